"""Random windows of one token file: which documents the model saw, and how much of each."""

from __future__ import annotations

import collections
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import new_optimizer, random_state, run_pipeline, seed, take_step
from torch.utils.data import DataLoader, Dataset

from auditor import AuditedSampler, DocumentIndex, Run
from auditor.errors import IdentityError
from auditor.record import documents as documents_module

T = 16
B = 4


def token_file(path: Path, n_documents: int = 30, eot: int = 0) -> np.memmap:
    """Documents of 0 to 39 tokens, each ended by its EOT; nobody ends the last."""
    rng = np.random.default_rng(0)
    pieces = []
    for length in rng.integers(0, 40, n_documents):
        pieces += [rng.integers(1, 1000, length), [eot]]
    np.concatenate(pieces[:-1]).astype(np.uint16).tofile(path)
    return np.memmap(path, dtype=np.uint16, mode="r")


def document_of_each(tokens: Any, eot: int = 0, eot_begins: bool = False) -> list[int]:
    """Brute force: of every token the number of its document."""
    numbers, number = [], 0
    for position, token in enumerate(tokens):
        if eot_begins and token == eot and position > 0:
            number += 1
        numbers.append(number)
        if not eot_begins and token == eot:
            number += 1
    return numbers


def batch_of(tokens: np.memmap, starts: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.from_numpy(tokens[i : i + T].astype(np.int64)) for i in starts])


def seen(run: Path) -> dict[Any, int]:
    """Tokens per step, row of the batch and document, as recorded."""
    opened = Run.open(run)
    assert opened.gaps() == []
    table = opened.scan("exposures", view="all").collect()
    assert table["state"].unique().to_list() == ["trained"]
    assert (table["sample_id"] == "train.bin:doc-" + table["row"].cast(pl.String)).all()
    assert set(table["shard"]) == {"train.bin"}
    assert set(table["source"]) == {"web"}
    rows = table.select("step", "position", "row", "n_tokens").rows()
    assert len({row[:3] for row in rows}) == len(rows)
    parts = table.group_by("step", "position", maintain_order=True).agg("part", "row")
    for part, row in parts.select("part", "row").iter_rows():
        assert part == list(range(len(part)))
        assert row == sorted(row)
    return {row[:3]: row[3] for row in rows}


def test_every_window_is_recorded_as_its_documents_with_their_tokens(tmp_path: Path) -> None:
    tokens = token_file(tmp_path / "train.bin")
    index = DocumentIndex.from_eot(tokens, eot=0, window=T, source="web", shard="train.bin")
    truth = document_of_each(tokens)
    assert len(index) == truth[-1] + 1 == 30
    optimizer = new_optimizer()
    audited = AuditedSampler(run=tmp_path / "run", optimizer=optimizer, locator=index.locator)
    torch.manual_seed(0)
    log: collections.Counter[Any] = collections.Counter()
    contents: dict[Any, list[int]] = collections.defaultdict(list)
    for step in range(40):
        starts = torch.randint(len(tokens) - T, (B,))
        x = batch_of(tokens, starts)
        audited.record(starts, x)
        take_step(optimizer)
        for position, start in enumerate(starts.tolist()):
            for offset in range(T):
                document = truth[start + offset]
                log[step, position, document] += 1
                contents[step, position, document].append(int(x[position, offset]))
    audited.close()
    assert seen(tmp_path / "run") == dict(log)
    # The same piece of a document again is a repeat; what is shorter than a shingle is not.
    table = Run.open(tmp_path / "run").scan("exposures").collect()
    met: collections.Counter[Any] = collections.Counter()
    for step, position, document, repeats in table.select(
        "step", "position", "row", "dup_run"
    ).rows():
        content = tuple(contents[step, position, document])
        assert repeats >= met[content]
        met[content] += 1


def test_recording_changes_neither_windows_nor_random_state(tmp_path: Path) -> None:
    tokens = token_file(tmp_path / "train.bin")

    def loop(audited: bool) -> tuple[Any, ...]:
        seed()
        optimizer = new_optimizer()
        if audited:
            index = DocumentIndex.from_eot(tokens, eot=0, window=T)
            sampler = AuditedSampler(
                run=tmp_path / "run", optimizer=optimizer, locator=index.locator
            )
        batches = []
        for _ in range(10):
            starts = torch.randint(len(tokens) - T, (B,))
            x = batch_of(tokens, starts)
            if audited:
                sampler.record(starts, x)
            batches.append(x.clone())
            take_step(optimizer)
        if audited:
            sampler.close()
        return torch.stack(batches), torch.get_rng_state(), random_state()[1][1].tolist()

    bare, recorded = loop(audited=False), loop(audited=True)
    assert torch.equal(bare[0], recorded[0])
    assert torch.equal(bare[1], recorded[1])
    assert bare[2] == recorded[2]


