"""The join: for each event, what was consumed before it, against what this run consumed earlier.

A source is compared with itself (:mod:`auditor.explain.contrast`): its share of the batch; what of
it was near-duplicate, similar to something recent, or repetitive, as shares of the batch; the
length of its samples, which is told and blames nothing; and the loss of its samples against that of
the others, where the loop recorded it. All in the lookback before the event, against windows of the
same length before the episode began that hold no other event.

Association, not causation: a replay with and without the samples is the test of cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from auditor import schema
from auditor.explain.composition import latest
from auditor.explain.contrast import (
    EXCESS,
    STRETCH_STEPS,
    Counts,
    Windows,
    benjamini_hochberg,
    contrast,
    has_past,
    lift_of,
    moved_alone,
    share_lift,
    smallest_p,
)
from auditor.schema import DUPLICATE_SIMILARITY, SIMILAR, UNKNOWN_SOURCE
from auditor.tables import polars_schema

LOOKBACK_STEPS: Final = 40
MIN_CONTROL_WINDOWS: Final = 20

LOSS_HISTORY_STEPS: Final = 100
"""Losses are compared with this many steps before: they fall for as long as the run learns."""

LEAST_LENGTH_DEVIATION: Final = 0.02
"""Of the mean length of a source's samples."""

BLAME_DEVIATIONS: Final = 6.0
"""|z| from which a source is blamed. On small trainings 6 left no learning-rate spike and no clean
event with a culprit; lower thresholds did."""

DOMINANCE: Final = 2.0
"""Nothing is blamed beside what stands out so many times as far."""

INPUT_SIDE: Final = ("input_fall",)
"""Kinds of events that say the input is poor, before they say anything about the model."""

MODEL_SIDE: Final = ("ratio_fall", "grade_drop", "probe_loss_rise", "entropy_fall")

MIN_EXPOSURES: Final = 2
"""A cluster, shard or sample seen once before an event is no evidence."""

CLUSTER_STEPS: Final = 1000
"""Clusters, shards and samples are compared with this many steps of the history."""

READ_AHEAD_STEPS: Final = 400
"""Steps of an episode that are read together with the history before it."""

N_NAMED: Final = 5
"""Clusters, shards and samples named per source."""

Exposures = Callable[[int, int], pl.LazyFrame]
"""Exposures (``schema.EXPOSURES_JOINED``) of the steps from one to another, both included."""


def suspects_of(
    events: pl.DataFrame,
    composition: pl.DataFrame,
    exposures: Exposures,
    jumped: Collection[int] = (),
) -> tuple[pl.DataFrame, dict[int, float]]:
    """What stands out before each event (``schema.SUSPECTS``), and the least p each could give.

    Sources are tested first; clusters, shards and samples are named, by effect size only, inside
    sources that are blamed. ``jumped`` are the episodes at whose onset the learning rate rose:
    another cause, beside which the order of events alone blames nothing.
    """
    rows: list[dict[str, Any]] = []
    smallest: dict[int, float] = {}
    if composition.is_empty():
        return pl.DataFrame(schema=polars_schema(schema.SUSPECTS)), smallest
    steps, features = features_of(composition)
    trained = _Trained(exposures)
    for event in events.iter_rows(named=True):
        windows = windows_of(event, events, steps)
        if windows is None:
            continue
        episode = events.filter(pl.col("episode") == event["episode"])
        found = _compared(features, windows)
        smallest[event["event"]] = smallest_p(windows)
        begin = int(np.searchsorted(steps, steps[windows.last_control] - CLUSTER_STEPS))
        span = int(steps[begin]), int(steps[windows.lookback[1] - 1])
        before = _first_by(episode, is_steady=event["episode"] not in jumped)
        for one in found:
            change = int(steps[one.pop("change")])
            one |= {"event": event["event"], "level": "source"}
            one["lag"] = event["onset_high"] - change
            one["is_first"] = before is not None and change <= before
        _judge(found)
        for one in found:
            place = one.pop("place")
            rows.append({name: one[name] for name in schema.SUSPECTS})
            if one["verdict"] == "blamed":
                totals = features[one["name"], "share"].total
                control = begin, windows.last_control + 1
                rows += _named(one, trained.of(*span), steps, totals, place, control)
    frame = pl.DataFrame(rows, schema=polars_schema(schema.SUSPECTS), orient="row")
    order = {"blamed": 0, "coincident": 1, "ranked": 2}
    levels = {"source": 0, "cluster": 1, "shard": 2, "sample": 3}
    return (
        frame.sort(
            pl.col("event"),
            pl.col("level").replace_strict(levels, return_dtype=pl.Int32),
            pl.col("verdict").replace_strict(order, return_dtype=pl.Int32),
            # Of the rest what grew, most first: where one source grows the others shrink.
            -pl.when(pl.col("verdict") == "blamed").then(pl.col("z").abs()).otherwise("z"),
            -pl.col("exposure"),
            pl.col("name"),
            maintain_order=True,
        ),
        smallest,
    )


