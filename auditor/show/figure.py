"""One figure with one x axis: panels under each other, events drawn through all of them.

All panels share a single plotly x axis, so zoom and unified hover are linked without a script of
ours. Places are counted in pixels from the top and turned into plotly's fractions, for a wide and
a narrow page; the page picks one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import plotly.graph_objects as go

from auditor.explain.explanation import Explanation
from auditor.show import series, wording
from auditor.show.panels import NEUTRAL, Panel, panels_of
from auditor.show.text import escape_label

EVENT_COLOURS: Final[Mapping[str, str]] = {
    "input_fall": "#e69f00",
    "ratio_fall": "#0072b2",
    "grade_drop": "#d55e00",
    "probe_loss_rise": "#cc79a7",
    "entropy_fall": "#009e73",
    "loss_spike": "#56b4e9",
    "grad_spike": "#a08a2c",
    "non_finite": "#7f3c8d",
}
"""Okabe and Ito's scheme, as far as it goes."""

GRADE_COLOURS: Final = (
    "#d55e00", "#d55e00", "#d55e00", "#e69f00", "#e69f00", "#56b4e9", "#3a8fc7", "#0072b2",
)  # fmt: skip
"""S0 to S7: danger, watch, healthy; never red against green."""

LANES: Final = 12
"""Most events with a lane of their own above the panels; bands are drawn for ``BANDS``."""

BANDS: Final = 200

FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"

_TITLE_PX, _LEGEND_ROW_PX, _LANE_PX, _MISSING_PX, _GAP_PX = 21, 20, 18, 26, 12
_CHARACTER_PX, _LEGEND_KEY_PX = 6.6, 48
_RIGHT_AXIS, _HIDDEN_AXIS = "y7", "y8"


@dataclass(frozen=True)
class Width:
    """A page width to lay the figure out for."""

    plot_px: int
    left_px: int
    right_px: int


WIDE: Final = Width(plot_px=960, left_px=62, right_px=58)
NARROW: Final = Width(plot_px=270, left_px=44, right_px=40)


@dataclass(frozen=True)
class Figure:
    """A figure as plotly's JSON, and what changes of its layout on a narrow page.

    ``narrow`` is for ``Plotly.relayout``; ``n_drawn`` panels have traces, ``panels`` has all.
    ``has_variants`` tells whether the rank ratio's variants can be switched.
    """

    data: list[dict[str, Any]]
    layout: dict[str, Any]
    wide: dict[str, Any]
    narrow: dict[str, Any]
    panels: Sequence[Panel]
    has_variants: bool

    @property
    def n_drawn(self) -> int:
        return sum(not panel.is_empty for panel in self.panels)


def figure_of(explanation: Explanation) -> Figure:
    """Build the figure; with nothing recorded it has no data."""
    panels = panels_of(explanation)
    traces: list[dict[str, Any]] = []
    layout: dict[str, Any] = {
        "template": "none",
        "font": {"family": FONT, "size": 12, "color": NEUTRAL},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "x unified",
        "hoversubplots": "axis",
        "hoverlabel": {"font": {"size": 11}, "namelength": 60},
        "dragmode": "zoom",
        "showlegend": True,
    }
    for number, panel in enumerate(panels, start=1):
        if panel.is_empty:
            continue
        legend = _numbered("legend", number)
        places = [(trace, _numbered("y", number)) for trace in panel.traces]
        places += [(trace, _RIGHT_AXIS) for trace in panel.right]
        places += [(trace, _HIDDEN_AXIS) for trace in panel.hidden]
        traces += [{**trace, "xaxis": "x", "yaxis": y, "legend": legend} for trace, y in places]
        layout[_numbered("yaxis", number)] = {**_axis(panel.axis), "anchor": "x"}
        if panel.right:
            layout["yaxis7"] = {
                **_axis(panel.right_axis),
                "anchor": "x",
                "overlaying": _numbered("y", number),
                "side": "right",
            }
        if panel.hidden:
            layout["yaxis8"] = {
                **_axis({"rangemode": "tozero"}),
                "anchor": "x",
                "overlaying": _numbered("y", number),
                "visible": False,
            }
        layout[legend] = {
            "orientation": "h", "x": 0, "xanchor": "left", "yanchor": "bottom",
            "font": {"size": 11}, "bgcolor": "rgba(0,0,0,0)", "itemsizing": "constant",
            "traceorder": "normal",
        }  # fmt: skip
    drawn = [n for n, panel in enumerate(panels, start=1) if not panel.is_empty]
    layout["xaxis"] = {
        "anchor": _numbered("y", drawn[-1]) if drawn else "y",
        "title": {"text": "step", "standoff": 6},
        "range": list(series.reach(explanation)),
        "showspikes": True, "spikemode": "across", "spikesnap": "cursor", "spikethickness": 1,
        "spikedash": "solid", "spikecolor": NEUTRAL, "zeroline": False, "gridcolor": _GRID,
        "ticks": "outside", "tickcolor": NEUTRAL,
        "hoverformat": "d", "unifiedhovertitle": {"text": "step %{x}"},
    }  # fmt: skip
    wide, narrow = (_placed(explanation, panels, width) for width in (WIDE, NARROW))
    figure = go.Figure(data=traces, layout=layout)
    for name, value in wide.items():
        figure.update_layout({name.replace(".", "_"): value})
    plain = figure.to_plotly_json()
    variants = {trace["meta"] for trace in panels[0].traces if "meta" in trace}
    return Figure(
        list(plain["data"]), plain["layout"], wide, narrow, panels, len(variants) > 1
    )  # fmt: skip


_GRID: Final = "rgba(138,143,152,0.22)"


def _axis(own: Mapping[str, Any]) -> dict[str, Any]:
    # Only x is zoomed: the panels keep their scales and a drag may start anywhere.
    return {"fixedrange": True, "gridcolor": _GRID, "zeroline": False, "automargin": False, **own}


def _placed(explanation: Explanation, panels: Sequence[Panel], width: Width) -> dict[str, Any]:
    """Domains, legends, bands and titles at a width, as arguments of ``Plotly.relayout``."""
    n_events = len(explanation.events)
    lanes = min(n_events, LANES)
    top = float(_TITLE_PX + lanes * _LANE_PX + _GAP_PX) if n_events else 0.0
    bounds = []
    for panel in panels:
        top += _TITLE_PX + _GAP_PX + _legend_rows(panel, width) * _LEGEND_ROW_PX
        height = _MISSING_PX if panel.is_empty else panel.height
        bounds.append((top, top + height))
        top += height
    total = top
    placed: dict[str, Any] = {
        "height": round(total) + 8 + 46,
        "margin": {"l": width.left_px, "r": width.right_px, "t": 8, "b": 46, "pad": 0},
    }
    shapes: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, (panel, (start, end)) in enumerate(zip(panels, bounds, strict=True), start=1):
        rows = _legend_rows(panel, width)
        title_y = 1 - (start - rows * _LEGEND_ROW_PX - 4) / total
        annotations.append(_words(f"<b>{escape_label(panel.title, 200)}</b>", title_y, width, 13))
        if panel.is_empty:
            sentence = _wrapped(panel.missing, width)
            annotations.append(_words(sentence, 1 - end / total, width, 12))
            continue
        domain = [_fraction(end, total), _fraction(start, total)]
        placed[f"{_numbered('yaxis', number)}.domain"] = domain
        placed[f"{_numbered('legend', number)}.y"] = _fraction(start - 2, total)
        if number == 2:
            shapes += _grade_bands(explanation)
    shapes += _event_bands(explanation)
    if n_events:
        more = f", first {lanes} of {n_events}" if n_events > lanes else ""
        title = f"<b>Events, from onset to recovery{more}</b>"
        annotations.append(_words(title, 1 - (_TITLE_PX - 4) / total, width, 13))
        bars, labels = _lanes(explanation, lanes, total)
        shapes += bars
        annotations += labels
    return {**placed, "shapes": shapes, "annotations": annotations}


