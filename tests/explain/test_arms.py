"""Arms of a replay: what is replaced, by what, and all that must stay as it was."""

from __future__ import annotations

from collections import Counter

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor import schema
from auditor.explain.arms import ARMS, Sample, Stretch, contents_of, stretch_of
from auditor.run import polars_schema

FIRST, LAST = 20, 29


def record(
    *,
    seed: int = 0,
    steps: int = 50,
    sizes: tuple[int, ...] = (4, 3),
    sources: tuple[str | None, ...] = ("a", "b", None),
    n_samples: int = 10_000,
    pack: int = 1,
) -> pl.DataFrame:
    """Exposures of a run: every step a batch of each size, samples drawn from ``n_samples``."""
    rng = np.random.default_rng(seed)
    rows = []
    for step in range(steps):
        for number, size in enumerate(sizes):
            for position in range(size):
                for part in range(int(rng.integers(1, pack + 1))):
                    key = int(rng.integers(n_samples))
                    rows.append(
                        {
                            "step": step,
                            "rank": 0,
                            "attempt": 0,
                            "batch": step * len(sizes) + number,
                            "position": position,
                            "part": part,
                            "state": "trained",
                            "key": key,
                            "dataset": 0,
                            "index": key,
                            "sample_id": f"s{key}",
                            "source": sources[key % len(sources)],
                            "shard": "x",
                            "row": key,
                            "duplication": 0.0,
                            "dup_of": None,
                        }
                    )
    types = polars_schema({**schema.REPLAY_ORDER, "duplication": "f32", "dup_of": "i64"})
    return pl.DataFrame(rows, schema=types)


def stretch(parts: pl.DataFrame, bad: set[str]) -> Stretch:
    told = contents_of(parts)
    named = told["sample_id"].is_in(list(bad))
    return stretch_of(told, first=FIRST, last=LAST, implicated=named, tainted=named)


def shown(of: Stretch, arm: str, seed: int) -> list[tuple[int, int, list[list[Sample]]]]:
    return [(b.step, b.batch, [list(row) for row in b.rows]) for b in of.batches(arm, seed)]


def flat(batches: list[tuple[int, int, list[list[Sample]]]]) -> list[tuple[str, ...]]:
    return [tuple(s.sample_id for s in row) for _, _, rows in batches for row in rows]


def named_in_stretch(parts: pl.DataFrame, share: float, seed: int) -> set[str]:
    own = parts.filter(pl.col("step").is_between(FIRST, LAST))["sample_id"].unique().sort()
    rng = np.random.default_rng(seed)
    n = max(1, int(share * len(own)))
    return set(rng.permutation(own.to_numpy())[:n].tolist())


def test_first_arm_is_the_record() -> None:
    parts = record(pack=3)
    of = stretch(parts, named_in_stretch(parts, 0.3, 0))
    own = parts.filter(pl.col("step").is_between(FIRST, LAST))
    expected = own.group_by("step", "batch", "position", maintain_order=True).agg("sample_id")
    assert flat(shown(of, "as_it_was", 0)) == [tuple(ids) for ids in expected["sample_id"]]
    assert of.batches("as_it_was", 0).steps == list(range(FIRST, LAST + 1))
    assert of.batches("as_it_was", 0).digest == of.batches("as_it_was", 7).digest


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    draw=st.integers(0, 1000),
    share=st.floats(0.0, 0.9),
    pack=st.integers(1, 3),
    n_samples=st.sampled_from([150, 500, 10_000]),
)
def test_replacing_keeps_sizes_and_order_and_leaves_nothing_implicated(
    seed: int, draw: int, share: float, pack: int, n_samples: int
) -> None:
    parts = record(seed=seed, pack=pack, n_samples=n_samples)
    bad = named_in_stretch(parts, share, seed)
    of = stretch(parts, bad)
    was = shown(of, "as_it_was", draw)
    own = set(flat(was))
    for arm in ARMS[1:]:
        now = shown(of, arm, draw)
        assert [(b[0], b[1], len(b[2])) for b in now] == [(b[0], b[1], len(b[2])) for b in was]
        pairs = list(zip(flat(was), flat(now), strict=True))
        replaced = [(old, new) for old, new in pairs if old != new]
        if arm == "without_implicated":
            assert not any(bad & set(new) for _, new in pairs)
            # What was not implicated is where it was; the rest is the same multiset.
            assert all(old == new for old, new in pairs if not bad & set(old))
            assert all(bad & set(old) for old, _ in replaced)
        else:
            assert len(replaced) == of.n_random
            assert not any(bad & set(old) for old, _ in replaced)
            assert not any(bad & set(new) for _, new in replaced)
        # Replacements are from elsewhere in the run, and new to the stretch.
        assert not {new for _, new in replaced} & own
        kept = Counter(flat(was)) - Counter(old for old, _ in replaced)
        assert Counter(flat(now)) == kept + Counter(new for _, new in replaced)
        assert shown(of, arm, draw) == now


def test_sources_keep_their_shares_and_no_sample_is_shown_twice() -> None:
    parts = record()
    of = stretch(parts, named_in_stretch(parts, 0.4, 1))
    for arm in ARMS[1:]:
        was, now = shown(of, "as_it_was", 3), shown(of, arm, 3)
        for (_, _, before), (_, _, after) in zip(was, now, strict=True):
            assert [row[0].source for row in before] == [row[0].source for row in after]
        assert of.compromises(arm, 3) == (0, 0)


