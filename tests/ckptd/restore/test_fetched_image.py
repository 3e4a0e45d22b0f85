"""What of an image is told to be wrong, and what is copied of a slot."""

from __future__ import annotations

import pytest

from ckptd.core.recovery.striping import ImagePart
from ckptd.core.slots.segment_format import set_slot_state
from ckptd.core.slots.slots import SlotState
from ckptd.restore.fetched_image import Wrong, _bounded, copy_parts, wrong_ranges
from ckptd.storage.image import Mismatch
from tests.ckptd.restore.setting import SNAPSHOT, Setting
from tests.ckptd.snapshots import snapshot_of


def test_few_ranges_are_told_one_by_one() -> None:
    found = [Mismatch("a", 0, 10), Mismatch("b", 10, 20), Mismatch("c", 50, 60)]
    assert _bounded(found, 3) == [
        Wrong(0, 10, ("a",)),
        Wrong(10, 20, ("b",)),
        Wrong(50, 60, ("c",)),
    ]


def test_of_many_those_that_lie_closest_are_told_as_one() -> None:
    """A copy of something else is wrong in each of a hundred thousand tensors; each range is a request."""
    found = [Mismatch(str(i), i * 10 + (100 if i > 2 else 0), i * 10 + 5) for i in range(3)]
    found += [Mismatch("x", 200, 205), Mismatch("y", 205, 210)]
    assert _bounded(found, 2) == [Wrong(0, 25, ("0", "1", "2")), Wrong(200, 210, ("x", "y"))]
    assert _bounded(found, 1) == [Wrong(0, 210, ("0", "1", "2", "x", "y"))]
    many = [Mismatch(str(i), i, i + 1) for i in range(10_000)]
    told = _bounded(many, 1024)
    assert len(told) == 1024
    assert [name for wrong in told for name in wrong.names] == [one.name for one in many]


def test_all_that_is_wrong_is_told() -> None:
    snapshot = snapshot_of(3, size=1000, tensors=("a", "b", "c"))
    image = bytearray(snapshot.image)
    image[-1] ^= 1
    image[-2500] ^= 1
    found = wrong_ranges(memoryview(image), snapshot.header.header_digest, None)
    assert [wrong.names for wrong in found] == [("a",), ("c",)]


@pytest.mark.usefixtures("unvalidated")
@pytest.mark.parametrize("state", list(SlotState))
def test_parts_are_copied_of_a_slot_that_has_the_snapshot_whole_or_damaged(
    setting: Setting, state: SlotState
) -> None:
    source = setting.segments[setting.holding(state=SlotState.SEALED).segment]
    set_slot_state(source.buffer, source.geometry, 1, state)
    target = memoryview(bytearray(len(SNAPSHOT.image)))
    parts = [ImagePart(0, 10, 20), ImagePart(1, 1000, 5000)]
    there = copy_parts(source, 1, SNAPSHOT.header, target, parts)
    assert there is (state in (SlotState.SEALED, SlotState.QUARANTINED))
    expected = bytearray(len(SNAPSHOT.image))
    if there:
        for part in parts:
            expected[part.start : part.stop] = SNAPSHOT.image[part.start : part.stop]
    assert target == expected


def test_a_slot_that_has_another_snapshot_is_not_copied(setting: Setting) -> None:
    source = setting.segments[setting.holding().segment]
    other = snapshot_of(5)
    target = memoryview(bytearray(len(other.image)))
    assert not copy_parts(source, 1, other.header, target, [ImagePart(0, 0, 10)])
    assert not any(target)
