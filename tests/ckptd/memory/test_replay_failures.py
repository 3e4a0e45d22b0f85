"""What a daemon keeps of failed replays, in real segment files: it outlives the daemon, and takes
the slots with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ckptd.core.recovery.quarantine import ReplayVerdict
from ckptd.core.slots.segment_format import slot_lock_byte
from ckptd.core.slots.slots import SlotState
from ckptd.event_log import EventLog
from ckptd.memory import locks
from ckptd.memory.replay_failures import Quarantine
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentStore
from ckptd.transport.messages import ReplayFailure
from tests.ckptd.persistence.slots import fill, segment_store, three_snapshots


@pytest.fixture
def store(tmp_path: Path) -> SegmentStore:
    return segment_store(tmp_path)


@pytest.fixture
def segment(store: SegmentStore) -> Iterator[Segment]:
    yield from three_snapshots(store)


class Daemon:
    """One life of it."""

    def __init__(self, store: SegmentStore) -> None:
        self.events, self.damaged = EventLog(100), list[Segment]()
        self.quarantine = Quarantine(
            store.folder, self.events, segments=store.all_of_run, damaged=self.damaged.append
        )
        self.quarantine.adopt()

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events.page(0, 100).events]


def failure(segment: Segment, *indices: int, verdict: ReplayVerdict) -> ReplayFailure:
    """A replay of what is in these slots."""
    headers = [segment.header(index) for index in indices]
    used = tuple((h.iteration, h.epoch, h.epoch_start) for h in headers if h is not None)
    return ReplayFailure(used[-1][0], used, (), "result", "drop", verdict)


def states(segment: Segment) -> list[SlotState]:
    return [header.state for _, header in segment.headers()]


F, S, Q = SlotState.FREE, SlotState.SEALED, SlotState.QUARANTINED


def test_only_what_is_decided_touches_slots(store: SegmentStore, segment: Segment) -> None:
    daemon = Daemon(store)
    daemon.quarantine.tell("job", "run", failure(segment, 1, 2, verdict=ReplayVerdict.SUSPECTED))
    assert states(segment) == [S, S, S, F]
    before = [bytes(segment.image(i, h)) for i, h in segment.headers() if h.state is S]
    daemon.quarantine.tell("job", "run", failure(segment, 1, 2, verdict=ReplayVerdict.QUARANTINED))
    assert states(segment) == [S, Q, Q, F]
    assert daemon.damaged == [segment]
    assert daemon.kinds() == ["replay_mismatch", "replay_mismatch", "slots_quarantined"]
    after = [bytes(segment.image(i, h)) for i, h in segment.headers() if h.state is not F]
    assert after == before, "nobody has lost a byte of it"


def test_the_next_daemon_goes_on_from_it(store: SegmentStore, segment: Segment) -> None:
    """The trainer that found out has ended, and the daemon may be killed before the next one comes."""
    told = failure(segment, 1, 2, verdict=ReplayVerdict.SUSPECTED)
    Daemon(store).quarantine.tell("job", "run", told)
    assert Daemon(store).quarantine.failures("job", "run") == (told,)


def test_a_copy_that_comes_later_is_quarantined_too(store: SegmentStore, segment: Segment) -> None:
    daemon = Daemon(store)
    told = failure(segment, 1, 2, verdict=ReplayVerdict.QUARANTINED)
    daemon.quarantine.tell("job", "run", told)
    fill(segment, 3, 2)
    daemon.quarantine.tick()
    assert states(segment) == [S, Q, Q, Q]


def test_a_slot_that_is_being_filled_is_left_alone(store: SegmentStore, segment: Segment) -> None:
    daemon = Daemon(store)
    told = failure(segment, 1, 2, verdict=ReplayVerdict.QUARANTINED)
    with locks.lock_file(segment.path, slot_lock_byte(1), exclusive=True) as taken:
        assert taken
        daemon.quarantine.tell("job", "run", told)
        assert states(segment) == [S, S, Q, F]
    daemon.quarantine.tick()
    assert states(segment) == [S, Q, Q, F]


def test_it_can_be_taken_back(store: SegmentStore, segment: Segment) -> None:
    daemon = Daemon(store)
    daemon.quarantine.tell("job", "run", failure(segment, 1, 2, verdict=ReplayVerdict.QUARANTINED))
    lifted = daemon.quarantine.lift("job", "run")
    assert [index for _, index, _ in lifted] == [1, 2]
    assert states(segment) == [S, S, S, F]
    daemon.quarantine.tick()
    assert states(segment) == [S, S, S, F]
    assert Daemon(store).quarantine.failures("job", "run") == ()


def test_it_goes_with_the_last_segment_of_the_run(store: SegmentStore, segment: Segment) -> None:
    daemon = Daemon(store)
    daemon.quarantine.tell("job", "run", failure(segment, 1, verdict=ReplayVerdict.QUARANTINED))
    store.remove(segment)
    daemon.quarantine.tick()
    assert list(store.folder.glob("*.replays")) == []


@pytest.mark.parametrize(
    "content",
    [b"", b"\xc1", msgspec.msgpack.encode({"format": 2, "failures": []})],
    ids=["empty", "no msgpack", "another format"],
)
def test_a_file_that_cannot_be_read_costs_a_replay_and_no_more(store: SegmentStore, content: bytes) -> None:
    (store.folder / "job~run.replays").write_bytes(content)
    daemon = Daemon(store)
    assert daemon.quarantine.failures("job", "run") == ()
    assert daemon.kinds() == ["replays_unreadable"]
