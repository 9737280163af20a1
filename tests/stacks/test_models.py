"""Models of transformers, made small from their configurations: found and seen without an edit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install transformers"
)

import polars as pl
import torch
import transformers

from auditor import GradeMonitor, Run
from auditor.measure.spectrum import attention_entropy
from auditor.record.capture import ENTROPY_SAMPLES
from auditor.record.sites import find_blocks

LAYERS, HEADS, WIDTH, T = 3, 4, 32, 24
COMMON = {
    "vocab_size": 64, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "intermediate_size": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**COMMON, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {
        "vocab_size": 64, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64,
        "bos_token_id": 1, "eos_token_id": 2,
    }),
    "llama": ("Llama", GROUPED),
    "mistral": ("Mistral", GROUPED),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 8}),
    "gpt_neox": ("GPTNeoX", COMMON),
    "gemma": ("Gemma", {**GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2", {**GROUPED, "head_dim": 8}),
    "olmo": ("Olmo", COMMON),
    "olmo2": ("Olmo2", COMMON),
    "phi": ("Phi", COMMON),
    "mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip


def make(name: str, attention: str) -> Any:
    family, settings = MODELS[name]
    if (name, attention) == ("gemma2", "sdpa"):
        pytest.skip("transformers has no SDPA for Gemma 2")
    config = getattr(transformers, f"{family}Config")(**settings, attn_implementation=attention)
    torch.manual_seed(0)
    return getattr(transformers, f"{family}{'LMHead' if name == 'gpt2' else 'ForCausal'}"
                   f"{'Model' if name == 'gpt2' else 'LM'}")(config)  # fmt: skip


def batch(seed: int) -> torch.Tensor:
    return torch.randint(3, 64, (4, T), generator=torch.Generator().manual_seed(seed))


def train(model: Any, run: Path | None) -> tuple[list[float], list[torch.Tensor], str]:
    model.train()
    torch.manual_seed(1)  # dropout
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = None
    if run is not None:
        held_out = {"input_ids": batch(9), "labels": batch(9)}
        monitor = GradeMonitor(model, run=run, every=1, probe=held_out)
    losses = []
    for step in range(2):
        ids = batch(step)
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        if monitor is not None:
            monitor.step(loss, optimizer=optimizer)
        optimizer.step()
        losses.append(loss.item())
    described = ""
    if monitor is not None:
        monitor.close()
        assert not monitor._recorder.failures
        described = monitor.describe()
    return losses, [parameter.detach() for parameter in model.parameters()], described


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_blocks_attention_and_values_are_seen_and_training_is_unchanged(
    name: str, attention: str, tmp_path: Path
) -> None:
    plain_losses, plain_weights, _ = train(make(name, attention), None)
    losses, weights, described = train(make(name, attention), tmp_path / "run")
    assert losses == plain_losses
    assert all(torch.equal(a, b) for a, b in zip(weights, plain_weights, strict=True))
    assert described.count("output, attention, values") == LAYERS, described
    assert "not seen" not in described
    signals = Run.open(tmp_path / "run").scan("signals").collect()
    for kind in ("live", "probe"):
        own = signals.filter(pl.col("kind") == kind)
        for signal in ("token_rank", "entropy", "value_rank", "max_logit", "residual_similarity"):
            rows = own.filter(pl.col("signal") == signal)
            assert rows["layer"].unique().sort().to_list() == list(range(LAYERS)), (kind, signal)
            assert rows["value"].is_not_null().all(), (kind, signal)
    assert signals.filter(pl.col("signal") == "probe_loss")["value"].is_not_null().all()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_entropy_is_that_of_the_probabilities_the_model_itself_returns(
    name: str, attention: str, tmp_path: Path
) -> None:
    model = make(name, "eager").eval()
    with torch.no_grad():
        returned = model(input_ids=batch(9), output_attentions=True, use_cache=False).attentions
    train(make(name, attention), tmp_path / "run")
    signals = Run.open(tmp_path / "run").scan("signals").collect()
    for layer, probabilities in enumerate(returned):
        found = signals.filter(
            (pl.col("signal") == "entropy") & (pl.col("kind") == "probe")
            & (pl.col("step") == 0) & (pl.col("layer") == layer)
        ).sort("head")  # fmt: skip
        p = probabilities[:ENTROPY_SAMPLES].double().numpy()  # T < 32: every query is sampled
        np.testing.assert_allclose(found["value"], attention_entropy(p).mean(axis=0), atol=2e-4)


def test_encoders_and_both_stacks_of_an_encoder_decoder_are_found() -> None:
    bert = transformers.BertModel(transformers.BertConfig(**{**COMMON, "num_hidden_layers": 2}))
    assert [site.path for site in find_blocks(bert)] == ["encoder.layer.0", "encoder.layer.1"]
    t5 = transformers.T5Model(
        transformers.T5Config(
            vocab_size=64, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=2, num_heads=HEADS
        )
    )
    assert [site.path for site in find_blocks(t5)] == [
        f"{stack}.block.{n}" for stack in ("encoder", "decoder") for n in range(2)
    ]
