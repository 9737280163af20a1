"""What is meant by the inputs: files, folders, globs and URLs of them, as units in natural order.

A tree of files is the same here and behind a URL: a list of names, and a way to read a small file.
"""

from __future__ import annotations

import glob
import os
import posixpath
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from auditor.clean.formats import FORMATS, format_of, format_of_name, is_mosaic_index
from auditor.errors import ShardError

_URL: Final = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]+://")

_LOCAL: Final = re.compile(r"^(file|local)://", re.IGNORECASE)
"""What ``fsspec`` calls the file system of this machine."""

# Data all the same, which must not be passed over in silence.
_OTHER_DATA: Final = re.compile(r"\.(bin|npy|idx|mds(\.\w+)?|csv|tsv|txt|feather|orc|zarr)$", re.I)
# In a folder, a bare .json is rather a description of the data than data.
_DESCRIPTION: Final = re.compile(r"\.json(\.\w+)?$", re.IGNORECASE)


@dataclass(frozen=True)
class Unit:
    """A file or folder found: ``path``, or a URL; ``parent`` is what its name is relative to."""

    path: Path | str
    parent: str
    format: str


@dataclass(frozen=True)
class Found:
    """What one input stands for; ``folder`` where it is one that was looked through."""

    units: tuple[Unit, ...]
    folder: str | None = None
    ignored: tuple[Path | str, ...] = ()
    beside: tuple[tuple[Path | str, str], ...] = ()


def is_url(given: str | Path) -> bool:
    """Whether an input is a URL."""
    return isinstance(given, str) and _URL.match(given) is not None


def located(given: str | Path) -> Path | str:
    """An input as a path on this machine, also where ``file://`` says so, or else its URL."""
    if not is_url(given):
        return Path(given)
    path = _LOCAL.sub("", str(given))
    return Path(unquote(path)) if path != given else path


