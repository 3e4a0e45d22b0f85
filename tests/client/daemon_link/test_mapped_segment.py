"""The trainer's ownership of its memory ends when it says so, and when it dies, whatever it forked meanwhile."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ckptd.client.daemon_link.mapped_segment import Generations, MappedSegment, RankTaken, SlotFile, SlotTable
from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.core.recovery.snapshot_tables import SnapshotCopy, SnapshotToLoad
from ckptd.core.slots.segment_format import (
    OWNER_LOCK_BYTE,
    RingHint,
    encode_descriptor,
    slot_lock_byte,
    write_ring_hint,
)
from ckptd.core.slots.slots import SlotRecord, SlotState
from ckptd.holdings import operators_id
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment
from ckptd.transport.messages import Attach, Attached, Hello, Reserve, Reserved
from ckptd.transport.wire import ControlClient
from tests.ckptd.running import MIB, descriptor, fill
from tests.client.daemon_link.test_rank_memory import attached
from tests.users import STRANGER, needs_users


@pytest.fixture
def path(endpoint: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A segment that the daemon has just made; its session stays open during the test."""
    run = "".join(c if c.isalnum() else "-" for c in request.node.name)[:60]
    with ControlClient(endpoint, timeout_s=20) as client:
        client.request(Hello("test", os.getpid()))
        client.ask(Attach("job", run, 0, 1, "dp1", 1, MIB, "for a test", ()), Attached)
        wish = Reserve(MIB, 3, encode_descriptor(descriptor(run=run)))
        yield client.ask(wish, Reserved).segment.path


def owned(path: str) -> bool:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return locks.is_locked(fd, OWNER_LOCK_BYTE, True)
    finally:
        os.close(fd)


def test_one_owner_at_a_time(path: str) -> None:
    segment = MappedSegment(path, 1)
    with pytest.raises(RankTaken, match="two trainers must not share job, run and rank"):
        MappedSegment(path, 1)
    segment.close()
    MappedSegment(path, 1).close()


@needs_users
def test_a_segment_of_another_user_is_not_mapped(path: str) -> None:
    """He could read the model out of it, and put another one in."""
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(PermissionError, match=f"owner {STRANGER}, mode 0600.*expected user"):
        MappedSegment(path, 1)
    with pytest.raises(PermissionError, match=f"owner {STRANGER}"):
        SlotFile(Path(path), "snapshots")


def test_a_segment_that_everybody_may_write_to_is_not_mapped(path: str) -> None:
    os.chmod(path, 0o666)
    with pytest.raises(PermissionError, match="written to by everybody"):
        MappedSegment(path, 1)


def test_close_gives_up_ownership_while_views_live(path: str) -> None:
    """``mmap`` keeps a duplicate of its descriptor as long as any tensor looks into it: locks on
    that description would outlive ``close``, and a second Checkpointer in one process would be
    refused.
    """
    segment = MappedSegment(path, 1)
    view = segment.memory.tensor
    assert owned(path)
    segment.close()
    assert not owned(path)
    assert view.numel() > 0


def test_a_forked_child_does_not_keep_ownership(path: str) -> None:
    """A data loader's worker outlives a killed trainer by a moment: its copy of the descriptors
    must not count.
    """
    segment = MappedSegment(path, 1)
    assert segment.try_lock_slot(1)
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:  # the child does nothing but live
        os.write(told, b"x")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"x"
        assert owned(path)
        segment.close()
        assert not owned(path)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        assert not locks.is_locked(fd, slot_lock_byte(1), True)
        os.close(fd)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(told)


def test_slots_are_sealed_here_as_the_daemon_would(path: str) -> None:
    segment = MappedSegment(path, 1)
    fill(_as_daemon(segment), 0, 7)
    segment.seal(0)
    header = segment.header(0)
    assert header is not None
    assert header.state is SlotState.SEALED
    assert header.sealed_at_ns >= header.filled_at_ns
    assert any(header.header_digest)
    segment.seal(0)
    assert segment.header(0) == header
    segment.close()


