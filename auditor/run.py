"""The read side of a run directory: facts as tables, whatever state the run is in.

    run = Run.open("run/")
    run.scan("exposures").filter(pl.col("step") > 9000).collect()

Facts are read from the ledgers of every attempt and rank, of a running run too, and kept as
Parquet under ``derived/`` until a ledger grows.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import polars as pl

from auditor import schema
from auditor.attempt import LEDGERS, place_of, read_run_json, write_json
from auditor.errors import RunError
from auditor.files import atomic
from auditor.ledger import NULL, Frame, LedgerReader
from auditor.measure.agreement import similarity
from auditor.schema import UNSCORED

FACTS: Final[Mapping[str, Mapping[str, str]]] = {
    "exposures": schema.EXPOSURES,
    "samples": schema.SAMPLES,
    "signals": schema.SIGNALS,
}
DERIVED: Final[Mapping[str, Mapping[str, str]]] = {
    "composition": schema.COMPOSITION,
    "grades": schema.GRADES,
    "events": schema.EVENTS,
    "suspects": schema.SUSPECTS,
}
View = Literal["effective", "all"]

_PLACE: Final = ("attempt", "rank", "key")
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


class Run:
    """A run directory, opened for reading; see :meth:`open`."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        self.facts = facts
        self.torn_bytes: dict[str, int] = {}
        self._tables: dict[str, pl.LazyFrame] = {}

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Open a run directory; a run that is still being written may be opened.

        Raises:
            RunError: not a run directory.
            SchemaVersionError: of another version of the format.
        """
        path = Path(path)
        return cls(path, read_run_json(path))

    @property
    def run_id(self) -> str:
        return str(self.facts["run_id"])

    @property
    def derived(self) -> Path:
        """The folder of all that can be rebuilt."""
        return self.path / "derived"

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """What each attempt of each rank noted about itself, by rank and number.

        Without those whose file cannot be read, which :meth:`gaps` tells of.
        """
        return [noted for noted in self._noted().values() if noted is not None]

    def _noted(self) -> dict[tuple[int, int], dict[str, Any] | None]:
        """By rank and attempt what is in its file; None where that is damaged."""
        found: dict[tuple[int, int], dict[str, Any] | None] = {}
        for path in self.path.glob("attempts/rank-*/attempt-*.json"):
            place = place_of(path)
            if place is not None:
                found[place] = _noted_in(path)
        return dict(sorted(found.items()))

    @property
    def shards(self) -> list[dict[str, Any]]:
        """The data files the latest attempt read: path, bytes, sha256 (null where not hashed)."""
        for attempt in reversed(self.attempts):
            if attempt.get("shards"):
                return list(attempt["shards"])
        return []

    def gaps(self) -> list[str]:
        """What is known to be missing from the record, in words; empty when nothing is."""
        found = []
        noted = self._noted()
        for (rank, number), attempt in noted.items():
            where = f"attempt {number}, rank {rank}"
            if attempt is None:
                found.append(
                    f"{where}: its attempt-{number:04d}.json is damaged; what it noted is "
                    "not known (restore the file from a copy, or remove it)"
                )
                continue
            if "closed" not in attempt:
                found.append(f"{where}: still running, or killed before it closed")
            for what, count in sorted(attempt.get("counts", {}).items()):
                found.append(f"{where}: {count} {what.replace('_', ' ')}")
            for place, count in sorted(attempt.get("failures", {}).items()):
                found.append(f"{where}: {place} failed {count} times")
        world_size = int(self.facts.get("world_size", 1))
        present = {rank for rank, _ in noted}
        missing = sorted(set(range(world_size)) - present)
        if missing:
            found.append(f"no record of ranks {missing} of {world_size}")
        for name, n_bytes in sorted(self.torn_bytes.items()):
            found.append(f"{name}: the last {n_bytes} bytes are torn and were dropped")
        return found

    def scan(self, table: str, view: View = "effective") -> pl.LazyFrame:
        """A table as a ``polars.LazyFrame``.

        Facts are ``exposures`` (columns of ``schema.EXPOSURES_JOINED``), ``samples`` and
        ``signals``; derived tables are ``composition``, ``grades``, ``events`` and ``suspects``.
        The ``effective`` view hides what a later attempt rolled back: of two attempts that trained
        the same step, the later counts.

        Raises:
            ValueError: there is no such table or view.
            RunError: a derived table that has not been made yet.
        """
        if view not in ("effective", "all"):
            raise ValueError(f"view must be 'effective' or 'all', got {view!r}")
        if table in DERIVED:
            return self._scan_derived(table)
        if table not in FACTS:
            raise ValueError(f"table must be one of {[*FACTS, *DERIVED]}, got {table!r}")
        if table == "samples":
            return self._facts("samples")
        frame = self._facts(table)
        if view == "effective":
            frame = frame.filter(~_rolled_back(self._first_steps()))
        if table == "exposures":
            frame = _with_samples(frame, self._facts("samples"))
        return frame

    def write_derived(self, table: str, frame: pl.DataFrame) -> None:
        """Keep a derived table under ``derived/``, cast to its schema."""
        columns = polars_schema(DERIVED[table])
        self.derived.mkdir(exist_ok=True)
        _write_parquet(frame.select(list(columns)).cast(columns), self.derived / f"{table}.parquet")

    def _scan_derived(self, table: str) -> pl.LazyFrame:
        path = self.derived / f"{table}.parquet"
        if not path.exists():
            raise RunError(
                f"the table {table!r} has not been derived yet",
                path=self.path,
                remedy=f"Run: auditor report {self.path}",
            )
        if not _is_whole(path):
            raise RunError(
                "cannot be read: the file is damaged",
                path=path,
                remedy=f"Delete {self.derived}, which auditor report {self.path} makes again",
            )
        return pl.scan_parquet(path)

    def _first_steps(self) -> list[tuple[int, int, int]]:
        """(rank, attempt, first step trained) of each attempt that trained any."""
        exposures = self._facts("exposures").filter(pl.col("state") == "trained")
        first = exposures.group_by("rank", "attempt").agg(pl.col("step").min()).collect()
        if first.is_empty():  # a run with a monitor only
            signals = self._facts("signals")
            first = signals.group_by("rank", "attempt").agg(pl.col("step").min()).collect()
        return [(row["rank"], row["attempt"], row["step"]) for row in first.iter_rows(named=True)]

    def _ledgers(self, table: str) -> list[tuple[int, int, Path]]:
        paths = sorted(self.path.glob(f"{table}/rank-*/attempt-*.ledger"))
        places = [(place_of(path), path) for path in paths]
        return [(*place, path) for place, path in places if place is not None]

    def _facts(self, table: str) -> pl.LazyFrame:
        """The table from the Parquet copy when it is as old as the ledgers, else from them.

        Read once: what a running run adds later is for the next opening.
        """
        if table not in self._tables:
            self._tables[table] = self._read_facts(table)
        return self._tables[table]

    def _read_facts(self, table: str) -> pl.LazyFrame:
        ledgers = self._ledgers(table)
        state = {str(path.relative_to(self.path)): path.stat().st_size for _, _, path in ledgers}
        columns = dict(FACTS[table])
        copy, stamp = self.derived / f"{table}.parquet", self.derived / f"{table}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            noted = json.loads(stamp.read_text(encoding="utf-8"))
            as_old = (noted["ledgers"], noted["columns"]) == (state, columns)
            # The stamp was written last: a copy that was changed since then is not ours.
            if as_old and copy.stat().st_mtime_ns <= stamp.stat().st_mtime_ns and _is_whole(copy):
                self.torn_bytes.update(noted["torn_bytes"])
                return pl.scan_parquet(copy)
        types = polars_schema(columns)
        parts = []
        torn: dict[str, int] = {}
        for rank, attempt, path in ledgers:
            reader = LedgerReader(path)
            part = _BUILDERS[table](reader)
            if reader.torn_bytes:
                torn[str(path.relative_to(self.path))] = reader.torn_bytes
            added = {"rank": rank, "attempt": attempt}
            part = part.with_columns(
                pl.lit(value).alias(name) for name, value in added.items() if name in columns
            )
            parts.append(part.select(list(types)).cast(types))
        frame = pl.concat(parts) if parts else pl.DataFrame(schema=types)
        if table == "samples":
            frame = frame.unique(["attempt", "rank", "key"], keep="first", maintain_order=True)
        self.torn_bytes.update(torn)
        with contextlib.suppress(OSError):  # a run on a read-only disk is read all the same
            self.derived.mkdir(exist_ok=True)
            _write_parquet(frame, copy)
            write_json(stamp, {"ledgers": state, "columns": columns, "torn_bytes": torn})
        return frame.lazy()


def _noted_in(path: Path) -> dict[str, Any] | None:
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return noted if isinstance(noted, dict) and {"attempt", "rank"} <= noted.keys() else None


def _is_whole(path: Path) -> bool:
    """Whether a Parquet file has its end, where it says what is in it."""
    try:
        pl.read_parquet_schema(path)
    except (OSError, pl.exceptions.PolarsError):
        return False
    return True


def _write_parquet(frame: pl.DataFrame, path: Path) -> None:
    with atomic(path) as file:
        frame.write_parquet(file)


def _rolled_back(first_steps: list[tuple[int, int, int]]) -> pl.Expr:
    """Steps of an attempt that a later attempt of the rank trained again, or went back behind."""
    expression = pl.lit(False)
    for rank, attempt, step in first_steps:
        expression = expression | (
            (pl.col("rank") == rank) & (pl.col("attempt") < attempt) & (pl.col("step") >= step)
        )
    return expression.fill_null(False)


def _with_samples(exposures: pl.LazyFrame, samples: pl.LazyFrame) -> pl.LazyFrame:
    # A key means something inside its attempt only: the next may read another dataset. Where one
    # rank reads for the others, it alone has described the samples.
    samples = samples.drop("preview")
    described = [name for name in samples.collect_schema().names() if name not in _PLACE]
    anywhere = samples.unique(["attempt", "key"], keep="first", maintain_order=True)
    joined = exposures.rename({"n_tokens": "n_tokens_seen"}).join(
        samples.with_columns(own=True),
        on=_PLACE,
        how="left",
        maintain_order="left",
    )
    joined = joined.join(
        anywhere.drop("rank"),
        on=["attempt", "key"],
        how="left",
        maintain_order="left",
        suffix="_anywhere",
    )
    joined = joined.with_columns(
        pl.when("own").then(name).otherwise(f"{name}_anywhere").alias(name) for name in described
    )
    joined = joined.with_columns(
        pl.max_horizontal("dup_batch", "dup_window").alias("duplication"),
        pl.col("sample_id").fill_null(pl.col("key").cast(pl.String)),
        pl.coalesce("n_tokens_seen", "n_tokens").alias("n_tokens"),
    )
    return joined.select(list(schema.EXPOSURES_JOINED))


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
    return frame.with_columns(_null_where_marked("row", "n_tokens"))


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


_BUILDERS: Final[Mapping[str, Callable[[Iterable[Frame]], pl.DataFrame]]] = {
    "exposures": _exposures_of,
    "samples": _samples_of,
    "signals": _signals_of,
}
assert set(_BUILDERS) == set(LEDGERS)
