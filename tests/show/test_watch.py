"""The dashboard follows a training from another process, and leaves no trace of itself."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import json
import math
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

import auditor.ledger
from auditor import Run
from auditor.attempt import Attempt, open_attempt
from auditor.cli import main
from auditor.errors import SchemaVersionError
from auditor.explain.composition import REPETITIVE_SHARE
from auditor.explain.grades import grades_of
from auditor.ledger import MAGIC, NULL, Frame, LedgerWriter, encode
from auditor.schema import DUPLICATE_SIMILARITY, UNKNOWN_SOURCE
from auditor.show import watch
from auditor.show.dashboard import Screen, curve, draw
from auditor.show.following import Following, Situation
from auditor.show.life import Pace
from auditor.show.recent import (
    BATCHES,
    OTHER_SOURCES,
    SOURCES,
    Composition,
    SignalHistory,
    SourceTable,
)

TRAINING = Path(__file__).with_name("watched.py")
N_STEPS = 130
WAIT_S = 120.0
ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[()].|[=>])")


def environment(**more: str) -> dict[str, str]:
    left_out = {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"}
    plain = {k: v for k, v in os.environ.items() if k not in left_out}
    return {**plain, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "LANG": "C.UTF-8", **more}


def train(run: Path, corpus: Path, n_steps: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(TRAINING), str(run), str(corpus), str(n_steps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the demo's model."""
    folder = tmp_path_factory.mktemp("trained")
    training = train(folder / "run", folder / "corpus", N_STEPS)
    training.communicate(timeout=WAIT_S)
    assert training.returncode == 0
    return folder / "run"


@pytest.fixture
def recorded(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoilt."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def lines(situation: Situation, **screen: Any) -> list[str]:
    return [line.plain for line in draw(situation, Screen(**{"width": 80, "height": 24, **screen}))]


def screen_of(situation: Situation, **screen: Any) -> str:
    return "\n".join(lines(situation, **screen))


def values(situation: Situation, name: str) -> list[tuple[int, int, float]]:
    return [(p.attempt, p.step, p.value) for p in situation.signals.points(name)]


# -- a run that is not over yet ------------------------------------------------------------------


class Terminal:
    """A pseudo terminal with the dashboard on it; what it shows is read back as text."""

    def __init__(self, *arguments: str, rows: int = 24, columns: int = 80, **env: str) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(rows, columns)
        self.mode = termios.tcgetattr(self.slave)
        self.output = ""
        self.decoder = codecs.getincrementaldecoder("utf-8")()  # a read may end inside a sign

        def own_the_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [sys.executable, "-m", "auditor", "watch", *arguments],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            preexec_fn=own_the_terminal,
            env=environment(**env),
        )

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self) -> None:
        while select.select([self.master], [], [], 0.05)[0]:
            self.output += self.decoder.decode(os.read(self.master, 2**16))

    def shown(self) -> list[str]:
        """The latest screen that was drawn to its end."""
        screens = self.output.split("\x1b[H")[1:-1]
        text = ESCAPES.sub("", screens[-1]) if screens else ""
        return [line.rstrip() for line in text.split("\r\n")]

    def wait_for(self, wanted: Callable[[list[str]], Any]) -> list[str]:
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            self.read()
            if wanted(self.shown()):
                return self.shown()
            assert self.process.poll() is None, self.output[-2000:]
        raise AssertionError("never shown; last:\n" + "\n".join(self.shown()))

    def press(self, key: bytes) -> None:
        os.write(self.master, key)

    def left(self) -> int:
        """The exit code, once the terminal was found to be as it was before."""
        code = self.process.wait(WAIT_S)
        self.read()
        assert termios.tcgetattr(self.slave) == self.mode
        assert "\x1b[?1049l" in self.output[self.output.rindex("\x1b[H") :]
        assert self.output.rindex("\x1b[?25h") > self.output.rindex("\x1b[?25l")
        return code


@contextlib.contextmanager
def terminal(*arguments: str, **settings: Any) -> Iterator[Terminal]:
    opened = Terminal(*arguments, **settings)
    try:
        yield opened
    finally:
        opened.process.kill()
        opened.process.wait()
        os.close(opened.master)
        os.close(opened.slave)


