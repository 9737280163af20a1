"""From the frames of a ledger to a table: exposures, samples, signals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from auditor import schema
from auditor.ledger import NULL, Frame
from auditor.measure.agreement import similarity
from auditor.schema import STATES, UNSCORED

_SCORES: Final = ("dup_batch", "dup_window", "dup_run", "dup_of", "repetition")
_NONE: Final = np.zeros(0, np.int64)

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


def _exposures_of(frames: Iterable[Frame]) -> pl.DataFrame:
    parts: dict[str, list[Mapping[str, np.ndarray]]] = {}
    for frame in frames:
        parts.setdefault(frame.kind, []).append(frame.columns)
    if "batches" not in parts:
        return pl.DataFrame(schema=polars_schema(schema.EXPOSURES))
    rows = pl.concat([_batch_rows(columns) for columns in parts["batches"]])
    rows = rows.join(_steps(parts), on="batch", how="left", maintain_order="left")
    rows = rows.with_columns(state=pl.coalesce("closed", "state"))
    # The scores of a batch are in the order of its rows.
    rows = rows.with_columns(order=pl.int_range(pl.len(), dtype=pl.Int64).over("batch"))
    for part in (_scores(parts.get("scores", [])), _losses(parts.get("losses", []), rows)):
        rows = rows.join(part, on=["batch", "order"], how="left", maintain_order="left")
    packed = pl.int_range(pl.len(), dtype=pl.Int32).over("batch", "position")
    return rows.with_columns(part=packed).sort("batch", maintain_order=True)


def _batch_rows(columns: Mapping[str, np.ndarray]) -> pl.DataFrame:
    sizes = columns["n_samples"].astype(np.int64)
    starts = np.cumsum(sizes) - sizes
    position = columns.get("position", np.arange(sizes.sum()) - np.repeat(starts, sizes))
    states = np.asarray(schema.STATES, dtype=object)[columns["state"].astype(np.int64)]
    n_tokens = columns.get("n_tokens", np.full(sizes.sum(), NULL))
    rows = pl.DataFrame(
        {
            "batch": np.repeat(columns["batch"].astype(np.int64), sizes),
            "position": position.astype(np.int32),
            "key": columns["key"].astype(np.int64),
            "state": pl.Series(np.repeat(states, sizes), dtype=pl.String),
            "n_tokens": n_tokens.astype(np.int64),
        }
    )
    return rows.with_columns(_null_where_marked("n_tokens"))


def _steps(parts: Mapping[str, Sequence[Mapping[str, np.ndarray]]]) -> pl.DataFrame:
    """Of each closed batch its step and what became of it."""
    closed = _stacked(parts.get("steps", []), "batch", "step", "state")
    renumbered = _stacked(parts.get("renumbered", []), "closed", "step")
    return (
        closed.join(
            renumbered.rename({"closed": "step", "step": "renumbered"}).unique("step", keep="last"),
            on="step",
            how="left",
        )
        .select(
            "batch",
            step=pl.coalesce("renumbered", "step"),
            closed=pl.col("state").replace_strict(
                dict(enumerate(schema.STATES)), return_dtype=pl.String
            ),
        )
        .unique("batch", keep="last")
    )


def steps_of_batches(frames: Iterable[Frame]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """By batch, i64 [highest batch + 1]: its step and state, -1 where no step closed over it."""
    step, state = np.full(0, -1, np.int64), np.full(0, -1, np.int64)
    parts: dict[str, list[Mapping[str, np.ndarray]]] = {}
    for frame in frames:
        if frame.kind in ("steps", "renumbered"):
            parts.setdefault(frame.kind, []).append(frame.columns)
    if "steps" in parts:
        closed = {
            name: np.concatenate([one[name].astype(np.int64) for one in parts["steps"]])
            for name in ("batch", "step", "state")
        }
        step, state = (np.full(closed["batch"].max() + 1, -1, np.int64) for _ in range(2))
        step[closed["batch"]], state[closed["batch"]] = closed["step"], closed["state"]
    renumbered: dict[int, int] = {}
    for one in parts.get("renumbered", []):
        renumbered |= zip(one["closed"].tolist(), one["step"].tolist(), strict=True)
    as_closed = step.copy()
    for before, after in renumbered.items():
        step[as_closed == before] = after
    return step, state


def first_trained_step(frames: Iterable[Frame]) -> int | None:
    """The first step that was trained, None where none was."""
    step, state = steps_of_batches(frames)
    trained = step[state == STATES.index("trained")]
    return int(trained.min()) if len(trained) else None


def batches_of_steps(frames: Iterable[Frame], low: int, high: int) -> NDArray[np.int64]:
    """Ordinals of the batches that steps from ``low`` to ``high`` closed over."""
    step, _ = steps_of_batches(frames)
    return np.flatnonzero((step >= low) & (step <= high))


def frames_of_batches(frames: Iterable[Frame], batches: NDArray[np.int64]) -> Iterator[Frame]:
    """Frames that hold something of these batches; those of steps are all there."""
    first, last = int(batches.min()), int(batches.max())
    for frame in frames:
        of_batches = frame.columns.get("batch")
        if frame.kind == "renumbered" or (
            of_batches is not None
            and (frame.kind == "steps" or ((of_batches >= first) & (of_batches <= last)).any())
        ):
            yield frame


def _scores(parts: Sequence[Mapping[str, np.ndarray]]) -> pl.DataFrame:
    """Scores by batch and order of its rows."""
    frames = []
    for columns in parts:
        sizes = columns["n_samples"].astype(np.int64)
        n = int(sizes.sum())
        nearest = np.full(n, -1, np.int64)
        nearest[columns["dup_at"].astype(np.int64)] = columns["dup_of"].astype(np.int64)
        frames.append(
            pl.DataFrame(
                {
                    "batch": np.repeat(columns["batch"].astype(np.int64), sizes),
                    "order": np.arange(n) - np.repeat(np.cumsum(sizes) - sizes, sizes),
                    "dup_batch": similarity(columns["equal_batch"]),
                    "dup_window": similarity(columns["equal_window"]),
                    "dup_run": columns["dup_run"].astype(np.int32),
                    "dup_of": nearest,
                    "repetition": (columns["repetition"].astype(np.float64) / 65535).astype(
                        np.float32
                    ),
                    "scored": columns["equal_batch"] != UNSCORED,
                }
            )
        )
    types = {name: _TYPES[schema.EXPOSURES[name]] for name in _SCORES}
    types = {"batch": pl.Int64, "order": pl.Int64, **types, "scored": pl.Boolean}
    empty = pl.DataFrame(schema=types)
    table = pl.concat([empty, *frames])
    return table.select(
        "batch",
        "order",
        *(pl.when("scored").then(name).alias(name) for name in _SCORES if name != "dup_of"),
        pl.when(pl.col("dup_of") >= 0).then("dup_of").alias("dup_of"),
    )


def _losses(parts: Sequence[Mapping[str, np.ndarray]], rows: pl.DataFrame) -> pl.DataFrame:
    """Losses by batch and order of its rows; of groups that do not fit their batches, none."""
    sizes = dict(rows.group_by("batch").len().iter_rows())
    batches: list[int] = []
    counts: list[int] = []
    values: list[np.ndarray] = []
    for columns in parts:
        n_batches, n_losses = columns["n_batches"].tolist(), columns["n_losses"].tolist()
        of_group = np.split(columns["batch"], np.cumsum(n_batches)[:-1])
        losses = np.split(columns["loss"], np.cumsum(n_losses)[:-1])
        for group, loss in zip(of_group, losses, strict=True):
            n = [sizes.get(int(batch), 0) for batch in group]
            if sum(n) == len(loss):  # else a batch of them was dropped, and none can be told
                batches += group.tolist()
                counts += n
                values.append(loss)
    return pl.DataFrame(
        {
            "batch": np.repeat(np.asarray(batches, np.int64), np.asarray(counts, np.int64)),
            "order": np.concatenate([np.arange(n) for n in counts]) if counts else _NONE,
            "loss": np.concatenate(values) if values else _NONE.astype(np.float32),
        }
    )


def _stacked(parts: Sequence[Mapping[str, np.ndarray]], *names: str) -> pl.DataFrame:
    """Integer columns of frames, one below the other."""
    empty = pl.DataFrame(schema=dict.fromkeys(names, pl.Int64))
    frames = [pl.DataFrame(dict(one)).select(names).cast(pl.Int64) for one in parts]
    return pl.concat([empty, *frames])


def _samples_of(frames: Iterable[Frame]) -> pl.DataFrame:
    parts = [
        pl.DataFrame(
            {
                **{name: values.astype(np.int64) for name, values in frame.columns.items()},
                **{name: pl.Series(v, dtype=pl.String) for name, v in frame.strings.items()},
            }
        )
        for frame in frames
        if frame.kind == "samples"
    ]
    empty = pl.DataFrame(schema=polars_schema(schema.SAMPLES))
    frame = pl.concat([empty, *parts], how="diagonal")
    frame = frame.with_columns(_null_where_marked("row", "n_tokens"))
    return frame.unique("key", keep="first", maintain_order=True)


def _signals_of(frames: Iterable[Frame]) -> pl.DataFrame:
    columns = polars_schema(schema.SIGNALS)
    parts = [pl.DataFrame(schema=columns)]
    for frame in frames:
        if frame.kind == "signals":
            n = len(frame.columns["value"])
            part = pl.DataFrame(
                {
                    **frame.columns,
                    **{name: pl.Series(v, dtype=pl.String) for name, v in frame.strings.items()},
                    "step": np.full(n, frame.scalars["step"], np.int64),
                }
            )
            part = part.cast({"layer": pl.Int32, "head": pl.Int32, "n_rows": pl.Int32})
            part = part.with_columns(_null_where_marked("layer", "head", "n_rows"))
            parts.append(part)
        elif frame.kind == "scalars":
            wide = pl.DataFrame(
                {
                    name: values.astype(np.int64 if name == "step" else np.float64)
                    for name, values in frame.columns.items()
                }
            )
            long = wide.unpivot(index="step", variable_name="signal", value_name="value")
            # Not measured is no row; a loss that is NaN was measured.
            long = long.filter(pl.col("value").is_not_nan() | (pl.col("signal") == "loss"))
            parts.append(long.with_columns(pl.lit("step").alias("kind")))
    table = pl.concat(parts, how="diagonal_relaxed")
    # A step that was discarded and tried again is measured again: the last counts.
    whole = ["step", "signal", "kind", "site", "layer", "head", "segment", "variant"]
    table = table.unique(whole, keep="last", maintain_order=True)
    return table.with_columns(
        pl.col("site").fill_null(""),
        pl.when((pl.col("kind") == "step") | pl.col("value").is_not_nan()).then("value"),
    )


def _null_where_marked(*names: str) -> list[pl.Expr]:
    return [pl.when(pl.col(name) != NULL).then(name).alias(name) for name in names]


BUILDERS: Final[Mapping[str, Callable[[Iterable[Frame]], pl.DataFrame]]] = {
    "exposures": _exposures_of,
    "samples": _samples_of,
    "signals": _signals_of,
}
"""By ledger, what makes its table of its frames, without attempt and rank."""