def test_a_free_slot_is_not_sealed(path: str) -> None:
    segment = MappedSegment(path, 1)
    segment.seal(2)
    header = segment.header(2)
    assert header is None or header.state is SlotState.FREE
    segment.close()


def test_the_table_reads_the_truth_from_memory(path: str) -> None:
    segment = MappedSegment(path, 1)
    table = SlotTable([segment])
    assert [r.state for r in table.records()] == [SlotState.FREE] * 3
    assert table.next_sequence() == 1
    fill(_as_daemon(segment), 1, 7, anchors=2)
    record = table.records()[1]
    assert (record.iteration, record.previous, record.state, record.anchors) == (
        7,
        6,
        SlotState.FILLED,
        2,
    )
    assert table.next_sequence() == record.sequence + 1
    segment.seal(1)
    assert table.records()[1].state is SlotState.SEALED
    segment.set_state(1, SlotState.FREE)
    assert table.records()[1].state is SlotState.FREE
    fill(_as_daemon(segment), 1, 8, anchors=1)
    assert (table.records()[1].iteration, table.records()[1].anchors) == (8, 1)
    segment.close()


def test_records_tell_their_history_and_their_digest(path: str) -> None:
    segment = MappedSegment(path, 1)
    fill(_as_daemon(segment), 1, 7)
    header = segment.header(1)
    assert header is not None
    segment.write_header(1, replace(header, epoch=3, epoch_start=5))
    segment.seal(1)
    record = SlotTable([segment]).records()[1]
    assert (record.state, record.epoch, record.epoch_start) == (SlotState.SEALED, 3, 5)
    sealed = segment.header(1)
    assert sealed is not None
    assert any(record.header_digest)
    assert record.header_digest == sealed.header_digest
    segment.close()


def test_what_the_daemon_asks_to_keep_is_read_at_once(path: str) -> None:
    segment = MappedSegment(path, 1)
    table = SlotTable([segment], epoch=2, epoch_start=4)
    assert (table.ring_hint, table.epochs) == (RingHint(), {2: 4})
    for hint in (RingHint(5, 6, 3), RingHint(0, span=1), RingHint()):
        write_ring_hint(segment.buffer, hint)
        assert segment.ring_hint == table.ring_hint == hint
    assert SlotTable([]).ring_hint == RingHint()
    segment.close()


def test_what_a_run_went_back_to_stays_until_its_new_history_has_a_floor(path: str) -> None:
    """Epoch 2 began at iteration 5. The floor was 3, and what may be the floor next began with 9, since a
    chain of another rank had broken. Iteration 5 was given away, and a job that died then had nothing in
    common with the others after 3, or nothing at all.
    """
    segment = MappedSegment(path, 1)
    told = msgspec.structs.replace(segment.descriptor, world_size=2)
    segment.descriptor = told
    for slot, iteration in enumerate((5, 9)):
        fill(_as_daemon(segment), slot, iteration, anchors=1)
        segment.seal(slot)
    header = segment.header(1)
    assert header is not None
    segment.write_header(1, replace(header, epoch=2, epoch_start=5))
    table = SlotTable([segment], epoch=2, epoch_start=5)
    first = SlotTable([segment], epoch=2, epoch_start=-1)

    def kept(of: SlotTable) -> set[int]:
        return {index for _, index in of.promised(of.records(), 1)}

    hint = RingHint(3, 9, 1, epoch=2, aim=9)
    write_ring_hint(segment.buffer, hint)
    assert kept(table) == {0, 1}
    assert kept(first) == {1}, "a run that never went back"
    write_ring_hint(segment.buffer, hint._replace(floor=5))
    assert kept(table) == {0, 1}, "it is the floor itself"
    write_ring_hint(segment.buffer, hint._replace(floor=9))
    assert kept(table) == {1}
    write_ring_hint(segment.buffer, hint._replace(floor=-1))
    segment.descriptor = msgspec.structs.replace(told, world_size=1)
    assert kept(table) == set(), "a run of one rank needs no common start"
    segment.close()


