"""The few facts that every report leads with, picked out of an explanation's tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import polars as pl

from auditor.clean.proposal import Proposal
from auditor.explain.attribution import blamed_sources
from auditor.explain.drift import sentences_of
from auditor.explain.explanation import Diagnosis, Explanation

N_RANKED_SOURCES: Final = 3
N_DRIFTS: Final = 12
N_NAMED: Final = 5
"""Rows of each level in the short list of suspects; the full list is in the JSON and the page."""

NO_DATA_CAUSE: Final = "No data cause found."
NO_EVENT: Final = "No event: no signal left what was normal for this run."
NOTHING_TO_DO: Final = "Nothing to do."
SAMPLE_MORE: Final = "Sample more often with a lower every=, or train longer, and report again."


def not_tested(explanation: Explanation) -> str:
    """Why an event has no suspects."""
    if explanation.composition.is_empty():
        return "Not tested: no exposures were recorded."
    return "Not tested: too little history before the onset."


def no_grade(explanation: Explanation) -> str:
    """Why a run has no lowest grade."""
    if explanation.grades.is_empty():
        return "no rank was measured"
    return "no sampled step after the warm-up has a grade"


@dataclass(frozen=True)
class GradePoint:
    """A graded step: the lowest of the run, or its last."""

    step: int
    grade: int
    ratio: float
    layer: int | None


@dataclass(frozen=True)
class Episode:
    """Events that follow one another without recovery, and what speaks for the cause.

    ``speaker`` is the number of the event whose suspects are shown first: the earliest that blames
    a source, else the earliest that was tested; None where none was.
    """

    number: int
    events: list[dict[str, Any]]
    speaker: int | None
    diagnosis: Diagnosis | None

    @property
    def first_step(self) -> int:
        return min(event["onset_high"] for event in self.events)


def lowest_grade(explanation: Explanation) -> GradePoint | None:
    """The worst sampled step after the warm-up, in which every run's ranks dip."""
    graded = _graded(explanation).sort("ratio", "step")
    return _point(graded.head(1))


def last_grade(explanation: Explanation) -> GradePoint | None:
    return _point(_graded(explanation).sort("step", "attempt").tail(1))


def alerts(explanation: Explanation) -> dict[str, int]:
    """Sampled steps by alert, most frequent first."""
    counts = Counter(name for name in explanation.grades["alert"] if name is not None)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def episodes(explanation: Explanation) -> Iterator[Episode]:
    """Episodes in order of their first event."""
    by_number: dict[int, list[dict[str, Any]]] = {}
    for event in explanation.events.sort("event").iter_rows(named=True):
        by_number.setdefault(event["episode"], []).append(event)
    sources = explanation.suspects.filter(pl.col("level") == "source")
    blaming, standing = (
        set(sources.filter(pl.col("verdict") == verdict)["event"])
        for verdict in ("blamed", "coincident")
    )
    tested = set(sources["event"])
    for number, events in by_number.items():
        numbers = [event["event"] for event in events]
        # The first that has something to say.
        speaker = next(
            (n for own in (blaming, standing, tested) for n in numbers if n in own), None
        )
        found = (explanation.diagnoses.get(n) for n in numbers)
        diagnosis = explanation.diagnoses.get(speaker) if speaker is not None else None
        if diagnosis is None:
            diagnosis = next((one for one in found if one is not None), None)
        yield Episode(number, events, speaker, diagnosis)


def suspects_of_event(explanation: Explanation, event: int) -> list[dict[str, Any]]:
    return explanation.suspects.filter(pl.col("event") == event).to_dicts()


def standing_out(suspects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The short list: sources that stand out, or the likeliest few, then what is inside them."""
    sources = [row for row in suspects if row["level"] == "source"]
    chosen = [row for row in sources if row["verdict"] != "ranked"]
    ranked = [row for row in sources if row["verdict"] == "ranked" and row["z"] is not None]
    ranked.sort(key=lambda row: -abs(row["z"]))
    # Where some stand out, the next in line shows by how much.
    chosen += ranked[: 1 if chosen else N_RANKED_SOURCES]
    for level in ("cluster", "shard", "sample"):
        chosen += [row for row in suspects if row["level"] == level][:N_NAMED]
    return chosen


def is_data_cause(suspects: list[dict[str, Any]]) -> bool:
    return any(row["level"] == "source" and row["verdict"] == "blamed" for row in suspects)


def blaming(explanation: Explanation) -> list[dict[str, Any]]:
    """Sources blamed, by event, each with the strongest of its features."""
    blamed = blamed_sources(explanation.suspects)
    return blamed.unique(["event", "name"], keep="first", maintain_order=True).to_dicts()


def drifts(explanation: Explanation) -> list[str]:
    """Where the data changed, in sentences; of many the first, and how many there are."""
    told = sentences_of(explanation.drifts)
    left = len(told) - N_DRIFTS
    return told if left <= 0 else [*told[:N_DRIFTS], f"{left:,} more in the table of drifts."]


def what_to_do(explanation: Explanation, proposal: Proposal) -> str:
    """The first thing to do: the earliest data episode's action, else the earliest episode's."""
    if not explanation.judged:
        return SAMPLE_MORE
    found = [one for one in episodes(explanation) if one.diagnosis is not None]
    if not found:
        return NOTHING_TO_DO if explanation.events.is_empty() else proposal.summary
    chosen = next(
        (one for one in found if one.diagnosis and one.diagnosis.cause == "data"), found[0]
    )
    assert chosen.diagnosis is not None
    return chosen.diagnosis.action


def _graded(explanation: Explanation) -> pl.DataFrame:
    return explanation.grades.filter(
        pl.col("grade").is_not_null()
        & pl.col("ratio").is_finite()
        & (pl.col("alert") != "warming").fill_null(True)
    )


def _point(row: pl.DataFrame) -> GradePoint | None:
    if row.is_empty():
        return None
    one = row.row(0, named=True)
    return GradePoint(one["step"], one["grade"], one["ratio"], one["layer"])
