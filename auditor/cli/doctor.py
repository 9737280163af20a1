"""``auditor doctor``: is everything in place for a recorded training?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from auditor.cli.command import as_json_option, console

if TYPE_CHECKING:
    from auditor.doctor import Check

_MARKS: Final = {"ok": "ok    ", "note": "note  ", "failed": "FAILED"}


@click.command()
@click.option(
    "--run",
    type=click.Path(path_type=Path),
    help="The folder a run is to be recorded in; nothing is left there.",
)
@click.option(
    "--loader", metavar="MODULE:FACTORY", help="A function that returns the loader of the training."
)
@click.option(
    "--model",
    metavar="MODULE:FACTORY",
    help="A function that returns the model, or the model and a batch.",
)
@as_json_option
def doctor(run: Path | None, loader: str | None, model: str | None, as_json: bool) -> None:
    """Check the environment, and a loader and a model before they train.

    Of the loader 20 batches are recorded in a folder that is removed: what would be known of its
    samples, and what that costs. Factories are imported from the current folder too. Exit code 1
    where something fails.

    \b
    Examples:
      auditor doctor
      auditor doctor --run /data/runs/a --loader train:make_loader --model train:make_model
      auditor doctor --loader train:make_loader --json | jq '.checks[] | select(.status != "ok")'
    """
    found = []
    for check in _checks(run, loader, model):
        found.append(check)
        if not as_json:
            _print(check)
    if as_json:
        click.echo(json.dumps({"checks": [asdict(check) for check in found]}, indent=2))
    if any(check.status == "failed" for check in found):
        sys.exit(1)


def _checks(run: Path | None, loader: str | None, model: str | None) -> Iterator[Check]:
    from auditor import doctor

    sys.path.insert(0, "")
    yield from doctor.environment()
    if run is not None:
        yield doctor.run_folder(run)
    if loader is not None:
        yield from doctor.loader(loader)
    if model is not None:
        yield doctor.model(model)


def _print(check: Check) -> None:
    from auditor.show.printing import line
    from auditor.show.text import clean

    screen = console()
    first, *rest = check.told.splitlines() or [""]
    line(screen, f"{_MARKS[check.status]}  {check.name}", clean(first, 400), label_chars=24)
    for more in rest:  # a table: its columns are to stay
        screen.print(more, markup=False, soft_wrap=True)
    if check.remedy:
        line(screen, "", clean(check.remedy, 400), label_chars=24)
