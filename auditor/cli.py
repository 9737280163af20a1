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
from auditor.schema import STATES

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
        except BrokenPipeError:  # the reader of our output has seen enough
            raise
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


_as_json = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON for machines and nothing else."
)
_checkpoints_option = click.option(
    "--checkpoints",
    "pattern",
    help="A pattern of checkpoints, quoted; {step} may stand for the step.  "
    "[default: those registered with monitor.checkpoint]",
)


@click.group(cls=_Group, context_settings=_SETTINGS)
@click.version_option(package_name="auditor", message="auditor %(version)s")
def main() -> None:
    """The flight recorder for LLM training data: which data did it?

    Record a training run with AuditedSampler and GradeMonitor (see the README), then:

    \b
      auditor report run/                       what happened, and which data was there
      auditor watch run/                        a dashboard while it trains
      auditor grade run/ --set watch_grade=5    grade a run again by other thresholds
      auditor sites package.module:factory      what the monitor finds in a model
      auditor exposures run/ --step 9500        what the model saw around a step
      auditor replay-order run/                 every sample in the order it was consumed
      auditor recover run/                      what to do after a drop, with numbers
      auditor checkpoints run/                  which checkpoints are from before the damage
      auditor dedupe run/ --out cleaned/        cleaned shards and a manifest
      auditor verify cleaned/                   check the manifest against the files
      auditor sketch shards/ --out signatures/  sketches for training runs to look up
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
@_as_json
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
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--every",
    type=click.FloatRange(0.1),
    default=2.0,
    show_default=True,
    help="Seconds between two looks at the run.",
)
@click.option("--once", is_flag=True, help="Print the screen once and exit.")
@click.option("--rank", type=click.IntRange(0), help="Only this rank.  [default: all together]")
def watch(run: Path, every: float, once: bool, rank: int | None) -> None:
    """Follow a training while it runs: grade, attention, loss and data on one screen.

    RUN is only read; it may lie on another machine's disk, and need not exist yet. q quits. Where
    the output is no terminal, the screen is printed once, as plain text.

    \b
    Examples:
      auditor watch run/
      auditor watch run/ --every 10 --rank 3
      auditor watch run/ --once
    """
    from auditor.show.watch import follow, print_once

    if once or not sys.stdout.isatty():
        print_once(run, rank)
    else:
        follow(run, rank, every)


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(0), help="Last step shown.  [default: last recorded]")
@click.option(
    "--window",
    type=click.IntRange(1),
    help="How many steps, up to and including --step.  [default: 40; with --sample: all]",
)
@click.option("--source", help="Only what came from this source.")
@click.option("--sample", help="Only this sample id: every time it was shown.")
@click.option("--rank", type=click.IntRange(0), help="Only this rank.  [default: all together]")
@click.option(
    "--all", "everything", is_flag=True, help="Show what later attempts rolled back, too."
)
@click.option(
    "--top", type=click.IntRange(0), default=5, show_default=True, help="Length of the lists."
)
@click.option("--rows", is_flag=True, help="Print the rows, one line per exposure, tab-separated.")
@click.option(
    "--limit",
    type=click.IntRange(0),
    default=1000,
    show_default=True,
    help="Most rows of --rows and --json; how many there are is said.",
)
@_as_json
def exposures(
    run: Path,
    step: int | None,
    window: int | None,
    source: str | None,
    sample: str | None,
    rank: int | None,
    everything: bool,
    top: int,
    rows: bool,
    limit: int,
    as_json: bool,
) -> None:
    """Show what the model saw around a step.

    Sums up steps STEP - WINDOW + 1 to STEP: sources with their shares, near-duplicates and
    repetition, then what was shown most often. Batches that were skipped or that no step closed
    over count with the next step. RUN may still be recording. Where no step was ever closed, the
    last WINDOW batches of each rank are shown.

    An event with its onset "after step 9300, by step 9500" is --step 9500 --window 240: its 200
    steps and the 40 before.

    \b
    Examples:
      auditor exposures run/                            the last 40 steps
      auditor exposures run/ --step 9500 --window 240
      auditor exposures run/ --step 9500 --window 1 --rows
      auditor exposures run/ --sample novels-17         every time it was shown
      auditor exposures run/ --json | jq '.contents[0]'
    """
    if rows and as_json:
        raise click.UsageError("--rows and --json exclude each other; --json has the rows as well")

    from auditor.explain.exposures import seen
    from auditor.run import Run
    from auditor.show.exposures import cut_short, print_seen, rows_as_text, seen_as_json

    found = seen(
        Run.open(run),
        step=step,
        window=window,
        rank=rank,
        source=source,
        sample=sample,
        view="all" if everything else "effective",
        n_named=top,
    )
    if as_json:
        click.echo(json.dumps(seen_as_json(found, limit), indent=2))
    elif rows:
        for line in rows_as_text(found, limit):
            click.echo(line)
        if note := cut_short(found, limit):
            click.echo(note, err=True)
    else:
        print_seen(_console(), found)


@main.command("replay-order")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--from-step", type=click.IntRange(0), help="First step.  [default: first recorded]")
@click.option("--to-step", type=click.IntRange(0), help="Last step.  [default: last recorded]")
@click.option("--rank", type=click.IntRange(0), help="Only this rank.  [default: all]")
@click.option(
    "--include",
    multiple=True,
    type=click.Choice(STATES[1:]),
    help="Also exposures of this state; may be repeated.  [default: trained only]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="A file: .jsonl, .jsonl.zst or .parquet.  [default: JSON lines on standard output]",
)
def replay_order(
    run: Path,
    from_step: int | None,
    to_step: int | None,
    rank: int | None,
    include: tuple[str, ...],
    out: Path | None,
) -> None:
    """Write every sample in the order it was consumed, to train on the same batches again.

    One line per exposure: step, rank, attempt, batch, position, part, state, key, dataset, index,
    sample_id, source, shard, row. Lines of one rank, attempt and batch were one batch. Steps that
    were trained again after a restart are there once, as they were trained last. What is known to
    be missing is said on standard error.

    \b
    Examples:
      auditor replay-order run/ --out order.parquet
      auditor replay-order run/ --to-step 9300 --rank 0 --out order.jsonl.zst
      auditor replay-order run/ | jq -c '[.step, .sample_id]'
    """
    if from_step is not None and to_step is not None and from_step > to_step:
        raise click.UsageError(f"--from-step {from_step} is after --to-step {to_step}")

    from auditor.explain.exposures import replay_order as order_of
    from auditor.run import Run
    from auditor.show.replay import check_suffix, doubts, json_lines, told, write_order

    if out is not None:
        with _checking():
            check_suffix(out)
    opened = Run.open(run)
    replay = order_of(
        opened, first=from_step, last=to_step, rank=rank, states=("trained", *include)
    )
    if out is None:
        for lines in json_lines(replay.rows):
            click.echo(lines, nl=False)
    else:
        write_order(replay.rows, out)
        click.echo(f"{told(replay)}: {out}")
    for doubt in doubts(replay, opened.gaps()):
        click.echo(doubt, err=True)


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--policy",
    type=click.Path(path_type=Path),
    help="A TOML file of thresholds.",
)
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="One threshold; repeatable."
)
@_as_json
def grade(run: Path, policy: Path | None, settings: tuple[str, ...], as_json: bool) -> None:
    """Grade a run again from its recorded signals, by the thresholds it had or by others.

    The thresholds and what they mean are in docs/grades.md; those not given are the run's own.
    Nothing is changed. RUN may still be recording.

    \b
    Examples:
      auditor grade run/
      auditor grade run/ --policy strict.toml
      auditor grade run/ --set watch_grade=5 --set confirm_samples=1 --json | jq '.alerts'
    """
    from auditor.explain.grades import policy_of
    from auditor.run import Run
    from auditor.show.grades import grade_run, grades_as_json, policy_from, print_grades

    opened = Run.open(run)
    with _checking():
        chosen = policy_from(policy, settings, policy_of(opened))
    graded = grade_run(opened, chosen)
    if as_json:
        click.echo(json.dumps(grades_as_json(graded), indent=2))
    else:
        print_grades(_console(), graded)


@main.command()
@click.argument("target", metavar="MODULE:FACTORY")
@click.option(
    "--site", "sites", multiple=True, help="A block, by path or pattern (layers.*); repeatable."
)
def sites(target: str, sites: tuple[str, ...]) -> None:
    """Show what the monitor finds in a model: its blocks, and what it sees of each.

    MODULE:FACTORY is a function that returns the model, or the model and a batch for it. With a
    batch the model is run once, and attention that stays unseen is told. The module is imported
    from the current folder too.

    \b
    Examples:
      auditor sites my_project.model:build
      auditor sites my_project.model:build --site 'decoder.layers.*'
    """
    from auditor.record.inspection import inspect

    sys.path.insert(0, "")
    with _checking():
        click.echo(inspect(target, sites or None))


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@_checkpoints_option
@_as_json
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
    with _checking():
        recovery = recovery_of(opened, pattern)
    if as_json:
        click.echo(json.dumps(recovery_as_json(recovery), indent=2))
    else:
        print_recovery(_console(), recovery)


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@_checkpoints_option
@_as_json
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
    with _checking():
        scored = score(opened, pattern)
    if as_json:
        click.echo(json.dumps(checkpoints_as_json(opened.run_id, scored), indent=2))
    else:
        print_checkpoints(_console(), scored)


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
@_as_json
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
    from auditor.clean.config import DedupeConfig
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
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A new folder.")
@click.option("--content", help="Column of the text or tokens.  [default: text, input_ids, tokens]")
@_as_json
def sketch(inputs: tuple[str, ...], out: Path, content: str | None, as_json: bool) -> None:
    """Sketch a corpus once, for training runs to look up.

    INPUT is shards, folders or globs of them: JSONL (plain, .gz, .zst) and Parquet, whose rows have
    ids. AuditedSampler(loader, run=..., duplication="signatures/") then finds the sketch of a
    sample by its id instead of making it.

    \b
    Examples:
      auditor sketch 'shards/*.jsonl.zst' --out signatures/
      auditor sketch corpus/ --out signatures/ --content body
    """
    from auditor.clean.sketches import sketch as write

    with _bar(quiet=as_json) as progress:
        document = write(inputs, out, content=content, progress=progress)
    if as_json:
        click.echo(json.dumps({"out": str(out), **document}, indent=2))
        return
    console = _console()
    console.print(f"{document['n_rows']} sketches in {out}", soft_wrap=True, markup=False)
    if document["n_without_id"]:
        console.print(f"{document['n_without_id']} rows have no id and were left out.")
    if document["n_repeated_ids"]:
        console.print(f"{document['n_repeated_ids']} rows repeat an id; the first counts.")


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--sample", type=click.IntRange(1), help="Hash this many shards instead of all.")
@_as_json
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
