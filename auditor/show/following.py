"""A run directory, followed while another process writes it; nothing is ever written to it.

Each ledger is read on from where it was left. Of one that was long already, only the end is read.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from auditor.attempt import LEDGERS, STALE_S, rank_folder, read_run_json
from auditor.errors import RunError, SchemaVersionError
from auditor.ledger import Frame, LedgerReader
from auditor.measure.grading import Policy
from auditor.run import Run
from auditor.show.life import Pace, is_gone, state_of
from auditor.show.recent import (
    HISTORY,
    BatchHistory,
    Composition,
    SignalHistory,
    SourceTable,
    composition,
)

EXPOSURE_FRAMES: Final = 400
"""Frames at the end of a ledger that hold the latest batches with their steps and scores."""

EXPOSURE_BYTES: Final = 16 * 2**20
SAMPLE_BYTES: Final = 16 * 2**20
SIGNAL_BYTES: Final = 64 * 2**20
"""What is read of ledgers that were there at first, of all ranks together."""

TORN_S: Final = 5.0
"""Bytes after the last whole frame are torn when nothing followed them for so long."""


class _RewrittenError(Exception):
    """A file that was read is gone, or shorter than it was."""


class LedgerTail:
    """One ledger: first its last ``n_frames`` in about ``n_bytes``, then what is appended."""

    def __init__(self, path: Path, *, n_frames: int, n_bytes: int) -> None:
        self.path = path
        self.torn_bytes = 0
        self.skipped = False  # whether earlier frames were left unread
        self._limits = n_frames, n_bytes
        self._end: int | None = None

    def frames(self) -> Iterator[Frame]:
        """What is new and whole.

        Raises:
            RunError: not a ledger, or (``SchemaVersionError``) of another version.
            OSError: the file cannot be read.
        """
        size = self.path.stat().st_size
        if self._end is None:
            self._end = self._first(*self._limits)
        elif size < self._end:
            raise _RewrittenError
        if size == self._end:
            return
        reader = LedgerReader(self.path, start=self._end)
        for frame in reader:
            self._end = reader.end
            yield frame
        self.torn_bytes = reader.torn_bytes

    def _first(self, n_frames: int, n_bytes: int) -> int:
        reader = LedgerReader(self.path)
        n = 0
        last: deque[int] = deque(maxlen=n_frames)
        for start in reader.starts():
            last.append(start)
            n += 1
        while last and reader.end - last[0] > n_bytes:
            last.popleft()
        self.skipped = len(last) < n
        return last[0] if self.skipped and last else (reader.end if self.skipped else 0)


@dataclass(frozen=True)
class Situation:
    """What there is to show.

    ``waiting_for`` says what is missing while there is nothing to show. ``state`` is running,
    starting (no facts yet), stalled or ended; ``why`` adds to it. ``quiet_s`` is the age of the
    newest fact, None before the first. ``steps_per_s`` is measured while following, before that
    the mean of the attempt (``is_mean``). ``signals_rank`` is the rank whose signals are shown.
    """

    run: Path
    waiting_for: str = ""
    run_id: str = ""
    attempt: int = 0
    world_size: int = 1
    ranks: Sequence[int] = ()
    silent: Sequence[int] = ()
    signals_rank: int | None = None
    step: int | None = None
    state: str = "starting"
    why: str = ""
    quiet_s: float | None = None
    steps_per_s: float | None = None
    is_mean: bool = False
    signals: SignalHistory = field(default_factory=SignalHistory)
    composition: Composition = field(default_factory=Composition)
    gaps: Sequence[str] = ()


class Following:
    """Follows a run directory from poll to poll; ``rank``: that rank only, else all.

    Signals are those of the lowest rank that has any: ranks of one training see the same model.
    """

    def __init__(self, run: Path, rank: int | None = None, *, history: int = HISTORY) -> None:
        self._run = run
        self._rank = rank
        self._history = history
        self._notes: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}
        self._gaps: tuple[Any, list[str]] = (None, [])
        self._forget()

    def _forget(self) -> None:
        self._run_id: str | None = None
        self._signals_rank: int | None = None
        self._signals = SignalHistory(self._history)
        self._sources = SourceTable()
        self._batches: dict[int, BatchHistory] = {}
        self._tails: dict[Path, LedgerTail | None] = {}  # None: not a ledger
        self._unreadable: dict[Path, str] = {}
        self._pace = Pace(time.monotonic())

    def poll(self) -> Situation:
        """Read what is new.

        Raises:
            RunError: ``run.json`` is there and cannot be read.
            SchemaVersionError: the run, or a ledger of it, is of another version of the format.
            OSError: the folder cannot be read.
        """
        for _ in range(3):
            try:
                return self._poll()
            except (_RewrittenError, FileNotFoundError):
                self._forget()
        return Situation(self._run, "its files, which change faster than they can be read")

    def _poll(self) -> Situation:
        if self._run.exists() and not self._run.is_dir():
            raise RunError("not a folder", path=self._run)
        if not (self._run / "run.json").exists():
            if self._run_id is not None:
                self._forget()
            return Situation(self._run, "the run to begin: it has no run.json yet")
        facts = read_run_json(self._run)
        if facts["run_id"] != self._run_id:
            self._forget()
            self._run_id = str(facts["run_id"])
        self._list()
        attempts = self._attempts()
        if not attempts:
            who = "any rank" if self._rank is None else f"rank {self._rank}"
            return Situation(self._run, f"a record of {who}: there is none yet", self._run_id or "")
        return self._situation(facts, attempts, news=self._read(attempts))

    # -- reading -----------------------------------------------------------------------------

    def _list(self) -> None:
        """Look which files there are, once for all that follows: ranks may be many."""
        self._attempt_files = sorted(self._run.glob("attempts/rank-*/attempt-*.json"))
        self._listed: dict[tuple[str, int], list[Path]] = {}
        for table in LEDGERS:
            for path in sorted(self._run.glob(f"{table}/rank-*/attempt-*.ledger")):
                self._listed.setdefault((table, int(path.parent.name[-5:])), []).append(path)
        if not self._tails.keys() <= {path for paths in self._listed.values() for path in paths}:
            raise _RewrittenError

    def _ledgers(self, table: str, rank: int, attempt: int | None = None) -> list[Path]:
        """By attempt; several of one attempt where loader workers wrote their own."""
        paths = self._listed.get((table, rank), [])
        return [path for path in paths if attempt in (None, _attempt_of(path))]

    def _attempts(self) -> dict[int, dict[str, Any]]:
        """What the latest attempt of each followed rank noted about itself."""
        latest: dict[int, Path] = {}
        for path in self._attempt_files:
            rank = int(path.parent.name[-5:])
            if self._rank in (None, rank):
                latest[rank] = path
        return {rank: self._note(path) for rank, path in sorted(latest.items())}

    def _note(self, path: Path) -> dict[str, Any]:
        stat = path.stat()
        stamp = stat.st_mtime_ns, stat.st_size
        if self._notes.get(path, (None,))[0] != stamp:
            try:
                note = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                note = {}
            note = note if isinstance(note, dict) else {}
            self._notes[path] = stamp, {"attempt": int(path.stem[-4:]), **note}
        return self._notes[path][1]

    def _read(self, attempts: Mapping[int, Mapping[str, Any]]) -> bool:
        """Read on in every ledger; whether there was anything new."""
        news = self._read_signals()
        for rank, note in attempts.items():
            if rank not in self._batches or self._batches[rank].attempt != note["attempt"]:
                self._batches[rank] = BatchHistory(note["attempt"])
        samples = [
            (history.attempt, path)
            for rank, history in self._batches.items()
            for path in self._ledgers("samples", rank, history.attempt)
        ]
        for attempt, path in samples:
            for frame in self._new(path, n_frames=2**31, n_bytes=SAMPLE_BYTES // len(samples)):
                self._sources.take(attempt, frame)
        n_ranks = len(self._batches)
        n_frames = max(16, EXPOSURE_FRAMES * 8 // max(n_ranks, 8))
        for rank, history in self._batches.items():
            for path in self._ledgers("exposures", rank, history.attempt):
                for frame in self._new(path, n_frames=n_frames, n_bytes=EXPOSURE_BYTES // n_ranks):
                    news = True
                    history.take(frame)
        return news

    def _read_signals(self) -> bool:
        ranks = sorted(
            rank
            for table, rank in self._listed
            if table == "signals" and self._rank in (None, rank)
        )
        if not ranks:
            return False
        if self._signals_rank not in (None, ranks[0]):
            raise _RewrittenError  # a lower rank began to measure: show that one, all of it
        self._signals_rank = ranks[0]
        paths = self._ledgers("signals", ranks[0])
        # The latest attempts get what there is to be read, the earlier ones what is left.
        n_frames, n_bytes = 2 * self._history, SIGNAL_BYTES
        limits = {}
        for path in reversed(paths):
            limits[path] = n_frames, n_bytes
            if path not in self._tails:
                n_bytes = max(0, n_bytes - path.stat().st_size)
        news = False
        for path in paths:
            attempt = _attempt_of(path)
            frames = self._new(path, n_frames=limits[path][0], n_bytes=limits[path][1])
            for frame in frames:
                news = True
                if attempt not in self._signals.policies:
                    self._signals.policies[attempt] = self._policy(path)
                self._signals.take(attempt, frame)
        return news

    def _policy(self, ledger: Path) -> Policy:
        rank = int(ledger.parent.name[-5:])
        note = rank_folder(self._run, "attempts", rank) / f"attempt-{_attempt_of(ledger):04d}.json"
        try:
            return Policy.of(self._note(note)["monitor"]["policy"])
        except (KeyError, TypeError, ValueError, OSError):  # noted by another version of ours
            return Policy()

    def _new(self, path: Path, *, n_frames: int, n_bytes: int) -> Iterator[Frame]:
        tail = self._tails.setdefault(path, LedgerTail(path, n_frames=n_frames, n_bytes=n_bytes))
        if tail is None:
            return
        try:
            yield from tail.frames()
        except SchemaVersionError:
            raise
        except RunError as error:
            self._tails[path] = None
            self._unreadable[path] = error.message

    # -- what it means -----------------------------------------------------------------------

    def _situation(
        self,
        facts: Mapping[str, Any],
        attempts: Mapping[int, Mapping[str, Any]],
        *,
        news: bool,
    ) -> Situation:
        assert self._run_id is not None
        now, clock = time.monotonic(), time.time()
        attempt = max(note["attempt"] for note in attempts.values())
        written_by = {rank: self._written(rank, note["attempt"]) for rank, note in attempts.items()}
        written = max(written_by.values())
        step = self._step(attempt)
        self._pace.look(now, news=news, step=step)
        quiet_s = self._pace.quiet_s(now, clock - written) if written else None
        mean = self._mean_rate(attempt, attempts, written)
        rate = self._pace.steps_per_s
        signs = {rank: max(self._beat(rank), at) for rank, at in written_by.items()}
        unclosed = [rank for rank, note in attempts.items() if "closed" not in note]
        state, why = state_of(
            attempts.values(),
            quiet_s=quiet_s,
            stalled_after=self._pace.stalled_after(mean),
            all_gone=all(is_gone(self._claim(rank)) for rank in unclosed),
            silent_s=clock - max(signs.values()),
        )
        return Situation(
            run=self._run,
            run_id=self._run_id,
            attempt=attempt,
            world_size=int(facts.get("world_size", 1)),
            ranks=list(attempts),
            silent=[rank for rank in unclosed if max(signs.values()) - signs[rank] > STALE_S],
            signals_rank=self._signals_rank,
            step=step,
            state=state,
            why=why,
            quiet_s=quiet_s,
            steps_per_s=mean if rate is None else rate,
            is_mean=rate is None,
            signals=self._signals,
            composition=composition(list(self._batches.values()), self._sources),
            gaps=self._known_gaps(attempts, state),
        )

    def _written(self, rank: int, attempt: int) -> float:
        """When facts of this attempt were last written, by the clock of the disk; 0: never."""
        times = [
            path.stat().st_mtime
            for table in ("exposures", "signals")
            for path in self._ledgers(table, rank, attempt)
        ]
        return max(times, default=0.0)

    def _step(self, attempt: int) -> int | None:
        steps = [
            history.step
            for history in self._batches.values()
            if history.attempt == attempt and history.step is not None
        ]
        if self._signals.step is not None and self._signals.step[0] == attempt:
            steps.append(self._signals.step[1])
        return max(steps, default=None)

    def _mean_rate(
        self, attempt: int, attempts: Mapping[int, Mapping[str, Any]], written: float
    ) -> float | None:
        """Steps per second over the attempt so far, of one that was read from its beginning."""
        for rank, history in self._batches.items():
            tails = [self._tails.get(path) for path in self._ledgers("exposures", rank)]
            skipped = any(tail is not None and tail.skipped for tail in tails)
            started = attempts[rank].get("started") if rank in attempts else None
            if (
                history.attempt == attempt
                and not skipped
                and history.step is not None
                and history.first_step is not None
                and isinstance(started, float)
                and written > started
                and history.step >= history.first_step
            ):
                return (history.step - history.first_step + 1) / (written - started)
        return None

    def _claim(self, rank: int) -> Path:
        return rank_folder(self._run, "attempts", rank) / "claim.json"

    def _beat(self, rank: int) -> float:
        """The last heartbeat of the rank's process by the clock of the disk; 0: none."""
        try:
            return self._claim(rank).stat().st_mtime
        except OSError:  # closed, or taken over just now
            return 0.0

    def _known_gaps(self, attempts: Mapping[int, Mapping[str, Any]], state: str) -> list[str]:
        stamp = [(path, path.stat().st_mtime_ns) for path in self._attempt_files]
        if self._gaps[0] != stamp:
            try:
                gaps = Run.open(self._run).gaps()
            except (ValueError, KeyError, TypeError) as error:
                gaps = [f"a file of an attempt cannot be read ({error!r})"]
            self._gaps = (stamp, gaps)
        running = {
            f"attempt {note['attempt']}, rank {rank}: still running"
            for rank, note in attempts.items()
        }
        gaps = [
            gap
            for gap in self._gaps[1]
            if state == "stalled" or not any(gap.startswith(one) for one in running)
        ]
        for path, tail in self._tails.items():
            over = state == "ended" or time.time() - path.stat().st_mtime >= TORN_S
            if tail is not None and tail.torn_bytes and over:
                where = path.relative_to(self._run)
                gaps.append(f"{where}: the last {tail.torn_bytes} bytes are torn")
        for path, what in self._unreadable.items():
            gaps.append(f"{path.relative_to(self._run)}: {what}")
        return gaps


def _attempt_of(ledger: Path) -> int:
    return int(ledger.name[8:12])
