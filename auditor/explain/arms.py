"""The arms of a replay: which samples each of them shows, step by step.

A **row** is one position of one recorded batch: a sample, or the documents packed into it. An arm
shows at every place of the stretch either the row that was there or a replacement, so that batch
sizes, the order of the rest and the share of each source stay as they were.

- ``as_it_was``: the rows as recorded.
- ``without_implicated``: the implicated rows are replaced.
- ``without_random``: as many others are replaced, in the same steps where these have enough.

Replacements are rows that the run showed outside of the stretch, of the source of the row that
they replace: first such as the model had not seen by the end of the stretch. No replacement is
implicated, or a near-duplicate of what is. The draw depends on the arm and the seed alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Final, overload

import numpy as np
import polars as pl
from numpy.typing import NDArray

from auditor import schema
from auditor.explain.attribution import clusters_of
from auditor.schema import DUPLICATE_SIMILARITY
from auditor.tables import places

ARMS: Final = ("as_it_was", "without_implicated", "without_random")

_BATCH: Final = ["step", "rank", "attempt", "batch"]
_SAMPLE: Final = ["sample_id", "source", "shard", "row", "dataset", "index"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample as recorded; ``index`` counts in dataset number ``dataset`` of the run's attempt.

    Both are None where samples were told by a hash: then ``sample_id``, or ``shard`` and ``row``.
    """

    sample_id: str
    source: str | None
    shard: str | None
    row: int | None
    dataset: int | None
    index: int | None


@dataclass(frozen=True)
class Batch:
    """What one rank read at once. Batches of one ``step`` went into one optimizer update.

    ``rows`` are in the order of positions: each a tuple of the samples packed in it, most often of
    one. ``step``, ``rank``, ``attempt`` and ``batch`` are those of the record.
    """

    step: int
    rank: int
    attempt: int
    batch: int
    rows: tuple[tuple[Sample, ...], ...]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def ids(self) -> list[str]:
        """The sample id of each row.

        Raises:
            ValueError: rows pack several samples.
        """
        return [sample.sample_id for sample in self._single("ids")]

    @property
    def indices(self) -> list[int]:
        """The dataset index of each row.

        Raises:
            ValueError: rows pack several samples, or were told by a hash.
        """
        indices = [s.index for s in self._single("indices") if s.index is not None]
        if len(indices) < len(self.rows):
            raise ValueError("samples were told by a hash and have no index; take ids, or rows")
        return indices

    def _single(self, what: str) -> list[Sample]:
        if any(len(row) != 1 for row in self.rows):
            raise ValueError(f"rows pack several samples and have no {what}; take rows")
        return [row[0] for row in self.rows]


