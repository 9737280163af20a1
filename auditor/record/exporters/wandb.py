"""Metrics to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from auditor.record.exporting import PER_STEP, required

STEP: Final = "auditor/step"
"""The metric that all of ours are plotted over."""


class WandB:
    """Log metrics over ``auditor/step``, without moving the step counter of your own run.

    Without ``run`` a run of our own is started beside yours at the first point, and finished at the
    end; ``wandb.run`` and ``wandb.log`` stay yours.

    With ``run`` the metrics of sampled steps are added to the row that your next ``run.log``
    completes, and the run is left open. A row takes one sampled step: where you log less often than
    the monitor samples, the last one counts. Metrics of every step are left out; rows for them
    would move your counter.

    Args:
        run: an active run.
        init: for ``wandb.init``, as ``project`` or ``group``.

    Raises:
        ImportError: wandb is not installed.
        ValueError: both ``run`` and arguments for ``wandb.init`` are given.
    """

    def __init__(self, run: Any = None, **init: Any) -> None:
        if run is not None and init:
            raise ValueError(f"{', '.join(init)}: for a new run only, and a run is given")
        self._wandb = required("wandb", extra="wandb")
        self._is_ours = run is None
        self._run = run
        # By default a new run would also wrap standard output, which is the training's.
        self._init = {"reinit": "create_new", "settings": {"console": "off"}, **init}
        self._defined = False

    def export(self, step: int, values: Mapping[str, float]) -> None:
        if not self._is_ours and values.keys() <= PER_STEP:
            return
        if self._run is None:
            self._run = self._wandb.init(**self._init)
        if not self._defined:
            self._run.define_metric(STEP, hidden=True)
            self._run.define_metric("auditor/*", step_metric=STEP)
            self._defined = True
        self._run.log({**values, STEP: step}, commit=self._is_ours)

    def close(self) -> None:
        if self._is_ours and self._run is not None:
            self._run.finish()
