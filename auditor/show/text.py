"""Text that came from data, made safe to show; the only place that cleans or escapes it.

Source names, sample ids and previews are whatever the corpus held: terminal escapes, markup, text
that reverses the direction of reading, a megabyte on one line.
"""

from __future__ import annotations

import html
import re
import unicodedata
from typing import Final

NAME_CHARS: Final = 60
"""Longest name shown: of sources, shards, clusters, samples."""

LABEL_CHARS: Final = 32
"""Longest name in a legend of the figure."""

PREVIEW_CHARS: Final = 240

SENTENCE_CHARS: Final = 2000
"""Longest verdict, reason, action or gap shown."""

_JOINERS: Final = frozenset("\u200c\u200d")  # zero width, but part of emoji and of Persian words

_ESCAPE = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI: colours, cursor
    "|\x1b[\\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\\\|\x9c)?"  # OSC and other strings: titles, links
    "|\x1b[ -/]*[0-~]?"
)


def clean(text: str | None, limit: int = NAME_CHARS) -> str:
    """One line of at most ``limit`` characters, without escapes, controls or bidi overrides.

    >>> clean("\\x1b[31mred\\x1b[0m\\nline")
    'red line'
    """
    if text is None:
        return ""
    # A margin for what cleaning removes; what lies beyond would be cut off anyway.
    head = _ESCAPE.sub("", text[: 8 * limit + 256])
    kept = "".join(map(_shown, head))
    line = " ".join(kept.split())
    if len(line) <= limit and len(text) <= 8 * limit + 256:
        return line
    return line[: limit - 1].rstrip() + "…"


def _shown(character: str) -> str:
    if character in _JOINERS:
        return character
    category = unicodedata.category(character)
    if category in ("Cc", "Zl", "Zp"):
        return " "
    return "" if category in ("Cf", "Cs", "Co", "Cn") else character


def escape(text: str | None, limit: int = NAME_CHARS) -> str:
    """Cleaned and escaped for HTML elements and attributes."""
    return html.escape(clean(text, limit), quote=True)


def escape_label(text: str | None, limit: int = LABEL_CHARS) -> str:
    """Cleaned and escaped for plotly, whose labels know some HTML, a few entities and MathJax."""
    escaped = html.escape(clean(text, limit), quote=False).replace("$", "&#36;")
    return escaped or "(no name)"


def markdown_code(text: str | None, limit: int = NAME_CHARS) -> str:
    """Cleaned, as code of Markdown that may stand in a table: nothing in it is live."""
    shown = clean(text, limit).replace("`", "'").replace("|", "\\|")
    return f"`{shown}`" if shown else "(no name)"


_MARKS = re.compile(r"([\\`*_{}\[\]<>#|~&$])")


def markdown_words(text: str) -> str:
    """Cleaned words, escaped for Markdown: no markup, HTML, formula, link or mention."""
    escaped = _MARKS.sub(r"\\\1", text)
    # Addresses and mentions are live without any markup, and know no escape.
    for live, broken in (("@", "@<!-- -->"), ("://", ":<!-- -->//"), ("www.", "www<!-- -->.")):
        escaped = re.sub(re.escape(live), broken, escaped, flags=re.IGNORECASE)
    return escaped


def sentence(text: str, limit: int = SENTENCE_CHARS) -> str:
    """Sentences of ours, cleaned: they quote names from data, which are cut where too long."""
    words = (
        word if len(word) <= NAME_CHARS else clean(word) for word in text[: 64 * limit].split()
    )
    return clean(" ".join(words), limit)


def escape_own(text: str) -> str:
    """A :func:`sentence`, escaped for HTML."""
    return escape(sentence(text), SENTENCE_CHARS)


def encodable(text: str, encoding: str | None) -> str:
    """The text with what the terminal's encoding lacks replaced: a log file may be ASCII."""
    if encoding is None or encoding.lower().replace("-", "").startswith("utf"):
        return text
    plain = text.replace("…", "...")
    return plain.encode(encoding, "replace").decode(encoding)
