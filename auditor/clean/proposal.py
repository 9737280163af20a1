"""What to change about the data, from what the report implicates; suggested, never applied.

Two kinds of changes follow from a blamed source: deduplicate it, and give it less weight, as much
less as its repeats had. Both rest on an association, so the change of weight is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from auditor.clean.mixes import MAX_EPOCHS

MAX_FACTOR: Final = 2.0
"""A proposal changes the weight of a source by this factor at most, up or down: the evidence is an
association, and a mix that jumps disturbs training by itself. What is left can be proposed again
from the next run."""

RAMP_STAGES: Final = 10
"""Ranges of steps that a ramp is cut into."""

NO_CHANGE: Final = "No change proposed: no data cause was found."
NO_EXPOSURES: Final = (
    "No change proposed: no exposures were recorded, so no data cause can be found."
)

CLEANED: Final[Mapping[str, str]] = {"duplication": "n_duplicate", "repetition": "repeated"}
"""By feature that deduplication can take away: the column that counts it. What else a source is
blamed for (being new, samples alike, their loss) leaves its weight to be changed."""

_SMALLEST_CHANGE: Final = 0.01
"""Where every weight would change by less than this share of itself, none is changed."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing to change about one source, and the evidence for it.

    Where the source is blamed, ``feature`` is what stood out most and ``event`` the event that it
    stood out before; ``exposure``, ``control``, ``lift``, ``low``, ``high`` and ``z`` are those of
    ``schema.SUSPECTS``; changes are ranked by ``z``. All are None where the reason is
    the repetition budget. ``factor``: new weight over old, None for a deduplication.
    """

    kind: Literal["deduplicate", "reweight"]
    source: str
    reason: Literal["blamed", "budget"]
    feature: str | None = None
    event: int | None = None
    exposure: float | None = None
    control: float | None = None
    lift: float | None = None
    low: float | None = None
    high: float | None = None
    z: float | None = None
    factor: float | None = None


@dataclass(frozen=True)
class Proposal:
    """A change of the data, or none.

    Weights are shares of the samples and sum to one. ``weights_now`` and ``epochs_now`` are the
    recorded mix, empty where no exposures were recorded; ``weights`` and ``projected_epochs``, how
    often each distinct content would be seen in a run as long as this one, are empty where nothing
    is proposed. ``changes`` are ranked by evidence. ``over_budget`` names the sources that the
    bound on the change leaves over the repetition budget, with their projected epochs.
    ``tokens_per_sample`` is the mean over what was trained, empty where it is not known.
    """

    summary: str
    deduplicate: bool
    weights_now: Mapping[str, float]
    weights: Mapping[str, float]
    epochs_now: Mapping[str, float]
    projected_epochs: Mapping[str, float]
    changes: tuple[Change, ...] = ()
    over_budget: Mapping[str, float] | None = None
    tokens_per_sample: Mapping[str, float] | None = None
    next_step: int = 0
    max_factor: float = MAX_FACTOR
    max_epochs: float = MAX_EPOCHS

    @property
    def mix(self) -> Mapping[str, float]:
        """The proposed weights, or those that are where nothing is proposed."""
        return self.weights or self.weights_now


@dataclass(frozen=True)
class Stage:
    """Weights over a range of steps, both ends included; ``last_step`` None: from there on."""

    first_step: int
    last_step: int | None
    weights: Mapping[str, float]


def propose(
    suspects: pl.DataFrame,
    composition: pl.DataFrame,
    *,
    max_factor: float = MAX_FACTOR,
    max_epochs: float = MAX_EPOCHS,
) -> Proposal:
    """Propose deduplication and weights where a source is blamed; nothing where none is.

    A blamed source is wished to have the share that it has without what it is blamed for, and never
    gains weight; what it gives up goes to the others in proportion to their weights. No weight
    changes by more than ``max_factor``; within that, no source is repeated more than
    ``max_epochs`` times.

    Args:
        suspects: columns of ``schema.SUSPECTS``.
        composition: columns of ``schema.COMPOSITION``. Distinct contents are those that were not
            seen before in the run; exposures that were not scored count as distinct.
        max_factor: largest change of a weight, 1 or more.
        max_epochs: repetition budget of a source.
    """
    if not max_factor >= 1:
        raise ValueError(f"max_factor must be 1 or more, got {max_factor!r}")
    if not max_epochs > 0:
        raise ValueError(f"max_epochs must be positive, got {max_epochs!r}")
    seen = _seen(composition)
    n = seen["n_samples"].to_numpy().astype(np.float64)
    distinct = np.maximum(seen["n_distinct"].to_numpy(), 1.0)
    names = seen["source"].to_list()
    now = n / n.sum() if len(n) else n

    def named(values: NDArray[np.float64]) -> dict[str, float]:
        return dict(zip(names, values.tolist(), strict=True))

    known = bool((seen["n_tokens"] > 0).all()) and len(n) > 0
    tokens = named(seen["n_tokens"].to_numpy() / n) if known else {}
    next_step = int(composition["step"].max()) + 1 if len(composition) else 0  # type: ignore[arg-type]
    blamed = _blamed(suspects, names)
    if blamed.is_empty():
        return Proposal(
            NO_CHANGE if len(n) else NO_EXPOSURES, False, named(now), {}, named(n / distinct), {},
            tokens_per_sample=tokens, next_step=next_step,
            max_factor=max_factor, max_epochs=max_epochs,
        )  # fmt: skip
    high = np.where(seen["source"].is_in(blamed["name"].implode()), now, now * max_factor)
    weights = _bounded(
        now * _kept(seen, blamed), now / max_factor, high, max_epochs * distinct / n.sum(), distinct
    )
    if (np.abs(weights / now - 1.0) < _SMALLEST_CHANGE).all():
        weights = now
    epochs = weights * n.sum() / distinct
    over = {name: e for name, e in named(epochs).items() if e > max_epochs * (1 + 1e-9)}
    factors = named(weights / now)
    changes = _changes(blamed, factors) + tuple(
        Change(kind="reweight", source=name, reason="budget", factor=factors[name])
        for name, e in sorted(named(n / distinct).items(), key=lambda item: -item[1])
        if e > max_epochs and factors[name] < 1 - 1e-9 and name not in set(blamed["name"])
    )
    return Proposal(
        _summary(changes, over, bool(distinct.sum() * max_epochs < n.sum()), max_epochs),
        any(one.kind == "deduplicate" for one in changes),
        named(now),
        named(weights),
        named(n / distinct),
        named(epochs),
        changes,
        over_budget=over,
        tokens_per_sample=tokens,
        next_step=next_step,
        max_factor=max_factor,
        max_epochs=max_epochs,
    )


def token_weights(proposal: Proposal, weights: Mapping[str, float]) -> dict[str, float]:
    """Weights as shares of the tokens, summing to one; the same where lengths are not known."""
    lengths = proposal.tokens_per_sample or dict.fromkeys(weights, 1.0)
    products = {name: weight * lengths[name] for name, weight in weights.items()}
    total = sum(products.values())
    return {name: product / total for name, product in products.items()}


def ramp(proposal: Proposal, n_steps: int, first_step: int) -> list[Stage]:
    """The way from the recorded mix to the proposed one, in ``RAMP_STAGES`` ranges of steps.

    Each range has the weights that a straight line has in its middle; the last stage, from
    ``first_step + n_steps`` on, is the proposed mix. Without steps, or without a change, that is
    all there is.
    """
    now, new = proposal.weights_now, proposal.mix
    if not n_steps or new == now:
        return [Stage(first_step, None, dict(new))]
    n_stages = min(RAMP_STAGES, n_steps)
    bounds = [first_step + i * n_steps // n_stages for i in range(n_stages + 1)]
    stages = []
    for i in range(n_stages):
        part = (i + 0.5) / n_stages
        weights = {name: (1 - part) * now[name] + part * new[name] for name in new}
        stages.append(Stage(bounds[i], bounds[i + 1] - 1, weights))
    return [*stages, Stage(bounds[-1], None, dict(new))]


def _seen(composition: pl.DataFrame) -> pl.DataFrame:
    """What the run trained on, a row per source in alphabetical order."""
    return (
        composition.group_by("source")
        .agg(
            pl.col("n_samples", "n_scored", "n_duplicate", "n_distinct", "n_tokens").sum(),
            repeated=(pl.col("repetition").fill_null(0.0) * pl.col("n_scored")).sum(),
        )
        .sort("source")
    )


def _blamed(suspects: pl.DataFrame, names: list[str]) -> pl.DataFrame:
    """The blamed sources and features, each with its strongest row, most evidence first."""
    return (
        suspects.filter(
            (pl.col("level") == "source")
            & (pl.col("verdict") == "blamed")
            & pl.col("name").is_in(names)
        )
        .sort("z", "name", "event", descending=[True, False, False], nulls_last=True)
        .unique(["name", "feature"], keep="first", maintain_order=True)
    )


def _kept(seen: pl.DataFrame, blamed: pl.DataFrame) -> NDArray[np.float64]:
    """Share of each source that is left without what the source is blamed for, f64 [n]."""
    kept = np.ones(len(seen))
    for name, feature in blamed.select("name", "feature").iter_rows():
        row = seen.row(by_predicate=pl.col("source") == name, named=True)
        place = seen["source"].to_list().index(name)
        left = 0.0  # where nothing tells good rows from bad, the weight falls as far as it may
        if feature in CLEANED:
            left = 1.0 - row[CLEANED[feature]] / max(1, row["n_scored"])
        kept[place] = min(kept[place], left)
    return kept


def _bounded(
    wished: NDArray[np.float64],
    low: NDArray[np.float64],
    high: NDArray[np.float64],
    budget: NDArray[np.float64],
    distinct: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Weights in proportion to those wished for, within the bounds, and the budget within those.

    Where the bounds leave the budget no room, sources go over it as equally as the bounds allow.
    """
    within = np.clip(budget, low, high)
    if within.sum() < 1.0:
        return _scaled(distinct, within, high)
    return _scaled(np.maximum(wished, 1e-9 * low), low, within)


