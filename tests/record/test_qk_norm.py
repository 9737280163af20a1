"""Queries and keys of bounded length: the bound holds, is reached, and attention stays open."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.demo.model import GPT, Attention, GPTConfig, next_byte_loss
from auditor.measure.spectrum import attention_entropy
from auditor.record.qk_norm import QKNorm

ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Relative, of a product of two vectors that were rounded once each."""


def logits(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Attention logits in float64: of the numbers as they are, without rounding of ours."""
    return q.double() @ k.double().transpose(-1, -2) / math.sqrt(q.shape[-1])


@settings(max_examples=150, deadline=None)
@given(
    d=st.sampled_from([1, 3, 8, 64]),
    dtype=st.sampled_from(list(ROUNDING)),
    exponent=st.floats(-12, 38),
    kind=st.sampled_from(["normal", "one huge entry", "zero row", "aligned"]),
    seed=st.integers(0, 2**16),
)
def test_no_logit_exceeds_the_bound(
    d: int, dtype: torch.dtype, exponent: float, kind: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    norm = QKNorm(d).to(torch.float64 if dtype == torch.float64 else torch.float32)
    with torch.no_grad():
        norm.q_scale.copy_(torch.randn(d, generator=generator) * 3)
        norm.k_scale.copy_(torch.randn(d, generator=generator) * 3)
    q, k = torch.randn(2, 2, 3, 5, d, generator=generator, dtype=torch.float64)
    if kind == "one huge entry":
        q[..., 0] *= 1e6
    if kind == "zero row":
        q[0, 0, 0] = 0
    if kind == "aligned":
        k = q.clone()
    limit = torch.finfo(dtype).max
    q, k = ((x * 10**exponent).clamp(-limit, limit).to(dtype) for x in (q, k))
    normed_q, normed_k = norm(q, k)
    assert normed_q.dtype == dtype and normed_q.shape == q.shape
    found = logits(normed_q, normed_k)
    assert found.isfinite().all()
    assert found.abs().max() <= norm.logit_bound() * (1 + ROUNDING[dtype])


def test_the_bound_is_reached_by_vectors_along_one_axis() -> None:
    norm = QKNorm(16)
    with torch.no_grad():
        norm.q_scale[5], norm.k_scale[5] = 2.0, -3.0
    axis = torch.zeros(1, 1, 1, 16)
    axis[..., 5] = 1e4
    found = logits(*norm(axis, axis)).item()
    assert norm.logit_bound() == pytest.approx(6 * 4)
    assert found == pytest.approx(-24.0, rel=1e-5)


@pytest.mark.parametrize("size", [1e-8, 1e-3, 1.0, 1e3])
def test_it_is_the_rms_norm_with_its_gradients(size: float) -> None:
    """Against the formula as written in the docstring, in float64."""
    norm = QKNorm(8).double()
    with torch.no_grad():
        norm.q_scale.copy_(torch.linspace(0.5, 2, 8))
    x = (size * torch.randn(2, 3, 4, 8, dtype=torch.float64)).requires_grad_()
    y = x.detach().clone().requires_grad_()
    weights = torch.randn(2, 3, 4, 8, dtype=torch.float64)
    found, _ = norm(x, x.detach())
    expected = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.q_scale.detach()
    torch.testing.assert_close(found, expected)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_zeros_stay_zeros_and_have_finite_gradients() -> None:
    x = torch.zeros(1, 1, 2, 4, requires_grad=True)
    q, _ = QKNorm(4)(x, x)
    q.sum().backward()
    assert torch.equal(q, torch.zeros_like(q))
    assert x.grad is not None and x.grad.isfinite().all()


def test_attention_that_had_collapsed_is_as_open_as_before() -> None:
    """Scaled by 100, attention looks at one key; normalised, it does not notice the scale."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 4, 64, 32)
    norm = QKNorm(32)

    def entropy(q: torch.Tensor, k: torch.Tensor) -> float:
        hidden = torch.ones(64, 64, dtype=torch.bool).triu(1)
        p = logits(q, k).masked_fill(hidden, -math.inf).softmax(-1)
        return float(np.mean(attention_entropy(p.numpy())))

    plain = entropy(q, k)
    assert entropy(100 * q, 100 * k) < 0.05 * plain
    with torch.no_grad():
        assert entropy(*norm(100 * q, 100 * k)) == pytest.approx(entropy(*norm(q, k)), rel=1e-4)
        assert entropy(*norm(100 * q, 100 * k)) == pytest.approx(plain, rel=0.05)


class WatchedAttention(Attention):
    """The demo's attention, with the norm or without, noting the largest logit of each forward."""

    def __init__(self, config: GPTConfig, *, normed: bool) -> None:
        super().__init__(config)
        self.qk_norm = QKNorm(config.width // config.n_heads) if normed else None
        self.largest: list[float] = []
        self.bounds: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_heads, D // self.n_heads).permute(2, 0, 3, 1, 4)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
            self.bounds.append(self.qk_norm.logit_bound())
        self.largest.append(float(logits(q.detach(), k.detach()).abs().max()))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, D))


def trained_at_a_far_too_high_rate(*, normed: bool) -> list[WatchedAttention]:
    torch.manual_seed(0)
    config = GPTConfig(n_positions=16, width=32, n_blocks=2)
    model = GPT(config)
    for block in model.blocks:
        block.attention = WatchedAttention(config, normed=normed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(30):
        batch = torch.randint(0, 256, (8, 17), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        next_byte_loss(model, batch).backward()
        optimizer.step()
    return [block.attention for block in model.blocks]


def test_logits_stay_bounded_at_a_far_too_high_learning_rate() -> None:
    normed = trained_at_a_far_too_high_rate(normed=True)
    for attention in normed:
        for largest, bound in zip(attention.largest, attention.bounds, strict=True):
            assert largest <= bound * (1 + 1e-4)
    largest = max(max(attention.largest) for attention in normed)
    plain = trained_at_a_far_too_high_rate(normed=False)
    assert max(max(attention.largest) for attention in plain) > 10 * largest


@pytest.mark.parametrize(("d", "eps"), [(0, 1e-6), (8, 0.0), (8, -1.0)])
def test_sizes_that_make_no_sense_are_refused(d: int, eps: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        QKNorm(d, eps)
