"""Hugging Face datasets: an index is a position, columns may be hidden, streams are shuffled."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from sources import (
    assert_nothing_changes,
    assert_recorded_as_received,
    new_optimizer,
    numbers,
    recorded,
    run_pipeline,
    train,
)
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, RandomSampler, Subset

from auditor import AuditedSampler, Located, Run
from auditor.record.datasets import TableRow

N = 60
T = 12


@pytest.fixture(autouse=True)
def no_progress_bars() -> None:
    datasets.disable_progress_bars()


def tokens_of(number: int) -> list[int]:
    """Begin with the document's number, by which the loop's own log tells it."""
    return [number, *range(1000 + number, 1000 + number + T - 1)]


def table(n: int = N, first: int = 0, source: str | None = None, **more: Any) -> datasets.Dataset:
    documents = range(first, first + n)
    return datasets.Dataset.from_dict(
        {
            "input_ids": [tokens_of(i) for i in documents],
            "id": [f"doc-{i}" for i in documents],
            "source": [source or "ab"[i % 2] for i in documents],
            "text": [f"text of {i}" for i in documents],
            **{name: [value(i) for i in documents] for name, value in more.items()},
        }
    )


def rows_of(batch: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Documents are numbered by their rows in the table."""
    return [(f"doc-{i}", "ab"[i % 2], None, i, T) for i in numbers(batch["input_ids"])]


MAPPED: dict[str, Callable[[], Any]] = {
    "as it is": lambda: table(),
    "shuffled": lambda: table().shuffle(seed=3),
    "filtered": lambda: table().filter(lambda row: row["input_ids"][0] % 3 > 0),
    "selected": lambda: table().select([5, 9, 9, 2, 40, 1, 33, 17, 8]),
    "all of them": lambda: (
        table().shuffle(seed=1).filter(lambda row: row["input_ids"][0] > 9).select(range(5, 40))
    ),
    "split": lambda: table().train_test_split(test_size=0.5, seed=0)["train"],
    "a subset": lambda: Subset(table().shuffle(seed=3), [7, 1, 30, 59]),
}
HIDDEN = {
    "shown": lambda data: formatted(data, columns=["input_ids", "id", "source"]),
    "hidden": lambda data: formatted(data, columns=["input_ids"]),
}


def formatted(data: Any, **options: Any) -> Any:
    inner = data.dataset if isinstance(data, Subset) else data
    inner.set_format("torch", **options)
    return data


@pytest.mark.parametrize("columns", HIDDEN)
@pytest.mark.parametrize("name", MAPPED)
def test_positions_become_rows_of_the_table_and_hidden_ids_are_known(
    name: str, columns: str, tmp_path: Path
) -> None:
    data = HIDDEN[columns](MAPPED[name]())
    loader = DataLoader(data, batch_size=7, shuffle=True)
    assert_recorded_as_received(loader, tmp_path / "run", rows_of, epochs=2)


@pytest.mark.parametrize("workers", [1, 2])
def test_hidden_ids_are_known_in_workers(workers: int, tmp_path: Path) -> None:
    data = HIDDEN["hidden"](table().shuffle(seed=3))
    loader = DataLoader(data, batch_size=7, shuffle=True, num_workers=workers)
    assert_recorded_as_received(loader, tmp_path / "run", rows_of, epochs=2)


def test_hidden_ids_are_known_in_spawned_workers(tmp_path: Path) -> None:
    loader = DataLoader(
        HIDDEN["hidden"](table().shuffle(seed=3)),
        batch_size=20,
        num_workers=1,
        multiprocessing_context=multiprocessing.get_context("spawn"),
    )
    assert_recorded_as_received(loader, tmp_path / "run", rows_of)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("columns", HIDDEN)
def test_batches_and_random_state_stay_the_same(columns: str, workers: int, tmp_path: Path) -> None:
    def make() -> Any:
        data = HIDDEN[columns](table().shuffle(seed=3))
        return DataLoader(data, batch_size=7, shuffle=True, num_workers=workers)

    batches = assert_nothing_changes(make, tmp_path / "run")
    assert ("id" in batches[0][0]) == (columns == "shown")