def step_shown(screen: list[str]) -> int | None:
    found = re.search(r"attempt \d+  .*  step ([\d,]+)  newest", "\n".join(screen))
    return int(found[1].replace(",", "")) if found else None


def has(*words: str) -> Callable[[list[str]], bool]:
    return lambda screen: all(word in "\n".join(screen) for word in words)


@pytest.mark.slow
def test_a_training_is_followed_from_before_it_begins_through_kill_and_restart(
    tmp_path: Path,
) -> None:
    run, corpus = tmp_path / "run", tmp_path / "corpus"
    trainings = []
    with terminal(str(run), "--every", "0.3") as screen:
        try:
            screen.wait_for(has("waiting for the run to begin"))
            trainings.append(train(run, corpus, 3000))
            shown = screen.wait_for(
                has("running  attempt 0", "ratio 0.", "entropy ", "loss ", "duplicated ", "steps/s")
            )
            assert len(shown) == 24
            assert max(map(cell_len, shown)) == 80
            assert has("novels", "no known gaps")(shown)
            first = step_shown(shown)
            assert first is not None
            screen.wait_for(lambda s: (step_shown(s) or 0) > first)

            screen.resize(33, 110)
            shown = screen.wait_for(lambda s: len(s) == 33)
            assert max(map(cell_len, shown)) == 110

            trainings[0].send_signal(signal.SIGKILL)
            trainings[0].wait()
            last = [int(line) for line in trainings[0].stdout.read().split()][-1]  # type: ignore[union-attr]
            trainings.append(train(run, corpus, 3000))
            shown = screen.wait_for(
                lambda s: has("attempt 1")(s) and (step_shown(s) or 0) > max(5, last - 200)
            )
            assert has("gaps: attempt 0, rank 0: still running, or killed")(shown)
            assert not (run / "derived").exists()
        finally:
            for training in trainings:
                training.kill()
                training.wait()
        screen.press(b"q")
        assert screen.left() == 0


@pytest.mark.parametrize("end", ["q", "ctrl-c", "terminate"])
def test_the_terminal_is_given_back(trained: Path, end: str) -> None:
    with terminal(str(trained)) as screen:
        screen.wait_for(has("ended", "q quits"))
        assert not termios.tcgetattr(screen.slave)[3] & termios.ECHO
        if end == "terminate":
            screen.process.terminate()
        else:
            screen.press(b"q" if end == "q" else b"\x03")
        assert screen.left() == (143 if end == "terminate" else 0)


def test_a_version_of_the_format_that_comes_up_later_ends_it_with_a_message(recorded: Path) -> None:
    facts = json.loads((recorded / "run.json").read_text())
    with terminal(str(recorded), "--every", "0.2") as screen:
        screen.wait_for(has("ended"))
        (recorded / "run.json").write_text(json.dumps({**facts, "schema_version": 99}))
        assert screen.left() == 1
        assert "schema version 99" in " ".join(screen.output.split())


def test_no_color_is_no_colour(trained: Path) -> None:
    with terminal(str(trained), NO_COLOR="1") as screen:
        screen.wait_for(has("ended", "q quits"))
        codes = set(";".join(re.findall(r"\x1b\[([\d;]*)m", screen.output)).split(";"))
        assert codes <= {"", "0", "1", "2"}  # bold and dim are no colours


# -- one frame -----------------------------------------------------------------------------------


def once(run: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "auditor", "watch", str(run), *arguments],
        capture_output=True,
        env=environment(**env),
        stdin=subprocess.DEVNULL,
    )


def test_without_a_terminal_one_plain_frame_is_printed(trained: Path) -> None:
    piped, asked, forced = once(trained), once(trained, "--once"), once(trained, FORCE_COLOR="1")
    assert (piped.returncode, piped.stderr) == (0, b"")
    text = piped.stdout.decode()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    assert f"step {N_STEPS - 1}" in text
    assert "q quits" not in text
    for other in (asked, forced):
        assert re.sub(r"\d+ (s|min)", "", other.stdout.decode()) == re.sub(r"\d+ (s|min)", "", text)


def test_where_the_encoding_is_ascii_so_is_the_frame(trained: Path) -> None:
    shown = once(trained, PYTHONIOENCODING="ascii", PYTHONUTF8="0", LANG="C", LC_ALL="C")
    assert shown.returncode == 0
    assert "loss" in shown.stdout.decode("ascii")
    assert "?" not in shown.stdout.decode("ascii")


