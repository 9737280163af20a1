"""``auditor.replay`` on recorded runs, with trainings whose dependence on the data is known."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import auditor
from auditor import AuditedSampler, Run
from auditor.errors import AuditorError, RunError
from auditor.explain.arms import ARMS, Batch
from auditor.record.checkpoints import append_checkpoint
from auditor.replaying import SEEDS, VERSION, ReplayResult, plan

ROOT = Path(__file__).parents[1]
STEPS, BATCH = 40, 8
N_ROWS = 900
BAD = [f"text-{i}" for i in range(0, N_ROWS, 5)]
"""Every fifth sample: what the made trainings depend on."""

N_BAD_DRAWN = 64


class Texts(Dataset):
    def __len__(self) -> int:
        return N_ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = np.random.default_rng(index).integers(0, 10**6, size=20)
        return {
            "text": " ".join(map(str, words)),
            "id": f"text-{index}",
            "source": "even" if index % 2 == 0 else "odd",
        }


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """A run of 40 steps of 8 samples with checkpoints after steps 9 and 19, and its own log."""
    folder = tmp_path_factory.mktemp("recorded")
    run, log = folder / "run", []
    torch.manual_seed(1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    loader = DataLoader(Texts(), batch_size=BATCH, shuffle=True)
    audited = AuditedSampler(loader, run=run, optimizer=optimizer)
    for step, batch in enumerate(audited):
        log.append(list(batch["id"]))
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == STEPS:
            break
    audited.close()
    for step in (9, 19):
        path = folder / f"step_{step}.pt"
        path.write_bytes(b"weights")
        append_checkpoint(run, str(path), step, attempt=0, rank=0)
    return run, log


@pytest.fixture
def run(recorded: tuple[Path, list[list[str]]]) -> Path:
    """The run, without what earlier tests kept of their replays."""
    path, _ = recorded
    kept = path / "derived" / "replay"
    if kept.exists():
        kept.rename(path.parent / f"kept-{len(list(path.parent.iterdir()))}")
    return path


def dose(batches: Sequence[Batch]) -> int:
    return sum(name in BAD for batch in batches for name in batch.ids)


def harmed(effect: float) -> Callable[..., dict[str, float]]:
    """A training whose loss rises by ``effect`` with every bad sample; noise by seed and data."""

    def train(checkpoint: str, batches: Sequence[Batch], seed: int) -> dict[str, float]:
        noise = np.random.default_rng([seed, sum(batches[0].indices)]).normal(scale=0.05)
        return {"probe_loss": 3.0 + seed + effect * dose(batches) + noise}

    return train


def silent(_: str) -> None:
    """No lines of progress."""


def test_name_stays_the_function_when_its_module_is_imported() -> None:
    program = (
        "import auditor\n"
        "first = auditor.replay\n"
        "import auditor.replaying\n"
        "from auditor import replay\n"
        "assert auditor.replay is first is replay is auditor.replaying.replay\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_train_is_given_the_record_from_the_checkpoint_on(
    run: Path, recorded: tuple[Path, list[list[str]]]
) -> None:
    seen: list[tuple[str, list[int], list[list[str]], int]] = []

    def train(checkpoint: str, batches: Sequence[Batch], seed: int) -> dict[str, float]:
        seen.append((checkpoint, [b.step for b in batches], [b.ids for b in batches], seed))
        return {"probe_loss": 1.0}

    found = auditor.replay(
        run, train, samples=BAD, checkpoint=run.parent / "step_19.pt", seeds=2, progress=silent
    )
    _, log = recorded
    assert [seed for *_, seed in seen] == [0, 0, 0, 1, 1, 1]
    for checkpoint, steps, ids, _ in seen:
        assert checkpoint == str(run.parent / "step_19.pt")
        assert steps == list(range(20, found.plan.last + 1))
        assert [len(one) for one in ids] == [BATCH] * len(steps)
    assert seen[0][2] == seen[3][2] == log[20 : found.plan.last + 1]
    # Without an effect nothing is found, and intervals of no width are not taken for certainty.
    assert not found.shows_cause


def test_effect_is_found_with_an_interval_that_covers_it(run: Path) -> None:
    effect = 0.1
    found = auditor.replay(
        str(run), harmed(effect), samples=BAD, checkpoint=run.parent / "step_9.pt", progress=silent
    )
    n = found.plan.n_implicated
    assert n == dose(found.plan.batches("as_it_was", 0))
    assert dose(found.plan.batches("without_implicated", 0)) == 0
    assert dose(found.plan.batches("without_random", 0)) == n
    first, second = found.effects
    for one, versus in ((first, "without_random"), (second, "as_it_was")):
        assert (one.versus, one.finding) == (versus, "better")
        assert one.low is not None and one.high is not None
        assert one.low <= -effect * n <= one.high < 0
        assert len(one.differences) == SEEDS
    assert found.shows_cause
    assert found.verdict.startswith("The implicated samples did harm: a cause")
    assert found.plan.cost == 3 * SEEDS * found.plan.n_steps


def test_samples_that_do_good_are_not_called_a_cause(run: Path) -> None:
    found = auditor.replay(
        run, harmed(-0.1), samples=BAD, checkpoint=run.parent / "step_9.pt", progress=silent
    )
    assert not found.shows_cause
    assert found.effects[0].finding == "worse"
    assert found.verdict.startswith("No cause is shown.")
    assert "the samples did this signal good" in found.verdict


def test_without_an_effect_the_verdict_says_so(run: Path) -> None:
    found = auditor.replay(
        run, harmed(0.0), samples=BAD, checkpoint=run.parent / "step_9.pt", progress=silent
    )
    assert found.effects[0].finding == "none shown"
    assert found.verdict.startswith("No cause is shown.")
    assert "the interval holds zero" in found.verdict


def test_what_leaving_out_any_samples_does_is_no_cause(
    run: Path, recorded: tuple[Path, list[list[str]]]
) -> None:
    _, log = recorded

    def train(checkpoint: str, batches: Sequence[Batch], seed: int) -> dict[str, float]:
        n_new = sum(
            name != was for b in batches for name, was in zip(b.ids, log[b.step], strict=True)
        )
        noise = np.random.default_rng([seed, sum(batches[0].indices)]).normal(scale=0.05)
        return {"probe_loss": 9.0 - 0.1 * n_new + noise}

    found = auditor.replay(
        run, train, samples=BAD, checkpoint=run.parent / "step_9.pt", progress=silent
    )
    assert [e.finding for e in found.effects] == ["none shown", "better"]
    assert not found.shows_cause
    assert found.verdict.startswith("No cause is shown.")


def test_one_seed_bears_an_effect_only(run: Path) -> None:
    found = auditor.replay(
        run, harmed(0.1), samples=BAD, checkpoint=run.parent / "step_9.pt", seeds=1,
        progress=silent,
    )  # fmt: skip
    assert not found.shows_cause
    assert found.verdict.startswith("Effect only")
    assert "one seed bears no interval" in found.verdict
    assert "(no interval)" in str(found)


def test_losses_that_are_not_finite_are_told(run: Path) -> None:
    def train(checkpoint: str, batches: Sequence[Batch], seed: int) -> dict[str, float]:
        return {"probe_loss": float("nan") if dose(batches) and seed == 1 else 2.0 + seed}

    for _ in range(2):  # as trained, and as kept
        found = auditor.replay(
            run, train, samples=BAD, checkpoint=run.parent / "step_9.pt", seeds=3, progress=silent
        )
        assert found.effects[0].finding == "undefined"
        assert "not finite in one of the two arms under 1 of 3 seeds" in found.verdict
        assert json.loads(found.to_json())["effects"][0]["differences"][1] is None


def test_result_is_text_and_json(run: Path) -> None:
    def train(checkpoint: str, batches: Sequence[Batch], seed: int) -> list[dict[str, float]]:
        x = dose(batches) + 0.1 * np.random.default_rng([seed, sum(batches[0].indices)]).normal()
        return [
            {"step": batch.step, "probe_loss": x, "probe_ratio": 0.8 - 0.001 * x, "\x1b[31mup": 1.0}
            for batch in batches
        ]

    found = auditor.replay(
        run, train, samples=BAD, checkpoint=run.parent / "step_9.pt", seeds=2, progress=silent
    )
    text = str(found)
    assert "\x1b" not in text
    for words in (
        "Replay of steps 10 to",
        f"3 arms x 2 seeds x {found.plan.n_steps} steps = {found.plan.cost} steps of training",
        "probe_ratio (higher is better)",
        "probe_loss (lower is better)",
        "up (not judged)",
        "seed 1",
        "without implicated less without random: -",
        "95% interval",
        found.verdict,
    ):
        assert words in text, words
    told = json.loads(found.to_json())
    assert told["schema_version"] == VERSION
    assert told["shows_cause"] is found.shows_cause is True
    assert told["steps_trained"] == found.plan.cost
    assert told["n_implicated"] == told["n_random"] == found.plan.n_implicated
    assert len(told["signals"]) == 3 * 2 * 3 * found.plan.n_steps
    assert {row["arm"] for row in told["outcomes"]} == set(ARMS)
    low, mean, high = (told["effects"][0][name] for name in ("low", "mean", "high"))
    assert low < mean < high


# -- what is kept, and goes on ---------------------------------------------------------------------


def test_what_was_finished_is_not_trained_again(run: Path) -> None:
    calls: list[int] = []
    lines: list[str] = []
    harm = harmed(0.1)

    def train(checkpoint: str, batches: Sequence[Batch], seed: int) -> dict[str, float]:
        calls.append(seed)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return harm(checkpoint, batches, seed)

    def replay(seeds: int) -> ReplayResult:
        return auditor.replay(
            run, train, samples=BAD, checkpoint=run.parent / "step_9.pt", seeds=seeds,
            progress=lines.append,
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        replay(3)
    assert calls == [0, 0, 0, 1, 1]
    found = replay(3)
    assert calls[5:] == [1, 1, 2, 2, 2]
    assert found.n_kept == 4
    assert any("4 of 9 trainings are there already" in line for line in lines)
    more = replay(4)  # further seeds are added to those that are there
    assert calls[10:] == [3, 3, 3]
    same = more.signals.filter(pl.col("seed") < 3)
    assert same.equals(found.signals)
    # A file cut short is trained again, and no other.
    kept = sorted((run / "derived" / "replay").rglob("*.json"))
    assert len(kept) == 12
    kept[0].write_text(kept[0].read_text()[:40])
    assert replay(4).signals.equals(more.signals)
    assert len(calls) == 14


def test_another_checkpoint_training_or_stretch_is_trained(run: Path) -> None:
    weights = run.parent / "step_9.pt"
    harm = harmed(0.1)
    calls: list[str] = []

    def train(checkpoint: str, batches: Sequence[Batch], seed: int) -> dict[str, float]:
        calls.append("one")
        return harm(checkpoint, batches, seed)

    def changed(checkpoint: str, batches: Sequence[Batch], seed: int) -> dict[str, float]:
        calls.append("other")
        return harm(checkpoint, batches, seed)

    def n_trained(one: Callable[..., Any], **options: Any) -> int:
        calls.clear()
        auditor.replay(
            run, one, checkpoint=weights, seeds=1, progress=silent, **{"samples": BAD, **options}
        )
        return len(calls)

    assert n_trained(train) == 3
    assert n_trained(train) == 0
    assert n_trained(changed) == 3
    assert n_trained(train, steps=12) == 3
    # The run as it was does not depend on what is implicated.
    assert n_trained(train, samples=BAD[: len(BAD) // 2], steps=12) == 2
    weights.write_bytes(b"other weights")
    assert n_trained(train) == 3


KILLED = """
import os, signal, sys
import auditor

