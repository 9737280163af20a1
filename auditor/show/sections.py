"""The parts of the page that tell about the run. Everything from data goes through ``escape``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from auditor.clean.proposal import Proposal
from auditor.explain.attribution import BLAME_DEVIATIONS
from auditor.explain.contrast import STRETCH_STEPS
from auditor.explain.explanation import Explanation
from auditor.show import digest, wording
from auditor.show.digest import Episode
from auditor.show.figure import Figure, event_colour
from auditor.show.tables import Cell, table
from auditor.show.text import PREVIEW_CHARS, escape, escape_own

_NO_NUMBER = wording.NOT_AVAILABLE


def headline(explanation: Explanation) -> str:
    """The finding in a few words; the verdict says it in full."""
    if explanation.culprit is not None:
        return f"Likely data cause: {explanation.culprit}"
    if not explanation.judged:
        return "Not judged"
    if explanation.events.is_empty():
        return "No event"
    if explanation.suspects.is_empty():
        return "Events, and no data recorded to compare them with"
    return "No data cause found"


def header(explanation: Explanation, proposal: Proposal) -> str:
    """The first screen: verdict, culprit, lowest grade, events, what to do."""
    every = (
        "nothing sampled"
        if explanation.every is None
        else f"sampled every {wording.counted(explanation.every, 'step')}"
    )
    lowest = digest.lowest_grade(explanation)
    if lowest is None:
        grade = _fact("Lowest grade", _NO_NUMBER, digest.no_grade(explanation), "")
    else:
        tone = "good" if lowest.grade >= 5 else "watch" if lowest.grade >= 3 else "bad"
        place = wording.block(lowest.layer)
        where = f"ratio {lowest.ratio:.3f} at step {lowest.step:,}" + (
            f", {place}" if place else ""
        )
        grade = _fact("Lowest grade after warm-up", wording.grade(lowest.grade), where, tone)
    n_events, found = len(explanation.events), list(digest.episodes(explanation))
    told = "no signal left what was normal for this run"
    if found:
        told = f"in {wording.counted(len(found), 'episode')}, the first from step "
        told += f"{found[0].first_step:,}"
    if explanation.culprit is not None:
        culprit = _fact(
            "Culprit", explanation.culprit, "by association; a replay tests cause", "bad"
        )
    else:
        none = "no event" if n_events == 0 else "no data cause found"
        culprit = _fact("Culprit", "none", none, "good" if n_events == 0 else "")
    todo = escape_own(digest.what_to_do(explanation, proposal))
    return f"""<header class="top">
<p class="eyebrow">auditor report, run {escape(explanation.run_id)},
{wording.counted(explanation.n_steps, "step")}, {every}</p>
<h1>{escape(headline(explanation), 160)}</h1>
<p class="verdict">{escape_own(explanation.verdict)}</p>
<dl class="facts">
{culprit}
{grade}
{_fact("Events", f"{n_events:,}", told, "watch" if n_events else "good")}
<div class="todo"><dt>What to do</dt><dd>{todo}</dd></div>
</dl>
</header>"""


def _fact(term: str, value: str, note: str, tone: str) -> str:
    return (
        f'<div class="{tone}"><dt>{escape(term)}</dt>'
        f"<dd><bdi>{escape(value)}</bdi><small>{escape(note, 200)}</small></dd></div>"
    )


def figure_section(explanation: Explanation, figure: Figure) -> str:
    summary = escape_own(text_summary(explanation, figure))
    if figure.n_drawn == 0:
        missing = "".join(f"<li>{escape_own(panel.missing)}</li>" for panel in figure.panels)
        return (
            '<section aria-labelledby="course"><h2 id="course">Step by step</h2>'
            f"<p>Nothing was recorded that could be drawn.</p><ul>{missing}</ul></section>"
        )
    variants = ""
    if figure.has_variants:
        variants = (
            "<fieldset><legend>Rank ratio</legend>"
            '<label><input type="radio" name="variant" value="raw" checked> raw</label>'
            '<label><input type="radio" name="variant" value="column"> column</label></fieldset>'
        )
    return f"""<section aria-labelledby="course">
<h2 id="course">Step by step</h2>
<div class="controls">{variants}<button type="button" id="reset-zoom">Reset zoom</button></div>
<figure>
<div id="figure" role="group" aria-label="Signals, batch composition and events by step"
 aria-describedby="figure-summary"></div>
