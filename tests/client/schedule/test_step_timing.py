"""Readings of a made-up clock."""

from __future__ import annotations

from ckptd.client.schedule.step_timing import StepTiming


def _steps(
    pace: StepTiming, count: int, *, boundary: float, wait: float, forward: float, rest: float
) -> None:
    now = 100.0
    for _ in range(count):
        pace.top(now, inline_copy_s=boundary / 2)
        now += boundary
        pace.boundary_over(now)
        now += forward
        pace.waited(wait)
        now += wait
        pace.optimizer_begins(now)
        now += rest


def test_what_is_ours_is_not_counted_as_room_for_copies() -> None:
    pace = StepTiming()
    _steps(pace, 5, boundary=0.25, wait=0.5, forward=4.0, rest=1.0)
    assert pace.copy_window_s == 4.0
    assert pace.iteration_s == 5.75


def test_preparation_is_no_steps_stall() -> None:
    pace = StepTiming()
    pace.top(10.0)
    pace.prepared(2.0)
    pace.boundary_over(12.5)
    assert pace.boundary_s == 0.5


def test_the_stall_share_waits_for_enough_steps_and_can_be_forgotten() -> None:
    pace = StepTiming()
    _steps(pace, 10, boundary=2.0, wait=1.0, forward=1.0, rest=4.0)
    assert pace.stall_share == 0.0
    _steps(pace, 20, boundary=2.0, wait=1.0, forward=1.0, rest=4.0)
    assert pace.stall_share == 0.25
    pace.forget_stalls()
    assert pace.stall_share == 0.0


def test_a_severe_stall_is_told_after_a_few_steps() -> None:
    mild, severe = StepTiming(), StepTiming()
    _steps(mild, 8, boundary=1.0, wait=0.0, forward=3.0, rest=4.0)
    assert (mild.stall_share, mild.stalls_severely) == (0.0, False)
    _steps(severe, 8, boundary=0.0, wait=5.0, forward=1.0, rest=4.0)
    assert severe.stall_share == 0.5
    assert severe.stalls_severely


def test_a_devices_wait_and_sealing_are_stalls_and_take_nothing_from_the_hosts_time() -> None:
    pace, now = StepTiming(), 100.0
    for _ in range(21):
        pace.top(now)
        pace.sealed(0.5)
        pace.boundary_over(now + 0.5)
        pace.device_waited(1.0)
        pace.optimizer_begins(now + 2.5)
        now += 6.0
    assert pace.copy_window_s == 2.0
    assert pace.stall_share == 0.25
    assert pace.device_s == 1.0


def test_the_first_step_has_no_predecessor() -> None:
    pace = StepTiming()
    assert pace.top(1.0) is None
    assert pace.top(3.0) == 2.0
