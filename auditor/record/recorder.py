"""The one writer of a run in this process, shared by sampler and monitor.

The training thread only notes what happened, in order, on a bounded queue. One background thread
describes samples, scores duplication, takes eigenvalues and appends to the ledgers. A hung disk or
a slow scorer blocks that thread, never training: what does not fit on the queue is dropped and
counted, and the counts are written with the attempt.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from auditor.attempt import Attempt, ledger_path, open_attempt
from auditor.files import sha256
from auditor.ledger import NULL, Frame, LedgerReader, LedgerWriter
from auditor.measure.sketch import exact_hash_tokens
from auditor.record.duplication import BoundedCounts, DuplicationScorer
from auditor.record.identity import Described, n_tokens_of, preview_of
from auditor.record.tagging import Tag

log = logging.getLogger("auditor")

QUEUE_TASKS: Final = 1024
"""Tasks that may wait for the background thread."""

SCORING_BACKLOG: Final = QUEUE_TASKS // 4
"""With more tasks waiting than this, batches are recorded without duplication scores."""

QUEUE_BYTES: Final = 256 * 2**20
"""Samples that may wait; beyond it batches are recorded by their keys alone, unscored."""

SYNC_S: Final = 2.0
"""The flush bound: a machine that dies loses at most this much."""

CLOSE_S: Final = 30.0
"""How long closing waits for the background thread before it gives the rest up."""

HASHED_SHARDS_BYTES: Final = 2**30
"""Shards are hashed in the background when together they are no larger than this."""

_open: dict[tuple[str, int], Recorder] = {}


def recorder_for(run: str | os.PathLike[str]) -> Recorder:
    """The open recorder of this run path and rank in this process, opened on first use.

    Raises what :func:`auditor.attempt.open_attempt` raises.
    """
    rank, world_size = _rank_and_world()
    path = Path(run).absolute()
    key = (str(path), rank)
    if key not in _open:
        _open[key] = Recorder(open_attempt(path, rank=rank, world_size=world_size))
    return _open[key]


def _rank_and_world() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Recorder:
    """Counts batches and steps on the training thread, writes ledgers on its own."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.next_step = self._first_step(attempt)
        if attempt.number:
            log.warning(
                "auditor: %s holds earlier attempts; recording goes on as attempt %d at step %d "
                "(give another folder for another run)",
                attempt.run,
                attempt.number,
                self.next_step,
            )
        self.counts: collections.Counter[str] = collections.Counter()
        self.failures: collections.Counter[str] = collections.Counter()
        self.closed = False
        self._n_batches = 0
        self._pending: list[int] = []
        self.last_batches: tuple[int, ...] = ()
        self._backward_done = False
        self._closed_by_optimizer: int | None = None
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._hooks: list[Any] = []
        self.on_close: list[Callable[[], None]] = []
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=QUEUE_TASKS)
        self._ledgers: dict[str, LedgerWriter] = {}
        self._scorer = DuplicationScorer()
        self._seen = BoundedCounts()
        self._synced = self._beat = time.monotonic()
        # Two counters, each written by one thread only, instead of a lock.
        self._bytes_in = self._bytes_out = 0
        self._datasets: list[Any] = []
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        atexit.register(self.close)

    @staticmethod
    def _first_step(attempt: Attempt) -> int:
        """One past the last step that an earlier attempt of this rank closed or measured."""
        for number in range(attempt.number - 1, -1, -1):
            last = -1
            for table in ("exposures", "signals"):
                path = ledger_path(attempt.run, table, attempt.rank, number)
                for frame in LedgerReader(path) if path.exists() else ():
                    if frame.kind == "close" and frame.scalars["state"] == "trained":
                        last = max(last, frame.scalars["step"])
                    elif frame.kind == "scalars":
                        last = max(last, int(frame.columns["step"].max()))
            if last >= 0:
                return last + 1
        return 0

    # -- the training thread ---------------------------------------------------------------

    def submit(self, task: Callable[[], None], *, what: str) -> bool:
        """Queue a task for the background thread; when the queue is full it is dropped, counted."""
        if self.closed or os.getpid() != self._process:  # a forked child has no writer
            return False
        if self._thread is None:
            # Started here, at the first record, because loader workers fork before it.
            self._thread = threading.Thread(target=self._work, name="auditor-recorder", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(task)
        except queue.Full:
            self.counts[f"dropped_{what}"] += 1
            if self.counts[f"dropped_{what}"] == 1:
                log.warning(
                    "auditor: recording cannot keep up; %s is dropped and counted (%s)",
                    what,
                    self.attempt.run,
                )
            return False
        return True

    def delivered(self, tag: Tag, *, state: str = "delivered", dataset: Any = None) -> None:
        """The loop was handed a batch (or it was left out on request: ``skipped``)."""
        self._discard_if_not_stepped()
        batch = self._n_batches
        self._n_batches += 1
        if state == "delivered":
            self._pending.append(batch)
        n_bytes = tag.n_bytes
        if self._bytes_in - self._bytes_out + n_bytes > QUEUE_BYTES:
            self.counts["batches_without_content"] += 1
            tag, n_bytes = tag.without_samples(), 0
        number = self._dataset_number(dataset)
        write = functools.partial(self._write_batch, batch, tag, state, number, n_bytes)
        if self.submit(write, what="batches"):
            self._bytes_in += n_bytes

    def _dataset_number(self, dataset: Any) -> int:
        """Datasets of one run number their samples apart; 0 is the first, or none."""
        if dataset is None:
            return 0
        for number, known in enumerate(self._datasets):
            if (known() if isinstance(known, weakref.ref) else known) is dataset:
                return number
        try:
            self._datasets.append(weakref.ref(dataset))
        except TypeError:  # a list has no weak references
            self._datasets.append(dataset)
        return len(self._datasets) - 1

    def hold_out(self, samples: Sequence[np.ndarray]) -> None:
        """Token samples that training must not contain; those it does contain are counted."""
        self._scorer.held_out |= frozenset(exact_hash_tokens(sample) for sample in samples)

    def drawn(self, indices: Sequence[int]) -> None:
        """A sampler drew these indices; whether they arrive is not known to it."""
        batch = self._n_batches
        self._n_batches += 1
        keys = np.asarray(list(indices), dtype=np.int64)
        self.submit(functools.partial(self._write_drawn, batch, keys), what="batches")

    def watch(self, optimizer: torch.optim.Optimizer) -> bool:
        """Let the optimizer's own step close steps from now on; True when it is new.

        An optimizer without step hooks cannot be watched; the monitor then closes the steps.
        """
        if optimizer in self._optimizers or not hasattr(optimizer, "register_step_post_hook"):
            return False

        def stepped(*_: Any) -> None:
            try:
                if self._pending:
                    numbered = self._backward_done  # the monitor has been here before
                    closed = self.close_step()
                    self._closed_by_optimizer = None if numbered else closed
            except Exception as error:
                self.failed("optimizer hook", error)

        self._hooks.append(optimizer.register_step_post_hook(stepped))
        self._optimizers.add(optimizer)
        return True

    def step_of_backward(
        self, step: int | None = None, optimizer: torch.optim.Optimizer | None = None
    ) -> int:
        """The number of the step whose backward has just run.

        Called by the monitor before or after the optimizer's own step: when the optimizer already
        closed the step, its number; else the number of the step about to close. An explicit
        ``step`` renumbers it and those that follow.
        """
        is_new = optimizer is not None and self.watch(optimizer)
        if self._closed_by_optimizer is not None:
            closed, self._closed_by_optimizer = self._closed_by_optimizer, None
            if step is not None and step != closed:
                self._renumber(closed, step)
                return step
            return closed
        if step is not None:
            self.next_step = step
        # A new optimizer may have stepped before it was watched, so this call closes the step.
        if is_new or not self._optimizers or not self._pending:
            return self.close_step()
        self._backward_done = True
        return self.next_step

    def close_step(self, state: str = "trained") -> int:
        """Every batch since the last close went into one update; returns its number."""
        step, batches = self.next_step, self._pending
        if state == "trained":
            self.next_step = step + 1
        self._pending, self._backward_done = [], False
        self.last_batches = tuple(batches)
        if batches:
            frame = Frame(
                "close",
                {"step": step, "state": state},
                {"batch": np.asarray(batches, dtype=np.int64)},
            )
            self.submit(lambda: self._append("exposures", frame), what="steps")
        return step

    def _renumber(self, closed: int, step: int) -> None:
        self.next_step = step + 1
        self.submit(
            lambda: self._append("exposures", Frame("renumber", {"closed": closed, "step": step})),
            what="steps",
        )

    def _discard_if_not_stepped(self) -> None:
        """Backward ran, the next batch is here, and a watched optimizer did not step: discarded."""
        if self._backward_done and self._optimizers and self._pending:
            self.close_step("discarded")

    @property
    def pending(self) -> tuple[int, ...]:
        """Batches delivered since the last step closed."""
        return tuple(self._pending)

    def failed(self, place: str, error: Exception) -> None:
        """Count a failure of ours; log the first at each place."""
        self.failures[place] += 1
        if self.failures[place] == 1:
            log.warning(
                "auditor: %s failed and is counted from now on; training is not affected: %r",
                place,
                error,
            )

    def drain(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until what was submitted so far is on disk; False when it took too long."""
        done = threading.Event()
        return self.submit(done.set, what="drains") and done.wait(timeout_s)

    def close(self) -> None:
        """Write what is waiting, note how the attempt ended, give the claim back. Idempotent.

        In a forked child there is nothing to close: run and claim are the parent's.
        """
        if self.closed or os.getpid() != self._process:
            return
        for send in self.on_close:
            try:
                send()
            except Exception as error:
                self.failed("closing", error)
        finished = self._thread is None
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=CLOSE_S)
                self._thread.join(CLOSE_S)
            finished = not self._thread.is_alive()
        self.closed = True
        for hook in self._hooks:
            hook.remove()
        atexit.unregister(self.close)
        _open.pop((str(self.attempt.run), self.attempt.rank), None)
        try:
            for ledger in self._ledgers.values() if finished else ():
                ledger.close()
            self.attempt.close(
                n_batches=self._n_batches,
                n_pending=len(self._pending),
                counts=dict(self.counts),
                failures=dict(self.failures),
                complete=finished,
            )
        except OSError as error:
            self.failed("closing", error)

    # -- the background thread -------------------------------------------------------------

    def _work(self) -> None:
        while True:
            try:
                task: Callable[[], None] | None = self._queue.get(timeout=SYNC_S)
            except queue.Empty:
                task = _nothing
            if task is None:
                return
            try:
                task()
                self._sync_when_due()
            except Exception as error:
                self.failed(_name_of(task), error)

    def _append(self, table: str, frame: Frame) -> None:
        if table not in self._ledgers:
            self._ledgers[table] = LedgerWriter(self.attempt.ledger(table))
        self._ledgers[table].append(frame)

    def append_signals(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Write rows of one step; background thread only."""
        names = ("kind", "site", "segment", "variant", "signal")
        integers = ("layer", "head", "n_rows")
        self._append(
            "signals",
            Frame(
                "signals",
                {"step": step},
                {
                    "value": np.asarray([row["value"] for row in rows], dtype=np.float64),
                    # Null is the least integer, so that every column stays one array.
                    **{
                        name: np.asarray(
                            [NULL if row.get(name) is None else row[name] for row in rows],
                            dtype=np.int32,
                        )
                        for name in integers
                    },
                },
                {name: [row.get(name) for row in rows] for name in names},
            ),
        )

    def append_scalars(self, columns: dict[str, np.ndarray]) -> None:
        """Write per-step scalars, one column per signal and ``step``; background thread only."""
        self._append("signals", Frame("scalars", {}, columns))

    def _write_drawn(self, batch: int, keys: np.ndarray) -> None:
        self._append("exposures", Frame("batch", {"batch": batch, "state": "drawn"}, {"key": keys}))

    def _write_batch(self, batch: int, tag: Tag, state: str, dataset: int, n_bytes: int) -> None:
        self._bytes_out += n_bytes
        described = tag.describe()
        if described.by_index and dataset:
            keys = described.keys + (np.int64(dataset) << DATASET_SHIFT)
            described = replace(described, keys=keys)
        frame = Frame("batch", {"batch": batch, "state": state}, {"key": described.keys})
        self._append("exposures", frame)
        if described.has_samples:
            self._write_samples(described)
        if state == "skipped" or not described.has_samples:
            return
        if self._queue.qsize() > SCORING_BACKLOG:
            self.counts["unscored_samples"] += len(described.keys)
            return
        scores = self._scorer.score(batch, described.keys, [o.content for o in described.located])
        if self._scorer.n_held_out:
            self.counts["probe_samples_in_training"] = self._scorer.n_held_out
        if scores:
            self._append("exposures", Frame("scores", {"batch": batch}, scores))

    def _write_samples(self, described: Described) -> None:
        new = [
            (int(key), one)
            for key, one in zip(described.keys, described.located, strict=True)
            if self._seen.add(int(key)) == 0
        ]
        if not new:
            return
        located = [one for _, one in new]
        self._append(
            "samples",
            Frame(
                "samples",
                {},
                {
                    "key": np.asarray([key for key, _ in new], dtype=np.int64),
                    "row": np.asarray(
                        [NULL if o.row is None else o.row for o in located], dtype=np.int64
                    ),
                    "n_tokens": np.asarray(
                        [NULL if (n := n_tokens_of(o)) is None else n for o in located],
                        dtype=np.int64,
                    ),
                },
                {
                    "sample_id": [o.sample_id for o in located],
                    "source": [o.source for o in located],
                    "shard": [o.shard for o in located],
                    "preview": [preview_of(o) for o in located],
                },
            ),
        )

    def write_losses(self, batches: Sequence[int], losses: np.ndarray) -> None:
        """Per-sample losses, float32 [sum of B], of the batches in order; background thread."""
        self._append(
            "exposures",
            Frame("losses", {}, {"batch": np.asarray(batches), "loss": losses.astype(np.float32)}),
        )

    def describe_dataset(self, dataset: Any) -> None:
        """Note type, length and shards of the dataset; shards are hashed in the background."""
        facts: dict[str, Any] = {"type": f"{type(dataset).__module__}.{type(dataset).__qualname__}"}
        with contextlib.suppress(TypeError, NotImplementedError):
            facts["n_samples"] = len(dataset)
        fingerprint = getattr(dataset, "_fingerprint", None)
        if isinstance(fingerprint, str):
            facts["fingerprint"] = fingerprint
        shards = [Path(str(shard)).absolute() for shard in getattr(dataset, "shards", None) or ()]
        self.submit(lambda: self._note_dataset(facts, shards), what="facts")

    def _note_dataset(self, facts: dict[str, Any], shards: list[Path]) -> None:
        sizes = {shard: shard.stat().st_size for shard in shards if shard.is_file()}
        hashed = sum(sizes.values()) <= HASHED_SHARDS_BYTES
        self.attempt.note(
            dataset=facts,
            shards=[
                {
                    "path": str(shard),
                    "bytes": sizes.get(shard),
                    "sha256": sha256(shard) if hashed and shard in sizes else None,
                }
                for shard in shards
            ],
        )

    def _sync_when_due(self) -> None:
        now = time.monotonic()
        if now - self._synced >= SYNC_S:
            self._synced = now
            for ledger in self._ledgers.values():
                ledger.sync()
        if now - self._beat >= 10.0:
            self._beat = now
            self.attempt.heartbeat()


DATASET_SHIFT: Final = 48
"""Bits of a key that hold the index; above them is the number of the dataset in the attempt."""


def _nothing() -> None:
    """The task of an idle moment: only the time has moved on."""


def _name_of(task: Any) -> str:
    return str(getattr(getattr(task, "func", task), "__name__", "recording")).strip("_")
