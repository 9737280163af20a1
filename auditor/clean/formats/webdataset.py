"""WebDataset shards (.tar, .tar.gz): a row is a sample, the consecutive members of one key.

``a/b.json`` and ``a/b.seg.txt`` are the members ``json`` and ``seg.txt`` of the sample ``a/b``. The
content is the member ``txt``, or the field ``text``, ``input_ids`` or ``tokens`` of ``json``, or
the ids of ``npy``; ``--content`` names a member (``npy``), or a field of one (``json.body``).
Written by ``webdataset.TarWriter``, each kept member byte for byte.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from auditor.clean.formats.compression import (
    FAULTS,
    MAX_BYTES,
    compressed,
    compression_of,
    damaged,
    decompressed,
)
from auditor.clean.row import (
    UNREADABLE,
    Findings,
    Reading,
    Row,
    at,
    changed,
    content_of,
    identity_of,
    no_content,
    without_padding,
)
from auditor.errors import ShardError
from auditor.files import atomic
from auditor.schema import MASK_COLUMN, TEXT_COLUMNS, TOKEN_COLUMNS

_NAME: Final = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$", re.DOTALL)
"""Key and extensions, as webdataset splits them."""


class _Sample(NamedTuple):
    key: str
    members: dict[str, bytes | None]  # by extension; None: not read
    fault: str | None


def files(path: Path) -> tuple[Path, ...]:
    return (path,)


def rows(path: Path, reading: Reading, findings: Findings) -> Iterator[Row]:
    """Samples in order; ``sample_id`` is the key."""
    content: str | None = None
    for row, sample in enumerate(_samples(path, findings, _is_read)):
        fault = sample.fault
        if fault is None:
            try:
                fields = {
                    name: _decoded(name, data)
                    for name, data in sample.members.items()
                    if data is not None
                }
            except (ValueError, RecursionError, *FAULTS) as error:
                fault = f"cannot be decoded: {error}"
        if fault is not None:
            if reading.on_error == "raise":
                raise ShardError(fault, path=path, row=row, remedy="Repair or remove the sample")
            findings.lost(row, fault)
            yield UNREADABLE
            continue
        if content is None:
            content = _choose(fields, sample, reading, path)
        value = _at(fields, content)
        ids = content_of(value)
        if ids is None:
            findings.notice(row, no_content(content, value))
        about = fields.get("json")
        about = about if isinstance(about, dict) else {}
        yield Row(
            without_padding(ids, about.get(MASK_COLUMN)),
            sample.key,
            identity_of(about)[1],
            columns=tuple([_at(fields, name) for name in reading.columns]),
        )


def copy(path: Path, out: Path, keep: NDArray[np.bool_], reading: Reading) -> None:
    """Write the kept samples; needs the package ``webdataset``."""
    writer_of = _writer()
    skip = reading.on_error == "skip"
    with (
        atomic(out) as file,
        compressed(file, compression_of(path)) as sink,
        # Times are left out: equal samples make equal files. PAX takes names of any length.
        writer_of(
            sink, encoder=False, compress=False, keep_meta=True, mtime=0, format="PAX_FORMAT"
        ) as writer,
    ):
        if skip and not len(keep):
            return
        n_rows = 0
        try:
            for sample in _samples(path, Findings(None), lambda _: True):
                if n_rows < len(keep) and keep[n_rows]:
                    if sample.fault is not None:
                        raise ShardError(sample.fault, path=path, row=n_rows)
                    writer.write({"__key__": sample.key, **sample.members})
                n_rows += 1
        except ShardError:
            if not skip:
                raise
        if n_rows != len(keep):
            raise changed(path, len(keep), n_rows)


def count(path: Path, reading: Reading) -> int:
    """Number of samples."""
    return sum(1 for _ in _samples(path, Findings(None), lambda _: False))


def lost(path: Path, keep: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Kept samples that cannot be copied, bool [n_rows]: those with a member that is refused."""
    samples = islice(_samples(path, Findings(None), lambda _: False), len(keep))
    cannot = np.zeros(len(keep), np.bool_)
    for row, sample in enumerate(samples):
        cannot[row] = keep[row] and sample.fault is not None
    return cannot