def test_a_contiguous_selection_cuts_the_table_so_its_rows_count_from_there(
    tmp_path: Path,
) -> None:
    data = HIDDEN["hidden"](table().select(range(20, 50)).shuffle(seed=3))

    def truth(batch: dict[str, Any]) -> list[tuple[Any, ...]]:
        rows = numbers(batch["input_ids"])
        assert [data.data.column("id")[i - 20].as_py() for i in rows] == [f"doc-{i}" for i in rows]
        return [(f"doc-{i}", "ab"[i % 2], None, i - 20, T) for i in rows]

    assert_recorded_as_received(DataLoader(data, batch_size=7), tmp_path / "run", truth)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_of_whole_batches_is_told_row_by_row(workers: int, tmp_path: Path) -> None:
    """``batch_size=None`` with a batch sampler: the dataset is indexed with a list."""
    data = HIDDEN["hidden"](table().shuffle(seed=3))
    loader = DataLoader(
        data,
        batch_size=None,
        sampler=BatchSampler(RandomSampler(data), batch_size=7, drop_last=False),
        num_workers=workers,
    )
    assert_recorded_as_received(loader, tmp_path / "run", rows_of, epochs=2)


def test_a_transform_hides_columns_and_ids_are_known_all_the_same(tmp_path: Path) -> None:
    def encode(batch: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": [torch.tensor(ids) for ids in batch["input_ids"]]}

    loader = DataLoader(table().shuffle(seed=3).with_transform(encode), batch_size=7)
    assert_recorded_as_received(loader, tmp_path / "run", rows_of)


@pytest.mark.parametrize("workers", [0, 1])
def test_shard_and_row_columns_name_the_row_though_hidden(workers: int, tmp_path: Path) -> None:
    data = table(shard=lambda i: f"{i // 10}.jsonl", row=lambda i: i % 10).shuffle(seed=2)
    data.set_format("torch", columns=["input_ids"])

    def truth(batch: dict[str, Any]) -> list[tuple[Any, ...]]:
        return [
            (f"doc-{i}", "ab"[i % 2], f"{i // 10}.jsonl", i % 10, T)
            for i in numbers(batch["input_ids"])
        ]

    loader = DataLoader(data, batch_size=7, num_workers=workers)
    assert_recorded_as_received(loader, tmp_path / "run", truth)


def test_a_table_row_is_no_row_of_a_shard(tmp_path: Path) -> None:
    """Where the shard is known and the row in it is not, none is claimed."""
    data = table(shard=lambda i: f"{i // 10}.jsonl")
    loader = DataLoader(formatted(data, columns=["input_ids", "shard"]), batch_size=7)
    found = assert_recorded_as_received(
        loader,
        tmp_path / "run",
        lambda batch: [
            (f"doc-{i}", "ab"[i % 2], f"{i // 10}.jsonl", None, T)
            for i in numbers(batch["input_ids"])
        ],
    )
    assert found.height == N


def test_meta_and_requested_columns_are_fetched_though_hidden(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict(
        {
            "input_ids": [tokens_of(i) for i in range(8)],
            "meta": [{"source": "ab"[i % 2], "id": f"m-{i}"} for i in range(8)],
            "url": [f"http://{i}" for i in range(8)],
        }
    ).select([6, 1, 3])
    data.set_format("torch", columns=["input_ids"])
    found = assert_recorded_as_received(
        DataLoader(data, batch_size=2),
        tmp_path / "run",
        lambda batch: [(f"m-{i}", "ab"[i % 2], None, i, T) for i in numbers(batch["input_ids"])],
        columns=["url"],
    )
    assert found["columns"].to_list() == [f'{{"url": "http://{i}"}}' for i in (6, 1, 3)]


def test_without_ids_the_row_of_the_table_is_the_name_and_not_the_position(
    tmp_path: Path,
) -> None:
    """Two shuffles of one table, as in two attempts: a sample keeps its name."""
    data = table().remove_columns(["id", "source", "text"]).with_format("torch")
    for attempt in range(2):
        assert_recorded_as_received(
            DataLoader(data.shuffle(seed=attempt), batch_size=7),
            tmp_path / f"run-{attempt}",
            lambda batch: [(str(i), None, None, i, T) for i in numbers(batch["input_ids"])],
        )


def test_a_locator_sees_the_position_and_keeps_what_the_table_knows(tmp_path: Path) -> None:
    data = HIDDEN["hidden"](table().shuffle(seed=3))
    positions = {int(ids[0]): position for position, ids in enumerate(data["input_ids"])}
    assert_recorded_as_received(
        DataLoader(data, batch_size=7),
        tmp_path / "run",
        lambda batch: [
            (f"doc-{i}", f"position {positions[i]}", None, i, T)
            for i in numbers(batch["input_ids"])
        ],
        locator=lambda index, sample: Located(source=f"position {index}"),
    )


def test_a_batch_is_skipped_by_an_id_that_is_hidden(tmp_path: Path) -> None:
    data = table()
    data.set_format("torch", columns=["input_ids"])
    loader = AuditedSampler(DataLoader(data, batch_size=10), run=tmp_path / "run", skip=["doc-25"])
    assert [numbers(batch["input_ids"])[0] for batch in loader] == [0, 10, 30, 40, 50]
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_concatenated_and_interleaved_tables_keep_source_and_row(
    workers: int, tmp_path: Path
) -> None:
    parts = [table(30, 0, "web").shuffle(seed=1), table(20, 30, "books"), table(10, 50, "code")]
    sources = ["web"] * 30 + ["books"] * 20 + ["code"] * 10

    def truth(batch: dict[str, Any]) -> list[tuple[Any, ...]]:
        return [(f"doc-{i}", sources[i], None, i, T) for i in numbers(batch["input_ids"])]

    mixes = {
        "concatenated": datasets.concatenate_datasets(parts),
        "interleaved": datasets.interleave_datasets(
            parts, probabilities=[0.5, 0.3, 0.2], seed=3, stopping_strategy="all_exhausted"
        ),
    }
    for name, mix in mixes.items():
        mix.set_format("torch", columns=["input_ids"])
        loader = DataLoader(mix, batch_size=7, shuffle=True, num_workers=workers)
        found = assert_recorded_as_received(loader, tmp_path / name, truth)
        assert set(found["source"]) == {"web", "books", "code"}


def test_rows_of_joined_datasets_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """Row 5 of two tables: the ids tell them, the bare number would not."""
    parts = [table(20, 0, "web").shuffle(seed=1), table(20, 20, "books").shuffle(seed=1)]
    for part in parts:
        part.set_format("torch", columns=["input_ids"])
    assert_recorded_as_received(
        DataLoader(ConcatDataset(parts), batch_size=7, shuffle=True),
        tmp_path / "run",
        lambda batch: [
            (f"doc-{i}", "web" if i < 20 else "books", None, None, T)
            for i in numbers(batch["input_ids"])
        ],
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_the_table_is_asked_for_new_samples_alone_and_not_on_the_training_thread(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    original = TableRow.get
    training = threading.get_ident()

    def get(self: TableRow, name: str) -> Any:
        if name == "id":
            asked.append((self.number, threading.get_ident()))
        return original(self, name)

    monkeypatch.setattr(TableRow, "get", get)
    loader = AuditedSampler(
        DataLoader(HIDDEN["hidden"](table()), batch_size=7, num_workers=workers),
        run=tmp_path / "run",
    )
    for _ in range(3):
        list(loader)
    loader.close()
    assert sorted(number for number, _ in asked) == ([] if workers else list(range(N)))
    assert training not in {thread for _, thread in asked}
    assert (
        Run.open(tmp_path / "run").scan("exposures").collect()["sample_id"].to_list()
        == [f"doc-{i}" for i in range(N)] * 3
    )


# -- streams -----------------------------------------------------------------------------------


def streamed(batch: dict[str, Any]) -> list[tuple[Any, ...]]:
    """A stream has no rows: its samples are told by their columns."""
    return [(f"doc-{i}", "ab"[i % 2], None, None, T) for i in numbers(batch["input_ids"])]


def stream(n: int = N, first: int = 0) -> Any:
    data = table(n, first).remove_columns(["text"])
    return data.to_iterable_dataset(num_shards=4).with_format("torch")


def interleaved() -> Any:
    parts = [
        stream(30, 0),
        stream(30, 30).shuffle(seed=1, buffer_size=9),
    ]
    mixed = datasets.interleave_datasets(parts, probabilities=[0.7, 0.3], seed=4)
    return mixed.with_format("torch")


STREAMS = {
    "in order": stream,
    "shuffled": lambda: stream().shuffle(seed=5, buffer_size=16),
    "mapped": lambda: stream().map(lambda row, index: {"index": index}, with_indices=True),
    "interleaved": interleaved,
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", STREAMS)
def test_streams_are_recorded_as_received_over_epochs(
    name: str, workers: int, tmp_path: Path
) -> None:
    loader = DataLoader(STREAMS[name](), batch_size=7, num_workers=workers)
    assert_recorded_as_received(loader, tmp_path / "run", streamed, epochs=2)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["shuffled", "interleaved"])
def test_streams_stay_the_same(name: str, workers: int, tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(STREAMS[name](), batch_size=7, num_workers=workers)

    epochs = assert_nothing_changes(make, tmp_path / "run")
    first, second = ([numbers(b["input_ids"]) for b in epoch] for epoch in epochs)
    if name == "shuffled":
        assert first != second  # set_epoch reached the stream through the wrapper


def test_a_stream_that_batches_itself_is_told_row_by_row(tmp_path: Path) -> None:
    loader = DataLoader(stream().batch(6), batch_size=None)
    assert_recorded_as_received(loader, tmp_path / "run", streamed)


def test_a_stream_without_ids_is_told_by_content(tmp_path: Path) -> None:
    data = stream().select_columns(["input_ids"])
    audited = AuditedSampler(DataLoader(data, batch_size=7), run=tmp_path / "run")
    for _ in range(2):
        list(audited)
    audited.close()
    keys = Run.open(tmp_path / "run").scan("exposures").collect()["key"].to_list()
    assert len(set(keys)) == N
    assert keys[:N] == keys[N:]


def test_a_resumed_stream_goes_on_where_it_was(tmp_path: Path) -> None:
    """The stream's own state, taken through the wrapper in the middle of an epoch, three times."""

    def attempt(state: Any, first_step: int, n: int | None) -> tuple[list[Any], Any]:
        optimizer = new_optimizer()
        data = stream().shuffle(seed=5, buffer_size=8)
        audited = AuditedSampler(
            DataLoader(data, batch_size=4), run=tmp_path / "run", optimizer=optimizer
        )
        if state is not None:
            audited.dataset.load_state_dict(state)
        log = train(audited, optimizer, streamed, n_batches=n, first_step=first_step)
        state = audited.dataset.state_dict()
        bare = data.state_dict()
        audited.close()
        assert state == bare
        return log, state

    log, state = attempt(None, 0, 3)
    for n in (3, 3, None):
        more, state = attempt(state, log[-1][0] + 1, n)
        log += more
    assert recorded(tmp_path / "run") == log
    attempts = Run.open(tmp_path / "run").scan("exposures").collect()["attempt"]
    assert set(attempts) == {0, 1, 2, 3}


@pytest.mark.parametrize("batch_size", [T, 7])
def test_lists_of_token_ids_are_collated_the_other_way_round(
    batch_size: int, tmp_path: Path
) -> None:
    """Without a format a column is T tensors [B]: with B = T it looks like one of samples."""
    data = table().remove_columns(["text", "id"])
    assert_recorded_as_received(
        DataLoader(data, batch_size=batch_size),
        tmp_path / "run",
        lambda batch: [(str(i), "ab"[i % 2], None, i, T) for i in batch["input_ids"][0].tolist()],
    )
    previews = Run.open(tmp_path / "run").scan("samples").collect()["preview"].drop_nulls()
    assert set(previews) <= {" ".join(map(str, tokens_of(i))) for i in range(N)}


@pytest.mark.parametrize("workers", [0, 1])
def test_meta_is_read_from_the_samples_that_show_it(workers: int, tmp_path: Path) -> None:
    rows = [
        {"input_ids": torch.tensor(tokens_of(i)), "meta": {"id": f"m-{i}", "source": "ab"[i % 2]}}
        for i in range(20)
    ]
    assert_recorded_as_received(
        DataLoader(rows, batch_size=7, num_workers=workers),
        tmp_path / "run",
        lambda batch: [(f"m-{i}", "ab"[i % 2], None, None, T) for i in numbers(batch["input_ids"])],
    )


def test_example_of_streams_runs(tmp_path: Path) -> None:
    run = run_pipeline("hf_datasets_streaming.py", tmp_path, "--workers", "1")
    trained = run.scan("exposures").collect()
    assert trained["source"].unique().sort().to_list() == [
        "novels", "peps", "speeches", "statutes",
    ]  # fmt: skip
    assert not trained["sample_id"].str.contains(r"^\d+$").any()
    assert len(run.shards) == 4
