"""What peers ask waits for the daemon's loop: bounded in number and in bytes, for each peer and for
all together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from ckptd.config.settings import DaemonConfig
from ckptd.event_log import EventLog
from ckptd.memory.segment_store import SegmentStore
from ckptd.node.peering import Peering
from ckptd.node_context import NodeContext, NodeWorkers
from ckptd.transport.fabric.zmq_fabric import ZmqFabric
from ckptd.transport.peer_messages import PeerRefused, decode_peer
from ckptd.transport.verbs import Fault
from ckptd.workers import Workers
from tests.transport.fabric_pairs import until

MIB = 1 << 20
SLOW_S = 60.0
LOOPBACK = "tcp://127.0.0.1:0"


class Busy:
    """What peers reach of a daemon whose loop thread does something else until `run`."""

    def __init__(self, folder: Path) -> None:
        self.posted: list[Callable[[], None]] = []
        self.events = EventLog(1000)
        self._workers = Workers("busy", 1, 8, lambda: None)
        self.peering = Peering(
            NodeContext(
                DaemonConfig(peer_listen=LOOPBACK, peer_security="plain", peer_data="zmq"),
                SegmentStore(folder, 1 << 30, "n0", mlock="off", hugepages="off"),
                self.events,
                self.posted.append,
            ),
            NodeWorkers(self._workers, self._workers),
            doubt=lambda segment, index, sequence: None,
        )

    def run(self) -> None:
        posted, self.posted[:] = list(self.posted), []
        for work in posted:
            work()

    def run_until(self, condition: Callable[[], bool]) -> None:
        def ran() -> bool:
            self.run()
            return condition()

        until(ran, SLOW_S)

    def close(self) -> None:
        self.peering.close()
        self._workers.close(timeout_s=1.0)


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Busy]:
    with closing(Busy(tmp_path)) as made:
        yield made


class Asker:
    """A peer that asks with bodies of some size; what it is answered."""

    def __init__(self, name: str, busy: Busy) -> None:
        self._fabric = ZmqFabric(name, LOOPBACK, serve=lambda *_: None)
        assert busy.peering.fabric is not None
        self._peer = self._fabric.peer(busy.peering.fabric.address)
        self.answers: list[bytes | Fault] = []

    def ask(self, size_bytes: int) -> None:
        self._peer.request(bytes(size_bytes), timeout_s=600.0, answered=self.answers.append)

    @property
    def codes(self) -> list[str]:
        found = []
        for answer in self.answers:
            assert not isinstance(answer, Fault)
            message = decode_peer(answer)
            assert isinstance(message, PeerRefused)
            found.append(message.code)
        return found

    def close(self) -> None:
        self._fabric.close()


def test_requests_of_a_peer_that_wait_have_so_many_bytes(busy: Busy) -> None:
    """1,024 of 32 MiB each could wait: a member with a busy neighbour took all of its memory."""
    with closing(Asker("one", busy)) as one, closing(Asker("other", busy)) as other:
        for _ in range(4):
            one.ask(30 * MIB)
        until(lambda: len(one.answers) == 2, SLOW_S)
        assert one.codes == ["busy", "busy"]
        other.ask(30 * MIB)
        until(lambda: len(busy.posted) >= 3, SLOW_S)
        assert not other.answers
        busy.run_until(lambda: len(one.answers) == 4)
        assert one.codes == ["busy", "busy", "bad_message", "bad_message"]
        busy.run_until(lambda: other.answers != [])
        one.ask(30 * MIB)
        busy.run_until(lambda: len(one.answers) == 5)
        assert one.codes[4] == "bad_message"
        assert busy.events.counters["peer_busy"] == 2


def test_requests_of_all_peers_that_wait_have_so_many_bytes(busy: Busy) -> None:
    """One of each peer waits, whatever the others have: nobody can keep a peer out."""
    with ExitStack() as stack:
        peers = [stack.enter_context(closing(Asker(f"peer{i}", busy))) for i in range(5)]
        for peer in peers[:4]:
            peer.ask(31 * MIB)
            peer.ask(31 * MIB)
        until(lambda: len(busy.posted) == 8, SLOW_S)
        peers[4].ask(31 * MIB)
        until(lambda: len(busy.posted) == 9, SLOW_S)
        peers[4].ask(31 * MIB)
        until(lambda: len(peers[4].answers) == 1, SLOW_S)
        assert peers[4].codes == ["busy"]


def test_requests_of_a_peer_that_wait_are_so_many(busy: Busy) -> None:
    with closing(Asker("one", busy)) as one:
        for _ in range(1100):
            one.ask(1)
        until(lambda: len(one.answers) == 1100 - 1024, SLOW_S)
        assert set(one.codes) == {"busy"}
        assert busy.events.counters["peer_busy"] == 0  # counted by the loop, which was busy
        busy.run()
        assert busy.events.counters["peer_busy"] == 1100 - 1024
