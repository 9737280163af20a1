"""A small byte-level GPT in plain PyTorch, shaped like large ones: pre-norm, fused QKV, SDPA."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of the model; the defaults train a few hundred steps in seconds on one core."""

    n_vocabulary: int = 256
    n_positions: int = 128
    n_blocks: int = 2
    n_heads: int = 4
    width: int = 64


class Attention(nn.Module):
    """Causal self-attention, [B, T, D] to [B, T, D]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_heads, D // self.n_heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    """Attention and MLP, each added to the residual stream after a layer norm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Next-byte model: int64 [B, T] to logits float32 [B, T, n_vocabulary]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.n_vocabulary, config.width)
        self.positions = nn.Embedding(config.n_positions, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_blocks))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.n_vocabulary, bias=False)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_byte_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy in nats of windows int64 [B, T + 1], each byte from those before it.

    Windows shorter than the rest are padded with -1, which is not predicted.
    """
    inputs, targets = batch[:, :-1].clamp(min=0), batch[:, 1:]
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
