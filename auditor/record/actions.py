"""What may be done about an alert; none of it is ever done unless asked for.

    GradeMonitor(model, run="run/", on_alert=[Log(), StopTraining(at="danger")])

An action is any ``action(alert, monitor)``. It is called on the training thread inside
``monitor.step``, after the alert became known, which is a moment after the step that it is about.
What it raises is counted and does not reach the loop.

Ranks learn of alerts at different steps. Whatever all ranks must do together, such as stopping or
another learning rate, is for the loop to agree on first: `docs/recovery.md` shows how.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor

from auditor.errors import AuditorError
from auditor.record.recorder import rank_and_world
from auditor.record.steps import inner_optimizer

if TYPE_CHECKING:
    from auditor.measure.grading import Alert

log = logging.getLogger("auditor")

LEVELS: Final = ("watch", "danger")


class Monitored(Protocol):
    """What the actions here use of a ``GradeMonitor``."""

    should_stop: bool

    @property
    def last_step(self) -> int | None:
        """The last step that was closed, which is later than the alert's."""

    def checkpoint(self, path: str | PathLike[str], step: int) -> None:
        """Register a checkpoint."""


DATA_SIGNALS: Final = frozenset({"sample_rank", "memorisation"})
"""Signals of what is trained on: poor or repeated data is not mended by a lower learning rate."""

Action = Callable[["Alert", Any], None]


class Log:
    """Log every alert, also that it is over, as one line at a level of :mod:`logging`."""

    def __init__(self, level: int = logging.WARNING) -> None:
        self._level = level

    def __call__(self, alert: Alert, monitor: Monitored) -> None:
        log.log(self._level, "auditor: %s", alert.message)


class StopTraining:
    """Set ``monitor.should_stop``, for the loop to look at; nothing is raised.

    The flag is this rank's own. Raises ``ValueError`` where ``at`` is no level.
    """

    def __init__(self, at: str = "danger") -> None:
        self._at = checked_level(at)

    def __call__(self, alert: Alert, monitor: Monitored) -> None:
        if reaches(alert, self._at):
            monitor.should_stop = True


