"""Durable checkpoints on a store that fails in parts: seeds, what they met, and rules that are broken on purpose.

``CKPTD_SIM_STORAGE_SEEDS`` sets how many seeds are played; ``tests.simulation.campaign`` plays thousands.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.simulation.model import WorldConfig
from tests.simulation.mutations import caught_after
from tests.simulation.played_threads import PlayedLock, Process, Threads
from tests.simulation.storage_mutations import STORAGE_MUTATIONS
from tests.simulation.storage_world import StorageWorld, play_storage

SEEDS = int(os.environ.get("CKPTD_SIM_STORAGE_SEEDS", "3"))


def test_what_is_durable_is_come_back_to_from_a_store_that_fails_in_parts() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        seen.update(play_storage(seed).seen)
    for what in ("recovered", "from the store", "told: retained", "told: store_paused"):
        assert seen[what] > 0, f"never: {what}: {seen}"


def test_a_seed_replays_exactly_and_a_left_out_strike_leaves_the_others_as_they_are() -> None:
    config = WorldConfig(among=frozenset({"keeper dies", "answers lost"}))
    assert play_storage(3, config).trace == play_storage(3, config).trace
    assert StorageWorld(3, WorldConfig(strikes=frozenset())).fates == StorageWorld(3).fates


@pytest.mark.parametrize("name", ["some manifests are enough", "a rank is not opened again"])
def test_a_broken_rule_is_caught(name: str) -> None:
    seeds, why = caught_after(STORAGE_MUTATIONS[name], limit=10)
    assert seeds > 0, f"10 seeds do not show why {STORAGE_MUTATIONS[name].rule}"
    assert "Error" in why


class _Clock:
    """Events in the order of their times."""

    def __init__(self) -> None:
        self.now_s, self.due = 0.0, list[tuple[float, int, object]]()

    def later(self, delay_s: float, what: object) -> None:
        self.due.append((self.now_s + delay_s, len(self.due), what))

    def skips(self, delay_s: float) -> bool:
        at_s = self.now_s + delay_s
        if any(due_s <= at_s for due_s, *_ in self.due):
            return False
        self.now_s = at_s
        return True

    def run(self) -> None:
        while self.due:
            self.now_s, _, what = entry = min(self.due)
            self.due.remove(entry)
            what()  # type: ignore[operator]


def test_played_threads_take_turns_and_end_where_they_pause_when_their_process_is_killed() -> None:
    clock, told = _Clock(), list[str]()
    threads = Threads(clock)
    lock, process = PlayedLock(threads), Process()

    def work(name: str) -> None:
        with lock:
            told.append(f"{name} begins")
            threads.pause(2.0)
            told.append(f"{name} ends")

    for name in ("a", "b", "c"):
        threads.start(process, lambda name=name: work(name))  # type: ignore[misc]
    clock.later(3.0, lambda: threads.kill(process))
    clock.run()
    assert told == ["a begins", "a ends", "b begins"]
    assert not process.threads
    assert not lock.locked()
    threads.close()


def test_a_played_thread_goes_on_where_it_is_if_nothing_happens_before() -> None:
    clock, told = _Clock(), list[str]()
    threads, process = Threads(clock), Process()

    def work() -> None:
        for seconds in (1.0, 4.0):
            threads.pause(seconds)
            told.append(f"woken at {clock.now_s}")

    threads.start(process, work)
    clock.later(3.0, lambda: told.append("another event"))
    clock.run()
    assert told == ["woken at 1.0", "another event", "woken at 5.0"]
    threads.close()
