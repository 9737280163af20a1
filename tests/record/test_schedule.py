"""When the monitor samples: as asked for, and more densely for a while once it is suspicious."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.record.schedule import DENSE_FOR_STEPS, DENSE_STEPS, Schedule


def sampled(
    schedule: Schedule,
    n_steps: int,
    *,
    suspicious: tuple[int, ...] = (),
    cost_s: float = 0.0,
    stride: int = 1,
    clock: list[float] | None = None,
    step_s: float = 1.0,
) -> list[int]:
    """Steps that were sampled by a loop that does what the monitor does."""
    found = []
    for step in range(0, n_steps * stride, stride):
        if clock is not None:
            clock[0] += step_s
        if schedule.is_sampled(step):
            extra = schedule.is_extra(step)
            schedule.sampled(step)
            schedule.agree(step, False)
            found.append(step)
            if extra:
                schedule.spend(cost_s)
        if step in suspicious:
            schedule.suspect(step)
        schedule.next_is_sampled(step)
    return found


@pytest.mark.parametrize("every", [1, 7, 50, 200])
def test_quiet_run_is_sampled_as_asked_for(every: int) -> None:
    assert sampled(Schedule(every, 1.0), 900) == list(range(0, 900, every))


@given(st.integers(1, 2000))
def test_dense_samples_are_close_enough_and_fall_on_the_sparse_ones(every: int) -> None:
    schedule = Schedule(every, 1.0)
    assert 1 <= schedule.dense <= DENSE_STEPS
    assert every <= DENSE_STEPS or schedule.dense * -(-every // DENSE_STEPS) <= every


def test_suspicion_makes_sampling_dense_for_a_while() -> None:
    found = sampled(Schedule(200, 1.0), 1600, suspicious=(400,))
    dense = [step for step in found if step % 200]
    assert dense[0] == 450  # at once, not at the next sparse sample
    assert all(400 < step < 400 + DENSE_FOR_STEPS for step in dense)
    assert set(range(0, 1600, 200)) <= set(found)
    assert dense == [s for s in range(450, 900, 50) if s % 200]


def test_dense_samples_stop_where_their_budget_ends_and_are_counted() -> None:
    """1% of the time: after 5,000 steps of a second there are 50 s, enough for 5 samples of 10."""
    clock = [0.0]
    schedule = Schedule(200, 0.01, clock=lambda: clock[0])
    found = sampled(
        schedule, 7000, suspicious=tuple(range(5000, 7000, 50)), cost_s=10.0, clock=clock
    )
    dense = [step for step in found if step % 200]
    spent = 10.0 * len(dense)
    assert 40.0 <= spent <= 0.01 * clock[0]
    assert schedule.n_over_budget > 20
    assert set(range(0, 7000, 200)) <= set(found)  # what was asked for is always there


def test_no_budget_is_no_dense_sample() -> None:
    schedule = Schedule(200, 0.0)
    schedule.spend(1e-9)
    assert sampled(schedule, 1000, suspicious=(200,)) == list(range(0, 1000, 200))


def test_steps_numbered_in_strides_are_sampled_by_period() -> None:
    assert sampled(Schedule(200, 1.0), 40, stride=30) == [
        0, 210, 420, 600, 810, 1020,
    ]  # fmt: skip


def test_ranks_that_agree_sample_alike_though_one_alone_is_suspicious() -> None:
    """Two schedules in one loop: what one rank wants at a sample, all do after it."""
    wants: list[list[bool]] = [[], []]

    def agree(rank: int):  # type: ignore[no-untyped-def]
        def exchange(holds: list[bool]) -> list[bool]:
            wants[rank] = holds
            return [any(pair) for pair in zip(*(w or [False] * 3 for w in wants), strict=True)]

        return exchange

    ranks = [Schedule(200, 1.0, agree=agree(rank)) for rank in range(2)]
    found: list[list[int]] = [[], []]
    for step in range(1200):
        due = [schedule.is_sampled(step) for schedule in ranks]
        assert due[0] == due[1]
        if due[0]:
            for rank, schedule in enumerate(ranks):
                found[rank].append(step)
                schedule.sampled(step)
            for schedule in (*ranks, *ranks):  # a collective gives both the same answer
                schedule.agree(step, False)
        if step == 210:
            ranks[1].suspect(step)
        for schedule in ranks:
            schedule.next_is_sampled(step)
    assert found[0] == found[1]
    assert next(step for step in found[0] if step % 200) == 450
