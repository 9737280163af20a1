"""``auditor dedupe``: from shards, or from a run, to cleaned shards and a manifest."""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auditor.cli.command import (
    GroupedCommand,
    as_json_option,
    checking,
    console,
    interruptible,
    option_under,
)
from auditor.cli.engines import engine_for
from auditor.cli.progress import progress_bar

if TYPE_CHECKING:
    from auditor.clean.config import DedupeConfig
    from auditor.clean.decide import Marked
    from auditor.clean.manifest import Manifest
    from auditor.run import Run


_what = option_under("What counts as a duplicate")
_stays = option_under("Which row stays")
_dropped = option_under("What else is dropped")
_read = option_under("How inputs are read")
_written = option_under("What is written")
_where = option_under("Where it runs")


@click.command(cls=GroupedCommand)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@_what(
    "--threshold",
    type=float,
    default=0.8,
    show_default=True,
    help="Jaccard similarity from which two rows are near-duplicates.",
)
@_what(
    "--source-threshold",
    "source_thresholds",
    multiple=True,
    metavar="SOURCE=VALUE",
    help="The same for rows of one source; repeatable.",
)
@_what(
    "--shingle",
    type=click.Choice(["auto", "word5", "char5", "token5"]),
    default="auto",
    show_default=True,
    help="What is compared: runs of 5 words, characters or tokens.",
)
@_what(
    "--substrings",
    type=click.Choice(["keep", "report", "cut"]),
    default="keep",
    show_default=True,
    help="Spans that occur in an earlier row word for word: leave, list, or cut them out.",
)
@_what(
    "--substring-elements",
    type=int,
    default=50,
    show_default=True,
    help="Words, characters or ids from which such a span counts.",
)
@_stays(
    "--keep",
    default="first",
    show_default=True,
    metavar="first|longest|highest:COLUMN|lowest:COLUMN",
    help="Which of several duplicates stays.",
)
@_stays(
    "--prefer",
    multiple=True,
    metavar="SOURCE",
    help="Its rows stay rather than those of others; repeatable, best first. Goes before --keep.",
)
@_stays(
    "--copies",
    type=int,
    default=1,
    show_default=True,
    help="How many rows alike may stay.",
)
@_stays("--soft", is_flag=True, help="Drop no duplicate; weigh each by the size of its cluster.")
@_stays(
    "--protect-source",
    "protect_sources",
    multiple=True,
    metavar="SOURCE",
    help="Never drop its rows; repeatable.",
)
@_stays(
    "--protect-ids",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Never drop rows of these sample ids, one a line.",
)
@_dropped("--keep-repetitive", is_flag=True, help="Keep samples that repeat themselves.")
@_dropped(
    "--repetitive-share",
    type=float,
    default=0.5,
    show_default=True,
    help="Share of a sample in consecutive repeats from which it is dropped.",
)
@_dropped(
    "--max-exposures",
    type=int,
    metavar="K",
    help="Drop rows that the run has been trained on K times or more; needs a run.",
)
@_dropped(
    "--only-implicated",
    is_flag=True,
    help="Drop duplicates and repetitive rows only where the run's report implicates them or what "
    "they are like; needs a run.",
)
@_dropped(
    "--drop-ids",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Drop rows of these sample ids, one a line.",
)
@_read("--content", help="Column of the text or tokens.  [default: text, input_ids, tokens]")
@_read(
    "--on-error",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    show_default=True,
    help="A row that cannot be read: stop, or drop and count it.",
)
@_read("--dtype", help="Of raw token files: the type of an id, such as uint16.")
@_read("--eot", type=int, help="Of raw token files: the id that ends a document.")
@_read("--shards", multiple=True, help="With a run as INPUT: its shards, if it named none.")
@_read("--run", type=click.Path(path_type=Path), help="Run whose mix the weights start from.")
@_written("--out", type=click.Path(path_type=Path), help="A new or empty folder.")
@_written(
    "--manifest-only",
    is_flag=True,
    help="Write no shards: load_manifest reads the rows that stay from the inputs.",
)
@_written(
    "--max-epochs",
    type=float,
    default=4.0,
    show_default=True,
    help="Repetition budget of a source, for the weights that are proposed.",
)
@_written("--dry-run", is_flag=True, help="Decide, count and show samples; write nothing.")
@_written(
    "--samples",
    type=click.IntRange(0),
    default=3,
    show_default=True,
    help="With --dry-run: rows shown for each reason.",
)
@_where(
    "--workers",
    type=click.IntRange(1),
    help="Processes on this machine.  [default: one a core, at most one a shard; "
    "none of its own under 32 MB]",
)
@_where(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="This machine, or a Ray cluster (needs auditor[cluster]).",
)
@_where("--address", help="Of the Ray cluster: auto, HOST:PORT or ray://HOST:PORT.")
@as_json_option
def dedupe(
    inputs: tuple[str, ...],
    out: Path | None,
    run: Path | None,
    shards: tuple[str, ...],
    dry_run: bool,
    manifest_only: bool,
    samples: int,
    workers: int | None,
    engine: str,
    address: str | None,
    only_implicated: bool,
    drop_ids: Path | None,
    as_json: bool,
    **policy: Any,
) -> None:
    """Remove exact and near-duplicates and repetitive samples; write cleaned shards and a manifest.

    INPUT is a run folder, whose recorded shards are cleaned, or shards, folders, globs or URLs of
    them: JSON Lines, Parquet, Arrow, WebDataset, MosaicML, Megatron and others. Inputs are never
    changed. A call that was interrupted goes on when it is made again. docs/cleaning.md has the
    rest.

    \b
    Examples:
      auditor dedupe run/ --out cleaned/
      auditor dedupe corpus/ --dry-run                         what would go, and why
      auditor dedupe 'shards/*.jsonl.zst' --out cleaned/ --threshold 0.7
      auditor dedupe corpus/ --out cleaned/ --prefer wiki --keep highest:score
      auditor dedupe corpus/ --out cleaned/ --protect-source exams --source-threshold code=0.9
      auditor dedupe run/ --out cleaned/ --max-exposures 4     and what was seen often enough
      auditor dedupe run/ --out cleaned/ --only-implicated     only what the report blames
      auditor dedupe s3://bucket/corpus/ --out cleaned/ --manifest-only
    """
    if out is None and not dry_run:
        raise click.UsageError("Missing option '--out'; only --dry-run goes without")
    is_run = len(inputs) == 1 and (Path(inputs[0]) / "run.json").is_file()
    if is_run and run is not None:
        raise click.UsageError("--run goes with shards; here INPUT is a run itself")
    if shards and not is_run:
        raise click.UsageError("--shards goes with a run; give the shards as INPUT instead")
    if policy["max_exposures"] is not None and not is_run and run is None:
        raise click.UsageError("--max-exposures needs a run, as INPUT or with --run")
    if only_implicated and not is_run and run is None:
        raise click.UsageError("--only-implicated needs a run, as INPUT or with --run")
    if address is not None and engine != "ray":
        raise click.UsageError("--address goes with --engine ray")
    config = _config(policy)
    named = frozenset() if drop_ids is None else _ids(drop_ids, "--drop-ids")

    from auditor.clean.shards import find_shards

    goes_on = "Stopped. The same command goes on where it stopped."
    with interruptible("Stopped; nothing was written." if dry_run else goes_on):
        opened, data = None, None
        if is_run or run is not None:
            from auditor.clean.from_run import run_data
            from auditor.run import Run

            opened = Run.open(inputs[0] if run is None else run)
            of_run = shards if is_run else inputs
            data = run_data(opened, of_run, max_exposures=config.max_exposures)
        paths = inputs if data is None else data.shards
        with ExitStack() as stack:
            engine_settings: Any = {"name": engine, "address": address, "workers": workers}
            on = stack.enter_context(engine_for(find_shards(paths).shards, **engine_settings))
            # Workers load what they need in the time that this takes.
            from auditor.clean.decide import Marked
            from auditor.clean.dedupe import dedupe as clean
            from auditor.clean.lookup import samples_of

            marked = Marked(
                exposed=frozenset() if data is None else data.exposed,
                implicated=named,
                only=_implicated(opened) if only_implicated and opened is not None else None,
            )
            if (target := out) is None:  # nothing is written, and nothing is there
                target = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "out"
            with progress_bar(quiet=as_json) as progress:
                manifest = clean(
                    paths,
                    target,
                    config=config,
                    engine=on,
                    progress=progress,
                    dry_run=dry_run,
                    manifest_only=manifest_only,
                    **({} if data is None else data.settings),
                    marked=marked,
                )
        found = samples_of(manifest, samples) if dry_run else []
    _warn(manifest, config, marked)

    from auditor.show.cleaning import print_manifest, print_samples, samples_as_json

    if as_json:
        document: dict[str, Any] = {"out": None if out is None else str(out), **manifest.document}
        if dry_run:
            document["samples"] = samples_as_json(found)
        click.echo(json.dumps(document, indent=2))
        return
    if dry_run:
        print_samples(console(), manifest, found)
        console().print()
    print_manifest(console(), manifest, None if dry_run else out)


