"""Slots that peers are filling: granted to one of them, verified, sealed (docs/replication.md §5).

A ticket is OPEN (the peer puts its image) → VERIFYING (nobody can reach the slot any more, a worker
compares the digests, last the cryptographic one that the sender told over the control session) →
sealed, or given up: aborted, not verified, its peer gone, or nothing heard for long. A slot that is
given up is free again when nothing can land in it any more (`ckptd.peers.replica_leases`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ckptd.core.replication.log_replicas import admit_log
from ckptd.core.replication.replicas import Admit, Deny, Promise, admit
from ckptd.core.slots.ring import SlotState
from ckptd.core.slots.segment_format import (
    SlotHeader,
    slot_lock_byte,
    unpack_slot_header,
    write_slot_header,
)
from ckptd.holdings import header_record
from ckptd.memory import locks
from ckptd.memory.inventory import log_records
from ckptd.memory.segment_file import Segment
from ckptd.memory.slot_holds import described_file, left_behind, lend_slot, slot_file
from ckptd.node_context import DigestThreads
from ckptd.peers.peer_link import AnswerPeer
from ckptd.peers.replica_leases import SLOWEST_BYTES_PER_S, HostParts, Leasing, Loan
from ckptd.storage.images.image import verify
from ckptd.storage.images.image_format import ImageError
from ckptd.storage.images.strong_digest import matches
from ckptd.transport.control import peer_messages as p
from ckptd.transport.verbs import Access, Region, Scope

__all__ = ["Filling", "Reading"]


_MAX_READS = 4096
_MAX_READS_PER_PEER = 1024
_IDLE_S = 60.0


@dataclass(slots=True)
class _Read:
    peer: str
    boot_id: str
    loan: Loan
    until_s: float
    asked: bool = False  # for its digest


class Reading:
    """Lets peers read sealed slots."""

    def __init__(self, host: HostParts) -> None:
        self._host = host
        self._reads: dict[int, _Read] = {}

    def slots_of(self, segment: Segment) -> set[int]:
        """Slots of a segment that are being read."""
        return {r.loan.index for r in self._reads.values() if r.loan.segment is segment}

    def open(self, peer: str, message: p.OpenRead, segment: Segment) -> p.PeerReply:
        """A region over a slot, if it still holds that snapshot."""
        own = sum(read.peer == peer for read in self._reads.values())
        full = len(self._reads) >= _MAX_READS or own >= _MAX_READS_PER_PEER
        if message.slot >= segment.geometry.num_slots or full:
            return p.PeerRefused("busy", f"slot {message.slot} cannot be read now")
        lent = lend_slot(segment, partial(self._lend, peer, message, segment), writable=False)
        if isinstance(lent, p.PeerRefused):
            return lent
        fd, region = lent
        key = region.key
        until_s = self._host.clock() + _IDLE_S + key.length / SLOWEST_BYTES_PER_S
        loan = Loan(segment, message.slot, fd, region)
        self._reads[key.region] = _Read(peer, message.boot_id, loan, until_s)
        raw = segment.raw_header(message.slot)
        header = unpack_slot_header(raw)
        kept = "" if header is None else segment.kept_digest(message.slot, header)
        return p.ReadOpened(key.region, key.token, key.length, raw, described_file(key), kept)

    def _lend(self, peer: str, message: p.OpenRead, segment: Segment, fd: int) -> Region | p.PeerRefused:
        """A region over the slot, locked by ``fd``."""
        header = None
        if locks.try_lock(fd, slot_lock_byte(message.slot), exclusive=False):
            header = segment.header(message.slot)
        if header is None or header.state is not SlotState.SEALED or header.sequence != message.sequence:
            return p.PeerRefused("unknown", f"slot {message.slot} no longer holds that snapshot")
        return self._host.fabric.register(
            segment.image(message.slot, header),
            access=Access.READ,
            scope=Scope(peer, message.job, message.run),
            file=slot_file(segment, message.slot),
        )

    def digest(self, peer: str, region: int, answer: AnswerPeer) -> None:
        """Have the digest made of what a peer has open; it is made while the peer reads."""
        read = self._reads.get(region)
        header = None if read is None else read.loan.segment.header(read.loan.index)
        if read is None or read.peer != peer or header is None:
            answer(p.PeerRefused("unknown", "nothing is open under this number"))
            return
        if read.asked:
            answer(p.PeerRefused("busy", "it was asked for already"))
            return
        read.asked = True

        def vouched(digest: str, why: str) -> None:
            answer(p.OpenedDigest(digest) if digest else p.PeerRefused("digest", why))

        self._host.vouch(read.loan.segment, read.loan.index, header, vouched)

    def close_read(self, peer: str, region: int) -> None:
        """The peer has it."""
        read = self._reads.get(region)
        if read is not None and read.peer == peer:
            self._end(region)

    def peer_gone(self, peer: str, boot_id: str) -> None:
        """End what a peer reads, but not what this boot of it has opened ("": all)."""
        for region, read in list(self._reads.items()):
            if read.peer == peer and (not boot_id or read.boot_id != boot_id):
                self._end(region)

    def removed(self, segment: Segment) -> None:
        """The segment is gone."""
        for region, read in list(self._reads.items()):
            if read.loan.segment is segment:
                self._end(region)

    def tick(self, now_s: float) -> None:
        """End what nobody comes back for."""
        for region, read in list(self._reads.items()):
            if now_s > read.until_s:
                self._end(region)

    def close(self) -> None:
        """End all."""
        for read in self._reads.values():
            self._host.lending.abandon(read.loan, None)
        self._reads.clear()

    def _end(self, region: int) -> None:
        self._host.lending.end(self._reads.pop(region).loan, None)


_MAX_TICKETS = 4096
_MAX_TICKETS_PER_PEER = 1024


@dataclass(slots=True)
class _Ticket:
    peer: str
    boot_id: str
    loan: Loan
    header: SlotHeader
    until_s: float
    digest: str = ""  # told with the seal
    verifying: bool = False


class Filling:
    """Grants slots of replicas, and seals them.

    Args:
        reads: slots that somebody reads are not given to anybody.
    """

    def __init__(
        self,
        host: HostParts,
        leases: Leasing,
        reads: Reading,
    ) -> None:
        self._host, self._known, self._leases, self._reads = host, host.known, leases, reads
        self._deadline_s = host.node.config.peer_deadline_s
        self._tickets: dict[int, _Ticket] = {}

    def slots_of(self, segment: Segment) -> set[int]:
        """Slots of a replica that are being filled."""
        return {t.loan.index for t in self._tickets.values() if t.loan.segment is segment}

    def _busy(self, segment: Segment) -> set[int]:
        """Slots of a replica that somebody fills, reads, or still touches."""
        touched = self._reads.slots_of(segment) | self._host.lending.slots_of(segment)
        return self.slots_of(segment) | touched

    # -- from peers ------------------------------------------------------------------------------

    def begin(self, peer: str, message: p.BeginSlot) -> p.PeerReply:
        """A slot for this snapshot, or why there is none."""
        found = self._leases.use(message.lease, peer)
        if found is None:
            return p.PeerRefused("unknown", "no such lease: open the replica again")
        segment, boot_id = found
        header = unpack_slot_header(message.header)
        if header is None or header.state is not SlotState.SEALED:
            return p.PeerRefused("bad_message", "not the header of a sealed slot")
        if not 0 < header.image_len <= segment.geometry.slot_bytes:
            return p.PeerRefused("bad_message", f"an image of {header.image_len} bytes")
        own = sum(ticket.peer == peer for ticket in self._tickets.values())
        if len(self._tickets) >= _MAX_TICKETS or own >= _MAX_TICKETS_PER_PEER:
            return p.PeerRefused("busy", "too many slots are being filled")
        job, run = segment.descriptor.job, segment.descriptor.run
        newest = self._known.newest_epoch(job, run)
        if max(header.epoch, message.epoch) > newest:
            # Told by itself it would make all that lies here stale, or end every promise.
            text = f"epoch {max(header.epoch, message.epoch)}, and of none after {newest} was told"
            return p.PeerRefused("bad_message", text)
        told = Promise(message.floor, message.horizon)
        if message.epoch >= 0:
            self._known.learn(job, run, message.epoch, told, message.span)
        promise, span = self._known.promise(job, run)
        if segment.is_log:
            decision = self._admit_log(segment, header, message)
        else:
            decision = self._admit(segment, header, message, promise, span)
        if not isinstance(decision, Admit):
            return p.PeerRefused(decision.code, decision.reason)
        return self._grant(peer, boot_id, segment, decision.index, header)

    def _admit_log(self, segment: Segment, header: SlotHeader, message: p.BeginSlot) -> Admit | Deny:
        told = segment.descriptor
        return admit_log(
            header_record(header, -1, -1, b""),
            log_records(segment),
            oldest=message.oldest,
            epochs=self._known.epochs(told.job, told.run),
            busy=self._busy(segment),
        )

    def _admit(
        self,
        segment: Segment,
        header: SlotHeader,
        message: p.BeginSlot,
        promise: Promise,
        span: int,
    ) -> Admit | Deny:
        told, ordinal = segment.descriptor, self._host.replicas.ordinal(segment)
        taken = self._busy(segment)
        return admit(
            header_record(header, -1, -1, message.anchors),
            self._host.replicas.auxiliary_records(segment),
            segment.descriptor.num_operators,
            generation=ordinal,
            promise=promise,
            epochs=self._known.epochs(told.job, told.run),
            span=span,
            busy={(ordinal, index) for index in taken},
        )

    def seal(self, peer: str, message: p.SealSlot, answer: AnswerPeer) -> None:
        """Verify what was put, and show it to recovery."""
        ticket = self._tickets.get(message.ticket)
        if ticket is None or ticket.peer != peer:
            answer(p.PeerRefused("unknown", "no such ticket: begin again"))
            return
        if ticket.verifying:
            answer(p.PeerRefused("busy", "it is being verified"))
            return
        ticket.verifying, ticket.digest = True, message.digest
        # What is verified must not change any more.
        self._host.lending.quiet(ticket.loan, partial(self._verify, message.ticket, answer))

    def abort(self, peer: str, message: p.AbortSlot) -> None:
        """The peer will not go on with it."""
        ticket = self._tickets.get(message.ticket)
        if ticket is not None and ticket.peer == peer and not ticket.verifying:
            self._end(message.ticket, SlotState.FREE)

    # -- ends ------------------------------------------------------------------------------------

    def peer_gone(self, peer: str, boot_id: str) -> None:
        """What a peer was filling is free again, but what this boot of it has begun ("": all)."""
        self._end_where(lambda t: t.peer == peer and (not boot_id or t.boot_id != boot_id))

    def removed(self, segment: Segment) -> None:
        """The replica is gone."""
        for number, ticket in list(self._tickets.items()):
            if ticket.loan.segment is segment:
                self._end(number, SlotState.FREE)

    def tick(self, now_s: float) -> None:
        """End what nobody goes on with."""
        if ended := self._end_where(lambda t: now_s > t.until_s):
            self._host.node.events.count("replica.ticket_expired", ended)

    def close(self) -> None:
        """Give up every ticket."""
        for ticket in self._tickets.values():
            self._host.lending.abandon(ticket.loan, SlotState.FREE)
        self._tickets.clear()

    def _end_where(self, over: Callable[[_Ticket], bool]) -> int:
        """End tickets that are not being verified; how many."""
        found = [n for n, t in self._tickets.items() if not t.verifying and over(t)]
        for number in found:
            self._end(number, SlotState.FREE)
        return len(found)

    def _end(self, number: int, state: SlotState | None) -> None:
        self._host.lending.end(self._tickets.pop(number).loan, state)

    # -- one ticket ------------------------------------------------------------------------------

    def _grant(
        self, peer: str, boot_id: str, segment: Segment, index: int, header: SlotHeader
    ) -> p.PeerReply:
        lent = lend_slot(segment, partial(self._lend, peer, segment, index, header), writable=True)
        if isinstance(lent, p.PeerRefused):
            return lent
        fd, region = lent
        number = next(self._host.ids)
        until_s = self._host.clock() + self._deadline_s + header.image_len / SLOWEST_BYTES_PER_S
        loan = Loan(segment, index, fd, region)
        self._tickets[number] = _Ticket(peer, boot_id, loan, header, until_s)
        key = region.key
        return p.SlotGranted(number, key.region, key.token, key.length, described_file(key))

    def _lend(
        self, peer: str, segment: Segment, index: int, header: SlotHeader, fd: int
    ) -> Region | p.PeerRefused:
        """A region over the slot, locked by ``fd`` and marked as filling; the mark comes last, when
        nothing can fail any more.
        """
        if not locks.try_lock(fd, slot_lock_byte(index), exclusive=True):
            return p.PeerRefused("busy", f"slot {index} is being read")
        if left_behind(segment, index):
            return p.PeerRefused("busy", f"slot {index} is still being written")
        told = segment.descriptor
        region = self._host.fabric.register(
            segment.image(index, header),
            access=Access.WRITE,
            scope=Scope(peer, told.job, told.run),
            file=slot_file(segment, index),
        )
        filling = replace(header, state=SlotState.FILLING, writer_pid=os.getpid())
        write_slot_header(segment.buffer, segment.geometry, index, filling)
        return region

    def _verify(self, number: int, answer: AnswerPeer) -> None:
        ticket = self._tickets.get(number)
        if ticket is None:
            answer(p.PeerRefused("unknown", "the replica is gone: open it again"))
            return
        image = ticket.loan.segment.image(ticket.loan.index, ticket.header)
        digests = self._host.workers.digests
        started = self._host.workers.verifiers.submit(
            partial(_wrong_with, image, ticket.header.header_digest, ticket.digest, digests),
            partial(self._verified, number, answer),
            partial(self._not_verified, number, answer),
        )
        if not started:
            self._end(number, SlotState.FREE)
            answer(p.PeerRefused("busy", "too many slots wait to be verified"))

    def _verified(self, number: int, answer: AnswerPeer, found: tuple[str, str]) -> None:
        ticket = self._tickets.get(number)
        if ticket is None:  # the replica went meanwhile
            answer(p.PeerRefused("unknown", "the replica is gone: open it again"))
            return
        segment, index = ticket.loan.segment, ticket.loan.index
        kind, wrong = found
        if wrong:
            self._end(number, SlotState.FREE)
            self._host.node.events.add(
                "error",
                kind,
                f"{segment.path.name} slot {index} (iteration {ticket.header.iteration}) from "
                f"{ticket.peer} arrived damaged: {wrong}",
                segment.key,
            )
            answer(p.PeerRefused("digest", wrong))
            return
        segment.keep_digest(index, ticket.header, ticket.digest)
        write_slot_header(segment.buffer, segment.geometry, index, ticket.header)
        self._end(number, None)
        self._host.node.events.count("replica.sealed")
        self._host.node.events.count("replica.sealed_bytes", ticket.header.image_len)
        answer(p.PeerDone())

    def _not_verified(self, number: int, answer: AnswerPeer, error: BaseException) -> None:
        if number in self._tickets:
            self._end(number, SlotState.FREE)
        self._host.failed("verifying a replica", error)
        answer(p.PeerRefused("internal", repr(error)[:4000]))


def _wrong_with(
    image: memoryview, header_digest: bytes, digest: str, threads: DigestThreads
) -> tuple[str, str]:
    """What in an image does not match its digests, and the event that says so; empty if all of it does."""
    try:
        verify(image, header_digest, map_fn=threads.map_fn)
    except ImageError as error:
        return "replica_damaged", str(error)
    if not matches(image, digest, threads=threads.count):
        text = "its xxh3 digests match, the cryptographic digest that its sender told does not"
        return "replica_forged", f"{text}: somebody changed bytes and digests together"
    return "", ""
