"""Which batches went into which update: told by the optimizer, never by counting.

A batch is pending from its delivery until a watched optimizer's own ``step()`` returns. Batches
whose gradients were cleared without a step were discarded: mixed precision skips a step when the
gradients overflowed, and loops skip steps for reasons of their own.

Gradients of a pending batch are noticed by a hook on a few parameters; that they are cleared, by
``zero_grad`` of the optimizer, or else by gradients that are gone or have been made anew. The fused
way of mixed precision calls ``step()`` all the same and leaves its flag on the device: that step is
closed with a flag to read later.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

WATCHED_PARAMETERS: Final = 3
"""Parameters of an optimizer whose gradients are watched: the first, the last, one between."""


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer whose ``step`` updates parameters, inside the wrappers of frameworks."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


class OptimizerWatch:
    """Hooks on one optimizer that say when it stepped and when it discarded gradients.

    Args:
        optimizer: has ``register_step_post_hook``.
        stepped: called after its step, with the flag of an overflow on the device, or None.
        produced: called when a backward produced gradients.
        cleared: called when gradients were cleared.
        failed: told of our own exceptions.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        stepped: Callable[[Tensor | None], None],
        produced: Callable[[], None],
        cleared: Callable[[], None],
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._cleared = cleared
        self._failed = failed
        self._gradients: set[int] = set()  # of the parameters that have one since the last step
        # A step with a closure may clear and compute gradients again and again: those it computed
        # itself are part of it.
        self._in_step = self._produced_in_step = False

        def before_step(*_: Any) -> None:
            self._in_step, self._produced_in_step = True, False

        def after_step(watched: Any, *_: Any) -> None:
            try:
                self._in_step = False
                self._gradients.clear()
                stepped(getattr(watched, "found_inf", None))
            except Exception as error:
                failed("optimizer hook", error)

        def after_backward(parameter: Tensor) -> None:
            try:
                self._gradients.add(id(parameter))
                self._produced_in_step = self._in_step
                produced()
            except Exception as error:
                failed("gradient hook", error)

        parameters = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        places = {0, len(parameters) // 2, len(parameters) - 1} if parameters else set()
        self._parameters = [parameters[place] for place in sorted(places)][:WATCHED_PARAMETERS]
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(before_step),
            optimizer.register_step_post_hook(after_step),
        ]
        self._handles += [
            one.register_post_accumulate_grad_hook(after_backward) for one in self._parameters
        ]
        self._handles += [one.register_hook(self._before_backward(one)) for one in self._parameters]
        self._watch_zero_grad(optimizer)

    def _clear(self) -> None:
        if not (self._in_step and self._produced_in_step):
            self._cleared()

    def _before_backward(self, parameter: Tensor) -> Callable[[Tensor], None]:
        watched = weakref.ref(parameter)

        @unserializable_hook
        def hook(_: Tensor) -> None:
            """A gradient is about to be made where one was: the old one was cleared by hand.

            Told by its absence. Another tensor in its place may be the same gradient: data
            parallelism exchanges gradients for views of its buckets.
            """
            try:
                one = watched()
                if one is not None and one.grad is None and id(one) in self._gradients:
                    self._gradients.clear()  # the other parameters' gradients are as new
                    self._clear()
            except Exception as error:
                self._failed("gradient hook", error)

        return hook

    def notice_gradients_gone(self) -> None:
        """To be called when the next batch arrives: were the gradients cleared by hand?"""
        if self._gradients and all(
            one.grad is None for one in self._parameters if id(one) in self._gradients
        ):
            self._gradients.clear()
            self._clear()

    def _watch_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        original = optimizer.zero_grad
        self._previous = vars(optimizer).get("zero_grad")

        @functools.wraps(original)
        def zero_grad(*args: Any, **kwargs: Any) -> None:
            try:
                self._gradients.clear()
                self._clear()
            except Exception as error:
                self._failed("zero_grad hook", error)
            original(*args, **kwargs)

        self._zero_grad = zero_grad
        vars(optimizer)["zero_grad"] = zero_grad

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        optimizer = self._optimizer()
        if optimizer is not None and vars(optimizer).get("zero_grad") is self._zero_grad:
            del vars(optimizer)["zero_grad"]
            if self._previous is not None:
                vars(optimizer)["zero_grad"] = self._previous
