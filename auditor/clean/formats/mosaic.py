"""MosaicML Streaming (MDS): the unit is the folder whose ``index.json`` names its shards.

Read from the format: samples are found by the offsets at the head of a shard, and only the columns
that are wanted are decoded, pickled ones never. Written by ``streaming.MDSWriter``, the samples
byte for byte.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from auditor.clean.formats.folder import atomic_folder, read_index, within
from auditor.clean.row import (
    UNREADABLE,
    Findings,
    Reading,
    Row,
    changed,
    choose_content,
    row_of,
)
from auditor.errors import ShardError
from auditor.schema import ID_COLUMNS, MASK_COLUMN


def is_index(document: Any) -> bool:
    """Whether the content of an ``index.json`` is that of an MDS folder."""
    shards = document.get("shards") if isinstance(document, dict) else None
    return isinstance(shards, list) and all(
        isinstance(shard, dict) and shard.get("format") == "mds" for shard in shards
    )


def files(path: Path) -> tuple[Path, ...]:
    return (*(_file(path, shard) for shard in _shards(path)), path / "index.json")


def rows(path: Path, reading: Reading, findings: Findings) -> Iterator[Row]:
    """Samples in the order in which ``StreamingDataset`` counts them."""
    row = 0
    for shard in _shards(path):
        names = shard["column_names"]
        column = choose_content(names, reading.content, path)
        own = (*ID_COLUMNS, "source", "meta", MASK_COLUMN)
        tops = {name if name in names else name.split(".")[0] for name in reading.columns}
        tops |= {column if column in names else column.split(".")[0], *own}
        wanted = [name for name in names if name in tops]
        samples = _samples(path, shard)
        for _ in range(shard["samples"]):
            try:
                fields = _decoded(next(samples), shard, wanted)
            except (StopIteration, ShardError, *_FAULTS) as error:
                if reading.on_error == "raise":
                    raise _damaged(path, shard, row, error) from error
                findings.lost(row, f"cannot be read: {_reason(error)}")
                yield UNREADABLE
            else:
                yield row_of(fields, column, reading.columns, row, findings)
            row += 1


def copy(path: Path, out: Path, keep: NDArray[np.bool_], reading: Reading) -> None:
    """Write the kept samples with the columns, compression, hashes and size limit of the input.

    Needs the package ``mosaicml-streaming``.
    """
    shards = _shards(path)
    n_rows = sum(shard["samples"] for shard in shards)
    if n_rows != len(keep):
        raise changed(path, len(keep), n_rows)
    config = _config(path, shards)
    writer_of = _writer()
    # The writer sees to shards and index, and is given the bytes of samples.
    with atomic_folder(out) as folder, writer_of(out=str(folder), **config) as writer:
        row = 0
        for shard in shards:
            part = keep[row : row + shard["samples"]]
            row += len(part)
            if not part.any():
                continue
            samples = _samples(path, shard)
            for is_kept in part[: int(np.flatnonzero(part)[-1]) + 1]:
                try:
                    sample = next(samples)
                except (StopIteration, ShardError, *_FAULTS) as error:
                    raise _damaged(path, shard, None, error) from error
                if is_kept:
                    writer.write(sample)


def count(path: Path, reading: Reading) -> int:
    """Number of samples, from the index."""
    return sum(shard["samples"] for shard in _shards(path))


def lost(path: Path, keep: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Kept samples that cannot be copied, bool [n_rows]: from a fault on to the end of a shard."""
    cannot = keep.copy()
    row = 0
    for shard in _shards(path):
        stop = row + shard["samples"]
        if keep[row:stop].any():
            with suppress(ShardError, *_FAULTS):
                for number, _ in enumerate(_samples(path, shard), row):
                    cannot[number] = False
        row = stop
    return cannot


_FAULTS: Final = (OSError, EOFError, ValueError, KeyError, IndexError, zstandard.ZstdError)


def _shards(path: Path) -> list[dict[str, Any]]:
    index = path / "index.json"
    document = read_index(index)
    if not is_index(document):
        raise ShardError("is not an index of MDS shards", path=index)
    for shard in document["shards"]:
        if shard.get("version") != 2:
            raise ShardError(
                f"is of version {shard.get('version')}", path=index, remedy="Version 2 is read"
            )
        kinds = ("samples", "column_names", "column_encodings", "column_sizes", "raw_data")
        missing = [name for name in kinds if name not in shard]
        if missing:
            raise ShardError(f"a shard has no {', '.join(missing)}", path=index)
    return list(document["shards"])


def _file(path: Path, shard: dict[str, Any]) -> Path:
    """The shard's file, the one that is not compressed where both are there."""
    raw = within(path, shard["raw_data"]["basename"])
    packed = shard.get("zip_data")
    return raw if raw.exists() or not packed else within(path, packed["basename"])


def _samples(path: Path, shard: dict[str, Any]) -> Iterator[bytes]:
    """The encoded samples of a shard in order."""
    data = _content(path, shard)
    n = int.from_bytes(data[:4], "little")
    if n != shard["samples"]:
        raise ValueError(f"holds {n} samples, the index says {shard['samples']}")
    offsets = np.frombuffer(data, "<u4", n + 1, 4)
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        if not start <= stop <= len(data):
            raise ValueError("a sample lies beyond the end of the file")
        yield data[start:stop]


