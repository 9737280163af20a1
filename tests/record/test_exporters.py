"""Exporters send what they are given, and nothing they do reaches the sender."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from auditor import GradeMonitor, Run
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.record.exporters import JSONLines, Prometheus, TensorBoard, Trackio, WandB
from auditor.record.exporting import QUEUE_POINTS, Exporting, metrics_of

LONG_S = 60.0
"""Longer than anything here takes: what has not happened by then does not happen."""


class Collecting:
    """An exporter that keeps what it gets."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.n_closed = 0

    def export(self, step: int, values: Mapping[str, float]) -> None:
        self.points.append((step, dict(values)))

    def close(self) -> None:
        self.n_closed += 1


class Hanging(Collecting):
    """Hangs in its first export until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.let_go = threading.Event(), threading.Event()

    def export(self, step: int, values: Mapping[str, float]) -> None:
        self.entered.set()
        self.let_go.wait()
        super().export(step, values)


class Failures(list[tuple[str, Exception]]):
    def __call__(self, place: str, error: Exception) -> None:
        self.append((place, error))


def script(text: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LONG_S * 2,
        check=False,
    )


# -- names ---------------------------------------------------------------------------------


def test_rows_get_stable_names() -> None:
    ratio = {"kind": "probe", "signal": "token_rank", "variant": "raw", "n_rows": 512}
    rows: list[dict[str, Any]] = [
        {**ratio, "site": "blocks.0", "layer": 0, "value": 0.5},
        {**ratio, "site": "blocks.3", "layer": 3, "value": 0.25},
        {**ratio, "site": "blocks.4", "layer": 4, "value": math.nan},
        {**ratio, "site": "blocks.5", "layer": 120, "value": 0.75, "segment": "tail"},
        {"kind": "live", "signal": "sample_rank", "variant": "centred", "layer": -1, "value": 0.9},
        {"kind": "live", "signal": "entropy_min", "layer": 1, "head": 7, "value": 2.0},
        {"kind": "live", "signal": "entropy", "layer": 1, "head": 6, "value": 2.5},  # one of many
        {"kind": "live", "signal": "entropy", "layer": 1, "head": 7, "value": 2.0},
        {"kind": "live", "signal": "max_logit", "layer": 1, "head": 2, "value": None},
        {"kind": "probe", "signal": "probe_loss", "value": 3.5},
        {"kind": "probe", "signal": "grade", "layer": 3, "value": 2},
    ]
    assert metrics_of(rows) == {
        "auditor/probe/token_rank/raw/layer_00": 0.5,
        "auditor/probe/token_rank/raw/layer_03": 0.25,
        "auditor/probe/token_rank/raw/min": 0.25,
        "auditor/probe/token_rank/raw/mean": 0.375,
        "auditor/probe/token_rank/raw/max": 0.5,
        "auditor/probe/token_rank/raw/tail/layer_120": 0.75,
        "auditor/probe/token_rank/raw/tail/min": 0.75,
        "auditor/probe/token_rank/raw/tail/mean": 0.75,
        "auditor/probe/token_rank/raw/tail/max": 0.75,
        "auditor/live/sample_rank/centred/embedding": 0.9,
        "auditor/live/entropy_min/layer_01": 2.0,
        "auditor/live/entropy_min/min": 2.0,
        "auditor/live/entropy_min/mean": 2.0,
        "auditor/live/entropy_min/max": 2.0,
        "auditor/probe_loss": 3.5,
        "auditor/grade": 2.0,
    }
    assert metrics_of([{"kind": "live", "signal": "grade", "layer": None, "value": math.nan}]) == {}


def test_recorded_signals_and_their_metrics_agree(tmp_path: Path) -> None:
    """A real sampled step: its rows flattened here, and its table aggregated by polars."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=32, width=32, n_heads=2, n_blocks=3))
    windows = torch.randint(0, 256, (6, 33))
    monitor = GradeMonitor(
        model, run=tmp_path / "run", every=1, probe=windows, probe_loss=next_byte_loss
    )
    loss = next_byte_loss(model, windows.flip(0))
    loss.backward()
    monitor.step(loss)
    monitor.close()
    signals = Run.open(tmp_path / "run").scan("signals").collect()
    metrics = metrics_of(signals.filter(pl.col("kind") != "step").to_dicts())

    def values(**which: Any) -> pl.Series:
        found = signals.filter(*[pl.col(name) == wanted for name, wanted in which.items()])
        return found.filter(pl.col("layer") >= 0)["value"]

    raw = values(kind="probe", signal="token_rank", variant="raw")
    assert len(raw) == 3
    assert metrics["auditor/probe/token_rank/raw/min"] == raw.min()
    assert metrics["auditor/probe/token_rank/raw/mean"] == pytest.approx(raw.mean())
    assert metrics["auditor/live/max_logit/max"] == values(kind="live", signal="max_logit").max()
    # Nothing but single heads is lost: every other value has a name of its own.
    named = signals.filter(
        pl.col("kind") != "step", pl.col("signal") != "entropy", pl.col("value").is_not_null()
    )
    n_over_blocks = sum(name.rpartition("/")[2] in {"min", "mean", "max"} for name in metrics)
    assert len(metrics) - n_over_blocks == len(named)
    [probe_loss] = signals.filter(pl.col("signal") == "probe_loss")["value"]
    assert metrics["auditor/probe_loss"] == probe_loss
    assert metrics["auditor/grade"] == monitor.grade.grade  # type: ignore[union-attr]


