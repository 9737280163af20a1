"""Run benchmarks: ``python benchmarks/run.py`` lists them, a name runs one, ``--all`` runs all.

Each prints its own numbers beside those of a peer or a baseline, measured in the same run, and the
versions and the machine they were measured with.
"""

from __future__ import annotations

import argparse
import ast
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parent


def benchmarks() -> dict[str, str]:
    """First line of the docstring by name."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        # The parts of a benchmark lie beside it and have no main.
        if path.name != Path(__file__).name and "def main()" in text:
            docstring = ast.get_docstring(ast.parse(text)) or ""
            found[path.stem] = docstring.splitlines()[0] if docstring else ""
    return found


def main() -> int:
    known = benchmarks()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", choices=[*known, []], help="benchmarks to run")
    parser.add_argument("--all", action="store_true", help="run all of them")
    arguments = parser.parse_args()
    names = list(known) if arguments.all else arguments.names
    if not names:
        for name, line in known.items():
            print(f"{name:20} {line}")
        return 0
    libraries = ("auditor", "torch", "numpy", "numba", "polars", "datasketch")
    print(f"Python {platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores;")
    print(", ".join(f"{name} {version(name)}" for name in libraries))
    failed = []
    for name in names:
        print(f"\n== {name}: {known[name]}", flush=True)
        if subprocess.run([sys.executable, FOLDER / f"{name}.py"]).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
