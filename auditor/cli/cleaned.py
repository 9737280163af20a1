"""Commands on what was cleaned: check it, explain it, give rows back; and sketches of a corpus."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from auditor.cli.command import as_json_option, checking, console, interruptible
from auditor.cli.progress import progress_bar

_parents_option = click.option(
    "--parents",
    type=click.Path(path_type=Path),
    help="Folder that holds the inputs now, if they were moved.",
)


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--sample", type=click.IntRange(1), help="Hash this many shards instead of all.")
@_parents_option
@as_json_option
def verify(folder: Path, sample: int | None, parents: Path | None, as_json: bool) -> None:
    """Check cleaned shards against their manifest; exit code 1 when anything disagrees.

    \b
    Examples:
      auditor verify cleaned/
      auditor verify cleaned/ --sample 20
      auditor verify cleaned/ --parents /mnt/archive/corpus
    """
    from dataclasses import asdict

    from auditor.clean.inputs import is_url
    from auditor.clean.verify import verify as check

    with progress_bar(quiet=as_json) as progress:
        result = check(folder, sample=sample, parents=parents, progress=progress)
    if as_json:
        click.echo(json.dumps({"ok": result.ok, **asdict(result)}, indent=2))
    else:
        for failure in result.failures:
            click.echo(f"FAILED  {failure}")
        for parent in result.missing_parents:
            why = "not compared, since behind a URL" if is_url(parent) else "not there to compare"
            click.echo(f"{why}: {parent}")
        verdict = "verified" if result.ok else f"FAILED, {len(result.failures)} in all"
        click.echo(
            f"{verdict}: hashed {result.n_shards_hashed} of {result.n_shards} shards, checked the "
            f"decisions on {result.n_rows} input rows"
        )
    if not result.ok:
        sys.exit(1)


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("row", metavar="ROW")
@_parents_option
@as_json_option
def explain(folder: Path, row: str, parents: Path | None, as_json: bool) -> None:
    """Say why a row was kept or dropped, and show it beside the row kept in its place.

    DIR is a cleaned folder. ROW is a sample id, or SHARD:ROW with the row from 0; where several
    rows have that id, all are told. The Jaccard similarity is computed again where the inputs are
    there. Exit code 1 when there is no such row.

    \b
    Examples:
      auditor explain cleaned/ novels-17
      auditor explain cleaned/ web/part-003.jsonl.zst:4711
      auditor explain cleaned/ novels-17 --json | jq '.rows[].reason'
    """
    from auditor.clean.lookup import look_up
    from auditor.clean.manifest import load_manifest
    from auditor.show.cleaning import found_as_json, print_found

    found = look_up(load_manifest(folder, parents=parents), row)
    if as_json:
        click.echo(json.dumps(found_as_json(found), indent=2))
    elif found:
        print_found(console(), found)
    else:
        click.echo(f"{folder}: no row has the id {row!r}, and no shard has it as a row", err=True)
    if not found:
        sys.exit(1)


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A new folder.")
@click.option("--reason", help="Only rows dropped for this: exact, near, repetition, ...")
@click.option("--source", help="Only rows of this source.")
@_parents_option
@as_json_option
def restore(
    folder: Path,
    out: Path,
    reason: str | None,
    source: str | None,
    parents: Path | None,
    as_json: bool,
) -> None:
    """Write the rows that were dropped to shards of their own, from the inputs.

    DIR is a cleaned folder. Shards keep their names and formats, rows their order. The inputs are
    checked first: one that is gone or has changed is an error. Rows that cannot be read are given
    back byte for byte in JSON Lines, in other formats where they allow it; the others are counted.

    \b
    Examples:
      auditor restore cleaned/ --out dropped/
      auditor restore cleaned/ --out dropped/ --reason near --source web
    """
    from dataclasses import asdict

    from auditor.clean.manifest import load_manifest
    from auditor.clean.restore import restore as give_back
    from auditor.show.cleaning import print_restored

    manifest = load_manifest(folder, parents=parents)
    with (
        interruptible("Stopped. The same command begins again and goes through."),
        progress_bar(quiet=as_json) as progress,
        checking(),
    ):
        restored = give_back(manifest, out, reason=reason, source=source, progress=progress)
    if as_json:
        n_rows = {"n_rows": restored.n_rows, "n_lost": restored.n_lost}
        click.echo(json.dumps({"out": str(out), **n_rows, **asdict(restored)}, indent=2))
    else:
        print_restored(console(), restored, out)


@click.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A new folder.")
@click.option("--content", help="Column of the text or tokens.  [default: text, input_ids, tokens]")
@as_json_option
def sketch(inputs: tuple[str, ...], out: Path, content: str | None, as_json: bool) -> None:
    """Sketch a corpus once, for training runs to look up.

    INPUT is shards, folders or globs of them, in any format that dedupe reads, whose rows have
    ids. AuditedSampler(loader, run=..., duplication="signatures/") then finds the sketch of a
    sample by its id instead of making it.

    \b
    Examples:
      auditor sketch 'shards/*.jsonl.zst' --out signatures/
      auditor sketch corpus/ --out signatures/ --content body
    """
    from auditor.clean.sketches import sketch as write

    with progress_bar(quiet=as_json) as progress:
        document = write(inputs, out, content=content, progress=progress)
    if as_json:
        click.echo(json.dumps({"out": str(out), **document}, indent=2))
        return
    screen = console()
    screen.print(f"{document['n_rows']} sketches in {out}", soft_wrap=True, markup=False)
    if document["n_without_id"]:
        screen.print(f"{document['n_without_id']} rows have no id and were left out.")
    if document["n_repeated_ids"]:
        screen.print(f"{document['n_repeated_ids']} rows repeat an id; the first counts.")
