"""The choice between threaded and inline copies, fed with iteration times."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckptd.client.schedule.copy_mode import CopyModeChooser


def settle(chooser: CopyModeChooser, time_of: Callable[[bool, int], float]) -> int:
    """Feed it until it decides; how many iterations that took."""
    for count in range(1, 1000):
        chooser.note(time_of(chooser.inline, count))
        if chooser.decided:
            return count
    raise AssertionError("never decided")


@pytest.mark.parametrize(("inline_s", "chosen"), [(0.8, True), (1.0, False), (0.995, False), (1.2, False)])
def test_inline_must_win_clearly(inline_s: float, chosen: bool) -> None:
    chooser = CopyModeChooser()
    settle(chooser, lambda inline, _: inline_s if inline else 1.0)
    assert chooser.inline is chosen
    assert "threaded 1000.00 ms" in chooser.reason


def test_both_are_tried_in_turn_so_that_drift_cancels() -> None:
    chooser = CopyModeChooser()
    modes: list[bool] = []

    def slower_and_slower(inline: bool, count: int) -> float:
        modes.append(inline)
        return count + (-10.0 if inline else 0.0)

    settle(chooser, slower_and_slower)
    assert modes.count(True) == modes.count(False)
    assert modes[0] is False
    assert chooser.inline


def test_single_outliers_do_not_decide() -> None:
    chooser = CopyModeChooser()
    settle(chooser, lambda inline, count: 100.0 if count % 6 == 2 else (0.8 if inline else 1.0))
    assert chooser.inline


def test_a_decision_holds_and_is_looked_at_again() -> None:
    chooser = CopyModeChooser(again_after=5)
    settle(chooser, lambda inline, _: 0.5 if inline else 1.0)
    assert chooser.inline
    for _ in range(5):
        assert chooser.decided
        chooser.note(1.0)
    assert not chooser.decided
    settle(chooser, lambda inline, _: 1.5 if inline else 1.0)
    assert not chooser.inline