def _content(path: Path, shard: dict[str, Any]) -> bytes:
    file = _file(path, shard)
    size = int(shard["raw_data"]["bytes"])
    kind = str(shard.get("compression")).split(":")[0]
    stream: Any
    with file.open("rb") as packed:
        if file.name == Path(shard["raw_data"]["basename"]).name:
            stream = packed
        elif kind == "zstd":
            stream = zstandard.ZstdDecompressor(max_window_size=1 << 31).stream_reader(packed)
        elif kind == "gz":
            stream = gzip.GzipFile(fileobj=packed)
        else:
            raise ShardError(
                f"is compressed with {kind}, which is not read",
                path=file,
                remedy="Decompress the shards: the raw files are read where they are there",
            )
        # One byte more than is due tells a shard that is not what its index says.
        data = bytes(stream.read(size + 1))
    if len(data) != size:
        raise ValueError(f"does not have the {size} bytes that the index says")
    return data


def _decoded(sample: bytes, shard: dict[str, Any], wanted: list[str]) -> dict[str, Any]:
    sizes: list[int] = []
    at = 0
    for size in shard["column_sizes"]:
        if not size:
            size = int.from_bytes(sample[at : at + 4], "little")
            at += 4
        sizes.append(size)
    fields = {}
    named = zip(shard["column_names"], shard["column_encodings"], sizes, strict=True)
    for name, encoding, size in named:
        if name in wanted:
            fields[name] = _decode(encoding, sample[at : at + size])
        at += size
    if at != len(sample):
        raise ValueError(f"a sample has {len(sample)} bytes, its columns {at}")
    return fields


def _decode(encoding: str, data: bytes) -> Any:
    kind, _, rest = encoding.partition(":")
    if kind == "ndarray":
        array = _ndarray(rest, data)
        integers = np.issubdtype(array.dtype, np.integer) and array.ndim == 1
        return array.tolist() if integers else array
    decode = _DECODE.get(kind)
    return decode(data) if decode else data


_SCALARS: Final = (
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64"),
)
_DECODE: Final[dict[str, Callable[[bytes], Any]]] = {
    "str": lambda data: data.decode("utf-8"),
    "bytes": lambda data: data.decode("utf-8"),
    "json": json.loads,
    "int": lambda data: int.from_bytes(data, "little", signed=True),
    "str_int": lambda data: int(data),
    "str_float": lambda data: float(data),
    **{
        name: (lambda data, name=name: np.frombuffer(data, name)[0].item())  # type: ignore[misc]
        for name in _SCALARS
    },
}
_DTYPES: Final = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}


def _ndarray(arguments: str, data: bytes) -> NDArray[Any]:
    """An array whose type and shape are given by the encoding, else by the first bytes."""
    dtype, _, given = arguments.partition(":")
    at = 0
    if not dtype:
        dtype, at = _DTYPES[data[0]], 1
    if given:
        shape = tuple(map(int, given.split(",")))
    else:
        n_dims, width = data[at] >> 2, 1 << (data[at] & 3)
        at += 1
        shape = tuple(np.frombuffer(data, f"<u{width}", n_dims, at).tolist())
        at += n_dims * width
    return np.frombuffer(data, dtype, offset=at).reshape(shape)


def _config(path: Path, shards: list[dict[str, Any]]) -> dict[str, Any]:
    """Arguments of the writer that made the shards."""
    keys = ("column_names", "column_encodings", "compression", "hashes", "size_limit")
    configs: list[dict[str, Any]] = [{key: shard.get(key) for key in keys} for shard in shards]
    if any(config != configs[0] for config in configs[1:]):
        raise ShardError(
            "holds shards that were written with different settings",
            path=path,
            remedy="Clean the folders that were merged one by one",
        )
    if not configs:
        return {"columns": {}}
    first = configs[0]
    columns = dict(zip(first["column_names"], first["column_encodings"], strict=True))
    return {
        "columns": columns,
        **{key: first[key] for key in ("compression", "hashes", "size_limit")},
    }


def _writer() -> Any:
    try:
        from streaming import MDSWriter  # type: ignore[import-not-found]
    except ImportError as error:
        raise ShardError(
            f"MDS shards are written with mosaicml-streaming, which cannot be imported: {error}",
            remedy="Install auditor[mosaic]",
        ) from error

    class Writer(MDSWriter):
        """Takes samples as they are encoded already."""

        def encode_sample(self, sample: bytes) -> bytes:
            return sample

    return Writer


def _damaged(path: Path, shard: dict[str, Any], row: int | None, error: Exception) -> Exception:
    if isinstance(error, ShardError):
        return error
    return ShardError(
        f"cannot be read: {_reason(error)}",
        path=_file(path, shard),
        row=row,
        remedy="Fetch or write the folder again",
    )


def _reason(error: Exception) -> str:
    return "it ends early" if isinstance(error, StopIteration) else str(error)
