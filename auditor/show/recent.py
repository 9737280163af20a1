"""The latest of what a run recorded, fed frame by frame and bounded in memory.

What a frame holds is told where it is written: ``record/exposures.py`` and ``record/recorder.py``.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from auditor.explain.composition import REPETITIVE_SHARE
from auditor.ledger import NULL, Frame
from auditor.measure.agreement import least_equal
from auditor.measure.grading import DEFAULT_POLICY, Alert, Grade, Policy
from auditor.measure.judging import JUDGED, Judge, StepJudge, measured_of
from auditor.schema import DUPLICATE_SIMILARITY, STATES, UNKNOWN_SOURCE, UNSCORED
from auditor.show import wording

HISTORY: Final = 2_000
"""Points kept of each series."""

BATCHES: Final = 64
"""Batches kept of each rank."""

NOTICES: Final = 200
"""Changes of grade or alert kept."""

SOURCES: Final = 4_096
"""Sources told apart; what comes from further ones counts as ``OTHER_SOURCES``."""

OTHER_SOURCES: Final = "other sources"

_ATTENTION: Final = ("entropy_mean", "entropy_normalised", "entropy_min", "max_logit")
_READ: Final = JUDGED | {"grade", *_ATTENTION}

_PLACES: Final = 2**21
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)
_SKIPPED: Final = STATES.index("skipped")
_DUPLICATE: Final = least_equal(DUPLICATE_SIMILARITY)


@dataclass(frozen=True)
class Point:
    """A value of a series; ``layer`` and ``head`` where it was the lowest or highest of many."""

    attempt: int
    step: int
    value: float
    layer: int | None = None
    head: int | None = None


@dataclass(frozen=True)
class Graded:
    """The grade of a sampled step, measured on ``kind``."""

    attempt: int
    kind: str
    grade: Grade

    @property
    def step(self) -> int:
        return self.grade.step


@dataclass(frozen=True)
class Notice:
    """Something to tell: a change of grade (``level`` is empty) or an alert."""

    attempt: int
    step: int
    level: str  # watch, danger, recovered
    text: str


class SignalHistory:
    """Series, grades, their changes and alerts of one rank.

    ``series`` has per-step signals by name, ``entropy_mean``, ``entropy_normalised`` (mean over
    blocks), ``entropy_min``, ``max_logit`` (with their block and head), ``probe_loss`` and
    ``input_diversity``. What a later attempt went back behind is dropped.
    """

    def __init__(self, history: int = HISTORY) -> None:
        self._history = history
        self.series: dict[str, deque[Point]] = {}
        self.graded: deque[Graded] = deque(maxlen=history)
        self.changes: deque[Notice] = deque(maxlen=NOTICES)
        self._alerts: deque[Notice] = deque(maxlen=NOTICES)
        self.policies: dict[int, Policy] = {}  # by attempt, where it has noted one
        self.step: tuple[int, int] | None = None  # attempt and step of the latest per-step signal
        self._attempt: int | None = None
        self._judge: Judge | None = None  # None before the attempt's first graded sample
        self._step_judge = StepJudge()

    @property
    def alerts(self) -> Sequence[Notice]:
        """As the monitor raises them, and that of the last step, which is not judged for good."""
        pending: list[Notice] = []
        if self._step_judge.expects_alert and self._attempt is not None:
            ended = copy.deepcopy(self._step_judge).end()
            pending = [_notice(self._attempt, alert) for alert in ended]
        return [*self._alerts, *pending]

    def points(self, name: str) -> Sequence[Point]:
        return self.series.get(name, ())

    def take(self, attempt: int, frame: Frame) -> None:
        """Add a frame of this attempt's signals; other kinds of frames are passed over."""
        if attempt < (self._attempt or 0):
            return  # what an earlier attempt left, come to light late
        if frame.kind == "scalars" and len(frame.columns["step"]):
            self._begin(attempt, int(frame.columns["step"][0]))
            self._take_scalars(attempt, frame)
        elif frame.kind == "signals":
            self._begin(attempt, int(frame.scalars["step"]))
            self._take_sample(attempt, frame)

    def _begin(self, attempt: int, step: int) -> None:
        """Drop what an attempt that begins at this step went back behind."""
        if attempt != self._attempt:
            self._attempt = attempt
            every: list[deque[Any]] = [*self.series.values(), self.graded]
            for facts in (*every, self.changes, self._alerts):
                _drop_void(facts, attempt, step)
            self._judge = None
            self._step_judge = StepJudge(self.policies.get(attempt, DEFAULT_POLICY))

    def _take_scalars(self, attempt: int, frame: Frame) -> None:
        steps = frame.columns["step"].tolist()
        for name, values in frame.columns.items():
            if name == "step":
                continue
            for step, value in zip(steps, values.tolist(), strict=True):
                if name == "loss" or not math.isnan(value):  # other NaN: not measured
                    self._add(name, Point(attempt, step, value))
        for place, step in enumerate(steps):
            alerts = self._step_judge.update(step, measured_of(frame.columns, place))
            self._alerts.extend(_notice(attempt, alert) for alert in alerts)
        self.step = (attempt, steps[-1])

    def _take_sample(self, attempt: int, frame: Frame) -> None:
        step = int(frame.scalars["step"])
        rows = _rows(frame)
        kind = next((row["kind"] for row in rows if row["signal"] == "grade"), None)
        for name, pick in zip(_ATTENTION, (_mean, _mean, _lowest, _highest), strict=True):
            of_name = [row for row in rows if row["signal"] == name]
            # Attention of the graded batch where it was seen there, else of the other.
            chosen = [row for row in of_name if row["kind"] == kind] or of_name
            if chosen:
                self._add(name, pick(attempt, step, chosen))
        for row in rows:
            if row["signal"] == "probe_loss":
                self._add("probe_loss", Point(attempt, step, row["value"]))
            elif (row["signal"], row["layer"], row["kind"]) == ("sample_rank", -1, "live"):
                self._add("input_diversity", Point(attempt, step, row["value"]))
        if kind is not None:
            self._take_grade(attempt, step, kind, rows)

    def _take_grade(
        self, attempt: int, step: int, kind: str, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        # The record has the grade, not the ratio: both come out of the same definition again.
        if self._judge is None:
            policy = self.policies.get(attempt, DEFAULT_POLICY)
            self._judge = Judge(policy, graded=kind)
            before = None
        else:
            before = self.graded[-1].grade if self.graded else None
        judgement = self._judge.update(step, rows)
        if judgement is None:
            return
        grade = judgement.grade
        for facts in (self.graded, self.changes):
            _drop_void(facts, attempt, step)
        self.graded.append(Graded(attempt, kind, grade))
        if before is not None and before.grade != grade.grade and grade.alert != "warming":
            text = f"grade {wording.grade(before.grade)} -> {wording.grade(grade.grade)}"
            if grade.layer is not None:
                ratio = f", ratio {grade.ratio:.2f}" if math.isfinite(grade.ratio) else ""
                text += f"{ratio} in {wording.block(grade.layer)}"
            self.changes.append(Notice(attempt, step, "", text))
        self._alerts.extend(_notice(attempt, alert) for alert in judgement.alerts)

    def _add(self, name: str, point: Point) -> None:
        points = self.series.setdefault(name, deque(maxlen=self._history))
        _drop_void(points, point.attempt, point.step)
        points.append(point)


def _notice(attempt: int, alert: Alert) -> Notice:
    text = alert.message.removeprefix(f"step {alert.step}: ")
    return Notice(attempt, alert.step, alert.level, text)


def _drop_void(facts: deque[Any], attempt: int, step: int) -> None:
    while facts and _is_void(facts[-1].attempt, facts[-1].step, attempt, step):
        facts.pop()


def _is_void(old_attempt: int, old_step: int, attempt: int, step: int) -> bool:
    """Whether a new fact makes an old one void: it was trained, or measured, again."""
    if attempt == old_attempt:
        return step == old_step
    return attempt > old_attempt and step <= old_step


def _rows(frame: Frame) -> list[dict[str, Any]]:
    """Rows of a sampled step that are shown or judged, of the whole sequence."""
    signals = frame.strings["signal"]
    segments = frame.strings.get("segment") or [None] * len(signals)
    at = [i for i, name in enumerate(signals) if name in _READ and segments[i] is None]
    kinds, variants = frame.strings["kind"], frame.strings["variant"]
    values = frame.columns["value"].tolist()
    layers, heads = frame.columns["layer"].tolist(), frame.columns["head"].tolist()
    return [
        {
            "signal": signals[i],
            "kind": kinds[i],
            "variant": variants[i],
            "value": values[i],
            "layer": None if layers[i] == NULL else layers[i],
            "head": None if heads[i] == NULL else heads[i],
        }
        for i in at
    ]


def _mean(attempt: int, step: int, rows: Sequence[Mapping[str, Any]]) -> Point:
    return Point(attempt, step, sum(row["value"] for row in rows) / len(rows))


def _lowest(attempt: int, step: int, rows: Sequence[Mapping[str, Any]]) -> Point:
    # A value that is not finite is the worst there is.
    row = min(rows, key=lambda one: one["value"] if math.isfinite(one["value"]) else -math.inf)
    return Point(attempt, step, row["value"], row["layer"], row["head"])


def _highest(attempt: int, step: int, rows: Sequence[Mapping[str, Any]]) -> Point:
    row = max(rows, key=lambda one: one["value"] if math.isfinite(one["value"]) else math.inf)
    return Point(attempt, step, row["value"], row["layer"], row["head"])


class SourceTable:
    """The source of samples by key, in bounded memory: of two keys at one place, the later."""

    def __init__(self) -> None:
        self.names: list[str] = [UNKNOWN_SOURCE, OTHER_SOURCES]
        self._number = {name: i for i, name in enumerate(self.names)}
        self._keys = np.full(_PLACES, -1, np.int64)
        self._sources = np.zeros(_PLACES, np.uint16)

    def take(self, attempt: int, frame: Frame) -> None:
        """Add the samples of a frame; other kinds of frames are passed over."""
        if frame.kind != "samples":
            return
        keys = _apart(attempt, frame.columns["key"].astype(np.int64))
        sources = frame.strings.get("source")
        numbers = (
            np.zeros(len(keys), np.uint16)
            if sources is None
            else np.asarray([self._numbered(name) for name in sources], np.uint16)
        )
        places = _places(keys)
        self._keys[places] = keys
        self._sources[places] = numbers

    def of(self, attempt: int, keys: np.ndarray) -> np.ndarray:
        """Index into ``names`` of each key i64 [n]; -1 where the sample is not, or no more, known.

        Nothing was ever known of samples that a dataset does not describe.
        """
        keys = _apart(attempt, keys)
        places = _places(keys)
        return np.where(self._keys[places] == keys, self._sources[places].astype(np.int64), -1)

    def _numbered(self, name: str | None) -> int:
        if name is None:
            return 0
        name = name[:256]
        if name not in self._number:
            if len(self.names) >= SOURCES:
                return 1
            self._number[name] = len(self.names)
            self.names.append(name)
        return self._number[name]


def _apart(attempt: int, keys: np.ndarray) -> np.ndarray:
    """Keys mean something inside their attempt only: those of others become other numbers."""
    return keys ^ np.int64((attempt * 0x2545F4914F6CDD1D) % 2**62)


def _places(keys: np.ndarray) -> np.ndarray:
    return (keys.view(np.uint64) * _SPREAD) >> np.uint64(64 - (_PLACES.bit_length() - 1))


@dataclass
class _Batch:
    state: int
    keys: np.ndarray
    n_scored: int = 0
    n_duplicate: int = 0
    n_repetitive: int = 0
    repetition: float = 0.0  # sum over scored rows


class BatchHistory:
    """The latest batches of one attempt and rank, and the step they came to."""

    def __init__(self, attempt: int, n_batches: int = BATCHES) -> None:
        self.attempt = attempt
        self.step: int | None = None  # the latest that closed
        self.first_step: int | None = None
        self._n_batches = n_batches
        self._batches: dict[int, _Batch] = {}

    def take(self, frame: Frame) -> None:
        """Add a frame of the attempt's exposures; kinds not needed here are passed over."""
        columns = frame.columns
        if frame.kind == "batches":
            parts = _split(columns["key"].astype(np.int64), columns["n_samples"])
            numbers, states = columns["batch"].tolist(), columns["state"].tolist()
            for number, state, keys in zip(numbers, states, parts, strict=True):
                if state != _SKIPPED:
                    self._batches[number] = _Batch(state, keys)
            for number in sorted(self._batches)[: -self._n_batches]:
                del self._batches[number]
        elif frame.kind == "scores":
            self._take_scores(columns)
        elif frame.kind == "steps":
            trained = columns["step"][columns["state"] == STATES.index("trained")].tolist()
            if trained:
                self.step = trained[-1]
                self.first_step = trained[0] if self.first_step is None else self.first_step
        elif frame.kind == "renumbered" and self.step in (closed := columns["closed"].tolist()):
            self.step = columns["step"].tolist()[len(closed) - 1 - closed[::-1].index(self.step)]

    def _take_scores(self, columns: Mapping[str, np.ndarray]) -> None:
        sizes = columns["n_samples"]
        equal = np.maximum(
            np.where(columns["equal_batch"] == UNSCORED, 0, columns["equal_batch"]),
            np.where(columns["equal_window"] == UNSCORED, 0, columns["equal_window"]),
        )
        scored = columns["equal_batch"] != UNSCORED
        repetition = columns["repetition"] / 65535
        for number, known, n_equal, share in zip(
            columns["batch"].tolist(),
            _split(scored, sizes),
            _split(equal, sizes),
            _split(repetition, sizes),
            strict=True,
        ):
            if number in self._batches:
                batch = self._batches[number]
                batch.n_scored = int(known.sum())
                batch.n_duplicate = int((known & (n_equal >= _DUPLICATE)).sum())
                batch.n_repetitive = int((known & (share >= REPETITIVE_SHARE)).sum())
                batch.repetition = float(share[known].sum())

    @property
    def batches(self) -> list[_Batch]:
        """In the order they were delivered."""
        return [self._batches[number] for number in sorted(self._batches)]


def _split(values: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.cumsum(sizes.astype(np.int64))[:-1]) if len(sizes) else []


@dataclass(frozen=True)
class Composition:
    """What the latest batches held, over the ranks followed.

    ``sources``: samples by source, most first, of the ``n_described`` samples whose source or
    whose having none is known. ``duplicated``: share of the scored samples per batch, in order, of
    all ranks together; None where none was scored.
    """

    n_batches: int = 0
    n_samples: int = 0
    n_described: int = 0
    n_scored: int = 0
    n_duplicate: int = 0
    n_repetitive: int = 0
    repetition: float = 0.0  # mean over scored samples
    only_drawn: bool = False
    sources: Sequence[tuple[str, int]] = ()
    duplicated: Sequence[float | None] = field(default=())


def composition(histories: Sequence[BatchHistory], table: SourceTable) -> Composition:
    """Sum the latest batches of all these ranks up."""
    batches = [batch for history in histories for batch in history.batches]
    if not batches:
        return Composition()
    sources: Counter[str] = Counter()
    n_described = 0
    for history in histories:
        if held := history.batches:
            found = table.of(history.attempt, np.concatenate([batch.keys for batch in held]))
            found = found[found >= 0]
            n_described += len(found)
            for number, n in zip(*np.unique(found, return_counts=True), strict=True):
                sources[table.names[number]] += int(n)
    n_scored = sum(batch.n_scored for batch in batches)
    return Composition(
        n_batches=len(batches),
        n_samples=sum(len(batch.keys) for batch in batches),
        n_described=n_described,
        n_scored=n_scored,
        n_duplicate=sum(batch.n_duplicate for batch in batches),
        n_repetitive=sum(batch.n_repetitive for batch in batches),
        repetition=sum(batch.repetition for batch in batches) / max(n_scored, 1),
        only_drawn=all(batch.state == STATES.index("drawn") for batch in batches),
        sources=sources.most_common(),
        duplicated=_duplicated(histories),
    )


def _duplicated(histories: Sequence[BatchHistory]) -> list[float | None]:
    """By how long ago the batch was: the latest of every rank go together."""
    by_age: dict[int, list[_Batch]] = {}
    for history in histories:
        for age, batch in enumerate(reversed(history.batches)):
            by_age.setdefault(age, []).append(batch)
    shares: list[float | None] = []
    for age in sorted(by_age, reverse=True):
        n = sum(batch.n_scored for batch in by_age[age])
        shares.append(sum(batch.n_duplicate for batch in by_age[age]) / n if n else None)
    return shares
