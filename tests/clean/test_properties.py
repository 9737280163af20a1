"""Whole calls of dedupe against one decided row by row, from the texts, with Python sets.

Whatever the rows, the policy, the format and the engine.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonl_files import write_jsonl

from auditor.clean.config import DedupeConfig
from auditor.clean.decide import Marked
from auditor.clean.dedupe import dedupe
from auditor.clean.engine import Engine, Processes
from auditor.clean.manifest import Manifest
from auditor.clean.verify import verify
from auditor.measure.sketch import choose_shingle

UNREADABLE = b'{"text": "cut of'
SOURCES = ["code", "web", "wiki"]
ENDS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"]

BASES: list[Any] = [
    [f"w{i}" for i in range(40)],
    [f"w{i}" for i in range(15, 55)],
    [f"v{i * i % 61}" for i in range(24)],
    ["only", "three", "words"],
]
POEM = "慈母手中线游子身上衣临行密密缝意恐迟迟归谁言寸草心报得三春晖"


# Rows


@st.composite
def texts(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(["words"] * 8 + ["characters"] * 2 + ["chant", "odd"]))
    if kind == "odd":
        return draw(st.sampled_from([None, "", " \n", "!?", "…"]))
    if kind == "chant":
        return "buy now " * 20
    if kind == "characters":
        poem = list(POEM)
        for i in draw(st.lists(st.integers(0, len(poem) - 1), max_size=2)):
            poem[i] = "雪"
        return "".join(poem)
    words = list(draw(st.sampled_from(BASES)))
    for i in draw(st.lists(st.integers(0, 40), max_size=2)):
        words[i % len(words)] = draw(st.sampled_from(["x", "y"]))
    words = words[draw(st.integers(0, 3)) :]
    text = draw(st.sampled_from([" ", "  ", ", "])).join(words)
    return text.upper() if draw(st.booleans()) else text


@st.composite
def token_ids(draw: st.DrawFn) -> Any:
    if draw(st.integers(0, 12)) == 0:
        return draw(st.sampled_from([None, [], [1, 2], [7] * 60]))
    ids = list(range(draw(st.integers(0, 2)) * 20, 60))
    for i in draw(st.lists(st.integers(0, 40), max_size=2)):
        ids[i % len(ids)] = draw(st.integers(0, 3))
    return ids


@dataclass(frozen=True)
class Case:
    column: str
    rows: list[Any]  # a dict, or UNREADABLE
    shards: list[tuple[str, int, int]]  # end of the name, first row, row after the last
    config: DedupeConfig
    marked: Marked


@st.composite
def cases(draw: st.DrawFn) -> Case:
    column = draw(st.sampled_from(["text", "text", "text", "input_ids"]))
    content = texts() if column == "text" else token_ids()
    skip = draw(st.booleans())
    rows: list[Any] = [
        {
            "id": f"r{i}",
            column: draw(content),
            "source": draw(st.sampled_from(SOURCES)),
            "score": draw(st.sampled_from([None, 0.5, -1.0, 3.0])),
            "kept as it is": i * i,
        }
        for i in range(draw(st.integers(1, 24)))
    ]
    ends = draw(st.lists(st.sampled_from(ENDS), min_size=1, max_size=3))
    # A file whose first row cannot be read has no columns to choose from.
    if skip and "parquet" not in ends:
        for i in draw(st.lists(st.integers(1, 30), max_size=2)):
            rows[min(i, len(rows)) :] = [UNREADABLE, *rows[min(i, len(rows)) :]]
        ends = ends[:1]
    cuts = sorted(draw(st.integers(0, len(rows))) for _ in ends[1:])
    bounds = [0, *cuts, len(rows)]
    ids = st.sets(st.sampled_from([f"r{i}" for i in range(24)]), max_size=4)
    soft = draw(st.integers(0, 4)) == 0
    threshold = st.sampled_from([0.5, 0.7, 0.8, 0.9, 1.0])
    return Case(
        column=column,
        rows=rows,
        shards=[(end, *bounds[i : i + 2]) for i, end in enumerate(ends)],  # type: ignore[misc]
        config=DedupeConfig(
            threshold=draw(threshold),
            thresholds=draw(st.dictionaries(st.sampled_from(SOURCES), threshold, max_size=2)),
            keep=draw(st.sampled_from(["first", "longest", "highest:score", "lowest:score"])),
            prefer=tuple(draw(st.lists(st.sampled_from(SOURCES), unique=True, max_size=2))),
            copies=1 if soft else draw(st.sampled_from([1, 1, 2, 3])),
            soft=soft,
            protect_sources=tuple(draw(st.sets(st.sampled_from(SOURCES), max_size=1))),
            protect_ids=frozenset(draw(ids)),
            repetition=draw(st.booleans()),
            on_error="skip" if skip else "raise",
            # Bands of two rows: a pair of similarity .5 is missed once in 10^16.
            n_permutations=256,
            bands=128,
        ),
        marked=Marked(
            exposed=draw(ids), implicated=draw(ids), only=draw(st.one_of(st.none(), ids))
        ),
    )


def write_shards(case: Case, folder: Path) -> None:
    for number, (end, start, stop) in enumerate(case.shards):
        path = folder / f"{number}.{end}"
        rows = case.rows[start:stop]
        if end == "parquet":
            kind = pa.string() if case.column == "text" else pa.list_(pa.int32())
            schema = pa.schema(
                [
                    ("id", pa.string()),
                    (case.column, kind),
                    ("source", pa.string()),
                    ("score", pa.float64()),
                    ("kept as it is", pa.int64()),
                ]
            )
            folder.mkdir(exist_ok=True, parents=True)
            pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=5)
        elif UNREADABLE in rows:
            folder.mkdir(exist_ok=True, parents=True)
            lines = [row if row is UNREADABLE else json.dumps(row).encode() for row in rows]
            data = b"".join(line + b"\n" for line in lines)
            if end.endswith("gz"):
                data = gzip.compress(data)
            elif end.endswith("zst"):
                data = zstandard.compress(data)
            path.write_bytes(data)
        else:
            write_jsonl(path, rows)


def read_shard(path: Path) -> list[Any]:
    if path.suffix == ".parquet":
        rows: list[Any] = pq.read_table(path).to_pylist()
        return rows
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    elif path.suffix == ".zst":
        data = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    return [UNREADABLE if line == UNREADABLE else json.loads(line) for line in data.splitlines()]


# What should become of them


def shingles(content: Any) -> set[Any]:
    if isinstance(content, str):
        if choose_shingle(content) == "word5":
            elements: Any = tuple(re.findall(r"\w+", content.lower()))
        else:
            elements = " ".join(content.lower().split())
    else:
        elements = tuple(content)
    if not elements:
        return set()
    return {elements[i : i + 5] for i in range(max(1, len(elements) - 4))}


def normalised(content: Any) -> Any:
    return " ".join(content.lower().split()) if isinstance(content, str) else tuple(content)


def similarity(a: Any, b: Any) -> float:
    if normalised(a) == normalised(b):
        return 1.0
    one, other = shingles(a), shingles(b)
    return len(one & other) / len(one | other) if one and other else 0.0


@dataclass(frozen=True)
class Expected:
    reasons: list[str | None]
    keepers: list[int | None]
    similarities: list[float | None]
    weights: list[float]


def expected(case: Case, repetitive: set[int]) -> Expected:
    """Row by row, as the documentation says; which rows repeat themselves is given."""
    config, rows = case.config, case.rows
    n = len(rows)
    reasons: list[str | None] = [None] * n
    keepers: list[int | None] = [None] * n
    similarities: list[float | None] = [None] * n
    protected = [False] * n
    for i, row in enumerate(rows):
        if row is UNREADABLE:
            reasons[i] = "unreadable"
            continue
        protected[i] = row["source"] in config.protect_sources or row["id"] in config.protect_ids
        if protected[i]:
            continue
        if row["id"] in case.marked.implicated:
            reasons[i] = "implicated"
        elif row["id"] in case.marked.exposed:
            reasons[i] = "exposure"
        elif i in repetitive:
            reasons[i] = "repetition"

    def place(i: int) -> tuple[Any, ...]:
        row = rows[i]
        source = row["source"]
        rank = config.prefer.index(source) if source in config.prefer else len(config.prefer)
        value = row["score"]
        by = {
            "first": 0,
            "longest": -len(row[case.column]),
            "highest:score": float("inf") if value is None else -value,
            "lowest:score": float("inf") if value is None else value,
        }[config.keep]
        return (not protected[i], rank, by, i)

    compared = [i for i in range(n) if reasons[i] is None and rows[i][case.column] is not None]
    content = {i: rows[i][case.column] for i in compared}
    like = {(a, b): similarity(content[a], content[b]) for a, b in combinations(compared, 2)}
    like |= {(b, a): s for (a, b), s in like.items()}
    threshold = {i: config.thresholds.get(rows[i]["source"], config.threshold) for i in compared}
    weights = [1.0 if reason is None else 0.0 for reason in reasons]
    clusters = {i: {i} for i in range(n)}
    for (a, b), s in like.items():
        if s >= min(threshold[a], threshold[b]) and clusters[a] is not clusters[b]:
            clusters[a] |= clusters[b]
            for i in clusters[b]:
                clusters[i] = clusters[a]
    only = case.marked.only
    named = [row is not UNREADABLE and (only is None or row["id"] in only) for row in rows]
    meant = [any(named[member] for member in clusters[i]) for i in range(n)]
    for i in range(n):
        if reasons[i] == "repetition" and not meant[i]:
            reasons[i], weights[i] = None, 1.0
    if config.soft:
        for i in compared:
            weights[i] = 1 / len(clusters[i]) if meant[i] else 1.0
        return Expected(reasons, keepers, similarities, weights)
    kept: list[int] = []
    for i in sorted(compared, key=place):
        alike = [other for other in kept if like[i, other] >= threshold[i]]
        if len(alike) < config.copies or protected[i]:
            kept.append(i)
            continue
        if not meant[i]:
            continue
        same = [other for other in alike if normalised(content[other]) == normalised(content[i])]
        keeper = same[0] if same else max(alike, key=lambda o: (like[i, o], -kept.index(o)))
        reasons[i] = "exact" if same else "near"
        keepers[i] = keeper
        similarities[i] = like[i, keeper]
        weights[i] = 0.0
    return Expected(reasons, keepers, similarities, weights)


def check(case: Case, folder: Path, engine: Engine | None = None) -> Manifest:
    write_shards(case, folder / "in")
    manifest = dedupe(
        [folder / "in"], folder / "out", config=case.config, marked=case.marked, engine=engine
    )
    assert verify(folder / "out").ok
    rows = manifest.rows
    assert rows.height == len(case.rows)
    assert manifest.document["capped_buckets"] == {"n_buckets": 0, "n_pairs_left_out": 0}

    # Which rows repeat themselves, what other tests hold; here only that a chant does.
    plain = dedupe([folder / "in"], "nowhere", config=_only_repetition(case), dry_run=True)
    repetitive = {i for i, r in enumerate(plain.rows["reason"]) if r == "repetition"}
    chants = {
        i
        for i, row in enumerate(case.rows)
        if row is not UNREADABLE and row[case.column] in ("buy now " * 20, [7] * 60)
    }
    assert repetitive == (chants if case.config.repetition else set())

    wanted = expected(case, repetitive)
    assert rows["reason"].to_list() == wanted.reasons
    starts = {f"{number}.{end}": start for number, (end, start, _) in enumerate(case.shards)}
    keepers = [
        None if shard is None else starts[shard] + row
        for shard, row in rows.select("keeper_shard", "keeper_row").iter_rows()
    ]
    assert keepers == wanted.keepers
    for found, exact in zip(rows["jaccard"], wanted.similarities, strict=True):
        assert (found is None) == (exact is None)
        assert exact is None or found == np.float32(exact)
    assert rows["weight"].to_list() == pytest.approx(wanted.weights)
    for name, cluster, members in (
        rows.filter(pl.col("keeper_row").is_not_null())
        .select("keeper_shard", "cluster", "keeper_row")
        .iter_rows()
    ):
        keeper = rows.filter((pl.col("shard") == name) & (pl.col("row") == members))
        assert keeper["cluster"].to_list() == [cluster]

    # The cleaned shards are the kept rows, in order, with all their columns.
    for number, (end, start, stop) in enumerate(case.shards):
        is_kept = [wanted.reasons[i] is None for i in range(start, stop)]
        parent = read_shard(folder / "in" / f"{number}.{end}")
        child = read_shard(folder / "out" / "data" / f"{number}.{end}")
        assert child == [row for row, kept in zip(parent, is_kept, strict=True) if kept]
    return manifest


def _only_repetition(case: Case) -> DedupeConfig:
    return DedupeConfig(
        repetition=case.config.repetition, on_error=case.config.on_error, threshold=1.0
    )


# Checks


unhurried = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@settings(unhurried, max_examples=120)
@given(cases())
def test_dedupe_decides_as_one_row_after_another_would(case: Case) -> None:
    with TemporaryDirectory() as folder:
        check(case, Path(folder))


@settings(unhurried, max_examples=40)
@given(cases())
def test_cleaning_the_result_again_drops_nothing(case: Case) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        first = check(case, folder)
        data = folder / "out" / "data"
        again = dedupe([data], folder / "again", config=case.config, marked=case.marked)
        assert again.counts["rows_in"] == again.counts["rows_out"] == first.counts["rows_out"]


@settings(unhurried, max_examples=40)
@given(cases())
def test_the_result_does_not_depend_on_the_shards(case: Case) -> None:
    end = case.shards[0][0]
    together = Case(case.column, case.rows, [(end, 0, len(case.rows))], case.config, case.marked)
    columns = ["sample_id", "source", "reason", "cluster", "jaccard", "weight"]
    with TemporaryDirectory() as one, TemporaryDirectory() as other:
        apart = check(case, Path(one)).rows.select(columns)
        if UNREADABLE in case.rows:  # the id of such a row is its shard and place
            apart = apart.drop("sample_id", "source")
        assert check(together, Path(other)).rows.select(apart.columns).equals(apart)


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    engine = Processes(2)
    yield engine
    engine.close()


@settings(unhurried, max_examples=6)
@given(case=cases())
def test_the_result_does_not_depend_on_the_engine(case: Case, processes: Processes) -> None:
    with TemporaryDirectory() as folder:
        check(case, Path(folder), processes)


# Real near-duplicates


@pytest.fixture(scope="module")
def revisions(corpora: Path) -> list[Any]:
    """4,293 documents at several revisions."""
    documents = []
    for path in sorted((corpora / "B_neardup").glob("docs-*.jsonl.zst")):
        raw = zstandard.ZstdDecompressor().stream_reader(path.read_bytes(), read_across_frames=True)
        documents += [json.loads(line) for line in raw.read().split(b"\n") if line]
    return documents


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [0.7, 0.8])
@pytest.mark.parametrize("shingle", ["word5", "char5"])
def test_real_near_duplicates_are_all_found_and_nothing_else(
    revisions: list[Any], corpora: Path, tmp_path: Path, shingle: Any, threshold: float
) -> None:
    """All pairs of the corpus are known: precision and recall of clusters' edges, and of drops.

    With ``soft`` no row is dropped, and clusters are the components of the pairs found.
    """
    rows = {row["id"]: i for i, row in enumerate(revisions)}
    with gzip.open(corpora / "B_neardup" / "pairs.csv.gz", "rt", newline="") as file:
        known = {
            (rows[pair["id_a"]], rows[pair["id_b"]]): float(pair[f"j_{shingle}"] or 0)
            for pair in csv.DictReader(file)
        }
    known |= {(b, a): s for (a, b), s in known.items()}
    path = write_jsonl(tmp_path / "in.jsonl", revisions)
    config = DedupeConfig(threshold=threshold, shingle=shingle, repetition=False)
    manifest = dedupe([path], tmp_path / "out", config=config)

    kept = [d == "kept" for d in manifest.rows["decision"]]
    near = manifest.rows.filter(pl.col("reason") == "near")
    assert near.height > 500
    for row, keeper, jaccard in near.select("row", "keeper_row", "jaccard").iter_rows():
        assert kept[keeper]
        assert jaccard == pytest.approx(known[row, keeper], abs=1e-5)
        assert jaccard >= np.float32(threshold)
    # Every known pair at the threshold has lost a member, but for those that hashing may miss.
    at_threshold = [pair for pair, s in known.items() if s >= threshold]
    missed = [pair for pair in at_threshold if kept[pair[0]] and kept[pair[1]]]
    assert len(missed) <= 0.01 * len(at_threshold)


def test_near_duplicates_without_spaces_are_found_by_characters(
    corpora: Path, tmp_path: Path
) -> None:
    """Poems with planted edits; every pair compared by sets of their runs of five characters."""
    with gzip.open(corpora / "A_text" / "zh_poetry-00-of-04.jsonl.gz", "rt") as file:
        poems = [row["text"] for row in map(json.loads, file) if len(row["text"]) > 60][:300]
    generator = np.random.default_rng(4)
    edited = []
    for poem in poems[::3]:
        letters = list(poem)
        for place in generator.integers(0, len(letters), generator.integers(1, 4)):
            letters[int(place)] = "囍"
        edited.append("".join(letters))
    contents = poems + edited
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in contents])
    config = DedupeConfig(threshold=0.6, repetition=False, n_permutations=256, bands=128)
    manifest = dedupe([path], tmp_path / "out", config=config)

    sets = [
        {text[i : i + 5] for i in range(max(1, len(text) - 4))}
        for text in (" ".join(text.lower().split()) for text in contents)
    ]
    kept: list[int] = []
    dropped = {}
    for i, one in enumerate(sets):
        best = max(((len(one & sets[k]) / len(one | sets[k]), -k) for k in kept), default=(0, 0))
        if best[0] >= 0.6:
            dropped[i] = -best[1]
        else:
            kept.append(i)
    assert sum(i >= len(poems) for i in dropped) > 30
    found = manifest.rows.filter(pl.col("decision") == "dropped").select("row", "keeper_row")
    assert dict(found.iter_rows()) == dropped
