"""Substring duplicates over shards: what is found, what is cut, and what is left."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonl_files import write_jsonl

from auditor.clean.row import Reading
from auditor.clean.shards import Shard, find_shards
from auditor.clean.substrings import rows_with_spans, substring_duplicates
from auditor.errors import ShardError
from auditor.measure.substrings import cut

KEEPER = ["keeper_shard", "keeper_row", "keeper_begin"]


def shards_of(folder: Path, *shards: Iterable[str | list[int]]) -> tuple[Shard, ...]:
    for i, rows in enumerate(shards):
        write_jsonl(
            folder / f"{i}.jsonl",
            [{"text": row} if isinstance(row, str) else {"input_ids": row} for row in rows],
        )
    return find_shards([folder]).shards


def words(n: int, seed: int) -> list[str]:
    """Words that occur nowhere else: the seed is in each."""
    return [f"w{seed}x{i}" for i in range(n)]


def cut_rows(texts: dict[tuple[str, int], str], spans: pl.DataFrame) -> dict[tuple[str, int], str]:
    left = dict(texts)
    for (shard, row), of_row in spans.group_by("shard", "row"):
        left[shard, row] = cut(texts[shard, row], of_row.select("begin", "end").iter_rows())
    return left


def texts_of(shards: Iterable[Shard]) -> dict[tuple[str, int], str]:
    return {
        (shard.name, i): row.content if isinstance(row.content, str) else ""
        for shard in shards
        for i, row in enumerate(shard.rows())
    }


def normalised(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def brute_force(texts: list[str], n_elements: int) -> list[set[int]]:
    """Words of each text that a window covers which an earlier, separate window equals."""
    first: dict[tuple[str, ...], tuple[int, int]] = {}
    covered: list[set[int]] = []
    for number, text in enumerate(texts):
        row = normalised(text)
        covered.append(set())
        for i in range(len(row) - n_elements + 1):
            where = first.setdefault(tuple(row[i : i + n_elements]), (number, i))
            if where[0] != number or i - where[1] >= n_elements:
                covered[-1].update(range(i, i + n_elements))
    return covered


rows_of_few_words = st.lists(
    st.lists(st.sampled_from(["a", "B, ", "çé\n", "İx ", "-- d"]), max_size=25).map(" ".join),
    min_size=1,
    max_size=6,
)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows_of_few_words, rows_of_few_words, st.integers(2, 6))
def test_spans_are_those_of_brute_force_in_characters(
    tmp_path: Path, one: list[str], two: list[str], n_elements: int
) -> None:
    shards = shards_of(tmp_path, one, two)
    spans = substring_duplicates(
        shards, n_elements=n_elements, work=tmp_path / "work", n_partitions=3
    )
    texts = texts_of(shards)
    found: dict[tuple[str, int], set[int]] = {key: set() for key in texts}
    for span in spans.iter_rows(named=True):
        text = texts[span["shard"], span["row"]]
        copied = normalised(text[span["begin"] : span["end"]])
        source = texts[span["keeper_shard"], span["keeper_row"]][span["keeper_begin"] :]
        assert len(copied) == span["n_elements"] >= n_elements
        assert normalised(source)[: len(copied)] == copied
        assert len(normalised(text)) == span["row_elements"]
        begin = span["begin_element"]
        assert len(normalised(text[: span["begin"]])) == begin
        found[span["shard"], span["row"]].update(range(begin, begin + span["n_elements"]))
    assert [*found.values()] == brute_force([*texts.values()], n_elements)
    shares = rows_with_spans(spans, min_left=3)
    assert {
        (shard, row): (n_cut, n_left, short)
        for shard, row, n_cut, n_left, short in shares.select(
            "shard", "row", "n_cut", "n_left", "short"
        ).iter_rows()
    } == {
        key: (len(cover), n - len(cover), n - len(cover) < 3)
        for key, cover in found.items()
        if cover
        for n in [len(normalised(texts[key]))]
    }


def test_case_and_punctuation_do_not_matter_and_are_left_outside_of_a_span(tmp_path: Path) -> None:
    block = words(50, 1)
    first = "Before. " + " ".join(block) + ". After"
    second = "(" + ",\n".join(block).upper() + ") and more"
    shards = shards_of(tmp_path, [first], [second])
    spans = substring_duplicates(shards, work=tmp_path / "work")
    assert spans.select("shard", "row", *KEEPER).rows() == [("1.jsonl", 0, "0.jsonl", 0, 8)]
    assert cut(second, spans.select("begin", "end").iter_rows()) == "() and more"


@pytest.mark.parametrize(("n", "n_spans"), [(49, 0), (50, 1), (51, 1)])
def test_a_span_counts_from_50_words_on(tmp_path: Path, n: int, n_spans: int) -> None:
    block = " ".join(words(n, 1))
    shards = shards_of(tmp_path, [f"one {block} two", f"three {block} four"])
    spans = substring_duplicates(shards, work=tmp_path / "work")
    assert spans["n_elements"].to_list() == [n] * n_spans


def test_a_block_repeated_inside_one_row_is_kept_once(tmp_path: Path) -> None:
    block, between = " ".join(words(60, 1)), " ".join(words(20, 2))
    text = f"{block} {between} {block} {block}"
    spans = substring_duplicates(shards_of(tmp_path, [text]), work=tmp_path / "work")
    assert spans["keeper_begin"].to_list() == [0, 0]
    assert cut(text, spans.select("begin", "end").iter_rows()) == f"{block} {between}  "


def test_a_copy_is_never_cut_by_overlapping_itself(tmp_path: Path) -> None:
    """120 equal words are 50, and 50 more, and 20: the first window stays."""
    shards = shards_of(tmp_path, [" ".join(["ha"] * 120), " ".join(["ho"] * 99)])
    spans = substring_duplicates(shards, work=tmp_path / "work")
    shares = rows_with_spans(spans)
    assert shares.select("row", "n_left").rows() == [(0, 50)]


def test_what_was_copied_from_two_rows_names_both(tmp_path: Path) -> None:
    a, b = words(60, 1), words(60, 2)
    rows = [" ".join(a), " ".join(b), " ".join(a + b)]
    spans = substring_duplicates(shards_of(tmp_path, rows), work=tmp_path / "work")
    assert spans.select("row", "begin_element", "n_elements", "keeper_row").rows() == [
        (2, 0, 60, 0),
        (2, 60, 60, 1),
    ]


def test_characters_are_the_elements_of_text_without_spaces(tmp_path: Path) -> None:
    generator = random.Random(1)
    block = "".join(chr(generator.randrange(0x4E00, 0x9F00)) for _ in range(70))
    first = f"前文。{block}后记"
    second = f"Another 引言:{block[:30]},\n{block[30:]}!结束"
    spans = substring_duplicates(shards_of(tmp_path, [first, second]), work=tmp_path / "work")
    assert spans.select("row", "n_elements", "keeper_begin").rows() == [(1, 70, 3)]
    assert cut(second, spans.select("begin", "end").iter_rows()) == "Another 引言:!结束"


def test_tokens(tmp_path: Path) -> None:
    block = list(range(100, 160))
    rows = [[1, 2, *block, 3], [], [7, *block], [*block[:49]]]
    shards = shards_of(tmp_path, rows)
    spans = substring_duplicates(shards, work=tmp_path / "work")
    assert spans.select("row", "begin", "end", "keeper_row", "keeper_begin").rows() == [
        (2, 1, 61, 0, 2)
    ]
    assert cut(np.array(rows[2]), [(1, 61)]).tolist() == [7]
    assert rows_with_spans(spans, min_left=2)["short"].to_list() == [True]


def test_rows_without_content_have_no_spans(tmp_path: Path) -> None:
    shards = shards_of(tmp_path, ["", " ", "...", ""], [" ".join(words(10, 0))])
    spans = substring_duplicates(shards, work=tmp_path / "work")
    assert len(spans) == 0
    assert rows_with_spans(spans).columns[:2] == ["shard", "row"]
    (tmp_path / "none.jsonl").touch()
    assert len(substring_duplicates(find_shards([tmp_path]).shards, work=tmp_path / "work")) == 0


def test_rows_are_numbered_as_read_where_some_cannot_be(tmp_path: Path) -> None:
    block = " ".join(words(50, 1))
    path = tmp_path / "0.jsonl"
    path.write_text(f'{{"text": "{block}"}}\n{{"text": broken\n{{"text": "see {block}"}}\n')
    shards = find_shards([path]).shards
    with pytest.raises(ShardError, match="row 1"):
        substring_duplicates(shards, work=tmp_path / "work")
    reading = Reading(on_error="skip")
    spans = substring_duplicates(shards, work=tmp_path / "work", reading=reading)
    assert spans.select("row", "begin", "keeper_row").rows() == [(2, 4, 0)]


def test_a_paragraph_in_100_real_documents_is_found_in_99(corpora: Path, tmp_path: Path) -> None:
    documents = [
        row.content
        for shard in find_shards([corpora / "A_text"]).shards
        if shard.name.startswith(("wiki", "docs_pep")) and shard.format == "jsonl"
        for row in shard.rows()
    ]
    paragraph = " ".join(words(80, 5)).capitalize() + "."
    generator = random.Random(2)
    planted = sorted(generator.sample(range(len(documents)), 100))
    texts = []
    for i, text in enumerate(documents):
        lines = text.split("\n")
        if i in planted:
            lines.insert(generator.randrange(len(lines) + 1), paragraph)
        texts.append("\n".join(lines))
    shards = shards_of(tmp_path / "in", texts[:200], texts[200:])
    spans = substring_duplicates(shards, work=tmp_path / "work", n_partitions=7)
    expected = brute_force(texts, 50)
    keys = [*texts_of(shards)]
    shares = {
        (shard, row): n_cut
        for shard, row, n_cut in rows_with_spans(spans).select("shard", "row", "n_cut").iter_rows()
    }
    assert shares == {key: len(c) for key, c in zip(keys, expected, strict=True) if c}
    left = cut_rows(texts_of(shards), spans)
    with_it = [i for i, key in enumerate(keys) if words(80, 5)[40] in left[key]]
    assert with_it == planted[:1]


def corpus_of_copies(seed: int) -> list[str]:
    """Rows that are made of 30 blocks of 20 to 80 words, in any order, with own words between."""
    generator = random.Random(seed)
    blocks = [words(generator.randrange(20, 80), 100 + i) for i in range(30)]
    return [
        " ".join(
            word
            for j in range(generator.randrange(6))
            for word in (*generator.choice(blocks), f"own{seed}x{i}x{j}")
        )
        for i in range(120)
    ]


def test_the_result_does_not_depend_on_partitions_or_on_how_rows_are_batched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = corpus_of_copies(1)
    shards = shards_of(tmp_path / "in", rows[:50], rows[50:])
    spans = substring_duplicates(shards, work=tmp_path / "work", n_partitions=1)
    assert len(spans) > 50
    monkeypatch.setattr("auditor.clean.substrings._BATCH_ELEMENTS", 100)
    monkeypatch.setattr("auditor.clean.substrings._CHUNK_WINDOWS", 64)
    for n in (2, 64):
        assert substring_duplicates(shards, work=tmp_path / "work", n_partitions=n).equals(spans)
    assert [*(tmp_path / "work").iterdir()] == []


def test_nothing_is_left_to_cut_but_across_a_cut(tmp_path: Path) -> None:
    """A duplicate after cutting has its first or its second copy across a place that was cut."""
    texts = texts_of(shards_of(tmp_path / "in", corpus_of_copies(3)))
    shards = find_shards([tmp_path / "in"]).shards
    spans = substring_duplicates(shards, n_elements=30, work=tmp_path / "work")
    assert len(spans) > 50
    marked = {}
    for key, text in texts.items():
        of_row = spans.filter(shard=key[0], row=key[1]).select("begin", "end").rows()
        # The left-over text, with a word of its own wherever something was cut out.
        pieces, at = [], 0
        for i, (begin, end) in enumerate(of_row):
            pieces += [text[at:begin], f" cut{key[1]}x{i} "]
            at = max(at, end)
        marked[key] = "".join([*pieces, text[at:]])
    again = shards_of(tmp_path / "marked", marked.values())
    assert len(substring_duplicates(again, n_elements=30, work=tmp_path / "work")) == 0


def test_a_cut_may_join_what_is_a_duplicate_then(tmp_path: Path) -> None:
    """The exception that the documentation states, and that a second round removes."""
    a, b, block = words(30, 1), words(30, 2), words(50, 3)
    rows = [" ".join(block), " ".join(a + b), " ".join(a + block + b)]
    texts = texts_of(shards_of(tmp_path / "1", rows))
    spans = substring_duplicates(find_shards([tmp_path / "1"]).shards, work=tmp_path / "work")
    left = cut_rows(texts, spans)
    assert normalised(left["0.jsonl", 2]) == a + b
    second = substring_duplicates(shards_of(tmp_path / "2", left.values()), work=tmp_path / "work")
    assert second.select("row", "n_elements", "keeper_row").rows() == [(2, 60, 1)]


def test_a_shard_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    block = " ".join(words(50, 1))
    shards = shards_of(tmp_path, [block, "filler", block])

    def rewrite(step: str, done: int, _: int) -> None:
        if step == "compare" and done == 0:
            lines = (tmp_path / "0.jsonl").read_text().splitlines()
            lines[2] = json.dumps({"text": block.replace("w1x7 ", "other ")})
            (tmp_path / "0.jsonl").write_text("\n".join(lines))

    with pytest.raises(ShardError, match="row 2: is another one"):
        substring_duplicates(shards, work=tmp_path / "work", progress=rewrite)
    assert [*(tmp_path / "work").iterdir()] == []


def test_a_shard_that_lost_rows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    block = " ".join(words(50, 1))
    shards = shards_of(tmp_path, [block, "filler", block])

    def truncate(step: str, done: int, _: int) -> None:
        if step == "compare" and done == 0:
            write_jsonl(tmp_path / "0.jsonl", [{"text": block}])

    with pytest.raises(ShardError, match="row 2: is another one"):
        substring_duplicates(shards, work=tmp_path / "work", progress=truncate)


@pytest.mark.parametrize("wrong", [{"n_elements": 0}, {"n_partitions": 0}])
def test_arguments_out_of_range_are_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="got 0"):
        substring_duplicates(shards_of(tmp_path, ["x"]), work=tmp_path / "work", **wrong)
