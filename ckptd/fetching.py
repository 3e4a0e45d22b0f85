"""Bringing a rank's snapshots here from whoever holds them (docs/replication.md §7).

A `FetchJob` lives on the daemon's loop thread. Pieces come in the order in which replay needs them; the next one begins while the
last parts of the one before are under way, so links stay busy. Each is pulled in parts from all its holders (`ckptd.striping`),
verified as a whole on a worker, and sealed. A piece that nobody can deliver ends the job with a reason; what was
sealed before stays.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ckptd import locks
from ckptd.errors import SegmentError
from ckptd.events import EventLog
from ckptd.pages import copy_bytes
from ckptd.peer_link import PeerLink
from ckptd.ring import SlotState
from ckptd.segment_format import (
    SegmentDescriptor,
    SlotHeader,
    decode_descriptor,
    set_slot_state,
    slot_lock_byte,
    unpack_slot_header,
    write_slot_header,
)
from ckptd.segments import Segment
from ckptd.sessions import RankKey
from ckptd.storage.image import DigestMismatch, ImageError, ImageView, MapFunction, verify
from ckptd.striping import Cancel, Part, Pull, Stripes
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import FetchPiece, FetchSource, FetchState
from ckptd.transport.verbs import Completion, Fault, RegionKey, Transfer
from ckptd.units import format_bytes
from ckptd.workers import Workers

__all__ = ["DescriptorSearch", "FetchJob", "FoundDescriptor", "LocalSource"]

logger = logging.getLogger(__name__)

_OPEN_PIECES = 2
_PART_DEADLINE_S = 30.0

# Finds a segment of this node by name, for pieces that lie here already.
LocalSource = Callable[[str], Segment | None]


@dataclass(frozen=True, slots=True)
class FoundDescriptor:
    """How to make a segment like the one that is fetched."""

    descriptor: SegmentDescriptor
    num_slots: int
    slot_bytes: int


class DescriptorSearch:
    """Asks the holders of a snapshot, one after the other, for their segment's descriptor."""

    def __init__(
        self,
        node: str,
        key: RankKey,
        sources: Sequence[FetchSource],
        link: Callable[[str], PeerLink | None],
        local: LocalSource,
        found: Callable[[FoundDescriptor | str], None],
    ) -> None:
        self._node, self._key, self._link, self._local = node, key, link, local
        self._found = found
        self._left = list(sources)
        self._reasons: list[str] = []
        self._next()

    def _next(self) -> None:
        while self._left:
            source = self._left.pop(0)
            segment = self._local(source.segment) if source.node == self._node else None
            link = self._link(source.node)
            if segment is not None:
                geometry = segment.geometry
                self._found(
                    FoundDescriptor(segment.descriptor, geometry.num_slots, geometry.slot_bytes)
                )
                return
            if link is not None:
                link.ask(
                    p.GetDescriptor(self._key.job, self._key.run, source.segment),
                    p.Descriptor,
                    partial(self._told, source),
                    partial(self._refused, source.node),
                )
                return
            self._reasons.append(f"{source.node}: its address is not known")
        self._found(f"no holder of {self._key} answers ({'; '.join(self._reasons)})")

    def _told(self, source: FetchSource, reply: p.Descriptor) -> None:
        try:
            descriptor = decode_descriptor(reply.descriptor)
        except SegmentError as error:
            self._not_told(source.node, str(error))
            return
        self._found(FoundDescriptor(descriptor, reply.num_slots, reply.slot_bytes))

    def _refused(self, node: str, _code: str, reason: str) -> None:
        self._not_told(node, reason)

    def _not_told(self, node: str, reason: str) -> None:
        self._reasons.append(f"{node}: {reason}")
        self._next()


@dataclass(slots=True, eq=False)
class _Flight:
    """One transfer of a part."""

    transfer: Transfer | None = None


@dataclass(slots=True, eq=False)
class _Piece:
    index: int
    header: SlotHeader
    sources: Sequence[FetchSource]
    stripes: Stripes | None = None
    regions: dict[str, RegionKey] = field(default_factory=dict)
    opening: int = 0
    flights: dict[tuple[str, int], _Flight] = field(default_factory=dict)
    # Cancelled, but their last bytes may still be landing: nothing is verified before they have ended.
    draining: set[_Flight] = field(default_factory=set)
    fd: int = -1
    sealed: bool = False
    verifying: bool = False


