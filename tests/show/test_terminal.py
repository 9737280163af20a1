"""The report on a terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import explanations
import pytest
from rich.cells import cell_len
from rich.console import Console

from auditor import schema
from auditor.clean.proposal import Proposal
from auditor.explain.explanation import Explanation
from auditor.show.terminal import print_report

PAGE = Path("derived/report.html")


def printed(explanation: Explanation, proposal: Proposal, width: int = 80) -> str:
    out = io.StringIO()
    print_report(Console(file=out, width=width), explanation, proposal, PAGE)
    return out.getvalue()


def flat(text: str) -> str:
    return " ".join(text.split())


def test_terminal_tells_verdict_grades_suspects_and_action() -> None:
    text = flat(printed(explanations.explanation(), explanations.proposal()))
    for told in (
        "Run run-1: 300 steps, sampled every 5 steps",
        "Verdict 1 episode; the first to blame is novels.",
        "lowest S4 (ratio 0.430, step 155, block 1)",
        "healthy: 21",
        "Episode 0: 2 events from step 150",
        "onset after step 145, by step 150",
        "0.81 -> 0.4, grade S7 -> S4",
        "source novels, near-duplicates: blamed",
        "What stands out before event 0",
        "59.4% of the batch in the strongest 10 steps, control 0.10%; lift 123 (50 to 4,321); "
        "z 95.3",
        "p 0.0051 (smallest attainable 0.005), q 0.02; lag 1 step",
        "cluster novels-00001",
        '"Call me Ishmael."',
        "Diagnosis data: 59% of the samples were repeats.",
        "What to do Deduplicate and go on.",
        "novels 56.0% 40.0% 7.5 4",
        "3 frames dropped",
        f"Page: {PAGE}",
    ):
        assert told in text, told


def test_terminal_lists_the_events_of_an_episode_in_order() -> None:
    text = printed(explanations.explanation(), explanations.proposal())
    assert text.index("event 0 input") < text.index("event 1 grade dropped")
    assert text.count("Episode ") == 1


def test_terminal_says_when_a_stretch_began_after_the_onset() -> None:
    for lag, told in ((-1, "began 1 step after the onset"), (-5, "began 5 steps after the onset")):
        late = explanations.suspect(lag=lag)
        made = explanations.explanation(suspects=explanations.frame(schema.SUSPECTS, [late]))
        text = flat(printed(made, explanations.proposal()))
        assert told in text
        assert "What stands out around event 0" in text


def test_terminal_shows_the_text_of_copies_once() -> None:
    text = printed(explanations.explanation(), explanations.proposal())
    assert text.count("Call me Ishmael.") == 1


@pytest.mark.parametrize("width", [40, 80, 200])
def test_terminal_keeps_to_the_width(width: int) -> None:
    for explanation, proposal in (
        (explanations.explanation(), explanations.proposal()),
        explanations.hostile(),
    ):
        lines = printed(explanation, proposal, width).splitlines()
        assert max(cell_len(line) for line in lines) <= width


def test_terminal_without_events_says_so_in_one_line() -> None:
    text = printed(explanations.without_events(), explanations.NOTHING_PROPOSED)
    assert sum("No event" in line for line in text.splitlines()) == 1
    assert "Episode" not in text
    assert "none known" in text


def test_terminal_without_a_culprit_says_no_data_cause_found() -> None:
    ranked = explanations.suspect(verdict="ranked", z=1.0)
    made = explanations.explanation(
        suspects=explanations.frame(schema.SUSPECTS, [ranked]), culprit=None
    )
    text = printed(made, explanations.NOTHING_PROPOSED)
    assert "No data cause found." in text
    assert "blamed" not in text


def test_terminal_says_what_was_not_tested() -> None:
    made = explanations.explanation(suspects=explanations.frame(schema.SUSPECTS, []))
    text = printed(made, explanations.NOTHING_PROPOSED)
    assert "Not tested: too little history before the onset." in text


def test_terminal_of_an_empty_run() -> None:
    made = explanations.without_events(**explanations.EMPTY)
    text = printed(made, explanations.NOTHING_PROPOSED)
    assert "nothing sampled" in text
    assert "none: no rank was measured" in text


def test_terminal_prints_hostile_text_inert() -> None:
    text = printed(*explanations.hostile())
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert "[red]markup[/red]" in text
    assert len(text) < 60_000


def test_terminal_colours_are_only_ours() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system="standard")
    print_report(console, *explanations.hostile(), PAGE)
    escapes = set(re.findall("\x1b[^m]*m", out.getvalue()))
    assert escapes
    assert all(re.fullmatch(r"\x1b\[[0-9;]*m", one) for one in escapes)


def test_terminal_needs_no_unicode() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", newline="\n")
    print_report(Console(file=out, width=80), *explanations.hostile(), PAGE)
    print_report(
        Console(file=out, width=80), explanations.explanation(), explanations.proposal(), PAGE
    )
    out.flush()
    assert b"Verdict" in raw.getvalue()


def test_run_too_short_to_judge_is_not_called_healthy() -> None:
    verdict = "Not judged: 2 sampled steps. Lower every= for a short run."
    explanation = explanations.without_events(judged=False, verdict=verdict)
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    print_report(console, explanation, explanations.proposal(), None)
    assert isinstance(console.file, io.StringIO)
    text = " ".join(console.file.getvalue().split())
    assert "Not judged" in text
    assert "lower every=" in text
    assert "No event" not in text
