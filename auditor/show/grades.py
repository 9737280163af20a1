"""Grades and alerts of a run, as ``auditor grade`` prints them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
from rich.console import Console
from rich.table import Table

from auditor.errors import RunError
from auditor.explain.grades import (
    alerts_of,
    graded_kind,
    grades_table,
    judgements_of,
    policy_of,
    step_alerts_of,
)
from auditor.measure.grading import Alert, Policy
from auditor.run import Run


@dataclass(frozen=True)
class RankGraded:
    """A rank by its own signals: ``grades`` has ``schema.GRADES``."""

    rank: int
    grades: pl.DataFrame
    alerts: Sequence[Alert]

    @property
    def lowest(self) -> Mapping[str, Any] | None:
        """The row of the lowest ratio after the warm-up, None without one."""
        warm = self.grades.filter(pl.col("alert") != "warming").sort("ratio", nulls_last=False)
        return warm.row(0, named=True) if len(warm) else None


@dataclass(frozen=True)
class Graded:
    """A run graded by a policy: its first rank, and the other ranks apart.

    ``grades``: ``schema.GRADES``; ``n_other``: sampled steps whose grade was another one live;
    ``n_live``: sampled steps with a live grade.
    """

    policy: Policy
    kind: str
    grades: pl.DataFrame
    alerts: Sequence[Alert]
    n_live: int
    n_other: int
    rank: int = 0
    others: Sequence[RankGraded] = ()


def policy_from(path: Path | None, settings: Sequence[str], base: Policy) -> Policy:
    """The policy that a file and ``name=value`` settings make out of another one.

    The file is TOML: settings at its top, or in a table named ``policy``.

    Raises:
        ValueError: the file is no TOML, or a setting is unknown or out of range.
    """
    given: dict[str, Any] = {}
    if path is not None:
        try:
            read = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not a TOML file: {error}") from error
        given |= read.get("policy", read)
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not separator:
            raise ValueError(f"--set takes name=value, got {setting!r}")
        given[name.strip()] = _number(value)
    return Policy.of({**asdict(base), **given})


def _number(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip()


def grade_run(run: Run, policy: Policy | None = None) -> Graded:
    """Grade a run again from its recorded signals.

    Raises:
        RunError: the run has no signals of blocks.
    """
    signals = run.scan("signals").collect()
    if signals.filter(pl.col("signal") == "token_rank").is_empty():
        raise RunError("no signals to grade", path=run.path, remedy="Record it with a GradeMonitor")
    policy = policy_of(run) if policy is None else policy
    kind = graded_kind(signals)
    ranks = signals.filter(pl.col("signal") == "token_rank")["rank"].unique().sort().to_list()
    first, *others = (_grade_rank(signals, policy, rank) for rank in ranks)
    live = (
        signals.filter((pl.col("signal") == "grade") & (pl.col("rank") == first.rank))
        .select("attempt", "step", live=pl.col("value").cast(pl.Int32))
        .join(first.grades.select("attempt", "step", "grade"), on=["attempt", "step"])
    )
    n_other = int((live["live"].ne_missing(live["grade"])).sum())
    return Graded(policy, kind, first.grades, first.alerts, len(live), n_other, first.rank, others)


def _grade_rank(signals: pl.DataFrame, policy: Policy, rank: int) -> RankGraded:
    judged = list(judgements_of(signals, policy, rank))
    alerts = alerts_of(judged, step_alerts_of(signals, policy, rank))
    return RankGraded(rank, grades_table(judged), alerts)


def grades_as_json(graded: Graded) -> Mapping[str, Any]:
    """Policy, grades per sampled step, and alerts."""
    return {
        "policy": asdict(graded.policy),
        "kind": graded.kind,
        "grades": graded.grades.to_dicts(),
        "alerts": [asdict(_finite(alert)) for alert in graded.alerts],
        "live": {"sampled_steps": graded.n_live, "graded_otherwise": graded.n_other},
        "rank": graded.rank,
        "other_ranks": [
            {
                "rank": other.rank,
                "sampled_steps": len(other.grades),
                "lowest": other.lowest,
                "alerts": [asdict(_finite(alert)) for alert in other.alerts],
            }
            for other in graded.others
        ],
    }


def _finite(alert: Alert) -> Alert:
    return alert if alert.ratio == alert.ratio else replace(alert, ratio=None)  # type: ignore[arg-type]


def print_grades(console: Console, graded: Graded) -> None:
    """Stretches of equal grade and alert, then the alerts."""
    table = Table(box=None, pad_edge=False)
    for name in ("steps", "samples", "grade", "lowest ratio", "block", "alert"):
        table.add_column(name, justify="right" if name != "alert" else "left")
    stretch = pl.struct("attempt", "grade", "alert").rle_id()
    for own in graded.grades.with_columns(stretch=stretch).partition_by(
        "stretch", maintain_order=True
    ):
        first, last = own["step"][0], own["step"][-1]
        lowest = own.sort("ratio", nulls_last=True).row(0, named=True)
        table.add_row(
            f"{first:,}-{last:,}" if last != first else f"{first:,}",
            f"{len(own):,}",
            "none" if lowest["grade"] is None else f"S{lowest['grade']}",
            "" if lowest["ratio"] is None else f"{lowest['ratio']:.2f}",
            "" if lowest["layer"] is None else str(lowest["layer"]),
            lowest["alert"],
        )
    of_rank = f" of rank {graded.rank}" if graded.others else ""
    console.print(
        f"Graded on the {graded.kind} batch{of_rank}, {len(graded.grades):,} sampled steps."
    )
    console.print(table)
    console.print()
    if not graded.alerts:
        console.print("No alert.")
    for alert in graded.alerts:
        console.print(alert.message, markup=False)
    _print_others(console, graded)
    if graded.n_other:
        console.print(
            f"{graded.n_other:,} of {graded.n_live:,} sampled steps were graded otherwise live: "
            "by another policy, or an earlier version."
        )


def _print_others(console: Console, graded: Graded) -> None:
    """One line per further rank; alerts that the first rank did not raise at the same step."""
    if not graded.others:
        return
    console.print()
    known = {(alert.signal, alert.level, alert.step) for alert in graded.alerts}
    for other in graded.others:
        lowest = other.lowest
        told = "warming" if lowest is None else f"lowest {_lowest(lowest)}"
        console.print(f"Rank {other.rank}: {len(other.grades):,} sampled steps, {told}.")
        for alert in other.alerts:
            if (alert.signal, alert.level, alert.step) not in known:
                console.print(f"  rank {other.rank}, {alert.message}", markup=False)


def _lowest(row: Mapping[str, Any]) -> str:
    if row["grade"] is None:
        return f"undefined at step {row['step']:,}"
    return f"S{row['grade']}, ratio {row['ratio']:.2f} at step {row['step']:,}"
