"""Killed, out of space, damaged, disturbed: the same command goes on, and its bytes are the same.

What is compared is the whole output folder, names and bytes, with that of a call nobody disturbed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from elsewhere import Elsewhere, elsewhere
from jsonl_files import write_jsonl

from auditor.clean.config import DedupeConfig
from auditor.clean.dedupe import dedupe
from auditor.clean.restore import restore
from auditor.clean.shards import MARKER, find_shards
from auditor.clean.verify import verify
from auditor.clean.work import writing
from auditor.errors import ShardError

DEADLINE_S = 120
"""Nothing here takes so long; a hang fails."""

KILLED = 9
"""Exit status of a call that died where it was told to."""

# Runs dedupe in forks of itself, so that importing does not count: a line of input is
# "inputs TAB out TAB workers TAB die TAB settings". ``die`` is the number of changes to the file
# system before the last of which the fork ends as if killed (0: never), ``settings`` those of
# DedupeConfig, as JSON. It answers with two lines: the fork's process id, and its exit status once
# it has ended.
FORKS = """
    import json, os, sys
    from auditor.clean.config import DedupeConfig
    from auditor.clean.dedupe import dedupe
    from auditor.clean.engine import Processes

    CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}

    def die_before(n):
        left = n

        def count(event, args):
            nonlocal left
            write = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
            if event in CHANGES or write:
                left -= 1
                if left == 0:
                    os._exit(9)

        sys.addaudithook(count)

    if __name__ == "__main__":
        # Loads the kernels; not a dry run, which uses polars: its threads do not survive a fork.
        dedupe([sys.argv[1]], sys.argv[2])
        for line in sys.stdin:
            inputs, out, workers, die, settings = line.rstrip("\\n").split("\\t")
            pid = os.fork()
            if not pid:
                os.setsid()
                code = 1
                try:
                    engine = Processes(int(workers)) if int(workers) else None
                    if int(die):
                        die_before(int(die))
                    config = DedupeConfig(**json.loads(settings))
                    dedupe([inputs], out, config=config, engine=engine)
                    if engine:
                        engine.close()
                    code = 0
                except Exception as error:
                    print(type(error).__name__, error, file=sys.stderr, flush=True)
                os._exit(code)
            print(pid, flush=True)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Forks:
    """Calls of dedupe that can be killed; see ``FORKS``."""

    def __init__(self, folder: Path, inputs: Path) -> None:
        script = folder / "forks.py"
        script.write_text(textwrap.dedent(FORKS))
        self._inputs = inputs
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(inputs), str(folder / "first")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, out: Path, *, workers: int = 0, die: int = 0, **config: Any) -> int:
        assert self._process.stdin is not None
        fields = (self._inputs, out, workers, die, json.dumps(config))
        self._process.stdin.write("\t".join(map(str, fields)) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def wait(self) -> int:
        return self._answer()

    def call(self, out: Path, **settings: Any) -> int:
        self.start(out, **settings)
        return self.wait()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)

    def _answer(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


def corpus(folder: Path, n_shards: int, n_rows: int, n_words: int) -> Path:
    """Shards of four kinds in two folders; three rows in ten are copies, or nearly."""
    generator = np.random.default_rng(3)
    texts: list[list[str]] = []
    for i in range(n_shards * n_rows):
        if i and generator.random() < 0.3:
            words = list(texts[int(generator.integers(i))])
            if generator.random() < 0.5:
                words[-1 - int(generator.integers(2))] = "changed"
        else:
            words = generator.integers(0, 5000, n_words).astype(str).tolist()
        texts.append(words)
    rows = [{"id": f"r{i}", "text": " ".join(words)} for i, words in enumerate(texts)]
    for number in range(n_shards):
        part = rows[number::n_shards]
        end = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet")[number % 4]
        path = folder / f"{number % 2}" / f"part-{number}.{end}"
        if end == "parquet":
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist(part), path)
        else:
            write_jsonl(path, part)
    return folder


