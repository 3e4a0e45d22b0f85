"""Segments that trainers ask for: empty ones, and ones that are filled from other nodes
(docs/replication.md §7).

On the daemon's loop thread; the answer follows when the memory is there (`SegmentMaker`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ckptd.core.sessions import AttachWish, TrainerSession
from ckptd.core.slots.segment_format import SegmentDescriptor, decode_descriptor, unpack_slot_header
from ckptd.errors import SegmentError
from ckptd.event_log import EventLog
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_maker import SegmentMaker
from ckptd.memory.segment_store import SegmentStore
from ckptd.node.peering import Peering
from ckptd.restore.descriptor_search import FoundDescriptor
from ckptd.transport import messages as m
from ckptd.transport.messages import RefusalCode
from ckptd.units import format_bytes

__all__ = ["Answer", "Reservations", "segment_info"]

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
