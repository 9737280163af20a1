"""``auditor watch``: the terminal's side of the dashboard.

Draws on the alternate screen, reads keys, and gives the terminal back as it was.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from auditor.errors import RunError
from auditor.show.dashboard import Screen, draw
from auditor.show.following import Following, Situation

PRINTED_LINES: Final = 30
"""Height of what is printed where there is no terminal to fill."""

KEYS_S: Final = 0.2
"""How long a key or a change of size waits at most."""


def print_once(run: Path, rank: int | None = None) -> None:
    """Print the screen as it is now: in colour on a terminal, else as plain text.

    Raises:
        RunError: there is nothing to show yet.
        SchemaVersionError: the run is of another version of the format.
    """
    situation = Following(run, rank).poll()
    if situation.waiting_for:
        raise RunError(f"waiting for {situation.waiting_for}", path=run)
    is_terminal = sys.stdout.isatty()
    # Told outright, because FORCE_COLOR would otherwise have escapes in a file.
    console = Console(highlight=False, force_terminal=is_terminal)
    height = console.height if is_terminal else PRINTED_LINES
    lines = draw(situation, Screen(console.width, height, console.encoding), keys=False)
    if not is_terminal:
        lines = [Text(line.plain) for line in lines]
    console.print(_group(lines))


def follow(run: Path, rank: int | None = None, every: float = 2.0) -> None:
    """Show the run until ``q`` or Ctrl-C, looking at it each ``every`` seconds.

    Raises:
        RunError: ``run`` is, or becomes, something that cannot be a run directory.
        SchemaVersionError: the run is of another version of the format.
    """
    console = Console(highlight=False)
    if console.is_dumb_terminal:
        print_once(run, rank)
        return
    following = Following(run, rank)
    situation = Situation(run, "its first look at the run")
    with contextlib.suppress(KeyboardInterrupt), _terminable(), _keys() as quits:  # noqa: SIM117
        with Live(console=console, screen=True, auto_refresh=False) as live:
            due, drawn = 0.0, None
            while True:
                if (size := console.size) != drawn:
                    drawn = size
                    lines = draw(situation, Screen(size.width, size.height, console.encoding))
                    live.update(_group(lines), refresh=True)
                if quits(max(0.0, min(KEYS_S, due - time.monotonic()))):
                    return
                if time.monotonic() >= due:
                    situation, drawn = _looked(following, situation), None
                    due = time.monotonic() + every


def _looked(following: Following, last: Situation) -> Situation:
    """The situation now. A disk that fails for a while is told, and looked at again."""
    try:
        return following.poll()
    except OSError as error:
        trouble = f"cannot be read now ({error.strerror or error})"
        if last.waiting_for:
            return replace(last, waiting_for=f"the run, which {trouble}")
        return replace(last, gaps=[f"the run {trouble}; this is what was read before"])


def _group(lines: list[Text]) -> Group:
    for line in lines:
        line.no_wrap, line.overflow = True, "crop"
    return Group(*lines)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let a SIGTERM end the program by way of every ``finally``."""

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """A function that waits so many seconds and tells whether ``q`` was pressed meanwhile.

    Keys are read one by one and not shown, if standard input is a terminal; it is then given back
    as it was.
    """

    def waits(seconds: float) -> bool:
        time.sleep(seconds)
        return False

    def reads(seconds: float) -> bool:
        if not select.select([keyboard], [], [], seconds)[0]:
            return False
        pressed = os.read(keyboard, 1024)
        return not pressed or b"q" in pressed.lower()  # nothing: the terminal is gone

    if not sys.stdin.isatty():
        yield waits
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard)
        yield reads
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
