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
from auditor.explain.attribution import clusters_of, suspects_of, what_rose
from auditor.explain.contrast import Counts, benjamini_hochberg, highest, shift_p
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
    new: str | None = None,
    losses: dict[str, float] | None = None,
) -> pl.DataFrame:
    """Exposures of a run that draws four sources at random; faults begin at ``onset``.

    ``decoy`` is duplicated all along. ``share_shift`` doubles in share at the onset. ``new`` is not
    in the mix before it. ``losses``: by how much the loss of a source's samples moves at the onset;
    before, it falls from 4 to 2.5 nats, each source on its own level, and samples differ by .5.
    """
    rng = np.random.default_rng(seed)
    weights = np.array([0.4, 0.3, 0.2, 0.1])
    levels = dict(zip(SOURCES, (0.0, 0.5, -0.5, 0.2), strict=True))
    rows = []
    for step in range(steps):
        p = weights.copy()
        if share_shift is not None and step >= onset:
            p[SOURCES.index(share_shift)] *= 2.5
        if new is not None and step < onset:
            p[SOURCES.index(new)] = 0.0
        usual = 2.5 + 1.5 * np.exp(-step / 60)
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
                    "loss": None
                    if losses is None
                    else usual
                    + levels[source]
                    + 0.5 * rng.normal()
                    + (losses.get(source, 0.0) if step >= onset else 0.0),
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


def suspects(
    exposures: pl.DataFrame, *rows: dict[str, Any], jumped: tuple[int, ...] = ()
) -> pl.DataFrame:
    composition = composition_of_rows(exposures.lazy())
    found, _ = suspects_of(numbered(*rows), composition, of_steps(exposures), jumped)
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


def with_lengths(exposures: pl.DataFrame, seed: int, **grown: float) -> pl.DataFrame:
    """Lengths as web pages have them (lognormal); those of some sources grow from step 240 on."""
    rng = np.random.default_rng(seed)
    lengths = 100 * np.exp(rng.normal(size=exposures.height))
    for source, times in grown.items():
        late = (exposures["source"] == source) & (exposures["step"] >= 240)
        lengths[late.to_numpy()] *= times
    return exposures.with_columns(n_tokens=pl.Series(lengths).cast(pl.Int64) + 1)


@pytest.mark.parametrize("times", [6.0, 1 / 10])
def test_a_change_of_length_is_told_and_blames_nothing(times: float) -> None:
    found = suspects(with_lengths(stream(seed=0), 0, books=times), *INPUT_THEN_MODEL)
    assert blamed(found) == set()
    (row,) = found.filter(pl.col("verdict") == "coincident").unique("name").to_dicts()
    assert (row["name"], row["feature"]) == ("books", "length")
    assert row["low"] < row["exposure"] / row["control"] < row["high"]
    assert row["exposure"] / row["control"] == pytest.approx(times, rel=0.5)
    verb = "rose" if times > 1 else "fell"
    assert f"mean length of the samples from books {verb} from" in what_rose(row)


def test_a_planted_source_is_blamed_though_lengths_changed_far_more() -> None:
    exposures = with_lengths(stream(seed=0, burst="books"), 0, web=50.0, books=50.0)
    assert blamed(suspects(exposures, *INPUT_THEN_MODEL)) == {("books", "duplication")}


@pytest.mark.parametrize("seed", range(3))
def test_a_source_that_was_not_in_the_mix_is_blamed_where_the_input_went_poor(seed: int) -> None:
    exposures = stream(seed=seed, new="wiki", decoy="web")
    assert blamed(suspects(exposures, *INPUT_THEN_MODEL)) == {("wiki", "share")}
    assert blamed(suspects(exposures, event("ratio_fall", 235, 240))) == set()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("source", ["books", "wiki"])
