"""A step is what an optimizer did: batches whose gradients were thrown away are told apart."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import Documents, exposures
from torch.utils.data import DataLoader

from auditor import AuditedSampler

SKIPPED = {2, 3, 6}
"""Batches of the epoch of seven whose update is left out."""


def outcome(run: Path) -> list[tuple[int, str]]:
    """Step and state of each batch in order."""
    table = exposures(run).unique("batch", maintain_order=True)
    return list(table.select("step", "state").iter_rows())


def expected(numbered: bool = False) -> list[tuple[int, str]]:
    """What three skipped updates should look like.

    ``numbered``: a skipped step has used up its number, because that it did nothing is on the
    device when it closes; else it shares that of the step that follows.
    """
    rows, step = [], 0
    for batch in range(7):
        rows.append((step, "discarded" if batch in SKIPPED else "trained"))
        step += numbered or batch not in SKIPPED
    return rows


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("to_none", [True, False], ids=["set_to_none", "set_to_zero"])
@pytest.mark.parametrize("where", ["first", "last", "by model"])
def test_overflowed_steps_are_discarded_wherever_gradients_are_cleared(
    fused: bool, to_none: bool, where: str, tmp_path: Path
) -> None:
    if where == "by model" and not (to_none or fused):
        pytest.skip("a model's zero_grad that keeps its tensors leaves no trace")
    model = torch.nn.Linear(48, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    loader = AuditedSampler(
        DataLoader(Documents(), batch_size=10), run=tmp_path / "run", optimizer=optimizer
    )
    for number, batch in enumerate(loader):
        if where == "first":
            optimizer.zero_grad(set_to_none=to_none)
        elif where == "by model":
            model.zero_grad(set_to_none=to_none)
        loss = model(batch["input_ids"].float()).sum()
        scaler.scale(loss * (float("inf") if number in SKIPPED else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if where == "last":
            optimizer.zero_grad(set_to_none=to_none)
    loader.close()
    rows = outcome(tmp_path / "run")
    wanted = expected(numbered=fused)
    if not fused and where != "last":
        # Nothing comes after the last batch that could clear its gradients.
        assert rows.pop() == (None, "delivered")
        wanted.pop()
    assert rows == wanted


@pytest.mark.parametrize("where", ["first", "last", "absent"])
def test_every_batch_is_trained_when_every_step_is_taken(where: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(48, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    loader = AuditedSampler(
        DataLoader(Documents(), batch_size=10), run=tmp_path / "run", optimizer=optimizer
    )
    for batch in loader:
        if where == "first":
            optimizer.zero_grad()
        model(batch["input_ids"].float()).sum().backward()
        optimizer.step()
        if where == "last":
            optimizer.zero_grad()
    loader.close()
    assert outcome(tmp_path / "run") == [(step, "trained") for step in range(7)]


def test_accumulated_micro_batches_are_discarded_together(tmp_path: Path) -> None:
    model = torch.nn.Linear(48, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    loader = AuditedSampler(
        DataLoader(Documents(), batch_size=10), run=tmp_path / "run", optimizer=optimizer
    )
    for number, batch in enumerate(loader):
        model(batch["input_ids"].float()).sum().backward()
        if number % 2 == 1 or number == 6:
            if number != 3:  # batches 2 and 3 overflow
                optimizer.step()
            optimizer.zero_grad()
    loader.close()
    assert outcome(tmp_path / "run") == [
        *[(0, "trained")] * 2,
        *[(1, "discarded")] * 2,
        *[(1, "trained")] * 2,
        (2, "trained"),
    ]


def test_two_optimizers_of_one_step_close_it_once(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(48, 8), torch.nn.Linear(8, 1))
    first = torch.optim.SGD(model[0].parameters(), lr=1e-9)
    second = torch.optim.AdamW(model[1].parameters(), lr=1e-9)
    loader = AuditedSampler(
        DataLoader(Documents(), batch_size=10), run=tmp_path / "run", optimizer=first
    )
    loader._open().watch(second)
    for batch in loader:
        model(batch["input_ids"].float()).sum().backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    loader.close()
    assert outcome(tmp_path / "run") == [(step, "trained") for step in range(7)]


def test_gradients_that_only_one_of_two_optimizers_clears_are_still_to_be_trained(
    tmp_path: Path,
) -> None:
    """As in adversarial training: the generator's loss leaves gradients in the discriminator."""
    generator, discriminator = torch.nn.Linear(48, 8), torch.nn.Linear(8, 1)
    ours = torch.optim.SGD(generator.parameters(), lr=1e-9)
    theirs = torch.optim.SGD(discriminator.parameters(), lr=1e-9)
    loader = AuditedSampler(
        DataLoader(Documents(), batch_size=10), run=tmp_path / "run", optimizer=ours
    )
    loader._open().watch(theirs)
    for batch in loader:
        ours.zero_grad()
        discriminator(generator(batch["input_ids"].float())).sum().backward()
        theirs.zero_grad()
        ours.step()
    loader.close()
    assert outcome(tmp_path / "run") == [(step, "trained") for step in range(7)]


def test_watched_optimizer_trains_copies_and_saves_as_before(tmp_path: Path) -> None:
    def train(audited: bool) -> tuple[torch.Tensor, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(48, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader: Any = DataLoader(Documents(), batch_size=10, shuffle=True)
        if audited:
            loader = AuditedSampler(loader, run=tmp_path / "run", optimizer=optimizer)
        for batch in loader:
            optimizer.zero_grad()
            model(batch["input_ids"].float()).square().mean().backward()
            optimizer.step()
        if audited:
            twin = copy.deepcopy(model)
            pickle.loads(pickle.dumps(optimizer)).zero_grad()
            twin[0].weight.sum().backward()  # our hooks stay with the original
            loader.close()
            assert "zero_grad" not in vars(optimizer)
        return torch.cat([p.detach().flatten() for p in model.parameters()]), optimizer.state_dict()

    bare, bare_state = train(audited=False)
    audited, audited_state = train(audited=True)
    assert torch.equal(bare, audited)
    assert bare_state["param_groups"] == audited_state["param_groups"]
    for key, state in bare_state["state"].items():
        for name, value in state.items():
            assert torch.equal(value, audited_state["state"][key][name])
