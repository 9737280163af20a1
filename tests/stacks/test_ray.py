"""Cleaning on a Ray cluster gives what one process gives, whatever dies meanwhile.

One machine with two nodes of Ray on it, each of one CPU.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'auditor[cluster]'")

import pyarrow as pa
import pyarrow.parquet as pq
import ray
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray_stages import always_die, die_once, refuse, refuse_or_sleep, square, tasks

from auditor import errors
from auditor.clean.config import DedupeConfig
from auditor.clean.dedupe import dedupe
from auditor.clean.engine import InProcess, Processes
from auditor.clean.ray import Ray
from auditor.clean.shards import find_shards
from auditor.clean.verify import verify
from auditor.errors import ShardError

LOREM = " ".join(f"word{i}" for i in range(60))
STAGES = ("read", "compare", "write")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Two nodes; this process is in the cluster, so that ``Ray`` uses it and leaves it alone."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        # Workers import from their environment, ray_stages too.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        nodes.add_node(num_cpus=1)
        ray.init(address=nodes.address, logging_level="ERROR", log_to_driver=False)
        yield nodes
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture
def engine(cluster: Any) -> Iterator[Ray]:
    of_ray = Ray()
    yield of_ray
    of_ray.close()


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def files(folder: Path) -> dict[str, bytes]:
    """Every file of an output, hidden ones too."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real text with real near-duplicates, in six shards of two formats."""
    beside = Path(__file__).resolve().parents[3] / "shared"
    real = Path(os.environ.get("AUDITOR_SHARED", beside)) / "data" / "B_neardup"
    if not real.is_dir():
        pytest.skip("no corpora: set AUDITOR_SHARED to the folder that holds data/B_neardup")
    folder = tmp_path_factory.mktemp("corpus")
    for path in real.glob("docs-0[0-2]*.jsonl.zst"):
        shutil.copy(path, folder)
    rows = find_shards([real / "docs-03-of-04.jsonl.zst"]).shards[0].rows()
    texts = [str(row.content) for row in rows]
    for number in range(3):
        table = pa.table({"text": texts[number::3]})
        pq.write_table(table, folder / f"rows-{number}.parquet")
    return folder


