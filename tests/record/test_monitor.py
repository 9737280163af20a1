"""The monitor measures what it says, and training does not notice it."""

from __future__ import annotations

import copy
import gc
import math
import random
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from auditor import AuditedSampler, GradeMonitor, Run
from auditor.cli import main
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.explain.grades import grades_of
from auditor.measure.spectrum import attention_entropy
from auditor.record.capture import ATTENTION, attention_of, capturing
from auditor.record.sites import find_blocks
from auditor.record.transfer import fetched, to_host

T, WIDTH, HEADS = 32, 48, 4


class DroppyGPT(nn.Module):
    """The demo's model with dropout and a batch norm, which a careless probe would disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(n_positions=T, width=WIDTH, n_heads=HEADS, n_blocks=3))
        self.dropout = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.dropout(self.gpt(ids)).transpose(1, 2)).transpose(1, 2)


def windows(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (n, T + 1), generator=torch.Generator().manual_seed(seed))


def train(run: Path | None, *, every: int = 3, n_steps: int = 10) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = DroppyGPT()
    model.gpt.blocks[0].eval()  # a part that the user keeps in evaluation mode
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader: Any = DataLoader(TensorDataset(windows(8 * n_steps)), batch_size=8, shuffle=True)
    monitor = None
    if run is not None:
        loader = AuditedSampler(loader, run=run)
        monitor = GradeMonitor(
            model, run=run, every=every, probe=windows(6, seed=9), probe_loss=next_byte_loss
        )
    losses = []
    for (batch,) in loader:
        optimizer.zero_grad()
        loss = next_byte_loss(model, batch)
        loss.backward()
        if monitor is not None:
            monitor.step(loss, optimizer=optimizer)
        optimizer.step()
        losses.append(loss.item())
    if monitor is not None:
        monitor.close()
    return model, losses, monitor


def test_training_is_bit_identical_with_the_monitor_on_and_off(tmp_path: Path) -> None:
    plain, plain_losses, _ = train(None)
    plain_random = torch.get_rng_state()
    audited, losses, monitor = train(tmp_path / "run")
    assert losses == plain_losses
    assert torch.equal(torch.get_rng_state(), plain_random)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, audited.state_dict()[name]), name
    assert [m.training for m in plain.modules()] == [m.training for m in audited.modules()]
    assert not any(module._forward_hooks for module in audited.modules())
    assert not any(module._forward_pre_hooks for module in audited.modules())
    assert not monitor._recorder.failures


def test_recorded_signals_equal_those_computed_by_hand(tmp_path: Path) -> None:
    """The probe's last block, from the model as it was at the step, through a float64 SVD."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(n_positions=T, width=WIDTH, n_heads=HEADS, n_blocks=2))
    probe, batch = windows(10, seed=3), windows(4, seed=4)
    monitor = GradeMonitor(
        model, run=tmp_path / "run", every=1, probe=probe, probe_loss=next_byte_loss
    )
    loss = next_byte_loss(model, batch)
    loss.backward()
    monitor.step(loss)
    monitor.close()
    signals = Run.open(tmp_path / "run").scan("signals").collect()

    def value(**which: Any) -> float:
        rows = signals.filter(*[pl.col(name) == wanted for name, wanted in which.items()])
        return float(rows["value"].item())

    for kind, ids in (("probe", probe[:, :-1]), ("live", batch[:, :-1])):
        with torch.no_grad():
            x = model.tokens(ids) + model.positions.weight[:T]
            embedded = x
            for block in model.blocks:
                normed = block.norm_attention(x)
                q, k, _ = (
                    part.view(len(ids), T, HEADS, -1).transpose(1, 2)
                    for part in block.attention.qkv(normed).split(WIDTH, dim=2)
                )
                x = block(x)
        rows = x.flatten(0, 1).double().numpy()  # fewer than 512: no row is left out
        for variant in ("raw", "centred"):
            centred = variant == "centred"
            matrix = rows - rows.mean(axis=0) if centred else rows
            s = np.linalg.svd(matrix, compute_uv=False)[:20]
            p = s / s.sum()
            ratio = math.exp(-(p * np.log(p)).sum()) / 20
            found = value(kind=kind, signal="token_rank", layer=1, variant=variant)
            assert found == pytest.approx(ratio, abs=1e-3)
        pooled = embedded.mean(dim=1).double().numpy()
        s = np.linalg.svd(pooled - pooled.mean(axis=0), compute_uv=False)[:20]
        s = s[: len(pooled) - 1]  # centring took one
        p = s / s.sum()
        ratio = math.exp(-(p * np.log(p)).sum()) / (len(pooled) - 1)
        found = value(kind=kind, signal="sample_rank", layer=-1)
        assert found == pytest.approx(ratio, abs=1e-3)

        logits = (q @ k.transpose(2, 3) / math.sqrt(WIDTH // HEADS)).double()[:4]
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
        p = logits.masked_fill(hidden, -math.inf).softmax(-1).numpy()
        entropy = attention_entropy(p).mean(axis=0)  # all 32 queries are sampled
        assert value(kind=kind, signal="entropy_mean", layer=1) == pytest.approx(
            entropy.mean(), abs=1e-5
        )
        assert value(kind=kind, signal="entropy_min", layer=1) == pytest.approx(
            entropy.min(), abs=1e-5
        )
        assert value(kind=kind, signal="max_logit", layer=1) == pytest.approx(
            float(logits.masked_fill(hidden, -math.inf).max()), abs=1e-4
        )
    assert value(signal="probe_loss") == pytest.approx(next_byte_loss(model, probe).item())
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    assert value(signal="grad_norm") == pytest.approx(norm, rel=1e-5)
    assert value(signal="loss") == pytest.approx(loss.item())


@pytest.mark.parametrize("form", ["causal", "bool mask", "float mask", "grouped", "scaled"])
def test_attention_entropy_follows_what_sdpa_was_given(form: str) -> None:
    torch.manual_seed(2)
    q, k = torch.randn(3, 4, 16, 8), torch.randn(3, 4, 16, 8)
    keep = torch.rand(16, 16) < 0.7
    keep.fill_diagonal_(True)
    options: dict[str, Any] = {}
    if form == "causal":
        options["is_causal"] = True
    elif form == "bool mask":
        options["attn_mask"] = keep
    elif form == "float mask":
        options["attn_mask"] = torch.zeros(3, 1, 16, 16).masked_fill(~keep, -math.inf)
    elif form == "grouped":
        k = k[:, :2]
        options["enable_gqa"] = True
    else:
        options["scale"] = 0.5
    # The probabilities, out of SDPA itself: values that are the identity give them back.
    identity = torch.eye(16).expand(3, k.shape[1], 16, 16)
    p = F.scaled_dot_product_attention(q, k, identity, **options)
    options.pop("enable_gqa", None)
    found = dict(zip(ATTENTION, attention_of(q, k, **options).numpy(), strict=True))
    p = p.double().numpy()
    by_query = -(p * np.log(np.where(p > 0, p, 1))).sum(axis=-1)
    np.testing.assert_allclose(found["entropy"], by_query.mean(axis=(0, 2)), atol=1e-5)
    n_visible = (p > 0).sum(axis=-1)
    normalised = np.where(n_visible > 1, by_query / np.log(np.maximum(n_visible, 2)), np.nan)
    np.testing.assert_allclose(
        found["entropy_normalised"], np.nanmean(normalised, axis=(0, 2)), atol=1e-5
    )
    rest = p[..., 1:] / np.where(p[..., 1:].sum(-1) > 0, p[..., 1:].sum(-1), np.nan)[..., None]
    no_sink = -(rest * np.log(np.where(rest > 0, rest, 1))).sum(axis=-1)
    np.testing.assert_allclose(
        found["entropy_no_sink"], np.nanmean(no_sink, axis=(0, 2)), atol=1e-5
    )


def test_attention_written_out_with_softmax_is_seen_too() -> None:
    class Manual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(24, 72)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)
            self.p = F.softmax(q @ k.transpose(-2, -1), dim=-1)
            return (self.p @ v)[:, 0] + x

    model = nn.Sequential(nn.ModuleList([Manual(), Manual()]))
    blocks = model[0]
    sites = find_blocks(model)
    with capturing(sites, _fail) as captured:
        x = torch.randn(2, 20, 24)
        for block in blocks:
            x = block(x)
    for layer, block in enumerate(blocks):
        expected = attention_entropy(block.p.detach().numpy()).mean(axis=0)
        np.testing.assert_allclose(captured.attention[layer][0], expected, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_torchs_own_layers_is_seen_too(masked: bool) -> None:
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(24, 3, 32, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(4, 20, 24)
    mask = nn.Transformer.generate_square_subsequent_mask(20) if masked else None
    expected = []
    y = x
    for block in encoder.layers:
        _, p = block.self_attn(y, y, y, attn_mask=mask, average_attn_weights=False)
        expected.append(attention_entropy(p.detach().numpy()).mean(axis=0))
        y = block(y, src_mask=mask)
    with capturing(find_blocks(encoder), _fail) as captured, torch.no_grad():
        encoder(x, mask=mask)
    for number, entropy in enumerate(expected):
        np.testing.assert_allclose(captured.attention[number][0], entropy, atol=1e-5)
        assert captured.values[number].shape == (80, 24)


def test_blocks_are_found_by_structure() -> None:
    gpt = GPT(GPTConfig(n_blocks=3))
    assert [site.path for site in find_blocks(gpt)] == ["blocks.0", "blocks.1", "blocks.2"]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 4)
    assert [site.path for site in find_blocks(encoder)] == [f"layers.{i}" for i in range(4)]
    assert find_blocks(nn.Linear(3, 3)) == []


def test_model_without_blocks_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Linear"):
        GradeMonitor(nn.Linear(3, 3), run=tmp_path / "run")
    with pytest.raises(ValueError, match="0"):
        GradeMonitor(GPT(GPTConfig()), run=tmp_path / "run", every=0)


def test_live_grades_equal_offline_grades(tmp_path: Path) -> None:
    _, _, monitor = train(tmp_path / "run", every=1, n_steps=30)
    offline = grades_of(Run.open(tmp_path / "run").scan("signals").collect())
    assert [grade.grade for grade in monitor.grades] == offline["grade"].to_list()
    assert [grade.step for grade in monitor.grades] == offline["step"].to_list()
    assert [grade.alert for grade in monitor.grades] == offline["alert"].to_list()
    np.testing.assert_allclose([g.ratio for g in monitor.grades], offline["ratio"], rtol=1e-12)
    recorded = Run.open(tmp_path / "run").scan("signals").filter(pl.col("signal") == "grade")
    assert recorded.sort("step").collect()["value"].to_list() == offline["grade"].to_list()


def test_only_sampled_steps_are_measured_and_losses_are_kept_of_all(tmp_path: Path) -> None:
    train(tmp_path / "run", every=4, n_steps=10)
    signals = Run.open(tmp_path / "run").scan("signals").collect()
    ranks = signals.filter(pl.col("signal") == "token_rank")
    assert ranks.group_by("kind").agg(pl.col("step").unique().sort()).sort("kind").rows() == [
        ("live", [0, 4, 8]),
        ("probe", [0, 4, 8]),
    ]
    for name, steps in (("loss", range(10)), ("lr", range(10)), ("grad_norm", [0, 4, 8])):
        found = signals.filter(pl.col("signal") == name).sort("step")["step"].to_list()
        assert found == list(steps), name


def test_evaluation_forwards_are_not_taken_for_the_training_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=T))
    monitor = GradeMonitor(model, run=tmp_path / "run", every=1)
    model.eval()
    with torch.no_grad():
        model(windows(50)[:, :-1])
    model.train()
    loss = next_byte_loss(model, windows(5))
    loss.backward()
    monitor.step(loss)
    monitor.close()
    ranks = Run.open(tmp_path / "run").scan("signals").filter(pl.col("signal") == "sample_rank")
    assert ranks.collect()["n_rows"].unique().to_list() == [5]


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf], ids=["zero", "nan", "inf"])
def test_degenerate_activations_are_undefined_and_do_not_raise(
    value: float, tmp_path: Path
) -> None:
    model = GPT(GPTConfig(n_positions=T))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    monitor = GradeMonitor(model, run=tmp_path / "run", every=1, probe=windows(4)[:, :-1])
    loss = next_byte_loss(model, windows(4))
    loss.backward()
    monitor.step(loss)
    monitor.close()
    assert monitor.grade is not None
    assert (monitor.grade.grade, monitor.grade.alert) == (None, "undefined")
    assert not monitor._recorder.failures
    assert Run.open(tmp_path / "run").scan("signals").collect().height > 10


