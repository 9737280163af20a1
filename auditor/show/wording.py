"""Words and numbers as every report gives them, so that terminal and page agree to the digit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

KINDS: Final[Mapping[str, str]] = {
    "grade_drop": "grade dropped",
    "ratio_fall": "rank ratio fell",
    "input_fall": "input diversity fell",
    "loss_spike": "loss spiked",
    "grad_spike": "gradient norm spiked",
    "probe_loss_rise": "probe loss rose",
    "entropy_fall": "attention entropy fell",
    "non_finite": "value not finite",
}

FEATURES: Final[Mapping[str, str]] = {
    "share": "share of the batch",
    "duplication": "near-duplicates",
    "similarity": "samples that share much",
    "repetition": "repeats inside samples",
    "length": "mean length of its samples",
    "loss": "loss of its samples",
}

VERDICTS: Final[Mapping[str, str]] = {
    "blamed": "stands out, and changed before the model was harmed, or the loss of its samples "
    "rose at once and that of no others: the likeliest cause in the data, by association",
    "coincident": "stands out, but without the order of events that a data cause leaves",
    "ranked": "listed by size; does not stand out, or was not tested",
}

NOT_AVAILABLE: Final = "n/a"


def is_number(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def number(value: float | None) -> str:
    """Three significant digits: ``0.0123``, ``12.3``, ``3,733``."""
    if value is None or not is_number(value):
        return NOT_AVAILABLE
    if abs(value) >= 1e6:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(value: float | None) -> str:
    if value is None or not is_number(value):
        return NOT_AVAILABLE
    if value == 0:
        return "0%"
    return f"{value:.2%}" if abs(value) < 0.01 else f"{value:.1%}"


def exposure(row: Mapping[str, Any], name: str) -> str:
    """``exposure`` or ``control`` of a row of ``schema.SUSPECTS``: a share, or a mean."""
    if not is_mean(row):
        return percent(row[name])
    return number(row[name]) + (" nats" if row["feature"] == "loss" else "")


def is_mean(row: Mapping[str, Any]) -> bool:
    """Whether a row is of a mean, that of a source; what is inside of it has a share."""
    return row["feature"] in ("length", "loss") and row["level"] == "source"


def chance(value: float | None) -> str:
    """A p or q value in two significant digits."""
    if not is_number(value):
        return NOT_AVAILABLE
    return f"{value:.2g}"


def deviations(value: float | None) -> str:
    if value is None or not is_number(value):
        return NOT_AVAILABLE
    text = f"{value:.1f}"
    return "0.0" if text == "-0.0" else text


def grade(value: int | None) -> str:
    return NOT_AVAILABLE if value is None else f"S{value}"


def block(layer: int | None) -> str:
    """Where in the model; empty where a signal has no place."""
    if layer is None:
        return ""
    return "embedding" if layer == -1 else f"block {layer}"


def counted(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def lag(n: int) -> str:
    """Steps from where the exposure changed to the onset, which it may also follow."""
    return f"lag {counted(n, 'step')}" if n >= 0 else f"began {counted(-n, 'step')} after the onset"


def place(rows: Iterable[Mapping[str, Any]]) -> str:
    """Where suspects stand to their event: before it, unless a stretch began after its onset."""
    return "around" if any((row["lag"] or 0) < 0 for row in rows) else "before"


def bound(p: float | None, least: float | None) -> str:
    """What to make of a p that could not have been smaller."""
    if p is None or least is None or least <= 0.05 or p > least + 1e-9:
        return ""
    return "; as small as one event allows in so short a run: the verdict rests on z"


def kind(name: str) -> str:
    return KINDS.get(name, name.replace("_", " "))


def feature(name: str) -> str:
    return FEATURES.get(name, name.replace("_", " "))


def onset(event: Mapping[str, Any]) -> str:
    """The interval an onset lies in: after the last healthy sample, by the first bad one."""
    low, high = event["onset_low"], event["onset_high"]
    if low is None or high is None:
        return f"by step {high}" if high is not None else "at an unknown step"
    return f"at step {high}" if high - low <= 1 else f"after step {low}, by step {high}"


def values(event: Mapping[str, Any], arrow: str = "->") -> str:
    """The signal before an event and at its worst."""
    return f"{number(event['before'])} {arrow} {number(event['after'])}"


def grades(event: Mapping[str, Any], arrow: str = "->") -> str:
    """The grade before an event and at its worst; empty where there is none."""
    if event["grade_before"] is None and event["grade_after"] is None:
        return ""
    return f"{grade(event['grade_before'])} {arrow} {grade(event['grade_after'])}"


def course(event: Mapping[str, Any], arrow: str = "->") -> str:
    """Before and after of an event, and what became of its grade."""
    graded = grades(event, arrow)
    return values(event, arrow) + (f", grade {graded}" if graded else "")


def recovery(event: Mapping[str, Any]) -> str:
    worst = f"worst at step {event['trough_step']}" if event["trough_step"] is not None else ""
    step = event["recovery_step"]
    end = "not recovered in this run" if step is None else f"recovered at step {step}"
    return ", ".join(filter(None, (worst, end)))


def lift(row: Mapping[str, Any]) -> str:
    if not is_number(row["lift"]):
        return NOT_AVAILABLE
    return f"{number(row['lift'])} ({number(row['low'])} to {number(row['high'])})"
