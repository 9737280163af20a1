"""Where the stages run on several machines: as tasks of Ray, which are what one machine runs.

A stage leaves what it makes in the work folder, so all nodes must see one storage: the output, and
inputs that are paths, lie on it. Every node is asked before it works whether it does, and whether
it has the versions that the driver has. Of code nothing is shipped: workers import ``auditor`` from
the environment of their node.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final, TypeVar

from auditor.clean.shards import MARKER, Shard
from auditor.errors import AuditorError, ShardError
from auditor.files import atomic

Task = TypeVar("Task")
Result = TypeVar("Result")

_ATTEMPTS: Final = 3
"""Times that a task is tried whose worker or node died."""

_TASKS_PER_CPU: Final = 2
"""Tasks that are with Ray at a time, for each CPU: one runs and one waits, for nobody to idle, and
for an autoscaler to see that there is more to do."""

_CONNECT_S: Final = 10.0
"""Time within which the head of a cluster must answer, in seconds."""

_STOP_S: Final = 30.0
"""Time that tasks get to end when there is no more use for them, in seconds."""

_PACKAGES: Final = ("auditor", "pyarrow", "zstandard")
"""Packages that the bytes of the output depend on."""


@dataclass(frozen=True, kw_only=True)
class _Common:
    """What all nodes must have in common with the driver: a file, and versions of packages."""

    marker: Path
    token: str
    versions: dict[str, str]


class Ray:
    """The nodes of a Ray cluster, which must mount what is read and written.

    Args:
        address: ``auto`` for the cluster that this machine is a node of, or ``HOST:PORT`` of its
            head. None: the Ray that runs already in this process, else what ``RAY_ADDRESS`` names,
            else the cluster of this machine, else a Ray of this machine alone, which ``close``
            ends.

    Raises ``ShardError`` where Ray is not installed, or cannot be reached.
    """

    def __init__(self, address: str | None = None) -> None:
        try:
            import ray
        except ImportError as error:
            raise ShardError(
                "Ray is not installed", remedy="Install it: pip install 'auditor[cluster]'"
            ) from error
        self._ray: Any = ray
        self._began = not ray.is_initialized()
        self._checked: set[str] = set()
        if self._began:
            try:
                _reach(address)
                ray.init(address, include_dashboard=False, logging_level=logging.WARNING)
            except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                raise ShardError(
                    f"no Ray cluster can be reached at {address or 'this machine'}: {error}",
                    remedy="Check the address, and that `ray status` shows a cluster there",
                ) from error

    def map(
        self,
        stage: Callable[[Task], Result],
        tasks: Sequence[Task],
        done: Callable[[int], None],
    ) -> list[Result]:
        """Results in the order of the tasks; ``done`` gets the number of each one that is through.

        Tasks are dataclasses whose paths lie in one work folder. Raises what a stage raises, and
        ``ShardError`` where a node lacks what it needs, and where the worker of a task, or its
        node, keeps dying.
        """
        if not tasks:
            return []
        tasks = [_absolute(task) for task in tasks]
        common = _leave_marker(_work_folder(tasks[0]))
        self._check_nodes(_input(tasks[0]), common)
        # Deaths are counted here: those by memory Ray counts apart, by a setting of the cluster,
        # and may try such a task without end.
        run = self._ray.remote(_run).options(
            num_cpus=1, max_retries=0, scheduling_strategy="SPREAD"
        )
        waiting = deque(range(len(tasks)))
        running: dict[Any, int] = {}
        results: dict[int, Result] = {}
        deaths: Counter[int] = Counter()
        try:
            while waiting or running:
                room = self._room() - len(running)
                for _ in range(min(room, len(waiting))):
                    number = waiting.popleft()
                    # Ray itself puts a large argument into its object store.
                    running[run.remote(stage, tasks[number], common)] = number
                (ref, *_), _ = self._ray.wait(list(running))
                number = running.pop(ref)
                try:
                    results[number] = self._ray.get(ref)
                except self._ray.exceptions.RayTaskError as error:
                    raise error.cause from error
                except self._ray.exceptions.RayError as error:
                    deaths[number] += 1
                    if deaths[number] == _ATTEMPTS:
                        raise _keeps_dying(error) from error
                    waiting.appendleft(number)
                else:
                    done(number)
        except BaseException:
            self._stop(list(running))
            raise
        return [results[number] for number in range(len(tasks))]

    def close(self) -> None:
        """Leave the cluster, unless this process was in it before."""
        if self._began:
            self._ray.shutdown()

    def _stop(self, running: list[Any]) -> None:
        """End tasks now: nobody may write to an output that others may begin to write."""
        for ref in running:
            self._ray.cancel(ref, force=True)
        if running:
            self._ray.wait(running, num_returns=len(running), timeout=_STOP_S)

    def _room(self) -> int:
        """Tasks that may be with Ray at a time. A cluster may grow."""
        n_cpus = int(self._ray.cluster_resources().get("CPU", 0))
        return _TASKS_PER_CPU * max(n_cpus, 1)

    def _check_nodes(self, given: Path | None, common: _Common) -> None:
        """Ask each node that is not known yet; raises ``ShardError`` for what one lacks."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        check = self._ray.remote(_check_node)
        asked = {}
        for node in self._ray.nodes():
            name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            number = node["NodeID"]
            if node["Alive"] and node["Resources"].get("CPU") and number not in self._checked:
                there = NodeAffinitySchedulingStrategy(number, soft=False)
                settings = check.options(num_cpus=0, max_retries=0, scheduling_strategy=there)
                asked[number] = name, settings.remote(given, common)
        for number, (name, ref) in asked.items():
            try:
                self._ray.get(ref)
            except self._ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, AuditorError):
                    raise error.cause from error
                raise ShardError(
                    f"node {name} cannot run auditor: {error.cause}",
                    remedy="Install auditor there, in the environment that Ray was started from",
                ) from error
            except self._ray.exceptions.RayError:
                continue  # The node has gone since it was listed.
            self._checked.add(number)


