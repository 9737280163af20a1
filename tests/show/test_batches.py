"""The table of the steps around an event says what the run consumed and did at each of them."""

from __future__ import annotations

import explanations
import pytest

from auditor import schema
from auditor.explain.batches import batches_around
from auditor.tables import polars_schema


def test_each_event_has_the_steps_around_it() -> None:
    made = explanations.explanation()
    table = batches_around(made, n_steps=30)
    assert table.schema == polars_schema(schema.BATCHES)
    for event in made.events.iter_rows(named=True):
        own = table.filter(table["event"] == event["event"])
        onset = event["onset_high"]
        assert own["step"].to_list() == list(range(onset - 30, min(onset + 30, 299) + 1))
        assert (own["lag"] == own["step"] - onset).all()


def test_a_step_is_told_as_its_batches_were() -> None:
    made = explanations.explanation()
    table = batches_around(made)
    composition = made.composition.filter(made.composition["step"] == 200)
    row = table.filter((table["step"] == 200) & (table["event"] == 0)).row(0, named=True)
    assert row["n_samples"] == composition["n_samples"].sum() == 24
    assert row["duplication"] == pytest.approx((7 + 1) / 24)
    assert row["repetition"] == pytest.approx(0.05)
    assert row["suspect"] == "novels" and row["feature"] == "duplication"
    assert row["exposure"] == pytest.approx(7 / 24)
    loss = made.signals.filter((made.signals["signal"] == "loss") & (made.signals["step"] == 200))[
        "value"
    ]
    assert row["loss"] == (loss[0] if len(loss) else None)


def test_the_strongest_steps_of_the_lookback_are_numbered() -> None:
    """Repeats begin in the middle of the run, at step 150."""
    made = explanations.explanation()
    table = batches_around(made)
    for number in (0, 1):
        own = table.filter((table["event"] == number) & table["place"].is_not_null())
        assert sorted(own["place"]) == [1, 2, 3, 4, 5]
        assert own["step"].min() >= 150


def test_without_events_or_exposures_there_is_nothing() -> None:
    assert batches_around(explanations.without_events()).is_empty()
    assert batches_around(explanations.explanation(**explanations.EMPTY)).is_empty()
