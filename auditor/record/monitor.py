"""``GradeMonitor``: signals and grades beside training, from a forward now and then."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import math
import operator
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from auditor.measure.baseline import memorisation
from auditor.measure.grading import DEFAULT_POLICY, Alert, Grade, Policy, heads_fell
from auditor.measure.judging import Judge, Judgement, StepJudge, measured_of
from auditor.measure.recovery import Checkpoint, RecoveryPlan, plan
from auditor.record.capture import Captured
from auditor.record.checkpoints import append_checkpoint
from auditor.record.exporting import Exporter, Exporting, metrics_of
from auditor.record.live import LiveForward, call_on, looking, random_state_kept
from auditor.record.recorder import Recorder, recorder_for
from auditor.record.schedule import Schedule
from auditor.record.sharding import agreement, is_sharded, whole
from auditor.record.signals import MIN_ROWS, Signals, frame_of, scalars_frame
from auditor.record.sites import describe, eager, find_blocks, named_blocks
from auditor.record.transfer import fetched, to_host

log = logging.getLogger("auditor")

SCALARS_STEPS: Final = 50
"""Losses, norms and learning rates are copied from the device together, this often."""

EXPORTERS_CLOSE_S: Final = 10.0
"""How long closing waits for exporters."""

KEPT: Final = 4096
"""Checkpoints, and learning rates of the latest steps, that a recovery plan knows."""

HISTORY: Final = 100_000
"""Grades and alerts kept in memory, at least."""

NOT_KNOWN: Final = float("nan")
"""As a loss or gradient norm: this very object says that the caller does not know it. Any other NaN
is a value that was measured, and is not finite."""

WAITING_BYTES: Final = 512 * 2**20
"""Activations of samples that wait to be analysed, at most; one sample always may."""

ALERTS_KEPT: Final = 64
"""Alerts that wait for the training thread at most."""

Action = Callable[[Alert, "GradeMonitor"], Any]


@dataclass(frozen=True)
class _Scalars:
    step: int
    loss: Tensor | None
    grad_norm: Tensor | None
    lr: float | Tensor | None


class GradeMonitor:
    """Grade a model while it trains.

    Example:
        monitor = GradeMonitor(model, run="run/", every=200, probe=held_out_batch)
        for batch in loader:
            loss = model(batch).loss
            loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            monitor.step(loss, optimizer=optimizer, grad_norm=grad_norm)
            optimizer.step()
            optimizer.zero_grad()

    Args:
        model: the model, wrapped or not; its transformer blocks are found by structure.
        run: the run directory, shared with the ``AuditedSampler`` on the same path.
        probe: a held-out batch, or a callable that returns one, measured on sampled steps in
            evaluation mode without gradients. Without it the run is live-only. Its samples must not
            be trained on: token samples of equal content are counted as a gap of the record.
        probe_loss: ``probe_loss(model, probe)`` runs the model on the probe and returns its loss.
            By default the model is called on the probe (``**`` of a mapping, ``*`` of a tuple) and
            the loss is the output's ``loss`` where it has one.
        every: steps between samples. Signals and grades exist on sampled steps, losses and
            learning rates on all. Once a signal is suspicious, sampling is denser for a while, at
            most 50 steps apart.
        sites: the blocks, where they are not found: module paths, patterns (``layers.*``) or
            modules, in order of depth.
        policy: thresholds of grades and alerts.
        budget: share of the time that the denser samples may take, as a hard cap.
        on_alert: actions, each called as ``action(alert, monitor)`` inside :meth:`step`, on the
            training thread, once the alert is known. None by default; ready-made ones are in
            :mod:`auditor.record.actions`.
        exporters: where signals are sent as well, by rank 0; see :mod:`auditor.record.exporters`.

    ``grade`` is the latest grade, computed on the recorder's thread a moment after its step;
    ``grades`` and ``alerts`` are those of this process, the latest 100,000 at least.
    ``should_stop`` is set by an action that wants training to end; nothing here ever ends it.

    Raises:
        ValueError: ``every`` or ``budget`` is out of range, the model has no transformer blocks, or
            ``sites`` names what it does not have.
        RunClaimedError: another live process records this run and rank.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        run: str | PathLike[str],
        probe: Any = None,
        probe_loss: Callable[[nn.Module, Any], Tensor] | None = None,
        every: int = 200,
        sites: Sequence[str | nn.Module] | None = None,
        policy: Policy = DEFAULT_POLICY,
        budget: float = 0.01,
        on_alert: Action | Sequence[Action] = (),
        exporters: Sequence[Exporter] = (),
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every!r}")
        if not 0 <= budget <= 1:
            raise ValueError(f"budget must be a share of the time from 0 to 1, got {budget!r}")
        self._model = eager(model)
        self.sites = find_blocks(self._model) if sites is None else named_blocks(self._model, sites)
        if not self.sites:
            raise ValueError(
                f"no transformer blocks found in {type(self._model).__name__}: "
                "expected a ModuleList of equal blocks; name them by sites=['path.*']"
            )
        self._run = run
        self._recorder: Recorder = recorder_for(run)
        self._closed = False
        self.should_stop = False
        self._probe = probe
        self._probe_loss = probe_loss
        self._policy = policy
        self._actions = tuple(on_alert) if isinstance(on_alert, Sequence) else (on_alert,)
        sharded = is_sharded(self._model)
        self._schedule = Schedule(every, budget, agree=agreement(self._model) if sharded else None)
        self._on_cpu = not any(p.device.type == "cuda" for p in self._model.parameters())
        of_first_rank = exporters if self._recorder.attempt.rank == 0 else ()
        self._exporting = Exporting(of_first_rank, _unless_gone(self._failed))
        self._live = LiveForward(model, self.sites, self._failed)
        self._scalars: list[_Scalars] = []
        self._last_step: int | None = None
        # Two counters, each written by one thread only, instead of a lock.
        self._bytes_sent = self._bytes_analysed = 0
        self._checkpoints: collections.deque[Checkpoint] = collections.deque(maxlen=KEPT)
        self._rates: collections.deque[tuple[int, float]] = collections.deque(maxlen=KEPT)
        self.grades: list[Grade] = []
        self.alerts: list[Alert] = []
        self._new_alerts: collections.deque[Alert] = collections.deque(maxlen=ALERTS_KEPT)
        # What follows belongs to the recorder's thread.
        self._signals = Signals(self.sites)
        self._judge = Judge(policy)
        self._has_enough_rows = True
        self._step_judge = StepJudge(policy)
        self._hurry = False  # scalars are to be sent at the next step
        self._losses: collections.deque[float] = collections.deque(maxlen=SCALARS_STEPS)
        self._note()
        self._live.arm()

    def describe(self) -> str:
        """A table of what was found in the model: blocks, and of each what was seen so far."""
        return describe(self._model, self.sites, self._signals.seen, self._signals.uses)

    @property
    def last_step(self) -> int | None:
        """The step that was closed last, None before the first."""
        return self._last_step

    def checkpoint(self, path: str | PathLike[str], step: int | None = None) -> None:
        """Register a checkpoint, so that a recovery plan can name it.

        Args:
            path: of the checkpoint, file or folder.
            step: the number of updates it holds is ``step + 1``: by default the step closed last.
        """
        try:
            step = self._last_step if step is None else step
            if step is None:
                raise ValueError("a checkpoint before the first step needs step=")
            attempt = self._recorder.attempt
            absolute = str(Path(path).absolute())
            self._checkpoints.append(Checkpoint(absolute, step, attempt=attempt.number))
            write = functools.partial(
                append_checkpoint, attempt.run, absolute, step,
                attempt=attempt.number, rank=attempt.rank,
            )  # fmt: skip
            self._recorder.submit(write, what="checkpoints")
        except Exception as error:
            self._failed("GradeMonitor.checkpoint", error)

    def recovery_plan(self) -> RecoveryPlan:
        """What to do about the latest drop, from this process's grades and checkpoints.

        ``print(monitor.recovery_plan())`` tells it in words; ``auditor recover run/`` knows earlier
        attempts as well, and moves the onset to that of other signals that fell before the grade.
        """
        found = plan(
            list(self.grades), list(self._checkpoints), learning_rates=dict(self._rates.copy()),
            entropy_collapsed=heads_fell(list(self.alerts)), policy=self._policy,
        )  # fmt: skip
        if found.drop is None:
            return found
        return replace(found, summary=f"{found.summary} {_ONSET_OF_GRADE}")

    def _failed(self, place: str, error: Exception) -> None:
        self._recorder.failed(place, error)

    def _note(self) -> None:
        noted = _monitors.get(self._recorder)
        other = None if noted is None else noted()
        if other is not None and other is not self and not other._closed:
            log.warning(
                "auditor: two monitors on %s count its steps together; give each model a run of "
                "its own",
                self._run,
            )
        _monitors[self._recorder] = weakref.ref(self)
        self._recorder.attempt.note(
            monitor={
                "every": self._schedule.every,
                "probe": self._probe is not None,
                "blocks": [site.path for site in self.sites],
                "policy": asdict(self._policy),
                "torch": torch.__version__,
            }
        )
        self._recorder.hold_out(_token_rows(self._probe))
        self._recorder.on_close.append(self._end_scalars)
        self._recorder.on_stopped.append(self._close_exporters)

    @property
    def grade(self) -> Grade | None:
        """The latest grade, None before the first."""
        return self.grades[-1] if self.grades else None

    def step(
        self,
        loss: Tensor | float,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        step: int | None = None,
        grad_norm: Tensor | float | None = None,
        sample_loss: Tensor | None = None,
    ) -> None:
        """Close a training step: call once per optimizer update, after backward.

        The place is between ``backward`` and ``optimizer.step()``, or right after the latter; with
        ``optimizer`` given, the optimizer's own step decides whether the update happened.

        Args:
            loss: the step's loss, a scalar; not synchronised. ``NOT_KNOWN`` where there is none.
            optimizer: gives the learning rate, and tells trained steps from discarded ones. With
                one that Accelerate prepared, calls on micro-batches that close no step do nothing.
            step: the loop's own step number; by default steps are counted from 0.
            grad_norm: the norm before clipping, as ``clip_grad_norm_`` returns it. Without it the
                norm is taken on sampled steps only; with ``NOT_KNOWN`` it is not taken at all.
            sample_loss: per-sample losses, [samples since the last step], kept with the exposures.
        """
        if self._closed or _is_accumulating(optimizer):
            return
        try:
            if self._recorder.closed:  # by the sampler's close(): training goes on, so do we
                self._recorder = recorder_for(self._run)
                self._bytes_sent = self._bytes_analysed  # what it did not get to is lost
                # Another attempt, which is judged by its own past.
                self._judge, self._step_judge = Judge(self._policy), StepJudge(self._policy)
                self._note()
            self._step(loss, optimizer, step, grad_norm, sample_loss)
        except Exception as error:
            self._failed("GradeMonitor.step", error)

    def close(self) -> None:
        """Write what is waiting and give the run directory back; also done when Python exits.

        Nothing but the closed monitor itself holds the model from then on.
        """
        self._closed = True
        try:
            self._live.disarm()
        except Exception as error:
            self._failed("GradeMonitor.close", error)
        recorder = self._recorder
        recorder.close()
        # The sampler may hold the recorder for as long as the loop has its loader.
        for hooks, own in (
            (recorder.on_close, self._end_scalars),
            (recorder.on_stopped, self._close_exporters),
        ):
            with contextlib.suppress(ValueError):
                hooks.remove(own)

    def _close_exporters(self) -> None:
        self._exporting.close(EXPORTERS_CLOSE_S)
        if self._exporting.dropped:
            self._recorder.counts["dropped_points"] = self._exporting.dropped

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until everything so far is on disk and graded; False when it took too long."""
        self._send_scalars()
        return self._recorder.drain(timeout_s)

    def _step(
        self,
        loss: Tensor | float,
        optimizer: torch.optim.Optimizer | None,
        step: int | None,
        grad_norm: Tensor | float | None,
        sample_loss: Tensor | None,
    ) -> None:
        pending = self._recorder.pending
        step = None if step is None else operator.index(step)
        step = self._recorder.step_of_backward(step, optimizer)
        if sample_loss is not None:
            self._note_sample_loss(pending or self._recorder.last_batches, sample_loss)
        sampled = self._schedule.is_sampled(step)
        if sampled:
            extra = self._schedule.is_extra(step)
            self._schedule.sampled(step)
            self._sample(step, extra=extra)
            if grad_norm is None:
                grad_norm = _gradient_norm(self._model)
        self._scalars.append(
            _Scalars(
                step,
                self._told("loss", lambda: _loss_of(loss)),
                self._told("grad_norm", lambda: _mean_of(grad_norm)),
                self._told("lr", lambda: _rate_of(optimizer)),
            )
        )
        if sampled or self._hurry or len(self._scalars) >= SCALARS_STEPS:
            self._hurry = False
            self._send_scalars()
        self._last_step = step
        if self._schedule.next_is_sampled(step):
            self._live.arm()
        self._act()

    def _told(self, what: str, value: Callable[[], Any]) -> Any:
        """A scalar that the loop gave; one that is none costs itself and not the others."""
        try:
            return value()
        except Exception as error:
            self._failed(f"GradeMonitor.step({what}=)", error)
            return None

    def _note_sample_loss(self, batches: Sequence[int], sample_loss: Any) -> None:
        def on_its_way() -> Callable[[], np.ndarray]:
            # A copy: the loop may use its own again before the recorder has read it.
            losses = torch.as_tensor(sample_loss).detach().to(torch.float32, copy=True)
            return to_host(losses)

        fetch = self._told("sample_loss", on_its_way)
        if fetch is not None:
            self._recorder.submit(
                lambda: self._recorder.write_losses(batches, fetch()), what="losses"
            )

    def _sample(self, step: int, *, extra: bool) -> None:
        began = time.perf_counter()
        probe, probe_error = None, None
        try:
            with random_state_kept(self._model):
                probe = self._probe() if callable(self._probe) else self._probe
        except Exception as error:
            probe_error = error
        if self._schedule.agree(step, probe_error is not None) and probe_error is None:
            probe_error = RuntimeError("the probe failed on another rank")
        try:
            live = self._live.take()
        except Exception as error:
            live = None
            self._failed("the training batch", error)
        seen, probe_loss = None, None
        if probe_error is not None:
            self._failed("the probe", probe_error)
        elif probe is not None:
            seen, probe_loss = self._run_probe(probe)
        try:
            work = functools.partial(
                self._analyse,
                step,
                None if live is None else fetched(live),
                None if seen is None else fetched(seen),
                probe_loss,
                time.perf_counter() - began if extra else None,
            )
            self._submit(work, sum(one.n_bytes for one in (live, seen) if one is not None))
        except Exception as error:  # the gradient norm that follows may be a collective
            self._failed("a sample", error)

    def _submit(self, work: Callable[[int], None], n_bytes: int) -> None:
        """Leave a sample to the recorder's thread, unless that is too far behind."""
        waiting = self._bytes_sent - self._bytes_analysed
        if waiting and waiting + n_bytes > WAITING_BYTES:
            self._recorder.count(
                "dropped_samples",
                "samples come faster than they are analysed; some are dropped and counted. Raise "
                "every=",
            )
        elif self._recorder.submit(functools.partial(work, n_bytes), what="samples"):
            self._bytes_sent += n_bytes

    def _act(self) -> None:
        """Call the actions for alerts that became known since the last step."""
        while self._new_alerts:
            alert = self._new_alerts.popleft()
            for action in self._actions:
                try:
                    action(alert, self)
                except Exception as error:
                    name = getattr(action, "__name__", type(action).__name__)
                    self._failed(f"action {name}", error)

    # -- the probe -------------------------------------------------------------------------

    def _run_probe(self, batch: Any) -> tuple[Captured | None, Tensor | None]:
        try:
            with looking(self._model, self.sites, self._failed) as captured:
                if self._probe_loss is not None:
                    loss: Any = self._probe_loss(self._model, batch)
                else:
                    loss = getattr(call_on(self._model, batch), "loss", None)
            return captured, None if loss is None else whole(torch.as_tensor(loss))
        except Exception as error:
            self._failed("the probe", error)
            return None, None

    # -- the recorder's thread -------------------------------------------------------------

    def _analyse(
        self,
        step: int,
        live: Mapping[str, Any] | None,
        probe: Mapping[str, Any] | None,
        probe_loss: Tensor | None,
        extra_s: float | None,
        n_bytes: int,
    ) -> None:
        self._bytes_analysed += n_bytes
        began = time.thread_time()
        rows: list[dict[str, Any]] = []
        warm = self._judge.is_warm(step)
        for kind, captured in (("live", live), ("probe", probe)):
            if captured is not None:
                rows += self._signals.of(kind, captured, warm=warm)
        if probe_loss is not None:
            value = float(probe_loss)
            gap = memorisation(value, self._losses)
            rows.append({"kind": "probe", "signal": "probe_loss", "value": value})
            rows.append({"kind": "probe", "signal": "memorisation", "value": gap})
        judgement = self._judge.update(step, rows)
        if judgement is not None:
            grade = judgement.grade
            value = np.nan if grade.grade is None else grade.grade
            row = {"kind": judgement.kind, "signal": "grade", "layer": grade.layer, "value": value}
            self._doubt_few_rows(rows, judgement.kind)
            rows.append(row)
            _append(self.grades, grade)
        self._recorder.append_signals(frame_of(step, rows))
        self._exporting.send(step, metrics_of(rows))
        if extra_s is not None:
            beside = time.thread_time() - began if self._on_cpu else 0.0
            self._schedule.spend(extra_s + beside)
        if judgement is not None:
            self._tell(judgement)

    def _doubt_few_rows(self, rows: Sequence[Mapping[str, Any]], kind: str) -> None:
        """Say it once where grades are of too few positions."""
        of_blocks = (row for row in rows if row["signal"] == "token_rank" and row["kind"] == kind)
        n = min(row["n_rows"] for row in of_blocks)
        if n < MIN_ROWS and self._has_enough_rows:
            self._has_enough_rows = False
            log.warning(
                "auditor: the %s is graded on %d %s of each block; below %d a grade says nothing. "
                "Give probe= more or longer samples",
                "probe" if kind == "probe" else "training batch",
                n,
                "position" if n == 1 else "positions",
                MIN_ROWS,
            )

    def _tell(self, judgement: Judgement) -> None:
        step = judgement.grade.step
        if judgement.suspicious:
            self._schedule.suspect(step)
        self._raise(judgement.alerts)
        over = self._schedule.n_over_budget
        if over and not self._recorder.counts["samples_over_budget"]:
            log.warning("auditor: step %d: denser sampling has used up its budget=", step)
        if over:
            self._recorder.counts["samples_over_budget"] = over

    def _raise(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            log.warning("auditor: %s", alert.message)
            _append(self.alerts, alert)
            self._new_alerts.append(alert)

    # -- per-step scalars ------------------------------------------------------------------

    def _send_scalars(self) -> None:
        scalars, self._scalars = self._scalars, []
        if not scalars:
            return
        columns = {
            name: _column([getattr(one, name) for one in scalars])
            for name in ("loss", "grad_norm", "lr")
        }

        def write() -> None:
            steps = [one.step for one in scalars]
            values = {name: fetch() for name, fetch in columns.items()}
            # In the record a norm that is NaN is one that was not measured.
            given = np.asarray([one.grad_norm is not None for one in scalars])
            values["grad_norm"][given & np.isnan(values["grad_norm"])] = np.inf
            has_loss = [one.loss is not None for one in scalars]
            self._losses.extend(itertools.compress(values["loss"].tolist(), has_loss))
            self._rates.extend(zip(steps, values["lr"].tolist(), strict=True))
            every = {"step": np.asarray(steps, np.int64), **values}
            for known, places in itertools.groupby(range(len(steps)), key=has_loss.__getitem__):
                at = list(places)
                names = [name for name in every if known or name != "loss"]
                part = {name: every[name][at] for name in names}
                self._recorder.append_signals(scalars_frame(part))
                self._judge_steps(part)
            for i, step in enumerate(steps):
                point = {
                    f"auditor/{name}": float(column[i])
                    for name, column in values.items()
                    if getattr(scalars[i], name) is not None
                }
                self._exporting.send(step, point)

        self._recorder.submit(write, what="scalars")

    def _judge_steps(self, columns: Mapping[str, Any]) -> None:
        for place, step in enumerate(columns["step"].tolist()):
            alerts = self._step_judge.update(step, measured_of(columns, place))
            self._raise(alerts)
            if any(alert.level == "danger" for alert in alerts):
                self._schedule.suspect(step)
        # Whether the last step is tried again is known from the next one: send that soon.
        self._hurry = self._step_judge.expects_alert

    def _end_scalars(self) -> None:
        self._send_scalars()
        self._recorder.submit(lambda: self._raise(self._step_judge.end()), what="scalars")


_ONSET_OF_GRADE: Final = (
    "The onset is that of the grade alone; auditor recover moves it to that of other signals where "
    "they fell before."
)

# Weak on both sides: a monitor holds its recorder, and its model.
_monitors: weakref.WeakKeyDictionary[Recorder, weakref.ref[GradeMonitor]] = (
    weakref.WeakKeyDictionary()
)


def _unless_gone(failed: Callable[[str, Exception], None]) -> Callable[[str, Exception], None]:
    """The method for a thread that may hang for ever, and must not hold the model as long."""
    known = weakref.WeakMethod(failed)

    def told(place: str, error: Exception) -> None:
        method = known()
        if method is not None:
            method(place, error)

    return told


def _append(kept: list[Any], one: Any) -> None:
    """To a list that is read while it grows, and does not grow for ever."""
    kept.append(one)
    if len(kept) >= 2 * HISTORY:
        del kept[:HISTORY]


def _loss_of(loss: Tensor | float) -> Tensor | None:
    return None if loss is NOT_KNOWN else torch.as_tensor(loss).detach().float().mean()


def _mean_of(value: Tensor | float | None) -> Tensor | None:
    if value is None or value is NOT_KNOWN:
        return None
    return whole(torch.as_tensor(value)).float().mean()


def _rate_of(optimizer: Any) -> Tensor | float | None:
    """The learning rate as it is now: a tensor is changed in place later, and is not waited for."""
    if optimizer is None:
        return None
    rate = optimizer.param_groups[0]["lr"]
    return rate.detach().float().clone() if isinstance(rate, Tensor) else float(rate)


def _column(values: Sequence[Tensor | float | None]) -> Callable[[], np.ndarray]:
    """Scalars, some of them on a device, on their way to f64 [n] on the host; NaN for None."""
    places = [i for i, value in enumerate(values) if isinstance(value, Tensor)]
    tensors = [value for value in values if isinstance(value, Tensor)]
    fetch = to_host(torch.stack(tensors)) if tensors else None
    known = [math.nan if v is None or isinstance(v, Tensor) else v for v in values]

    def column() -> np.ndarray:
        filled = np.asarray(known, np.float64)
        if fetch is not None:
            filled[places] = fetch()
        return filled

    return column


def _is_accumulating(optimizer: Any) -> bool:
    """Whether Accelerate's optimizer lets ``step()`` and ``zero_grad()`` of this micro-batch pass
    without effect, as it does inside ``accumulate``."""
    return not getattr(getattr(optimizer, "gradient_state", None), "sync_gradients", True)


def _token_rows(probe: Any) -> list[np.ndarray]:
    """The token samples of a probe batch, where it is one: [T] each."""
    ids = probe.get("input_ids") if isinstance(probe, Mapping) else probe
    if isinstance(ids, Tensor) and ids.ndim == 2 and not (ids.is_floating_point() or ids.is_meta):
        return list(ids.cpu().numpy())
    return []


def _gradient_norm(model: nn.Module) -> Tensor | None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return whole(torch.nn.utils.get_total_norm(gradients)) if gradients else None
