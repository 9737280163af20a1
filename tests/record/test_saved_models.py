"""A model that is saved while a monitor looks at it: loaded where there is no auditor."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from auditor import GradeMonitor

LOAD = """
import sys
sys.modules["auditor"] = None  # importing it fails
import torch
model = torch.load(sys.argv[1], weights_only=False)
x, expected = torch.load(sys.argv[2])
with torch.no_grad():
    assert torch.equal(model.eval()(x), expected)
model.train()(x, mask=None).sum().backward()  # arguments by name meet the hooks too
"""


def encoder() -> nn.TransformerEncoder:
    """A model whose classes are PyTorch's own."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("form", ["eager", "compiled in place"])
def test_model_saved_while_it_is_looked_at_loads_without_auditor(form: str, tmp_path: Path) -> None:
    model = encoder()
    if form == "compiled in place":
        model.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = GradeMonitor(model, run=tmp_path / "run", every=1)
    x = torch.randn(3, 10, 16)
    for step in range(2):  # hooks of the model and of its parameters are there by then
        loss = model(x).sum()
        loss.backward()
        monitor.step(loss, optimizer=optimizer)
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    torch.save(model, tmp_path / "model.pt")  # between backward and update, armed for the next
    assert monitor._live._armed._exit_callbacks
    torch.save(optimizer, tmp_path / "optimizer.pt")
    with torch.no_grad():
        torch.save((x, copy.deepcopy(model).eval()(x)), tmp_path / "expected.pt")
    monitor.close()
    for name in ("model.pt", "optimizer.pt"):
        assert b"auditor" not in (tmp_path / name).read_bytes(), name
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, tmp_path / "model.pt", tmp_path / "expected.pt"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert loaded.returncode == 0, loaded.stderr


def test_state_dict_is_untouched(tmp_path: Path) -> None:
    plain, model = encoder(), encoder()
    monitor = GradeMonitor(model, run=tmp_path / "run", every=1)
    state: dict[str, Any] = model.state_dict()
    monitor.close()
    assert list(state) == list(plain.state_dict())
    torch.save(state, tmp_path / "state.pt")
    assert b"auditor" not in (tmp_path / "state.pt").read_bytes()
    plain.load_state_dict(torch.load(tmp_path / "state.pt"))
