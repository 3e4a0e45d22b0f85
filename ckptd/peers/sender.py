"""The shell around `ckptd.core.replication.replicator`, for one local rank (docs/replication.md §5).

It performs the core's decisions on the daemon's loop thread. A slot that is being sent is held by a read
lock of its own description, so that the trainer passes it over; the lock ends with the transfer, however
that ends. A slot that a peer granted is sealed or given back there, even if the answer comes after the end.

While an image travels, a worker makes its cryptographic digest, unless that is known; the slot is held
until both are there. The digest goes with the `SealSlot`, over the control session.

The same core and messages replicate snapshots and boundary logs; a *ring* makes the difference. Whether a
snapshot travels as an image or as gradients (`ckptd.recompute.gradient_puts`) makes none to the core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from ckptd.core.replication.log_replicas import as_sent, as_whole, oldest_held
from ckptd.core.replication.replicas import Promise
from ckptd.core.replication.replicator import Replicator
from ckptd.core.replication.target import (
    Abort,
    Agreed,
    Begin,
    BeginRefused,
    Effect,
    Event,
    Granted,
    OpenRefused,
    OpenTarget,
    PeerBack,
    PeerLost,
    Put,
    PutEnded,
    Seal,
    SealedThere,
    SealRefused,
    Slots,
    TargetOpened,
    Targets,
)
from ckptd.core.sessions import RankKey
from ckptd.core.slots.segment_format import origin_of, unpack_slot_header
from ckptd.core.slots.slots import Hold, Joined, Note, Release, SlotRecord, SlotState, SnapshotKey, Tick
from ckptd.holdings import header_record
from ckptd.memory.inventory import log_records, records_of
from ckptd.memory.segment_store import SegmentStore
from ckptd.memory.slot_digests import Vouch
from ckptd.memory.slot_holds import SlotHolds
from ckptd.node_context import NodeContext
from ckptd.peers.peer_link import PeerLink, region_of
from ckptd.recompute.gradient_puts import GradientOffer, GradientOffers, PutOfPieces
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import HeldSlot
from ckptd.transport.verbs import Completion, RegionKey, Transfer


class ReplicatedRing(Protocol):
    """What is sent of one rank: its segments, and how the core sees their slots."""

    sets_floor: bool
    """Whether the run's floor waits for it."""

    def slots(self) -> Slots | None:
        """What is sealed now; None as long as there never was anything."""

    def as_held(self, record: SlotRecord) -> SlotRecord:
        """A slot that a target holds, as the core is to see it."""

    def oldest(self, generation: int) -> int:
        """The value of `BeginSlot.oldest` for slots of a generation."""


class SnapshotRing:
    """A rank's snapshots."""

    sets_floor = True

    def __init__(self, store: SegmentStore, key: RankKey) -> None:
        self._store, self._key = store, key
        self._num_operators = 0

    def slots(self) -> Slots | None:
        segments = self._store.of_rank(self._key)
        if segments:
            self._num_operators = segments[-1].descriptor.num_operators
        if not self._num_operators:
            return None
        records = tuple(r for r in records_of(segments) if r.sealed)
        num_slots = max((s.geometry.num_slots for s in segments[-1:]), default=0)
        return Slots(records, self._num_operators, num_slots)

    def as_held(self, record: SlotRecord) -> SlotRecord:
        return record

    def oldest(self, generation: int) -> int:
        """Not used: a host of snapshots follows the run's promise."""
        return -1


class LogRing:
    """A rank's boundary log, where it asks for replicas."""

    sets_floor = False

    def __init__(self, store: SegmentStore, key: RankKey) -> None:
        self._store, self._key = store, key
        self._seen = False

    def slots(self) -> Slots | None:
        self._seen = self._seen or bool(self._store.replicated_logs_of(self._key))
        return Slots(as_sent(self._records()), 1) if self._seen else None

    def as_held(self, record: SlotRecord) -> SlotRecord:
        return as_whole(record)

    def oldest(self, generation: int) -> int:
        return oldest_held(self._records(), generation)

    def _records(self) -> list[SlotRecord]:
        segments = self._store.replicated_logs_of(self._key)
        return [record for segment in segments for record in log_records(segment)]


_SLOWEST_BYTES_PER_S = 4 << 20  # a put may take so much longer than the deadline