class FetchJob:
    """Fills slot i of ``segment`` with piece i.

    Args:
        link: the connection to a node, None if its address is not known.
        local: segments of this very node.
        finished: called once, with "" or the reason of the failure.
        verifiers: workers that digest; `map_fn`, if given, spreads one image over threads.
    """

    def __init__(
        self,
        segment: Segment,
        pieces: Sequence[FetchPiece],
        *,
        node: str,
        link: Callable[[str], PeerLink | None],
        local: LocalSource,
        verifiers: Workers,
        map_fn: MapFunction | None,
        events: EventLog,
        clock: Callable[[], float],
        finished: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.segment = segment
        self._node, self._link, self._local = node, link, local
        self._verifiers, self._map, self._events = verifiers, map_fn, events
        self._clock, self._finished = clock, finished
        self._pieces: list[_Piece] = []
        for index, piece in enumerate(pieces):
            header = unpack_slot_header(piece.header)
            assert header is not None, "checked by who made the job"
            self._pieces.append(_Piece(index, header, piece.sources))
        self.reason = ""
        self.over = False
        self._by_node: dict[str, int] = {}
        self._began_s = clock()

    def start(self) -> None:
        """Begin; afterwards everything happens in callbacks and `tick`."""
        self._go_on()

    @property
    def state(self) -> FetchState:
        """For the trainer that waits."""
        by_node = dict(self._by_node)
        for piece in self._pieces:
            if piece.stripes is not None and not piece.sealed:
                for name, size in piece.stripes.bytes_by_holder.items():
                    by_node[name] = by_node.get(name, 0) + size
        word = "running" if not self.over else "failed" if self.reason else "done"
        return FetchState(
            state=word,
            reason=self.reason,
            pieces_done=sum(piece.sealed for piece in self._pieces),
            bytes_done=sum(by_node.values()),
            bytes_total=sum(piece.header.image_len for piece in self._pieces),
            by_node=by_node,
        )

    def tick(self) -> None:
        """Take over parts from holders that became slow."""
        self._go_on()

    def peer_lost(self, node: str) -> None:
        """Its parts are asked of others at once."""
        for piece in self._pieces:
            if piece.stripes is not None and node in piece.stripes.holders_left():
                self._cancel(piece, node, piece.stripes.lose(node))
        self._go_on()

    def close(self, reason: str = "cancelled") -> None:
        """End early; what is not sealed is freed."""
        if not self.over:
            self._end(reason)

    # -- pieces ----------------------------------------------------------------------------------

    def _go_on(self) -> None:
        if self.over or self._given_back():
            return
        unsealed = [piece for piece in self._pieces if not piece.sealed]
        if not unsealed:
            self._end("")
            return
        for piece in unsealed[:_OPEN_PIECES]:
            self._push(piece)

    def _push(self, piece: _Piece) -> None:
        """The next that can be done for a piece, unless what was done for another has ended the job."""
        if self.over:
            return
        if piece.stripes is None:
            self._open(piece)
        elif not piece.verifying:
            self._advance(piece)

    def _given_back(self) -> bool:
        """Whether the trainer dropped the segment meanwhile (its ranks plan anew): then the job is over."""
        if self.segment.fd >= 0 and self.segment.in_place():
            return False
        self._end("its memory was given back")
        return True

    def _open(self, piece: _Piece) -> None:
        """Lock the slot, and ask every holder for a region to read from."""
        piece.stripes = Stripes(piece.header.image_len, [s.node for s in piece.sources])
        piece.fd = os.open(self.segment.path, os.O_RDWR | os.O_CLOEXEC)
        if not locks.try_lock(piece.fd, slot_lock_byte(piece.index), exclusive=True):
            self._end(f"slot {piece.index} of {self.segment.path.name} is locked")
            return
        filling = replace(piece.header, state=SlotState.FILLING, writer_pid=os.getpid())
        write_slot_header(self.segment.buffer, self.segment.geometry, piece.index, filling)
        if self._copy_local(piece):
            return
        self._ask_sources(piece)

    def _copy_local(self, piece: _Piece) -> bool:
        """A replica on this very node needs no network; false if there is none (or the workers are full)."""
        for source in piece.sources:
            segment = self._local(source.segment) if source.node == self._node else None
            if segment is None:
                continue
            target = self.segment.image(piece.index, piece.header)
            piece.verifying = self._verifiers.submit(
                partial(_copy_slot, segment, source.slot, piece.header, target, self._map),
                partial(self._copied, piece, source),
                lambda error: self._end(f"copying a replica failed: {error!r}"),
            )
            return piece.verifying
        return False

    def _copied(
        self, piece: _Piece, source: FetchSource, wrong: Sequence[tuple[int, int]] | None
    ) -> None:
        piece.verifying = False
        if self.over or self._given_back():
            return
        assert piece.stripes is not None
        if wrong:
            self._lose(piece, source.node, "the copy on this node is damaged or gone")
            self._ask_sources(piece)
            self._go_on()
            return
        for part in piece.stripes.parts:
            piece.stripes.claim(source.node, part)
        self._seal(piece)

    def _ask_sources(self, piece: _Piece) -> None:
        piece.opening = len(piece.sources)
        for source in piece.sources:
            self._open_source(piece, source)

    def _open_source(self, piece: _Piece, source: FetchSource) -> None:
        link = self._link(source.node)
        if link is None or source.node == self._node:
            self._no_source(piece, source, "its address is not known" if link is None else "gone")
            return
        told = self.segment.descriptor
        message = p.OpenRead(told.job, told.run, source.segment, source.slot, piece.header.sequence)

        def opened(reply: p.ReadOpened) -> None:
            piece.opening -= 1
            if self.over or piece.sealed:
                link.tell(p.CloseRead(reply.region))  # too late
                return
            header = unpack_slot_header(reply.header)
            wanted = piece.header
            if (
                header is None
                or header.header_digest != wanted.header_digest
                or reply.length != wanted.image_len
            ):
                self._lose(piece, source.node, "it holds something else")
            else:
                key = RegionKey(reply.region, reply.token, reply.length)
                piece.regions[source.node] = key
            self._go_on()

        link.ask(
            message,
            p.ReadOpened,
            opened,
            lambda code, reason: self._no_source(piece, source, reason),
        )

    def _open_again(self, piece: _Piece, node: str) -> None:
        """Ask for a new region: who just noticed that we were restarted ended all our reads, those of this life, too."""
        assert piece.stripes is not None
        if node in piece.stripes.holders_left() and piece.regions.pop(node, None) is not None:
            piece.opening += 1
            self._open_source(piece, next(s for s in piece.sources if s.node == node))

    def _no_source(self, piece: _Piece, source: FetchSource, reason: str) -> None:
        piece.opening -= 1
        self._lose(piece, source.node, reason)
        self._go_on()

    def _lose(self, piece: _Piece, node: str, reason: str) -> None:
        assert piece.stripes is not None
        if node in piece.stripes.holders_left():
            self._cancel(piece, node, piece.stripes.lose(node))
            self._events.add(
                "warning",
                "fetch_source_lost",
                f"iteration {piece.header.iteration} from {node}: {reason}",
            )

    # -- parts -----------------------------------------------------------------------------------

    def _advance(self, piece: _Piece) -> None:
        stripes = piece.stripes
        assert stripes is not None
        if stripes.complete:
            if not piece.draining:
                self._verify(piece)
            return
        if stripes.failed:
            self._end(
                f"iteration {piece.header.iteration}: no holder is left of "
                f"{', '.join(s.node for s in piece.sources)}"
            )
            return
        for effect in stripes.next_pulls(self._clock(), ready=piece.regions):
            if isinstance(effect, Cancel):
                self._cancel(piece, effect.holder, [effect.part])
            else:
                self._pull(piece, effect)

    def _pull(self, piece: _Piece, pull: Pull) -> None:
        link = self._link(pull.holder)
        assert link is not None
        part = pull.part
        image = self.segment.image(piece.index, piece.header)

        flight = _Flight()

        def done(completion: Completion) -> None:
            if piece.flights.get((pull.holder, part.index)) is not flight:
                self._drained(piece, flight)
                return  # cancelled meanwhile
            del piece.flights[pull.holder, part.index]
            assert piece.stripes is not None
            if completion.ok:
                piece.stripes.delivered(pull.holder, part, self._clock())
            else:
                logger.info("part %d from %s: %s", part.index, pull.holder, completion.detail)
                self._events.count(f"fetch.{completion.fault}")
                piece.stripes.failed_part(pull.holder, part)
                if completion.fault in (Fault.REGION, Fault.ACCESS):
                    self._open_again(piece, pull.holder)
            self._go_on()

        piece.flights[pull.holder, part.index] = flight
        flight.transfer = link.get(
            piece.regions[pull.holder],
            image[part.start : part.stop],
            offset=part.start,
            deadline_s=_PART_DEADLINE_S,
            done=done,
        )

    def _cancel(self, piece: _Piece, node: str, parts: Sequence[Part]) -> None:
        for part in parts:
            flight = piece.flights.pop((node, part.index), None)
            if flight is not None and flight.transfer is not None:
                piece.draining.add(flight)
                flight.transfer.cancel()

    def _drained(self, piece: _Piece, flight: _Flight) -> None:
        """The last byte of a cancelled transfer has landed."""
        piece.draining.discard(flight)
        if not self.over:
            self._go_on()
        elif not piece.draining:
            self._let_go(piece)

    # -- the end of a piece ----------------------------------------------------------------------

    def _verify(self, piece: _Piece) -> None:
        piece.verifying = True
        image = self.segment.image(piece.index, piece.header)
        if not self._verifiers.submit(
            partial(_wrong_ranges, image, piece.header.header_digest, self._map),
            partial(self._verified, piece),
            lambda error: self._end(f"verifying failed: {error!r}"),
        ):
            piece.verifying = False  # the workers are full; the next tick tries again

    def _verified(self, piece: _Piece, wrong: Sequence[tuple[int, int]]) -> None:
        piece.verifying = False
        if self.over or self._given_back():
            return
        stripes = piece.stripes
        assert stripes is not None
        if wrong:
            liars = stripes.blame(wrong)
            self._events.add(
                "error",
                "fetch_damaged",
                f"iteration {piece.header.iteration} as delivered by {', '.join(liars)} does not match its "
                "digests; it is fetched from others",
            )
            self._doubt(piece, liars)
            self._go_on()
            return
        self._seal(piece)

    def _doubt(self, piece: _Piece, liars: Sequence[str]) -> None:
        """Have the holders verify what they hold: unless they quarantine it, the next plan would ask them again."""
        told = self.segment.descriptor
        for source in piece.sources:
            link = self._link(source.node)
            if source.node in liars and link is not None:
                link.tell(
                    p.DoubtSlot(
                        told.job, told.run, source.segment, source.slot, piece.header.sequence
                    )
                )

    def _seal(self, piece: _Piece) -> None:
        assert piece.stripes is not None
        write_slot_header(self.segment.buffer, self.segment.geometry, piece.index, piece.header)
        piece.sealed = True
        for name, size in piece.stripes.bytes_by_holder.items():
            self._by_node[name] = self._by_node.get(name, 0) + size
        self._let_go(piece)
        self._go_on()

    def _let_go(self, piece: _Piece) -> None:
        for node, key in piece.regions.items():
            link = self._link(node)
            if link is not None:
                link.tell(p.CloseRead(key.region))
        piece.regions.clear()
        if piece.fd >= 0:
            os.close(piece.fd)
            piece.fd = -1

    def _end(self, reason: str) -> None:
        if self.over:
            return
        self.over, self.reason = True, reason
        mapped = self._local(self.segment.path.name) is self.segment
        for piece in self._pieces:
            for node, index in list(piece.flights):
                assert piece.stripes is not None
                self._cancel(piece, node, [piece.stripes.parts[index]])
            if piece.fd >= 0 and not piece.sealed and mapped:
                set_slot_state(
                    self.segment.buffer, self.segment.geometry, piece.index, SlotState.FREE
                )
            if (
                not piece.draining
            ):  # else the slot stays locked until nothing can land in it any more
                self._let_go(piece)
        took_s = self._clock() - self._began_s
        told = self.segment.descriptor
        where = ", ".join(
            f"{format_bytes(n)} from {name}" for name, n in self._by_node.items() if n
        )
        self._events.add(
            "error" if reason else "info",
            "fetch_failed" if reason else "fetched",
            f"{told.job}/{told.run} rank {told.rank}: "
            + (reason or f"{len(self._pieces)} snapshots in {took_s:.2f} s: {where}"),
        )
        self._finished(reason)


def _copy_slot(
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
    return _wrong_ranges(target, wanted.header_digest, map_fn)


def _wrong_ranges(
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
