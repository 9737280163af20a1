"""From the frames of a ledger to a table: exposures, samples, signals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from auditor import schema
from auditor.ledger import NULL, Frame, LedgerReader
from auditor.measure.agreement import similarity
from auditor.schema import STATES, UNSCORED

_SCORES: Final = ("dup_batch", "dup_window", "dup_run", "dup_of", "repetition")
_ROWS_AT_A_TIME: Final = 1 << 17

_TYPES: Final[Mapping[str, Any]] = {
    "i32": pl.Int32,
    "i64": pl.Int64,
    "f32": pl.Float32,
    "f64": pl.Float64,
    "str": pl.String,
    "bool": pl.Boolean,
}


def polars_schema(columns: Mapping[str, str]) -> pl.Schema:
    """A table of :mod:`auditor.schema` as polars types by column."""
    return pl.Schema({name: _TYPES[kind] for name, kind in columns.items()})


def _exposures_of(frames: Iterable[Frame], closed: Closed | None = None) -> pl.DataFrame:
    """Exposures; ``closed``: what steps closed over, where the frames do not tell."""
    parts: dict[str, list[Mapping[str, np.ndarray]]] = {}
    for frame in frames:
        parts.setdefault(frame.kind, []).append(frame.columns)
    if "batches" not in parts:
        return pl.DataFrame(schema=polars_schema(schema.EXPOSURES))
    if closed is None:
        closed = closed_of(parts)
    rows = _batch_rows(parts["batches"], closed)
    # The scores of a batch are in the order of its rows.
    rows = rows.with_columns(order=pl.int_range(pl.len(), dtype=pl.Int64).over("batch"))
    for part in (_scores(parts.get("scores", [])), _losses(parts.get("losses", []), rows)):
        rows = rows.join(part, on=["batch", "order"], how="left", maintain_order="left")
    packed = pl.int_range(pl.len(), dtype=pl.Int32).over("batch", "position")
    return rows.with_columns(part=packed).sort("batch", maintain_order=True)


def _batch_rows(parts: Sequence[Mapping[str, np.ndarray]], closed: Closed) -> pl.DataFrame:
    batch, sizes, state = (joined(parts, name) for name in ("batch", "n_samples", "state"))
    whole = [
        {
            "key": one["key"],
            "position": one.get("position", places(one["n_samples"].astype(np.int64))),
            "n_tokens": one.get("n_tokens", np.full(len(one["key"]), NULL)),
        }
        for one in parts
    ]
    is_closed = batch < len(closed.state)
    step, closed_state = np.full(len(batch), -1), np.full(len(batch), -1)
    step[is_closed] = closed.step[batch[is_closed]]
    closed_state[is_closed] = closed.state[batch[is_closed]]
    states = np.asarray(schema.STATES, dtype=object)[
        np.where(closed_state < 0, state, closed_state)
    ]
    rows = pl.DataFrame(
        {
            "batch": np.repeat(batch, sizes),
            "position": joined(whole, "position").astype(np.int32),
            "key": joined(whole, "key"),
            "state": pl.Series(np.repeat(states, sizes), dtype=pl.String),
            "n_tokens": joined(whole, "n_tokens"),
            "step": np.repeat(step, sizes),
        }
    )
    return rows.with_columns(
        *_null_where_marked("n_tokens"), pl.when(pl.col("step") >= 0).then("step").alias("step")
    )


def places(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place of each row in its batch, i64 [rows]; ``sizes`` i64 [batches]."""
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def joined(
    parts: Sequence[Mapping[str, np.ndarray]], name: str, kind: Any = np.int64
) -> NDArray[Any]:
    """One column of many frames."""
    return np.concatenate([np.zeros(0, kind), *(one[name].astype(kind) for one in parts)])


@dataclass(frozen=True)
class Closed:
    """What became of batches, i64 [highest batch + 1]: step and state, -1 where no step closed."""

    step: NDArray[np.int64]
    state: NDArray[np.int64]

    @property
    def first_trained(self) -> int | None:
        """The first step that was trained, None where none was."""
        trained = self.step[self.state == STATES.index("trained")]
        return int(trained.min()) if len(trained) else None


def closed_of(parts: Mapping[str, Sequence[Mapping[str, np.ndarray]]]) -> Closed:
    """What the columns of frames, by kind, say of batches."""
    steps = parts.get("steps", [])
    batch = joined(steps, "batch")
    step, state = (np.full(int(batch.max(initial=-1)) + 1, -1) for _ in range(2))
    step[batch], state[batch] = joined(steps, "step"), joined(steps, "state")
    renumbered: dict[int, int] = {}
    for one in parts.get("renumbered", []):
        renumbered |= zip(one["closed"].tolist(), one["step"].tolist(), strict=True)
    as_closed = step.copy()
    for before, after in renumbered.items():
        step[as_closed == before] = after
    return Closed(step, state)


