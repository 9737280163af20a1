"""Reading activations during one forward pass, and reducing them to what a signal needs.

Shapes: **B** samples, **T** positions, **D** width, **H** heads, **Q** sampled queries, **n** rows.

Hooks stay on the model for one forward only. Attention is seen where it is computed: a torch
function mode takes q, k and v from ``scaled_dot_product_attention`` (after rotary embedding) and
probabilities from a ``softmax`` over [B, H, T, T]. Nothing here draws random numbers, changes
gradients or synchronises a device.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from auditor.record.sites import Site

N_ROWS: Final = 512
"""Positions a token rank is taken over."""

N_VALUE_ROWS: Final = 256
"""Positions a value rank is taken over: it is compared with its own past alone, so a coarser one
will do."""

N_SAMPLES: Final = 64
"""Samples a sample rank is taken over, at most; smaller micro-batches of a step are pooled."""

ENTROPY_SAMPLES: Final = 4
ENTROPY_QUERIES: Final = 32
"""Samples and queries an attention entropy is taken over; all heads."""


ATTENTION: Final = ("entropy", "entropy_normalised", "entropy_no_sink", "max_logit")
"""Rows of what is captured of an attention, each per head.

Entropy in nats; divided by the log of the number of visible keys, so that lengths compare; in nats
with the first key left out, which many heads rest on; and the largest logit.
"""


@dataclass
class Captured:
    """What forwards showed; tensors float32 on the model's device, by layer (-1: embedding).

    Rows of further forwards are added until there are enough; of attention the first is kept. Of a
    block that a forward uses several times, the first use is taken.
    ``places``: where in its sample each row of ``positions`` lies, in [0, 1). ``uses``: of a block
    in one forward, the most that there were.
    """

    positions: dict[int, Tensor] = field(default_factory=dict)  # [n, D]
    places: dict[int, np.ndarray] = field(default_factory=dict)  # f64 [n]
    samples: dict[int, Tensor] = field(default_factory=dict)  # [B, D], mean over positions
    values: dict[int, Tensor] = field(default_factory=dict)  # [n, H * head width]
    attention: dict[int, Tensor] = field(default_factory=dict)  # [len(ATTENTION), H]
    uses: dict[int, int] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        """Memory of the tensors."""
        parts = (self.positions, self.samples, self.values, self.attention)
        return sum(tensor.nbytes for part in parts for tensor in part.values())

    @property
    def full(self) -> bool:
        """Whether another forward would add nothing."""
        enough = (
            all(len(rows) >= n for rows in have.values())
            for have, n in ((self.positions, N_ROWS), (self.samples, N_SAMPLES))
        )
        return bool(self.positions) and all(enough)


@contextmanager
def capturing(
    sites: Sequence[Site],
    failed: Callable[[str, Exception], None],
    captured: Captured | None = None,
    model: nn.Module | None = None,
) -> Iterator[Captured]:
    """Capture the forwards of the blocks inside the ``with``, on top of what was ``captured``.

    Inside is one forward of the model, or, with ``model`` given, as many as that is called for. A
    failure of ours inside the forward is passed to ``failed`` and does not disturb it.
    """
    captured = Captured() if captured is None else captured
    mode = _AttentionMode(captured, failed)
    handles: list[Any] = []
    uses: collections.Counter[int] = collections.Counter()  # of this forward
    in_forward = model is None

    def begin(*_: Any) -> None:
        nonlocal in_forward
        in_forward = True
        uses.clear()

    def before(site: Site) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            uses[site.layer] += 1 if in_forward else 0
            if uses[site.layer] > 1:
                return
            mode.layer = site.layer
            if site.layer == 0:
                with _guard(failed, "embedding"):
                    _take(captured, -1, _hidden_states(args, kwargs), site.batch_first)

        return hook

    def after(site: Site) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            mode.layer = None
            n = uses[site.layer]
            captured.uses[site.layer] = max(captured.uses.get(site.layer, 0), n)
            if n > 1:
                return
            with _guard(failed, site.path):
                _take(captured, site.layer, output, site.batch_first)

        return hook

    try:
        if model is not None:
            handles.append(model.register_forward_pre_hook(begin))
        for site in sites:
            handles.append(site.module.register_forward_pre_hook(before(site), with_kwargs=True))
            handles.append(site.module.register_forward_hook(after(site)))
        with mode:
            yield captured
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _guard(failed: Callable[[str, Exception], None], place: str) -> Iterator[None]:
    try:
        with torch.no_grad(), _mode_off():
            yield
    except Exception as error:
        failed(f"capture of {place}", error)


def _mode_off() -> Any:
    """Our own arithmetic is not the model's: keep it out of the attention mode."""
    return torch._C.DisableTorchFunction()


