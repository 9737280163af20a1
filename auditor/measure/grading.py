"""The grade: one definition, used live by the monitor and offline by the report.

A block's ratio is the lower of two, each of the block's output with rows as positions, k = 20:

- the **column** ratio as it is, which keeps its meaning from model to model (outlying dimensions
  do not move it) and falls when the model is damaged, for instance by the learning rate;
- the **raw** ratio relative to the best it has been lately, scaled so that its best counts as
  ``healthy_ratio``: it falls when one direction common to all positions grows, which training on
  repeated samples does and which the column ratio hardly sees.

The grade is the scale applied to the lowest block. Taken on the probe where there is one, else on
the training batch. `docs/grades.md` has the measurements behind the choice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Final

_RANGES: Final[Mapping[str, tuple[int, int | None]]] = {
    "watch_grade": (0, 7),
    "danger_grade": (0, 7),
    "quick_grades": (1, 7),
    "baseline_samples": (1, None),
    "confirm_samples": (1, None),
    "recover_samples": (1, None),
}
"""Least and most of settings; of the others, whole numbers are 0 or more, ratios 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Every threshold of grades and alerts; a finished run can be graded again by another one.

    The defaults follow the table of three levels in `docs/grades.md`. Ratios are in [0, 1], steps
    are optimizer updates, samples are sampled steps.
    """

    healthy_ratio: float = 0.75
    """Where a block's best raw ratio is put on the absolute scale: the middle of S7's lower half.
    """
    baseline_samples: int = 100
    """The best raw ratio is looked for among so many latest samples: slow change is not a fall."""
    warmup_samples: int = 10
    warmup_steps: int = 100
    """Both must have passed before a grade can alarm: ranks dip in the first steps of a run."""
    watch_grade: int = 4
    """At this grade and lower a run is watched."""
    danger_grade: int = 2
    """At this grade and lower it is in danger, if it was ``quick_grades`` better since the warm-up.
    """
    settle_steps: int = 200
    """After the warm-up a run that has not been above ``watch_grade`` yet, and does not fall, is
    given so long before it is watched. Chosen on 7 small models that train well (2 to 6 blocks,
    width 64 and 128): all of them were low when the warm-up ended."""
    low_steps: int = 1000
    """A run that was never better is in danger after so long at ``danger_grade`` or lower. Chosen
    on the same: the slowest of them was that low for 790 steps after the warm-up."""
    fall_steps: int = 200
    """A watched grade counts as falling when the ratio is lower than so many steps ago."""
    falling_margin: float = 0.02
    """A change of ratio smaller than this is not a fall."""
    quick_steps: int = 100
    quick_grades: int = 2
    """So many grades lost within ``quick_steps``, ending at ``watch_grade`` or lower: danger."""
    quick_fall: float = 0.10
    """A ratio that lost so much within ``quick_steps`` is watched at any grade."""
    confirm_samples: int = 2
    """Samples in a row that an alert needs; values that are not finite need one."""
    recover_samples: int = 3
    """Samples in a row that must call for less before its level is lowered; that is told when they
    call for none."""
    cooldown_steps: int = 500
    """After an alert of one level, none of the same level for so long."""

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for a threshold of the wrong type or out of range."""
        for setting in fields(self):
            value, default = getattr(self, setting.name), setting.default
            whole = isinstance(default, int)
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                kind = "a whole number" if whole else "a number"
                raise ValueError(f"{setting.name} must be {kind}, got {value!r}")
            least, most = _RANGES.get(setting.name, (0, None) if whole else (0.0, 1.0))
            if not value >= least or (most is not None and value > most):
                wanted = f"at least {least}" if most is None else f"from {least} to {most}"
                raise ValueError(f"{setting.name} must be {wanted}, got {value!r}")
        if self.danger_grade > self.watch_grade:
            raise ValueError(
                f"danger_grade must not be above watch_grade, got {self.danger_grade} and "
                f"{self.watch_grade}"
            )

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> Policy:
        """A policy from a table of settings.

        Raises:
            ValueError: there is no such setting, or its value is of the wrong type.
        """
        known = {setting.name for setting in fields(cls)}
        for name in settings:
            if name not in known:
                raise ValueError(
                    f"there is no setting {name!r} of grades; there are: {', '.join(sorted(known))}"
                )
        return cls(**settings)  # type: ignore[arg-type]


DEFAULT_POLICY: Final = Policy()


def grade_of(ratio: float) -> int | None:
    """S7 (>= .7) down to S0 (< .1), as 7 to 0; None where the ratio is undefined."""
    if not math.isfinite(ratio):
        return None
    # Rounding keeps .7 - 1e-16 from losing a grade to the float representation.
    return max(0, min(7, math.floor(round(ratio * 10.0, 9))))


