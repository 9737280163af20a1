"""The report on a terminal or in a log file: 80 columns, no colour needed, nothing from data live.

Everything is printed as ``rich.text.Text``, never as markup, so that ``[red]`` in a source's name
stays what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from auditor.clean.proposal import Proposal
from auditor.explain.attribution import BLAME_DEVIATIONS
from auditor.explain.contrast import STRETCH_STEPS
from auditor.explain.explanation import Explanation
from auditor.show import digest, wording
from auditor.show.digest import Episode, GradePoint
from auditor.show.printing import heading, line, new_table
from auditor.show.text import PREVIEW_CHARS, clean, encodable, sentence

_NAME_CHARS: Final = 40
_STYLES: Final = {"blamed": "bold red", "coincident": "bold yellow", "ranked": "dim"}


def print_report(
    console: Console, explanation: Explanation, proposal: Proposal, html_path: Path | None
) -> None:
    """Print the report; ``html_path`` is where the page lies, None where none was written."""
    every = (
        "nothing sampled"
        if explanation.every is None
        else f"sampled every {wording.counted(explanation.every, 'step')}"
    )
    steps = wording.counted(explanation.n_steps, "step")
    line(console, "Run", f"{clean(explanation.run_id)}: {steps}, {every}", style="bold")
    line(console, "Verdict", sentence(explanation.verdict), style="bold")
    _grades(console, explanation)
    for episode in digest.episodes(explanation):
        _episode(console, explanation, episode)
    if not explanation.judged:
        line(console, "Next", digest.SAMPLE_MORE)
    drifts = digest.drifts(explanation)
    if drifts:
        heading(console, "Drift of the data")
        for told in drifts:
            line(console, "  -", sentence(told, 400), label_chars=4)
    heading(console, "Proposal")
    _proposal(console, proposal)
    heading(console, "Gaps in the record")
    for gap in explanation.gaps:
        line(console, "  -", sentence(gap, 400), label_chars=4)
    if not explanation.gaps:
        line(console, "", "none known", label_chars=2)
    if html_path is not None:
        console.print()
        # In one piece whatever its length, so that it can be copied.
        text = encodable(f"Page: {html_path}", console.encoding)
        console.print(Text(text), soft_wrap=True)


def _grades(console: Console, explanation: Explanation) -> None:
    lowest, last = digest.lowest_grade(explanation), digest.last_grade(explanation)
    if lowest is None or last is None:
        line(console, "Grades", f"none: {digest.no_grade(explanation)}")
    else:
        line(console, "Grades", f"lowest {_point(lowest)}; last {_point(last)}")
    counts = digest.alerts(explanation)
    if counts:
        words = "; ".join(f"{clean(name)}: {n:,}" for name, n in counts.items())
        sampled = wording.counted(sum(counts.values()), "sampled step")
        line(console, "Alerts", f"{words} (of {sampled})")


def _point(point: GradePoint) -> str:
    where = wording.block(point.layer)
    place = f"step {point.step}" + (f", {where}" if where else "")
    return f"{wording.grade(point.grade)} (ratio {point.ratio:.3f}, {place})"


def _episode(console: Console, explanation: Explanation, episode: Episode) -> None:
    n = wording.counted(len(episode.events), "event")
    heading(console, f"Episode {episode.number}: {n} from step {episode.first_step}")
    for event in episode.events:
        what = [
            wording.kind(event["kind"]),
            f"{clean(event['signal'])}, {clean(event['measured'])}",
            wording.block(event["layer"]),
        ]
        told = (
            f"{' | '.join(filter(None, what))}\nonset {wording.onset(event)}; "
            f"{wording.recovery(event)}\n{wording.course(event)}"
        )
        line(console, f"  event {event['event']}", told)
    console.print()
    if episode.speaker is None:
        line(console, "", digest.not_tested(explanation), label_chars=2)
    else:
        _suspects(console, explanation, episode)
    if episode.diagnosis is not None:
        cause, reason = clean(episode.diagnosis.cause), sentence(episode.diagnosis.reason)
        line(console, "  Diagnosis", f"{cause}: {reason}.", label_chars=13)
        line(console, "  What to do", sentence(episode.diagnosis.action), label_chars=13)


def _suspects(console: Console, explanation: Explanation, episode: Episode) -> None:
    assert episode.speaker is not None
    suspects = digest.suspects_of_event(explanation, episode.speaker)
    chosen = digest.standing_out(suspects)
    event = f"{wording.place(chosen)} event {episode.speaker}"
    if digest.is_data_cause(suspects):
        head = f"What stands out {event}"
    else:
        head = f"No data cause found. What came closest {event}"
    line(
        console,
        "",
        f"{head} (a source stands out from |z| = {BLAME_DEVIATIONS:g}):",
        label_chars=2,
    )
    previews = dict(
        zip(explanation.previews["sample_id"], explanation.previews["preview"], strict=True)
    )
    shown: set[str] = set()
    for row in chosen:
        if row["level"] == "source":
            _source(console, row, explanation.smallest_p.get(episode.speaker))
            if row is chosen[0] and row["verdict"] != "ranked":
                steps = ", ".join(map(str, explanation.strongest.get(episode.speaker, ())))
                line(console, "      most of it", f"at steps {steps}", label_chars=18)
        else:
            _inside(console, row)
        preview = previews.get(row["name"]) if row["level"] in ("cluster", "sample") else None
        # Copies have one text: once is enough.
        if preview and preview not in shown:
            shown.add(preview)
            line(console, "", f'text: "{clean(preview, PREVIEW_CHARS)}"', label_chars=12)
    others = [
        f"event {row['event']}: {clean(row['name'], _NAME_CHARS)}, "
        f"{wording.feature(row['feature'])}, z {wording.deviations(row['z'])}"
        for row in digest.blaming(explanation)
        if row["event"] != episode.speaker
        and row["event"] in {event["event"] for event in episode.events}
    ]
    if others:
        line(console, "", f"Blamed as well: {'; '.join(others)}.", label_chars=2)
    console.print()


def _source(console: Console, row: Mapping[str, Any], least: float | None) -> None:
    verdict = row["verdict"] or "ranked"
    text = Text("  source ")
    text.append(encodable(clean(row["name"], _NAME_CHARS), console.encoding), style="bold")
    text.append(f", {wording.feature(row['feature'])}: ")
    text.append(verdict, style=_STYLES.get(verdict, ""))
    console.print(text)
    strong = f"{_exposure(row)}; z {wording.deviations(row['z'])}"
    line(console, "      how strong", strong, label_chars=18)
    lag = "" if row["lag"] is None else f"; {wording.lag(row['lag'])}"
    sure = (
        f"p {wording.chance(row['p'])} (smallest attainable {wording.chance(least)}), "
        f"q {wording.chance(row['q'])}{lag}{wording.bound(row['p'], least)}"
    )
    line(console, "      how sure", sure, label_chars=18)


def _inside(console: Console, row: Mapping[str, Any]) -> None:
    """A cluster, shard or sample: named by size, not tested."""
    name = clean(row["name"], _NAME_CHARS)
    line(
        console,
        f"    {row['level']}",
        f"{name}, {wording.feature(row['feature'])}: {_exposure(row)}; {row['verdict']}",
        label_chars=12,
    )


def _exposure(row: Mapping[str, Any]) -> str:
    of_batch = "" if wording.is_mean(row) else " of the batch"
    return (
        f"{wording.exposure(row, 'exposure')}{of_batch} in the strongest {STRETCH_STEPS} steps, "
        f"control {wording.exposure(row, 'control')}; lift {wording.lift(row)}"
    )


def _proposal(console: Console, proposal: Proposal) -> None:
    line(console, "", sentence(proposal.summary), label_chars=2)
    if not proposal.weights:
        return
    table = new_table(console)
    table.add_column("source", overflow="fold")
    for name in ("weight now", "proposed", "epochs now", "projected"):
        table.add_column(name, justify="right")
    for name in sorted(set(proposal.weights_now) | set(proposal.weights)):
        table.add_row(
            Text(encodable(clean(name, _NAME_CHARS), console.encoding)),
            wording.percent(proposal.weights_now.get(name)),
            wording.percent(proposal.weights.get(name)),
            wording.number(proposal.epochs_now.get(name)),
            wording.number(proposal.projected_epochs.get(name)),
        )
    console.print(table)
