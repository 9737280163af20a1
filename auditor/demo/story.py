"""The demo from beginning to end: train, report, clean, train again, compare."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
from datasets import disable_progress_bars
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn
from torch.utils.data import Subset

from auditor.attempt import write_json
from auditor.clean.from_run import dedupe_run
from auditor.clean.manifest import Manifest
from auditor.clean.mixes import MixSampler
from auditor.clean.verify import verify
from auditor.demo.corpus import BATCH_SAMPLES, DECOY, PLANTED, WEIGHTS, Corpus, ShardRows, build
from auditor.demo.training import EVERY, held_out_loss, train
from auditor.demo.training import Progress as Step
from auditor.errors import AuditorError
from auditor.run import Run
from auditor.schema import DUPLICATE_SIMILARITY
from auditor.show.produce import Report, produce
from auditor.show.terminal import print_report

STEPS: Final = 420
QUICK_STEPS: Final = 300
MIN_STEPS: Final = 260
"""Fewer leave no history after the warm-up, or no time for the damage to show."""

_MARKER: Final = "demo.json"


@dataclass(frozen=True)
class Arm:
    """One training run of the comparison."""

    name: str
    report: Report
    held_out: float
    repeated: float
    epochs: dict[str, float]


def tell(
    out: Path, console: Console, *, seed: int, steps: int, plant: bool, lr_spike: bool
) -> list[Arm]:
    """Run the whole story into ``out``; returns the arms: as it was, cleaned, at random.

    Raises:
        AuditorError: ``out`` holds something that is not an earlier demo.
    """
    begun = time.monotonic()
    disable_progress_bars()  # loading the cleaned shards takes no time worth showing
    _prepare(out, seed=seed, steps=steps, plant=plant, lr_spike=lr_spike)
    corpus = build(out / "data", seed=seed, steps=steps, plant=plant)
    spike_step = steps * 12 // 21 if lr_spike else None
    n_samples = steps * BATCH_SAMPLES
    _introduce(console, corpus, steps, spike_step)

    rows = ShardRows(corpus.shards)

    def arm(name: str, folder: str, dataset: Any, sampler: MixSampler) -> Arm:
        run = out / folder
        with _display(console, name, steps) as show:
            model = train(
                dataset, sampler, corpus, run,
                steps=steps, seed=seed, lr_spike_step=spike_step, progress=show,
            )  # fmt: skip
        return _measured(name, Run.open(run), model, corpus)

    console.rule("1. Train on the data as it is")
    before = arm(
        "as it is", "run-1-as-it-is", rows, MixSampler(rows.sources, WEIGHTS, seed, n_samples)
    )

    console.rule("2. Report")
    print_report(console, before.report.explanation, before.report.proposal, before.report.html)

    console.rule("3. Clean")
    manifest = _clean(out, console)

    console.rule("4. Train again, cleaned and reweighted, from the same seed")
    after = arm("cleaned", "run-2-cleaned", manifest.dataset, manifest.sampler(seed, n_samples))

    console.rule("5. Train again, as many samples removed at random")
    kept = _at_random(len(rows), manifest.counts["rows_in"] - manifest.counts["rows_out"], seed)
    sources = [rows.sources[i] for i in kept]
    random = arm(
        "at random",
        "run-3-at-random",
        _RandomRows(rows, kept),
        MixSampler(sources, WEIGHTS, seed, n_samples),
    )

    console.rule("Before and after")
    arms = [before, after, random]
    console.print(_comparison(arms))
    console.print(_epochs(arms))
    console.print(
        f"Signals were sampled every {EVERY} steps. One seed per arm: what happened here, "
        f"not a statistic. Took {time.monotonic() - begun:.0f} s."
    )
    _conclude(console, before, after, plant=plant, lr_spike=lr_spike)
    for one in arms[:2]:
        console.print(f"Report, {one.name}:", str(one.report.html), soft_wrap=True)
    return arms


class _RandomRows(Subset):
    """Part of the rows, which names the shards they came from."""

    @property
    def shards(self) -> list[Path]:
        return list(self.dataset.shards)  # type: ignore[attr-defined]


def _prepare(out: Path, **settings: Any) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not (out / _MARKER).is_file():
            raise AuditorError(
                "not empty, and not an earlier demo",
                path=out,
                remedy="Choose another folder with --out",
            )
        shutil.rmtree(out)
    write_json(out / _MARKER, settings)


def _introduce(console: Console, corpus: Corpus, steps: int, spike_step: int | None) -> None:
    mix = ", ".join(f"{name} {weight:.0%}" for name, weight in WEIGHTS.items())
    console.print(f"Four sources of real text: {mix}.")
    if corpus.onset_step is None:
        console.print("Nothing is planted.")
    else:
        console.print(
            f"From about step {corpus.onset_step} the shard of {PLANTED} repeats four passages."
        )
    console.print(f"{DECOY} repeats passages all along, and is innocent.")
    if spike_step is not None:
        console.print(f"The learning rate is ten times too high from step {spike_step}.")
    console.print(
        f"A byte-level GPT of 0.1M parameters is trained three times, {steps} steps each."
    )


@contextmanager
def _display(console: Console, name: str, steps: int) -> Iterator[Any]:
    """A progress bar with loss, grade and alert; plain lines where there is no terminal."""
    if not console.is_terminal:

        def line(at: Step) -> None:
            if (at.step + 1) % 60 == 0:
                console.print(
                    f"{name}: step {at.step + 1}/{steps}  loss {at.loss:.2f}  "
                    f"grade {_grade(at.grade)}  {at.alert}"
                )

        yield line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("step {task.completed}/{task.total}  loss {task.fields[loss]:.2f}"),
        TextColumn("grade {task.fields[grade]}  {task.fields[alert]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=steps, loss=float("nan"), grade="-", alert="")

        def update(at: Step) -> None:
            bar.update(
                task, completed=at.step + 1, loss=at.loss, grade=_grade(at.grade), alert=at.alert
            )

        yield update


def _grade(grade: int | None) -> str:
    return "-" if grade is None else f"S{grade}"


def _measured(name: str, run: Run, model: nn.Module, corpus: Corpus) -> Arm:
    report = produce(run)
    exposures = run.scan("exposures").filter(pl.col("state") == "trained")
    repeated = exposures.select((pl.col("duplication") >= DUPLICATE_SIMILARITY).mean()).collect()
    per_source = exposures.group_by("source").agg(
        epochs=pl.len() / (pl.col("dup_run") == 0).sum().clip(1)
    )
    return Arm(
        name,
        report,
        held_out_loss(model, corpus.held_out),
        float(repeated.item()),
        dict(per_source.sort("source").collect().iter_rows()),
    )


def _clean(out: Path, console: Console) -> Manifest:
    manifest = dedupe_run(Run.open(out / "run-1-as-it-is"), out / "cleaned")
    counts = manifest.counts
    console.print(
        f"{counts['rows_in']} rows in, {counts['rows_out']} out: {counts['exact']} exact and "
        f"{counts['near']} near-duplicates and {counts['repetition']} repetitive rows dropped."
    )
    checked = verify(out / "cleaned")
    if not checked.ok:
        raise AuditorError("; ".join(checked.failures), path=out / "cleaned")
    console.print(f"Verified {checked.n_shards} shards against their manifest.")
    title = "passes over the cleaned rows, at the old and at the proposed weights"
    table = Table("source", "weight", "epochs", "proposed", "epochs", title=title)
    for name, source in manifest.document["sources"].items():
        at_old_weight = source["projected_epochs_at_old_weight"]
        table.add_row(
            name,
            f"{source['weight_before']:.1%}",
            "-" if at_old_weight is None else f"{at_old_weight:.2f}",
            f"{source['weight']:.1%}",
            f"{source['projected_epochs']:.2f}",
        )
    console.print(table)
    return manifest


def _at_random(n_rows: int, n_removed: int, seed: int) -> list[int]:
    rng = np.random.default_rng([seed, len(WEIGHTS)])
    removed = set(rng.choice(n_rows, size=n_removed, replace=False).tolist())
    return [i for i in range(n_rows) if i not in removed]


def _second_half(arm: Arm) -> pl.DataFrame:
    """Grades once the model has formed; before, they rise in every run."""
    grades = arm.report.explanation.grades
    middle = arm.report.explanation.n_steps // 2
    return grades.filter((pl.col("step") >= middle) & pl.col("grade").is_not_null())


def _lowest_ratio(arm: Arm) -> float:
    return min(_second_half(arm)["ratio"].to_list())


def _comparison(arms: list[Arm]) -> Table:
    table = Table("", *(arm.name for arm in arms))
    frames = [_second_half(arm) for arm in arms]

    def row(name: str, values: list[str]) -> None:
        table.add_row(name, *values)

    row("lowest grade, second half", [_grade(min(frame["grade"].to_list())) for frame in frames])
    row("last grade", [_grade(frame["grade"].to_list()[-1]) for frame in frames])
    row("lowest ratio, second half", [f"{_lowest_ratio(arm):.2f}" for arm in arms])
    alarms = [frame.filter(pl.col("alert") != "healthy") for frame in frames]
    row("samples with an alert", [str(len(frame)) for frame in alarms])
    row("events", [str(len(arm.report.explanation.events)) for arm in arms])
    row("source named", [arm.report.explanation.culprit or "none" for arm in arms])
    row("held-out loss (nats/byte)", [f"{arm.held_out:.3f}" for arm in arms])
    row("repeated exposure", [f"{arm.repeated:.1%}" for arm in arms])
    return table


def _epochs(arms: list[Arm]) -> Table:
    table = Table("passes over distinct text", *(arm.name for arm in arms))
    for source in WEIGHTS:
        table.add_row(source, *(f"{arm.epochs.get(source, 0.0):.1f}" for arm in arms))
    return table


def _conclude(console: Console, before: Arm, after: Arm, *, plant: bool, lr_spike: bool) -> None:
    """Say what came of it, in either direction."""
    culprit = before.report.explanation.culprit
    if plant:
        found = "the planted source" if culprit == PLANTED else "not the planted source"
        console.print(f"The first run's report names {culprit or 'no source'}: {found}.")
    else:
        reason = "the learning rate was at fault" if lr_spike else "nothing was planted"
        verdict = "rightly, since" if culprit is None else "wrongly, since"
        console.print(f"The first run's report names {culprit or 'no source'}, {verdict} {reason}.")
    n_events = [len(arm.report.explanation.events) for arm in (before, after)]
    better = {
        "held-out loss": after.held_out < before.held_out,
        "lowest ratio": _lowest_ratio(after) > _lowest_ratio(before),
        "number of events": n_events[1] < n_events[0],
    }
    won = [name for name, is_better in better.items() if is_better]
    lost = [name for name, is_better in better.items() if not is_better]
    if not lost:
        console.print(f"The cleaned run is better in {', '.join(won)}.")
    elif not won:
        console.print(f"The cleaned run is NOT better: not in {', '.join(lost)}.")
    else:
        console.print(
            f"The cleaned run is better in {', '.join(won)}, and not in {', '.join(lost)}."
        )