<noscript><p>The figure is drawn by the script in this file; the tables below need none.</p>
</noscript>
<figcaption id="figure-summary">{summary}</figcaption>
</figure>
</section>"""


def text_summary(explanation: Explanation, figure: Figure) -> str:
    """The figure in words, for those who do not see it."""
    sentences = [
        f"{figure.n_drawn} of {len(figure.panels)} panels over "
        f"{wording.counted(explanation.n_steps, 'step')}, sharing one step axis."
    ]
    sentences += [panel.missing for panel in figure.panels if panel.is_empty]
    lowest, last = digest.lowest_grade(explanation), digest.last_grade(explanation)
    if lowest is not None and last is not None:
        sentences.append(
            f"The grade is lowest at step {lowest.step:,} with {wording.grade(lowest.grade)} and "
            f"ends at {wording.grade(last.grade)}."
        )
    for event in explanation.events.sort("event").head(20).iter_rows(named=True):
        graded = wording.grades(event, "to")
        sentences.append(
            f"Event {event['event']}: {wording.kind(event['kind'])} {wording.onset(event)}, from "
            f"{wording.values(event, 'to')}{', grade ' if graded else ''}{graded}, "
            f"{wording.recovery(event)}."
        )
    if len(explanation.events) > 20:
        sentences.append(f"{len(explanation.events) - 20} more events are in the tables below.")
    if explanation.events.is_empty():
        sentences.append("There is no event.")
    return " ".join(sentences)


def episode_cards(explanation: Explanation) -> Iterator[str]:
    found = list(digest.episodes(explanation))
    if not found:
        yield (
            '<section aria-labelledby="events"><h2 id="events">Events</h2>'
            f"<p>{digest.NO_EVENT}</p></section>"
        )
    for episode in found:
        yield _card(explanation, episode)


def _card(explanation: Explanation, episode: Episode) -> str:
    name = f"episode-{episode.number}"
    n = wording.counted(len(episode.events), "event")
    parts = [
        f'<article aria-labelledby="{name}">',
        f'<h2 id="{name}">Episode {episode.number}: {n} from step {episode.first_step:,}</h2>',
        _diagnosis(episode),
        _events_table(episode),
    ]
    if episode.speaker is None:
        parts.append(f"<p>{digest.not_tested(explanation)}</p>")
        return "\n".join([*parts, "</article>"])
    suspects = digest.suspects_of_event(explanation, episode.speaker)
    if not digest.is_data_cause(suspects):
        parts.append(f"<p><strong>{digest.NO_DATA_CAUSE}</strong></p>")
    least = wording.chance(explanation.smallest_p.get(episode.speaker))
    told = "stands out" if digest.is_data_cause(suspects) else "came closest"
    chosen = digest.standing_out(suspects)
    caption = (
        f"What {told} {wording.place(chosen)} event {episode.speaker}; smallest attainable p "
        f"{least}, a source stands out from |z| = {BLAME_DEVIATIONS:g}"
    )
    parts += [suspects_table(chosen, caption), _samples(explanation, chosen)]
    if chosen and chosen[0]["verdict"] != "ranked":
        steps = ", ".join(map(str, explanation.strongest.get(episode.speaker, ())))
        name = escape(chosen[0]["name"])
        parts.append(f"<p>Steps that held most of it, of {name}: {steps}.</p>")
    for event in episode.events:
        tested = digest.suspects_of_event(explanation, event["event"])
        if tested:
            least = wording.chance(explanation.smallest_p.get(event["event"]))
            caption = f"Event {event['event']}; smallest attainable p {least}"
            parts.append(
                f"<details><summary>Everything compared for event {event['event']} "
                f"({len(tested)} rows)</summary>{suspects_table(tested, caption)}</details>"
            )
    return "\n".join([*parts, "</article>"])


def _diagnosis(episode: Episode) -> str:
    if episode.diagnosis is None:
        return ""
    one = episode.diagnosis
    return (
        f'<div class="diagnosis"><p><strong>Diagnosis: {escape(one.cause)}.</strong> '
        f"{escape_own(one.reason[:1].upper() + one.reason[1:])}.</p>"
        f"<p><strong>What to do:</strong> {escape_own(one.action)}</p></div>"
    )


def _events_table(episode: Episode) -> str:
    rows = []
    for event in episode.events:
        key = f'<span class="key" style="background:{event_colour(event["kind"])}"></span>'
        where = wording.block(event["layer"])
        signal = f"{event['signal']}, {event['measured']}" + (f", {where}" if where else "")
        rows.append(
            [
                Cell(f"{event['event']} {wording.kind(event['kind'])}", before=key),
                Cell(signal),
                Cell(wording.onset(event)),
                Cell(wording.values(event, "→"), is_short=True),
                Cell(wording.grades(event, "→"), is_short=True),
                Cell(wording.recovery(event)),
            ]
        )
    head = ["event", "signal", "onset", "before → worst", "grade", "course"]
    return table("Events of the episode, in order", head, rows)


def suspects_table(rows: list[dict[str, Any]], caption: str) -> str:
    caption += f"; exposure is what was in the strongest {STRETCH_STEPS} steps"
    head = ["name", "what", "exposure", "control", "lift (95%)", "z", "p", "q", "lag", "verdict"]
    body = []
    for row in rows:
        verdict = row["verdict"] or "ranked"
        body.append(
            [
                Cell(f"{row['level']} {row['name']}"),
                Cell(wording.feature(row["feature"])),
                Cell(wording.exposure(row, "exposure"), is_number=True),
                Cell(wording.exposure(row, "control"), is_number=True),
                Cell(wording.lift(row), is_number=True),
                *(
                    # Clusters, shards and samples are named by size, not tested.
                    Cell(form(row[name]) if row["level"] == "source" else "", is_number=True)
                    for name, form in (
                        ("z", wording.deviations),
                        ("p", wording.chance),
                        ("q", wording.chance),
                    )
                ),
                _lag(row["lag"]),
                Cell(verdict, tag=verdict),
            ]
        )
    return table(caption, head, body, inside=[row["level"] != "source" for row in rows])


def _lag(steps: int | None) -> Cell:
    """The column's bare number, and words where it would be negative."""
    if steps is None:
        return Cell(_NO_NUMBER, is_number=True)
    return Cell(f"{steps:,}", is_number=True) if steps >= 0 else Cell(wording.lag(steps))


