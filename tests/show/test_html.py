"""The page as text: structure, escaping, policy, determinism."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import explanations
import polars as pl
import pytest

from auditor import schema
from auditor.explain.explanation import Explanation
from auditor.show.html import page_of, write_html

VOID = {"meta", "input", "br", "img", "link", "hr"}


class Page(HTMLParser):
    """A page taken apart: elements with attributes, text outside scripts, script contents."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not self.open or self.open[-1] != "style":
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def figure(self) -> dict[str, Any]:
        return json.loads(self.scripts[0], parse_constant=lambda name: pytest.fail(name))

    @property
    def words(self) -> str:
        return " ".join(self.text.split())


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(page_of(explanations.explanation(), explanations.proposal()))


def nothing(**changes: Any) -> Explanation:
    return explanations.without_events(**{**explanations.EMPTY, **changes})


def test_page_leads_with_verdict_culprit_grade_events_and_action(page: Page) -> None:
    first = page.words[: page.words.index("Step by step")]
    for told in (
        "Likely data cause: novels",
        "1 episode; the first to blame is novels.",
        "Lowest grade after warm-up S4 ratio 0.430 at step 155, block 1".replace(" S4 ", "S4"),
        "2in 1 episode, the first from step 150",
        "Deduplicate and go on.",
    ):
        assert told.replace(" ", "") in first.replace(" ", ""), told


def test_page_has_the_numbers_of_the_terminal(page: Page) -> None:
    for told in ("59.4%", "0.10%", "123 (50 to 4,321)", "95.3", "0.0051", "56.0%", "40.0%"):
        assert told in page.words


def test_page_shows_previews_diagnosis_gaps_and_how_to_read(page: Page) -> None:
    assert page.words.count("Call me Ishmael.") == 1
    assert "59% of the samples were repeats" in page.words
    assert "3 frames dropped" in page.words
    assert "association, not causation" in page.words
    for name in schema.SIGNAL_NAMES:
        assert name in page.words


def test_page_is_semantic(page: Page) -> None:
    assert page.all("html")[0]["lang"] == "en"
    assert len(page.all("h1")) == len(page.all("main")) == len(page.all("title")) == 1
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(one.get("scope") in ("col", "row") for one in page.all("th"))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    figure = next(one for one in page.all("div") if one.get("id") == "figure")
    assert figure["aria-label"]
    assert figure["aria-describedby"] in ids
    for _, attributes in page.elements:
        assert attributes.get("aria-labelledby", ids[0]) in ids


def test_page_policy_names_its_scripts_by_hash_and_nothing_else(page: Page) -> None:
    policy = next(one["content"] for one in page.all("meta") if "http-equiv" in one)
    assert policy is not None
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == "'none'"
    assert directives["img-src"] == "data: blob:"
    hashes = {
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in page.scripts[1:]
    }
    assert set(directives["script-src"].split()) == hashes
    assert len(hashes) == 2


def test_page_refers_to_nothing_outside(page: Page) -> None:
    for _, attributes in page.elements:
        assert not {"src", "srcset", "href", "action", "data"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)


def test_page_has_six_panels_on_one_step_axis(page: Page) -> None:
    data = page.figure["data"]
    assert {trace["xaxis"] for trace in data} == {"x"}
    assert {trace["yaxis"] for trace in data} == {"y", *(f"y{n}" for n in range(2, 9))}
    assert page.figure["layout"]["hovermode"] == "x unified"
    for width in ("wide", "narrow"):
        domains = [page.figure[width][f"yaxis{n or ''}.domain"] for n in ("", 2, 3, 4, 5, 6)]
        assert all(low < high for low, high in domains)
        # From top to bottom, without overlap.
        assert all(a[0] > b[1] for a, b in itertools.pairwise(domains))


def test_page_marks_onsets_as_bands(page: Page) -> None:
    bands = [
        (shape["x0"], shape["x1"])
        for shape in page.figure["wide"]["shapes"]
        if shape["xref"] == "x" and shape["yref"] == "paper" and shape["y1"] == 1
        and shape["type"] == "rect"
    ]  # fmt: skip
    assert bands == [(145, 150), (155, 160)]


def warm_ups(page: Page) -> list[tuple[int, int]]:
    return [
        (shape["x0"], shape["x1"])
        for shape in page.figure["wide"]["shapes"]
        if shape["xref"] == "x" and shape["yref"] == "y2"
    ]


