"""Segments that trainers ask for: empty ones, and ones that are filled from other nodes
(docs/replication.md §7).

On the daemon's loop thread; the answer follows when the memory is there (`SegmentMaker`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from ckptd.core.sessions import AttachWish, RankKey, TrainerSession
from ckptd.core.slots.segment_format import SegmentDescriptor, decode_descriptor, unpack_slot_header
from ckptd.errors import SegmentError
from ckptd.event_log import EventLog
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentMaker, SegmentStore
from ckptd.node.peering import Peering
from ckptd.restore.fetches import Fetches
from ckptd.restore.puller import FoundDescriptor
from ckptd.transport.control import messages as m
from ckptd.transport.control.messages import RefusalCode
from ckptd.units import format_bytes

__all__ = ["Answer", "ForReading", "Reservations", "segment_info"]


Answer = Callable[[m.Reply], None]


class Reservations:
    """Lays out segments for attached ranks, has them made and filled, and answers."""

    def __init__(self, store: SegmentStore, maker: SegmentMaker, events: EventLog, peering: Peering) -> None:
        self._store, self._maker, self._events, self._peering = store, maker, events, peering

    def reserve(
        self, session: TrainerSession, message: m.Reserve | m.ReserveBeside, answer: Answer
    ) -> m.Reply | None:
        """Begin to make a segment for a rank; the answer follows later, or a refusal is returned."""
        try:
            descriptor = decode_descriptor(message.descriptor)
        except SegmentError as error:
            return m.Refused(RefusalCode.BAD_DESCRIPTOR, str(error))
        if descriptor.holds_snapshots == isinstance(message, m.ReserveBeside):
            text = f"{type(message).__name__} with the descriptor of a segment for {descriptor.kind}"
            return m.Refused(RefusalCode.BAD_DESCRIPTOR, text)
        return self._make(
            session,
            descriptor,
            message.num_slots,
            message.slot_bytes,
            lambda segment: answer(m.Reserved(segment_info(segment), segment.mlocked)),
            answer,
        )

    def _make(
        self,
        session: TrainerSession,
        descriptor: SegmentDescriptor,
        num_slots: int,
        slot_bytes: int,
        made: Callable[[Segment], None],
        answer: Answer,
        *,
        final: bool = True,
    ) -> m.Reply | None:
        """Begin to make the next generation of a rank; ``made`` or a refusal follows later, or one
        is returned.

        Args:
            final: whether to tell of a refusal, because less is not asked for afterwards.
        """
        try:
            plan = self._store.plan(descriptor, num_slots, slot_bytes)
        except ValueError as error:
            return m.Refused(RefusalCode.BAD_DESCRIPTOR, str(error))
        if (wrong := _contradiction(descriptor, session.wish)) is not None:
            return m.Refused(RefusalCode.BAD_DESCRIPTOR, wrong)
        what = f"{num_slots} slots of {format_bytes(slot_bytes)}"
        return self._maker.make(plan, what=what, made=partial(self._made, made), refused=answer, final=final)

    def _made(self, made: Callable[[Segment], None], segment: Segment) -> None:
        self._events.add(
            "info",
            "reserved",
            f"{segment.key} generation {segment.generation}: {segment.geometry.num_slots} slots of "
            f"{format_bytes(segment.geometry.slot_bytes)}"
            f"{', locked in memory' if segment.mlocked else ''}",
            segment.key,
        )
        made(segment)

    def fetch(self, session: TrainerSession, message: m.Fetch, answer: Answer) -> m.Reply | None:
        """Make a segment like the one that the holders have, and begin to fill it; answers as
        `reserve` does.
        """
        images = [h.image_len for p in message.pieces if (h := unpack_slot_header(p.header))]
        if len(images) < len(message.pieces):
            return m.Refused(RefusalCode.BAD_MESSAGE, "a slot header in it is damaged")

        def described(found: FoundDescriptor | str) -> None:
            if isinstance(found, str):
                hint = "the nodes that held it are gone: start again, the ranks then plan anew"
                answer(m.Refused(RefusalCode.NOT_FOUND, found, hint))
                return
            if not found.descriptor.holds_snapshots:
                text = f"what is to be fetched holds {found.descriptor.kind}, not snapshots"
                answer(m.Refused(RefusalCode.BAD_MESSAGE, text))
                return
            if not all(0 < image_len <= found.slot_bytes for image_len in images):
                text = f"images of {min(images)} to {max(images)} bytes, slots of {found.slot_bytes}"
                hint = "a node tells what cannot be: see `ckptctl peers`, and plan anew"
                answer(m.Refused(RefusalCode.BAD_MESSAGE, f"{text} bytes", hint))
                return
            least = len(message.pieces) + 2
            make = partial(
                self._make,
                session,
                found.descriptor,
                slot_bytes=found.slot_bytes,
                made=lambda segment: self._begin_fetch(segment, message, answer),
                answer=answer,
            )
            # As much room as the holder has, or, on a node with less memory, as little as will do.
            refused = None
            if found.num_slots > least:
                refused = make(num_slots=found.num_slots, final=False)
            if found.num_slots <= least or refused is not None:
                refused = make(num_slots=least)
            if refused is not None:
                answer(refused)

        self._peering.neighbours.meet(message.cards)
        self._peering.fetches.find_descriptor(session.key, message.pieces[0].sources, described)
        return None

    def _begin_fetch(self, segment: Segment, message: m.Fetch, answer: Answer) -> None:
        self._peering.fetches.fetch(segment, message.pieces)
        answer(m.Reserved(segment_info(segment), segment.mlocked))

    def fetch_state(self, session: TrainerSession, message: m.GetFetch) -> m.Reply:
        """How far a fetch is."""
        job = self._peering.fetches.of(session.key, message.generation)
        if job is None:
            text = f"nothing is fetched into generation {message.generation} of {session.key}"
            return m.Refused(RefusalCode.NOT_FOUND, text, "the daemon was restarted: start again")
        return job.state


def segment_info(segment: Segment) -> m.SegmentInfo:
    """Where a trainer finds its segment."""
    return m.SegmentInfo(
        path=str(segment.path),
        generation=segment.generation,
        slot_bytes=segment.geometry.slot_bytes,
        num_slots=segment.geometry.num_slots,
    )


def _contradiction(descriptor: SegmentDescriptor, wish: AttachWish) -> str | None:
    """How a segment's descriptor differs from what its trainer attached as, if it does."""
    key = wish.key
    pairs = (
        ("job", descriptor.job, key.job),
        ("run", descriptor.run, key.run),
        ("rank", descriptor.rank, key.rank),
        ("world_size", descriptor.world_size, wish.world_size),
        ("topology", descriptor.topology, wish.topology),
        ("layout_version", descriptor.layout_version, wish.layout_version),
    )
    for name, told, attached in pairs:
        if told != attached:
            return f"the descriptor says {name} {told!r}, the session attached with {attached!r}"
    return None