def test_low_precision_activations_are_measured_in_float(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=T))
    grades = {}
    for dtype in (torch.float32, torch.bfloat16):
        twin = copy.deepcopy(model).to(dtype)
        run = tmp_path / str(dtype)
        monitor = GradeMonitor(twin, run=run, every=1, probe=windows(4)[:, :-1])
        loss = next_byte_loss(twin, windows(4))
        loss.backward()
        monitor.step(loss)
        monitor.close()
        assert not monitor._recorder.failures
        assert monitor.grade is not None
        grades[dtype] = monitor.grade.ratio
    assert grades[torch.bfloat16] == pytest.approx(grades[torch.float32], abs=0.01)


def test_failing_probe_and_hooks_never_reach_the_loop(tmp_path: Path, monkeypatch: Any) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("auditor.record.capture._take", broken)
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=T))
    monitor = GradeMonitor(model, run=tmp_path / "run", every=1, probe=broken)
    for _ in range(3):
        loss = next_byte_loss(model, windows(4))
        loss.backward()
        monitor.step(loss)
    monitor.close()
    assert sum(monitor._recorder.failures.values()) > 3
    assert Run.open(tmp_path / "run").gaps()


def test_per_sample_losses_lie_with_their_exposures(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=T))
    data = TensorDataset(windows(12))
    loader = AuditedSampler(DataLoader(data, batch_size=4, shuffle=True), run=tmp_path / "run")
    monitor = GradeMonitor(model, run=tmp_path / "run", every=100)
    expected = []
    for (batch,) in loader:
        logits = model(batch[:, :-1]).transpose(1, 2)
        each = F.cross_entropy(logits, batch[:, 1:], reduction="none").mean(dim=1)
        each.mean().backward()
        given = each.detach().clone()
        monitor.step(each.mean(), sample_loss=given)
        given.zero_()  # the loop uses its memory again
        expected += each.tolist()
    monitor.close()
    table = Run.open(tmp_path / "run").scan("exposures").collect()
    np.testing.assert_allclose(table["loss"], expected, rtol=1e-6)


