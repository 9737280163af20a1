"""A signal against the run's own past: what was normal, and whether this sample left it.

Nothing here knows what a good value is; it is what the run had, after its warm-up. A sample that
was called bad never becomes part of what is normal.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import numpy as np

MIN_SAMPLES: Final = 10
"""Good samples that must be there before anything is called bad."""

HISTORY_SAMPLES: Final = 40
LONG_HISTORY_SAMPLES: Final = 400

INPUT_FALL: Final = 0.10
INPUT_DEVIATIONS: Final = 3.0
"""Fall of input diversity below its median, whichever is more."""

VALUE_FALL: Final = 0.10
VALUE_DEVIATIONS: Final = 6.0
"""The same of the rank of attention values."""

ENTROPY_SHARE: Final = 0.5
"""Attention entropy below this share of its median so far; of a head, it has fallen."""

HEADS_FALLEN: Final = 0.5
"""Share of the heads that have fallen: one low head is normal, many at once are not."""

LOGIT_LIMIT: Final = 50.0
LOGIT_FACTOR: Final = 2.0
"""Largest attention logit, above both the limit and this multiple of its median."""

PROBE_LOSS_RISE: Final = 0.10
"""Nats above the lowest of the last ``HISTORY_SAMPLES``."""

MEMORISED: Final = 0.5
"""Nats by which the gap of probe loss over training loss grew beyond its median."""


IsBad = Callable[[float, float, float, float], bool]
"""Whether a value is bad, given median, deviation and lowest of the good samples before it."""


class Baseline:
    """Median and robust deviation (1.4826 MAD) of the last n good samples of one series."""

    def __init__(self, n: int) -> None:
        self._good: deque[float] = deque(maxlen=n)

    def normal(self) -> tuple[float, float, float]:
        """Median, deviation and lowest of the good samples; NaN before ``MIN_SAMPLES`` of them."""
        if len(self._good) < MIN_SAMPLES:
            return math.nan, math.nan, math.nan
        past = np.fromiter(self._good, np.float64, len(self._good))
        middle = float(np.median(past))
        deviation = 1.4826 * float(np.median(np.abs(past - middle)))
        return middle, deviation, float(past.min())

    def judge(self, value: float, is_bad: IsBad, *, keep: bool) -> tuple[bool, float]:
        """Whether ``is_bad(value, median, deviation, lowest)``, and the median.

        The value joins the past when it is good and ``keep`` is set; values that are not finite are
        not judged.
        """
        if not math.isfinite(value):
            return False, math.nan
        middle, deviation, lowest = self.normal()
        bad = math.isfinite(middle) and is_bad(value, middle, deviation, lowest)
        if keep and not bad:
            self._good.append(value)
        return bad, middle


def fell_from_median(fall: float, deviations: float) -> IsBad:
    """Below the median by ``fall`` and by so many deviations."""
    return lambda value, middle, deviation, _: value <= middle - max(fall, deviations * deviation)


def below_share(value: float, middle: float, _: float, __: float) -> bool:
    return value < ENTROPY_SHARE * middle


def logit_grew(value: float, middle: float, _: float, __: float) -> bool:
    return value > max(LOGIT_LIMIT, LOGIT_FACTOR * middle)


def probe_loss_rose(value: float, _: float, __: float, lowest: float) -> bool:
    return value >= lowest + PROBE_LOSS_RISE


def memorised(value: float, middle: float, _: float, __: float) -> bool:
    return value >= middle + MEMORISED


RULES: Final[Mapping[str, tuple[int, IsBad]]] = {
    "sample_rank": (HISTORY_SAMPLES, fell_from_median(INPUT_FALL, INPUT_DEVIATIONS)),
    "entropy_mean": (LONG_HISTORY_SAMPLES, below_share),
    "value_rank": (HISTORY_SAMPLES, fell_from_median(VALUE_FALL, VALUE_DEVIATIONS)),
    "max_logit": (HISTORY_SAMPLES, logit_grew),
    "probe_loss": (HISTORY_SAMPLES, probe_loss_rose),
    "memorisation": (HISTORY_SAMPLES, memorised),
}
"""By signal: how many good samples are remembered, and what is bad."""


@dataclass(frozen=True)
class Deviation:
    """A signal of a sampled step that left what had been normal."""

    signal: str
    value: float
    normal: float

    def __str__(self) -> str:
        normal = "" if math.isnan(self.normal) else f", {self.normal:.3g} is normal"
        return f"{self.signal} {self.value:.3g}{normal}"


@dataclass
class HeadBaselines:
    """Which attention heads have lost their entropy, each against its own past."""

    _heads: dict[tuple[str, int, int], Baseline] = field(default_factory=dict)

    def share_fallen(
        self, kind: str, layer: int, entropies: Sequence[float], *, warm: bool
    ) -> float:
        """Share of a layer's heads below ``ENTROPY_SHARE`` of their median, in [0, 1]."""
        fallen = 0
        for head, entropy in enumerate(entropies):
            own = self._heads.setdefault((kind, layer, head), Baseline(HISTORY_SAMPLES))
            fallen += own.judge(float(entropy), below_share, keep=warm)[0]
        return fallen / len(entropies) if len(entropies) else math.nan


@dataclass
class Deviations:
    """Judges the signals of one sampled step after another: :meth:`of`."""

    _baselines: dict[str, Baseline] = field(default_factory=dict)

    def of(
        self, rows: Sequence[Mapping[str, Any]], graded: str, *, warm: bool
    ) -> Iterator[Deviation]:
        """Signals that left their normal, out of the rows of a step (``schema.SIGNALS``).

        ``graded``: probe or live, whichever is graded. ``warm``: whether the warm-up is over.
        """

        finite: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for row in rows:
            if math.isfinite(row["value"]):
                finite.setdefault((row["signal"], row["kind"]), []).append(row)

        def values(signal: str, kind: str) -> list[float]:
            return [row["value"] for row in finite.get((signal, kind), ())]

        def first(signal: str, kind: str, layer: int | None = None) -> float:
            found = finite.get((signal, kind), ())
            return next((row["value"] for row in found if row.get("layer") == layer), math.nan)

        entropies = values("entropy_mean", graded)
        measured = {
            "sample_rank": first("sample_rank", "live", layer=-1),
            "entropy_mean": float(np.mean(entropies)) if entropies else math.nan,
            "value_rank": min(values("value_rank", graded), default=math.nan),
            "max_logit": max(values("max_logit", graded), default=math.nan),
            "probe_loss": first("probe_loss", "probe"),
            "memorisation": first("memorisation", "probe"),
        }
        for signal, (n, is_bad) in RULES.items():
            baseline = self._baselines.setdefault(signal, Baseline(n))
            bad, normal = baseline.judge(measured[signal], is_bad, keep=warm)
            if bad:
                yield Deviation(signal, measured[signal], normal)
        fallen = values("heads_fallen", graded)
        if fallen and float(np.mean(fallen)) >= HEADS_FALLEN:
            yield Deviation("heads_fallen", float(np.mean(fallen)), math.nan)
        bad_values = max(values("non_finite", "live") + values("non_finite", "probe"), default=0.0)
        if bad_values > 0.0:
            yield Deviation("non_finite", bad_values, math.nan)


def memorisation(probe_loss: float, losses: Sequence[float]) -> float:
    """Probe loss over the median of recent training losses, nats; NaN where one is not known."""
    known = [loss for loss in losses if math.isfinite(loss)]
    return probe_loss - median(known) if known else math.nan
