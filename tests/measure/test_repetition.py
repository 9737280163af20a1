"""Repetition inside a sample, against a brute-force reading of the definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.measure.repetition import (
    FLAG_REPEATS,
    MAX_PERIOD,
    MIN_COPIES,
    character_ids,
    flagged,
    repetition,
    repetition_batch,
    word_ids,
)


def brute_force(sample: list[int]) -> tuple[float, int]:
    """Try every period and every start, and count the copies one by one."""
    covered: set[int] = set()
    most = 1 if sample else 0
    for period in range(1, MAX_PERIOD + 1):
        for start in range(len(sample)):
            stop = start + period
            while stop < len(sample) and sample[stop] == sample[stop - period]:
                stop += 1
            if stop > len(sample):
                break
            copies = (stop - start) // period
            most = max(most, copies)
            if copies >= MIN_COPIES:
                covered.update(range(start, stop))
    return len(covered) / max(len(sample), 1), most


samples = st.one_of(
    st.lists(st.integers(0, 2), max_size=60),
    st.tuples(
        st.lists(st.integers(0, 9), max_size=9),
        st.lists(st.integers(0, 9), min_size=1, max_size=15),
        st.integers(1, 40),
        st.lists(st.integers(0, 9), max_size=9),
    ).map(lambda parts: parts[0] + parts[1] * parts[2] + parts[3]),
)


@settings(deadline=None)
@given(samples)
def test_repetition_equals_brute_force(sample: list[int]) -> None:
    assert repetition(np.array(sample, np.int64)) == pytest.approx(brute_force(sample))


@settings(deadline=None)
@given(st.lists(samples, max_size=8))
def test_repetition_batch_equals_one_by_one(batch: list[list[int]]) -> None:
    offsets = np.cumsum([0, *map(len, batch)])
    values = np.array([value for sample in batch for value in sample], np.int64)
    share, repeats = repetition_batch(values, offsets)
    assert share.dtype == np.float32
    assert repeats.dtype == np.int32
    for i, sample in enumerate(batch):
        assert (share[i], repeats[i]) == pytest.approx(repetition(np.array(sample, np.int64)))


@pytest.mark.parametrize("period", [1, 2, 13])
def test_repetition_flags_32_copies_and_not_31(period: int) -> None:
    around = np.arange(1000, 1050)
    for copies in (FLAG_REPEATS - 1, FLAG_REPEATS):
        sample = np.concatenate([around, np.tile(np.arange(period), copies), around + 100])
        share, repeats = repetition(sample)
        assert repeats == copies
        assert flagged(np.array([repeats]))[0] == (copies >= FLAG_REPEATS)
        assert share == pytest.approx(period * copies / len(sample))


def test_repetition_ignores_ngrams_longer_than_13() -> None:
    assert repetition(np.tile(np.arange(14), 50)) == (0.0, 1)


def test_repetition_counts_the_incomplete_last_copy() -> None:
    assert repetition(np.array([1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2])) == (1.0, 3)


def test_repetition_of_short_and_empty_samples() -> None:
    assert repetition(np.array([], np.int64)) == (0.0, 0)
    assert repetition(np.array([7])) == (0.0, 1)
    assert repetition(np.array([7, 7])) == (0.0, 2)
    assert repetition(np.array([7, 7, 7])) == (1.0, 3)


def test_repetition_refuses_a_matrix() -> None:
    with pytest.raises(ValueError, match="1-D"):
        repetition(np.zeros((2, 2), np.int64))


def test_word_ids_repeat_with_the_words() -> None:
    the, cat, *rest = word_ids("The cat, the cat;\tTHE cat ...").tolist()
    assert the != cat
    assert rest == [the, cat, the, cat]
    assert len(word_ids(" \n --- ")) == 0


def test_character_ids_leave_punctuation_out() -> None:
    assert len(character_ids("-" * 80)) == 0
    share, repeats = repetition(character_ids("春眠,不觉曉。" * 40))
    assert (share, repeats) == (1.0, 40)