@pytest.mark.parametrize("how", ["before", "after", "in place"])
def test_compiled_model_trains_as_without_the_monitor_and_is_measured(
    how: str, tmp_path: Path
) -> None:
    def losses(run: Path | None) -> list[float]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: Any = GPT(GPTConfig(n_positions=T))
        monitor = None
        compiled = model
        if how == "before":
            compiled = torch.compile(model, backend="eager", fullgraph=True)
        elif how == "in place":
            model.compile(backend="eager", fullgraph=True)
        if run is not None:
            monitor = GradeMonitor(
                compiled, run=run, every=2, probe=windows(4), probe_loss=next_byte_loss
            )
        if how == "after":
            compiled = torch.compile(model, backend="eager", fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for i in range(6):
            optimizer.zero_grad()
            loss = next_byte_loss(compiled, windows(4, seed=i))
            loss.backward()
            if monitor is not None:
                monitor.step(loss, optimizer=optimizer)
            optimizer.step()
            found.append(loss.item())
        if monitor is not None:
            monitor.close()
            assert not monitor._recorder.failures
        return found

    assert losses(tmp_path / "run") == losses(None)
    ranks = Run.open(tmp_path / "run").scan("signals").filter(pl.col("signal") == "token_rank")
    for kind in ("probe", "live"):
        steps = ranks.filter(pl.col("kind") == kind).collect()["step"].unique().sort().to_list()
        # A model that is compiled behind the monitor's back is measured on the probe alone.
        assert steps == ([] if (kind, how) == ("live", "after") else [0, 2, 4])


def test_armed_model_can_be_saved_and_copied_and_the_copy_is_free_of_hooks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=T))
    monitor = GradeMonitor(model, run=tmp_path / "run", every=1)  # armed at once
    torch.save(model, tmp_path / "model.pt")
    twin = copy.deepcopy(model)
    loss = next_byte_loss(twin, windows(3))
    loss.backward()
    assert not monitor._live.seen
    loss = next_byte_loss(model, windows(5))
    loss.backward()
    monitor.step(loss)
    monitor.close()
    monitor.step(loss)  # after closing: nothing, and no hooks
    assert not any(module._forward_hooks for module in model.modules())
    ranks = Run.open(tmp_path / "run").scan("signals").filter(pl.col("signal") == "sample_rank")
    assert ranks.collect()["n_rows"].unique().to_list() == [5]