class ExposureIndex:
    """Which frames of a ledger of exposures hold which batches, and which steps closed over them.

    So the exposures of some steps are read without all others.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        parts: dict[str, list[Mapping[str, np.ndarray]]] = {}
        starts, first, last = [], [], []
        reader = LedgerReader(path, columns=("batch", "step", "state", "closed"))
        start = reader.end
        for frame in reader:
            if frame.kind in ("steps", "renumbered"):
                parts.setdefault(frame.kind, []).append(frame.columns)
            elif len(frame.columns["batch"]):
                starts.append(start)
                first.append(int(frame.columns["batch"].min()))
                last.append(int(frame.columns["batch"].max()))
            start = reader.end
        self.closed = closed_of(parts)
        self._starts = np.asarray(starts, np.int64)
        self._first, self._last = np.asarray(first, np.int64), np.asarray(last, np.int64)

    def exposures(self, low: int, high: int) -> pl.DataFrame:
        """Exposures of steps ``low`` to ``high``, both included, and perhaps of others."""
        batches = np.flatnonzero((self.closed.step >= low) & (self.closed.step <= high))
        if not len(batches):
            return pl.DataFrame(schema=polars_schema(schema.EXPOSURES))
        inside = (self._last >= batches[0]) & (self._first <= batches[-1])
        return _exposures_of(self._frames(self._starts[inside]), self.closed)

    def by_batches(self, n: int) -> Iterator[tuple[range, Iterator[Frame]]]:
        """Ordinals of ``n`` batches at a time, and the frames that hold something of them.

        Or of some more: batches of one step are never parted.
        """
        first, end = 0, int(self._last.max(initial=-1)) + 1
        step = self.closed.step
        while first < end:
            stop = first + n
            closed = step[first:stop]
            if (closed >= 0).any():
                together = np.flatnonzero(step == closed[closed >= 0][-1])
                stop = max(stop, int(together[-1]) + 1)
            inside = (self._last >= first) & (self._first < stop)
            yield range(first, stop), self._frames(self._starts[inside])
            first = stop

    def _frames(self, starts: NDArray[np.int64]) -> Iterator[Frame]:
        return LedgerReader(self._path).at(starts.tolist())


def _scores(parts: Sequence[Mapping[str, np.ndarray]]) -> pl.DataFrame:
    """Scores by batch and order of its rows."""
    sizes = joined(parts, "n_samples")
    nearest = np.full(int(sizes.sum()), -1)
    starts = np.cumsum([0, *(len(one["equal_batch"]) for one in parts)])
    for start, one in zip(starts.tolist(), parts, strict=False):
        nearest[start + one["dup_at"].astype(np.int64)] = one["dup_of"]
    by_batch, by_window = (
        joined(parts, name, np.uint8) for name in ("equal_batch", "equal_window")
    )
    repetition = joined(parts, "repetition", np.float64) / 65535
    table = pl.DataFrame(
        {
            "batch": np.repeat(joined(parts, "batch"), sizes),
            "order": places(sizes),
            "dup_batch": similarity(by_batch),
            "dup_window": similarity(by_window),
            "dup_run": joined(parts, "dup_run", np.int32),
            "dup_of": nearest,
            "repetition": repetition.astype(np.float32),
            "scored": by_batch != UNSCORED,
        }
    )
    return table.select(
        "batch",
        "order",
        *(pl.when("scored").then(name).alias(name) for name in _SCORES if name != "dup_of"),
        pl.when(pl.col("dup_of") >= 0).then("dup_of").alias("dup_of"),
    )


def _losses(parts: Sequence[Mapping[str, np.ndarray]], rows: pl.DataFrame) -> pl.DataFrame:
    """Losses by batch and order of its rows."""
    batch, n_rows, loss = fitting_losses(parts, dict(rows.group_by("batch").len().iter_rows()))
    return pl.DataFrame(
        {"batch": np.repeat(batch, n_rows), "order": places(n_rows), "loss": loss},
        schema_overrides={"order": pl.Int64},
    )


def fitting_losses(
    parts: Sequence[Mapping[str, np.ndarray]], sizes: Mapping[int, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Batches i64 [B], their rows i64 [B], and the losses of these rows in order, f32.

    ``sizes``: rows by batch. Losses came for some batches together; where a batch of them was
    dropped, none of their rows can be told, and they are left out.
    """
    batches: list[int] = []
    counts: list[int] = []
    values: list[np.ndarray] = []
    for columns in parts:
        n_batches, n_losses = columns["n_batches"].tolist(), columns["n_losses"].tolist()
        of_group = np.split(columns["batch"], np.cumsum(n_batches)[:-1])
        losses = np.split(columns["loss"], np.cumsum(n_losses)[:-1])
        for group, loss in zip(of_group, losses, strict=True):
            n = [sizes.get(int(batch), 0) for batch in group]
            if sum(n) == len(loss):
                batches += group.tolist()
                counts += n
                values.append(loss)
    return (
        np.asarray(batches, np.int64),
        np.asarray(counts, np.int64),
        np.concatenate([np.zeros(0, np.float32), *values]),
    )


