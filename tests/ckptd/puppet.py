"""A peer that says what the test wants."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Self

from ckptd.core.slots.segment_format import (
    encode_descriptor,
    origin_of,
    pack_slot_header,
)
from ckptd.transport.fabric.zmq_fabric import ZmqFabric
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
from ckptd.transport.tcp.stream_fabric import StreamFabric
from ckptd.transport.verbs import Completion, Fault, Peer, PeerAddress, RegionKey
from tests.ckptd.nodes import PORT, Node
from tests.ckptd.running import descriptor
from tests.ckptd.snapshots import Snapshot

__all__ = ["Puppet", "begin_slot", "open_replica"]


def open_replica(
    node: str,
    *,
    job: str = "job",
    run: str = "run",
    generation: int = 0,
    window: int = 1,
    num_slots: int = 4,
    epoch: int = 1,
    span: int = 1,
    boot_id: str = "",
) -> OpenReplica:
    """Asks for a replica of a rank 0 that lives on this node, with slots of a MiB."""
    told = descriptor(
        job, run, generation=generation, node_id=node, created_at_ns=1, window=window, num_operators=1
    )
    origin, encoded = origin_of(told), encode_descriptor(told)
    return OpenReplica(job, run, 0, origin, encoded, 1 << 20, num_slots, epoch, -1, span, boot_id)


def begin_slot(lease: int, snapshot: Snapshot, *, epoch: int = 1, **promise: int) -> BeginSlot:
    """Asks for a slot for this snapshot; the promise is of this epoch."""
    return BeginSlot(lease, pack_slot_header(snapshot.header), b"\1", **promise, epoch=epoch)


class Puppet:
    """A peer that says what the test wants, over a fabric without keys. Close it after use.

    Args:
        data: how its bytes travel, as in the configuration of a daemon.
    """

    def __init__(self, name: str, data: str = "stream") -> None:
        fabric = {"stream": StreamFabric, "zmq": ZmqFabric}[data]
        self._fabric = fabric(name, "tcp://127.0.0.1:0", serve=_serve_nothing)
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
        reply = self.ask(node, open_replica(self._name, run=run))
        assert isinstance(reply, ReplicaOpened), reply
        return reply

    def begin(self, node: Node, lease: int, snapshot: Snapshot) -> PeerMessage:
        """Ask for a slot for this snapshot."""
        return self.ask(node, begin_slot(lease, snapshot))


def _serve_nothing(node: str, body: bytes, answer: Callable[[bytes], None]) -> None:
    answer(encode_peer(PeerDone()))