def test_probe_does_not_call_what_a_layer_does_on_eval(tmp_path: Path) -> None:
    class Merging(nn.Linear):
        """As adapters do: merged into the weights for evaluation, taken out for training."""

        def train(self, mode: bool = True) -> Merging:
            with torch.no_grad():
                self.weight += 1.0 if not mode else 0.0
            return super().train(mode)

    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=T))
    model.blocks[1].mlp[0] = Merging(64, 256)
    before = model.blocks[1].mlp[0].weight.detach().clone()
    monitor = GradeMonitor(
        model, run=tmp_path / "run", every=1, probe=windows(3), probe_loss=next_byte_loss
    )
    loss = next_byte_loss(model, windows(3))
    loss.backward()
    monitor.step(loss)
    monitor.close()
    assert torch.equal(model.blocks[1].mlp[0].weight, before)


@pytest.mark.parametrize("stride", [4, 7])
def test_steps_numbered_in_strides_are_sampled(stride: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=T))
    monitor = GradeMonitor(model, run=tmp_path / "run", every=20)
    for step in range(3, 103, stride):
        loss = next_byte_loss(model, windows(4))
        loss.backward()
        monitor.step(loss, step=step)
    monitor.close()
    steps = [grade.step for grade in monitor.grades]
    assert [step // 20 for step in steps] == [0, 1, 2, 3, 4, 5][: len(steps)]
    ranks = Run.open(tmp_path / "run").scan("signals").filter(pl.col("signal") == "token_rank")
    assert ranks.collect()["step"].unique().sort().to_list() == steps  # all of them live


def test_step_tried_again_after_an_overflow_is_measured_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=T))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    data = TensorDataset(windows(40))
    loader = AuditedSampler(DataLoader(data, batch_size=4), run=tmp_path / "run")
    monitor = GradeMonitor(model, run=tmp_path / "run", every=2)
    losses = []
    for number, (batch,) in enumerate(loader):
        loss = next_byte_loss(model, batch)
        loss.backward()
        monitor.step(loss, optimizer=optimizer)
        if number != 4:
            optimizer.step()
            losses.append(loss.item())
    monitor.close()
    signals = Run.open(tmp_path / "run").scan("signals").collect()
    recorded = signals.filter(pl.col("signal") == "loss").sort("step")
    assert recorded["step"].to_list() == list(range(9))
    np.testing.assert_allclose(recorded["value"], losses, rtol=1e-6)
    offline = grades_of(signals)
    assert [grade.step for grade in monitor.grades] == offline["step"].to_list() == [0, 2, 4, 6, 8]


