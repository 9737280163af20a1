"""Is everything in place for a recorded training? Looked at before the first step, not after.

Each check tells what it found; one that fails says what to do.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

import polars as pl

from auditor.record.inspection import inspect, make
from auditor.record.sampler import AuditedSampler
from auditor.run import Run

_CORE: Final = ("torch", "numpy", "numba", "polars", "pyarrow", "datasets")
_OPTIONAL: Final = (
    *("transformers", "accelerate", "lightning", "torchdata", "webdataset", "mosaicml-streaming"),
    *("ray", "tensorboard", "wandb", "trackio", "prometheus-client"),
)

_LEAST_FREE_BYTES: Final = 1 << 30
_SLOW_LOAD_S: Final = 5.0
"""Compiled code that was kept is loaded in less."""

N_BATCHES: Final = 20
"""Batches of a loader that are looked at."""


@dataclass(frozen=True)
class Check:
    """What was found; ``remedy`` is empty where nothing is to be done."""

    name: str
    status: Literal["ok", "note", "failed"]
    told: str
    remedy: str = ""


def environment() -> Iterator[Check]:
    """Versions, and whether compiled code is kept between processes."""
    auditor = metadata.version("auditor")
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    yield Check("auditor", "ok", f"{auditor} on Python {platform.python_version()}, {machine}")
    versions = {name: _version(name) for name in (*_CORE, *_OPTIONAL)}
    yield Check("needs", "ok", ", ".join(f"{name} {versions[name]}" for name in _CORE))
    there = [f"{name} {versions[name]}" for name in _OPTIONAL if versions[name]]
    yield Check("works with", "ok", ", ".join(there) or "none of the optional packages")
    yield _compiled()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _compiled() -> Check:
    begin = time.perf_counter()
    from auditor.measure.compact import compact

    compact(["a text to sketch"])
    took = time.perf_counter() - begin
    if took < _SLOW_LOAD_S:
        return Check("compiled code", "ok", f"loaded in {took:.1f} s")
    return Check(
        "compiled code",
        "note",
        f"compiled in {took:.0f} s, as a first time takes",
        "If the next call says so again, set NUMBA_CACHE_DIR to a folder that can be written",
    )


def run_folder(path: Path) -> Check:
    """Whether a run can be recorded there; leaves nothing behind."""
    above = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not above.is_dir():
        return Check("run folder", "failed", f"{above} is a file", "Name another folder")
    try:
        with tempfile.NamedTemporaryFile(dir=above) as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Check(
            "run folder",
            "failed",
            f"{above} cannot be written: {error.strerror}",
            "Mend its rights, free some space, or name another folder",
        )
    free = shutil.disk_usage(above).free
    told = f"{above} can be written, {free / 1e9:,.1f} GB free"
    if free < _LEAST_FREE_BYTES:
        remedy = "A run takes some 5 bytes an exposure, and 300 a sample: free some space"
        return Check("run folder", "note", told, remedy)
    return Check("run folder", "ok", told)


def model(target: str) -> Check:
    """What the monitor finds in the model of ``module:factory``."""
    try:
        return Check("model", "ok", inspect(target))
    except ValueError as error:
        return Check("model", "failed", str(error), "See auditor sites --help")


def loader(target: str) -> Iterator[Check]:
    """What would be recorded of the loader of ``module:factory``, and what it costs.

    Two loaders are made; of each the first ``N_BATCHES`` batches are taken, of one recorded.
    """
    try:
        bare, other = make(target), make(target)
        bare_s = _seconds_a_batch(bare)
    except Exception as error:
        yield Check("loader", "failed", str(error), "The loader fails without auditor as well")
        return
    with tempfile.TemporaryDirectory() as folder:
        with _warnings() as warned:
            try:
                audited = AuditedSampler(other, run=Path(folder) / "run")
                audited_s = _seconds_a_batch(audited)
                audited.close()
            except Exception as error:
                told = f"not while recorded: {type(error).__name__}: {error}"
                yield Check("loader", "failed", told, "See docs/recording.md")
                return
        run = Run.open(Path(folder) / "run")
        exposures = run.scan("exposures", "all").collect()
        samples = run.scan("samples").collect()
    if exposures.is_empty():
        told = "no sample was recorded"
        yield Check("loader", "failed", told, "; ".join(warned) or "Is the loader empty?")
        return
    yield Check("loader", *_identity(exposures, samples))
    for column, what, remedy in (
        ("source", "source", "Give the samples a column source, or a locator="),
        ("shard", "file", "Give dataset.shards, or a locator=, to clean the run's shards later"),
    ):
        known = samples[column].drop_nulls()
        names = known.unique().sort().to_list()
        listed = ", ".join(map(str, names[:5])) + (", ..." if len(names) > 5 else "")
        if len(known) == len(samples):
            yield Check(what, "ok", f"of every sample: {listed}")
        else:
            told = f"of {len(known)} of {len(samples)} samples" if len(known) else "of no sample"
            yield Check(what, "note", told, remedy)
    n_scored = exposures["duplication"].count()
    told = f"{n_scored} of {len(exposures)} samples"
    if n_scored == len(exposures):
        yield Check("duplication", "ok", f"scored of {told}")
    else:
        yield Check("duplication", "note", f"scored of {told}", "Texts and token ids are scored")
    yield Check(
        "cost",
        "ok",
        f"a batch takes {1000 * audited_s:.2f} ms recorded, {1000 * bare_s:.2f} ms bare "
        f"(over {N_BATCHES} batches at most, one after the other, and no training beside it)",
    )
    for warning in warned:
        yield Check("warning", "note", warning)


def _identity(
    exposures: pl.DataFrame, samples: pl.DataFrame
) -> tuple[Literal["ok", "note"], str, str]:
    n_batches = exposures["batch"].n_unique()
    told = f"{len(exposures)} samples in {n_batches} batches"
    if samples["sample_id"].count() == len(samples):
        first = samples["sample_id"].sort().to_list()[0]
        return "ok", f"{told}, told by id, such as {first}", ""
    return (
        "note",
        f"{told}, told by their place in the dataset",
        ("Give the samples a column id, or a locator=, to tell them in the report"),
    )


def _seconds_a_batch(batches: Any) -> float:
    """Median time that the loop waits for a batch after the first, which starts workers."""
    iterator = iter(batches)
    times: list[float] = []
    while len(times) <= N_BATCHES:
        begin = time.perf_counter()
        if not list(islice(iterator, 1)):
            break
        times.append(time.perf_counter() - begin)
    times = sorted(times[1:] or times or [0.0])
    return times[len(times) // 2]


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What auditor warns of in the block, instead of printing it."""
    told: list[str] = []
    log = logging.getLogger("auditor")

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    handler = Listening(logging.WARNING)
    propagates, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield told
    finally:
        log.removeHandler(handler)
        log.propagate = propagates