def tree(folder: Path) -> dict[str, bytes | None]:
    """All that is in a folder: bytes of files, None for folders."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def is_whole(out: Path) -> bool:
    """Whether a call that was killed had ended but for its exit."""
    return (out / "manifest.json").is_file() and not (out / MARKER).exists()


def members(session: int) -> list[int]:
    """Processes of a session that are alive."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, NotADirectoryError):
            continue
        if fields[3] == str(session) and fields[0] not in "ZX":
            found.append(int(entry.name))
    return found


def wait_until(holds: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.01)
    return holds()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 short rows in 4 shards."""
    return corpus(tmp_path_factory.mktemp("small") / "in", 4, 12, 30)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 2 MB in 8 shards."""
    return corpus(tmp_path_factory.mktemp("large") / "in", 8, 100, 500)


@pytest.fixture(scope="module")
def expected_small(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return undisturbed(small, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def expected_large(large: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return undisturbed(large, tmp_path_factory.mktemp("undisturbed"))


def undisturbed(inputs: Path, folder: Path, **config: Any) -> dict[str, Any]:
    manifest = dedupe([inputs], folder / "out", config=DedupeConfig(**config))
    assert manifest.counts["near"] + manifest.counts["exact"] > 3
    return tree(folder / "out")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: hundreds of calls there wait for no disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with TemporaryDirectory(dir=memory) as name:
        yield Path(name)


@pytest.fixture
def small_forks(small: Path, tmp_path: Path) -> Iterator[Forks]:
    forks = Forks(tmp_path, small)
    yield forks
    forks.close()


@pytest.fixture
def large_forks(large: Path, tmp_path: Path) -> Iterator[Forks]:
    forks = Forks(tmp_path, large)
    yield forks
    forks.close()


# Killed


def test_a_call_killed_before_any_change_to_the_file_system_goes_on(
    small_forks: Forks, small: Path, expected_small: dict[str, Any], folder: Path
) -> None:
    """Every file opened, renamed or removed, and every folder made or removed, is a place to die.

    Every seventh time, the second call has another threshold.
    """
    other = undisturbed(small, folder / "other", threshold=0.95)
    assert other != expected_small
    assert die_everywhere(small_forks, folder, expected_small, other) > 60


@pytest.mark.slow
def test_a_call_killed_while_it_writes_folders_and_spans_goes_on(
    corpora: Path, tmp_path: Path, folder: Path
) -> None:
    """Units of several files, and the file that several units are opened by; every tenth place."""
    formats = corpora / "E_formats"
    for name in ("hf_dict_save_to_disk", "hf_save_to_disk"):
        shutil.copytree(formats / name, tmp_path / "in" / name)
    for name in ("megatron_bytes_uint16.idx", "megatron_bytes_uint16.bin"):
        shutil.copy(formats / name, tmp_path / "in" / name)
    settings: dict[str, Any] = {"substrings": "report", "substring_elements": 30}
    expected = undisturbed(tmp_path / "in", folder / "undisturbed", **settings)
    assert any(name.endswith("dataset_dict.json") for name in expected)
    assert len(expected["substrings.parquet"]) > 1000
    forks = Forks(tmp_path, tmp_path / "in")
    try:
        assert die_everywhere(forks, folder, expected, None, step=10, **settings) > 30
    finally:
        forks.close()


def die_everywhere(
    forks: Forks,
    folder: Path,
    expected: dict[str, Any],
    other: dict[str, Any] | None,
    step: int = 1,
    **settings: Any,
) -> int:
    """Die before every change to the file system, or some, and call again; returns how often.

    With ``other``, every seventh time the second call is that with a threshold of .95.
    """
    for n_deaths, die in enumerate(count(1, step)):
        out = folder / f"out-{die}"
        code = forks.call(out, die=die, **settings)
        if code == 0:
            return n_deaths  # it made fewer changes than that
        assert code == KILLED, die
        changed = other is not None and die % 7 == 0 and not is_whole(out)
        if not is_whole(out):
            assert forks.call(out, **settings, **({"threshold": 0.95} if changed else {})) == 0, die
        assert tree(out) == (other if changed else expected), die
        shutil.rmtree(out)
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "n_kills"), [(0, 44), (2, 4)])
def test_a_call_killed_at_any_time_goes_on(
    large_forks: Forks,
    expected_large: dict[str, Any],
    folder: Path,
    workers: int,
    n_kills: int,
) -> None:
    """Kills at times spread over the whole call, every third time twice."""
    durations = []
    for call in range(2):
        start = time.monotonic()
        assert large_forks.call(folder / str(call), workers=workers) == 0
        durations.append(time.monotonic() - start)
        assert tree(folder / str(call)) == expected_large
    generator = np.random.default_rng(workers)
    n_killed = 0
    for kill in range(n_kills):
        out = folder / f"out-{kill}"
        for _ in range(2 if kill % 3 == 0 and not is_whole(out) else 1):
            pid = large_forks.start(out, workers=workers)
            time.sleep(min(durations) * (kill + generator.random()) / n_kills)
            with suppress(ProcessLookupError):  # it was faster this time
                os.kill(pid, signal.SIGKILL)
            n_killed += large_forks.wait() == -signal.SIGKILL
            assert wait_until(lambda pid=pid: not members(pid), within_s=5)  # type: ignore[misc]
        if not is_whole(out):
            assert large_forks.call(out) == 0
        assert tree(out) == expected_large, kill
        shutil.rmtree(out)
    assert n_killed > n_kills / 4


@pytest.mark.slow
@pytest.mark.parametrize("n_files", [1, 12, 45])
def test_the_command_killed_after_some_files_goes_on(
    large: Path, expected_large: dict[str, Any], tmp_path: Path, n_files: int
) -> None:
    """The real command, killed once this many files of its work folder have been seen."""
    command = [sys.executable, "-m", "auditor", "dedupe", str(large), "--out", str(tmp_path / "o")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    seen: set[str] = set()

    def enough() -> bool:
        for _, _, names in os.walk(tmp_path / "o" / MARKER):
            seen.update(names)
        return len(seen) >= n_files or process.poll() is not None

    deadline = time.monotonic() + DEADLINE_S
    while not enough() and time.monotonic() < deadline:
        pass
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert (tmp_path / "o" / MARKER).is_dir()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE_S)
    assert tree(tmp_path / "o") == expected_large


# No space, no permission


class Disk:
    """A file system in memory, of a size that can be changed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mount(self, options: str) -> None:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.path)],
            check=True,
            capture_output=True,
        )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    one = Disk(path)
    try:
        one.mount("size=1m")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a file system needs root")
    yield one
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.parametrize("n_kilobytes", [4, 60, 200, 450, 700, 1000, 1300, 1600, 1900, 2200])
def test_a_full_disk_is_told_and_the_same_command_goes_on(
    large: Path, expected_large: dict[str, Any], disk: Disk, n_kilobytes: int
) -> None:
    out = disk.path / "out"
    disk.mount(f"remount,size={n_kilobytes}k")
    with pytest.raises(ShardError) as caught:
        dedupe([large], out)
    message = str(caught.value)
    assert str(disk.path) in message
    assert "No space left on device" in message
    assert message.endswith("Free some space. The same command goes on where it stopped")
    disk.mount("remount,size=64m")
    dedupe([large], out)
    assert tree(out) == expected_large


@pytest.mark.parametrize("n_kilobytes", [4, 60])
def test_a_disk_that_is_full_when_rows_are_given_back_is_told(
    large: Path, tmp_path: Path, disk: Disk, n_kilobytes: int
) -> None:
    manifest = dedupe([large], tmp_path / "out", manifest_only=True)
    disk.mount(f"remount,size={n_kilobytes}k")
    with pytest.raises(ShardError) as caught:
        restore(manifest, disk.path / "back")
    message = str(caught.value)
    assert message.startswith(f"{disk.path / 'back'}")
    assert "No space left on device" in message
    assert message.endswith("Free some space. The same command begins again")
    disk.mount("remount,size=64m")
    assert restore(manifest, disk.path / "back").n_rows > 0


def test_an_input_that_may_not_be_read_is_no_matter_of_the_output(tmp_path: Path) -> None:
    refused = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "in.jsonl"))
    with (
        pytest.raises(ShardError, match=r"in\.jsonl: .*denied\. Change the permissions there\."),
        writing(tmp_path / "out", "Again"),
    ):
        raise refused


def test_a_disk_that_became_read_only_is_told_and_the_same_command_goes_on(
    small: Path, expected_small: dict[str, Any], disk: Disk
) -> None:
    out = disk.path / "out"

    interrupt_at_write(small, out)
    disk.mount("remount,ro")
    with pytest.raises(ShardError, match="Read-only file system") as caught:
        dedupe([small], out)
    assert str(disk.path) in str(caught.value)
    assert str(caught.value).endswith(
        "Choose another --out, or change the permissions there. "
        "The same command goes on where it stopped"
    )
    disk.mount("remount,rw")
    dedupe([small], out)
    assert tree(out) == expected_small


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_told(small: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ShardError, match=f"{tmp_path}.*Permission denied"):
        dedupe([small], tmp_path / "out")


# Inputs that do not hold still


def at(stage: str, action: Callable[[], object]) -> Callable[[str, int, int], None]:
    """Progress that acts when a stage begins."""

    def progress(name: str, done: int, total: int) -> None:
        if (name, done) == (stage, 0):
            action()

    return progress


@pytest.mark.parametrize("place", [Path, elsewhere])
@pytest.mark.parametrize("stage", ["compare", "write"])
def test_an_input_changed_under_the_same_size_and_time_is_refused(
    small: Path, tmp_path: Path, stage: str, place: Callable[[Path], str | Path]
) -> None:
    """Also one behind a URL, by the same words."""
    shutil.copytree(small, tmp_path / "in")
    path = tmp_path / "in" / "0" / "part-0.jsonl"

    def change() -> None:
        before = path.stat()
        path.write_bytes(path.read_bytes().replace(b" 1", b" 2"))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert (path.stat().st_size, path.stat().st_mtime_ns) == (
            before.st_size,
            before.st_mtime_ns,
        )

    where = re.escape(f"{place(path)}: changed while ")
    with pytest.raises(ShardError, match=f"^{where}.*start again"):
        dedupe([place(tmp_path / "in")], tmp_path / "out", progress=at(stage, change))
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_an_input_cut_short_is_refused_where_no_shard_is_written(
    small: Path, tmp_path: Path
) -> None:
    shutil.copytree(small, tmp_path / "in")
    path = tmp_path / "in" / "0" / "part-0.jsonl"

    def cut() -> None:
        path.write_bytes(path.read_bytes().split(b"\n")[0] + b"\n")

    with pytest.raises(ShardError, match=r"part-0\.jsonl: changed"):
        dedupe([tmp_path / "in"], tmp_path / "out", progress=at("compare", cut), manifest_only=True)


@pytest.mark.parametrize("stage", ["compare", "write"])
def test_an_input_that_is_gone_is_named_and_the_call_goes_on_once_it_is_back(
    small: Path, expected_small: dict[str, Any], tmp_path: Path, stage: str
) -> None:
    shutil.copytree(small, tmp_path / "in")
    path, away = tmp_path / "in" / "0" / "part-2.jsonl.zst", tmp_path / "away"
    with pytest.raises(ShardError, match=r"part-2\.jsonl\.zst: .*No such file"):
        dedupe([tmp_path / "in"], tmp_path / "out", progress=at(stage, lambda: path.rename(away)))
    away.rename(path)
    dedupe([tmp_path / "in"], tmp_path / "out")
    data = {name: kept for name, kept in tree(tmp_path / "out").items() if name.startswith("data")}
    assert data == {n: kept for n, kept in expected_small.items() if n.startswith("data")}


@pytest.mark.parametrize("place", [Path, elsewhere])
def test_an_input_of_other_rows_when_its_substrings_are_read_is_refused(
    small: Path, tmp_path: Path, place: Callable[[Path], str | Path]
) -> None:
    shutil.copytree(small, tmp_path / "in")
    path = tmp_path / "in" / "0" / "part-0.jsonl"

    def cut() -> None:
        path.write_bytes(path.read_bytes().split(b"\n")[0] + b"\n")

    where = re.escape(f"{place(path)}: has another number of rows")
    with pytest.raises(ShardError, match=f"^{where}.*start again"):
        dedupe(
            [place(tmp_path / "in")],
            tmp_path / "out",
            config=DedupeConfig(substrings="report"),
            progress=at("substrings: read", cut),
        )


@pytest.mark.parametrize("place", [Path, elsewhere])
def test_inputs_touched_since_are_read_again(
    small: Path, tmp_path: Path, place: Callable[[Path], str | Path]
) -> None:
    """What a file system tells of what is behind a URL is compared as size and time are."""
    shutil.copytree(small, tmp_path / "in")
    interrupt_at_write(place(tmp_path / "in"), tmp_path / "out")
    for path in (tmp_path / "in").rglob("*.jsonl"):
        path.write_bytes(path.read_bytes().upper().replace(b"ID", b"id").replace(b"TEXT", b"text"))
    dedupe([place(tmp_path / "in")], tmp_path / "out")
    fresh = dedupe([place(tmp_path / "in")], tmp_path / "fresh")
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")
    assert fresh.rows["sample_id"][0].startswith("R")


def test_what_file_systems_tell_of_a_file_is_known_by_any_spelling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the file systems of S3, Google's and Azure's storage, HTTP and the Hub have them."""
    url = elsewhere(write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}]))
    told = {
        "ETag": '"0a1b"',
        "LastModified": "2026-01-02",
        "Last-Modified": "Fri",
        "last_modified": "2026",
        "md5Hash": "x==",
        "generation": "17",
        "updated": "2026",
        "VersionId": "v1",
        "blob_id": "f00",
    }
    for name, value in told.items():
        facts = {"name": "a", "type": "file", "size": 14, "url": "https://signed", name: value}
        monkeypatch.setattr(Elsewhere, "info", lambda *_, facts=facts, **__: facts)
        (shard,) = find_shards([url]).shards
        assert shard.stamps() == [sorted([f"{name}={value}", "size=14"])]


