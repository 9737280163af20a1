"""The detectors of ``detection.py``: the monitor's alerts, replayed, and rules on the loss alone.

The rules on the loss follow what is published, in our own words. A value that is not finite alarms
in each of them. Their thresholds, and a factor on all of the monitor's margins, can be swept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import numpy as np
from detection_trainings import Training

from auditor.measure import baseline
from auditor.measure.baseline import HeadBaselines, memorisation
from auditor.measure.grading import Alert, Grade, Grader
from auditor.measure.judging import Judge, StepJudge, measured_of
from auditor.record.monitor import SCALARS_STEPS

WINDOW_STEPS: Final = 50
"""Of the rolling mean and median; OLMo's and Lightning's windows are their defaults."""

Raised = list[tuple[int, str, str]]
"""Step, level and signal of alerts."""


@dataclass(frozen=True)
class Detector:
    """``alarms(training, threshold)`` gives steps; ``thresholds`` from sensitive to blunt."""

    name: str
    alarms: Callable[[Training, float], list[int]]
    thresholds: tuple[float, ...]
    published: float | None = None


# -- the monitor -------------------------------------------------------------------------------


@dataclass
class _ScaledGrader(Grader):
    """Ratios are moved towards that of a healthy model: a margin of .1 becomes one of .1 scale."""

    scale: float = 1.0

    def update(self, step: int, raw: Mapping[int, float], column: Mapping[int, float]) -> Grade:
        return super().update(step, raw, {name: self._moved(x) for name, x in column.items()})

    def _relative(self, layer: int, value: float, warm: bool) -> float:
        return self._moved(super()._relative(layer, value, warm))

    def _moved(self, ratio: float) -> float:
        if self.scale == 1.0:
            return ratio
        healthy = self.policy.healthy_ratio
        return healthy - (healthy - ratio) / self.scale


@contextmanager
def _scaled_margins(scale: float) -> Iterator[None]:
    """All margins of ``auditor.measure.baseline`` times ``scale``, for a while."""
    fell = baseline.fell_from_median
    falls = {
        "sample_rank": fell(baseline.INPUT_FALL * scale, baseline.INPUT_DEVIATIONS * scale),
        "value_rank": fell(baseline.VALUE_FALL * scale, baseline.VALUE_DEVIATIONS * scale),
    }
    rules = {name: (n, falls.get(name, is_bad)) for name, (n, is_bad) in baseline.RULES.items()}
    with mock.patch.multiple(
        baseline,
        RULES=rules,
        ENTROPY_SHARE=baseline.ENTROPY_SHARE**scale,
        LOGIT_LIMIT=baseline.LOGIT_LIMIT * scale,
        LOGIT_FACTOR=baseline.LOGIT_FACTOR**scale,
        PROBE_LOSS_RISE=baseline.PROBE_LOSS_RISE * scale,
        MEMORISED=baseline.MEMORISED * scale,
    ):
        yield


def replay(training: Training, every: int, scale: float = 1.0) -> Raised:
    """The alerts of a monitor that samples every so many steps, from the recorded signals.

    Losses and gradient norms are judged at every step, whatever the rate.
    """
    judge, step_judge = Judge(graded="probe"), StepJudge()
    judge._grader = _ScaledGrader(scale=scale)
    heads = HeadBaselines()
    raised: list[Alert] = []
    with _scaled_margins(scale):
        for step in sorted(step for step in training.rows if step % every == 0):
            rows = list(_rows(training, step, every, heads, judge.is_warm(step)))
            judged = judge.update(step, rows)
            raised += [] if judged is None else judged.alerts
    columns = {"loss": training.loss, "grad_norm": training.grad_norm}
    for step in range(len(training.loss)):
        raised += step_judge.update(step, measured_of(columns, step))
    raised += step_judge.end()
    return [(alert.step, alert.level, alert.signal) for alert in raised]


def _rows(
    training: Training, step: int, every: int, heads: HeadBaselines, warm: bool
) -> Iterator[dict[str, Any]]:
    """The recorded rows; what depends on earlier samples is taken from those of this rate."""
    entropies: dict[int, list[float]] = {}
    # Losses are handed over after each sample, so a sample knows those up to the one before.
    losses = training.loss[: max(0, step - every + 1)][-SCALARS_STEPS:]
    for row in training.rows[step]:
        if row["signal"] == "entropy" and row["kind"] == "probe":
            entropies.setdefault(row["layer"], []).append(row["value"])
        elif row["signal"] == "memorisation":
            continue
        elif row["signal"] != "heads_fallen":
            yield row
        if row["signal"] == "probe_loss":
            gap = memorisation(row["value"], losses.tolist())
            yield {"kind": "probe", "signal": "memorisation", "value": gap}
    for layer, of_heads in entropies.items():
        share = heads.share_fallen("probe", layer, of_heads, warm=warm)
        yield {"kind": "probe", "signal": "heads_fallen", "layer": layer, "value": share}


def monitor(
    every: int,
    name: str = "monitor",
    *,
    levels: tuple[str, ...] = ("watch", "danger"),
    counts: Callable[[str], bool] = lambda signal: True,
) -> Detector:
    """The alerts of these levels and signals; the threshold is the factor on all margins."""

    def alarms(training: Training, scale: float) -> list[int]:
        return [
            step
            for step, level, signal in replay(training, every, scale)
            if level in levels and counts(signal)
        ]

    scales = (0.5, 0.65, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0)
    return Detector(name, alarms, scales, published=1.0)


# -- rules on the loss -------------------------------------------------------------------------


def rolling_z(training: Training, k: float) -> list[int]:
    """Loss above mean + k deviations of the 50 steps before it."""
    return [
        step
        for step in range(WINDOW_STEPS, len(training.loss))
        if _is_outlier(training.loss, step, WINDOW_STEPS, k, two_sided=False)
    ]


def olmo(training: Training, k: float) -> list[int]:
    """OLMo-core's ``SkipStepOptimizer``: loss or gradient norm further than k deviations, on
    either side, from the mean of the last 128; from 64 on. Published: k = 6."""
    return [
        step
        for step in range(64, len(training.loss))
        if any(
            _is_outlier(series, step, 128, k, two_sided=True)
            for series in (training.loss, training.grad_norm)
        )
    ]


def lightning(training: Training, share: float) -> list[int]:
    """Lightning's ``SpikeDetection``: worse than the step before, and off the running mean of 10
    by a share of it; a spike does not join the mean. Published: share = 2."""
    alarms, good = [], [float(training.loss[0])]
    for step, loss in enumerate(training.loss.tolist()[1:], 1):
        mean = sum(good[-10:]) / len(good[-10:])
        if not math.isfinite(loss) or (loss > good[-1] and abs(loss - mean) >= share * mean):
            alarms.append(step)
        else:
            good.append(loss)
    return alarms


def rolling_median(training: Training, factor: float) -> list[int]:
    """Loss above a multiple of the median of the 50 steps before it."""
    loss = training.loss
    return [
        step
        for step in range(WINDOW_STEPS, len(loss))
        if not loss[step] <= factor * np.median(loss[step - WINDOW_STEPS : step])
    ]


def _is_outlier(series: np.ndarray, step: int, n: int, k: float, *, two_sided: bool) -> bool:
    past, value = series[max(0, step - n) : step], series[step]
    off = value - past.mean()
    return not (abs(off) if two_sided else off) <= k * past.std(ddof=1)  # NaN alarms


LOSS_RULES: Final = (
    Detector("rolling z-score", rolling_z, tuple(np.arange(1.5, 10.01, 0.25).tolist())),
    Detector("OLMo rule", olmo, tuple(np.arange(1.5, 14.01, 0.25).tolist()), published=6.0),
    Detector(
        "Lightning rule", lightning, (*np.arange(0.02, 0.6, 0.01).tolist(), 1.0, 2.0), published=2.0
    ),
    Detector("rolling median", rolling_median, tuple(np.arange(1.02, 2.0, 0.01).tolist())),
)
