"""Bringing here what another rank of the run has, for a trainer of this node to read
(docs/replication.md §7).

The same pieces, jobs and messages as for a rank's own snapshots; what is different is where they
go: into a copy that is nobody's memory but its reader's (`ckptd.restore.remote_copy_files`).
Nothing in here depends on the kind of the segments. On the daemon's loop thread; the answer follows
when the memory is there (`SegmentMaker`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from ckptd.core.sessions import RankKey, TrainerSession
from ckptd.core.slots.segment_format import SegmentDescriptor, unpack_slot_header
from ckptd.event_log import EventLog
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_maker import SegmentMaker
from ckptd.restore.descriptor_search import FoundDescriptor
from ckptd.restore.fetches import Fetches
from ckptd.transport import messages as m
from ckptd.transport.messages import RefusalCode
from ckptd.units import format_bytes

__all__ = ["ForReading"]

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
