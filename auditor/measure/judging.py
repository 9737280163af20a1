"""A sampled step judged: its grade, which signals left their normal, and what a person is told.

Also the loss and gradient norm of every step, which have to be finite.

The monitor does it live, the report and ``auditor grade`` do it again from the recorded signals:
one definition, the same rows, the same result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from auditor.measure.baseline import Deviation, Deviations
from auditor.measure.grading import DEFAULT_POLICY, Alert, Alerts, Grade, Grader, Policy

JUDGED: Final = frozenset(
    {
        "token_rank", "sample_rank", "entropy_mean", "value_rank", "max_logit", "probe_loss",
        "memorisation", "heads_fallen", "non_finite",
    }
)  # fmt: skip
"""Signals that are looked at; the others are for people to read."""

STEP_SIGNALS: Final = ("loss", "grad_norm")
"""Signals of every step that must be finite."""

RECOVER_STEPS: Final = 50
"""Finite steps in a row until it is told that such a signal has recovered."""


@dataclass(frozen=True)
class Judgement:
    """What one sampled step came to."""

    grade: Grade
    deviations: Sequence[Deviation]
    alerts: Sequence[Alert]
    kind: str
    """``probe`` or ``live``: the forward whose blocks are graded."""

    @property
    def suspicious(self) -> bool:
        """Whether to look again soon."""
        return bool(self.deviations) or self.grade.alert not in {"warming", "healthy"}


class Judge:
    """Judges the samples of one attempt in order.

    The probe is graded, where the first sample that shows any block shows the probe's, else the
    training batch: a probe that fails from the start silences no grade. It stays so, for the two
    are not compared with each other.

    Args:
        policy: thresholds of grades and alerts.
        graded: ``probe`` or ``live``: the forward whose blocks are graded, where it is known.
    """

    def __init__(self, policy: Policy = DEFAULT_POLICY, *, graded: str | None = None) -> None:
        self._policy = policy
        self._graded = graded
        self._grader = Grader(policy)
        self._deviations = Deviations()
        self._alerts: dict[str, Alerts] = {"grade": Alerts(policy=policy)}

    def is_warm(self, step: int) -> bool:
        """Whether the warm-up is over at this step, the next one to be judged."""
        return self._grader.is_warm(step)

    def update(self, step: int, rows: Sequence[Mapping[str, Any]]) -> Judgement | None:
        """Judge one step by its rows (``schema.SIGNALS``, undefined values NaN).

        None where the graded forward is not among them, because it failed.
        """
        if self._graded is None:
            self._graded = graded_of(rows)
        if self._graded is None:
            return None
        raw, column = (ratios_of(rows, self._graded, variant) for variant in ("raw", "column"))
        if not raw:
            return None
        warm = self.is_warm(step)
        grade = self._grader.update(step, raw, column)
        deviations = list(self._deviations.of(rows, self._graded, warm=warm))
        by_signal = {deviation.signal: deviation for deviation in deviations}
        others = sorted((self._alerts.keys() | by_signal.keys()) - {"grade"})
        raised = [
            self._alerts["grade"].of_grade(grade),
            *(self._alert(signal, by_signal.get(signal), grade) for signal in others),
        ]
        told = [alert for alert in raised if alert is not None]
        return Judgement(grade, deviations, told, self._graded)

    def _alert(self, signal: str, deviation: Deviation | None, grade: Grade) -> Alert | None:
        alerts = self._alerts.setdefault(signal, Alerts(signal, self._policy))
        if deviation is None:
            return alerts.update(grade, "", f"{signal} is back to normal", at_once=False)
        if signal == "non_finite":
            return alerts.update(grade, "danger", str(deviation), at_once=True)
        return alerts.update(grade, "watch", str(deviation), at_once=False)


class StepJudge:
    """Judges every step of one attempt in order: danger at once where a value is not finite.

    A step that was discarded is there again once it was tried again, and its last values count: a
    step is judged when the next one is known, or at the end. The norm of an attempt's first step is
    left out: mixed precision begins with an overflow, and whether that step was discarded is not
    known yet.
    """

    def __init__(self, policy: Policy = DEFAULT_POLICY) -> None:
        policy = replace(policy, recover_samples=max(RECOVER_STEPS, policy.recover_samples))
        self._alerts = {signal: Alerts(signal, policy) for signal in STEP_SIGNALS}
        self._step: int | None = None
        self._values: dict[str, float] = {}
        self._is_first = True

    @property
    def expects_alert(self) -> bool:
        """Whether the step that is not judged yet will bring danger that was not told before."""
        return any(
            not math.isfinite(value) and self._alerts[signal].level != "danger"
            for signal, value in self._judged_values()
        )

    def update(self, step: int, values: Mapping[str, float]) -> list[Alert]:
        """Take the ``STEP_SIGNALS`` of a step, those that were measured; judge the one before."""
        if step == self._step:
            self._values.update(values)
            return []
        alerts = self.end()
        self._step, self._values = step, dict(values)
        return alerts

    def end(self) -> list[Alert]:
        """Judge the last step."""
        alerts = []
        if self._step is not None:
            grade = Grade(self._step, math.nan, None, None, "undefined")
            for signal, value in self._judged_values():
                bad = not math.isfinite(value)
                what = f"{signal} is {value}" if bad else f"{signal} is finite again"
                called = "danger" if bad else ""
                alerts.append(self._alerts[signal].update(grade, called, what, at_once=bad))
            self._is_first = False
        self._step, self._values = None, {}
        return [alert for alert in alerts if alert is not None]

    def _judged_values(self) -> list[tuple[str, float]]:
        left_out = "grad_norm" if self._is_first else None
        return [(signal, value) for signal, value in self._values.items() if signal != left_out]


def measured_of(columns: Mapping[str, Any], place: int) -> dict[str, float]:
    """The ``STEP_SIGNALS`` of one of many steps, f64 [n] by name; a NaN norm was not measured."""
    found = {name: float(columns[name][place]) for name in STEP_SIGNALS if name in columns}
    return {name: v for name, v in found.items() if name == "loss" or not math.isnan(v)}


def graded_of(rows: Iterable[Mapping[str, Any]]) -> str | None:
    """The forward to be graded, by the rows of one step; None where no block was seen."""
    kinds = {row["kind"] for row in rows if row["signal"] == "token_rank"}
    return next((kind for kind in ("probe", "live") if kind in kinds), None)


def ratios_of(rows: Iterable[Mapping[str, Any]], kind: str, variant: str) -> dict[int, float]:
    """Rank ratios of one forward's blocks by layer, in one form, out of the rows of a step."""
    return {
        row["layer"]: row["value"]
        for row in rows
        if row["kind"] == kind and row["signal"] == "token_rank" and row.get("variant") == variant
    }
