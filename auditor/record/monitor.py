"""``GradeMonitor``: signals and grades beside training, from a forward now and then."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from auditor.measure.grading import Grade, Grader
from auditor.measure.spectrum import VARIANTS, rank_ratio
from auditor.record.capture import Captured, capturing
from auditor.record.recorder import Recorder, recorder_for
from auditor.record.sites import eager, find_blocks, is_compiled
from auditor.record.transfer import fetched, to_host

log = logging.getLogger("auditor")

SCALARS_STEPS: Final = 50
"""Losses, norms and learning rates are copied from the device together, this often."""


@dataclass(frozen=True)
class _Scalars:
    step: int
    loss: Tensor
    grad_norm: Tensor | None
    lr: float | None


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
            learning rates on all.

    ``grade`` is the latest grade, computed on the recorder's thread a moment after its step;
    ``grades`` all of this process.

    Raises:
        ValueError: ``every`` is not positive, or the model has no transformer blocks.
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
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every!r}")
        self._wrapped = model
        self._model = eager(model)
        self.sites = find_blocks(self._model)
        if not self.sites:
            raise ValueError(
                f"no transformer blocks found in {type(self._model).__name__}: "
                "expected a ModuleList of equal blocks"
            )
        self._run = run
        self._recorder: Recorder = recorder_for(run)
        self._closed = False
        self._last_step: int | None = None
        self._last_period: int | None = None
        self._probe = probe
        self._probe_loss = probe_loss
        self._every = every
        self._grader = Grader()
        self._live: Captured | None = None
        self._armed = contextlib.ExitStack()
        self._scalars: list[_Scalars] = []
        self.grades: list[Grade] = []
        self._note()
        self._arm()

    def _note(self) -> None:
        self._recorder.attempt.note(
            monitor={
                "every": self._every,
                "probe": self._probe is not None,
                "blocks": [site.path for site in self.sites],
                "torch": torch.__version__,
            }
        )
        self._recorder.hold_out(_token_rows(self._probe))
        self._recorder.on_close.append(self._send_scalars)

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
            loss: the step's loss, a scalar; not synchronised.
            optimizer: gives the learning rate, and tells trained steps from discarded ones. With
                one that Accelerate prepared, calls on micro-batches that close no step do nothing.
            step: the loop's own step number; by default steps are counted from 0.
            grad_norm: the norm before clipping, as ``clip_grad_norm_`` returns it. Without it the
                norm is taken on sampled steps only.
            sample_loss: per-sample losses, [samples since the last step], kept with the exposures.
        """
        if self._closed or _is_accumulating(optimizer):
            return
        try:
            if self._recorder.closed:  # by the sampler's close(): training goes on, so do we
                self._recorder = recorder_for(self._run)
                self._note()
            self._step(loss, optimizer, step, grad_norm, sample_loss)
        except Exception as error:
            self._recorder.failed("GradeMonitor.step", error)

    def close(self) -> None:
        """Write what is waiting and give the run directory back; also done when Python exits."""
        self._closed = True
        try:
            self._disarm()
        except Exception as error:
            self._recorder.failed("GradeMonitor.close", error)
        self._recorder.close()

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
        step = self._recorder.step_of_backward(step, optimizer)
        if sample_loss is not None:
            batches = pending or self._recorder.last_batches
            losses = sample_loss.detach().float().cpu().numpy()
            write = functools.partial(self._recorder.write_losses, batches, losses)
            self._recorder.submit(write, what="losses")
        # By periods and not by remainders: a loop may number its steps in strides, or try the same
        # step again after an overflow.
        sampled = step // self._every != self._last_period
        if sampled:
            self._last_period = step // self._every
            self._sample(step)
            if grad_norm is None:
                grad_norm = _gradient_norm(self._model)
        self._scalars.append(
            _Scalars(
                step,
                torch.as_tensor(loss).detach().float().mean(),
                None if grad_norm is None else torch.as_tensor(grad_norm).detach().float().mean(),
                float(optimizer.param_groups[0]["lr"]) if optimizer is not None else None,
            )
        )
        if sampled or len(self._scalars) >= SCALARS_STEPS:
            self._send_scalars()
        stride = 1 if self._last_step is None else max(1, step - self._last_step)
        self._last_step = step
        if (step + stride) // self._every != self._last_period:
            self._arm()

    def _sample(self, step: int) -> None:
        live, self._live = self._live, None
        self._disarm()
        probe, probe_loss = self._run_probe() if self._probe is not None else (None, None)
        work = functools.partial(
            self._analyse,
            step,
            None if live is None else fetched(live),
            None if probe is None else fetched(probe),
            probe_loss,
        )
        self._recorder.submit(work, what="samples")

    # -- the live forward ------------------------------------------------------------------

    def _arm(self) -> None:
        """Capture the next training forward of the model, then take the hooks off.

        A compiled model is left alone: its calls do not pass our hooks, or would be compiled again
        because of them.
        """
        self._disarm()
        if is_compiled(self._wrapped):
            return
        armed = self._armed = contextlib.ExitStack()

        def before(module: nn.Module, args: Any) -> None:
            if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
                return  # compiled later, or a side call in evaluation mode: not a training batch
            try:
                self._live = armed.enter_context(capturing(self.sites, self._recorder.failed))
            except Exception as error:
                self._recorder.failed("capture", error)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling() and self._live is not None:
                self._disarm()

        armed.callback(self._model.register_forward_pre_hook(_Hook(before)).remove)
        armed.callback(self._model.register_forward_hook(_Hook(after), always_call=True).remove)

    def _disarm(self) -> None:
        """Stop capturing and take the hooks off."""
        self._armed.close()

    # -- the probe -------------------------------------------------------------------------

    def _run_probe(self) -> tuple[Captured | None, Tensor | None]:
        try:
            batch = self._probe() if callable(self._probe) else self._probe
            with (
                _evaluating(self._model),
                torch.no_grad(),
                torch.compiler.set_stance("force_eager"),
                capturing(self.sites, self._recorder.failed) as captured,
            ):
                if self._probe_loss is not None:
                    loss: Any = self._probe_loss(self._model, batch)
                else:
                    loss = getattr(_call(self._model, batch), "loss", None)
            return captured, None if loss is None else torch.as_tensor(loss).detach()
        except Exception as error:
            self._recorder.failed("the probe", error)
            return None, None

    # -- the recorder's thread -------------------------------------------------------------

    def _analyse(
        self,
        step: int,
        live: Mapping[str, Any] | None,
        probe: Mapping[str, Any] | None,
        probe_loss: Tensor | None,
    ) -> None:
        rows: list[dict[str, Any]] = []
        for kind, captured in (("live", live), ("probe", probe)):
            if captured is not None:
                rows += self._signals(kind, captured)
        if probe_loss is not None:
            rows.append({"kind": "probe", "signal": "probe_loss", "value": float(probe_loss)})
        graded = "probe" if probe is not None else "live"
        grade = self._grader.update(
            step, _ratios(rows, graded, "raw"), _ratios(rows, graded, "column")
        )
        rows.append(
            {
                "kind": graded,
                "signal": "grade",
                "layer": grade.layer,
                "value": np.nan if grade.grade is None else grade.grade,
            }
        )
        before = self.grades[-1].alert if self.grades else ""
        self.grades.append(grade)
        self._recorder.append_signals(step, rows)
        if grade.grade is None and before != "undefined":
            log.warning("auditor: step %d: no rank ratio is defined", step)
        elif grade.alert != before and grade.alert not in {"warming", "healthy", "undefined"}:
            log.warning(
                "auditor: step %d: grade S%s, ratio %.2f in block %s: %s",
                step,
                grade.grade,
                grade.ratio,
                grade.layer,
                grade.alert,
            )

    def _signals(self, kind: str, captured: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        paths = {site.layer: site.path for site in self.sites}

        def row(signal: str, layer: int, value: float, **more: Any) -> dict[str, Any]:
            site = paths.get(layer, "embedding")
            return {
                "kind": kind,
                "site": site,
                "layer": layer,
                "signal": signal,
                "value": value,
                **more,
            }

        for layer, matrix in captured["positions"].items():
            if layer < 0:
                continue
            for variant in VARIANTS:
                value = rank_ratio(matrix, variant)
                yield row("token_rank", layer, value, variant=variant, n_rows=len(matrix))
        for signal, matrices in (
            ("sample_rank", captured["samples"]),
            ("value_rank", captured["values"]),
        ):
            for layer, matrix in matrices.items():
                value = rank_ratio(matrix, "centred")
                yield row(signal, layer, value, variant="centred", n_rows=len(matrix))
        for layer, heads in captured["attention"].items():
            entropy, normalised, no_sink, max_logit = heads
            yield row("entropy_mean", layer, float(entropy.mean()))
            yield row("entropy_min", layer, float(entropy.min()), head=int(entropy.argmin()))
            yield row("entropy_normalised", layer, float(normalised.mean()))
            yield row("entropy_no_sink", layer, float(no_sink.mean()))
            yield row("max_logit", layer, float(max_logit.max()), head=int(max_logit.argmax()))

    # -- per-step scalars ------------------------------------------------------------------

    def _send_scalars(self) -> None:
        scalars, self._scalars = self._scalars, []
        if not scalars:
            return
        loss = to_host(torch.stack([one.loss for one in scalars]))
        norms = [one.grad_norm for one in scalars if one.grad_norm is not None]
        norm = to_host(torch.stack(norms)) if norms else None

        def write() -> None:
            columns = {
                "step": np.asarray([one.step for one in scalars], np.int64),
                "loss": loss().astype(np.float64),
                "lr": np.asarray([np.nan if s.lr is None else s.lr for s in scalars]),
            }
            grad_norm = np.full(len(scalars), np.nan)
            if norm is not None:
                grad_norm[[one.grad_norm is not None for one in scalars]] = norm()
            self._recorder.append_scalars({**columns, "grad_norm": grad_norm})

        self._recorder.submit(write, what="scalars")


class _Hook:
    """A hook that stays behind: in a copy of the model, or a saved one, it does nothing."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        self._hook(*args)

    def __reduce__(self) -> Any:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    pass


def _is_accumulating(optimizer: Any) -> bool:
    """Whether Accelerate's optimizer lets ``step()`` and ``zero_grad()`` of this micro-batch pass
    without effect, as it does inside ``accumulate``."""
    return not getattr(getattr(optimizer, "gradient_state", None), "sync_gradients", True)


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and random state and training flags afterwards as they were."""
    training = [module for module in model.modules() if module.training]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        # Not model.eval(): some layers override it, to merge adapters into weights for instance.
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True


def _token_rows(probe: Any) -> list[np.ndarray]:
    """The token samples of a probe batch, where it is one: [T] each."""
    ids = probe.get("input_ids") if isinstance(probe, Mapping) else probe
    if isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point():
        return list(ids.cpu().numpy())
    return []


def _gradient_norm(model: nn.Module) -> Tensor | None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients) if gradients else None


def _ratios(rows: Sequence[Mapping[str, Any]], kind: str, variant: str) -> dict[int, float]:
    return {
        row["layer"]: row["value"]
        for row in rows
        if row["kind"] == kind and row["signal"] == "token_rank" and row.get("variant") == variant
    }
