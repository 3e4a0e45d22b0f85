"""Cryptographic digests of slots: made once, kept beside the slot, and not made of what was changed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest

from ckptd.core.slots.segment_format import slot_lock_byte
from ckptd.event_log import EventLog
from ckptd.memory import locks
from ckptd.memory.image_digests import ImageDigests
from ckptd.memory.segment_file import KEPT_DIGEST_AT, Segment, open_segment
from ckptd.memory.segment_store import SegmentStore
from ckptd.storage.strong_digest import strong_digest
from ckptd.workers import Workers
from tests.ckptd.forging import forged
from tests.ckptd.memory.fresh import put_header
from tests.ckptd.running import descriptor, eventually
from tests.ckptd.snapshots import Snapshot, snapshot_of

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
    told = msgspec.structs.replace(descriptor(), window=1, num_operators=1)
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
