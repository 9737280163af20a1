"""Scores of ``attribution.py``: what a fault moved, what the report and the baselines name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl
from attribution_trainings import BURST_STEPS, DATA_FAULTS, STEPS, Truth, load_truth
from scipy import stats

from auditor.explain.attribution import LOOKBACK_STEPS, features_of
from auditor.explain.contrast import shift_p
from auditor.explain.explanation import Explanation
from auditor.explain.pipeline import explain
from auditor.run import Run

MOVED_RATIO: Final = 0.10
MOVED_NATS: Final = 0.10
MOVED_ENTROPY: Final = 0.5
MOVED_DEVIATIONS: Final = 6.0
DOMINATES: Final = 0.9
BASELINES: Final = ("batches i-1, i", "loss rank", "loss z-score")


@dataclass(frozen=True)
class Outcome:
    """One training as it was explained.

    ``moved``: whether a signal left that of the paired run. ``first``: the source that stands at
    the top of the report, ``blamed`` the one it blames; ``drifted``: where there is no event, the
    source that a drift of the mix names first; ``answers``: what counts as right.
    ``lag_error``: steps from the planted onset to where the report says that the exposure changed.
    ``batches``: share of the five batches named that hold planted samples. ``smallest_q`` is None
    without an event. ``p``: of the pre-declared test at a random step.
    """

    truth: Truth
    moved: bool
    n_events: int
    first: str | None
    blamed: str | None
    drifted: str | None
    answers: frozenset[str]
    lag_error: int | None
    batches: float | None
    smallest_q: float | None
    p: float
    baselines: dict[str, str | None]

    @property
    def is_first_right(self) -> bool:
        return self.first in self.answers

    @property
    def is_named(self) -> bool:
        """By its events, or where there is none by a drift of the mix."""
        return (self.first or self.drifted) in self.answers


def outcome_of(folder: Path, paired: Path) -> Outcome:
    truth = load_truth(folder)
    run = Run.open(folder / "run")
    found = explain(run)
    sources = found.suspects.filter(pl.col("level") == "source")
    top = _top(sources)
    answers = frozenset({truth.culprit} if truth.culprit else ())
    if truth.kind == "correlated shuffle" and len(found.events):
        answers |= _dominating(found)
    lag_error = batches = None
    if top is not None and truth.culprit is not None:
        event = found.events.row(by_predicate=pl.col("event") == top["event"], named=True)
        lag_error = event["onset_high"] - top["lag"] - truth.onset
        named = found.strongest[top["event"]]
        batches = float(np.mean([step in truth.planted_steps for step in named]))
    q = sources["q"].min()
    return Outcome(
        truth=truth,
        moved=truth.kind in DATA_FAULTS
        and moved(run, Run.open(paired / "run"), truth.onset, truth.onset + BURST_STEPS),
        n_events=found.events["episode"].n_unique(),
        first=None if top is None else str(top["name"]),
        blamed=found.culprit,
        drifted=_drifted(found),
        answers=answers,
        lag_error=lag_error,
        batches=batches,
        smallest_q=None if q is None else float(q),  # type: ignore[arg-type]
        p=_predeclared(found, truth.seed),
        baselines=_baselines(run, found),
    )


def _top(sources: pl.DataFrame) -> dict | None:
    """What a reader sees first: what is blamed, of the rest what grew most before the first event
    that has something that stands out."""
    if sources.is_empty():
        return None
    order = {"blamed": 0, "coincident": 1, "ranked": 2}
    place = pl.col("verdict").replace_strict(order, return_dtype=pl.Int32)
    best = sources.filter(place == place.min()).sort("event", maintain_order=True)
    return best.row(0, named=True)


def _drifted(found: Explanation) -> str | None:
    mixed = found.drifts.filter((pl.col("kind") == "mix") & (pl.col("z") > 0))
    if len(found.events) or mixed.is_empty():
        return None
    return str(mixed.sort("onset", maintain_order=True)["source"][0])


def _dominating(found: Explanation) -> frozenset[str]:
    """Sources that were alone in a batch around the first event: what an order by source does."""
    event = found.events.row(0, named=True)
    near = found.composition.filter(
        pl.col("step").is_between(event["onset_low"] - LOOKBACK_STEPS, event["onset_high"] + 10)
    )
    share = pl.col("n_samples") / pl.col("n_samples").sum().over("step")
    return frozenset(near.filter(share >= DOMINATES)["source"])


# -- what the fault moved ----------------------------------------------------------------------


def moved(run: Run, paired: Run, onset: int, end: int) -> bool:
    """Whether a signal that events are made of leaves that of the paired run, twice running.

    By .10 of a rank ratio (raw or column, lowest block; input diversity) or .10 nats of the probe
    loss, by half of the attention entropy, or the loss by 6 robust deviations of its last 100
    steps. Looked at from the onset to ``end``, sampled steps more.
    """
    theirs, ours = (
        one.scan("signals").filter(pl.col("step") >= onset).collect() for one in (paired, run)
    )
    past = paired.scan("signals").filter(
        (pl.col("signal") == "loss") & pl.col("step").is_between(onset - 100, onset - 1)
    )
    losses = past.collect()["value"].to_numpy()
    deviation = 1.4826 * float(np.median(np.abs(losses - np.median(losses))))
    for pick, limit, is_share in (
        ((pl.col("signal") == "token_rank") & (pl.col("variant") == "raw"), MOVED_RATIO, False),
        ((pl.col("signal") == "token_rank") & (pl.col("variant") == "column"), MOVED_RATIO, False),
        ((pl.col("signal") == "sample_rank") & (pl.col("layer") == -1), MOVED_RATIO, False),
        (pl.col("signal") == "probe_loss", MOVED_NATS, False),
        (pl.col("signal") == "entropy_mean", MOVED_ENTROPY, True),
        (pl.col("signal") == "loss", MOVED_DEVIATIONS * deviation, False),
    ):
        both = _lowest(ours.filter(pick)).join(_lowest(theirs.filter(pick)), on=["kind", "step"])
        for (kind,), series in both.sort("step").group_by("kind", maintain_order=True):
            a, b = series["value"].to_numpy(), series["value_right"].to_numpy()
            gap = np.abs(a / b - 1.0) if is_share else np.abs(a - b)
            if kind == "step":  # a batch that is easy to predict harms nothing
                gap = np.where(series["step"].to_numpy() <= end, a - b, 0.0)
            beyond = ~(gap < limit)
            if (beyond[1:] & beyond[:-1]).any():
                return True
    return False


def _lowest(signals: pl.DataFrame) -> pl.DataFrame:
    return signals.group_by("kind", "step").agg(pl.col("value").min())


# -- baselines and calibration -----------------------------------------------------------------


def _baselines(run: Run, found: Explanation) -> dict[str, str | None]:
    """Whom the baselines blame for the first event; they always blame someone.

    - batches i-1, i: the source whose share of the two batches is highest over its own before;
    - loss rank: of the samples of the lookback the twentieth with the highest loss, the same;
    - loss z-score: of the batch with the most robust deviations of the loss in the lookback.
    """
    if found.events.is_empty():
        return dict.fromkeys(BASELINES)
    event = found.events.row(0, named=True)
    low, high = event["onset_low"] - LOOKBACK_STEPS, event["onset_high"]
    rows = (
        run.scan("exposures").filter(pl.col("state") == "trained").select("step", "source", "loss")
    ).collect()
    before = rows.filter(pl.col("step") <= low)
    inside = rows.filter(pl.col("step").is_between(low + 1, high))
    losses = found.signals.filter(pl.col("signal") == "loss").sort("step")
    near = losses.filter(pl.col("step").is_between(low + 1, high))
    past = losses.filter(pl.col("step").is_between(low - 100, low))["value"].median()
    highest = int(near.sort((pl.col("value") - past).abs())["step"][-1])
    hard = inside.sort("loss", descending=True).head(max(1, len(inside) // 20))
    chosen = (
        inside.filter(pl.col("step") >= high - 1),
        hard,
        inside.filter(pl.col("step") == highest),
    )
    return {name: _most_over(some, before) for name, some in zip(BASELINES, chosen, strict=True)}


def _most_over(some: pl.DataFrame, before: pl.DataFrame) -> str | None:
    n, m = max(1, len(some)), max(1, len(before))
    counts = (
        some.group_by("source")
        .len("a")
        .join(before.group_by("source").len("b"), on="source", how="left")
    )
    lift = ((pl.col("a") + 0.5) / n) / ((pl.col("b").fill_null(0) + 0.5) / m)
    ordered = counts.sort(lift, "source")["source"]
    return str(ordered[-1]) if len(ordered) else None


def _predeclared(found: Explanation, seed: int) -> float:
    """p of the share of the first source in the alphabet, at a random step that is no event's."""
    steps, features = features_of(found.composition)
    rng = np.random.default_rng([seed, 7])
    end = int(rng.integers(150, min(len(steps), STEPS)))
    source = min(source for source, _ in features)
    return shift_p(features[source, "share"], (end - LOOKBACK_STEPS, end), 1.0)


# -- words -------------------------------------------------------------------------------------


def proportion(right: Iterable[bool]) -> str:
    """``9/10 (.60-.98)``: with the 95% interval of Wilson."""
    values = list(right)
    if not values:
        return "none"
    interval = stats.binomtest(sum(values), len(values)).proportion_ci(method="wilson")
    return f"{sum(values)}/{len(values)} ({interval.low:.2f}-{interval.high:.2f})"


def median_of(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else math.nan
