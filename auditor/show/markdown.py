"""The report as GitHub-flavoured Markdown, for a pull request or an issue.

Names and texts of the data stand in code, where no markup, link or mention is live; sentences of
ours that quote them are escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from auditor.clean.proposal import Proposal
from auditor.explain.explanation import Explanation
from auditor.show import digest, wording
from auditor.show.digest import Episode
from auditor.show.text import PREVIEW_CHARS, markdown_code, markdown_words, sentence


def markdown_of(explanation: Explanation, proposal: Proposal) -> str:
    """The report; ends with a line break."""
    return "\n\n".join(_parts(explanation, proposal)) + "\n"


def _parts(explanation: Explanation, proposal: Proposal) -> Iterator[str]:
    yield f"## Training run {markdown_code(explanation.run_id)}"
    yield f"**{_words(explanation.verdict)}**"
    lowest, last = digest.lowest_grade(explanation), digest.last_grade(explanation)
    grade = digest.no_grade(explanation)
    if lowest is not None and last is not None:
        grade = f"S{lowest.grade} at step {lowest.step:,}, last S{last.grade}"
    facts = [
        ("Steps", f"{explanation.n_steps:,}"),
        ("Lowest grade", grade),
        ("Events", f"{len(explanation.events):,}"),
        ("What to do", _words(digest.what_to_do(explanation, proposal))),
    ]
    yield _table(("", ""), facts)
    for episode in digest.episodes(explanation):
        yield from _episode(explanation, episode)
    drifts = digest.drifts(explanation)
    if drifts:
        yield "### Drift of the data"
        yield _items(drifts)
    yield "### Proposal"
    yield _words(proposal.summary)
    if proposal.weights:
        rows = [
            (
                markdown_code(name),
                wording.percent(proposal.weights_now.get(name)),
                wording.percent(proposal.weights.get(name)),
                wording.number(proposal.epochs_now.get(name)),
                wording.number(proposal.projected_epochs.get(name)),
            )
            for name in sorted(set(proposal.weights_now) | set(proposal.weights))
        ]
        yield _table(("source", "weight now", "proposed", "epochs now", "projected"), rows)
    yield "### Gaps in the record"
    yield _items(explanation.gaps) if explanation.gaps else "None known."


def _episode(explanation: Explanation, episode: Episode) -> Iterator[str]:
    n = wording.counted(len(episode.events), "event")
    yield f"### Episode {episode.number}: {n} from step {episode.first_step:,}"
    if episode.diagnosis is not None:
        reason = _words(episode.diagnosis.reason)
        yield f"**{_words(episode.diagnosis.cause)}**: {reason}. {_words(episode.diagnosis.action)}"
    rows = [
        (
            str(event["event"]),
            _words(wording.kind(event["kind"])),
            _words(", ".join(filter(None, (event["measured"], wording.block(event["layer"]))))),
            wording.onset(event),
            wording.course(event, arrow="→"),
            wording.recovery(event),
        )
        for event in episode.events
    ]
    yield _table(("event", "what", "measured", "onset", "before → worst", "course"), rows)
    if episode.speaker is None:
        yield digest.not_tested(explanation)
        return
    yield from _suspects(explanation, episode.speaker)


def _suspects(explanation: Explanation, event: int) -> Iterator[str]:
    suspects = digest.suspects_of_event(explanation, event)
    chosen = digest.standing_out(suspects)
    where = f"{wording.place(chosen)} event {event}"
    if digest.is_data_cause(suspects):
        yield f"What stands out {where}:"
    else:
        yield f"No data cause found. What came closest {where}:"
    rows = [
        (
            row["level"],
            markdown_code(row["name"]),
            wording.feature(row["feature"]),
            row["verdict"] or "ranked",
            f"{wording.exposure(row, 'exposure')}, before {wording.exposure(row, 'control')}",
            wording.lift(row),
            wording.deviations(row["z"]),
            wording.chance(row["q"]),
        )
        for row in chosen
    ]
    head = ("", "name", "what", "verdict", "exposure", "lift (95%)", "z", "q")
    yield _table(head, rows)
    previews = explanation.previews.filter(
        explanation.previews["sample_id"].is_in([row["name"] for row in chosen])
    )
    texts = [text for text in previews["preview"].unique(maintain_order=True) if text]
    if texts:
        yield "\n".join(f"- {markdown_code(text, PREVIEW_CHARS)}" for text in texts)


def _words(text: str) -> str:
    return markdown_words(sentence(text))


def _items(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {_words(one)}" for one in sentences)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
