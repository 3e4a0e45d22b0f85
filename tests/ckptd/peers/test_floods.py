"""Silence and floods, before and after anybody has shown who it is: replication goes on, and memory
is bounded.
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from ckptd.transport.access.keys import Keys, trust
from ckptd.transport.fabric.frames import (
    PROTOCOL,
    Dial,
    Open,
    Opened,
    Ticket,
    decode_answer,
    encode,
)
from ckptd.transport.tcp.sealing import offered_ciphers
from tests.ckptd.nodes import DATA_PORT, PORT, Net, Node
from tests.ckptd.peers_harness import Job
from tests.ckptd.running import eventually

MIB = 1 << 20
WAIT_MS = 60_000
SIZE = 300_000
SIGNATURE = b"\xff" + bytes(8) + b"\x7f\x03\x00"
GREETING = SIGNATURE + b"CURVE".ljust(20, b"\0") + bytes(32)
GREETING_NULL = SIGNATURE + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
HANDSHAKE_NULL = GREETING_NULL + b"\x04" + bytes([len(READY)]) + READY
PART = bytes(256 << 10)
ENDLESS = 2 << 30  # bytes of a message, of which no end was seen when its sender is cut
# What comes between two looks, which may be late on a busy machine; and 256 MiB more of a member. Usually half of it.
OF_A_MEMBER = 1024 * MIB
OF_A_STRANGER = 768 * MIB


def resident(node: Node) -> int:
    assert node.process is not None
    status = Path(f"/proc/{node.process.pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


def most_resident(node: Node) -> int:
    """The most memory that it ever had, in bytes."""
    assert node.process is not None
    status = Path(f"/proc/{node.process.pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def turned_away(node: Node) -> int:
    return sum(n for name, n in node.counters().items() if ".turned_away." in name)


@pytest.mark.parametrize("port", [DATA_PORT, PORT])
def test_replication_goes_on_beside_many_that_say_nothing(port: int) -> None:
    """64 silent streams stopped it: each had a thread and one of the places for streams."""
    with Net(2, curve=True).up() as net, ExitStack() as stack:
        job = Job(net, net.nodes, replicas=1)
        job.start()
        for node in net.nodes:
            for _ in range(100):
                each = stack.enter_context(socket.socket())
                each.setblocking(False)
                each.connect_ex((node.address, port))
        for iteration in range(4):
            job.record(iteration, size=SIZE)
            for node in net.nodes:  # those that were closed come again
                for _ in range(20):
                    each = stack.enter_context(socket.socket())
                    each.setblocking(False)
                    each.connect_ex((node.address, port))
            job.await_replicas(iteration, 1)
        job.check_all()
        for node in net.nodes:
            eventually(lambda n=node: turned_away(n) >= 50, "they are closed")  # type: ignore[misc]
        job.end()


@pytest.fixture
def node() -> Iterator[Node]:
    """A daemon with keys that trusts the key of ``friend``."""
    made = Node("n0", f"127.{secrets.randbelow(200) + 20}.7.8", peer_security="curve")
    made.runtime_dir.mkdir(parents=True, mode=0o700)
    Keys.create(made.keys_dir)
    trust(made.keys_dir, "friend", Keys.create(made.folder / "friend").public)
    made.launch()
    yield made
    made.clean_up()


def is_cut_while_it_sends(attacker: socket.socket, part: bytes) -> bool:
    """Send until the other side ends the connection; false if it takes everything. Its end is
    looked for, not only an error of sending: where the window was closed at the cut, a sender gets
    no error for as long as a minute.
    """
    attacker.setblocking(False)
    left = ENDLESS
    rest = memoryview(part)
    deadline = time.monotonic() + WAIT_MS / 1000
    while left > 0:
        assert time.monotonic() < deadline, "it is neither taken nor cut"
        select.select([attacker], [attacker], [], 1)
        try:
            if attacker.recv(4096) == b"":
                return True
        except BlockingIOError:
            pass
        except ConnectionError:
            return True
        try:
            sent = attacker.send(rest)
        except BlockingIOError:
            continue
        except ConnectionError:
            return True
        left -= sent
        rest = rest[sent:] or memoryview(part)
    return False


@pytest.fixture
def plain_node() -> Iterator[Node]:
    """A daemon without keys: whoever shakes hands is not authenticated, and what it sends is not decrypted."""
    made = Node("n0", f"127.{secrets.randbelow(200) + 20}.7.8", peer_security="plain")
    made.launch()
    yield made
    made.clean_up()


@contextmanager
def member(node: Node, *, opens: bool = True) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A connection with a trusted key that was let in, and its monitor."""
    keys = Keys.load(node.folder / "friend")
    with zmq.Context() as context, context.socket(zmq.DEALER) as connection:
        connection.linger = 0
        connection.reconnect_ivl = -1
        connection.curve_publickey = keys.public.encode()
        connection.curve_secretkey = keys.secret.encode()
        connection.curve_serverkey = Keys.load(node.keys_dir).public.encode()
        with connection.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            connection.connect(f"tcp://{node.address}:{PORT}")
            if opens:
                connection.send(encode(Open(PROTOCOL, "friend", "n0", False)))
                assert connection.poll(WAIT_MS), "it is not let in"
                assert isinstance(decode_answer(connection.recv()), Opened)
            yield connection, monitor
            connection.disable_monitor()


