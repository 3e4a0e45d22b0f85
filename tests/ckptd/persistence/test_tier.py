"""The third tier of a daemon in this process, with a real keeper and a real folder."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.msgpack import encode

from ckptd.config.settings import DaemonConfig
from ckptd.core.sessions import RankKey
from ckptd.core.slots.segment_format import slot_lock_byte
from ckptd.event_log import EventLog
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentStore
from ckptd.node_context import NodeContext
from ckptd.persistence import keeper_wire as w
from ckptd.persistence.tier import StorageTier
from ckptd.storage.checkpoints.reader import read_catalog, read_manifest
from ckptd.storage.stores.open_store import open_store
from tests.ckptd.persistence.slots import FROZEN_BYTES, descriptor, fill, segment_store

RANK = RankKey("job", "run", 0)


class Daemon:
    """What a tier needs of one; ``store``: the folder that it shares with others."""

    def __init__(self, folder: Path, *, store: Path | None = None) -> None:
        self.posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.store: SegmentStore = segment_store(folder / "shm")
        self.events = EventLog(100)
        self.url = f"file://{store or folder / 'store'}"
        config = replace(DaemonConfig(), store=self.url, persist_every=2, persist_every_s=0.0)
        self.tier = StorageTier(
            NodeContext(config, self.store, self.events, self.posted.put),
            ranks_of=lambda job, run: [0],
            span_of=lambda job, run: 1,
            replicas=(),
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
    """Time passes between joining a run and reserving memory: with a tick between them, a run was
    never made durable.
    """
    daemon.tier.join(RANK, 1, 1, -1)
    daemon.tier.tick()
    segment = daemon.store.create(descriptor(), 6, 1 << 20)
    for iteration in (1, 2):
        fill(segment, iteration, iteration)
    link = daemon.tier.link
    assert link.durable_of(RANK.job, RANK.run) == -1
    daemon.run_until(lambda: bool(daemon.told("persisted")))
    assert daemon.told("persisted") == ["checkpoint 2 is durable on all 1 ranks"]
    assert link.durable_of(RANK.job, RANK.run) == 2
    assert link.durable_of(RANK.job, "another") == -1


@pytest.mark.parametrize("policy", ["partial", "sliding"])
def test_of_partial_snapshots_alone_a_part_is_stored(daemon: Daemon, policy: str) -> None:
    """A replay needs all of an older snapshot."""
    daemon.tier.join(RANK, 1, 1, -1)
    told = descriptor(partial=True, client=encode({"operators": [], "policy": policy}))
    segment = daemon.store.create(told, 6, 1 << 20)
    for iteration in (1, 2):
        fill(segment, iteration, iteration, partial=True)
    daemon.run_until(lambda: bool(daemon.told("persisted")))
    store = open_store(daemon.url)
    (found,) = read_catalog(store, "job", "run").committed
    older, newest = read_manifest(store, found.manifests[0].key).snapshots
    assert (older.anchors, newest.anchors) == (0b010 if policy == "partial" else 0b110, 0b101)
    assert (older.image_len < FROZEN_BYTES) == (policy == "partial")
    assert newest.image_len > FROZEN_BYTES


def test_a_rank_whose_memory_was_given_back_is_forgotten(daemon: Daemon) -> None:
    daemon.tier.join(RANK, 1, 1, -1)
    segment = daemon.store.create(descriptor(), 6, 1 << 20)
    daemon.tier.tick()
    assert RANK in daemon.tier.states()
    daemon.store.remove(segment)
    daemon.tier.tick()
    assert daemon.tier.states() == {}


def is_held(segment: Segment, index: int) -> bool:
    """Whether the trainer would pass over this slot."""
    return locks.is_locked(segment.fd, slot_lock_byte(index), exclusive=True)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A store keeper that answers nothing meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def another_job(folder: Path, tmp_path: Path, *, epoch: int) -> Iterator[None]:
    """The names in the store are used by a daemon of another job, too, which is in a later epoch."""
    other = Daemon(tmp_path, store=folder)
    other.tier.join(RANK, 1, epoch, -1)
    segment = other.store.create(descriptor(), 6, 1 << 20)
    for iteration in (1, 2):
        fill(segment, iteration, iteration, epoch=epoch)
    other.run_until(lambda: bool(other.told("persisted")))
    try:
        yield
    finally:
        other.tier.close()


def test_a_later_history_that_appears_while_a_checkpoint_is_under_way_stops_the_rank(
    daemon: Daemon, tmp_path: Path
) -> None:
    """As when it is there at the start. It was tried again every few minutes, for ever."""
    daemon.tier.join(RANK, 1, 1, -1)
    segment = daemon.store.create(descriptor(), 6, 1 << 20)
    for iteration in (1, 2):
        fill(segment, iteration, iteration)
    daemon.run_until(lambda: bool(daemon.told("persisted")))
    with another_job(tmp_path / "store", tmp_path / "other", epoch=5):
        for iteration in (3, 4):
            fill(segment, iteration, iteration)
        daemon.run_until(lambda: bool(daemon.told("persist.fenced")))
    assert daemon.tier.idle
    daemon.run_until(lambda: not any(is_held(segment, index) for index in range(6)))
    assert "another job writes under these names" in daemon.tier.states()[RANK].reason
    daemon.tier.leave(RANK)
    assert daemon.tier.idle, "nothing is asked of the store any more"
    daemon.tier.join(RANK, 1, 6, 4)
    for iteration in (5, 6):
        fill(segment, iteration - 1, iteration, epoch=6)
    daemon.run_until(lambda: "checkpoint 6 is durable on all 1 ranks" in daemon.told("persisted"))


def test_an_answer_about_an_epoch_that_was_left_does_not_stop_the_next(
    daemon: Daemon, tmp_path: Path
) -> None:
    """A rank that was fenced in epoch 1, and had joined epoch 6 before it heard of that, was never
    made durable again.
    """
    daemon.tier.join(RankKey("job", "run", 1), 1, 1, -1)
    daemon.run_until(lambda: daemon.tier.keeper_pid > 0)
    with another_job(tmp_path / "store", tmp_path / "other", epoch=5):
        with stopped(daemon.tier.keeper_pid):
            daemon.tier.join(RANK, 1, 1, -1)
            daemon.tier.join(RANK, 1, 6, 2)
        segment = daemon.store.create(descriptor(), 6, 1 << 20)
        for iteration in (3, 4):
            fill(segment, iteration, iteration, epoch=6)
        daemon.run_until(lambda: "checkpoint 4 is durable on all 1 ranks" in daemon.told("persisted"))


def test_the_slots_of_a_history_that_is_over_are_let_go_although_the_store_does_not_answer(
    daemon: Daemon,
) -> None:
    """They were held until the store had answered for the new one, and the new trainer had only
    what was left of the ring.
    """
    daemon.tier.join(RANK, 1, 1, -1)
    segment = daemon.store.create(descriptor(), 6, 1 << 20)
    for iteration in (1, 2):
        fill(segment, iteration, iteration)
    daemon.run_until(lambda: bool(daemon.told("persisted")))
    with stopped(daemon.tier.keeper_pid):
        for iteration in (3, 4):
            fill(segment, iteration, iteration)
        daemon.run_until(lambda: is_held(segment, 4))
        daemon.tier.join(RANK, 1, 2, 2)
        assert not is_held(segment, 4)


def test_a_flush_that_waits_for_the_store_is_not_idle(daemon: Daemon) -> None:
    """A daemon that was stopped right after its trainer's end did not wait for what it had been
    asked to make durable.
    """
    segment = daemon.store.create(descriptor(), 6, 1 << 20)
    for iteration in (2, 3):
        fill(segment, iteration, iteration)
    daemon.tier.join(RANK, 1, 1, -1)
    daemon.tier.leave(RANK)  # before the store keeper has answered for the first time
    assert not daemon.tier.idle
    daemon.run_until(lambda: daemon.tier.idle)
    daemon.run_until(lambda: bool(daemon.told("persisted")))
    assert daemon.told("persisted") == ["checkpoint 3 is durable on all 1 ranks"]


def test_the_size_of_the_world_is_that_of_the_last_join(daemon: Daemon, tmp_path: Path) -> None:
    """A rank that had joined before it had memory, and joined again in a smaller world, wrote
    manifests of the first one.
    """
    daemon.tier.join(RANK, 2, 1, -1)
    daemon.tier.join(RANK, 1, 2, -1)
    segment = daemon.store.create(descriptor(), 6, 1 << 20)
    for iteration in (1, 2):
        fill(segment, iteration, iteration, epoch=2)
    folder = tmp_path / "store"
    daemon.run_until(lambda: any(folder.rglob("*-of-*.json")))
    assert [found.name for found in folder.rglob("*-of-*.json")] == ["rank-00000-of-00001.json"]


def test_a_snapshot_that_is_damaged_in_memory_is_told_of(daemon: Daemon) -> None:
    """The operator was told to give the daemon more memory."""
    daemon.tier.join(RANK, 1, 1, -1)
    segment = daemon.store.create(descriptor(), 6, 1 << 20)
    for iteration in (1, 2):
        fill(segment, iteration, iteration)
    segment.buffer[segment.geometry.slot_offset(1) + 200_000] ^= 1
    daemon.run_until(lambda: bool(daemon.told("persist_abandoned")))
    (told,) = daemon.told("persist_abandoned")
    assert "iteration 1 is damaged in memory" in told
    assert "more memory" not in told


def test_a_later_history_that_appears_after_our_manifest_stops_the_rank(
    daemon: Daemon, tmp_path: Path
) -> None:
    """The event log told of it, and the rank went on to upload."""
    daemon.tier.join(RANK, 2, 1, -1)  # the other rank's manifest is looked for, and never comes
    segment = daemon.store.create(descriptor(world_size=2), 6, 1 << 20)
    for iteration in (1, 2):
        fill(segment, iteration, iteration)
    daemon.run_until(lambda: daemon.tier.states()[RANK].last_s > 0)
    with another_job(tmp_path / "store", tmp_path / "other", epoch=5):
        daemon.run_until(lambda: bool(daemon.told("persist.fenced")))
    for iteration in (3, 4):
        fill(segment, iteration, iteration)
    daemon.tier.changed(RANK)
    assert daemon.tier.states()[RANK].under_way == -1
    assert not any(is_held(segment, index) for index in range(6))


def test_a_fence_against_an_epoch_that_was_joined_meanwhile_is_none(daemon: Daemon) -> None:
    daemon.tier.join(RANK, 1, 5, -1)
    segment = daemon.store.create(descriptor(), 6, 1 << 20)
    daemon.tier._ranks[RANK].fenced(w.RankFenced(w.RankName("job", "run", 0), 5, "epoch 5 is there"))
    for iteration in (1, 2):
        fill(segment, iteration, iteration, epoch=5)
    daemon.run_until(lambda: bool(daemon.told("persisted")))
    assert daemon.told("persist.fenced") == []


def test_a_slot_that_the_trainer_takes_gives_the_checkpoint_up_and_the_next_is_persisted(
    daemon: Daemon,
) -> None:
    daemon.tier.join(RANK, 1, 1, -1)
    segment = daemon.store.create(descriptor(), 6, 1 << 20)
    for iteration in (1, 2):
        fill(segment, iteration, iteration)
    with locks.lock_file(segment.path, slot_lock_byte(2), exclusive=True):
        daemon.run_until(lambda: bool(daemon.told("persist_abandoned")))
    assert "iteration 2 was overwritten" in daemon.told("persist_abandoned")[0]
    daemon.run_until(lambda: not is_held(segment, 1))  # the store keeper has it, too, while it uploads
    for iteration in (3, 4):
        fill(segment, iteration, iteration)
    daemon.run_until(lambda: "checkpoint 4 is durable on all 1 ranks" in daemon.told("persisted"))