def _legend_rows(panel: Panel, width: Width) -> int:
    """Rows plotly will need: entries of a wrapped legend are all as wide as the widest."""
    names = [
        trace["name"]
        for trace in [*panel.traces, *panel.right, *panel.hidden]
        if trace.get("visible", True) and trace.get("showlegend", True)
    ]
    if not names:
        return 0
    widths = [_LEGEND_KEY_PX + len(name) * _CHARACTER_PX for name in names]
    if sum(widths) <= width.plot_px:
        return 1
    return math.ceil(len(names) / max(1, int(width.plot_px // max(widths))))


def _words(text: str, y: float, width: Width, size: int) -> dict[str, Any]:
    return {
        "text": text, "xref": "paper", "x": 0, "xanchor": "left", "yref": "paper",
        "y": round(y, 6), "yanchor": "bottom", "showarrow": False, "align": "left",
        "xshift": 4 - width.left_px, "font": {"size": size if width is WIDE else size - 1},
    }  # fmt: skip


def _wrapped(sentence: str, width: Width) -> str:
    """Plotly does not wrap: lines broken by hand where the page is narrow."""
    limit = int((width.plot_px + width.left_px) / _CHARACTER_PX)
    lines, current = [], ""
    for word in sentence.split():
        if current and len(current) + 1 + len(word) > limit:
            lines.append(current)
            current = word
        else:
            current = f"{current} {word}".strip()
    return "<br>".join(escape_label(one, 300) for one in [*lines, current])


def _grade_bands(explanation: Explanation) -> list[dict[str, Any]]:
    bands = [
        {
            "type": "rect", "xref": "paper", "x0": 0, "x1": 1, "yref": "y2", "layer": "below",
            "y0": grade - 0.5, "y1": grade + 0.5, "line": {"width": 0},
            "fillcolor": colour, "opacity": 0.14 + 0.05 * abs(grade - 4),
        }
        for grade, colour in enumerate(GRADE_COLOURS)
    ]  # fmt: skip
    for n, (first, last) in enumerate(series.warm_ups(explanation.grades)):
        # The first has the words for all: attempts may be short.
        words = "" if n else "warm-up, not judged"
        bands.append(
            {
                "type": "rect", "xref": "x", "x0": first, "x1": last, "yref": "y2",
                "y0": -0.5, "y1": 7.5, "layer": "below", "line": {"width": 0},
                "fillcolor": NEUTRAL, "opacity": 0.3,
                "label": {"text": words, "textposition": "bottom left", "font": {"size": 10}},
            }
        )  # fmt: skip
    return bands


def _event_bands(explanation: Explanation) -> list[dict[str, Any]]:
    """The interval of each onset, and a line at its end that even a million steps leave visible."""
    bands = []
    for event in explanation.events.sort("event").head(BANDS).iter_rows(named=True):
        colour = event_colour(event["kind"])
        high = event["onset_high"]
        low = high if event["onset_low"] is None else event["onset_low"]
        place = {"xref": "x", "yref": "paper", "y0": 0, "y1": 1}
        bands.append(
            {
                **place, "type": "rect", "x0": low, "x1": high, "layer": "below",
                "fillcolor": colour, "opacity": 0.22, "line": {"width": 0},
            }
        )  # fmt: skip
        bands.append(
            {
                **place, "type": "line", "x0": high, "x1": high, "layer": "above",
                "opacity": 0.75, "line": {"width": 1, "color": colour, "dash": "dot"},
            }
        )  # fmt: skip
    return bands


def _lanes(
    explanation: Explanation, n: int, total: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A bar per event from onset to recovery, labelled on the side that has room."""
    until = series.ends(explanation)
    first, last = series.reach(explanation)
    bars: list[dict[str, Any]] = []
    labels: list[dict[str, Any]] = []
    for lane, event in enumerate(explanation.events.sort("event").head(n).iter_rows(named=True)):
        top = _TITLE_PX + lane * _LANE_PX
        high = event["onset_high"]
        bars.append(
            {
                "type": "rect", "xref": "x", "yref": "paper", "layer": "below",
                "x0": high, "x1": max(until[event["event"]], high),
                "y0": _fraction(top + _LANE_PX - 3, total), "y1": _fraction(top + 2, total),
                "fillcolor": event_colour(event["kind"]), "opacity": 0.5,
                "line": {"width": 1, "color": event_colour(event["kind"])},
            }
        )  # fmt: skip
        is_late = high - first > 0.45 * (last - first)
        labels.append(
            {
                "text": escape_label(f"{event['event']} {wording.kind(event['kind'])}"),
                "xref": "x", "yref": "paper", "showarrow": False, "font": {"size": 11},
                "x": event["onset_low"] if is_late and event["onset_low"] is not None else high,
                "xanchor": "right" if is_late else "left", "yanchor": "middle",
                "xshift": -3 if is_late else 3,
                "y": _fraction(top + _LANE_PX / 2, total),
            }
        )  # fmt: skip
    return bars, labels


def event_colour(kind: str) -> str:
    return EVENT_COLOURS.get(kind, NEUTRAL)


def _fraction(px: float, total: float) -> float:
    return round(max(0.0, min(1.0, 1 - px / total)), 6)


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}{number}"
