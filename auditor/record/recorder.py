"""The one writer of a run in this process, shared by sampler and monitor.

The training thread only notes what happened, in order, on a bounded queue. One background thread
describes samples, scores duplication, takes eigenvalues and appends to the ledgers. A hung disk or
a slow scorer blocks that thread, never training: what does not fit on the queue is dropped and
counted, and the counts are written with the attempt. Facts go before scores: what was consumed is
written though scoring lags behind.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from auditor.attempt import Attempt, ledger_path, open_attempt
from auditor.errors import AuditorError, IdentityError, RunError
from auditor.files import sha256
from auditor.ledger import Frame, LedgerReader, LedgerWriter
from auditor.measure.agreement import similarity
from auditor.record.background import QUEUE_TASKS, Background, Task
from auditor.record.datasets import shards_of
from auditor.record.duplication import DuplicationScorer, Scores
from auditor.record.exposures import ExposureBuffer
from auditor.record.identity import Unlocated
from auditor.record.samples import SampleLedger
from auditor.record.steps import OptimizerWatch, inner_optimizer
from auditor.record.tagging import Describer, RawTag, SentTag, Tag
from auditor.record.transfer import to_host
from auditor.schema import STATES

log = logging.getLogger("auditor")

SCORING_BACKLOG: Final = QUEUE_TASKS // 4
"""With more batches waiting to be scored, further ones are recorded without scores."""

QUEUE_BYTES: Final = 256 * 2**20
"""Samples that may wait; beyond it batches are recorded by their keys alone, unscored."""

FLUSH_S: Final = 1.0
"""Facts wait at most so long, or for ``exposures.FLUSH_BATCHES``, before they are written: what a
killed process loses at most."""

SYNC_S: Final = 2.0
"""How often what was written is forced to the disk: what a machine that dies loses at most."""

HEARTBEAT_S: Final = 10.0
"""How often the claim of the run says that its holder lives."""

REMEMBER_S: Final = 300.0
"""How often the contents that the run has seen are written for a later attempt: how much of them a
process that is killed forgets."""

CLOSE_S: Final = 30.0
"""How long closing waits for the background thread before it gives the rest up."""

PENDING_BATCHES: Final = 65_536
"""Batches that one step may close over; older ones stay delivered."""

HASHED_SHARDS_BYTES: Final = 2**30
"""Shards are hashed in the background when together they are no larger than this."""

_UNLOCATED: Final = "samples_that_the_locator_failed_on"
_OTHER_ROWS: Final = "batches_with_more_or_fewer_rows_than_samples"
"""Counts, that readers print with blanks."""

_NO_STEPS: Final = np.zeros(0, np.int64)

_open: dict[tuple[str, int], Recorder] = {}


def recorder_for(run: str | os.PathLike[str]) -> Recorder:
    """The open recorder of this run path and rank in this process, opened on first use.

    One whose run was deleted meanwhile is closed, and another opened.

    Raises what :func:`auditor.attempt.open_attempt` raises.
    """
    rank, world_size = rank_and_world()
    path = Path(run).absolute()
    key = (str(path), rank)
    if key in _open and _open[key].has_lost_its_run():
        _open[key].close()
    if key not in _open:
        _open[key] = Recorder(open_attempt(path, rank=rank, world_size=world_size))
    return _open[key]


def rank_and_world() -> tuple[int, int]:
    """Rank and world size of this process, by ``torch.distributed`` or what its launcher set."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Recorder:
    """Counts batches and steps on the training thread, writes ledgers on its own."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.next_step = self._started_at = self._first_step(attempt)
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
        self.last_scores: Mapping[str, Any] | None = None
        self.last_batches: tuple[int, ...] = ()
        self.on_close: list[Callable[[], None]] = []  # before the last tasks are run
        self.on_stopped: list[Callable[[], None]] = []  # after
        self._n_batches = 0
        self._pending: list[int] = []
        self._n_with_gradients = 0  # of the pending batches, from the first
        self._optimizers_with_gradients: set[int] = set()
        self._step_due = False
        self._closed_by_optimizer: int | None = None
        self._watches: weakref.WeakKeyDictionary[Any, OptimizerWatch] = weakref.WeakKeyDictionary()
        self._datasets: list[Any] = []
        self._process = os.getpid()
        self._has_warned_of_fork = False
        # Two counters, each written by one thread only, instead of a lock.
        self._bytes_in = self._bytes_out = 0
        self._deleted = False  # the run's files, while they were written
        self._lost = False  # something, since drain() was last asked
        self._background = Background(self._idle, self._task_failed)
        # What follows belongs to the background thread.
        self._ledgers: dict[str, LedgerWriter] = {}
        self._exposures = ExposureBuffer()
        self._samples = SampleLedger(attempt.ledger("samples"))
        self._scorer: DuplicationScorer | None = None
        self._contents = attempt.ledger("exposures").with_name("contents.npz")
        self._to_score: collections.deque[Callable[[], None]] = collections.deque()
        self._draining: list[threading.Event] = []
        self._flushed = self._synced = self._beat = self._remembered = time.monotonic()
        atexit.register(self.close)

    @staticmethod
    def _first_step(attempt: Attempt) -> int:
        """One past the last step that an earlier attempt of this rank closed or measured."""
        for number in range(attempt.number - 1, -1, -1):
            last = -1
            for table in ("exposures", "signals"):
                path = ledger_path(attempt.run, table, attempt.rank, number)
                for frame in LedgerReader(path) if path.exists() else ():
                    steps = frame.columns.get("step", _NO_STEPS)
                    if frame.kind == "steps":
                        steps = steps[frame.columns["state"] == STATES.index("trained")]
                    last = max(last, *steps.tolist(), -1)
            if last >= 0:
                return last + 1
        return 0

    # -- the training thread ---------------------------------------------------------------

    def submit(self, task: Task, *, what: str) -> bool:
        """Queue a task for the background thread; when the queue is full it is dropped, counted."""
        if self.closed:
            return False
        if os.getpid() != self._process:  # a forked child has no writer
            self._warn_of_fork()
            return False
        if self._background.submit(task):
            return True
        self.count(
            f"dropped_{what}",
            f"recording cannot keep up; dropped and counted: {what} ({self.attempt.run})",
        )
        return False

    def count(self, name: str, warning: str, n: int = 1) -> None:
        """Count what readers find as a gap of the run; say so the first time."""
        if not self.counts[name]:
            log.warning("auditor: %s", warning)
        self.counts[name] += n

    def _warn_of_fork(self) -> None:
        if not self._has_warned_of_fork:
            self._has_warned_of_fork = True
            log.warning(
                "auditor: nothing is recorded in process %d, which was forked from process %d "
                "after recording began there. Make the AuditedSampler in the process that trains",
                os.getpid(),
                self._process,
            )

    @property
    def has_begun(self) -> bool:
        """Whether a batch or a step was recorded in this attempt."""
        return self._n_batches > 0 or self.next_step != self._started_at

    def start_at(self, step: int) -> None:
        """Number the first step of the attempt."""
        self.next_step = self._started_at = step

    @property
    def watched(self) -> list[Any]:
        """The optimizers whose steps close steps."""
        return list(self._watches)

    def delivered(
        self, tag: Tag | SentTag | RawTag, describer: Describer, *, state: str = "delivered"
    ) -> int:
        """The loop was handed a batch (or it was left out on request: ``skipped``); its number."""
        self._discard_if_not_stepped()
        batch = self._n_batches
        self._n_batches += 1
        if state == "delivered":
            self._pending.append(batch)
            if len(self._pending) > PENDING_BATCHES:  # nobody closes steps
                del self._pending[: PENDING_BATCHES // 2]
                self._n_with_gradients = min(self._n_with_gradients, len(self._pending))
        if not isinstance(tag, RawTag):
            self.submit(functools.partial(self._write_tag, batch, tag, state), what="batches")
            return batch
        n_bytes = tag.n_bytes
        alone = self._bytes_in - self._bytes_out + n_bytes > QUEUE_BYTES
        if alone:
            self.counts["batches_without_content"] += 1
            tag, n_bytes = tag.without_samples(), 0
        write = functools.partial(self._write_raw, batch, tag, describer, state, n_bytes, alone)
        if self.submit(write, what="batches"):
            self._bytes_in += n_bytes
        return batch

    def withdraw(self, batches: Sequence[int]) -> None:
        """The loop passed over these latest batches: delivered, and part of no update."""
        self._pending = [batch for batch in self._pending if batch not in batches]
        self._n_with_gradients = min(self._n_with_gradients, len(self._pending))

    def dataset_number(self, dataset: Any) -> int:
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

    def score_duplication(self) -> None:
        """Make the scorer's tables; its kernels are ready before loader workers fork."""
        if self._scorer is None:
            self._scorer = DuplicationScorer()
            if self._contents.exists():
                self.submit(self._recall_contents, what="facts")  # before anything is scored

    def _recall_contents(self) -> None:
        assert self._scorer is not None
        self._scorer.recall(self._contents)

    def hold_out(self, samples: Sequence[np.ndarray]) -> None:
        """Token samples that training must not contain; those it does contain are counted."""
        if samples:
            self.score_duplication()
            assert self._scorer is not None
            self._scorer.hold_out(samples)

    def drawn(self, indices: Sequence[int]) -> None:
        """A sampler drew these indices; whether they arrive is not known to it."""
        batch = self._n_batches
        self._n_batches += 1
        keys = np.asarray(list(indices), dtype=np.int64)
        write = functools.partial(self._exposures.add_batch, batch, "drawn", keys, None)
        self.submit(write, what="batches")

    def watch(self, optimizer: Any) -> bool:
        """Let the optimizer's own step close steps from now on; True when it is new.

        An optimizer without step hooks cannot be watched; the monitor then closes the steps.
        """
        optimizer = inner_optimizer(optimizer)
        if optimizer in self._watches or not hasattr(optimizer, "register_step_post_hook"):
            return False
        number = len(self._watches)

        def stepped(overflow: Tensor | None) -> None:
            if self._pending:
                numbered = self._step_due  # the monitor has been here before
                closed = self.close_step(overflow=overflow)
                self._closed_by_optimizer = None if numbered else closed

        def produced() -> None:
            self._n_with_gradients = len(self._pending)
            self._optimizers_with_gradients.add(number)

        def cleared() -> None:
            if number in self._optimizers_with_gradients:
                self._optimizers_with_gradients.discard(number)
                if not self._optimizers_with_gradients and self._n_with_gradients:
                    self.close_step("discarded", n_batches=self._n_with_gradients)

        self._watches[optimizer] = OptimizerWatch(
            optimizer, stepped=stepped, produced=produced, cleared=cleared, failed=self.failed
        )
        return True

    def step_of_backward(self, step: int | None = None, optimizer: Any = None) -> int:
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
        if is_new or not self._watches or not self._pending:
            return self.close_step()
        self._step_due = True
        self._n_with_gradients = len(self._pending)
        return self.next_step

    def close_step(
        self,
        state: str = "trained",
        *,
        n_batches: int | None = None,
        overflow: Tensor | None = None,
    ) -> int:
        """The first ``n_batches`` pending batches (all) went into one update; returns its number.

        ``overflow``: a flag on the device; where it is not zero the update did nothing, and the
        batches are discarded under the number that the step has.
        """
        step = self.next_step
        batches = self._pending[:n_batches]
        self._pending = [] if n_batches is None else self._pending[n_batches:]
        if state == "trained":
            self.next_step = step + 1
        self._step_due, self._n_with_gradients = False, 0
        self._optimizers_with_gradients.clear()
        self.last_batches = tuple(batches)
        if batches:
            flag = None if overflow is None else to_host(overflow)
            self.submit(
                functools.partial(self._write_step, step, state, batches, flag), what="steps"
            )
        return step

    def _renumber(self, closed: int, step: int) -> None:
        self.next_step = step + 1
        renumber = functools.partial(self._exposures.add_renumbered, closed, step)
        self.submit(renumber, what="steps")

    def _discard_if_not_stepped(self) -> None:
        """The next batch is here: did what was pending lose its gradients without a step?"""
        if self._n_with_gradients:
            for watch in list(self._watches.values()):
                watch.notice_gradients_gone()
        if self._step_due and self._watches and self._pending:
            self.close_step("discarded")

    @property
    def pending(self) -> tuple[int, ...]:
        """Batches delivered since the last step closed."""
        return tuple(self._pending)

    def failed(self, place: str, error: Exception) -> None:
        """Count a failure of ours; log the first at each place."""
        self.failures[place] += 1
        if self.failures[place] == 1:
            ours = isinstance(error, AuditorError)  # its text names a remedy, its repr does not
            log.warning(
                "auditor: %s failed and is counted from now on; training is not affected: %s",
                place,
                f"{type(error).__name__}: {error}" if ours else repr(error),
            )

    def drain(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until what was submitted so far is on disk.

        False when it took too long, when something could not be written since the last call, or
        when the run was deleted. Of a closed recorder: whether its end is on disk.
        """
        if not self.closed:
            done = threading.Event()
            submitted = self.submit(functools.partial(self._draining.append, done), what="drains")
            self._background.hurry()
            if not (submitted and done.wait(timeout_s)):
                return False
        lost, self._lost = self._lost, False
        return not (lost or self._deleted)

    def has_lost_its_run(self) -> bool:
        """Whether the run was deleted since it was opened; in a forked child the parent knows."""
        return os.getpid() == self._process and not self.attempt.is_there

    def close(self) -> None:
        """Write what is waiting, note how the attempt ended, give the claim back. Idempotent.

        In a forked child there is nothing to close: run and claim are the parent's. Of a run that
        was deleted nothing is written.
        """
        if self.closed or os.getpid() != self._process:
            return
        self._notice_deletion()
        self._call(self.on_close)
        finished = self._background.stop(CLOSE_S)
        self._call(self.on_stopped)
        self.closed = True
        for watch in list(self._watches.values()):
            watch.remove()
        atexit.unregister(self.close)
        _open.pop((str(self.attempt.run), self.attempt.rank), None)
        self._lost |= not finished
        if finished:
            self._flush()
            self._writing(self._samples.close)
            for ledger in self._ledgers.values():
                self._writing(ledger.close)
            self._writing(self._remember_contents)
        self._notice_deletion()
        if not self._deleted:
            self._writing(functools.partial(self._close_attempt, finished))

    def _close_attempt(self, finished: bool) -> None:
        self.attempt.close(
            n_batches=self._n_batches,
            n_pending=len(self._pending),
            counts=dict(self.counts),
            failures=dict(self.failures),
            complete=finished,
        )

    def _call(self, hooks: Sequence[Callable[[], None]]) -> None:
        for hook in hooks:
            try:
                hook()
            except Exception as error:
                self.failed("closing", error)

    # -- the background thread -------------------------------------------------------------

    def _idle(self, empty: bool) -> bool:
        """Between tasks: score one batch when no facts wait, write and sync what is due."""
        if empty and self._to_score:
            try:
                self._to_score.popleft()()
            except Exception as error:
                self.failed("scoring duplication", error)
        drained = empty and not self._to_score and self._draining
        now = time.monotonic()
        if self._exposures.full or drained or now - self._flushed >= FLUSH_S:
            self._flush()
        if now - self._synced >= SYNC_S:
            self._synced = now
            self._writing(self._sync)
        if now - self._remembered >= REMEMBER_S:
            self._writing(self._remember_contents)
        if now - self._beat >= HEARTBEAT_S:
            self._beat = now
            self._notice_deletion()
            if not self._deleted:
                self._writing(self.attempt.heartbeat)
                self._writing(self._note_losses)
        if drained:
            done, self._draining[:] = list(self._draining), []
            for event in done:
                event.set()
        return bool(self._to_score)

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        self._notice_deletion()
        for frame in self._exposures.take():
            self._append("exposures", frame)
        if self._deleted:
            self._samples.drop()
        else:
            self._writing(self._samples.flush)

    def _note_losses(self) -> None:
        """So that readers of a running run, or of one that was killed, know what is missing."""
        known = {"counts": dict(self.counts), "failures": dict(self.failures)}
        if any(self.attempt.facts.get(name, {}) != found for name, found in known.items()):
            self.attempt.note(**known)

    def _sync(self) -> None:
        self._samples.sync()
        for ledger in self._ledgers.values():
            ledger.sync()

    def _remember_contents(self) -> None:
        self._remembered = time.monotonic()
        if self._scorer is not None and not self._deleted:
            self._scorer.remember(self._contents)

    def _append(self, table: str, frame: Frame) -> None:
        if table not in self._ledgers:  # a deleted run's folders would be made again
            self._notice_deletion()
        if not self._deleted:
            self._writing(functools.partial(self._append_to, table, frame))

    def _append_to(self, table: str, frame: Frame) -> None:
        if table not in self._ledgers:
            self._ledgers[table] = LedgerWriter(self.attempt.ledger(table))
        self._ledgers[table].append(frame)

    def _writing(self, write: Callable[[], None]) -> None:
        """What the disk refuses is lost; whoever asks by ``drain`` is told."""
        try:
            write()
        except OSError as error:
            self._lost = True
            self.failed("writing", error)

    def _notice_deletion(self) -> None:
        """Somebody may delete the run while it is recorded: what is written then is in no file."""
        if not self._deleted and not self.attempt.is_there:
            self._deleted = True
            self.failed(
                "writing",
                RunError(
                    "the run was deleted; nothing is recorded from now on",
                    path=self.attempt.run,
                    remedy="Make a new AuditedSampler, which begins a new run",
                ),
            )

    def _task_failed(self, task: Task, error: Exception) -> None:
        name = str(getattr(getattr(task, "func", task), "__name__", "recording")).strip("_")
        self.failed({"write_raw": "write_batch", "write_tag": "write_batch"}.get(name, name), error)

    def append_signals(self, frame: Frame) -> None:
        """Write a frame of the signals table; background thread only."""
        self._append("signals", frame)

    def _write_tag(self, batch: int, sent: Tag | SentTag, state: str) -> None:
        """A batch that a loader worker described."""
        tag = sent.tag()
        if tag.failure is not None:
            raise IdentityError(tag.failure)
        self._exposures.add_batch(batch, state, tag.keys, tag.parts)
        rows = tag.other_rows if tag.parts is None else None
        self._note_doubts(len(tag.keys), tag.unlocated, rows)
        if state != "skipped" and tag.sketches is not None:
            sketches = tag.sketches
            self._score_later(batch, tag.keys, lambda: sketches, 0)

    def _write_raw(
        self, batch: int, raw: RawTag, describer: Describer, state: str, n_bytes: int, alone: bool
    ) -> None:
        """A batch still to be described; ``alone``: by its keys only."""
        try:
            described = describer.keys_alone(raw) if alone else describer.describe(raw)
            self._exposures.add_batch(batch, state, described.keys, described.parts)
        except Exception:
            self._bytes_out += n_bytes
            raise
        rows = raw.other_rows if described.parts is None else None
        self._note_doubts(len(described.keys), described.unlocated, rows)
        self._samples.note(described)
        if describer.sketching and state != "skipped" and not alone:
            sketch = functools.partial(describer.sketches, described)
            self._score_later(batch, described.keys, sketch, n_bytes)
        else:
            self._bytes_out += n_bytes

    def _note_doubts(self, n: int, unlocated: Unlocated | None, rows: int | None) -> None:
        """Count, and say once, what may keep the record of ``n`` samples from being the truth."""
        if unlocated is not None:
            self.count(
                _UNLOCATED,
                "the locator failed, which is counted from now on: such samples are told by their "
                f"index and columns: {unlocated.first}",
                unlocated.n,
            )
        if rows is not None:
            self.count(
                _OTHER_ROWS,
                f"the collate function made {rows} rows of {n} samples: all {n} are recorded as "
                "consumed. That is right where it packs samples into rows, and wrong where it "
                "drops or repeats some. Such batches are counted from now on",
            )

    def _score_later(
        self, batch: int, keys: np.ndarray, sketches: Callable[[], np.ndarray], n_bytes: int
    ) -> None:
        if len(self._to_score) >= SCORING_BACKLOG:
            self.counts["unscored_samples"] += len(keys)
            self._bytes_out += n_bytes
            return
        self._to_score.append(functools.partial(self._score, batch, keys, sketches, n_bytes))

    def _score(
        self, batch: int, keys: np.ndarray, sketches: Callable[[], np.ndarray], n_bytes: int
    ) -> None:
        assert self._scorer is not None
        try:
            scores = self._scorer.score(batch, keys, sketches())
        finally:
            self._bytes_out += n_bytes
        self._exposures.add_scores(batch, scores)
        self.last_scores = _readable(batch, keys, scores)
        if self._scorer.n_held_out:
            self.counts["probe_samples_in_training"] = self._scorer.n_held_out

    def _write_step(
        self, step: int, state: str, batches: Sequence[int], overflow: Callable[[], Any] | None
    ) -> None:
        if overflow is not None and np.any(overflow()):
            state = "discarded"
        self._exposures.add_step(step, state, batches)

    def write_losses(self, batches: Sequence[int], losses: np.ndarray) -> None:
        """Per-sample losses, float32 [sum of B], of the batches in order; background thread."""
        self._exposures.add_losses(batches, losses)

    def describe_dataset(self, dataset: Any) -> None:
        """Note type, length and shards of the dataset; shards are hashed in the background."""
        facts: dict[str, Any] = {"type": f"{type(dataset).__module__}.{type(dataset).__qualname__}"}
        with contextlib.suppress(TypeError, NotImplementedError):
            facts["n_samples"] = len(dataset)
        fingerprint = getattr(dataset, "_fingerprint", None)
        if isinstance(fingerprint, str):
            facts["fingerprint"] = fingerprint
        shards = [Path(shard).absolute() for shard in shards_of(dataset)]
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


def _readable(batch: int, keys: np.ndarray, scores: Scores) -> Mapping[str, Any]:
    return {
        "batch": batch,
        "key": keys,
        "dup_batch": np.where(scores.known, similarity(scores.n_equal_batch), np.nan),
        "dup_window": np.where(scores.known, similarity(scores.n_equal_window), np.nan),
        "dup_run": scores.dup_run,
        "repetition": np.where(scores.known, scores.repetition, np.nan),
    }
