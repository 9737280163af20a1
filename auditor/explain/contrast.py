"""What a source was in the lookback of an event, against what it was before: the statistics.

A window's statistic is its strongest stretch of ``STRETCH_STEPS``, so that a short burst is not
diluted; the lookback and its controls are scanned alike.

Shapes: **S** steps, **W** control windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

STRETCH_STEPS: Final = 10

EXCESS: Final = 1.5
"""What stands out lies this many times as far above the usual as any control window did."""

PART_OF_THE_WAY: Final = 0.5
PART_OF_A_LOSS: Final = 0.25
"""Of the way to its strongest, what a rate must have gone from its change on. Losses go on moving
while the model learns what is new."""

AT_ONCE_STEPS: Final = 3
ALONE_SHARE: Final = 0.10
"""A loss moved in one source alone when that of the others moved by less than this part of it."""

LEAST_LOSS_DEVIATION: Final = 0.01
"""Nats."""


@dataclass(frozen=True)
class Counts:
    """What is compared: ``amount`` of something over ``total``, f64 [S] each.

    A rate is a share of the samples (``is_share``), or a mean: below ``least`` of its own unit,
    deviations of means are not told from none.
    """

    amount: NDArray[np.float64]
    total: NDArray[np.float64]
    is_share: bool = True
    least: float = LEAST_LOSS_DEVIATION

    def mean(self, chosen: slice | NDArray[np.int64]) -> float:
        return float(self.amount[chosen].sum()) / max(float(self.total[chosen].sum()), 1e-12)

    @property
    def rates(self) -> NDArray[np.float64]:
        """The rate of each step, f64 [S]; 0 where there is nothing."""
        return self.amount / np.maximum(self.total, 1e-12)

    @classmethod
    def summed(cls, parts: Sequence[Counts]) -> Counts:
        """Of all of them together."""
        amount, total = (
            np.sum([getattr(one, name) for one in parts], axis=0) for name in ("amount", "total")
        )
        return cls(amount, total, parts[0].is_share)

    def without(self, part: Counts) -> Counts:
        """The rest of a whole."""
        return Counts(self.amount - part.amount, self.total - part.total, self.is_share)

    def beside(self, others: Counts) -> Counts:
        """The difference of a mean to that of others, step by step, where both are known."""
        known = (others.total > 0) & (self.total > 0)
        return Counts(
            np.where(known, self.amount - self.total * others.rates, 0.0),
            np.where(known, self.total, 0.0),
            is_share=False,
        )

    def stretches(self, otherwise: float) -> NDArray[np.float64]:
        """The rate in every stretch, f64 [S - STRETCH_STEPS + 1]; ``otherwise`` of nothing."""
        amount, total = (sums(values, STRETCH_STEPS) for values in (self.amount, self.total))
        return np.where(total > 0, amount / np.maximum(total, 1e-12), otherwise)


@dataclass(frozen=True)
class Windows:
    """The windows of one event, in places of the step axis.

    ``lookback`` is half-open; ``is_control`` tells which steps before it belong to no event, bool
    [lookback start]. Control windows are as long as the lookback and lie in such steps alone.
    """

    lookback: tuple[int, int]
    is_control: NDArray[np.bool_]

    @property
    def usual(self) -> NDArray[np.int64]:
        """Places of the control steps."""
        return np.flatnonzero(self.is_control)

    @property
    def last_control(self) -> int:
        return int(self.usual[-1])

    def last(self, n: int) -> Windows:
        """The same lookback with the last ``n`` control steps alone."""
        is_control = self.is_control.copy()
        is_control[self.usual[:-n]] = False
        return Windows(self.lookback, is_control)

    @property
    def controls(self) -> NDArray[np.int64]:
        """Places where a control window begins, [W]."""
        length = self.lookback[1] - self.lookback[0]
        if len(self.is_control) < length:
            return np.zeros(0, np.int64)
        return np.flatnonzero(sums(self.is_control.astype(np.float64), length) > length - 0.5)


def contrast(counts: Counts, windows: Windows) -> dict[str, Any]:
    """One source and feature in the lookback against the controls; by name:

    - ``z``: robust deviations (median and MAD of the control windows, at least the binomial
      deviation of a stretch) of the strongest stretch, negative for a fall;
    - ``excess``: how many times as far from the usual it lies as the farthest control window;
    - ``p``: share of the circular shifts that look at least as bad (:func:`shift_p`);
    - ``place``, ``change``: where the strongest stretch begins, and the step from which the rate
      had gone half of the way there, of a loss a quarter (the minimum of a cumulative sum,
      Page 1954);
    - ``exposure``, ``control``, ``lift``, ``low``, ``high``: see :func:`lift_of`.
    """
    start, end = windows.lookback
    n_stretches = end - start - STRETCH_STEPS + 1
    usual = windows.usual
    base = counts.mean(usual)
    rate = counts.stretches(base)
    begins = windows.controls
    best: dict[str, Any] | None = None
    for sign in (1.0, -1.0):
        here = sign * rate[start : end - STRETCH_STEPS + 1]
        past = highest(sign * rate, n_stretches)[begins]
        place = int(np.argmax(here))
        median = float(np.median(past))
        deviation = 1.4826 * float(np.median(np.abs(past - median)))
        distance = float(here[place]) - median
        floor = _least_deviation(counts, windows, base, start + place)
        z = distance / max(deviation, floor)
        if best is None or z > best["z"] * best["sign"]:
            # From the usual rate, not from the usual extreme: what a window comes to by chance
            # alone is no distance.
            farthest = max(float(past.max()) - sign * base, 1e-12)
            excess = (float(here[place]) - sign * base) / farthest
            best = {"sign": sign, "z": sign * z, "excess": excess, "place": start + place}
    assert best is not None
    sign = best.pop("sign")
    first = best["place"]
    in_stretch = slice(first, first + STRETCH_STEPS)
    best |= lift_of(counts, in_stretch, usual)
    best["p"] = shift_p(counts, windows.lookback, sign)
    part = PART_OF_THE_WAY if counts.is_share else PART_OF_A_LOSS
    line = best["control"] + part * (best["exposure"] - best["control"])
    best["change"] = turn(counts, slice(start, in_stretch.stop), line, sign)
    return best


def _least_deviation(counts: Counts, windows: Windows, base: float, place: int) -> float:
    """What the rate of a stretch deviates by chance, by the number of its samples."""
    n = float(counts.total[place : place + STRETCH_STEPS].sum())
    if counts.is_share:
        # At least one sample's worth of chance, so that a rate of zero has a deviation.
        p = min(max(base, 1.0 / n), 1.0 - 1.0 / n) if n > 2 else 0.5
        return math.sqrt(p * (1.0 - p) / n)
    usual = windows.usual[counts.total[windows.usual] > 0]
    squares = counts.total[usual] * (counts.rates[usual] - base) ** 2
    variance = float(squares.sum()) / max(1, len(usual) - 1)  # of a sample, from that of means
    return max(counts.least, math.sqrt(variance / max(n, 1.0)))


def turn(counts: Counts, within: slice, line: float, sign: float) -> int:
    """The place from which the rate is beyond ``line``: the minimum of a cumulative sum."""
    beyond = sign * (counts.amount[within] - line * counts.total[within])
    summed = np.concatenate([[0.0], np.cumsum(beyond)])
    return int(within.start) + int(np.argmin(summed[:-1]))


def has_past(own: Counts, others: Counts, windows: Windows) -> bool:
    """Whether losses of a source and of others were recorded at enough of the control steps."""
    usual = windows.usual
    return all(int((one.total[usual] > 0).sum()) >= 2 * STRETCH_STEPS for one in (own, others))


def moved_alone(own: Counts, others: Counts, change: int, way: float) -> bool:
    """Whether a loss moved by most of ``way`` at once in one source, and in the others not yet.

    What harms the model raises the loss of all it reads, and what drifts takes its time; a source
    that turned bad changes its own loss, in the very batch that brought it. At once: half of the
    way from the last ``STRETCH_STEPS`` recorded steps before to the first ``AT_ONCE_STEPS`` after.
    """
    both = np.flatnonzero((own.total > 0) & (others.total > 0))
    first = int(np.searchsorted(both, change))
    before, now = both[max(0, first - STRETCH_STEPS) : first], both[first : first + AT_ONCE_STEPS]
    if not len(before) or not len(now):
        return False
    sign = math.copysign(1.0, way)
    moved = sign * (own.mean(now) - own.mean(before))
    of_others = sign * (others.mean(now) - others.mean(before))
    return moved >= 0.5 * abs(way) and of_others < ALONE_SHARE * moved


def smallest_p(windows: Windows) -> float:
    """The least that :func:`shift_p` can be: as many shifted windows hold one extreme stretch."""
    start, end = windows.lookback
    return min(1.0, (end - start - STRETCH_STEPS + 1) / end)


def shift_p(counts: Counts, lookback: tuple[int, int], sign: float) -> float:
    """Share of the circular shifts whose last window is at least as extreme as the real one.

    Valid when the event's place is arbitrary under the null; neighbours of an extreme stretch are
    extreme themselves, which is what keeps p honest under autocorrelation.
    """
    start, end = lookback
    length = end - start
    amount, total = (
        np.concatenate([values[:end], values[: length - 1]])
        for values in (counts.amount, counts.total)
    )
    rate = Counts(amount, total).stretches(counts.mean(slice(0, end)))
    extremes = highest(sign * rate, length - STRETCH_STEPS + 1)
    return float(np.mean(extremes >= extremes[start] - 1e-12))


def lift_of(counts: Counts, stretch: slice, usual: NDArray[np.int64]) -> dict[str, float]:
    """Exposure in the stretch over exposure in the controls, with a 95% interval.

    ``usual`` are the places of the controls. Of a share it is :func:`share_lift`, widened by the
    dispersion of the control's stretches where they vary more than chance; of a mean, the interval
    is the spread of the control's stretches.
    """
    x0, n0 = counts.amount[usual], counts.total[usual]
    blocks = len(x0) // STRETCH_STEPS
    xs, ns = (
        values[: blocks * STRETCH_STEPS].reshape(blocks, STRETCH_STEPS).sum(axis=1)
        for values in (x0, n0)
    )
    exposure, control = counts.mean(stretch), counts.mean(usual)
    if not counts.is_share:
        rates = xs[ns > 0] / ns[ns > 0]
        spread = float(np.std(rates)) if len(rates) > 1 else 0.0
        lift = exposure / max(control, 1e-12)
        width = 1.96 * spread / max(control, 1e-12)
        return {
            "exposure": exposure,
            "control": control,
            "lift": lift,
            "low": max(0.0, lift - width),
            "high": lift + width,
        }
    dispersion = 1.0
    if blocks >= 4 and 0.0 < control < 1.0:
        expected = ns * control
        chi2 = float(((xs - expected) ** 2 / np.maximum(expected * (1 - control), 1e-12)).sum())
        dispersion = chi2 / (blocks - 1)
    return share_lift(
        float(counts.amount[stretch].sum()), float(counts.total[stretch].sum()),
        float(x0.sum()), float(n0.sum()), dispersion,
    )  # fmt: skip


def share_lift(a: float, n: float, b: float, m: float, dispersion: float = 1.0) -> dict[str, float]:
    """``a`` of ``n`` over ``b`` of ``m``, half a sample added to each.

    The 95% interval is that of a ratio of proportions on the log scale (Katz 1978), its variance
    times ``dispersion`` where that is above 1.
    """
    lift = ((a + 0.5) / (n + 0.5)) / ((b + 0.5) / (m + 0.5))
    variance = max(0.0, 1 / (a + 0.5) - 1 / (n + 0.5) + 1 / (b + 0.5) - 1 / (m + 0.5))
    width = 1.96 * math.sqrt(variance * max(1.0, dispersion))
    return {
        "exposure": a / n,
        "control": b / m,
        "lift": lift,
        "low": lift * math.exp(-width),
        "high": lift * math.exp(width),
    }


def benjamini_hochberg(p: Sequence[float]) -> list[float]:
    """Adjusted p values (Benjamini and Hochberg 1995)."""
    values = np.asarray(p, dtype=np.float64)
    n = len(values)
    if n == 0:
        return []
    order = np.argsort(values)[::-1]
    scaled = values[order] * n / np.arange(n, 0, -1)
    q = np.empty(n)
    q[order] = np.minimum.accumulate(np.minimum(scaled, 1.0))
    return [float(value) for value in q]


def sums(values: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """Sums over every run of ``length`` neighbours: [S - length + 1]."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return total[length:] - total[:-length]


def highest(values: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """The highest of every run of ``length`` neighbours: [S - length + 1].

    From those of one, two, four and so on, so that a long run costs the logarithm of the length.
    """
    size = 1
    while size < length:
        more = min(size, length - size)
        values = np.maximum(values[:-more], values[more:])
        size += more
    return values
