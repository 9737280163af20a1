"""The grade: one definition, used live by the monitor and offline by the report.

A block's ratio is the lower of two, each of the block's output with rows as positions, k = 20:

- the **column** ratio as it is, which keeps its meaning from model to model (outlying dimensions
  do not move it) and falls when the model is damaged, for instance by the learning rate;
- the **raw** ratio relative to the best it has been lately, scaled so that its best counts as
  ``HEALTHY_RATIO``: it falls when one direction common to all positions grows, which training on
  repeated samples does and which the column ratio hardly sees.

The grade is the scale applied to the lowest block. Taken on the probe where there is one, else on
the training batch. `docs/grades.md` has the measurements behind the choice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Final

HEALTHY_RATIO: Final = 0.75
"""Where a block's best raw ratio is put on the absolute scale: the middle of S7's lower half."""

BASELINE_SAMPLES: Final = 100
"""The best raw ratio is looked for among this many latest samples: slow change is not a fall."""

WARMUP_SAMPLES: Final = 10
WARMUP_STEPS: Final = 100
"""Both must have passed before a grade can alarm: ranks dip in the first steps of every run."""

FALL_STEPS: Final = 200
"""S4 and S3 count as falling when the ratio is lower than this many steps ago."""

QUICK_STEPS: Final = 100
"""Two grades lost within this many steps, ending below S5, is danger."""

QUICK_FALL: Final = 0.10
"""A ratio that lost this much within ``QUICK_STEPS`` is watched at any grade."""

FALLING_MARGIN: Final = 0.02
"""A change of ratio smaller than this is not a fall."""


def grade_of(ratio: float) -> int | None:
    """S7 (>= .7) down to S0 (< .1), as 7 to 0; None where the ratio is undefined."""
    if not math.isfinite(ratio):
        return None
    # Rounding keeps .7 - 1e-16 from losing a grade to the float representation.
    return max(0, min(7, math.floor(round(ratio * 10.0, 9))))


@dataclass(frozen=True)
class Grade:
    """The grade of one sampled step.

    ``ratio`` is uncapped; ``grade`` and ``layer`` are None where every ratio was undefined.
    ``alert`` is warming, healthy, "watch, stable" or "watch, falling" (S4, S3, or falling at any
    grade), danger, or undefined.
    """

    step: int
    ratio: float
    grade: int | None
    layer: int | None
    alert: str


@dataclass
class Grader:
    """Grades samples one after another; the same samples give the same grades, live or offline."""

    _raw: dict[int, deque[float]] = field(default_factory=dict)
    _best: dict[int, deque[float]] = field(default_factory=dict)
    _history: deque[Grade] = field(default_factory=lambda: deque(maxlen=4096))
    _first_step: int | None = None
    _n_samples: int = 0

    def update(self, step: int, raw: Mapping[int, float], column: Mapping[int, float]) -> Grade:
        """Grade one sampled step from the ratios of its blocks by layer."""
        if self._first_step is None:
            self._first_step = step
        self._n_samples += 1
        warm = self._n_samples > WARMUP_SAMPLES and step - self._first_step >= WARMUP_STEPS
        ratios = {
            layer: min(column.get(layer, math.nan), self._relative(layer, value, warm))
            for layer, value in raw.items()
            if math.isfinite(value) and math.isfinite(column.get(layer, math.nan))
        }
        if ratios:
            layer = min(ratios, key=lambda name: ratios[name])
            ratio = ratios[layer]
        else:
            layer, ratio = None, math.nan
        grade = grade_of(ratio)
        result = Grade(step, ratio, grade, layer, self._alert(step, ratio, grade, warm))
        self._history.append(result)
        return result

    def _relative(self, layer: int, value: float, warm: bool) -> float:
        recent = self._raw.setdefault(layer, deque(maxlen=3))
        recent.append(value)
        if not warm:
            return math.inf
        # The median of three keeps one odd sample from becoming the standard for the rest.
        best = self._best.setdefault(layer, deque(maxlen=BASELINE_SAMPLES))
        best.append(median(recent))
        return HEALTHY_RATIO * value / max(best)

    def _alert(self, step: int, ratio: float, grade: int | None, warm: bool) -> str:
        if grade is None:
            return "undefined"
        if not warm:
            return "warming"
        recent = [
            past
            for past in self._history
            if past.grade is not None
            and past.step >= step - QUICK_STEPS
            and past.alert != "warming"
        ]
        quickly = bool(recent) and max(past.ratio for past in recent) - ratio >= QUICK_FALL
        if grade >= 5:
            return "watch, falling" if quickly else "healthy"
        if grade <= 2 or (recent and max(past.grade or 0 for past in recent) - grade >= 2):
            return "danger"
        earlier = [past.ratio for past in self._history if past.step <= step - FALL_STEPS]
        falling = quickly or (bool(earlier) and earlier[-1] - ratio > FALLING_MARGIN)
        return "watch, falling" if falling else "watch, stable"
