"""Slots that peers read or fill (docs/replication.md §5, §7).

A slot that a peer *reads* is not reused until the peer has closed it, is gone, or idles.

A slot that a peer *fills* has a ticket: OPEN (the peer puts its image) → VERIFYING (no peer can
reach the slot any more; a worker compares the digests, last the cryptographic one that came over
the control session) → sealed, or given up: aborted, not verified, its peer gone, or idle for long.
A slot that is given up is free once nothing can land in it any more (`RegionLoans`).

A peer may put gradients instead of what follows from them and from a snapshot that is here, the *base*
(docs/recompute.md). The rest is computed before the digests are compared, so what is sealed has the bits
of the sender, or nothing is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from ckptd.core.replication.log_replicas import admit_log
from ckptd.core.replication.replicas import Admit, Deny, Promise, admit
from ckptd.core.slots.segment_format import (
    SlotHeader,
    slot_lock_byte,
    slot_view,
    unpack_slot_header,
    write_slot_header,
)
from ckptd.core.slots.slots import SlotState
from ckptd.holdings import header_record
from ckptd.memory import locks
from ckptd.memory.inventory import log_records
from ckptd.memory.segment_file import Segment
from ckptd.node_context import DigestThreads
from ckptd.peers.peer_link import AnswerPeer
from ckptd.peers.replica_leases import SLOWEST_BYTES_PER_S, HostParts, Loan, ReplicaLeases
from ckptd.recompute.recomputation import PlacedSnapshot
from ckptd.storage.image import verify
from ckptd.storage.image_format import ImageError
from ckptd.storage.strong_digest import matches
from ckptd.transport import peer_messages as p
from ckptd.transport.fabric.short_cut import is_being_filled
from ckptd.transport.verbs import Access, FileRange, Region, Scope

_MAX_READS = 4096
_MAX_READS_PER_PEER = 1024
_READ_IDLE_S = 60.0
_MAX_TICKETS = 4096
_MAX_TICKETS_PER_PEER = 1024


def _lend(
    segment: Segment, index: int, register: Callable[[int], Region | p.PeerRefused], *, writable: bool
) -> Loan | p.PeerRefused:
    """A loan of a slot; ``register`` locks the slot by its descriptor and makes the region, or refuses."""
    fd, region = -1, None
    try:
        fd = os.open(segment.path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        region = register(fd)
    except FileNotFoundError:
        return p.PeerRefused("unknown", f"{segment.path.name} is gone")
    except OSError as error:  # no descriptor is left, for example; the peer must not wait for an answer
        return p.PeerRefused("busy", f"{segment.path.name} cannot be used now: {error.strerror}")
    finally:
        if fd >= 0 and (region is None or isinstance(region, p.PeerRefused)):
            os.close(fd)
    return region if isinstance(region, p.PeerRefused) else Loan(segment, index, fd, region)


def slot_file(segment: Segment, index: int) -> FileRange:
    """The slot as a file range, which daemons of this host may use without the network."""
    status = os.fstat(segment.fd)
    offset = segment.geometry.slot_offset(index)
    return FileRange(str(segment.path), status.st_dev, status.st_ino, offset)


@dataclass(slots=True)
class _Read:
    peer: str
    boot_id: str
    loan: Loan
    until_s: float
    asked: bool = False  # for its digest


class ReadGrants:
    """Lets peers read sealed slots."""

    def __init__(self, host: HostParts) -> None:
        self._host = host
        self._reads: dict[int, _Read] = {}

    def slots_of(self, segment: Segment) -> set[int]:
        return {r.loan.index for r in self._reads.values() if r.loan.segment is segment}

    def open(self, peer: str, message: p.OpenRead, segment: Segment) -> p.PeerReply:
        """A region over a slot, if it still holds that snapshot."""
        own = sum(read.peer == peer for read in self._reads.values())
        full = len(self._reads) >= _MAX_READS or own >= _MAX_READS_PER_PEER
        if message.slot >= segment.geometry.num_slots or full:
            return p.PeerRefused("busy", f"slot {message.slot} cannot be read now")
        register = partial(self._register, peer, message, segment)
        loan = _lend(segment, message.slot, register, writable=False)
        if isinstance(loan, p.PeerRefused):
            return loan
        key = loan.region.key
        until_s = self._host.node.clock() + _READ_IDLE_S + key.length / SLOWEST_BYTES_PER_S
        self._reads[key.region] = _Read(peer, message.boot_id, loan, until_s)
        raw = segment.raw_header(message.slot)
        header = unpack_slot_header(raw)
        kept = "" if header is None else segment.kept_digest(message.slot, header)
        return p.ReadOpened(key.region, key.token, key.length, raw, key.file, kept)

    def _register(self, peer: str, message: p.OpenRead, segment: Segment, fd: int) -> Region | p.PeerRefused:
        header = None
        if locks.try_lock(fd, slot_lock_byte(message.slot), exclusive=False):
            header = segment.sealed(message.slot, message.sequence)
        if header is None:
            return p.PeerRefused("unknown", f"slot {message.slot} no longer holds that snapshot")
        return self._host.fabric.register(
            segment.image(message.slot, header),
            access=Access.READ,
            scope=Scope(peer, message.job, message.run),
            file=slot_file(segment, message.slot),
        )

    def digest(self, peer: str, region: int, answer: AnswerPeer) -> None:
        """Make the digest of a slot that the peer has open, while the peer reads it."""
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

        self._host.workers.vouch(read.loan.segment, read.loan.index, header, vouched)

    def close_read(self, peer: str, region: int) -> None:
        self._end_where(lambda number, read: number == region and read.peer == peer)

    def peer_gone(self, peer: str, boot_id: str) -> None:
        """End the reads of a peer, except those of this boot of it ("": all)."""
        self._end_where(lambda _, read: read.peer == peer and (not boot_id or read.boot_id != boot_id))

    def removed(self, segment: Segment) -> None:
        self._end_where(lambda _, read: read.loan.segment is segment)

    def tick(self, now_s: float) -> None:
        self._end_where(lambda _, read: now_s > read.until_s)

    def close(self) -> None:
        for read in self._reads.values():
            self._host.loans.abandon(read.loan, None)
        self._reads.clear()

    def _end_where(self, over: Callable[[int, _Read], bool]) -> None:
        for region in [region for region, read in self._reads.items() if over(region, read)]:
            self._host.loans.end(self._reads.pop(region).loan, None)


@dataclass(slots=True)
class _Ticket:
    peer: str
    boot_id: str
    loan: Loan
    header: SlotHeader
    until_s: float
    base: int = -1  # the slot from which this one may be computed
    digest: str = ""  # arrives with the seal
    verifying: bool = False
    computed: bool = False


class WriteGrants:
    """Grants slots of replicas to peers, and seals them.

    Args:
        reads: slots that peers read are not granted.
    """

    def __init__(self, host: HostParts, leases: ReplicaLeases, reads: ReadGrants) -> None:
        self._host, self._known, self._leases, self._reads = host, host.known, leases, reads
        self._deadline_s = host.node.config.peer_deadline_s
        self._tickets: dict[int, _Ticket] = {}

    def slots_of(self, segment: Segment) -> set[int]:
        return {t.loan.index for t in self._tickets.values() if t.loan.segment is segment}

    def _busy(self, segment: Segment) -> set[int]:
        """Slots of a replica that a peer fills, reads, or still touches, and those that are computed from."""
        touched = self._reads.slots_of(segment) | self._host.loans.slots_of(segment)
        bases = {t.base for t in self._tickets.values() if t.loan.segment is segment}
        return self.slots_of(segment) | touched | bases

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
        if header.image_len + message.gradient_bytes > segment.geometry.slot_bytes:
            text = f"{message.gradient_bytes} bytes of gradients do not fit behind the image"
            return p.PeerRefused("bad_message", text)
        own = sum(ticket.peer == peer for ticket in self._tickets.values())
        if len(self._tickets) >= _MAX_TICKETS or own >= _MAX_TICKETS_PER_PEER:
            return p.PeerRefused("busy", "too many slots are being filled")
        job, run = segment.key.job, segment.key.run
        newest = self._known.newest_epoch(job, run)
        if max(header.epoch, message.epoch) > newest:
            # An epoch that nobody announced would make all that lies here stale, or end every promise.
            text = (
                f"epoch {max(header.epoch, message.epoch)} is above {newest}, the newest that was announced"
            )
            return p.PeerRefused("bad_message", text)
        if message.epoch >= 0:
            promised = Promise(message.floor, message.horizon)
            self._known.learn(job, run, message.epoch, promised, message.span)
        admitted = self._admit_log if segment.is_log else self._admit
        decision = admitted(segment, header, message)
        if not isinstance(decision, Admit):
            return p.PeerRefused(decision.code, decision.reason)
        base, why_whole = self._base(segment, decision.index, header, message)
        reply = self._grant(peer, boot_id, segment, (decision.index, base, message.gradient_bytes), header)
        if isinstance(reply, p.SlotGranted) and message.gradient_bytes:
            reply = msgspec.structs.replace(reply, recomputes=base >= 0, why_whole=why_whole)
        return reply

    def _base(
        self, segment: Segment, index: int, header: SlotHeader, message: p.BeginSlot
    ) -> tuple[int, str]:
        """The slot from which a snapshot can be computed; or -1, and why it is needed whole."""
        if not message.gradient_bytes:
            return -1, ""
        recomputation = self._host.workers.recomputation
        if recomputation is None:
            return -1, "nothing is computed from gradients here"
        if why := recomputation.why_not():
            return -1, why
        found = [
            (h.sequence, i)
            for i, h in segment.headers()
            if i != index
            and (h.state, h.iteration, h.epoch) == (SlotState.SEALED, message.base, header.epoch)
        ]
        if not found:
            return -1, "the snapshot from which it would be computed is not here"
        return max(found)[1], ""

    def _admit_log(self, segment: Segment, header: SlotHeader, message: p.BeginSlot) -> Admit | Deny:
        return admit_log(
            header_record(header, -1, -1, b""),
            log_records(segment),
            oldest=message.oldest,
            epochs=self._known.epochs(segment.key.job, segment.key.run),
            busy=self._busy(segment),
        )

    def _admit(self, segment: Segment, header: SlotHeader, message: p.BeginSlot) -> Admit | Deny:
        job, run = segment.key.job, segment.key.run
        ordinal = self._host.replicas.ordinal(segment)
        promise, span = self._known.promise(job, run)
        return admit(
            header_record(header, -1, -1, message.anchors),
            self._host.replicas.group_records(segment),
            segment.descriptor.num_operators,
            generation=ordinal,
            promise=promise,
            epochs=self._known.epochs(job, run),
            span=span,
            busy={(ordinal, index) for index in self._busy(segment)},
        )

    def seal(self, peer: str, message: p.SealSlot, answer: AnswerPeer) -> None:
        """Verify the image that the peer put, and show it to recovery."""
        ticket = self._tickets.get(message.ticket)
        if ticket is None or ticket.peer != peer:
            answer(p.PeerRefused("unknown", "no such ticket: begin again"))
            return
        if ticket.verifying:
            answer(p.PeerRefused("busy", "it is being verified"))
            return
        if message.recompute and ticket.base < 0:
            answer(p.PeerRefused("bad_message", "this snapshot is not computed here: put all of its image"))
            return
        ticket.verifying, ticket.digest, ticket.computed = True, message.digest, message.recompute
        # The image must not change any more once it is verified.
        then = self._compute if message.recompute else self._verify
        self._host.loans.quiet(ticket.loan, partial(then, message.ticket, answer))

    def abort(self, peer: str, message: p.AbortSlot) -> None:
        ticket = self._tickets.get(message.ticket)
        if ticket is not None and ticket.peer == peer and not ticket.verifying:
            self._end(message.ticket, SlotState.FREE)

    # -- ends ------------------------------------------------------------------------------------

    def peer_gone(self, peer: str, boot_id: str) -> None:
        """Free what a peer was filling, except what this boot of it has begun ("": all)."""
        self._end_where(lambda t: t.peer == peer and (not boot_id or t.boot_id != boot_id))

    def removed(self, segment: Segment) -> None:
        for number, ticket in list(self._tickets.items()):
            if ticket.loan.segment is segment:
                self._end(number, SlotState.FREE)

    def tick(self, now_s: float) -> None:
        if ended := self._end_where(lambda t: now_s > t.until_s):
            self._host.node.events.count("replica.ticket_expired", ended)

    def close(self) -> None:
        for ticket in self._tickets.values():
            self._host.loans.abandon(ticket.loan, SlotState.FREE)
        self._tickets.clear()

    def _end_where(self, over: Callable[[_Ticket], bool]) -> int:
        """End tickets, but not while they are being verified; returns how many."""
        found = [n for n, t in self._tickets.items() if not t.verifying and over(t)]
        for number in found:
            self._end(number, SlotState.FREE)
        return len(found)

    def _end(self, number: int, state: SlotState | None) -> None:
        self._host.loans.end(self._tickets.pop(number).loan, state)

    # -- one ticket ------------------------------------------------------------------------------

    def _grant(
        self, peer: str, boot_id: str, segment: Segment, place: tuple[int, int, int], header: SlotHeader
    ) -> p.PeerReply:
        """A ticket for a place: the slot, its base (or -1), and the bytes of gradients behind the image."""
        index, base, gradient_bytes = place
        length = header.image_len + (gradient_bytes if base >= 0 else 0)
        register = partial(self._register, peer, segment, index, header, length)
        loan = _lend(segment, index, register, writable=True)
        if isinstance(loan, p.PeerRefused):
            return loan
        number, key = next(self._host.ids), loan.region.key
        until_s = self._host.node.clock() + self._deadline_s + header.image_len / SLOWEST_BYTES_PER_S
        self._tickets[number] = _Ticket(peer, boot_id, loan, header, until_s, base)
        return p.SlotGranted(number, key.region, key.token, key.length, key.file)

    def _register(
        self, peer: str, segment: Segment, index: int, header: SlotHeader, length: int, fd: int
    ) -> Region | p.PeerRefused:
        """A region over the slot; the slot is marked as filling last, when nothing can fail any more."""
        if not locks.try_lock(fd, slot_lock_byte(index), exclusive=True):
            return p.PeerRefused("busy", f"slot {index} is being read")
        geometry = segment.geometry
        # By a peer of this host, for a daemon that was killed meanwhile.
        if is_being_filled(segment.fd, geometry.slot_offset(index), geometry.slot_bytes):
            return p.PeerRefused("busy", f"slot {index} is still being written")
        region = self._host.fabric.register(
            slot_view(segment.buffer, geometry, index)[:length],
            access=Access.WRITE,
            scope=Scope(peer, segment.key.job, segment.key.run),
            file=slot_file(segment, index),
        )
        filling = replace(header, state=SlotState.FILLING, writer_pid=os.getpid())
        write_slot_header(segment.buffer, geometry, index, filling)
        return region

    def _compute(self, number: int, answer: AnswerPeer) -> None:
        """Fill in what the peer did not put, then verify all of it."""
        ticket, recomputation = self._tickets.get(number), self._host.workers.recomputation
        if ticket is None or recomputation is None:
            answer(p.PeerRefused("unknown", "the replica is gone: open it again"))
            return
        segment = ticket.loan.segment
        base = segment.header(ticket.base)
        if base is None:
            self._not_computed(number, answer, "the header of its base is damaged")
            return
        recomputation.compute(
            str(segment.path),
            segment.geometry.slot_bytes,
            _place(segment, ticket.base, base),
            _place(segment, ticket.loan.index, ticket.header),
            timeout_s=self._deadline_s,  # the sender waits for twice as long, then sends the image
            done=partial(self._computed, number, answer),
            failed=partial(self._not_computed, number, answer),
        )

    def _computed(self, number: int, answer: AnswerPeer, computed_bytes: int) -> None:
        self._host.node.events.count("replica.recomputed_bytes", computed_bytes)
        self._verify(number, answer)

    def _not_computed(self, number: int, answer: AnswerPeer, reason: str) -> None:
        if number not in self._tickets:
            answer(p.PeerRefused("unknown", "the replica is gone: open it again"))
            return
        self._end(number, SlotState.FREE)
        self._host.node.events.count("replica.not_recomputed")
        answer(p.PeerRefused("recompute", reason))

    def _verify(self, number: int, answer: AnswerPeer) -> None:
        ticket = self._tickets.get(number)
        if ticket is None:
            answer(p.PeerRefused("unknown", "the replica is gone: open it again"))
            return
        image = ticket.loan.segment.image(ticket.loan.index, ticket.header)
        digests = self._host.workers.digests
        started = self._host.workers.verifiers.submit(
            partial(_mismatch, image, ticket.header.header_digest, ticket.digest, digests),
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
        segment, index, events = ticket.loan.segment, ticket.loan.index, self._host.node.events
        kind, wrong = found
        if wrong and ticket.computed:
            # What arrived has digests of its own on the way, so the sender's kernels are others than ours.
            self._not_computed(number, answer, f"computed with other bits than the sender's: {wrong}")
            return
        if wrong:
            self._end(number, SlotState.FREE)
            where = f"{segment.path.name} slot {index} (iteration {ticket.header.iteration})"
            events.add("error", kind, f"{where} from {ticket.peer} arrived damaged: {wrong}", segment.key)
            answer(p.PeerRefused("digest", wrong))
            return
        segment.keep_digest(index, ticket.header, ticket.digest)
        write_slot_header(segment.buffer, segment.geometry, index, ticket.header)
        self._end(number, None)
        events.count("replica.sealed")
        events.count("replica.recomputed", int(ticket.computed))
        events.count("replica.sealed_bytes", ticket.header.image_len)
        answer(p.PeerDone())

    def _not_verified(self, number: int, answer: AnswerPeer, error: BaseException) -> None:
        if number in self._tickets:
            self._end(number, SlotState.FREE)
        self._host.node.failed("verifying a replica", error)
        answer(p.PeerRefused("internal", repr(error)[:4000]))


def _place(segment: Segment, index: int, header: SlotHeader) -> PlacedSnapshot:
    offset = segment.geometry.slot_offset(index)
    return PlacedSnapshot(offset, header.image_len, header.iteration, header.sequence)


def _mismatch(
    image: memoryview, header_digest: bytes, digest: str, threads: DigestThreads
) -> tuple[str, str]:
    """The kind of event, and what does not match its digest; two empty texts if all matches."""
    try:
        verify(image, header_digest, map_fn=threads.map_fn)
    except ImageError as error:
        return "replica_damaged", str(error)
    if not matches(image, digest, threads=threads.count):
        text = "its xxh3 digests match, and the cryptographic digest of its sender does not"
        return "replica_forged", f"{text}: somebody changed bytes and digests together"
    return "", ""
