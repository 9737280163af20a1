"""Which batches a skip list names: by step, rank and attempt."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from auditor import schema
from auditor.explain.stretches import blamed_stretches, skip_list
from auditor.tables import polars_schema


def frame(columns: Any, rows: list[dict[str, Any]]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=polars_schema(columns))


def composition(duplicates: dict[int, int], n_steps: int = 300) -> pl.DataFrame:
    """Ten samples a step of one source, by step how many of them are near-duplicates."""
    usual = {"attempt": 0, "source": "a", "n_samples": 10, "n_scored": 10, "n_repetitive": 0}
    return frame(
        schema.COMPOSITION,
        [{**usual, "step": s, "n_duplicate": duplicates.get(s, 0)} for s in range(n_steps)],
    )


def event(number: int = 0, **changes: Any) -> dict[str, Any]:
    usual = {"event": number, "episode": 0, "onset_low": 200, "onset_high": 205, "trough_step": 240}
    return {**usual, **changes}


def suspect(**changes: Any) -> dict[str, Any]:
    usual = {"event": 0, "level": "source", "name": "a", "feature": "duplication", "lag": 5}
    return {**usual, "exposure": 0.8, "control": 0.0, "z": 20.0, "verdict": "blamed", **changes}


def stretches(
    duplicates: dict[int, int], suspects: list[dict[str, Any]], events: list[dict[str, Any]]
) -> list[tuple[int, int]]:
    return blamed_stretches(
        frame(schema.EVENTS, events), frame(schema.SUSPECTS, suspects), composition(duplicates)
    )


def test_stretch_begins_and_ends_with_the_duplicates() -> None:
    bad = dict.fromkeys(range(198, 226), 8)
    assert stretches(bad, [suspect()], [event()]) == [(198, 225)]


def test_single_clean_step_inside_is_bridged_and_a_stray_bad_one_outside_is_not_a_stretch() -> None:
    bad = dict.fromkeys(range(198, 226), 8) | {210: 0, 175: 8}
    assert stretches(bad, [suspect()], [event()]) == [(198, 225)]


def test_bursts_far_apart_are_two_stretches_and_none_goes_beyond_the_trough() -> None:
    bad = dict.fromkeys([*range(170, 182), *range(200, 280)], 8)
    assert stretches(bad, [suspect()], [event()]) == [(170, 181), (200, 240)]


def test_usual_amount_of_duplicates_is_not_implicated() -> None:
    """Two of ten are duplicates at all times; in the burst eight: half of the way is five."""
    bad = dict.fromkeys(range(300), 2) | dict.fromkeys(range(200, 220), 8)
    assert stretches(bad, [suspect(control=0.2)], [event()]) == [(200, 219)]


def test_stretches_of_several_events_are_joined() -> None:
    bad = dict.fromkeys(range(198, 260), 8)
    later = event(1, onset_low=245, onset_high=250, trough_step=255)
    two = [suspect(), suspect(event=1, lag=10)]
    assert stretches(bad, two, [event(), later]) == [(198, 255)]


def test_nothing_is_implicated_where_nothing_is_blamed() -> None:
    bad = dict.fromkeys(range(198, 226), 8)
    assert stretches(bad, [suspect(verdict="coincident")], [event()]) == []


# -- batches -----------------------------------------------------------------------------------


def exposures(*attempts: tuple[int, range], ranks: int = 1, per_step: int = 1) -> Any:
    """Attempts with their steps; every step has as many batches on each rank."""
    rows = [
        {"attempt": number, "rank": rank, "step": step, "batch": i * per_step + k}
        for number, steps in attempts
        for rank in range(ranks)
        for i, step in enumerate(steps)
        for k in range(per_step)
    ]
    table = pl.DataFrame(rows).with_columns(state=pl.lit("trained")).lazy()
    return lambda low, high: table.filter(pl.col("step").is_between(low, high))


def test_step_of_several_batches_on_several_ranks_is_skipped_whole() -> None:
    seen = exposures((0, range(100)), ranks=2, per_step=3)
    assert skip_list([(10, 11)], seen).batches == (30, 31, 32, 33, 34, 35)
    assert skip_list([(10, 11)], seen).steps == [10, 11]


def test_batches_are_counted_from_the_step_that_a_loader_begins_with() -> None:
    seen = exposures((0, range(100)), per_step=2)
    assert skip_list([(5, 6), (10, 10)], seen, from_step=6).batches == (0, 1, 8, 9)
    assert skip_list([(5, 6)], seen, from_step=7).batches == ()


def test_attempt_that_was_resumed_counts_from_its_own_beginning() -> None:
    seen = exposures((0, range(50)), (1, range(50, 100)))
    assert skip_list([(60, 61)], seen).batches == (10, 11)
    assert skip_list([(60, 61)], seen, from_step=55).batches == (5, 6)


@pytest.mark.parametrize("from_step", [None, 40])
def test_batches_of_attempts_that_count_anew_cannot_be_listed_together(
    from_step: int | None,
) -> None:
    seen = exposures((0, range(50)), (1, range(50, 100)))
    with pytest.raises(ValueError, match=r"attempts 0, 1 of the run.*--from-step"):
        skip_list([(48, 52)], seen, from_step)


def test_step_that_was_not_recorded_is_refused() -> None:
    seen = exposures((0, range(10, 50)))
    with pytest.raises(ValueError, match="no batch of step 5 was recorded"):
        skip_list([(20, 21)], seen, from_step=5)
