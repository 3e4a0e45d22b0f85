"""Daemons of several nodes on loopback addresses, and trainers without torch that attach, fill and recover through the real client.

A `Net` is the nodes and, if asked for, a `FaultProxy` on each directed path between two of them: the cards that ranks
exchange are rewritten so that everybody sees the others through its own proxies. A `Job` is the ranks of one run. What it
records is remembered, so that a test can compare whatever is sealed anywhere with what was written.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypeVar

import msgspec
import numpy as np

from ckptd.client.identity import Identity
from ckptd.client.memory import RankMemory
from ckptd.client.replay import SnapshotImage
from ckptd.client.segment import MappedSegment
from ckptd.launch import answers
from ckptd.ring import SlotState, choose_slot, slots_for_window
from ckptd.segment_format import (
    SegmentDescriptor,
    SlotHeader,
    encode_descriptor,
    origin_of,
    pack_slot_header,
    parse_replica_file_name,
    parse_segment_file_name,
)
from ckptd.segments import open_segment
from ckptd.storage.image import ImageLayout, TensorEntry, seal
from ckptd.transport.keys import Keys, trust
from ckptd.transport.messages import EventInfo, Events, GetEvents, GetStatus, NodeCard, Status
from ckptd.transport.peer_messages import (
    BeginSlot,
    OpenReplica,
    PeerDone,
    PeerMessage,
    ReplicaOpened,
    SlotGranted,
    decode_peer,
    encode_peer,
)
from ckptd.transport.verbs import Completion, Fault, Peer, PeerAddress, RegionKey
from ckptd.transport.zmq_fabric import ZmqFabric
from tests.ckptd.running import DaemonProcess, eventually
from tests.cluster.proxy import FaultProxy

__all__ = [
    "DEADLINE_S",
    "IMAGE_BYTES",
    "PORT",
    "Job",
    "Net",
    "Node",
    "Puppet",
    "Snapshot",
    "Trainer",
    "flip",
    "sealed_in",
    "snapshot_of",
    "states_in",
]

PORT = 29_471
IMAGE_BYTES = 200_000
DEADLINE_S = 1.2
T = TypeVar("T")


class Node(DaemonProcess):
    """A daemon with a fixed name and peer address, over all its lives."""

    def __init__(self, name: str, address: str, **settings: str) -> None:
        self.name, self.address = name, address
        super().__init__(
            node_id=name,
            peer_listen=f"tcp://{address}:{PORT}",
            peer_data="zmq",  # everything goes through one port, and through its proxy
            **({"memory": "256MiB", "peer_deadline_s": str(DEADLINE_S)} | settings),
        )

    @property
    def keys_dir(self) -> Path:
        return self.runtime_dir / "keys"

    def launch(self) -> None:
        """Start, and wait until it answers (quicker than `ckptctl wait`)."""
        process = self.spawn()
        deadline = time.monotonic() + 20
        while not answers(self.endpoint):
            alive = process.poll() is None and time.monotonic() < deadline
            assert alive, f"{self.name} did not start:\n{self.log_text()}"
            time.sleep(0.02)

    def pause(self) -> None:
        """SIGSTOP: its sockets stay open, and it does nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def unpause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def lose(self) -> None:
        """The node is gone, with its memory."""
        self.kill()
        shutil.rmtree(self.segment_dir)

    def events(self, kind: str = "") -> list[EventInfo]:
        """What it recorded since its start, of this kind or all."""
        with self.client() as client:
            page = client.ask(GetEvents(limit=10_000), Events)
        return [event for event in page.events if kind in ("", event.kind)]

    def saw(self, kind: str, text: str = "") -> bool:
        """Whether it recorded an event of this kind with this text in it."""
        return any(text in event.message for event in self.events(kind))

    def counters(self) -> dict[str, int]:
        with self.client() as client:
            return client.ask(GetStatus(), Status).counters

    def replicas(self, rank: int | None = None) -> list[Path]:
        """The replica files that lie on it, of this rank or all."""
        middle = "*" if rank is None else f"*~r{rank}~*"
        return sorted(self.segment_dir.glob(f"{middle}.rep"))

    def files(self) -> list[Path]:
        """All segments and replicas that lie on it."""
        return sorted(p for p in self.segment_dir.glob("*") if p.suffix in (".seg", ".rep"))


