"""The report as one HTML file that opens offline and can fetch nothing.

The Content-Security-Policy allows the two scripts of the file by their hashes, inline styles, and
nothing from anywhere else; plotly's bundle draws these charts without ``eval``. The same
explanation gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any, Final

from plotly.offline import get_plotlyjs

from auditor.clean.proposal import Proposal
from auditor.explain.explanation import Explanation
from auditor.files import atomic
from auditor.show import sections
from auditor.show.figure import Figure, figure_of
from auditor.show.reading import how_to_read, settings
from auditor.show.text import escape

_PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
{scripts}
</body>
</html>
"""


def write_html(explanation: Explanation, proposal: Proposal, path: Path) -> None:
    """Write ``report.html``, about 5 MB, nearly all of it the chart library."""
    page = page_of(explanation, proposal)
    with atomic(path) as file:
        file.write(page.encode())


def page_of(explanation: Explanation, proposal: Proposal) -> str:
    """The page as text."""
    figure = figure_of(explanation)
    has_figure = figure.n_drawn > 0
    body = [
        sections.header(explanation, proposal),
        "<main>",
        sections.figure_section(explanation, figure),
        *sections.episode_cards(explanation),
        sections.drifts_section(explanation),
        sections.proposal_section(proposal),
        sections.gaps_section(explanation),
        how_to_read(),
        settings(explanation),
        "<footer>Made by auditor from the run's own record. Nothing on this page is fetched from "
        "anywhere.</footer>",
        "</main>",
    ]
    scripts = [_bundle(), _resource("report.js")] if has_figure else []
    tags = [f"<script>{script}</script>" for script in scripts]
    if has_figure:
        data = f'<script type="application/json" id="figure-data">{_data(figure)}</script>'
        tags.insert(0, data)
    return _PAGE.format(
        policy=_policy(scripts),
        title=escape(f"{sections.headline(explanation)} (run {explanation.run_id})", 200),
        style=_resource("report.css"),
        body="\n".join(part for part in body if part),
        scripts="\n".join(tags),
    )


def _policy(scripts: list[str]) -> str:
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts) or "'none'"
    # Plotly styles its elements inline and hands out pictures as blobs.
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _digest(script: str) -> str:
    # The parser of HTML turns CRLF into LF before the browser hashes.
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


def _data(figure: Figure) -> str:
    """The figure as JSON that cannot end the script element it lies in."""
    plain: dict[str, Any] = {
        "data": figure.data,
        "layout": figure.layout,
        "wide": figure.wide,
        "narrow": figure.narrow,
    }
    text = json.dumps(plain, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _resource(name: str) -> str:
    text = resources.files("auditor.show").joinpath(name).read_text(encoding="utf-8")
    return text.replace("\r\n", "\n")


def _bundle() -> str:
    return str(get_plotlyjs()).replace("\r\n", "\n").replace("\r", "\n")
