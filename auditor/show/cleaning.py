"""What cleaning did or would do, on a terminal and as JSON; nothing from data is live.

Everything is printed as ``rich.text.Text``, never as markup.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from auditor.clean.lookup import Found
from auditor.clean.manifest import Manifest
from auditor.clean.restore import Restored
from auditor.clean.shards import Shard
from auditor.show.differences import Differences, Piece, differences, excerpt
from auditor.show.printing import heading, line, new_table
from auditor.show.text import SENTENCE_CHARS, clean, encodable
from auditor.show.wording import counted

REASONS: Final = {
    "exact": "same normalised content as a row that stays",
    "near": "similar to a row that stays, at or above the threshold",
    "repetition": "repeats itself",
    "exposure": "consumed by the run often enough",
    "implicated": "named to be dropped",
    "unreadable": "cannot be read",
}
"""Why a row is dropped, in the order in which reasons are told."""

_SOURCES: Final = 30
"""Sources that are printed: those with the most rows."""

_KINDS: Final = 5
_EXAMPLES: Final = 3
_NAMES: Final = 5
_PATH_CHARS: Final = 200


def print_manifest(console: Console, manifest: Manifest, out: Path | None) -> None:
    """Counts, sources and weights; ``out`` is where they were written, None for a dry run."""
    counts, document = manifest.counts, manifest.document
    verb = "would be written" if out is None else "written"
    if not manifest.has_children and out is not None:
        verb = "kept"
    _say(console, f"{counts['rows_in']} rows in, {counts['rows_out']} rows {verb}")
    for reason, why in REASONS.items():
        if counts.get(reason):
            _say(console, f"  {counts[reason]:>9} dropped: {reason:<10}  {why}")
    table = new_table(console)
    table.add_column("source")
    for name in ("rows in", "rows out", "weight", "epochs", "proposed", "epochs"):
        table.add_column(name, justify="right")
    by_rows = sorted(document["sources"].items(), key=lambda item: -item[1]["rows_in"])
    for name, source in by_rows[:_SOURCES]:
        at_old_weight = source["projected_epochs_at_old_weight"]
        cells = (
            clean(name),
            str(source["rows_in"]),
            str(source["rows_out"]),
            f"{source['weight_before']:.1%}",
            "-" if at_old_weight is None else f"{at_old_weight:.2f}",
            f"{source['weight']:.1%}",
            f"{source['projected_epochs']:.2f}",
        )
        table.add_row(*(Text(encodable(cell, console.encoding)) for cell in cells))
    console.print(table)
    if (n_more := len(by_rows) - _SOURCES) > 0:
        _say(console, f"and {counted(n_more, 'more source')}, in manifest.json")
    for note in _notes(manifest):
        line(console, "", clean(note, SENTENCE_CHARS), label_chars=0)
    if out is not None:
        _say(console, f"{out / 'manifest.json'}")
        _say(console, f"Check it at any time: auditor verify {out}")


def print_samples(console: Console, manifest: Manifest, samples: Sequence[Found]) -> None:
    """For each reason how many rows would go, and some of them beside their keepers."""
    for reason, why in REASONS.items():
        found = [one for one in samples if one.row["reason"] == reason]
        if found:
            n = counted(manifest.counts[reason], "row")
            heading(console, f"{reason}: {n}, {why}")
            for one in found:
                console.print()
                _pair(console, one)


def samples_as_json(samples: Sequence[Found]) -> list[dict[str, Any]]:
    """The same for machines: places, Jaccard, and both excerpts around the first difference."""
    return [_sample_as_json(one) for one in samples]


def print_found(console: Console, found: Sequence[Found]) -> None:
    """One row, or all of one id: decision, reason, keeper, cluster, and the two side by side."""
    for i, one in enumerate(found):
        if i:
            console.print()
        row = one.row
        line(console, "Row", f"{_place(row)}  id {clean(row['sample_id'])}", style="bold")
        line(console, "Source", clean(row["source"]))
        reason = row["reason"]
        why = f": {reason}, {REASONS.get(reason, '')}".rstrip(", ") if reason else ""
        line(console, "Decision", f"{row['decision']}{why}", style="bold")
        if row["decision"] == "kept" and row["weight"] != 1:
            line(console, "Weight", f"{row['weight']:.4g}")
        if row["keeper_shard"] is not None:
            line(console, "Keeper", f"{_keeper(one)}, {_similarity(one)}")
        if one.n_members:
            shown = f", the first {len(one.members)}" if one.n_members > len(one.members) else ""
            line(console, "Cluster", f"{row['cluster']}: {one.n_members} rows{shown}")
            for member in one.members:
                said = member["reason"] or member["decision"]
                body = f"{said:<10}  {_place(member)}  id {clean(member['sample_id'])}"
                line(console, "", body)
        if one.unread is not None:
            line(console, "Content", f"not shown: {clean(one.unread, SENTENCE_CHARS)}")
        elif one.content is not None:
            console.print()
            _pair(console, one)


def found_as_json(found: Sequence[Found]) -> dict[str, Any]:
    """The same for machines."""
    return {
        "rows": [
            {
                **one.row,
                "keeper": one.keeper,
                "jaccard_recomputed": one.similarity,
                "cluster_size": one.n_members,
                "cluster_members": one.members,
                "content": _sides_as_json(one),
                "unread": one.unread,
            }
            for one in found
        ]
    }


def print_restored(console: Console, restored: Restored, out: Path) -> None:
    """How many rows were given back, why they had been dropped, and where they are."""
    n_rows, n_shards = counted(restored.n_rows, "row"), counted(len(restored.by_shard), "shard")
    _say(console, f"{n_rows} from {n_shards} in {out}")
    for reason, n in restored.by_reason.items():
        _say(console, f"  {n:>9} had been dropped: {reason}")
    if restored.n_lost:
        rows = counted(restored.n_lost, "row")
        why = "cannot be read, and cannot be given back as they are in this format"
        _say(console, f"{rows} not given back: {why}")
        for name, n in list(restored.lost_by_shard.items())[:_SOURCES]:
            _say(console, f"  {n:>9} in {clean(name, _PATH_CHARS)}")
        if (n_more := len(restored.lost_by_shard) - _SOURCES) > 0:
            _say(console, f"  and in {counted(n_more, 'more shard')}")


def warnings(manifest: Manifest, *, unknown_ids: Collection[str] = ()) -> Iterator[str]:
    """What went by without an error and should be known: findings, names that match nothing.

    ``unknown_ids``: ids to protect that no row has.
    """
    document = manifest.document
    if n := document["n_findings"]:
        kinds = Counter(_kind(one) for one in document["findings"])
        listed = len(document["findings"])
        of = f", of the first {listed}" if n > listed else ""
        yield f"{counted(n, 'finding')} about the shards{of}:"
        for kind, count in kinds.most_common(_KINDS):
            yield f"{count:>9} {kind}"
            alike = [one for one in document["findings"] if _kind(one) == kind][:_EXAMPLES]
            for one in alike:
                row = "" if one["row"] is None else f":{one['row']}"
                where = f"{clean(one['shard'], _PATH_CHARS)}{row}"
                yield f"            {where}  {clean(one['what'], 160)}"
        if len(kinds) > _KINDS:
            yield f"          and {counted(len(kinds) - _KINDS, 'other kind')}"
    said = document["parameters"]
    named = {
        "--prefer": said["prefer"],
        "--protect-source": said["protect_sources"],
        "--source-threshold": said["thresholds"],
    }
    for option, names in named.items():
        if unknown := [name for name in names if name not in document["sources"]]:
            yield f"{option}: no row is of source {_listed(unknown)}"
    counts = document["counts"]
    if n := counts.get("without_quality"):
        rest = "no row has a number there, so the first ones stay"
        if n < counts["rows_in"] - counts["unreadable"]:
            rest = f"{counted(n, 'row')} without a number there come last"
        yield f"--keep {clean(said['keep'])}: {rest}"
    for source, shards in _merged(document):
        yield f"the source {clean(source)} is that of {_listed(shards)}; rows can name their own"
    if unknown_ids:
        yield f"--protect-ids: no row has the id {_listed(sorted(unknown_ids))}"


def _merged(document: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Sources that are the file name of several shards, which lie in different folders."""
    shards: dict[str, list[str]] = {}
    for entry in document["shards"]:
        shard = Shard(entry["parent"], entry["shard"])
        shards.setdefault(shard.stem, []).append(shard.name)
    for source, names in shards.items():
        if source in document["sources"] and len(names) > 1:
            yield source, names


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(map(clean, names[:_NAMES])) + more


