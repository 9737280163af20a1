"""How to read the page: signals, grades, statistics, and the settings the numbers depend on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from auditor import schema
from auditor.explain import attribution, composition
from auditor.explain.contrast import STRETCH_STEPS
from auditor.explain.explanation import Explanation
from auditor.measure.grading import DEFAULT_POLICY
from auditor.show import wording
from auditor.show.tables import Cell, table
from auditor.show.text import escape, escape_own

_STATISTICS: Final = (
    (
        "exposure and control",
        "Exposure is the share of the samples, or the mean of their losses, in the strongest "
        f"{STRETCH_STEPS} steps of the lookback, not the mean over it. The lookback ends at the "
        f"first bad sample, and {STRETCH_STEPS} steps later for a signal of the training batch. "
        "Control is the same over this run's own steps before the lookback and the episode: a "
        "source is only ever compared with itself.",
    ),
    (
        "lift",
        "Exposure over control, with half a sample added to each so that nothing divides by zero; "
        "its 95% interval is in brackets. Where the control is zero the lift is large and vague: "
        "read the exposure instead.",
    ),
    (
        "z",
        "How many robust deviations (median and MAD over the control windows) the exposure lies "
        "from what was usual. The verdict rests on it.",
    ),
    (
        "p",
        "The share of circular shifts of the run's past that look at least as bad. With little "
        "history it cannot be small, so the smallest attainable p stands beside it.",
    ),
    (
        "q",
        "p corrected for everything compared for the same event (Benjamini and Hochberg). Read it "
        "as the share of false findings among all with a q this low.",
    ),
    (
        "lag",
        "Steps from where the exposure changed to the onset, the first bad sample. A change N "
        "steps after the onset is said to be; the lag is then -N in the JSON. Only signals of the "
        "training batch can have such a change.",
    ),
    *(
        (f"verdict: {name}", f"{words[0].upper()}{words[1:]}.")
        for name, words in wording.VERDICTS.items()
    ),
)


def how_to_read() -> str:
    signals = _terms(
        (name, f"{words[0].upper()}{words[1:]}.") for name, words in schema.SIGNAL_NAMES.items()
    )
    statistics = _terms(_STATISTICS)
    scale = table(
        "The grade scale: the lowest block's ratio",
        ["grade", "ratio from", "alert"],
        [
            [Cell(f"S{grade}"), Cell(f"{grade / 10:.1f}", is_number=True), Cell(_alert(grade))]
            for grade in range(7, -1, -1)
        ],
    )
    return f"""<section aria-labelledby="reading">
<h2 id="reading">How to read this</h2>
<p>The report shows <strong>association, not causation</strong>: a source that stands out before an
event was there when it happened, and may share a cause with it. Replaying the run from a checkpoint
with and without those samples is the test of cause.</p>
<p>A coloured band marks the interval in which an onset lies: after the last healthy sample and not
later than the first bad one. Signals on the <em>probe</em> come from one held-out batch that never
changes, so they move only when the model does; signals on the training batch also move with what
the batch holds.</p>
<h3>Signals</h3>
{signals}
<h3>Grades</h3>
<p>A block's ratio is its effective rank over the largest it could be. The column ratio counts as it
is, the raw ratio relative to the best it has been lately; the lower of the two, in the lowest
block, is graded. Ranks dip in the first steps of every run: the warm-up is not judged.</p>
{scale}
<h3>How strong, how sure</h3>
{statistics}
</section>"""


def settings(explanation: Explanation) -> str:
    rows = [
        ("steps trained", f"{explanation.n_steps:,}"),
        ("steps between samples", "none" if explanation.every is None else f"{explanation.every}"),
        (
            "warm-up",
            f"{DEFAULT_POLICY.warmup_samples} samples and {DEFAULT_POLICY.warmup_steps} steps",
        ),
        (
            "low ever since the warm-up",
            f"watched after {DEFAULT_POLICY.settle_steps} steps, "
            f"danger after {DEFAULT_POLICY.low_steps}",
        ),
        ("best raw ratio looked for among", f"{DEFAULT_POLICY.baseline_samples} samples"),
        ("lookback before an onset", f"{attribution.LOOKBACK_STEPS} steps"),
        ("stretch compared", f"{STRETCH_STEPS} steps"),
        ("a source stands out from", f"|z| = {attribution.BLAME_DEVIATIONS:g}"),
        ("near-duplicate from", f"estimated Jaccard {schema.DUPLICATE_SIMILARITY:g}"),
        ("repetitive from", f"{composition.REPETITIVE_SHARE:.0%} of the sample repeated"),
        ("report schema", f"{schema.REPORT_VERSION}"),
    ]
    body = table(
        "Settings", ["setting", "value"], [[Cell(name), Cell(text)] for name, text in rows]
    )
    return f"""<section aria-labelledby="settings">
<h2 id="settings">Settings</h2>
{body}
</section>"""


def _alert(grade: int) -> str:
    if grade >= 5:
        return "healthy"
    return "watch; danger where two grades went quickly" if grade >= 3 else "danger"


def _terms(pairs: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape_own(words)}</dd>" for name, words in pairs)
    return f'<dl class="terms">{items}</dl>'