def features_of(
    composition: pl.DataFrame,
) -> tuple[NDArray[np.int64], dict[tuple[str, str], Counts]]:
    """Steps i64 [S], and what is compared by (source, feature).

    Of a step that several attempts trained, the latest counts. Where no sample of a step was
    scored, its duplicates are unknown and taken as the source's mean.
    """
    rows = latest(composition)
    steps, places = np.unique(rows["step"].to_numpy(), return_inverse=True)
    names = rows["source"].unique().sort().to_list()
    codes = rows["source"].rank("dense").cast(pl.Int64).to_numpy() - 1

    def sums(values: NDArray[Any]) -> NDArray[np.float64]:
        """By source and step, f64 [sources, S]."""
        size = len(names), len(steps)
        of_all = np.bincount(codes * size[1] + places, values, size[0] * size[1])
        return of_all.astype(np.float64).reshape(size)

    n_samples, scored, n_losses = (
        rows[name].to_numpy() for name in ("n_samples", "n_scored", "n_losses")
    )
    n, n_scored, n_with_loss = sums(n_samples), sums(scored), sums(n_losses)
    contents = {
        "duplication": sums(rows["n_duplicate"].to_numpy()),
        "similarity": sums(rows["n_similar"].to_numpy()),
        "repetition": sums(rows["repetition"].fill_null(0.0).to_numpy() * scored),
    }
    losses = sums(rows["loss"].fill_null(0.0).to_numpy() * n_losses)
    tokens = sums(rows["n_tokens"].to_numpy())
    totals = n.sum(axis=0)
    features: dict[tuple[str, str], Counts] = {}
    for i, source in enumerate(names):
        features[source, "share"] = Counts(n[i], totals)
        if n_scored[i].any():
            for feature, values in contents.items():
                usual = values[i].sum() / n_scored[i].sum()
                features[source, feature] = Counts(values[i] + usual * (n[i] - n_scored[i]), totals)
        lengths = tokens[i].sum() / n[i].sum()
        if lengths > 0:
            least = LEAST_LENGTH_DEVIATION * lengths
            features[source, "length"] = Counts(tokens[i], n[i], is_share=False, least=least)
        if n_with_loss[i].any():
            features[source, "loss"] = Counts(losses[i], n_with_loss[i], is_share=False)
    return steps, features