@dataclass(frozen=True)
class Grade:
    """The grade of one sampled step.

    ``ratio`` is uncapped. Where a block's is undefined that was defined before, ``ratio`` is NaN,
    ``grade`` None, and ``layer`` that block; where every one is undefined, ``layer`` is None too.
    ``alert`` is warming (in the warm-up, or low ever since and not yet settled), healthy, "watch,
    stable" or "watch, falling" (S4 and lower, or falling at any grade), danger, or undefined.
    """

    step: int
    ratio: float
    grade: int | None
    layer: int | None
    alert: str


@dataclass
class Grader:
    """Grades samples one after another; the same samples give the same grades, live or offline."""

    policy: Policy = DEFAULT_POLICY
    _raw: dict[int, deque[float]] = field(default_factory=dict)
    _best: dict[int, deque[float]] = field(default_factory=dict)
    _history: deque[Grade] = field(default_factory=lambda: deque(maxlen=4096))
    _first_step: int | None = None
    _n_samples: int = 0
    _seen: set[int] = field(default_factory=set)
    """Blocks that had a ratio before."""
    _warm_since: int | None = None
    _low_since: int | None = None
    """First step of the stretch at ``danger_grade`` or lower that goes on; None where none does."""
    _best_grade: int = 0
    """Since the warm-up."""
    _has_settled: bool = False

    def update(self, step: int, raw: Mapping[int, float], column: Mapping[int, float]) -> Grade:
        """Grade one sampled step from the ratios of its blocks by layer."""
        warm = self.is_warm(step)
        if self._first_step is None:
            self._first_step = step
        self._n_samples += 1
        ratios = {
            layer: min(column.get(layer, math.nan), self._relative(layer, value, warm))
            for layer, value in raw.items()
            if math.isfinite(value) and math.isfinite(column.get(layer, math.nan))
        }
        dead = self._seen & (raw.keys() - ratios.keys())
        self._seen |= ratios.keys()
        layer: int | None
        if ratios and not dead:
            layer = min(ratios, key=lambda name: ratios[name])
            ratio = ratios[layer]
        else:
            # The first of them: what follows a dead block may be undefined by its fault.
            layer, ratio = min(dead) if ratios else None, math.nan
        grade = grade_of(ratio)
        result = Grade(step, ratio, grade, layer, self._alert(step, ratio, grade, warm))
        self._history.append(result)
        return result

    def is_warm(self, step: int) -> bool:
        """Whether the warm-up is over for a sample at this step, the next one to be graded."""
        return (
            self._first_step is not None
            and self._n_samples >= self.policy.warmup_samples
            and step - self._first_step >= self.policy.warmup_steps
        )

    def _relative(self, layer: int, value: float, warm: bool) -> float:
        recent = self._raw.setdefault(layer, deque(maxlen=3))
        recent.append(value)
        if not warm:
            return math.inf
        # The median of three keeps one odd sample from becoming the standard for the rest.
        best = self._best.setdefault(layer, deque(maxlen=self.policy.baseline_samples))
        best.append(median(recent))
        return self.policy.healthy_ratio * value / max(best)

    def _alert(self, step: int, ratio: float, grade: int | None, warm: bool) -> str:
        if grade is None:
            return "undefined"
        if not warm:
            return "warming"
        recent = self._since(step - self.policy.quick_steps)
        quickly = (
            bool(recent) and max(past.ratio for past in recent) - ratio >= self.policy.quick_fall
        )
        self._follow(step, grade)
        was_better = self._best_grade - grade >= self.policy.quick_grades
        if grade > self.policy.watch_grade:
            return "watch, falling" if quickly else "healthy"
        lost = max((past.grade or 0 for past in recent), default=grade) - grade
        if lost >= self.policy.quick_grades:
            return "danger"
        # What has been low ever since the warm-up has not collapsed.
        if not (was_better or quickly or self._has_settled):
            return "warming"
        low_since = step if self._low_since is None else self._low_since
        if grade <= self.policy.danger_grade and (
            was_better or step - low_since >= self.policy.low_steps
        ):
            return "danger"
        before = self._before(step - self.policy.fall_steps)
        lower = before is not None and before.ratio - ratio > self.policy.falling_margin
        falling = quickly or lower
        return "watch, falling" if falling else "watch, stable"

    def _follow(self, step: int, grade: int) -> None:
        """What is remembered of the samples since the warm-up."""
        if self._warm_since is None:
            self._warm_since = step
        self._best_grade = max(self._best_grade, grade)
        if grade > self.policy.danger_grade:
            self._low_since = None
        elif self._low_since is None:
            self._low_since = step
        if grade > self.policy.watch_grade or step - self._warm_since >= self.policy.settle_steps:
            self._has_settled = True

    def _since(self, step: int) -> list[Grade]:
        """Grades from a step on that were defined and after the warm-up."""
        if self._warm_since is None:
            return []
        found = []
        for past in reversed(self._history):
            if past.step < max(step, self._warm_since):
                break
            if past.grade is not None:
                found.append(past)
        return found

    def _before(self, step: int) -> Grade | None:
        """The latest grade up to a step."""
        return next((past for past in reversed(self._history) if past.step <= step), None)


