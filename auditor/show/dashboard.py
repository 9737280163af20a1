"""The screen of ``auditor watch``: a situation in, lines of text out; no I/O.

Every line is a ``rich.text.Text``, never markup, and fits the width. Where the encoding is not
UTF-8, bars, curves and boxes are ASCII.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.text import Text

from auditor.schema import DUPLICATE_SIMILARITY, UNKNOWN_SOURCE
from auditor.show import wording
from auditor.show.following import Situation
from auditor.show.recent import Notice, Point
from auditor.show.text import clean, encodable, sentence

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_SIGNS: Final = "_.-=+*#@"
"""Levels of a curve, with and without UTF-8. On a curve of two rows they are used twice over."""

_NOT_FINITE: Final = "!"

_LABEL_CHARS: Final = 11
_VALUE_CHARS: Final = 8
_PANEL_LINES: Final = 8
_MAX_PANEL_LINES: Final = 12
_MIN_NOTICES: Final = 5

# Seven segments and an S that is no 5: readable without UTF-8 and over any line.
_GLYPHS: Final = {
    "S": (" __ ", "(_  ", "__) "),
    "0": (" _ ", "| |", "|_|"),
    "1": ("   ", "  |", "  |"),
    "2": (" _ ", " _|", "|_ "),
    "3": (" _ ", " _|", " _|"),
    "4": ("   ", "|_|", "  |"),
    "5": (" _ ", "|_ ", " _|"),
    "6": (" _ ", "|_ ", "|_|"),
    "7": (" _ ", "  |", "  |"),
    "-": ("   ", " _ ", "   "),
}
_LEVEL_STYLES: Final = {"danger": "bold red", "watch": "yellow", "recovered": "green"}
_STATE_STYLES: Final = {"stalled": "bold red", "ended": "cyan", "running": "green"}


@dataclass(frozen=True)
class Screen:
    """How much there is to draw on, in cells, and the encoding of what is drawn."""

    width: int
    height: int
    encoding: str = "utf-8"

    @property
    def is_utf(self) -> bool:
        return self.encoding.lower().replace("-", "").startswith("utf")


def draw(situation: Situation, screen: Screen, *, keys: bool = True) -> list[Text]:
    """The screen as at most ``height`` lines of at most ``width`` cells; ``keys``: name them."""
    title = Text.assemble((f"auditor watch {clean(str(situation.run), 200)}", "bold"))
    hint = "q quits" if keys else ""
    if situation.waiting_for:
        lines = [title, Text(), Text(f"waiting for {sentence(situation.waiting_for)}"), Text(hint)]
        return _fitted(lines, screen)
    title.append(f"  run {clean(situation.run_id)}", style="dim")
    panel_lines = min(_MAX_PANEL_LINES, max(3, (screen.height - 3 - _MIN_NOTICES) // 2))
    if screen.height >= 24:
        panel_lines = max(panel_lines, _PANEL_LINES)
    left, right = screen.width - screen.width // 2, screen.width // 2
    lines = [title]
    for pair in ((_grade, _attention), (_training, _data)):
        panels = [
            _panel(
                *panel(situation, screen, width - 4, panel_lines - 2), width, panel_lines, screen
            )
            for panel, width in zip(pair, (left, right), strict=True)
        ]
        lines += [one + other for one, other in zip(*panels, strict=True)]
    n_notices = screen.height - len(lines) - 2
    if n_notices >= 3:
        notices = _notices(situation, n_notices - 2)
        lines += _panel("alerts and changes of grade", notices, screen.width, n_notices, screen)
    return _fitted(
        [*lines[: max(1, screen.height - 2)], _status(situation), _gaps(situation, hint)], screen
    )


def _fitted(lines: Iterable[Text], screen: Screen) -> list[Text]:
    fitted = []
    for line in lines:
        # The only place where text is made fit for the terminal: nothing gets past it.
        shown = _encodable(line, screen.encoding)
        shown.truncate(screen.width, overflow="crop")
        shown.rstrip()
        fitted.append(shown)
    return fitted[: screen.height]


def _encodable(line: Text, encoding: str) -> Text:
    plain = encodable(line.plain, encoding)
    if plain == line.plain:
        return line.copy()
    if len(plain) == len(line.plain):
        return Text(plain, style=line.style, spans=list(line.spans))
    return Text(plain, style=line.style)


def _panel(
    title: str, lines: Sequence[Text], width: int, height: int, screen: Screen
) -> list[Text]:
    """A box of exactly this size, its content cropped to it."""
    if width < 6 or height < 3:
        return [Text(" " * width) for _ in range(height)]
    corners, across, down = ("┌┐└┘", "─", "│") if screen.is_utf else ("++++", "-", "|")
    head = Text(encodable(f" {title} ", screen.encoding))
    head.truncate(width - 4, overflow="crop")
    fill = width - 3 - head.cell_len
    box = [Text.assemble((corners[0] + across, "dim"), head, (across * fill + corners[1], "dim"))]
    inner = width - 4
    for i in range(height - 2):
        line = _encodable(lines[i], screen.encoding) if i < len(lines) else Text()
        line.truncate(inner, overflow="crop", pad=True)
        box.append(Text.assemble((f"{down} ", "dim"), line, (f" {down}", "dim")))
    box.append(Text(corners[2] + across * (width - 2) + corners[3], style="dim"))
    return box


# -- the panels: a title and lines ---------------------------------------------------------------


def _grade(situation: Situation, screen: Screen, width: int, height: int) -> tuple[str, list[Text]]:
    graded = situation.signals.graded
    if not graded:
        return "grade", [Text("no sampled step yet", style="dim")]
    last, grade = graded[-1], graded[-1].grade
    style = _grade_style(grade.grade, grade.alert)
    words = [
        f"ratio {_value(grade.ratio)}"
        + (f", {where}" if (where := wording.block(grade.layer)) else ""),
        f"{last.kind}, step {grade.step:,}",
        grade.alert,
    ]
    if height < len(words):
        return "grade", [Text(f"{wording.grade(grade.grade)} {grade.alert}", style=style)]
    digit = "-" if grade.grade is None else str(grade.grade)
    lines = [
        Text.assemble((s + d, f"bold {style}"), "  ", (word, style if i == 2 else ""))
        for i, (s, d, word) in enumerate(zip(_GLYPHS["S"], _GLYPHS[digit], words, strict=True))
    ]
    ratios = [one.grade.ratio for one in graded]
    n_rows = max(1, min(3, height - 4))
    lines += [Text(row, style=style) for row in curve(ratios, width, screen.is_utf, n_rows)]
    known = [ratio for ratio in ratios if math.isfinite(ratio)]
    if known:
        between = f"{min(known):.2f} to {max(known):.2f}"
        lines.append(Text(f"{between}, steps {graded[0].step:,} to {grade.step:,}", style="dim"))
    return "grade", lines


def _attention(
    situation: Situation, screen: Screen, width: int, height: int
) -> tuple[str, list[Text]]:
    signals = situation.signals
    rows = [
        (label, points)
        for label, name in (
            ("entropy", "entropy_mean"),
            ("normalised", "entropy_normalised"),
            ("lowest head", "entropy_min"),
            ("max logit", "max_logit"),
        )
        if (points := signals.points(name))
    ]
    lines = []
    for n_left, (label, points) in zip(range(len(rows) - 1, -1, -1), rows, strict=True):
        lines.append(_row(label, points, screen, width))
        if points[-1].layer is not None and len(lines) + n_left < height:
            lines.append(Text(" " * (_LABEL_CHARS + 1) + _head(points[-1]), style="dim"))
    return "attention", lines or [Text("not recorded", style="dim")]


def _head(point: Point) -> str:
    head = "" if point.head is None else f", head {point.head}"
    return f"{wording.block(point.layer)}{head}"


def _training(
    situation: Situation, screen: Screen, width: int, height: int
) -> tuple[str, list[Text]]:
    signals = situation.signals
    lines = [
        _row(label, points, screen, width)
        for label, name in (
            ("loss", "loss"),
            ("probe loss", "probe_loss"),
            ("grad norm", "grad_norm"),
            ("lr", "lr"),
        )
        if (points := signals.points(name))
    ]
    if not lines:
        lines.append(Text("no losses recorded", style="dim"))
    if situation.steps_per_s is not None:
        mean = "mean so far" if situation.is_mean else ""
        lines.append(_labelled("steps/s", wording.number(situation.steps_per_s), mean))
    return "training", lines


def _data(situation: Situation, screen: Screen, width: int, height: int) -> tuple[str, list[Text]]:
    seen = situation.composition
    if not seen.n_batches:
        return "data", [Text("no batches recorded", style="dim")]
    what = "drawn" if seen.only_drawn else "last"
    batches = "batch" if seen.n_batches == 1 else f"{seen.n_batches:,} batches"
    title = f"data: {what} {batches}, {wording.counted(seen.n_samples, 'sample')}"
    below = []
    if seen.n_scored:
        shares = [math.nan if one is None else one for one in seen.duplicated]
        duplicated = seen.n_duplicate / seen.n_scored
        below.append(
            _labelled(
                "duplicated",
                wording.percent(duplicated),
                _curve(shares, width, screen, lowest=0.0, highest=1.0),
                "yellow" if duplicated >= 0.2 else "",
            )
        )
        repetitive = wording.percent(seen.n_repetitive / seen.n_scored)
        mean = f"mean {wording.percent(seen.repetition)}"
        below.append(_labelled("repetitive", repetitive, mean))
    else:
        below.append(Text(f"duplicates (from {DUPLICATE_SIMILARITY}) not scored", style="dim"))
    if diversity := situation.signals.points("input_diversity"):
        below.append(_row("diversity", diversity, screen, width))
    n_sources = max(1, height - len(below))
    return title, _sources(seen.sources, seen.n_described, n_sources, screen, width) + below


def _sources(
    sources: Sequence[tuple[str, int]], n: int, n_lines: int, screen: Screen, width: int
) -> list[Text]:
    if not n or [name for name, _ in sources] == [UNKNOWN_SOURCE]:
        return [Text("sources unknown", style="dim")]
    shown = list(sources if len(sources) <= n_lines else sources[: n_lines - 1])
    rest = len(sources) - len(shown)
    if rest:
        held = sum(count for _, count in sources[len(shown) :])
        shown.append((f"{rest} more" if len(shown) else wording.counted(rest, "source"), held))
    name_chars = max(_LABEL_CHARS, min(24, width // 3))
    bar_chars = max(0, width - name_chars - 8)
    lines = []
    for name, count in shown:
        label = Text(encodable(clean(name, name_chars) or "(no name)", screen.encoding))
        label.truncate(name_chars, overflow="crop", pad=True)
        full = round(bar_chars * count / n)
        bar = ("█" if screen.is_utf else "#") * full
        lines.append(
            Text.assemble(label, " ", (bar.ljust(bar_chars), "cyan"), f"{count / n:>6.1%}")
        )
    return lines


def _row(label: str, points: Sequence[Point], screen: Screen, width: int) -> Text:
    values = [point.value for point in points]
    style = "" if math.isfinite(values[-1]) else "bold red"
    return _labelled(label, _value(values[-1]), _curve(values, width, screen), style)


def _labelled(label: str, value: str, more: str, style: str = "") -> Text:
    return Text.assemble(
        (f"{label:<{_LABEL_CHARS}} ", "dim"), (f"{value:<{_VALUE_CHARS}} ", style), (more, "cyan")
    )


def _curve(
    values: Sequence[float],
    width: int,
    screen: Screen,
    *,
    lowest: float | None = None,
    highest: float | None = None,
) -> str:
    room = max(0, width - _LABEL_CHARS - _VALUE_CHARS - 2)
    return curve(values, room, screen.is_utf, lowest=lowest, highest=highest)[0]


def curve(
    values: Sequence[float],
    width: int,
    is_utf: bool,
    n_rows: int = 1,
    *,
    lowest: float | None = None,
    highest: float | None = None,
) -> list[str]:
    """Values over time as ``n_rows`` lines of at most ``width`` signs, the top line first.

    More values than signs are averaged in groups; a group that holds a value that is not finite is
    marked ``!``. The range is that of the values unless given.
    """
    groups = _grouped(values, width)
    finite = [value for value in groups if math.isfinite(value)]
    low = min(finite, default=0.0) if lowest is None else lowest
    high = max(finite, default=0.0) if highest is None else highest
    levels = _BLOCKS if is_utf else _SIGNS
    n_levels = len(levels) * n_rows
    rows = [""] * n_rows
    for value in groups:
        is_finite = math.isfinite(value)
        place = (value - low) / (high - low) if is_finite and high > low else 0.5
        level = max(0, min(n_levels - 1, int(place * n_levels)))
        for i in range(n_rows):  # from the bottom
            above = level - len(levels) * i
            full = levels[-1] if is_utf else "|"
            sign = full if above >= len(levels) else levels[above] if above >= 0 else " "
            if not is_finite:
                sign = _NOT_FINITE if i == 0 else " "
            rows[n_rows - 1 - i] += sign
    return rows


def _grouped(values: Sequence[float], width: int) -> list[float]:
    values = list(values)
    n = len(values)
    if n <= width:
        return values
    if width <= 0:
        return []
    bounds = [i * n // width for i in range(width + 1)]
    # A mean with a value that is not finite is not finite either.
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]


# -- below the panels ----------------------------------------------------------------------------


def _notices(situation: Situation, n: int) -> list[Text]:
    """The latest alerts and changes, in order; half of the room is kept for alerts."""
    alerts, changes = list(situation.signals.alerts), list(situation.signals.changes)
    n_alerts = min(len(alerts), max((n + 1) // 2, n - len(changes)))
    n_changes = min(len(changes), n - n_alerts)
    chosen: list[Notice] = alerts[len(alerts) - n_alerts :] + changes[len(changes) - n_changes :]
    chosen.sort(key=lambda one: (one.attempt, one.step))
    if not chosen:
        return [Text("none so far", style="dim")]
    return [
        Text.assemble(
            (_place(one, situation.attempt), "dim"),
            (sentence(one.text), _LEVEL_STYLES.get(one.level, "")),
        )
        for one in chosen
    ]


def _place(notice: Notice, attempt: int) -> str:
    of_attempt = f"attempt {notice.attempt}, " if attempt else ""
    return f"{of_attempt}step {notice.step:,}: "


def _status(situation: Situation) -> Text:
    state = situation.state.upper() if situation.state == "stalled" else situation.state
    why = f" ({situation.why})" if situation.why else ""
    step = "no step yet" if situation.step is None else f"step {situation.step:,}"
    newest = (
        "no facts yet" if situation.quiet_s is None else f"newest fact {age(situation.quiet_s)} ago"
    )
    ranks = f"{wording.counted(len(situation.ranks), 'rank')} of {situation.world_size}"
    if situation.signals_rank not in (None, 0):
        ranks += f", signals of rank {situation.signals_rank}"
    parts = [f"attempt {situation.attempt}", ranks, step, newest]
    if situation.silent:
        silent = ", ".join(map(str, situation.silent[:5]))
        parts.append(f"silent: rank {silent}" + ("..." if len(situation.silent) > 5 else ""))
    return Text.assemble(
        (f"{state}{why}", _STATE_STYLES.get(situation.state, "yellow")), "  ", "  ".join(parts)
    )


def _gaps(situation: Situation, hint: str) -> Text:
    gaps = situation.gaps
    more = f" (and {len(gaps) - 1} more)" if len(gaps) > 1 else ""
    told = f"gaps: {sentence(gaps[0], 400)}{more}" if gaps else "no known gaps"
    return Text.assemble((f"{hint}  " if hint else "", "bold"), (told, "yellow" if gaps else "dim"))


def age(seconds: float) -> str:
    """A duration in one unit: ``12 s``, ``3 min``, ``2.5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _grade_style(grade: int | None, alert: str) -> str:
    if alert == "warming":
        return "dim"
    if grade is None or grade <= 2:
        return "red"
    return "yellow" if grade <= 4 else "green"


def _value(value: float) -> str:
    return wording.number(value) if math.isfinite(value) else str(value)
