"""Tables of the page: captions, header cells with scopes, scrolling inside themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from auditor.show.text import escape


@dataclass(frozen=True)
class Cell:
    """A cell's text, from data or not; ``before`` is HTML of ours, ``tag`` its class."""

    text: str
    is_number: bool = False
    is_short: bool = False
    tag: str = ""
    before: str = ""

    @property
    def kind(self) -> str:
        """The class attribute: numbers align to the right, short text is not broken."""
        return " class=n" if self.is_number else " class=short" if self.is_short else ""

    def html(self) -> str:
        text = f"{self.before}<bdi>{escape(self.text, 120)}</bdi>"
        return f'<span class="tag {escape(self.tag)}">{text}</span>' if self.tag else text


def table(
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    inside: Sequence[bool] | None = None,
) -> str:
    """A table whose first column names the row; rows marked ``inside`` belong to the one above."""
    is_number = [bool(rows) and rows[0][i].is_number for i in range(len(head))]
    heads = "".join(
        f'<th scope="col"{" class=n" if number else ""}>{escape(name)}</th>'
        for name, number in zip(head, is_number, strict=True)
    )
    body = []
    for i, row in enumerate(rows):
        cells = [f'<th scope="row">{row[0].html()}</th>']
        cells += [f"<td{cell.kind}>{cell.html()}</td>" for cell in row[1:]]
        body.append(f"<tr{' class=inside' if inside and inside[i] else ''}>{''.join(cells)}</tr>")
    label = escape(caption, 200)
    # Focusable, so that a keyboard can scroll it where the page is narrow.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>'
        f"<caption>{label}</caption><thead><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )
