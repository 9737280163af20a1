"""The six panels of the figure: their titles, axes and traces, or why there is nothing to draw.

A trace is a dict of plotly's ``scatter`` without its y axis, which the figure assigns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import polars as pl

from auditor.explain.explanation import Explanation
from auditor.show import series
from auditor.show.series import Line, thin
from auditor.show.text import escape_label

NEUTRAL: Final = "#8a8f98"
SOURCE_COLOURS: Final = (
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee7733", NEUTRAL,
)  # fmt: skip
"""Paul Tol's bright scheme, told apart by colour-blind readers, legible on white and on black."""

DEPTH_COLOURS: Final = ("#4477aa", "#55a5b0", "#b5a83d", "#ee7733")
"""Shallow to deep; blocks in between are mixed."""

BLUE, RED, PURPLE = "#4477aa", "#ee6677", "#c04fa0"

LOG_SPAN: Final = 100.0
"""Highest over lowest gradient norm from which its axis is logarithmic."""

Trace = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One panel; without traces ``missing`` says why.

    ``right`` are traces on a second axis, ``hidden`` are on one that is not drawn: what counts of
    them is their course, and hovering tells the values.
    """

    title: str
    traces: list[Trace]
    axis: Mapping[str, Any]
    missing: str
    height: int = 170
    right: list[Trace] = field(default_factory=list)
    right_axis: Mapping[str, Any] = field(default_factory=dict)
    hidden: list[Trace] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.traces and not self.right


def panels_of(explanation: Explanation) -> list[Panel]:
    """All six, in order from top to bottom."""
    composition = series.composition_of(explanation)
    return [
        rank_panel(explanation.signals),
        grade_panel(explanation.grades),
        entropy_panel(explanation.signals),
        optimizer_panel(explanation.signals),
        composition_panel(composition),
        repeats_panel(composition, explanation.signals),
    ]


def rank_panel(signals: pl.DataFrame) -> Panel:
    kind = series.kind_of(signals, "token_rank")
    traces = []
    for variant, dash in (("raw", "solid"), ("column", "solid")):
        lines = series.by_layer(series.of_signal(signals, "token_rank", kind, variant))
        for i, one in enumerate(lines):
            trace = _trace(
                one, f"rank ratio ({variant}), {one.name}", ".3f", _depth(i, len(lines)), dash
            )
            traces.append({**trace, "meta": variant, "visible": variant == "raw"})
    traces = [trace for trace in traces if _has_points(trace)]
    if traces and not any(trace["visible"] for trace in traces):
        traces = [{**trace, "visible": True} for trace in traces]
    return Panel(
        f"Rank ratio per block, {_where(kind)}",
        traces,
        {"title": {"text": "rank ratio"}, "rangemode": "normal", "nticks": 5},
        "No rank ratio was recorded: no monitor was attached, or every value was undefined.",
        height=190,
    )


def grade_panel(grades: pl.DataFrame) -> Panel:
    graded = grades.filter(pl.col("grade").is_not_null()).sort("step", "attempt")
    graded = graded.unique("step", keep="last", maintain_order=True)
    traces = []
    if len(graded):
        # Steps change where the grade does; the run's odd samples must survive thinning.
        steps = graded["step"].to_numpy().astype(np.float64)
        x, y = thin(steps, graded["grade"].to_numpy().astype(np.float64))
        kept = graded.filter(pl.col("step").is_in(x.astype(np.int64).tolist()))
        told = [
            [_number(row["ratio"]), "" if row["layer"] is None else row["layer"], row["alert"]]
            for row in kept.iter_rows(named=True)
        ]
        traces.append(
            {
                **_scatter("grade", x, y, NEUTRAL),
                "line": {"shape": "hv", "width": 2.2, "color": PURPLE},
                "customdata": told,
                "hovertemplate": "grade %{y}, ratio %{customdata[0]}, block %{customdata[1]}, "
                "%{customdata[2]}<extra></extra>",
                "showlegend": False,
            }
        )
    kind = "live" if len(graded) == 0 else str(graded["kind"][0])
    return Panel(
        f"Grade, S7 to S0, {_where(kind)}",
        traces,
        {
            "range": [-0.5, 7.5],
            "tickvals": [0, 2, 4, 7] if not traces else list(range(8)),
            "ticktext": [f"S{g}" for g in range(8)],
            "showgrid": False,
            "zeroline": False,
        },
        "No grade was given: there was no rank ratio to grade.",
    )


def entropy_panel(signals: pl.DataFrame) -> Panel:
    kind = series.kind_of(signals, "entropy_mean")
    traces = []
    for signal, how, name, colour, dash in (
        ("entropy_mean", "mean", "mean of all heads", BLUE, "solid"),
        ("entropy_min", "min", "lowest head", RED, "solid"),
    ):
        own = series.of_signal(signals, signal, kind, is_of_one_head=signal == "entropy_min")
        one = series.over_layers(own, how, name)
        if one.is_defined:
            traces.append(_trace(one, f"attention entropy, {name}", ".3g", colour, dash))
    return Panel(
        f"Attention entropy, {_where(kind)}",
        traces,
        {"title": {"text": "nats"}, "rangemode": "tozero", "nticks": 5},
        "No attention entropy was recorded: no attention call was seen, or there was no monitor.",
        height=140,
    )


def optimizer_panel(signals: pl.DataFrame) -> Panel:
    norm = series.line(series.of_signal(signals, "grad_norm", "step"), "gradient norm (left)")
    losses = [
        (series.line(series.of_signal(signals, "loss", "step"), "training loss"), BLUE, "solid"),
        (
            series.line(series.of_signal(signals, "probe_loss", "probe"), "probe loss"),
            RED,
            "solid",
        ),
    ]
    losses = [one for one in losses if one[0].is_defined]
    rate = series.line(series.of_signal(signals, "lr", "step"), "learning rate")
    rates = [_trace(rate, "learning rate", ".3g", NEUTRAL, "dot", 1.2)] if rate.is_defined else []
    positive = norm.values[np.isfinite(norm.values) & (norm.values > 0)]
    is_log = len(positive) > 0 and positive.max() / positive.min() > LOG_SPAN
    left = [_trace(norm, "gradient norm", ".3g", "#b5a83d", "solid")] if norm.is_defined else []
    loss_axis = {"title": {"text": "loss"}, "nticks": 5, "tickmode": "auto"}
    right = [_trace(line, line.name, ".4g", colour, dash) for line, colour, dash in losses]
    left_axis: dict[str, Any] = {"title": {"text": "gradient norm"}, "nticks": 5}
    left_axis |= {"type": "log", "dtick": 1} if is_log else {"rangemode": "tozero"}
    return Panel(
        "Gradient norm, loss and learning rate" if rates else "Gradient norm and loss",
        left or right or rates,
        left_axis if left else loss_axis if right else {"title": {"text": "learning rate"}},
        "No loss, no gradient norm and no learning rate were recorded.",
        right=right if left else [],
        right_axis={**loss_axis, "showgrid": False} if left and right else {},
        hidden=rates if left or right else [],
    )


def composition_panel(composition: series.Composition | None) -> Panel:
    traces = []
    title = "Batch composition by source"
    for one, colour in _coloured(composition.shares if composition else []):
        trace = _trace(one, "share of %{fullData.name}", ".1%", colour, "solid")
        # Areas need no line; the gap between two is what the eye follows.
        trace["line"] = {"width": 0.6, "color": colour}
        traces.append({**trace, "stackgroup": "share", "fillcolor": _alpha(colour, 0.72)})
    if composition is not None and composition.width > 1:
        title += f", mean of {composition.width:,} steps"
    return Panel(
        title,
        traces,
        {"range": [0, 1], "tickformat": ".0%", "nticks": 5},
        "No exposures were recorded: no sampler was attached, so what the batches were made of is "
        "not known.",
    )


def repeats_panel(composition: series.Composition | None, signals: pl.DataFrame) -> Panel:
    traces = []
    duplicates = composition.duplicates if composition else []
    for one, colour in _coloured(duplicates):
        if one.is_defined and np.nanmax(one.values) > 0:
            traces.append(
                _trace(one, "near-duplicates, %{fullData.name}", ".1%", colour, "solid", width=2.0)
            )
    if composition is not None and composition.repetition.is_defined:
        traces.append(
            _trace(composition.repetition, "mean repetition", ".1%", NEUTRAL, "dot", width=1.5)
        )
    diversity = series.of_signal(signals, "sample_rank", "live").filter(pl.col("layer") == -1)
    if len(diversity):
        # Whichever variant it has: there is one at the embedding.
        one = series.line(diversity, "input diversity (rank)")
        if one.is_defined:
            traces.append(_trace(one, "input diversity", ".3f", PURPLE, "dash", width=1.3))
    return Panel(
        "Near-duplicates by source; input diversity",
        traces,
        {"range": [0, 1.02], "tickformat": ".0%", "nticks": 5},
        "Neither duplication nor input diversity was recorded.",
        height=190,
    )


def _where(kind: str) -> str:
    return "on the probe" if kind == "probe" else "on the training batch"


def _trace(line: Line, told: str, form: str, colour: str, dash: str, width: float = 1.6) -> Trace:
    """A line with its hover text; ``told`` may name the trace as ``%{fullData.name}``."""
    x, y = thin(line.steps, line.values)
    return {
        **_scatter(escape_label(line.name), x, y, colour),
        "line": {"width": width, "color": colour, "dash": dash},
        "hovertemplate": f"{told}: %{{y:{form}}}<extra></extra>",
    }


def _scatter(name: str, x: Sequence[float] | Any, y: Sequence[float] | Any, colour: str) -> Trace:
    # A single point has no line to show it.
    n_defined = int(np.isfinite(np.asarray(y, dtype=np.float64)).sum())
    return {
        "type": "scatter",
        "mode": "lines" if n_defined > 1 else "lines+markers",
        "name": name,
        "x": [int(value) if float(value).is_integer() else float(value) for value in x],
        "y": [_number(value) for value in y],
        "marker": {"color": colour},
    }


def _has_points(trace: Trace) -> bool:
    return any(value is not None for value in trace["y"])


def _number(value: float | None) -> float | None:
    """Five significant digits: more cannot be seen, and the page is half the size."""
    if value is None or not np.isfinite(value):
        return None
    return float(f"{value:.5g}")


def _coloured(lines: Sequence[Line]) -> list[tuple[Line, str]]:
    """Sources with the colour they have in every panel."""
    return [
        (
            one,
            NEUTRAL
            if one.name == series.OTHER_SOURCES
            else SOURCE_COLOURS[i % len(SOURCE_COLOURS)],
        )
        for i, one in enumerate(lines)
    ]


def _depth(i: int, n: int) -> str:
    """The colour of block i of n, mixed from the two nearest of ``DEPTH_COLOURS``."""
    place = 0.0 if n < 2 else i / (n - 1) * (len(DEPTH_COLOURS) - 1)
    low = min(int(place), len(DEPTH_COLOURS) - 2)
    pairs = zip(_channels(DEPTH_COLOURS[low]), _channels(DEPTH_COLOURS[low + 1]), strict=True)
    mixed = [round(a + (b - a) * (place - low)) for a, b in pairs]
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _alpha(colour: str, alpha: float) -> str:
    return "rgba({},{},{},{})".format(*_channels(colour), alpha)
