"""What the sender of a rank's snapshots does with gradients (docs/recompute.md section 2).

A snapshot whose slot has gradients behind the image is offered with them. A peer that has the snapshot
before gets the gradients and what does not follow from them; any other gets the image. A peer that could
not compute a snapshot gets that one whole at once, and is offered gradients again after 2, 4, 8, …
snapshots: other kernels, or an optimizer that is not known there, do not go away by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ckptd.core.slots.segment_format import SlotHeader, slot_view
from ckptd.core.slots.slots import SnapshotKey
from ckptd.memory.segment_file import Segment
from ckptd.storage.gradient_block import pack_pieces, read_block
from ckptd.storage.image import ImageView
from ckptd.storage.image_format import ImageError
from ckptd.transport.verbs import Completion, Done, Fault, RegionKey, Transfer

__all__ = ["GradientOffer", "GradientOffers", "PieceLink", "PutOfPieces"]

_LEFT_OUT_MAX = 1024


@dataclass(frozen=True, slots=True)
class GradientOffer:
    """The gradients of one slot: the iteration that they continue, and what to put where in the peer's
    slot.
    """

    base: int
    bytes_behind: int
    pieces: tuple[tuple[int, memoryview], ...]

    @property
    def put_bytes(self) -> int:
        """Bytes to put instead of the image."""
        return sum(len(piece) for _, piece in self.pieces)


@dataclass(slots=True)
class _Peer:
    failed: int = 0  # in a row
    leave_out: int = 0  # snapshots that go whole before the next offer
    said: str = ""  # the last reason, which is logged once


class GradientOffers:
    """Decides, for the targets of one rank, which snapshots go as gradients."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}
        self._whole: dict[str, SnapshotKey] = {}
        # The newest, the same for all nodes. It keeps the memory of its segment mapped.
        self._made: tuple[SnapshotKey, Segment, GradientOffer | None] | None = None

    def of(self, node: str, key: SnapshotKey, segment: Segment, index: int) -> GradientOffer | None:
        """What to offer to a node for a sealed slot; None: the image."""
        peer = self._peers.setdefault(node, _Peer())
        header = segment.header(index)
        if header is None or self._whole.get(node) == key:
            return None
        if self._made is None or self._made[0] != key:
            self._made = key, segment, offer_of(segment, index, header)
        found = self._made[2]
        if found is not None and peer.leave_out:
            peer.leave_out -= 1
            return None
        return found

    def let_go(self) -> None:
        """Keep nothing of a segment that was given back."""
        if self._made is not None and self._made[1].fd < 0:
            self._made = None

    def accepted(self, node: str) -> None:
        """The node has computed a snapshot."""
        peer = self._peers.setdefault(node, _Peer())
        peer.failed = peer.leave_out = 0

    def declined(self, node: str, reason: str) -> str:
        """The node wants the image, and may take gradients next time; returns a new reason, for the log."""
        peer = self._peers.setdefault(node, _Peer())
        news = "" if reason == peer.said else reason
        peer.said = reason
        return news

    def failed(self, node: str, key: SnapshotKey, reason: str) -> str:
        """The node could not compute a snapshot, which goes whole now; returns a new reason, for the log."""
        self._whole[node] = key
        peer = self._peers.setdefault(node, _Peer())
        peer.failed += 1
        peer.leave_out = min(2**peer.failed, _LEFT_OUT_MAX)
        kind = reason.partition(":")[0]  # what follows names a tensor
        news = "" if kind == peer.said else reason
        peer.said = kind
        return news


def offer_of(segment: Segment, index: int, header: SlotHeader) -> GradientOffer | None:
    """The gradients behind an image, if there are any and they take fewer bytes than it."""
    slot = slot_view(segment.buffer, segment.geometry, index)
    names = {"iteration": header.iteration, "sequence": header.sequence}
    try:
        block = read_block(slot, header.image_len, **names)
        if block is None:
            return None
        pieces = pack_pieces(slot, ImageView(slot[: header.image_len]), block)
    except ImageError:  # the image is there all the same, and its digests are compared
        return None
    offset, last = pieces[-1]
    stop = offset + len(last)
    found = GradientOffer(block.record.base, stop - header.image_len, tuple(pieces))
    return found if found.put_bytes < header.image_len and stop <= len(slot) else None


class PieceLink(Protocol):
    """The put of `ckptd.peers.peer_link.PeerLink`."""

    def put(
        self, source: memoryview, target: RegionKey, *, offset: int = 0, deadline_s: float, done: Done
    ) -> Transfer: ...


class PutOfPieces:
    """Puts pieces, one after the other, as one transfer with one completion.

    Args:
        pieces: bytes, and where they go in the region.
        done: called on the loop thread with the sum, or with the first failure.
    """

    def __init__(
        self,
        link: PieceLink,
        region: RegionKey,
        pieces: Sequence[tuple[int, memoryview]],
        *,
        deadline_s: float,
        done: Done,
    ) -> None:
        self._link, self._region = link, region
        self._left = [each for each in pieces if len(each[1])]
        self._until_s, self._done = time.monotonic() + deadline_s, done
        self._sum: Completion | None = None
        self._now: Transfer | None = None
        self._cancelled = False
        self._next()

    def cancel(self) -> None:
        """The piece that is under way ends, and no other begins."""
        self._cancelled = True
        if self._now is not None:
            self._now.cancel()

    def _next(self) -> None:
        offset, piece = self._left.pop(0)
        deadline_s = max(0.1, self._until_s - time.monotonic())
        self._now = self._link.put(
            piece, self._region, offset=offset, deadline_s=deadline_s, done=self._ended
        )
        if self._cancelled:
            self._now.cancel()

    def _ended(self, completion: Completion) -> None:
        before = self._sum
        if before is not None:
            completion = replace(
                completion,
                size_bytes=before.size_bytes + completion.size_bytes,
                retries=before.retries + completion.retries,
                seconds=before.seconds + completion.seconds,
            )
        self._sum = completion
        if not completion.ok or not self._left:
            self._done(completion)
        elif self._cancelled:
            self._done(replace(completion, fault=Fault.CANCELLED, detail="cancelled between two pieces"))
        else:
            self._next()
