"""Loaders that Accelerate prepared: what is recorded, and that nothing else changes.

Trainings are real processes (``accelerate_worker.py``), alone or as two ranks over gloo; each is
run bare and audited. The record is compared with what the loop itself received and with the steps
that moved its weights.
"""

from __future__ import annotations

import copy
import os
import pickle
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import polars as pl
import pytest

pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install accelerate")

import torch
from accelerate_worker import FIRST_ID, SCENARIOS, Rows
from torch.utils.data import DataLoader

from auditor import AuditedSampler, Run

WORKER = Path(__file__).with_name("accelerate_worker.py")
EXAMPLE = Path(__file__).parents[2] / "pipelines" / "accelerate_loop.py"
ALONE = "one process"
PAIR = "two ranks"
TIMEOUT_S = 120
N_RANKS = {ALONE: 1, PAIR: 2}

ONLY_FOR = {  # what the other kind has nothing to say about, or would say again
    ALONE: {"stateful-workers"},
    PAIR: {
        *("recorder-first", "uneven", "split", "dispatch-split", "divided-twice", "seedable"),
        *("accumulate-dispatch", "accumulate-synced", "before-prepare", "monitor"),
    },
}
TRAININGS = [
    (kind, name)
    for kind, other in ((ALONE, PAIR), (PAIR, ALONE))
    for name in SCENARIOS
    if name not in ONLY_FOR[other]
    and name != "killed"
    and (find_spec("torchdata") or not name.startswith("stateful"))
]
of_all_trainings = pytest.mark.parametrize(
    ("kind", "name"), TRAININGS, ids=[" ".join(one) for one in TRAININGS]
)


def launch(scenarios: list[str], out: Path, n_ranks: int) -> tuple[list[int], list[str]]:
    """Run the worker as ``n_ranks`` processes; their exit codes and what they printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(n_ranks):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if n_ranks > 1:  # what a launcher sets
            environment |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(n_ranks),
                "LOCAL_WORLD_SIZE": str(n_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(WORKER), str(out), *scenarios],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        printed = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], printed


class Trainings:
    """All trainings of each kind, in one launch each, when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._printed: dict[str, str] = {}
        self.codes: dict[str, list[int]] = {}

    def folder(self, kind: str, name: str) -> Path:
        out = self._folder / kind.replace(" ", "-")
        if kind not in self._printed:
            names = [one for of, one in TRAININGS if of == kind]
            last = ["killed"] if kind == PAIR else []
            self.codes[kind], printed = launch([*names, *last], out, N_RANKS[kind])
            self._printed[kind] = "\n".join(printed)
        for rank in range(N_RANKS[kind] if name != "killed" else 0):
            assert (out / name / f"audited-{rank}.pt").exists(), self._printed[kind]
        return out / name

    def seen(self, kind: str, name: str, which: str) -> list[Any]:
        """What the loops of a training saw, by rank."""
        folder = self.folder(kind, name)
        return [
            torch.load(folder / f"{which}-{rank}.pt", weights_only=False)
            for rank in range(N_RANKS[kind])
        ]

    def run(self, kind: str, name: str) -> Path:
        return self.folder(kind, name) / "run"


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("accelerate"))


def exposures(run: Path) -> pl.DataFrame:
    return Run.open(run).scan("exposures", view="all").collect()


def in_steps(table: pl.DataFrame) -> list[tuple[int, int, int, str]]:
    """(step, batch of the step, position, sample) of one rank, as the worker logs them."""
    trained = table.filter(pl.col("state") == "trained")
    within = pl.col("batch").rank("dense").over("step").cast(pl.Int64) - 1
    return list(trained.select("step", within, "position", "sample_id").iter_rows())


