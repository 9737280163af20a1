"""Commands for after a drop: what to do, and from which checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import click

from auditor.cli.command import as_json_option, checking, console

_checkpoints_option = click.option(
    "--checkpoints",
    "pattern",
    help="A pattern of checkpoints, quoted; {step} may stand for the step.  "
    "[default: those registered with monitor.checkpoint]",
)


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@_checkpoints_option
@as_json_option
def recover(run: Path, pattern: str | None, as_json: bool) -> None:
    """Plan the recovery from a drop: which checkpoint, learning rate and batches.

    The plan is for the latest drop of the grade that has not recovered, else for the latest.
    Nothing is changed. RUN may still be recording.

    \b
    Examples:
      auditor recover run/
      auditor recover run/ --checkpoints 'out/checkpoint-*'
      auditor recover run/ --json | jq '.checkpoint.path, .learning_rate, .skip_steps'
    """
    from auditor.explain.recovery import recovery_of
    from auditor.run import Run
    from auditor.show.recovery import print_recovery, recovery_as_json

    opened = Run.open(run)
    with checking():
        recovery = recovery_of(opened, pattern)
    if as_json:
        click.echo(json.dumps(recovery_as_json(recovery), indent=2))
    else:
        print_recovery(console(), recovery)


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@_checkpoints_option
@as_json_option
def checkpoints(run: Path, pattern: str | None, as_json: bool) -> None:
    """Score checkpoints by what was recorded around them; the one to go back to is marked.

    The step is taken from the name: what follows step, iter or update, else the last integer that
    is not the number of something else. RUN may still be recording.

    \b
    Examples:
      auditor checkpoints run/
      auditor checkpoints run/ --checkpoints 'out/checkpoint-*'
      auditor checkpoints run/ --checkpoints 'out/step_{step}.pt' --json | jq .best
    """
    from auditor.explain.checkpoints import score
    from auditor.run import Run
    from auditor.show.recovery import checkpoints_as_json, print_checkpoints

    opened = Run.open(run)
    with checking():
        scored = score(opened, pattern)
    if as_json:
        click.echo(json.dumps(checkpoints_as_json(opened.run_id, scored), indent=2))
    else:
        print_checkpoints(console(), scored)