_GONE = "the nodes that held it are gone: start again, the ranks then plan anew"
_PLAN_ANEW = "a node tells what cannot be: see `ckptctl peers`, and plan anew"


@dataclass(frozen=True, slots=True)
class _Request:
    """What a trainer asked for, and how to answer it."""

    session: TrainerSession
    message: m.Fetch
    answer: Callable[[m.Reply], None]

    @property
    def whose(self) -> RankKey:
        """The rank that is read."""
        return RankKey(self.session.key.job, self.session.key.run, self.message.rank)

    def refuse(self, code: RefusalCode, text: str, hint: str = "") -> None:
        """There will be no copy."""
        self.answer(m.Refused(code, text, hint))


class ForReading:
    """Has copies made, and begins to fill them.

    Args:
        meet: connects to nodes.
        attached: whether a session has not ended meanwhile.
    """

    def __init__(
        self,
        maker: SegmentMaker,
        fetches: Fetches,
        events: EventLog,
        *,
        meet: Callable[[Iterable[m.NodeCard]], None],
        attached: Callable[[TrainerSession], bool],
    ) -> None:
        self._maker, self._fetches, self._copies = maker, fetches, fetches.copies
        self._events, self._meet, self._attached = events, meet, attached

    def begin(
        self, session: TrainerSession, message: m.Fetch, answer: Callable[[m.Reply], None]
    ) -> m.Reply | None:
        """Find out how the segments look of which these are pieces, then make a copy; the answer
        follows, or a refusal is returned.
        """
        request = _Request(session, message, answer)
        if (wrong := _out_of_place(request)) is not None:
            return m.Refused(RefusalCode.BAD_MESSAGE, wrong)
        self._meet(message.cards)
        sources = message.pieces[0].sources
        self._fetches.find_descriptor(request.whose, sources, partial(self._described, request))
        return None

    def _described(self, request: _Request, found: FoundDescriptor | str) -> None:
        if isinstance(found, str):
            request.refuse(RefusalCode.NOT_FOUND, found, _GONE)
            return
        if (wrong := _unlike(found.descriptor, request)) is not None:
            request.refuse(RefusalCode.BAD_MESSAGE, wrong, _PLAN_ANEW)
            return
        images = _image_lens(request.message)
        if not all(0 < length <= found.slot_bytes for length in images):
            sizes = f"images of {min(images)} to {max(images)} bytes"
            text = f"{sizes}, slots of {found.slot_bytes} bytes"
            request.refuse(RefusalCode.BAD_MESSAGE, text, _PLAN_ANEW)
            return
        self._make(request, found.descriptor, len(images), max(images))

    def _make(
        self, request: _Request, descriptor: SegmentDescriptor, num_slots: int, slot_bytes: int
    ) -> None:
        try:
            plan = self._copies.plan(request.session.wish, descriptor, num_slots, slot_bytes)
        except ValueError as error:
            request.refuse(RefusalCode.BAD_MESSAGE, str(error))
            return
        what = f"{num_slots} slots of {format_bytes(slot_bytes)} to read what {request.whose} has"
        made = partial(self._made, request, plan.number)
        refusal = self._maker.make(plan, what=what, made=made, refused=request.answer)
        if refusal is not None:
            request.answer(refusal)

    def _made(self, request: _Request, number: int, segment: Segment) -> None:
        reader = request.session.key
        if not self._attached(request.session):  # nobody would ever drop it
            self._maker.give_back(segment)
            request.refuse(RefusalCode.NO_SESSION, f"{reader} has left meanwhile")
            return
        size = format_bytes(segment.file_bytes)
        text = f"{reader}: a copy of {request.whose} ({request.message.kind}, {size})"
        self._events.add("info", "reserved", text, reader)
        self._fetches.fetch_for_reading(reader, number, segment, request.message.pieces)
        geometry = segment.geometry
        info = m.SegmentInfo(str(segment.path), number, geometry.slot_bytes, geometry.num_slots)
        request.answer(m.Reserved(info, segment.mlocked))