def windows_of(
    event: Mapping[str, Any], events: pl.DataFrame, steps: NDArray[np.int64]
) -> Windows | None:
    """The lookback of an event and the steps its controls lie in; None without enough of them.

    The lookback ends where the event shows itself. For a signal of the training batch the one at
    the onset is measured on itself, and more may have confirmed it: it reaches one stretch further.
    """
    end = int(np.searchsorted(steps, event["onset_high"], side="right"))
    if event["measured"] != "probe":
        end = min(end + STRETCH_STEPS, len(steps))
    start = int(np.searchsorted(steps, event["onset_low"] - LOOKBACK_STEPS, side="right"))
    # Neither the lookback nor anything of the episode is among its own controls.
    episode = events.filter(pl.col("episode") == event["episode"])
    low = int(episode["onset_low"].min())  # type: ignore[arg-type]
    n_before = min(start, int(np.searchsorted(steps, low, side="right")))
    is_control = np.arange(start) < n_before
    windows = Windows((start, end), is_control.copy())
    if end - start < STRETCH_STEPS or len(windows.controls) < MIN_CONTROL_WINDOWS:
        return None
    for other in events.filter(pl.col("episode") < event["episode"]).iter_rows(named=True):
        over = other["recovery_step"] or other["trough_step"]
        is_control[(steps[:start] > other["onset_low"]) & (steps[:start] <= over)] = False
    apart = Windows((start, end), is_control)
    # Of a run that had events all along, the past is all there is to compare with.
    return apart if len(apart.controls) >= MIN_CONTROL_WINDOWS else windows


def _compared(features: Mapping[tuple[str, str], Counts], windows: Windows) -> list[dict[str, Any]]:
    """What :func:`contrast` finds for each source and feature, and whether the loss moved alone."""
    rows: list[dict[str, Any]] = []
    losses = [one for (_, feature), one in features.items() if feature == "loss"]
    recent = windows.last(LOSS_HISTORY_STEPS)
    has_losses = len(losses) > 1 and len(recent.controls) >= MIN_CONTROL_WINDOWS
    of_all = Counts.summed(losses) if has_losses else None
    for (source, feature), counts in features.items():
        row: dict[str, Any] = {"name": source, "feature": feature}
        if feature != "loss":
            rows.append(row | contrast(counts, windows))
            continue
        if of_all is None:
            continue
        others = of_all.without(counts)
        if not has_past(counts, others, recent):
            continue
        difference = counts.beside(others)
        row |= contrast(difference, recent)
        stretch = slice(row["place"], row["place"] + STRETCH_STEPS)
        moved = difference.mean(stretch) - difference.mean(recent.usual)
        row |= lift_of(counts, stretch, recent.last(LOOKBACK_STEPS).usual)
        # Where the others moved and this one stayed, nothing happened to this one.
        way = row["exposure"] - row["control"]
        row["z"] *= float(np.clip(way / (moved or 1.0), 0.0, 1.0))
        row["is_alone"] = moved_alone(counts, others, row["change"], way)
        rows.append(row)
    for row, q in zip(rows, benjamini_hochberg([row["p"] for row in rows]), strict=True):
        row["q"] = q
    return rows


def blamed_sources(suspects: pl.DataFrame) -> pl.DataFrame:
    """The sources that are blamed: earliest event first, and there the most evidence first."""
    return suspects.filter((pl.col("level") == "source") & (pl.col("verdict") == "blamed")).sort(
        "event", pl.col("z").abs(), descending=[False, True], maintain_order=True
    )


def standing_out_before(suspects: pl.DataFrame) -> pl.DataFrame:
    """Sources not blamed whose content stands out before an event: earliest event first."""
    return suspects.filter(
        (pl.col("level") == "source")
        & (pl.col("verdict") == "coincident")
        & (pl.col("feature") != "share")
        & ((pl.col("z") > 0) | pl.col("feature").is_in(("length", "loss")))
        & (pl.col("lag") >= 0)
    )


def input_came_first(episode: pl.DataFrame) -> bool:
    """Whether the episode's input went poor before its model did: the order gate.

    A fault of the data shows in the input first and in the model later; a fault of the optimizer
    shows in the model. Both at the same sample cannot be told apart.
    """
    first_input = episode.filter(pl.col("kind").is_in(INPUT_SIDE))["onset_high"].min()
    first_model = episode.filter(pl.col("kind").is_in(MODEL_SIDE))["onset_high"].min()
    if first_input is None:
        return False
    return bool(first_model is None or first_input < first_model)  # type: ignore[operator]