def _take(captured: Captured, layer: int, output: Any, batch_first: bool) -> None:
    x = _first_tensor(output)
    if x is not None and x.ndim == 2:  # packed samples without a batch dimension
        x = x[None]
    if x is None or x.ndim != 3:
        raise TypeError(f"expected activations [B, T, D], got {_shape(output)}")
    x = x.detach() if batch_first else x.detach().transpose(0, 1)
    B, T = x.shape[:2]
    # Micro-batches of one step: rows are added.
    wanted = N_ROWS - len(captured.positions.get(layer, ()))
    if wanted > 0:
        rows = sampled_rows(x.flatten(0, 1), wanted).float()
        places = (_spread(np.arange(min(B * T, wanted)), B * T) % T) / T
        if layer in captured.positions:
            rows = torch.cat([captured.positions[layer], rows])
            places = np.concatenate([captured.places[layer], places])
        captured.positions[layer], captured.places[layer] = rows, places
    wanted = N_SAMPLES - len(captured.samples.get(layer, ()))
    if wanted > 0:
        pooled = x[:wanted].mean(dim=1, dtype=torch.float32)
        if layer in captured.samples:
            pooled = torch.cat([captured.samples[layer], pooled])
        captured.samples[layer] = pooled


def _hidden_states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a block is called on, among masks and positions: the first activations."""
    given = (*args, *kwargs.values())
    for one in given:
        if isinstance(one, Tensor) and one.is_floating_point() and one.ndim in (2, 3):
            return one
    return given


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Mapping):  # also the output classes of transformers
        output = tuple(output.values())
    while isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


def _shape(x: Any) -> str:
    return str(list(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def sampled_rows(rows: Tensor, most: int) -> Tensor:
    """At most so many of the rows, spread over them; a copy, the model may change its own."""
    if len(rows) <= most:
        return rows.clone()
    return rows.index_select(0, _spread(torch.arange(most, device=rows.device), len(rows)))


def _spread(numbers: Any, n: int) -> Any:
    """Which of n rows the samples of these ``numbers``, all from 0, are; an array or a tensor.

    One row of each of equal stretches, at a place in it that goes from stretch to stretch by the
    golden ratio. Evenly spaced rows are the same few places of every sequence: what differs from
    place to place is missed, and a rank ratio of real activations is some .02 too high.
    """
    first = numbers * n // len(numbers)
    length = (numbers + 1) * n // len(numbers) - first
    return first + numbers * _GOLDEN % 2**16 * length // 2**16


_GOLDEN: Final = 40503  # the golden ratio's fractional part, in units of 2**-16


class _AttentionMode(TorchFunctionMode):
    """Looks at attention as the model calls it; passes every call on unchanged."""

    def __init__(self, captured: Captured, failed: Callable[[str, Exception], None]) -> None:
        super().__init__()
        self.layer: int | None = None
        self._captured = captured
        self._failed = failed
        self._probabilities: torch.Size | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # what the model calls compiles itself: not our business
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if self.layer is not None:
            if func is F.scaled_dot_product_attention:
                with _guard(self._failed, "attention"):
                    self._sdpa(*args, **kwargs)
            elif func is F.multi_head_attention_forward:
                with _guard(self._failed, "attention"):
                    self._multi_head(*args, **kwargs)
            elif type(func).__name__ == _FLEX:
                with _guard(self._failed, "attention"):
                    self._flex(*args, **kwargs)
            elif func in _SOFTMAX and isinstance(result, Tensor) and result.ndim == 4:
                with _guard(self._failed, "softmax"):
                    self._softmax(args[0], result)
            elif self._probabilities is not None and func in _PRODUCT and len(args) == 2:
                with _guard(self._failed, "attention"):
                    self._weighted(*args)
        return result

    def _sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        assert self.layer is not None
        if query.ndim == 3:  # heads are part of the batch dimension, or there is one
            query, key, value = query[:, None], key[:, None], value[:, None]
        if query.ndim != 4:
            return
        heads_last = value.detach().transpose(1, 2).flatten(2)
        self._keep_values(heads_last.flatten(0, 1))
        if self.layer in self._captured.attention:
            return
        self._captured.attention[self.layer] = attention_of(
            query.detach(), key.detach(), attn_mask, is_causal=is_causal, scale=scale
        )

    def _flex(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Callable[..., Tensor],
        block_mask: tuple[Any, ...],
        scale: float,
        *_: Any,
        **__: Any,
    ) -> None:
        """``flex_attention``, run eagerly; the last of a block mask says which keys are seen."""
        assert self.layer is not None
        self._keep_values(value.detach().transpose(1, 2).flatten(2).flatten(0, 1))
        if self.layer not in self._captured.attention:
            self._captured.attention[self.layer] = flex_attention_of(
                query.detach(), key.detach(), score_mod, block_mask[-1], scale=scale
            )

    def _multi_head(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        embed_dim_to_check: int,
        num_heads: int,
        in_proj_weight: Tensor | None,
        in_proj_bias: Tensor | None,
        *_: Any,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        **__: Any,
    ) -> None:
        """``nn.MultiheadAttention``, whose inner attention no mode sees: [T, B, D] inputs."""
        if in_proj_weight is None or query.ndim != 3:
            return
        B, T = query.shape[1], key.shape[0]
        biases = in_proj_bias.chunk(3) if in_proj_bias is not None else (None, None, None)
        weights = in_proj_weight.chunk(3)
        q, k, v = (
            F.linear(x.detach(), w.detach(), b if b is None else b.detach())
            .unflatten(2, (num_heads, -1))
            .permute(1, 2, 0, 3)
            for x, w, b in zip((query, key, value), weights, biases, strict=True)
        )
        mask = attn_mask
        if mask is not None and mask.ndim == 3:  # one for each sample and head
            mask = mask.unflatten(0, (B, num_heads))
        if mask is not None and mask.dtype == torch.bool:
            mask = ~mask  # here True hides a key, in scaled_dot_product_attention it shows one
        if key_padding_mask is not None:
            padding = key_padding_mask.view(B, 1, 1, T)
            if padding.dtype == torch.bool:
                padding = torch.zeros_like(padding, dtype=q.dtype).masked_fill(padding, -math.inf)
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf)
            mask = padding if mask is None else padding + mask
        self._sdpa(q, k, v, mask, is_causal=is_causal and mask is None)

    def _keep_values(self, rows: Tensor) -> None:
        """Values [B * T, H * head width] of the layer's first attention, pooled like positions."""
        assert self.layer is not None
        have = self._captured.values.get(self.layer)
        wanted = N_VALUE_ROWS - (0 if have is None else len(have))
        if wanted > 0:
            taken = sampled_rows(rows, wanted).float()
            self._captured.values[self.layer] = taken if have is None else torch.cat([have, taken])

    def _weighted(self, probabilities: Any, value: Any) -> None:
        """Attention written out: the product after a softmax shows the values [B, H, T, d]."""
        expected, self._probabilities = self._probabilities, None
        if (
            isinstance(value, Tensor)
            and value.ndim == 4
            and getattr(probabilities, "shape", None) == expected
            and value.shape[2] == probabilities.shape[3]
        ):
            self._keep_values(value.detach().transpose(1, 2).flatten(2).flatten(0, 1))

    def _softmax(self, logits: Tensor, probabilities: Tensor) -> None:
        assert self.layer is not None
        self._probabilities = probabilities.shape
        if self.layer in self._captured.attention:
            return
        index = _query_index(logits.shape[2], logits.device)
        sampled = logits.detach()[:ENTROPY_SAMPLES].index_select(2, index).float()
        p = probabilities.detach()[:ENTROPY_SAMPLES].index_select(2, index).float()
        self._captured.attention[self.layer] = _statistics(p, sampled)


