"""What `bench.policies` draws and predicts before any kill, and what it reads from the events after one."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from bench.policies import (
    TURN_EVERY,
    Stretch,
    drawn_stretches,
    predicted_ettr,
    restart_of,
    turn_points,
)
from ckptd.core.advice.job_shape import RankShape
from ckptd.core.advice.outlook import Conditions, dense_outlook, window_outlook
from ckptd.core.snapshot_policy import OperatorCost, OperatorKind

COLD = 5
RANK = RankShape(tuple(OperatorCost(f"e{i}", OperatorKind.EXPERT, 700, 100) for i in range(4)), (0.0,) * 4)
CONDITIONS = Conditions(1.0, 1.0, link_Bps=1e12, network_Bps=1e12, restart_s=5.0, top_s=0.0)


def life(gaps: Iterable[float], *, begins_s: float, replayed: int = 0) -> list[dict[str, Any]]:
    """The events of a process; its first iterations are replayed."""
    times = itertools.accumulate(gaps, initial=begins_s)
    return [
        {"event": "step", "time_s": time_s, "replaying": number < replayed}
        for number, time_s in enumerate(times)
    ]


class TestRestart:
    def test_replayed_iterations_and_the_first_new_one_are_no_part_of_it(self) -> None:
        """A kill after 10 s; two iterations of 1 s are replayed, and a new one ends at 17.5 s."""
        found = restart_of(life([1.0, 1.5, *[1.0] * COLD], begins_s=15.0, replayed=2), 10.0, 1.0, COLD)
        assert (found.replayed, found.first_s, found.whole) == (2, 7.5, True)
        assert found.restart_s == pytest.approx(7.5 - 3.0)

    def test_what_the_next_iterations_take_longer_is_told(self) -> None:
        found = restart_of(life([1.5] * COLD + [9.0], begins_s=12.0), 10.0, 1.0, COLD)
        assert found.restart_s == pytest.approx(1.0)
        assert found.cold_s == pytest.approx(0.5 * COLD)

    def test_a_process_that_is_killed_soon_says_less(self) -> None:
        found = restart_of(life([1.25], begins_s=12.0), 10.0, 1.0, COLD)
        assert not found.whole
        assert (found.restart_s, found.cold_s) == pytest.approx((1.0, 0.25))

    def test_events_of_the_process_that_was_killed_do_not_count(self) -> None:
        events = [*life([1.0, 1.0], begins_s=7.0), *life([1.0] * COLD, begins_s=12.0)]
        assert restart_of(events, 10.0, 1.0, COLD).first_s == 2.0


class TestDrawnFailures:
    @pytest.mark.parametrize("seed", range(20))
    def test_at_least_one_comes_and_work_is_as_long_as_asked_for(self, seed: int) -> None:
        *before, last = drawn_stretches(random.Random(seed), 50.0, 240.0)
        assert before
        assert all(each.iterations >= 1 and 0 <= each.cut_off < 1 for each in before)
        assert last.cut_off == 0
        total = sum(each.iterations + each.cut_off for each in (*before, last))
        assert total == pytest.approx(240.0, abs=1 + len(before))

    def test_they_come_as_often_as_asked_for(self) -> None:
        rng = random.Random(1)
        counts = [len(drawn_stretches(rng, 50.0, 500.0)) - 1 for _ in range(1000)]
        assert statistics.fmean(counts) == pytest.approx(10.0, rel=0.05)


class TestPrediction:
    """Iterations of 1 s, restarts of 5 s."""

    def test_a_sliding_window_of_one_loses_what_was_cut_off(self) -> None:
        outlook = window_outlook(RANK, CONDITIONS, "sliding", 1)
        stretches = [Stretch(20, 0.5), Stretch(30, 0.25), Stretch(10, 0.0)]
        assert predicted_ettr(outlook, 1.0, stretches) == pytest.approx(60 / (60 + 0.75 + 2 * 5.0), rel=1e-4)

    def test_stalls_and_replays_take_time(self) -> None:
        found = window_outlook(RANK, CONDITIONS, "sliding", 4)
        outlook = replace(found, stall_s=0.1)
        assert found.replay_s == 3.0
        expected = 40 / (1.1 * 40.5 + 5.0 + 3.0)
        assert predicted_ettr(outlook, 1.0, [Stretch(20, 0.5), Stretch(20, 0.0)]) == pytest.approx(
            expected, rel=1e-4
        )

    def test_dense_snapshots_go_back_to_the_interval(self) -> None:
        outlook = dense_outlook(RANK, CONDITIONS, 10)
        found = predicted_ettr(outlook, 1.0, [Stretch(27, 0.5), Stretch(13, 0.0)])
        assert found == pytest.approx((20 + 13) / (27.5 + 5.0 + 13), rel=1e-4)


@pytest.mark.parametrize("length", [1, TURN_EVERY, TURN_EVERY + 12, 5 * TURN_EVERY])
@pytest.mark.parametrize("guard", [4, 13])
def test_no_failure_takes_an_iteration_in_which_the_twin_had_its_turn(length: int, guard: int) -> None:
    first, last = 100, 100 + length - 1
    points = turn_points(first, last, cold=COLD, guard=guard)
    assert all(first + COLD < at < last - guard for at in points)
    assert len(points) == max(0, -(-(length - 1 - guard) // TURN_EVERY) - 1)