def test_probe_that_is_trained_on_is_reported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=T))
    data = windows(16)
    loader = AuditedSampler(DataLoader(TensorDataset(data), batch_size=8), run=tmp_path / "run")
    monitor = GradeMonitor(model, run=tmp_path / "run", every=100, probe=data[3:6])
    list(loader)
    monitor.close()
    assert any("3 probe samples in training" in gap for gap in Run.open(tmp_path / "run").gaps())


def test_device_copies_are_read_where_they_are_needed() -> None:
    """The path that CUDA takes asynchronously gives the same arrays on the CPU."""
    tensor = torch.randn(4, 3)
    np.testing.assert_array_equal(to_host(tensor)(), tensor.numpy())
    model = GPT(GPTConfig(n_positions=T))
    with capturing(find_blocks(model), _fail) as captured, torch.no_grad():
        model(windows(3)[:, :-1])
    arrays = fetched(captured)
    assert {layer for layer, _ in arrays["positions"].items()} == {-1, 0, 1}
    assert dict(arrays["samples"].items())[1].shape == (3, 64)


def _fail(place: str, error: Exception) -> None:
    raise AssertionError(place) from error


# -- what a training loop does to a model ----------------------------------------------------


def measured(run: Path, signal: str, kind: str = "live") -> pl.DataFrame:
    rows = (
        Run.open(run)
        .scan("signals")
        .filter((pl.col("signal") == signal) & (pl.col("kind") == kind))
    )
    return rows.collect()