def _first_by(episode: pl.DataFrame, *, is_steady: bool) -> float | None:
    """The step by which a change has to be there to have come before the harm; None: no telling.

    Where the input went poor first, by the first bad sample of the model, if it followed at all.
    Else by the last sample at which the model was healthy, where the learning rate was steady:
    what changed by then was there before the harm, whether the input's diversity shows it or not.
    """
    harm = episode.filter(pl.col("kind").is_in(MODEL_SIDE))
    if input_came_first(episode):
        return math.inf if harm.is_empty() else float(harm["onset_high"].min())  # type: ignore[arg-type]
    if harm.is_empty() or not is_steady:
        return None
    return float(harm["onset_low"].min())  # type: ignore[arg-type]


def _judge(found: Sequence[dict[str, Any]]) -> None:
    """Put a verdict to each row of an event; ``is_first``: it came before what it may be to blame
    for."""
    for one in found:
        one["verdict"] = _verdict(one)
    standing_out = (one for one in found if one["verdict"] != "ranked")
    most = max((one["z"] for one in standing_out if one["feature"] != "length"), default=0.0)
    for one in found:
        # Beside what stands out far more, the rest has no claim of its own.
        if one["verdict"] == "blamed" and abs(one["z"]) < most / DOMINANCE:
            one["verdict"] = "coincident"


def _verdict(row: Mapping[str, Any]) -> str:
    if abs(row["z"]) < BLAME_DEVIATIONS or row["excess"] < EXCESS:
        return "ranked"
    if row["lag"] < 0 or row["feature"] == "length":
        return "coincident"
    if row["feature"] == "loss":
        # A loss that rises tells by itself that the input went bad; one that falls, that it is
        # easy to predict, which may be all well.
        is_cause = row["is_alone"] and (row["z"] > 0 or row["is_first"])
    elif row["feature"] == "share":
        is_cause = row["z"] > 0 and row["control"] == 0.0 and row["is_first"]
    else:
        is_cause = row["z"] > 0 and row["is_first"]
    return "blamed" if is_cause else "coincident"


def marked(row: Mapping[str, Any]) -> pl.Expr:
    """Which exposures of a source are meant where a row of ``schema.SUSPECTS`` blames it."""
    if row["feature"] == "share":
        return pl.lit(True)
    if row["feature"] == "loss":
        middle = 0.5 * (row["control"] + row["exposure"])
        return pl.col("loss") > middle if row["z"] > 0 else pl.col("loss") < middle
    return {
        "duplication": pl.col("duplication") >= DUPLICATE_SIMILARITY,
        "similarity": pl.col("duplication") >= SIMILAR,
        "repetition": pl.col("repetition") > 0.0,
    }[row["feature"]]


def what_rose(row: Mapping[str, Any]) -> str:
    """What a row of ``schema.SUSPECTS`` that blames a source says, as a clause."""
    name, feature = row["name"] or '""', row["feature"]
    if feature == "loss":
        verb = "rose" if row["z"] > 0 else "fell"
        return (
            f"the loss of the samples from {name} {verb} from {row['control']:.2f} to "
            f"{row['exposure']:.2f} nats at once, that of the others did not"
        )
    if feature == "length":
        verb = "rose" if row["z"] > 0 else "fell"
        return (
            f"the mean length of the samples from {name} {verb} from {row['control']:,.0f} to "
            f"{row['exposure']:,.0f} (tokens, or characters of text)"
        )
    if feature == "share":
        return f"{name}, which had not been in the mix, rose to {row['exposure']:.0%} of it"
    what = {
        "duplication": "near-duplicates",
        "similarity": "samples that share much with recent ones",
        "repetition": "repetition inside samples",
    }[feature]
    return (
        f"{what} from {name} rose from {row['control']:.1%} to {row['exposure']:.0%} of what was "
        "consumed"
    )


# -- inside a blamed source ------------------------------------------------------------------