class Net:
    """Nodes ``n0``, ``n1``, …; with keys each trusts all others.

    Args:
        proxied: put a proxy on every directed path.
        settings: of all daemons; `of` holds those of single ones, by name.
    """

    def __init__(
        self,
        num_nodes: int,
        *,
        curve: bool = False,
        proxied: bool = False,
        of: dict[str, dict[str, str]] | None = None,
        **settings: str,
    ) -> None:
        a, b = secrets.randbelow(200) + 20, secrets.randbelow(250) + 2
        settings = {"peer_security": "curve" if curve else "plain"} | settings
        self.nodes = [
            Node(f"n{i}", f"127.{a}.{b}.{i + 10}", **(settings | (of or {}).get(f"n{i}", {})))
            for i in range(num_nodes)
        ]
        self._curve, self._proxied = curve, proxied
        self._proxies: dict[tuple[str, str], FaultProxy] = {}

    def __getitem__(self, index: int) -> Node:
        return self.nodes[index]

    def path(self, source: Node, target: Node) -> FaultProxy:
        """The proxy through which ``source`` sees ``target``."""
        return self._proxies[source.name, target.name]

    def paths(self, one: Node) -> list[FaultProxy]:
        """All proxies to and from a node."""
        return [proxy for ends, proxy in self._proxies.items() if one.name in ends]

    def seen_from(self, name: str, card: NodeCard) -> NodeCard:
        """A node's card as this node must get it."""
        proxy = self._proxies.get((name, card.node))
        if proxy is None:
            return card
        host, port = proxy.address
        return msgspec.structs.replace(card, endpoint=f"tcp://{host}:{port}")

    @contextlib.contextmanager
    def up(self, prepare: Callable[[], None] = lambda: None) -> Iterator[Net]:
        """All daemons run; afterwards everything is gone. ``prepare``: called before they are started."""
        try:
            if self._curve:
                self._exchange_keys()
            prepare()
            if self._proxied:
                for one in self.nodes:
                    for other in self.nodes:
                        if one is not other:
                            target = (other.address, PORT)
                            self._proxies[one.name, other.name] = FaultProxy(target)
            with ThreadPoolExecutor(len(self.nodes)) as pool:
                list(pool.map(Node.launch, self.nodes))
            yield self
        finally:
            for proxy in self._proxies.values():
                proxy.close()
            for node in self.nodes:
                node.clean_up()

    def _exchange_keys(self) -> None:
        public = {}
        for node in self.nodes:
            node.runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            public[node.name] = Keys.create(node.keys_dir).public
        for node in self.nodes:
            for name, key in public.items():
                if name != node.name:
                    trust(node.keys_dir, name, key)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A sealed slot: its header without what differs between copies, and its image."""

    header: SlotHeader
    image: bytes

    @property
    def name(self) -> tuple[int, int, int]:
        return self.header.iteration, self.header.epoch, self.header.sequence


def sealed_in(path: Path) -> dict[tuple[int, int, int], Snapshot]:
    """What a segment file holds sealed, by iteration, epoch and sequence; read as it is now."""
    found = {}
    try:
        segment = open_segment(path)
    except FileNotFoundError:
        return {}
    try:
        for index, header in segment.headers():
            if header.state is SlotState.SEALED:
                image = bytes(segment.image(index, header))
                if segment.header(index) == header:  # else it was reused while we looked
                    found[header.iteration, header.epoch, header.sequence] = Snapshot(header, image)
    finally:
        segment.close()
    return found


def _content(header: SlotHeader) -> tuple[object, ...]:
    """What every copy of a snapshot has in common."""
    h = header
    identity = (h.iteration, h.previous, h.epoch, h.epoch_start, h.sequence, h.phase)
    return (*identity, h.image_len, h.layout_id, h.header_digest)


class Trainer:
    """One rank: real client, made-up state."""

    def __init__(self, job: Job, rank: int, node: Node) -> None:
        self.job, self.rank, self.node = job, rank, node
        self.memory = RankMemory(
            Identity(job.name, job.run, rank, job.world_size),
            lambda: node.endpoint,
            needed_bytes=job.num_slots * job.slot_bytes,
            needed_text="for a test",
            topology=f"dp{job.world_size}",
            version="test",
            timeout_s=20,
            replicas=job.replicas,
        )
        self.last = -1

    def reserve(self) -> MappedSegment:
        job = self.job
        return self.memory.reserve(
            job.slot_bytes,
            job.num_slots,
            window=job.window,
            num_operators=job.window,
            payload=b"\x80",
        )

    def record(self, iteration: int, *, size: int = IMAGE_BYTES) -> Snapshot:
        """Fill a slot as the recorder does, and wait until it is sealed."""
        segment, index = self._claim()
        self._write(segment, index, iteration, size)
        header = segment.header(index)
        assert header is not None
        self.memory.session.filled(segment.generation, index, iteration)
        eventually(
            lambda: self._state(segment, index) is SlotState.SEALED,
            f"rank {self.rank} iteration {iteration} is sealed",
        )
        sealed = segment.header(index)
        assert sealed is not None
        written = Snapshot(sealed, bytes(segment.slot(index)[: sealed.image_len]))
        self.job.written[self.rank, *written.name] = written
        self.last = iteration
        return written

    def _state(self, segment: MappedSegment, index: int) -> SlotState | None:
        header = segment.header(index)
        return None if header is None else header.state

    def _claim(self) -> tuple[MappedSegment, int]:
        table, segment = self.memory.table, self.memory.table.segments[-1]
        busy: set[tuple[int, int]] = set()
        while True:
            choice = choose_slot(
                table.records(),
                self.job.window,
                busy=busy,
                generation=segment.generation,
                protect_from=table.protect_from,
                epochs=table.epochs,
            )
            assert choice.index is not None, choice.reason
            if segment.try_lock_slot(choice.index):
                return segment, choice.index
            busy.add((segment.generation, choice.index))

    def _write(self, segment: MappedSegment, index: int, iteration: int, size: int) -> None:
        table, window = self.memory.table, self.job.window
        layout = ImageLayout.build(
            [TensorEntry("w", "U8", (size,))],
            identity={"job": self.job.name},
            num_operators=window,
            anchors=1 << iteration % window,
        )
        header = SlotHeader(
            state=SlotState.FILLING,
            iteration=iteration,
            previous=self.last,
            image_len=layout.image_len,
            sequence=table.next_sequence(),
            layout_id=layout.layout_id,
            filled_at_ns=time.time_ns(),
            writer_pid=os.getpid(),
            epoch=table.epoch,
            epoch_start=table.epoch_start,
        )
        segment.begin_filling(index, header)
        slot = segment.slot(index)
        layout.write_header(slot, iteration=iteration, previous=self.last, scalars_len=0)
        random = np.random.default_rng((self.rank, iteration, table.epoch))
        offset = layout.offset_of("w")
        slot[offset : offset + size] = random.bytes(size)
        segment.write_header(index, replace(header, state=SlotState.FILLED))
        segment.unlock_slot(index)

    def own(self) -> dict[tuple[int, int, int], Snapshot]:
        """What its own segments hold sealed."""
        found: dict[tuple[int, int, int], Snapshot] = {}
        for path in self.node.segment_dir.glob(
            f"{self.job.name}~{self.job.run}~r{self.rank}~*.seg"
        ):
            found |= sealed_in(path)
        return found


class Job:
    """The ranks of one run.

    Args:
        homes: the node of each rank.
        window: how many snapshots anchor everything; also the number of operators.
    """

    def __init__(
        self,
        net: Net,
        homes: Sequence[Node],
        *,
        run: str = "run",
        window: int = 1,
        replicas: int | None = None,
        slot_bytes: int = 1 << 20,
        slack: int = 2,
    ) -> None:
        self.name, self.run, self.net, self.homes = "job", run, net, list(homes)
        self.window, self.replicas, self.slot_bytes = window, replicas, slot_bytes
        self.num_slots = slots_for_window(window, slack)
        self.written: dict[tuple[int, int, int, int], Snapshot] = {}
        self.trainers: list[Trainer] = []

    @property
    def world_size(self) -> int:
        return len(self.homes)

    def __getitem__(self, rank: int) -> Trainer:
        return self.trainers[rank]

    def attach(self) -> None:
        """All ranks attach to the daemons of their nodes."""
        self.trainers = [Trainer(self, rank, node) for rank, node in enumerate(self.homes)]

    def together(self, work: Callable[[Trainer], T]) -> list[T]:
        """The same on every rank, at the same time; the results by rank."""
        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(work, self.trainers))

    def recover(self) -> list[tuple[list[SnapshotImage], str] | str]:
        """What each rank's memory says; collective."""
        meeting = _Meeting(self.net, [node.name for node in self.homes])
        return self.together(lambda t: t.memory.recover(meeting.exchange_of(t.rank)))

    def start(self) -> None:
        """Attach, find nothing to recover, reserve."""
        self.attach()
        for found in self.recover():
            assert isinstance(found, str), found
        self.together(Trainer.reserve)

    def resume(self) -> int:
        """Attach and recover; the iteration that all ranks go on from. Every byte is compared with what was written."""
        self.attach()
        ends = set()
        for trainer, found in zip(self.trainers, self.recover(), strict=True):
            assert not isinstance(found, str), found
            images, _ = found
            self.check_images(trainer.rank, images)
            trainer.last = images[-1].iteration
            ends.add(trainer.last)
        assert len(ends) == 1, f"ranks resume from different iterations: {ends}"
        return ends.pop()

    def check_images(self, rank: int, images: Sequence[SnapshotImage]) -> None:
        """What is to be replayed is what was written, and anchors everything."""
        anchored = 0
        for image in images:
            view = image.view  # waits until it is there
            told = [
                s for (r, i, _, _), s in self.written.items() if (r, i) == (rank, view.iteration)
            ]
            assert any(bytes(view.data("w")) in s.image for s in told), (
                f"iteration {view.iteration}"
            )
            anchored |= 1 << view.iteration % self.window
        assert anchored == (1 << self.window) - 1

    def record(self, *iterations: int, size: int = IMAGE_BYTES) -> None:
        """All ranks record these iterations, one after the other."""
        for iteration in iterations:
            self.together(lambda t, i=iteration: t.record(i, size=size))  # type: ignore[misc]

    def end(self) -> None:
        """The trainers leave; what they recorded stays."""
        if self.trainers:
            self.together(lambda t: t.memory.close())
        self.trainers = []

    # -- what lies where -------------------------------------------------------------------------

    def holders(self, rank: int, iteration: int) -> list[Node]:
        """The running nodes that hold a true replica of this snapshot, compared byte for byte."""
        return [
            n
            for n in self.net.nodes
            if n is not self.homes[rank] and self._holds(n, rank, iteration)
        ]

    def _holds(self, node: Node, rank: int, iteration: int) -> bool:
        for path in node.replicas(rank):
            for snapshot in sealed_in(path).values():
                if snapshot.header.iteration == iteration and self._true(rank, snapshot):
                    return True
        return False

    def _true(self, rank: int, snapshot: Snapshot) -> bool:
        told = self.written.get((rank, *snapshot.name))
        return (
            told is not None
            and told.image == snapshot.image
            and _content(told.header) == _content(snapshot.header)
        )

    def await_replicas(
        self, iteration: int, copies: int, *, ranks: Sequence[int] | None = None
    ) -> None:
        """Until so many nodes hold this snapshot of every rank."""
        for rank in range(self.world_size) if ranks is None else ranks:
            eventually(
                lambda r=rank: len(self.holders(r, iteration)) >= copies,  # type: ignore[misc]
                f"{copies} replicas of iteration {iteration} of rank {rank}",
            )

    def check_all(self) -> int:
        """Whatever is sealed anywhere is what was written; returns how many replicas of snapshots were compared."""
        compared = 0
        for node in self.net.nodes:
            for path in node.files():
                rank = _rank_of(path)
                for snapshot in sealed_in(path).values():
                    told = self.written[rank, *snapshot.name]
                    assert told.image == snapshot.image, f"{node.name} {path.name} {snapshot.name}"
                    assert _content(told.header) == _content(snapshot.header)
                    compared += path.suffix == ".rep"
        return compared


