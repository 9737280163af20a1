"""Data sets saved by ``Dataset.save_to_disk``: the unit is the folder with ``state.json``.

Each split of a ``DatasetDict`` is a unit.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.clean.formats import arrow
from auditor.clean.formats.folder import atomic_folder, read_index, within
from auditor.clean.row import Findings, Reading, Row, changed
from auditor.errors import ShardError


def files(path: Path) -> tuple[Path, ...]:
    return (*_data_files(path), path / "dataset_info.json", path / "state.json")


def rows(path: Path, reading: Reading, findings: Findings) -> Iterator[Row]:
    """Rows of the data files in the order of ``state.json``, in which ``datasets`` counts them."""
    n_rows = 0
    for file in _data_files(path):
        for row in arrow.rows(file, reading, findings, n_rows):
            yield row
            n_rows += 1


def copy(path: Path, out: Path, keep: NDArray[np.bool_], reading: Reading) -> None:
    """Write the kept rows as a folder that ``datasets.load_from_disk`` opens.

    As many data files as the input has, each with its own rows; features and metadata stay. The
    fingerprint is a new one, since ``datasets`` names what it caches by it.
    """
    sources = _data_files(path)
    with atomic_folder(out) as folder:
        start = 0
        is_cut = False
        for file in sources:
            # Nothing was read of the files after one that is cut off.
            n_rows, cut_here = (0, True) if is_cut else _n_rows(file, reading)
            is_cut |= cut_here
            arrow.copy(file, folder / file.name, keep[start : start + n_rows], reading)
            start += n_rows
        if start != len(keep):
            raise changed(path, len(keep), start)
        shutil.copyfile(path / "dataset_info.json", folder / "dataset_info.json")
        state = read_index(path / "state.json")
        kept = hashlib.sha256(str(state.get("_fingerprint")).encode() + np.packbits(keep).tobytes())
        state["_fingerprint"] = kept.hexdigest()[:16]
        (folder / "state.json").write_text(json.dumps(state, indent=2, sort_keys=True))


def count(path: Path, reading: Reading) -> int:
    """Rows of all data files."""
    return sum(arrow.count(file, reading) for file in _data_files(path))


def _n_rows(file: Path, reading: Reading) -> tuple[int, bool]:
    """Rows of a data file to its end or, when skipping, to where it is cut off."""
    n_rows = 0
    try:
        for batch in arrow.batches(file, Findings(None)):
            n_rows += len(batch)
    except ShardError:
        if reading.on_error == "raise":
            raise
        return n_rows, True
    return n_rows, False


def _data_files(path: Path) -> list[Path]:
    state: dict[str, Any] = read_index(path / "state.json")
    if state.get("_indices_data_files"):
        raise ShardError(
            "keeps its rows in an order of their own (indices)",
            path=path,
            remedy="Save it again after Dataset.flatten_indices()",
        )
    try:
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise ShardError("names no data files", path=path / "state.json") from error
    return [within(path, name) for name in names]