def _scaled(
    wished: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Positive wishes times the one number at which, cut to their bounds, they sum to one."""
    least, most = 0.0, float((high / wished).max())
    for _ in range(200):
        middle = 0.5 * (least + most)
        if np.clip(middle * wished, low, high).sum() < 1.0:
            least = middle
        else:
            most = middle
    weights: NDArray[np.float64] = np.clip(most * wished, low, high)
    return weights / weights.sum()


def _changes(blamed: pl.DataFrame, factors: Mapping[str, float]) -> tuple[Change, ...]:
    found: list[Change] = []
    cleaned = set(blamed.filter(pl.col("feature").is_in(list(CLEANED)))["name"])
    for row in blamed.unique("name", keep="first", maintain_order=True).iter_rows(named=True):
        columns = ("feature", "event", "exposure", "control", "lift", "low", "high", "z")
        evidence = {name: row[name] for name in columns}
        evidence |= {"source": row["name"], "reason": "blamed"}
        if row["name"] in cleaned:
            found.append(Change(kind="deduplicate", **evidence))
        factor = factors[row["name"]]
        if factor < 1.0 - 1e-9:
            found.append(Change(kind="reweight", factor=factor, **evidence))
    return tuple(found)


def _summary(
    changes: tuple[Change, ...], over: Mapping[str, float], is_short: bool, max_epochs: float
) -> str:
    names = ", ".join(one.source for one in changes if one.kind == "deduplicate")
    lowered = [f"{one.source} (x {one.factor:.2f})" for one in changes if one.factor is not None]
    wishes = [f"deduplicate, starting with {names}"] if names else []
    wishes += [f"lower the weight of {', '.join(lowered)}"] if lowered else []
    words = ", and ".join(wishes) or "leave the mix as it is: no weight can be lowered further"
    words = f"{words[0].upper()}{words[1:]}."
    if is_short:
        words += (
            f" All sources together hold too few distinct samples for {max_epochs:g} epochs: add "
            "data."
        )
    elif over:
        words += (
            f" Even so over {max_epochs:g} epochs, since one proposal changes a weight only so "
            f"far: {', '.join(over)}."
        )
    return words