@dataclass(frozen=True, slots=True)
class _Grant:
    ticket: int
    region: RegionKey
    offer: GradientOffer | None = None  # that the peer has accepted

    @property
    def pieces(self) -> tuple[tuple[int, memoryview], ...]:
        """What to put instead of the image; empty: the image."""
        return () if self.offer is None else self.offer.pieces


@dataclass(slots=True)
class _Sending:
    size_bytes: int
    ended: Completion | None = None
    vouched: bool = False
    over: bool = False
    digest: str = ""
    reason: str = ""


class ReplicatedRun(Protocol):
    """The run of a replicated rank."""

    def joined(self) -> tuple[int, int, int]:
        """The current epoch, where it starts, and the number of snapshots in a suffix at most."""

    def promised(self) -> tuple[int, int, int, int]:
        """Floor, horizon and span, as far as this node knows them, and their epoch."""

    def progressed(self, rank: int) -> object:
        """What is replicated of a rank may have changed."""


class RankReplication:
    """Sends one rank's snapshots, or its boundary log, to its targets.

    Args:
        ring: which of them.
        link: the connection to a node, None if its address is not known.
        vouch: makes digests of images.
    """

    def __init__(
        self,
        key: RankKey,
        core: Replicator,
        ring: ReplicatedRing,
        node: NodeContext,
        run: ReplicatedRun,
        *,
        link: Callable[[str], PeerLink | None],
        vouch: Vouch,
    ) -> None:
        self.key, self.core, self.ring = key, core, ring
        self._node, self._run, self._link, self._vouch = node, run, link, vouch
        self._deadline_s = node.config.peer_deadline_s
        self._holds = SlotHolds(node.store, key)
        self._leases: dict[tuple[str, int], int] = {}
        self._transfers: dict[tuple[str, SnapshotKey], Transfer | PutOfPieces] = {}
        self._sent: dict[tuple[str, SnapshotKey], _Sending] = {}  # put, and not sealed yet
        self._granted: set[tuple[str, int]] = set()  # node, ticket: neither sealed nor given back
        self._offers = GradientOffers()
        self._closed = False

    def begin(self, promise: Promise | None) -> None:
        """Read what there is, without reporting progress; ``promise`` is None for the run's only rank."""
        self._handle(self._joined())
        self.read_slots()
        if promise is not None:
            self._handle(Agreed(promise.floor, promise.horizon))

    def set_targets(self, nodes: Iterable[str], *, missing: bool = False) -> None:
        """Replicate to these nodes from now on; ``missing``: another that should be a target is away."""
        self.rejoined()
        self.feed(Targets(tuple(nodes), missing))

    def agreed(self, promise: Promise) -> None:
        self.feed(Agreed(promise.floor, promise.horizon))

    def rejoined(self) -> None:
        """The run's epoch or span changed."""
        self.feed(self._joined())

    def _joined(self) -> Joined:
        epoch, start, span = self._run.joined()
        return Joined(epoch, start, span if self.ring.sets_floor else 1)

    def changed(self) -> None:
        """The rank's slots changed: one was sealed, or a generation came or went."""
        self._offers.let_go()
        self.feed(*self._slots())

    def read_slots(self) -> None:
        """Like `changed`, without reporting progress."""
        for event in self._slots():
            self._handle(event)

    def _slots(self) -> list[Slots]:
        found = self.ring.slots()
        return [] if found is None else [found]

    def peer_lost(self, node: str, reason: str) -> None:
        self._cancel_to(node)
        self.feed(PeerLost(node, reason))

    def peer_back(self, node: str) -> None:
        self.feed(PeerBack(node))

    def peer_restarted(self, node: str) -> None:
        """The peer answers, and has lost our leases. One event, so that it counts without a gap."""
        self._cancel_to(node)
        self.feed(PeerLost(node, "its daemon was restarted"), PeerBack(node))

    def _cancel_to(self, node: str) -> None:
        for (name, _), transfer in list(self._transfers.items()):
            if name == node:
                transfer.cancel()  # the slot is held until the completion comes

    def tick(self) -> None:
        self._offers.let_go()
        self.feed(Tick())

    def close(self) -> None:
        """Stop: cancel transfers, let slots go, here and on the targets."""
        self._closed = True
        for node, ticket in list(self._granted):
            self._give_back(node, ticket)
        if not self._transfers:
            self._holds.release_all()
        for transfer in list(self._transfers.values()):
            transfer.cancel()  # the last completion lets the slots go

    def feed(self, *events: Event) -> None:
        """Handle events that belong together, then report progress once."""
        before = self.core.word, self.core.aim
        for event in events:
            self._handle(event)
        moved = (self.core.word, self.core.aim) != before
        if moved and self.ring.sets_floor and not self._closed:
            self._run.progressed(self.key.rank)

    def _handle(self, event: Event) -> None:
        if not self._closed:
            for effect in self.core.handle(event, now_s=self._node.clock()):
                self._perform(effect)

    # -- effects ---------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, OpenTarget):
            self._open(effect.node, effect.generation)
        elif isinstance(effect, Begin):
            self._begin(effect)
        elif isinstance(effect, Put):
            self._put(effect)
        elif isinstance(effect, Seal):
            self._seal(effect)
        elif isinstance(effect, Abort):
            self._abort(effect)
        elif isinstance(effect, Hold):
            # If the trainer overwrites the slot first, the next effect finds nothing held.
            self._holds.hold(effect.key, effect.record)
        elif isinstance(effect, Release):
            self._holds.release(effect.key)
        elif isinstance(effect, Note):
            self._node.events.add(effect.level, effect.kind, effect.message, self.key)

    def _open(self, node: str, generation: int) -> None:
        link, segment = self._link(node), self._node.store.get(self.key, generation)
        if link is None or segment is None:
            reason = "its address is not known" if link is None else "the generation is gone"
            self.feed(OpenRefused(node, generation, "away", reason))
            return
        joined = self._joined()
        message = p.OpenReplica(
            self.key.job,
            self.key.run,
            self.key.rank,
            origin_of(segment.descriptor),
            segment.raw_descriptor(),
            segment.geometry.slot_bytes,
            segment.geometry.num_slots,
            joined.epoch,
            joined.epoch_start,
            joined.span,
            link.boot_id,
        )

        def opened(reply: p.ReplicaOpened) -> None:
            held = (r for s in reply.held if (r := _record(generation, s)) is not None)
            self._leases[node, generation] = reply.lease
            records = tuple(map(self.ring.as_held, held))
            self.feed(TargetOpened(node, generation, reply.lease, records, reply.boot_id))

        link.ask(
            message,
            p.ReplicaOpened,
            opened,
            lambda code, reason: self.feed(OpenRefused(node, generation, code, reason)),
            timeout_s=2 * self._deadline_s,
        )

    def _begin(self, effect: Begin) -> None:
        node, key = effect.node, effect.key
        link, held = self._link(node), self._holds.get(key)
        lease = self._leases.get((node, key.generation))
        if held is None:
            self.feed(BeginRefused(node, key, "gone", "the snapshot is gone"))
            return
        if link is None or lease is None:
            self.feed(BeginRefused(node, key, "unreachable", f"no connection to {node}"))
            return
        offer = self._offers.of(node, key, held.segment, held.index)
        width = (held.segment.descriptor.num_operators + 7) // 8
        message = p.BeginSlot(
            lease,
            held.segment.raw_header(held.index),
            effect.record.anchors.to_bytes(width, "little"),
            *self._run.promised(),
            self.ring.oldest(key.generation),
            0 if offer is None else offer.bytes_behind,
            -1 if offer is None else offer.base,
        )

        def granted(reply: p.SlotGranted) -> None:
            self._granted.add((node, reply.ticket))
            if self._closed:
                self._give_back(node, reply.ticket)
                return
            if offer is not None and not reply.recomputes:
                self._goes_whole(node, key, self._offers.declined(node, reply.why_whole))
            accepted = offer if reply.recomputes else None
            self.feed(Granted(node, key, _Grant(reply.ticket, region_of(reply), accepted)))

        link.ask(
            message,
            p.SlotGranted,
            granted,
            lambda code, reason: self.feed(BeginRefused(node, key, code, reason)),
        )

    def _put(self, effect: Put) -> None:
        node, key = effect.node, effect.key
        link, held, grant = self._link(node), self._holds.get(key), effect.grant
        assert isinstance(grant, _Grant)
        # A generation that its trainer dropped meanwhile is not mapped any more.
        mapped = held is not None and held.segment.fd >= 0
        header = held.segment.header(held.index) if held is not None and mapped else None
        if link is None or held is None or header is None or header.sequence != key.sequence:
            self.feed(PutEnded(node, key, False, "the snapshot is gone"))
            return
        image = held.segment.image(held.index, header)
        deadline_s = self._deadline_s + len(image) / _SLOWEST_BYTES_PER_S
        sending = self._sent[node, key] = _Sending(len(image))

        def vouched(digest: str, reason: str) -> None:
            sending.vouched, sending.digest, sending.reason = True, digest, reason
            self._put_over(node, key, sending)

        def done(completion: Completion) -> None:
            sending.ended = completion
            self._put_over(node, key, sending)

        put: Transfer | PutOfPieces
        if grant.pieces:
            put = PutOfPieces(link, grant.region, grant.pieces, deadline_s=deadline_s, done=done)
        else:
            put = link.put(image, grant.region, deadline_s=deadline_s, done=done)
        self._transfers[node, key] = put
        self._vouch(held.segment, held.index, header, vouched)

    def _put_over(self, node: str, key: SnapshotKey, sending: _Sending) -> None:
        """Go on when both the transfer has ended and the digest is there: nothing reads the slot any more."""
        completion = sending.ended
        if sending.over or completion is None or (completion.ok and not sending.vouched):
            return
        sending.over = True
        self._transfers.pop((node, key), None)
        if self._closed and not self._transfers:
            self._holds.release_all()
        reason = "" if completion.ok else f"{completion.fault}: {completion.detail}"
        self._node.events.count("replicated_bytes", completion.size_bytes if completion.ok else 0)
        self._node.events.count("replicated_ns", int(completion.seconds * 1e9) if completion.ok else 0)
        self.feed(PutEnded(node, key, completion.ok, reason))  # and `_seal`, if that comes next
        if self._sent.get((node, key)) is sending:
            del self._sent[node, key]

    def _seal(self, effect: Seal) -> None:
        node, key, grant = effect.node, effect.key, effect.grant
        assert isinstance(grant, _Grant)
        link = self._link(node)
        if link is None:
            self.feed(SealRefused(node, key, "away", "its address is not known"))
            return
        sending = self._sent[node, key]
        if not sending.digest:
            self._give_back(node, grant.ticket)
            self.feed(SealRefused(node, key, "digest", sending.reason))
            return

        def sealed(_: p.PeerDone) -> None:
            self._granted.discard((node, grant.ticket))
            if grant.offer is not None and grant.pieces:
                self._offers.accepted(node)
                self._node.events.count("gradient_puts")
                self._node.events.count("gradient_put_bytes", grant.offer.put_bytes)
            self.feed(SealedThere(node, key))

        def refused(code: str, reason: str) -> None:
            self._give_back(node, grant.ticket)  # it may not know that the put has ended
            if grant.pieces:  # whatever it is: a peer that computes too slowly does not answer in time
                self._goes_whole(node, key, self._offers.failed(node, key, reason))
            self.feed(SealRefused(node, key, code, reason))

        link.ask(
            p.SealSlot(grant.ticket, sending.digest, bool(grant.pieces)),
            p.PeerDone,
            sealed,
            refused,
            timeout_s=2 * self._deadline_s,
        )

    def _goes_whole(self, node: str, key: SnapshotKey, news: str) -> None:
        """Report why gradients were not enough, if the reason is a new one."""
        if news:
            text = (
                f"{node} does not compute iteration {key.iteration} from gradients, so it goes whole: {news}"
            )
            self._node.events.add("info", "gradients_declined", text, self.key)

    def _abort(self, effect: Abort) -> None:
        transfer = self._transfers.get((effect.node, effect.key))
        if transfer is not None:
            transfer.cancel()
        if isinstance(effect.grant, _Grant):
            self._give_back(effect.node, effect.grant.ticket)

    def _give_back(self, node: str, ticket: int) -> None:
        """Free the peer's slot now, not when the ticket expires."""
        self._granted.discard((node, ticket))
        link = self._link(node)
        if link is not None:
            link.tell(p.AbortSlot(ticket))


def _record(generation: int, slot: HeldSlot) -> SlotRecord | None:
    """A sealed slot that a peer claims to hold; None if its header cannot be read."""
    header = unpack_slot_header(slot.header)
    if header is None or header.state is not SlotState.SEALED:
        return None
    return header_record(header, generation, slot.slot, slot.anchors)
