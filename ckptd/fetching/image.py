"""Whether an image that was brought here is what its digests say; on workers."""

from __future__ import annotations

from ckptd.memory import locks
from ckptd.memory.pages import copy_bytes
from ckptd.memory.ring import SlotState
from ckptd.memory.segment_format import SlotHeader, slot_lock_byte
from ckptd.memory.segments import Segment
from ckptd.storage.image import DigestMismatch, ImageError, ImageView, MapFunction, verify

__all__ = ["copy_slot", "wrong_ranges"]


def copy_slot(
    source: Segment,
    slot: int,
    wanted: SlotHeader,
    target: memoryview,
    map_fn: MapFunction | None,
) -> list[tuple[int, int]]:
    """Copy a slot of this node and verify the copy; the ranges that are wrong (all of it if the slot holds something else)."""
    with locks.lock_file(source.path, slot_lock_byte(slot), exclusive=False) as taken:
        header = source.header(slot)
        if (
            not taken
            or header is None
            or header.state is not SlotState.SEALED
            or header.header_digest != wanted.header_digest
        ):
            return [(0, len(target))]
        copy_bytes(target, source.image(slot, header))
    return wrong_ranges(target, wanted.header_digest, map_fn)


def wrong_ranges(
    image: memoryview, header_digest: bytes, map_fn: MapFunction | None
) -> list[tuple[int, int]]:
    """The byte ranges that do not match their digests: the first tensor found, or all of it if the header is bad."""
    try:
        verify(image, header_digest, map_fn=map_fn)
    except DigestMismatch as error:
        if error.tensor == "header":
            return [(0, min(len(image), 8))] if len(image) < 8 else [(0, _header_len(image))]
        entry = ImageView(image).tensor(error.tensor)
        return [(entry.offset, entry.offset + max(entry.nbytes, 1))]
    except ImageError:
        return [(0, len(image))]
    return []


def _header_len(image: memoryview) -> int:
    return min(len(image), 8 + int.from_bytes(image[:8], "little"))
