"""What the documents show works: commands parse, code runs, links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from torch.utils.data import DataLoader

from auditor import Run
from auditor.cli import main
from auditor.demo.corpus import ShardRows, build, collate
from auditor.demo.model import GPT, GPTConfig, next_byte_loss

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_commands(page: Path) -> None:
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[:1] == ["auditor"]:
            command = main.commands[words[1]]
            command.make_context(words[1], words[2:])  # raises on an unknown option
        elif words[:1] == ["make"]:
            assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()


def test_quoted_benchmarks_exist() -> None:
    named = set(re.findall(r"benchmarks/run\.py (\w+)", "".join(p.read_text() for p in PAGES)))
    assert named
    assert named <= {path.stem for path in (ROOT / "benchmarks").glob("*.py")}


def test_readme_and_documents_run_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop of the README, the commands after it, then every other Python block."""
    monkeypatch.chdir(tmp_path)
    corpus = build(tmp_path / "data", seed=0, steps=300, plant=False)
    model = GPT(GPTConfig(n_positions=64))
    dataset = ShardRows(corpus.shards)
    names: dict[str, Any] = {
        "torch": torch,
        "DataLoader": DataLoader,
        "dataset": dataset,
        "collate": collate,
        "loader": DataLoader(dataset, batch_size=16, sampler=range(1600), collate_fn=collate),
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "held_out_batch": corpus.probe[:, :-1].clamp(min=0),
        "compute_loss": next_byte_loss,
    }
    loop, load = blocks(ROOT / "README.md", "python")
    exec(loop, names)
    names["monitor"].close()
    assert Run.open("run/").gaps() == []
    for command in (
        ["report", "run/"],
        ["replay-order", "run/", "--out", "order.parquet"],
        ["dedupe", "run/", "--out", "cleaned/"],
        ["verify", "cleaned/"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code in (0, None), command
    exec(load, names)
    assert len(names["loader"]) == 100_000
    shutil.copytree(tmp_path / "data", "corpus")
    for page in PAGES[1:]:
        for block in blocks(page, "python"):
            exec(block, names)


def test_help_of_the_group_names_every_command() -> None:
    text = main.get_help(click.Context(main, info_name="auditor"))
    for name in main.commands:
        assert name in text


def test_pipelines_have_help_and_do_what_they_say(tmp_path: Path) -> None:
    script = ROOT / "pipelines" / "plain_pytorch.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, "--out", tmp_path / "out", "--steps", "300", "--workers", "2"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "novels" in done.stdout
    assert (tmp_path / "out/cleaned/manifest.json").is_file()