def train_steps(model: Any, run: Path | None, n: int = 4, micro: int = 1, **options: Any) -> Any:
    """Losses and final weights of a few steps of ``micro`` batches of 4; the monitor at each."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    monitor = GradeMonitor(model, run=run, every=1, **options) if run is not None else None
    losses = []
    for step in range(n):
        optimizer.zero_grad()
        for part in range(micro):
            loss = next_byte_loss(model, windows(4, seed=10 * step + part))
            loss.backward()
        if monitor is not None:
            monitor.step(loss, optimizer=optimizer)
        optimizer.step()
        losses.append(loss.item())
    if monitor is not None:
        monitor.close()
        assert not monitor._recorder.failures
    return losses, [p.detach().clone() for p in model.parameters()], monitor


def assert_same_training(make: Any, run: Path, **options: Any) -> GradeMonitor:
    plain_losses, plain_weights, _ = train_steps(
        make(), None, **{name: value for name, value in options.items() if name in {"n", "micro"}}
    )
    plain_random = torch.get_rng_state()
    losses, weights, monitor = train_steps(make(), run, **options)
    assert losses == plain_losses
    assert all(torch.equal(a, b) for a, b in zip(plain_weights, weights, strict=True))
    assert torch.equal(torch.get_rng_state(), plain_random)
    return monitor


def small() -> GPT:
    torch.manual_seed(1)
    return GPT(GPTConfig(n_positions=T, width=WIDTH, n_heads=HEADS, n_blocks=2))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_measured_once_and_train_alike(
    reentrant: bool, tmp_path: Path
) -> None:
    class Checkpointed(GPT):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
            return self.head(self.norm(x))

    def make() -> GPT:
        torch.manual_seed(1)
        return Checkpointed(GPTConfig(n_positions=T, width=WIDTH, n_heads=HEADS, n_blocks=2))

    assert_same_training(make, tmp_path / "run")
    train_steps(small(), tmp_path / "plain")
    for signal in ("token_rank", "entropy", "value_rank", "sample_rank"):
        expected, found = (measured(tmp_path / name, signal) for name in ("plain", "run"))
        np.testing.assert_allclose(found["value"], expected["value"], rtol=1e-6)


def test_micro_batches_of_a_step_are_pooled(tmp_path: Path) -> None:
    """4 samples in a micro-batch say little of diversity; 16 micro-batches of them say it."""
    assert_same_training(small, tmp_path / "run", micro=18, n=2)
    ranks = measured(tmp_path / "run", "sample_rank").filter(pl.col("layer") == -1)
    assert ranks["n_rows"].to_list() == [64, 64]
    batch = torch.cat([windows(4, seed=part) for part in range(16)])[:, :-1]
    model = small()
    embedded = (model.tokens(batch) + model.positions.weight[:T]).mean(dim=1).detach().double()
    s = np.linalg.svd(embedded - embedded.mean(dim=0), compute_uv=False)[:20]
    p = s / s.sum()
    assert ranks["value"][0] == pytest.approx(math.exp(-(p * np.log(p)).sum()) / 20, abs=1e-4)


def test_frozen_layers_and_adapters_change_nothing(tmp_path: Path) -> None:
    class Adapted(nn.Module):
        """A linear layer with a low-rank adapter beside it."""

        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.down = nn.Linear(base.in_features, 2, bias=False)
            self.up = nn.Linear(2, base.out_features, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))

    def make() -> GPT:
        model = small()
        model.requires_grad_(False)
        for block in model.blocks:
            block.attention.qkv = Adapted(block.attention.qkv)
        return model

    assert_same_training(make, tmp_path / "run")
    assert measured(tmp_path / "run", "token_rank")["layer"].unique().sort().to_list() == [0, 1]


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_of_the_training_forward_is_kept(compiled: bool, tmp_path: Path) -> None:
    def trained(run: Path | None) -> list[float]:
        torch._dynamo.reset()
        inner = small()
        model: Any = torch.compile(inner, backend="eager") if compiled else inner
        monitor = GradeMonitor(model, run=run, every=1) if run else None
        losses = []
        for step in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = next_byte_loss(model, windows(4, seed=step))
            loss.backward()
            if monitor is not None:
                monitor.step(loss)
            losses.append(loss.item())
        if monitor is not None:
            monitor.close()
            assert not monitor._recorder.failures
        return losses

    assert trained(tmp_path / "run") == trained(None)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        model = small()
        x = model.tokens(windows(4, seed=0)[:, :-1]) + model.positions.weight[:T]
        for block in model.blocks:
            x = block(x)
    s = np.linalg.svd(x.flatten(0, 1).double().numpy(), compute_uv=False)[:20]
    p = s / s.sum()
    first = measured(tmp_path / "run", "token_rank").filter(
        (pl.col("layer") == 1) & (pl.col("variant") == "raw") & (pl.col("step") == 0)
    )
    assert first["value"].item() == pytest.approx(math.exp(-(p * np.log(p)).sum()) / 20, abs=1e-5)


def test_sequence_first_encoder_is_read_the_right_way_round(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(24, 3, 32, batch_first=False)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(30, 5, 24)  # 5 samples
    with capturing(find_blocks(encoder), _fail) as captured:
        encoder(x)
    torch.testing.assert_close(captured.samples[-1], x.mean(dim=0))


def test_signals_of_a_block_follow_their_definitions(tmp_path: Path) -> None:
    train_steps(small(), tmp_path / "run", n=1, probe=windows(6), probe_loss=next_byte_loss)
    model = small()
    with torch.no_grad():
        x = model.tokens(windows(4, seed=0)[:, :-1]) + model.positions.weight[:T]
        inputs = [x]
        for block in model.blocks:
            inputs.append(block(inputs[-1]))
    before, after = (x.flatten(0, 1).double() for x in inputs[1:3])
    s = np.linalg.svd(after.numpy(), compute_uv=False)
    p = s / s.sum()
    run = tmp_path / "run"

    def of_last(signal: str) -> pl.DataFrame:
        return measured(run, signal).filter(pl.col("layer") == 1)

    raw = pl.col("variant") == "raw"
    rank = math.exp(-(p * np.log(p)).sum())
    assert of_last("effective_rank").filter(raw)["value"].item() == pytest.approx(rank, rel=1e-4)
    full = of_last("token_rank_full").filter(raw)["value"].item()
    assert full == pytest.approx(rank / WIDTH, rel=1e-4)
    assert of_last("spectral_gap")["value"].item() == pytest.approx(s[0] / s[1], rel=1e-4)
    cosine = F.cosine_similarity(before, after, dim=1).mean().item()
    assert of_last("residual_similarity")["value"].item() == pytest.approx(cosine, abs=1e-5)
    assert of_last("max_abs")["value"].item() == pytest.approx(after.abs().max().item(), rel=1e-5)
    assert of_last("non_finite")["value"].item() == 0.0
    halves = inputs[2].double().unflatten(1, (2, T // 2))
    for number, name in enumerate(("front", "back")):
        s = np.linalg.svd(halves[:, number].flatten(0, 1).numpy(), compute_uv=False)[:20]
        p = s / s.sum()
        found = of_last("segment_rank").filter(pl.col("segment") == name)["value"].item()
        assert found == pytest.approx(math.exp(-(p * np.log(p)).sum()) / 20, abs=1e-4)
    assert of_last("entropy")["head"].to_list() == list(range(HEADS))


def test_sites_can_be_named_by_path_pattern_and_module(tmp_path: Path) -> None:
    model = small()
    by_pattern = GradeMonitor(model, run=tmp_path / "a", sites=["blocks.*"])
    assert [site.path for site in by_pattern.sites] == ["blocks.0", "blocks.1"]
    by_module = GradeMonitor(model, run=tmp_path / "b", sites=[model.blocks[1]])
    assert [(site.layer, site.path) for site in by_module.sites] == [(0, "blocks.1")]
    with pytest.raises(ValueError, match=r"'layers\.\*'"):
        GradeMonitor(model, run=tmp_path / "c", sites=["layers.*"])
    by_pattern.close(), by_module.close()


def test_description_says_what_was_seen_of_each_block(tmp_path: Path) -> None:
    class Unseen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(x)

    model = small()
    model.blocks = nn.ModuleList([Unseen(), Unseen()])
    monitor = GradeMonitor(model, run=tmp_path / "run", every=1)
    assert "no forward seen yet" in monitor.describe()
    loss = next_byte_loss(model, windows(4))
    loss.backward()
    monitor.step(loss)
    assert monitor.flush()
    text = monitor.describe()
    assert "blocks.1  Unseen  output; not seen: attention, values" in text
    assert "scaled_dot_product_attention" in text
    monitor.close()


class Looped(nn.Module):
    """One block, used three times in a forward; its third use puts out a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = small()
        self.gpt.blocks = nn.ModuleList([self.gpt.blocks[0]] * 3)
        self.gpt.blocks[0].register_forward_hook(self._third)
        self.n = 0

    def _third(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return torch.ones_like(output) if self.n % 3 == 0 else output

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.gpt(ids)


def looped() -> tuple[nn.Module, torch.Tensor]:
    return Looped(), windows(4)[:, :-1]


def test_block_that_is_used_several_times_is_told_and_its_first_use_is_seen(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = Looped()
    # Few enough positions that the rows of further uses would be added to those of the first.
    monitor = GradeMonitor(
        model, run=tmp_path / "run", every=1, probe=windows(4), probe_loss=next_byte_loss
    )
    next_byte_loss(model, windows(3)).backward()
    monitor.step(1.0)
    assert monitor.flush()
    assert "1 block\n" in monitor.describe()
    assert "used 3 times in a forward, the first is seen" in monitor.describe()
    monitor.close()
    signals = Run.open(tmp_path / "run").scan("signals").collect()
    ranks = signals.filter((pl.col("signal") == "token_rank") & (pl.col("variant") == "raw"))
    assert dict(ranks.select("kind", "n_rows").rows()) == {"live": 3 * T, "probe": 4 * T}
    assert ranks["value"].min() > 0.3  # of the constant it would be .05
    found = CliRunner().invoke(main, ["sites", f"{__name__}:looped"])
    assert "used 3 times in a forward, the first is seen" in found.output, found.output


def test_probe_that_is_run_in_parts_is_seen_whole(tmp_path: Path) -> None:
    """Each part is a forward of its own."""

    def in_parts(model: nn.Module, probe: torch.Tensor) -> torch.Tensor:
        return torch.stack([next_byte_loss(model, part) for part in probe.split(2)]).mean()

    model = small()
    monitor = GradeMonitor(
        model, run=tmp_path / "run", every=1, probe=windows(6), probe_loss=in_parts
    )
    monitor.step(1.0)
    monitor.close()
    assert "times in a forward" not in monitor.describe()
    signals = Run.open(tmp_path / "run").scan("signals").collect()
    ranks = signals.filter((pl.col("signal") == "token_rank") & (pl.col("kind") == "probe"))
    assert set(ranks["n_rows"]) == {6 * T}


@pytest.mark.parametrize(
    ("shape", "told"), [((1, 1), True), ((1, 31), True), ((1, 32), False), ((16, 2), False)]
)
def test_probe_of_too_few_positions_is_told_once(
    shape: tuple[int, int], told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one position the rank ratio is 1, whatever the model: S7, for ever."""
    probe = windows(shape[0])[:, : shape[1]]
    monitor = GradeMonitor(small(), run=tmp_path / "run", every=1, probe=probe)
    for _ in range(3):
        monitor.step(1.0)
    monitor.close()
    assert len(monitor.grades) == 3
    assert caplog.text.count("a grade says nothing") == told
    if shape == (1, 1):
        assert [grade.ratio for grade in monitor.grades] == pytest.approx([1.0] * 3)
        assert "the probe is graded on 1 position of each block" in caplog.text


class Hanging:
    """An exporter that never comes back, so that its thread stays."""

    def export(self, step: int, values: Any) -> None:
        threading.Event().wait()

    def close(self) -> None: ...


@pytest.mark.parametrize("exporters", [[], [Hanging()]], ids=["no exporter", "hanging exporter"])
def test_closed_monitor_keeps_no_model_alive(
    exporters: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a sweep: one model after another, each with a run of its own."""
    monkeypatch.setattr("auditor.record.monitor.EXPORTERS_CLOSE_S", 0.1)
    models, loaders = [], []
    for number in range(2):
        run, model = tmp_path / f"run-{number}", small()
        loader = AuditedSampler(DataLoader(TensorDataset(windows(8)), batch_size=4), run=run)
        monitor = GradeMonitor(
            model, run=run, every=1, probe=windows(4), probe_loss=next_byte_loss,
            exporters=exporters,
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for (batch,) in loader:
            loss = next_byte_loss(model, batch)
            loss.backward()
            monitor.step(loss, optimizer=optimizer)
            optimizer.step()
        monitor.close()
        models.append(weakref.ref(model))
        loaders.append(loader)  # the loop may hold it for longer
        del model, monitor, optimizer, loss, batch
        gc.collect()
    assert [model() for model in models] == [None, None]


# -- what a model or a probe may bring along -------------------------------------------------


def test_compiled_functions_inside_eager_blocks_are_not_compiled_again(tmp_path: Path) -> None:
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    torch._dynamo.reset()
    activation = torch.compile(
        lambda x: F.gelu(x) * x.sigmoid(), backend=backend, fullgraph=True, dynamic=False
    )

    def make() -> GPT:
        torch.manual_seed(1)
        model = GPT(GPTConfig(n_positions=T, width=WIDTH, n_heads=HEADS, n_blocks=10))
        for block in model.blocks:
            block.mlp[1].forward = activation
        return model

    try:
        assert_same_training(make, tmp_path / "run")
        assert len(compiled) == 1
        assert measured(tmp_path / "run", "entropy")["layer"].n_unique() == 10
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("source", ["torch", "numpy", "python", "loader"])
def test_probe_that_draws_at_random_leaves_the_random_state_as_it_was(
    source: str, tmp_path: Path
) -> None:
    loader = DataLoader(TensorDataset(windows(8)), batch_size=4, shuffle=True)

    def probe() -> torch.Tensor:
        if source == "torch":
            return torch.randint(0, 256, (4, T + 1))
        if source == "numpy":
            return torch.from_numpy(np.random.randint(0, 256, (4, T + 1)))
        if source == "python":
            return torch.tensor([[random.randrange(256) for _ in range(T + 1)] for _ in range(4)])
        return next(iter(loader))[0]

    before = random.getstate(), np.random.get_state()[1].tolist()
    assert_same_training(small, tmp_path / "run", probe=probe, probe_loss=next_byte_loss)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_counters_that_every_forward_updates_count_the_training_alone(tmp_path: Path) -> None:
    class Counting(nn.Module):
        """Experts that balance themselves by how often they were used, in evaluation mode too."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.register_buffer("bias", torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x) + self.bias
            self.bias = self.bias + 0.01 * y.detach().mean(dim=(0, 1)).sign()
            return y

    def make() -> GPT:
        model = small()
        for block in model.blocks:
            block.mlp = Counting(block.mlp)
        return model

    assert_same_training(make, tmp_path / "run", probe=windows(4), probe_loss=next_byte_loss)


@pytest.mark.parametrize("shape", [(3, 1, 1, 16), (1, 1, 16, 16), (4, 16, 16), (3, 4, 16, 16)])
def test_masks_of_any_shape_that_broadcasts_are_followed(shape: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    q, k = torch.randn(3, 4, 16, 8), torch.randn(3, 4, 16, 8)
    keep = torch.rand(shape) < 0.7
    keep[..., 0] = True
    identity = torch.eye(16).expand(3, 4, 16, 16)
    p = F.scaled_dot_product_attention(q, k, identity, attn_mask=keep).double().numpy()
    found = attention_of(q, k, keep)[0].numpy()
    np.testing.assert_allclose(found, attention_entropy(p).mean(axis=0), atol=1e-5)


def test_mask_for_each_head_of_torchs_attention_and_padded_samples(tmp_path: Path) -> None:
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(24, 3, 32, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    x = torch.randn(4, 20, 24)
    causal = nn.Transformer.generate_square_subsequent_mask(20).expand(12, 20, 20)
    padding = torch.zeros(4, 20, dtype=torch.bool)
    padding[2] = True  # a sample that is all padding has no attention to measure
    _, p = encoder.layers[0].self_attn(
        x, x, x, attn_mask=causal, average_attn_weights=False, need_weights=True
    )
    p = p[[0, 1, 3]].detach().double().numpy()
    with capturing(find_blocks(encoder), _fail) as captured, torch.no_grad():
        encoder(
            x, mask=causal, src_key_padding_mask=padding.float().masked_fill(padding, -math.inf)
        )
    np.testing.assert_allclose(
        captured.attention[0][0], attention_entropy(p).mean(axis=0), atol=1e-5
    )


def test_scalar_that_is_none_costs_itself_alone_and_steps_may_be_of_numpy(tmp_path: Path) -> None:
    model = small()
    monitor = GradeMonitor(model, run=tmp_path / "run", every=1)
    for step in range(3):
        loss = next_byte_loss(model, windows(4, seed=step))
        loss.backward()
        broken: Any = "no number"
        monitor.step(loss, step=np.int64(step), grad_norm=broken, sample_loss=broken)
    monitor.close()
    signals = Run.open(tmp_path / "run").scan("signals").collect()
    assert signals.filter(pl.col("signal") == "loss")["value"].is_not_null().sum() == 3
    assert signals.filter(pl.col("signal") == "grade")["step"].to_list() == [0, 1, 2]
    assert monitor._recorder.failures["GradeMonitor.step(grad_norm=)"] == 3


def test_two_monitors_on_one_run_are_told_to_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = GradeMonitor(small(), run=tmp_path / "run")
    assert "two monitors" not in caplog.text
    second = GradeMonitor(small(), run=tmp_path / "run")
    assert "two monitors" in caplog.text
    first.close(), second.close()
