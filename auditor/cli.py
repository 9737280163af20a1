"""The command line. Each command imports what it needs when it runs, so that help is instant.

Exit codes: 0 ok, 1 an error, 2 wrong usage.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auditor.errors import AuditorError

if TYPE_CHECKING:
    from rich.console import Console

    from auditor.clean.manifest import Manifest

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class _Group(click.Group):
    """Turns our errors into one message and an exit code, here and nowhere else."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AuditorError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise click.ClickException(f"{where}{error.strerror or error}") from error


@contextmanager
def _checking() -> Iterator[None]:
    """Arguments that the code below refuses are wrong usage; anything later would be a bug."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


@click.group(cls=_Group, context_settings=_SETTINGS)
@click.version_option(package_name="auditor", message="auditor %(version)s")
def main() -> None:
    """The flight recorder for LLM training data: which data did it?

    Record a training run with AuditedSampler and GradeMonitor (see the README), then:

    \b
      auditor report run/                       what happened, and which data was there
      auditor dedupe run/ --out cleaned/        cleaned shards and a manifest
      auditor verify cleaned/                   check the manifest against the files
      auditor demo                              all of it, on real text, in two minutes
    """


@main.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("demo-run"),
    show_default=True,
    help="A new folder, or that of an earlier demo, which is replaced.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of data and model."
)
@click.option("--steps", type=int, help="Steps per training run, at least 260.  [default: 420]")
@click.option("--quick", is_flag=True, help="300 steps.")
@click.option("--clean", is_flag=True, help="Plant nothing.")
@click.option("--lr-spike", is_flag=True, help="Plant nothing; raise the learning rate instead.")
def demo(out: Path, seed: int, steps: int | None, quick: bool, clean: bool, lr_spike: bool) -> None:
    """Train, report, clean and train again on real text.

    Trains a small GPT on four sources, one of which begins to repeat itself; reports which; cleans
    the shards; trains again, and once more with as many samples removed at random.

    \b
    Examples:
      auditor demo
      auditor demo --quick --seed 3
      auditor demo --lr-spike --out spike/      an event that no data caused
    """
    from auditor.demo.story import MIN_STEPS, QUICK_STEPS, STEPS, tell

    if steps is None:
        steps = QUICK_STEPS if quick else STEPS
    if steps < MIN_STEPS:
        raise click.UsageError(f"the demo needs at least {MIN_STEPS} steps, got {steps}")
    tell(out, _console(), seed=seed, steps=steps, plant=not (clean or lr_spike), lr_spike=lr_spike)


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines and nothing else.")
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    help="Where to write the page.  [default: RUN/derived/report.html]",
)
def report(run: Path, as_json: bool, html: Path | None) -> None:
    """Explain a run: grades, events, and the data before each.

    RUN is the folder given to AuditedSampler or GradeMonitor; it may still be recording.

    \b
    Examples:
      auditor report run/
      auditor report run/ --json | jq '.events[].suspects[0]'
      auditor report run/ --html report.html
    """
    from auditor.run import Run
    from auditor.show.produce import produce

    opened = Run.open(run)
    produced = produce(opened, html)
    if as_json:
        from auditor.show.report import report_of

        click.echo(json.dumps(report_of(produced.explanation, produced.proposal), indent=2))
        return
    from auditor.show.terminal import print_report

    print_report(_console(), produced.explanation, produced.proposal, produced.html)


@main.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--out", type=click.Path(path_type=Path), help="A new or empty folder.")
@click.option(
    "--run", type=click.Path(path_type=Path), help="Run whose mix the weights start from."
)
@click.option("--shards", multiple=True, help="With a run as INPUT: its shards, if it named none.")
@click.option("--threshold", type=float, default=0.8, show_default=True, help="Jaccard similarity.")
@click.option(
    "--shingle",
    type=click.Choice(["auto", "word5", "char5", "token5"]),
    default="auto",
    show_default=True,
    help="What is compared: runs of 5 words, characters or tokens.",
)
@click.option(
    "--keep",
    type=click.Choice(["first", "longest"]),
    default="first",
    show_default=True,
    help="Which of several duplicates stays.",
)
@click.option("--content", help="Column of the text or tokens.  [default: text, input_ids, tokens]")
@click.option("--keep-repetitive", is_flag=True, help="Do not drop samples that repeat themselves.")
@click.option(
    "--on-error",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    show_default=True,
    help="A row that cannot be read: stop, or drop and count it.",
)
@click.option(
    "--max-epochs",
    type=float,
    default=4.0,
    show_default=True,
    help="Repetition budget of a source.",
)
@click.option("--dry-run", is_flag=True, help="Decide and count; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines and nothing else.")
def dedupe(
    inputs: tuple[str, ...],
    out: Path | None,
    run: Path | None,
    shards: tuple[str, ...],
    threshold: float,
    shingle: Any,
    keep: Any,
    content: str | None,
    keep_repetitive: bool,
    on_error: Any,
    max_epochs: float,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove exact and near-duplicates and repetitive samples; write cleaned shards and a manifest.

    INPUT is a run folder, whose recorded shards are cleaned, or shards, folders or globs of them:
    JSONL (plain, .gz, .zst) and Parquet. Inputs are never changed.

    \b
    Examples:
      auditor dedupe run/ --out cleaned/
      auditor dedupe 'shards/*.jsonl.zst' --out cleaned/ --threshold 0.7
      auditor dedupe corpus/ --out cleaned/ --dry-run
    """
    from auditor.clean.dedupe import DedupeConfig
    from auditor.clean.dedupe import dedupe as clean
    from auditor.clean.from_run import dedupe_run
    from auditor.run import Run

    if out is None:
        if not dry_run:
            raise click.UsageError("Missing option '--out'; only --dry-run goes without")
        out = Path("nowhere")
    with _checking():
        config = DedupeConfig(
            threshold=threshold,
            shingle=shingle,
            keep=keep,
            repetition=not keep_repetitive,
            max_epochs=max_epochs,
            content=content,
            on_error=on_error,
        )
    is_run = len(inputs) == 1 and (Path(inputs[0]) / "run.json").is_file()
    if is_run and run is not None:
        raise click.UsageError("--run goes with shards; here INPUT is a run itself")
    if shards and not is_run:
        raise click.UsageError("--shards goes with a run; give the shards as INPUT instead")
    with _bar(quiet=as_json) as progress:
        settings: Any = {"config": config, "progress": progress, "dry_run": dry_run}
        if is_run:
            manifest = dedupe_run(Run.open(inputs[0]), out, shards=shards, **settings)
        elif run is not None:
            manifest = dedupe_run(Run.open(run), out, shards=inputs, **settings)
        else:
            manifest = clean(inputs, out, **settings)
    if as_json:
        click.echo(json.dumps({"out": str(out), **manifest.document}, indent=2))
    else:
        _print_manifest(_console(), manifest, out, dry_run)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--sample", type=click.IntRange(1), help="Hash this many shards instead of all.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines and nothing else.")