def interrupt_at_write(inputs: str | Path, out: Path) -> None:
    """Begin a call that is stopped by Ctrl-C once its decisions are made."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dedupe([inputs], out, progress=at("write", interrupt))


# Who else is there


def test_a_second_process_is_refused_at_once_and_the_first_is_not_disturbed(
    small: Path, expected_small: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    told: list[str] = []

    def second() -> None:
        command = [sys.executable, "-m", "auditor", "dedupe", str(small), "--out", str(out)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        assert ended.returncode == 1
        told.append(" ".join((ended.stdout + ended.stderr).split()))
        with pytest.raises(ShardError, match="another process"):
            dedupe([small], out, config=DedupeConfig(threshold=0.5))

    dedupe([small], out, progress=at("write", second))
    assert "another process is writing this output" in told[0]
    assert "Wait for it" in told[0]
    assert tree(out) == expected_small


def test_an_output_that_another_process_made_whole_meanwhile_is_left_alone(
    small: Path, expected_small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was incomplete when this call looked, and whole when this call came to it."""
    out = tmp_path / "out"
    dedupe([small], out)
    monkeypatch.setattr("auditor.clean.dedupe.check_out", lambda out, inputs: None)
    with pytest.raises(ShardError, match="just written"):
        dedupe([small], out, config=DedupeConfig(threshold=0.5))
    assert tree(out) == expected_small


