"""The report as Markdown, read back by a parser of Markdown."""

from __future__ import annotations

import explanations
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from auditor.clean.proposal import Proposal
from auditor.explain.explanation import Explanation
from auditor.show.markdown import markdown_of
from auditor.show.text import clean, markdown_code, markdown_words


def parsed(text: str) -> list[Token]:
    """All tokens, those inside of blocks as well."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    return [one for token in tokens for one in (token, *(token.children or ()))]


def shown(text: str) -> str:
    """What a reader sees."""
    kinds = ("text", "code_inline")
    content = " ".join(one.content for one in parsed(text) if one.type in kinds)
    return " ".join(content.split())


def live(text: str) -> list[Token]:
    """What a browser would act on."""
    kinds = ("link_open", "image", "html_block", "html_inline")
    return [one for one in parsed(text) if one.type in kinds and one.content != "<!-- -->"]


def test_markdown_tells_verdict_grades_suspects_and_action() -> None:
    text = shown(markdown_of(explanations.explanation(), explanations.proposal()))
    for told in (
        "Training run run-1",
        "1 episode; the first to blame is novels.",
        "S4 at step 155",
        "Episode 0: 2 events from step 150",
        "after step 145, by step 150",
        "0.81 → 0.4, grade S7 → S4",
        "novels near-duplicates blamed 59.4%, before 0.10% 123 (50 to 4,321) 95.3 0.02",
        "novels-00001",
        "Call me Ishmael.",
        "59% of the samples were repeats. Deduplicate and go on.",
        "novels 56.0% 40.0% 7.5 4",
        "3 frames dropped",
    ):
        assert told in text, told


@pytest.mark.parametrize(
    ("made", "proposal"),
    [
        (explanations.explanation(), explanations.proposal()),
        (explanations.without_events(**explanations.EMPTY), explanations.NOTHING_PROPOSED),
        explanations.hostile(),
    ],
    ids=["blamed", "empty", "hostile"],
)
def test_tables_are_whole_and_nothing_is_live(made: Explanation, proposal: Proposal) -> None:
    text = markdown_of(made, proposal)
    assert live(text) == []
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    opened = [one for one in parsed(text) if one.type == "tr_open"]
    n_rules = sum(set(line) <= set("| -") and "---" in line for line in rows)
    assert len(opened) == len(rows) - n_rules


@given(st.text(max_size=80))
def test_names_come_back_as_they_were_cleaned_and_are_inert(name: str) -> None:
    row = f"| a | b |\n| --- | --- |\n| {markdown_code(name)} | {markdown_words(clean(name))} |"
    tokens = parsed(row)
    assert live(row) == []
    assert sum(one.type == "td_open" for one in tokens) == 2
    codes = [one.content for one in tokens if one.type == "code_inline"]
    assert codes == ([clean(name).replace("`", "'")] if clean(name) else [])


@pytest.mark.parametrize("word", ["@octocat", "http://evil.example", "WWW.evil.example", "<b>"])
def test_addresses_and_mentions_in_sentences_are_broken(word: str) -> None:
    text = markdown_words(f"the source {word} rose")
    assert word not in text
    assert live(text) == []
