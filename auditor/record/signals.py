"""From what a forward showed to rows and frames of the signals table, on the recorder's thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from auditor.ledger import NULL, Frame
from auditor.measure.baseline import HeadBaselines
from auditor.measure.spectrum import VARIANTS, Forms, rank_ratio, residual_similarity
from auditor.record.capture import Captured
from auditor.record.sites import Site

MIN_ROWS: Final = 32
"""Rows that a rank ratio needs to mean something: of one row it is 1, of two nearly always. A
segment of the sequence with fewer has none."""

Row = dict[str, Any]


PARTS: Final = ("positions", "samples", "values", "attention")


def parts_of(captured: Captured) -> dict[int, set[str]]:
    """By layer, which parts of ``Captured`` there are."""
    return _parts({name: getattr(captured, name) for name in PARTS})


def _parts(by_name: Mapping[str, Any]) -> dict[int, set[str]]:
    seen: dict[int, set[str]] = {}
    for name in PARTS:
        for layer in by_name[name]:
            seen.setdefault(layer, set()).add(name)
    return seen


def frame_of(step: int, rows: Sequence[Row]) -> Frame:
    """The rows of one sampled step, as the ledger has them."""
    # Null is the least integer, so that every column stays one array.
    integers = {
        name: np.asarray([NULL if row.get(name) is None else row[name] for row in rows], np.int32)
        for name in ("layer", "head", "n_rows")
    }
    values = np.asarray([row["value"] for row in rows], np.float64)
    names = ("kind", "site", "segment", "variant", "signal")
    strings = {name: [row.get(name) for row in rows] for name in names}
    return Frame("signals", {"step": step}, {"value": values, **integers}, strings)


def scalars_frame(columns: Mapping[str, np.ndarray]) -> Frame:
    """Signals of every step: one column per signal, and ``step``."""
    return Frame("scalars", {}, dict(columns))


class Signals:
    """Rows of ``schema.SIGNALS`` of one sampled step after another: :meth:`of`.

    ``seen``: by layer, what was captured of it so far: positions, values, attention. ``uses``: how
    often one forward used it, at most.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        self._paths = {site.layer: site.path for site in sites}
        self._follows = {site.layer for site in sites if site.follows}
        self._heads = HeadBaselines()
        self.seen: dict[int, set[str]] = {}
        self.uses: dict[int, int] = {}

    def of(self, kind: str, captured: Mapping[str, Any], *, warm: bool) -> Iterator[Row]:
        """Rows of one forward, ``kind`` live or probe; arrays by layer as ``Captured`` has them."""
        positions = dict(captured["positions"].items())
        for layer, parts in _parts(captured).items():
            self.seen.setdefault(layer, set()).update(parts)
        for layer, n in captured["uses"].items():
            self.uses[layer] = max(n, self.uses.get(layer, 0))
        for layer, matrix in positions.items():
            rows = [self._row("non_finite", layer, float(np.mean(~np.isfinite(matrix))))]
            if layer >= 0:
                inputs = positions.get(layer - 1) if layer in self._follows else None
                rows += self._of_block(layer, matrix, inputs)
                rows += self._of_segments(layer, matrix, captured["places"][layer])
            yield from ({**row, "kind": kind} for row in rows)
        for signal, name in (("sample_rank", "samples"), ("value_rank", "values")):
            for layer, matrix in captured[name].items():
                ratio = rank_ratio(matrix, "centred")
                row = self._row(signal, layer, ratio, variant="centred", n_rows=len(matrix))
                yield {**row, "kind": kind}
        for layer, heads in captured["attention"].items():
            for row in self._of_attention(kind, layer, heads, warm):
                yield {**row, "kind": kind}

    def _row(self, signal: str, layer: int, value: float, **more: Any) -> Row:
        site = self._paths.get(layer, "embedding")
        return {"site": site, "layer": layer, "signal": signal, "value": value, **more}

    def _of_block(self, layer: int, matrix: np.ndarray, inputs: np.ndarray | None) -> Iterator[Row]:
        """A block's output [n, D], and its input at the same positions."""
        n = len(matrix)
        forms = Forms(matrix)
        raw = forms.spectrum("raw")
        for variant in VARIANTS:
            ratio = raw.ratio() if variant == "raw" else forms.ratio(variant)
            yield self._row("token_rank", layer, ratio, variant=variant, n_rows=n)
        for signal, value in (
            ("token_rank_full", raw.ratio(None)),
            ("effective_rank", raw.effective_rank),
            ("spectral_gap", raw.gap),
        ):
            yield self._row(signal, layer, value, variant="raw", n_rows=n)
        finite = np.abs(matrix[np.isfinite(matrix)])
        yield self._row("max_abs", layer, float(finite.max()) if len(finite) else np.nan)
        if inputs is not None and inputs.shape == matrix.shape:
            similarity = residual_similarity(inputs, matrix)
            yield self._row("residual_similarity", layer, similarity, n_rows=n)

    def _of_segments(self, layer: int, matrix: np.ndarray, places: np.ndarray) -> Iterator[Row]:
        """The first and the last half of the sequence, each by itself, equally many rows."""
        halves = {"front": matrix[places < 0.5], "back": matrix[places >= 0.5]}
        n = min(len(half) for half in halves.values())
        if n < MIN_ROWS:
            return
        for segment, half in halves.items():
            rows = half[np.arange(n) * len(half) // n]
            ratio = rank_ratio(rows, "raw")
            yield self._row("segment_rank", layer, ratio, variant="raw", segment=segment, n_rows=n)

    def _of_attention(self, kind: str, layer: int, heads: np.ndarray, warm: bool) -> Iterator[Row]:
        """Statistics of an attention, [4, H] as ``capture.ATTENTION`` names them."""
        entropy, normalised, no_sink, max_logit = heads
        for head, value in enumerate(entropy):
            yield self._row("entropy", layer, float(value), head=head)
        yield self._row("entropy_mean", layer, float(entropy.mean()))
        yield self._row("entropy_min", layer, float(entropy.min()), head=int(entropy.argmin()))
        yield self._row("entropy_normalised", layer, float(normalised.mean()))
        yield self._row("entropy_no_sink", layer, float(no_sink.mean()))
        yield self._row("max_logit", layer, float(max_logit.max()), head=int(max_logit.argmax()))
        fallen = self._heads.share_fallen(kind, layer, entropy.tolist(), warm=warm)
        yield self._row("heads_fallen", layer, fallen)
