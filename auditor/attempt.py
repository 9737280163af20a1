"""The write side of a run directory: where its files lie, who may write them, which attempt it is.

    run.json                                the run: schema version, id, world size
    attempts/rank-00000/claim.json          the process that writes this rank now
    attempts/rank-00000/attempt-0000.json   one process life: versions, dataset, how it ended
    {exposures,samples,signals}/rank-00000/attempt-0000.ledger      facts, append-only
    derived/                                all that can be rebuilt

One writer per rank, no locks: a claim of a living process is refused, a stale one is taken over as
a new attempt.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import socket
import threading
import time
import uuid
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from auditor.errors import RunClaimedError, RunError, SchemaVersionError
from auditor.files import atomic
from auditor.schema import RUN_VERSION

LEDGERS = ("exposures", "samples", "signals")
STALE_S = 60.0
"""A claim from another host is stale when its heartbeat is older than this."""


def rank_folder(run: Path, table: str, rank: int) -> Path:
    return run / table / f"rank-{rank:05d}"


def ledger_path(run: Path, table: str, rank: int, attempt: int) -> Path:
    return rank_folder(run, table, rank) / f"attempt-{attempt:04d}.ledger"


def place_of(path: Path) -> tuple[int, int] | None:
    """Rank and attempt of one of these files, by its name; None where it is none of them."""
    rank, attempt = _RANK.fullmatch(path.parent.name), _ATTEMPT.fullmatch(path.name)
    return None if rank is None or attempt is None else (int(rank[1]), int(attempt[1]))


_RANK = re.compile(r"rank-(\d{5,})")
_ATTEMPT = re.compile(r"attempt-(\d{4,})(?:\.json|\.ledger|\.worker-\d+\.ledger)")


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole: a reader sees the old file or the new one, never half of it."""
    with atomic(path) as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")


def read_run_json(run: Path) -> dict[str, Any]:
    """The parsed ``run.json``.

    Raises:
        RunError: there is none, or it is not one.
        SchemaVersionError: it was written by another version of the format.
    """
    path = run / "run.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        found = int(value["schema_version"])
    except FileNotFoundError:
        raise RunError(
            "not a run directory: it has no run.json",
            path=run,
            remedy="Give the folder that was passed to AuditedSampler or GradeMonitor as run=",
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"run.json cannot be read ({error})",
            path=path,
            remedy="Restore it from a copy, or record the run again",
        ) from None
    if found != RUN_VERSION:
        raise SchemaVersionError("run directory", path=path, found=found, expected=RUN_VERSION)
    return dict(value)


@dataclass
class Attempt:
    """One process life of one rank; made by :func:`open_attempt`."""

    run: Path
    run_id: str
    rank: int
    number: int
    facts: dict[str, Any]
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def _path(self) -> Path:
        return rank_folder(self.run, "attempts", self.rank) / f"attempt-{self.number:04d}.json"

    @property
    def is_there(self) -> bool:
        """Whether the attempt's file is still where it was made; True where that cannot be told."""
        try:
            self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        return True

    def ledger(self, table: str) -> Path:
        return ledger_path(self.run, table, self.rank, self.number)

    def note(self, **facts: Any) -> None:
        """Add facts to the attempt's file; not where the run was deleted since it was opened."""
        with self._lock:  # the training thread and the recorder's both note
            is_new = not self.facts
            self.facts.update(facts)
            if is_new or self.is_there:
                write_json(self._path, self.facts)

    def heartbeat(self) -> None:
        write_json(_claim_path(self.run, self.rank), _claim())

    def close(self, *, complete: bool, **facts: Any) -> None:
        """Record how the attempt ended; give the claim back unless something still writes."""
        self.note(closed=time.time(), complete=complete, **facts)
        if complete:
            _claim_path(self.run, self.rank).unlink(missing_ok=True)


def open_attempt(run: Path, *, rank: int = 0, world_size: int = 1) -> Attempt:
    """Claim a rank of a run directory, creating the directory on first use.

    Raises:
        RunClaimedError: a live process is writing this rank.
        RunError: the path exists and is something else, or cannot be written.
        SchemaVersionError: the run is of another version of the format.
    """
    if run.exists() and not run.is_dir():
        raise RunError("not a folder", path=run, remedy="Give a folder as run=")
    folder = rank_folder(run, "attempts", rank)
    try:
        return _opened(run, folder, rank, world_size)
    except OSError as error:
        raise RunError(
            f"cannot be written ({error.strerror or error})",
            path=run,
            remedy="Choose a writable folder",
        ) from None


def _opened(run: Path, folder: Path, rank: int, world_size: int) -> Attempt:
    folder.mkdir(parents=True, exist_ok=True)
    _create_once(
        run / "run.json",
        {
            "schema_version": RUN_VERSION,
            "run_id": uuid.uuid4().hex[:12],
            "created": time.time(),
            "world_size": world_size,
        },
    )
    run_id = read_run_json(run)["run_id"]
    _claim_rank(run, rank)
    places = map(place_of, folder.glob("attempt-*.json"))
    number = 1 + max((place[1] for place in places if place is not None), default=-1)
    attempt = Attempt(run, run_id, rank, number, {})
    attempt.note(
        attempt=number,
        rank=rank,
        world_size=world_size,
        started=time.time(),
        host=socket.gethostname(),
        pid=os.getpid(),
        python=platform.python_version(),
        auditor=version("auditor"),
    )
    return attempt


def _create_once(path: Path, value: Any) -> None:
    """Like :func:`write_json`, but the first of several ranks wins."""
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.new")
    write_json(temporary, value)
    with contextlib.suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()


def _claim_path(run: Path, rank: int) -> Path:
    return rank_folder(run, "attempts", rank) / "claim.json"


def _claim() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_started": _process_started(os.getpid()),
        "heartbeat": time.time(),
    }


def _claim_rank(run: Path, rank: int) -> None:
    """Create the claim file, which only one process can; move a stale one out of the way first."""
    path = _claim_path(run, rank)
    for _ in range(100):
        temporary = path.with_name(f".claim.{uuid.uuid4().hex}")
        write_json(temporary, _claim())
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass
        else:
            return
        finally:
            temporary.unlink()
        holder = _read_claim(path)
        if holder is not None and _is_alive(holder):
            raise RunClaimedError(
                f"rank {rank} is being written by process {holder.get('pid')} "
                f"on {holder.get('host')}",
                path=run,
                remedy="Give this training its own run folder, or stop the other process",
            )
        stale = path.with_name(f".claim.stale.{uuid.uuid4().hex}")
        with contextlib.suppress(FileNotFoundError):
            path.rename(stale)
            if _read_claim(stale) != holder:  # a rival had taken it over in between: put it back
                with contextlib.suppress(FileExistsError):
                    os.link(stale, path)
            stale.unlink()
    raise RunError("cannot be claimed", path=path, remedy="Remove this file")


def _read_claim(path: Path) -> dict[str, Any] | None:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return holder if isinstance(holder, dict) else None


def _is_alive(holder: dict[str, Any]) -> bool:
    if holder.get("host") != socket.gethostname():
        return bool(time.time() - holder.get("heartbeat", 0.0) < STALE_S)
    pid = holder.get("pid", 0)
    if pid == os.getpid():  # an earlier attempt of this very process that was never closed
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    # Numbers of processes are used again, in containers at once: the same number is the same
    # process only if it started at the same time.
    return _process_started(pid) == holder.get("process_started")


def _process_started(pid: int) -> str | None:
    """Boot and start time of a process, where the system tells; None elsewhere."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return f"{boot}:{fields[19]}"
