"""The training batch's own forward, looked at on a sampled step and at no other time.

Hooks sit on the model from the end of the step before to the end of the sampled step, and on its
blocks only while a forward of the model runs: a checkpointed block that is computed again during
the backward does not meet them. A compiled model must not meet them at all, for it would be
compiled again. There the arguments of the call are kept, and the eager module runs on them again,
in evaluation mode and without gradients, when the step closes.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from auditor.record.capture import Captured, capturing
from auditor.record.sharding import reshard
from auditor.record.sites import Site, anything_compiled, compiled_entry, eager

Failed = Callable[[str, Exception], None]


class LiveForward:
    """Captures the forwards of one step: :meth:`arm` before it, :meth:`take` when it closes."""

    def __init__(self, model: nn.Module, sites: Sequence[Site], failed: Failed) -> None:
        self._wrapped = model
        self._model = eager(model)
        self._sites = sites
        self._failed = failed
        self._captured: Captured | None = None
        self._calls: list[Callable[[], None]] = []
        self._armed = contextlib.ExitStack()

    @property
    def seen(self) -> bool:
        """Whether there was a training forward since the model was armed."""
        return self._captured is not None or bool(self._calls)

    def arm(self) -> None:
        """Look at the forwards in training mode from now on, until there are rows enough."""
        self.disarm()
        self._captured, self._calls = None, []
        self._armed = contextlib.ExitStack()
        entry = compiled_entry(self._wrapped)
        if entry is None and anything_compiled():
            # A function that the model calls may be compiled, and would be compiled again for the
            # mode by which attention is seen.
            entry = self._model
        if entry is None:
            self._hook(self._model, self._begin, self._end)
        elif getattr(entry, "_compiled_call_impl", None) is not None:
            self._intercept(entry)
        else:
            self._hook(entry, self._keep_call, None)

    def disarm(self) -> None:
        """Take the hooks off."""
        self._armed.close()

    def take(self) -> Captured | None:
        """What the step's forwards showed; None where there was none in training mode."""
        self.disarm()
        captured, self._captured = self._captured, None
        calls, self._calls = self._calls, []
        for call in calls:
            captured = Captured() if captured is None else captured
            with looking(self._model, self._sites, self._failed, captured):
                call()
            if captured.full:
                break
        return captured

    # -- eager models ----------------------------------------------------------------------

    def _hook(
        self, module: nn.Module, before: Callable[..., None], after: Callable[..., None] | None
    ) -> None:
        handle = module.register_forward_pre_hook(_Hook(before, self._failed), with_kwargs=True)
        self._armed.callback(handle.remove)
        if after is not None:
            done = module.register_forward_hook(_Hook(after, self._failed), always_call=True)
            self._armed.callback(done.remove)

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not _is_training(module) or torch.compiler.is_compiling():
            return
        if self._captured is not None and self._captured.full:
            return
        self._captured = self._captured or Captured()
        self._inside = contextlib.ExitStack()
        self._inside.enter_context(capturing(self._sites, self._failed, self._captured))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._inside.close()

    _inside = contextlib.ExitStack()

    # -- compiled models -------------------------------------------------------------------

    def _keep_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # the model was compiled behind our back
            return
        if not _is_training(module) or len(self._calls) >= MAX_CALLS:
            return
        device = next((p.device.type for p in self._model.parameters()), "cpu")
        enabled = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device)

        def call() -> None:
            with torch.autocast(device, dtype=dtype, enabled=enabled):
                self._model(*args, **kwargs)

        self._calls.append(call)

    def _intercept(self, module: nn.Module) -> None:
        """A module compiled in place: its hooks are compiled with it, so its call is wrapped."""
        compiled: Any = module._compiled_call_impl

        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                self._keep_call(module, args, kwargs)
            except Exception as error:
                self._failed("capture", error)
            return compiled(*args, **kwargs)

        def restore() -> None:
            if module._compiled_call_impl is called:
                module._compiled_call_impl = compiled

        module._compiled_call_impl = called
        self._armed.callback(restore)


MAX_CALLS = 16
"""Calls of a compiled model that are kept to be run again; each holds its arguments."""


def _is_training(module: nn.Module) -> bool:
    """Not a side call in evaluation mode: a training batch."""
    return module.training and torch.is_grad_enabled()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; random state, flags, buffers and shards afterwards as they were."""
    training = [module for module in model.modules() if module.training]
    with random_state_kept(model), _buffers_kept(model):
        # Not model.eval(): some layers override it, to merge adapters into weights for instance.
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True
            # A forward without a backward leaves the root's parameters whole: the next training
            # forward would take them for the ones that the optimizer has updated meanwhile.
            reshard(model)


@contextlib.contextmanager
def random_state_kept(model: nn.Module) -> Iterator[None]:
    """The random state of torch, on the model's devices too, of numpy and of Python."""
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextlib.contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """What a forward updates even in evaluation mode, as the counters of some experts."""
    saved = [
        (module._buffers, name, buffer, buffer._version, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffers, name, buffer, version, values in saved:
                buffers[name] = buffer  # where another was put in its place
                if buffer._version != version:
                    buffer.copy_(values)


@contextlib.contextmanager
def looking(
    model: nn.Module, sites: Sequence[Site], failed: Failed, captured: Captured | None = None
) -> Iterator[Captured]:
    """For a forward of ours: :func:`evaluating`, without gradients, eager, and captured."""
    with (
        evaluating(model),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        capturing(sites, failed, captured, model) as seen,
    ):
        yield seen


def call_on(model: nn.Module, batch: Any) -> Any:
    """The model on a batch: ``**`` of a mapping, ``*`` of a tuple or list."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


class _Hook:
    """A hook that stays behind: a copy of the model, or a saved one, has one that does nothing.

    That one is of the standard library, so that a saved model loads where there is no auditor. What
    it raises does not reach the forward.
    """

    def __init__(self, hook: Callable[..., None], failed: Failed) -> None:
        self._hook = hook
        self._failed = failed

    def __call__(self, *args: Any) -> None:
        try:
            self._hook(*args)
        except Exception as error:
            self._failed("capture", error)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes anything, returns None