def train(checkpoint, batches, seed):
    print("trained", seed, flush=True)
    if os.environ.get("KILL_AT") == str(seed):
        os.kill(os.getpid(), signal.SIGKILL)
    return {"probe_loss": float(seed + sum(batches[0].indices))}

run, checkpoint, *bad = sys.argv[1:]
auditor.replay(run, train, samples=bad, checkpoint=checkpoint, seeds=2)
"""


def test_killed_replay_goes_on(run: Path, tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    words = [sys.executable, str(script), str(run), str(run.parent / "step_9.pt"), *BAD]

    def start(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, capture_output=True, text=True, env={**os.environ, **more}, check=False
        )

    killed = start(KILL_AT="1")
    assert killed.returncode == -signal.SIGKILL
    assert killed.stdout.split() == ["trained", "0"] * 3 + ["trained", "1"]
    assert "3 arms x 2 seeds" in killed.stderr  # the cost is told before anything is trained
    again = start()
    assert again.returncode == 0, again.stderr
    assert again.stdout.split() == ["trained", "1"] * 3
    assert "3 of 6 trainings are there already" in again.stderr


def test_replay_of_a_run_that_cannot_be_written_is_done_and_says_so(run: Path) -> None:
    (run / "derived" / "replay").write_text("in the way")
    try:
        found = auditor.replay(
            run, harmed(0.1), samples=BAD, checkpoint=run.parent / "step_9.pt", progress=silent
        )
    finally:
        (run / "derived" / "replay").unlink()
    assert found.shows_cause
    assert any("could not be kept" in note for note in found.notes)


# -- what goes wrong is told -----------------------------------------------------------------------


def test_exception_of_train_is_told_with_arm_and_seed(run: Path) -> None:
    def train(checkpoint: str, batches: Sequence[Batch], seed: int) -> dict[str, float]:
        if seed == 1 and not dose(batches):
            raise torch.OutOfMemoryError("no memory \x1b[31mleft")
        return {"probe_loss": 1.0 * seed}

    with pytest.raises(AuditorError) as raised:
        auditor.replay(
            run, train, samples=BAD, checkpoint=run.parent / "step_9.pt", progress=silent
        )
    text = str(raised.value)
    for words in ("arm without_implicated, seed 1", "OutOfMemoryError", "4 trainings", "of 15"):
        assert words in text
    assert "\x1b" not in text
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (lambda seed: None, "NoneType"),
        (lambda seed: {"loss": 1.0}, "none of the signals to judge"),
        (lambda seed: [{"step": 3, "probe_loss": "low"}], "is no number"),
        (lambda seed: {"probe_loss": 1.0} | ({"x": 1.0} if seed else {}), "returned no x"),
    ],
)
def test_returns_that_cannot_be_compared_are_told_with_arm_and_seed(
    run: Path, returned: Callable[[int], Any], told: str
) -> None:
    with pytest.raises(AuditorError, match=told) as raised:
        auditor.replay(
            run, lambda checkpoint, batches, seed: returned(seed), samples=BAD,
            checkpoint=run.parent / "step_9.pt", progress=silent,
        )  # fmt: skip
    assert "arm as_it_was, seed 0" in str(raised.value)


def test_other_signals_are_judged_on_request(run: Path) -> None:
    def train(checkpoint: str, batches: Sequence[Batch], seed: int) -> dict[str, float]:
        return {"accuracy": -dose(batches) + 0.01 * seed * (dose(batches) == 0)}

    found = auditor.replay(
        run, train, samples=BAD, checkpoint=run.parent / "step_9.pt", seeds=3,
        better={"accuracy": "higher"}, progress=silent,
    )  # fmt: skip
    assert found.shows_cause


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"samples": BAD, "event": 0}, ValueError, "not both"),
        ({"samples": "text-1"}, ValueError, "several sample ids"),
        ({"samples": BAD, "seeds": 0}, ValueError, "seeds must be"),
        ({"samples": BAD, "steps": 0}, ValueError, "steps must be"),
        ({"samples": BAD, "better": {"x": "up"}}, ValueError, "'higher' or 'lower'"),
        ({"samples": BAD, "checkpoint": "weights.pt"}, ValueError, "give first_step="),
        (
            {"samples": BAD, "checkpoint": "weights.pt", "first_step": 90},
            RunError,
            "before step 90",
        ),
        (
            {"samples": BAD, "first_step": 90, "checkpoint": "w", "steps": 5},
            RunError,
            "inside of it",
        ),
        ({"samples": ["nobody"]}, RunError, "none of the 1 samples"),
        ({"samples": BAD}, RunError, "no checkpoint from step"),
        ({}, RunError, "no event has a blamed source"),
        ({"event": 7}, RunError, "there is no event 7"),
    ],
)
def test_questions_without_an_answer_are_refused_before_training(
    run: Path, options: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        auditor.replay(run, harmed(0.1), progress=silent, **options)


def test_last_checkpoint_before_the_samples_is_taken_if_it_is_there(
    run: Path, recorded: tuple[Path, list[list[str]]]
) -> None:
    _, log = recorded
    late = [log[25][0], log[27][3]]
    assert plan(run, samples=late).first == 20
    assert (plan(run, samples=late).checkpoint, plan(run, samples=late).last) == (
        str(run.parent / "step_19.pt"), 27,
    )  # fmt: skip
    weights = run.parent / "step_19.pt"
    content = weights.read_bytes()
    weights.unlink()
    try:
        assert plan(run, samples=late).first == 10
    finally:
        weights.write_bytes(content)
    assert plan(run, samples=late, first_step=18).first == 18
    assert plan(run, samples=late, steps=15).last == 34


def test_what_limits_the_answer_is_noted(run: Path, recorded: tuple[Path, list[list[str]]]) -> None:
    _, log = recorded
    weights = run.parent / "step_19.pt"
    two = plan(run, samples=[log[3][0], log[22][0]], checkpoint=weights)
    assert any("1 exposures of implicated samples are from before step 20" in n for n in two.notes)
    assert any("1 of the 2 samples named are in these steps" in note for note in two.notes)
    most = plan(run, samples=[n for ids in log[20:30] for n in ids[1:]], checkpoint=weights)
    assert (most.n_implicated, most.stretch.n_random) == (70, 10)
    assert any("Only 10 other samples" in note for note in most.notes)
    longer = plan(run, samples=[log[22][0]], checkpoint=weights, steps=100)
    assert (longer.n_steps, longer.last) == (20, 39)
    assert any("20 of the 100 steps" in note for note in longer.notes)


# -- an event of a real training -------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The pipeline: a small GPT, a burst of repeats, a replay of it."""
    out = tmp_path_factory.mktemp("pipeline") / "out"
    done = subprocess.run(
        [sys.executable, ROOT / "pipelines" / "replay.py", "--out", out, "--seeds", "2"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out, done.stdout


@pytest.mark.slow
def test_pipeline_shows_that_the_burst_did_it(shown: tuple[Path, str]) -> None:
    out, text = shown
    assert "the first to blame is novels" in text
    assert "The implicated samples did harm: a cause" in text
    told = json.loads((out / "replay.json").read_text())
    loss = next(e for e in told["effects"] if e["signal"] == "probe_loss")
    assert (loss["versus"], loss["finding"]) == ("without_random", "better")
    assert loss["high"] < -0.05


@pytest.mark.slow
def test_implicated_are_the_copies_and_replacements_are_none(shown: tuple[Path, str]) -> None:
    out, _ = shown
    planned = plan(out / "run")
    texts = {
        row["sample_id"]: row["preview"]
        for row in Run.open(out / "run").scan("samples").collect().iter_rows(named=True)
    }
    counts: dict[str, int] = {}
    was = [name for batch in planned.batches("as_it_was", 0) for name in batch.ids]
    for name in was:
        if name.startswith("novels"):
            counts[texts[name]] = counts.get(texts[name], 0) + 1
    copies = {text for text, n in counts.items() if n > 20}
    assert len(copies) == 4
    implicated = planned.stretch.own["implicated"].to_list()
    is_copy = [texts[name] in copies for name in was]
    # Every copy is; of the rest only what chance made alike.
    assert all(bad for bad, copy in zip(implicated, is_copy, strict=True) if copy)
    assert sum(implicated) <= 1.02 * sum(is_copy)
    for seed in range(3):
        now = [n for batch in planned.batches("without_implicated", seed) for n in batch.ids]
        assert not any(texts[name] in copies for name in now)
        assert [n.split("-")[0] for n in now] == [n.split("-")[0] for n in was]
