"""What was consumed, gathered for a moment and written as a few frames.

A frame costs some 200 bytes however little it holds, so batches, steps, scores and losses of up to
``FLUSH_BATCHES`` batches share theirs. Frame kinds, column by column (nb batches, n their samples):

- ``batches``: batch [nb], n_samples [nb], state [nb] (index into ``schema.STATES``), key [n];
  position [n], n_tokens [n] where a row of the batch packs several samples;
- ``steps``: step, batch, state: one row per batch that a step closed over;
- ``renumbered``: closed, step: steps that turned out to have another number;
- ``scores``: batch [nb], n_samples [nb], equal_batch, equal_window (u8 [n], equal sketch bytes,
  255: unscored), dup_run [n], repetition (u16 [n], of 65535); dup_at, dup_of: places and keys of
  the nearest samples, where there are any;
- ``losses``: n_batches, n_losses per group, batch, loss: groups of batches, their samples' losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from auditor.ledger import Frame
from auditor.record.duplication import Scores
from auditor.record.identity import Parts
from auditor.schema import STATES, UNSCORED

FLUSH_BATCHES: Final = 64
"""Batches that wait for each other at most."""


class ExposureBuffer:
    """Facts about exposures on their way to the ledger."""

    def __init__(self) -> None:
        self._batches: list[tuple[int, int, np.ndarray, Parts | None]] = []
        self._steps: list[tuple[int, int, Sequence[int]]] = []
        self._renumbered: list[tuple[int, int]] = []
        self._scores: list[tuple[int, Scores]] = []
        self._losses: list[tuple[Sequence[int], np.ndarray]] = []

    @property
    def full(self) -> bool:
        facts = len(self._batches), len(self._steps), len(self._scores), len(self._losses)
        return max(facts) >= FLUSH_BATCHES

    def add_batch(self, batch: int, state: str, keys: np.ndarray, parts: Parts | None) -> None:
        """A batch with its keys i64 [n]; their parts where rows pack several samples."""
        self._batches.append((batch, STATES.index(state), keys, parts))

    def add_step(self, step: int, state: str, batches: Sequence[int]) -> None:
        """A step closed over these batches: ``trained`` or ``discarded``."""
        self._steps.append((step, STATES.index(state), batches))

    def add_renumbered(self, closed: int, step: int) -> None:
        """The step that was closed under one number has another."""
        self._renumbered.append((closed, step))

    def add_scores(self, batch: int, scores: Scores) -> None:
        self._scores.append((batch, scores))

    def add_losses(self, batches: Sequence[int], losses: np.ndarray) -> None:
        """Losses f32 [samples of these batches in order]."""
        self._losses.append((batches, losses))

    def take(self) -> list[Frame]:
        """All that waits, as frames; the buffer is empty afterwards."""
        frames = []
        if self._batches:
            frames += _batch_frames(self._batches)
        if self._steps:
            frames.append(_step_frame(self._steps))
        if self._renumbered:
            closed, step = zip(*self._renumbered, strict=True)
            frames.append(
                Frame("renumbered", {}, {"closed": np.asarray(closed), "step": np.asarray(step)})
            )
        if self._scores:
            frames.append(_score_frame(self._scores))
        if self._losses:
            frames.append(_loss_frame(self._losses))
        self.__init__()  # type: ignore[misc]
        return frames


def _batch_frames(
    batches: Sequence[tuple[int, int, np.ndarray, Parts | None]],
) -> list[Frame]:
    frames = []
    for packed in (False, True):
        chosen = [one for one in batches if (one[3] is not None) == packed]
        if not chosen:
            continue
        numbers, states, keys, parts = zip(*chosen, strict=True)
        columns: dict[str, Any] = {
            "batch": np.asarray(numbers),
            "n_samples": np.asarray([len(one) for one in keys]),
            "state": np.asarray(states),
            "key": np.concatenate(keys),
        }
        if packed:
            columns["position"] = np.concatenate([one.positions for one in parts])
            columns["n_tokens"] = np.concatenate([one.n_tokens for one in parts])
        frames.append(Frame("batches", {}, columns))
    return frames


def _step_frame(steps: Sequence[tuple[int, int, Sequence[int]]]) -> Frame:
    sizes = [len(batches) for _, _, batches in steps]
    return Frame(
        "steps",
        {},
        {
            "step": np.repeat([step for step, _, _ in steps], sizes),
            "state": np.repeat([state for _, state, _ in steps], sizes),
            "batch": np.asarray([batch for _, _, batches in steps for batch in batches]),
        },
    )


def _score_frame(scored: Sequence[tuple[int, Scores]]) -> Frame:
    scores = [one for _, one in scored]
    known = np.concatenate([one.known for one in scores])
    dup_of = np.concatenate([one.dup_of for one in scores])
    at = np.flatnonzero(dup_of >= 0)

    def equal(name: str) -> np.ndarray:
        values = np.concatenate([getattr(one, name) for one in scores])
        return np.where(known, values, UNSCORED).astype(np.uint8)

    return Frame(
        "scores",
        {},
        {
            "batch": np.asarray([batch for batch, _ in scored]),
            "n_samples": np.asarray([len(one.known) for one in scores]),
            "equal_batch": equal("n_equal_batch"),
            "equal_window": equal("n_equal_window"),
            "dup_run": np.concatenate([one.dup_run for one in scores]),
            "repetition": np.rint(
                np.concatenate([one.repetition for one in scores]) * 65535
            ).astype(np.uint16),
            "dup_at": at,
            "dup_of": dup_of[at],
        },
    )


def _loss_frame(losses: Sequence[tuple[Sequence[int], np.ndarray]]) -> Frame:
    return Frame(
        "losses",
        {},
        {
            "n_batches": np.asarray([len(batches) for batches, _ in losses]),
            "n_losses": np.asarray([len(values) for _, values in losses]),
            "batch": np.asarray([batch for batches, _ in losses for batch in batches]),
            "loss": np.concatenate([values.astype(np.float32) for _, values in losses]),
        },
    )