def test_a_source_whose_loss_alone_rose_at_once_is_blamed_by_that_alone(
    seed: int, source: str
) -> None:
    """Noise: each batch is as diverse as before, so that no input event comes first."""
    exposures = stream(seed=seed, losses={source: 2.0}, decoy="web")
    spike = event("loss_spike", 239, 240, measured="step")
    found = suspects(exposures, spike)
    assert blamed(found) == {(source, "loss")}
    row = found.filter(pl.col("verdict") == "blamed").filter(pl.col("level") == "source")
    assert row["lag"][0] in (0, 1)  # a batch holds few samples of a small source
    assert row["exposure"][0] - row["control"][0] == pytest.approx(2.0, abs=0.2)
    implicated = implicated_exposures(numbered(spike), found, of_steps(exposures)).collect()
    assert set(implicated["source"]) == {source}
    assert (implicated["step"] >= 240).mean() > 0.8


@pytest.mark.parametrize("seed", range(5))
def test_losses_that_all_rise_blame_no_source(seed: int) -> None:
    """What harms the model raises the loss of everything, of some sources more than of others."""
    losses = dict(zip(SOURCES, (1.0, 1.5, 2.5, 1.0), strict=True))
    exposures = stream(seed=seed, losses=losses, decoy="web")
    spike = event("loss_spike", 239, 240, measured="step")
    assert blamed(suspects(exposures, spike, event("ratio_fall", 240, 245))) == set()


def test_losses_that_drift_or_rise_slowly_blame_no_source() -> None:
    """Neither is at once: a source that gets harder over a hundred steps, a model that diverges."""
    spike = event("loss_spike", 249, 250, measured="step")
    for since, slopes in (
        (180, {"books": 0.02}),
        (240, {"books": 0.1, "code": 0.03, "web": 0.03, "wiki": 0.03}),
    ):
        rise = pl.lit(0.0)
        for source, slope in slopes.items():
            own = slope * (pl.col("step") - since).clip(lower_bound=0)
            rise = rise + pl.when(pl.col("source") == source).then(own).otherwise(0.0)
        for seed in range(5):
            ramp = stream(seed=seed, losses={}).with_columns(loss=pl.col("loss") + rise)
            assert blamed(suspects(ramp, spike)) == set()


@pytest.mark.parametrize("seed", range(5))
def test_a_new_source_is_not_blamed_for_a_loss_that_it_never_had(seed: int) -> None:
    exposures = stream(seed=seed, new="wiki", losses={})
    assert blamed(suspects(exposures, event("grad_spike", 249, 250, measured="step"))) == set()


@pytest.mark.parametrize("every", [2, 4, 5])
def test_losses_of_some_steps_only_are_enough(every: int) -> None:
    exposures = stream(seed=1, losses={"books": 2.0}).with_columns(
        loss=pl.when(pl.col("step") % every == 0).then("loss")
    )
    spike = event("loss_spike", 239, 240, measured="step")
    assert blamed(suspects(exposures, spike)) == {("books", "loss")}


def test_losses_that_begin_shortly_before_an_event_are_not_compared() -> None:
    for begin in (200, 225, 238, 240):
        exposures = stream(seed=1, losses={"books": 2.0}).with_columns(
            loss=pl.when(pl.col("step") >= begin).then("loss")
        )
        found = suspects(exposures, event("loss_spike", 239, 240, measured="step"))
        assert "loss" not in set(found["feature"])


def test_what_changed_after_the_harm_is_not_blamed_for_its_end() -> None:
    exposures = stream(seed=0, burst="books", onset=240, steps=400)
    late = (pl.col("source") == "code") & (pl.col("step") >= 330)
    exposures = exposures.with_columns(
        duplication=pl.when(late)
        .then(1.0)
        .when((pl.col("source") == "books") & (pl.col("step") > 270))
        .then(0.0)
        .otherwise("duplication")
    )
    found = suspects(exposures, *INPUT_THEN_MODEL, event("probe_loss_rise", 335, 340))
    assert blamed(found) == {("books", "duplication")}


