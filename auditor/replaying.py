"""``auditor.replay``: train a stretch of a run again, with and without the implicated samples.

The report's evidence is association. This is the experiment: from a checkpoint before the event the
same steps are trained as they were, without the implicated samples, and without as many others,
under several seeds. Only that shows a cause, and it costs training:

    3 arms x seeds x steps

The user trains; this module says on which batches, keeps what came back, and compares. Every
finished training is kept under ``derived/replay/``, so that a replay that was interrupted goes on.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Final

import polars as pl

from auditor.attempt import write_json
from auditor.errors import AuditorError, RunError
from auditor.explain.arms import ARMS, Batches, Stretch, contents_of, stretch_of
from auditor.explain.attribution import LOOKBACK_STEPS, blamed_sources, marked
from auditor.explain.checkpoints import registered, step_of
from auditor.explain.effects import BETTER, SIGNALS, Effect, effects_of, outcomes_of, signals_of
from auditor.explain.exposures import replay_order
from auditor.explain.implicated import implicated_exposures
from auditor.explain.pipeline import explain
from auditor.run import Run
from auditor.schema import UNKNOWN_SOURCE
from auditor.show.report import strict
from auditor.show.text import clean

SEEDS: Final = 5
"""Seeds per arm: with two an interval is wide (t = 12.7), with five it is 2.8 standard errors."""

AFTER_STEPS: Final = 200
"""A replay ends at the trough of the episode, at most so many steps after its first onset."""

POOL_STEPS: Final = 1000
"""Replacements come from so many steps before the stretch, and after it."""

VERSION: Final = 1
"""Of the files kept, and of the JSON of a result."""

Train = Callable[[str, Batches, int], Any]
"""``train(checkpoint, batches, seed) -> signals``; see :func:`replay`."""

_EXPOSURE: Final = ["attempt", "rank", "batch", "position", "part"]


@dataclass(frozen=True)
class ReplayPlan:
    """What would be trained; ``print(plan)`` says so and what it costs.

    Attributes:
        run: the run directory.
        checkpoint: given to ``train``.
        event: number of the event whose episode is replayed, None where samples were named.
        first, last: the steps trained, inclusive.
        stretch: the rows of those steps, and those that can replace them.
        sources: the implicated rows by source.
        n_seeds: seeds 0 to ``n_seeds - 1``.
        notes: what limits the answer, in sentences.
    """

    run: Run
    checkpoint: str
    event: int | None
    first: int
    last: int
    stretch: Stretch
    sources: Mapping[str, int]
    n_seeds: int
    notes: tuple[str, ...]

    @property
    def n_steps(self) -> int:
        """Steps of one training."""
        return int(self.stretch.own["step"].n_unique())

    @property
    def n_rows(self) -> int:
        return self.stretch.end_row - self.stretch.first_row

    @property
    def n_implicated(self) -> int:
        return sum(self.sources.values())

    @property
    def cost(self) -> int:
        """Steps of training in all arms and seeds."""
        return len(ARMS) * self.n_seeds * self.n_steps

    def batches(self, arm: str, seed: int) -> Batches:
        """What ``train`` is given for an arm (one of ``ARMS``) and seed."""
        return self.stretch.batches(arm, seed)

    def __str__(self) -> str:
        sources = ", ".join(f"{clean(name)} {n:,}" for name, n in self.sources.items())
        return (
            f"Replay of steps {self.first:,} to {self.last:,} from {clean(self.checkpoint, 500)}: "
            f"{self.n_implicated:,} of {self.n_rows:,} samples implicated ({sources}). "
            f"{len(ARMS)} arms x {self.n_seeds} seeds x {self.n_steps:,} steps = "
            f"{self.cost:,} steps of training."
        )


@dataclass(frozen=True)
class ReplayResult:
    """What a replay showed; ``print(result)`` is the report, ``result.to_json()`` the same as data.

    Attributes:
        plan: what was trained.
        signals: arm, seed, step, signal, value, as ``train`` returned them.
        outcomes: arm, seed, signal, value: the mean over the last quarter of the steps.
        effects: the implicated samples left out, against others left out and against the run as it
            was; signals that are judged first.
        verdict: what may be said, in sentences. Claims cause only where the interval of the
            difference to the random arm excludes zero in the good direction.
        notes: what limits the answer.
        n_kept: trainings that were not repeated, because an earlier call had finished them.
    """

    plan: ReplayPlan
    signals: pl.DataFrame
    outcomes: pl.DataFrame
    effects: tuple[Effect, ...]
    verdict: str
    notes: tuple[str, ...]
    n_kept: int

    @property
    def shows_cause(self) -> bool:
        return any(one.finding == "better" for one in _against_random(self.effects))

    def to_dict(self) -> dict[str, Any]:
        """As values of JSON; numbers that are not finite are None."""
        plan = self.plan
        document = {
            "schema_version": VERSION,
            "run_id": plan.run.run_id,
            "checkpoint": plan.checkpoint,
            "event": plan.event,
            "first_step": plan.first,
            "last_step": plan.last,
            "n_seeds": plan.n_seeds,
            "n_samples": plan.n_rows,
            "n_implicated": plan.n_implicated,
            "n_random": plan.stretch.n_random,
            "sources": dict(plan.sources),
            "steps_trained": plan.cost,
            "shows_cause": self.shows_cause,
            "verdict": self.verdict,
            "notes": list(self.notes),
            "effects": [vars(effect) for effect in self.effects],
            "outcomes": self.outcomes.to_dicts(),
            "signals": self.signals.to_dicts(),
        }
        return {name: strict(value) for name, value in document.items()}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    def __str__(self) -> str:
        lines = [str(self.plan), ""]
        for signal in dict.fromkeys(effect.signal for effect in self.effects):
            lines += [*_table(self, signal), ""]
        lines.append(self.verdict)
        lines += [f"Note: {note}" for note in self.notes]
        return "\n".join(lines)


def plan(
    run: str | PathLike[str] | Run,
    *,
    checkpoint: str | PathLike[str] | None = None,
    event: int | None = None,
    samples: Iterable[str] | None = None,
    first_step: int | None = None,
    steps: int | None = None,
    seeds: int = SEEDS,
) -> ReplayPlan:
    """What :func:`replay` with the same arguments would train. Trains nothing.

    Raises:
        RunError, ValueError: as of :func:`replay`.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be 1 or more, got {seeds}")
    if steps is not None and steps < 1:
        raise ValueError(f"steps must be 1 or more, got {steps}")
    if isinstance(samples, str):
        raise ValueError(f"samples must be several sample ids, got the string {samples!r}")
    if samples is not None and event is not None:
        raise ValueError("give samples or an event, not both")
    run = run if isinstance(run, Run) else Run.open(Path(run))
    if samples is not None:
        named = sorted({str(one) for one in samples})
        blame = _named(run, named)
    else:
        named = None
        blame = _blamed(run, event)
    notes: list[str] = []
    path, first = _begin(run, checkpoint, first_step, blame, notes)
    last = blame.end if steps is None else first + steps - 1
    if last < first:
        raise RunError(
            f"what is implicated ends at step {last}, before step {first}, where the replay begins",
            path=run.path,
            remedy="Give a checkpoint from before it, or steps=",
        )
    stretch = _stretch(run, first, last, blame, named, notes)
    counts = stretch.own.filter("implicated").group_by("source").len().sort("source")
    return ReplayPlan(
        run=run,
        checkpoint=path,
        event=blame.event,
        first=first,
        last=int(stretch.own["step"][-1]),
        stretch=stretch,
        sources=dict(counts.iter_rows()),
        n_seeds=seeds,
        notes=tuple(notes),
    )