_CALLED: Final = {
    "watch, stable": "watch",
    "watch, falling": "watch",
    "danger": "danger",
    "undefined": "danger",
}
"""The level that a grade's alert calls for; the others call for none."""

_LEVELS: Final = ("", "watch", "danger")


@dataclass(frozen=True)
class Alert:
    """What a person is told: once when it begins, not at every sample.

    ``level``: watch, danger or recovered. ``signal``: what moved, ``grade`` or a name of
    ``schema.SIGNAL_NAMES``. ``grade``, ``ratio``, ``layer``: of the step.
    """

    step: int
    level: str
    grade: int | None
    ratio: float
    layer: int | None
    signal: str
    message: str


def heads_fell(alerts: Iterable[Alert]) -> bool:
    """Whether it was told that the attention of many heads fell together."""
    return any(one.signal == "heads_fallen" and one.level != "recovered" for one in alerts)


@dataclass
class Alerts:
    """Alerts of one signal: confirmed, held until they are over, not repeated all the time."""

    signal: str = "grade"
    policy: Policy = DEFAULT_POLICY
    level: str = ""
    _above: list[str] = field(default_factory=list)
    _below: list[str] = field(default_factory=list)
    _told: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    """By level: step and grade of the alert that was told last."""

    def of_grade(self, grade: Grade) -> Alert | None:
        """The alert that this sample raises or takes back, None where nothing changes."""
        if grade.grade is None:
            what = "no rank ratio is defined: activations are zero or not finite"
            if grade.layer is not None:
                what = f"block {grade.layer} has no rank ratio: its output is zero or not finite"
        else:
            what = f"grade S{grade.grade}, ratio {grade.ratio:.2f} in block {grade.layer}"
        called = _CALLED.get(grade.alert, "")
        return self.update(grade, called, what, at_once=grade.grade is None)

    def update(self, grade: Grade, called: str, what: str, *, at_once: bool) -> Alert | None:
        """A sample of the signal calls for a level, "" for none.

        ``what`` tells it to a person; ``at_once``: one sample is enough. ``grade``: of the step.
        """
        rank, held = _LEVELS.index(called), _LEVELS.index(self.level)
        worse = rank == held > 0 and self._is_far_below(grade, self.level)
        self._above = [*self._above, called] if rank > held or worse else []
        self._below = [*self._below, called] if rank < held else []
        if self._above and (at_once or len(self._above) >= self.policy.confirm_samples):
            # Of samples in a row that call for different levels, what all of them call for.
            self.level = called if at_once else min(self._above, key=_LEVELS.index)
            self._above = []
            return self._tell(grade, what)
        if len(self._below) >= self.policy.recover_samples:
            self.level = max(self._below, key=_LEVELS.index)
            self._below = []
            if not self.level:
                return self._alert(grade, "recovered", what)
        return None

    def _tell(self, grade: Grade, what: str) -> Alert | None:
        """The alert, unless the like was told lately; a lower grade is told at any time."""
        told = self._told.get(self.level)
        recent = told is not None and grade.step - told[0] < self.policy.cooldown_steps
        if recent and not self._is_far_below(grade, self.level):
            return None
        self._told[self.level] = grade.step, grade.grade
        return self._alert(grade, self.level, what)

    def _is_far_below(self, grade: Grade, level: str) -> bool:
        """Whether the grade lies ``quick_grades`` or more below the one that was told."""
        told = self._told.get(level, (0, None))[1]
        if self.signal != "grade" or told is None or grade.grade is None:
            return False
        return grade.grade <= told - self.policy.quick_grades

    def _alert(self, grade: Grade, level: str, what: str) -> Alert:
        message = f"step {grade.step}: {level}: {what}"
        return Alert(grade.step, level, grade.grade, grade.ratio, grade.layer, self.signal, message)
