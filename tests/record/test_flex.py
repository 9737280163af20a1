"""``flex_attention``: seen where the installed torch runs it, and not disturbed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from auditor import GradeMonitor, Run
from auditor.measure.spectrum import attention_entropy
from auditor.record.capture import ATTENTION, flex_attention_of

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")

T, HEADS, KEY_HEADS, WIDTH = 32, 4, 2, 32


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def within_document(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q // 12 == k // 12)


def near(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score - (q - k) * (h + 1) * 0.1  # as ALiBi does


class Block(nn.Module):
    """Its attention is not trained: PyTorch has no backward of it on the CPU."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.attend = [attend]
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: Any) -> torch.Tensor:
        q = self.q(x).detach().unflatten(2, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(x).detach().unflatten(2, (2, KEY_HEADS, -1)).permute(2, 0, 3, 1, 4)
        self.seen = q, k
        y = self.attend[0](q, k, v, score_mod=near, block_mask=mask, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, attend: Callable[..., Any] = flex_attention) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList([Block(attend), Block(attend)])
        self.head = nn.Linear(WIDTH, 64)
        self.mask = create_block_mask(causal, None, None, T, T, device="cpu")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(x)


def train(run: Path | None, attend: Callable[..., Any]) -> tuple[list[float], Model, str]:
    torch.manual_seed(0)
    model = Model(attend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    windows = torch.randint(0, 64, (5, 4, T + 1))
    monitor = None
    if run is not None:
        monitor = GradeMonitor(model, run=run, every=2, probe=windows[0, :, :-1])
    losses = []
    for batch in windows:
        optimizer.zero_grad()
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        if monitor is not None:
            monitor.step(loss, optimizer=optimizer)
        optimizer.step()
        losses.append(loss.item())
    told = ""
    if monitor is not None:
        monitor.close()
        assert not monitor._recorder.failures
        told = monitor.describe()
    return losses, model, told


@pytest.mark.parametrize("form", ["eager", "compiled"])
def test_attention_is_seen_and_training_is_bit_identical(form: str, tmp_path: Path) -> None:
    torch._dynamo.reset()

    def attend() -> Callable[..., Any]:
        if form == "eager":
            return flex_attention
        return torch.compile(flex_attention, backend="eager", fullgraph=True)

    losses, model, told = train(tmp_path / "run", attend())  # first: nothing is compiled yet
    plain_losses, plain, _ = train(None, attend())
    assert losses == plain_losses
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    assert told.count("output, attention, values") == 2, told
    signals = Run.open(tmp_path / "run").scan("signals").collect()
    entropies = signals.filter(pl.col("signal") == "entropy")
    of_probe = entropies.filter(pl.col("kind") == "probe")
    assert of_probe["step"].unique().sort().to_list() == [0, 2, 4]
    assert of_probe["value"].is_not_null().all()
    of_live = entropies.filter(pl.col("kind") == "live")["step"].unique().sort().to_list()
    assert of_live[-2:] == [2, 4]


@pytest.mark.parametrize("mask", [causal, within_document])
def test_entropy_is_that_of_the_probabilities(mask: Callable[..., Any]) -> None:
    """The probabilities, out of flex attention itself: values that are the identity."""
    torch.manual_seed(1)
    q, k = torch.randn(3, HEADS, T, 8), torch.randn(3, KEY_HEADS, T, 8)
    identity = torch.eye(T).expand(3, KEY_HEADS, T, T)
    blocks = create_block_mask(mask, None, None, T, T, device="cpu")
    p = flex_attention(
        q, k, identity, score_mod=near, block_mask=blocks, enable_gqa=True, scale=0.5
    )
    found = dict(zip(ATTENTION, flex_attention_of(q, k, near, mask, scale=0.5), strict=True))
    expected = attention_entropy(p.numpy()).mean(axis=0)
    np.testing.assert_allclose(found["entropy"], expected, atol=1e-5)
    n_visible = (p.numpy() > 0).sum(axis=-1)
    by_query = -(p * p.clamp(min=1e-30).log()).sum(dim=-1).numpy()
    of_many = np.where(n_visible > 1, by_query / np.log(np.maximum(n_visible, 2)), np.nan)
    np.testing.assert_allclose(
        found["entropy_normalised"], np.nanmean(of_many, axis=(0, 2)), atol=1e-5
    )
    assert all(math.isfinite(value) for value in found["max_logit"])


def test_probe_entropy_is_that_of_the_models_own_attention(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    ids = torch.randint(0, 64, (4, T))
    monitor = GradeMonitor(model, run=tmp_path / "run", every=1, probe=ids)
    monitor.step(model(ids).sum())
    monitor.close()
    with torch.no_grad():
        model(ids)
    signals = Run.open(tmp_path / "run").scan("signals").collect()
    for layer, block in enumerate(model.blocks):
        q, k = block.seen
        identity = torch.eye(T).expand(4, KEY_HEADS, T, T)
        p = flex_attention(q, k, identity, score_mod=near, block_mask=model.mask, enable_gqa=True)
        found = signals.filter(
            (pl.col("signal") == "entropy") & (pl.col("kind") == "probe")
            & (pl.col("layer") == layer)
        ).sort("head")["value"]  # fmt: skip
        np.testing.assert_allclose(found, attention_entropy(p.numpy()).mean(axis=0), atol=1e-5)


def test_fault_of_a_mask_in_our_own_arithmetic_is_counted_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("auditor.record.capture.flex_attention_of", broken)
    torch.manual_seed(0)
    model = Model()
    ids = torch.randint(0, 64, (4, T))
    monitor = GradeMonitor(model, run=tmp_path / "run", every=1, probe=ids)
    monitor.step(model(ids).sum())
    monitor.close()
    assert monitor._recorder.failures["capture of attention"] >= 2
    assert monitor.grade is not None