def _named(
    row: Mapping[str, Any],
    trained: pl.DataFrame,
    steps: NDArray[np.int64],
    totals: NDArray[np.float64],
    place: int,
    controls: tuple[int, int],
) -> list[dict[str, Any]]:
    """Clusters, shards and samples of a blamed source in its strongest stretch, by exposure.

    ``place`` is where the stretch begins among the steps; controls, half-open places as well, are
    the last ``CLUSTER_STEPS`` of the history before the episode, which may lie long before a late
    event's stretch.
    """
    in_stretch = slice(place, place + STRETCH_STEPS)
    in_control = slice(*controls)
    window, control = ((int(steps[s][0]), int(steps[s][-1])) for s in (in_stretch, in_control))
    own = trained.filter(
        (pl.col("source") == row["name"]) & pl.col("step").is_between(control[0], window[1])
    )
    own = own.with_columns(cluster=clusters_of(own))
    implicated = marked(row)
    levels = [("cluster", "cluster"), ("shard", "shard"), ("sample", "sample_id")]
    named = []
    for level, column in levels:
        counted = (
            own.filter(implicated & pl.col(column).is_not_null())
            .group_by(column)
            .agg(
                x1=pl.col("step").is_between(*window).sum(),
                x0=pl.col("step").is_between(*control).sum(),
            )
            .filter(pl.col("x1") >= MIN_EXPOSURES)
            .sort(["x1", column], descending=[True, False])
            .head(N_NAMED)
        )
        for one in counted.iter_rows(named=True):
            lift = share_lift(
                one["x1"], float(totals[in_stretch].sum()),
                one["x0"], float(totals[in_control].sum()),
            )  # fmt: skip
            named.append(
                {
                    "event": row["event"],
                    "level": level,
                    "name": str(one[column]),
                    "feature": row["feature"],
                    **lift,
                    "z": None,
                    "p": None,
                    "q": None,
                    "lag": row["lag"],
                    "verdict": "ranked",
                }
            )
    return named


def trained_with_source(exposures: pl.LazyFrame) -> pl.LazyFrame:
    """Those that were trained, each with the name of a source."""
    trained = exposures.filter(pl.col("state") == "trained")
    return trained.with_columns(pl.col("source").fill_null(UNKNOWN_SOURCE))


class _Trained:
    """Trained exposures as far as naming needs them, read once for the events of an episode."""

    def __init__(self, exposures: Exposures) -> None:
        self._exposures = exposures
        self._span = (0, -1)
        self._rows = pl.DataFrame()

    def of(self, low: int, high: int) -> pl.DataFrame:
        """Those of steps ``low`` to ``high``, and of others."""
        if low < self._span[0] or high > self._span[1]:
            self._span = (low, max(high, low + CLUSTER_STEPS + READ_AHEAD_STEPS))
            self._rows = (
                trained_with_source(self._exposures(*self._span))
                .select(
                    *("step", "key", "sample_id", "source", "shard"),
                    *("dup_of", "duplication", "repetition", "loss"),
                )
                .collect()
            )
        return self._rows


def clusters_of(rows: pl.DataFrame) -> pl.Series:
    """The cluster of each exposure, named by the sample id of its first member, str [N].

    Clusters are the connected components of the links from a sample to the one it repeated.
    """
    names = dict(zip(rows["key"].reverse(), rows["sample_id"].reverse(), strict=True))
    parent: dict[int, int] = {}

    def root(key: int) -> int:
        while parent.setdefault(key, key) != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    order: dict[int, int] = {}
    for key, other in zip(rows["key"], rows["dup_of"], strict=True):
        order.setdefault(key, len(order))
        if other is None or other not in names:
            continue
        a, b = root(key), root(other)
        if a != b:
            order.setdefault(other, len(order))
            first, later = sorted((a, b), key=lambda k: order.get(k, len(order)))
            parent[later] = first
    return pl.Series([names[root(key)] for key in rows["key"]], dtype=pl.String)