def replay(
    run: str | PathLike[str] | Run,
    train: Train,
    *,
    checkpoint: str | PathLike[str] | None = None,
    event: int | None = None,
    samples: Iterable[str] | None = None,
    first_step: int | None = None,
    steps: int | None = None,
    seeds: int = SEEDS,
    better: Mapping[str, str] = BETTER,
    progress: Callable[[str], None] | None = None,
) -> ReplayResult:
    """Train a stretch of a run again, with and without the implicated samples: the test of cause.

    ``train(checkpoint, batches, seed)`` restores the checkpoint (model, optimizer, schedule),
    trains on the batches in their order and returns signals of the model. It must not depend on
    the arm in any other way, and take all its randomness from ``seed``, an int from 0. ``batches``
    is a sequence of :class:`~auditor.explain.arms.Batch`: ``batch.step``, ``batch.rank``,
    ``batch.ids`` (sample ids by position) and ``batch.indices`` (dataset indices); several batches
    of one step went into one update. Signals are a mapping of signal to number, or rows: mappings
    with ``step`` (of the record) and signals. Of rows the mean over the last quarter of the steps
    is compared. Signals must be measured on data that is the same in all arms, held out of them:
    the training loss says what was read as well as what the model became.

    The implicated samples are those of the blamed sources of an event that are near-duplicates (or
    repetitive), with what they repeat, or ``samples``. They are replaced by other samples of the
    run, most of all of the same source; so are as many others in the third arm.

    Args:
        run: the run directory.
        train: see above.
        checkpoint: handed to ``train``; by default the last one registered (and there) that is from
            before the lookback of the event, else from before its onset.
        event: number in the table ``events``; by default the first with a blamed source. Its whole
            episode is replayed.
        samples: sample ids that are implicated, instead of an event.
        first_step: the first step that the checkpoint has not seen; by default the one after the
            step it was registered with, or that its name holds.
        steps: how many; by default to the worst of the episode, at most 200 after its first onset.
        seeds: seeds per arm. One gives an effect without an interval.
        better: the good direction, ``"higher"`` or ``"lower"``, of the signals that are judged.
        progress: called with a line of text before the first and after each training; by default
            the line goes to standard error.

    Raises:
        RunError: nothing is implicated, there is no checkpoint before it, or nothing can replace
            it; says what to do.
        AuditorError: ``train`` failed, or returned no signals; says for which arm and seed. What
            was finished before is kept.
        ValueError: an argument makes no sense.
    """
    if not better or not set(better.values()) <= {"higher", "lower"}:
        raise ValueError(f"better maps signals to 'higher' or 'lower', got {dict(better)!r}")
    say = _say if progress is None else progress
    planned = plan(
        run, checkpoint=checkpoint, event=event, samples=samples, first_step=first_step,
        steps=steps, seeds=seeds,
    )  # fmt: skip
    kept = _Kept(planned, train)
    there = {(arm, seed): kept.read(arm, seed) for seed in range(seeds) for arm in ARMS}
    n_there = sum(found is not None for found in there.values())
    done = f" {n_there} of {len(ARMS) * seeds} trainings are there already." if n_there else ""
    say(f"{planned}{done}")
    for note in planned.notes:
        say(f"Note: {note}")
    rows: list[tuple[str, int, int | None, str, float]] = []
    n_done = 0
    # Seed by seed, so that what an interruption leaves is whole pairs.
    for seed in range(seeds):
        for arm in ARMS:
            found = there[arm, seed]
            n_done += 1
            if found is None:
                begun = time.monotonic()
                found = _train(planned, train, arm, seed, n_done - 1)
                kept.write(arm, seed, found)
                say(
                    f"{arm}, seed {seed}: {time.monotonic() - begun:.1f} s "
                    f"({n_done} of {len(ARMS) * seeds})"
                )
            _check_judged(found, better, arm, seed)
            rows += [(arm, seed, *one) for one in found]
    signals = pl.DataFrame(rows, schema=dict(SIGNALS), orient="row")
    outcomes = outcomes_of(signals, planned.first, planned.last)
    _check_whole(outcomes, seeds)
    effects = effects_of(outcomes, better)
    return ReplayResult(
        plan=planned,
        signals=signals,
        outcomes=outcomes,
        effects=tuple(effects),
        verdict=_verdict(effects, seeds),
        notes=(*planned.notes, *kept.notes),
        n_kept=n_there,
    )


