"""Elements, seeds and spans of duplicate windows, against brute force."""

from __future__ import annotations

import re
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from auditor.measure.sketch import choose_shingle
from auditor.measure.substrings import (
    MAX_ELEMENTS,
    FirstOccurrences,
    cover,
    cut,
    elements_text,
    elements_tokens,
    located_text,
    repeated,
    seeds,
)

Corpus = list[list[int]]


def packed(rows: Corpus) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.cumsum([0, *map(len, rows)])
    flat = [value for row in rows for value in row]
    return elements_tokens(np.array(flat, np.int64)), offsets


def first_occurrences(rows: Corpus, n_elements: int) -> dict[int, int]:
    """By definition: of each duplicate window the earliest equal one that it does not overlap."""
    windows: list[tuple[int, int, tuple[int, ...]]] = []
    position = 0
    for number, row in enumerate(rows):
        windows += [
            (number, position + i, tuple(row[i : i + n_elements]))
            for i in range(len(row) - n_elements + 1)
        ]
        position += len(row)
    found = {}
    for i, (row, at, window) in enumerate(windows):
        for other, source, earlier in windows[:i]:
            if window == earlier and (row != other or at - source >= n_elements):
                found[at] = source
                break
    return found


def found_runs(rows: Corpus, n_elements: int) -> np.ndarray:
    values, offsets = packed(rows)
    records = seeds(values, offsets, n_elements, 0)
    records = records[repeated(records, n_elements)]
    runs = FirstOccurrences(values, n_elements).duplicates(records)
    return runs[np.argsort(runs[:, 0])]


corpora_of_few_elements = st.lists(
    st.one_of(
        st.lists(st.integers(0, 1), max_size=30),
        st.lists(st.integers(0, 3), max_size=30),
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(1, 9)).map(
            lambda part: part[0] * part[1]
        ),
    ),
    max_size=7,
)


@settings(deadline=None, max_examples=300)
@given(corpora_of_few_elements, st.integers(1, 8))
@example([[0] * 200], 3)
@example([[1, 2, 3] * 40, [], [2, 3, 1] * 30], 6)
@example([[*range(12), *range(12), 0, 1]], 5)
def test_duplicate_windows_are_those_of_the_definition(rows: Corpus, n_elements: int) -> None:
    found = {
        at + i: first + i
        for at, first, count in found_runs(rows, n_elements).tolist()
        for i in range(count)
    }
    assert found == first_occurrences(rows, n_elements)


@settings(deadline=None, max_examples=300)
@given(corpora_of_few_elements, st.integers(1, 8))
@example([[0] * 200], 3)
@example([[1, 2, 3] * 40, [], [2, 3, 1] * 30], 6)
@example([[*range(12), *range(12), 0, 1]], 5)
def test_spans_cover_exactly_the_duplicate_windows(rows: Corpus, n_elements: int) -> None:
    values, offsets = packed(rows)
    spans, end = cover(values, offsets, found_runs(rows, n_elements), n_elements, 0)
    expected = first_occurrences(rows, n_elements)
    covered = {i for at, _, n in spans.tolist() for i in range(at, at + n)}
    assert covered == {i for at in expected for i in range(at, at + n_elements)}
    assert end == max(covered, default=-1) + 1
    flat = [value for row in rows for value in row]
    row_of = np.repeat(np.arange(len(rows)), np.diff(offsets))
    reached = 0
    for at, source, n in spans.tolist():
        assert n >= n_elements
        assert flat[at : at + n] == flat[source : source + n]
        assert len(set(row_of[at : at + n])) == len(set(row_of[source : source + n])) == 1
        assert source + n <= at
        assert source == expected[at]
        # It ends only where it must: at a row's end, at itself, or at another element.
        ends = {*offsets.tolist()}
        assert (
            at + n in ends
            or source + n in ends
            or source + n == at
            or flat[at + n] != flat[source + n]
        )
        assert reached - n_elements < at < at + n
        assert at + n > reached
        reached = at + n


def test_every_duplicate_element_has_an_earlier_copy_that_is_kept() -> None:
    generator = np.random.default_rng(3)
    blocks = [generator.integers(0, 9, generator.integers(8, 20)).tolist() for _ in range(6)]
    rows = [[*chain(*(blocks[i] for i in generator.integers(0, 6, 8)))] for _ in range(20)]
    values, offsets = packed(rows)
    spans, _ = cover(values, offsets, found_runs(rows, 10), 10, 0)
    copied_from = {}
    for at, source, n in spans.tolist():
        copied_from.update({at + i: source + i for i in range(n)})
    assert len(copied_from) > len(values) / 2
    for at in copied_from:
        kept = at
        while kept in copied_from:
            assert copied_from[kept] < kept
            kept = copied_from[kept]
        assert values[kept] == values[at]


def test_a_span_that_two_calls_share_is_covered_once() -> None:
    block = list(range(100))
    rows = [block, block]
    values, offsets = packed(rows)
    # As two sets of seeds give them: one run of windows in two.
    runs = np.array([[100, 0, 30], [130, 30, 61]])
    first, end = cover(values, offsets, runs[:1], 10, 0)
    second, _ = cover(values, offsets, runs[1:], 10, end)
    assert first.tolist() == [[100, 0, 100]]
    assert second.tolist() == []


