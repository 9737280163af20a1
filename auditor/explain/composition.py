"""What the model saw per step and source: the table that reports and the join read.

It is summed straight from the ledgers, some batches at a time: the rows of a long run, of which
there may be hundreds of millions, are never a table. Memory goes by steps times sources, and by the
samples that were described.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from auditor import schema
from auditor.ledger import NULL, Frame
from auditor.measure.agreement import similarity
from auditor.run import Run, rolled_back
from auditor.schema import DUPLICATE_SIMILARITY, SIMILAR, STATES, UNKNOWN_SOURCE, UNSCORED
from auditor.tables import Closed, fitting_losses, joined, places

REPETITIVE_SHARE: Final = 0.3
"""Share of a sample covered by repeated n-grams from which it counts as repetitive."""

_TRAINED: Final = STATES.index("trained")
_IS_DUPLICATE: Final = similarity(np.arange(256)) >= DUPLICATE_SIMILARITY
_IS_SIMILAR: Final = (similarity(np.arange(256)) >= SIMILAR) & ~_IS_DUPLICATE
"""By number of equal sketch bytes; those of ``UNSCORED`` are looked at nowhere."""

_BATCHES_AT_A_TIME: Final = 1 << 14
_ROWS_AT_A_TIME: Final = 3_000_000
"""Sums that are kept before those of several ranks are added up: about 100 bytes each."""

_MOST_GROUPS: Final = 1 << 24
"""Steps times sources up to which sums are kept for all of them, whether they occur or not."""

_COUNTS: Final = (
    *("n_samples", "n_scored", "n_duplicate", "n_similar", "n_repetitive"),
    *("n_distinct", "n_tokens", "n_losses"),
)
_MEANS: Final = {"repetition": "n_scored", "loss": "n_losses"}
"""Summed here, and told as means over so many rows."""

_SUMMED: Final = pl.Schema(
    {
        "attempt": pl.Int32(),
        **dict.fromkeys(("step", "code", *_COUNTS), pl.Int64()),
        **dict.fromkeys(_MEANS, pl.Float64()),
    }
)


def composition_of(run: Run) -> pl.DataFrame:
    """Trained exposures summed per attempt, step and source, over ranks: ``schema.COMPOSITION``.

    The effective view: what a later attempt rolled back is left out.
    """
    described = _Described(run)
    gone = rolled_back(run.first_steps())
    parts = [pl.DataFrame(schema=_SUMMED)]
    for rank, attempt, path in run.ledgers("exposures"):
        place = {"rank": pl.lit(rank, pl.Int32), "attempt": pl.lit(attempt, pl.Int32)}
        index = run.index(path)
        for batches, frames in index.by_batches(_BATCHES_AT_A_TIME):
            consumed = _consumed(frames, batches, index.closed)
            sums = pl.DataFrame(_sums(consumed, described, rank, attempt)).with_columns(**place)
            parts.append(sums.filter(~gone).select(list(_SUMMED)))
        if sum(map(len, parts)) > _ROWS_AT_A_TIME:
            parts = [_summed(parts)]
    total = _summed(parts)
    names = dict(enumerate(described.sources))
    return (
        total.with_columns(
            source=pl.col("code").replace_strict(names, return_dtype=pl.String),
            **{
                mean: pl.when(pl.col(count) > 0).then(pl.col(mean) / pl.col(count))
                for mean, count in _MEANS.items()
            },
        )
        .sort("step", "attempt", "source")
        .select(list(schema.COMPOSITION))
    )


def latest(composition: pl.DataFrame) -> pl.DataFrame:
    """Of a step that several attempts trained, the latest."""
    return composition.filter(pl.col("attempt") == pl.col("attempt").max().over("step"))


def _summed(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    return pl.concat(parts).group_by("attempt", "step", "code").agg(pl.all().sum())


# -- samples ---------------------------------------------------------------------------------


class _Described:
    """Source and length of the samples of a run, by attempt, rank and key.

    ``sources`` are the names that codes number, in alphabetical order.
    """

    def __init__(self, run: Run) -> None:
        self._samples = run.scan("samples").with_columns(pl.col("source").fill_null(UNKNOWN_SOURCE))
        described = self._samples.select("attempt", "rank").unique().sort("rank").collect()
        self._ranks: dict[int, list[int]] = {}
        for attempt, rank in described.iter_rows():
            self._ranks.setdefault(attempt, []).append(rank)
        names = self._samples.select("source").unique().collect(engine="streaming")["source"]
        self.sources = sorted({*names, UNKNOWN_SOURCE})
        self._codes = {name: code for code, name in enumerate(self.sources)}
        self._tables: dict[tuple[int, int], _Table] = {}

    def _table(self, attempt: int, rank: int) -> _Table:
        if (attempt, rank) not in self._tables:
            table = (
                self._samples.filter((pl.col("attempt") == attempt) & (pl.col("rank") == rank))
                .select(
                    "key",
                    pl.col("source").replace_strict(self._codes, return_dtype=pl.Int32),
                    pl.col("n_tokens").fill_null(0),
                )
                .collect()
            )
            self._tables[attempt, rank] = _Table(table)
        return self._tables[attempt, rank]

    def look_up(
        self, attempt: int, rank: int, keys: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Code of the source and length of each key's sample, i64 [n] each."""
        code, length = (
            np.full(len(keys), self._codes[UNKNOWN_SOURCE]),
            np.zeros(len(keys), np.int64),
        )
        missing = np.ones(len(keys), np.bool_)
        # Where one rank reads for the others, it alone has described the samples.
        for other in sorted(self._ranks.get(attempt, ()), key=lambda one: (one != rank, one)):
            if not missing.any():
                break
            more = code[missing], length[missing]
            found = self._table(attempt, other).look_up(keys[missing], *more)
            code[missing], length[missing] = more
            missing[missing] = ~found
        return code, length


