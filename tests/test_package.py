"""The package as a whole: what an import costs, what is public, what is documented."""

from __future__ import annotations

import inspect
import subprocess
import sys

import click
import pytest

import auditor
from auditor.cli import main


def modules_after(statement: str) -> set[str]:
    program = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import auditor",
        "from auditor.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from auditor.cli import main\ntry: main(['dedupe', '--help'])\nexcept SystemExit: pass",
    ],
)
def test_import_and_help_load_nothing_heavy(statement: str) -> None:
    loaded = modules_after(statement)
    assert not loaded & {"torch", "polars", "numba", "numpy", "datasets", "plotly", "pyarrow"}


@pytest.mark.parametrize(
    "module",
    [
        "auditor.clean.dedupe",
        "auditor.clean.restore",
        "auditor.show.cleaning",
        "auditor.show.produce",
        "auditor.show.exposures",
        "auditor.show.replay",
        "auditor.explain.pipeline",
        "auditor.replaying",
    ],
)
def test_offline_commands_start_without_torch(module: str) -> None:
    assert "torch" not in modules_after(f"import {module}")


def test_live_path_loads_no_polars() -> None:
    """A fork with polars loaded deadlocks loader workers."""
    loaded = modules_after("import auditor.record.sampler, auditor.record.monitor")
    assert not loaded & {"polars", "datasets", "pandas", "pyarrow"}


def test_public_names_are_all_there_and_documented() -> None:
    assert auditor.__all__ == [
        "AuditedSampler",
        "DocumentIndex",
        "GradeMonitor",
        "Located",
        "Run",
        "load_manifest",
        "replay",
    ]
    for name in auditor.__all__:
        assert inspect.getdoc(getattr(auditor, name)), name
    assert set(auditor.__all__) <= set(dir(auditor))
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = auditor.nothing_here


def commands(group: click.Group) -> list[tuple[str, click.Command]]:
    return sorted(group.commands.items())


def test_every_command_has_help_with_an_example() -> None:
    assert [name for name, _ in commands(main)] == [
        "checkpoints",
        "dedupe",
        "demo",
        "doctor",
        "explain",
        "exposures",
        "grade",
        "import",
        "propose",
        "recover",
        "replay-order",
        "report",
        "restore",
        "sites",
        "sketch",
        "verify",
        "watch",
    ]
    for name, command in commands(main):
        assert f"auditor {name}" in (command.help or ""), name
        assert "Examples:" in (command.help or ""), name


def test_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "auditor", "--version"], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == f"auditor {auditor.__version__}"
