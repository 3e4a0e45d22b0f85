"""What is judged from readings; how the judgement is used in a loop is tests/simulation/test_window_simulation."""

from __future__ import annotations

import pytest

from ckptd.core.window_control import Cause, SnapshotReading, WindowControl

BYTES = 1_000_000
FREE = SnapshotReading(1.0, BYTES, copy_s=0.5)


def judged(*readings: SnapshotReading, regular: bool = True, plain: tuple[float, ...] = ()) -> WindowControl:
    control = WindowControl(bound=0.01, regular=regular)
    for seconds in plain:
        control.note(SnapshotReading(seconds))
    for reading in readings:
        control.note(reading)
    return control


def test_what_costs_nothing_is_no_shortage() -> None:
    assert judged(*[FREE] * 20, plain=(9.0, 1.0, 1.0)).shortage() is None


def test_of_a_copy_that_is_waited_for_the_part_that_was_not_is_affordable() -> None:
    found = judged(*[SnapshotReading(2.0, BYTES, copy_s=1.0, copy_wait_s=0.5)] * 8).shortage()
    assert found is not None
    assert (found.cause, found.share, found.iteration_s) == (Cause.COPIES, 0.25, 1.5)
    assert found.affordable_bytes == pytest.approx(BYTES * (0.5 + 0.01 * 2.0))


def test_a_copy_by_the_training_thread_may_cost_the_bound() -> None:
    found = judged(*[SnapshotReading(1.0, BYTES, copy_wait_s=0.2)] * 20, regular=False).shortage()
    assert found is not None
    assert found.affordable_bytes == pytest.approx(BYTES * 0.05, rel=0.01)


def test_slow_digests_are_seen_before_the_slots_run_out() -> None:
    found = judged(*[SnapshotReading(1.0, BYTES, copy_s=0.5, seal_s=4.0)] * 8).shortage()
    assert found is not None
    assert (found.cause, found.share) == (Cause.SEALING, 0.75)
    assert found.affordable_bytes == pytest.approx(BYTES / 4, rel=0.02)


def test_on_a_busy_machine_only_waits_count_as_slow_digests() -> None:
    late = SnapshotReading(1.0, BYTES, copy_s=0.5, seal_s=4.0)
    assert judged(*[late] * 20, regular=False).shortage() is None
    waited = SnapshotReading(1.0, BYTES, copy_s=0.5, seal_wait_s=0.4)
    found = judged(*[waited] * 20, regular=False).shortage()
    assert found is not None
    assert (found.cause, found.severe) == (Cause.SEALING, True)


def test_a_slowdown_is_told_from_the_iterations_before_the_first_snapshot() -> None:
    slow = SnapshotReading(1.25, BYTES, copy_s=0.5)
    found = judged(*[slow] * 8, plain=(30.0, 1.0, 1.01, 0.99)).shortage()
    assert found is not None
    assert found.cause is Cause.SLOWDOWN
    assert found.share == pytest.approx(0.2)
    assert judged(*[slow] * 8, plain=(30.0, 1.0, 1.6, 0.9)).shortage() is None  # they vary as much without
    assert judged(*[slow] * 20, plain=(30.0, 1.0, 1.0), regular=False).shortage() is None


def test_a_slowdown_that_smaller_snapshots_do_not_change_is_not_ours() -> None:
    control = judged(*[SnapshotReading(2.0, BYTES, copy_s=0.1)] * 8, plain=(1.0, 1.0, 1.0))
    assert control.shortage() is not None
    control.changed()
    for _ in range(8):
        control.note(SnapshotReading(2.0, BYTES // 4, copy_s=0.03))
    assert control.shortage() is None


def test_a_slowdown_that_became_smaller_is_followed_further() -> None:
    control = judged(*[SnapshotReading(2.0, BYTES, copy_s=0.1)] * 8, plain=(1.0, 1.0, 1.0))
    control.changed()
    for _ in range(8):
        control.note(SnapshotReading(1.25, BYTES // 4, copy_s=0.03))
    found = control.shortage()
    assert found is not None
    assert found.affordable_bytes < BYTES // 4


@pytest.mark.parametrize(("regular", "mild", "severe"), [(True, 8, 6), (False, 20, 6)])
def test_a_severe_loss_needs_fewer_readings(regular: bool, mild: int, severe: int) -> None:
    for wait, needed in ((0.1, mild), (0.6, severe)):
        control = WindowControl(bound=0.01, regular=regular)
        found = []
        for _ in range(20):
            control.note(SnapshotReading(1.0, BYTES, copy_s=0.7, copy_wait_s=wait))
            found.append(control.shortage() is not None)
        assert found.index(True) == needed - 1
        assert all(found[needed:])


def test_readings_of_another_window_say_nothing() -> None:
    control = judged(*[SnapshotReading(1.0, BYTES, copy_s=0.7, copy_wait_s=0.6)] * 20)
    assert control.shortage() is not None
    control.changed()
    assert control.shortage() is None


def test_it_looks_now_and_then_and_soon_where_something_is_short() -> None:
    control = WindowControl(bound=0.01, regular=True)
    assert control.due(1)
    control.looked(1, in_vain=False)
    assert [step for step in range(2, 60) if control.due(step)] == list(range(51, 60))
    for _ in range(8):
        control.note(SnapshotReading(1.0, BYTES, copy_s=0.7, copy_wait_s=0.6))
    assert [step for step in range(2, 20) if control.due(step)] == [12, 16]
    control.looked(12, in_vain=True)
    assert not any(control.due(step) for step in range(13, 62))
    assert control.due(62)


def test_only_iterations_before_the_first_snapshot_are_without_one() -> None:
    """A step whose snapshot found no slot, after the window has changed, is no measure."""
    control = judged(*[FREE] * 8, plain=(9.0, 1.0, 1.0))
    control.changed()
    for _ in range(10):
        control.note(SnapshotReading(0.1))
    for _ in range(8):
        control.note(FREE)
    assert control.shortage() is None


def test_waits_that_a_device_tells_late_are_no_error() -> None:
    found = judged(
        *[SnapshotReading(1.0, BYTES, copy_s=0.5, copy_wait_s=1.0)] * 8, plain=(1.0,) * 3
    ).shortage()
    assert found is not None
    assert found.affordable_bytes >= 0
