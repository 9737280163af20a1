"""``auditor doctor``: what would be recorded is told before anything is."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from auditor.cli import main

FACTORIES = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from auditor.demo.model import GPT, GPTConfig

def texts():
    rows = [
        {"id": f"d{i}", "source": "ab"[i % 2], "text": f"text {i} of many"} for i in range(400)
    ]
    return DataLoader(rows, batch_size=8)

def tokens():
    return DataLoader(TensorDataset(torch.randint(0, 256, (400, 65))), batch_size=8, num_workers=1)

def short():
    return DataLoader([{"id": "a", "text": "x"}], batch_size=8)

def empty():
    return []

def number():
    return 5

def fails():
    raise RuntimeError("no corpus")

def model():
    return GPT(GPTConfig(n_positions=64)), (torch.randint(0, 256, (2, 64)),)
"""


@pytest.fixture(autouse=True)
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("factories", None)


def doctor(*arguments: object) -> tuple[Result, dict[str, dict[str, Any]]]:
    """The result as text, and the checks by name, from JSON."""
    command = ["doctor", *map(str, arguments)]
    text, as_json = (CliRunner().invoke(main, [*command, *more]) for more in ([], ["--json"]))
    assert text.exit_code == as_json.exit_code
    assert "Traceback" not in text.output
    checks = {one["name"]: one for one in json.loads(as_json.stdout)["checks"]}
    return text, checks


def test_the_environment_is_told() -> None:
    text, checks = doctor()
    assert text.exit_code == 0
    assert [*checks] == ["auditor", "needs", "works with", "compiled code"]
    assert f"Python {sys.version_info.major}.{sys.version_info.minor}" in checks["auditor"]["told"]
    assert "torch " in checks["needs"]["told"]


def test_a_loader_of_texts_with_ids_and_sources(tmp_path: Path) -> None:
    text, checks = doctor("--run", tmp_path / "new/run", "--loader", "factories:texts")
    assert text.exit_code == 0
    assert checks["loader"]["status"] == "ok"
    assert "168 samples in 21 batches, told by id, such as d0" in checks["loader"]["told"]
    assert checks["source"] == {
        "name": "source", "status": "ok", "told": "of every sample: a, b", "remedy": ""
    }  # fmt: skip
    assert (checks["file"]["status"], checks["file"]["told"]) == ("note", "of no sample")
    assert checks["duplication"]["told"] == "scored of 168 of 168 samples"
    assert " ms recorded, " in checks["cost"]["told"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != "_") == [
        "factories.py"
    ]


def test_a_loader_of_tokens_without_ids_says_what_is_missing() -> None:
    text, checks = doctor("--loader", "factories:tokens")
    assert text.exit_code == 0
    assert checks["loader"]["status"] == checks["source"]["status"] == "note"
    assert "told by their place in the dataset" in checks["loader"]["told"]
    assert "column id" in checks["loader"]["remedy"]


def test_a_loader_of_one_batch_is_enough() -> None:
    text, checks = doctor("--loader", "factories:short")
    assert text.exit_code == 0
    assert "1 samples in 1 batches" in checks["loader"]["told"]


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("factories:fails", "RuntimeError: no corpus"),
        ("factories:number", "'int' object is not iterable"),
        ("factories:empty", "no sample was recorded"),
        ("factories:nothing", "cannot import factories:nothing"),
        ("factories", "expected module:factory"),
    ],
)
def test_a_loader_that_fails_is_said_to(target: str, told: str) -> None:
    text, checks = doctor("--loader", target)
    assert text.exit_code == 1
    assert checks["loader"]["status"] == "failed"
    assert told in checks["loader"]["told"]
    assert checks["loader"]["remedy"]


def test_a_model_is_looked_at() -> None:
    text, checks = doctor("--model", "factories:model")
    assert text.exit_code == 0
    assert "blocks.1" in text.output
    text, checks = doctor("--model", "factories:texts")
    assert (text.exit_code, checks["model"]["status"]) == (1, "failed")


def test_a_run_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    text, checks = doctor("--run", tmp_path / "factories.py" / "run")
    assert text.exit_code == 1
    assert checks["run folder"]["told"] == f"{tmp_path / 'factories.py'} is a file"