def _rank_of(path: Path) -> int:
    parse = parse_replica_file_name if path.suffix == ".rep" else parse_segment_file_name
    return parse(path.name).rank


class _Meeting:
    """An exchange between the ranks as threads; node cards are seen through the reader's proxies."""

    def __init__(self, net: Net, names: Sequence[str]) -> None:
        self._net, self._names = net, names
        self._said: list[bytes] = [b""] * len(names)
        self._barrier = threading.Barrier(len(names), timeout=60)

    def exchange_of(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def exchange(said: bytes) -> list[bytes]:
            self._said[rank] = said
            self._barrier.wait()
            heard = [self._translated(rank, data) for data in self._said]
            self._barrier.wait()  # nobody speaks again before everybody has heard
            return heard

        return exchange

    def _translated(self, reader: int, data: bytes) -> bytes:
        try:
            card = msgspec.msgpack.decode(data, type=NodeCard)
        except msgspec.MsgspecError:
            return data
        return msgspec.msgpack.encode(self._net.seen_from(self._names[reader], card))


class Puppet:
    """A peer that says what the test wants, over a fabric without keys. Close it after use."""

    def __init__(self, name: str) -> None:
        self._fabric = ZmqFabric(name, "tcp://127.0.0.1:0", serve=_serve_nothing)
        self._name = name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._fabric.close()

    def _peer(self, node: Node) -> Peer:
        return self._fabric.peer(PeerAddress(node.name, f"tcp://{node.address}:{PORT}"))

    def ask(self, node: Node, message: PeerMessage) -> PeerMessage:
        """The answer to a request."""
        answer: queue.SimpleQueue[bytes | Fault] = queue.SimpleQueue()
        self._peer(node).request(encode_peer(message), timeout_s=10, answered=answer.put)
        body = answer.get(timeout=15)
        assert isinstance(body, bytes), body
        return decode_peer(body)

    def put(self, node: Node, image: bytes, granted: SlotGranted) -> Completion:
        """How a put into a granted region ended."""
        target = RegionKey(granted.region, granted.token, granted.length)
        return self._peer(node).put(memoryview(image), target, deadline_s=5).wait(10)

    def open(self, node: Node, run: str = "run") -> ReplicaOpened:
        """A replica of a rank 0 that lives here, with four slots of a MiB."""
        descriptor = SegmentDescriptor(
            job="job",
            run=run,
            rank=0,
            world_size=1,
            topology="dp1",
            layout_version=1,
            generation=0,
            node_id=self._name,
            created_at_ns=1,
            window=1,
            num_operators=1,
        )
        encoded = encode_descriptor(descriptor)
        message = OpenReplica("job", run, 0, origin_of(descriptor), encoded, 1 << 20, 4, 1, -1)
        reply = self.ask(node, message)
        assert isinstance(reply, ReplicaOpened), reply
        return reply

    def begin(self, node: Node, lease: int, snapshot: Snapshot) -> PeerMessage:
        """Ask for a slot for this snapshot."""
        return self.ask(node, BeginSlot(lease, pack_slot_header(snapshot.header), b"\1"))


def snapshot_of(iteration: int, *, size: int = IMAGE_BYTES) -> Snapshot:
    """A sealed snapshot that no trainer made, of an epoch 1."""
    layout = ImageLayout.build(
        [TensorEntry("w", "U8", (size,))], identity={"job": "job"}, num_operators=1, anchors=1
    )
    image = bytearray(layout.image_len)
    layout.write_header(memoryview(image), iteration=iteration, previous=-1, scalars_len=0)
    offset = layout.offset_of("w")
    image[offset : offset + size] = np.random.default_rng(iteration).bytes(size)
    digest = seal(memoryview(image))
    header = SlotHeader(
        state=SlotState.SEALED,
        iteration=iteration,
        previous=-1,
        image_len=layout.image_len,
        sequence=iteration + 1,
        layout_id=layout.layout_id,
        writer_pid=os.getpid(),
        header_digest=digest,
        epoch=1,
    )
    return Snapshot(header, bytes(image))


def states_in(path: Path) -> list[SlotState]:
    """The state of every readable slot of a segment file."""
    segment = open_segment(path)
    try:
        return [SlotState(header.state) for _, header in segment.headers()]
    finally:
        segment.close()


def flip(node: Node, rank: int, iterations: Sequence[int]) -> int:
    """Change a byte in the middle of these snapshots in the replicas on a node; returns how many were changed."""
    changed = 0
    for path in node.replicas(rank):
        segment = open_segment(path)
        for index, header in segment.headers():
            if header.state is SlotState.SEALED and header.iteration in iterations:
                segment.image(index, header)[header.image_len // 2] ^= 1
                changed += 1
        segment.close()
    return changed


def _serve_nothing(node: str, body: bytes, answer: Callable[[bytes], None]) -> None:
    answer(encode_peer(PeerDone()))
