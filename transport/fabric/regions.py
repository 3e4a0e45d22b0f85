"""Registered buffers on the side that owns them: which peer may touch which bytes, and until when.

A region is OPEN, then REVOKED: unknown to peers, while operations that began before may still touch its
buffer. `LocalRegion.close` waits for them, and breaks off those that wait for a peer. `Regions.use` makes all
checks, and an operation holds the region while it runs. A copy by a peer of this host
(`ckptd.transport.fabric.short_cut`) is such an operation too; its locks show it.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from ckptd.transport.fabric.frames import BufferUse, bytes_of
from ckptd.transport.fabric.short_cut import FileLease
from ckptd.transport.verbs import Access, Fault, FileRange, RegionKey, Scope

logger = logging.getLogger(__name__)

SETTLE_POLL_S = 0.001  # while libzmq sends
COPY_POLL_S = 0.005  # while another process copies
WARN_AFTER_S = 10.0
BREAK_AFTER_S = 0.5  # a chunk that takes longer to end is broken off when its region is closed


class Refusal(Exception):
    """A request that is not granted, and why."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault
        self.detail = detail


class LocalRegion:
    """Implements `Region`. Each hold is released once, from any thread."""

    def __init__(
        self,
        key: RegionKey,
        buffer: memoryview,
        access: Access,
        scope: Scope,
        owner: Regions,
        lease: FileLease | None = None,
    ) -> None:
        self.key = key
        self.access = access
        self.scope = scope
        self.buffer = buffer
        self._owner = owner
        self._lease = lease
        self._changed = threading.Condition()
        self._holds: list[Callable[[], None]] = []
        self._closed = False
        self._leaving: list[BufferUse] = []

    def hold(self, break_off: Callable[[], None]) -> bool:
        """Keep the buffer until `release`; false if the region is closed.

        ``break_off`` makes the operation end soon. It is called, from any thread, if the operation takes long
        when the region is closed.
        """
        with self._changed:
            if not self._closed:
                self._holds.append(break_off)
            return not self._closed

    def release(self, break_off: Callable[[], None]) -> None:
        with self._changed:
            self._holds.remove(break_off)
            self._changed.notify_all()

    def leaves(self, use: BufferUse) -> None:
        """A part of the buffer is being sent without a copy."""
        with self._changed:
            self._leaving = [*(each for each in self._leaving if not each.over()), use]

    def revoke(self) -> bool:
        """Refuse every further request; returns whether nothing touches the buffer any more. Never waits."""
        self._owner.remove(self)
        with self._changed:
            self._closed = True
            if self._lease is not None:
                self._lease.end()
            return self._let_go()

    def end_lease(self) -> None:
        """Let peers begin no more copies of their own; other requests are not affected."""
        with self._changed:
            if self._lease is not None:
                self._lease.end()

    def break_off(self) -> None:
        """After `revoke`: break off operations of this process that take long.

        Waits `BREAK_AFTER_S` for them before, once more after, and for nothing else.
        """
        with self._changed:
            if self._changed.wait_for(lambda: not self._holds, BREAK_AFTER_S):
                return
            for break_off in self._holds:
                break_off()
            self._changed.wait_for(lambda: not self._holds, BREAK_AFTER_S)

    def close(self) -> None:
        """Revoke, and wait until nothing touches the buffer any more.

        An operation that takes long is broken off. A send by libzmq to a peer that has stopped taking bytes
        ends only when the heartbeats find its connection dead.
        """
        if self.revoke():
            return
        self.break_off()
        with self._changed:
            warn_at = time.monotonic() + WARN_AFTER_S
            while not self._let_go():
                self._changed.wait(self._poll_s())
                if time.monotonic() > warn_at:
                    logger.warning("region %d is still in use", self.key.region)
                    warn_at += WARN_AFTER_S

    def _let_go(self) -> bool:
        """Give up the buffer if nobody uses it. The lock is held."""
        self._leaving = [use for use in self._leaving if not use.over()]
        if self._holds or self._leaving or (self._lease is not None and self._lease.in_use):
            return False
        self.buffer = memoryview(b"")
        if self._lease is not None:
            self._lease.close()
            self._lease = None
        return True

    def _poll_s(self) -> float:
        """How often to look at what wakes nobody: sends of libzmq, and other processes."""
        if self._leaving:
            return SETTLE_POLL_S
        copied = self._lease is not None and self._lease.in_use
        return COPY_POLL_S if copied else WARN_AFTER_S


def _nothing_to_break() -> None:
    """For operations that do not wait for the network."""


class Regions:
    """All registered buffers of a fabric; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[int, LocalRegion] = {}

    def register(
        self, buffer: memoryview, access: Access, scope: Scope, file: FileRange | None = None
    ) -> LocalRegion:
        """Make a region. With a ``file``, peers of this host may copy by themselves."""
        view = bytes_of(buffer, writable=Access.WRITE in access)
        with self._lock:
            number = secrets.randbits(62)
            while number in self._regions:
                number = secrets.randbits(62)
            key = RegionKey(number, secrets.token_bytes(16), len(view), file)
            lease = _lease(key, access, scope)
            if lease is None:
                key = replace(key, file=None)
            region = LocalRegion(key, view, access, scope, self, lease)
            self._regions[number] = region
        return region

    def end_leases(self) -> None:
        with self._lock:
            regions = list(self._regions.values())
        for region in regions:
            region.end_lease()

    def remove(self, region: LocalRegion) -> None:
        with self._lock:
            self._regions.pop(region.key.region, None)

    @contextmanager
    def use(
        self,
        number: int,
        token: bytes,
        peer: str,
        access: Access,
        offset: int,
        length: int,
        break_off: Callable[[], None] = _nothing_to_break,
    ) -> Iterator[tuple[LocalRegion, memoryview]]:
        """The region and the requested bytes, held while the context lasts; for ``break_off`` see
        `LocalRegion.hold`.

        Raises:
            Refusal: there is no such region for this peer, operation and range.
        """
        region = self._regions.get(number)
        if region is None or not hmac.compare_digest(region.key.token, token):
            raise Refusal(Fault.REGION, f"there is no region {number} with this token")
        if region.scope.peer not in ("", peer):
            raise Refusal(Fault.ACCESS, f"region {number} is not for {peer}")
        if access not in region.access:
            raise Refusal(Fault.ACCESS, f"region {number} does not allow {access.name}")
        if offset + length > region.key.length:
            end = offset + length
            raise Refusal(Fault.BOUNDS, f"bytes {offset} to {end} of a region of {region.key.length}")
        if not region.hold(break_off):
            raise Refusal(Fault.REGION, f"region {number} is closed")
        try:
            yield region, region.buffer[offset : offset + length]
        finally:
            region.release(break_off)


def _lease(key: RegionKey, access: Access, scope: Scope) -> FileLease | None:
    """None if peers of this host cannot copy by themselves; then everything goes over the network."""
    if key.file is None:
        return None
    try:
        return FileLease(key, access, scope.peer)
    except OSError as error:
        logger.info("no short cut for a region, peers of this host use the network: %s", error)
        return None
