"""The read side of a run directory: facts as tables, whatever state the run is in.

    run = Run.open("run/")
    run.scan("exposures").filter(pl.col("step") > 9000).collect()

Facts are read from the ledgers of every attempt and rank, of a running run too, one ledger at a
time, and kept as Parquet under ``derived/`` until that ledger grows.
"""

from __future__ import annotations

import contextlib
import html
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import polars as pl

from auditor import schema
from auditor.attempt import place_of, read_run_json, write_json
from auditor.errors import RunError
from auditor.files import atomic
from auditor.ledger import LedgerReader
from auditor.tables import BUILDERS, ExposureIndex, polars_schema

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
    "drifts": schema.DRIFTS,
}
View = Literal["effective", "all"]


_PLACE: Final = ("attempt", "rank", "key")


class Run:
    """A run directory, opened for reading; see :meth:`open`."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        self.facts = facts
        self.torn_bytes: dict[str, int] = {}
        self._tables: dict[str, pl.LazyFrame] = {}
        self._first: list[tuple[int, int, int]] | None = None
        self._indices: dict[Path, ExposureIndex] = {}

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Open a run directory; a run that is still being written may be opened.

        Raises:
            RunError: not a run directory.
            SchemaVersionError: of another version of the format.
        """
        path = Path(path)
        return cls(path, read_run_json(path))

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        """What a notebook shows of a run; no ledger is read for it."""
        derived = [table for table in DERIVED if (self.derived / f"{table}.parquet").exists()]
        gaps = self.gaps()
        told = {
            "run": self.run_id,
            "folder": str(self.path),
            "attempts": str(len({number for _, number in self._noted()})),
            "ranks": str(len({rank for rank, _ in self._noted()})),
            "recorded": ", ".join(filter(self.ledgers, FACTS)) or "nothing",
            "derived": ", ".join(derived) or f"nothing yet: auditor report {self.path}",
            "gaps": "; ".join(gaps) or "none known",
        }
        rows = (
            f"<tr><th scope='row'>{name}</th><td>{html.escape(value)}</td></tr>"
            for name, value in told.items()
        )
        return f"<table>{''.join(rows)}</table>"

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

    def scan(
        self, table: str, view: View = "effective", *, steps: tuple[int, int] | None = None
    ) -> pl.LazyFrame:
        """A table as a ``polars.LazyFrame``.

        Facts are ``exposures`` (columns of ``schema.EXPOSURES_JOINED``), ``samples`` and
        ``signals``; derived tables are ``composition``, ``grades``, ``events``, ``suspects`` and
        ``drifts``.
        The ``effective`` view hides what a later attempt rolled back: of two attempts that trained
        the same step, the later counts.

        ``steps`` asks for the exposures of these steps alone, first and last included: of a long
        run they are read without all others.

        Raises:
            ValueError: there is no such table or view, or ``steps`` of another table.
            RunError: a derived table that has not been made yet.
        """
        if view not in ("effective", "all"):
            raise ValueError(f"view must be 'effective' or 'all', got {view!r}")
        if table in DERIVED:
            return self._scan_derived(table)
        if table not in FACTS:
            raise ValueError(f"table must be one of {[*FACTS, *DERIVED]}, got {table!r}")
        if steps is not None and table != "exposures":
            raise ValueError(f"steps= goes with exposures, not with {table!r}")
        if table == "samples":
            return self._facts("samples")
        frame = self._facts(table) if steps is None else self._exposures_of(*steps)
        if view == "effective":
            frame = frame.filter(~rolled_back(self.first_steps()))
        if table == "exposures":
            samples = self._facts("samples").drop("preview")
            if steps is not None:  # few of very many
                samples = _samples_at(samples, frame.select(_PLACE).unique().collect())
            frame = _with_samples(frame, samples)
        return frame

    def exposures(self, low: int, high: int) -> pl.LazyFrame:
        """The exposures of steps ``low`` to ``high``, both included, in the effective view."""
        return self.scan("exposures", steps=(low, high))

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

    def first_steps(self) -> list[tuple[int, int, int]]:
        """(rank, attempt, first step trained) of each attempt that trained any."""
        if self._first is None:
            steps = {
                (rank, attempt): self.index(path).closed.first_trained
                for rank, attempt, path in self.ledgers("exposures")
            }
            self._first = [(*place, step) for place, step in steps.items() if step is not None]
        if not self._first:  # a run with a monitor only
            signals = self._facts("signals")
            first = signals.group_by("rank", "attempt").agg(pl.col("step").min()).collect()
            self._first = [*first.select("rank", "attempt", "step").iter_rows()]
        return self._first

    def ledgers(self, table: str) -> list[tuple[int, int, Path]]:
        """(rank, attempt, file) of each ledger of a table of facts."""
        paths = sorted(self.path.glob(f"{table}/rank-*/attempt-*.ledger"))
        places = [(place_of(path), path) for path in paths]
        return [(*place, path) for place, path in places if place is not None]

    def _facts(self, table: str) -> pl.LazyFrame:
        """The table from Parquet copies of ledgers where they are as old, else from the ledgers.

        Read once: what a running run adds later is for the next opening.
        """
        if table not in self._tables:
            parts = []
            for _, ledgers in itertools.groupby(self.ledgers(table), key=lambda one: one[:2]):
                some = [self._fact(table, *ledger) for ledger in ledgers]
                # Each worker of a loader describes what it reads, and several may read the same.
                several = table == "samples" and len(some) > 1
                part = pl.concat(some)
                parts.append(
                    part.unique(_PLACE, keep="first", maintain_order=True) if several else part
                )
            empty = pl.DataFrame(schema=polars_schema(FACTS[table])).lazy()
            self._tables[table] = pl.concat(parts) if parts else empty
        return self._tables[table]

    def _exposures_of(self, low: int, high: int) -> pl.LazyFrame:
        """Exposures of some steps, from the ledgers."""
        types = polars_schema(FACTS["exposures"])
        parts = [pl.DataFrame(schema=types)]
        for rank, attempt, path in self.ledgers("exposures"):
            found = self.index(path).exposures(low, high)
            parts.append(_placed(found, types, rank, attempt))
        return pl.concat(parts).lazy().filter(pl.col("step").is_between(low, high))

    def index(self, ledger: Path) -> ExposureIndex:
        """What is where in a ledger of exposures, found out once."""
        if ledger not in self._indices:
            self._indices[ledger] = ExposureIndex(ledger)
        return self._indices[ledger]

    def _fact(self, table: str, rank: int, attempt: int, ledger: Path) -> pl.LazyFrame:
        """The rows of one ledger."""
        name = str(ledger.relative_to(self.path))
        size, columns = ledger.stat().st_size, dict(FACTS[table])
        copy = (self.derived / name).with_suffix(".parquet")
        stamp = copy.with_suffix(".json")
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            noted = json.loads(stamp.read_text(encoding="utf-8"))
            as_old = (noted["bytes"], noted["columns"]) == (size, columns)
            # The stamp was written last: a copy that was changed since then is not ours.
            if as_old and copy.stat().st_mtime_ns <= stamp.stat().st_mtime_ns and _is_whole(copy):
                if noted["torn_bytes"]:
                    self.torn_bytes[name] = noted["torn_bytes"]
                return pl.scan_parquet(copy)
        reader = LedgerReader(ledger)
        frame = _placed(BUILDERS[table](reader), polars_schema(columns), rank, attempt)
        if reader.torn_bytes:
            self.torn_bytes[name] = reader.torn_bytes
        # A run on a read-only or full disk is read all the same.
        with contextlib.suppress(OSError, pl.exceptions.ComputeError):
            copy.parent.mkdir(parents=True, exist_ok=True)
            _write_parquet(frame, copy)
            write_json(stamp, {"bytes": size, "columns": columns, "torn_bytes": reader.torn_bytes})
            return pl.scan_parquet(copy)
        return frame.lazy()


