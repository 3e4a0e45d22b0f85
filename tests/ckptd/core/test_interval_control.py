"""Intervals that follow from what snapshots were measured to cost."""

from __future__ import annotations

import math

import pytest

from ckptd.core.interval_control import IntervalControl, IntervalRule, SnapshotCost, interval_of
from ckptd.core.window_control import SnapshotReading

COST = SnapshotCost(stall_s=0.2, busy_s=0.45, iteration_s=0.1)
CHECKFREQ, GEMINI, YOUNG_DALY = IntervalRule.CHECKFREQ, IntervalRule.GEMINI, IntervalRule.YOUNG_DALY


def test_each_rule_by_hand() -> None:
    assert interval_of(CHECKFREQ, COST, bound=0.03) == 67  # 0.2 / (0.03 * 0.1) = 66.7
    assert interval_of(GEMINI, COST, bound=0.03) == 5
    assert interval_of(YOUNG_DALY, COST, bound=0.03, mtbf_s=1000) == round(math.sqrt(400) / 0.1)


@pytest.mark.parametrize("rule", IntervalRule)
def test_no_rule_is_shorter_than_copies_allow(rule: IntervalRule) -> None:
    cost = SnapshotCost(stall_s=0.0, busy_s=0.45, iteration_s=0.1)
    assert interval_of(rule, cost, bound=0.5, mtbf_s=1.0) == 5
    assert interval_of(rule, SnapshotCost(0.0, 0.0, 0.1), bound=0.5, mtbf_s=1.0) == 1


def test_checkfreqs_interval_is_the_shortest_within_the_bound() -> None:
    for stall_ms in range(1, 300, 7):
        cost = SnapshotCost(stall_ms / 1e3, 0.0, 0.1)
        every = interval_of(CHECKFREQ, cost, bound=0.03)
        assert cost.stall_s / (every * cost.iteration_s) <= 0.03 * (1 + 1e-9)
        assert every == 1 or cost.stall_s / ((every - 1) * cost.iteration_s) > 0.03


def run(
    control: IntervalControl,
    every: int,
    snapshots: int,
    *,
    wait_s: float = 0.02,
    slower_s: float = 0.0,
    behind: int = 0,
) -> None:
    """Iterations of 0.1 s, of which each ``every``-th has a snapshot that is waited for."""
    for number in range(snapshots * every + 1):
        if number % every:
            control.note(SnapshotReading(0.1), behind=behind, every=every)
        else:
            own_s = 0.1 + slower_s
            reading = SnapshotReading(own_s + wait_s, 1000, copy_s=0.08, copy_wait_s=wait_s)
            control.note(reading, behind=behind, every=every)


def test_nothing_changes_before_a_few_snapshots_were_taken() -> None:
    control = IntervalControl(CHECKFREQ, bound=0.03)
    run(control, 1, 2)
    assert (control.cost, control.needed(1)) == (None, 1)
    run(control, 1, 1)
    assert control.needed(1) == 7  # 0.02 / (0.03 * 0.1) = 6.7


def test_waits_in_the_iterations_after_a_snapshot_are_its_own() -> None:
    control = IntervalControl(CHECKFREQ, bound=0.03)
    for _ in range(5):
        control.note(SnapshotReading(0.12, 1000, copy_s=0.05, copy_wait_s=0.02), behind=0, every=2)
        control.note(SnapshotReading(0.14, seal_wait_s=0.04), behind=0, every=2)
    cost = control.cost
    assert cost is not None
    assert (cost.stall_s, cost.busy_s, cost.iteration_s) == pytest.approx((0.06, 0.05, 0.1))


def test_what_iterations_with_a_snapshot_take_longer_counts() -> None:
    control = IntervalControl(CHECKFREQ, bound=0.03)
    run(control, 4, 6, wait_s=0.0, slower_s=0.03)
    cost = control.cost
    assert cost is not None
    assert cost.stall_s == pytest.approx(0.03)
    assert control.needed(4) == 10


def test_an_interval_that_is_much_the_same_stays() -> None:
    control = IntervalControl(CHECKFREQ, bound=0.03)
    run(control, 6, 6)
    assert control.needed(6) == 6
    assert control.needed(8) == 8
    assert control.needed(5) == 7
    assert control.needed(9) == 7


def test_after_a_change_the_next_one_waits_for_new_readings() -> None:
    control = IntervalControl(CHECKFREQ, bound=0.03)
    run(control, 1, 6)
    control.changed()
    assert control.needed(20) == 20
    run(control, 20, 3)
    assert control.needed(20) == 7


@pytest.mark.parametrize("behind", [0, 3, 4, 9])
def test_a_peer_that_lacks_the_last_snapshot_twice_makes_the_interval_longer(behind: int) -> None:
    control = IntervalControl(GEMINI, bound=0.03)
    run(control, 4, 4, wait_s=0.0, behind=behind)
    slow = behind >= 4
    assert control.needed(4) == (6 if slow else 1)
    control.changed()
    run(control, 6, 6, wait_s=0.0)
    assert control.needed(6) == (6 if slow else 1), "it does not come back below that"