def _samples(explanation: Explanation, rows: list[dict[str, Any]]) -> str:
    """What the implicated clusters and samples say; copies have one text, shown once."""
    by_id = {row["sample_id"]: row for row in explanation.previews.iter_rows(named=True)}
    items: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        preview = by_id.get(row["name"]) if row["level"] in ("cluster", "sample") else None
        if preview is not None and preview["preview"]:
            items.setdefault(escape(preview["preview"], PREVIEW_CHARS), []).append(row)
    if not items:
        return ""
    shown = []
    for text, own in items.items():
        names = ", ".join(f"{row['level']} {escape(row['name'])}" for row in own)
        shown.append(f'<li><q dir="auto">{text}</q><small>{names}</small></li>')
    return f'<h3>What the model read</h3><ul class="samples">{"".join(shown)}</ul>'


def proposal_section(proposal: Proposal) -> str:
    weights = ""
    if proposal.weights:
        names = sorted(set(proposal.weights_now) | set(proposal.weights))
        rows = [
            [
                Cell(name),
                Cell(wording.percent(proposal.weights_now.get(name)), is_number=True),
                Cell(wording.percent(proposal.weights.get(name)), is_number=True),
                Cell(wording.number(proposal.epochs_now.get(name)), is_number=True),
                Cell(wording.number(proposal.projected_epochs.get(name)), is_number=True),
            ]
            for name in names
        ]
        head = ["source", "weight now", "proposed", "epochs now", "projected"]
        caption = "Shares of the samples, and how often each distinct content is seen"
        weights = table(caption, head, rows)
    return f"""<section aria-labelledby="proposal">
<h2 id="proposal">Proposal</h2>
<p>{escape_own(proposal.summary)}</p>
{weights}
<p class="note">A proposal is never applied by itself.</p>
</section>"""


def drifts_section(explanation: Explanation) -> str:
    """Where the data changed, whether a signal moved or not; nothing where it did not."""
    drifts = "".join(f"<li>{escape_own(one)}</li>" for one in digest.drifts(explanation))
    if not drifts:
        return ""
    return f"""<section aria-labelledby="drift">
<h2 id="drift">Drift of the data</h2>
<ul>{drifts}</ul>
<p class="note">Facts about what was consumed, whether meant or not.</p>
</section>"""


def gaps_section(explanation: Explanation) -> str:
    gaps = "".join(f"<li>{escape_own(gap)}</li>" for gap in explanation.gaps)
    told = f"<ul>{gaps}</ul>" if gaps else "<p>None known.</p>"
    signals = explanation.signals
    if len(signals) and not (signals["kind"] == "probe").any():
        told += (
            "<p>There was no probe batch: the signals were taken on the training batches, whose "
            "own poverty lowers them.</p>"
        )
    unscored = explanation.composition.select(pl.col("n_samples") - pl.col("n_scored")).sum()
    n_unscored = int(unscored.item() or 0)
    if n_unscored:
        total = int(explanation.composition["n_samples"].sum())
        told += (
            f"<p>{n_unscored:,} of {total:,} samples were not scored for duplication and "
            "repetition.</p>"
        )
    return f"""<section aria-labelledby="gaps">
<h2 id="gaps">Gaps in the record</h2>
{told}
</section>"""
