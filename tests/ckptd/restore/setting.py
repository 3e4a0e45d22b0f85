"""A fetch without a network: its holders are objects of the test, its memory and its workers are real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from ckptd.core.recovery.held import STORE_NODE
from ckptd.core.slots.segment_format import (
    SlotHeader,
    pack_slot_header,
    slot_lock_byte,
)
from ckptd.core.slots.slots import SlotState
from ckptd.event_log import EventLog
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentStore
from ckptd.node_context import DigestThreads
from ckptd.peers.peer_link import PeerLink
from ckptd.restore.puller import CopyDoubts, FetchTools
from ckptd.restore.slot_fetch import FetchJob
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import (
    FetchPiece,
    FetchSource,
    GetHoldings,
    HeldSegment,
    HeldSlot,
    Holdings,
)
from ckptd.transport.verbs import Completion, Done, Fault, RegionKey
from ckptd.workers import Workers
from tests.ckptd.memory.fresh import put_header
from tests.ckptd.running import descriptor, eventually
from tests.ckptd.snapshots import Snapshot, snapshot_of

__all__ = ["AWAY", "MIB", "SNAPSHOT", "Holder", "Setting", "check_sealed"]

MIB = 1 << 20
SNAPSHOT = snapshot_of(4)
AWAY = FetchSource("away", "a.seg", 0)


@dataclass
class Holder:
    """Grants reads, and delivers when it is told to (`later`).

    Args:
        ended: what is got of the first so many reads is refused, as if they had been ended.
        refuses: segments that it knows nothing of.
        others: segments that hold something else.
        damaged: bytes of a segment's image that are not as they were.
        gone: bytes of a segment's image that it knows to be lost.
        vouches: what it vouches for of a segment, if it is not what it holds.
        unmade: segments of which it has made no digest yet; `silent`: of which it makes none.
        images: what it delivers of a segment, if it is not the snapshot's image.
    """

    ended: int = 0
    refuses: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    damaged: dict[str, list[int]] = field(default_factory=dict)
    gone: dict[str, list[int]] = field(default_factory=dict)
    vouches: dict[str, str] = field(default_factory=dict)
    unmade: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    images: dict[str, bytes] = field(default_factory=dict)
    snapshot: Snapshot = SNAPSHOT
    away: bool = False  # when it is told of a doubt
    boot_id: str = "b1"
    opened: list[p.OpenRead] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    doubted: list[str] = field(default_factory=list)
    got_of: list[int] = field(default_factory=list)
    got: list[tuple[str, int, int]] = field(default_factory=list)
    later: list[Callable[[], None]] = field(default_factory=list)

    def ask(
        self,
        message: p.PeerMessage,
        expect: type,
        done: Callable[[Any], None],
        failed: Callable[[str, str], None],
        *,
        timeout_s: float = 10.0,
    ) -> None:
        if isinstance(message, GetHoldings):
            self.later.append(lambda: done(self._holdings()))
            return
        if isinstance(message, p.GetDigest):
            name = self.opened[message.region - 1].name
            if name in self.silent:
                self.later.append(lambda: failed("digest", "it does not match"))
            else:
                self.later.append(lambda: done(p.OpenedDigest(self._digest(name))))
            return
        if isinstance(message, p.DoubtSlot):
            if self.away:
                self.later.append(lambda: failed(str(Fault.DEADLINE), "no answer"))
            else:
                self.doubted.append(message.name)
                self.later.append(lambda: done(p.PeerDone()))
            return
        assert isinstance(message, p.OpenRead)
        if message.name in self.refuses:
            self.later.append(lambda: failed("unknown", "it is not here"))
            return
        self.opened.append(message)
        header = self.snapshot.header
        if message.name in self.others:
            header = replace(header, header_digest=bytes(len(header.header_digest)))
        made = message.name not in (*self.unmade, *self.silent)
        reply = p.ReadOpened(
            len(self.opened),
            bytes(16),
            len(self.snapshot.image),
            pack_slot_header(header),
            digest=self._digest(message.name) if made else "",
        )
        self.later.append(lambda: done(reply))

    def _digest(self, name: str) -> str:
        return self.vouches.get(name, self.snapshot.digest)

    def _holdings(self) -> Holdings:
        """As storage tells them: the snapshot is in slot 0 of `stored.json`, of rank 0 and of another one."""
        slot = HeldSlot(0, pack_slot_header(self.snapshot.header), b"\1")
        held = [
            HeldSegment(f"stored{rank}.json", rank, False, "", 0, 1, 1, 1, "", MIB, 1, (slot,))
            for rank in (1, 0)
        ]
        return Holdings(STORE_NODE, tuple(held))

    def tell(self, message: p.PeerMessage) -> None:
        assert isinstance(message, p.CloseRead)
        self.closed.append(message.region)

    def get(
        self, source: RegionKey, target: memoryview, *, offset: int, deadline_s: float, done: Done
    ) -> None:
        name = self.opened[source.region - 1].name
        here = range(offset, offset + len(target))
        fault = Fault.REGION if source.region <= self.ended else None
        fault = Fault.DAMAGED if any(at in here for at in self.gone.get(name, ())) else fault
        self.got_of.append(source.region)
        self.got.append((name, offset, offset + len(target)))
        if fault is None:
            image = self.images.get(name, self.snapshot.image)
            target[:] = image[offset : offset + len(target)]
            for at in self.damaged.get(name, ()):
                if at in here:
                    target[at - offset] ^= 1
        self.later.append(lambda: done(Completion(fault, "", len(target), 0, 0.0)))


@dataclass
class Setting:
    """A job on a node named "here"; ``storage``, if not None, is its store."""

    store: SegmentStore
    workers: Workers
    holder: Holder | None = None
    storage: Holder | None = None
    events: EventLog = field(default_factory=lambda: EventLog(100))
    over: list[str] = field(default_factory=list)
    doubted: list[tuple[str, int, int]] = field(default_factory=list)
    segments: dict[str, Segment] = field(default_factory=dict)
    doubts: CopyDoubts = field(init=False)

    def make(self, rank: int, num_slots: int = 2, slot_bytes: int = MIB) -> Segment:
        told = descriptor(rank=rank, node_id="here", created_at_ns=1, window=1, num_operators=1)
        segment = self.store.create(told, num_slots, slot_bytes)
        self.segments[segment.path.name] = segment
        return segment

    def holding(
        self,
        *,
        damaged: bool = False,
        snapshot: Snapshot = SNAPSHOT,
        at: Sequence[int] = (),
        state: SlotState = SlotState.SEALED,
    ) -> FetchSource:
        """A copy of the snapshot on this very node; ``at``: bytes of it that are not as they were."""
        segment = self.make(len(self.segments) + 1)
        image = segment.image(1, snapshot.header)
        image[:] = snapshot.image
        for byte in at or [snapshot.header.image_len // 2] * damaged:
            image[byte] ^= 1
        put_header(segment.buffer, segment.geometry, 1, replace(snapshot.header, state=state))
        return FetchSource("here", segment.path.name, 1)

    def job(
        self,
        *sources: FetchSource,
        header: SlotHeader = SNAPSHOT.header,
        packed: bytes = b"",
        workers: Workers | None = None,
        slot_bytes: int = MIB,
    ) -> FetchJob:
        links = {"here": None, STORE_NODE: self.storage}

        def link(node: str) -> PeerLink | None:
            return cast("PeerLink | None", links.get(node, self.holder))

        self.doubts = CopyDoubts(
            lambda s, index, sequence: self.doubted.append((s.path.name, index, sequence)),
            link,
            self.events,
        )
        tools = FetchTools(
            self.make(0, slot_bytes=slot_bytes),
            node="here",
            link=link,
            local=self.segments.get,
            doubts=self.doubts,
            verifiers=workers or self.workers,
            digests=DigestThreads(),
            events=self.events,
            clock=lambda: 100.0,
        )
        pieces = [FetchPiece(packed or pack_slot_header(header), sources)]
        job = FetchJob(tools, pieces, self.over.append)
        job.start()
        return job

    def finish(self, job: FetchJob) -> str:
        """Let everything happen that is under way, and a tick now and then; how the job ended."""

        def finished() -> bool:
            self.deliver()
            self.workers.collect()
            job.tick()
            return bool(self.over)

        eventually(finished, "the fetch ends")
        self.deliver()
        return self.over[0]

    def deliver(self) -> None:
        for holder in (self.holder, self.storage):
            while holder is not None and holder.later:
                holder.later.pop(0)()

    def told(self, kind: str) -> list[str]:
        """The texts of the events of a kind."""
        return [e.message for e in self.events.page(0, 100).events if e.kind == kind]

    def lost(self) -> list[str]:
        return self.told("fetch_source_lost")


def check_sealed(segment: Segment, snapshot: Snapshot = SNAPSHOT) -> None:
    header = segment.header(0)
    assert header is not None
    assert header.state is SlotState.SEALED
    assert bytes(segment.image(0, header)) == snapshot.image
    assert not locks.is_locked(segment.fd, slot_lock_byte(0), exclusive=True)