# -- what is implicated, and from where ----------------------------------------------------------


@dataclass(frozen=True)
class _Blame:
    """``since`` is the last step before anything implicated, ``begin`` the last before the event.

    ``end`` is the last to replay by default. ``keys``: attempt and key of the implicated samples.
    ``marks``: what marks an exposure of a blamed source after ``since``; empty where samples
    were named.
    """

    event: int | None
    begin: int
    end: int
    since: int
    keys: pl.DataFrame
    marks: Mapping[str, pl.Expr]


def _blamed(run: Run, number: int | None) -> _Blame:
    explained = explain(run)
    events, blamed = explained.events, blamed_sources(explained.suspects)
    if number is not None and number not in events["event"]:
        there = f"events 0 to {len(events) - 1}" if len(events) else "no event"
        raise RunError(
            f"there is no event {number}; the run has {there}",
            path=run.path,
            remedy=f"See: auditor report {run.path}",
        )
    if number is None and len(blamed):
        number = int(blamed["event"][0])
    episode = events
    if number is not None:
        which = events.filter(pl.col("event") == number)["episode"][0]
        episode = events.filter(pl.col("episode") == which)
    suspects = explained.suspects.filter(pl.col("event").is_in(episode["event"].implode()))
    blamed = blamed_sources(suspects)
    if number is None or blamed.is_empty():
        what = "no event" if number is None else f"neither event {number} nor its episode"
        raise RunError(
            f"{what} has a blamed source, so that no sample is implicated",
            path=run.path,
            remedy="Name the samples to test with samples=",
        )
    marks: dict[str, pl.Expr] = {}
    for row in blamed.iter_rows(named=True):
        marks[row["name"]] = marks.get(row["name"], pl.lit(False)) | marked(row)
    onset = episode.select(low=pl.min("onset_low"), high=pl.min("onset_high")).row(0)
    keys = implicated_exposures(events, suspects, run.exposures).select("attempt", "key")
    return _Blame(
        event=number,
        begin=onset[0],
        end=min(int(episode["trough_step"].max()), onset[1] + AFTER_STEPS),  # type: ignore[arg-type]
        since=onset[0] - LOOKBACK_STEPS,
        keys=keys.unique().collect(),
        marks=marks,
    )


