"""WebDataset: samples are told by shard and key, however they are shuffled and batched."""

from __future__ import annotations

import io
import logging
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("webdataset", reason="WebDataset is not installed: pip install webdataset")

import numpy as np
import torch
import webdataset as wds
from sources import (
    assert_nothing_changes,
    assert_recorded_as_received,
    numbers,
    run_pipeline,
)
from torch.utils.data import DataLoader

from auditor import AuditedSampler, Located, Run

SHARDS = 4
PER_SHARD = 15
T = 24


def tokens_of(number: int) -> np.ndarray:
    """Begin with the sample's number, by which the loop's own log tells it."""
    tokens = np.random.default_rng(number).integers(0, 50_000, T)
    tokens[0] = number
    return tokens


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Shards whose keys are the same in every one of them."""
    folder = tmp_path_factory.mktemp("shards")
    paths = []
    for shard in range(SHARDS):
        path = folder / f"part-{shard}.tar"
        with tarfile.open(path, "w") as archive:
            for row in range(PER_SHARD):
                number = shard * PER_SHARD + row
                array = io.BytesIO()
                np.save(array, tokens_of(number))
                text = "".join(f"{word} " for word in tokens_of(number)).encode()
                for name, data in (
                    ("input_ids.npy", array.getvalue()),
                    ("source.txt", b"web" if number % 3 else b"books"),
                    ("txt", text),
                ):
                    member = tarfile.TarInfo(f"{row:03}.{name}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        paths.append(str(path))
    return paths


@pytest.fixture
def truth(urls: list[str]) -> Callable[[Any], list[tuple[Any, ...]]]:
    """By the tokens alone: which key of which shard."""

    def identities(batch: Any) -> list[tuple[Any, ...]]:
        return [
            (
                f"{number % PER_SHARD:03}",
                "web" if number % 3 else "books",
                urls[number // PER_SHARD],
                None,
                T,
            )
            for number in numbers(batch["input_ids"])
        ]

    return identities


def samples(urls: list[str], *, shuffle: bool = True) -> Any:
    """Dicts of tokens, source, key and url, shuffled in shards and in a buffer."""
    dataset = wds.WebDataset(
        urls, shardshuffle=SHARDS if shuffle else False, detshuffle=True, seed=3
    )
    if shuffle:
        dataset = dataset.shuffle(20, seed=5)
    return (
        dataset.decode()
        .rename(input_ids="input_ids.npy", source="source.txt", keep=True)
        .map(lambda sample: {k: v for k, v in sample.items() if "." not in k and k != "txt"})
    )


LOADERS: dict[str, Callable[..., Any]] = {
    "batched by a DataLoader": lambda urls, **options: DataLoader(
        samples(urls), batch_size=4, **options
    ),
    "batched in the pipeline": lambda urls, **options: DataLoader(
        samples(urls).batched(4), batch_size=None, **options
    ),
    "batched by a WebLoader": lambda urls, **options: wds.WebLoader(
        samples(urls), batch_size=4, **options
    ),
    "batched again after a WebLoader": lambda urls, **options: (
        wds.WebLoader(samples(urls).batched(4), batch_size=None, **options)
        .unbatched()
        .shuffle(30, seed=9)
        .batched(7)
    ),
}
every_loader = pytest.mark.parametrize("name", LOADERS)
zero_and_two = pytest.mark.parametrize("workers", [0, 2])


@zero_and_two
@every_loader
def test_samples_are_recorded_as_received_over_epochs(
    name: str, workers: int, urls: list[str], truth: Any, tmp_path: Path
) -> None:
    loader = LOADERS[name](urls, num_workers=workers)
    table = assert_recorded_as_received(loader, tmp_path / "run", truth, epochs=2)
    assert table.height == 2 * SHARDS * PER_SHARD
    # Of the keys there are as many as in one shard; the samples are told apart all the same.
    assert table["sample_id"].n_unique() == PER_SHARD
    assert table["key"].n_unique() == SHARDS * PER_SHARD
    assert set(table["dup_run"]) == {0, 1}


@zero_and_two
@every_loader
def test_batches_and_random_state_stay_the_same(
    name: str, workers: int, urls: list[str], tmp_path: Path
) -> None:
    assert_nothing_changes(lambda: LOADERS[name](urls, num_workers=workers), tmp_path / "run")


def test_length_that_the_loop_was_given_stays(urls: list[str], tmp_path: Path) -> None:
    loader = wds.WebLoader(samples(urls), batch_size=4).with_length(15)
    audited = AuditedSampler(loader, run=tmp_path / "run")
    assert len(audited) == 15
    assert len(list(audited)) == 15
    audited.close()


@zero_and_two
def test_an_epoch_cut_short_is_recorded_as_far_as_it_went(
    workers: int, urls: list[str], truth: Any, tmp_path: Path
) -> None:
    loader = wds.WebLoader(samples(urls), batch_size=4, num_workers=workers).with_epoch(5)
    table = assert_recorded_as_received(loader, tmp_path / "run", truth, epochs=2)
    assert table["step"].max() == 9


@zero_and_two
def test_tuples_that_lose_the_key_are_told_by_their_content(
    workers: int, urls: list[str], tmp_path: Path
) -> None:
    dataset = samples(urls).to_tuple("input_ids", "source")
    audited = AuditedSampler(
        DataLoader(dataset, batch_size=4, num_workers=workers), run=tmp_path / "run"
    )
    log = [numbers(tokens) for _ in range(2) for tokens, _ in audited]
    audited.close()
    run = Run.open(tmp_path / "run")
    assert run.gaps() == []
    table = run.scan("exposures").collect()
    seen = [number for batch in log for number in batch]
    keys = dict(zip(seen, table["key"], strict=True))  # of each number the last of its keys
    assert [keys[number] for number in seen] == table["key"].to_list()
    assert len(set(keys.values())) == SHARDS * PER_SHARD


@zero_and_two
def test_texts_that_lose_the_key_are_told_by_their_content(
    workers: int, urls: list[str], tmp_path: Path
) -> None:
    dataset = wds.WebDataset(urls, shardshuffle=False).decode().to_tuple("txt", "source.txt")
    audited = AuditedSampler(
        DataLoader(dataset, batch_size=4, num_workers=workers), run=tmp_path / "run"
    )
    texts = [text for batch, _ in audited for text in batch]
    audited.close()
    table = Run.open(tmp_path / "run").scan("exposures").collect()
    assert table["key"].n_unique() == len(set(texts)) == SHARDS * PER_SHARD
    assert table["n_tokens"].to_list() == [len(text) for text in texts]


@zero_and_two
@pytest.mark.parametrize("batched", ["by the loader", "in the pipeline"])
def test_samples_without_key_and_content_are_an_error_that_names_the_remedy_and_is_counted(
    batched: str,
    workers: int,
    urls: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As images are: the loop gets every batch, the record says what is missing from it."""

    def make() -> Any:
        dataset = (
            samples(urls).to_tuple("input_ids", "source").map_tuple(lambda x: torch.tensor(x) / 2)
        )
        if batched == "in the pipeline":
            return DataLoader(dataset.batched(4), batch_size=None, num_workers=workers)
        return DataLoader(dataset, batch_size=4, num_workers=workers)

    with caplog.at_level(logging.WARNING, logger="auditor"):
        audited = AuditedSampler(make(), run=tmp_path / "run")
        received = list(audited)
        audited.close()
    bare = list(make())
    assert len(received) == len(bare)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(received, bare, strict=True))
    run = Run.open(tmp_path / "run")
    assert run.scan("exposures").collect().height == 0
    assert run.gaps() == [f"attempt 0, rank 0: write_batch failed {len(bare)} times"]
    (message,) = [one.getMessage() for one in caplog.records if "failed" in one.getMessage()]
    assert message.count("IdentityError") == 1
    assert "__key__" in message
    assert "locator=" in message


@zero_and_two
def test_a_locator_reads_the_raw_sample_and_not_the_batch(
    workers: int, urls: list[str], truth: Any, tmp_path: Path
) -> None:
    """A collate function may drop what tells a sample; the locator comes before it."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"input_ids": torch.stack([torch.from_numpy(row["input_ids"]) for row in rows])}

    def locator(index: None, sample: dict[str, Any]) -> Located:
        assert index is None
        return Located(row=int(sample["__key__"]), shard=Path(sample["__url__"]).name)

    table = assert_recorded_as_received(
        DataLoader(samples(urls), batch_size=4, collate_fn=collate, num_workers=workers),
        tmp_path / "run",
        lambda batch: [
            (name, source, Path(url).name, int(name), n) for name, source, url, _, n in truth(batch)
        ],
        locator=locator,
    )
    assert table["key"].n_unique() == SHARDS * PER_SHARD


def test_example_runs(tmp_path: Path) -> None:
    run = run_pipeline("webdataset_shards.py", tmp_path, "--workers", "2")
    trained = run.scan("exposures").collect()
    assert trained["shard"].str.ends_with(".tar").all()
    assert trained["source"].n_unique() > 1
    assert trained["duplication"].is_not_null().all()