# -- what exporters may do -----------------------------------------------------------------


def test_every_exporter_gets_every_point_in_order_and_is_closed_once() -> None:
    failures, first, second = Failures(), Collecting(), Collecting()
    exporting = Exporting([first, second], failures)
    values = {"auditor/loss": 0.0}
    for step in range(500):
        values["auditor/loss"] = step / 2  # the sender's mapping is copied, not kept
        exporting.send(step, values)
    exporting.send(500, {})
    exporting.close(LONG_S)
    exporting.send(501, values)
    exporting.close(LONG_S)
    expected = [(step, {"auditor/loss": step / 2}) for step in range(500)]
    assert first.points == second.points == expected
    assert first.n_closed == second.n_closed == 1
    assert (exporting.dropped, failures) == (0, [])


def test_no_thread_before_the_first_point() -> None:
    """Loader workers fork before it."""
    before = set(threading.enumerate())
    exporting = Exporting([Collecting()], Failures())
    assert set(threading.enumerate()) <= before
    exporting.send(0, {"auditor/loss": 1.0})
    assert len(set(threading.enumerate()) - before) == 1
    exporting.close(LONG_S)
    assert set(threading.enumerate()) <= before


def test_exporter_that_raises_is_counted_and_tried_again() -> None:
    class Raising(Collecting):
        def export(self, step: int, values: Mapping[str, float]) -> None:
            if step % 2:
                raise ConnectionError(step)
            super().export(step, values)

        def close(self) -> None:
            raise OSError("in close")

    failures, raising, other = Failures(), Raising(), Collecting()
    exporting = Exporting([raising, other], failures)
    for step in range(6):
        exporting.send(step, {"auditor/loss": 1.0})
    exporting.close(LONG_S)
    assert [step for step, _ in raising.points] == [0, 2, 4]
    assert [step for step, _ in other.points] == [0, 1, 2, 3, 4, 5]
    assert {place for place, _ in failures} == {"exporter Raising"}
    assert [type(error) for _, error in failures] == [ConnectionError] * 3 + [OSError]


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_exporter_that_exits_is_counted_as_any_other_and_gets_the_next_point(
    raised: BaseException,
) -> None:
    """``sys.exit()`` in a client library would end the exporter's thread without a word."""

    class Exiting(Collecting):
        def export(self, step: int, values: Mapping[str, float]) -> None:
            if step == 1:
                raise raised
            super().export(step, values)

        def close(self) -> None:
            raise raised

    failures, exiting = Failures(), Exiting()
    exporting = Exporting([exiting], failures)
    for step in range(4):
        exporting.send(step, {"auditor/loss": 1.0})
    exporting.close(LONG_S)
    assert [step for step, _ in exiting.points] == [0, 2, 3]
    assert [place for place, _ in failures] == ["exporter Exiting"] * 2
    assert all(repr(raised) in str(error) for _, error in failures)
    assert exporting.dropped == 0


def test_exporter_cannot_change_what_the_others_get() -> None:
    class Taking(Collecting):
        def export(self, step: int, values: Any) -> None:
            values.pop("auditor/loss")

    failures, other = Failures(), Collecting()
    exporting = Exporting([Taking(), other], failures)
    exporting.send(0, {"auditor/loss": 1.0})
    exporting.close(LONG_S)
    assert other.points == [(0, {"auditor/loss": 1.0})]
    assert [place for place, _ in failures] == ["exporter Taking"]


