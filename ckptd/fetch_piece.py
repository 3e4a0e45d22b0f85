"""One snapshot on its way here: from where, which parts, and whether it is what it should be (docs/replication.md §7).

A `FetchedPiece` waits until it is begun; then its slot is locked, and it is COPIED from a replica of this very node, or PULLED in
parts from all its holders (`ckptd.striping`); then VERIFIED as a whole on a worker. What does not match is pulled again from others,
until it is SEALED. It tells its job what happened, by `Job`, and is asked to go on by `push`. All on the daemon's loop thread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ckptd import locks
from ckptd.descriptor_search import LocalSource
from ckptd.events import EventLog
from ckptd.fetched_image import copy_slot, wrong_ranges
from ckptd.peer_link import PeerLink
from ckptd.ring import SlotState
from ckptd.segment_format import (
    SlotHeader,
    set_slot_state,
    slot_lock_byte,
    unpack_slot_header,
    write_slot_header,
)
from ckptd.segments import Segment
from ckptd.slot_files import region_of
from ckptd.storage.image import MapFunction
from ckptd.striping import Cancel, Part, Pull, Stripes
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import FetchSource
from ckptd.transport.verbs import Completion, Fault, RegionKey, Transfer
from ckptd.workers import Workers

__all__ = ["FetchTools", "FetchedPiece", "Job"]

logger = logging.getLogger(__name__)

_PART_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class FetchTools:
    """What all pieces of a job need.

    Args:
        segment: into whose slots they go.
        node: our own.
        link: the connection to a node, None if its address is not known.
        local: segments of this very node.
        verifiers: workers that digest; `map_fn`, if given, spreads one image over threads.
    """

    segment: Segment
    node: str
    link: Callable[[str], PeerLink | None]
    local: LocalSource
    verifiers: Workers
    map_fn: MapFunction | None
    events: EventLog
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Job:
    """What a piece asks and tells its job.

    Args:
        goes_on: false if the job is over, or has to end because its memory was given back.
        over: whether the job has ended.
        progressed: something may be possible that was not.
        failed: the job cannot be completed, for this reason.
    """

    goes_on: Callable[[], bool]
    over: Callable[[], bool]
    progressed: Callable[[], None]
    failed: Callable[[str], None]


@dataclass(slots=True, eq=False)
class _Flight:
    """One transfer of a part."""

    transfer: Transfer | None = None


class FetchedPiece:
    """Fills slot ``index`` with the snapshot of this header."""

    def __init__(
        self,
        index: int,
        header: SlotHeader,
        sources: Sequence[FetchSource],
        tools: FetchTools,
        job: Job,
    ) -> None:
        self.header, self.sealed = header, False
        self._index, self._sources, self._tools, self._job = index, sources, tools, job
        self._begun = False
        self._stripes = Stripes(header.image_len, [source.node for source in sources])
        self._regions: dict[str, RegionKey] = {}
        self._flights: dict[tuple[str, int], _Flight] = {}
        # Cancelled, but their last bytes may still be landing: nothing is verified before they have ended.
        self._draining: set[_Flight] = set()
        self._fd = -1
        self._busy = False  # a worker copies or verifies

    @property
    def bytes_by_node(self) -> dict[str, int]:
        """What has arrived, by who delivered it."""
        return self._stripes.bytes_by_holder

    def push(self) -> None:
        """Do what can be done now."""
        if not self._begun:
            self._begun = True
            self._begin()
        elif not self._busy:
            self._advance()

    def lose(self, node: str) -> None:
        """Its parts are asked of others at once."""
        if self._begun and node in self._stripes.holders_left():
            self._cancel(node, self._stripes.lose(node))

    def end(self, *, mapped: bool) -> None:
        """The job is over; what is not sealed is freed, if the segment is still ``mapped``."""
        for node, index in list(self._flights):
            self._cancel(node, [self._stripes.parts[index]])
        if self._fd >= 0 and not self.sealed and mapped:
            segment = self._tools.segment
            set_slot_state(segment.buffer, segment.geometry, self._index, SlotState.FREE)
        if not self._draining:  # else the slot stays locked until nothing can land in it any more
            self._let_go()

    # -- the slot --------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Lock the slot, and copy, or ask every holder for a region to read from."""
        segment = self._tools.segment
        self._fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
        if not locks.try_lock(self._fd, slot_lock_byte(self._index), exclusive=True):
            self._job.failed(f"slot {self._index} of {segment.path.name} is locked")
            return
        filling = replace(self.header, state=SlotState.FILLING, writer_pid=os.getpid())
        write_slot_header(segment.buffer, segment.geometry, self._index, filling)
        if not self._copy_local():
            self._ask_sources()

    @property
    def _image(self) -> memoryview:
        return self._tools.segment.image(self._index, self.header)

    def _seal(self) -> None:
        segment = self._tools.segment
        write_slot_header(segment.buffer, segment.geometry, self._index, self.header)
        self.sealed = True
        self._let_go()
        self._job.progressed()

    def _let_go(self) -> None:
        for node, key in self._regions.items():
            link = self._tools.link(node)
            if link is not None:
                link.tell(p.CloseRead(key.region))
        self._regions.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # -- from this node --------------------------------------------------------------------------

    def _copy_local(self) -> bool:
        """A replica on this very node needs no network; false if there is none (or the workers are full)."""
        tools = self._tools
        for source in self._sources:
            segment = tools.local(source.segment) if source.node == tools.node else None
            if segment is None:
                continue
            self._busy = tools.verifiers.submit(
                partial(copy_slot, segment, source.slot, self.header, self._image, tools.map_fn),
                partial(self._copied, source),
                lambda error: self._job.failed(f"copying a replica failed: {error!r}"),
            )
            return self._busy
        return False

    def _copied(self, source: FetchSource, wrong: Sequence[tuple[int, int]]) -> None:
        self._busy = False
        if not self._job.goes_on():
            return
        if wrong:
            self._give_up(source.node, "the copy on this node is damaged or gone")
            self._ask_sources()
            self._job.progressed()
            return
        for part in self._stripes.parts:
            self._stripes.claim(source.node, part)
        self._seal()

    # -- holders ---------------------------------------------------------------------------------

    def _ask_sources(self) -> None:
        for source in self._sources:
            self._open_source(source)

    def _open_source(self, source: FetchSource) -> None:
        tools = self._tools
        link = tools.link(source.node)
        if link is None or source.node == tools.node:
            self._no_source(source, "its address is not known" if link is None else "gone")
            return
        told = tools.segment.descriptor
        message = p.OpenRead(
            told.job, told.run, source.segment, source.slot, self.header.sequence, link.boot_id
        )
        link.ask(
            message,
            p.ReadOpened,
            partial(self._opened, source, link),
            lambda code, reason: self._no_source(source, reason),
        )

    def _opened(self, source: FetchSource, link: PeerLink, reply: p.ReadOpened) -> None:
        if self._job.over() or self.sealed:
            link.tell(p.CloseRead(reply.region))  # too late
            return
        header = unpack_slot_header(reply.header)
        if (
            header is None
            or header.header_digest != self.header.header_digest
            or reply.length != self.header.image_len
        ):
            self._give_up(source.node, "it holds something else")
        else:
            self._regions[source.node] = region_of(reply)
        self._job.progressed()

    def _open_again(self, node: str) -> None:
        """Ask for a new region: who has taken us for lost meanwhile has ended our reads."""
        left = node in self._stripes.holders_left()
        if left and self._regions.pop(node, None) is not None:
            self._open_source(next(s for s in self._sources if s.node == node))

    def _no_source(self, source: FetchSource, reason: str) -> None:
        self._give_up(source.node, reason)
        self._job.progressed()

    def _give_up(self, node: str, reason: str) -> None:
        if node in self._stripes.holders_left():
            self._cancel(node, self._stripes.lose(node))
            iteration = self.header.iteration
            text = f"iteration {iteration} from {node}: {reason}"
            self._tools.events.add("warning", "fetch_source_lost", text)

    # -- parts -----------------------------------------------------------------------------------

    def _advance(self) -> None:
        if self._stripes.complete:
            if not self._draining:
                self._verify()
            return
        if self._stripes.failed:
            names = ", ".join(source.node for source in self._sources)
            self._job.failed(f"iteration {self.header.iteration}: no holder is left of {names}")
            return
        for effect in self._stripes.next_pulls(self._tools.clock(), ready=self._regions):
            if isinstance(effect, Cancel):
                self._cancel(effect.holder, [effect.part])
            else:
                self._pull(effect)

    def _pull(self, pull: Pull) -> None:
        link = self._tools.link(pull.holder)
        assert link is not None
        part, flight = pull.part, _Flight()
        self._flights[pull.holder, part.index] = flight
        flight.transfer = link.get(
            self._regions[pull.holder],
            self._image[part.start : part.stop],
            offset=part.start,
            deadline_s=_PART_DEADLINE_S,
            done=partial(self._pulled, pull, flight),
        )

    def _pulled(self, pull: Pull, flight: _Flight, completion: Completion) -> None:
        holder, part = pull.holder, pull.part
        if self._flights.get((holder, part.index)) is not flight:
            self._drained(flight)
            return  # cancelled meanwhile
        del self._flights[holder, part.index]
        if completion.ok:
            self._stripes.delivered(holder, part, self._tools.clock())
        else:
            logger.info("part %d from %s: %s", part.index, holder, completion.detail)
            self._tools.events.count(f"fetch.{completion.fault}")
            self._stripes.failed_part(holder, part)
            if completion.fault in (Fault.REGION, Fault.ACCESS):
                self._open_again(holder)
        self._job.progressed()

    def _cancel(self, node: str, parts: Sequence[Part]) -> None:
        for part in parts:
            flight = self._flights.pop((node, part.index), None)
            if flight is not None and flight.transfer is not None:
                self._draining.add(flight)
                flight.transfer.cancel()

    def _drained(self, flight: _Flight) -> None:
        """The last byte of a cancelled transfer has landed."""
        self._draining.discard(flight)
        if not self._job.over():
            self._job.progressed()
        elif not self._draining:
            self._let_go()

    # -- is it what it should be -----------------------------------------------------------------

    def _verify(self) -> None:
        tools = self._tools
        # If the workers are full the next tick tries again.
        self._busy = tools.verifiers.submit(
            partial(wrong_ranges, self._image, self.header.header_digest, tools.map_fn),
            self._verified,
            lambda error: self._job.failed(f"verifying failed: {error!r}"),
        )

    def _verified(self, wrong: Sequence[tuple[int, int]]) -> None:
        self._busy = False
        if not self._job.goes_on():
            return
        if not wrong:
            self._seal()
            return
        liars = self._stripes.blame(wrong)
        self._tools.events.add(
            "error",
            "fetch_damaged",
            f"iteration {self.header.iteration} as delivered by {', '.join(liars)} does not match its "
            "digests; it is fetched from others",
        )
        self._doubt(liars)
        self._job.progressed()

    def _doubt(self, liars: Sequence[str]) -> None:
        """Have the holders verify what they hold: unless they quarantine it, the next plan would ask them again."""
        told = self._tools.segment.descriptor
        for source in self._sources:
            link = self._tools.link(source.node)
            if source.node in liars and link is not None:
                doubt = p.DoubtSlot(
                    told.job, told.run, source.segment, source.slot, self.header.sequence
                )
                link.tell(doubt)