def test_output_and_inputs_may_not_contain_each_other(small: Path, tmp_path: Path) -> None:
    shutil.copytree(small, tmp_path / "in")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for out in ("in/out", "in", ".", "link/out", "link"):
        with pytest.raises(ShardError, match="Choose an --out outside"):
            dedupe([tmp_path / "in"], tmp_path / out)
    with pytest.raises(ShardError, match="Choose an --out outside"):
        dedupe([tmp_path / "link"], tmp_path / "in" / "out")
    assert tree(tmp_path / "in") == tree(small)


def test_the_output_may_be_a_link_to_a_folder(
    small: Path, expected_small: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    dedupe([small], tmp_path / "link")
    assert tree(tmp_path / "there") == expected_small


# What is found in the work folder


def test_what_others_left_in_the_work_folder_is_not_used(
    small: Path, expected_small: dict[str, Any], tmp_path: Path
) -> None:
    """A lock of a dead process, facts of another version."""
    out = tmp_path / "out"
    interrupt_at_write(small, out)
    assert (out / MARKER / "lock").exists()
    job = out / MARKER / "job.json"
    job.write_bytes(job.read_bytes().replace(b'"tool_version": "', b'"tool_version": "0.0-'))
    for path in (out / MARKER / "scan").iterdir():
        path.write_bytes(b"of another version")
    dedupe([small], out)
    assert tree(out) == expected_small


def test_what_killed_processes_were_writing_is_removed(
    small: Path, expected_small: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    interrupt_at_write(small, out)
    for name in (
        ".rows.parquet.partial-7",
        "data/.x.partial-7/.y.partial-7",
        "data/0/.z.partial-7",
    ):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).touch()
    dedupe([small], out)
    assert tree(out) == expected_small


@pytest.mark.parametrize("share", [0.0, 0.5, None], ids=["empty", "cut", "gone"])
@pytest.mark.parametrize(
    ("stage", "names"),
    [
        ("compare", "job.json"),
        ("read", "scan/000000.json"),
        ("read", "scan/000000.facts"),
        ("read", "scan/000000.identities"),
        ("read", "scan/000000.signatures"),
        ("write", "scan/000001.json"),
        ("write", "scan/000001.facts"),
        ("write", "scan/000001.identities"),
        ("write", "scan/signatures"),
        ("write", "leaders"),
        ("compare", "hashes/000000.ends.npy"),
        ("compare", "hashes/000000.hashes"),
        ("write", "hashes/000000.ends.npy"),
        ("write", "hashes/hashes"),
        ("write", "write/000000.json"),
        ("write", "../data/0/part-0.jsonl"),
    ],
)
def test_a_damaged_work_folder_is_found_out_and_mended(
    small: Path,
    expected_small: dict[str, Any],
    tmp_path: Path,
    stage: str,
    names: str,
    share: float | None,
) -> None:
    """A file that is empty, cut off or gone is made again, at the latest by the call after next."""
    out = tmp_path / "out"

    def stop(name: str, done: int, total: int) -> None:
        if name == stage and 0 < done < total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dedupe([small], out, progress=stop)
    path = out / MARKER / names
    whole = path.read_bytes()
    if share is None:
        path.unlink()
    else:
        path.write_bytes(whole[: int(share * len(whole))])
    try:
        dedupe([small], out)
    except ShardError as error:
        assert "work folder is damaged. The same command makes this file again" in str(error)
        dedupe([small], out)
    assert tree(out) == expected_small
    assert verify(out).ok
