"""Slots that peers are reading (docs/replication.md §7): they may not be reused until the peer has
closed them, is gone, or idles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ckptd.core.slots.ring import SlotState
from ckptd.core.slots.segment_format import slot_lock_byte, unpack_slot_header
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment
from ckptd.memory.slot_files import described_file, lend_slot, slot_file
from ckptd.peers.peer_link import AnswerPeer
from ckptd.peers.replicas.host_parts import SLOWEST_BYTES_PER_S, HostParts
from ckptd.peers.replicas.region_loans import Loan
from ckptd.transport import peer_messages as p
from ckptd.transport.verbs import Access, Region, Scope

__all__ = ["Reading"]

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
