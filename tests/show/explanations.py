"""Explanations made by hand, small and without a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from auditor import schema
from auditor.clean.proposal import NO_CHANGE, Proposal
from auditor.explain.explanation import Diagnosis, Explanation
from auditor.tables import polars_schema

EVERY = 5


def frame(columns: Mapping[str, str], rows: list[dict[str, Any]]) -> pl.DataFrame:
    """A table of the schema; columns that a row leaves out are null."""
    full = [{name: row.get(name) for name in columns} for row in rows]
    return pl.DataFrame(full, schema=polars_schema(columns), orient="row")


def signals(
    n_steps: int = 300, n_layers: int = 2, kinds: tuple[str, ...] = ("live", "probe")
) -> pl.DataFrame:
    """Every signal of a monitor, falling in the last layer from the middle on."""
    steps = np.arange(0, n_steps, EVERY)
    parts = []

    def add(at: np.ndarray, values: np.ndarray, **labels: Any) -> None:
        parts.append(
            frame(schema.SIGNALS, []).vstack(
                pl.DataFrame({"step": at, "value": values})
                .with_columns(
                    *(
                        pl.lit(labels.get(name), dtype=kind).alias(name)
                        for name, kind in polars_schema(schema.SIGNALS).items()
                        if name not in ("step", "value")
                    )
                )
                .select(list(schema.SIGNALS))
                .cast(polars_schema(schema.SIGNALS))
            )
        )

    for kind in kinds:
        common = {"attempt": 0, "rank": 0, "kind": kind, "site": "blocks"}
        for layer in range(n_layers):
            fall = np.where(steps > n_steps // 2, 0.3 * (layer + 1) / n_layers, 0.0)
            for variant in ("raw", "column"):
                values = 0.75 - fall + 0.01 * np.sin(steps + layer)
                add(steps, values, signal="token_rank", layer=layer, variant=variant, **common)
            add(steps, 3.0 - fall, signal="entropy_mean", layer=layer, **common)
            add(steps, 2.0 - fall, signal="entropy_min", layer=layer, head=layer % 4, **common)
        diversity = 0.8 - np.where(steps > n_steps // 2 - 10, 0.4, 0.0)
        add(steps, diversity, signal="sample_rank", layer=-1, variant="centred", **common)
    if "probe" in kinds:
        labels = {"attempt": 0, "rank": 0, "kind": "probe", "site": ""}
        add(steps, 2.0 + 0.001 * steps, signal="probe_loss", **labels)
    at = np.arange(n_steps)
    labels = {"attempt": 0, "rank": 0, "kind": "step", "site": ""}
    add(at, 4.0 * np.exp(-at / 100), signal="loss", **labels)
    add(at, 1.0 + (at == n_steps // 2) * 500.0, signal="grad_norm", **labels)
    add(at, 1e-3 * np.minimum(1.0, (at + 1) / 20), signal="lr", **labels)
    return pl.concat(parts)


def grades(n_steps: int = 300) -> pl.DataFrame:
    rows = []
    for step in range(0, n_steps, EVERY):
        ratio = 0.15 if step < 50 else 0.72 if step <= n_steps // 2 else 0.43
        alert = "warming" if step < 50 else "healthy" if ratio > 0.5 else "watch, falling"
        rows.append(
            {
                "attempt": 0,
                "step": step,
                "kind": "probe",
                "layer": 1,
                "ratio": ratio,
                "grade": int(ratio * 10),
                "alert": alert,
            }
        )
    return frame(schema.GRADES, rows)


def resumed(*starts: int, n_steps: int = 150) -> dict[str, Any]:
    """Changes that make a run of attempts at these steps, each with a warm-up of 50."""
    tables: dict[str, list[pl.DataFrame]] = {"signals": [], "grades": [], "composition": []}
    for attempt, start in enumerate(starts):
        for name, made in (
            ("signals", signals(n_steps)),
            ("grades", grades(n_steps)),
            ("composition", composition(n_steps)),
        ):
            moved = made.with_columns(
                pl.lit(attempt, pl.Int32).alias("attempt"), pl.col("step") + start
            )
            tables[name].append(moved)
    return {name: pl.concat(parts) for name, parts in tables.items()}


def composition(
    n_steps: int = 300, sources: tuple[str, ...] = ("novels", "speeches", "peps")
) -> pl.DataFrame:
    rows = []
    for step in range(n_steps):
        for i, source in enumerate(sources):
            repeats = step >= n_steps // 2 and i == 0
            rows.append(
                {
                    "attempt": 0,
                    "step": step,
                    "source": source,
                    "n_samples": 8,
                    "n_scored": 8,
                    "n_duplicate": 7 if repeats else int(i == 1),
                    "n_repetitive": 0,
                    "n_distinct": 0,
                    "n_tokens": 512,
                    "repetition": 0.05,
                }
            )
    return frame(schema.COMPOSITION, rows)


def event(number: int = 0, **changes: Any) -> dict[str, Any]:
    usual = {
        "event": number,
        "episode": 0,
        "kind": "input_fall",
        "signal": "sample_rank",
        "measured": "live",
        "layer": -1,
        "onset_low": 145 + 10 * number,
        "onset_high": 150 + 10 * number,
        "trough_step": 200,
        "recovery_step": None,
        "before": 0.81,
        "after": 0.4,
        "grade_before": 7,
        "grade_after": 4,
    }
    return {**usual, **changes}


def suspect(name: str = "novels", **changes: Any) -> dict[str, Any]:
    usual = {
        "event": 0,
        "level": "source",
        "name": name,
        "feature": "duplication",
        "exposure": 0.594,
        "control": 0.001,
        "lift": 123.4,
        "low": 50.0,
        "high": 4321.0,
        "z": 95.3,
        "p": 0.0051,
        "q": 0.02,
        "lag": 1,
        "verdict": "blamed",
    }
    return {**usual, **changes}


def inside(name: str, level: str) -> dict[str, Any]:
    return suspect(name, level=level, verdict="ranked", z=None, p=None, q=None)


def explanation(**changes: Any) -> Explanation:
    """One episode with two events, the source ``novels`` blamed for both."""
    usual: dict[str, Any] = {
        "run_id": "run-1",
        "n_steps": 300,
        "every": EVERY,
        "signals": signals(),
        "grades": grades(),
        "events": frame(
            schema.EVENTS,
            [
                event(0),
                event(1, kind="grade_drop", signal="grade", measured="probe", layer=None),
            ],
        ),
        "composition": composition(),
        "suspects": frame(
            schema.SUSPECTS,
            [
                suspect(),
                suspect("peps", verdict="ranked", z=1.1, feature="share", p=0.4, q=1.0),
                inside("novels-00001", "cluster"),
                inside("novels.jsonl.zst", "shard"),
                inside("novels-00002", "sample"),
                suspect(event=1),
            ],
        ),
        "drifts": frame(schema.DRIFTS, []),
        "previews": pl.DataFrame(
            {
                "sample_id": ["novels-00001", "novels-00002"],
                "source": ["novels", "novels"],
                "preview": ["Call me Ishmael.", "Call me Ishmael."],
            }
        ),
        "diagnoses": dict.fromkeys(
            (0, 1), Diagnosis("data", "59% of the samples were repeats", "Deduplicate and go on.")
        ),
        "smallest_p": {0: 0.005, 1: 0.005},
        "verdict": "1 episode; the first to blame is novels.",
        "culprit": "novels",
        "judged": True,
        "gaps": ["attempt 0, rank 0: 3 frames dropped"],
    }
    return Explanation(**{**usual, **changes})


def without_events(**changes: Any) -> Explanation:
    usual: dict[str, Any] = {
        "events": frame(schema.EVENTS, []),
        "suspects": frame(schema.SUSPECTS, []),
        "diagnoses": {},
        "smallest_p": {},
        "verdict": "No event: no signal left what was normal for this run.",
        "culprit": None,
        "gaps": [],
    }
    return explanation(**{**usual, **changes})


def proposal() -> Proposal:
    return Proposal(
        "Deduplicate, starting with novels.",
        True,
        {"novels": 0.56, "speeches": 0.34, "peps": 0.1},
        {"novels": 0.4, "speeches": 0.45, "peps": 0.15},
        {"novels": 7.5, "speeches": 1.0, "peps": 1.0},
        {"novels": 4.0, "speeches": 1.2, "peps": 1.3},
    )


def drift(source: str | None, **changes: Any) -> dict[str, Any]:
    row = {"kind": "mix", "source": source, "onset": 150, "before": 0.4, "after": 0.9, "z": 20.0}
    return row | changes


NOTHING_PROPOSED = Proposal(NO_CHANGE, False, {}, {}, {}, {})

EMPTY: Mapping[str, Any] = {
    "n_steps": 0,
    "every": None,
    "signals": frame(schema.SIGNALS, []),
    "grades": frame(schema.GRADES, []),
    "composition": frame(schema.COMPOSITION, []),
}
"""Changes that make a run in which nothing was recorded."""

HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "<a href='javascript:alert(1)'>x</a>",
    "\u202egnirts desrever\u202c",
    "شعر عربي",
    "\U0001f469\u200d\U0001f52c\U0001f600",
    "\x1b[31mred\x1b[0m\x1b]0;title\x07\x1b]8;;http://example.com\x1b\\link",
    "a\r\n\t\x00\x08b\u2028c",
    "x" * 1_000_000,
    "[red]markup[/red] [link=http://example.com]y[/link] :smile:",
    "%{y} $\\LaTeX$ &lt;b&gt;",
    "",
)
"""Names and previews that a corpus may hold."""


def hostile() -> tuple[Explanation, Proposal]:
    """Hostile text wherever an explanation carries text from data."""
    suspects = [suspect(name, z=90.0 - i) for i, name in enumerate(HOSTILE)]
    suspects += [inside(name, "cluster") for name in HOSTILE[:5]]
    suspects += [inside(name, "shard") for name in HOSTILE[5:9]]
    suspects += [inside(name, "sample") for name in HOSTILE[6:11]]
    mix = dict.fromkeys(HOSTILE, 1 / len(HOSTILE))
    made = explanation(
        run_id=HOSTILE[0],
        suspects=frame(schema.SUSPECTS, suspects),
        drifts=frame(schema.DRIFTS, [drift(name) for name in HOSTILE]),
        composition=composition(sources=HOSTILE),
        previews=pl.DataFrame(
            {"sample_id": HOSTILE, "source": HOSTILE, "preview": [*HOSTILE[1:], HOSTILE[0]]}
        ),
        events=frame(schema.EVENTS, [event(0, signal=HOSTILE[0]), event(1, kind=HOSTILE[1])]),
        diagnoses={0: Diagnosis(HOSTILE[0], HOSTILE[6], HOSTILE[9])},
        verdict=" ".join(HOSTILE),
        culprit=HOSTILE[0],
        gaps=list(HOSTILE),
    )
    return made, Proposal(HOSTILE[0], True, mix, mix, mix, mix)
