"""The steps towards another order, which every rank takes alike."""

from __future__ import annotations

import random

import pytest

from ckptd.client.schedule.schedule_change import orders_towards
from ckptd.core.schedule import OperatorCost, OperatorKind, Schedule, plan_schedule

COSTS = [OperatorCost(f"e{i}", OperatorKind.EXPERT, 100 + i, 10) for i in range(12)]
ROOM = 2_000


def four_phases() -> Schedule:
    return plan_schedule(COSTS, budget_bytes=None, order=list(range(12)), window=4)


@pytest.mark.parametrize("seed", range(20))
def test_an_order_is_reached_and_nothing_is_postponed_by_more_than_a_phase_at_once(
    seed: int,
) -> None:
    """So any window and one snapshot more anchor everything, across every step."""
    order = random.Random(seed).sample(range(12), 12)
    schedule = four_phases()
    steps = orders_towards(schedule, COSTS, order, capacity_bytes=ROOM)
    assert steps
    assert len(set(steps)) == len(steps)
    before = schedule.phases
    for after in steps:
        was = {op: phase for phase, ops in enumerate(before) for op in ops}
        assert all(phase <= was[op] + 1 for phase, ops in enumerate(after) for op in ops)
        before = after
    reached = [op for phase in steps[-1] for op in phase]
    places = {op: place for place, op in enumerate(order)}
    early, late = set(reached[:3]), set(reached[-3:])
    assert max(places[op] for op in early) < min(places[op] for op in late)


def test_there_is_no_step_to_the_order_that_is() -> None:
    assert orders_towards(four_phases(), COSTS, range(12), capacity_bytes=ROOM) == ()


@pytest.mark.parametrize("order", [range(11), [0] * 12, range(13)])
def test_an_order_of_other_operators_is_refused(order: list[int]) -> None:
    with pytest.raises(ValueError, match="there are 12"):
        orders_towards(four_phases(), COSTS, order, capacity_bytes=ROOM)