@of_all_trainings
def test_training_is_bit_for_bit_the_same_with_and_without_auditing(
    kind: str, name: str, trainings: Trainings
) -> None:
    for bare, audited in zip(
        trainings.seen(kind, name, "bare"), trainings.seen(kind, name, "audited"), strict=True
    ):
        if name != "before-prepare":  # there Accelerate is kept from preparing the loader
            assert audited["length"] == bare["length"]
            assert audited["states"] == bare["states"]  # sync, end of the loader, remainder
            assert audited["metrics"] == bare["metrics"]
            assert len(audited["batches"]) == len(bare["batches"]) > 0
            for ours, theirs in zip(audited["batches"], bare["batches"], strict=True):
                assert type(ours) is type(theirs)
                assert list(ours) == list(theirs)
                assert all(torch.equal(ours[column], theirs[column]) for column in ours)
            assert all(map(torch.equal, audited["weights"], bare["weights"]))
        assert all(map(torch.equal, audited["random"], bare["random"]))
        assert audited.get("resumed") == bare.get("resumed")


@of_all_trainings
def test_record_equals_what_each_loop_received_and_trained(
    kind: str, name: str, trainings: Trainings
) -> None:
    table = exposures(trainings.run(kind, name))
    for rank, loop in enumerate(trainings.seen(kind, name, "audited")):
        of_rank = table.filter(pl.col("rank") == rank)
        received = [str(one) for batch in loop["batches"] for one in batch["id"].tolist()]
        if name.startswith("skip-outside"):  # the rebuilt loader of the first epoch is not audited
            received = received[-of_rank.height :]
            assert 0 < of_rank.height < len(loop["exposures"])
        else:
            assert in_steps(of_rank) == loop["exposures"]
        assert of_rank.sort("batch", "position")["sample_id"].to_list() == received
    assert Run.open(trainings.run(kind, name)).gaps() == []


def test_samples_that_even_batches_repeats_are_recorded_as_often_as_they_were_trained(
    trainings: Trainings,
) -> None:
    scenario = SCENARIOS["default"]
    table = exposures(trainings.run(PAIR, "default"))
    first = table.filter(pl.col("step") < table["step"].n_unique() / scenario.epochs)
    counts = first["sample_id"].value_counts()["count"]
    assert len(counts) == scenario.n
    assert counts.sum() == 40  # 2 ranks, 5 batches of 4: 3 more than there are
    assert sorted(counts.to_list())[-4:] == [1, 2, 2, 2]


@pytest.mark.parametrize("name", ["accumulate", "accumulate-dispatch", "monitor", "monitor-always"])
def test_accumulation_that_does_not_divide_the_epoch_ends_it_with_a_smaller_step(
    name: str, trainings: Trainings
) -> None:
    table = exposures(trainings.run(PAIR, name))
    sizes = table.group_by("rank", "step").agg(pl.col("batch").n_unique()).sort("rank", "step")
    assert sizes["batch"].to_list() == [2, 2, 1] * 2 * 2  # epochs, ranks


@pytest.mark.parametrize("name", ["monitor", "monitor-always"])
def test_monitor_has_a_loss_for_each_update_and_no_more(name: str, trainings: Trainings) -> None:
    signals = Run.open(trainings.run(PAIR, name)).scan("signals").collect()
    losses = signals.filter(pl.col("signal") == "loss").sort("rank", "step")
    assert losses["step"].to_list() == [*range(6)] * 2
    grades = signals.filter(pl.col("signal") == "grade").sort("rank", "step")
    assert grades["step"].to_list() == [0, 2, 4] * 2


def test_duplication_is_scored_where_a_rank_reads_for_the_others(trainings: Trainings) -> None:
    """The sketches that loader workers of rank 0 made reach the other rank with the batch."""
    table = exposures(trainings.run(PAIR, "dispatch-workers"))
    second_epoch = table.filter(pl.col("step") >= table["step"].n_unique() / 2)
    for rank in range(2):
        seen_before = second_epoch.filter(pl.col("rank") == rank)["dup_window"]
        own_first = set(table.filter((pl.col("rank") == rank) & (pl.col("step") < 5))["sample_id"])
        again = second_epoch.filter(pl.col("rank") == rank)["sample_id"].is_in(own_first)
        assert again.any()
        assert (seen_before.filter(again) == 1.0).all()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("before-prepare", "a loader whose sampler does not divide the data"),
        ("divided-twice", "Accelerate divides each part again"),  # transformers #34365
        ("skip-outside", "what it yields is not recorded"),
        ("skip-outside-dispatch", "what it yields is not recorded"),
    ],
)
def test_a_setup_that_loses_data_or_record_is_warned_of_once(
    name: str, words: str, trainings: Trainings
) -> None:
    for loop in trainings.seen(PAIR, name, "audited"):
        assert [words in message for message in loop["messages"]] == [True]


