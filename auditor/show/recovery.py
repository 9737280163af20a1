"""A recovery plan and scored checkpoints, on a terminal and as JSON."""

from __future__ import annotations

import os
from typing import Any, Final

import polars as pl
from rich.console import Console
from rich.text import Text

from auditor.explain.checkpoints import LOSS_STEPS, MODEL_EVENTS, NEIGHBOUR_STEPS, Scored
from auditor.explain.recovery import Recovery
from auditor.measure.recovery import ROLLBACK_GRADE, Checkpoint, RecoveryPlan
from auditor.show import wording
from auditor.show.printing import heading, line, new_table
from auditor.show.report import strict
from auditor.show.text import clean, encodable, sentence

RECOVERY_VERSION: Final = 1
"""Version of the JSON that ``auditor recover --json`` and ``auditor checkpoints --json`` print."""

NO_CHECKPOINTS: Final = (
    "No checkpoint is known. Name yours with --checkpoints 'ckpt-*', or register them with "
    "monitor.checkpoint(path, step)."
)

_PATH_CHARS: Final = 400
_N_NAMES: Final = 5
_STYLES: Final = {"good": "green", "suspect": "yellow", "after onset": "red"}


def print_recovery(console: Console, recovery: Recovery) -> None:
    """Print the plan, its steps numbered, and what is known about checkpoints."""
    line(console, "Run", clean(recovery.run_id), style="bold")
    line(console, "Plan", sentence(recovery.plan.summary))
    if recovery.verification is not None:
        told = recovery.verification
        line(
            console,
            "Verified",
            f"{told.state}: resumed at step {recovery.resumed_step}, behind the drop of the "
            f"attempt before; {sentence(told.reason)}",
        )
    for number, step in enumerate(recovery.plan.steps, 1):
        console.print()
        title = encodable(clean(step.title, _PATH_CHARS), console.encoding)
        console.print(Text(f"{number}. {title}", style="bold"), soft_wrap=True)
        # Whole, not as a sentence: a path in it is to be copied.
        line(console, "", clean(step.detail, 10 * _PATH_CHARS), label_chars=3)
    _print_notes(console, recovery.scored)
    if recovery.plan.state in ("none", "recovered"):
        _print_lasting(console, recovery.scored)


def recovery_as_json(recovery: Recovery) -> dict[str, Any]:
    """The plan as strict JSON."""
    verification = recovery.verification
    return {
        "schema_version": RECOVERY_VERSION,
        "run_id": recovery.run_id,
        **plan_as_json(recovery.plan),
        "verification": None
        if verification is None
        else {
            "state": verification.state,
            "resumed_step": recovery.resumed_step,
            "n_steps": verification.n_steps,
            "reason": verification.reason,
        },
        "not_understood": list(recovery.scored.not_understood),
    }


def plan_as_json(plan: RecoveryPlan) -> dict[str, Any]:
    """A plan's fields as strict JSON."""
    drop = plan.drop
    document = {
        "state": plan.state,
        "summary": plan.summary,
        "drop": None
        if drop is None
        else {
            "level": drop.level,
            "severe": drop.severe,
            "onset_low": drop.onset_low,
            "onset_high": drop.onset_high,
            "trough_step": drop.trough.step,
            "recovery_step": drop.recovery_step,
            "grade_before": None if drop.before is None else drop.before.grade,
            "grade_after": drop.trough.grade,
            "ratio_before": None if drop.before is None else drop.before.ratio,
            "ratio_after": drop.trough.ratio,
            "layer": drop.trough.layer,
        },
        "checkpoint": _checkpoint(plan.checkpoint),
        "checkpoint_is_good": plan.checkpoint_is_good,
        "usual_learning_rate": plan.usual_learning_rate,
        "learning_rate_factor": plan.learning_rate_factor,
        "learning_rate": plan.learning_rate,
        "lowest_learning_rate": plan.lowest_learning_rate,
        "reset_optimizer": plan.reset_optimizer,
        "skip_steps": plan.skip_steps,
        "verify_steps": plan.verify_steps,
        "qk_norm": plan.qk_norm,
        "steps": [{"title": step.title, "detail": step.detail} for step in plan.steps],
    }
    plain = strict(document)
    assert isinstance(plain, dict)
    return plain


