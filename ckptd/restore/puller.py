"""The parts of one snapshot, pulled from its holders on other nodes (docs/replication.md §7).

A *source* is one copy, and everything here is counted by source: a node may hold two copies, its
own and a replica, and one of them may be refused or damaged while the other is good. Each source is
asked for a region, from which its parts are read. An open region locks the holder's slot; so a
region that is not used (any more) is closed: when the piece is done, when another region takes its
place, when it arrives too late.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ckptd.core.recovery.held import STORE_NODE
from ckptd.core.recovery.striping import Cancel, ImagePart, Pull, Stripes
from ckptd.core.slots.segment_format import SlotHeader, unpack_slot_header
from ckptd.event_log import EventLog
from ckptd.memory.segment_file import Segment
from ckptd.memory.slot_digests import Doubt
from ckptd.node_context import DigestThreads
from ckptd.peers.peer_link import Holder, region_of
from ckptd.restore.fetched_image import Vouchers
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import FetchSource
from ckptd.transport.verbs import Completion, Fault, RegionKey, Transfer
from ckptd.workers import Workers

logger = logging.getLogger(__name__)

_MAX_DOUBTS = 1024
_NO_ANSWER = (Fault.DEADLINE, Fault.CANCELLED)
_PART_DEADLINE_S = 30.0
# How long a holder may take for a digest: other requests for digests may come first.
_DIGEST_S = 60.0
_DIGEST_BYTES_PER_S = 256 << 20
# Asking this source for the same bytes again is useless; it is good for others.
_FOR_GOOD = (Fault.DAMAGED, Fault.BOUNDS)


class CopyDoubts:
    """Has copies verified in which a fetch found something wrong, on this node and on others.

    Unless such a copy is quarantined, the next plan names it again. A node that does not answer is asked
    again at each tick, even when the fetch is long over.

    Args:
        here: has a slot of this node verified.
        link: the connection to a node, None if its address is not known.
    """

    def __init__(self, here: Doubt, link: Callable[[str], Holder | None], events: EventLog) -> None:
        self.here = here
        self._link, self._events = link, events
        self._open: dict[tuple[str, p.DoubtSlot], bool] = {}  # True: the node is being asked

    def elsewhere(self, node: str, message: p.DoubtSlot) -> None:
        """Have a node verify its copy."""
        if len(self._open) >= _MAX_DOUBTS:
            del self._open[next(iter(self._open))]
            self._events.count("doubts_dropped")
        if not self._open.get((node, message)):
            self._ask(node, message)

    def tick(self) -> None:
        for (node, message), asking in list(self._open.items()):
            if not asking:
                self._ask(node, message)

    def _ask(self, node: str, message: p.DoubtSlot) -> None:
        link = self._link(node)
        if link is None:
            self._close(node, message)
            logger.warning("%s has left: nobody verifies %s there", node, message.name)
            return
        self._open[node, message] = True
        link.ask(
            message,
            p.PeerDone,
            lambda _: self._close(node, message),
            lambda code, reason: self._failed(node, message, code, reason),
        )

    def _close(self, node: str, message: p.DoubtSlot) -> None:
        self._open.pop((node, message), None)

    def _failed(self, node: str, message: p.DoubtSlot, code: str, reason: str) -> None:
        if code not in _NO_ANSWER:
            logger.warning("%s does not verify %s: %s", node, message.name, reason)
            self._close(node, message)
        elif (node, message) in self._open:
            self._open[node, message] = False


@dataclass(frozen=True, slots=True)
class FetchTools:
    """What all pieces of a job need.

    Args:
        segment: the target; each piece goes into one of its slots.
        node: this node.
        link: the connection to a node, None if its address is not known.
        local: a segment of this node, by name.
        verifiers: workers that digest.
        stored: whether to ask storage for what no copy of the plan has.
    """

    segment: Segment
    node: str
    link: Callable[[str], Holder | None]
    local: Callable[[str], Segment | None]
    doubts: CopyDoubts
    verifiers: Workers
    digests: DigestThreads
    events: EventLog
    clock: Callable[[], float]
    stored: bool = True


@dataclass(slots=True, eq=False)
class _Flight:
    part: ImagePart
    region: RegionKey
    transfer: Transfer | None = None


class Pulling:
    """Fills ``image()`` with the parts that ``stripes`` hands out.

    Args:
        progressed: called when something may be possible that was not before.
        vouchers: gets the digests that holders vouch for.
        drained: called when the last byte of a cancelled transfer has landed.
    """

    def __init__(
        self,
        header: SlotHeader,
        stripes: Stripes[FetchSource],
        tools: FetchTools,
        progressed: Callable[[], None],
        *,
        image: Callable[[], memoryview],
        vouchers: Vouchers,
        drained: Callable[[], None],
    ) -> None:
        self._header, self._stripes, self._tools = header, stripes, tools
        self._progressed, self._vouchers = progressed, vouchers
        self._image, self._on_drained = image, drained
        self._regions: dict[FetchSource, RegionKey] = {}
        self._flights: dict[tuple[FetchSource, int], _Flight] = {}
        # Cancelled, but their last bytes may still land: nothing is verified before they have ended.
        self._draining: set[_Flight] = set()
        self._reported: set[FetchSource] = set()  # an event says that they cannot deliver everything
        self._ended = False

    @property
    def landing(self) -> bool:
        return bool(self._draining)

    def open(self) -> None:
        """Ask every remaining source on other nodes for a region."""
        for source in self._stripes.holders_left():
            if source.node != self._tools.node:
                self.ask(source)

    def advance(self) -> None:
        """Begin and cancel transfers as the stripes say."""
        for effect in self._stripes.next_pulls(self._tools.clock(), ready=self._regions):
            if isinstance(effect, Cancel):
                self._cancel(effect.holder, [effect.part])
            else:
                self._pull(effect)

    def lose(self, node: str) -> None:
        for source in self._stripes.holders_left():
            if source.node == node:
                self._cancel(source, self._stripes.lose(source))

    def give_up(self, source: FetchSource, reason: str) -> None:
        """Do not ask this source again."""
        if source in self._stripes.holders_left():
            self._cancel(source, self._stripes.lose(source))
            text = f"iteration {self._header.iteration} from {source.node}: {reason}"
            self._tools.events.add("warning", "fetch_source_lost", text)

    def doubt(self, source: FetchSource) -> None:
        """Have the holder verify its copy."""
        key = self._tools.segment.key
        message = p.DoubtSlot(key.job, key.run, source.segment, source.slot, self._header.sequence)
        self._tools.doubts.elsewhere(source.node, message)

    def end(self) -> None:
        """The job is over: cancel all transfers."""
        self._ended = True
        for (source, _), flight in list(self._flights.items()):
            self._cancel(source, [flight.part])

    def close(self) -> None:
        """Close all regions, including those that are opened from now on."""
        self._ended = True
        for source, region in self._regions.items():
            self._tell(source, p.CloseRead(region.region))
        self._regions.clear()

    # -- regions ---------------------------------------------------------------------------------

    def ask(self, source: FetchSource) -> None:
        """Ask a source for a region."""
        link, key = self._tools.link(source.node), self._tools.segment.key
        if link is None:
            self.give_up(source, "its address is not known")
            return
        sequence = self._header.sequence
        message = p.OpenRead(key.job, key.run, source.segment, source.slot, sequence, link.boot_id)
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
            link.tell(p.CloseRead(reply.region))  # too late, or another snapshot
        if wanted:
            if not true:
                self.give_up(source, "it holds something else")
            self._progressed()

    def _ask_digest(self, source: FetchSource, link: Holder, reply: p.ReadOpened) -> None:
        """Get the digest that the source vouches for; a holder that has none makes it during the transfer."""
        if reply.digest or source.node == STORE_NODE:
            self._vouchers.tell(source, reply.digest)
            return
        if not self._vouchers.lacks([source]):
            return

        def made(digest: str) -> None:
            if not self._ended:
                self._vouchers.tell(source, digest)
                self._progressed()

        def refused(code: str, reason: str) -> None:
            current = self._regions.get(source)
            if current is not None and current.region == reply.region and not self._ended:
                self.give_up(source, f"it does not vouch for what it delivers: {reason} ({code})")
                made("")

        link.ask(
            p.GetDigest(reply.region),
            p.OpenedDigest,
            lambda answer: made(answer.digest),
            refused,
            timeout_s=_DIGEST_S + reply.length / _DIGEST_BYTES_PER_S,
        )

    def _refused(self, source: FetchSource, reason: str) -> None:
        if not self._ended:
            self.give_up(source, reason)
            self._progressed()

    def _open_again(self, source: FetchSource, failed: RegionKey) -> None:
        """Ask for a new region: a holder that took this node for lost has ended its reads."""
        if self._regions.get(source) is not failed:
            return  # the first of two failed parts has asked already
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
        if link is None:  # it opened a region, and was forgotten since
            self.give_up(source, "its address is not known any more")
            return
        flight = self._flights[source, part.index] = _Flight(part, self._regions[source])
        flight.transfer = link.get(
            flight.region,
            self._image()[part.start : part.stop],
            offset=part.start,
            deadline_s=_PART_DEADLINE_S,
            done=partial(self._pulled, source, flight),
        )

    def _pulled(self, source: FetchSource, flight: _Flight, completion: Completion) -> None:
        part = flight.part
        if self._flights.get((source, part.index)) is not flight:  # cancelled meanwhile
            self._draining.discard(flight)
            self._on_drained()
            return
        del self._flights[source, part.index]
        if completion.ok:
            self._stripes.delivered(source, part, self._tools.clock())
        else:
            logger.info("bytes %d to %d from %s: %s", part.start, part.stop, source.node, completion.detail)
            self._tools.events.count(f"fetch.{completion.fault}")
            self._failed(source, flight, completion)
        self._progressed()

    def _failed(self, source: FetchSource, flight: _Flight, completion: Completion) -> None:
        if completion.fault in _FOR_GOOD:
            self._stripes.cannot(source, flight.part)
            self._report_damage(source, completion.detail)
            return
        self._cancel(source, self._stripes.failed_part(source, flight.part))
        if completion.fault in (Fault.REGION, Fault.ACCESS):
            self._open_again(source, flight.region)

    def _report_damage(self, source: FetchSource, detail: str) -> None:
        if source not in self._reported:
            self._reported.add(source)
            where = "storage" if source.node == STORE_NODE else source.node
            text = f"iteration {self._header.iteration}: {where} cannot deliver all of it: {detail}"
            self._tools.events.add("error", "fetch_damaged", f"{text}; fetched from other copies")

    def _cancel(self, source: FetchSource, parts: Sequence[ImagePart]) -> None:
        for part in parts:
            flight = self._flights.pop((source, part.index), None)
            if flight is not None and flight.transfer is not None:
                self._draining.add(flight)
                flight.transfer.cancel()
