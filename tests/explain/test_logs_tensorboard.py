"""TensorBoard event files, written by TensorBoard itself where it is installed."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import pytest

from auditor import Run
from auditor.explain.logs.columns import Columns
from auditor.explain.logs.importing import import_logs
from auditor.explain.logs.log import LogError, NoRecordError
from auditor.explain.logs.recognise import read_log
from auditor.explain.logs.tensorboard import masked_crc32c


def record(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    return b"".join(
        (
            length,
            struct.pack("<I", masked_crc32c(length)),
            event,
            struct.pack("<I", masked_crc32c(event)),
        )
    )


def scalar(tag: str, step: int, value: float) -> bytes:
    """An Event with a step below 128, by hand: field 2 is the step, field 5 the summary."""
    inner = b"\x0a" + bytes([len(tag)]) + tag.encode() + b"\x15" + struct.pack("<f", value)
    summary = b"\x0a" + bytes([len(inner)]) + inner
    return record(b"\x10" + bytes([step]) + b"\x2a" + bytes([len(summary)]) + summary)


HEADER = record(b"\x09" + struct.pack("<d", 1.0) + b"\x1a\x0dbrain.Event:2")


def test_checksum_is_crc32c() -> None:
    """RFC 3720, appendix B.4: 32 bytes of zeros give 8A9136AA."""
    crc = 0x8A9136AA
    masked = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    assert masked_crc32c(bytes(32)) == masked


def test_scalars_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    values = [scalar("train/loss", 1, 2.5), scalar("train/loss", 2, math.nan)]
    path.write_bytes(HEADER + b"".join(values) + scalar("val/loss", 2, math.inf))
    log = read_log(path, Columns())
    assert log.series("train/loss")[1].tolist() == [1, 2]
    assert log.series("train/loss")[2].tolist() == pytest.approx([2.5, math.nan], nan_ok=True)
    assert log.series("val/loss")[2].tolist() == [math.inf]


@pytest.mark.parametrize("damage", ["cut", "changed", "appended"])
def test_what_follows_damage_is_dropped_and_counted(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "events.out.tfevents.1"
    good = HEADER + scalar("loss", 1, 2.5)
    last = scalar("loss", 2, 2.0)
    torn = {"cut": last[:-3], "changed": last[:-9] + b"\xff" + last[-8:], "appended": b"\x00" * 5}
    path.write_bytes(good + torn[damage])
    log = read_log(path, Columns())
    assert log.series("loss")[1].tolist() == [1]
    ((what, one),) = log.skipped.items()
    assert (what, one.count) == ("bytes after the last whole record", len(torn[damage]))
    assert one.first.startswith(f"byte {len(good)}: ")


def test_file_with_its_header_only_says_that_the_run_logged_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(HEADER)
    with pytest.raises(NoRecordError, match="an event file without scalars"):
        read_log(path, Columns())


def test_folder_of_event_files_is_a_run_with_its_restarts(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name, content in (
        ("events.out.tfevents.10", scalar("loss", 1, 3.0) + scalar("loss", 2, 3.0)),
        ("events.out.tfevents.11", b""),  # died before it logged
        ("events.out.tfevents.12", scalar("loss", 2, 2.0)),
    ):
        (tmp_path / "logs" / name).write_bytes(HEADER + content)
    found = import_logs([tmp_path / "logs"], tmp_path / "run")
    assert len(found.empty) == 1
    kept = Run.open(tmp_path / "run").scan("signals").collect().sort("step")
    assert kept.select("attempt", "step", "value").rows() == [(0, 1, 3.0), (1, 2, 2.0)]
    (tmp_path / "none").mkdir()
    with pytest.raises(LogError, match="without TensorBoard event files"):
        import_logs([tmp_path / "none"], tmp_path / "run2")


def test_what_tensorboard_writes_is_read(tmp_path: Path) -> None:
    writing = pytest.importorskip("torch.utils.tensorboard")
    with writing.SummaryWriter(tmp_path / "logs") as writer:
        for step in range(300):
            writer.add_scalar("train/loss", 5.0 - step / 100, step)
            writer.add_scalar("train/grad_norm", 1.5, step, new_style=True)  # a tensor
        writer.add_histogram("weights", np.arange(10.0), 3)
        writer.add_scalar("val/loss", float("nan"), 2**40)
    (path,) = (tmp_path / "logs").iterdir()
    log = read_log(path, Columns())
    _, steps, values = log.series("train/loss")
    assert steps.tolist() == list(range(300))
    assert values == pytest.approx(5.0 - np.arange(300) / 100, rel=1e-6)
    assert log.series("train/grad_norm")[2].tolist() == [1.5] * 300
    assert log.series("val/loss")[1].tolist() == [2**40]
    assert {what: one.count for what, one in log.skipped.items()} == {
        "summaries that are no scalars": 1
    }
