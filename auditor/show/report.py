"""The report as JSON: what scripts read. Its names are stable; ``schema_version`` counts them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from auditor import schema
from auditor.clean.proposal import Proposal
from auditor.explain.explanation import Explanation
from auditor.show.digest import alerts, lowest_grade, suspects_of_event

_EVENT_COLUMNS: Final = (
    "event", "episode", "kind", "signal", "measured", "layer", "onset_step", "onset_low",
    "onset_high", "trough_step", "recovery_step", "before", "after", "grade_before", "grade_after",
)  # fmt: skip


def report_of(explanation: Explanation, proposal: Proposal) -> dict[str, Any]:
    """The report as plain objects that are strict JSON: what is not a finite number is null.

    ``lowest_grade`` and ``lowest_ratio`` leave the warm-up out, as alerts do. ``onset_step`` is
    ``onset_high``, the first bad sample. Names are as the data has them, not cleaned for show.
    """
    lowest = lowest_grade(explanation)
    report = {
        "schema_version": schema.REPORT_VERSION,
        "run_id": explanation.run_id,
        "verdict": explanation.verdict,
        "culprit": explanation.culprit,
        "steps": explanation.n_steps,
        "every": explanation.every,
        "lowest_grade": None if lowest is None else lowest.grade,
        "lowest_ratio": None if lowest is None else lowest.ratio,
        "alerts": alerts(explanation),
        "events": [
            _event(explanation, event)
            for event in explanation.events.sort("event").iter_rows(named=True)
        ],
        "drifts": explanation.drifts.to_dicts(),
        "proposal": {
            "summary": proposal.summary,
            "deduplicate": proposal.deduplicate,
            "weights_now": dict(proposal.weights_now),
            "weights": dict(proposal.weights),
            "epochs_now": dict(proposal.epochs_now),
            "projected_epochs": dict(proposal.projected_epochs),
        },
        "gaps": list(explanation.gaps),
    }
    plain = strict(report)
    assert isinstance(plain, dict)
    return plain


def _event(explanation: Explanation, event: Mapping[str, Any]) -> dict[str, Any]:
    number = event["event"]
    diagnosis = explanation.diagnoses.get(number)
    columns = {**event, "onset_step": event["onset_high"]}
    return {
        **{name: columns[name] for name in _EVENT_COLUMNS},
        "diagnosis": None
        if diagnosis is None
        else {
            "cause": diagnosis.cause,
            "reason": diagnosis.reason,
            "action": diagnosis.action,
        },
        "smallest_p": explanation.smallest_p.get(number),
        "suspects": [
            {name: row[name] for name in schema.SUSPECTS if name != "event"}
            for row in suspects_of_event(explanation, number)
        ],
    }


def strict(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, Mapping):
        return {str(name): strict(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [strict(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
