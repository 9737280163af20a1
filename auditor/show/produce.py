"""From a run directory to its report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from auditor.clean.proposal import Proposal, propose
from auditor.explain.explanation import Explanation
from auditor.explain.pipeline import explain
from auditor.run import Run
from auditor.show.html import write_html


@dataclass(frozen=True)
class Report:
    """An explained run, what it proposes, and the page that shows both."""

    explanation: Explanation
    proposal: Proposal
    html: Path


def produce(run: Run, html: Path | None = None) -> Report:
    """Explain a run and write its page, to ``derived/report.html`` where no path is given.

    Raises:
        OSError: the page cannot be written.
    """
    explanation = explain(run)
    proposal = propose(explanation.suspects, run.scan("exposures"))
    if html is None:
        html = run.derived / "report.html"
    html.parent.mkdir(parents=True, exist_ok=True)
    write_html(explanation, proposal, html)
    return Report(explanation, proposal, html)