def is_cut(monitor: zmq.Socket[bytes]) -> bool:
    if not monitor.poll(WAIT_MS):
        return False
    return bool(recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED)


def test_thousands_of_parts_before_the_handshake_are_not_kept(node: Node) -> None:
    """A part with "more follows" belongs to a message of which no end comes."""
    before = resident(node)
    part = b"\x01\xff" + bytes(255)  # more follows, 255 bytes
    with ExitStack() as stack:
        for _ in range(8):
            attacker = stack.enter_context(socket.create_connection((node.address, PORT)))
            with suppress(OSError):  # it is cut at the first part
                attacker.sendall(GREETING)
                for _ in range(64):
                    attacker.sendall(part * 1000)
        assert resident(node) < before + 24 * MIB
    with member(node):
        pass


def test_a_message_of_thousands_of_parts_costs_a_member_its_connection(node: Node) -> None:
    with member(node) as (connection, monitor):
        before = resident(node)
        for _ in range(20_000):
            connection.send(bytes(100), zmq.SNDMORE)
        connection.send(b"end")
        assert is_cut(monitor)
        assert resident(node) < before + 128 * MIB
    assert node.counters()["fabric.turned_away.flood"] >= 1
    with member(node):
        pass


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("opens", "bound"), [(True, OF_A_MEMBER), (False, OF_A_STRANGER)])
def test_a_message_without_an_end_costs_a_member_its_connection(node: Node, opens: bool, bound: int) -> None:
    """Parts of an allowed size, of a trusted key, before and after it has said who it is. The parts
    of a message are kept until its end comes: what was sent before the `open` was not measured, for
    as long as a stranger may stay.
    """
    with member(node):
        before = most_resident(node)
    with member(node, opens=opens) as (connection, monitor):
        for _ in range(ENDLESS // len(PART)):
            connection.send(PART, zmq.SNDMORE, copy=False)
        connection.send(b"end")  # nothing is sent before
        assert is_cut(monitor)
        assert most_resident(node) < before + bound
    eventually(lambda: node.counters().get("fabric.turned_away.flood", 0) > 0, "it is counted")
    with member(node):
        pass


@pytest.mark.timeout(240)
def test_a_stranger_that_sends_without_an_end_is_cut(plain_node: Node) -> None:
    """Truly without an end: by hand, as no library sends a message of which it does not know the end."""
    before = most_resident(plain_node)
    part = b"\x03" + struct.pack(">Q", len(PART)) + PART  # more follows, and its length has 8 bytes
    with socket.create_connection((plain_node.address, PORT)) as attacker:
        attacker.sendall(HANDSHAKE_NULL)
        assert is_cut_while_it_sends(attacker, part)
        assert most_resident(plain_node) < before + OF_A_STRANGER
    flood = "fabric.turned_away.flood"
    eventually(lambda: plain_node.counters().get(flood, 0) > 0, "it is counted")


@pytest.mark.parametrize("length", [MIB, 64 << 30, (1 << 63) - 1])
def test_a_frame_that_is_announced_and_too_long_is_never_waited_for(
    node: Node, plain_node: Node, length: int
) -> None:
    """Room for a whole frame is made when its length is known."""
    for each, handshake in ((node, GREETING), (plain_node, HANDSHAKE_NULL)):
        before = most_resident(each)
        with socket.create_connection((each.address, PORT)) as attacker:
            attacker.settimeout(WAIT_MS / 1000)
            attacker.sendall(handshake + b"\x02" + struct.pack(">Q", length))
            with suppress(ConnectionError):  # an end, or a reset
                while attacker.recv(4096):
                    pass
        assert most_resident(each) < before + 24 * MIB


def test_a_huge_frame_costs_a_member_its_connection(node: Node) -> None:
    with member(node) as (connection, monitor):
        before = resident(node)
        connection.send(bytes(64 * MIB))
        assert is_cut(monitor)
        assert resident(node) < before + 16 * MIB


def test_a_huge_header_is_refused_and_the_member_goes_on(node: Node) -> None:
    with member(node) as (connection, _):
        for size in (1025, 200 << 10):
            connection.send_multipart([b"\x96" + bytes(size), b"body"])
        eventually(lambda: node.counters().get("fabric.garbage", 0) >= 2, "it is counted")
        connection.send(encode(Open(PROTOCOL, "friend", "n0", False)))
        assert connection.poll(WAIT_MS)
        assert isinstance(decode_answer(connection.recv()), Opened)


def test_a_member_has_so_many_tickets_and_streams(node: Node) -> None:
    """Each ticket reserves a place for a stream of its address."""
    with member(node) as (connection, _):
        ciphers = offered_ciphers(plaintext=False)
        tickets = []
        for number in range(200):
            slot = number.to_bytes(16, "big")
            connection.send(encode(Dial(number, slot, ciphers, bytes(32))))
            assert connection.poll(WAIT_MS)
            answer = decode_answer(connection.recv())
            assert isinstance(answer, Ticket)
            tickets.append(answer)
        with ExitStack() as stack:
            for _ in range(150):  # silent, from the address that the tickets are for
                each = stack.enter_context(socket.socket())
                each.setblocking(False)
                each.connect_ex((node.address, DATA_PORT))
            eventually(
                lambda: (
                    sum(n for name, n in node.counters().items() if ".turned_away." in name) >= 150 - 64 - 16
                ),
                "all but those with a ticket, and some strangers, are closed",
            )
    with member(node):
        pass
