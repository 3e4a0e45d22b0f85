"""Cryptographic digests of sealed images: made on workers, once per snapshot, and kept beside it
(`Segment.keep_digest`).

A digest is made when it is first needed: sealing makes xxh3 digests alone, five times as fast. What
does not match those any more is not vouched for. They are compared after the digest was made, so
that what is changed meanwhile is seen. An `ImageDigests` lives on the daemon's loop thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from ckptd.core.slots.ring import SlotState
from ckptd.core.slots.segment_format import SlotHeader, slot_lock_byte
from ckptd.event_log import EventLog
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment
from ckptd.memory.slot_doubts import Doubt
from ckptd.storage.image import DigestMap, verify
from ckptd.storage.image_format import ImageError
from ckptd.storage.strong_digest import strong_digest
from ckptd.workers import Workers

__all__ = ["ImageDigests", "NotVouched", "Vouch", "Vouched", "digest_slot"]

logger = logging.getLogger(__name__)

# Called with the digest and "", or with "" and why there is none.
Vouched = Callable[[str, str], None]
# Has the digest of the image in this slot made, if it is not known, and calls back once.
Vouch = Callable[[Segment, int, SlotHeader, Vouched], None]
_Job = tuple[Segment, int, int]


class NotVouched(RuntimeError):
    """The slot holds something else, or does not match its xxh3 digests; says which."""


class _Damaged(NotVouched):
    """It does not match its xxh3 digests."""


class ImageDigests:
    """Digests of slots on this node.

    Args:
        workers: threads of their own, so that no seal waits for a digest.
        threads: for one digest; `map_fn`, if given, spreads one comparison over threads.
        doubt: told which slots did not match their xxh3 digests. Whoever asked gives such a copy up
            at once and reads no more of it, so nobody else tells.
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
        """Have the digest of a sealed slot; ``done`` is called once, now if it is known. Several
        that want the same wait for one job.
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
        elif job[0].fd < 0:  # it was given back while it waited
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
    """The digest of a sealed slot, which is kept from then on, and the nanoseconds that it took (0:
    it was kept already).

    Raises:
        NotVouched: see there.
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
