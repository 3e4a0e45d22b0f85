"""Bringing here what another rank of the run has, for a trainer of this node to read
(docs/replication.md §7).

The same pieces, jobs and messages as for a rank's own snapshots; what is different is where they
go: into a copy that is nobody's memory but its reader's (`ckptd.restore.remote_copy_files`).
Nothing in here depends on the kind of the segments. On the daemon's loop thread; making the memory
goes to workers, and the answer follows when it is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from ckptd.core.sessions import MemoryFacts, RankKey, TrainerSession, reject_if_too_large
from ckptd.core.slots.segment_format import SegmentDescriptor, unpack_slot_header
from ckptd.event_log import EventLog
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import CannotReserve, SegmentPlan, SegmentStore
from ckptd.restore.descriptor_search import FoundDescriptor
from ckptd.restore.fetches import Fetches
from ckptd.transport.control import messages as m
from ckptd.transport.control.messages import RefusalCode
from ckptd.units import format_bytes
from ckptd.workers import Workers

__all__ = ["ForReading"]

logger = logging.getLogger(__name__)

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
    """Admits, makes and begins to fill copies.

    Args:
        slow: workers for making memory.
        meet: connects to nodes.
        memory: its numbers, now.
        attached: whether a session has not ended meanwhile.
    """

    def __init__(
        self,
        store: SegmentStore,
        fetches: Fetches,
        events: EventLog,
        slow: Workers,
        *,
        meet: Callable[[Iterable[m.NodeCard]], None],
        memory: Callable[[], MemoryFacts],
        attached: Callable[[TrainerSession], bool],
    ) -> None:
        self._store, self._fetches, self._copies = store, fetches, fetches.copies
        self._events, self._slow = events, slow
        self._meet, self._memory, self._attached = meet, memory, attached

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
        reader = request.session.key
        try:
            number, plan = self._copies.plan(reader, descriptor, num_slots, slot_bytes)
        except ValueError as error:
            request.refuse(RefusalCode.BAD_MESSAGE, str(error))
            return
        facts = self._store.facts()
        own = sum(fact.total_bytes for fact in facts if fact.key == reader)
        what = f"{num_slots} slots of {format_bytes(slot_bytes)} to read what {request.whose} has"
        beside = f" beside {format_bytes(own)} that it has" if own else ""
        needed = own + plan.geometry.total_bytes
        rejected = reject_if_too_large(reader, needed, what + beside, facts, self._memory())
        if rejected is not None:
            self._events.add("warning", f"refused.{rejected.code}", rejected.message, reader)
            request.refuse(rejected.code, rejected.message, rejected.hint)
            return
        self._copies.promise(request.session.wish, number, plan)
        started = self._slow.submit(
            partial(self._store.build, plan),
            partial(self._built, request, number),
            partial(self._not_built, request, number, plan),
        )
        if not started:
            self._copies.cancel(reader, number)
            request.refuse(RefusalCode.IN_USE, "too many segments are being made", "try again")

    def _built(self, request: _Request, number: int, segment: Segment) -> None:
        reader = request.session.key
        if not self._attached(request.session):
            self._discard(reader, number, segment)
            request.refuse(RefusalCode.NO_SESSION, f"{reader} has left meanwhile")
            return
        self._copies.enter(reader, number, segment)
        size = format_bytes(segment.file_bytes)
        text = f"{reader}: a copy of {request.whose} ({request.message.kind}, {size})"
        self._events.add("info", "reserved", text, reader)
        self._fetches.fetch_for_reading(reader, number, segment, request.message.pieces)
        geometry = segment.geometry
        info = m.SegmentInfo(str(segment.path), number, geometry.slot_bytes, geometry.num_slots)
        request.answer(m.Reserved(info, segment.mlocked))

    def _discard(self, reader: RankKey, number: int, segment: Segment) -> None:
        """It was made for nobody, and nobody would ever drop it."""
        self._copies.cancel(reader, number)
        segment.path.unlink(missing_ok=True)
        self._slow.submit(segment.close, _nothing, _log_failure)

    def _not_built(
        self, request: _Request, number: int, plan: SegmentPlan, error: BaseException
    ) -> None:
        reader = request.session.key
        self._copies.cancel(reader, number)
        if isinstance(error, CannotReserve):
            self._events.add("warning", f"refused.{error.code}", error.message, reader)
            request.refuse(error.code, error.message, error.hint)
            return
        logger.error("making %s failed", plan.path.name, exc_info=error)
        self._events.add("error", "reserve_failed", f"{reader}: {error!r}", reader)
        request.refuse(RefusalCode.INTERNAL, f"making a copy to read failed: {error!r}")


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


def _nothing(_: object) -> None:
    """The result is not needed."""


def _log_failure(error: BaseException) -> None:
    logger.error("closing a copy that nobody waited for failed", exc_info=error)