def _out_of_place(request: _Request) -> str | None:
    """Why this cannot be asked for, if so: a trainer reads what ranks of its own run have, and all
    pieces are of one rank.
    """
    message, world_size = request.message, request.session.wish.world_size
    if not 0 <= message.rank < world_size:
        return f"rank {message.rank} of a run with {world_size} ranks"
    if len(_image_lens(message)) < len(message.pieces):
        return "a slot header in it is damaged"
    whose = request.whose
    names = f"{whose.job}~{whose.run}~r{whose.rank}~g"
    for piece in message.pieces:
        for source in piece.sources:
            if not source.segment.startswith(names):
                return f"{source.segment} on {source.node} is no segment of {whose}"
    return None


def _unlike(told: SegmentDescriptor, request: _Request) -> str | None:
    """How the segment that was found differs from what was asked for, if it does."""
    wish, whose = request.session.wish, request.whose
    pairs = (
        ("job", told.job, whose.job),
        ("run", told.run, whose.run),
        ("rank", told.rank, whose.rank),
        ("kind", told.kind, request.message.kind),
        ("world_size", told.world_size, wish.world_size),
        ("layout_version", told.layout_version, wish.layout_version),
    )
    for name, found, wanted in pairs:
        if found != wanted:
            return f"what is to be read has {name} {found!r}, asked for was {wanted!r}"
    return None


def _image_lens(message: m.Fetch) -> list[int]:
    """Of the pieces whose header can be read."""
    return [h.image_len for p in message.pieces if (h := unpack_slot_header(p.header)) is not None]
