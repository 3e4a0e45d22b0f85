"""Doubted slots are examined, whatever stands in the way at first."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from ckptd.config.settings import DaemonConfig
from ckptd.core.slots.ring import SlotState
from ckptd.core.slots.segment_format import slot_lock_byte
from ckptd.event_log import EventLog
from ckptd.memory import locks
from ckptd.memory.housekeeping import Housekeeper
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentStore
from ckptd.workers import Workers
from tests.ckptd.memory.fresh import put_header
from tests.ckptd.running import descriptor, eventually
from tests.ckptd.snapshots import snapshot_of, states_in

MIB = 1 << 20
SLOTS = 4
_PATIENCE_TICKS = 60  # seconds, by the housekeeper's clock


@dataclass
class Setting:
    """A segment whose slots hold snapshots, and who keeps it; the clock is a number."""

    store: SegmentStore
    segment: Segment
    housekeeper: Housekeeper
    workers: Workers
    events: EventLog
    now_s: float = 1000.0

    def damage(self, index: int) -> None:
        header = self.segment.header(index)
        assert header is not None
        self.segment.image(index, header)[header.image_len // 2] ^= 1

    def doubt(self, index: int) -> None:
        header = self.segment.header(index)
        assert header is not None
        self.housekeeper.doubt(self.segment, index, header.sequence)

    def settle(self) -> None:
        """Let the workers end what they have."""

        def idle() -> bool:
            self.workers.collect()
            return self.workers.pending == 0

        eventually(idle, "the workers are through")

    def tick(self) -> None:
        self.now_s += 1
        self.housekeeper.tick(self.now_s, ())
        self.settle()

    @property
    def examined(self) -> int:
        counters = self.events.counters
        return counters.get("scrub.intact", 0) + counters.get("scrub.damaged", 0)

    @property
    def quarantined(self) -> list[int]:
        states = states_in(self.segment.path)
        return [i for i, state in enumerate(states) if state is SlotState.QUARANTINED]


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    store = SegmentStore(tmp_path, 64 * MIB, "here", mlock="off", hugepages="off")
    told = msgspec.structs.replace(descriptor(), window=1, num_operators=1)
    segment = store.create(told, SLOTS, MIB)
    for index in range(SLOTS):
        snapshot = snapshot_of(index)
        segment.image(index, snapshot.header)[:] = snapshot.image
        put_header(segment.buffer, segment.geometry, index, snapshot.header)
    workers, events = Workers("test", 1, SLOTS, lambda: None), EventLog(100)
    config = DaemonConfig(scrub_interval_s=0)  # nobody else looks at the slots
    housekeeper = Housekeeper(config, store, events, workers, workers, None)
    yield Setting(store, segment, housekeeper, workers, events)
    workers.close(5.0)


def test_a_slot_whose_lock_is_held_is_examined_when_it_is_free(setting: Setting) -> None:
    """A trainer looks at the slot at that moment, to reuse it or not: the doubt was dropped, and the
    slot stayed in every plan until the next scrub.
    """
    setting.damage(1)
    byte = slot_lock_byte(1)
    with locks.lock_file(setting.segment.path, byte, exclusive=True) as taken:
        assert taken
        setting.doubt(1)
        setting.settle()
        setting.tick()
        assert setting.quarantined == []
    setting.tick()
    assert setting.quarantined == [1]


def test_a_slot_for_which_no_worker_has_time_is_examined_later(setting: Setting) -> None:
    setting.damage(2)
    gate = threading.Event()
    while setting.workers.submit(gate.wait, lambda _: None, lambda _: None):
        pass
    setting.doubt(2)
    gate.set()
    setting.settle()
    assert setting.quarantined == []
    setting.tick()
    assert setting.quarantined == [2]


def test_a_slot_that_cannot_be_opened_is_examined_later(setting: Setting) -> None:
    """The daemon had no descriptor left for a moment. That is told once."""
    setting.damage(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        setting.doubt(0)
        setting.settle()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert setting.quarantined == []
    for _ in range(_PATIENCE_TICKS):
        setting.tick()
    assert setting.quarantined == [0]
    (told,) = [e for e in setting.events.page(0, 100).events if e.kind == "scrub_failed"]
    assert "slot 0 cannot be examined now" in told.message


def test_one_slot_that_is_held_does_not_keep_the_others_waiting(setting: Setting) -> None:
    for index in range(SLOTS):
        setting.damage(index)
    with locks.lock_file(setting.segment.path, slot_lock_byte(0), exclusive=True):
        for index in range(SLOTS):
            setting.doubt(index)
        setting.settle()
        setting.tick()
        assert setting.quarantined == [1, 2, 3]
    setting.tick()
    assert setting.quarantined == [0, 1, 2, 3]


def test_whoever_doubts_again_and_again_costs_an_examination_now_and_then(
    setting: Setting,
) -> None:
    """Peers doubt, and seals of trainers wait for the same workers: one slot is examined at a time,
    and each with a pause. The last doubt is followed all the same, since what was intact may be
    damaged now.
    """
    for _ in range(5):
        for index in range(SLOTS):
            setting.doubt(index)
        assert setting.workers.pending <= 1
        setting.settle()
    assert setting.examined == SLOTS
    setting.damage(3)
    for _ in range(_PATIENCE_TICKS):
        setting.tick()
    assert setting.quarantined == [3]
    assert setting.examined == 2 * SLOTS


def test_a_doubt_about_what_a_slot_no_longer_holds_is_not_followed(setting: Setting) -> None:
    header = setting.segment.header(0)
    assert header is not None
    setting.damage(0)
    setting.housekeeper.doubt(setting.segment, 0, header.sequence + 1)
    setting.housekeeper.remove(setting.segment, "a test is over")
    setting.housekeeper.doubt(setting.segment, 0, header.sequence)
    setting.tick()
    assert setting.examined == 0
