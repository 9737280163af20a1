"""Documents of a token file: which of them a window overlaps, and how much of each.

Training on random windows of one long file (nanoGPT's way) shows the model pieces of documents that
nobody named. What was seen of which document is known all the same, from where the documents begin.

Shapes: **N** documents, **T** tokens of a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from auditor.errors import IdentityError
from auditor.record.identity import Located

SCANNED_TOKENS: Final = 2**24
"""Tokens looked at in one piece: a memmap larger than memory is scanned as well."""


@dataclass(frozen=True)
class _File:
    """A memmap on its way to another process."""

    path: str
    dtype: str
    offset: int
    n_tokens: int

    def open(self) -> np.memmap:
        return np.memmap(self.path, self.dtype, "r", self.offset, (self.n_tokens,))


class DocumentIndex:
    """Where the documents of a token file begin.

        tokens = np.memmap("train.bin", dtype=np.uint16, mode="r")
        documents = DocumentIndex.from_eot(tokens, eot=50256, window=T, source="web")
        audited = AuditedSampler(run="run/", optimizer=optimizer, locator=documents.locator)
        starts = torch.randint(len(tokens) - T, (B,))
        x = torch.stack([torch.from_numpy(tokens[i : i + T].astype(np.int64)) for i in starts])
        audited.record(starts, x)

    A window is recorded as its documents, one exposure each: ``part`` counts them, ``row`` is the
    number of the document, ``n_tokens`` how many of its tokens were in the window.

    Args:
        offsets: int64 [N + 1], in order: document ``i`` is tokens ``offsets[i]`` to
            ``offsets[i + 1]``. Tokens outside of all documents belong to none.
        window: T, tokens of a window.
        source, shard: names for all of them.
        tokens: the file, [at least offsets[-1]]: the content that duplication is measured on.
            Without it, it is the window as the loop has it.
        stride: where samples are told by a dataset index, tokens from one window to the next;
            1 where they are told by the window's first token.

    Raises:
        ValueError: offsets that are not in order; no positive window or stride.
    """

    def __init__(
        self,
        offsets: Any,
        *,
        window: int,
        source: str | None = None,
        shard: str | None = None,
        tokens: Any = None,
        stride: int = 1,
    ) -> None:
        self.offsets = np.asarray(offsets, dtype=np.int64)
        if self.offsets.ndim != 1 or len(self.offsets) < 2:
            raise ValueError(f"offsets must be [N + 1], N > 0, got shape {self.offsets.shape}")
        falls = np.flatnonzero(np.diff(self.offsets) < 0)
        if len(falls) or self.offsets[0] < 0:
            at = int(falls[0]) if len(falls) else 0
            raise ValueError(f"offsets must be in order, got {self.offsets[at : at + 2]} at {at}")
        if tokens is not None and len(tokens) < self.offsets[-1]:
            raise ValueError(f"documents end at {self.offsets[-1]} of {len(tokens)} tokens")
        if window < 1 or stride < 1:
            raise ValueError(f"window and stride must be positive, got {window} and {stride}")
        self.window = window
        self.stride = stride
        self.source = source
        self.shard = shard
        self._tokens = tokens
        self._prefix = "doc-" if shard is None else f"{shard}:doc-"

    @classmethod
    def from_eot(
        cls,
        tokens: Any,
        eot: int,
        *,
        window: int,
        source: str | None = None,
        shard: str | None = None,
        stride: int = 1,
        eot_begins: bool = False,
    ) -> DocumentIndex:
        """Find the documents of a token array [n] (a memmap is read once, piece by piece).

        Args:
            eot: the token between documents. It is the last token of its document, or with
                ``eot_begins`` the first.
            window, source, shard, stride: as for the class.
        """
        n = len(tokens)
        if n == 0:
            raise ValueError("there are no tokens")
        found = [np.zeros(0, np.int64)]
        for start in range(0, n, SCANNED_TOKENS):
            piece = np.asarray(tokens[start : start + SCANNED_TOKENS])
            found.append(np.flatnonzero(piece == eot).astype(np.int64) + start)
        bounds = np.concatenate(found) + (0 if eot_begins else 1)
        bounds = bounds[(bounds > 0) & (bounds < n)]
        return cls(
            np.concatenate([[0], bounds, [n]]),
            window=window,
            source=source,
            shard=shard,
            tokens=tokens,
            stride=stride,
        )

    def __len__(self) -> int:
        """Documents, N."""
        return len(self.offsets) - 1

    def overlaps(self, start: int, n_tokens: int) -> list[tuple[int, int, int]]:
        """The documents in tokens ``start`` to ``start + n_tokens``: (document, first, end)."""
        end = start + n_tokens
        first = int(np.searchsorted(self.offsets, start, side="right")) - 1
        last = int(np.searchsorted(self.offsets, end, side="left"))
        overlaps = []
        for document in range(max(first, 0), min(last, len(self))):
            begin, stop = self.offsets[document : document + 2].tolist()
            begin, stop = max(begin, start), min(stop, end)
            if begin < stop:  # not an empty document
                overlaps.append((document, begin, stop))
        return overlaps

    def locator(self, index: Any, sample: Any) -> list[Located]:
        """The documents of the window ``index``; to be given as ``locator=``.

        Raises:
            IdentityError: there is no index, or no document in the window.
        """
        if index is None:
            raise IdentityError(
                "a window without its first token cannot be located",
                remedy="Give AuditedSampler.record the first token of each window",
            )
        start = int(index) * self.stride
        overlaps = self.overlaps(start, self.window)
        if not overlaps:
            raise IdentityError(
                f"tokens {start} to {start + self.window} are in no document",
                path=self.shard,
                remedy=f"Documents are tokens {self.offsets[0]} to {self.offsets[-1]}",
            )
        return [
            Located(
                sample_id=f"{self._prefix}{document}",
                source=self.source,
                shard=self.shard,
                row=document,
                n_tokens=stop - begin,
                content=self._content(sample, start, begin, stop),
            )
            for document, begin, stop in overlaps
        ]

    def __getstate__(self) -> dict[str, Any]:
        """For loader workers that are spawned: a memmap is opened there, not copied whole."""
        tokens = self._tokens
        if isinstance(tokens, np.memmap) and tokens.filename is not None and tokens.ndim == 1:
            tokens = _File(str(tokens.filename), tokens.dtype.str, tokens.offset, len(tokens))
        return {**self.__dict__, "_tokens": tokens}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tokens = state["_tokens"]
        if isinstance(tokens, _File):
            state = {**state, "_tokens": tokens.open()}
        self.__dict__.update(state)

    def _content(self, sample: Any, start: int, begin: int, stop: int) -> Any:
        if self._tokens is not None:
            return np.asarray(self._tokens[begin:stop]).astype(np.int64)
        if getattr(sample, "ndim", 0) == 1:
            return sample[begin - start : stop - start]
        return None
