"""The parts of one snapshot, pulled from its holders on other nodes (docs/replication.md §7).

A *source* is one copy, and everything here is counted by source: a node may hold two of them, as
its own and as a replica, and one of them may be refused or damaged while the other is good. Each
source is asked for a region of its own, from which its parts are got. What a holder opened for us
locks its slot; so whatever is not used (any more) is closed: when the piece is done, when another
region takes its place, when it came too late.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ckptd.core.recovery.held import STORE_NODE
from ckptd.core.recovery.striping import Cancel, ImagePart, Pull, Stripes
from ckptd.core.sessions import RankKey
from ckptd.core.slots.segment_format import (
    SegmentDescriptor,
    SlotHeader,
    decode_descriptor,
    unpack_slot_header,
)
from ckptd.errors import SegmentError
from ckptd.event_log import EventLog
from ckptd.memory.segment_file import Segment
from ckptd.memory.slot_digests import Doubt
from ckptd.memory.slot_holds import region_of
from ckptd.node_context import DigestThreads
from ckptd.peers.peer_link import Holder
from ckptd.restore.fetched_image import Vouchers
from ckptd.transport.control import peer_messages as p
from ckptd.transport.control.messages import FetchSource, GetHoldings, Holdings
from ckptd.transport.verbs import Completion, Fault, RegionKey, Transfer
from ckptd.workers import Workers

__all__ = [
    "CopyDoubts",
    "DescriptorSearch",
    "FetchTools",
    "FoundDescriptor",
    "Job",
    "LocalSource",
    "Pulling",
    "find_stored",
]

logger = logging.getLogger(__name__)


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
        link: Callable[[str], Holder | None],
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
                self._found(FoundDescriptor(segment.descriptor, geometry.num_slots, geometry.slot_bytes))
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


_MAX_UNTOLD = 1024
_NO_ANSWER = (Fault.DEADLINE, Fault.CANCELLED)


class CopyDoubts:
    """Has copies verified in which a fetch found something wrong, on this node and on others. Unless
    they are quarantined, the next plan asks for them again.

    A node that does not answer is told again at each tick, also when the fetch is long over.

    Args:
        here: has a slot of this node verified.
        link: the connection to a node, None if its address is not known.
    """

    def __init__(self, here: Doubt, link: Callable[[str], Holder | None], events: EventLog) -> None:
        self.here = here
        self._link, self._events = link, events
        self._untold: dict[tuple[str, p.DoubtSlot], bool] = {}  # True: it is being asked

    def elsewhere(self, node: str, message: p.DoubtSlot) -> None:
        """Tell the node that holds this copy."""
        if len(self._untold) >= _MAX_UNTOLD:
            del self._untold[next(iter(self._untold))]
            self._events.count("doubts_dropped")
        if not self._untold.get((node, message)):
            self._ask(node, message)

    def tick(self) -> None:
        """Tell those again that did not answer."""
        for (node, message), asking in list(self._untold.items()):
            if not asking:
                self._ask(node, message)

    def _ask(self, node: str, message: p.DoubtSlot) -> None:
        link = self._link(node)
        if link is None:
            self._untold.pop((node, message), None)
            logger.warning("%s has left: nobody verifies %s there", node, message.name)
            return
        self._untold[node, message] = True
        link.ask(
            message,
            p.PeerDone,
            lambda _: self._told(node, message),
            lambda code, reason: self._not_told(node, message, code, reason),
        )

    def _told(self, node: str, message: p.DoubtSlot) -> None:
        self._untold.pop((node, message), None)

    def _not_told(self, node: str, message: p.DoubtSlot, code: str, reason: str) -> None:
        if code not in _NO_ANSWER:
            logger.warning("%s does not verify %s: %s", node, message.name, reason)
            self._untold.pop((node, message), None)
        elif (node, message) in self._untold:
            self._untold[node, message] = False


@dataclass(frozen=True, slots=True)
class FetchTools:
    """What all pieces of a job need.

    Args:
        segment: into whose slots they go.
        node: our own.
        link: the connection to a node, None if its address is not known; the only way to holders elsewhere.
        local: segments of this very node.
        doubts: told which copies did not match their digests.
        verifiers: workers that digest.
        stored: whether storage is asked for what no copy has that the plan knows.
    """

    segment: Segment
    node: str
    link: Callable[[str], Holder | None]
    local: LocalSource
    doubts: CopyDoubts
    verifiers: Workers
    digests: DigestThreads
    events: EventLog
    clock: Callable[[], float]
    stored: bool = True


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


_PART_DEADLINE_S = 30.0
# How long a holder may take for the digest of what it delivers: others may wait for theirs before.
_DIGEST_S = 60.0
_DIGEST_BYTES_PER_S = 256 << 20
# To ask for the same bytes again is in vain; whoever says so is good for others.
_FOR_GOOD = (Fault.DAMAGED, Fault.BOUNDS)


@dataclass(slots=True, eq=False)
class _Flight:
    """One transfer of a part, from this region."""

    part: ImagePart
    region: RegionKey
    transfer: Transfer | None = None


class Pulling:
    """Fills ``image()`` with the parts that ``stripes`` hands out.

    Args:
        vouchers: told what each holder vouches for.
        drained: called when the last byte of what was cancelled has landed.
    """

    def __init__(
        self,
        header: SlotHeader,
        stripes: Stripes[FetchSource],
        tools: FetchTools,
        job: Job,
        *,
        image: Callable[[], memoryview],
        vouchers: Vouchers,
        drained: Callable[[], None],
    ) -> None:
        self._header, self._stripes, self._tools, self._job = header, stripes, tools, job
        self._vouchers = vouchers
        self._image, self._on_drained = image, drained
        self._regions: dict[FetchSource, RegionKey] = {}
        self._flights: dict[tuple[FetchSource, int], _Flight] = {}
        # Cancelled, but their last bytes may still be landing: nothing is verified before they have ended.
        self._draining: set[_Flight] = set()
        self._unable: set[FetchSource] = set()  # it was told of them that they cannot deliver all
        self._ended = False

    @property
    def landing(self) -> bool:
        """Whether bytes of cancelled transfers may still arrive."""
        return bool(self._draining)

    def open(self) -> None:
        """Ask every source that is left elsewhere for a region to read from."""
        for source in self._stripes.holders_left():
            if source.node != self._tools.node:
                self.ask(source)

    def advance(self) -> None:
        """Begin what can be begun."""
        for effect in self._stripes.next_pulls(self._tools.clock(), ready=self._regions):
            if isinstance(effect, Cancel):
                self._cancel(effect.holder, [effect.part])
            else:
                self._pull(effect)

    def lose(self, node: str) -> None:
        """What this node was to deliver is asked of others."""
        for source in self._stripes.holders_left():
            if source.node == node:
                self._cancel(source, self._stripes.lose(source))

    def give_up(self, source: FetchSource, reason: str) -> None:
        """This source is not asked again."""
        if source in self._stripes.holders_left():
            self._cancel(source, self._stripes.lose(source))
            iteration = self._header.iteration
            text = f"iteration {iteration} from {source.node}: {reason}"
            self._tools.events.add("warning", "fetch_source_lost", text)

    def doubt(self, source: FetchSource) -> None:
        """Have the holder verify what it holds."""
        told = self._tools.segment.descriptor
        message = p.DoubtSlot(told.job, told.run, source.segment, source.slot, self._header.sequence)
        self._tools.doubts.elsewhere(source.node, message)

    def end(self) -> None:
        """The job is over: cancel what is under way."""
        self._ended = True
        for (source, _), flight in list(self._flights.items()):
            self._cancel(source, [flight.part])

    def close(self) -> None:
        """Close what holders have opened for us, now and from now on."""
        self._ended = True
        for source, region in self._regions.items():
            self._tell(source, p.CloseRead(region.region))
        self._regions.clear()

    # -- regions ---------------------------------------------------------------------------------

    def ask(self, source: FetchSource) -> None:
        """Ask a source for a region."""
        tools = self._tools
        link = tools.link(source.node)
        if link is None:
            self.give_up(source, "its address is not known")
            return
        told = tools.segment.descriptor
        message = p.OpenRead(
            told.job, told.run, source.segment, source.slot, self._header.sequence, link.boot_id
        )
        link.ask(
            message,
            p.ReadOpened,
            partial(self._opened, source, link),
            lambda code, reason: self._refused(source, reason),
        )

    def _opened(self, source: FetchSource, link: Holder, reply: p.ReadOpened) -> None:
        header = unpack_slot_header(reply.header)
        true = (
            header is not None
            and header.header_digest == self._header.header_digest
            and reply.length == self._header.image_len
        )
        wanted = not self._ended and source in self._stripes.holders_left()
        if true and wanted:
            self._regions[source] = region_of(reply)
            self._ask_digest(source, link, reply)
        else:
            link.tell(p.CloseRead(reply.region))  # too late, or of no use
        if wanted:
            if not true:
                self.give_up(source, "it holds something else")
            self._job.progressed()

    def _ask_digest(self, source: FetchSource, link: Holder, reply: p.ReadOpened) -> None:
        """What it vouches for. Where that was not made yet, it is made while the parts are on their way."""
        if reply.digest or source.node == STORE_NODE:
            self._vouchers.tell(source, reply.digest)
            return
        if not self._vouchers.lacks([source]):
            return

        def told(digest: str) -> None:
            if not self._ended:
                self._vouchers.tell(source, digest)
                self._job.progressed()

        def refused(code: str, reason: str) -> None:
            current = self._regions.get(source)
            if current is not None and current.region == reply.region and not self._ended:
                self.give_up(source, f"it does not vouch for what it delivers: {reason} ({code})")
                told("")

        link.ask(
            p.GetDigest(reply.region),
            p.OpenedDigest,
            lambda answer: told(answer.digest),
            refused,
            timeout_s=_DIGEST_S + reply.length / _DIGEST_BYTES_PER_S,
        )

    def _refused(self, source: FetchSource, reason: str) -> None:
        if not self._ended:
            self.give_up(source, reason)
            self._job.progressed()

    def _open_again(self, source: FetchSource, failed: RegionKey) -> None:
        """Ask for a new region: who has taken us for lost meanwhile has ended our reads."""
        if self._regions.get(source) is not failed:
            return  # of two parts the first to fail has done it: what was opened since is good
        del self._regions[source]
        self._tell(source, p.CloseRead(failed.region))
        if source in self._stripes.holders_left():
            self.ask(source)

    def _tell(self, source: FetchSource, message: p.PeerMessage) -> None:
        link = self._tools.link(source.node)
        if link is not None:
            link.tell(message)

    # -- parts -----------------------------------------------------------------------------------

    def _pull(self, pull: Pull[FetchSource]) -> None:
        source, part = pull.holder, pull.part
        link = self._tools.link(source.node)
        if link is None:  # it has opened a region, and was forgotten since
            self.give_up(source, "its address is not known any more")
            return
        flight = self._flights[source, part.index] = _Flight(part, self._regions[source])
        flight.transfer = link.get(
            flight.region,
            self._image()[part.start : part.stop],
            offset=part.start,
            deadline_s=_PART_DEADLINE_S,
            done=partial(self._pulled, pull, flight),
        )

    def _pulled(self, pull: Pull[FetchSource], flight: _Flight, completion: Completion) -> None:
        source, part = pull.holder, pull.part
        if self._flights.get((source, part.index)) is not flight:
            self._drained(flight)
            return  # cancelled meanwhile
        del self._flights[source, part.index]
        if completion.ok:
            self._stripes.delivered(source, part, self._tools.clock())
        else:
            logger.info("bytes %d to %d from %s: %s", part.start, part.stop, source.node, completion.detail)
            self._tools.events.count(f"fetch.{completion.fault}")
            self._failed(source, flight, completion)
        self._job.progressed()

    def _failed(self, source: FetchSource, flight: _Flight, completion: Completion) -> None:
        if completion.fault in _FOR_GOOD:
            self._stripes.cannot(source, flight.part)
            self._tell_unable(source, completion.detail)
            return
        self._cancel(source, self._stripes.failed_part(source, flight.part))
        if completion.fault in (Fault.REGION, Fault.ACCESS):
            self._open_again(source, flight.region)

    def _tell_unable(self, source: FetchSource, detail: str) -> None:
        if source not in self._unable:
            self._unable.add(source)
            where = "storage" if source.node == STORE_NODE else source.node
            text = f"iteration {self._header.iteration}: {where} cannot deliver all of it: {detail}"
            self._tools.events.add("error", "fetch_damaged", f"{text}; fetched from other copies")

    def _cancel(self, source: FetchSource, parts: Sequence[ImagePart]) -> None:
        for part in parts:
            flight = self._flights.pop((source, part.index), None)
            if flight is not None and flight.transfer is not None:
                self._draining.add(flight)
                flight.transfer.cancel()

    def _drained(self, flight: _Flight) -> None:
        """The last byte of a cancelled transfer has landed."""
        self._draining.discard(flight)
        self._on_drained()


def find_stored(
    link: Holder,
    key: RankKey,
    header: SlotHeader,
    found: Callable[[list[FetchSource]], None],
    failed: Callable[[str], None],
) -> None:
    """Ask storage which committed checkpoints have this very snapshot of this rank; one of the two
    is called, later.
    """
    link.ask(
        GetHoldings(key.job, key.run),
        Holdings,
        lambda told: found(_copies(told, key.rank, header)),
        lambda code, reason: failed(f"{code}: {reason}"),
    )


def _copies(told: Holdings, rank: int, header: SlotHeader) -> list[FetchSource]:
    return [
        FetchSource(STORE_NODE, segment.name, slot.slot)
        for segment in told.segments
        if segment.rank == rank
        for slot in segment.slots
        if (stored := unpack_slot_header(slot.header)) is not None
        and stored.header_digest == header.header_digest
    ]