def _samples(path: Path, findings: Findings, is_read: Any) -> Iterator[_Sample]:
    """Samples with those of their members for whose extension ``is_read`` is true."""
    row = 0
    sample: _Sample | None = None
    try:
        with decompressed(path) as (stream, _):
            counted = _Counted(stream)
            tar = tarfile.open(fileobj=counted, mode="r|")  # type: ignore[call-overload]  # noqa: SIM115
            for member in tar:
                tar.members = []  # or it keeps them all
                split = _NAME.match(member.name)
                if not member.isfile() or split is None or _is_meta(member.name):
                    if not member.isdir():
                        findings.notice(None, f"{member.name!r} is in no sample: it is left out")
                    continue
                key, extension = split.groups()
                if sample is None or sample.key != key:
                    if sample is not None:
                        yield sample
                        row += 1
                    sample = _Sample(key, {}, None)
                fault = _fault(member, extension, sample)
                if fault is not None:
                    sample = sample._replace(fault=sample.fault or fault)
                elif is_read(extension):
                    content = tar.extractfile(member)
                    assert content is not None
                    data = content.read()
                    if len(data) != member.size:
                        raise EOFError(f"{member.name!r} is cut off")
                    sample.members[extension] = data
                else:
                    sample.members[extension] = None
            # tarfile ends quietly where there is no more to read.
            missing = tar.offset + tarfile.BLOCKSIZE - counted.n_bytes
            if missing > 0 and missing != tarfile.BLOCKSIZE:
                raise EOFError("the last member is cut off")
            if sample is not None:
                yield sample
            if missing > 0:
                findings.notice(None, "has no mark of its end: it may be cut off")
    except (tarfile.TarError, *FAULTS) as error:
        raise damaged(path, row, error) from error


class _Counted:
    """A stream that knows how many bytes were read from it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.n_bytes = 0

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self.n_bytes += len(data)
        return data


def _fault(member: tarfile.TarInfo, extension: str, sample: _Sample) -> str | None:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts:
        return f"the member {member.name!r} leads out of the archive"
    if extension in sample.members:
        return f"the member {member.name!r} is there twice"
    if member.size > MAX_BYTES:
        return f"the member {member.name!r} is longer than {MAX_BYTES >> 20} MB"
    return None


def _is_meta(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_read(extension: str) -> bool:
    return extension.lower().removesuffix(".gz").rsplit(".", 1)[-1] in _DECODERS


_DECODERS: Final = {
    "txt": lambda data: data.decode("utf-8"),
    "text": lambda data: data.decode("utf-8"),
    "json": lambda data: json.loads(data.decode("utf-8")),
    "npy": lambda data: _array(data),
    "cls": lambda data: data.decode("utf-8"),
}


def _decoded(extension: str, data: bytes) -> Any:
    kind = extension.lower()
    if kind.endswith(".gz"):
        with gzip.open(io.BytesIO(data)) as stream:
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"{extension!r} is longer than {MAX_BYTES >> 20} MB")
        kind = kind.removesuffix(".gz")
    return _DECODERS[kind.rsplit(".", 1)[-1]](data)


def _array(data: bytes) -> Any:
    array = np.load(io.BytesIO(data), allow_pickle=False)
    return array.tolist() if np.issubdtype(array.dtype, np.integer) and array.ndim == 1 else array


def _choose(fields: Mapping[str, Any], sample: _Sample, reading: Reading, path: Path) -> str:
    """Where the content is, from the first sample; raises ``ShardError`` naming its members."""
    if reading.content is not None:
        if reading.content.split(".")[0] in {name.split(".")[0] for name in sample.members}:
            return reading.content
        if reading.content.split(".")[0] in (fields.get("json") or {}):
            return reading.content
    else:
        for name in ("txt", "txt.gz", "text"):
            if name in fields:
                return name
        about = fields.get("json")
        for name in (*TEXT_COLUMNS, *TOKEN_COLUMNS):
            if isinstance(about, dict) and name in about:
                return f"json.{name}"
        for name in ("npy", *(f"{name}.npy" for name in TOKEN_COLUMNS)):
            if name in fields:
                return name
        if isinstance(about, list):
            return "json"
    found = ", ".join(map(repr, sample.members)) or "none"
    about = fields.get("json")
    if isinstance(about, dict):
        found += f"; fields of 'json': {', '.join(map(repr, about))}"
    raise ShardError(
        f"no member {reading.content or 'txt, json or npy'!r} that holds content; "
        f"members found: {found}",
        path=path,
        remedy="Name the member, or a field of one as json.text, with --content",
    )


def _at(fields: Mapping[str, Any], name: str) -> Any:
    """The value of a member, of a field of one, or of a field of ``json``."""
    if name in fields:
        return fields[name]
    parts = name.split(".")
    for i in range(len(parts) - 1, 0, -1):
        member = fields.get(".".join(parts[:i]))
        if isinstance(member, dict):
            return at(member, ".".join(parts[i:]))
    about = fields.get("json")
    return at(about, name) if isinstance(about, dict) else None


def _writer() -> Any:
    try:
        from webdataset import TarWriter
    except ImportError as error:
        raise ShardError(
            f"tar shards are written with webdataset, which cannot be imported: {error}",
            remedy="Install auditor[webdataset]",
        ) from error
    return TarWriter