def expand(given: str | Path) -> list[Found]:
    """What an input stands for, globs in natural order.

    Raises ``ShardError`` for what is not there, a format that is not read, and a protocol whose
    package is missing.
    """
    place = located(given)
    return _expand_url(place) if isinstance(place, str) else _expand_path(place)


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts shard 2 before shard 10."""
    parts = re.split(r"(\d+)", name)
    return [(1, int(p), p) if p.isdecimal() else (0, 0, p) for p in parts]


def units_of(
    names: Iterable[str], read: Callable[[str], bytes]
) -> tuple[list[tuple[str, str]], list[str]]:
    """Units among the files of a folder, as (name, format), and names of other data.

    Args:
        names: paths relative to the folder, with slashes, in the order wanted.
        read: the content of one of them; called for ``index.json`` alone.
    """
    listed = [n for n in names if not any(part.startswith(".") for part in n.split("/"))]
    there = set(listed)
    folders: dict[str, str] = {}
    foreign: set[str] = set()
    for name in listed:
        folder, base = posixpath.split(name)
        if base == "state.json" and posixpath.join(folder, "dataset_info.json") in there:
            folders[folder] = "huggingface"
        elif base == "index.json":
            if is_mosaic_index(read(name)):
                folders[folder] = "mosaic"
            else:
                foreign.add(folder)
    units: dict[str, str] = {}
    raw: dict[str, str] = {}
    other: list[str] = []
    for name in listed:
        ancestors = _ancestors(name)
        unit = next((folder for folder in ancestors if folder in folders), None)
        kind = format_of_name(name)
        stem = posixpath.splitext(name)[0]
        if unit is not None:
            units[unit] = folders[unit]
        elif kind == "megatron" and f"{stem}.bin" in there:
            units[name] = kind
        elif kind == "tokens":
            if name.endswith(".bin") and f"{stem}.idx" in there:
                continue
            (other.append(name) if posixpath.dirname(name) in foreign else raw.update({name: kind}))
        elif kind not in (None, "megatron") and not _DESCRIPTION.search(name):
            units[name] = str(kind)
        elif _OTHER_DATA.search(name):
            other.append(name)
    if not units:
        # A bare .bin or .npy may be anything; where nothing else is, it is meant.
        units = raw
    else:
        other += raw
    return list(units.items()), other


def _ancestors(name: str) -> list[str]:
    """The folders that hold a file, outermost first; the one that was given is ``""``."""
    parts = name.split("/")[:-1]
    return ["", *("/".join(parts[: i + 1]) for i in range(len(parts)))]


# On this machine


def _expand_path(path: Path) -> list[Found]:
    if path.exists():
        return [_at_path(_absolute(path))]
    # Path.glob takes no absolute patterns.
    found = glob.glob(str(path), recursive=True)  # noqa: PTH207
    if not found:
        raise ShardError("no such file or folder", path=path, remedy="Check the path")
    paths = sorted((_absolute(Path(name)) for name in found), key=lambda p: natural(str(p)))
    return [_at_path(path) for path in paths]


def _at_path(path: Path) -> Found:
    kind = format_of(path)
    if kind is None and path.is_dir():
        return _folder(path)
    if kind in ("megatron", "tokens"):
        kind, path = _of_pair(path, lambda name: path.with_name(name).exists())
    return Found((Unit(path, str(path.parent), _known(kind, path)),))


def _of_pair(path: Any, exists: Callable[[str], bool]) -> tuple[str, Any]:
    """Format and path of an ``.idx``, or a ``.bin`` that may be the other half of one."""
    name = str(path).rsplit("/", 1)[-1]
    stem = name.rsplit(".", 1)[0]
    if name.endswith(".idx") and not exists(f"{stem}.bin"):
        raise ShardError("has no .bin beside it", path=path, remedy="Put the two side by side")
    if name.endswith(".bin") and exists(f"{stem}.idx"):
        return "megatron", type(path)(str(path)[: -len(".bin")] + ".idx")
    return ("megatron" if name.endswith(".idx") else "tokens"), path


def _folder(path: Path) -> Found:
    names = sorted(
        (p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()), key=natural
    )
    units, other = units_of(names, lambda name: (path / name).read_bytes())
    return Found(
        tuple(Unit(path / name, str(path), kind) for name, kind in units),
        str(path),
        tuple(path / name for name in other),
        tuple((path / name, name) for name in names if _is_beside(name, units)),
    )


def _absolute(path: Path) -> Path:
    # Symbolic links stay: in a hub cache the link has the name and its target has none.
    return Path(os.path.abspath(path))  # noqa: PTH100


# Behind a URL


def filesystem(url: str) -> tuple[Any, str]:
    """The ``fsspec`` file system of a URL, and the path in it."""
    import fsspec  # type: ignore[import-untyped]

    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ShardError(
            f"cannot be opened: {error}",
            path=url,
            remedy="Install the package of fsspec for this protocol (s3fs, gcsfs, aiohttp, ...)",
        ) from error
    return system, path


def remote_files(url: str, kind: str | None) -> tuple[Any, str, list[str]]:
    """The file system of a unit behind a URL, its path, and those of its files; or ``OSError``."""
    system, path = filesystem(url)
    if kind in ("huggingface", "mosaic"):
        return system, path, sorted(system.find(path))
    files = [path, f"{posixpath.splitext(path)[0]}.bin"] if kind == "megatron" else [path]
    return system, path, files


_STAMPS: Final = frozenset(
    [
        "size",
        "etag",
        "mtime",
        "lastmodified",
        "modified",
        "modificationtime",
        "created",
        "updated",
        "generation",
        "versionid",
        "checksum",
        "digest",
        "md5",
        "md5hash",
        "contentmd5",
        "crc32c",
        "sha256",
        "blobid",
    ]
)
"""What file systems tell of a file that is another once it is written again, in one spelling."""


def remote_stamps(url: str, kind: str | None) -> list[list[str]]:
    """Size, time, check sum of each file of a unit, as far as its file system tells them.

    Raises ``ShardError`` where it cannot be reached.
    """
    try:
        system, _, paths = remote_files(url, kind)
        facts = [dict(system.info(path)) for path in paths]
    except OSError as error:
        raise unreachable(url, error) from error
    return [
        sorted(f"{name}={value}" for name, value in each.items() if _plain(name) in _STAMPS)
        for each in facts
    ]


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def _expand_url(url: str) -> list[Found]:
    system, path = filesystem(url)
    # What was listed before in this process may have changed since.
    system.invalidate_cache()
    try:
        if glob.has_magic(path):
            paths = sorted(map(str, system.glob(path)), key=natural)
        else:
            paths = [path.rstrip("/")] if system.exists(path) else []
        if not paths:
            raise ShardError("no such file or folder", path=url, remedy="Check the URL")
        return [_at_url(system, each) for each in paths]
    except OSError as error:
        raise unreachable(url, error) from error


def unreachable(url: str, error: Exception) -> ShardError:
    """The refusal of a URL that cannot be read."""
    return ShardError(
        f"cannot be read: {error}", path=url, remedy="Check the URL, access rights and connection"
    )


def _at_url(system: Any, path: str) -> Found:
    url = system.unstrip_protocol(path)
    kind = format_of_name(path)
    if kind is not None and not (kind == "arrow" and system.isdir(path)):
        parent = posixpath.dirname(url)
        if kind in ("megatron", "tokens"):
            kind, url = _of_pair(
                url, lambda name: system.exists(f"{posixpath.dirname(path)}/{name}")
            )
        return Found((Unit(url, parent, kind),))
    if not system.isdir(path):
        raise _not_read(url)
    names = sorted((posixpath.relpath(each, path) for each in system.find(path)), key=natural)
    units, other = units_of(names, lambda name: bytes(system.cat_file(f"{path}/{name}")))
    if [name for name, _ in units] == [""]:
        return Found((Unit(url, posixpath.dirname(url), units[0][1]),))
    return Found(
        tuple(Unit(f"{url}/{name}", url, kind) for name, kind in units),
        url,
        tuple(f"{url}/{name}" for name in other),
        tuple((f"{url}/{name}", name) for name in names if _is_beside(name, units)),
    )


def _is_beside(name: str, units: list[tuple[str, str]]) -> bool:
    """Whether a file names the units of its folder, so that they are opened by it together."""
    folder, base = posixpath.split(name)
    within = {posixpath.dirname(unit) for unit, kind in units if kind == "huggingface"}
    return base == "dataset_dict.json" and folder in within


def _known(kind: str | None, path: Path | str) -> str:
    if kind is None:
        raise _not_read(path)
    return kind


def _not_read(path: Path | str) -> ShardError:
    return ShardError(
        "this format is not read",
        path=path,
        remedy=f"Formats read: {FORMATS}. Convert the file to one of them",
    )