def test_page_marks_the_warm_up_of_each_attempt_and_starts_at_the_first_step(page: Page) -> None:
    assert warm_ups(page) == [(0, 45)]
    assert page.figure["layout"]["xaxis"]["range"] == [0, 299]
    changes = explanations.resumed(1000, 1150)
    late = Page(page_of(explanations.without_events(**changes), explanations.NOTHING_PROPOSED))
    assert warm_ups(late) == [(1000, 1045), (1150, 1195)]
    assert late.figure["layout"]["xaxis"]["range"] == [1000, 1299]


def test_page_marks_no_warm_up_that_a_later_attempt_replaced() -> None:
    changes = explanations.resumed(1000, 1020)
    made = explanations.without_events(**changes)
    spans = warm_ups(Page(page_of(made, explanations.NOTHING_PROPOSED)))
    assert spans == [(1000, 1015), (1020, 1065)]


def test_page_labels_late_events_of_a_late_run_to_the_left() -> None:
    changes = explanations.resumed(1000, 1150)
    events = [
        explanations.event(0, onset_low=1005, onset_high=1010),
        explanations.event(1, onset_low=1250, onset_high=1255),
    ]
    made = explanations.explanation(events=explanations.frame(schema.EVENTS, events), **changes)
    labels = [
        one["xanchor"]
        for one in Page(page_of(made, explanations.proposal())).figure["wide"]["annotations"]
        if one["xref"] == "x"
    ]
    assert labels == ["left", "right"]


def test_page_draws_the_learning_rate_on_a_scale_of_its_own(page: Page) -> None:
    (rate,) = [trace for trace in page.figure["data"] if trace["name"] == "learning rate"]
    assert rate["yaxis"] == "y8"
    assert rate["line"]["dash"] == "dot"
    assert max(rate["y"]) == pytest.approx(1e-3)
    assert page.figure["layout"]["yaxis8"]["visible"] is False
    assert page.figure["layout"]["yaxis8"]["overlaying"] == "y4"


@pytest.mark.parametrize("left_out", ["loss", "grad_norm", "both"])
def test_page_draws_the_learning_rate_beside_whatever_there_is(left_out: str) -> None:
    names = ["loss", "probe_loss"] if left_out == "loss" else ["grad_norm"]
    names = ["loss", "probe_loss", "grad_norm"] if left_out == "both" else names
    signals = explanations.signals().filter(~pl.col("signal").is_in(names))
    page = Page(page_of(explanations.explanation(signals=signals), explanations.proposal()))
    (rate,) = [trace for trace in page.figure["data"] if trace["name"] == "learning rate"]
    assert rate["yaxis"] == ("y4" if left_out == "both" else "y8")
    title = page.figure["layout"]["yaxis4"]["title"]["text"]
    assert (
        title == {"loss": "gradient norm", "grad_norm": "loss", "both": "learning rate"}[left_out]
    )


def test_page_says_when_a_stretch_began_after_the_onset() -> None:
    late = explanations.suspect(lag=-5)
    made = explanations.explanation(suspects=explanations.frame(schema.SUSPECTS, [late]))
    page = Page(page_of(made, explanations.proposal()))
    assert "began 5 steps after the onset" in page.words
    assert "What stands out around event 0" in page.words


def test_page_says_that_exposure_is_of_the_strongest_steps(page: Page) -> None:
    assert "What stands out before event 0" in page.words
    assert "exposure is what was in the strongest 10 steps" in page.words
    assert "not the mean over it" in page.words


def test_page_gradient_norm_is_logarithmic_where_it_spans_decades(page: Page) -> None:
    assert page.figure["layout"]["yaxis4"]["type"] == "log"
    calm = explanations.signals().filter(pl.col("value") < 100)
    other = Page(page_of(explanations.explanation(signals=calm), explanations.proposal()))
    assert other.figure["layout"]["yaxis4"].get("type") != "log"


def test_page_is_the_same_bytes_for_the_same_explanation(tmp_path: Path) -> None:
    for name in ("a.html", "b.html"):
        write_html(explanations.explanation(), explanations.proposal(), tmp_path / name)
    first = (tmp_path / "a.html").read_bytes()
    assert first == (tmp_path / "b.html").read_bytes()
    assert len(first) < 8e6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html"]


