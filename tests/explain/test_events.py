"""Rules over signals: what is an event, where it began, and what is not one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
import pytest

from auditor import schema
from auditor.explain.diagnosis import diagnose, learning_rate_jumps
from auditor.explain.events import events_of
from auditor.explain.grades import grades_of
from auditor.tables import polars_schema

EVERY = 5
SAMPLES = 100


def table(**series: Sequence[float] | np.ndarray) -> pl.DataFrame:
    """Signals of a run: rank ratios of one block, input diversity, losses and so on."""
    where = {
        "raw": ("probe", "token_rank", 0, "raw"),
        "column": ("probe", "token_rank", 0, "column"),
        "diversity": ("live", "sample_rank", -1, "centred"),
        "probe_loss": ("probe", "probe_loss", None, None),
        "entropy": ("probe", "entropy_mean", 0, None),
        "loss": ("step", "loss", None, None),
        "grad_norm": ("step", "grad_norm", None, None),
        "lr": ("step", "lr", None, None),
    }
    rows = []
    for name, values in series.items():
        kind, signal, layer, variant = where[name]
        stride = 1 if kind == "step" else EVERY
        for i, value in enumerate(values):
            rows.append(
                {
                    "attempt": 0,
                    "rank": 0,
                    "step": i * stride,
                    "kind": kind,
                    "site": "",
                    "layer": layer,
                    "variant": variant,
                    "signal": signal,
                    "value": float(value),
                }
            )
    return pl.DataFrame(rows, schema=polars_schema(schema.SIGNALS))


def noise(level: float, sd: float = 0.005, n: int = SAMPLES, seed: int = 0) -> np.ndarray:
    return level + np.random.default_rng(seed).normal(scale=sd, size=n)


def dropping(level: float, to: float, at: int, over: int = 1, n: int = SAMPLES) -> np.ndarray:
    """Flat, then down (or up) over some samples from sample ``at``, and flat again."""
    values = noise(level, n=n)
    values += (to - level) * np.clip((np.arange(n) - at + 1) / over, 0, 1)
    return values


def events(signals: pl.DataFrame) -> pl.DataFrame:
    return events_of(signals, grades_of(signals))


HEALTHY = {"raw": noise(0.75), "column": noise(0.8, seed=1), "diversity": noise(0.8, 0.03)}


def test_quiet_run_has_no_event() -> None:
    signals = table(
        **HEALTHY,
        probe_loss=np.linspace(3, 2.5, SAMPLES),
        entropy=noise(2.5),
        loss=noise(2.5, 0.05, 500),
        grad_norm=noise(0.8, 0.1, 500),
    )
    assert events(signals).is_empty()


@pytest.mark.parametrize("seed", range(10))
def test_noisy_input_diversity_is_no_event(seed: int) -> None:
    signals = table(**{**HEALTHY, "diversity": noise(0.75, 0.03, seed=seed)})
    assert events(signals).is_empty()


def test_warmup_dip_is_no_event() -> None:
    dip = noise(0.75)
    dip[:15] = np.concatenate([np.linspace(0.95, 0.2, 8), np.linspace(0.3, 0.75, 7)])
    assert events(table(**{**HEALTHY, "raw": dip, "column": dip})).is_empty()


def test_fall_of_the_ratio_has_its_onset_between_two_samples() -> None:
    found = events(table(**{**HEALTHY, "raw": dropping(0.75, 0.5, at=60)}))
    row = found.filter(pl.col("kind") == "ratio_fall").row(0, named=True)
    assert (row["onset_low"], row["onset_high"]) == (59 * EVERY, 60 * EVERY)
    assert row["before"] == pytest.approx(0.75, abs=0.02)
    assert row["after"] == pytest.approx(0.5, abs=0.03)
    assert (row["grade_before"], row["measured"]) == (7, "probe")


def test_slow_fall_has_its_onset_at_its_beginning_not_where_it_was_noticed() -> None:
    found = events(table(**{**HEALTHY, "raw": dropping(0.75, 0.45, at=50, over=16)}))
    row = found.filter(pl.col("kind") == "ratio_fall").row(0, named=True)
    assert 50 * EVERY <= row["onset_high"] <= 56 * EVERY


def test_one_odd_sample_is_no_event() -> None:
    odd = noise(0.75)
    odd[60] = 0.5
    loss = noise(2.5, 0.05, 500)
    loss[300] = 2.9  # 8 deviations: one hard batch of the many that a run has
    assert events(table(**{**HEALTHY, "raw": odd}, loss=loss)).is_empty()


def test_poor_input_is_its_own_kind_of_event_and_ends() -> None:
    poor = noise(0.8, 0.02)
    poor[60:70] -= 0.3
    (row,) = events(table(**{**HEALTHY, "diversity": poor})).iter_rows(named=True)
    assert (row["kind"], row["measured"], row["layer"]) == ("input_fall", "live", -1)
    assert (row["onset_high"], row["recovery_step"]) == (60 * EVERY, 70 * EVERY)


def test_loss_on_the_probe_that_rises_is_an_event() -> None:
    found = events(table(**HEALTHY, probe_loss=dropping(2.6, 2.85, at=70)))
    assert found["kind"].to_list() == ["probe_loss_rise"]
    assert found["onset_high"].to_list() == [70 * EVERY]


def test_spikes_and_values_that_are_not_finite_are_told_apart() -> None:
    loss, norm = noise(2.5, 0.05, 500), noise(0.8, 0.1, 500)
    norm[200] = 20.0
    loss[300:304] = 5.0
    loss[450:] = np.nan
    found = events(table(**HEALTHY, loss=loss, grad_norm=norm))
    kinds = dict(found.select("kind", "onset_high").iter_rows())
    assert kinds == {"grad_spike": 200, "loss_spike": 300, "non_finite": 450}
    assert found["episode"].n_unique() == 3 - 1  # within 100 steps of the first's end: 200, 300


def test_an_event_does_not_enter_its_own_baseline() -> None:
    """A fall that stays is one event until the end, not a new normal after a while."""
    poor = noise(0.8, 0.01)
    poor[50:] -= 0.3
    (row,) = events(table(**{**HEALTHY, "diversity": poor})).iter_rows(named=True)
    assert row["recovery_step"] is None


def test_collapse_of_all_heads_is_attention() -> None:
    signals = table(**HEALTHY, entropy=dropping(2.6, 1.0, at=60))
    found = events(signals)
    assert found["kind"].to_list() == ["entropy_fall"]
    empty = pl.DataFrame(schema=polars_schema(schema.SUSPECTS))
    jumps = learning_rate_jumps(found, signals)
    assert diagnose(found, empty, signals, jumps)[0].cause == "attention"


def test_a_jump_of_the_learning_rate_is_named_as_the_cause() -> None:
    lr = np.full(500, 1e-3)
    lr[300:320] = 1e-2
    signals = table(**{**HEALTHY, "column": dropping(0.8, 0.4, at=61)}, lr=lr)
    found = events(signals)
    empty = pl.DataFrame(schema=polars_schema(schema.SUSPECTS))
    jumps = learning_rate_jumps(found, signals)
    causes = {one.cause for one in diagnose(found, empty, signals, jumps).values()}
    assert causes == {"optimizer"}


def test_events_far_apart_are_two_episodes() -> None:
    poor = noise(0.8, 0.01)
    poor[30:34] -= 0.3
    poor[80:84] -= 0.3
    found = events(table(**{**HEALTHY, "diversity": poor}))
    assert found["episode"].to_list() == [0, 1]


def test_run_without_signals_has_no_events() -> None:
    signals = pl.DataFrame(schema=polars_schema(schema.SIGNALS))
    assert events(signals).is_empty()


@pytest.mark.parametrize("name", ["raw", "probe_loss"])
def test_a_fall_that_stays_does_not_recover_by_becoming_the_norm(name: str) -> None:
    level, to = {"raw": (0.75, 0.55), "probe_loss": (2.5, 3.0)}[name]
    found = events(table(**{**HEALTHY, name: dropping(level, to, at=40)}))
    kind = {"raw": "ratio_fall", "probe_loss": "probe_loss_rise"}[name]
    row = found.filter(pl.col("kind") == kind).row(0, named=True)
    assert row["recovery_step"] is None


def test_one_overflow_of_the_norm_is_no_event_and_a_series_of_them_is() -> None:
    norm = noise(0.8, 0.1, 500)
    norm[200] = np.inf
    assert events(table(**HEALTHY, grad_norm=norm)).is_empty()
    norm[300:303] = np.nan
    assert events(table(**HEALTHY, grad_norm=norm))["kind"].to_list() == ["non_finite"]


def test_model_that_was_undefined_from_the_first_step_is_reported() -> None:
    nothing = np.full(SAMPLES, np.nan)
    signals = table(raw=nothing, column=nothing, loss=np.full(500, np.nan))
    assert events(signals)["kind"].to_list() == ["non_finite"]


def test_steps_that_do_not_begin_at_zero_are_no_different() -> None:
    signals = table(**{**HEALTHY, "raw": dropping(0.75, 0.5, at=60)})
    shifted = signals.with_columns(pl.col("step") + 100_000)
    plain, moved = events(signals), events(shifted)
    assert moved["onset_high"].to_list() == [step + 100_000 for step in plain["onset_high"]]
    assert moved["kind"].to_list() == plain["kind"].to_list()