class RequestCheckpoint:
    """Save a checkpoint and register it with the run.

    Args:
        save: ``save(step)`` writes a checkpoint of now, the last step closed, and returns its path,
            or None where there is nothing to register. It runs on the training thread: it takes as
            long as it takes. With several ranks it must not need the others.
        at: the level from which to save, watch or danger.
        cooldown_steps: after a checkpoint none for so many steps, however many alerts.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        save: Callable[[int], str | PathLike[str] | None],
        at: str = "watch",
        cooldown_steps: int = 500,
    ) -> None:
        if cooldown_steps < 0:
            raise ValueError(f"cooldown_steps must not be negative, got {cooldown_steps!r}")
        self._save = save
        self._at = checked_level(at)
        self._cooldown_steps = cooldown_steps
        self._saved_step: int | None = None

    def __call__(self, alert: Alert, monitor: Monitored) -> None:
        step = alert.step if monitor.last_step is None else monitor.last_step
        recent = self._saved_step is not None and step - self._saved_step < self._cooldown_steps
        if not reaches(alert, self._at) or recent:
            return
        path = self._save(step)
        # Only now: one that failed is tried again at the next alert.
        self._saved_step = step
        if path is not None:
            monitor.checkpoint(path, step)


class CutLearningRate:
    """Multiply the learning rate of all parameter groups for some optimizer steps.

    Schedules set the learning rate anew at every step, so the cut is made just before the
    optimizer's ``step`` and taken back right after it: a schedule and a saved optimizer see the
    schedule's own value all along. Alerts during a cut prolong it; factors do not multiply, the
    lower one counts. Alerts of ``DATA_SIGNALS`` cut nothing.

    Updates that mixed precision skips do not count; those of a fused optimizer, which is called all
    the same, do. An ``optimizer.step`` replayed from a CUDA graph runs no hooks and is not cut.

    Args:
        optimizer: may be wrapped by a framework; needs step hooks, as those of PyTorch have.
        factor: for alerts of level watch, in (0, 1).
        steps: optimizer updates that a cut lasts.
        at: the level from which to cut, watch or danger.
        severe_factor: for alerts of level danger, in (0, 1).

    Raises:
        ValueError: an argument is out of range, or the optimizer has no step hooks.
    """

    def __init__(
        self,
        optimizer: Any,
        factor: float = 0.5,
        steps: int = 500,
        at: str = "watch",
        *,
        severe_factor: float = 1 / 3,
    ) -> None:
        for name, value in (("factor", factor), ("severe_factor", severe_factor)):
            _check_factor(name, value)
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps!r}")
        self._optimizer = inner_optimizer(optimizer)
        if not isinstance(self._optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"the learning rate of {type(optimizer).__name__} cannot be cut: it has no step "
                "hooks; give the torch optimizer that does the update"
            )
        self._factor = factor
        self._severe_factor = severe_factor
        self._steps = steps
        self._at = checked_level(at)
        self._active = 1.0
        self._remaining = 0
        self._handles: list[Any] = []
        self._own: list[tuple[dict[str, Any], Any]] = []  # groups that are cut now, and their rates
        self.failures = 0

    @property
    def active_factor(self) -> float:
        """What the next update's learning rate is multiplied by; 1 while nothing is cut."""
        return self._active

    def __call__(self, alert: Alert, monitor: Monitored) -> None:
        if not reaches(alert, self._at) or alert.signal in DATA_SIGNALS:
            return
        if rank_and_world()[1] > 1:
            raise AuditorError(
                "the learning rate was not cut: ranks learn of an alert at different steps, and "
                "their weights would part",
                remedy="Call cut() on all ranks at the same step, see docs/recovery.md",
            )
        self.cut(self._severe_factor if alert.level == "danger" else self._factor)

    def cut(self, factor: float | None = None) -> None:
        """Cut from the next update on, by ``factor`` or that of level watch.

        Not to be called from a step hook of the optimizer.

        Raises:
            ValueError: the factor is not in (0, 1).
        """
        factor = self._factor if factor is None else factor
        _check_factor("factor", factor)
        self._active = min(self._active, factor)
        self._remaining = self._steps
        self._remove()
        self._register()

    def close(self) -> None:
        """End the cut and take the hooks off. Not to be called from a step hook either."""
        self._active, self._remaining = 1.0, 0
        self._restore()
        self._remove()

    def _register(self) -> None:
        after = self._optimizer.register_step_post_hook(self._after_step)
        hooks = getattr(self._optimizer, "_optimizer_step_post_hooks", None)
        if isinstance(hooks, OrderedDict):
            # Before hooks of others, which may step a schedule or save the optimizer.
            hooks.move_to_end(after.id, last=False)
        self._handles = [
            after,
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_state_dict_post_hook(self._put_own_rates),
        ]

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        try:
            self._restore()  # where the last step raised, its post hook has not run
            tensors: dict[int, Tensor] = {}  # groups may share one
            with torch.no_grad():
                for group in optimizer.param_groups:
                    rate = group["lr"]
                    if not isinstance(rate, Tensor):
                        self._own.append((group, rate))
                        group["lr"] = rate * self._active
                        continue
                    if id(rate) not in tensors:
                        tensors[id(rate)] = rate.clone()
                        # In place: a compiled update reads this very tensor.
                        rate.mul_(self._active)
                    self._own.append((group, tensors[id(rate)]))
        except Exception as error:
            self._failed(error)

    def _after_step(self, *_: Any) -> None:
        try:
            if not self._own:  # idle, or the cut was asked for in the middle of this step
                return
            self._restore()
            self._remaining -= 1
            if self._remaining == 0:
                self._active = 1.0
                # The optimizer goes through its post hooks just now, so that ours must stay, idle,
                # until the next cut or close().
                for handle in self._handles[1:]:
                    handle.remove()
                del self._handles[1:]
        except Exception as error:
            self._failed(error)

    def _restore(self) -> None:
        own, self._own = self._own, []
        with torch.no_grad():
            for group, rate in own:
                if isinstance(rate, Tensor):
                    group["lr"].copy_(rate)
                else:
                    group["lr"] = rate

    def _put_own_rates(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Saved from inside a step, or after one that raised: without the cut all the same."""
        for saved, (_, rate) in zip(state["param_groups"], self._own, strict=False):
            saved["lr"] = rate.clone() if isinstance(rate, Tensor) else rate

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            log.warning(
                "auditor: CutLearningRate failed and is counted from now on; training is not "
                "affected: %r",
                error,
            )


def reaches(alert: Alert, level: str) -> bool:
    """Whether an alert is of the level or a higher one; that it is over is none."""
    return alert.level in LEVELS[LEVELS.index(level) :]


def checked_level(level: str) -> str:
    """The level itself; raises ``ValueError`` where there is no such level."""
    if level not in LEVELS:
        raise ValueError(f"at must be one of {', '.join(LEVELS)}, got {level!r}")
    return level


def _check_factor(name: str, factor: float) -> None:
    if not 0 < factor < 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {factor!r}")
