"""Deduplicate shards on a Ray cluster, and check what came out.

    python pipelines/cluster_dedupe.py INPUT... --out DIR [--address auto|HOST:PORT]

Needs ray. INPUT are files, folders, globs or URLs. On several machines, OUT and inputs that are no
URLs lie on storage that all nodes mount under the same path. Without an address and a cluster, Ray
is started on this machine alone. The same command goes on where it was interrupted. As a job:

    ray job submit -- python /shared/cluster_dedupe.py /shared/corpus --out /shared/clean
"""

from __future__ import annotations

import argparse
import sys

from auditor.clean.dedupe import dedupe
from auditor.clean.manifest import verify
from auditor.clean.ray import Ray
from auditor.errors import AuditorError


def tell(stage: str, done: int, total: int) -> None:
    print(f"{stage:8} {done / max(total, 1):6.1%}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("inputs", nargs="+")
    parser.add_argument("--out", required=True)
    parser.add_argument("--address")
    arguments = parser.parse_args()
    try:
        engine = Ray(arguments.address)
        try:
            manifest = dedupe(arguments.inputs, arguments.out, engine=engine, progress=tell)
        finally:
            engine.close()
        checked = verify(arguments.out)
    except AuditorError as error:
        print(error, file=sys.stderr)
        return 1
    counts = manifest.counts
    print(f"{counts['rows_in']} rows in, {counts['rows_out']} out, verified: {checked.ok}")
    return 0 if checked.ok else 1


if __name__ == "__main__":
    sys.exit(main())
