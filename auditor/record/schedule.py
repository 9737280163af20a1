"""Which steps are sampled: sparsely while all is quiet, densely for a while once it is not.

Sparse samples are what the user asked for. Dense ones are extra, and paid for out of a budget: the
time they took, on the training thread and beside it, stays below a share of the time that has
passed. Where sampling runs collectives (sharded models), all ranks agree on what comes next while
they sample, so that the sequence of collectives is the same on each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

DENSE_STEPS: Final = 50
"""Dense samples are at most so many steps apart."""

DENSE_FOR_STEPS: Final = 500
"""How long sampling stays dense after the last suspicious sample."""

Agree = Callable[[list[bool]], list[bool]]
"""Element by element whether it holds on any rank."""


class Schedule:
    """Steps to sample, by periods of ``every`` steps and, when suspicious, shorter ones.

    By periods and not by remainders: a loop may number its steps in strides, or try the same step
    again after an overflow.

    ``n_over_budget`` counts dense samples that were left out because the budget had run dry.
    """

    def __init__(
        self,
        every: int,
        budget: float,
        *,
        agree: Agree | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.every = every
        self.dense = every // math.ceil(every / DENSE_STEPS)
        self.n_over_budget = 0
        self._budget = budget
        self._agree = agree
        self._clock = clock
        self._began = clock()
        self._spent = 0.0
        self._last_cost = 0.0
        self._dense_until = -1
        self._agreed_dense = False
        self._dense_is_next = False
        self._period: int | None = None
        self._dense_period: int | None = None
        self._last_step: int | None = None

    def suspect(self, step: int) -> None:
        """The sample of this step was suspicious: sample densely for a while. Any thread."""
        self._dense_until = max(self._dense_until, step + DENSE_FOR_STEPS)

    def spend(self, seconds: float) -> None:
        """A dense sample took so long."""
        self._last_cost = seconds
        self._spent += seconds

    def is_sampled(self, step: int) -> bool:
        """Whether the step that closes is sampled; it is the first of its period then."""
        sparse = step // self.every != self._period
        return sparse or (self._dense_is_next and step // self.dense != self._dense_period)

    def is_extra(self, step: int) -> bool:
        """Whether a sampled step is a dense one, beyond what was asked for."""
        return step // self.every == self._period

    def sampled(self, step: int) -> None:
        """The step was sampled."""
        self._period, self._dense_period = step // self.every, step // self.dense

    def agree(self, step: int, probe_failed: bool) -> bool:
        """Exchange with the other ranks what comes next; whether the probe failed on any of them.

        A collective where the ranks have to agree. It comes first in a sample: nothing that fails
        on one rank comes between.
        """
        if self._agree is None:
            return probe_failed
        suspicious, dry, failed = self._agree(
            [step < self._dense_until, not self._affordable(), probe_failed]
        )
        self._agreed_dense = suspicious and not dry
        return failed

    def next_is_sampled(self, step: int) -> bool:
        """After a step closed: whether the one that follows will be sampled."""
        stride = 1 if self._last_step is None else max(1, step - self._last_step)
        self._last_step = step
        following = step + stride
        self._dense_is_next = False
        if following // self.every != self._period:
            return True
        if following // self.dense == self._dense_period:
            return False
        self._dense_is_next = self._is_dense(following)
        if not self._dense_is_next and following < self._dense_until:
            self.n_over_budget += 1
            self._dense_period = following // self.dense  # counted once
        return self._dense_is_next

    def _is_dense(self, step: int) -> bool:
        if self._agree is not None:
            return self._agreed_dense
        return step < self._dense_until and self._affordable()

    def _affordable(self) -> bool:
        passed = self._clock() - self._began
        return self._spent + self._last_cost <= self._budget * passed
