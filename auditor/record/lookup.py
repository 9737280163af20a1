"""Sketches that ``auditor sketch`` made before training, looked up by the samples' ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from auditor.errors import RunError, SchemaVersionError
from auditor.measure.compact import WORDS, compact
from auditor.measure.sketch import NORMALISATION_VERSION, exact_hash
from auditor.schema import SKETCHES_VERSION


class Lookup:
    """A folder of sketches, mapped into memory when first used; picklable.

    Raises:
        RunError: the folder holds no sketches, or of another normalisation of texts.
        SchemaVersionError: they are of another version of the format.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "signatures.json"
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            version, normalisation = document["schema_version"], document["normalisation"]
        except (OSError, ValueError, KeyError, TypeError):
            raise RunError(
                "holds no sketches",
                path=folder,
                remedy=f"Make them: auditor sketch SHARDS --out {folder}",
            ) from None
        if version != SKETCHES_VERSION:
            raise SchemaVersionError(
                "sketches", path=path, found=version, expected=SKETCHES_VERSION
            )
        if normalisation != NORMALISATION_VERSION:
            raise RunError(
                "its sketches were made with another normalisation of texts",
                path=folder,
                remedy="Make them again: auditor sketch SHARDS --out ANOTHER_FOLDER",
            )
        self._folder = folder.absolute()
        self._arrays: tuple[np.ndarray, np.ndarray] | None = None

    def sketches(
        self, ids: Sequence[str | None] | None, contents: Sequence[Any] | np.ndarray
    ) -> np.ndarray:
        """Sketches i64 [n, WORDS]: looked up where the id is known, else made of the content."""
        if ids is None:
            return compact(contents)
        if self._arrays is None:
            self._arrays = (
                np.load(self._folder / "keys.npy", mmap_mode="r"),
                np.load(self._folder / "sketches.npy", mmap_mode="r"),
            )
        keys, rows = self._arrays
        wanted = np.asarray([-1 if one is None else exact_hash(one.encode()) for one in ids])
        places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        known = keys[places] == wanted
        found = np.zeros((len(ids), WORDS), np.int64)
        found[known] = rows[places[known]]
        others = np.flatnonzero(~known)
        if len(others):
            found[others] = compact([contents[int(i)] for i in others])
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": None}