def print_checkpoints(console: Console, scored: Scored) -> None:
    """Print one line per checkpoint, the best one marked, and why some are not good."""
    if scored.table.is_empty():
        line(console, "", NO_CHECKPOINTS, label_chars=0)
        _print_notes(console, scored)
        return
    folder, names = _common_folder(scored.table["path"].to_list())
    if folder:
        line(console, "Folder", clean(folder, _PATH_CHARS))
    table = new_table(console)
    table.add_column("", no_wrap=True)
    table.add_column("checkpoint", overflow="fold")
    for name in ("step", "grade", "near", "loss", "probe"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name, row in zip(names, scored.table.iter_rows(named=True), strict=True):
        table.add_row(
            "*" if row["best"] else "",
            Text(encodable(clean(name, _PATH_CHARS), console.encoding)),
            str(row["step"]),
            _grade(row["grade"], row["ratio"]),
            f"{wording.grade(row['lowest_before'])}/{wording.grade(row['lowest_after'])}",
            wording.number(row["loss"]),
            wording.number(row["probe_loss"]),
            Text(row["verdict"], style=_STYLES[row["verdict"]]),
        )
    console.print(table)
    line(
        console,
        "",
        f"near: lowest grade of the {NEIGHBOUR_STEPS} steps up to it and after it. loss: median of "
        f"the last {LOSS_STEPS} steps. probe: loss on the probe.\n*: {_best(scored)}",
        label_chars=0,
    )
    reasons: dict[str, list[str]] = {}
    for row in scored.table.iter_rows(named=True):
        gone = "is not there any more" if row["exists"] is False else ""
        for reason in filter(None, (row["reason"], gone)):
            reasons.setdefault(reason, []).append(str(row["step"]))
    if reasons:
        heading(console, "Why")
    for reason, steps in reasons.items():
        line(console, "  -", f"step {', '.join(steps)}: {reason}", label_chars=4)
    _print_notes(console, scored)


def checkpoints_as_json(run_id: str, scored: Scored) -> dict[str, Any]:
    """The table as strict JSON; ``best`` is the path of the one to go back to, null without one."""
    best = scored.table.filter("best")["path"]
    document = {
        "schema_version": RECOVERY_VERSION,
        "run_id": run_id,
        "best": best[0] if len(best) else None,
        "onset": scored.drop_onset,
        "checkpoints": scored.table.to_dicts(),
        "not_understood": list(scored.not_understood),
        "n_torn_lines": scored.n_torn_lines,
    }
    plain = strict(document)
    assert isinstance(plain, dict)
    return plain


def _checkpoint(one: Checkpoint | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return {
        "path": one.path,
        "step": one.step,
        "attempt": one.attempt,
        "grade": one.grade,
        "loss": one.loss,
    }


def _grade(grade: int | None, ratio: float | None) -> str:
    return wording.grade(grade) if ratio is None else f"{wording.grade(grade)} {ratio:.2f}"


def _best(scored: Scored) -> str:
    if not scored.table["best"].any():
        return "none is good to go back to."
    if scored.drop_onset is None:
        return "the last good one."
    return (
        f"the last at S{ROLLBACK_GRADE} or better before the onset by step {scored.drop_onset[1]}."
    )


def _common_folder(paths: list[str]) -> tuple[str, list[str]]:
    """The folder of all paths, empty where they have none in common, and their names inside it."""
    folders = [path.rpartition("/")[0] for path in paths]
    try:
        folder = os.path.commonpath(folders) if all(folders) else ""
    except ValueError:  # absolute ones and relative ones
        folder = ""
    if folder in ("", "/") or any("://" in path for path in paths):
        return "", paths
    return folder, [path[len(folder) + 1 :] for path in paths]


def _print_lasting(console: Console, scored: Scored) -> None:
    """Signals of the model that fell and did not recover, where the grade did not or has."""
    lasting = scored.events.filter(
        pl.col("kind").is_in(list(MODEL_EVENTS - {"grade_drop"}))
        & pl.col("recovery_step").is_null()
    )
    if lasting.is_empty():
        return
    told = "; ".join(
        f"{wording.kind(row['kind'])} ({clean(row['signal'])}, {wording.onset(row)})"
        for row in lasting.iter_rows(named=True)
    )
    console.print()
    line(console, "", f"Not recovered, see auditor report: {told}.", label_chars=0)


def _print_notes(console: Console, scored: Scored) -> None:
    n_unread, n_torn = len(scored.not_understood), scored.n_torn_lines
    if n_unread:
        names = ", ".join(clean(name, _PATH_CHARS) for name in scored.not_understood[:_N_NAMES])
        more = f" and {n_unread - _N_NAMES} more" if n_unread > _N_NAMES else ""
        console.print()
        line(
            console,
            "",
            f"No step in the name of {names}{more}: write the pattern with {{step}} in its place.",
            label_chars=0,
        )
    if n_torn:
        console.print()
        torn = wording.counted(n_torn, "torn line")
        line(console, "", f"The register of checkpoints has {torn}, left out.", label_chars=0)
