"""Digests of slots on worker threads: sealing, scrubbing, doubts, and cryptographic digests.

A worker takes the slot's read lock on a description of its own, reads the header again under the lock, and
changes nothing if the slot holds something else by now.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from ckptd.core.slots.segment_format import (
    SlotHeader,
    set_slot_state,
    slot_lock_byte,
    write_slot_header,
)
from ckptd.core.slots.slots import SlotState
from ckptd.event_log import EventLog
from ckptd.memory import locks
from ckptd.memory.replicated_digests import ReplicatedDigests, replicated_digests
from ckptd.memory.segment_file import Segment
from ckptd.storage.image import DigestMap, DigestMismatch, seal, verify
from ckptd.storage.image_format import ImageError
from ckptd.storage.strong_digest import matches, strong_digest
from ckptd.workers import Workers

logger = logging.getLogger(__name__)

_LOCK_TRIES = 50  # the writer may send Filled a moment before it releases its lock
_LOCK_PAUSE_S = 0.02


class SealVerdict(StrEnum):
    """How sealing or scrubbing a slot ended."""

    SEALED = "sealed"
    INTACT = "intact"
    DAMAGED = "damaged"  # freed, or quarantined if it was sealed
    BUSY = "busy"  # its lock is held; try again later
    CHANGED = "changed"  # it holds something else by now


@dataclass(frozen=True, slots=True)
class SealOutcome:
    """How it ended; ``replicated``: of a slot that is sealed now, what other ranks should have as well."""

    verdict: SealVerdict
    iteration: int = -1
    reason: str = ""
    digest_ns: int = 0
    image_len: int = 0
    epoch: int = 0
    replicated: tuple[ReplicatedDigests, ...] = ()


def seal_slot(segment: Segment, index: int, map_fn: DigestMap | None = None) -> SealOutcome:
    """Digest a filled slot and mark it as sealed; free a slot that holds no image."""
    fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not _lock_soon(fd, slot_lock_byte(index)):
            return SealOutcome(SealVerdict.BUSY)
        header = segment.header(index)
        if header is not None and header.state is SlotState.SEALED:  # by its trainer
            return _with_replicated(
                SealOutcome(SealVerdict.CHANGED, header.iteration), segment, index, header
            )
        if header is None or header.state is not SlotState.FILLED:
            return SealOutcome(SealVerdict.CHANGED)
        outcome = _seal(segment, index, header, map_fn)
        if outcome.verdict is not SealVerdict.SEALED:
            return outcome
        return _with_replicated(outcome, segment, index, header)
    finally:
        os.close(fd)


def scrub_slot(
    segment: Segment,
    index: int,
    sequence: int,
    map_fn: DigestMap | None = None,
    *,
    strong: bool = False,
) -> SealOutcome:
    """Verify a sealed slot against its digests; quarantine it if it is damaged.

    Args:
        strong: also against the cryptographic digest that was kept of it, if there is one.
    """
    with locks.lock_file(segment.path, slot_lock_byte(index), exclusive=False) as taken:
        header = segment.sealed(index, sequence)
        if not taken:
            return SealOutcome(SealVerdict.BUSY)
        if header is None:
            return SealOutcome(SealVerdict.CHANGED)
        try:
            image = segment.image(index, header)
            verify(image, header.header_digest, map_fn=map_fn)
            kept = segment.kept_digest(index, header) if strong else ""
            if kept and not matches(image, kept, threads=1):
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


def _with_replicated(outcome: SealOutcome, segment: Segment, index: int, header: SlotHeader) -> SealOutcome:
    """The outcome for a sealed slot, which is locked, with the digests that ranks compare."""
    try:
        found = replicated_digests(segment.descriptor, segment.image(index, header), segment.replicated_sets)
    except ImageError as error:  # a process that ignores the lock writes to it: the scrub will tell
        logger.warning("%s slot %d was written to while it was sealed: %s", segment.path.name, index, error)
        return outcome
    return replace(outcome, epoch=header.epoch, replicated=found)


def _lock_soon(fd: int, byte: int) -> bool:
    """Take the read lock; wait a bounded time for the writer to release its own."""
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


_PAUSE_S = 10.0  # between two examinations of a slot
_BYTES_PER_S = 64 << 20  # and longer for large ones; verifying is not slower than this

# Has a slot of this node verified soon, if it still holds the snapshot with this sequence number.
Doubt = Callable[[Segment, int, int], None]
_Slot = tuple[Segment, int]


@dataclass(slots=True)
class _Doubt:
    sequence: int
    reported: bool = False  # that it could not be examined


class SlotDoubts:
    """Verifies slots out of turn that somebody doubts.

    A doubt ends when its slot is found intact, is quarantined, or holds something else. A slot that cannot
    be examined now (its lock is held, the workers are full, no descriptor is left) is examined at a later
    tick. One slot is examined at a time, so that seals need not wait for many, and a slot rests between two
    examinations: a peer may doubt it as often as it likes. On the daemon's loop thread.

    Args:
        workers: threads that digest; ``map_fn`` spreads one image over threads.
        examined: called with the outcome for a slot.
    """

    def __init__(
        self,
        workers: Workers,
        events: EventLog,
        map_fn: DigestMap | None,
        examined: Callable[[Segment, int, SealOutcome], None],
    ) -> None:
        self._workers, self._events, self._map = workers, events, map_fn
        self._on_examined = examined
        self._now_s = 0.0  # of the last tick
        self._open: dict[_Slot, _Doubt] = {}
        self._rest_until_s: dict[_Slot, float] = {}
        self._examining = False

    def add(self, segment: Segment, index: int, sequence: int) -> None:
        """Verify this slot as soon as possible, if it still holds the snapshot with this sequence number."""
        self._open[segment, index] = _Doubt(sequence)
        self._next()

    def tick(self, now_s: float) -> None:
        """Examine slots that could not be examined before."""
        self._now_s = now_s
        rests = self._rest_until_s.items()
        self._rest_until_s = {slot: until_s for slot, until_s in rests if now_s < until_s}
        self._next()

    def _next(self) -> None:
        if self._examining:
            return
        for (segment, index), doubt in list(self._open.items()):
            if not _holds(segment, index, doubt.sequence):
                del self._open[segment, index]
            elif (segment, index) not in self._rest_until_s:
                self._examine(segment, index, doubt)
                return

    def _examine(self, segment: Segment, index: int, doubt: _Doubt) -> None:
        # If the workers are full the next tick tries again.
        self._examining = self._workers.submit(
            partial(scrub_slot, segment, index, doubt.sequence, self._map, strong=True),
            partial(self._examined, segment, index, doubt),
            partial(self._failed, segment, index, doubt),
        )

    def _examined(self, segment: Segment, index: int, doubt: _Doubt, outcome: SealOutcome) -> None:
        self._examining = False
        if outcome.verdict in (SealVerdict.INTACT, SealVerdict.DAMAGED):
            self._rest(segment, index)
            # A new doubt is examined after the pause.
            if self._open.get((segment, index)) is doubt:
                del self._open[segment, index]
            self._on_examined(segment, index, outcome)
        else:  # its lock is held, or it has just changed: the next tick looks at it again
            self._rest_until_s[segment, index] = self._now_s
        self._next()

    def _failed(self, segment: Segment, index: int, doubt: _Doubt, error: BaseException) -> None:
        self._examining = False
        if not _is_there(segment):  # it was removed while it waited
            self._next()
            return
        self._rest(segment, index)
        self._events.count("examine_again")
        if not doubt.reported:
            doubt.reported = True
            text = f"{segment.path.name} slot {index} cannot be examined now, and is later: {error!r}"
            logger.error("%s", text, exc_info=error)
            self._events.add("error", "scrub_failed", text, segment.key)
        self._next()

    def _rest(self, segment: Segment, index: int) -> None:
        pause_s = _PAUSE_S + segment.geometry.slot_bytes / _BYTES_PER_S
        self._rest_until_s[segment, index] = self._now_s + pause_s


def _is_there(segment: Segment) -> bool:
    return segment.fd >= 0 and segment.in_place()


def _holds(segment: Segment, index: int, sequence: int) -> bool:
    """Whether a slot may still hold the doubted snapshot; an unreadable header may be half written."""
    if not _is_there(segment):
        return False
    header = segment.header(index)
    return header is None or (header.state, header.sequence) == (SlotState.SEALED, sequence)


# Called with the digest and "", or with "" and the reason why there is none.
Vouched = Callable[[str, str], None]
# Gets the digest of the image in a slot, makes it if necessary, and calls back once.
Vouch = Callable[[Segment, int, SlotHeader, Vouched], None]
_Job = tuple[Segment, int, int]


class NotVouched(RuntimeError):
    """No digest: the slot holds another snapshot, or does not match its xxh3 digests."""


class _Damaged(NotVouched):
    """It does not match its xxh3 digests."""


class ImageDigests:
    """Cryptographic digests of sealed images, made once and kept (`Segment.keep_digest`).

    Sealing makes xxh3 digests only, which is five times as fast; a cryptographic digest is made when it is
    first needed. An image that does not match its xxh3 digests any more gets none. They are compared after
    the digest was made, so that a change meanwhile is noticed. On the daemon's loop thread.

    Args:
        workers: separate threads, so that no seal waits for a digest.
        threads: for one digest; ``map_fn`` spreads one comparison over threads.
        doubt: called with slots that did not match their xxh3 digests. The requester gives such a copy up
            at once and reads no more of it, so nobody else reports it.
    """

    def __init__(
        self,
        workers: Workers,
        events: EventLog,
        *,
        threads: int,
        map_fn: DigestMap | None,
        doubt: Doubt,
    ) -> None:
        self._workers, self._events, self._doubt = workers, events, doubt
        self._threads, self._map = threads, map_fn
        self._waiting: dict[_Job, list[Vouched]] = {}

    def want(self, segment: Segment, index: int, header: SlotHeader, done: Vouched) -> None:
        """Call ``done`` once with the digest of a sealed slot, now if it is known.

        Requests for the same slot share one job.
        """
        if known := segment.kept_digest(index, header):
            done(known, "")
            return
        job = segment, index, header.sequence
        if job in self._waiting:
            self._waiting[job].append(done)
            return
        self._waiting[job] = [done]
        started = self._workers.submit(
            partial(digest_slot, segment, index, header, self._threads, self._map),
            partial(self._made, job, header.image_len),
            partial(self._not_made, job),
        )
        if not started:
            self._not_made(job, NotVouched("too many images wait for their digests"))

    def _made(self, job: _Job, size_bytes: int, result: tuple[str, int]) -> None:
        digest, took_ns = result
        if took_ns:
            self._events.count("image_digests")
            self._events.count("image_digest_ns", took_ns)
            self._events.count("image_digest_bytes", size_bytes)
        for done in self._waiting.pop(job):
            done(digest, "")

    def _not_made(self, job: _Job, error: BaseException) -> None:
        if isinstance(error, NotVouched):
            reason = str(error)
        elif job[0].fd < 0:  # the segment was given back meanwhile
            reason = f"{job[0].path.name} is gone"
        else:
            logger.error("a digest of %s failed", job[0].path.name, exc_info=error)
            reason = repr(error)
        for done in self._waiting.pop(job):
            done("", reason)
        if isinstance(error, _Damaged):
            self._doubt(*job)


def digest_slot(
    segment: Segment, index: int, header: SlotHeader, threads: int, map_fn: DigestMap | None
) -> tuple[str, int]:
    """Make and keep the digest of a sealed slot; returns it and its nanoseconds (0: it was kept).

    Raises:
        NotVouched: there is no digest of this snapshot.
    """
    with locks.lock_file(segment.path, slot_lock_byte(index), exclusive=False) as taken:
        found = segment.header(index) if taken else None
        if found is None or found.state is not SlotState.SEALED:
            raise NotVouched(f"slot {index} of {segment.path.name} is not sealed any more")
        if (found.sequence, found.epoch) != (header.sequence, header.epoch):
            raise NotVouched(f"slot {index} of {segment.path.name} holds another snapshot")
        if known := segment.kept_digest(index, found):
            return known, 0
        begun_ns = time.perf_counter_ns()
        image = segment.image(index, found)
        digest = strong_digest(image, threads=threads)
        try:
            verify(image, found.header_digest, map_fn=map_fn)
        except ImageError as error:
            text = f"iteration {found.iteration} does not match its digests on this node: {error}"
            raise _Damaged(text) from error
        segment.keep_digest(index, found, digest)
        return digest, time.perf_counter_ns() - begun_ns
