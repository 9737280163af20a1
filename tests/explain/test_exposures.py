"""Windows and orders equal what the loop itself saw, and a plain reading of made runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from auditor import AuditedSampler, GradeMonitor, Run, schema
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.errors import RunError
from auditor.explain.exposures import WINDOW, replay_order, seen
from auditor.record.recorder import recorder_for
from auditor.tables import polars_schema

# -- runs recorded from a loop that keeps its own log ---------------------------------------------


class Texts(Dataset):
    """Rows of words; those of ``copied`` say what row 0 says, under their own ids."""

    def __init__(self, n: int = 96, copied: Sequence[int] = (), named: bool = True) -> None:
        rng = np.random.default_rng(0)
        self.texts = [" ".join(map(str, rng.integers(0, 10**6, size=30))) for _ in range(n)]
        for index in copied:
            self.texts[index] = self.texts[0]
        self.named = named

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = {"text": self.texts[index], "source": "even" if index % 2 == 0 else "odd"}
        return {**row, "index": index} | ({"id": f"text-{index}"} if self.named else {})


@dataclass
class Loop:
    """A training loop and its own log: (step, state, ids of the batch) in the order of batches."""

    run: Path
    step: int = 0
    log: list[tuple[int | None, str, list[str]]] = field(default_factory=list)
    model: Any = field(default_factory=lambda: torch.nn.Linear(1, 1))

    def train(self, loader: Any, n_batches: int, *, close: bool = True, **options: Any) -> None:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-9)
        audited = AuditedSampler(loader, run=self.run, optimizer=optimizer, **options)
        self.step = options.get("start_step", self.step)
        taken = 0
        while taken < n_batches:
            for batch in audited:
                self.model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                self.log.append((self.step, "trained", list(batch["id"])))
                self.step += 1
                taken += 1
                if taken == n_batches:
                    break
        if close:
            audited.close()
        else:
            assert audited.flush()

    def ids(self, first: int, last: int) -> list[str]:
        return [
            name
            for step, state, ids in self.log
            if state == "trained" and step is not None and first <= step <= last
            for name in ids
        ]


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    """40 steps of 8 samples, shuffled, over a dataset a quarter of whose rows are one text."""
    torch.manual_seed(3)
    made = Loop(tmp_path_factory.mktemp("recorded") / "run")
    data = Texts(copied=range(0, 96, 4))
    made.train(DataLoader(data, batch_size=8, shuffle=True), 40)
    return made


def test_window_is_what_the_loop_saw_in_its_steps(loop: Loop) -> None:
    for step, window in ((20, 5), (None, 3), (39, 40), (2, 100), (45, 10)):
        found = seen(Run.open(loop.run), step=step, window=window)
        last = 39 if step is None else step
        first = last - window + 1
        assert found.rows["sample_id"].to_list() == loop.ids(first, last)
        assert found.states == {"trained": len(found.rows)}
        assert (found.first, found.last) == (max(first, 0), min(last, 39))
        assert found.recorded == (0, 39)
        assert found.n_missing == 0


def test_default_window_ends_at_the_last_step(loop: Loop, tmp_path: Path) -> None:
    longer = Loop(tmp_path / "run")
    longer.train(DataLoader(Texts(), batch_size=8), WINDOW + 7)
    found = seen(Run.open(longer.run))
    assert (found.first, found.last) == (7, WINDOW + 6)


def test_sources_are_counted_as_the_loop_would(loop: Loop) -> None:
    found = seen(Run.open(loop.run), step=30, window=12)
    ids = loop.ids(19, 30)
    counts = Counter("even" if int(name[5:]) % 2 == 0 else "odd" for name in ids)
    rows = {row["source"]: row for row in found.sources.iter_rows(named=True)}
    texts = Texts(copied=range(0, 96, 4)).texts
    for source, n in counts.items():
        own = [int(name[5:]) for name in ids if (int(name[5:]) % 2 == 0) == (source == "even")]
        assert rows[source]["n_samples"] == n
        assert rows[source]["share"] == pytest.approx(n / len(ids))
        assert rows[source]["n_tokens"] == sum(len(texts[index]) for index in own)
        assert rows[source]["n_unscored"] == 0
    assert found.total["n_samples"].item() == len(ids) == found.n_counted
    assert found.total["share"].item() == 1.0


def test_near_duplicates_are_the_rows_whose_text_was_there_before(loop: Loop) -> None:
    """All 40 batches lie inside the window of duplication, so brute force is a set of texts."""
    texts = Texts(copied=range(0, 96, 4)).texts
    before: set[str] = set()
    repeated = Counter[str]()
    for name in loop.ids(0, 39):
        index = int(name[5:])
        repeated["even" if index % 2 == 0 else "odd"] += texts[index] in before
        before.add(texts[index])
    found = seen(Run.open(loop.run), window=40)
    counted = dict(found.sources.select("source", "n_duplicate").iter_rows())
    assert counted == dict(repeated)
    assert found.total["duplicate_share"].item() == pytest.approx(repeated.total() / 320)


def test_lists_name_what_was_shown_most_often(loop: Loop) -> None:
    texts = Texts(copied=range(0, 96, 4)).texts
    ids = loop.ids(10, 39)
    found = seen(Run.open(loop.run), window=30, n_named=10)
    by_id, by_text = Counter(ids), Counter(texts[int(name[5:])] for name in ids)
    assert found.samples["times"].to_list() == [n for _, n in by_id.most_common(10) if n > 1]
    assert dict(found.samples.select("sample_id", "times").iter_rows()).items() <= by_id.items()
    assert found.contents["times"].to_list() == [n for _, n in by_text.most_common(10) if n > 1]
    top = found.contents.row(0, named=True)
    copies = [name for name in ids if texts[int(name[5:])] == texts[0]]
    assert top["times"] == len(copies)
    assert top["n_samples"] == len(set(copies))
    assert top["sample_id"] == copies[0]
    assert top["preview"] == texts[0][: len(top["preview"])] != ""
    assert top["dup_run"] + 1 == sum(texts[int(n[5:])] == texts[0] for n in loop.ids(0, 39))
    assert set(found.duplicates["duplication"]) == {1.0}
    for row in found.duplicates.iter_rows(named=True):
        original = row["duplicate_of"]
        assert texts[int(original[5:])] == texts[int(row["sample_id"][5:])]


def test_one_source_keeps_its_share_of_everything(loop: Loop) -> None:
    found = seen(Run.open(loop.run), window=10, source="odd")
    ids = [name for name in loop.ids(30, 39) if int(name[5:]) % 2]
    assert found.rows["sample_id"].to_list() == ids
    assert found.sources["source"].to_list() == ["odd"]
    assert found.sources["share"].item() == pytest.approx(len(ids) / 80)


def test_one_sample_is_looked_for_in_all_steps(loop: Loop) -> None:
    found = seen(Run.open(loop.run), sample="text-5")
    steps = [step for step, _, ids in loop.log for name in ids if name == "text-5"]
    assert len(steps) > 1
    assert found.rows["step"].to_list() == steps
    assert (found.first, found.last) == (0, 39)
    narrow = seen(Run.open(loop.run), sample="text-5", step=steps[0], window=1)
    assert narrow.rows["step"].to_list() == steps[:1]


def test_sample_without_an_id_is_found_by_its_index(tmp_path: Path) -> None:
    class Unnamed(Texts):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"text": self.texts[index], "index": index}

    audited = AuditedSampler(
        DataLoader(Unnamed(24), batch_size=8, shuffle=True), run=tmp_path / "run"
    )
    where = [
        (number, position)
        for number, batch in enumerate(audited)
        for position, index in enumerate(batch["index"].tolist())
        if index == 11
    ]
    audited.close()
    found = seen(Run.open(tmp_path / "run"), sample="11")
    assert list(found.rows.select("batch", "position").iter_rows()) == where


def test_what_is_not_there_is_refused_with_what_is(loop: Loop, tmp_path: Path) -> None:
    run = Run.open(loop.run)
    with pytest.raises(RunError, match=r"steps 461 to 500.*steps 0 to 39.*--step"):
        seen(run, step=500)
    with pytest.raises(RunError, match=r"source 'web' in steps 0 to 39.*'even', 'odd'"):
        seen(run, source="web")
    with pytest.raises(RunError, match=r"sample 'text-999' in steps 0 to 39"):
        seen(run, sample="text-999")
    with pytest.raises(RunError, match=r"rank 3.*has rank 0.*--rank"):
        seen(run, rank=3)
    with pytest.raises(RunError, match=r"steps 50 to 60.*steps 0 to 39.*--from-step"):
        replay_order(run, first=50, last=60)
    with pytest.raises(RunError, match=r"nothing drawn.*320 trained.*--include trained"):
        replay_order(run, states=["drawn"])
    AuditedSampler([], run=tmp_path / "empty").close()
    with pytest.raises(RunError, match=r"no exposure was recorded.*AuditedSampler"):
        seen(Run.open(tmp_path / "empty"))


def test_running_run_shows_what_it_has_so_far(tmp_path: Path) -> None:
    running = Loop(tmp_path / "run")
    running.train(DataLoader(Texts(), batch_size=8), 5, close=False)
    found = seen(Run.open(running.run))
    assert found.rows["sample_id"].to_list() == running.ids(0, 4)
    assert any("still running" in gap for gap in found.gaps)
    recorder_for(running.run).close()


def test_discarded_and_skipped_batches_are_counted_beside_the_trained(tmp_path: Path) -> None:
    model = GPT(GPTConfig(n_positions=8))
    tokens = torch.randint(0, 256, (2, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    loader = AuditedSampler(DataLoader(Texts(), batch_size=8), run=tmp_path / "run", skip={5})
    monitor = GradeMonitor(model, run=tmp_path / "run", every=100)
    log = {"trained": 0, "discarded": 0}
    for number, _ in enumerate(loader):  # 11 of 12: one is skipped
        loss = next_byte_loss(model, tokens)
        loss.backward()
        monitor.step(loss, optimizer=optimizer)
        if number != 3:
            optimizer.step()
        optimizer.zero_grad()
        log["discarded" if number == 3 else "trained"] += 8
    monitor.close()
    run = Run.open(tmp_path / "run")
    found = seen(run)
    assert found.states == {**log, "skipped": 8}
    assert found.n_counted == log["trained"] == found.total["n_samples"].item()
    # The skipped batch was the sixth; four steps were closed over the five before it.
    around = seen(run, step=4, window=1)
    assert around.states == {"trained": 8, "skipped": 8}
    assert around.rows["sample_id"].to_list() == [f"text-{i}" for i in range(40, 56)]
    order = replay_order(run)
    assert order.left_out == {"discarded": 8, "skipped": 8}
    whole = replay_order(run, states=schema.STATES)
    assert whole.rows["index"].to_list() == list(range(96))
    assert whole.left_out == {}


def test_run_without_steps_shows_the_last_batches(tmp_path: Path) -> None:
    audited = AuditedSampler(DataLoader(Texts(), batch_size=8), run=tmp_path / "run")
    log = [name for batch in audited for name in batch["id"]]
    audited.close()
    run = Run.open(tmp_path / "run")
    found = seen(run, window=2)
    assert found.unit == "batch"
    assert found.counted is None
    assert (found.first, found.last) == (10, 11)
    assert found.states == {"delivered": 16}
    assert found.rows["sample_id"].to_list() == log[-16:]
    assert found.total["n_samples"].item() == 16
    with pytest.raises(RunError, match=r"no step was recorded.*Leave --step out"):
        seen(run, step=3)
    with pytest.raises(RunError, match=r"no step was recorded.*--from-step"):
        replay_order(run, first=3)
    with pytest.raises(RunError, match=r"nothing trained.*96 delivered.*--include delivered"):
        replay_order(run)
    assert replay_order(run, states=["delivered"]).rows["sample_id"].to_list() == log


def test_drawn_indices_are_all_that_is_known_of_a_bare_sampler(tmp_path: Path) -> None:
    torch.manual_seed(0)
    audited = AuditedSampler(
        BatchSampler(RandomSampler(range(50)), 8, drop_last=False), run=tmp_path / "run"
    )
    log = [index for batch in audited for index in batch]
    audited.close()
    run = Run.open(tmp_path / "run")
    found = seen(run, window=100)
    assert found.states == {"drawn": 50}
    assert found.total["n_unscored"].item() == 50
    assert found.total["n_tokens"].item() is None
    assert found.sources["source"].to_list() == [schema.UNKNOWN_SOURCE]
    order = replay_order(run, states=["drawn"]).rows
    assert order["index"].to_list() == log


def test_restarted_run_shows_each_step_as_it_was_trained_last(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, second = Loop(tmp_path / "run"), Loop(tmp_path / "run")
    first.train(DataLoader(Texts(), batch_size=8, shuffle=True), 10, skip={7})
    second.train(DataLoader(Texts(), batch_size=8, shuffle=True), 8, start_step=6)
    run = Run.open(tmp_path / "run")
    effective = first.ids(0, 5) + second.ids(6, 13)
    found = seen(run)
    assert found.rows["sample_id"].to_list() == effective
    assert found.states == {"trained": 14 * 8}  # the skipped batch was rolled back as well
    everything = seen(run, view="all", step=8, window=3)
    assert everything.states == {"trained": 6 * 8, "skipped": 8}
    both = [name for step in (6, 7, 8) for one in (first, second) for name in one.ids(step, step)]
    trained = everything.rows.filter(pl.col("state") == "trained")
    assert trained["sample_id"].to_list() == both
    assert replay_order(run).rows["sample_id"].to_list() == effective


def test_ranks_are_shown_together_or_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops = []
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        loops.append(Loop(tmp_path / "run"))
        torch.manual_seed(rank)
        loops[-1].train(DataLoader(Texts(), batch_size=8, shuffle=True), 6)
    run = Run.open(tmp_path / "run")
    together = [
        (step, rank, name)
        for step in (4, 5)
        for rank in (0, 1)
        for name in loops[rank].ids(step, step)
    ]
    found = seen(run, window=2)
    assert list(found.rows.select("step", "rank", "sample_id").iter_rows()) == together
    assert found.n_batches == 4
    twice = Counter(name for _, _, name in together)
    assert dict(found.samples.select("sample_id", "times").iter_rows()) == {
        name: n for name, n in twice.most_common(5) if n > 1
    }
    own = seen(run, window=2, rank=1)
    assert own.rows["sample_id"].to_list() == loops[1].ids(4, 5)
    order = replay_order(run, rank=1)
    assert order.rows["sample_id"].to_list() == loops[1].ids(0, 5)
    assert set(order.rows["rank"]) == {1}


# -- the order of a re-run ------------------------------------------------------------------------


def test_replaying_the_order_gives_the_same_batches_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(11)
    data = torch.utils.data.TensorDataset(torch.randn(50, 7), torch.randint(0, 9, (50,)))
    optimizer = torch.optim.SGD(torch.nn.Linear(7, 1).parameters(), lr=1e-9)
    audited = AuditedSampler(
        DataLoader(data, batch_size=8, shuffle=True), run=tmp_path / "run", optimizer=optimizer
    )
    log = []
    for _ in range(2):  # epochs of 7 batches, the last of them of 2 samples
        for batch in audited:
            optimizer.step()
            log.append([one.clone() for one in batch])
    audited.close()
    order = replay_order(Run.open(tmp_path / "run")).rows
    batches = order.group_by("attempt", "batch", maintain_order=True).agg("index")["index"]
    again = list(DataLoader(data, batch_sampler=batches.to_list()))
    assert len(again) == len(log) == 14
    for left, right in zip(again, log, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_part_of_the_order_is_cut_by_steps(loop: Loop) -> None:
    run = Run.open(loop.run)
    order = replay_order(run, first=7, last=9).rows
    assert order["sample_id"].to_list() == loop.ids(7, 9)
    assert order["step"].unique().sort().to_list() == [7, 8, 9]
    assert replay_order(run, last=9).rows["sample_id"].to_list() == loop.ids(0, 9)
    assert replay_order(run, first=35).rows["sample_id"].to_list() == loop.ids(35, 39)


def test_order_has_the_columns_of_the_schema(loop: Loop) -> None:
    rows = replay_order(Run.open(loop.run)).rows
    assert dict(rows.schema) == dict(polars_schema(schema.REPLAY_ORDER))


def test_datasets_of_one_run_are_told_apart(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1e-9)
    loaders = [
        AuditedSampler(
            DataLoader(Texts(), batch_size=4, shuffle=True),
            run=tmp_path / "run",
            optimizer=optimizer,
        )
        for _ in range(2)
    ]
    log = []
    for batches in zip(*loaders, strict=True):
        for number, batch in enumerate(batches):
            log += [(number, index) for index in batch["index"].tolist()]
        optimizer.step()
    loaders[0].close()
    rows = replay_order(Run.open(tmp_path / "run")).rows
    assert list(rows.select("dataset", "index").iter_rows()) == log


def test_samples_told_by_hash_have_no_index(tmp_path: Path) -> None:
    batches = [{"id": [f"x-{4 * n + i}" for i in range(4)]} for n in range(5)]
    audited = AuditedSampler(batches, run=tmp_path / "run")
    assert len(list(audited)) == 5
    audited.close()
    rows = replay_order(Run.open(tmp_path / "run"), states=["delivered"]).rows
    assert rows["sample_id"].to_list() == [f"x-{i}" for i in range(20)]
    assert rows["index"].null_count() == rows["dataset"].null_count() == 20
    assert rows["key"].n_unique() == 20


# -- made runs: a plain reading of their batches is the truth -------------------------------------


@dataclass(frozen=True)
class Made:
    """A batch of a made run."""

    rank: int
    attempt: int
    batch: int
    state: str
    step: int | None
    keys: tuple[int, ...]


class MadeRun(Run):
    """A run of which the facts are given."""

    def __init__(self, path: Path, batches: Sequence[Made]) -> None:
        super().__init__(path, {"run_id": "made", "world_size": 1})
        rows = [
            {**{n: getattr(b, n) for n in ("rank", "attempt", "batch", "state", "step")}}
            | {"position": position, "part": 0, "key": key}
            for b in batches
            for position, key in enumerate(b.keys)
        ]
        self.made = {
            "exposures": _table(rows, schema.EXPOSURES),
            "samples": _table([], schema.SAMPLES),
            "signals": _table([], schema.SIGNALS),
        }

    def first_steps(self) -> list[tuple[int, int, int]]:
        trained = self.made["exposures"].filter(pl.col("state") == "trained")
        first = trained.group_by("rank", "attempt").agg(pl.min("step"))
        return [*first.select("rank", "attempt", "step").iter_rows()]

    def _facts(self, table: str) -> pl.LazyFrame:
        return self.made[table].lazy()


def _table(rows: list[dict[str, Any]], columns: Mapping[str, str]) -> pl.DataFrame:
    types = polars_schema(columns)
    return pl.DataFrame([{name: row.get(name) for name in types} for row in rows], schema=types)


def made_at_random(seed: int) -> list[Made]:
    """Ranks and attempts that restart at earlier steps, lose batches, skip and discard some."""
    rng = np.random.default_rng(seed)
    batches = []
    for rank in range(int(rng.integers(1, 4))):
        step = 0
        for attempt in range(int(rng.integers(1, 4))):
            step = int(rng.integers(0, step + 1))
            number = 0
            for _ in range(int(rng.integers(1, 12))):
                number += int(rng.random() < 0.1)
                keys = tuple(int(key) for key in rng.integers(0, 40, size=rng.integers(1, 4)))
                state = str(rng.choice(["trained"] * 6 + ["discarded", "skipped", "delivered"]))
                closed = step if state in ("trained", "discarded") else None
                batches.append(Made(rank, attempt, number, state, closed, keys))
                step += state == "trained" and rng.random() < 0.7  # else it accumulates
                number += 1
            step += 1
    return batches


def place_of(batch: Made, batches: Sequence[Made]) -> int:
    """The step that a batch counts with, as the documents put it."""
    own = [b for b in batches if (b.rank, b.attempt) == (batch.rank, batch.attempt)]
    after = [b.step for b in own if b.batch >= batch.batch and b.step is not None]
    before = [b.step for b in own if b.batch < batch.batch and b.step is not None]
    if after or before:
        return after[0] if after else before[-1]
    rank = [b for b in batches if b.rank == batch.rank and b.step is not None]
    earlier = [b.step for b in rank if b.attempt < batch.attempt]
    later = [b.step for b in rank if b.attempt > batch.attempt]
    if earlier or later:
        return earlier[-1] if earlier else later[0]
    return min(b.step for b in batches if b.step is not None)


def is_rolled_back(batch: Made, batches: Sequence[Made]) -> bool:
    return any(
        b.rank == batch.rank
        and b.attempt > batch.attempt
        and b.state == "trained"
        and b.step <= place_of(batch, batches)
        for b in batches
    )


@pytest.mark.parametrize("seed", range(60))
def test_made_runs_are_read_as_a_plain_reading_has_it(seed: int, tmp_path: Path) -> None:
    batches = made_at_random(seed)
    if all(b.step is None for b in batches):
        pytest.skip("no step in it")
    run = MadeRun(tmp_path, batches)
    rng = np.random.default_rng(seed)
    kept = [b for b in batches if not is_rolled_back(b, batches)]
    order = sorted(kept, key=lambda b: (place_of(b, batches), b.attempt, b.rank, b.batch))

    last = max(place_of(b, batches) for b in kept)
    first = int(rng.integers(0, last + 1))
    inside = [b for b in order if first <= place_of(b, batches) <= last]
    if not inside:
        pytest.skip("nothing in the window")
    found = seen(run, window=last - first + 1)
    listed = [(b.rank, b.attempt, b.batch, b.state, key) for b in inside for key in b.keys]
    columns = ["rank", "attempt", "batch", "state", "key"]
    assert list(found.rows.select(columns).iter_rows()) == listed
    assert found.states == dict(Counter(state for *_, state, _ in listed))
    assert found.n_batches == len(inside)

    trained = [
        (b.step, b.rank, b.batch, key) for b in order if b.state == "trained" for key in b.keys
    ]
    if trained:
        rows = replay_order(run).rows
        assert list(rows.select("step", "rank", "batch", "key").iter_rows()) == trained
        assert rows["index"].to_list() == rows["key"].to_list()
        effective = run.scan("exposures").filter(pl.col("state") == "trained").collect()
        assert sorted(effective.select("step", "rank", "batch", "key").iter_rows()) == sorted(
            trained
        )


def test_missing_batches_are_counted_where_they_were() -> None:
    numbers = [0, 1, 4, 5, 6, 8]
    made = [Made(0, 0, number, "trained", step, (1,)) for step, number in enumerate(numbers)]
    run = MadeRun(Path("made"), made)
    assert replay_order(run).n_missing == 3
    assert seen(run).n_missing == 3
    assert seen(run, step=1, window=2).n_missing == 0
    assert seen(run, step=4, window=3).n_missing == 2
    first_lost = MadeRun(Path("made"), [Made(0, 0, 1, "trained", 0, (1,))])
    assert replay_order(first_lost).n_missing == 1


def test_keys_are_split_into_dataset_and_index() -> None:
    shift = 1 << schema.KEY_SHIFT
    keys = (0, 5, shift - 1 - shift, shift + 7, shift - 2, 2 * shift)
    rows = replay_order(MadeRun(Path("made"), [Made(0, 0, 0, "trained", 0, keys)])).rows
    expected = [(0, 0), (0, 5), (0, -1), (1, 7), (1, -2), (2, 0)]
    assert list(rows.select("dataset", "index").iter_rows()) == expected


@pytest.mark.parametrize(
    "keys",
    [(2**62 + 5,), (3, 2**62), (2**63 - 1, 1), (7 << 48,)],
    ids=["a hash", "one of both", "the largest", "no dataset 0"],
)
def test_keys_that_are_not_all_indices_have_none(keys: tuple[int, ...]) -> None:
    rows = replay_order(MadeRun(Path("made"), [Made(0, 0, 0, "trained", 0, keys)])).rows
    assert rows["index"].to_list() == rows["dataset"].to_list() == [None] * len(keys)


def test_equal_ids_of_two_shards_are_two_samples() -> None:
    run = MadeRun(Path("made"), [Made(0, 0, n, "trained", n, (1, 2)) for n in range(3)])
    samples = [
        {"attempt": 0, "rank": 0, "key": key, "sample_id": "0", "shard": f"{key}.jsonl", "row": 0}
        for key in (1, 2)
    ]
    run.made["samples"] = _table(samples, schema.SAMPLES)
    found = seen(run)
    assert sorted(found.samples["shard"]) == ["1.jsonl", "2.jsonl"]
    assert found.samples["times"].to_list() == [3, 3]
    assert found.contents["times"].to_list() == [3, 3]


def test_unscored_rows_are_counted_and_no_share_is_made_up() -> None:
    run = MadeRun(Path("made"), [Made(0, 0, 0, "trained", 0, (1, 2, 3))])
    total = seen(run).total.row(0, named=True)
    assert (total["n_scored"], total["n_unscored"]) == (0, 3)
    assert total["duplicate_share"] is None
    assert total["repetition"] is None