def test_samples_that_became_easy_are_blamed_only_where_the_input_went_poor() -> None:
    exposures = stream(seed=0, losses={"books": -1.5}, decoy="web")
    assert blamed(suspects(exposures, *INPUT_THEN_MODEL)) == {("books", "loss")}
    # The model was harmed at the same sample as they changed.
    assert blamed(suspects(exposures, event("probe_loss_rise", 235, 240))) == set()


def test_what_the_past_has_seen_as_much_of_does_not_stand_out() -> None:
    """Duplicates of a source that come and go, its passages read in turn."""
    exposures = stream(seed=0).with_columns(
        duplication=pl.when((pl.col("source") == "web") & (pl.col("step") // 30 % 3 == 2))
        .then(1.0)
        .otherwise(0.0)
    )
    found = suspects(exposures, event("input_fall", 247, 252), event("ratio_fall", 275, 280))
    web = found.filter((pl.col("name") == "web") & (pl.col("feature") == "duplication"))
    assert set(web["verdict"]) == {"ranked"}


def test_controls_hold_no_other_event() -> None:
    """A second burst is as much of a contrast as the first was, which is over."""
    exposures = stream(seed=0, burst="books", onset=150, steps=400)
    exposures = exposures.with_columns(
        duplication=pl.when(pl.col("step").is_between(190, 299)).then(0.0).otherwise("duplication")
    )
    first = event("input_fall", 145, 150, trough_step=185, recovery_step=195)
    second = event("input_fall", 295, 300, episode=1), event("ratio_fall", 315, 320, episode=1)
    found = suspects(exposures, first, *second)
    late = found.filter((pl.col("event") == 1) & (pl.col("verdict") == "blamed"))
    assert set(late.filter(pl.col("level") == "source").select("name", "control").rows()) == {
        ("books", 0.0)
    }


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


def test_duplicates_after_which_the_model_was_healthy_for_a_while_came_first() -> None:
    """No input event tells so, but that the model was still well after they began."""
    exposures = stream(seed=0, burst="books", onset=228)
    harmed = event("probe_loss_rise", 235, 240)
    assert blamed(suspects(exposures, harmed)) == {("books", "duplication")}
    # The learning rate rose at the onset: two causes, and nothing tells between them.
    assert blamed(suspects(exposures, harmed, jumped=(0,))) == set()
    spike = event("loss_spike", 235, 240, measured="step")  # no harm to the model was seen
    assert blamed(suspects(exposures, spike)) == set()


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
    """Through the whole test of an event: 60 streams with a decoy, none blamed or coincident.

    Lengths have long tails: in one of a hundred such streams a mean of some stands out.
    """
    long = 0
    for seed in range(60):
        exposures = with_lengths(stream(seed=1000 + seed, steps=280, decoy="web"), seed)
        found = suspects(exposures, *INPUT_THEN_MODEL)
        of_length = found.filter(pl.col("feature") == "length")
        long += "coincident" in set(of_length["verdict"])
        assert set(of_length["verdict"]) <= {"ranked", "coincident"}, seed
        others = found.filter(pl.col("feature") != "length")
        assert set(others["verdict"]) == {"ranked"}, seed
    assert long <= 2


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
        stream = Counts(counts, np.full(n_steps, float(BATCH)))
        values.append(shift_p(stream, (n_steps - 40, n_steps), sign))
    for level in (0.01, 0.05, 0.10):
        share = np.mean(np.asarray(values) <= level)
        assert share <= stats.binom.ppf(0.999, n, level) / n, level


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=40), st.data())
def test_highest_of_neighbours_is_that_of_each_window(values: list[float], data: Any) -> None:
    length = data.draw(st.integers(1, len(values)))
    windows = [values[i : i + length] for i in range(len(values) - length + 1)]
    assert highest(np.array(values), length).tolist() == [max(one) for one in windows]


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