def _kind(finding: dict[str, Any]) -> str:
    """A finding without its numbers: one that was made of many rows is one kind."""
    lost = "not read: " if finding["lost"] else ""
    # Digits of a name, such as UTF-8, are no number of anything.
    return lost + re.sub(r"(?<![\w-])\d+", "N", clean(finding["what"], 100))


def _pair(console: Console, one: Found) -> None:
    """A row and its keeper side by side, or the row alone."""
    row = one.row
    if one.unread is not None:
        line(
            console,
            "",
            f"{_place(row)}  not shown: {clean(one.unread, SENTENCE_CHARS)}",
            label_chars=2,
        )
        return
    if one.keeper is None or one.content is None or one.keeper_content is None:
        text = "no content" if one.content is None else excerpt(one.content)
        _say(console, f"  {_place(row)}")
        line(console, "", text, label_chars=4)
        return
    found = differences(one.content, one.keeper_content)
    where = "" if not found.begin else f", from {found.unit} {found.begin} on"
    _say(console, f"  {_similarity(one)}{where}")
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(ratio=1)
    table.add_column(ratio=1)
    for cells in (
        (f"dropped  {_place(row)}", f"keeper  {_keeper(one)}"),
        (
            _text(console, found.left, found.joint, "-"),
            _text(console, found.right, found.joint, "+"),
        ),
    ):
        table.add_row(*(_cell(console, cell) for cell in cells))
    console.print(table)
    if found.first is None:
        _say(console, "  no difference but in whitespace")


