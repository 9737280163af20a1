"""Awkward files from the field: each is read whole, or says what is wrong with it.

``TABLE.md`` beside the files says what a careful tool does; ``CASES`` is that table as data.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from auditor.clean.row import Finding, Reading
from auditor.clean.shards import Shard, find_shards
from auditor.errors import ShardError


class Case(NamedTuple):
    """What a file gives when unreadable rows are skipped; ``refused`` is the error when not.

    ``rows`` counts all rows, the unreadable ones too; ``notices`` are parts of findings without
    loss, each in the order given; a file without ``refused`` reads the same in both modes.
    """

    rows: int
    unreadable: tuple[int, ...] = ()
    empty: tuple[int, ...] = ()
    notices: tuple[str, ...] = ()
    refused: str | None = None


NOT_READ = "format is not read"
NULL = "'text' is null or missing"

CASES: dict[str, Case] = {
    "big_int_id.jsonl": Case(3),
    "blank_lines.jsonl": Case(2, notices=("3 blank lines",)),
    "bom_utf8.jsonl": Case(3, notices=("byte order mark",)),
    "chinese_no_spaces.jsonl": Case(21),
    "concatenated_json_no_newlines.json": Case(1, (0,), refused="row 0: .*more than one value"),
    "crlf.jsonl": Case(4),
    "csv_embedded_newlines.csv": Case(0, refused=NOT_READ),
    "deep_nesting.jsonl": Case(2, (0,), refused="row 0: .*deeply nested"),
    "duplicate_column_names.parquet": Case(0, refused="more than one column named 'text'"),
    "duplicate_ids.jsonl": Case(4, notices=("2 rows have the id of an earlier one",)),
    "duplicate_keys.jsonl": Case(2, notices=("has 'text' more than once; the last counts",)),
    "emoji_zwj.jsonl": Case(4),
    "empty.parquet": Case(0, refused="Parquet"),
    "empty_and_whitespace.jsonl": Case(7),
    "empty_file.jsonl": Case(0, notices=("holds no rows",)),
    "empty_file.jsonl.gz": Case(0, notices=("holds no rows",)),
    "gz_bad_crc.jsonl.gz": Case(20, refused="row 20: .*CRC"),
    "gz_line_across_members.jsonl.gz": Case(12),
    "gz_multi_member.jsonl.gz": Case(20),
    "gz_named_jsonl.jsonl": Case(20),
    "gz_trailing_garbage.jsonl.gz": Case(20, notices=("bytes that are no part of it",)),
    "gz_trailing_zeros.jsonl.gz": Case(20),
    "gz_truncated.jsonl.gz": Case(13, refused="row 13: cannot be read to its end"),
    "huge_single_line.jsonl.zst": Case(2),
    "invalid_utf8.jsonl": Case(3, (1,), refused="row 1: .*UTF-8"),
    "json_array.json": Case(0, refused="JSON array"),
    "latin1_file.jsonl": Case(3, (0, 1, 2), refused="row 0: .*UTF-8"),
    "lone_surrogates.jsonl": Case(4, notices=("lone surrogates", "lone surrogates")),
    "many_row_groups.parquet": Case(20),
    "missing_or_null_text.jsonl": Case(6, empty=(1, 2, 4), notices=(NULL, NULL, NULL)),
    "mixed_types.jsonl": Case(
        6,
        empty=(2, 3, 4, 5),
        notices=("is a number", "is a list of other than", "is an object", "is a boolean"),
    ),
    "nested_json.jsonl": Case(0, refused="'id', 'data', 'messages'.*--content"),
    "no_final_newline.jsonl": Case(3),
    "no_text_column.parquet": Case(0, refused="'id', 'content', 'body'.*--content"),
    "non_object_rows.jsonl": Case(
        8,
        empty=(0, 1, 2, 3, 4, 6),
        notices=("a list", "a string", "a number", "null", "a boolean", "a number"),
    ),
    "nul_bytes_in_text.jsonl": Case(2, notices=("NUL",)),
    "nul_bytes_raw.jsonl": Case(3, (1,), refused="row 1: not a line of JSON"),
    "one_long_word.jsonl": Case(3),
    "partial_last_line.jsonl": Case(4, (3,), refused="row 3: .*Unterminated string"),
    "plain_named_gz.jsonl.gz": Case(5),
    "plain_text_documents.txt": Case(0, refused=NOT_READ),
    "rtl_arabic_persian.jsonl": Case(11),
    "schema_a_string.parquet": Case(20),
    "schema_b_large_string_extra.parquet": Case(20),
    "schema_c_dictionary.parquet": Case(20),
    "schema_d_list_struct.parquet": Case(0, refused="neither text nor lists of integers"),
    "text.arrow_stream.arrow": Case(20, notices=("no mark of its end",)),
    # Row 3 is UTF-16 without a mark, which is UTF-8 as well: every other byte is NUL.
    "text_binary.parquet": Case(20, notices=("NUL characters, as UTF-16 read as UTF-8",)),
    "text_nulls.parquet": Case(20, empty=(0, 4, 8, 12, 16), notices=(NULL,) * 5),
    "truncated.parquet": Case(0, refused="Parquet"),
    "u2028_u0085_in_text.jsonl": Case(2),
    "utf16le_bom.jsonl": Case(0, refused="is UTF-16"),
    "zero_rows.parquet": Case(0, notices=("holds no rows",)),
    # Of one block each: nothing of it can be read when that is damaged.
    "zst_bad_checksum.jsonl.zst": Case(0, refused="checksum"),
    "zst_truncated.jsonl.zst": Case(0, refused="cut off"),
    "zst_long_window_27.jsonl.zst": Case(1800, notices=("1740 rows have the id",)),
    "zst_multi_frame.jsonl.zst": Case(30),
    "zst_no_content_size.jsonl.zst": Case(10),
    "zst_skippable_frame.jsonl.zst": Case(10),
}
SKIP = Reading(on_error="skip")
every_case = pytest.mark.parametrize("name", CASES)
readable = pytest.mark.parametrize("name", [n for n in CASES if CASES[n].refused != NOT_READ])


def test_every_file_is_a_case(corpora: Path) -> None:
    names = {path.name for path in (corpora / "C_awkward").iterdir()}
    assert names - {"TABLE.md"} == set(CASES)


@every_case
def test_what_is_damaged_is_refused_with_its_file_and_a_remedy(corpora: Path, name: str) -> None:
    case = CASES[name]
    path = corpora / "C_awkward" / name
    findings: list[Finding] = []
    if case.refused is None:
        assert len(list(shard(path).rows(findings=findings))) == case.rows
        assert not any(finding.lost for finding in findings)
        assert_noticed(case, findings)
        return
    with pytest.raises(ShardError, match=case.refused) as refused:
        list(shard(path).rows(findings=findings))
    assert name in str(refused.value)
    assert refused.value.remedy


@readable
def test_what_is_damaged_is_skipped_and_found(corpora: Path, name: str) -> None:
    case = CASES[name]
    findings: list[Finding] = []
    rows = list(shard(corpora / "C_awkward" / name).rows(SKIP, findings))
    assert len(rows) == case.rows
    assert tuple(i for i, row in enumerate(rows) if not row.readable) == case.unreadable
    empty = tuple(i for i, row in enumerate(rows) if row.readable and row.content is None)
    assert empty == case.empty
    lost = [finding for finding in findings if finding.lost]
    assert tuple(finding.row for finding in lost if finding.row in case.unreadable) == (
        case.unreadable
    )
    assert bool(lost) == (case.refused is not None)
    assert_noticed(case, findings)


@readable
def test_a_copy_holds_what_was_read(corpora: Path, tmp_path: Path, name: str) -> None:
    """The copy of a damaged file is sound, and has the rows that were read, less the damaged."""
    source = shard(corpora / "C_awkward" / name)
    rows = list(source.rows(SKIP))
    keep = np.array([row.readable for row in rows], np.bool_)
    source.copy(tmp_path / name, keep, SKIP)
    copied = shard(tmp_path / name)
    assert copied.count() == keep.sum()
    if not keep.any():
        return
    contents = [row.content for row in copied.rows()]
    assert contents == [row.content for row in rows if row.readable]


def assert_noticed(case: Case, findings: list[Finding]) -> None:
    found = [finding.what for finding in findings if not finding.lost]
    assert len(found) == len(case.notices), found
    for what, part in zip(found, case.notices, strict=True):
        assert re.search(re.escape(part), what)


def shard(path: Path) -> Shard:
    return find_shards([path]).shards[0]