@pytest.fixture(scope="session")
def expected(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process makes of the corpus."""
    out = tmp_path_factory.mktemp("local") / "out"
    manifest = dedupe([corpus], out, engine=InProcess())
    assert manifest.counts["near"] > 1000
    assert verify(out).ok
    return files(out)


def test_output_is_that_of_one_process_byte_for_byte(
    engine: Ray, corpus: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    dedupe([corpus], tmp_path / "ray", engine=engine)
    pool = Processes(2)
    dedupe([corpus], tmp_path / "pool", engine=pool)
    pool.close()
    assert files(tmp_path / "ray") == expected
    assert files(tmp_path / "pool") == expected


rows = st.lists(
    st.tuples(st.sampled_from([LOREM, "buy now " * 40, "", None, "short"]), st.integers(0, 59)),
    max_size=12,
)


@settings(
    deadline=None,
    max_examples=8,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(st.lists(rows, min_size=1, max_size=4), st.sampled_from(["first", "longest"]))
def test_small_corpora_come_out_alike(
    engine: Ray, shards: list[list[tuple[str | None, int]]], keep: str
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        for number, drawn in enumerate(shards):
            texts = [text and text.replace(f"word{i}", "changed") for text, i in drawn]
            of_shard = ({"text": text} for text in texts)
            write_jsonl(folder / "in" / f"{number}.jsonl", of_shard)
        config = DedupeConfig(keep=keep)
        dedupe([folder / "in"], folder / "local", config=config)
        dedupe([folder / "in"], folder / "ray", config=config, engine=engine)
        assert files(folder / "local") == files(folder / "ray")


def workers() -> list[int]:
    """Processes that run a task of Ray now, of clusters that this process began."""
    found = []
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            is_busy = status.read_bytes().startswith(b"ray::_run")
            if is_busy and os.getpid() in ancestors(int(status.parent.name)):
                found.append(int(status.parent.name))
    return found


def ancestors(process: int) -> Iterator[int]:
    while process > 1:
        status = Path(f"/proc/{process}/status").read_text()
        process = int(status.split("PPid:")[1].split()[0])
        yield process


@pytest.mark.parametrize("stage", STAGES)
def test_workers_killed_in_a_stage_change_nothing(
    engine: Ray, corpus: Path, expected: dict[str, bytes], tmp_path: Path, stage: str
) -> None:
    killed: list[int] = []

    def kill(told: str, done: int, total: int) -> None:
        if told == stage and 0 < done < total and not killed:
            for _ in range(50):  # the next task begins in a moment
                killed.extend(workers())
                if killed:
                    break
            for process in killed:
                os.kill(process, signal.SIGKILL)

    dedupe([corpus], tmp_path / "out", engine=engine, progress=kill)
    assert killed
    assert files(tmp_path / "out") == expected


def test_a_node_that_is_lost_changes_nothing(
    cluster: Any, engine: Ray, corpus: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    lost = [cluster.add_node(num_cpus=1)]

    def lose(told: str, done: int, total: int) -> None:
        if told == "write" and done and lost:
            cluster.remove_node(lost.pop(), allow_graceful=False)

    dedupe([corpus], tmp_path / "out", engine=engine, progress=lose)
    assert not lost
    assert files(tmp_path / "out") == expected


def ignore(number: int) -> None:
    pass


def test_results_come_in_order_and_each_task_is_told_of_once(engine: Ray, tmp_path: Path) -> None:
    told: list[int] = []
    assert engine.map(square, tasks(tmp_path, 20), told.append) == [i * i for i in range(20)]
    assert sorted(told) == list(range(20))
    assert engine.map(square, [], told.append) == []


def test_a_task_whose_worker_was_killed_is_done_again(engine: Ray, tmp_path: Path) -> None:
    assert engine.map(die_once, tasks(tmp_path, 3), ignore) == [0, 1, 2]
    assert [(tmp_path / str(i)).stat().st_size for i in range(3)] == [1, 2, 1]


def test_a_task_that_keeps_dying_is_given_up(engine: Ray, tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"died 3 times.*goes on where it stopped"):
        engine.map(always_die, tasks(tmp_path, 1), ignore)
    assert (tmp_path / "0").stat().st_size == 3


def test_a_refusal_is_told_as_locally_and_not_tried_again(engine: Ray, tmp_path: Path) -> None:
    with pytest.raises(ShardError) as local:
        InProcess().map(refuse, tasks(tmp_path, 1), ignore)
    (tmp_path / "0").unlink()
    with pytest.raises(ShardError) as told:
        engine.map(refuse, tasks(tmp_path, 1), ignore)
    assert type(told.value) is ShardError
    assert vars(told.value) == vars(local.value)
    assert str(told.value) == str(local.value) == f"{tmp_path / '0'}, row 0: is torn. Mend it"
    assert (tmp_path / "0").stat().st_size == 1


def test_a_refusal_ends_the_other_tasks(engine: Ray, tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="torn"):
        engine.map(refuse_or_sleep, tasks(tmp_path, 4), ignore)
    assert workers() == []


def test_every_error_survives_the_way_between_processes() -> None:
    where: dict[str, Any] = {"path": Path("a"), "row": 1, "remedy": "Mend it"}
    versions = errors.SchemaVersionError("a table", path="a", found=2, expected=1)
    for error in (
        versions,
        *(kind("bad", **where) for kind in errors.AuditorError.__subclasses__()),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_a_shard_that_is_torn_is_told_as_locally(engine: Ray, tmp_path: Path) -> None:
    path = tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"text": "x"}\n{"text": "cut\n')
    told = []
    for name, one in {"local": InProcess(), "ray": engine}.items():
        with pytest.raises(ShardError, match="row 1") as error:
            dedupe([path], tmp_path / name, engine=one)
        told.append(str(error.value))
    assert told[0] == told[1]


def test_paths_may_be_relative(
    engine: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", [{"text": LOREM}] * 2)
    monkeypatch.chdir(tmp_path)
    assert dedupe(["in"], "out", engine=engine).counts["rows_out"] == 1
    assert verify(tmp_path / "out").ok


def test_a_rehearsal_leaves_nothing(engine: Ray, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": LOREM}] * 2)
    manifest = dedupe([path], tmp_path / "out", engine=engine, dry_run=True)
    assert manifest.counts["rows_out"] == 1
    assert not (tmp_path / "out").exists()


DRIVER = """
import sys
from auditor.clean.dedupe import dedupe
from auditor.clean.ray import Ray

def tell(stage, done, total):
    print(stage, done, flush=True)

if __name__ == "__main__":
    engine = Ray(sys.argv[1])
    dedupe([sys.argv[2]], sys.argv[3], engine=engine, progress=tell)
    engine.close()
"""


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_driver_goes_on_with_the_same_command(
    cluster: Any, corpus: Path, expected: dict[str, bytes], tmp_path: Path, stage: str
) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    command = [sys.executable, script, cluster.address, corpus, tmp_path / "out"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            if line.startswith(stage) and not line.endswith(" 0\n"):
                driver.kill()
                break
    assert not (tmp_path / "out" / "manifest.json").exists()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "out") == expected


@pytest.fixture
def apart(cluster: Any, tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """Add a node that sees an empty folder of its own where the others see a given one."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("a node with mounts of its own needs root and unshare")
    before = {node["NodeID"] for node in ray.nodes()}
    hidden: list[subprocess.Popen[bytes]] = []

    def add(folder: Path) -> None:
        start = f"mount -t tmpfs none {folder} && exec {Path(sys.executable).parent}/ray start"
        settings = f"--address {cluster.address} --num-cpus 1 --block --disable-usage-stats"
        command = ["unshare", "-m", "sh", "-c", f"{start} {settings}"]
        hidden.append(
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )
        while not {n["NodeID"] for n in ray.nodes() if n["Alive"]} - before:
            assert hidden[0].poll() is None
            time.sleep(0.1)

    yield add
    for process in hidden:
        process.send_signal(signal.SIGTERM)
        process.wait()
    while {n["NodeID"] for n in ray.nodes() if n["Alive"]} - before:
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("out", r"is not the same folder on node .*that all nodes mount"),
        ("in", r"is not there on node .*give them as URLs"),
    ],
)
def test_a_node_that_does_not_share_the_storage_is_named(
    engine: Ray, apart: Callable[[Path], None], tmp_path: Path, own: str, message: str
) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", [{"text": LOREM}])
    (tmp_path / "out").mkdir()
    apart(tmp_path / own)
    with pytest.raises(ShardError, match=message) as error:
        dedupe([tmp_path / "in"], tmp_path / "out", engine=engine)
    assert str(tmp_path / own) in str(error.value)


