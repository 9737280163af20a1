"""Cleaning and escaping text from data."""

from __future__ import annotations

import unicodedata

import pytest
from explanations import HOSTILE

from auditor.show.text import clean, encodable, escape


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_clean_leaves_one_short_line_without_controls(text: str) -> None:
    found = clean(text, 50)
    assert len(found) <= 50
    assert not any(unicodedata.category(c) in ("Cc", "Zl", "Zp") for c in found)
    assert not any(c in found for c in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def test_clean_removes_whole_escapes_and_keeps_the_text_between() -> None:
    assert clean("\x1b[1;31mred\x1b[0m \x1b]8;;http://e.com\x07link\x1b]8;;\x07") == "red link"
    assert clean("\x9b31mred") == "red"


def test_clean_keeps_scripts_and_joined_emoji() -> None:
    assert clean("شعر عربي") == "شعر عربي"
    assert clean("\U0001f469\u200d\U0001f52c") == "\U0001f469\u200d\U0001f52c"


def test_clean_marks_what_it_cut() -> None:
    assert clean("abcdef", 4) == "abc…"
    assert clean("\x1b" * 5000 + "hidden", 10).endswith("…")


def test_clean_of_nothing_is_empty() -> None:
    assert clean(None) == ""


def test_escape_leaves_nothing_to_parse() -> None:
    for text in HOSTILE:
        assert not set("<>\"'") & set(escape(text))


def test_encodable_replaces_what_an_encoding_lacks() -> None:
    assert encodable("año…", "ascii") == "a?o..."
    assert encodable("año…", "utf-8") == "año…"