def test_full_queue_drops_and_counts_and_a_late_exporter_catches_up() -> None:
    failures, hanging = Failures(), Hanging()
    exporting = Exporting([hanging], failures)
    exporting.send(0, {"auditor/loss": 1.0})
    assert hanging.entered.wait(LONG_S)  # it holds one point, and the queue is empty
    for step in range(1, QUEUE_POINTS + 11):
        exporting.send(step, {"auditor/loss": 1.0})
    assert exporting.dropped == 10
    hanging.let_go.set()
    exporting.close(LONG_S)
    assert [step for step, _ in hanging.points] == list(range(QUEUE_POINTS + 1))
    assert (hanging.n_closed, failures) == (1, [])


def test_hanging_exporter_starves_no_other_and_closing_gives_it_up() -> None:
    failures, hanging, other = Failures(), Hanging(), Collecting()
    exporting = Exporting([hanging, other], failures)
    exporting.send(0, {"auditor/loss": 1.0})
    assert hanging.entered.wait(LONG_S)
    exporting.send(1, {"auditor/loss": 2.0})
    exporting.close(0.5)  # the time that the hanging one is given
    assert [step for step, _ in other.points] == [0, 1]
    assert other.n_closed == 1
    [(place, error)] = failures
    assert place == "exporter Hanging"
    assert isinstance(error, TimeoutError)
    assert (hanging.points, exporting.dropped) == ([], 1)  # the one that waited
    hanging.let_go.set()


def test_exporter_that_never_got_a_point_is_closed_too() -> None:
    collecting = Collecting()
    Exporting([collecting], Failures()).close(LONG_S)
    assert (collecting.points, collecting.n_closed) == ([], 1)


def _in_child(exporting: Exporting, collecting: Collecting) -> None:
    before = (len(collecting.points), threading.active_count())
    exporting.send(1, {"auditor/loss": 1.0})
    exporting.close(LONG_S)
    same = (len(collecting.points), threading.active_count()) == before
    os._exit(0 if same and collecting.n_closed == 0 else 1)


@pytest.mark.parametrize("started", [False, True])
def test_forked_child_sends_and_closes_nothing(started: bool) -> None:
    failures, collecting = Failures(), Collecting()
    exporting = Exporting([collecting], failures)
    if started:
        exporting.send(0, {"auditor/loss": 1.0})
    child = multiprocessing.get_context("fork").Process(
        target=_in_child, args=(exporting, collecting)
    )
    child.start()
    child.join(LONG_S)
    assert child.exitcode == 0
    exporting.send(2, {"auditor/loss": 1.0})
    exporting.close(LONG_S)
    assert [step for step, _ in collecting.points] == ([0, 2] if started else [2])
    assert (collecting.n_closed, failures) == (1, [])


@pytest.mark.parametrize(
    ("make", "module", "extra"),
    [
        (lambda: TensorBoard("tb"), "tensorboard", "tensorboard"),
        (lambda: WandB(project="p"), "wandb", "wandb"),
        (lambda: Trackio("p"), "trackio", "trackio"),
        (lambda: Prometheus(), "prometheus_client", "prometheus"),
    ],
)
def test_missing_package_names_its_extra_when_the_exporter_is_made(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], module: str, extra: str
) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install 'auditor\[{extra}\]'"):
        make()


# -- JSON lines ----------------------------------------------------------------------------