def test_a_node_that_joins_late_is_told_of_all_the_same(
    engine: Ray, apart: Callable[[Path], None], tmp_path: Path
) -> None:
    for number in range(8):
        write_jsonl(tmp_path / "in" / f"{number}.jsonl", [{"text": LOREM}])
    (tmp_path / "out").mkdir()
    joined: list[bool] = []

    def join(stage: str, done: int, total: int) -> None:
        if done and not joined:
            joined.append(True)
            apart(tmp_path / "out")

    with pytest.raises(ShardError, match="is not the same folder on node"):
        dedupe([tmp_path / "in"], tmp_path / "out", engine=engine, progress=join)


def test_other_versions_of_packages_are_refused(
    engine: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"auditor": "0.0.1", "pyarrow": pa.__version__}
    monkeypatch.setattr("auditor.clean.ray._versions", partial(dict, versions))
    with pytest.raises(ShardError, match=r"node .* has auditor .*, and the driver 0\.0\.1"):
        engine.map(square, tasks(tmp_path, 1), ignore)


@pytest.mark.parametrize("address", ["auto", "127.0.0.1:1"])
def test_a_cluster_that_is_not_there_is_told_of(address: str) -> None:
    script = (
        f"from auditor.clean.ray import Ray\n"
        f"from auditor.errors import ShardError\n"
        f"try: Ray({address!r})\n"
        f"except ShardError as error: print(error)\n"
    )
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert f"no Ray cluster can be reached at {address}" in done.stdout, done.stderr


def test_without_ray_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ShardError, match=r"pip install 'auditor\[cluster\]'"):
        Ray()


def test_command_line_writes_the_same_bytes(cluster: Any, corpus: Path, tmp_path: Path) -> None:
    for engine, where in {"local": [], "ray": ["--address", cluster.address]}.items():
        command = [sys.executable, "-m", "auditor", "dedupe", corpus, "--out", tmp_path / engine]
        done = subprocess.run(
            [*command, "--engine", engine, *where], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert files(tmp_path / "ray") == files(tmp_path / "local")
    assert verify(tmp_path / "ray").ok
