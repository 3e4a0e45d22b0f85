"""Digest and seal filled slots, and verify sealed ones: what worker threads do with a slot.

Each function takes the slot's read lock on a description of its own, looks at the state again
under the lock, and changes nothing if the slot has become something else meanwhile.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from enum import StrEnum

from ckptd.core.slots.ring import SlotState
from ckptd.core.slots.segment_format import (
    SlotHeader,
    set_slot_state,
    slot_lock_byte,
    write_slot_header,
)
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment
from ckptd.storage.image import DigestMap, DigestMismatch, seal, verify
from ckptd.storage.image_format import ImageError
from ckptd.storage.strong_digest import matches

__all__ = ["SealOutcome", "SealVerdict", "scrub_slot", "seal_slot"]

_LOCK_TRIES = 50  # the writer may send Filled a moment before it releases its lock
_LOCK_PAUSE_S = 0.02


class SealVerdict(StrEnum):
    """How sealing or scrubbing a slot ended."""

    SEALED = "sealed"
    INTACT = "intact"
    DAMAGED = "damaged"  # freed, or quarantined if it had been sealed
    BUSY = "busy"  # its lock is held; try again later
    CHANGED = "changed"  # it is no longer what was to be worked on


@dataclass(frozen=True, slots=True)
class SealOutcome:
    """What became of a slot, and why."""

    verdict: SealVerdict
    iteration: int = -1
    reason: str = ""
    digest_ns: int = 0
    image_len: int = 0


def seal_slot(segment: Segment, index: int, map_fn: DigestMap | None = None) -> SealOutcome:
    """Digest a filled slot and mark it sealed; a slot that holds no image is freed."""
    fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not _lock_soon(fd, slot_lock_byte(index)):
            return SealOutcome(SealVerdict.BUSY)
        header = segment.header(index)
        if header is None or header.state is not SlotState.FILLED:
            return SealOutcome(SealVerdict.CHANGED)
        return _seal(segment, index, header, map_fn)
    finally:
        os.close(fd)


def scrub_slot(
    segment: Segment,
    index: int,
    sequence: int,
    map_fn: DigestMap | None = None,
    *,
    strong: bool = False,
    threads: int = 1,
) -> SealOutcome:
    """Verify a sealed slot against its digests; a damaged one is quarantined.

    Args:
        strong: against the cryptographic digest, too, that was kept of it, if there is one.
        threads: for that one.
    """
    with locks.lock_file(segment.path, slot_lock_byte(index), exclusive=False) as taken:
        header = segment.header(index)
        if not taken:
            return SealOutcome(SealVerdict.BUSY)
        if header is None or header.state is not SlotState.SEALED or header.sequence != sequence:
            return SealOutcome(SealVerdict.CHANGED)
        try:
            image = segment.image(index, header)
            verify(image, header.header_digest, map_fn=map_fn)
            kept = segment.kept_digest(index, header) if strong else ""
            if kept and not matches(image, kept, threads=threads):
                raise ImageError("its xxh3 digests match, and its cryptographic digest does not")
        except ImageError as error:
            if segment.header(index) != header:
                return SealOutcome(SealVerdict.CHANGED)
            set_slot_state(segment.buffer, segment.geometry, index, SlotState.QUARANTINED)
            return SealOutcome(SealVerdict.DAMAGED, header.iteration, _why(error))
        return SealOutcome(SealVerdict.INTACT, header.iteration)


def _seal(segment: Segment, index: int, header: SlotHeader, map_fn: DigestMap | None) -> SealOutcome:
    started = time.perf_counter_ns()
    try:
        digest = seal(segment.image(index, header), map_fn=map_fn)
    except ImageError as error:
        set_slot_state(segment.buffer, segment.geometry, index, SlotState.FREE)
        return SealOutcome(SealVerdict.DAMAGED, header.iteration, _why(error))
    took = time.perf_counter_ns() - started
    if segment.header(index) != header:
        return SealOutcome(SealVerdict.CHANGED)  # its trainer sealed it itself, or gave it up
    sealed = replace(
        header,
        state=SlotState.SEALED,
        header_digest=digest,
        sealed_at_ns=time.time_ns(),
        digest_ns=took,
    )
    write_slot_header(segment.buffer, segment.geometry, index, sealed)
    return SealOutcome(SealVerdict.SEALED, header.iteration, digest_ns=took, image_len=header.image_len)


def _lock_soon(fd: int, byte: int) -> bool:
    """Take the read lock, waiting a bounded time for the writer to let go."""
    for _ in range(_LOCK_TRIES):
        if locks.try_lock(fd, byte, exclusive=False):
            return True
        time.sleep(_LOCK_PAUSE_S)
    return False


def _why(error: ImageError) -> str:
    if isinstance(error, DigestMismatch):
        what = "its header" if error.tensor == "header" else f"tensor {error.tensor!r}"
        return f"the digest of {what} does not match"
    return str(error)
