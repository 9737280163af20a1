"""Settings of ``dedupe``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from auditor.clean.mixes import MAX_EPOCHS
from auditor.clean.row import Reading
from auditor.schema import DUPLICATE_SIMILARITY

REPETITIVE_ELEMENTS: Final = 16
"""Words, characters or ids from which a covered share is judged: shorter is a title or a chant."""


@dataclass(frozen=True, kw_only=True)
class DedupeConfig:
    """Settings of ``dedupe``; a bad value raises ``ValueError``."""

    threshold: float = DUPLICATE_SIMILARITY
    """Exact Jaccard similarity from which two samples are near-duplicates."""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """The same for single sources: a row is dropped by the threshold of its own source."""
    shingle: Literal["auto", "word5", "char5", "token5"] = "auto"
    """``auto``: token5 for token ids, else word5 or char5 by the text's script."""
    keep: str = "first"
    """Which of several duplicates stays: ``first``, ``longest`` (characters or tokens),
    ``highest:COLUMN`` or ``lowest:COLUMN``; rows without that number come last."""
    prefer: tuple[str, ...] = ()
    """Sources whose rows stay rather than those of others, best first; goes before ``keep``."""
    copies: int = 1
    """A row is dropped when this many rows like it are kept."""
    soft: bool = False
    """Drop no duplicate; weigh each row one over the size of its cluster instead."""
    protect_sources: tuple[str, ...] = ()
    """Sources whose rows are never dropped, whatever they are."""
    protect_ids: frozenset[str] = frozenset()
    """Sample ids that are never dropped."""
    repetition: bool = True
    """Drop samples that repeat themselves: OLMo 2's flag, or a covered share that is too large."""
    repetitive_share: float = 0.5
    """Share of a sample covered by consecutive repeats from which it counts as repetitive."""
    max_exposures: int | None = None
    """Drop what the run has consumed this often already; None: drop nothing for that."""
    substrings: Literal["keep", "report", "cut"] = "keep"
    """Spans that occur, word for word, in an earlier row that stays: list them in
    ``substrings.parquet``, or cut them out of the cleaned shards as well."""
    substring_elements: int = 50
    """Words, characters (in scripts without spaces) or ids from which such a span counts."""
    n_permutations: int = 128
    bands: int = 32
    seed: int = 1
    max_epochs: float = MAX_EPOCHS
    """Repetition budget for the weights that the manifest proposes."""
    content: str | None = None
    """Column of the content; None: text, else input_ids or tokens.

    Of token ids, those under the ones of a column ``attention_mask`` count: padding is no content.
    Without a mask all ids do, and rows that are mostly padding are dropped for repetition: add the
    mask, or set ``repetition=False``.
    """
    on_error: Literal["raise", "skip"] = "raise"
    """What a row that cannot be parsed does: end the run, or be dropped as unreadable."""
    dtype: str | None = None
    """Of raw token files: the type of an id, such as uint16."""
    eot: int | None = None
    """Of raw token files: the id that ends a document."""

    def __post_init__(self) -> None:
        for name, threshold in {"threshold": self.threshold, **self.thresholds}.items():
            if not 0 < threshold <= 1:
                raise ValueError(f"threshold must be within (0, 1], got {name}={threshold!r}")
        if self.shingle not in ("auto", "word5", "char5", "token5"):
            raise ValueError(f"shingle must be auto, word5, char5 or token5, got {self.shingle!r}")
        how, _, column = self.keep.partition(":")
        if self.keep not in ("first", "longest") and (
            how not in ("highest", "lowest") or not column
        ):
            raise ValueError(
                f"keep must be first, longest, highest:COLUMN or lowest:COLUMN, got {self.keep!r}"
            )
        if self.copies < 1:
            raise ValueError(f"copies must be positive, got {self.copies!r}")
        if self.soft and self.copies != 1:
            raise ValueError(f"soft drops no copy, so copies must be 1, got {self.copies!r}")
        if self.on_error not in ("raise", "skip"):
            raise ValueError(f"on_error must be raise or skip, got {self.on_error!r}")
        if not 0 < self.repetitive_share <= 1:
            raise ValueError(
                f"repetitive_share must be within (0, 1], got {self.repetitive_share!r}"
            )
        if self.max_exposures is not None and self.max_exposures < 1:
            raise ValueError(f"max_exposures must be positive, got {self.max_exposures!r}")
        if self.substrings not in ("keep", "report", "cut"):
            raise ValueError(f"substrings must be keep, report or cut, got {self.substrings!r}")
        if self.substring_elements < 1:
            raise ValueError(
                f"substring_elements must be positive, got {self.substring_elements!r}"
            )
        if not 1 <= self.n_permutations <= 4096:
            raise ValueError(f"n_permutations must be within 1..4096, got {self.n_permutations!r}")
        if self.bands < 1 or self.n_permutations % self.bands:
            raise ValueError(
                f"bands must divide n_permutations = {self.n_permutations}, got {self.bands!r}"
            )
        if not (self.max_epochs > 0 and math.isfinite(self.max_epochs)):
            raise ValueError(f"max_epochs must be positive, got {self.max_epochs!r}")

    @property
    def quality_column(self) -> str | None:
        """The column that ``keep`` names, if it names one."""
        return self.keep.partition(":")[2] or None

    @property
    def lowest_threshold(self) -> float:
        """The similarity below which no pair matters."""
        return min((self.threshold, *self.thresholds.values()))

    @property
    def reading(self) -> Reading:
        """How rows are read."""
        column = self.quality_column
        return Reading(
            content=self.content,
            on_error=self.on_error,
            columns=() if column is None else (column,),
            dtype=self.dtype,
            eot=self.eot,
        )