def test_nothing_to_show_is_an_error_that_says_what_is_missing(
    recorded: Path, tmp_path: Path
) -> None:
    def told(*arguments: str) -> str:
        result = CliRunner().invoke(main, ["watch", *arguments])
        assert result.exit_code == 1
        return " ".join(result.output.split())

    assert "no run.json yet" in told(str(tmp_path / "nowhere"), "--once")
    assert "a record of rank 7: there is none yet" in told(str(recorded), "--once", "--rank", "7")
    (tmp_path / "file").write_text("")
    assert "not a folder" in told(str(tmp_path / "file"))
    (recorded / "run.json").write_text('{"schema_version": 1}')
    assert "schema version 1, this auditor reads" in told(str(recorded))


# -- what is shown equals what is recorded -------------------------------------------------------


def test_series_grades_and_composition_equal_the_record(recorded: Path) -> None:
    files = {path: path.stat().st_mtime_ns for path in recorded.rglob("*")}
    situation = Following(recorded).poll()
    assert {path: path.stat().st_mtime_ns for path in recorded.rglob("*")} == files  # only read

    run = Run.open(recorded)
    signals = run.scan("signals").collect()
    for name in ("loss", "lr", "grad_norm", "probe_loss"):
        of_name = signals.filter(pl.col("signal") == name).sort("step")
        assert values(situation, name) == [
            (0, *row) for row in of_name.select("step", "value").rows()
        ]
    probe = signals.filter(pl.col("kind") == "probe", pl.col("segment").is_null())
    lowest = probe.filter(pl.col("signal") == "entropy_min").sort("value").group_by(
        "step", maintain_order=True
    ).first().sort("step")  # fmt: skip
    assert [
        (p.step, p.value, p.layer, p.head) for p in situation.signals.points("entropy_min")
    ] == lowest.select("step", "value", "layer", "head").rows()
    mean = probe.filter(pl.col("signal") == "entropy_mean").group_by("step").agg(
        pl.col("value").mean()
    ).sort("step")  # fmt: skip
    assert [p.value for p in situation.signals.points("entropy_mean")] == pytest.approx(
        mean["value"].to_list()
    )
    grades = grades_of(signals)
    assert [
        (one.kind, one.grade.step, one.grade.grade, one.grade.ratio, one.grade.alert)
        for one in situation.signals.graded
    ] == grades.select("kind", "step", "grade", "ratio", "alert").rows()
    assert grades["grade"].to_list() == [
        int(v) for v in signals.filter(pl.col("signal") == "grade").sort("step")["value"]
    ]

    exposures = run.scan("exposures").collect()
    last = exposures.filter(pl.col("batch") > exposures["batch"].max() - BATCHES)
    seen = situation.composition
    assert (seen.n_batches, seen.n_samples) == (BATCHES, len(last))
    assert dict(seen.sources) == Counter(last["source"])
    assert seen.n_scored == last["duplication"].is_not_null().sum()
    assert seen.n_duplicate == (last["duplication"] >= DUPLICATE_SIMILARITY).sum() > 0
    assert seen.n_repetitive == (last["repetition"] >= REPETITIVE_SHARE).sum()
    assert seen.repetition == pytest.approx(last["repetition"].mean())
    assert situation.step == exposures["step"].max() == N_STEPS - 1


def signals_frame(step: int, ratio: float) -> Frame:
    rows = [
        ("probe", "token_rank", "raw", 0, NULL, ratio),
        ("probe", "token_rank", "column", 0, NULL, ratio),
        ("probe", "entropy_mean", None, 0, NULL, ratio),
        ("probe", "entropy_mean", None, 1, NULL, 2 * ratio),
        ("probe", "max_logit", None, 1, 3, 10 * ratio),
        ("probe", "something_new", "form", 0, NULL, 1.0),
        ("probe", "grade", None, 0, NULL, math.floor(10 * ratio)),
    ]
    kind, signal_, variant, layer, head, value = zip(*rows, strict=True)
    n = len(rows)
    return Frame(
        "signals",
        {"step": step},
        {
            "value": np.asarray(value, np.float64),
            "layer": np.asarray(layer, np.int32),
            "head": np.asarray(head, np.int32),
            "n_rows": np.full(n, NULL, np.int32),
        },
        {
            "kind": list(kind),
            "site": ["x"] * n,
            "segment": [None] * n,
            "variant": list(variant),
            "signal": list(signal_),
        },
    )


