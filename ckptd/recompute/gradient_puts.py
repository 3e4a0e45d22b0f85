"""What the sender of a rank's snapshots does with gradients (docs/recompute.md section 2).

A snapshot whose slot has gradients behind the image is offered with them. A peer that has the snapshot
before gets the gradients and what does not follow from them; any other gets the image. A peer that could
not compute a snapshot gets that one whole at once, and is offered gradients again after 2, 4, 8, …
snapshots: other kernels, or an optimizer that is not known there, do not go away by themselves. One that
only declines is offered the next ones, too, but after the first time not all of them: a gap is over soon, a
node without torch stays one. What goes is packed once a peer takes it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from ckptd.core.slots.segment_format import SlotHeader, slot_view
from ckptd.core.slots.slots import SnapshotKey
from ckptd.memory.segment_file import Segment
from ckptd.storage.gradient_block import GradientBlock, pack_pieces, read_block
from ckptd.storage.image import ImageView
from ckptd.storage.image_format import ImageError
from ckptd.transport.verbs import Completion, Done, Fault, RegionKey, Transfer

_LEFT_OUT_MAX = 1024  # after failures
_DECLINED_MAX = 4  # 15 snapshots


class GradientOffer:
    """The gradients of one slot.

    Attributes:
        base: the iteration that they continue.
        bytes_behind: for which a peer needs room behind the image: the rest of the slot, at most.
    """

    def __init__(self, slot: memoryview, image_len: int, block: GradientBlock) -> None:
        self._slot, self._image_len, self._block = slot, image_len, block
        self.base, self.bytes_behind = block.record.base, len(slot) - image_len

    @cached_property
    def pieces(self) -> tuple[tuple[int, memoryview], ...]:
        """What to put where in the peer's slot; empty: the image, which takes fewer bytes.

        They are made when they are asked for first, while the slot is held.
        """
        try:
            found = tuple(pack_pieces(self._slot, ImageView(self._slot[: self._image_len]), self._block))
        except ImageError:  # the image is there all the same, and its digests are compared
            return ()
        offset, last = found[-1]
        fits = offset + len(last) <= len(self._slot)
        return found if fits and _bytes_of(found) < self._image_len else ()

    @property
    def put_bytes(self) -> int:
        """Bytes to put instead of the image."""
        return _bytes_of(self.pieces)


def _bytes_of(pieces: Sequence[tuple[int, memoryview]]) -> int:
    return sum(len(piece) for _, piece in pieces)


@dataclass(slots=True)
class _Peer:
    failed: int = 0  # in a row
    declined: int = 0  # in a row
    leave_out: int = 0  # snapshots that go whole before the next offer
    whole: SnapshotKey | None = None  # the last that goes whole, however often it is tried
    said: str = ""  # the last reason, which is logged once


class GradientOffers:
    """Decides, for the targets of one rank, which snapshots go as gradients."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}
        # The newest, the same for all nodes. It keeps the memory of its segment mapped.
        self._made: tuple[SnapshotKey, Segment, GradientOffer | None] | None = None

    def of(self, node: str, key: SnapshotKey, segment: Segment, index: int) -> GradientOffer | None:
        """What to offer to a node for a sealed slot; None: the image."""
        peer = self._peers.setdefault(node, _Peer())
        if peer.leave_out and peer.whole != key:
            peer.leave_out -= 1
            peer.whole = key
        header = None if peer.whole == key else segment.header(index)
        if header is None:
            return None
        if self._made is None or self._made[0] != key:
            self._made = key, segment, offer_of(segment, index, header)
        return self._made[2]

    def let_go(self) -> None:
        """Keep nothing of a segment that was given back."""
        if self._made is not None and self._made[1].fd < 0:
            self._made = None

    def accepted(self, node: str) -> None:
        """The node has computed a snapshot."""
        peer = self._peers.setdefault(node, _Peer())
        peer.failed = peer.declined = peer.leave_out = 0

    def declined(self, node: str, reason: str) -> str:
        """The node wants the image, and may take gradients next time; returns a new reason, for the log."""
        peer = self._peers.setdefault(node, _Peer())
        peer.leave_out = max(peer.leave_out, 2**peer.declined - 1)
        peer.declined = min(peer.declined + 1, _DECLINED_MAX)
        news = "" if reason == peer.said else reason
        peer.said = reason
        return news

    def failed(self, node: str, key: SnapshotKey, reason: str) -> str:
        """The node could not compute a snapshot, which goes whole now; returns a new reason, for the log."""
        peer = self._peers.setdefault(node, _Peer())
        peer.whole = key
        peer.failed += 1
        peer.leave_out = min(2**peer.failed, _LEFT_OUT_MAX)
        kind = reason.partition(":")[0]  # what follows names a tensor
        news = "" if kind == peer.said else reason
        peer.said = kind
        return news


def offer_of(segment: Segment, index: int, header: SlotHeader) -> GradientOffer | None:
    """The gradients behind an image, if there are any."""
    slot = slot_view(segment.buffer, segment.geometry, index)
    names = {"iteration": header.iteration, "sequence": header.sequence}
    try:
        block = read_block(slot, header.image_len, **names)
    except ImageError:  # the image is there all the same
        return None
    return None if block is None else GradientOffer(slot, header.image_len, block)


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
