"""Whether an image that was brought here is what its digests say, and what of a copy on this node
can be had; on workers.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ckptd.core.recovery.striping import ImagePart
from ckptd.core.slots.ring import SlotState
from ckptd.core.slots.segment_format import SlotHeader, slot_lock_byte
from ckptd.memory import locks
from ckptd.memory.pages import copy_bytes
from ckptd.memory.segment_file import Segment
from ckptd.storage.image import DigestMap, Mismatch, mismatches
from ckptd.storage.strong_digest import matches

__all__ = ["Examined", "Wrong", "copy_parts", "examine", "wrong_ranges"]

# Ranges told of one verification. Each is a request of its own, to storage too, and a copy that is
# wrong in more places than that is hardly one of this snapshot.
_MAX_RANGES = 1024
_WITH_IMAGE = (SlotState.SEALED, SlotState.QUARANTINED)


@dataclass(frozen=True, slots=True)
class Wrong:
    """Bytes ``[start, stop)`` of an image that do not match; the names of what lies there (a
    tensor, or "header").
    """

    start: int
    stop: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Examined:
    """What is wrong by the xxh3 digests of an image; if nothing is, which cryptographic digests it
    has of those that were told.
    """

    wrong: Sequence[Wrong]
    matching: frozenset[str] = frozenset()


def examine(
    image: memoryview,
    header_digest: bytes,
    digests: Sequence[str],
    map_fn: DigestMap | None,
    threads: int,
) -> Examined:
    """Compare an image with all its digests.

    Raises:
        ImageError: as `wrong_ranges`.
    """
    wrong = wrong_ranges(image, header_digest, map_fn)
    if wrong:
        return Examined(wrong)
    return Examined((), frozenset(d for d in digests if matches(image, d, threads=threads)))


def copy_parts(
    source: Segment, slot: int, wanted: SlotHeader, target: memoryview, parts: Sequence[ImagePart]
) -> bool:
    """Copy these parts of a slot of this node, damaged as they may be; False if the slot holds
    something else (by now).
    """
    with locks.lock_file(source.path, slot_lock_byte(slot), exclusive=False) as taken:
        header = source.header(slot)
        if (
            not taken
            or header is None
            or header.state not in _WITH_IMAGE
            or header.header_digest != wanted.header_digest
            or header.image_len != wanted.image_len
        ):
            return False
        image = source.image(slot, header)
        for part in parts:
            copy_bytes(target[part.start : part.stop], image[part.start : part.stop])
    return True


def wrong_ranges(image: memoryview, header_digest: bytes, map_fn: DigestMap | None) -> list[Wrong]:
    """All of the image that does not match its digests, in order and disjoint; 1024 ranges at most,
    which then include what is between neighbours.

    Raises:
        ImageError: what was sealed is not an image that fits here.
    """
    return _bounded(mismatches(image, header_digest, map_fn=map_fn), _MAX_RANGES)


def _bounded(found: Sequence[Mismatch], limit: int) -> list[Wrong]:
    """The same in so many ranges at most: the widest gaps stay."""
    if len(found) <= limit:
        return [_joined([one]) for one in found]
    gaps = [after.start - before.stop for before, after in itertools.pairwise(found)]
    cuts = sorted(heapq.nlargest(limit - 1, range(len(gaps)), key=gaps.__getitem__))
    edges = [0, *(cut + 1 for cut in cuts), len(found)]
    return [_joined(found[a:b]) for a, b in itertools.pairwise(edges)]


def _joined(found: Sequence[Mismatch]) -> Wrong:
    return Wrong(found[0].start, found[-1].stop, tuple(one.name for one in found))
