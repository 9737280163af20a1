"""Proposals follow the verdict, change weights within bounds, and keep to the repetition budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor import schema
from auditor.clean.proposal import NO_CHANGE, NO_EXPOSURES, Proposal, propose, ramp, token_weights
from auditor.tables import polars_schema


def suspects(*rows: tuple[str, str] | dict[str, Any]) -> pl.DataFrame:
    table = []
    for row in rows:
        one = row if isinstance(row, dict) else {"name": row[0], "verdict": row[1]}
        usual = {"event": 0, "level": "source", "feature": "duplication", "z": 10.0}
        table.append({**usual, **one})
    return pl.DataFrame(table, schema=polars_schema(schema.SUSPECTS))


def composition(**sources: tuple[int, int, int] | tuple[int, int]) -> pl.DataFrame:
    """By source: samples, how many are distinct, how many near-duplicates; spread over two steps.

    Without the third, all that are not distinct are near-duplicates.
    """
    rows = []
    for name, counts in sources.items():
        n, n_distinct, n_duplicate = (
            counts if len(counts) == 3 else (*counts, counts[0] - counts[1])
        )
        row = {
            "attempt": 0,
            "source": name,
            "n_samples": n // 2,
            "n_scored": n // 2,
            "n_duplicate": n_duplicate // 2,
            "n_repetitive": 0,
            "n_distinct": n_distinct // 2,
            "n_tokens": 64 * (n // 2),
            "repetition": 0.0,
        }
        rows += [{"step": step, **row} for step in (0, 1)]
    return pl.DataFrame(rows, schema=polars_schema(schema.COMPOSITION))


@pytest.mark.parametrize("verdict", ["ranked", "coincident"])
def test_nothing_is_proposed_where_nothing_is_blamed(verdict: str) -> None:
    proposal = propose(suspects(("b", verdict)), composition(a=(600, 600), b=(400, 10)))
    assert proposal.summary == NO_CHANGE
    assert not proposal.deduplicate
    assert proposal.changes == ()
    assert proposal.weights == {}
    assert proposal.mix == pytest.approx({"a": 0.6, "b": 0.4})  # as it is, over budget or not


def test_run_without_exposures_has_no_mix() -> None:
    empty = pl.DataFrame(schema=polars_schema(schema.COMPOSITION))
    proposal = propose(suspects(), empty)
    assert proposal.summary == NO_EXPOSURES
    assert proposal.mix == {}
    assert proposal.next_step == 0


def test_blamed_source_is_to_be_deduplicated_and_to_lose_the_share_of_its_repeats() -> None:
    seen = composition(a=(300, 300), b=(400, 300), c=(300, 300))
    proposal = propose(suspects(("b", "blamed"), ("a", "ranked")), seen)
    # b without its repeats: 300 of 900, as its neighbours.
    assert proposal.weights == pytest.approx({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3})
    assert [(one.kind, one.source, one.reason) for one in proposal.changes] == [
        ("deduplicate", "b", "blamed"),
        ("reweight", "b", "blamed"),
    ]
    assert proposal.changes[1].factor == pytest.approx((1 / 3) / 0.4)
    assert proposal.summary.startswith("Deduplicate, starting with b, and lower the weight of b")
    assert proposal.projected_epochs == pytest.approx({"a": 10 / 9, "b": 10 / 9, "c": 10 / 9})


def test_repeats_inside_samples_lower_the_weight_by_the_share_they_cover() -> None:
    seen = composition(a=(500, 500), b=(500, 500)).with_columns(
        repetition=pl.when(pl.col("source") == "b").then(0.5).otherwise(0.0)
    )
    blamed = suspects({"name": "b", "verdict": "blamed", "feature": "repetition"})
    assert propose(blamed, seen).weights == pytest.approx({"a": 2 / 3, "b": 1 / 3})


def test_no_weight_changes_by_more_than_the_factor_and_what_stays_over_budget_is_told() -> None:
    """b has 10 distinct samples of 400: the budget of 4 epochs would be a tenth of its weight."""
    seen = composition(a=(600, 600), b=(400, 10))
    proposal = propose(suspects(("b", "blamed")), seen)
    assert proposal.weights == pytest.approx({"a": 0.8, "b": 0.2})
    assert proposal.over_budget == pytest.approx({"b": 20.0})
    assert "Even so over 4 epochs" in proposal.summary
    further = propose(suspects(("b", "blamed")), seen, max_factor=20.0)
    assert further.weights == pytest.approx({"a": 0.98, "b": 0.02})  # a twentieth of .4
    assert further.over_budget == {}
    assert max(further.projected_epochs.values()) <= 4.0


def test_unblamed_source_over_the_budget_is_lowered_after_those_that_are_blamed() -> None:
    """Of c, 100 samples were shown 5 times each, evenly: no duplicates in any window."""
    seen = composition(a=(800, 800), b=(700, 600), c=(500, 100, 0))
    proposal = propose(suspects(("b", "blamed")), seen)
    assert proposal.epochs_now["c"] == pytest.approx(5.0)
    assert proposal.projected_epochs["c"] == pytest.approx(4.0)
    assert [(one.source, one.reason) for one in proposal.changes] == [
        ("b", "blamed"),
        ("b", "blamed"),
        ("c", "budget"),
    ]


def test_changes_are_ranked_by_evidence_each_source_with_its_strongest() -> None:
    seen = composition(a=(400, 300), b=(400, 300), c=(400, 400))
    table = suspects(
        {"name": "a", "verdict": "blamed", "event": 0, "z": 8.0},
        {"name": "b", "verdict": "blamed", "event": 0, "z": 20.0, "lift": 9.0},
        {"name": "b", "verdict": "blamed", "event": 1, "z": 30.0, "lift": 12.0, "low": 3.0},
        {"name": "c", "verdict": "ranked", "event": 1, "z": 50.0},
    )
    changes = [one for one in propose(table, seen).changes if one.kind == "deduplicate"]
    assert [(one.source, one.event, one.lift) for one in changes] == [
        ("b", 1, 12.0),
        ("a", 0, None),
    ]


def test_too_little_distinct_data_is_said_and_sources_are_repeated_evenly() -> None:
    seen = composition(a=(600, 60), b=(400, 40))
    proposal = propose(suspects(("b", "blamed")), seen)
    assert "too few distinct samples" in proposal.summary
    assert sum(proposal.weights.values()) == pytest.approx(1.0)
    assert set(proposal.over_budget or {}) == {"a", "b"}


def test_settings_that_make_no_sense_are_refused() -> None:
    seen = composition(a=(600, 600))
    with pytest.raises(ValueError, match=r"max_factor .* got 0.5"):
        propose(suspects(), seen, max_factor=0.5)
    with pytest.raises(ValueError, match=r"max_epochs .* got 0"):
        propose(suspects(), seen, max_epochs=0)


counts = st.tuples(st.integers(1, 500), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.booleans())


@given(st.lists(counts, min_size=1, max_size=6), st.floats(1.0, 10.0), st.floats(1.0, 8.0))
def test_every_proposal_sums_to_one_within_bounds_and_budget(
    sources: list[tuple[int, float, float, bool]], max_factor: float, max_epochs: float
) -> None:
    seen = composition(
        **{
            f"s{i}": (2 * n, 2 * round(n * distinct), 2 * round(n * repeats))
            for i, (n, distinct, repeats, _) in enumerate(sources)
        }
    )
    blamed = [f"s{i}" for i, one in enumerate(sources) if one[3]]
    proposal = propose(
        suspects(*((name, "blamed") for name in blamed)),
        seen,
        max_factor=max_factor,
        max_epochs=max_epochs,
    )
    mix, now = proposal.mix, proposal.weights_now
    assert sum(mix.values()) == pytest.approx(1.0)
    for name, weight in mix.items():
        assert now[name] / max_factor * (1 - 1e-9) <= weight <= now[name] * max_factor * (1 + 1e-9)
        if name in blamed:
            assert weight <= now[name] * (1 + 1e-9)
    if proposal.weights:
        over = {n for n, e in proposal.projected_epochs.items() if e > max_epochs * (1 + 1e-9)}
        assert over == set(proposal.over_budget or {})
        if over - {n for n in over if mix[n] <= now[n] / max_factor * (1 + 1e-9)}:
            # Not because it may not be lowered further: then no other has room to take more.
            n_samples = int(seen["n_samples"].sum())
            distinct = dict(seen.group_by("source").agg(pl.col("n_distinct").sum()).iter_rows())
            for name, weight in mix.items():
                top = now[name] if name in blamed else now[name] * max_factor
                room = min(top, max_epochs * max(1, distinct[name]) / n_samples)
                assert weight >= room * (1 - 1e-6)


# -- ramps and tokens --------------------------------------------------------------------------


def changed() -> Proposal:
    seen = composition(a=(300, 300), b=(400, 300), c=(300, 300))
    return propose(suspects(("b", "blamed")), seen)


@pytest.mark.parametrize("n_steps", [1, 7, 10, 105])
def test_ramp_covers_its_steps_without_gaps_and_ends_at_the_proposed_mix(n_steps: int) -> None:
    proposal = changed()
    stages = ramp(proposal, n_steps, first_step=50)
    *moving, last = stages
    covered = [s for one in moving for s in range(one.first_step, (one.last_step or 0) + 1)]
    assert covered == list(range(50, 50 + n_steps))
    assert (last.first_step, last.last_step) == (50 + n_steps, None)
    assert last.weights == proposal.weights
    for stage in stages:
        assert sum(stage.weights.values()) == pytest.approx(1.0)
    shares = [stage.weights["b"] for stage in stages]
    assert np.all(np.diff(shares) < 0)
    assert shares[0] < proposal.weights_now["b"]
    # A straight line, so its mean over the steps is half of the way.
    lengths = [(one.last_step or 0) - one.first_step + 1 for one in moving]
    middle = (proposal.weights_now["b"] + proposal.weights["b"]) / 2
    if n_steps % 10 == 0:
        assert np.average(shares[:-1], weights=lengths) == pytest.approx(middle)


def test_nothing_to_change_is_no_ramp() -> None:
    unchanged = propose(suspects(), composition(a=(300, 300), b=(400, 300)))
    (only,) = ramp(unchanged, 100, first_step=2)
    assert (only.first_step, only.last_step, only.weights) == (2, None, unchanged.weights_now)
    assert len(ramp(changed(), 0, first_step=2)) == 1


def test_weights_by_tokens_follow_the_length_of_the_samples() -> None:
    seen = composition(a=(300, 300), b=(300, 300)).with_columns(
        n_tokens=pl.when(pl.col("source") == "b").then(3).otherwise(1) * pl.col("n_tokens")
    )
    proposal = propose(suspects(), seen)
    assert token_weights(proposal, proposal.mix) == pytest.approx({"a": 0.25, "b": 0.75})
    unknown = propose(suspects(), seen.with_columns(n_tokens=pl.lit(0, pl.Int64)))
    assert token_weights(unknown, unknown.mix) == pytest.approx({"a": 0.5, "b": 0.5})
