"""Formats of shards: how the rows of each are read, counted and copied.

A format is a module with the same few functions:

    files(path) -> tuple[Path, ...]                  every file of the unit; the last makes it whole
    rows(path, reading, findings) -> Iterator[Row]   in order; ``ShardError`` for what is damaged
    copy(path, out, keep, reading) -> None           the kept rows, whole or not at all
    count(path, reading) -> int

Those in which a row may be there that ``copy`` refuses, since it cannot be read, say which:

    lost(path, keep) -> NDArray[np.bool_]            of the kept rows, those not to be copied

Which one it is, the name says, and for folders what is in them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Final

from auditor.clean.formats import (
    arrow,
    huggingface,
    jsonl,
    megatron,
    mosaic,
    parquet,
    tokens,
    webdataset,
)

FORMATS: Final = (
    "JSON Lines (.jsonl, .ndjson, .json; plain, .gz or .zst), Parquet (.parquet), Arrow and "
    "Feather (.arrow, .feather), folders of datasets.save_to_disk, WebDataset (.tar, .tar.gz), "
    "folders of MosaicML shards (index.json), Megatron (.idx with .bin) and raw token ids "
    "(.bin, .npy)"
)

_MODULES: Final[dict[str, ModuleType]] = {
    "jsonl": jsonl,
    "parquet": parquet,
    "arrow": arrow,
    "huggingface": huggingface,
    "webdataset": webdataset,
    "mosaic": mosaic,
    "megatron": megatron,
    "tokens": tokens,
}

_SUFFIXES: Final = {
    "jsonl": re.compile(r"\.(jsonl|ndjson|json)(\.gz|\.zst|\.zstd)?$", re.IGNORECASE),
    "parquet": re.compile(r"\.(parquet|pq)$", re.IGNORECASE),
    "arrow": re.compile(r"\.(arrow|feather)$", re.IGNORECASE),
    "webdataset": re.compile(r"\.(tar|tar\.gz|tgz)$", re.IGNORECASE),
    "megatron": re.compile(r"\.idx$", re.IGNORECASE),
    "tokens": re.compile(r"\.(bin|npy)$", re.IGNORECASE),
}

UNIT_FILES: Final = {"huggingface": "state.json", "mosaic": "index.json"}
"""Of formats whose unit is a folder, the file in it that makes it one."""


def module_of(name: str) -> ModuleType:
    """The module of a format."""
    return _MODULES[name]


def format_of_name(name: str) -> str | None:
    """The format that a file's name says, None where it is none that is read."""
    return next((kind for kind, suffix in _SUFFIXES.items() if suffix.search(name)), None)


def format_of(path: Path) -> str | None:
    """The format of a file or folder on this machine."""
    if not path.is_dir():
        return format_of_name(path.name)
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return "huggingface"
    index = path / "index.json"
    return "mosaic" if index.is_file() and is_mosaic_index(index.read_bytes()) else None


def is_mosaic_index(data: bytes) -> bool:
    """Whether an ``index.json`` is that of MosaicML shards: LitData has one as well."""
    try:
        return mosaic.is_index(json.loads(data))
    except ValueError:
        return False


def without_suffix(name: str) -> str:
    """A file's name without the extensions of its format."""
    kind = format_of_name(name)
    return _SUFFIXES[kind].sub("", name) if kind else name