def test_a_damaged_header_counts_as_free(path: str) -> None:
    segment = MappedSegment(path, 1)
    fill(_as_daemon(segment), 1, 7)
    at = bytes(segment.buffer[: segment.geometry.slots_offset]).index(b"SLOT", 4096)
    while bytes(segment.buffer[at + 8 : at + 16]) != (7).to_bytes(8, "little"):
        at = bytes(segment.buffer[: segment.geometry.slots_offset]).index(b"SLOT", at + 1)
    segment.buffer[at + 8] ^= 1
    assert SlotTable([segment]).records()[1].state is SlotState.FREE
    segment.close()


def test_an_image_that_cannot_be_read_anchors_nothing(path: str) -> None:
    segment = MappedSegment(path, 1)
    fill(_as_daemon(segment), 1, 7, anchors=3)
    segment.slot(1)[:8] = b"\xff" * 8
    assert SlotTable([segment]).records()[1].anchors == 0
    segment.close()


def _as_daemon(segment: MappedSegment) -> Segment:
    """What ``fill`` uses of a daemon's segment, our mapping has too."""
    return segment  # type: ignore[return-value]


@pytest.fixture
def memory(endpoint: str) -> Iterator[RankMemory]:
    with attached(endpoint, uuid.uuid4().hex[:8]) as found:
        yield found


def generation(memory: RankMemory, table: str) -> MappedSegment:
    payload = msgspec.msgpack.encode({"operators": [table]})
    return memory.reserve(MIB, 4, window=1, num_operators=1, payload=payload)


def test_those_with_the_newest_table_are_current(memory: RankMemory) -> None:
    assert Generations().current() == []
    assert Generations().newest is None
    a, b, c, d = (generation(memory, table) for table in "abac")
    found = Generations()
    for segment, current in ((a, [a]), (b, [b]), (c, [c])):
        found.add(segment)
        assert found.current() == current
        assert found.newest is segment
    found.remove(b)
    assert found.current() == [a, c], "nothing unlike lies between them any more"
    found.add(d)
    table_of_a = (1, operators_id(a.descriptor))
    assert found.newer_than_table(table_of_a) == [d]
    assert found.newer_than_table((1, operators_id(d.descriptor))) == []
    assert found.newer_than_table((7, "unknown")) == [], "none is given up for a table not here"


def test_an_own_copy_is_one_on_this_node_that_is_mapped(memory: RankMemory) -> None:
    segment = generation(memory, "a")
    found = Generations()
    name = segment.path.rpartition("/")[2]
    record = SlotRecord(7, 0, SlotState.SEALED, iteration=5)
    elsewhere = SnapshotCopy("elsewhere", name, 1)
    piece = SnapshotToLoad(record, (elsewhere, SnapshotCopy("here", name, 2)))
    assert found.own_copy("here", piece) is None
    found.add(segment)
    own = found.own_copy("here", piece)
    assert own is not None
    assert (own.generation, own.index, own.iteration) == (segment.generation, 2, 5)
    assert found.of(own) is segment
    assert found.own_copy("here", SnapshotToLoad(record, (elsewhere,))) is None


def test_a_run_goes_on_only_in_slots_that_were_made_for_its_window(memory: RankMemory) -> None:
    """A wider window has smaller slots: what is recorded under the old one would not fit into them."""
    payload = msgspec.msgpack.encode({"operators": ["a"]})

    def made(slot_bytes: int, slots: int, window: int) -> MappedSegment:
        return memory.reserve(slot_bytes, slots, window=window, num_operators=1, payload=payload)

    used, grown, wider = made(MIB, 4, 2), made(MIB, 6, 2), made(MIB // 2, 5, 3)
    found = Generations()
    for segment in (used, grown, wider):
        found.add(segment)
    assert found.of_another_window(used) == [wider]
    assert found.of_another_window(wider) == []
