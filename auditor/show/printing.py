"""Headings, wrapped lines and tables of what is printed on a terminal."""

from __future__ import annotations

from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from auditor.show.text import encodable

LABEL_CHARS: Final = 10


def heading(console: Console, words: str) -> None:
    console.print()
    console.print(Text(words, style="bold underline"))


def line(
    console: Console,
    label: str,
    body: str,
    *,
    label_chars: int = LABEL_CHARS,
    style: str = "",
) -> None:
    """A label and a body wrapped beside it; rich's own padding would leave trailing blanks."""
    width = max(16, console.width - label_chars)
    # rich wraps at the line feeds of the body as well as at the width.
    lines = Text(encodable(body, console.encoding)).wrap(console, width)
    for i, wrapped in enumerate(lines):
        wrapped.rstrip()
        margin = Text(label.ljust(label_chars) if i == 0 else " " * label_chars, style=style)
        console.print(margin + wrapped, soft_wrap=True)


def new_table(console: Console) -> Table:
    """A table without columns, drawn in what the terminal can show."""
    is_utf = console.encoding.lower().startswith("utf")
    return Table(box=box.SIMPLE_HEAD if is_utf else box.ASCII, pad_edge=False)
