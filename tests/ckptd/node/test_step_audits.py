"""What an audit showed is marked on the very snapshots that it compared, in real segment files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ckptd.core.slots.segment_format import slot_lock_byte
from ckptd.core.slots.slots import SlotState
from ckptd.event_log import EventLog
from ckptd.memory import inventory, locks
from ckptd.memory.segment_file import Segment, open_segment
from ckptd.memory.segment_store import SegmentStore
from ckptd.node.step_audits import StepAudits
from ckptd.transport.messages import AuditedSnapshot, TellAudit
from tests.ckptd.persistence.slots import fill, segment_store, three_snapshots


@pytest.fixture
def store(tmp_path: Path) -> SegmentStore:
    return segment_store(tmp_path)


@pytest.fixture
def segment(store: SegmentStore) -> Iterator[Segment]:
    yield from three_snapshots(store)


class Node:
    """The audits of a daemon, and its events."""

    def __init__(self, store: SegmentStore) -> None:
        self.events = EventLog(100)
        self.audits = StepAudits(self.events, segments=store.all_of_run)


def told(segment: Segment, index: int, *, passed: bool = True, certain: bool = True) -> TellAudit:
    """An audit of the step that led to the snapshot in this slot."""
    header = segment.header(index)
    assert header is not None
    compared = (AuditedSnapshot(segment.descriptor.rank, header.header_digest),)
    key, end = segment.key, header.iteration
    return TellAudit(
        key.job, key.run, end - 1, end, header.epoch, passed, certain, "what it showed", compared
    )


def audited(segment: Segment) -> list[bool]:
    return [segment.audited(index, header) for index, header in segment.headers()]


def test_the_compared_snapshot_is_marked_for_as_long_as_it_is_there(
    store: SegmentStore, segment: Segment
) -> None:
    node = Node(store)
    done = node.audits.tell(told(segment, 1), 10.0)
    assert (audited(segment), done.message) == (
        [False, True, False, False],
        "1 slots of this node are marked as audited",
    )
    assert [slot.audited for slot in inventory.held_slots(segment)] == [False, True, False]
    assert [record.audited for record in inventory.records_of([segment])] == [False, True, False, False]
    assert [
        s.audited for s in inventory.rank_snapshots([segment], operators=False).slots if s.iteration >= 0
    ] == [*(False, True, False)]
    again = open_segment(segment.path)
    assert audited(again)[1]
    again.close()
    fill(segment, 1, 3)  # as the ring does
    assert audited(segment) == [False] * 4


def test_another_snapshot_of_that_iteration_is_not(store: SegmentStore, segment: Segment) -> None:
    node, right = Node(store), told(segment, 1)
    other = AuditedSnapshot(segment.descriptor.rank, bytes(16))
    for wrong in (
        TellAudit(*(right.job, right.run, 0, 1, right.epoch, True, True, "", (other,))),
        TellAudit(*(right.job, right.run, 0, 1, right.epoch + 1, True, True, "", right.snapshots)),
        TellAudit(*(right.job, right.run, 1, 2, right.epoch, True, True, "", right.snapshots)),
        told(segment, 1, passed=False),
    ):
        node.audits.tell(wrong, 0.0)
    with locks.lock_file(segment.path, slot_lock_byte(1), exclusive=True):  # it is about to be filled again
        node.audits.tell(right, 0.0)
    assert audited(segment) == [False] * 4


def test_a_damaged_mark_is_none(store: SegmentStore, segment: Segment) -> None:
    Node(store).audits.tell(told(segment, 1), 0.0)
    segment.buffer[segment.geometry.header_offset(1) + 256 + 9] ^= 1
    assert audited(segment) == [False] * 4
    header = segment.header(1)
    assert header is not None
    assert not segment.audited(1, replace(header, state=SlotState.SEALED, epoch=header.epoch + 1))


def test_what_is_told_to_an_operator(store: SegmentStore, segment: Segment) -> None:
    node = Node(store)
    node.audits.tell(told(segment, 1), 10.0)
    node.audits.tell(msgspec.structs.replace(told(segment, 2, passed=False), differing=(5, 3)), 20.0)
    node.audits.tell(told(segment, 2, passed=False, certain=False), 30.0)
    events = [(event.kind, event.rank) for event in node.events.page(0, 100).events]
    assert events == [("step_audited", 0), ("audit_failed", 3), ("audit_unclear", 0)]
    (report,) = node.audits.reports(35.0)
    assert (report.passed, report.failed, report.newest, report.newest_failed) == (1, 1, 1, 2)
    assert (report.verdict, report.ago_s) == ("what it showed", 5.0)
    node.audits.forget("job", "run")
    assert node.audits.reports(35.0) == ()