_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}
_FLEX: Final = "FlexAttentionHOP"  # by name: to import it takes a second
_PRODUCT = {torch.matmul, Tensor.matmul, Tensor.__matmul__}


def _query_index(n_queries: int, device: torch.device) -> Tensor:
    n = min(n_queries, ENTROPY_QUERIES)
    return torch.arange(n, device=device) * n_queries // n


def _statistics(p: Tensor, logits: Tensor) -> Tensor:
    """Rows of ``ATTENTION`` from probabilities and logits [B, H, Q, K]: [4, H].

    Means over samples and queries that see a key at all. A query that sees one key has no entropy
    to lose: it is left out of the normalised form, and of the form without the sink when that key
    is the sink.
    """
    entropy = torch.special.entr(p).sum(dim=-1)
    n_visible = (p > 0).sum(dim=-1)
    normalised = torch.where(n_visible > 1, entropy / n_visible.clamp(min=2).log(), math.nan)
    rest = p[..., 1:]
    total = rest.sum(dim=-1, keepdim=True)
    no_sink = torch.special.entr(rest / total.clamp(min=1e-12)).sum(dim=-1)
    no_sink = torch.where(total[..., 0] > 0, no_sink, math.nan)
    return torch.stack(
        [
            entropy.nanmean(dim=(0, 2)),
            normalised.nanmean(dim=(0, 2)),
            no_sink.nanmean(dim=(0, 2)),
            logits.amax(dim=(0, 2, 3)),
        ]
    )


