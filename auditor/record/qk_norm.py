"""``QKNorm``: queries and keys of bounded length, so that attention logits are bounded."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class QKNorm(nn.Module):
    """Normalise queries and keys of each head before attention, with a learnable scale.

    Of a query q float [d], the RMS norm q / sqrt(mean(q^2) + eps), times ``q_scale`` [d]; of keys
    alike. As in Dehghani et al. 2023 (ViT-22B), with the RMS norm in place of their layer norm
    without bias; Henry et al. 2020 divided by the L2 norm and learnt one temperature, which differs
    by the factor sqrt(d). Each normalised vector is no longer than sqrt(d), so with attention's own
    factor 1/sqrt(d) no logit exceeds :meth:`logit_bound`.

    To be called between the projections (and their rotary embedding, which keeps lengths) and
    attention:

        q, k = self.qk_norm(q, k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    Args:
        d: width of a head.
        eps: added to the mean square.

    Raises:
        ValueError: ``d`` or ``eps`` is not positive.
    """

    def __init__(self, d: int, eps: float = 1e-6) -> None:
        super().__init__()
        if d < 1 or not eps > 0:
            raise ValueError(f"d and eps must be positive, got {d!r} and {eps!r}")
        self.eps = eps
        self.q_scale = nn.Parameter(torch.ones(d))
        self.k_scale = nn.Parameter(torch.ones(d))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, H, T, d] and keys [B, H, S, d] to the same shapes and types."""
        return _normalised(q, self.q_scale, self.eps), _normalised(k, self.k_scale, self.eps)

    def logit_bound(self) -> float:
        """max_i |q_scale_i * k_scale_i| * sqrt(d): the largest logit there can be, up to rounding.

        It is reached where query and key both point along the i of the largest product.
        """
        product = (self.q_scale.detach().double() * self.k_scale.detach().double()).abs().max()
        return float(product) * len(self.q_scale) ** 0.5

    def extra_repr(self) -> str:
        return f"d={len(self.q_scale)}, eps={self.eps}"


def _normalised(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # The same for any divisor: it keeps squares of huge entries in range, and no gradient needs to
    # pass through it.
    divisor = wide.detach().abs().amax(dim=-1, keepdim=True).clamp_min(eps**0.5)
    shrunk = wide / divisor
    mean_square = shrunk.square().mean(dim=-1, keepdim=True) + (eps**0.5 / divisor).square()
    return (shrunk * mean_square.rsqrt() * scale).to(x.dtype)
