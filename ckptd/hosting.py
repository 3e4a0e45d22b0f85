"""Serving peers: replicas that they put here, and snapshots that they get from here (docs/replication.md §4, §5, §7).

A `Host` lives on the daemon's loop thread; making memory and verifying go to workers. What a peer holds of us are *leases* (a
replica segment, until we restart), *tickets* (a slot being filled, locked against everybody else) and *reads* (a slot that may
not be reused). All three end with the peer, or when nothing happens for long; none of them is a promise that outlives us.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ckptd import locks
from ckptd.errors import SegmentError
from ckptd.events import EventLog
from ckptd.holdings import header_record
from ckptd.inventory import held_segment, held_slots
from ckptd.replica_store import ReplicaStore
from ckptd.replicas import Admit, Promise, admit, removable, stale_slots
from ckptd.ring import SlotState
from ckptd.segment_format import (
    SlotHeader,
    decode_descriptor,
    set_slot_state,
    slot_lock_byte,
    unpack_slot_header,
    write_slot_header,
)
from ckptd.segments import CannotReserve, Segment, SegmentPlan, SegmentStore
from ckptd.sessions import RankKey
from ckptd.storage.image import ImageError, MapFunction, verify
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import GetHoldings, Holdings
from ckptd.transport.verbs import Access, Fabric, Region, Scope
from ckptd.units import format_age, format_bytes
from ckptd.workers import Workers

__all__ = ["Host", "local_holdings"]

logger = logging.getLogger(__name__)

_MAX_LEASES = 65_536
_MAX_TICKETS = 4096
_MAX_READS = 4096
_READ_IDLE_S = 60.0
_TICKET_FLOOR_BYTES_PER_S = (
    4 << 20
)  # a sender slower than this has gone, as far as its slot is concerned

AnswerPeer = Callable[[p.PeerReply], None]


@dataclass(slots=True)
class _Lease:
    peer: str
    segment: Segment


@dataclass(slots=True)
class _Ticket:
    peer: str
    segment: Segment
    index: int
    header: SlotHeader
    fd: int  # holds the slot's write lock
    region: Region
    until_s: float
    verifying: bool = False


@dataclass(slots=True)
class _Read:
    peer: str
    segment: Segment
    index: int
    fd: int  # holds the slot's read lock
    region: Region
    until_s: float


class Host:
    """What this node keeps and gives for its peers.

    Args:
        promise_of: what is known to be agreed on of a run, and its span.
        sealers: workers that verify; `map_fn`, if given, spreads one image over threads.
        slow: workers for making memory.
        retain_s: how long a replica is kept that no peer has open; 0 for good.
    """

    def __init__(
        self,
        fabric: Fabric,
        store: SegmentStore,
        replicas: ReplicaStore,
        events: EventLog,
        *,
        promise_of: Callable[[str, str], tuple[Promise, int]],
        sealers: Workers,
        slow: Workers,
        map_fn: MapFunction | None,
        deadline_s: float,
        retain_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fabric, self._store, self._replicas, self._events = fabric, store, replicas, events
        self._promise_of, self._sealers, self._slow, self._map = promise_of, sealers, slow, map_fn
        self._deadline_s, self._retain_s, self._clock = deadline_s, retain_s, clock
        self._used_s: dict[str, float] = {}
        # Has a slot verified soon (and quarantined, if it is damaged).
        self.doubt: Callable[[Segment, int, int], None] = lambda segment, index, sequence: None
        # Not from 1: a lease or ticket of an earlier boot must mean nothing.
        self._ids = itertools.count(secrets.randbits(61))
        self._leases: dict[int, _Lease] = {}
        self._tickets: dict[int, _Ticket] = {}
        self._reads: dict[int, _Read] = {}
        self._building: dict[str, list[tuple[str, AnswerPeer]]] = {}
        self._epochs: dict[tuple[str, str], dict[int, int]] = {}
        self._told: dict[tuple[str, str], tuple[int, Promise, int]] = {}

    def serve(self, peer: str, message: p.PeerMessage, answer: AnswerPeer) -> bool:
        """Answer a message about snapshots, now or later; false if it is about something else."""
        if isinstance(message, p.OpenReplica):
            self._open_replica(peer, message, answer)
        elif isinstance(message, p.BeginSlot):
            answer(self._begin(peer, message))
        elif isinstance(message, p.SealSlot):
            self._seal(peer, message, answer)
        elif isinstance(message, p.AbortSlot):
            self._abort(peer, message)
            answer(p.PeerDone())
        elif isinstance(message, p.OpenRead):
            answer(self._open_read(peer, message))
        elif isinstance(message, p.CloseRead):
            self._close_read(peer, message.region)
            answer(p.PeerDone())
        elif isinstance(message, p.DoubtSlot):
            self._doubted(message)
            answer(p.PeerDone())
        elif isinstance(message, p.EndRun):
            self._end_run(peer, message)
            answer(p.PeerDone())
        elif isinstance(message, p.GetDescriptor):
            answer(self._descriptor(message))
        elif isinstance(message, GetHoldings):
            answer(self.holdings(message.job, message.run))
        else:
            return False
        return True

    def holdings(self, job: str, run: str) -> Holdings:
        """Every sealed snapshot of a run that lies here."""
        return local_holdings(self._store, self._replicas, job, run)

    def note_epoch(self, job: str, run: str, epoch: int, start: int) -> None:
        """A recovery began this epoch: what it abandoned is freed here."""
        known = self._epochs.setdefault((job, run), {})
        if known.get(epoch) == start:
            return
        known[epoch] = start
        for group in self._replicas.groups():
            told = group[0].descriptor
            if (told.job, told.run) == (job, run):
                records = self._replicas.records_beside(group[0])
                for ordinal, index in stale_slots(records, known):
                    self._free(group[ordinal], index)

    def peer_gone(self, peer: str) -> None:
        """A peer died or was restarted: what it was filling is free again."""
        for number, ticket in list(self._tickets.items()):
            if ticket.peer == peer and not ticket.verifying:
                self._end_ticket(number, SlotState.FREE)
        for region, read in list(self._reads.items()):
            if read.peer == peer:
                self._end_read(region)
        self._leases = {n: lease for n, lease in self._leases.items() if lease.peer != peer}

    def damaged(self, segment: Segment) -> None:
        """A slot of a replica was quarantined: whoever fills it must learn that it is gone."""
        self._leases = {n: v for n, v in self._leases.items() if v.segment is not segment}

    def tick(self, now_s: float) -> None:
        """End what nobody comes back for; drop replicas that nothing needs any more."""
        for number, ticket in list(self._tickets.items()):
            if now_s > ticket.until_s and not ticket.verifying:
                self._events.count("replica.ticket_expired")
                self._end_ticket(number, SlotState.FREE)
        for region, read in list(self._reads.items()):
            if now_s > read.until_s:
                self._end_read(region)
        for segment, why in self._unneeded() or self._expired(now_s):
            self.remove(segment, why)
        self._told = {run: v for run, v in self._told.items() if self._replicas.of_run(*run)}

    def remove(self, segment: Segment, why: str) -> None:
        """Free a replica's memory."""
        for number, ticket in list(self._tickets.items()):
            if ticket.segment is segment:
                self._end_ticket(number, SlotState.FREE)
        for region, read in list(self._reads.items()):
            if read.segment is segment:
                self._end_read(region)
        self._leases = {n: v for n, v in self._leases.items() if v.segment is not segment}
        self._replicas.remove(segment)
        self._used_s.pop(segment.path.name, None)
        size = format_bytes(segment.file_bytes)
        self._events.add("info", "replica_removed", f"{segment.path.name} ({size}): {why}")
        self._slow.submit(segment.close, _nothing, partial(self._failed, "closing a replica"))

    def close(self) -> None:
        """Give up every lease, ticket and read."""
        for number in list(self._tickets):
            self._end_ticket(number, SlotState.FREE)
        for region in list(self._reads):
            self._end_read(region)
        self._leases.clear()

    # -- replicas --------------------------------------------------------------------------------

    def _open_replica(self, peer: str, message: p.OpenReplica, answer: AnswerPeer) -> None:
        self.note_epoch(message.job, message.run, message.epoch, message.epoch_start)
        try:
            descriptor = decode_descriptor(message.descriptor)
            # Over a gap, the old suffix and the new one must both find room, or neither could ever go.
            num_slots = max(message.num_slots, 2 * descriptor.window)
            plan = self._replicas.plan(descriptor, num_slots, message.slot_bytes, message.origin)
        except (SegmentError, ValueError) as error:
            answer(p.PeerRefused("bad_message", str(error)))
            return
        told = (descriptor.job, descriptor.run, descriptor.rank)
        if told != (message.job, message.run, message.rank):
            answer(p.PeerRefused("bad_message", f"the descriptor is of {told}"))
            return
        segment = self._replicas.get(plan.path.name)
        if segment is not None:
            answer(self._lease(peer, segment))
            return
        waiting = self._building.setdefault(plan.path.name, [])
        waiting.append((peer, answer))
        if len(waiting) == 1:
            self._build(plan)

    def _build(self, plan: SegmentPlan) -> None:
        refused = self._replicas.refusal(plan)
        if refused:
            self._events.add("warning", "replica_refused", refused, plan.key)
            self._answer_builders(plan, p.PeerRefused("quota", refused, "raise its CKPTD_MEMORY"))
            return
        self._replicas.promise(plan)
        started = self._slow.submit(
            partial(self._store.build, plan),
            partial(self._built, plan),
            partial(self._not_built, plan),
        )
        if not started:
            self._replicas.cancel(plan)
            self._answer_builders(plan, p.PeerRefused("busy", "too many segments are being made"))

    def _built(self, plan: SegmentPlan, segment: Segment) -> None:
        self._replicas.enter(plan, segment)
        size = format_bytes(segment.file_bytes)
        self._events.add("info", "replica_opened", f"{segment.path.name} ({size})", plan.key)
        for peer, answer in self._building.pop(plan.path.name, []):
            answer(self._lease(peer, segment))

    def _not_built(self, plan: SegmentPlan, error: BaseException) -> None:
        self._replicas.cancel(plan)
        code = "quota" if isinstance(error, CannotReserve) else "internal"
        self._events.add("warning", "replica_refused", f"{plan.path.name}: {error}", plan.key)
        self._answer_builders(plan, p.PeerRefused(code, str(error)[:4000]))

    def _answer_builders(self, plan: SegmentPlan, reply: p.PeerReply) -> None:
        for _, answer in self._building.pop(plan.path.name, []):
            answer(reply)

    def _lease(self, peer: str, segment: Segment) -> p.PeerReply:
        for number, known in self._leases.items():
            if known.peer == peer and known.segment is segment:  # it asks again what is held
                return p.ReplicaOpened(number, held_slots(segment))
        if len(self._leases) >= _MAX_LEASES:
            return p.PeerRefused("busy", "too many replicas are open")
        lease = next(self._ids)
        self._leases[lease] = _Lease(peer, segment)
        return p.ReplicaOpened(lease, held_slots(segment))

    # -- filling a slot --------------------------------------------------------------------------

    def _begin(self, peer: str, message: p.BeginSlot) -> p.PeerReply:
        lease = self._leases.get(message.lease)
        if lease is None or lease.peer != peer:
            return p.PeerRefused("unknown", "no such lease: open the replica again")
        segment = lease.segment
        header = unpack_slot_header(message.header)
        if header is None or header.state is not SlotState.SEALED:
            return p.PeerRefused("bad_message", "not the header of a sealed slot")
        if not 0 < header.image_len <= segment.geometry.slot_bytes:
            return p.PeerRefused("bad_message", f"an image of {header.image_len} bytes")
        if len(self._tickets) >= _MAX_TICKETS:
            return p.PeerRefused("busy", "too many slots are being filled")
        told = segment.descriptor
        self._learn(told.job, told.run, header.epoch, message)
        promise, span = self._known_promise(told.job, told.run)
        ordinal = self._replicas.ordinal(segment)
        decision = admit(
            header_record(header, -1, -1, message.anchors),
            self._replicas.records_beside(segment),
            told.num_operators,
            generation=ordinal,
            promise=promise,
            epochs=self._epochs.get((told.job, told.run), {}),
            span=span,
            busy={(ordinal, index) for index in self._busy(segment)},
        )
        if not isinstance(decision, Admit):
            return p.PeerRefused(decision.code, decision.reason)
        return self._grant(peer, segment, decision.index, header)

    def _learn(self, job: str, run: str, epoch: int, told: p.BeginSlot) -> None:
        """What a sender knows of the run's promise; what an older epoch agreed on says nothing of this one."""
        known_epoch, known, span = self._told.get((job, run), (-1, Promise(), 1))
        if epoch > known_epoch:
            known, span = Promise(), 1
        elif epoch < known_epoch:
            return
        self._told[job, run] = (
            epoch,
            Promise(max(known.floor, told.floor), max(known.horizon, told.horizon)),
            max(span, told.span),
        )

    def _known_promise(self, job: str, run: str) -> tuple[Promise, int]:
        promise, span = self._promise_of(job, run)
        _, told, told_span = self._told.get((job, run), (-1, Promise(), 1))
        return (
            Promise(max(promise.floor, told.floor), max(promise.horizon, told.horizon)),
            max(span, told_span),
        )

    def _grant(self, peer: str, segment: Segment, index: int, header: SlotHeader) -> p.PeerReply:
        fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
        if not locks.try_lock(fd, slot_lock_byte(index), exclusive=True):
            os.close(fd)
            return p.PeerRefused("busy", f"slot {index} is being read")
        filling = replace(header, state=SlotState.FILLING, writer_pid=os.getpid())
        write_slot_header(segment.buffer, segment.geometry, index, filling)
        told = segment.descriptor
        region = self._fabric.register(
            segment.image(index, header),
            access=Access.WRITE,
            scope=Scope(peer, told.job, told.run),
        )
        ticket = next(self._ids)
        patience_s = self._deadline_s + header.image_len / _TICKET_FLOOR_BYTES_PER_S
        self._tickets[ticket] = _Ticket(
            peer, segment, index, header, fd, region, self._clock() + patience_s
        )
        key = region.key
        return p.SlotGranted(ticket, key.region, key.token, key.length)

    def _seal(self, peer: str, message: p.SealSlot, answer: AnswerPeer) -> None:
        ticket = self._tickets.get(message.ticket)
        if ticket is None or ticket.peer != peer:
            answer(p.PeerRefused("unknown", "no such ticket: begin again"))
            return
        if ticket.verifying:
            answer(p.PeerRefused("busy", "it is being verified"))
            return
        ticket.verifying = True
        ticket.region.close()  # from here on nobody else can change a byte
        image = ticket.segment.image(ticket.index, ticket.header)
        started = self._sealers.submit(
            partial(_wrong_with, image, ticket.header.header_digest, self._map),
            partial(self._verified, message.ticket, answer),
            partial(self._not_verified, message.ticket, answer),
        )
        if not started:
            self._end_ticket(message.ticket, SlotState.FREE)
            answer(p.PeerRefused("busy", "too many slots wait to be verified"))

    def _verified(self, number: int, answer: AnswerPeer, wrong: str) -> None:
        ticket = self._tickets.get(number)
        if ticket is None:  # the replica went meanwhile
            answer(p.PeerRefused("unknown", "the replica is gone: open it again"))
            return
        if wrong:
            self._end_ticket(number, SlotState.FREE)
            self._events.add(
                "error",
                "replica_damaged",
                f"{ticket.segment.path.name} slot {ticket.index} (iteration "
                f"{ticket.header.iteration}) from {ticket.peer} arrived damaged: {wrong}",
                _key_of(ticket.segment),
            )
            answer(p.PeerRefused("digest", wrong))
            return
        write_slot_header(
            ticket.segment.buffer, ticket.segment.geometry, ticket.index, ticket.header
        )
        self._end_ticket(number, None)
        self._events.count("replica.sealed")
        self._events.count("replica.sealed_bytes", ticket.header.image_len)
        answer(p.PeerDone())

    def _not_verified(self, number: int, answer: AnswerPeer, error: BaseException) -> None:
        if number in self._tickets:
            self._end_ticket(number, SlotState.FREE)
        self._failed("verifying a replica", error)
        answer(p.PeerRefused("internal", repr(error)[:4000]))

    def _abort(self, peer: str, message: p.AbortSlot) -> None:
        ticket = self._tickets.get(message.ticket)
        if ticket is not None and ticket.peer == peer and not ticket.verifying:
            self._end_ticket(message.ticket, SlotState.FREE)

    def _end_ticket(self, number: int, state: SlotState | None) -> None:
        """Give the slot up in this state (None: as it is) and unlock it."""
        ticket = self._tickets.pop(number)
        ticket.region.close()
        if state is not None:
            set_slot_state(ticket.segment.buffer, ticket.segment.geometry, ticket.index, state)
        os.close(ticket.fd)

    def _free(self, segment: Segment, index: int) -> None:
        with locks.lock_file(segment.path, slot_lock_byte(index), exclusive=True) as taken:
            if taken:
                set_slot_state(segment.buffer, segment.geometry, index, SlotState.FREE)
                self._events.count("replica.stale_freed")

    def _leased(self) -> set[int]:
        return {id(lease.segment) for lease in self._leases.values()}

    def _busy(self, segment: Segment) -> set[int]:
        """Slots of a replica that somebody reads or fills."""
        reading = {read.index for read in self._reads.values() if read.segment is segment}
        return reading | {t.index for t in self._tickets.values() if t.segment is segment}

    def _end_run(self, peer: str, message: p.EndRun) -> None:
        self._leases = {
            n: v
            for n, v in self._leases.items()
            if v.peer != peer
            or (v.segment.descriptor.job, v.segment.descriptor.run) != (message.job, message.run)
        }

    def _expired(self, now_s: float) -> list[tuple[Segment, str]]:
        """Replicas of runs that nobody has had to do with for long."""
        leased = self._leased()
        for segment in self._replicas:
            if id(segment) in leased or segment.path.name not in self._used_s:
                self._used_s[segment.path.name] = now_s
        limit_s = self._retain_s
        return [
            (segment, f"nobody has used it for {format_age(limit_s)}")
            for segment in self._replicas
            if limit_s and now_s - self._used_s[segment.path.name] > limit_s
        ]

    def _unneeded(self) -> list[tuple[Segment, str]]:
        found: list[tuple[Segment, str]] = []
        leased = self._leased()
        for group in self._replicas.groups():
            told = group[0].descriptor
            promise, span = self._known_promise(told.job, told.run)
            epochs = self._epochs.get((told.job, told.run), {})
            slots = self._replicas.slots_of(group)
            for name, why in removable(slots, promise, epochs=epochs, span=span):
                segment = self._replicas.get(name)
                if segment is not None and id(segment) not in leased:
                    found.append((segment, why))
        return found

    # -- reading ---------------------------------------------------------------------------------

    def _open_read(self, peer: str, message: p.OpenRead) -> p.PeerReply:
        segment = self._find(message.job, message.run, message.name)
        if segment is None:
            return p.PeerRefused("unknown", f"no segment {message.name} here")
        if message.slot >= segment.geometry.num_slots or len(self._reads) >= _MAX_READS:
            return p.PeerRefused("busy", f"slot {message.slot} cannot be read now")
        fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
        header = None
        if locks.try_lock(fd, slot_lock_byte(message.slot), exclusive=False):
            header = segment.header(message.slot)
        if (
            header is None
            or header.state is not SlotState.SEALED
            or header.sequence != message.sequence
        ):
            os.close(fd)
            return p.PeerRefused("unknown", f"slot {message.slot} no longer holds that snapshot")
        region = self._fabric.register(
            segment.image(message.slot, header),
            access=Access.READ,
            scope=Scope(peer, message.job, message.run),
        )
        until_s = self._clock() + _READ_IDLE_S + header.image_len / _TICKET_FLOOR_BYTES_PER_S
        key = region.key
        self._used_s[segment.path.name] = self._clock()
        self._reads[key.region] = _Read(peer, segment, message.slot, fd, region, until_s)
        return p.ReadOpened(key.region, key.token, key.length, segment.raw_header(message.slot))

    def _close_read(self, peer: str, region: int) -> None:
        read = self._reads.get(region)
        if read is not None and read.peer == peer:
            self._end_read(region)

    def _end_read(self, region: int) -> None:
        read = self._reads.pop(region)
        read.region.close()
        os.close(read.fd)

    def _doubted(self, message: p.DoubtSlot) -> None:
        segment = self._find(message.job, message.run, message.name)
        if segment is not None and message.slot < segment.geometry.num_slots:
            self.doubt(segment, message.slot, message.sequence)

    def _descriptor(self, message: p.GetDescriptor) -> p.PeerReply:
        segment = self._find(message.job, message.run, message.name)
        if segment is None:
            return p.PeerRefused("unknown", f"no segment {message.name} here")
        return p.Descriptor(
            segment.raw_descriptor(), segment.geometry.num_slots, segment.geometry.slot_bytes
        )

    def _find(self, job: str, run: str, name: str) -> Segment | None:
        for segment in (*self._store.of_run(job, run), *self._replicas.of_run(job, run)):
            if segment.path.name == name:
                return segment
        return None

    def _failed(self, what: str, error: BaseException) -> None:
        logger.error("%s failed", what, exc_info=error)
        self._events.add("error", "internal", f"{what}: {error!r}")


def local_holdings(store: SegmentStore, replicas: ReplicaStore, job: str, run: str) -> Holdings:
    """Every sealed snapshot of a run that lies on this node."""
    own = [held_segment(s, own=True) for s in store.of_run(job, run)]
    others = [held_segment(s, own=False) for s in replicas.of_run(job, run)]
    return Holdings(store.node_id, tuple(s for s in (*own, *others) if s.slots))


def _wrong_with(image: memoryview, header_digest: bytes, map_fn: MapFunction | None) -> str:
    """What in an image does not match its digests; empty if all of it does."""
    try:
        verify(image, header_digest, map_fn=map_fn)
    except ImageError as error:
        return str(error)
    return ""


def _key_of(segment: Segment) -> RankKey:
    told = segment.descriptor
    return RankKey(told.job, told.run, told.rank)


def _nothing(_: object) -> None:
    """The result is not needed."""
