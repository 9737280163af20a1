"""The live file format survives being cut at any byte."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.errors import RunError, SchemaVersionError
from auditor.ledger import MAGIC, Frame, LedgerReader, LedgerWriter, encode, narrowed

FRAMES = st.lists(
    st.builds(
        Frame,
        st.sampled_from(["batch", "close", "scores"]),
        st.dictionaries(st.text(max_size=8), st.integers(-(2**53), 2**53), max_size=3),
        st.dictionaries(
            st.text(max_size=8),
            st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20).map(
                lambda values: np.asarray(values, dtype=np.int64)
            ),
            max_size=3,
        ),
        st.dictionaries(
            st.text(max_size=8), st.lists(st.none() | st.text(max_size=12), max_size=5), max_size=2
        ),
    ),
    max_size=6,
)


def assert_equal_frames(left: list[Frame], right: list[Frame]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a.kind, dict(a.scalars)) == (b.kind, dict(b.scalars))
        assert {k: list(v) for k, v in a.strings.items()} == {
            k: list(v) for k, v in b.strings.items()
        }
        assert set(a.columns) == set(b.columns)
        for name, values in a.columns.items():
            assert values.tolist() == b.columns[name].tolist()


@given(frames=FRAMES, data=st.data())
def test_ledger_cut_anywhere_yields_a_whole_prefix(tmp_path_factory, frames, data) -> None:
    path = tmp_path_factory.mktemp("ledger") / "x.ledger"
    writer = LedgerWriter(path)
    ends = [len(MAGIC)]
    for frame in frames:
        writer.append(frame)
        ends.append(path.stat().st_size)
    writer.close()
    cut = data.draw(st.integers(0, ends[-1]))
    path.write_bytes(path.read_bytes()[:cut])
    n_whole = max(sum(end <= cut for end in ends) - 1, 0)
    reader = LedgerReader(path)
    assert_equal_frames(list(reader), frames[:n_whole])
    assert reader.torn_bytes == (cut - ends[n_whole] if cut >= len(MAGIC) else cut)


@given(frames=FRAMES, data=st.data())
def test_a_reader_goes_on_where_another_ended(tmp_path_factory, frames, data) -> None:
    path = tmp_path_factory.mktemp("ledger") / "x.ledger"
    writer = LedgerWriter(path)
    for frame in frames:
        writer.append(frame)
    writer.close()
    whole = path.read_bytes()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    end, found = 0, []
    for cut in [*cuts, len(whole)]:
        path.write_bytes(whole[:cut])
        reader = LedgerReader(path, start=end)
        found += list(reader)
        end = reader.end
    assert_equal_frames(found, frames)
    assert (end, reader.torn_bytes) == (len(whole), 0)


def test_starts_are_where_frames_can_be_read_from(tmp_path: Path) -> None:
    path = tmp_path / "x.ledger"
    writer = LedgerWriter(path)
    frames = [Frame("n", {"i": i}, {"v": np.arange(i)}) for i in range(5)]
    ends = [len(MAGIC)]
    for frame in frames:
        writer.append(frame)
        ends.append(path.stat().st_size)
    writer.close()
    with path.open("ab") as file:
        file.write(b"torn")
    reader = LedgerReader(path)
    assert list(reader.starts()) == ends[:-1]
    assert (reader.end, reader.torn_bytes) == (ends[-1], 4)
    for i, start in enumerate(ends):
        assert_equal_frames(list(LedgerReader(path, start=start)), frames[i:])


@given(frames=FRAMES.filter(bool), data=st.data())
def test_ledger_drops_what_follows_a_flipped_bit(tmp_path_factory, frames, data) -> None:
    path = tmp_path_factory.mktemp("ledger") / "x.ledger"
    writer = LedgerWriter(path)
    for frame in frames:
        writer.append(frame)
    writer.close()
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(len(MAGIC), len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    reader = LedgerReader(path)
    read = list(reader)
    assert len(read) < len(frames)
    assert reader.torn_bytes > 0
    assert_equal_frames(read, frames[: len(read)])


def test_integers_are_stored_in_the_narrowest_width() -> None:
    assert narrowed(np.array([0, 255])).dtype == np.uint8
    assert narrowed(np.array([0, 256])).dtype == np.uint16
    assert narrowed(np.array([2**31])).dtype == np.uint32
    assert narrowed(np.array([-1])).dtype == np.int64


@pytest.mark.parametrize("n_samples", [10**5, 10**6, 10**9])
def test_shuffled_indices_take_little_more_than_their_information(n_samples: int) -> None:
    """64 batches of 256: log2(N) / 8 bytes a sample, and less than half a byte more."""
    keys = np.random.default_rng(0).integers(0, n_samples, 64 * 256)
    size = len(encode(Frame("batches", {}, {"key": keys})))
    assert size / len(keys) <= np.log2(n_samples) / 8 + 0.5


def test_hashed_ids_take_nine_bytes_at_most() -> None:
    keys = np.random.default_rng(0).integers(0, 2**63, 64 * 256)
    assert len(encode(Frame("batches", {}, {"key": keys}))) / len(keys) <= 9


def test_foreign_and_newer_files_are_refused_by_name(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.ledger"
    foreign.write_bytes(b"PAR1 something else")
    with pytest.raises(RunError, match=r"foreign\.ledger: not a ledger"):
        list(LedgerReader(foreign))
    newer = tmp_path / "newer.ledger"
    newer.write_bytes(MAGIC[:-1] + bytes([MAGIC[-1] + 1]))
    with pytest.raises(SchemaVersionError, match="schema version 3"):
        list(LedgerReader(newer))


def test_ledger_of_a_process_killed_while_writing_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "x.ledger"
    program = (
        "import numpy as np, sys\n"
        "from pathlib import Path\n"
        "from auditor.ledger import Frame, LedgerWriter\n"
        "writer = LedgerWriter(Path(sys.argv[1]))\n"
        "for i in range(10**9):\n"
        "    writer.append(Frame('batch', {'batch': i}, {'key': np.arange(64)}))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(path)])
    deadline = time.monotonic() + 60
    while (not path.exists() or path.stat().st_size < 200_000) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    reader = LedgerReader(path)
    numbers = [frame.scalars["batch"] for frame in reader]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > 100
    assert reader.torn_bytes < 1000


def test_frame_that_did_not_fit_on_the_disk_does_not_hide_those_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.ledger"
    writer = LedgerWriter(path)
    frames = [Frame("batch", {"batch": i}, {"key": np.arange(100)}) for i in range(9)]
    write = os.write

    def full(file: int, data: bytes) -> int:
        if len(data) < 100:
            raise OSError(28, "No space left on device")
        return write(file, bytes(data)[:20])  # a part of it, and then no more

    for i, frame in enumerate(frames):
        if i == 4:
            monkeypatch.setattr(os, "write", lambda file, data: full(file, data))
            with pytest.raises(OSError, match="No space"):
                writer.append(frame)
            monkeypatch.setattr(os, "write", write)
        else:
            writer.append(frame)
    reader = LedgerReader(path)
    assert [frame.scalars["batch"] for frame in reader] == [0, 1, 2, 3, 5, 6, 7, 8]
    assert reader.torn_bytes == 0