def _named(run: Run, named: list[str]) -> _Blame:
    trained = pl.col("state") == "trained"
    rows = run.scan("exposures").filter(trained & pl.col("sample_id").is_in(named))
    found = rows.select("attempt", "key", "step").collect()
    if found.is_empty():
        raise RunError(
            f"none of the {len(named)} samples named was trained on in this run",
            path=run.path,
            remedy="Name them by sample_id, as auditor exposures prints it",
        )
    first = int(found["step"].min())  # type: ignore[arg-type]
    last = int(found["step"].max())  # type: ignore[arg-type]
    return _Blame(
        event=None,
        begin=first - 1,
        end=min(last, first + AFTER_STEPS),
        since=first - 1,
        keys=found.select("attempt", "key").unique(),
        marks={},
    )


def _begin(
    run: Run,
    given: str | PathLike[str] | None,
    first_step: int | None,
    blame: _Blame,
    notes: list[str],
) -> tuple[str, int]:
    """The checkpoint, and the first step that it has not seen."""
    found, _ = registered(run.path)
    if given is not None:
        path = str(given)
        same = [one.step for one in found if one.path in (path, str(Path(path).absolute()))]
        step = same[-1] if same else step_of(Path(path).name)
        if first_step is not None:
            return path, first_step
        if step is None:
            raise ValueError(
                f"the step of checkpoint {path!r} is not known: it was not registered and its "
                "name holds none; give first_step="
            )
        return path, step + 1
    there = [one for one in found if "://" in one.path or Path(one.path).exists()]
    early = [one for one in there if one.step <= blame.since]
    late = [one for one in there if one.step <= blame.begin]
    if not late:
        missing = f" ({len(found) - len(there)} are registered but not there)" if found else ""
        raise RunError(
            f"no checkpoint from step {blame.begin} or before is registered{missing}",
            path=run.path,
            remedy="Give checkpoint=, and first_step= where its name does not hold its step",
        )
    if not early:
        notes.append(
            f"No checkpoint is from before the lookback of {LOOKBACK_STEPS} steps: the one taken "
            "may hold harm already, and the effect is then smaller than the whole."
        )
    chosen = (early or late)[-1]
    return chosen.path, chosen.step + 1 if first_step is None else first_step