class Windows(Dataset):
    """Windows one after the other, told by their number."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n = len(np.memmap(path, dtype=np.uint16, mode="r")) // T

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, number: int) -> torch.Tensor:
        tokens = np.memmap(self.path, dtype=np.uint16, mode="r")
        return torch.from_numpy(tokens[number * T : (number + 1) * T].astype(np.int64))


@pytest.mark.parametrize(
    ("workers", "start"), [(0, None), (2, "fork"), (1, "spawn")], ids=["0", "2", "1 spawned"]
)
def test_an_epoch_of_windows_shows_every_token_of_every_document_once(
    workers: int, start: str | None, tmp_path: Path
) -> None:
    tokens = token_file(tmp_path / "train.bin")
    index = DocumentIndex.from_eot(
        tokens, eot=0, window=T, source="web", shard="train.bin", stride=T
    )
    optimizer = new_optimizer()
    loader = DataLoader(
        Windows(tmp_path / "train.bin"),
        batch_size=B,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context=start,
    )
    audited = AuditedSampler(
        loader, run=tmp_path / "run", optimizer=optimizer, locator=index.locator
    )
    for _ in audited:
        take_step(optimizer)
    audited.close()
    found: collections.Counter[int] = collections.Counter()
    for (_, _, document), n in seen(tmp_path / "run").items():
        found[document] += n
    whole = len(tokens) // T * T
    assert found == collections.Counter(document_of_each(tokens)[:whole])


@settings(deadline=None, max_examples=300)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    eot=st.integers(0, 3),
    start=st.integers(0, 59),
    window=st.integers(1, 70),
    eot_begins=st.booleans(),
    piece=st.integers(1, 20),
)
def test_overlaps_are_those_of_brute_force(
    tokens: list[int], eot: int, start: int, window: int, eot_begins: bool, piece: int
) -> None:
    file = np.asarray(tokens, dtype=np.uint16)
    whole, documents_module.SCANNED_TOKENS = documents_module.SCANNED_TOKENS, piece
    try:
        index = DocumentIndex.from_eot(file, eot, window=window, eot_begins=eot_begins)
    finally:
        documents_module.SCANNED_TOKENS = whole
    truth = document_of_each(tokens, eot, eot_begins)
    expected = collections.Counter(truth[start : start + window])
    if not expected:
        with pytest.raises(IdentityError, match="in no document"):
            index.locator(start, None)
        return
    located = index.locator(start, None)
    assert {one.row: one.n_tokens for one in located} == expected
    assert [one.row for one in located] == sorted(expected)
    assert (
        np.concatenate([one.content for one in located]).tolist() == tokens[start : start + window]
    )


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    gap=st.integers(0, 5),
    start=st.integers(0, 100),
    n=st.integers(1, 40),
)
def test_overlaps_by_offsets_skip_empty_documents_and_what_is_in_none(
    sizes: list[int], gap: int, start: int, n: int
) -> None:
    offsets = np.concatenate([[0], np.cumsum(sizes)]) + gap
    index = DocumentIndex(offsets, window=n)
    owner = {gap + i: d for i, d in enumerate(np.repeat(np.arange(len(sizes)), sizes).tolist())}
    expected = collections.Counter(
        owner[token] for token in range(start, start + n) if token in owner
    )
    assert {d: stop - begin for d, begin, stop in index.overlaps(start, n)} == expected


def test_without_the_file_the_content_is_the_windows_own(tmp_path: Path) -> None:
    index = DocumentIndex([0, 5, 9, 30], window=8)
    window = torch.arange(100, 108)
    located = index.locator(3, window)
    assert [one.content.tolist() for one in located] == [
        [100, 101],
        [102, 103, 104, 105],
        [106, 107],
    ]
    assert [one.sample_id for one in located] == ["doc-0", "doc-1", "doc-2"]
    assert [one.content for one in index.locator(3, None)] == [None] * 3


def test_a_pickled_index_opens_the_file_and_does_not_carry_it(tmp_path: Path) -> None:
    np.zeros(200_000, np.uint16).tofile(tmp_path / "train.bin")
    tokens = np.memmap(tmp_path / "train.bin", dtype=np.uint16, mode="r", offset=64)
    index = DocumentIndex([0, 100, len(tokens)], window=T, tokens=tokens)
    data = pickle.dumps(index)
    assert len(data) < 2_000
    content = pickle.loads(data).locator(95, None)[1].content
    assert content.tolist() == tokens[100:111].tolist()


def test_a_window_outside_of_the_documents_is_told_by_its_start_and_counted(
    tmp_path: Path,
) -> None:
    index = DocumentIndex([10, 50], window=4)
    audited = AuditedSampler(run=tmp_path / "run", locator=index.locator)
    audited.record([20, 60], torch.zeros(2, 4, dtype=torch.int64))
    audited.record([20, 40], torch.zeros(2, 4, dtype=torch.int64))
    audited.close()
    run = Run.open(tmp_path / "run")
    assert run.gaps() == ["attempt 0, rank 0: 1 samples that the locator failed on"]
    named = run.scan("exposures").collect()["sample_id"]
    assert named.to_list() == ["doc-0", "60", "doc-0", "doc-0"]


@pytest.mark.parametrize(
    ("offsets", "options", "message"),
    [
        ([0], {}, r"shape \(1,\)"),
        ([0, 9, 4], {}, "in order"),
        ([-1, 4], {}, "in order"),
        ([0, 4], {"window": 0}, "positive"),
        ([0, 4], {"stride": 0}, "positive"),
        ([0, 4], {"tokens": [1, 2]}, "documents end at 4 of 2 tokens"),
    ],
)
def test_bad_offsets_are_refused(offsets: list[int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DocumentIndex(offsets, **{"window": 8, **options})


def test_a_file_without_tokens_or_windows_without_starts_are_refused() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        DocumentIndex.from_eot([], eot=0, window=4)
    with pytest.raises(IdentityError, match="first token"):
        DocumentIndex([0, 9], window=4).locator(None, None)


def test_example_of_memmap_windows_runs(tmp_path: Path) -> None:
    run = run_pipeline("memmap_windows.py", tmp_path)
    trained = run.scan("exposures").collect()
    assert trained["sample_id"].str.contains(r"^train\.bin:doc-\d+$").all()
    tokens = trained.group_by("step", "position").agg(pl.col("n_tokens").sum())["n_tokens"]
    assert tokens.n_unique() == 1