def _samples_of(frames: Iterable[Frame]) -> pl.DataFrame:
    empty = pl.DataFrame(schema={**polars_schema(schema.SAMPLES), "frame": pl.Int64})
    parts = [empty]
    samples = (frame for frame in frames if frame.kind == "samples")
    # Some at a time: as objects of Python, strings take several times what they take in a table.
    while some := _some(samples):
        parts.append(
            pl.concat(_stacked(some), how="diagonal_relaxed").sort("frame", maintain_order=True)
        )
    frame = pl.concat(parts, how="diagonal_relaxed")
    frame = frame.with_columns(_null_where_marked("row", "n_tokens"))
    return frame.unique("key", keep="first", maintain_order=True)


def _some(frames: Iterator[Frame]) -> list[Frame]:
    """The next frames, ``_ROWS_AT_A_TIME`` rows or a few more."""
    some, n_rows = [], 0
    for frame in frames:
        some.append(frame)
        n_rows += len(frame.columns["key"])
        if n_rows >= _ROWS_AT_A_TIME:
            break
    return some


def _signals_of(frames: Iterable[Frame]) -> pl.DataFrame:
    parts = [frame for frame in frames if frame.kind in ("signals", "scalars")]
    tables = [pl.DataFrame(schema={**polars_schema(schema.SIGNALS), "frame": pl.Int64})]
    for stacked in _stacked([one if one.kind == "signals" else _as_floats(one) for one in parts]):
        if "value" in stacked.columns:
            tables.append(stacked.with_columns(_null_where_marked("layer", "head", "n_rows")))
            continue
        long = stacked.unpivot(index=["step", "frame"], variable_name="signal", value_name="value")
        # Not measured is no row; a loss that is NaN was measured.
        long = long.filter(pl.col("value").is_not_nan() | (pl.col("signal") == "loss"))
        tables.append(long.with_columns(pl.lit("step").alias("kind")))
    table = pl.concat(tables, how="diagonal_relaxed").sort("frame", maintain_order=True)
    # A step that was discarded and tried again is measured again: the last counts.
    whole = ["step", "signal", "kind", "site", "layer", "head", "segment", "variant"]
    table = table.unique(whole, keep="last", maintain_order=True)
    return table.with_columns(
        pl.col("site").fill_null(""),
        pl.when((pl.col("kind") == "step") | pl.col("value").is_not_nan()).then("value"),
    )


def _as_floats(scalars: Frame) -> Frame:
    columns = {
        name: values.astype(np.int64 if name == "step" else np.float64)
        for name, values in scalars.columns.items()
    }
    return Frame("scalars", {}, columns)


def _stacked(frames: Sequence[Frame]) -> Iterator[pl.DataFrame]:
    """Frames that have the same columns as one table, integers as i64, with the number of each in
    ``frame``; scalars are columns. One table each would cost more than what they hold."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for number, frame in enumerate(frames):
        names = (*sorted(frame.columns), *sorted(frame.strings), *sorted(frame.scalars))
        alike.setdefault(names, []).append(number)
    for numbers in alike.values():
        some = [frames[number] for number in numbers]
        sizes = [len(next(iter(frame.columns.values()))) for frame in some]
        columns: dict[str, Any] = {}
        for name, values in some[0].columns.items():
            kind = np.float64 if values.dtype.kind == "f" else np.int64
            columns[name] = joined([frame.columns for frame in some], name, kind)
        for name in some[0].strings:
            texts = [text for frame in some for text in frame.strings[name]]
            columns[name] = pl.Series(texts, dtype=pl.String)
        for name in some[0].scalars:
            columns[name] = np.repeat([frame.scalars[name] for frame in some], sizes)
        yield pl.DataFrame({**columns, "frame": np.repeat(numbers, sizes)})


def _null_where_marked(*names: str) -> list[pl.Expr]:
    return [pl.when(pl.col(name) != NULL).then(name).alias(name) for name in names]


BUILDERS: Final[Mapping[str, Callable[[Iterable[Frame]], pl.DataFrame]]] = {
    "exposures": _exposures_of,
    "samples": _samples_of,
    "signals": _signals_of,
}
"""By ledger, what makes its table of its frames, without attempt and rank."""
