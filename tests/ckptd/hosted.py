"""A host without a network, for tests of what it grants and takes back."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ckptd.config.settings import DaemonConfig
from ckptd.core.replication.replicas import Promise
from ckptd.core.users import UserQuotas
from ckptd.event_log import EventLog
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentMaker, SegmentStore
from ckptd.memory.slot_digests import ImageDigests
from ckptd.node_context import NodeContext
from ckptd.peers.replica_leases import HostWorkers
from ckptd.peers.replica_server import Host, local_holdings
from ckptd.peers.replica_store import ReplicaStore
from ckptd.peers.run_records import RunRecords
from ckptd.recompute.recomputation import Recomputation
from ckptd.transport import peer_messages as p
from ckptd.transport.fabric.regions import LocalRegion
from ckptd.transport.fabric.zmq_fabric import ZmqFabric
from ckptd.transport.messages import Holdings
from ckptd.transport.verbs import Access, FileRange, Scope
from ckptd.workers import Workers
from tests.ckptd.puppet import begin_slot, open_replica
from tests.ckptd.running import eventually
from tests.ckptd.snapshots import Snapshot

__all__ = ["MIB", "Setting", "hosted", "never"]

MIB = 1 << 20


class Watched(ZmqFabric):
    """Remembers what was registered: a test holds a region as a transfer does that has not ended."""

    def __init__(self) -> None:
        super().__init__("host", "tcp://127.0.0.1:0", serve=lambda node, body, answer: None)
        self.regions: dict[int, LocalRegion] = {}

    def register(
        self, buffer: memoryview, *, access: Access, scope: Scope, file: FileRange | None = None
    ) -> LocalRegion:
        region = super().register(buffer, access=access, scope=scope, file=file)
        self.regions[region.key.region] = region
        return region


def never() -> None:
    """A peer that has stopped cannot be broken off."""


@dataclass
class Setting:
    """A host without a network: what peers say is handed to it, and the clock is a number."""

    store: SegmentStore
    fabric: Watched
    replicas: ReplicaStore = field(init=False)
    host: Host = field(init=False)
    now_s: float = 1000.0
    promise: Promise = field(default_factory=Promise)
    span: int = 1
    epoch: int = 1
    retain_s: float = 0.0
    computes: bool = False
    doubted: list[tuple[Segment, int, int]] = field(default_factory=list)
    strangers: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.events = EventLog(100)
        self.replicas = ReplicaStore(self.store)
        self.workers = Workers("test", 2, 100, lambda: None)
        config = DaemonConfig(peer_deadline_s=5.0, retain_detached_s=self.retain_s)
        maker = SegmentMaker(self.store, self.events, self.workers, lambda: self.now_s)
        self.records = RunRecords(self.store.folder, self.events)
        digests = ImageDigests(self.workers, self.events, threads=1, map_fn=None, doubt=self.doubt)
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        node = NodeContext(config, self.store, self.events, self.posted.put, "here", clock=lambda: self.now_s)
        self.recomputation = Recomputation(node) if self.computes else None
        self.host = Host(
            node,
            self.fabric,
            self.replicas,
            HostWorkers(
                self.workers, maker, self.workers, digests.want, self.doubt, recomputation=self.recomputation
            ),
            records=self.records,
            promise_of=lambda job, run: (self.epoch, self.promise, self.span),
            holdings=self.holdings,
            may_act=lambda peer, job, run: (peer, run) not in self.strangers,
        )

    def holdings(self, job: str, run: str) -> Holdings:
        return local_holdings(self.store, self.replicas, job, run, self.records.of(job, run))

    def doubt(self, segment: Segment, index: int, sequence: int) -> None:
        self.doubted.append((segment, index, sequence))

    def next_replicas(self) -> ReplicaStore:
        """As the next daemon finds them, in a store of its own."""
        store = self.store
        return ReplicaStore(
            SegmentStore(store.folder, store.quota_bytes, store.node_id, mlock="off", hugepages="off")
        )

    def say(self, message: p.PeerMessage, peer: str = "p") -> queue.SimpleQueue[p.PeerReply]:
        """Hand it over; the answer comes now or later. The host does not wait for anything."""
        answers: queue.SimpleQueue[p.PeerReply] = queue.SimpleQueue()
        begun_s = time.monotonic()
        assert self.host.serve(peer, message, answers.put)
        assert time.monotonic() - begun_s < 4.0, "the loop thread waited"  # peers have 5 s
        return answers

    def ask(self, message: p.PeerMessage, peer: str = "p") -> p.PeerReply:
        answers = self.say(message, peer)
        self.until(lambda: not answers.empty(), "an answer")
        return answers.get_nowait()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        def collected() -> bool:
            self.workers.collect()
            while not self.posted.empty():
                self.posted.get()()
            if not condition():
                self.host._loans.tick()  # what outlasts its worker is looked at again
            return condition()

        eventually(collected, what)

    def open(self, peer: str = "p", **options: object) -> p.ReplicaOpened:
        reply = self.ask(open_replica("away", **options), peer)  # type: ignore[arg-type]
        assert isinstance(reply, p.ReplicaOpened), reply
        return reply

    def begin(self, lease: int, snapshot: Snapshot, peer: str = "p") -> p.SlotGranted:
        reply = self.ask(begin_slot(lease, snapshot), peer)
        assert isinstance(reply, p.SlotGranted), reply
        return reply

    def fill(self, lease: int, snapshot: Snapshot, peer: str = "p") -> None:
        """The whole way to a sealed slot."""
        granted = self.begin(lease, snapshot, peer)
        region = self.fabric.regions[granted.region]
        region.buffer[:] = snapshot.image
        assert isinstance(self.ask(p.SealSlot(granted.ticket, snapshot.digest), peer), p.PeerDone)

    def holding(self, region: int) -> Callable[[], None]:
        """A transfer touches the region; returns what ends it."""
        found = self.fabric.regions[region]
        assert found.hold(never)
        return lambda: found.release(never)

    @property
    def only(self) -> Segment:
        (segment,) = self.replicas
        return segment


@contextmanager
def hosted(
    folder: Path, *, retain_s: float = 0.0, computes: bool = False, users: UserQuotas | None = None
) -> Iterator[Setting]:
    """A host with 40 MiB, and its end; ``computes``: snapshots from gradients, in a process of its own."""
    fabric = Watched()
    store = SegmentStore(folder, 40 * MIB, "host", mlock="off", hugepages="off", users=users)
    setting = Setting(store, fabric, retain_s=retain_s, computes=computes)
    yield setting
    if setting.recomputation is not None:
        setting.recomputation.close()
    setting.host.close()
    fabric.close()
    setting.workers.close(5.0)