def _config(policy: dict[str, Any]) -> DedupeConfig:
    """The settings of the options; what they refuse is wrong usage."""
    from auditor.clean.config import DedupeConfig

    thresholds = policy.pop("source_thresholds")
    file: Path | None = policy.pop("protect_ids")
    keep_repetitive = policy.pop("keep_repetitive")
    with checking():
        return DedupeConfig(
            thresholds=_source_thresholds(thresholds),
            protect_ids=frozenset() if file is None else _ids(file, "--protect-ids"),
            repetition=not keep_repetitive,
            **policy,
        )


def _source_thresholds(given: tuple[str, ...]) -> dict[str, float]:
    pairs = list(map(_source_threshold, given))
    thresholds = dict(pairs)
    for source, value in pairs:
        if thresholds[source] != value:
            raise click.UsageError(
                f"--source-threshold names {source!r} twice: {value:g} and {thresholds[source]:g}"
            )
    return thresholds


def _source_threshold(given: str) -> tuple[str, float]:
    source, _, value = given.rpartition("=")
    try:
        if not source:
            raise ValueError
        return source, float(value)
    except ValueError:
        raise click.UsageError(
            f"--source-threshold takes SOURCE=VALUE, such as web=0.7, got {given!r}"
        ) from None


def _implicated(run: Run) -> frozenset[str]:
    """Ids of the samples that the report of a run implicates."""
    from auditor.explain.implicated import implicated_samples
    from auditor.explain.pipeline import explain

    explained = explain(run)
    ids = implicated_samples(run, explained.events, explained.suspects)["sample_id"]
    if ids.is_empty():
        raise click.ClickException(
            f"{run.path}: the report implicates no sample: {explained.verdict} "
            "Without --only-implicated all duplicates go"
        )
    return frozenset(ids)


def _ids(path: Path, option: str) -> frozenset[str]:
    try:
        # Editors and spreadsheets put a byte order mark first.
        lines = path.read_text("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{option}: {path} is not UTF-8: {error}") from error
    return frozenset(line.removesuffix("\r") for line in lines) - {""}


def _warn(manifest: Manifest, config: DedupeConfig, marked: Marked) -> None:
    """Say on standard error what went by without an error."""
    from auditor.clean.lookup import ids_not_there
    from auditor.show.cleaning import warnings

    unknown = ids_not_there(manifest, config.protect_ids)
    for warning in warnings(manifest, unknown_ids=unknown):
        click.echo(warning, err=True)
    told = {
        "--max-exposures": (marked.exposed, "samples that the run was trained on so often"),
        "--only-implicated": (marked.only or (), "implicated samples"),
        "--drop-ids": (marked.implicated, "samples"),
    }
    for option, (ids, what) in told.items():
        if n := len(ids_not_there(manifest, ids)):
            click.echo(
                f"{option}: {n} of {len(ids)} {what} are not in the shards by their id", err=True
            )
