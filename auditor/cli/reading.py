"""Commands that read a run: what happened, and which data was there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from auditor.cli.command import as_json_option, checking, console
from auditor.schema import STATES

if TYPE_CHECKING:
    from auditor.explain.explanation import Explanation

_BELOW: Final = 3


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["terminal", "md", "json", "html"]),
    default="terminal",
    show_default=True,
    help="What to print: the report for a terminal, as Markdown, as JSON, or the page's path.",
)
@as_json_option
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    help="Where to write the page.  [default: RUN/derived/report.html]",
)
@click.option("--open", "in_browser", is_flag=True, help="Open the page in a browser.")
@click.option(
    "--fail-below",
    type=click.Choice([f"S{grade}" for grade in range(1, 8)], case_sensitive=False),
    metavar="GRADE",
    help="Exit with code 3 where the lowest grade is below this one (S1 to S7), or there is none.",
)
@click.option(
    "--implicated",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the implicated samples as well: .jsonl or .parquet.",
)
@click.option(
    "--batches",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the 200 steps before and after each event as well: .csv, .jsonl or .parquet.",
)
@click.option("--no-text", is_flag=True, help="Show no text of the data.")
def report(
    run: Path,
    form: str,
    as_json: bool,
    html: Path | None,
    in_browser: bool,
    fail_below: str | None,
    implicated: Path | None,
    batches: Path | None,
    no_text: bool,
) -> None:
    """Explain a run: grades, events, and the data before each.

    RUN is the folder given to AuditedSampler or GradeMonitor; it may still be recording.

    \b
    Examples:
      auditor report run/
      auditor report run/ --json | jq '.events[].suspects[0]'
      auditor report run/ --html report.html
      auditor report run/ --implicated samples.jsonl --no-text
      auditor report run/ --batches around.csv
      auditor report run/ --format md >> "$GITHUB_STEP_SUMMARY"
      auditor report run/ --fail-below S3 || echo "do not promote"
    """
    for option, path, kinds in (
        ("--implicated", implicated, (".jsonl", ".parquet")),
        ("--batches", batches, (".csv", ".jsonl", ".parquet")),
    ):
        if path is not None and path.suffix.lower() not in kinds:
            told = f"{', '.join(kinds[:-1])} or {kinds[-1]}"
            raise click.UsageError(f"{option} takes a {told} file, got {path}")
    from auditor.run import Run
    from auditor.show.produce import produce, write_batches, write_implicated

    opened = Run.open(run)
    produced = produce(opened, html, with_text=not no_text)
    if implicated is not None:
        n = write_implicated(opened, produced.explanation, implicated, with_text=not no_text)
        click.echo(f"{implicated}: {n} implicated samples", err=True)
    if batches is not None:
        n = write_batches(produced.explanation, batches)
        click.echo(f"{batches}: {n} steps around events", err=True)
    form = "json" if as_json else form
    if form == "json":
        from auditor.show.report import report_of

        click.echo(json.dumps(report_of(produced.explanation, produced.proposal), indent=2))
    elif form == "md":
        from auditor.show.markdown import markdown_of

        click.echo(markdown_of(produced.explanation, produced.proposal), nl=False)
    elif form == "terminal":
        from auditor.show.terminal import print_report

        print_report(console(), produced.explanation, produced.proposal, produced.html)
    elif produced.html is not None:
        click.echo(produced.html)
    if in_browser and produced.html is not None and click.launch(str(produced.html)):
        click.echo(f"{produced.html}: no browser could be opened", err=True)
    if fail_below is not None:
        _gate(produced.explanation, int(fail_below[1:]))


def _gate(explanation: Explanation, least: int) -> None:
    """End with an exit code of its own where the lowest grade is below ``least``."""
    from auditor.show import digest

    lowest = digest.lowest_grade(explanation)
    if lowest is None:
        click.echo(f"--fail-below S{least}: {digest.no_grade(explanation)}", err=True)
    elif lowest.grade < least:
        click.echo(f"--fail-below S{least}: S{lowest.grade} at step {lowest.step:,}", err=True)
    else:
        return
    sys.exit(_BELOW)


@click.command()
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


@click.command()
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
@as_json_option
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
        print_seen(console(), found)


@click.command("replay-order")
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
        with checking():
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


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--policy",
    type=click.Path(path_type=Path),
    help="A TOML file of thresholds.",
)
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="One threshold; repeatable."
)
@as_json_option
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
    with checking():
        chosen = policy_from(policy, settings, policy_of(opened))
    graded = grade_run(opened, chosen)
    if as_json:
        click.echo(json.dumps(grades_as_json(graded), indent=2))
    else:
        print_grades(console(), graded)


@click.command()
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
    with checking():
        click.echo(inspect(target, sites or None))
