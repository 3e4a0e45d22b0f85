"""Changes of the schedule, agreed on under seeded chaos; the world and its promise are in `switching_world`.

``CKPTD_SIM_SWITCHING_SEEDS`` sets how many seeds are played; ``tests.simulation.campaign`` plays thousands.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from ckptd.core.switching import Decided, Event, Stage, Switching
from tests.simulation.switching_world import WorldConfig, play

SEEDS = int(os.environ.get("CKPTD_SIM_SWITCHING_SEEDS", "75"))
# Whatever of this never occurred was not tested.
TROUBLE = (
    "access failed",
    "died",
    "died while decided",
    "died while promised",
    "died while ready",
    "dropped",
    "dropped: late",
    "dropped: patience",
    "dropped: refused",
    "left out",
    "snapshots",
    "switched",
    "switched late",
    "wished",
)


@pytest.mark.slow
def test_no_two_ranks_ever_snapshot_an_iteration_by_different_schedules() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        seen.update(play(seed).seen)
    for what in TROUBLE:
        assert seen[what] > 0, f"{SEEDS} seeds never showed: {what} ({dict(seen)})"


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("lockstep", [True, False])
def test_where_nobody_fails_changes_come_about_and_nothing_is_left_out(ranks: int, lockstep: bool) -> None:
    for seed in range(4):
        world = play(seed, WorldConfig(ranks=ranks, lockstep=lockstep))
        first = world.applied[0]
        assert len(first) >= 2, (seed, world.seen)
        assert world.seen["left out"] == world.seen["dropped"] == 0, (seed, world.seen)
        assert all(changes == first for changes in world.applied), seed


def test_a_dead_store_leaves_the_schedule_as_it_is() -> None:
    """Whoever is in doubt when it dies takes no snapshot; all the others go on."""
    for seed in range(3):
        world = play(seed, WorldConfig(store_dies_s=0.001))
        assert world.seen["switched"] == world.seen["left out"] == 0
        assert world.seen["snapshots"] == 3 * 400


def test_a_late_message_makes_the_next_attempt_more_patient() -> None:
    """The first margins are far too small for these delays."""
    seen: Counter[str] = Counter()
    for seed in range(5):
        seen.update(play(seed, WorldConfig(slow_messages=0.1, margin_s=0.1, iterations=3000)).seen)
    assert seen["dropped: late"] > 0
    assert seen["switched"] > 0


class _SnapshotsInDoubt(Switching):
    """Goes on by the old schedule although it has promised."""

    def knows(self, iteration: int) -> bool:
        return True


class _PromisesThePast(Switching):
    """Its promise is not later than what it has begun."""

    def _promise(self) -> None:
        super()._promise()
        self._promised = max(0, self._reached - 3)


class _SwitchesWhenItHears(Switching):
    """Does not wait for the iteration that was agreed on."""

    def handle(self, event: Event, *, now_s: float) -> None:
        super().handle(event, now_s=now_s)
        if isinstance(event, Decided) and self.stage is Stage.DECIDED:
            self._at = self._reached + 1


@pytest.mark.parametrize(
    ("careless", "config"),
    [
        (_SnapshotsInDoubt, WorldConfig(slow_messages=0.3, margin_s=0.1)),
        (_PromisesThePast, WorldConfig(lockstep=False)),
        (_SwitchesWhenItHears, WorldConfig()),
    ],
    ids=["in doubt", "the past", "at once"],
)
def test_a_rule_that_is_left_out_is_missed(careless: type[Switching], config: WorldConfig) -> None:
    """The simulation must be able to fail."""
    with pytest.raises(AssertionError, match="snapshots iteration"):
        play_all(range(50), replace(config, machine=careless))


def play_all(seeds: Iterable[int], config: WorldConfig) -> None:
    for seed in seeds:
        play(seed, config)


def test_a_seed_replays_exactly() -> None:
    assert play(5).seen == play(5).seen