def _placed(frame: pl.DataFrame, types: pl.Schema, rank: int, attempt: int) -> pl.DataFrame:
    """The rows of a ledger with where they are from, in the columns of their table."""
    added = {"rank": rank, "attempt": attempt}
    placed = frame.with_columns(
        pl.lit(value).alias(name) for name, value in added.items() if name in types
    )
    return placed.select(list(types)).cast(types)


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


def rolled_back(first_steps: list[tuple[int, int, int]]) -> pl.Expr:
    """Steps of an attempt that a later attempt of the rank trained again, or went back behind."""
    expression = pl.lit(False)
    for rank, attempt, step in first_steps:
        expression = expression | (
            (pl.col("rank") == rank) & (pl.col("attempt") < attempt) & (pl.col("step") >= step)
        )
    return expression.fill_null(False)


def _samples_at(samples: pl.LazyFrame, places: pl.DataFrame) -> pl.LazyFrame:
    """Samples at these places (``_PLACE``); those of other ranks where the own told nothing."""
    own = samples.join(places.lazy(), on=_PLACE, how="semi", maintain_order="left").collect()
    if places.join(own, on=_PLACE, how="anti").is_empty():
        return own.lazy()
    keys = places["key"].unique()
    return samples.filter(pl.col("key").is_in(keys.implode())).collect().lazy()


def _with_samples(exposures: pl.LazyFrame, samples: pl.LazyFrame) -> pl.LazyFrame:
    # A key means something inside its attempt only: the next may read another dataset. Where one
    # rank reads for the others, it alone has described the samples.
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