def scalars_frame(steps: list[int], loss: float = 1.0) -> Frame:
    n = len(steps)
    norms = np.where(np.arange(n) % 2, np.nan, loss)
    return Frame(
        "scalars",
        {},
        {
            "step": np.asarray(steps),
            "loss": np.full(n, loss),
            "lr": np.full(n, np.nan),
            "grad_norm": norms,
        },
    )


def write(attempt: Attempt, table: str, *frames: Frame) -> Path:
    writer = LedgerWriter(attempt.ledger(table))
    for frame in frames:
        writer.append(frame)
    writer.close()
    return attempt.ledger(table)


ATTEMPTS = st.lists(
    st.tuples(
        st.integers(0, 12),  # its first step
        st.lists(st.tuples(st.booleans(), st.integers(1, 5)), min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=3,
)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(attempts=ATTEMPTS, data=st.data())
def test_reading_on_gives_what_reading_at_once_gives(
    tmp_path_factory: pytest.TempPathFactory, attempts: list[Any], data: st.DataObject
) -> None:
    """Ledgers grow by chopped pieces, as if their writer was caught at any byte."""
    folder = tmp_path_factory.mktemp("growing")
    whole, growing = folder / "whole", folder / "growing"
    following = Following(growing)
    polls = 0
    for first, parts in attempts:
        attempt = open_attempt(whole)
        step, frames = first, []
        for sampled, n in parts:
            frames.append(
                scalars_frame(list(range(step, step + n)), loss=attempt.number + step / 7)
            )
            if sampled:
                frames.append(signals_frame(step, 0.3 + 0.05 * (step % 9)))
            step += n
        path = write(attempt, "signals", *frames)
        attempt.close(complete=True)
        data_of = path.read_bytes()
        cuts = data.draw(st.lists(st.integers(0, len(data_of)), max_size=5))
        for cut in [*sorted(cuts), len(data_of)]:
            for source in sorted(whole.rglob("*")):
                target = growing / source.relative_to(whole)
                if source.is_dir():
                    target.mkdir(parents=True, exist_ok=True)
                elif source != path:
                    shutil.copy(source, target)
            (growing / path.relative_to(whole)).write_bytes(data_of[:cut])
            situation = following.poll()
            polls += 1
    assert polls >= len(attempts)
    at_once = Following(growing).poll()
    assert situation.signals.series == at_once.signals.series
    assert situation.signals.graded == at_once.signals.graded
    assert situation.signals.alerts == at_once.signals.alerts
    table = Run.open(whole).scan("signals").sort("step").collect()
    for name in ("loss", "grad_norm"):
        rows = table.filter(pl.col("signal") == name).select("attempt", "step", "value").rows()
        assert values(situation, name) == rows
    assert "lr" not in situation.signals.series  # never measured
    means = table.filter(pl.col("signal") == "entropy_mean").group_by("step").agg(
        pl.col("value").mean()
    ).sort("step")  # fmt: skip
    assert [p.value for p in situation.signals.points("entropy_mean")] == pytest.approx(
        means["value"].to_list()
    )


def test_old_frames_are_never_decoded_again_and_of_a_long_ledger_only_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_decoded = 0
    decode = auditor.ledger._decode

    def counted(payload: bytes, *kinds: Any) -> Frame:
        nonlocal n_decoded
        n_decoded += 1
        return decode(payload, *kinds)

    monkeypatch.setattr(auditor.ledger, "_decode", counted)
    attempt = open_attempt(tmp_path / "run")
    path = write(attempt, "signals", *[scalars_frame([step], loss=step) for step in range(500)])
    following = Following(tmp_path / "run", history=10)
    situation = following.poll()
    assert n_decoded <= 20
    assert [value for _, _, value in values(situation, "loss")] == list(range(490, 500))
    n_decoded = 0
    following.poll()
    assert n_decoded == 0
    with path.open("ab") as file:
        file.write(encode(scalars_frame([500], loss=500)))
    assert [value for _, _, value in values(following.poll(), "loss")] == list(range(491, 501))
    assert n_decoded == 1


# -- what can go wrong ---------------------------------------------------------------------------


def test_a_run_without_signals_or_without_exposures_shows_what_there_is(tmp_path: Path) -> None:
    attempt = open_attempt(tmp_path / "run")
    following = Following(tmp_path / "run")
    empty = following.poll()
    assert (empty.state, empty.step, empty.quiet_s) == ("starting", None, None)
    assert "no batches recorded" in screen_of(empty)
    write(attempt, "signals", scalars_frame([0, 1]))
    assert following.poll().step == 1
    closed = {"step": 9, "state": 0, "batch": 0}
    write(
        attempt,
        "exposures",
        Frame(
            "batches",
            {},
            {
                "batch": np.asarray([0, 1]),
                "n_samples": np.asarray([2, 1]),
                "state": np.asarray([3, 2]),  # delivered, skipped
                "key": np.asarray([5, 6, 7]),
            },
        ),
        Frame("steps", {}, {name: np.asarray([v]) for name, v in closed.items()}),
        Frame("renumbered", {}, {"closed": np.asarray([9]), "step": np.asarray([40])}),
    )
    both = following.poll()
    assert both.step == 40
    assert (both.composition.n_batches, both.composition.n_samples) == (1, 2)
    assert "sources unknown" in screen_of(both)
    assert "not scored" in screen_of(both)


def test_files_cut_short_deleted_or_replaced_are_read_anew(recorded: Path) -> None:
    following = Following(recorded)
    whole = following.poll()
    ledger = recorded / "signals/rank-00000/attempt-0000.ledger"
    data = ledger.read_bytes()
    ledger.write_bytes(data[: len(data) // 2])
    half = following.poll()
    assert 0 < len(half.signals.points("loss")) < N_STEPS
    ledger.unlink()
    assert not following.poll().signals.series
    ledger.write_bytes(data)
    assert following.poll().signals.series == whole.signals.series
    shutil.rmtree(recorded)
    assert "no run.json" in following.poll().waiting_for
    open_attempt(recorded)
    fresh = following.poll()
    assert fresh.run_id != whole.run_id
    assert not fresh.signals.series
    assert not fresh.composition.n_batches


def test_a_torn_tail_is_told_and_hides_nothing_before_it(recorded: Path) -> None:
    ledger = recorded / "signals/rank-00000/attempt-0000.ledger"
    before = Following(recorded).poll()
    with ledger.open("ab") as file:
        file.write(b"\x40\x00\x00\x00torn")
    torn = Following(recorded).poll()
    assert torn.signals.series == before.signals.series
    assert torn.gaps == ["signals/rank-00000/attempt-0000.ledger: the last 8 bytes are torn"]


def test_a_ledger_of_another_version_is_an_error_and_no_ledger_at_all_a_gap(
    recorded: Path,
) -> None:
    ledger = recorded / "signals/rank-00000/attempt-0000.ledger"
    ledger.write_bytes(b"something else entirely")
    situation = Following(recorded).poll()
    assert situation.gaps == ["signals/rank-00000/attempt-0000.ledger: not a ledger file"]
    assert situation.composition.n_samples
    ledger.write_bytes(MAGIC[:-1] + bytes([99]))
    with pytest.raises(SchemaVersionError):
        Following(recorded).poll()


def test_a_run_is_stalled_when_nothing_comes_and_told_when_its_process_is_gone(
    tmp_path: Path,
) -> None:
    attempt = open_attempt(tmp_path / "run")
    ledger = write(attempt, "signals", scalars_frame([0, 1]))
    claim = tmp_path / "run/attempts/rank-00000/claim.json"

    def quiet_for(seconds: float) -> Situation:
        then = time.time() - seconds
        os.utime(ledger, (then, then))
        return Following(tmp_path / "run").poll()

    assert quiet_for(5).state == "running"
    assert quiet_for(29).state == "running"
    stalled = quiet_for(600)
    assert (stalled.state, stalled.why) == ("stalled", "")  # this process is alive
    assert "STALLED" in screen_of(stalled)
    assert "newest fact 10 min ago" in screen_of(stalled)

    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    claim.write_text(json.dumps({**json.loads(claim.read_text()), "pid": gone.pid}))
    assert quiet_for(5).state == "running"  # its last facts may still be on their way
    killed = quiet_for(20)
    assert (killed.state, killed.why) == ("stalled", "its process is gone")
    assert killed.gaps == ["attempt 0, rank 0: still running, or killed before it closed"]

    elsewhere = {**json.loads(claim.read_text()), "host": "another.example"}
    claim.write_text(json.dumps(elsewhere))
    assert quiet_for(20).state == "running"
    then = time.time() - 300
    os.utime(claim, (then, then))
    assert quiet_for(300).why == "its process gives no sign of life"

    attempt.close(complete=True)
    assert quiet_for(600).state == "ended"


def test_slow_steps_are_not_taken_for_a_stall(tmp_path: Path) -> None:
    attempt = open_attempt(tmp_path / "run")
    attempt.note(started=time.time() - 1000.0)
    steps = Frame(
        "steps", {}, {"step": np.arange(10), "state": np.zeros(10, int), "batch": np.arange(10)}
    )
    ledger = write(attempt, "exposures", steps)
    then = time.time() - 100.0  # ten steps in 900 s: one every 90 s
    os.utime(ledger, (then, then))
    situation = Following(tmp_path / "run").poll()
    assert situation.state == "running"
    assert situation.steps_per_s == pytest.approx(10 / 900, rel=0.01)


def test_ranks_are_counted_followed_alone_and_missed_when_silent(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for rank in range(3):
        attempt = open_attempt(run, rank=rank, world_size=4)
        write(attempt, "signals", scalars_frame([rank], loss=float(rank)))
        write(
            attempt,
            "exposures",
            Frame(
                "batches",
                {},
                {"batch": np.asarray([0]), "n_samples": np.asarray([rank + 1]),
                 "state": np.asarray([3]), "key": np.arange(rank + 1)},
            ),
        )  # fmt: skip
    long_ago = time.time() - 500
    for path in run.glob("*/rank-00001/*"):
        os.utime(path, (long_ago, long_ago))
    together = Following(run).poll()
    assert (list(together.ranks), list(together.silent)) == ([0, 1, 2], [1])
    assert (together.signals_rank, together.composition.n_samples) == (0, 6)
    assert "3 ranks of 4" in screen_of(together)
    assert "silent: rank 1" in screen_of(together, width=120)
    assert any("ranks [3] of 4" in gap for gap in together.gaps)
    following = Following(run)
    (run / "signals/rank-00000").rename(run / "later")
    assert following.poll().signals_rank == 1
    (run / "later").rename(run / "signals/rank-00000")
    assert values(following.poll(), "loss") == [(0, 0, 0.0)]
    alone = Following(run, rank=2).poll()
    assert (alone.signals_rank, alone.composition.n_samples) == (2, 3)
    assert values(alone, "loss") == [(0, 2, 2.0)]


def test_a_clock_of_the_disk_that_goes_wrong_is_not_believed() -> None:
    pace = Pace(began=100.0)
    pace.look(100.0, news=True, step=0)
    assert pace.quiet_s(103.0, by_disk=50.0) == 50.0  # all there is to go by
    assert pace.quiet_s(103.0, by_disk=-3600.0) == 3.0
    pace.look(110.0, news=True, step=1)
    assert pace.quiet_s(112.0, by_disk=3600.0) == 2.0
    assert pace.quiet_s(112.0, by_disk=-3600.0) == 2.0
    assert pace.quiet_s(112.0, by_disk=1.0) == 1.0


def test_what_is_usual_is_learnt_while_watching() -> None:
    pace = Pace(began=0.0)
    assert pace.stalled_after(None) == 30.0
    assert pace.stalled_after(1 / 20) == 200.0
    for i in range(5):
        pace.look(8.0 * i, news=True, step=i)
        pace.look(8.0 * i + 2, news=False, step=i)
    assert pace.stalled_after(1 / 20) == 80.0
    assert pace.steps_per_s == pytest.approx(4 / 34)
    for i in range(40):
        pace.look(40.0 + 2 * i, news=False, step=4)
    assert pace.steps_per_s is None  # none in the last minute
    pace.look(130.0, news=True, step=2)  # another attempt goes back
    pace.look(131.0, news=True, step=5)
    assert pace.steps_per_s == 3.0


def test_a_disk_that_fails_for_a_while_is_told_and_looked_at_again(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    following = Following(trained)
    poll = following.poll
    before = watch._looked(following, Situation(trained, "its first look"))

    def fails() -> Situation:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(following, "poll", fails)
    told = screen_of(watch._looked(following, before), width=160)
    assert "gaps: the run cannot be read now (Stale file handle)" in told
    assert f"step {N_STEPS - 1}" in told
    first = screen_of(watch._looked(following, Situation(trained, "its first look")), width=160)
    assert "waiting for the run, which cannot be read now (Stale file handle)" in first
    monkeypatch.setattr(following, "poll", poll)
    assert "no known gaps" in screen_of(watch._looked(following, before))


HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07[red]evil[/red]\r\n\u202etxt",
    "\x9b31m" + "long " * 500,
    "漢字" * 30,
    "",
)


def test_names_from_data_are_inert(tmp_path: Path) -> None:
    attempt = open_attempt(tmp_path / "run")
    n = len(HOSTILE)
    keys = np.arange(n)
    write(
        attempt,
        "samples",
        Frame("samples", {}, {"key": keys}, {"source": list(HOSTILE), "sample_id": ["x"] * n}),
    )
    batches = {"batch": [0], "n_samples": [n], "state": [3], "key": keys}
    write(
        attempt,
        "exposures",
        Frame("batches", {}, {name: np.asarray(v) for name, v in batches.items()}),
    )
    situation = Following(tmp_path / "run").poll()
    assert len(situation.composition.sources) == n
    for width, encoding in ((80, "utf-8"), (120, "utf-8"), (80, "ascii"), (80, "latin-1")):
        drawn = draw(situation, Screen(width, 40, encoding))
        text = "\n".join(line.plain for line in drawn)
        assert "[red]evil" in text  # markup is text
        assert "owned" not in text
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
        assert all(cell_len(line.plain) <= width for line in drawn)
        text.encode(encoding)


def samples_frame(sources: dict[int, str | None]) -> Frame:
    return Frame("samples", {}, {"key": np.asarray(list(sources))}, {"source": [*sources.values()]})


def test_a_key_means_something_inside_its_attempt_only_and_memory_is_bounded() -> None:
    table = SourceTable()
    table.take(0, samples_frame({1: "books", 2: None, 2**62 + 5: "web"}))
    table.take(1, samples_frame({1: "news"}))

    def named(attempt: int, *keys: int) -> list[str | None]:
        found = table.of(attempt, np.asarray(keys))
        return [None if number < 0 else table.names[number] for number in found]

    assert named(0, 1, 2, 3, 2**62 + 5) == ["books", UNKNOWN_SOURCE, None, "web"]
    assert named(1, 1, 2, 2**62 + 5) == ["news", None, None]
    for begin in range(0, 3 * SOURCES, SOURCES):
        table.take(2, samples_frame({key: f"s{key}" for key in range(begin, begin + SOURCES)}))
    assert len(table.names) == SOURCES
    assert named(2, 5, 3 * SOURCES - 1) == ["s5", OTHER_SOURCES]


def test_a_dumb_terminal_gets_one_frame_without_escapes(trained: Path) -> None:
    with terminal(str(trained), TERM="dumb") as screen:
        assert screen.process.wait(WAIT_S) == 0
        screen.read()
        assert "\x1b" not in screen.output
        assert f"step {N_STEPS - 1}" in screen.output


# -- drawing -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def situation(trained: Path) -> Situation:
    return Following(trained).poll()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    width=st.integers(1, 240),
    height=st.integers(1, 90),
    encoding=st.sampled_from(["utf-8", "ascii"]),
)
def test_it_fits_any_terminal(situation: Situation, width: int, height: int, encoding: str) -> None:
    for shown in (situation, Situation(Path("x" * 300), "it"), Situation(Path("run"))):
        drawn = lines(shown, width=width, height=height, encoding=encoding)
        assert len(drawn) <= height
        assert all(cell_len(line) <= width for line in drawn)
        "".join(drawn).encode(encoding)


def test_eighty_by_twenty_four_shows_all_of_it(situation: Situation) -> None:
    text = screen_of(situation)
    for told in ("ratio 0.", "probe, step 125", "entropy", "lowest head", "max logit", "loss",
                 "probe loss", "grad norm", "lr", "steps/s", "novels", "duplicated", "repetitive",
                 "diversity", "alerts and changes", "ended", "q quits"):  # fmt: skip
        assert told in text, told


@pytest.mark.parametrize("ratio, glyph", [(0.75, " _   |   |"), (0.05, " _  | | |_|")])
def test_the_grade_is_drawn_large(ratio: float, glyph: str) -> None:
    history = SignalHistory()
    history.take(0, signals_frame(0, ratio))
    drawn = lines(Situation(Path("run"), signals=history))
    digit = [line[6:9] for line in drawn[2:5]]
    assert " ".join(digit).split() == glyph.split()


def test_a_fall_is_told_as_change_and_alert_and_an_attempt_that_goes_back_takes_it_back() -> None:
    history = SignalHistory()
    for step in range(0, 400, 10):
        history.take(0, signals_frame(step, 0.75 if step < 300 else 0.25))
    told = [(one.step, one.level, one.text) for one in (*history.changes, *history.alerts)]
    assert told == [
        (300, "", "grade S7 -> S2, ratio 0.25 in block 0"),
        (310, "danger", "danger: grade S2, ratio 0.25 in block 0"),
        (310, "watch", "watch: entropy_mean 0.375, 1.12 is normal"),
    ]
    shown = screen_of(Situation(Path("run"), signals=history))
    assert "step 300: grade S7 -> S2" in shown
    assert "step 310: danger" in shown
    history.take(1, signals_frame(290, 0.75))
    assert not history.changes
    assert not history.alerts
    assert [one.step for one in history.graded][-2:] == [280, 290]


def test_losses_that_are_not_finite_are_told_at_any_step_and_the_last_one_too() -> None:
    history = SignalHistory()
    history.take(0, scalars_frame([0, 1, 2]))
    history.take(0, scalars_frame([3], math.nan))
    told = [(one.step, one.level, one.text) for one in history.alerts]
    assert told == [(3, "danger", "danger: loss is nan")]
    assert "step 3: danger: loss is nan" in screen_of(Situation(Path("run"), signals=history))
    history.take(0, scalars_frame([3]))  # tried again, as mixed precision does
    history.take(0, scalars_frame([4, 5]))
    assert not history.alerts
    history.take(0, scalars_frame([6], math.inf))
    history.take(0, scalars_frame([7]))
    assert {(one.step, one.text) for one in history.alerts} == {
        (6, "danger: loss is inf"),
        (6, "danger: grad_norm is inf"),
    }


def test_a_step_that_was_tried_again_counts_as_it_was_measured_last() -> None:
    history = SignalHistory()
    for loss in (1.0, 2.0):
        history.take(0, scalars_frame([4, 5], loss) if loss == 1.0 else scalars_frame([5], loss))
    assert [(p.step, p.value) for p in history.points("loss")] == [(4, 1.0), (5, 2.0)]


def test_alerts_are_not_pushed_out_by_changes_of_grade() -> None:
    history = SignalHistory()
    for step in range(0, 2000, 10):
        ratio = 0.75 if step < 300 else 0.25 if step < 350 else (0.59, 0.61)[step // 10 % 2]
        history.take(0, signals_frame(step, ratio))
    assert len(history.changes) > 50
    assert {one.level for one in history.alerts} >= {"danger", "recovered"}
    assert history.alerts[-1].step < history.changes[-10].step
    assert history.alerts[-1].text in screen_of(Situation(Path("run"), signals=history))


def test_curves_show_level_extremes_and_what_is_not_finite() -> None:
    assert curve([0, 1, 2, 3, 4, 5, 6, 7], 10, True) == ["▁▂▃▄▅▆▇█"]
    assert curve([0, 7], 10, False) == ["_@"]
    assert curve([1.0, math.nan, 2.0, math.inf], 10, True) == ["▁!█!"]
    assert curve([3.0, 3.0], 10, True) == ["▅▅"]
    assert curve([0, 15], 10, True, 2) == [" █", "▁█"]
    assert curve([0.5], 10, True, lowest=0.0, highest=1.0) == ["▅"]
    assert curve([0, 0, 7, 7], 2, True) == ["▁█"]
    assert curve([], 10, True) == [""]
    assert curve([1.0], 0, True) == [""]


def test_a_frame_without_anything_yet_has_no_crash_and_no_invention() -> None:
    text = screen_of(Situation(Path("run"), composition=Composition()))
    assert "no sampled step yet" in text
    assert "no losses recorded" in text
