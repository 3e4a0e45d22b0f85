"""Sealed slots of this node's segments and replicas as the source of an export: locked against reuse, and
verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptd.core.export.export_errors import DamagedSnapshot, ExportError
from ckptd.core.export.joining import RankImage
from ckptd.core.slots.ring import SlotState
from ckptd.core.slots.segment_format import SlotHeader, slot_lock_byte
from ckptd.errors import SegmentError
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment, open_segment
from ckptd.storage.image import ImageView, verify
from ckptd.storage.image_format import ImageError

__all__ = ["SealedSlot", "held", "open_segments", "rank_image", "sealed_slots", "verify_slot"]


@dataclass(frozen=True, slots=True)
class SealedSlot:
    """A snapshot in a slot, with its header at the time of reading."""

    segment: Segment
    index: int
    header: SlotHeader

    def __str__(self) -> str:
        """The name of the snapshot in messages."""
        return f"rank {self.segment.key.rank}'s snapshot of iteration {self.header.iteration}"


def open_segments(paths: Iterable[Path]) -> tuple[list[Segment], list[str]]:
    """The segments that can be read, and the errors of the others."""
    found: list[Segment] = []
    problems: list[str] = []
    for path in paths:
        try:
            found.append(open_segment(path, readonly=True))
        except (OSError, ValueError, SegmentError) as error:
            problems.append(f"{path.name}: {error}")
    return found, problems


def sealed_slots(segments: Iterable[Segment]) -> list[SealedSlot]:
    """All sealed slots."""
    return [
        SealedSlot(segment, index, header)
        for segment in segments
        for index, header in segment.headers()
        if header.state is SlotState.SEALED
    ]


@contextmanager
def held(slot: SealedSlot) -> Iterator[ImageView]:
    """Lock the slot until the end of the block, and return its image, which is not verified yet.

    Raises:
        ExportError: the slot was overwritten since its header was read.
        DamagedSnapshot: the slot contains no valid image.
    """
    lock = slot_lock_byte(slot.index)
    with locks.lock_file(slot.segment.path, lock, exclusive=False) as taken:
        if not taken or slot.segment.header(slot.index) != slot.header:
            raise ExportError(f"{slot} has just been overwritten; choose a newer one")
        try:
            view = ImageView(slot.segment.image(slot.index, slot.header))
        except ImageError as error:
            raise DamagedSnapshot(f"{slot} is damaged: {error}") from error
        yield view


def verify_slot(slot: SealedSlot) -> None:
    """Check that a held slot is, bit for bit, the sealed image.

    Raises:
        DamagedSnapshot: it differs.
    """
    try:
        verify(slot.segment.image(slot.index, slot.header), slot.header.header_digest)
    except ImageError as error:
        raise DamagedSnapshot(f"{slot} is damaged: {error}") from error


def rank_image(view: ImageView, segments: Iterable[Segment]) -> RankImage:
    """The facts of a held image, together with the other snapshots of its rank in these segments."""
    dense = view.anchors == (1 << view.num_operators) - 1
    return RankImage(view.entries, dense, [found.entries for found in _images(segments)])


def _images(segments: Iterable[Segment]) -> Iterator[ImageView]:
    for slot in sealed_slots(segments):
        try:
            view = ImageView(slot.segment.image(slot.index, slot.header))
        except ImageError:
            continue  # damaged or being overwritten: it would only have shown a dtype
        if slot.segment.header(slot.index) == slot.header:
            yield view