def test_json_lines_are_appended_and_strict(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    for step in range(2):  # two processes' worth: the second appends
        lines = JSONLines(path)
        lines.export(step, {"auditor/loss": 0.5, "auditor/lr": math.nan})
        lines.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    points = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [point.pop("time") > 0 for point in points] == [True, True]
    assert points == [{"step": step, "auditor/loss": 0.5, "auditor/lr": None} for step in range(2)]


def test_json_lines_of_a_killed_process_are_all_there(tmp_path: Path) -> None:
    done = script(
        "import os, signal\n"
        "from auditor.record.exporters import JSONLines\n"
        "lines = JSONLines('metrics.jsonl')\n"
        "for step in range(100): lines.export(step, {'auditor/loss': 1.0 / (step + 1)})\n"
        "os.kill(os.getpid(), signal.SIGKILL)",
        tmp_path,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    points = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [(point["step"], point["auditor/loss"]) for point in points] == [
        (step, 1.0 / (step + 1)) for step in range(100)
    ]


def test_line_that_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "audi')
    lines = JSONLines(path)
    lines.export(2, {"auditor/loss": 1.0})
    lines.close()
    first, torn, last = path.read_text().splitlines()
    assert (json.loads(first)["step"], torn, json.loads(last)["step"]) == (
        0,
        '{"step": 1, "audi',
        2,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_is_a_counted_failure() -> None:
    failures = Failures()
    exporting = Exporting([JSONLines("/dev/full")], failures)
    for step in range(3):
        exporting.send(step, {"auditor/loss": 1.0})
    exporting.close(LONG_S)
    assert [place for place, _ in failures] == ["exporter JSONLines"] * 3
    assert all(isinstance(error, OSError) for _, error in failures)


# -- TensorBoard ---------------------------------------------------------------------------


def test_tensorboard_reads_back_what_was_sent(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    failures = Failures()
    exporting = Exporting([TensorBoard(tmp_path / "tb")], failures)
    for step in (200, 150, 151):  # a sampled step, then the steps before it
        exporting.send(step, {"auditor/loss": step / 8})
    exporting.send(200, {"auditor/probe/token_rank/raw/layer_03": 0.5, "auditor/grade": 7.0})
    exporting.close(LONG_S)
    assert failures == []
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    read = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    assert read == {
        "auditor/loss": [(200, 25.0), (150, 18.75), (151, 18.875)],
        "auditor/probe/token_rank/raw/layer_03": [(200, 0.5)],
        "auditor/grade": [(200, 7.0)],
    }


# -- Prometheus ----------------------------------------------------------------------------


def scraped(port: int) -> dict[tuple[str, str], float]:
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LONG_S) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert {family.type for family in families} == {"gauge"}
    return {
        (sample.name, sample.labels.get("layer", "")): sample.value
        for family in families
        for sample in family.samples
    }


def test_prometheus_serves_the_latest_values_to_this_machine() -> None:
    pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")
    prometheus = Prometheus(port=0)
    prometheus.export(200, {"auditor/probe/x/layer_03": 0.25, "auditor/probe/x/min": 0.125})
    prometheus.export(201, {"auditor/loss": 2.0, "auditor/lr": 0.5})
    prometheus.export(202, {"auditor/loss": 1.5})
    assert scraped(prometheus.port) == {
        ("auditor_step", ""): 202,
        ("auditor_probe_x", "3"): 0.25,
        ("auditor_probe_x_min", ""): 0.125,
        ("auditor_loss", ""): 1.5,
        ("auditor_lr", ""): 0.5,
    }
    # A signal that has become undefined is gone, and not what it was before.
    prometheus.export(400, {"auditor/grade": 7.0})
    assert scraped(prometheus.port) == {
        ("auditor_step", ""): 400,
        ("auditor_grade", ""): 7.0,
        ("auditor_loss", ""): 1.5,
        ("auditor_lr", ""): 0.5,
    }
    with pytest.raises(ConnectionRefusedError):  # another address of this machine
        socket.create_connection(("127.0.0.2", prometheus.port), timeout=LONG_S)
    prometheus.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", prometheus.port), timeout=LONG_S)


def test_port_in_use_is_a_counted_failure_until_it_is_free() -> None:
    pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")

    class Told(Prometheus):
        exported = threading.Semaphore(0)

        def export(self, step: int, values: Mapping[str, float]) -> None:
            try:
                super().export(step, values)
            finally:
                self.exported.release()

    failures = Failures()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = Told(port)
        exporting = Exporting([told], failures)
        for step in range(2):
            exporting.send(step, {"auditor/loss": 1.0})
            assert told.exported.acquire(timeout=LONG_S)
    exporting.send(2, {"auditor/loss": 3.0})
    assert told.exported.acquire(timeout=LONG_S)
    assert scraped(port) == {("auditor_step", ""): 2, ("auditor_loss", ""): 3.0}
    exporting.close(LONG_S)
    assert [place for place, _ in failures] == ["exporter Told"] * 2
    assert all(isinstance(error, OSError) for _, error in failures)


# -- Weights & Biases ----------------------------------------------------------------------


def offline_runs(folder: Path) -> list[Any]:
    """The records of each offline run: a log in blocks of 32 KiB, as LevelDB's, after 7 bytes."""
    from wandb.proto import wandb_internal_pb2 as messages

    def records(data: bytes) -> Iterator[Any]:
        at, whole = 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            _, length, kind = struct.unpack("<IHB", data[at : at + 7])
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # the whole record, or its last part
                record = messages.Record()
                record.ParseFromString(whole)
                yield record
                whole = b""

    paths = (folder / "wandb").glob("offline-run-*/*.wandb")
    return [list(records(path.read_bytes())) for path in paths]


def rows_of(records: list[Any]) -> list[tuple[int, dict[str, float]]]:
    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            logged = {name: value for name, value in items.items() if name[0] != "_"}
            rows.append((record.history.step.num, logged))
    return rows


USER_LOOP = """
import sys
import threading
import wandb
from auditor.record.exporters import WandB
from auditor.record.exporting import Exporting

mode, explicit = sys.argv[1:]
user = wandb.init(project="theirs")
failures = []
exporters = {"none": [], "ours": [WandB(project="ours")], "theirs": [WandB(user)]}[mode]
for exporter in exporters:  # tells when a point is through, so that its row is known
    exporter.through = threading.Semaphore(0)
    def export(step, values, exporter=exporter, export=exporter.export):
        export(step, values)
        exporter.through.release()
    exporter.export = export
exporting = Exporting(exporters, lambda place, error: failures.append((place, error)))
for step in range(12):
    if step % 4 == 0:
        exporting.send(step, {"auditor/grade": 7.0 - step / 4, "auditor/probe/x/min": 0.5})
        exporting.send(step, {"auditor/loss": 1.0, "auditor/lr": 0.5})
        for exporter in exporters:
            assert exporter.through.acquire(timeout=60), failures
            assert exporter.through.acquire(timeout=60), failures
    user.log({"loss": 1.0 / (step + 1)}, **({"step": step} if explicit == "step" else {}))
assert wandb.run is user
exporting.close(60)
user.log({"after": 1.0})  # the run is still open
user.finish()
assert not failures, failures
"""


@pytest.mark.slow
@pytest.mark.parametrize("explicit", ["step", "counted"])
@pytest.mark.parametrize("mode", ["ours", "theirs"])
def test_wandb_gets_the_metrics_and_your_rows_stay_as_they_are(
    tmp_path: Path, mode: str, explicit: str
) -> None:
    """Offline runs of the real client, with the exporter and without it."""
    pytest.importorskip("wandb", reason="the extra wandb is not installed")

    def runs(exported: str) -> list[Any]:
        folder = tmp_path / exported
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", USER_LOOP, exported, explicit],
            cwd=folder,
            env={**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"},
            capture_output=True,
            text=True,
            timeout=LONG_S * 2,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return offline_runs(folder)

    def project(records: list[Any]) -> str:
        return next(r.run.project for r in records if r.WhichOneof("record_type") == "run")

    [plain] = runs("none")
    exported = {project(records): records for records in runs(mode)}
    assert exported.keys() == ({"ours", "theirs"} if mode == "ours" else {"theirs"})
    theirs = [
        (step, {name: value for name, value in row.items() if not name.startswith("auditor/")})
        for step, row in rows_of(exported["theirs"])
    ]
    assert theirs == rows_of(plain)
    assert len(theirs) >= 12

    ours = [
        {name: value for name, value in row.items() if name.startswith("auditor/")}
        for _, row in rows_of(exported[mode])
    ]
    sampled = [
        {"auditor/step": step, "auditor/grade": 7.0 - step / 4, "auditor/probe/x/min": 0.5}
        for step in (0, 4, 8)
    ]
    assert [row for row in ours if "auditor/grade" in row] == sampled
    every_step = [row for row in ours if "auditor/loss" in row]
    assert len(every_step) == (3 if mode == "ours" else 0)
    axes = {
        r.metric.glob_name: r.metric.step_metric
        for r in exported[mode]
        if r.WhichOneof("record_type") == "metric" and r.metric.glob_name
    }
    assert axes == {"auditor/*": "auditor/step"}


def test_wandb_run_and_arguments_for_a_new_one_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="project"):
        WandB(object(), project="p")


# -- Trackio -------------------------------------------------------------------------------


@pytest.mark.slow
def test_trackio_stores_the_metrics_locally(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="the extra trackio is not installed")
    done = script(
        "from auditor.record.exporters import Trackio\n"
        "from auditor.record.exporting import Exporting\n"
        "failures = []\n"
        "exporting = Exporting([Trackio('mine', name='run')], lambda *one: failures.append(one))\n"
        "for step in (0, 200, 400): exporting.send(step, {'auditor/grade': 7.0 - step / 200})\n"
        "exporting.close(60)\n"
        "assert not failures, failures",
        tmp_path,
        TRACKIO_DIR=str(tmp_path / "trackio"),
    )
    assert done.returncode == 0, done.stderr
    database = sqlite3.connect(tmp_path / "trackio" / "mine.db")
    rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    database.close()
    assert [(name, step, json.loads(metrics)) for name, step, metrics in rows] == [
        ("run", step, {"auditor/grade": 7.0 - step / 200}) for step in (0, 200, 400)
    ]


def test_trackio_refuses_to_send_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_SPACE_ID", "someone/space")
    with pytest.raises(ValueError, match="TRACKIO_SPACE_ID"):
        Trackio("mine")