def test_page_leaves_hostile_text_inert() -> None:
    harmless = Page(page_of(explanations.explanation(), explanations.proposal()))
    text = page_of(*explanations.hostile())
    page = Page(text)
    tags = {tag for tag, _ in page.elements}
    assert tags <= {tag for tag, _ in harmless.elements}
    assert len(page.scripts) == len(harmless.scripts)
    for _, attributes in page.elements:
        assert not {"src", "href", "onerror"} & set(attributes)
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", page.text)
    assert "<script>alert(1)</script>" in page.text
    # Plotly reads its labels as HTML of its own: there too everything is escaped.
    for trace in page.figure["data"]:
        assert not set("<>") & set(trace["name"])
    assert len(text) < 8e6


@pytest.mark.parametrize(
    "changes",
    [
        {"signals": explanations.EMPTY["signals"], "grades": explanations.EMPTY["grades"]},
        {"composition": explanations.EMPTY["composition"]},
        {"signals": explanations.signals(kinds=("live",))},
        {"signals": explanations.signals(n_steps=1), "every": None},
        {
            "signals": explanations.signals().with_columns(value=pl.lit(None, pl.Float64)),
            "grades": explanations.grades().with_columns(
                ratio=pl.lit(None, pl.Float64), grade=pl.lit(None, pl.Int32)
            ),
        },
        {"signals": explanations.signals().with_columns(value=pl.lit(float("nan")))},
        {"previews": explanations.explanation().previews.clear()},
        {"diagnoses": {}, "smallest_p": {}},
        {"suspects": explanations.frame(schema.SUSPECTS, []), "culprit": None},
    ],
    ids=[
        "sampler only",
        "monitor only",
        "no probe",
        "one step",
        "null",
        "nan",
        "no previews",
        "no diagnosis",
        "no suspects",
    ],
)
def test_page_of_an_incomplete_run_says_what_is_missing(changes: dict[str, Any]) -> None:
    for made in (explanations.explanation(**changes), explanations.without_events(**changes)):
        page = Page(page_of(made, explanations.NOTHING_PROPOSED))
        drawn = {trace["yaxis"] for trace in page.figure["data"]} - {"y7", "y8"}
        missing = sum(
            "No " in one["text"] or "Neither " in one["text"]
            for one in page.figure["wide"]["annotations"]
        )
        assert len(drawn) + missing == 6


def test_page_of_an_empty_run_has_no_figure_and_no_script() -> None:
    page = Page(page_of(nothing(), explanations.NOTHING_PROPOSED))
    assert page.scripts == []
    assert "Nothing was recorded that could be drawn." in page.words
    assert "No exposures were recorded" in page.words
    assert "No event" in page.words


def test_page_without_a_culprit_says_no_data_cause_found() -> None:
    ranked = explanations.suspect(verdict="ranked", z=1.0)
    made = explanations.explanation(
        suspects=explanations.frame(schema.SUSPECTS, [ranked]), culprit=None
    )
    page = Page(page_of(made, explanations.NOTHING_PROPOSED))
    assert "No data cause found" in page.words
    assert "Likely data cause" not in page.words


def test_page_of_many_events_and_deep_models_stays_readable() -> None:
    events = [
        explanations.event(n, episode=n // 10, onset_low=n, onset_high=n + 1) for n in range(400)
    ]
    made = explanations.explanation(
        events=explanations.frame(schema.EVENTS, events),
        signals=explanations.signals(n_layers=48),
    )
    text = page_of(made, explanations.proposal())
    page = Page(text)
    assert sum(trace["yaxis"] == "y" for trace in page.figure["data"]) == 8
    assert page.figure["wide"]["height"] < 1800
    assert len(text) < 8e6


def test_page_tells_where_the_data_drifted_and_says_nothing_where_it_did_not() -> None:
    drifts = explanations.frame(schema.DRIFTS, [explanations.drift("novels")])
    drifted = Page(page_of(explanations.explanation(drifts=drifts), explanations.proposal()))
    assert "At step 150 the mix changed: novels from 40% to 90%." in drifted.words
    steady = Page(page_of(explanations.explanation(), explanations.proposal()))
    assert "Drift of the data" not in steady.words
