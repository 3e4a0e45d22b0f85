"""Nobody costs a daemon anything before it has shown who it is: real daemons, real attackers, an
honest peer beside them.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import zmq

from ckptd.transport.access.keys import Keys, trust
from ckptd.transport.fabric.zmq_fabric import ZmqFabric
from ckptd.transport.verbs import Fault, PeerAddress
from tests.ckptd.nodes import DATA_PORT, PORT, Node
from tests.transport.fabric_pairs import until

MIB = 1 << 20
FEW = 400  # descriptors of the daemon
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
IDLERS = """
import resource, socket, sys, time
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
opened = []
for _ in range(count):
    each = socket.socket()
    each.setblocking(False)
    each.connect_ex((host, port))
    opened.append(each)
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A daemon with keys and few descriptors, that trusts the key of ``friend``."""
    made = Node("n0", f"127.{secrets.randbelow(200) + 20}.7.7", peer_security="curve")
    made.runtime_dir.mkdir(parents=True, mode=0o700)
    Keys.create(made.keys_dir)
    friend = Keys.create(made.folder / "friend")
    trust(made.keys_dir, "friend", friend.public)
    trust(made.folder / "friend", "n0", Keys.load(made.keys_dir).public)
    monkeypatch.setattr(made, "spawn", partial(made.spawn, files=FEW))
    made.launch()
    yield made
    made.clean_up()


@pytest.fixture
def friend(node: Node) -> Iterator[Callable[[], None]]:
    """A trusted peer; each call asks the daemon something over a connection of its own, and gets the answer."""
    keys = Keys.load(node.folder / "friend")
    fabrics: list[ZmqFabric] = []

    def ask() -> None:
        fabric = ZmqFabric("friend", "tcp://127.0.0.1:0", serve=lambda *_: None, keys=keys)
        fabrics.append(fabric)
        address = f"tcp://{node.address}:{PORT}"
        answers: list[bytes | Fault] = []
        public = Keys.load(node.keys_dir).public
        peer = fabric.peer(PeerAddress("n0", address, public))
        deadline = time.monotonic() + 20
        while not answers or isinstance(answers[-1], Fault):
            assert time.monotonic() < deadline, f"the daemon did not answer: {answers[-3:]}"
            count = len(answers)
            peer.request(b"?", timeout_s=3, answered=answers.append)
            until(lambda count=count: len(answers) > count)  # type: ignore[misc]

    yield ask
    for fabric in fabrics:
        fabric.close()


@contextmanager
def idlers(node: Node, port: int, count: int) -> Iterator[None]:
    """Attackers with so many connections that say nothing."""
    with ExitStack() as stack:
        for _ in range(4):
            command = [sys.executable, "-c", IDLERS, node.address, str(port), str(count // 4)]
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            assert process.stdin is not None
            assert process.stdout is not None
            stack.callback(process.stdin.close)
            assert process.stdout.readline() == b"open\n"
        yield


def descriptors(node: Node) -> int:
    assert node.process is not None
    return len(os.listdir(f"/proc/{node.process.pid}/fd"))


def resident(node: Node) -> int:
    assert node.process is not None
    status = Path(f"/proc/{node.process.pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


@pytest.mark.parametrize("port", [PORT, DATA_PORT])
def test_two_thousand_idle_connections_take_no_descriptors(
    node: Node, friend: Callable[[], None], port: int
) -> None:
    """They took all that the daemon had, and libzmq then spun, or aborted the process when it
    needed one for itself.
    """
    friend()  # what the first peer costs is not theirs
    before, memory = descriptors(node), resident(node)
    with idlers(node, port, 2000):
        most = 0
        for _ in range(3):
            friend()
            most = max(most, descriptors(node))
            assert resident(node) < memory + 128 * MIB
        assert node.process is not None
        assert node.process.poll() is None
        assert most < before + FEW // 2
    until(lambda: descriptors(node) <= before + 24)
    assert resident(node) < memory + 128 * MIB, "nothing is left behind"
    counters = node.counters()
    assert sum(n for name, n in counters.items() if "turned_away." in name) > 100
    assert len(node.log_text().splitlines()) < 30


def test_what_is_sent_before_a_handshake_is_not_kept(node: Node, friend: Callable[[], None]) -> None:
    """Sixteen connections that each announced a frame of 32 MiB, and sent it, left 500 MiB behind."""
    friend()
    before = resident(node)
    with ExitStack() as stack:
        for _ in range(16):
            attacker = stack.enter_context(socket.create_connection((node.address, PORT)))
            attacker.settimeout(5)
            with suppress(OSError):  # it may be cut at any byte
                attacker.sendall(GREETING + b"\x06" + struct.pack(">Q", 32 * MIB))
                for _ in range(31):
                    attacker.sendall(bytes(MIB))
        assert resident(node) < before + 8 * MIB
        friend()
    assert resident(node) < before + 8 * MIB


def test_a_frame_of_the_allowed_size_is_all_that_a_stranger_can_leave(
    node: Node, friend: Callable[[], None]
) -> None:
    friend()
    before = resident(node)
    with ExitStack() as stack:
        for _ in range(16):
            attacker = stack.enter_context(socket.create_connection((node.address, PORT)))
            with suppress(OSError):
                attacker.sendall(GREETING + b"\x06" + struct.pack(">Q", 256 << 10))
                attacker.sendall(bytes((256 << 10) - 1))
        time.sleep(0.3)
        assert resident(node) < before + 10 * MIB


def test_false_keys_are_counted_and_fill_no_log(node: Node, friend: Callable[[], None]) -> None:
    """Each was a line of its own."""
    with zmq.Context() as context:
        for _ in range(300):
            public, secret = zmq.curve_keypair()
            with context.socket(zmq.DEALER) as stranger:
                stranger.linger = 0
                stranger.curve_publickey, stranger.curve_secretkey = public, secret
                stranger.curve_serverkey = Keys.load(node.keys_dir).public.encode()
                stranger.connect(f"tcp://{node.address}:{PORT}")
                time.sleep(0.005)
    friend()
    until(lambda: node.counters().get("fabric.unauthenticated", 0) >= 100)
    assert "fabric.turned_away_from.127.0.0.1" in node.counters()
    assert node.log_text().count("turned_away") < 12
    assert node.saw("turned_away")
