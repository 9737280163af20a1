"""What an event most likely is: a table of symptoms, as rules over signals and suspects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import polars as pl

from auditor.explain.attribution import (
    INPUT_SIDE,
    MODEL_SIDE,
    blamed_sources,
    standing_out_before,
    what_rose,
)
from auditor.explain.explanation import Diagnosis

LR_JUMP: Final = 2.0
"""Learning rate at the onset over its median before, from which the jump is named."""

LR_HISTORY_STEPS: Final = 50
LR_LOOKBACK_STEPS: Final = 10


def learning_rate_jumps(events: pl.DataFrame, signals: pl.DataFrame) -> dict[int, float]:
    """By episode, how many times the learning rate rose at its onset, from ``LR_JUMP`` on."""
    known = signals.filter((pl.col("signal") == "lr") & pl.col("value").is_finite())
    rates = known.group_by("step").agg(pl.col("value").last())
    jumps = {
        int(str(number)): _jump(rates, *_onset(episode))
        for (number,), episode in events.group_by("episode")
    }
    return {number: jump for number, jump in jumps.items() if jump >= LR_JUMP}


def _onset(episode: pl.DataFrame) -> tuple[int, int]:
    """Last good and first bad step of the first event that is more than a poor input.

    A poor input may have come and gone before, and belong to the episode by its time alone.
    """
    harm = episode.filter(~pl.col("kind").is_in(INPUT_SIDE))
    first = (harm if len(harm) else episode).sort("onset_high", maintain_order=True)
    return int(first["onset_low"][0]), int(first["onset_high"][0])


def diagnose(
    events: pl.DataFrame,
    suspects: pl.DataFrame,
    signals: pl.DataFrame,
    jumps: Mapping[int, float],
    *,
    has_exposures: bool = True,
) -> dict[int, Diagnosis]:
    """A diagnosis per event; events of one episode share what is found for the episode.

    ``jumps`` are those of :func:`learning_rate_jumps`. Without exposures, as in a log of another
    tool, no batch can be looked at here.
    """
    diagnoses = {}
    for (number,), episode in events.group_by("episode", maintain_order=True):
        numbers = episode["event"].to_list()
        own = suspects.filter(pl.col("event").is_in(numbers))
        found = _of_episode(episode, own, signals, jumps.get(int(str(number))), has_exposures)
        diagnoses.update(dict.fromkeys(numbers, found))
    return diagnoses


def _of_episode(
    episode: pl.DataFrame,
    suspects: pl.DataFrame,
    signals: pl.DataFrame,
    jump: float | None,
    has_exposures: bool,
) -> Diagnosis:
    blamed = blamed_sources(suspects)
    kinds = set(episode["kind"])
    if not blamed.is_empty():
        # The earliest event of the episode speaks: later lookbacks hold the fault for longer.
        return _data(blamed.row(0, named=True), jump, is_harmed=not kinds.isdisjoint(MODEL_SIDE))
    if jump is not None:
        rose = standing_out_before(suspects)
        beside = (
            "and no source, duplicate or repetition stands out before it"
            if rose.is_empty()
            else f"and {what_rose(rose.row(0, named=True))}: nothing tells which of them did it"
        )
        return Diagnosis(
            "optimizer",
            f"the learning rate rose {jump:.1f} times at the onset, {beside}",
            "Lower the peak or smooth the schedule; roll back to a checkpoint before the onset if "
            "the grade has not recovered.",
        )
    if "non_finite" in kinds:
        return Diagnosis(
            "numerics",
            "a loss or gradient norm was not finite",
            "Roll back before the onset; check loss scaling and the range of the last residual.",
        )
    if "entropy_fall" in kinds:
        return Diagnosis(
            "attention",
            "attention entropy, over all heads, fell below half of its usual level",
            "Check for missing QK normalisation and for the size of attention logits.",
        )
    if kinds <= {"grad_spike", "loss_spike"}:
        has_rank = (signals["signal"] == "token_rank").any()
        look = (
            "Look at the batches at the onset"
            if has_exposures
            else "Have the loader of that run tell the batches at the onset, and auditor compare "
            "whether other runs spike there as well"
        )
        rank = " while the rank stayed normal" if has_rank else "; no rank was measured"
        return Diagnosis(
            "dirty batch",
            f"loss or gradient norm jumped{rank}",
            f"{look}; if it recurs, clip to 1.0 or lower the peak.",
        )
    if kinds == {"input_fall"}:
        return Diagnosis(
            "undetermined",
            "the input was poor for a while and the model did not follow",
            "Look at the batches at the onset.",
        )
    return Diagnosis(
        "undetermined",
        "no data cause found, and no known symptom fits",
        "Replay from a checkpoint before the onset with and without the batches before it.",
    )


def _data(row: dict[str, Any], jump: float | None, *, is_harmed: bool) -> Diagnosis:
    reason = what_rose(row)
    if not is_harmed:
        reason += "; the model did not follow"
    elif row["feature"] != "loss" or row["z"] < 0:
        reason += ", before the model was harmed"
    if jump is not None:
        reason += f"; the learning rate also rose {jump:.1f} times, which may share the blame"
    is_repeated = row["feature"] in ("duplication", "repetition")
    if not is_harmed:
        first = "Deduplicate" if is_repeated else "Look at its samples"
        return Diagnosis("data", reason, f"{first} before more of them come.")
    remedy = (
        "deduplicate, roll back to a checkpoint before the onset and train on the cleaned shards."
        if is_repeated
        else "look at its samples, roll back to a checkpoint before the onset and train without "
        "them or with less of them."
    )
    return Diagnosis("data", reason, f"Stop if it is still running; {remedy}")


def _jump(rates: pl.DataFrame, low: int, high: int) -> float:
    """How many times the learning rate, by step, rose around an onset; 1 where nothing tells."""
    begin = low - LR_LOOKBACK_STEPS
    before = rates.filter(pl.col("step").is_between(begin - LR_HISTORY_STEPS, begin))["value"]
    around = rates.filter(pl.col("step").is_between(begin, high))["value"]
    if before.is_empty() or around.is_empty():
        return 1.0
    usual = float(np.median(before.to_numpy()))
    return float(around.to_numpy().max()) / usual if usual > 0 else 1.0
