"""When a step counts as overdue: after a deadline that is given, or learned and generous."""

from __future__ import annotations

import math
import random

import pytest

from ckptd.host.hangs.step_watch import StepWatch
from ckptd.progress_page import StepProgress, StepStage


class Watched:
    """A trainer whose page is looked at, with the clock a number."""

    def __init__(self, deadline_s: float | None = None) -> None:
        self.watch = StepWatch(deadline_s)
        self.now_s = 100.0
        self.progress = StepProgress()
        self.watch.begin_life(self.now_s)

    def steps(self, number: int, each_s: float, *, looks_every_s: float = 0.5) -> None:
        """Steps of equal length; looked at now and then, as the host does."""
        for _ in range(number):
            self.progress = StepProgress(self.progress.beats + 1, self.progress.step + 1, running=True)
            assert not self.look()
            left_s = each_s
            while left_s > looks_every_s:
                assert not self.look(looks_every_s)
                left_s -= looks_every_s
            self.now_s += left_s

    def look(self, later_s: float = 0.0) -> bool:
        self.now_s += later_s
        return self.watch.look(self.progress, self.now_s)


def test_a_given_deadline_counts_from_the_beginning_of_the_step() -> None:
    watched = Watched(deadline_s=10.0)
    watched.steps(5, each_s=1.0)
    assert not watched.look(8.9)
    assert watched.look(0.2)
    assert watched.watch.idle_s(watched.now_s) == pytest.approx(10.1)


def test_it_is_said_again_only_after_as_long_again() -> None:
    watched = Watched(deadline_s=10.0)
    watched.steps(5, each_s=1.0)
    assert watched.look(10.0)
    assert not watched.look(5.0)
    assert watched.look(6.0)


def test_first_steps_of_a_life_have_no_deadline() -> None:
    """They compile and replay, which may take minutes."""
    watched = Watched(deadline_s=10.0)
    for _ in range(2):
        watched.steps(3, each_s=1.0)
        assert watched.watch.deadline_s == math.inf
        assert not watched.look(1e6)
        watched.steps(2, each_s=1.0)
        assert watched.look(20.0)
        watched.watch.begin_life(watched.now_s)
        watched.progress = StepProgress()


def test_outside_the_loop_nothing_is_overdue() -> None:
    watched = Watched(deadline_s=10.0)
    watched.steps(5, each_s=1.0)
    watched.progress = StepProgress(5, 5, running=False)
    assert not watched.look()
    assert not watched.look(1e6)
    assert watched.watch.idle_s(watched.now_s) == 0.0


def test_quick_steps_have_five_minutes() -> None:
    watched = Watched()
    watched.steps(30, each_s=0.05)
    assert watched.watch.deadline_s == 300.0
    assert not watched.look(299.0)
    assert watched.look(1.1)


def test_slow_steps_have_twenty_times_as_long() -> None:
    watched = Watched()
    watched.steps(30, each_s=30.0)
    assert watched.watch.deadline_s == pytest.approx(600.0, rel=0.05)


def test_a_step_that_once_took_long_for_a_reason_may_take_three_times_as_long() -> None:
    """An evaluation every hundred steps, say."""
    watched = Watched()
    watched.steps(10, each_s=1.0)
    watched.steps(1, each_s=200.0)
    watched.steps(10, each_s=1.0)
    assert watched.watch.deadline_s == pytest.approx(600.0, rel=0.05)


def test_what_is_learned_outlasts_a_life() -> None:
    watched = Watched()
    watched.steps(10, each_s=30.0)
    watched.watch.begin_life(watched.now_s)
    watched.progress = StepProgress()
    watched.steps(4, each_s=30.0)
    assert watched.watch.deadline_s == pytest.approx(600.0, rel=0.05)


def test_patience_multiplies_both_kinds() -> None:
    for given in (10.0, None):
        watched = Watched(given)
        watched.steps(10, each_s=1.0)
        before_s = watched.watch.deadline_s
        watched.watch.patience = 4
        assert watched.watch.deadline_s == 4 * before_s


def test_no_deadline_is_none() -> None:
    watched = Watched(math.inf)
    watched.steps(10, each_s=1.0)
    assert not watched.look(1e9)


@pytest.mark.parametrize("seed", range(20))
def test_steps_that_vary_tenfold_are_never_overdue(seed: int) -> None:
    rng = random.Random(seed)
    watched = Watched()
    scale_s = rng.choice([0.01, 1.0, 60.0])
    for _ in range(200):
        watched.steps(1, each_s=scale_s * rng.uniform(1.0, 10.0))


def test_a_stage_of_a_step_is_progress() -> None:
    """An accumulation of many gradients is one long step; its forwards show that it goes on."""
    watched = Watched(deadline_s=10.0)
    watched.steps(5, each_s=1.0)
    for stage in (StepStage.FORWARD, StepStage.BACKWARD) * 5:
        watched.progress = watched.progress._replace(stage=stage)
        assert not watched.look(9.0)
    assert watched.look(11.0)
