"""A slot is begun anew while somebody reads it: the writer acts between any two instructions of the reader.

A reader took the state first, then the body and its crc. A trainer that began the slot anew in
between left the reader with a *sealed* header of the snapshot that was only being filled: with the
new iteration, and a body that was torn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

from ckptd.core.slots.segment_format import (
    SegmentGeometry,
    SlotHeader,
    pack_slot_header,
    read_slot_header,
    set_slot_state,
    slot_view,
    unpack_slot_header,
    write_slot_header,
)
from ckptd.core.slots.slots import SlotState
from ckptd.memory.inventory import slot_record
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentStore
from tests.ckptd.memory.fresh import DESCRIPTOR, make
from tests.ckptd.snapshots import snapshot_of

pytestmark = pytest.mark.usefixtures("unvalidated")

OLD = SlotHeader(SlotState.SEALED, 41, 40, 1000, 7, 5, 11, 12, 4321, 3, bytes(range(16)), 99, -1, 0)
FILLING = replace(
    OLD, state=SlotState.FILLING, iteration=45, sequence=8, header_digest=bytes(16), sealed_at_ns=0
)
FILLED = replace(FILLING, state=SlotState.FILLED, filled_at_ns=21)
SEALED = replace(FILLED, state=SlotState.SEALED, sealed_at_ns=22, header_digest=b"\1" * 16)


class Acts:
    """Does something once, after so many instructions of some code."""

    def __init__(self, after: int, act: Callable[[], None]) -> None:
        self.left, self._act = after, act
        self.acted = False

    def count(self) -> None:
        if self.left == 0 and not self.acted:
            self.acted = True
            self._act()
        self.left -= 1


@contextmanager
def between_instructions(of: tuple[str, ...], acts: Acts) -> Iterator[None]:
    """Let it act while functions of these files run."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(of):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            sys.settrace(None)  # what it does is not the reader's
            acts.count()
            sys.settrace(trace)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def fill(buf: memoryview, geometry: SegmentGeometry, *stages: SlotHeader) -> None:
    for stage in stages:
        write_slot_header(buf, geometry, 0, stage)


@pytest.mark.parametrize(
    "stages",
    [(FILLING,), (FILLING, FILLED), (FILLING, FILLED, SEALED), (SEALED,)],
    ids=["begun", "filled", "sealed", "sealed-at-once"],
)
def test_a_header_is_read_as_it_stood_at_one_moment(stages: tuple[SlotHeader, ...]) -> None:
    acted, after = True, 0
    seen = set()
    while acted:
        buf, geometry = make()
        fill(buf, geometry, OLD)
        acts = Acts(after, lambda: fill(buf, geometry, *stages))  # noqa: B023 - called in this round
        with between_instructions(("slots/segment_format.py",), acts):
            found = read_slot_header(buf, geometry, 0)
        seen.add(found)
        assert found in {OLD, stages[-1]}, f"after {after} instructions"
        acted, after = acts.acted, after + 1
    assert seen == {OLD, stages[-1]}
    assert after > 20


def test_a_header_that_is_half_written_is_read_when_it_is_whole() -> None:
    """Between the stores of a writer the crc does not match; the slot is not damaged."""
    buf, geometry = make()
    fill(buf, geometry, FILLING)
    whole = bytes(buf)
    fill(buf, geometry, FILLED)
    start = geometry.header_offset(0)
    half = whole[start : start + 60] + bytes(buf[start + 60 : start + 112])
    assert unpack_slot_header(half) is None
    buf[start : start + 112] = half
    acted, after, seen = True, 0, set()
    while acted:
        buf[start : start + 112] = half
        acts = Acts(after, lambda: fill(buf, geometry, FILLED))
        with between_instructions(("slots/segment_format.py",), acts):
            seen.add(read_slot_header(buf, geometry, 0))
        acted, after = acts.acted, after + 1
    assert seen == {None, FILLED}


def test_a_header_that_never_rests_is_none() -> None:
    class Restless:
        """Another fill at every look."""

        def __init__(self) -> None:
            self.looks = 0

        def __getitem__(self, key: slice) -> bytes:
            self.looks += 1
            packed = pack_slot_header(replace(SEALED, sequence=self.looks))
            at = geometry.header_offset(0)
            return packed[key.start - at : key.stop - at]

    _, geometry = make()
    assert read_slot_header(Restless(), geometry, 0) is None  # type: ignore[arg-type]


def test_the_raw_header_that_peers_get_is_of_one_moment(segment: Segment) -> None:
    acted, after, seen = True, 0, set()
    while acted:
        fill(segment.buffer, segment.geometry, OLD)
        acts = Acts(after, lambda: fill(segment.buffer, segment.geometry, FILLING))
        with between_instructions(("slots/segment_format.py", "memory/segment_file.py"), acts):
            raw = segment.raw_header(0)
        seen.add(unpack_slot_header(raw))
        acted, after = acts.acted, after + 1
    assert seen == {OLD, FILLING}


def test_what_an_image_anchors_is_of_the_snapshot_of_its_header(segment: Segment) -> None:
    """The daemon's table named an old iteration with the operators of the snapshot that was being
    written over it.
    """
    one, other = snapshot_of(41, anchors=0), snapshot_of(45, anchors=1)

    def place(header: SlotHeader, image: bytes) -> None:
        set_slot_state(segment.buffer, segment.geometry, 0, SlotState.FILLING)
        slot_view(segment.buffer, segment.geometry, 0)[: len(image)] = image
        write_slot_header(segment.buffer, segment.geometry, 0, header)

    told = set()
    acted, after = True, 0
    while acted:
        place(replace(one.header, sequence=1), one.image)
        acts = Acts(after, lambda: place(replace(other.header, sequence=2), other.image))
        with between_instructions(("memory/inventory.py",), acts):
            header = segment.header(0)
            assert header is not None
            record = slot_record(segment, 0, header)
        told.add((record.iteration, record.anchors))
        acted, after = acts.acted, after + 1
    assert told == {(41, 0)}


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    store = SegmentStore(tmp_path, 1 << 30, "node-a", mlock="off", hugepages="off")
    made = store.create(msgspec.structs.replace(DESCRIPTOR, num_operators=1), 2, 1 << 20)
    yield made
    made.close()
