"""Slots that are held while they are read, in real segment files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.core.sessions import RankKey
from ckptd.core.slots.segment_format import slot_lock_byte
from ckptd.core.slots.slots import SlotRecord, key_of
from ckptd.memory import locks
from ckptd.memory.inventory import records_of
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentStore
from ckptd.memory.slot_holds import SlotHolds
from tests.ckptd.persistence.slots import descriptor, fill, segment_store

RANK = RankKey("job", "run", 0)


@pytest.fixture
def store(tmp_path: Path) -> SegmentStore:
    return segment_store(tmp_path)


@pytest.fixture
def segment(store: SegmentStore) -> Iterator[Segment]:
    made = store.create(descriptor(), 4, 1 << 20)
    for iteration in (0, 1):
        fill(made, iteration, iteration)
    yield made
    made.close()


@pytest.fixture
def holds(store: SegmentStore) -> Iterator[SlotHolds]:
    made = SlotHolds(store, RANK)
    yield made
    made.release_all()


def record(segment: Segment, index: int) -> SlotRecord:
    return next(found for found in records_of([segment]) if found.index == index)


def passed_over(segment: Segment) -> list[int]:
    """The slots that a trainer finds taken."""
    return [i for i in range(4) if locks.is_locked(segment.fd, slot_lock_byte(i), exclusive=True)]


def test_what_is_held_is_passed_over_until_it_is_released(holds: SlotHolds, segment: Segment) -> None:
    first, second = (record(segment, index) for index in (0, 1))
    assert holds.hold(key_of(first), first)
    assert holds.hold(key_of(second), second)
    assert holds.hold(key_of(second), second), "again: it is held already"
    assert passed_over(segment) == [0, 1]
    held = holds.get(key_of(second))
    assert held is not None
    assert (held.segment, held.index) == (segment, 1)
    holds.release(key_of(second))
    assert passed_over(segment) == [0]
    assert holds.get(key_of(second)) is None
    holds.release(key_of(second))  # nothing happens
    holds.release_all()
    assert passed_over(segment) == []


def test_a_slot_that_has_something_else_by_now_is_not_held(holds: SlotHolds, segment: Segment) -> None:
    before = record(segment, 1)
    fill(segment, 1, 5)
    assert not holds.hold(key_of(before), before)
    assert passed_over(segment) == []


def test_the_same_iteration_of_another_history_is_something_else(holds: SlotHolds, segment: Segment) -> None:
    before = record(segment, 1)
    fill(segment, 1, 1, epoch=2)
    assert not holds.hold(key_of(before), before)


def test_a_slot_that_is_being_filled_is_not_held(holds: SlotHolds, segment: Segment) -> None:
    before = record(segment, 1)
    with locks.lock_file(segment.path, slot_lock_byte(1), exclusive=True):
        assert not holds.hold(key_of(before), before)
    assert holds.hold(key_of(before), before)


def test_a_file_that_somebody_removed_holds_nothing_and_breaks_nothing(
    holds: SlotHolds, segment: Segment
) -> None:
    """It went up to the daemon's loop as an error."""
    before = record(segment, 1)
    segment.path.unlink()
    assert not holds.hold(key_of(before), before)


def test_a_generation_that_was_dropped_holds_nothing(
    holds: SlotHolds, segment: Segment, store: SegmentStore
) -> None:
    before = record(segment, 1)
    store.remove(segment)
    assert not holds.hold(key_of(before), before)