def test_a_setup_that_loses_nothing_is_not_warned_of(trainings: Trainings) -> None:
    for name in ("default", "dispatch", "stream", "accumulate", "no-sampler", "seedable"):
        for loop in trainings.seen(PAIR, name, "audited"):
            assert loop["messages"] == []


def test_of_data_divided_twice_the_record_shows_that_a_part_was_never_trained(
    trainings: Trainings,
) -> None:
    table = exposures(trainings.run(PAIR, "divided-twice"))
    assert table["sample_id"].n_unique() < SCENARIOS["divided-twice"].n * 2 / 3


def test_a_loader_wrapped_before_prepare_gives_each_rank_all_data(trainings: Trainings) -> None:
    table = exposures(trainings.run(PAIR, "before-prepare"))
    for _, of_rank in table.group_by("rank"):
        assert of_rank["sample_id"].n_unique() == SCENARIOS["before-prepare"].n


def test_a_killed_rank_leaves_a_readable_run_that_names_it(trainings: Trainings) -> None:
    folder = trainings.folder(PAIR, "killed")
    assert trainings.codes[PAIR][1] == -signal.SIGKILL
    assert trainings.codes[PAIR][0] != 0  # the survivor cannot go on without the other
    run = Run.open(folder / "run")
    assert run.gaps() == ["attempt 0, rank 1: still running, or killed before it closed"]
    table = run.scan("exposures", view="all").collect()
    last = SCENARIOS["killed"].kill_at
    assert last is not None
    for rank in range(2):  # the bare training went the same way, and was not killed
        bare = torch.load(folder / f"bare-{rank}.pt", weights_only=False)
        trained = [one for one in bare["exposures"] if one[0] <= last]
        assert in_steps(table.filter(pl.col("rank") == rank)) == trained


def test_a_sampler_of_a_prepared_loader_is_pickled_and_copied(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderShard

    loader = Accelerator(cpu=True).prepare(DataLoader(Rows(8), batch_size=4))
    audited = AuditedSampler(loader, run=tmp_path / "run")
    audited.close()
    for other in (pickle.loads(pickle.dumps(audited)), copy.copy(audited)):
        assert type(other) is AuditedSampler
        assert isinstance(other, DataLoaderShard)  # by which skip_first_batches goes
        assert [batch["id"].tolist() for batch in other] == [
            [FIRST_ID + index for index in batch] for batch in ([0, 1, 2, 3], [4, 5, 6, 7])
        ]
        other.close()
    assert exposures(tmp_path / "run")["sample_id"].n_unique() == 8


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_the_example_runs(n_ranks: int, tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    done = subprocess.run(
        [
            sys.executable,
            *(launcher if n_ranks > 1 else []),
            str(EXAMPLE),
            *("--out", str(tmp_path), "--steps", "12", "--accumulate", str(n_ranks)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert f"auditor report {tmp_path / 'run'}" in done.stdout
    run = Run.open(tmp_path / "run")
    assert run.gaps() == []
    table = run.scan("exposures", view="all").collect()
    assert set(table["state"]) == {"trained"}
    sizes = table.group_by("rank", "step").agg(pl.col("batch").n_unique())
    assert sizes.height == 12 * n_ranks
    assert set(sizes["batch"]) == {n_ranks}
    losses = run.scan("signals").filter(pl.col("signal") == "loss").collect()
    assert losses.height == 12 * n_ranks
