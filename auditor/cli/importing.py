"""The command that makes a run directory of training logs of other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auditor.cli.command import as_json_option, checking
from auditor.cli.progress import progress_bar

if TYPE_CHECKING:
    from auditor.explain.logs.importing import Imported

_FORMATS = ("text", "two-columns", "csv", "json", "jsonl", "tensorboard")


@click.command("import")
@click.argument("logs", metavar="LOG...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A new folder.")
@click.option(
    "--column",
    "settings",
    multiple=True,
    metavar="SIGNAL=COLUMN",
    help="Which column is step, loss, grad_norm, lr or probe_loss; repeatable.  "
    "[default: by their names]",
)
@click.option(
    "--format", "format_", type=click.Choice(_FORMATS), help="[default: told from the content]"
)
@as_json_option
def import_(
    logs: tuple[Path, ...],
    out: Path,
    settings: tuple[str, ...],
    format_: str | None,
    as_json: bool,
) -> None:
    """Make a run directory of training logs, for auditor report and recover.

    Reads text logs (Megatron, llm.c, nanoGPT, torchtitan and the like), CSV (Lightning, exports of
    W&B and trackio), trainer_state.json, golden values of Megatron, JSON Lines and TensorBoard
    event files; a folder stands for the event files in it. Several logs are attempts of one run in
    the order given, and so are the parts of a log where the step goes back: what a later attempt
    trained again is rolled back. Validation loss becomes the probe loss.

    A log does not say what the model saw: data can be neither blamed nor cleared.

    \b
    Examples:
      auditor import train.log --out run/
      auditor import trainer_state.json --out run/ && auditor report run/
      auditor import metrics.csv --out run/ --column loss=train/ce --column probe_loss=val/ce
      auditor import before.log after.log --out run/    a restart, in two files
      auditor import runs/exp1/ --out run/ --json | jq '.attempts[].signals'
    """
    from auditor.explain.logs.columns import Columns
    from auditor.explain.logs.importing import import_logs

    with checking():
        columns = Columns.of(settings)
    with progress_bar(quiet=as_json) as progress:
        imported = import_logs(logs, out, columns=columns, format=format_, progress=progress)
    if as_json:
        click.echo(json.dumps(_as_json(imported, out), indent=2))
        return
    _print(imported, out)


def _print(imported: Imported, out: Path) -> None:
    """What was taken on standard output, what was passed over on standard error."""
    from auditor.explain.logs.columns import SIGNALS
    from auditor.show.text import clean, sentence

    for error in imported.empty:
        where = clean(str(error.path), 200)
        click.echo(f"{where}: passed over: {sentence(error.message, 400)}", err=True)
    reached = -1
    for number, (attempt, chosen) in enumerate(
        zip(imported.attempts, imported.chosen, strict=True)
    ):
        back = f", back from step {reached}" if attempt.first_step <= reached else ""
        click.echo(
            f"attempt {number}: steps {attempt.first_step} to {attempt.last_step}{back}, "
            f"{attempt.log.format}, {clean(str(attempt.log.path), 200)}"
        )
        reached = attempt.last_step
        for signal in SIGNALS:
            if signal not in attempt.series:
                continue
            n, not_finite = _counts(attempt.series[signal][1])
            bad = f", {not_finite} of them not finite" if not_finite else ""
            column = clean(chosen.columns[signal])
            click.echo(f"  {signal:<10}  {n} values{bad}, from {column!r}")
            others = ", ".join(repr(clean(name)) for name in chosen.others.get(signal, ())[:5])
            if others and number == 0:
                told = f"{signal} could also be {others}: choose with --column {signal}=NAME"
                click.echo(told, err=True)
        missing = [signal for signal in SIGNALS if signal not in attempt.series]
        if missing:
            click.echo(f"  not in it   {', '.join(missing)}")
        for what, one in attempt.log.skipped.items():
            if what in attempt.skipped:
                told = f"passed over {one.count} {what}; the first is {sentence(one.first, 200)}"
                click.echo(f"{clean(str(attempt.log.path), 200)}: {told}", err=True)
        for what, count in attempt.skipped.items():
            if what not in attempt.log.skipped:
                click.echo(f"attempt {number}: passed over {count} {what}", err=True)
    click.echo("No exposures: data can be neither blamed nor cleared.")
    click.echo(f"Next: auditor report {out}")


def _as_json(imported: Imported, out: Path) -> dict[str, Any]:
    return {
        "run": str(out),
        "empty": [str(error.path) for error in imported.empty],
        "attempts": [
            {
                "file": str(attempt.log.path),
                "format": attempt.log.format,
                "first_step": attempt.first_step,
                "last_step": attempt.last_step,
                "signals": {
                    signal: {
                        "column": chosen.columns[signal],
                        "others": list(chosen.others.get(signal, ())),
                        "values": _counts(values)[0],
                        "not_finite": _counts(values)[1],
                    }
                    for signal, (_, values) in attempt.series.items()
                },
                "passed_over": dict(attempt.skipped),
            }
            for attempt, chosen in zip(imported.attempts, imported.chosen, strict=True)
        ],
    }


def _counts(values: Any) -> tuple[int, int]:
    """How many values there are, and how many of them are not finite."""
    import numpy as np

    return len(values), int((~np.isfinite(values)).sum())
