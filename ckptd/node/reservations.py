"""Segments that trainers ask for (docs/replication.md §7).

Empty ones, ones filled from other nodes, and copies of what other ranks have. On the daemon's loop thread;
the answer follows when the memory is there (`SegmentMaker`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ckptd.core.durable_experts import have_gaps, slots_with_old_copies
from ckptd.core.recovery.held import STORE_NODE
from ckptd.core.sessions import AttachWish, RankKey, TrainerSession
from ckptd.core.slots.segment_format import SegmentDescriptor, decode_descriptor, unpack_slot_header
from ckptd.core.snapshot_policy import PolicyKind
from ckptd.errors import SegmentError
from ckptd.holdings import policy_of
from ckptd.memory.segment_file import Segment
from ckptd.node.peering import Peering
from ckptd.node_context import NodeContext
from ckptd.restore.fetches import FoundDescriptor
from ckptd.transport import messages as m
from ckptd.transport.messages import RefusalCode
from ckptd.units import format_bytes

Answer = Callable[[m.Reply], None]

_GONE = "the nodes that held it are gone: start again, the ranks then plan anew"
_PLAN_ANEW = "a node reports what cannot be true: see `ckptctl peers`, and start again"


@dataclass(frozen=True, slots=True)
class _Request:
    """A trainer's request for snapshots, and how to answer it."""

    session: TrainerSession
    message: m.Fetch
    answer: Answer

    @property
    def is_copy(self) -> bool:
        """Whether it is for reading what a rank has, and not for the trainer's own ring."""
        return bool(self.message.kind)

    @property
    def source(self) -> RankKey:
        """The rank whose segment is fetched."""
        key = self.session.key
        return RankKey(key.job, key.run, self.message.rank) if self.is_copy else key

    @property
    def image_lens(self) -> list[int]:
        """The lengths of the images whose header can be read."""
        return [h.image_len for p in self.message.pieces if (h := unpack_slot_header(p.header)) is not None]

    def refuse(self, code: RefusalCode, text: str, hint: str = "") -> None:
        self.answer(m.Refused(code, text, hint))


