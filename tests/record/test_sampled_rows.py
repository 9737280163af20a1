"""512 positions stand for all of them: which ones, and how near their ratio is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from auditor.demo.corpus import WEIGHTS, text_of
from auditor.demo.model import GPT, GPTConfig, next_byte_loss
from auditor.measure.spectrum import VARIANTS, rank_ratio
from auditor.record.capture import N_ROWS, Captured, capturing, sampled_rows
from auditor.record.sites import find_blocks

T = 128


def windows(n: int, seed: int) -> torch.Tensor:
    data = torch.frombuffer(bytearray(text_of(next(iter(WEIGHTS))).encode()), dtype=torch.uint8)
    starts = torch.randint(0, len(data) - T, (n,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([data[start : start + T + 1] for start in starts]).long()


def ratio_by_svd(rows: torch.Tensor, variant: str) -> float:
    x = rows.double().numpy()
    if variant == "centred":
        x = x - x.mean(axis=0)
    if variant == "column":
        x = x / np.sqrt((x**2).mean(axis=0))
    s = np.linalg.svd(x, compute_uv=False)[:20]
    p = s / s.sum()
    return float(np.exp(-(p * np.log(p)).sum()) / 20)


@pytest.mark.parametrize("n", [513, 700, 1024, 4096, 8192])
def test_one_row_of_each_stretch_and_every_place_of_the_sequence(n: int) -> None:
    numbers = sampled_rows(torch.arange(n)[:, None], 512)[:, 0]
    assert len(numbers) == 512
    stretch = torch.arange(512) * n // 512
    assert (numbers >= stretch).all()
    assert (numbers < (torch.arange(512) + 1) * n // 512).all()
    if n >= 4096:  # 512 rows over 128 places of a sequence: none is missed, none comes often
        seen = torch.bincount(numbers % T, minlength=T)
        assert 1 <= seen.min() <= seen.max() <= 10


def test_fewer_rows_are_taken_whole_and_are_a_copy() -> None:
    rows = torch.randn(40, 3)
    taken = sampled_rows(rows, 512)
    assert torch.equal(taken, rows)
    rows.zero_()
    assert taken.abs().sum() > 0


def test_places_are_those_of_the_rows() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=T, width=32, n_blocks=1))
    model.positions.weight.data[:, 0] = torch.arange(T)
    model.tokens.weight.data[:, 0] = 0.0
    with capturing(find_blocks(model), _fail) as captured, torch.no_grad():
        model(windows(16, seed=0)[:, :-1])
    assert isinstance(captured, Captured)
    np.testing.assert_array_equal(captured.places[-1] * T, captured.positions[-1][:, 0])


@pytest.fixture(scope="module")
def outputs() -> list[torch.Tensor]:
    """[8192, 384] of each block, after a few steps on real text: the hard case is early."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_positions=T, width=384, n_heads=6, n_blocks=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(12):
        optimizer.zero_grad()
        next_byte_loss(model, windows(4, seed=step)).backward()
        optimizer.step()
    found: list[torch.Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, y: found.append(y.detach().flatten(0, 1)))
    with torch.no_grad():
        model(windows(64, seed=99)[:, :-1])
    return found


def test_ratio_of_sampled_rows_is_near_that_of_all(outputs: list[torch.Tensor]) -> None:
    errors = []
    for rows in outputs:
        sample = sampled_rows(rows, N_ROWS)
        for variant in VARIANTS:
            found = rank_ratio(sample.numpy(), variant)
            # Of those rows by an exact decomposition, and of all.
            assert found == pytest.approx(ratio_by_svd(sample, variant), abs=1e-4)
            errors.append(abs(found - ratio_by_svd(rows, variant)))
    assert np.median(errors) <= 0.01
    assert max(errors) <= 0.03


def _fail(place: str, error: Exception) -> None:
    raise AssertionError(place) from error