class Batches(Sequence[Batch]):
    """The batches of an arm in the order they are trained, made as they are asked for."""

    def __init__(self, stretch: Stretch, shown: NDArray[np.int64]) -> None:
        self._stretch = stretch
        self._shown = shown
        places = stretch.rows[stretch.first_row : stretch.end_row].select(_BATCH)
        starts = places.with_row_index("place").group_by(_BATCH, maintain_order=True).first()
        self._starts = np.append(starts["place"].to_numpy(), len(places)).astype(np.int64)
        self._names = starts.select(_BATCH).rows()

    @property
    def steps(self) -> list[int]:
        """The steps, each once."""
        return sorted({name[0] for name in self._names})

    @property
    def digest(self) -> str:
        """SHA-256 over which sample is where, 64 hexadecimal digits."""
        digest = hashlib.sha256()
        digest.update(np.asarray(self._names, np.int64).tobytes())
        digest.update(self._starts.tobytes())
        part, _ = self._parts(self._shown)
        for column in ("attempt", "rank", "key", "part"):
            digest.update(part[column].cast(pl.Int64).to_numpy().tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> list[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | list[Batch]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        shown = self._shown[self._starts[number] : self._starts[number + 1]]
        parts, sizes = self._parts(shown)
        samples = (Sample(*values) for values in parts.select(_SAMPLE).iter_rows())
        rows = tuple(tuple(islice(samples, n)) for n in sizes.tolist())
        step, rank, attempt, batch = self._names[number]
        return Batch(step, rank, attempt, batch, rows)

    def __iter__(self) -> Iterator[Batch]:
        return (self[number] for number in range(len(self)))

    def _parts(self, shown: NDArray[np.int64]) -> tuple[pl.DataFrame, NDArray[np.int64]]:
        """The parts of these rows one below the other, and how many each has."""
        rows = self._stretch.rows[shown]
        sizes, starts = rows["n_parts"].to_numpy(), rows["first_part"].to_numpy()
        return self._stretch.parts[np.repeat(starts, sizes) + places(sizes)], sizes


@dataclass(frozen=True)
class Stretch:
    """The steps that are replayed, with the rows around them from which replacements come.

    Attributes:
        parts: exposures in the order they were consumed, ``schema.REPLAY_ORDER``.
        rows: one for each batch position: its place in the record, ``source`` (of its first part),
            ``first_part`` and ``n_parts`` into ``parts``; ``name``, equal where the samples are;
            ``implicated``; ``tainted``, implicated or like it, and so never a replacement.
        first_row, end_row: the rows of the stretch, half-open.
    """

    parts: pl.DataFrame
    rows: pl.DataFrame
    first_row: int
    end_row: int

    @property
    def own(self) -> pl.DataFrame:
        """The rows of the stretch itself."""
        return self.rows[self.first_row : self.end_row]

    def batches(self, arm: str, seed: int) -> Batches:
        """What an arm shows under a seed.

        Raises:
            ValueError: there is no such arm, or nothing to draw replacements from.
        """
        return Batches(self, self.shown(arm, seed))

    def shown(self, arm: str, seed: int) -> NDArray[np.int64]:
        """For every place of the stretch the row shown there, i64 [N], into ``rows``."""
        if arm not in ARMS:
            raise ValueError(f"arm must be one of {ARMS}, got {arm!r}")
        shown = np.arange(self.first_row, self.end_row)
        if arm == "as_it_was":
            return shown
        rng = np.random.default_rng([ARMS.index(arm), seed])
        removed = self._implicated() if arm == "without_implicated" else self._random(rng)
        shown[removed - self.first_row] = self._replacements(removed, rng)
        return shown

    def _implicated(self) -> NDArray[np.int64]:
        return self.first_row + np.flatnonzero(self.own["implicated"].to_numpy())

    @property
    def has_replacements(self) -> bool:
        """Whether anything outside of the stretch is fit to replace what is in it."""
        return len(self._donors) > 0

    @property
    def n_random(self) -> int:
        """Rows that the random arm replaces: fewer than are implicated where few others are."""
        own = self.own
        return min(int(own["implicated"].sum()), int((~own["tainted"]).sum()))

    def _random(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """As many rows that are not tainted, of each step as many where it has them."""
        own = self.own
        free = rng.permutation(np.flatnonzero(~own["tainted"].to_numpy()))
        steps = own["step"].to_numpy()
        wanted = dict(own.filter("implicated").group_by("step").len().iter_rows())
        chosen: list[int] = []
        rest: list[int] = []
        for place in free.tolist():
            left = wanted.get(steps[place], 0)
            (chosen if left else rest).append(place)
            if left:
                wanted[steps[place]] = left - 1
        chosen += rest[: self.n_random - len(chosen)]
        return self.first_row + np.sort(np.asarray(chosen, np.int64))

    def _replacements(
        self, removed: NDArray[np.int64], rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """A row for each that is removed, i64 [N]."""
        donors = self._donors
        if len(donors) == 0 and len(removed):
            raise ValueError("nothing outside of the stretch can replace what is in it")
        order = donors[rng.permutation(len(donors))]
        is_seen = order["seen"].to_numpy()
        order = order[np.argsort(is_seen, kind="stable")]
        sources = order["source"].to_numpy()
        rows = order["slot"].to_numpy()
        is_free = np.ones(len(rows), np.bool_)
        result = np.full(len(removed), -1, np.int64)
        wanted = self.rows["source"].to_numpy()[removed]
        for source in sorted(set(wanted)):
            places = rng.permutation(np.flatnonzero(wanted == source))
            own = np.flatnonzero(sources == source)[: len(places)]
            result[places[: len(own)]] = rows[own]
            is_free[own] = False
        # A source without enough clean rows is made up for by the others, then by what there is.
        missing = np.flatnonzero(result < 0)
        spare = np.concatenate([rows[is_free], rows[~is_free]])
        result[missing] = np.resize(spare, len(missing))
        return result

    @cached_property
    def _donors(self) -> pl.DataFrame:
        """Clean rows outside of the stretch, each sample once: slot, source, seen."""
        rows = self.rows.with_row_index("slot")
        inside = pl.col("slot").is_between(self.first_row, self.end_row, closed="left")
        is_seen = (pl.col("slot") < self.first_row).any().over("name")
        return (
            rows.with_columns(seen=is_seen)
            .filter((~pl.col("tainted")).all().over("name"), (~inside).all().over("name"))
            .unique("name", keep="first", maintain_order=True)
            .select(pl.col("slot").cast(pl.Int64), "source", "seen")
        )

    def compromises(self, arm: str, seed: int) -> tuple[int, int]:
        """Replacements of another source than what they replace, and those shown before in the arm.

        Both are 0 where every source has enough clean rows.
        """
        shown, was = self.shown(arm, seed), np.arange(self.first_row, self.end_row)
        shown, was = shown[shown != was], was[shown != was]
        sources = self.rows["source"].to_numpy()
        return int((sources[was] != sources[shown]).sum()), len(shown) - len(np.unique(shown))


def stretch_of(
    parts: pl.DataFrame, *, first: int, last: int, implicated: pl.Series, tainted: pl.Series
) -> Stretch:
    """The stretch of steps ``first`` to ``last`` inclusive.

    Args:
        parts: exposures of the stretch and around it in the order they were consumed,
            ``schema.REPLAY_ORDER`` and ``who``, equal where the sample is.
        implicated, tainted: bool [N], of the parts.
    """
    place = [*_BATCH, "position"]
    rows = (
        parts.with_columns(implicated=implicated, tainted=tainted | implicated)
        .with_row_index("first_part")
        .group_by(place, maintain_order=True)
        .agg(
            pl.col("source").first().fill_null(schema.UNKNOWN_SOURCE),
            pl.col("first_part").first().cast(pl.Int64),
            n_parts=pl.len().cast(pl.Int64),
            name=pl.col("who").cast(pl.String).str.join(","),
            implicated=pl.col("implicated").any() & pl.col("step").first().is_between(first, last),
            tainted=pl.col("tainted").any(),
        )
    )
    steps = rows["step"].to_numpy()
    first_row, end_row = (int(n) for n in np.searchsorted(steps, [first, last + 1]))
    return Stretch(parts.select(list(schema.REPLAY_ORDER)), rows, first_row, end_row)


def contents_of(parts: pl.DataFrame) -> pl.DataFrame:
    """With ``who``, equal where the sample is, and ``content``, equal where one repeats the other.

    ``parts`` has the columns of ``schema.REPLAY_ORDER``, ``duplication`` and ``dup_of``. Contents
    are the connected components of links from near-duplicates to what they repeat.
    """
    parts = parts.with_columns(
        who=pl.struct(
            pl.col("source").fill_null(schema.UNKNOWN_SOURCE), "shard", "sample_id"
        ).rank("dense").cast(pl.Int64)
    )  # fmt: skip
    # Where one rank reads for the others its keys are theirs: a key is told by its attempt.
    known = parts.select("attempt", dup_of="key", other="who").unique(["attempt", "dup_of"])
    links = (
        parts.filter(pl.col("duplication") >= DUPLICATE_SIMILARITY)
        .join(known, on=["attempt", "dup_of"])
        .select("who", "other")
        .unique(maintain_order=True)
    )
    ends = pl.concat([links, links.select(who="other", other=pl.lit(None, pl.Int64)).unique()])
    found = ends.select(key="who", dup_of="other", sample_id=pl.col("who").cast(pl.String))
    clusters = ends.select("who", content=clusters_of(found).cast(pl.Int64)).unique("who")
    return parts.join(clusters, on="who", how="left", maintain_order="left").with_columns(
        pl.col("content").fill_null(pl.col("who"))
    )