def verify(folder: Path, sample: int | None, as_json: bool) -> None:
    """Check cleaned shards against their manifest; exit code 1 when anything disagrees.

    \b
    Examples:
      auditor verify cleaned/
      auditor verify cleaned/ --sample 20
    """
    from dataclasses import asdict

    from auditor.clean.manifest import verify as check

    result = check(folder, sample=sample)
    if as_json:
        click.echo(json.dumps({"ok": result.ok, **asdict(result)}, indent=2))
    else:
        for failure in result.failures:
            click.echo(f"FAILED  {failure}")
        for parent in result.missing_parents:
            click.echo(f"not there to compare: {parent}")
        verdict = "verified" if result.ok else f"FAILED, {len(result.failures)} in all"
        click.echo(
            f"{verdict}: hashed {result.n_shards_hashed} of {result.n_shards} shards, checked the "
            f"decisions on {result.n_rows} input rows"
        )
    if not result.ok:
        sys.exit(1)


@contextmanager
def _bar(*, quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A progress bar on standard error where that is a terminal."""
    console = _console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield update


def _print_manifest(console: Console, manifest: Manifest, out: Path, dry_run: bool) -> None:
    from rich.markup import escape
    from rich.table import Table

    counts, document = manifest.counts, manifest.document
    verb = "would be written" if dry_run else "written"
    console.print(f"{counts['rows_in']} rows in, {counts['rows_out']} rows {verb}")
    for reason in ("exact", "near", "repetition", "unreadable"):
        if counts.get(reason):
            console.print(f"  {counts[reason]:>9} dropped: {reason}")
    table = Table("source", "rows in", "rows out", "weight", "epochs", "proposed", "epochs")
    for name, source in manifest.document["sources"].items():
        table.add_row(
            escape(name),
            str(source["rows_in"]),
            str(source["rows_out"]),
            f"{source['weight_before']:.1%}",
            f"{source['projected_epochs_at_old_weight']:.2f}",
            f"{source['weight']:.1%}",
            f"{source['projected_epochs']:.2f}",
        )
    console.print(table)
    for note in _notes(document):
        console.print(note, markup=False)
    if not dry_run:
        console.print(f"{out / 'manifest.json'}", soft_wrap=True, markup=False)
        console.print(f"Check it at any time: auditor verify {out}", soft_wrap=True, markup=False)


def _notes(document: dict[str, Any]) -> Iterator[str]:
    """What a reader of the counts should know as well."""
    if document["counts"].get("without_content"):
        yield f"{document['counts']['without_content']} rows without content were kept unread."
    if document["ignored"]:
        yield f"Not read, since no data format of ours: {', '.join(document['ignored'][:5])}"
    if document["capped_buckets"]["n_buckets"]:
        yield (
            f"{document['capped_buckets']['n_buckets']} hot buckets were capped: some pairs were "
            "not compared, and a second pass may drop more."
        )
    if document["mix"]["unmatched"]:
        yield (
            "The run knows sources that the shards do not name, which were left out of the "
            f"weights: {', '.join(document['mix']['unmatched'][:5])}"
        )
    if not document["mix"]["feasible"]:
        yield (
            "All sources together hold too few rows for the repetition budget: every source would "
            "be repeated equally often. Add data, or train on fewer samples."
        )