class Reservations:
    """Lays out segments for attached ranks, has them made and filled, and answers.

    Args:
        attached: whether a session has not ended meanwhile.
    """

    def __init__(
        self, node: NodeContext, peering: Peering, *, attached: Callable[[TrainerSession], bool]
    ) -> None:
        self._store, self._events = node.store, node.events
        self._peering, self._maker, self._fetches = peering, peering.maker, peering.fetches
        self._attached = attached

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
        answered = partial(_answer_segment, answer)
        return self._make(session, descriptor, message.num_slots, message.slot_bytes, answered, answer)

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
        """Begin to make the next generation of a rank; ``made`` or a refusal follows, or one is returned.

        Args:
            final: whether to report a refusal: less is not tried afterwards.
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
        num_slots, slot_bytes = segment.geometry.num_slots, segment.geometry.slot_bytes
        locked = ", locked in memory" if segment.mlocked else ""
        what = f"{segment.key} generation {segment.generation}"
        text = f"{what}: {num_slots} slots of {format_bytes(slot_bytes)}{locked}"
        self._events.add("info", "reserved", text, segment.key)
        made(segment)

    def fetch(self, session: TrainerSession, message: m.Fetch, answer: Answer) -> m.Reply | None:
        """Make a segment like that of the source, and begin to fill it; answers as `reserve` does.

        Without a ``kind`` in the message it is the next generation of the rank. With one, it is a
        copy that only this rank reads, of what another rank of the run has.
        """
        request = _Request(session, message, answer)
        if (wrong := _bad_request(request)) is not None:
            return m.Refused(RefusalCode.BAD_MESSAGE, wrong)
        self._peering.neighbours.meet(message.cards)
        sources = message.pieces[0].sources
        self._fetches.find_descriptor(request.source, sources, partial(self._described, request))
        return None

    def _described(self, request: _Request, found: FoundDescriptor | str) -> None:
        if isinstance(found, str):
            request.refuse(RefusalCode.NOT_FOUND, found, _GONE)
            return
        if not request.is_copy and not found.descriptor.holds_snapshots:
            text = f"the segment to be fetched holds {found.descriptor.kind}, not snapshots"
            request.refuse(RefusalCode.BAD_MESSAGE, text)
            return
        if request.is_copy and (wrong := _unlike(found.descriptor, request)) is not None:
            request.refuse(RefusalCode.BAD_MESSAGE, wrong, _PLAN_ANEW)
            return
        images = request.image_lens
        if not all(0 < length <= found.slot_bytes for length in images):
            text = f"images of {min(images)} to {max(images)} bytes, slots of {found.slot_bytes} bytes"
            request.refuse(RefusalCode.BAD_MESSAGE, text, _PLAN_ANEW)
            return
        if request.is_copy:
            self._make_copy(request, found.descriptor, len(images), max(images))
        else:
            self._make_generation(request, found)

    def _make_generation(self, request: _Request, found: FoundDescriptor) -> None:
        """As many slots as the source has; on a node with less memory, as few as will do."""
        least = _slots_for(request.message.pieces, found.descriptor)
        make = partial(
            self._make,
            request.session,
            found.descriptor,
            slot_bytes=found.slot_bytes,
            made=partial(self._begin_fetch, request),
            answer=request.answer,
        )
        refused = None
        if found.num_slots > least:
            refused = make(num_slots=found.num_slots, final=False)
        if found.num_slots <= least or refused is not None:
            refused = make(num_slots=least)
        if refused is not None:
            request.answer(refused)

    def _begin_fetch(self, request: _Request, segment: Segment) -> None:
        self._fetches.fetch(segment, request.message.pieces)
        _answer_segment(request.answer, segment)

    def _make_copy(
        self, request: _Request, descriptor: SegmentDescriptor, num_slots: int, slot_bytes: int
    ) -> None:
        copies = self._fetches.copies
        try:
            plan = copies.plan(request.session.wish, descriptor, num_slots, slot_bytes)
        except ValueError as error:
            request.refuse(RefusalCode.BAD_MESSAGE, str(error))
            return
        what = f"{num_slots} slots of {format_bytes(slot_bytes)} to read what {request.source} has"
        made = partial(self._copy_made, request, plan.number)
        refusal = self._maker.make(plan, what=what, made=made, refused=request.answer)
        if refusal is not None:
            request.answer(refusal)

    def _copy_made(self, request: _Request, number: int, segment: Segment) -> None:
        reader = request.session.key
        if not self._attached(request.session):  # nobody would ever drop it
            self._maker.give_back(segment)
            request.refuse(RefusalCode.NO_SESSION, f"{reader} has left meanwhile")
            return
        size = format_bytes(segment.file_bytes)
        text = f"{reader}: a copy of {request.source} ({request.message.kind}, {size})"
        self._events.add("info", "reserved", text, reader)
        self._fetches.fetch_copy(reader, number, segment, request.message.pieces)
        geometry = segment.geometry
        info = m.SegmentInfo(str(segment.path), number, geometry.slot_bytes, geometry.num_slots)
        request.answer(m.Reserved(info, segment.mlocked))

    def fetch_state(self, session: TrainerSession, message: m.GetFetch) -> m.Reply:
        """The progress of a fetch."""
        job = self._fetches.of(session.key, message.generation)
        if job is None:
            text = f"nothing is fetched into generation {message.generation} of {session.key}"
            return m.Refused(RefusalCode.NOT_FOUND, text, "the daemon was restarted: start again")
        return job.state


def segment_info(segment: Segment) -> m.SegmentInfo:
    """Where a trainer finds its segment."""
    geometry = segment.geometry
    return m.SegmentInfo(str(segment.path), segment.generation, geometry.slot_bytes, geometry.num_slots)


def _slots_for(pieces: Sequence[m.FetchPiece], descriptor: SegmentDescriptor) -> int:
    """As few slots as will do: these snapshots, one that is filled and one that is digested.

    Durable images of several checkpoints do not give way one by one to new snapshots, but may all be needed
    until a whole window is there.
    """
    headers = [unpack_slot_header(piece.header) for piece in pieces]
    images = sorted((header.iteration, header.sequence) for header in headers if header is not None)
    if have_gaps(images) and policy_of(descriptor) == PolicyKind.PARTIAL:
        return max(len(pieces) + 2, slots_with_old_copies(descriptor.window))
    return len(pieces) + 2


def _answer_segment(answer: Answer, segment: Segment) -> None:
    answer(m.Reserved(segment_info(segment), segment.mlocked))


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
    for name, found, attached in pairs:
        if found != attached:
            return f"the descriptor says {name} {found!r}, the session attached with {attached!r}"
    return None


def _bad_request(request: _Request) -> str | None:
    """Why a fetch is refused: a trainer reads what ranks of its run have, all pieces of one rank."""
    message, world_size = request.message, request.session.wish.world_size
    if request.is_copy and not 0 <= message.rank < world_size:
        return f"rank {message.rank} of a run with {world_size} ranks"
    if len(request.image_lens) < len(message.pieces):
        return "a slot header in the request is damaged"
    source = request.source
    files, stored = f"{source.job}~{source.run}~r{source.rank}~g", f"{source.job}/{source.run}/"
    for piece in message.pieces:
        for each in piece.sources:
            if not each.segment.startswith(stored if each.node == STORE_NODE else files):
                return f"{each.segment} on {each.node} is no segment of {source}"
    return None


def _unlike(descriptor: SegmentDescriptor, request: _Request) -> str | None:
    """How the segment that was found differs from the one that was asked for, if it does."""
    wish, source = request.session.wish, request.source
    pairs = (
        ("job", descriptor.job, source.job),
        ("run", descriptor.run, source.run),
        ("rank", descriptor.rank, source.rank),
        ("kind", descriptor.kind, request.message.kind),
        ("world_size", descriptor.world_size, wish.world_size),
        ("layout_version", descriptor.layout_version, wish.layout_version),
    )
    for name, found, wanted in pairs:
        if found != wanted:
            return f"the segment to be read has {name} {found!r}, the request is for {wanted!r}"
    return None
