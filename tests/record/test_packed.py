"""Rows that pack several documents: each is an exposure of its own."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from sources import (
    assert_nothing_changes,
    new_optimizer,
    recorded,
    run_pipeline,
    take_step,
)
from torch.utils.data import DataLoader, Dataset

from auditor import AuditedSampler, Located, Run

T = 64
N_ROWS = 24


def document(number: int) -> np.ndarray:
    """Tokens of a document; its length and content by its number alone."""
    rng = np.random.default_rng(number)
    return rng.integers(1, 50_000, int(rng.integers(8, 40)))


class PackedRows(Dataset):
    """Rows of T tokens that pack whole documents, padded with zeros; every fifth is padding alone.

    A row says where its documents begin: ``bounds`` of (document, begin, end), padded with -1.
    """

    def __len__(self) -> int:
        return N_ROWS

    def __getitem__(self, row: int) -> dict[str, Any]:
        ids = torch.zeros(T, dtype=torch.int64)
        bounds = torch.full((8, 3), -1)
        begin, n = 0, 0
        for number in range(8 * row, 8 * row + 8):
            tokens = document(number)
            if row % 5 == 4 or begin + len(tokens) > T:
                break
            ids[begin : begin + len(tokens)] = torch.from_numpy(tokens)
            bounds[n] = torch.tensor([number, begin, begin + len(tokens)])
            begin, n = begin + len(tokens), n + 1
        return {"input_ids": ids, "bounds": bounds}


def documents_in(index: int, sample: dict[str, Any]) -> list[Located]:
    return [
        Located(
            sample_id=f"doc-{number}",
            source="ab"[number % 2],
            shard="packed.bin",
            row=number,
            content=sample["input_ids"][begin:end],
        )
        for number, begin, end in sample["bounds"].tolist()
        if number >= 0
    ]


def received(batch: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What the loop got: position, identity and part of every document."""
    log = []
    for position, bounds in enumerate(batch["bounds"].tolist()):
        held = [one for one in bounds if one[0] >= 0]
        log += [
            (position, f"doc-{n}", "ab"[n % 2], "packed.bin", n, end - begin, part)
            for part, (n, begin, end) in enumerate(held)
        ]
    return log


@pytest.mark.parametrize("workers", [0, 2])
def test_every_document_of_a_row_is_an_exposure_with_position_and_part(
    workers: int, tmp_path: Path
) -> None:
    optimizer = new_optimizer()
    loader = DataLoader(PackedRows(), batch_size=5, shuffle=True, num_workers=workers)
    audited = AuditedSampler(
        loader, run=tmp_path / "run", optimizer=optimizer, locator=documents_in
    )
    log = []
    for epoch in range(2):
        for step, batch in enumerate(audited, epoch * len(loader)):
            take_step(optimizer)
            log += [(step, *one) for one in received(batch)]
    audited.close()
    assert recorded(tmp_path / "run", "part") == log
    assert {part for *_, part in log} >= {0, 1, 2}


