"""From a run directory to its explanation, writing the derived tables on the way."""

from __future__ import annotations

import contextlib

import numpy as np
import polars as pl

from auditor.explain.attribution import (
    blamed_sources,
    standing_out_before,
    suspects_of,
    what_rose,
)
from auditor.explain.composition import composition_of
from auditor.explain.diagnosis import diagnose, learning_rate_jumps
from auditor.explain.drift import drifts_of, sentences_of
from auditor.explain.events import MIN_BEST_SAMPLES, events_of
from auditor.explain.explanation import Explanation
from auditor.explain.grades import grades_of, policy_of
from auditor.measure.grading import DEFAULT_POLICY
from auditor.run import Run


def explain(run: Run) -> Explanation:
    """Explain a run. The derived tables are rebuilt from the facts and kept under ``derived/``.

    Raises:
        SchemaVersionError: a ledger is of another version of the format.
    """
    # Of a long run most signals are those of single heads, which nothing below looks at.
    signals = run.scan("signals").filter(pl.col("signal") != "entropy").collect()
    composition = composition_of(run)
    grades = grades_of(signals, policy_of(run))
    events = events_of(signals, grades)
    jumps = learning_rate_jumps(events, signals)
    suspects, smallest_p = suspects_of(events, composition, run.exposures, jumps)
    drifts = drifts_of(composition)
    diagnoses = diagnose(events, suspects, signals, jumps, has_exposures=len(composition) > 0)
    with contextlib.suppress(OSError):  # a run on a read-only disk is explained all the same
        for table, frame in (
            ("composition", composition),
            ("grades", grades),
            ("events", events),
            ("suspects", suspects),
            ("drifts", drifts),
        ):
            run.write_derived(table, frame)
    blamed = blamed_sources(suspects)
    n_judged = _n_judged(signals, grades)
    judged = n_judged > MIN_BEST_SAMPLES or not events.is_empty()
    return Explanation(
        run_id=run.run_id,
        n_steps=_n_steps(composition, signals),
        every=_sampling_interval(grades),
        signals=signals,
        grades=grades,
        events=events,
        composition=composition,
        suspects=suspects,
        drifts=drifts,
        previews=_previews(run, suspects),
        diagnoses=diagnoses,
        smallest_p=smallest_p,
        verdict=_verdict(events, suspects, blamed, composition, drifts)
        if judged
        else _too_short(signals, grades),
        culprit=None if blamed.is_empty() else str(blamed["name"][0]),
        judged=judged,
        gaps=run.gaps(),
    )


def _verdict(
    events: pl.DataFrame,
    suspects: pl.DataFrame,
    blamed: pl.DataFrame,
    composition: pl.DataFrame,
    drifts: pl.DataFrame,
) -> str:
    if events.is_empty():
        none = "No event: no signal left what was normal for this run."
        if composition.is_empty():
            return f"{none} No exposures were recorded: data can be neither blamed nor cleared."
        told = sentences_of(drifts.filter(pl.col("kind") == "mix"))
        return f"{none} {told[0]}" if told else none
    n = events["episode"].n_unique()
    counted = "1 episode" if n == 1 else f"{n} episodes"
    if blamed.is_empty():
        if composition.is_empty():
            return (
                f"{counted}; no exposures were recorded, so data can be neither blamed nor cleared."
            )
        if suspects.is_empty():
            return (
                f"{counted}, not tested: too little history before the onset to compare the data "
                "with. Data can be neither blamed nor cleared."
            )
        content = standing_out_before(suspects)
        if len(content):
            return (
                f"{counted}; no source is blamed: {what_rose(content.row(0, named=True))}, but "
                "nothing tells that this came before the harm, or it came beside another cause."
            )
        stood_out = suspects.filter(pl.col("verdict") == "coincident")
        mixed = stood_out.filter((pl.col("feature") == "share") & (pl.col("z") > 0))
        mixed = mixed.filter(pl.col("lag") >= 0)
        if len(mixed):
            row = mixed.row(0, named=True)
            since = int(events.row(row["event"], named=True)["onset_high"]) - row["lag"]
            return (
                f"{counted}; no source is blamed, but the mix had changed: {row['name']} rose from "
                f"{row['control']:.0%} to {row['exposure']:.0%} of it by step {since}, "
                f"{row['lag']} steps before event {row['event']}. A change of the mix can move "
                "these signals by itself."
            )
        if len(stood_out):
            names = ", ".join(stood_out["name"].unique().sort())
            return f"{counted}; no data cause found: {names} changed about then, but not before."
        return f"{counted}; no data cause found: no source stood out before the onset."
    row = blamed.row(0, named=True)
    event = events.row(row["event"], named=True)
    return (
        f"{counted}; the first to blame is {row['name']}: {what_rose(row)} ({row['z']:.0f} robust "
        f"deviations) at the onset by step {event['onset_high']}. This is an association; a replay "
        "would show the cause."
    )


def _n_judged(signals: pl.DataFrame, grades: pl.DataFrame) -> int:
    """Sampled steps after the warm-up; of a run without grades, records of its longest series."""
    if len(grades):
        return grades.filter(pl.col("alert") != "warming").height
    return max(0, _n_records(signals) - DEFAULT_POLICY.warmup_samples)


def _n_records(signals: pl.DataFrame) -> int:
    judged = signals.filter(pl.col("signal").is_in(["loss", "grad_norm", "probe_loss"]))
    counts = judged.group_by("attempt", "rank", "signal").len()["len"]
    return 0 if counts.is_empty() else int(counts.max())  # type: ignore[arg-type]


def _too_short(signals: pl.DataFrame, grades: pl.DataFrame) -> str:
    n_samples = DEFAULT_POLICY.warmup_samples + MIN_BEST_SAMPLES + 1
    n_steps = DEFAULT_POLICY.warmup_steps
    if grades.is_empty() and len(signals):
        return (
            f"Not judged: {_n_records(signals)} records; at least {n_samples}, and {n_steps} "
            "steps, are needed before an event can be told. No exposures were recorded: data can "
            "be neither blamed nor cleared."
        )
    return (
        f"Not judged: {len(grades)} sampled steps; at least {n_samples}, and {n_steps} steps, are "
        "needed before an event can be told. Lower every= for a short run."
    )


def _n_steps(composition: pl.DataFrame, signals: pl.DataFrame) -> int:
    steps = composition["step"] if len(composition) else signals["step"]
    return int(steps.n_unique())


def _sampling_interval(grades: pl.DataFrame) -> int | None:
    steps = np.unique(grades["step"].to_numpy())
    return int(np.median(np.diff(steps))) if len(steps) > 1 else None


def _previews(run: Run, suspects: pl.DataFrame) -> pl.DataFrame:
    names = suspects.filter(pl.col("level").is_in(["cluster", "sample"]))["name"].unique().to_list()
    samples = run.scan("samples").filter(pl.col("sample_id").is_in(names))
    previews = samples.select("sample_id", "source", "preview").unique("sample_id", keep="first")
    return previews.collect().sort("sample_id")
