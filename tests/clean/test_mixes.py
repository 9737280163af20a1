"""Weights within the repetition budget, and the sampler that draws by them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.clean.mixes import MixSampler, cap_repetition

mixes = st.lists(st.tuples(st.floats(0.01, 10), st.integers(0, 1000)), min_size=1, max_size=8)


@given(mixes, st.integers(1, 5000), st.floats(0.5, 16))
def test_cap_repetition_stays_within_the_budget(
    mix: list[tuple[float, int]], n_samples: int, max_epochs: float
) -> None:
    weights = {f"s{i}": weight for i, (weight, _) in enumerate(mix)}
    n_unique = {f"s{i}": n for i, (_, n) in enumerate(mix)}
    if not any(n_unique.values()):
        with pytest.raises(ValueError, match="no source"):
            cap_repetition(weights, n_unique, n_samples, max_epochs)
        return
    result = cap_repetition(weights, n_unique, n_samples, max_epochs)
    assert sum(result.weights.values()) == pytest.approx(1)
    for name, n in n_unique.items():
        if n:
            epochs = result.weights[name] * n_samples / n
            assert result.projected_epochs[name] == pytest.approx(epochs)
        else:
            assert result.weights[name] == result.projected_epochs[name] == 0
    assert result.feasible == (max_epochs * sum(n_unique.values()) >= n_samples * (1 - 1e-9))
    if result.feasible:
        assert max(result.projected_epochs.values()) <= max_epochs * (1 + 1e-6)
        free = [name for name in weights if name not in result.capped and n_unique[name]]
        scale = [result.weights[name] / weights[name] for name in free]
        assert scale == pytest.approx([scale[0]] * len(scale) if scale else [])


def test_cap_repetition_gives_what_is_over_to_the_others_in_proportion() -> None:
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    result = cap_repetition(weights, {"a": 10, "b": 1000, "c": 100}, n_samples=1000)
    assert result.weights == pytest.approx({"a": 0.04, "b": 0.576, "c": 0.384})
    assert result.capped == ("a",)
    assert result.feasible


def test_cap_repetition_leaves_a_mix_within_the_budget_alone() -> None:
    result = cap_repetition({"a": 3, "b": 1}, {"a": 300, "b": 100}, n_samples=400)
    assert result.weights == pytest.approx({"a": 0.75, "b": 0.25})
    assert result.capped == ()


def test_cap_repetition_says_when_no_weights_can_fit() -> None:
    result = cap_repetition({"a": 1, "b": 1}, {"a": 10, "b": 30}, n_samples=400)
    assert not result.feasible
    assert result.projected_epochs == pytest.approx({"a": 10, "b": 10})


@pytest.mark.parametrize(
    ("weights", "n_unique", "n_samples", "max_epochs", "message"),
    [
        ({"a": -1}, {"a": 1}, 1, 4, "-1"),
        ({"a": float("nan")}, {"a": 1}, 1, 4, "nan"),
        ({"a": 1}, {"b": 1}, 1, 4, "differ"),
        ({"a": 1}, {"a": -3}, 1, 4, "-3"),
        ({"a": 1}, {"a": 1}, 0, 4, "n_samples"),
        ({"a": 1}, {"a": 1}, 1, 0, "max_epochs"),
    ],
)
def test_cap_repetition_refuses_bad_arguments(
    weights: dict[str, float],
    n_unique: dict[str, int],
    n_samples: int,
    max_epochs: float,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        cap_repetition(weights, n_unique, n_samples, max_epochs)


def test_mix_sampler_gives_each_row_of_a_source_once_before_any_twice() -> None:
    sources = ["a", "b", "a", "b", "a", "c"]
    drawn = list(MixSampler(sources, {"a": 0.7, "b": 0.3}, seed=3, n_samples=200))
    a_rows = [row for row in drawn if sources[row] == "a"]
    assert a_rows == ([0, 2, 4] * len(a_rows))[: len(a_rows)]
    assert all(sources[row] != "c" for row in drawn)


def test_mix_sampler_draws_by_weight() -> None:
    sources = ["a"] * 10 + ["b"] * 90
    drawn = Counter(sources[i] for i in MixSampler(sources, {"a": 3, "b": 1}, 0, 100_000))
    assert drawn["a"] == pytest.approx(75_000, abs=700)


def test_mix_sampler_repeats_itself_and_depends_on_the_seed() -> None:
    sampler = MixSampler(np.array(["a", "b"] * 50), {"a": 1, "b": 1}, seed=1, n_samples=100_000)
    first = list(sampler)
    assert len(sampler) == len(first)
    assert list(sampler) == first
    assert list(MixSampler(["a", "b"] * 50, {"a": 1, "b": 1}, 1, 10)) == first[:10]
    assert list(MixSampler(["a", "b"] * 50, {"a": 1, "b": 1}, 2, 100_000)) != first


def test_mix_sampler_refuses_what_it_cannot_draw() -> None:
    with pytest.raises(ValueError, match=r"no rows.*'b'"):
        MixSampler(["a"], {"a": 1, "b": 1}, 0, 1)
    with pytest.raises(ValueError, match="positive"):
        MixSampler(["a"], {"a": 0}, 0, 1)
    with pytest.raises(ValueError, match="-1"):
        MixSampler(["a"], {"a": 1}, 0, -1)
