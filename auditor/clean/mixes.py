"""Mixes: sources and their weights, kept within a repetition budget, and drawn from.

A source that cleaning has made small is repeated more often at its old weight, so weights are
chosen together with what is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MAX_EPOCHS: Final = 4.0
"""Repetition budget: up to 4 epochs of a source cost almost nothing (Muennighoff et al. 2023)."""

_BLOCK_DRAWS = 65_536


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Weights that sum to one, and how often each source's samples are seen at them.

    ``capped`` names the sources that the budget holds below their wish. ``feasible`` is False where
    all sources together hold too few samples for the budget: then every source is repeated equally
    often, which is as little as can be.
    """

    weights: dict[str, float]
    projected_epochs: dict[str, float]
    capped: tuple[str, ...]
    feasible: bool


def cap_repetition(
    weights: Mapping[str, float],
    n_unique: Mapping[str, float],
    n_samples: int,
    max_epochs: float = MAX_EPOCHS,
) -> Mix:
    """The weights nearest to those wished for that repeat no source more than ``max_epochs`` times.

    A source's projected epochs are ``weight * n_samples / n_unique``. Sources over the budget are
    held at it, and what they give up goes to the others in proportion to their weights, again and
    again until all fit (water-filling). A source without samples gets no weight.

    Args:
        weights: wished weight per source, not negative, on any scale.
        n_unique: samples each source has; several that share a weight of one count as one.
        n_samples: samples the run consumes.
        max_epochs: repetition budget.
    """
    if not n_samples > 0:
        raise ValueError(f"n_samples must be positive, got {n_samples!r}")
    if not max_epochs > 0:
        raise ValueError(f"max_epochs must be positive, got {max_epochs!r}")
    if set(weights) != set(n_unique):
        raise ValueError(f"sources differ: {sorted(weights)} and {sorted(n_unique)}")
    if bad := {name: w for name, w in weights.items() if not (w >= 0 and np.isfinite(w))}:
        raise ValueError(f"weights must be finite and not negative, got {bad}")
    if bad_counts := {name: n for name, n in n_unique.items() if n < 0}:
        raise ValueError(f"n_unique must not be negative, got {bad_counts}")

    names = list(weights)
    unique = np.array([n_unique[name] for name in names], np.float64)
    wished = np.where(unique > 0, [weights[name] for name in names], 0.0)
    if not wished.sum() > 0:
        raise ValueError(f"no source has both weight and samples: {dict(weights)}")
    limit = np.where(wished > 0, max_epochs * unique / n_samples, 0.0)
    feasible = bool(limit.sum() >= 1 - 1e-12)
    if feasible:
        result, held = _fill(wished, limit)
    else:
        result, held = limit / limit.sum(), wished > 0
    epochs = np.divide(result * n_samples, unique, out=np.zeros_like(result), where=unique > 0)
    return Mix(
        weights=dict(zip(names, result.tolist(), strict=True)),
        projected_epochs=dict(zip(names, epochs.tolist(), strict=True)),
        capped=tuple(name for name, is_held in zip(names, held, strict=True) if is_held),
        feasible=feasible,
    )


def _fill(
    wished: NDArray[np.float64], limit: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    held = np.zeros(len(wished), np.bool_)
    while True:
        rest = np.where(held, 0.0, wished)
        room = max(1.0 - limit[held].sum(), 0.0)
        share = rest * (room / rest.sum()) if rest.sum() > 0 else rest
        result = np.where(held, limit, share)
        over = ~held & (share > limit * (1 + 1e-12))
        if not over.any():
            return result / result.sum(), held
        held |= over


class MixSampler:
    """Row indices drawn from a mix: a source by weight, then that source's next row.

        >>> list(MixSampler(["a", "a", "b"], {"a": 0.5, "b": 0.5}, seed=0, n_samples=6))
        [2, 0, 1, 0, 2, 2]

    Rows of a source come in their order and begin again at its end, so that each is seen once
    before any is seen twice. With row weights, a row of weight w comes in a share w of these
    passes, spread evenly, from a pass that the seed chooses. Every pass over the sampler gives the
    same indices. It has a length and yields ints: give it to ``DataLoader(sampler=...)``.

    Args:
        sources: source of each row, sequence of str [n_rows].
        weights: weight per source, on any scale; a source not named is not drawn.
        seed: of the numpy generator that draws the sources.
        n_samples: indices to give.
        row_weights: f64 [n_rows], within (0, 1]; default: 1 for every row.
    """

    def __init__(
        self,
        sources: Sequence[str] | NDArray[Any],
        weights: Mapping[str, float],
        seed: int,
        n_samples: int,
        *,
        row_weights: NDArray[Any] | None = None,
    ) -> None:
        if n_samples < 0:
            raise ValueError(f"n_samples must not be negative, got {n_samples!r}")
        drawn = {name: weight for name, weight in weights.items() if weight != 0}
        if not drawn or not all(w > 0 and np.isfinite(w) for w in drawn.values()):
            raise ValueError(f"weights must be positive and finite, got {dict(weights)}")
        labels = np.asarray(sources, dtype=np.str_)
        names, codes = np.unique(labels, return_inverse=True)
        order = np.argsort(codes, kind="stable")
        starts = np.searchsorted(codes[order], np.arange(len(names) + 1))
        rows = {str(n): order[starts[i] : starts[i + 1]] for i, n in enumerate(names)}
        if missing := sorted(set(drawn) - set(rows)):
            raise ValueError(f"sources with a weight and no rows: {missing}")
        self._names = sorted(drawn)
        self._rows = [rows[name] for name in self._names]
        bounds = np.cumsum([drawn[name] for name in self._names], dtype=np.float64)
        self._bounds = bounds / bounds[-1]
        self._seed = seed
        self._n_samples = n_samples
        self._row_weights = None
        if row_weights is not None and not (row_weights == 1).all():
            if not ((row_weights > 0) & (row_weights <= 1)).all():
                raise ValueError("row_weights must be within (0, 1]")
            self._row_weights = np.asarray(row_weights, np.float64)

    def __len__(self) -> int:
        return self._n_samples

    def __iter__(self) -> Iterator[int]:
        generator = np.random.default_rng(self._seed)
        passes = [self._passes(rows) for rows in self._rows]
        left = self._n_samples
        while left:
            size = min(left, _BLOCK_DRAWS)
            left -= size
            for code in np.searchsorted(self._bounds, generator.random(size), "right").tolist():
                yield next(passes[code])

    def _passes(self, rows: NDArray[np.int64]) -> Iterator[int]:
        """The rows of one source, again and again."""
        if self._row_weights is None:
            while True:
                yield from rows.tolist()
        weights = self._row_weights[rows]
        owed = np.random.default_rng((self._seed, len(rows))).random(len(rows))
        while True:
            owed += weights
            due = owed >= 1
            owed[due] -= 1
            yield from rows[due].tolist()
