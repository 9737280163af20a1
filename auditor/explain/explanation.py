"""Everything that is explained about one run, as tables and words: what reports are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import polars as pl

from auditor.explain.stretches import strongest_steps


@dataclass(frozen=True)
class Diagnosis:
    """What an event most likely is.

    ``cause`` is one of data, optimizer, attention, numerics, dirty batch, undetermined; ``reason``
    says why in a sentence, ``action`` what to do.
    """

    cause: str
    reason: str
    action: str


@dataclass(frozen=True)
class Explanation:
    """A run explained. Frames have the columns of their table in :mod:`auditor.schema`.

    Attributes:
        run_id: the run's id.
        n_steps: steps trained, in the effective view.
        every: steps between sampled steps, None when nothing was sampled.
        signals, grades, events, composition, suspects, drifts: the tables.
        previews: sample_id and preview of the samples and cluster keepers named in ``suspects``.
        diagnoses: by number of event.
        smallest_p: by number of event, the least p its test could have given.
        verdict: what happened and how sure, in one or two sentences.
        culprit: the source blamed first, None when no data cause was found.
        judged: False when the run is too short, or sampled too sparsely, for events to be found.
        gaps: what is known to be missing from the record.
    """

    run_id: str
    n_steps: int
    every: int | None
    signals: pl.DataFrame
    grades: pl.DataFrame
    events: pl.DataFrame
    composition: pl.DataFrame
    suspects: pl.DataFrame
    drifts: pl.DataFrame
    previews: pl.DataFrame
    diagnoses: Mapping[int, Diagnosis]
    smallest_p: Mapping[int, float]
    verdict: str
    culprit: str | None
    judged: bool
    gaps: list[str]

    @cached_property
    def strongest(self) -> Mapping[int, list[int]]:
        """By number of event, the steps of its lookback that held most of its first suspect."""
        return strongest_steps(self.events, self.suspects, self.composition)