@pytest.mark.parametrize("workers", [0, 2])
def test_packed_batches_stay_the_same(workers: int, tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(PackedRows(), batch_size=5, shuffle=True, num_workers=workers)

    assert_nothing_changes(make, tmp_path / "run", locator=documents_in)


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_of_one_document_and_of_none_keep_their_positions(
    workers: int, tmp_path: Path
) -> None:
    """As many documents as rows, and still not one in each."""
    held = {0: [1, 2], 1: [], 2: [3], 3: []}
    rows = [torch.full((4,), row) for row in held]

    def locator(index: int, sample: torch.Tensor) -> list[Located]:
        return [Located(sample_id=f"doc-{n}", n_tokens=n) for n in held[int(sample[0])]]

    audited = AuditedSampler(
        DataLoader(rows, batch_size=4, num_workers=workers),
        run=tmp_path / "run",
        locator=locator,
    )
    list(audited)
    audited.close()
    table = Run.open(tmp_path / "run").scan("exposures").collect()
    assert table.select("position", "part", "sample_id", "n_tokens").rows() == [
        (0, 0, "doc-1", 1),
        (0, 1, "doc-2", 2),
        (2, 0, "doc-3", 3),
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_pieces_of_one_document_count_the_tokens_of_each_piece(
    workers: int, tmp_path: Path
) -> None:
    """A document longer than a row goes on in the next: its name stays, what was seen differs."""
    tokens = torch.arange(100)
    pieces = [tokens[:40], tokens[40:80], tokens[80:]]

    def locator(index: int, sample: torch.Tensor) -> list[Located]:
        return [Located(sample_id="long", content=sample)]

    audited = AuditedSampler(
        DataLoader(pieces, batch_size=1, num_workers=workers), run=tmp_path / "run", locator=locator
    )
    list(audited)
    audited.close()
    table = Run.open(tmp_path / "run").scan("exposures").collect()
    assert table["n_tokens"].to_list() == [40, 40, 20]
    assert table["key"].n_unique() == 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("with_locator", [False, True])
def test_rows_of_several_types_are_one_exposure_each(
    with_locator: bool, workers: int, tmp_path: Path
) -> None:
    """Nothing is packed here, and nothing may be lost because a batch is not of one kind."""
    rows: list[Any] = [
        {"input_ids": torch.arange(T) + i} if i % 2 else torch.arange(T) + i for i in range(20)
    ]
    options = {"locator": lambda index, sample: Located(source="web")} if with_locator else {}
    audited = AuditedSampler(
        DataLoader(rows, batch_size=5, collate_fn=list, num_workers=workers),
        run=tmp_path / "run",
        **options,
    )
    list(audited)
    audited.close()
    run = Run.open(tmp_path / "run")
    assert run.gaps() == []
    table = run.scan("exposures").collect()
    assert table["key"].to_list() == list(range(20))
    assert table["position"].to_list() == [0, 1, 2, 3, 4] * 4
    assert set(table["n_tokens"]) == {T}
    assert set(table["source"]) == ({"web"} if with_locator else {None})


class NearDuplicates(Dataset):
    """Two documents to a row, one of them new; the other, in rows 3 and 11, nearly the same."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, row: int) -> dict[str, Any]:
        rng = np.random.default_rng(row)
        new = rng.integers(1, 50_000, 200)
        other = rng.integers(1, 50_000, 100)
        if row in (3, 11):
            other = np.random.default_rng(77).integers(1, 50_000, 100)
            if row == 11:
                other[-1] += 1  # of 96 shingles one
        documents = [other, new] if row == 11 else [new, other]
        return {
            "input_ids": torch.from_numpy(np.concatenate(documents)),
            "length": len(documents[0]),
        }


def both(index: int, sample: dict[str, Any]) -> list[Located]:
    ids, length = sample["input_ids"], sample["length"]
    return [
        Located(sample_id=f"{index}:0", content=ids[:length]),
        Located(sample_id=f"{index}:1", content=ids[length:]),
    ]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [2, 16], ids=["in the window", "in the batch"])
def test_near_duplicates_are_found_wherever_in_a_row_they_are_packed(
    batch_size: int, workers: int, tmp_path: Path
) -> None:
    audited = AuditedSampler(
        DataLoader(NearDuplicates(), batch_size=batch_size, num_workers=workers),
        run=tmp_path / "run",
        locator=both,
    )
    list(audited)
    audited.close()
    table = Run.open(tmp_path / "run").scan("exposures").collect()
    assert table["sample_id"].to_list() == [f"{i}:{part}" for i in range(16) for part in (0, 1)]
    found = table.filter(pl.col("duplication") >= 0.8)
    assert found["sample_id"].to_list() == ["11:0"]
    of = table.filter(pl.col("key") == found["dup_of"].item())
    assert of["sample_id"].to_list() == ["3:1"]
    assert found["dup_run"].item() == 1


def test_rows_told_whole_hide_what_their_documents_repeat(tmp_path: Path) -> None:
    """The control of the test before: without a locator the same rows are like no other."""
    audited = AuditedSampler(DataLoader(NearDuplicates(), batch_size=2), run=tmp_path / "run")
    list(audited)
    audited.close()
    table = Run.open(tmp_path / "run").scan("exposures").collect()
    assert (table["duplication"] < 0.8).all()


def test_tokens_of_a_source_are_counted_by_what_was_seen(tmp_path: Path) -> None:
    audited = AuditedSampler(
        DataLoader(PackedRows(), batch_size=5), run=tmp_path / "run", locator=documents_in
    )
    expected: collections.Counter[str] = collections.Counter()
    for batch in audited:
        for _, _, source, _, _, n_tokens, _ in received(batch):
            expected[source] += n_tokens
    audited.close()
    table = Run.open(tmp_path / "run").scan("exposures").collect()
    assert dict(table.group_by("source").agg(pl.col("n_tokens").sum()).iter_rows()) == expected


def test_example_of_packed_rows_runs(tmp_path: Path) -> None:
    run = run_pipeline("packed_rows.py", tmp_path, "--workers", "2")
    trained = run.scan("exposures").collect()
    assert trained["part"].max() >= 3
    assert trained["source"].n_unique() == 4
