"""The join finds what was planted, clears what was not, and its p values keep their word."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from compositions import composition_of_rows
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from auditor import schema
from auditor.explain.attribution import (
    _shift_p,
    benjamini_hochberg,
    clusters_of,
    suspects_of,
)
from auditor.explain.implicated import implicated_exposures
from auditor.tables import polars_schema

BATCH = 32
SOURCES = ("books", "code", "web", "wiki")


def stream(
    *,
    seed: int,
    steps: int = 300,
    onset: int = 240,
    burst: str | None = None,
    feature: str = "duplication",
    decoy: str | None = None,
    share_shift: str | None = None,
) -> pl.DataFrame:
    """Exposures of a run that draws four sources at random; faults begin at ``onset``.

    ``decoy`` is duplicated all along. ``share_shift`` doubles in share at the onset.
    """
    rng = np.random.default_rng(seed)
    weights = np.array([0.4, 0.3, 0.2, 0.1])
    rows = []
    for step in range(steps):
        p = weights.copy()
        if share_shift is not None and step >= onset:
            p[SOURCES.index(share_shift)] *= 2.5
        drawn = rng.choice(4, size=BATCH, p=p / p.sum())
        for position, which in enumerate(drawn):
            source = SOURCES[which]
            bad = source == burst and step >= onset
            duplicated = source == decoy or (bad and feature == "duplication")
            key = len(rows)
            rows.append(
                {
                    "attempt": 0,
                    "rank": 0,
                    "step": step,
                    "batch": step,
                    "position": position,
                    "part": 0,
                    "key": key,
                    "state": "trained",
                    "dup_batch": 0.0,
                    "dup_window": 1.0 if duplicated and rng.random() < 0.9 else 0.0,
                    "dup_run": 0,
                    "dup_of": None,
                    "repetition": 0.8 if bad and feature == "repetition" else 0.0,
                    "duplication": None,
                    "loss": None,
                    "sample_id": f"{source}-{key}",
                    "source": source,
                    "shard": f"{source}.jsonl",
                    "row": key,
                    "n_tokens": 100,
                }
            )
    frame = pl.DataFrame(rows, schema=polars_schema(schema.EXPOSURES_JOINED))
    return frame.with_columns(duplication=pl.max_horizontal("dup_batch", "dup_window"))


def event(kind: str, low: int, high: int, **more: Any) -> dict[str, Any]:
    measured = "live" if kind == "input_fall" else "probe"
    row = dict.fromkeys(schema.EVENTS)
    return {
        **row,
        "event": 0,
        "episode": 0,
        "kind": kind,
        "signal": "x",
        "measured": measured,
        "onset_low": low,
        "onset_high": high,
        "trough_step": high + 20,
        **more,
    }


def suspects(exposures: pl.DataFrame, *rows: dict[str, Any]) -> pl.DataFrame:
    composition = composition_of_rows(exposures.lazy())
    found, _ = suspects_of(numbered(*rows), composition, of_steps(exposures))
    return found


def of_steps(exposures: pl.DataFrame) -> Any:
    return lambda low, high: exposures.lazy().filter(pl.col("step").is_between(low, high))


def numbered(*rows: dict[str, Any]) -> pl.DataFrame:
    events = [{**row, "event": number} for number, row in enumerate(rows)]
    return pl.DataFrame(events, schema=polars_schema(schema.EVENTS), orient="row")


def blamed(found: pl.DataFrame) -> set[tuple[str, str]]:
    rows = found.filter((pl.col("level") == "source") & (pl.col("verdict") == "blamed"))
    return set(rows.select("name", "feature").iter_rows())


INPUT_THEN_MODEL = (event("input_fall", 235, 240), event("ratio_fall", 265, 270))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("feature", ["duplication", "repetition"])
@pytest.mark.parametrize("source", ["books", "wiki"])
def test_planted_source_is_blamed_alone_beside_a_decoy(
    seed: int, feature: str, source: str
) -> None:
    exposures = stream(seed=seed, burst=source, feature=feature, decoy="web")
    assert blamed(suspects(exposures, *INPUT_THEN_MODEL)) == {(source, feature)}


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_blamed_where_nothing_changed(seed: int) -> None:
    assert blamed(suspects(stream(seed=seed, decoy="web"), *INPUT_THEN_MODEL)) == set()


def test_a_change_of_share_alone_is_coincident_and_not_blamed() -> None:
    found = suspects(stream(seed=0, share_shift="wiki"), *INPUT_THEN_MODEL)
    assert blamed(found) == set()
    coincident = found.filter(pl.col("verdict") == "coincident")
    assert set(coincident.select("name", "feature").iter_rows()) == {("wiki", "share")}


@pytest.mark.parametrize(
    "events",
    [
        (event("ratio_fall", 235, 240),),
        (event("ratio_fall", 225, 230), event("input_fall", 235, 240)),
        (event("probe_loss_rise", 235, 240), event("input_fall", 235, 240)),
    ],
    ids=["no input event", "model first", "simultaneous"],
)
def test_duplicates_that_did_not_come_first_are_not_blamed(events: Any) -> None:
    """A burst of innocent duplicates that coincides with, say, a learning rate spike."""
    found = suspects(stream(seed=0, burst="books"), *events)
    assert blamed(found) == set()
    assert "coincident" in set(found["verdict"])


def test_duplicates_that_ended_long_before_are_not_in_the_lookback() -> None:
    exposures = stream(seed=0, burst="books", onset=100)
    exposures = exposures.with_columns(
        pl.when(pl.col("step") > 130).then(0.0).otherwise("duplication").alias("duplication")
    )
    assert blamed(suspects(exposures, *INPUT_THEN_MODEL)) == set()


def test_neither_lookback_nor_episode_is_among_the_controls() -> None:
    """The fault began well before the event: its own first steps must not dilute the contrast."""
    found = suspects(
        stream(seed=0, burst="books", onset=210),
        event("input_fall", 235, 240),
        event("ratio_fall", 265, 270),
    )
    for number in (0, 1):
        row = found.filter(
            (pl.col("event") == number)
            & (pl.col("name") == "books")
            & (pl.col("feature") == "duplication")
        ).row(0, named=True)
        assert row["control"] <= 0.06  # of 195 steps at most the last are the fault's
    late = stream(seed=0, burst="books", onset=200)
    found = suspects(late, event("input_fall", 239, 240))
    assert found.filter(pl.col("verdict") == "blamed")["control"].to_list() == [0.0]


def test_verdicts_of_streams_without_a_fault_are_calibrated() -> None:
    """Through the whole test of an event: 60 streams with a decoy, none blamed or coincident."""
    for seed in range(60):
        found = suspects(stream(seed=1000 + seed, steps=280, decoy="web"), *INPUT_THEN_MODEL)
        assert set(found["verdict"]) == {"ranked"}, seed


def test_late_event_of_a_long_episode_is_explained_too() -> None:
    """More steps lie between its lookback and the last healthy step than controls are taken of."""
    exposures = stream(seed=0, burst="books", onset=240, steps=1420)
    found = suspects(exposures, event("input_fall", 235, 240), event("ratio_fall", 1395, 1400))
    late = found.filter(pl.col("event") == 1)
    assert ("books", "blamed") in set(late.select("name", "verdict").iter_rows())
    (shard,) = late.filter(pl.col("level") == "shard").iter_rows(named=True)
    assert shard["name"] == "books.jsonl"
    assert shard["control"] == 0.0


def test_short_history_gives_no_verdict() -> None:
    exposures = stream(seed=0, burst="books", onset=30, steps=60)
    assert suspects(exposures, event("input_fall", 25, 30)).is_empty()


def test_effect_is_stated_with_an_interval_that_holds_it() -> None:
    found = suspects(stream(seed=3, burst="wiki", decoy="web"), *INPUT_THEN_MODEL)
    row = found.filter((pl.col("name") == "wiki") & (pl.col("feature") == "duplication")).row(
        0, named=True
    )
    assert row["exposure"] == pytest.approx(0.09, abs=0.06)
    assert row["control"] == 0.0
    assert row["low"] < row["lift"] < row["high"]
    assert row["low"] > 1.0
    assert 0 <= row["lag"] <= 10
    innocent = found.filter((pl.col("name") == "code") & (pl.col("feature") == "share")).row(
        0, named=True
    )
    assert innocent["low"] < 1.3 and innocent["high"] > 0.7


def test_clusters_and_shards_are_named_inside_the_blamed_source_only() -> None:
    exposures = stream(seed=1, burst="books", decoy="web")
    bad = (pl.col("source") == "books") & (pl.col("duplication") > 0.8)
    first = exposures.filter(bad)["key"][0]
    exposures = exposures.with_columns(
        pl.when(bad & (pl.col("key") != first)).then(pl.lit(first)).alias("dup_of")
    )
    found = suspects(exposures, *INPUT_THEN_MODEL)
    lower = found.filter(pl.col("level") != "source")
    assert set(lower.filter(pl.col("level") == "shard")["name"]) == {"books.jsonl"}
    assert set(lower.filter(pl.col("level") == "cluster")["name"]) == {f"books-{first}"}
    assert lower["p"].is_null().all()  # effect size only


@pytest.mark.parametrize("feature", ["duplication", "repetition"])
def test_implicated_are_the_bad_exposures_of_the_blamed_source_around_the_event(
    feature: str,
) -> None:
    exposures = stream(seed=0, burst="books", feature=feature, decoy="web")
    events = numbered(*INPUT_THEN_MODEL)
    found = implicated_exposures(
        events, suspects(exposures, *INPUT_THEN_MODEL), of_steps(exposures)
    )
    planted = exposures.filter(
        (pl.col("source") == "books")
        & (pl.col(feature) > 0.5)
        & pl.col("step").is_between(240, 260)  # its trough
    )
    of_first = found.collect().filter(pl.col("event") == 0)
    assert set(of_first["key"]) == set(planted["key"])
    innocent = stream(seed=0, decoy="web")
    nothing = implicated_exposures(
        events, suspects(innocent, *INPUT_THEN_MODEL), of_steps(innocent)
    ).collect()
    assert nothing.is_empty()
    assert nothing.schema == of_first.schema


def test_p_values_of_a_predeclared_test_are_calibrated() -> None:
    """1,000 streams with autocorrelation and no fault, one random event and test each.

    The share of p at or below each level stays under the binomial upper bound at 1 in 1,000.
    """
    rng = np.random.default_rng(0)
    n, values = 1000, []
    for _ in range(n):
        n_steps = int(rng.integers(150, 400))
        slow = np.cumsum(rng.normal(size=n_steps + 60))
        slow = (slow[60:] - slow[:-60]) / np.sqrt(60)  # neighbours resemble each other
        rate = 1 / (1 + np.exp(2 - slow))
        counts = rng.binomial(BATCH, rate).astype(float)
        sign = float(rng.choice([-1.0, 1.0]))
        values.append(_shift_p(counts, np.full(n_steps, float(BATCH)), 40, 10, sign))
    for level in (0.01, 0.05, 0.10):
        share = np.mean(np.asarray(values) <= level)
        assert share <= stats.binom.ppf(0.999, n, level) / n, level


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_benjamini_hochberg_equals_scipys(p: list[float]) -> None:
    np.testing.assert_allclose(benjamini_hochberg(p), stats.false_discovery_control(p), atol=1e-12)


@given(
    st.lists(st.tuples(st.integers(0, 12), st.none() | st.integers(0, 12)), min_size=1, max_size=40)
)
def test_clusters_are_the_connected_components(links: list[tuple[int, int | None]]) -> None:
    rows = pl.DataFrame(
        {
            "key": [key for key, _ in links],
            "dup_of": [other for _, other in links],
            "sample_id": [f"s{key}" for key, _ in links],
        },
        schema={"key": pl.Int64, "dup_of": pl.Int64, "sample_id": pl.String},
    )
    found = dict(zip(rows["key"], clusters_of(rows), strict=True))
    known = {key for key, _ in links}
    reach = {key: {key} for key in known}  # by brute force
    for _ in known:
        for key, other in links:
            if other in known:
                union = reach[key] | reach[other]
                for member in union:
                    reach[member] = union
    for a in known:
        for b in known:
            assert (found[a] == found[b]) == (b in reach[a])