def _stretch(
    run: Run, first: int, last: int, blame: _Blame, named: list[str] | None, notes: list[str]
) -> Stretch:
    try:
        inside = replay_order(run, first=first, last=last)
    except RunError as error:  # its remedy is an option of the command line
        raise RunError(
            error.message, path=run.path, remedy="Give a checkpoint and steps= inside of it"
        ) from None
    if inside.n_missing:
        notes.append(f"Batches missing from the record of these steps: {inside.n_missing}.")
    n_steps = inside.rows["step"].n_unique()
    if n_steps < last + 1 - first:
        notes.append(f"The record has {n_steps:,} of the {last + 1 - first:,} steps.")
    low, high = max(0, first - POOL_STEPS), last + POOL_STEPS
    parts = replay_order(run, first=low, last=high).rows
    contents = (
        run.exposures(low, high)
        .filter(pl.col("state") == "trained")
        .select(*_EXPOSURE, "duplication", "repetition", "dup_of", "loss")
        .collect()
    )
    parts = parts.join(contents, on=_EXPOSURE, how="left", maintain_order="left")
    parts = contents_of(parts)
    implicated, tainted = _marks(parts, blame)
    stretch = stretch_of(parts, first=first, last=last, implicated=implicated, tainted=tainted)
    own = stretch.own
    if not own["implicated"].any():
        raise RunError(
            f"none of the implicated samples was trained on in steps {first} to {last}",
            path=run.path,
            remedy="Give another checkpoint, or more steps=",
        )
    n_before = int((implicated & (parts["step"] < first)).sum())
    if n_before:
        notes.append(
            f"{n_before:,} exposures of implicated samples are from before step {first:,}: the "
            "checkpoint holds them in every arm."
        )
    if named is not None:
        there = parts.filter(implicated & pl.col("step").is_between(first, last))["sample_id"]
        if there.n_unique() < len(named):
            notes.append(
                f"{there.n_unique():,} of the {len(named):,} samples named are in these steps."
            )
    if stretch.n_random < own["implicated"].sum():
        notes.append(
            f"Only {stretch.n_random:,} other samples are there for the random arm to leave out."
        )
    if not stretch.has_replacements:
        raise RunError(
            f"no sample of the {POOL_STEPS:,} steps before and after can replace those implicated",
            path=run.path,
            remedy="Replay fewer steps, or name fewer samples",
        )
    for arm in ARMS[1:]:
        n_foreign, n_again = stretch.compromises(arm, 0)
        if n_foreign or n_again:
            notes.append(
                f"Samples are short: of the replacements of arm {arm}, {n_foreign:,} are of "
                f"another source than what they replace, and {n_again:,} are shown again."
            )
    return stretch