def attention_of(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Rows of ``ATTENTION`` per head [4, H], recomputed from q [B, H, T, d] and k [B, G, T, d].

    Fused kernels never show their probabilities; a few samples and queries are enough. With
    grouped queries (G < H) each key head serves H / G query heads.
    """
    n_queries, n_keys = query.shape[-2], key.shape[-2]
    logits, index = _sampled_logits(query, key, scale)
    if is_causal:
        hidden = torch.arange(n_keys, device=query.device) > index[:, None]
        logits = logits.masked_fill(hidden, -math.inf)
    if attn_mask is not None:
        whole = (query.shape[0], 1, n_queries, n_keys)
        mask = attn_mask.expand(torch.broadcast_shapes(attn_mask.shape, whole))
        mask = mask[:ENTROPY_SAMPLES].index_select(2, index)
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
    return _statistics(logits.softmax(dim=-1), logits)


def flex_attention_of(
    query: Tensor,
    key: Tensor,
    score_mod: Callable[..., Tensor],
    mask_mod: Callable[..., Tensor],
    *,
    scale: float | None = None,
) -> Tensor:
    """The same where functions of (batch, head, query, key) change logits and say what is seen."""
    logits, index = _sampled_logits(query, key, scale)
    B, H, _, n_keys = logits.shape
    numbers = [torch.arange(n, device=logits.device) for n in (B, H)]
    places = (*numbers, index, torch.arange(n_keys, device=logits.device))
    logits = _over_all(score_mod, (0,))(logits, *places)
    visible = _over_all(mask_mod, ())(*places)
    logits = logits.masked_fill(~visible, -math.inf)
    return _statistics(logits.softmax(dim=-1), logits)


def _over_all(function: Callable[..., Tensor], first: tuple[int, ...]) -> Callable[..., Tensor]:
    """A function of single numbers (b, h, q, k), made one of vectors of them: [B, H, Q, K]."""
    for place in (3, 2, 1, 0):
        dims = tuple(0 if other == place else None for other in range(4))
        function = torch.vmap(function, in_dims=(*first, *dims))
    return function


def _sampled_logits(query: Tensor, key: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Logits [B, H, Q, K] of a few samples and queries, and which queries, i64 [Q]."""
    index = _query_index(query.shape[-2], query.device)
    q = query[:ENTROPY_SAMPLES].index_select(2, index).float()
    k = key[:ENTROPY_SAMPLES].float()
    if k.shape[1] != q.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    with torch.autocast(q.device.type, enabled=False):
        return q @ k.transpose(-2, -1) * (scale or 1.0 / math.sqrt(q.shape[-1])), index