def test_random_arm_leaves_out_as_many_in_each_step() -> None:
    parts = record()
    bad = named_in_stretch(parts, 0.3, 2)
    of = stretch(parts, bad)

    def per_step(arm: str) -> Counter[int]:
        was, now = shown(of, "as_it_was", 0), shown(of, arm, 0)
        return Counter(
            step
            for (step, _, before), (_, _, after) in zip(was, now, strict=True)
            for old, new in zip(before, after, strict=True)
            if old != new
        )

    wanted = per_step("without_implicated")
    assert per_step("without_random").total() == wanted.total()
    # Each batch has seven rows a step: where more than half are implicated, others make up for it.
    enough = {step: n for step, n in wanted.items() if n <= 3}
    assert enough
    assert all(per_step("without_random")[step] >= n for step, n in enough.items())


def test_seeds_and_arms_draw_differently_and_again_the_same() -> None:
    parts = record()
    bad = named_in_stretch(parts, 0.4, 1)
    of, again = stretch(parts, bad), stretch(parts, bad)
    digests = {(arm, seed): of.batches(arm, seed).digest for arm in ARMS[1:] for seed in range(5)}
    assert len(set(digests.values())) == 10
    for (arm, seed), digest in digests.items():
        assert again.batches(arm, seed).digest == digest


def test_unseen_samples_are_taken_before_those_the_checkpoint_has_seen() -> None:
    parts = record(sources=("a",))
    of = stretch(parts, named_in_stretch(parts, 0.3, 0))
    before = set(parts.filter(pl.col("step") < FIRST)["sample_id"])
    old, new = flat(shown(of, "as_it_was", 0)), flat(shown(of, "without_implicated", 0))
    assert not {n for o, n in zip(old, new, strict=True) if o != n} & {(one,) for one in before}


def test_samples_are_made_up_for_by_other_sources_and_then_repeated() -> None:
    """Source a is implicated altogether; b has fewer rows elsewhere than are needed."""
    parts = record(sources=("a", "b"), sizes=(8,), steps=LAST + 4)
    parts = parts.filter((pl.col("step") >= FIRST) | (pl.col("step") < 2))
    bad = set(parts.filter(pl.col("source") == "a")["sample_id"])
    of = stretch(parts, bad)
    new = flat(shown(of, "without_implicated", 0))
    assert not bad & {one for (one,) in new}
    n_foreign, n_again = of.compromises("without_implicated", 0)
    n_bad = int(of.own["implicated"].sum())
    spare = set(parts.filter(pl.col("source") == "b")["sample_id"]) - set(
        parts.filter(pl.col("step").is_between(FIRST, LAST))["sample_id"]
    )
    assert n_foreign == n_bad
    assert n_again == n_bad - len(spare) > 0


def test_nothing_to_draw_from_is_told() -> None:
    parts = record().filter(pl.col("step").is_between(FIRST, LAST))
    of = stretch(parts, named_in_stretch(parts, 0.3, 0))
    assert not of.has_replacements
    with pytest.raises(ValueError, match="can replace"):
        of.batches("without_implicated", 0)
    with pytest.raises(ValueError, match="arm must be"):
        of.batches("without_all", 0)


def test_contents_are_told_across_copies_and_not_across_sources_of_the_same_name() -> None:
    parts = record(steps=1, sizes=(6,)).with_columns(
        key=pl.Series([0, 1, 2, 3, 4, 5]),
        sample_id=pl.Series(["x", "x", "y", "z", "u", "v"]),
        source=pl.Series(["a", "b", "a", "a", "a", "a"]),
        # y repeats x of a, z repeats y; u is similar to v, but not enough; v repeats what is gone.
        duplication=pl.Series([0.0, 0.0, 0.9, 1.0, 0.5, 1.0], dtype=pl.Float32),
        dup_of=pl.Series([None, None, 0, 2, 5, 99]),
    )
    told = contents_of(parts)
    assert told["who"].n_unique() == 6
    content = dict(zip("xwyzuv", told["content"], strict=True))
    assert content["x"] == content["y"] == content["z"]
    assert len({content[name] for name in "xwuv"}) == 4
    assert told.drop("who", "content").equals(parts)


def test_batches_are_a_sequence() -> None:
    parts = record()
    batches = stretch(parts, named_in_stretch(parts, 0.3, 0)).batches("as_it_was", 0)
    assert len(batches) == 2 * (LAST + 1 - FIRST)
    assert batches[-1] == list(batches)[-1] == batches[1:][-1]
    assert (batches[0].step, len(batches[0]), len(batches[1])) == (FIRST, 4, 3)
    assert batches[0].ids == [f"s{index}" for index in batches[0].indices]
    with pytest.raises(IndexError):
        batches[len(batches)]


def test_what_has_no_index_or_is_packed_says_so() -> None:
    hashed = record().with_columns(index=pl.lit(None, pl.Int64))
    batch = stretch(hashed, named_in_stretch(hashed, 0.3, 0)).batches("as_it_was", 0)[0]
    with pytest.raises(ValueError, match="told by a hash"):
        _ = batch.indices
    packed = record(pack=3)
    for batch in stretch(packed, named_in_stretch(packed, 0.3, 0)).batches("as_it_was", 0):
        if any(len(row) > 1 for row in batch.rows):
            with pytest.raises(ValueError, match="pack several"):
                _ = batch.ids