def _marks(parts: pl.DataFrame, blame: _Blame) -> tuple[pl.Series, pl.Series]:
    """Of each part whether it is implicated, and whether it cannot replace one that is."""
    source = pl.col("source").fill_null(UNKNOWN_SOURCE)
    like = pl.lit(False)
    for name, mark in blame.marks.items():
        like = like | ((source == name) & mark.fill_null(False))
    blamed = source.is_in(list(blame.marks))
    who = parts.join(blame.keys, on=["attempt", "key"], how="semi")["who"].unique()
    marked = parts.with_columns(
        like=like,
        implicated=pl.col("who").is_in(who.implode()) | (like & (pl.col("step") > blame.since)),
    )
    contents = marked.filter("implicated")["content"].unique()
    same = pl.col("content").is_in(contents.implode())
    # What was named is tested as named; what is blamed, with the first of its copies.
    marked = marked.with_columns(
        implicated=pl.col("implicated") | (same & blamed), tainted=same | pl.col("like")
    )
    return marked["implicated"], marked["tainted"]


# -- training, and what is kept of it --------------------------------------------------------------


def _train(
    planned: ReplayPlan, train: Train, arm: str, seed: int, n_done: int
) -> list[tuple[int | None, str, float]]:
    batches = planned.batches(arm, seed)
    try:
        returned = train(planned.checkpoint, batches, seed)
        found = signals_of(returned)  # rows may be made as they are read
    except Exception as error:
        raise AuditorError(
            f"train failed in arm {arm}, seed {seed}: {type(error).__name__}: "
            f"{clean(str(error), 500)}",
            path=planned.run.path,
            remedy=f"Mend it and call replay again: the {n_done} trainings finished before it, of "
            f"{len(ARMS) * planned.n_seeds}, are kept",
        ) from error
    return found


def _check_judged(
    found: Iterable[tuple[int | None, str, float]], better: Mapping[str, str], arm: str, seed: int
) -> None:
    names = sorted({signal for _, signal, _ in found})
    if not set(names) & set(better):
        raise AuditorError(
            f"train returned {', '.join(map(clean, names))} in arm {arm}, seed {seed}: none of "
            f"the signals to judge, {', '.join(map(clean, better))}",
            remedy='Return one of these, or say which to judge: better={"name": "lower"}',
        )


def _check_whole(outcomes: pl.DataFrame, n_seeds: int) -> None:
    counts = outcomes.group_by("signal").len().filter(pl.col("len") < len(ARMS) * n_seeds)
    if counts.is_empty():
        return
    signal = counts["signal"].sort()[0]
    there = set(outcomes.filter(pl.col("signal") == signal).select("arm", "seed").iter_rows())
    arm, seed = next((a, s) for s in range(n_seeds) for a in ARMS if (a, s) not in there)
    raise AuditorError(
        f"train returned no {clean(signal)} for arm {arm}, seed {seed}, but did for others",
        remedy="Return the same signals always; one that is not finite as nan",
    )


@dataclass
class _Kept:
    """The trainings finished so far, a small JSON file each.

    They are told apart by the checkpoint, the source of ``train`` and the batches. What ``train``
    calls is not looked at.
    """

    planned: ReplayPlan
    train: Train
    notes: list[str] = field(default_factory=list)
    _paths: dict[tuple[str, int], Path] = field(default_factory=dict)

    def path(self, arm: str, seed: int) -> Path:
        if (arm, seed) not in self._paths:
            checkpoint = self.planned.checkpoint
            told = [str(VERSION), checkpoint, _state(checkpoint), _source(self.train)]
            folder = hashlib.sha256("\n".join(told).encode()).hexdigest()[:12]
            digest = self.planned.batches(arm, seed).digest[:12]
            name = f"{arm}-seed-{seed:05d}-{digest}.json"
            self._paths[arm, seed] = self.planned.run.derived / "replay" / folder / name
        return self._paths[arm, seed]

    def read(self, arm: str, seed: int) -> list[tuple[int | None, str, float]] | None:
        try:
            noted = json.loads(self.path(arm, seed).read_text(encoding="utf-8"))
            return [
                (None if step is None else int(step), str(signal), float(value))
                for step, signal, value in noted["signals"]
            ]
        except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged: train again
            return None

    def write(self, arm: str, seed: int, signals: list[tuple[int | None, str, float]]) -> None:
        value = {"schema_version": VERSION, "arm": arm, "seed": seed, "signals": signals}
        try:
            write_json(self.path(arm, seed), value)
        except OSError as error:
            note = f"Trainings could not be kept: {error}."
            if note not in self.notes:
                self.notes.append(note)


