"""What the model saw around a step, and the exact order in which it saw it.

A batch that no step closed over (skipped, delivered, drawn) has no step of its own. It counts with
the step that was closed next in its attempt, at the end of an attempt with the last one. Where no
step was closed at all, batches are counted instead: the **place** of a batch is its step, or its
ordinal in its rank.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal

import polars as pl

from auditor import schema
from auditor.errors import RunError
from auditor.explain.attribution import LOOKBACK_STEPS, clusters_of
from auditor.run import Run, View
from auditor.schema import DUPLICATE_SIMILARITY, UNKNOWN_SOURCE

WINDOW: Final = LOOKBACK_STEPS
"""Steps shown unless told otherwise: as many as a report looks at before an event."""

N_NAMED: Final = 5

Unit = Literal["step", "batch"]

_BATCH: Final = ["rank", "attempt", "batch"]
_SAMPLE: Final = ["rank", "attempt", "key"]
_ORDER: Final = ["place", "attempt", "rank", "batch", "position", "part"]


@dataclass(frozen=True)
class Batches:
    """Every recorded batch of a run, in the order of rank, attempt and batch.

    Attributes:
        table: rank, attempt, batch, step, state, n (samples); ``place``; ``n_missing``, batches
            missing from the record just before this one; ``rolled_back``, a later attempt of the
            rank trained its place again.
        unit: what places count.
    """

    table: pl.DataFrame
    unit: Unit


@dataclass(frozen=True)
class Seen:
    """What was consumed in a window of a run.

    Attributes:
        unit, first, last: the window, ``first`` to ``last`` inclusive, cut to what is recorded.
        recorded: first and last step (or batch) of the record.
        rows: exposures of the window in consumption order, ``schema.EXPOSURES_JOINED``.
        counted: the exposures that ``sources`` and the lists are about: trained ones, or all of
            them (None) where no step was closed.
        n_counted: how many of those the window holds, of all sources and samples.
        n_batches: batches of ``rows``.
        n_missing: batches of the window that are missing from the record.
        states: exposures by state.
        sources: per source n_samples, share (of ``n_counted``), n_tokens, n_scored, n_duplicate,
            duplicate_share (of the scored), repetition (mean of the scored), n_unscored.
        total: the same over all sources, one row.
        contents: clusters of near-duplicates by times shown, those shown more than once.
        samples: samples by times shown, those shown more than once.
        duplicates: samples by their similarity to another, near-duplicates only.
        repetitive: samples by the share of them that repeats itself.
    """

    run_id: str
    view: View
    unit: Unit
    first: int
    last: int
    recorded: tuple[int, int]
    rows: pl.DataFrame
    counted: str | None
    n_counted: int
    n_batches: int
    n_missing: int
    states: dict[str, int]
    sources: pl.DataFrame
    total: pl.DataFrame
    contents: pl.DataFrame
    samples: pl.DataFrame
    duplicates: pl.DataFrame
    repetitive: pl.DataFrame
    gaps: list[str]


@dataclass(frozen=True)
class Replay:
    """The order of exposures: ``rows`` are ``schema.REPLAY_ORDER``, in consumption order.

    ``left_out`` counts the other exposures of the same range by state, ``n_missing`` the batches
    that are not in the record, so that the order is known not to be whole.
    """

    rows: pl.DataFrame
    left_out: dict[str, int]
    n_missing: int


def seen(
    run: Run,
    *,
    step: int | None = None,
    window: int | None = None,
    rank: int | None = None,
    source: str | None = None,
    sample: str | None = None,
    view: View = "effective",
    n_named: int = N_NAMED,
) -> Seen:
    """What the model saw in the ``window`` steps up to and including ``step``.

    ``step`` is the last recorded one unless given, ``window`` is ``WINDOW``, or all steps for one
    ``sample``. In a run without closed steps it is the last ``window`` batches of each rank.

    Raises:
        RunError: nothing of that kind was recorded; says what was.
    """
    batches = _batches(run, rank, view)
    recorded = _bounds(batches.table)
    if step is not None and batches.unit == "batch":
        raise _without_steps(run, remedy="Leave --step out: the last batches are shown then")
    last = recorded[1] if step is None else step
    if window is None and sample is not None:
        window = last + 1
    first = last + 1 - (WINDOW if window is None else window)
    table = batches.table.filter(pl.col("place").is_between(first, last))
    if table.is_empty():
        raise RunError(
            f"no exposure of {_span('step', first, last)} is in the record, "
            f"which has {_span('step', *recorded)}",
            path=run.path,
            remedy="Give a --step that is there, or leave it out for the last one",
        )
    first, last = max(first, recorded[0]), min(last, recorded[1])
    keys = None if sample is None else _keys_of(run, sample)
    frame = _rows_of(run, table, view, keys)
    if source is not None:
        frame = frame.filter(pl.col("source").fill_null(UNKNOWN_SOURCE) == source)
    if sample is not None:
        frame = frame.filter(pl.col("sample_id") == sample)
    rows = frame.collect()
    if rows.is_empty():
        raise _nothing_of(run, table, view, source, sample, _span(batches.unit, first, last))
    counted = "trained" if batches.unit == "step" else None
    is_counted = pl.lit(True) if counted is None else pl.col("state") == counted
    n_counted = int(table.filter(is_counted)["n"].sum())
    told = _with_identity(rows.filter(is_counted))
    lists = {
        "contents": _contents(told),
        "samples": _samples(told).filter(pl.col("times") > 1),
        "duplicates": _samples(told)
        .filter(pl.col("duplication") >= DUPLICATE_SIMILARITY)
        .sort("duplication", "times", "who", descending=[True, True, False]),
        "repetitive": _samples(told)
        .filter(pl.col("repetition") > 0)
        .sort("repetition", "times", "who", descending=[True, True, False]),
    }
    return Seen(
        run_id=run.run_id,
        view=view,
        unit=batches.unit,
        first=first,
        last=last,
        recorded=recorded,
        rows=rows.select(list(schema.EXPOSURES_JOINED)),
        counted=counted,
        n_counted=n_counted,
        n_batches=rows.select(pl.struct(_BATCH).n_unique()).item(),
        n_missing=int(table["n_missing"].sum()),
        states=_states(rows.group_by("state").len()),
        sources=_by_source(told, n_counted),
        total=_by_source(told.with_columns(source=pl.lit("")), n_counted).drop("source"),
        **_named(run, {name: frame.head(n_named) for name, frame in lists.items()}),
        gaps=run.gaps(),
    )


def replay_order(
    run: Run,
    *,
    first: int | None = None,
    last: int | None = None,
    rank: int | None = None,
    states: Collection[str] = ("trained",),
) -> Replay:
    """The exposures of steps ``first`` to ``last`` inclusive in the order they were consumed.

    Steps that a later attempt trained again are there once, as it trained them. Sorted by step,
    rank, batch and position; by default only what was trained.

    Raises:
        RunError: nothing of that kind was recorded; says what was.
    """
    batches = _batches(run, rank, "effective")
    recorded = _bounds(batches.table)
    if batches.unit == "batch" and (first is not None or last is not None):
        raise _without_steps(run, remedy="Leave --from-step and --to-step out")
    table = batches.table
    if batches.unit == "step":
        low, high = recorded[0] if first is None else first, recorded[1] if last is None else last
        table = table.filter(pl.col("place").is_between(low, high))
        if table.is_empty():
            raise RunError(
                f"no exposure of {_span('step', low, high)} is in the record, "
                f"which has {_span('step', *recorded)}",
                path=run.path,
                remedy="Give --from-step and --to-step inside of it",
            )
    counts = _states(table.group_by("state").agg(len=pl.col("n").sum()))
    left_out = {state: n for state, n in counts.items() if state not in states}
    chosen = table.filter(pl.col("state").is_in(list(states)))
    if chosen.is_empty():
        raise RunError(
            f"nothing {' or '.join(states)} is in the record there; it has "
            + ", ".join(f"{n} {state}" for state, n in left_out.items()),
            path=run.path,
            remedy="Add " + " ".join(f"--include {state}" for state in left_out),
        )
    rows = _rows_of(run, chosen, "effective").collect()
    told = rows.join(_attempts_by_index(run), on=["rank", "attempt"], how="left")
    rows = told.with_columns(
        pl.when("by_index").then(number).alias(name)
        for name, number in (("dataset", _dataset()), ("index", _index()))
    )
    return Replay(
        rows.sort(_ORDER).select(list(schema.REPLAY_ORDER)).cast({"dataset": pl.Int32}),
        left_out,
        int(table["n_missing"].sum()),
    )


def _batches(run: Run, rank: int | None, view: View) -> Batches:
    """Raises ``RunError`` where there are none, or none of the rank."""
    table = (
        _unnamed(run)
        .group_by(_BATCH)
        .agg(pl.col("step").first(), pl.col("state").first(), n=pl.len().cast(pl.Int64))
        .collect()
        .sort(_BATCH)
    )
    if table.is_empty():
        remedy = "Wrap the loader in AuditedSampler(loader, run=...)"
        if gaps := "; ".join(run.gaps()):
            remedy += f". Gaps in the record: {gaps}; the log of the training says more"
        raise RunError("no exposure was recorded", path=run.path, remedy=remedy)
    table, unit = _placed(table)
    before = pl.col("batch").shift(1, fill_value=-1).over("rank", "attempt")
    table = table.with_columns(n_missing=pl.col("batch") - before - 1)
    table = _with_rollback(table) if view == "effective" else table
    if rank is not None:
        ranks = table["rank"].unique().sort().to_list()
        if rank not in ranks:
            raise RunError(
                f"no exposure of rank {rank} is in the record, which has "
                f"{_listed('rank', [str(one) for one in ranks])}",
                path=run.path,
                remedy="Give a --rank that is there, or leave it out for all",
            )
        table = table.filter(pl.col("rank") == rank)
    return Batches(table, unit)


def _unnamed(run: Run) -> pl.LazyFrame:
    """Exposures of all attempts without the names of their samples.

    ``Run.scan`` joins the samples, which for every row of a long run takes twenty times as long.
    """
    return run._facts("exposures")


def _placed(table: pl.DataFrame) -> tuple[pl.DataFrame, Unit]:
    """With the step that each batch counts with; with its ordinal where no step was closed."""
    if table["step"].is_null().all():
        return table.with_columns(place=pl.int_range(pl.len()).over("rank")), "batch"
    own = pl.col("step").fill_null(strategy="backward").fill_null(strategy="forward")
    # An attempt that closed no step goes with its neighbours, a rank that closed none with the
    # first of all.
    near = pl.col("place").fill_null(strategy="forward").fill_null(strategy="backward")
    return (
        table.with_columns(place=own.over("rank", "attempt"))
        .with_columns(place=near.over("rank"))
        .with_columns(pl.col("place").fill_null(pl.col("step").min()))
    ), "step"


def _with_rollback(table: pl.DataFrame) -> pl.DataFrame:
    """Without what a later attempt of the rank went back behind, whatever its state.

    ``Run.scan`` hides exposures that have a step; their neighbours that have none go with them.
    """
    trained = pl.col("step").filter(pl.col("state") == "trained").min()
    later = pl.col("first").reverse().cum_min().fill_null(strategy="forward").reverse().shift(-1)
    starts = (
        table.group_by("rank", "attempt")
        .agg(first=trained)
        .sort("rank", "attempt")
        .with_columns(again=later.over("rank"))
    )
    joined = table.join(starts, on=["rank", "attempt"], how="left", maintain_order="left")
    kept = (pl.col("place") < pl.col("again")).fill_null(True)
    return joined.filter(kept).drop("first", "again")


def _rows_of(
    run: Run, table: pl.DataFrame, view: View, keys: pl.Series | None = None
) -> pl.LazyFrame:
    """The exposures of these batches in consumption order, with ``place``.

    ``keys`` are the only ones of interest, where that is known.
    """
    # Range and keys are for the readers of the files, which skip what lies outside, of the samples
    # too; the join decides.
    inside = pl.col("batch").is_between(table["batch"].min(), table["batch"].max())
    if keys is None:
        keys = _unnamed(run).filter(inside).select("key").unique().collect()["key"]
    exposures = run.scan("exposures", view=view).filter(inside, pl.col("key").is_in(keys.implode()))
    chosen = table.lazy().select(*_BATCH, "place")
    return exposures.join(chosen, on=_BATCH, how="inner").sort(_ORDER)


def _keys_of(run: Run, sample: str) -> pl.Series:
    """The keys that a sample id may stand for; a sample without an id has its key for one."""
    named = run.scan("samples").filter(pl.col("sample_id") == sample).select("key")
    keys = named.collect()["key"]
    if sample.isdecimal() and int(sample) < 1 << 63:
        keys = keys.append(pl.Series([int(sample)], dtype=pl.Int64))
    return keys.unique()


def _bounds(table: pl.DataFrame) -> tuple[int, int]:
    first, last = table.select(first=pl.col("place").min(), last=pl.col("place").max()).row(0)
    return int(first), int(last)


def _states(counted: pl.DataFrame) -> dict[str, int]:
    found = dict(counted.select("state", "len").iter_rows())
    return {state: int(found[state]) for state in schema.STATES if state in found}


def _by_source(told: pl.DataFrame, n_counted: int) -> pl.DataFrame:
    scored = pl.col("duplication").is_not_null()
    duplicate = pl.col("duplication") >= DUPLICATE_SIMILARITY
    repetition = pl.col("repetition").cast(pl.Float64)
    return (
        told.group_by("source")
        .agg(
            n_samples=pl.len().cast(pl.Int64),
            share=pl.len() / n_counted,
            n_tokens=pl.when(pl.col("n_tokens").is_not_null().any()).then(pl.col("n_tokens").sum()),
            n_scored=scored.sum().cast(pl.Int64),
            n_duplicate=duplicate.sum().cast(pl.Int64),
            duplicate_share=duplicate.mean(),
            repetition=repetition.mean(),
            n_unscored=(~scored).sum().cast(pl.Int64),
        )
        .sort("n_samples", "source", descending=[True, False])
    )


def _with_identity(rows: pl.DataFrame) -> pl.DataFrame:
    """With ``who``, one number per sample over ranks and attempts, and its ``cluster``.

    A key means something inside its attempt only, and ids may repeat from shard to shard.
    """
    rows = rows.with_columns(pl.col("source").fill_null(UNKNOWN_SOURCE))
    same = pl.struct("source", "shard", "sample_id")
    rows = rows.with_columns(who=same.rank("dense").cast(pl.Int64))
    known = rows.select(*_SAMPLE, other="who").unique(_SAMPLE, maintain_order=True)
    linked = pl.when(pl.col("duplication") >= DUPLICATE_SIMILARITY).then("dup_of")
    links = rows.with_columns(dup_of=linked).join(
        known,
        left_on=["rank", "attempt", "dup_of"],
        right_on=_SAMPLE,
        how="left",
        maintain_order="left",
    )
    clusters = clusters_of(
        links.select(key="who", dup_of="other", sample_id=pl.col("who").cast(pl.String))
    )
    return rows.with_columns(cluster=clusters.cast(pl.Int64))


def _samples(told: pl.DataFrame) -> pl.DataFrame:
    """One row per sample, most often shown first; key, dup_of are of one of its exposures."""
    likest = pl.col("duplication").fill_null(-1.0).arg_max()
    return _counted(
        told.group_by("who").agg(
            pl.col(*_SAMPLE, "sample_id", "source", "shard", "row").first(),
            times=pl.len().cast(pl.Int64),
            first=pl.col("place").min(),
            last=pl.col("place").max(),
            duplication=pl.col("duplication").max(),
            dup_of=pl.col("dup_of").get(likest),
            dup_run=pl.col("dup_run").max(),
            repetition=pl.col("repetition").max(),
        ),
        "who",
    )


def _contents(told: pl.DataFrame) -> pl.DataFrame:
    """One row per cluster shown more than once, named by its first member in the window."""
    counted = told.group_by("cluster", maintain_order=True).agg(
        pl.col(*_SAMPLE, "sample_id", "source", "shard", "row").first(),
        times=pl.len().cast(pl.Int64),
        n_samples=pl.col("who").n_unique().cast(pl.Int64),
        first=pl.col("place").min(),
        last=pl.col("place").max(),
        dup_run=pl.col("dup_run").max(),
    )
    return _counted(counted, "cluster").filter(pl.col("times") > 1)


def _counted(frame: pl.DataFrame, identity: str) -> pl.DataFrame:
    return frame.sort("times", identity, descending=[True, False])


def _named(run: Run, lists: dict[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
    """The lists with previews, and with the id of the sample that each is a duplicate of."""
    known = _described(
        run,
        pl.concat(
            [
                *(frame.select(_SAMPLE) for frame in lists.values()),
                lists["duplicates"].select("rank", "attempt", key="dup_of").drop_nulls(),
            ]
        ),
    )
    others = known.select("rank", "attempt", dup_of="key", duplicate_of="sample_id")
    previews = known.drop("sample_id")
    own = {*_SAMPLE, "who", "cluster", "dup_of"}
    named = {}
    for name, frame in lists.items():
        frame = frame.join(previews, on=_SAMPLE, how="left", maintain_order="left")
        if name == "duplicates":
            place = ["rank", "attempt", "dup_of"]
            frame = frame.join(others, on=place, how="left", maintain_order="left")
        named[name] = frame.drop(column for column in frame.columns if column in own)
    return named


def _described(run: Run, wanted: pl.DataFrame) -> pl.DataFrame:
    """sample_id and preview of samples by rank, attempt and key, as another rank has them else."""
    wanted = wanted.unique(_SAMPLE)
    described = run.scan("samples").select(*_SAMPLE, "sample_id", "preview")
    found = described.rename({"rank": "by"}).join(wanted.lazy(), on=["attempt", "key"])
    return (
        found.sort(pl.col("by") != pl.col("rank"), pl.col("preview").is_null(), "by")
        .group_by(_SAMPLE, maintain_order=True)
        .agg(
            pl.col("sample_id").first().fill_null(pl.col("key").cast(pl.String).first()),
            pl.col("preview").first(),
        )
        .collect()
    )


def _dataset() -> pl.Expr:
    """Number of the dataset in a key that holds an index; an index may count from the end."""
    high, low = pl.col("key") // (1 << schema.KEY_SHIFT), pl.col("key") % (1 << schema.KEY_SHIFT)
    return high + (low >= 1 << (schema.KEY_SHIFT - 1)).cast(pl.Int64)


def _index() -> pl.Expr:
    low = pl.col("key") % (1 << schema.KEY_SHIFT)
    return low - (low >= 1 << (schema.KEY_SHIFT - 1)).cast(pl.Int64) * (1 << schema.KEY_SHIFT)


def _attempts_by_index(run: Run) -> pl.DataFrame:
    """Whether the keys of an attempt and rank are dataset indices: rank, attempt, by_index.

    The record does not say. Datasets are numbered from 0 without a gap in the high bits of such
    keys; in hashes those bits are random. So a record of hashes passes for one of indices with a
    chance of 1 in 32,768 when it has one sample, and practically never when it has more; a record
    of both is taken for hashes.
    """
    numbers = (
        _unnamed(run)
        .select("rank", "attempt", number=_dataset())
        .group_by("rank", "attempt")
        .agg(
            low=pl.col("number").min(),
            high=pl.col("number").max(),
            n=pl.col("number").n_unique().cast(pl.Int64),
        )
    )
    dense = (pl.col("low") == 0) & (pl.col("high") + 1 == pl.col("n"))
    return numbers.select("rank", "attempt", by_index=dense).collect()


def _span(unit: str, first: int, last: int) -> str:
    if first == last:
        return f"{unit} {first:,}"
    return f"{unit}s {first:,} to {last:,}"


def _listed(what: str, names: list[str]) -> str:
    plural = what if len(names) == 1 else f"{what}s"
    more = ", ..." if len(names) > N_NAMED else ""
    return f"{plural} {', '.join(names[:N_NAMED])}{more}"


def _without_steps(run: Run, *, remedy: str) -> RunError:
    return RunError(
        "no step was recorded: nothing closed one over the batches (no GradeMonitor, no "
        "optimizer= of AuditedSampler)",
        path=run.path,
        remedy=remedy,
    )


def _nothing_of(
    run: Run, table: pl.DataFrame, view: View, source: str | None, sample: str | None, span: str
) -> RunError:
    """Nothing of a source or sample: names the sources that are there."""
    asked = [
        f"{what} {name[:60]!r}"  # as a literal, so that its control characters stay inert
        for what, name in (("sample", sample), ("source", source))
        if name is not None
    ]
    names = _rows_of(run, table, view).select(pl.col("source").fill_null(UNKNOWN_SOURCE).unique())
    there = [repr(name[:60]) for name in names.collect()["source"].sort()]
    return RunError(
        f"no exposure of {' of '.join(asked)} in {span}; there are those of "
        f"{_listed('source', there)}",
        path=run.path,
        remedy="Widen the --window, or check the name",
    )