def test_windows_that_share_a_hash_and_are_not_equal_are_no_duplicates() -> None:
    values, offsets = packed([[1, 2, 3, 4, 5], [1, 2, 9, 4, 5]])
    spans, _ = cover(values, offsets, np.array([[5, 0, 3]]), 3, 0)
    assert spans.tolist() == []


def test_a_text_that_a_thousand_rows_share_is_compared_with_its_first_row_alone() -> None:
    rows = [[7000 + i, *range(60), 9000 + i] for i in range(1000)]
    runs = found_runs(rows, 50)
    assert len({at for at, _, _ in runs.tolist()}) == len(runs)
    assert {first for _, first, _ in runs.tolist()} <= set(range(62))
    assert runs[:, 2].sum() == 999 * 11


def test_seeds_are_few_and_all_windows_are_in_one_record() -> None:
    values, offsets = packed([np.random.default_rng(0).integers(0, 1 << 40, 10_000).tolist()])
    records = seeds(values, offsets, 50, 0)
    assert len(records) < 10_000 / 10
    windows = Counter(
        begin + i
        for begin, count in zip(
            (records[:, 1] >> 16).tolist(), (records[:, 1] & 0xFFFF).tolist(), strict=True
        )
        for i in range(count)
    )
    assert windows == Counter(range(10_000 - 49))


def test_a_row_of_one_element_makes_few_records() -> None:
    values, offsets = packed([[5] * 300_000])
    assert len(seeds(values, offsets, 50, 0)) == 5  # of 65,535 windows at most


@pytest.mark.parametrize("n_elements", [0, MAX_ELEMENTS + 1])
def test_seeds_refuse_a_window_that_is_none(n_elements: int) -> None:
    with pytest.raises(ValueError, match=str(n_elements)):
        seeds(np.empty(0, np.uint64), np.zeros(1, np.int64), n_elements, 0)


texts = st.text(st.sampled_from("aB1_ \n.-éÉßİΣ漢字かなไท\u0307\ud800"), max_size=40)


def words_and_characters(text: str) -> list[str]:
    """An independent reading of the definition of elements."""
    return re.findall(r"[漢字かなไท]|[^\W漢字かなไท]+", text.lower())


@settings(deadline=None)
@given(texts, texts)
def test_elements_are_equal_where_words_or_characters_are(a: str, b: str) -> None:
    named = dict(zip(words_and_characters(a + " " + b), elements_text(a + " " + b), strict=True))
    assert len(set(named.values())) == len(named)
    assert elements_text(b).tolist() == [named[word] for word in words_and_characters(b)]


@settings(deadline=None)
@given(texts)
def test_elements_are_located_in_the_text_as_it_is(text: str) -> None:
    elements, begins, ends = located_text(text)
    assert elements.tolist() == elements_text(text).tolist()
    assert (begins < ends).all()
    for begin, end, word in zip(begins, ends, words_and_characters(text), strict=True):
        # The dot that "İ" leaves in lower case is no word character, and a sigma is another
        # letter at the end of a word.
        found = text[begin:end].lower().replace("\u0307", "")
        assert re.sub("[σς]", "Σ", found) == re.sub("[σς]", "Σ", word)


def test_scripts_without_spaces_are_those_for_which_shingles_are_characters() -> None:
    points = [*range(0x80), *range(0x80, 0x110000, 61)]
    letters = [chr(point) for point in points if re.fullmatch(r"\w", chr(point).lower())]
    alone = {letter for letter in letters if len(elements_text(letter.lower() * 2)) == 2}
    assert alone == {letter for letter in letters if choose_shingle(letter) == "char5"}
    assert len(alone) > 500


def test_elements_of_tokens_do_not_depend_on_their_integer_type() -> None:
    ids = np.array([0, 1, 50_000, 1])
    assert elements_tokens(ids.astype(np.uint16)).tolist() == elements_tokens(ids).tolist()
    assert len(set(elements_tokens(np.arange(1000)).tolist())) == 1000
    with pytest.raises(ValueError, match="1-D"):
        elements_tokens(np.zeros((2, 2), np.int64))


def test_cut_removes_the_spans_and_nothing_else() -> None:
    text = "Keep, this!  Cut these words. Keep\tthat…"
    begin, end = text.index("Cut"), text.index(". Keep")
    assert cut(text, [(begin, end)]) == "Keep, this!  . Keep\tthat…"
    assert cut(text, []) == text
    assert cut(text, [(0, len(text))]) == ""


def test_cut_takes_spans_that_overlap_and_come_in_any_order() -> None:
    assert cut("a b c d e f", [(6, 9), (2, 5), (4, 7)]) == "a  f"
    assert cut("a b c d e f", [(0, 11), (2, 5)]) == ""


def test_cut_keeps_words_apart_that_nothing_else_would() -> None:
    assert cut("left春眠不覺曉right", [(4, 9)]) == "left right"
    assert cut("春眠不覺曉", [(1, 4)]) == "春曉"
    assert cut("left春眠不覺曉", [(4, 8)]) == "left曉"


def test_cut_of_tokens() -> None:
    ids = np.arange(10, dtype=np.uint16)
    left = cut(ids, [(2, 5), (8, 10)])
    assert left.dtype == np.uint16
    assert left.tolist() == [0, 1, 5, 6, 7]
    assert ids.tolist() == list(range(10))


@pytest.mark.parametrize("span", [(-1, 2), (3, 2), (2, 4)])
def test_cut_refuses_a_span_that_is_not_within_the_content(span: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="span"):
        cut("abc", [span])