def _state(checkpoint: str) -> str:
    """Size and time of a checkpoint that is one local file, so that a new one is told apart."""
    try:
        stat = Path(checkpoint).stat()
    except OSError:
        return ""
    return f"{stat.st_size} {stat.st_mtime_ns}" if Path(checkpoint).is_file() else ""


def _source(train: object) -> str:
    while hasattr(train, "func"):  # functools.partial
        train = train.func
    named = inspect.unwrap(train) if callable(train) else train
    for one in (named, type(named)):
        try:
            return inspect.getsource(one)  # type: ignore[arg-type]
        except (OSError, TypeError):
            continue
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -- words --------------------------------------------------------------------------------------


def _against_random(effects: Iterable[Effect]) -> list[Effect]:
    return [one for one in effects if one.versus == "without_random" and one.better is not None]


def _verdict(effects: Sequence[Effect], n_seeds: int) -> str:
    judged = _against_random(effects)
    sentences = []
    if any(one.finding == "better" for one in judged):
        sentences.append("The implicated samples did harm: a cause, not only an association.")
    elif all(one.finding in ("no interval", "undefined") for one in judged):
        sentences.append("Effect only: nothing is said of a cause.")
    else:
        sentences.append("No cause is shown.")
    sentences += [_told(one, n_seeds) for one in judged]
    return " ".join(sentences)


def _told(effect: Effect, n_seeds: int) -> str:
    name = clean(effect.signal)
    if effect.finding == "undefined":
        n = sum(value - value != 0 for value in effect.differences)
        return f"{name} is not finite in one of the two arms under {n} of {n_seeds} seeds."
    direction = "lower" if effect.mean < 0 else "higher"
    what = (
        f"{name} ended {abs(effect.mean):.4g} {direction} without the implicated samples than "
        "without as many others"
    )
    if effect.low is None or effect.high is None:
        why = "one seed bears" if n_seeds == 1 else "seeds that change nothing bear"
        return f"{what}; {why} no interval."
    interval = f"{_percent(effect.level)} interval {effect.low:+.4g} to {effect.high:+.4g}"
    meaning = {
        "better": "",
        "worse": ": the samples did this signal good",
        "none shown": ": the interval holds zero",
    }[effect.finding]
    return f"{what} ({interval}, {n_seeds} seeds){meaning}."


def _table(result: ReplayResult, signal: str) -> list[str]:
    own = result.outcomes.filter(pl.col("signal") == signal)
    values = {(arm, seed): v for arm, seed, v in own.select("arm", "seed", "value").iter_rows()}
    effects = [one for one in result.effects if one.signal == signal]
    better = effects[0].better
    aim = "not judged" if better is None else f"{better} is better"
    lines = [
        f"{clean(signal)} ({aim})",
        "  " + f"{'':8}" + "".join(f"{arm.replace('_', ' '):>20}" for arm in ARMS),
    ]
    for seed in range(result.plan.n_seeds):
        cells = "".join(f"{values[arm, seed]:>20.4f}" for arm in ARMS)
        lines.append(f"  {f'seed {seed}':8}{cells}")
    for effect in effects:
        interval = "no interval"
        if effect.low is not None and effect.high is not None:
            interval = f"{_percent(effect.level)} interval {effect.low:+.4f} to {effect.high:+.4f}"
        lines.append(
            f"  {effect.arm.replace('_', ' ')} less {effect.versus.replace('_', ' ')}: "
            f"{effect.mean:+.4f} ({interval})"
        )
    return lines


def _percent(level: float) -> str:
    return f"{100 * level:.3g}%"
