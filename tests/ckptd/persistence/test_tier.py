"""The third tier of a daemon in this process, with a real keeper and a real folder."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptd.events import EventLog
from ckptd.memory.segments import SegmentStore
from ckptd.persistence.tier import StorageTier
from ckptd.sessions import RankKey
from ckptd.settings import DaemonConfig
from tests.ckptd.persistence.slots import descriptor, fill, segment_store

RANK = RankKey("job", "run", 0)


class Daemon:
    """What a tier needs of one."""

    def __init__(self, folder: Path) -> None:
        self.posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.store: SegmentStore = segment_store(folder / "shm")
        self.events = EventLog(100)
        config = replace(
            DaemonConfig(), store=f"file://{folder}/store", persist_every=2, persist_every_s=0.0
        )
        self.tier = StorageTier(
            config,
            self.store,
            self.events,
            post=self.posted.put,
            ranks_of=lambda job, run: [0],
            span_of=lambda job, run: 1,
            replicas=list,
            boot_id="b",
            clock=time.monotonic,
        )

    def run_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not done():
            assert time.monotonic() < deadline, self.events.page(0, 100)
            self.tier.tick()
            try:
                self.posted.get(timeout=0.05)()
            except queue.Empty:
                continue

    def told(self, kind: str) -> list[str]:
        return [event.message for event in self.events.page(0, 100).events if event.kind == kind]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path)
    yield made
    made.tier.close()


def test_a_rank_that_has_no_memory_yet_is_not_forgotten(daemon: Daemon) -> None:
    """Time passes between joining a run and reserving memory: with a tick between them, a run was never made durable."""
    daemon.tier.join(RANK, 1, 1, -1)
    daemon.tier.tick()
    segment = daemon.store.create(descriptor(), 6, 1 << 20)
    for iteration in (1, 2):
        fill(segment, iteration, iteration)
    daemon.run_until(lambda: bool(daemon.told("persisted")))
    assert daemon.told("persisted") == ["checkpoint 2 is durable on all 1 ranks"]


def test_a_rank_whose_memory_was_given_back_is_forgotten(daemon: Daemon) -> None:
    daemon.tier.join(RANK, 1, 1, -1)
    segment = daemon.store.create(descriptor(), 6, 1 << 20)
    daemon.tier.tick()
    assert RANK in daemon.tier.states()
    daemon.store.remove(segment)
    daemon.tier.tick()
    assert daemon.tier.states() == {}
