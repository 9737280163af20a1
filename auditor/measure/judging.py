"""A sampled step judged: its grade, which signals left their normal, and what a person is told.

The monitor does it live, the report and ``auditor grade`` do it again from the recorded signals:
one definition, the same rows, the same result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Judgement:
    """What one sampled step came to."""

    grade: Grade
    deviations: Sequence[Deviation]
    alerts: Sequence[Alert]

    @property
    def suspicious(self) -> bool:
        """Whether to look again soon."""
        return bool(self.deviations) or self.grade.alert not in {"warming", "healthy"}


class Judge:
    """Judges the samples of one attempt in order.

    Args:
        policy: thresholds of grades and alerts.
        graded: ``probe`` or ``live``: the forward whose blocks are graded.
    """

    def __init__(self, policy: Policy = DEFAULT_POLICY, *, graded: str) -> None:
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
        return Judgement(grade, deviations, [alert for alert in raised if alert is not None])

    def _alert(self, signal: str, deviation: Deviation | None, grade: Grade) -> Alert | None:
        alerts = self._alerts.setdefault(signal, Alerts(signal, self._policy))
        if deviation is None:
            return alerts.update(grade, "", f"{signal} is back to normal", at_once=False)
        if signal == "non_finite":
            return alerts.update(grade, "danger", str(deviation), at_once=True)
        return alerts.update(grade, "watch", str(deviation), at_once=False)


def ratios_of(rows: Iterable[Mapping[str, Any]], kind: str, variant: str) -> dict[int, float]:
    """Rank ratios of one forward's blocks by layer, in one form, out of the rows of a step."""
    return {
        row["layer"]: row["value"]
        for row in rows
        if row["kind"] == kind and row["signal"] == "token_rank" and row.get("variant") == variant
    }
