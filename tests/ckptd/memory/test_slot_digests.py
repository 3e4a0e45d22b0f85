"""Cryptographic digests of slots: made once, kept beside the slot, and not made of what was changed."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ckptd.config.settings import DaemonConfig
from ckptd.core.slots.segment_format import slot_lock_byte
from ckptd.core.slots.slots import SlotState
from ckptd.event_log import EventLog
from ckptd.memory import locks
from ckptd.memory.housekeeping import Housekeeper
from ckptd.memory.segment_file import KEPT_DIGEST_AT, Segment, open_segment
from ckptd.memory.segment_store import SegmentStore
from ckptd.memory.slot_digests import ImageDigests
from ckptd.storage.strong_digest import strong_digest
from ckptd.workers import Workers
from tests.ckptd.forging import forged
from tests.ckptd.memory.fresh import put_header
from tests.ckptd.running import descriptor, eventually
from tests.ckptd.snapshots import Snapshot, snapshot_of, states_in

SLOTS = 4
_PATIENCE_TICKS = 60  # seconds, by the housekeeper's clock


@dataclass
class Doubting:
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
        self.housekeeper.doubts.add(self.segment, index, header.sequence)

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
def doubting(tmp_path: Path) -> Iterator[Doubting]:
    store = SegmentStore(tmp_path, 64 * MIB, "here", mlock="off", hugepages="off")
    told = descriptor(window=1, num_operators=1)
    segment = store.create(told, SLOTS, MIB)
    for index in range(SLOTS):
        snapshot = snapshot_of(index)
        segment.image(index, snapshot.header)[:] = snapshot.image
        put_header(segment.buffer, segment.geometry, index, snapshot.header)
    workers, events = Workers("test", 1, SLOTS, lambda: None), EventLog(100)
    config = DaemonConfig(scrub_interval_s=0)  # nobody else looks at the slots
    housekeeper = Housekeeper(config, store, events, workers, workers, None)
    yield Doubting(store, segment, housekeeper, workers, events)
    workers.close(5.0)


def test_a_slot_whose_lock_is_held_is_examined_when_it_is_free(doubting: Doubting) -> None:
    """A trainer looks at the slot at that moment, to reuse it or not: the doubt was dropped, and the
    slot stayed in every plan until the next scrub.
    """
    doubting.damage(1)
    byte = slot_lock_byte(1)
    with locks.lock_file(doubting.segment.path, byte, exclusive=True) as taken:
        assert taken
        doubting.doubt(1)
        doubting.settle()
        doubting.tick()
        assert doubting.quarantined == []
    doubting.tick()
    assert doubting.quarantined == [1]


def test_a_slot_for_which_no_worker_has_time_is_examined_later(doubting: Doubting) -> None:
    doubting.damage(2)
    gate = threading.Event()
    while doubting.workers.submit(gate.wait, lambda _: None, lambda _: None):
        pass
    doubting.doubt(2)
    gate.set()
    doubting.settle()
    assert doubting.quarantined == []
    doubting.tick()
    assert doubting.quarantined == [2]


def test_a_slot_that_cannot_be_opened_is_examined_later(doubting: Doubting) -> None:
    """The daemon had no descriptor left for a moment. That is told once."""
    doubting.damage(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        doubting.doubt(0)
        doubting.settle()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert doubting.quarantined == []
    for _ in range(_PATIENCE_TICKS):
        doubting.tick()
    assert doubting.quarantined == [0]
    (told,) = [e for e in doubting.events.page(0, 100).events if e.kind == "scrub_failed"]
    assert "slot 0 cannot be examined now" in told.message


def test_one_slot_that_is_held_does_not_keep_the_others_waiting(doubting: Doubting) -> None:
    for index in range(SLOTS):
        doubting.damage(index)
    with locks.lock_file(doubting.segment.path, slot_lock_byte(0), exclusive=True):
        for index in range(SLOTS):
            doubting.doubt(index)
        doubting.settle()
        doubting.tick()
        assert doubting.quarantined == [1, 2, 3]
    doubting.tick()
    assert doubting.quarantined == [0, 1, 2, 3]


def test_whoever_doubts_again_and_again_costs_an_examination_now_and_then(
    doubting: Doubting,
) -> None:
    """Peers doubt, and seals of trainers wait for the same workers: one slot is examined at a time,
    and each with a pause. The last doubt is followed all the same, since what was intact may be
    damaged now.
    """
    for _ in range(5):
        for index in range(SLOTS):
            doubting.doubt(index)
        assert doubting.workers.pending <= 1
        doubting.settle()
    assert doubting.examined == SLOTS
    doubting.damage(3)
    for _ in range(_PATIENCE_TICKS):
        doubting.tick()
    assert doubting.quarantined == [3]
    assert doubting.examined == 2 * SLOTS


def test_a_doubt_about_what_a_slot_no_longer_holds_is_not_followed(doubting: Doubting) -> None:
    header = doubting.segment.header(0)
    assert header is not None
    doubting.damage(0)
    doubting.housekeeper.doubts.add(doubting.segment, 0, header.sequence + 1)
    doubting.housekeeper.remove(doubting.segment, "a test is over")
    doubting.housekeeper.doubts.add(doubting.segment, 0, header.sequence)
    doubting.tick()
    assert doubting.examined == 0


MIB = 1 << 20
SNAPSHOT = snapshot_of(4)


@dataclass
class Setting:
    segment: Segment
    digests: ImageDigests
    workers: Workers
    events: EventLog
    doubted: list[tuple[Segment, int, int]]

    def want(self, snapshot: Snapshot = SNAPSHOT, *, times: int = 1) -> tuple[str, str]:
        """The digest of slot 0, or why there is none; all who ask at once hear the same."""
        heard: list[tuple[str, str]] = []
        for _ in range(times):
            self.digests.want(self.segment, 0, snapshot.header, lambda *answer: heard.append(answer))

        def answered() -> bool:
            self.workers.collect()
            return len(heard) == times

        eventually(answered, "the digest")
        assert len(set(heard)) == 1
        return heard[0]

    @property
    def made(self) -> int:
        return self.events.counters.get("image_digests", 0)


def put(segment: Segment, snapshot: Snapshot) -> None:
    segment.image(0, snapshot.header)[:] = snapshot.image
    put_header(segment.buffer, segment.geometry, 0, snapshot.header)


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    """A segment whose slot 0 holds a snapshot."""
    store = SegmentStore(tmp_path, 40 * MIB, "here", mlock="off", hugepages="off")
    told = descriptor(window=1, num_operators=1)
    segment = store.create(told, 2, MIB)
    put(segment, SNAPSHOT)
    workers, events = Workers("test", 1, 100, lambda: None), EventLog(100)
    doubted: list[tuple[Segment, int, int]] = []
    digests = ImageDigests(workers, events, threads=2, map_fn=None, doubt=lambda *slot: doubted.append(slot))
    yield Setting(segment, digests, workers, events, doubted)
    workers.close(5.0)


def test_a_digest_is_made_once_for_all_who_ask(setting: Setting) -> None:
    """Two targets of a snapshot, storage, and whoever resumes from it later."""
    assert setting.want(times=3) == (strong_digest(SNAPSHOT.image), "")
    assert setting.want() == (strong_digest(SNAPSHOT.image), "")
    assert setting.made == 1


def test_it_outlives_the_daemon(setting: Setting) -> None:
    digest, _ = setting.want()
    again = open_segment(setting.segment.path)
    header = again.header(0)
    assert header is not None
    assert again.kept_digest(0, header) == digest
    again.close()


def test_it_does_not_follow_what_is_changed_in_memory(setting: Setting) -> None:
    """Who changes an image together with its xxh3 digests does not change what was told of it."""
    digest, _ = setting.want()
    setting.segment.image(0, SNAPSHOT.header)[:] = forged(SNAPSHOT.image, SNAPSHOT.header.header_digest)
    assert setting.want() == (digest, "")


def test_another_snapshot_in_the_slot_has_its_own(setting: Setting) -> None:
    before, _ = setting.want()
    other = snapshot_of(9)
    put(setting.segment, other)
    after, _ = setting.want(other)
    assert (after, before) == (strong_digest(other.image), strong_digest(SNAPSHOT.image))
    assert setting.made == 2


def test_the_same_iteration_filled_again_has_its_own(setting: Setting) -> None:
    """Parked states and repeats of an iteration may have the number of what lay there."""
    setting.want()
    header = replace(SNAPSHOT.header, filled_at_ns=7)
    assert setting.segment.kept_digest(0, header) == ""


def test_a_slot_of_before_this_version_has_none_until_it_is_asked_for(setting: Setting) -> None:
    assert setting.segment.kept_digest(0, SNAPSHOT.header) == ""


@pytest.mark.parametrize("byte", range(72))
def test_one_that_was_damaged_counts_as_unknown(setting: Setting, byte: int) -> None:
    """It is made anew, from an image that matches its xxh3 digests."""
    segment = setting.segment
    segment.keep_digest(0, SNAPSHOT.header, strong_digest(SNAPSHOT.image))
    segment.buffer[segment.geometry.header_offset(0) + KEPT_DIGEST_AT + byte] ^= 1
    assert segment.kept_digest(0, SNAPSHOT.header) == ""


def test_what_does_not_match_its_own_digests_is_not_vouched_for(setting: Setting) -> None:
    """Else a bit that flipped in memory would be blessed by the digest that is made of it. The slot is
    doubted: whoever asked gives the copy up when it is refused, and often before it has read the bytes
    that are wrong. The slot stayed in every plan until the next scrub, for up to five minutes.
    """
    setting.segment.image(0, SNAPSHOT.header)[-1] ^= 1
    digest, why = setting.want()
    assert digest == ""
    assert "does not match" in why
    assert setting.segment.kept_digest(0, SNAPSHOT.header) == ""
    assert setting.doubted == [(setting.segment, 0, SNAPSHOT.header.sequence)]


def test_a_slot_that_is_filled_again_is_not_vouched_for(setting: Setting) -> None:
    with locks.lock_file(setting.segment.path, slot_lock_byte(0), exclusive=True) as taken:
        assert taken
        digest, why = setting.want()
    assert digest == ""
    assert "not sealed any more" in why
    assert setting.doubted == []
    put(setting.segment, snapshot_of(9))
    digest, why = setting.want()
    assert digest == ""
    assert "another snapshot" in why


def test_a_segment_that_is_given_back_before_its_turn_is_told_to_who_asked(
    setting: Setting,
) -> None:
    heard: list[tuple[str, str]] = []
    gate = threading.Event()
    setting.workers.submit(gate.wait, lambda _: None, lambda _: None)
    setting.digests.want(setting.segment, 0, SNAPSHOT.header, lambda *a: heard.append(a))
    setting.segment.close()
    gate.set()

    def answered() -> bool:
        setting.workers.collect()
        return bool(heard)

    eventually(answered, "the digest is given up")
    ((digest, why),) = heard
    assert digest == ""
    assert "is gone" in why