def _reach(address: str | None) -> None:
    """Raise ``OSError`` where nobody listens at ``HOST:PORT``: Ray would end this process."""
    if address in (None, "auto"):
        address = os.environ.get("RAY_ADDRESS")
    host, _, port = (address or "").rpartition(":")
    if port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


def _run(stage: Callable[[Task], Result], task: Task, common: _Common) -> Result:
    """On a node: a task of a stage. The node may have joined since all were asked."""
    _check(_input(task), common)
    return stage(task)


def _check_node(given: Path | None, common: _Common) -> None:
    """On a node: raise ``ShardError`` where a task would find or leave nothing there."""
    _check(given, common)
    trial = common.marker.with_name(f".written-{uuid.uuid4().hex}")
    try:
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise ShardError(
            f"cannot be written on node {_node()}: {error.strerror}",
            path=common.marker.parent,
            remedy="Let the user that Ray runs as write there",
        ) from error


def _check(given: Path | None, common: _Common) -> None:
    found = _versions()
    for package, wanted in common.versions.items():
        if found[package] != wanted:
            raise ShardError(
                f"node {_node()} has {package} {found[package]}, and the driver {wanted}",
                remedy="Install the same versions on all nodes",
            )
    try:
        is_shared = common.marker.read_text() == common.token
    except OSError:
        is_shared = False
    if not is_shared:
        raise ShardError(
            f"is not the same folder on node {_node()}",
            path=common.marker.parent,
            remedy="Put the output on storage that all nodes mount under the same path "
            "(for a rehearsal, set TMPDIR to a folder there)",
        )
    if given is not None and not given.exists():
        raise ShardError(
            f"is not there on node {_node()}",
            path=given,
            remedy="Put the inputs on storage that all nodes mount, or give them as URLs",
        )


def _input(task: Any) -> Path | None:
    """The path of the shard that a task reads, None where it reads none or that is a URL."""
    shard = getattr(task, "shard", None)
    return shard.path if isinstance(shard, Shard) and isinstance(shard.path, Path) else None


def _node() -> str:
    import ray

    return f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"


def _versions() -> dict[str, str]:
    return {package: metadata.version(package) for package in _PACKAGES}


def _leave_marker(folder: Path) -> _Common:
    """Leave a file in the work folder, which goes when the folder goes."""
    common = _Common(marker=folder / ".shared", token=uuid.uuid4().hex, versions=_versions())
    with atomic(common.marker) as file:
        file.write(common.token.encode())
    return common


def _absolute(task: Task) -> Task:
    """The task with absolute paths: the current folder of a worker is another one."""
    paths = {name: path.absolute() for name, path in _paths(task).items()}
    return replace(task, **paths) if paths else task  # type: ignore[type-var]


def _work_folder(task: Any) -> Path:
    """The folder whose name is ``MARKER``; of a rehearsal, which has none, that of the task."""
    paths = list(_paths(task).values())
    if not paths:
        raise TypeError(f"a task must be a dataclass that has a path, got {task!r}")
    above = [parent for path in paths for parent in path.parents if parent.name == MARKER]
    return above[0] if above else paths[0].parent


def _paths(task: Any) -> dict[str, Path]:
    """Fields of a task that are paths."""
    if not is_dataclass(task):
        return {}
    values = {field.name: getattr(task, field.name) for field in fields(task)}
    return {name: value for name, value in values.items() if isinstance(value, Path)}


def _keeps_dying(error: Exception) -> ShardError:
    return ShardError(
        f"the worker of a task died {_ATTEMPTS} times: {error}",
        remedy="If it was its memory, use nodes with more of it for each CPU. "
        "The same command goes on where it stopped",
    )
