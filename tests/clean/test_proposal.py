"""Proposals follow the verdict, and keep to the repetition budget."""

from __future__ import annotations

import polars as pl
import pytest

from auditor import schema
from auditor.clean.proposal import NO_CHANGE, propose
from auditor.tables import polars_schema


def suspects(*rows: tuple[str, str]) -> pl.DataFrame:
    table = [{"level": "source", "name": name, "verdict": verdict} for name, verdict in rows]
    return pl.DataFrame(table, schema=polars_schema(schema.SUSPECTS))


def exposures() -> pl.LazyFrame:
    """600 samples of a and 400 of b, of which 10 are distinct."""
    rows = [
        {
            "source": source,
            "state": "trained",
            "dup_run": 0 if i < n_distinct else 5,
            "duplication": 0.0 if i < n_distinct else 1.0,
        }
        for source, n, n_distinct in (("a", 600, 600), ("b", 400, 10))
        for i in range(n)
    ]
    return pl.DataFrame(rows, schema_overrides={"dup_run": pl.Int32}).lazy()


@pytest.mark.parametrize("verdict", ["ranked", "coincident"])
def test_nothing_is_proposed_where_nothing_is_blamed(verdict: str) -> None:
    proposal = propose(suspects(("b", verdict)), exposures())
    assert proposal.summary == NO_CHANGE
    assert not proposal.deduplicate
    assert proposal.weights == {}


def test_blamed_source_is_named_and_no_source_is_seen_more_than_four_times() -> None:
    proposal = propose(suspects(("b", "blamed"), ("a", "ranked")), exposures())
    assert "b" in proposal.summary
    assert proposal.deduplicate
    assert proposal.weights_now == pytest.approx({"a": 0.6, "b": 0.4})
    assert proposal.epochs_now == pytest.approx({"a": 1.0, "b": 40.0})
    assert sum(proposal.weights.values()) == pytest.approx(1.0)
    assert proposal.weights["b"] == pytest.approx(4 * 10 / 1000)
    assert max(proposal.projected_epochs.values()) <= 4.0 + 1e-9