class _Table:
    """Codes and lengths by key; columns ``key`` (distinct), ``source`` (a code), ``n_tokens``."""

    def __init__(self, described: pl.DataFrame) -> None:
        described = described.sort("key")
        self._keys = described["key"].to_numpy()
        self._codes = described["source"].to_numpy()
        self._lengths = described["n_tokens"].to_numpy()
        self._places: NDArray[np.int32] | None = None
        # Indices of a dataset are looked up at once; hashes of ids are searched for.
        if len(self._keys) and self._keys[0] >= 0 and self._keys[-1] < 16 * len(self._keys) + 4096:
            self._places = np.full(int(self._keys[-1]) + 2, -1, np.int32)
            self._places[self._keys] = np.arange(len(self._keys))

    def look_up(
        self, keys: NDArray[np.int64], code: NDArray[np.int64], length: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Put in what is known of these keys; returns of which something is, bool [n]."""
        if not len(self._keys):
            return np.zeros(len(keys), np.bool_)
        if self._places is not None:
            inside = np.where(keys < 0, len(self._places) - 1, keys)
            place = self._places[np.minimum(inside, len(self._places) - 1)]
            known = place >= 0
        else:
            place = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
            known = self._keys[place] == keys
        place = place[known]
        code[known], length[known] = self._codes[place], self._lengths[place]
        return known


# -- exposures -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Consumed:
    """What one ledger tells of trained exposures; **n** of them, in **B** batches."""

    step: NDArray[np.int64]  # [B]
    n_samples: NDArray[np.int64]  # [B]
    key: NDArray[np.int64]  # [n]
    n_tokens: NDArray[np.int64]  # [n], NULL where the whole sample was seen
    equal: NDArray[np.uint8]  # [n] equal sketch bytes, the higher of batch and window; or UNSCORED
    is_first: NDArray[np.bool_]  # [n] content not seen before in the run
    repetition: NDArray[np.uint16]  # [n] of 65535
    loss: NDArray[np.float32]  # [n], NaN where none was recorded


def _consumed(frames: Iterable[Frame], wanted: range, closed: Closed) -> _Consumed:
    """Of some batches, from frames that hold more."""
    parts: dict[str, list[Mapping[str, np.ndarray]]] = {}
    for frame in frames:
        parts.setdefault(frame.kind, []).append(frame.columns)
    batches, scores = parts.get("batches", []), parts.get("scores", [])
    batch, size = (joined(batches, name, np.int64) for name in ("batch", "n_samples"))
    key = joined(batches, "key", np.int64)
    unseen = [np.full(len(one["key"]), NULL, np.int64) for one in batches]
    whole = zip(batches, unseen, strict=True)
    n_tokens = joined([{"n": one.get("n_tokens", none)} for one, none in whole], "n", np.int64)
    # Scores lie in the order of the rows of their batches, wherever these are.
    inside = (batch >= wanted.start) & (batch < wanted.stop)
    starts = np.full(len(wanted), -1)
    starts[batch[inside] - wanted.start] = (np.cumsum(size) - size)[inside]

    def rows_of(of: NDArray[np.int64], n: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Row of each of ``n`` values of some batches, and which of the values have one."""
        is_there = (of >= wanted.start) & (of < wanted.stop)
        start = np.where(is_there, starts[np.where(is_there, of - wanted.start, 0)], -1)
        row, row_is_there = np.repeat(start, n) + places(n), np.repeat(start >= 0, n)
        return row[row_is_there], row_is_there

    row, row_is_there = rows_of(*(joined(scores, name) for name in ("batch", "n_samples")))
    loss = np.full(len(key), np.nan, np.float32)
    if "losses" in parts:
        sizes = dict(zip(batch.tolist(), size.tolist(), strict=True))
        of_losses, n_losses, losses = fitting_losses(parts["losses"], sizes)
        row_of_loss, has_row = rows_of(of_losses, n_losses)
        loss[row_of_loss] = losses[has_row]

    def scored(name: str, kind: Any, default: int) -> NDArray[Any]:
        values = np.full(len(key), default, kind)
        values[row] = joined(scores, name, kind)[row_is_there]
        return values

    by_batch, by_window = (scored(n, np.uint8, UNSCORED) for n in ("equal_batch", "equal_window"))
    is_closed = inside & (batch < len(closed.state))
    trained = np.zeros(len(batch), np.bool_)
    trained[is_closed] = closed.state[batch[is_closed]] == _TRAINED
    rows = np.repeat(trained, size)
    return _Consumed(
        step=closed.step[batch[trained]],
        n_samples=size[trained],
        key=key[rows],
        n_tokens=n_tokens[rows],
        equal=np.where(by_batch == UNSCORED, UNSCORED, np.maximum(by_batch, by_window))[rows],
        is_first=scored("dup_run", np.int64, 0)[rows] == 0,
        repetition=scored("repetition", np.uint16, 0)[rows],
        loss=loss[rows],
    )


def _sums(
    consumed: _Consumed, described: _Described, rank: int, attempt: int
) -> dict[str, NDArray[Any]]:
    """By step and code of the source: ``_COUNTS``, and the sums that ``_MEANS`` are made of."""
    steps, of_batch = np.unique(consumed.step, return_inverse=True)
    code, length = described.look_up(attempt, rank, consumed.key)
    group = np.repeat(of_batch * len(described.sources), consumed.n_samples) + code
    n_groups = len(steps) * len(described.sources)
    places = np.arange(n_groups)
    if n_groups > _MOST_GROUPS:
        places, group = np.unique(group, return_inverse=True)
    scored = consumed.equal != UNSCORED
    near = scored & _IS_DUPLICATE[consumed.equal]
    repetition = (consumed.repetition.astype(np.float64) / 65535).astype(np.float32)
    n_tokens = np.where(consumed.n_tokens == NULL, length, consumed.n_tokens)
    has_loss = np.isfinite(consumed.loss)

    def count(chosen: Any) -> NDArray[np.int64]:
        return np.bincount(group[chosen], minlength=len(places))

    def total(values: NDArray[Any]) -> NDArray[np.float64]:
        return np.bincount(group, values, len(places)).astype(np.float64)

    sums = {
        "n_samples": count(slice(None)),
        "n_scored": count(scored),
        "n_duplicate": count(near),
        "n_similar": count(scored & _IS_SIMILAR[consumed.equal]),
        "n_repetitive": count(scored & (repetition >= np.float32(REPETITIVE_SHARE))),
        "n_distinct": count((consumed.is_first | ~scored) & ~near),
        "n_tokens": total(n_tokens).astype(np.int64),
        "n_losses": count(has_loss),
        "repetition": total(np.where(scored, repetition, 0)),
        "loss": total(np.where(has_loss, consumed.loss, 0)),
    }
    some = np.flatnonzero(sums["n_samples"])
    step, code = np.divmod(places[some], len(described.sources))
    return {
        "step": steps[step] if len(steps) else step,
        "code": code,
        **{name: values[some] for name, values in sums.items()},
    }
