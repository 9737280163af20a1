"""From a run directory to its report."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from auditor.clean.proposal import Proposal, propose
from auditor.explain.batches import batches_around
from auditor.explain.explanation import Explanation
from auditor.explain.implicated import implicated_samples
from auditor.explain.pipeline import explain
from auditor.files import atomic
from auditor.run import Run
from auditor.show.html import write_html

log = logging.getLogger("auditor")


@dataclass(frozen=True)
class Report:
    """An explained run, what it proposes, and the page that shows both, where it was written."""

    explanation: Explanation
    proposal: Proposal
    html: Path | None


def produce(run: Run, html: Path | None = None, *, with_text: bool = True) -> Report:
    """Explain a run and write its page, to ``derived/report.html`` where no path is given.

    ``with_text``: whether samples are shown by the beginning of their text.

    A page that nobody asked for and that cannot be written, of a run on a read-only disk, is left
    out with a warning.

    Raises:
        OSError: the page cannot be written to ``html``.
    """
    explanation = explain(run)
    if not with_text:
        explanation = replace(explanation, previews=explanation.previews.clear())
    proposal = propose(explanation.suspects, explanation.composition)
    path = run.derived / "report.html" if html is None else html
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_html(explanation, proposal, path)
    except OSError as error:
        if html is not None:
            raise
        log.warning("%s was not written (%s); --html gives another place", path, error.strerror)
        return Report(explanation, proposal, None)
    return Report(explanation, proposal, path)


def write_implicated(run: Run, explanation: Explanation, path: Path, *, with_text: bool) -> int:
    """Write the implicated samples, by the path; returns how many."""
    samples = implicated_samples(run, explanation.events, explanation.suspects)
    if not with_text:
        samples = samples.drop("preview")
    _write(samples, path)
    return samples.height


def write_batches(explanation: Explanation, path: Path) -> int:
    """Write the steps around each event (``schema.BATCHES``), by the path; returns how many."""
    batches = batches_around(explanation)
    _write(batches, path)
    return batches.height


def _write(frame: pl.DataFrame, path: Path) -> None:
    with atomic(path) as file:
        kind = path.suffix.lower()
        if kind == ".parquet":
            frame.write_parquet(file)
        elif kind == ".csv":
            frame.write_csv(file)
        else:
            frame.write_ndjson(file)
