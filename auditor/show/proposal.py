"""A proposal on a terminal and as JSON: what is proposed, why, and what may come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from auditor.clean.proposal import CLEANED, Change, Proposal, Stage
from auditor.explain.attribution import what_rose
from auditor.explain.contrast import STRETCH_STEPS
from auditor.explain.stretches import SkipList
from auditor.show import wording
from auditor.show.printing import heading, line, new_table
from auditor.show.report import strict
from auditor.show.text import clean, encodable, sentence

PROPOSAL_VERSION: Final = 1
"""Version of the JSON that ``auditor propose --json`` prints."""

SKIP_VERSION: Final = 1
"""Version of ``skip.json``."""

NOTHING_RECORDED: Final = "No change proposed: no exposures were recorded."

_ASSOCIATION: Final = (
    "The intervals are of an association. What a change does to the loss or the grade has no "
    "interval here; a replay from a checkpoint before the event would give one."
)


def print_proposal(
    console: Console, run_id: str, verdict: str, proposal: Proposal, stages: Sequence[Stage]
) -> None:
    """Print the changes in order of their evidence, the mix, and the stages of a ramp."""
    line(console, "Run", clean(run_id), style="bold")
    line(console, "Verdict", sentence(verdict))
    line(console, "Proposal", sentence(summary(proposal)), style="bold")
    for number, change in enumerate(proposal.changes, 1):
        heading(console, encodable(f"{number}. {_title(change)}", console.encoding))
        line(console, "  why", sentence(_why(change, proposal)), label_chars=12)
        line(console, "  expected", sentence(_expected(change, proposal)), label_chars=12)
    if proposal.weights_now:
        heading(console, "Mix")
        _print_mix(console, proposal)
    if len(stages) > 1:
        heading(console, "Ramp")
        _print_ramp(console, stages)
    if proposal.changes:
        console.print()
        line(console, "", _ASSOCIATION, label_chars=0)


def summary(proposal: Proposal) -> str:
    """The proposal in a sentence or two."""
    return proposal.summary if proposal.weights_now else NOTHING_RECORDED


def proposal_as_json(
    run_id: str, verdict: str, proposal: Proposal, stages: Sequence[Stage]
) -> dict[str, Any]:
    """The proposal as strict JSON; ``weights`` are those that are where nothing is proposed."""
    document = {
        "schema_version": PROPOSAL_VERSION,
        "run_id": run_id,
        "verdict": verdict,
        "summary": summary(proposal),
        "proposed": bool(proposal.changes),
        "changes": [asdict(change) for change in proposal.changes],
        "max_factor": proposal.max_factor,
        "max_epochs": proposal.max_epochs,
        "weights_now": proposal.weights_now,
        "weights": proposal.mix,
        "epochs_now": proposal.epochs_now,
        "projected_epochs": proposal.projected_epochs or proposal.epochs_now,
        "over_budget": proposal.over_budget or {},
        "stages": [asdict(stage) for stage in stages] if proposal.weights_now else [],
    }
    plain = strict(document)
    assert isinstance(plain, dict)
    return plain


def skip_as_json(run_id: str, skipped: SkipList) -> dict[str, Any]:
    """``skip.json``, as ``AuditedSampler(skip=)`` reads it."""
    return {
        "schema_version": SKIP_VERSION,
        "run_id": run_id,
        "from_step": skipped.from_step,
        "stretches": [list(stretch) for stretch in skipped.stretches],
        "batches": list(skipped.batches),
    }


def _title(change: Change) -> str:
    name = clean(change.source)
    if change.factor is None:
        return f"Deduplicate {name}"
    return f"Reweight {name}: x {change.factor:.2f}"


def _why(change: Change, proposal: Proposal) -> str:
    if change.reason == "budget":
        epochs = wording.number(proposal.epochs_now[change.source])
        return (
            f"Each distinct content was seen {epochs} times; the budget is "
            f"{proposal.max_epochs:g} epochs."
        )
    rose = what_rose({**asdict(change), "name": change.source})
    return (
        f"Blamed before event {change.event}: {rose}, in the strongest {STRETCH_STEPS} steps "
        f"(z {wording.deviations(change.z)})."
    )


def _expected(change: Change, proposal: Proposal) -> str:
    if change.factor is not None:
        words = (
            f"{wording.percent(proposal.weights_now[change.source])} of the samples become "
            f"{wording.percent(proposal.weights[change.source])}, "
            f"{wording.number(proposal.epochs_now[change.source])} epochs become "
            f"{wording.number(proposal.projected_epochs[change.source])}."
        )
        if change.feature in CLEANED:
            words += " Without deduplication, its repeats fall in the same proportion."
        return words + " No interval of an effect on the model can be given."
    what = wording.feature(change.feature or "")
    if not (wording.is_number(change.low) and wording.is_number(change.high)):
        return f"Fewer {what}; no interval can be given."
    return (
        f"{what.capitalize()} back to what they were: by a factor of "
        f"{wording.number(change.lift)} (95% interval {wording.number(change.low)} to "
        f"{wording.number(change.high)}) in such a stretch."
    )


def _print_mix(console: Console, proposal: Proposal) -> None:
    epochs = proposal.projected_epochs or proposal.epochs_now
    over = proposal.over_budget or {}
    table = new_table(console)
    table.add_column("source", overflow="fold")
    for name in ("weight now", "proposed", "epochs now", "projected"):
        table.add_column(name, justify="right")
    table.add_column("")
    for name, weight in proposal.mix.items():
        table.add_row(
            Text(encodable(clean(name), console.encoding)),
            wording.percent(proposal.weights_now[name]),
            wording.percent(weight),
            wording.number(proposal.epochs_now[name]),
            wording.number(epochs[name]),
            "over budget" if name in over else "",
        )
    console.print(table)
    line(
        console,
        "",
        "Shares of the samples. Epochs: how often each distinct content is seen in a run as long "
        f"as this one; at most {proposal.max_epochs:g}, and weights change by a factor of "
        f"{proposal.max_factor:g} at most, which goes first.",
        label_chars=0,
    )


def _print_ramp(console: Console, stages: Sequence[Stage]) -> None:
    table = new_table(console)
    table.add_column("steps", no_wrap=True)
    for name in stages[-1].weights:
        title = Text(encodable(clean(name), console.encoding))
        table.add_column(title, justify="right", overflow="fold")
    for stage in stages:
        last = "" if stage.last_step is None else f" to {stage.last_step}"
        values = [wording.percent(weight) for weight in stage.weights.values()]
        table.add_row(f"{stage.first_step}{last or ' on'}", *values)
    console.print(table)