def _cell(console: Console, cell: str | Text) -> Text:
    if isinstance(cell, Text):
        return cell
    return Text(encodable(cell, console.encoding), style="dim", overflow="fold")


def _text(console: Console, pieces: Sequence[Piece], joint: str, sign: str) -> Text:
    """Pieces with what differs in colour; without colours in brackets, as wdiff has it."""
    style = "bold red" if sign == "-" else "bold green"
    opening, closing = {"-": ("[-", "-]"), "+": ("{+", "+}")}[sign]
    coloured = console.is_terminal and not console.no_color
    text = Text(overflow="fold")
    for i, piece in enumerate(pieces):
        if i:
            text.append(joint)
        shown = encodable(piece.text, console.encoding)
        if piece.differs and not coloured:
            shown = f"{opening}{shown}{closing}"
        text.append(shown, style if piece.differs else "")
    return text


def _place(row: dict[str, Any]) -> str:
    return f"{clean(row['shard'], _PATH_CHARS)}:{row['row']}"


def _keeper(one: Found) -> str:
    return f"{clean(one.row['keeper_shard'], _PATH_CHARS)}:{one.row['keeper_row']}"


def _similarity(one: Found) -> str:
    if one.row["reason"] == "exact":
        return "same normalised content"
    again = "" if one.similarity is None else f", computed again {one.similarity:.3f}"
    return f"Jaccard {one.row['jaccard']:.3f}{again}"


def _sample_as_json(one: Found) -> dict[str, Any]:
    row = one.row
    names = ("reason", "shard", "row", "sample_id", "source", "keeper_shard", "keeper_row")
    return {
        **{name: row[name] for name in names},
        "jaccard": row["jaccard"],
        "content": _sides_as_json(one),
        "unread": one.unread,
    }


def _sides_as_json(one: Found) -> dict[str, Any] | None:
    if one.content is None:
        return None
    if one.keeper_content is None:
        return {"from": 0, "first_difference": None, "row": excerpt(one.content), "keeper": None}
    found: Differences = differences(one.content, one.keeper_content)
    return {
        "from": found.begin,
        "first_difference": found.first,
        "row": found.joint.join(piece.text for piece in found.left),
        "keeper": found.joint.join(piece.text for piece in found.right),
    }


def _notes(manifest: Manifest) -> Iterator[str]:
    """What a reader of the counts should know as well."""
    document = manifest.document
    if document["counts"].get("without_content"):
        yield f"{document['counts']['without_content']} rows without content were kept unread."
    if document["ignored"]:
        names = ", ".join(clean(name, _PATH_CHARS) for name in document["ignored"][:_NAMES])
        yield f"Not read, since no data format of ours: {names}"
    if document["capped_buckets"]["n_buckets"]:
        yield (
            f"{document['capped_buckets']['n_buckets']} hot buckets were capped: some pairs were "
            "not compared, and a second pass may drop more."
        )
    if (spans := document.get("substrings")) is not None:
        verb = "cut out of" if spans["are_cut"] else "found in"
        yield f"{spans['n_spans']} substring duplicates {verb} {spans['n_rows']} rows that stay."
    if document["mix"]["unmatched"]:
        yield (
            "The run knows sources that the shards do not name, which were left out of the "
            f"weights: {_listed(document['mix']['unmatched'])}"
        )
    if n := document["counts"].get("n_shards_cut_off"):
        yield (
            f"{counted(n, 'shard')} could not be read to the end: rows behind the fault are not "
            "counted, and not in the cleaned shards."
        )
    if not document["counts"]["rows_out"]:
        yield "No row stays, so no weights are proposed."
    elif not document["mix"]["feasible"]:
        yield (
            "All sources together hold too few rows for the repetition budget: every source would "
            "be repeated equally often. Add data, or train on fewer samples."
        )


def _say(console: Console, words: str) -> None:
    """One line, in one piece whatever its length, so that it can be copied."""
    console.print(Text(encodable(words, console.encoding)), soft_wrap=True)
