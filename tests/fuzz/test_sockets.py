"""Malformed bytes at every socket of real processes, while an honest user works beside.

No coverage guides them: the code runs in another process. The messages are mutations of valid ones, so that
handlers see what decoders accept. ``CKPTD_FUZZ_SOCKETS=n`` sends n to each socket; `make fuzz` does so.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path
from random import Random

import pytest
import zmq

from ckptd.core.slots.segment_format import encode_descriptor
from ckptd.core.slots.slots import SlotState
from ckptd.launch import answers
from ckptd.memory.segment_file import Segment, open_segment
from ckptd.transport import messages, peer_messages
from ckptd.transport.access.keys import Keys, trust
from ckptd.transport.fabric import frames
from ckptd.transport.tcp.stream_frames import encode_preamble
from ckptd.transport.wire import encode
from tests.ckptd.host.hosting import Hosting, until
from tests.ckptd.nodes import DATA_PORT, PORT, Node
from tests.ckptd.running import attach, descriptor, eventually, fill, own, state_of
from tests.ckptd.scraped import get
from tests.fuzz.examples import examples_of
from tests.fuzz.mutations import changed_bytes, in_msgpack
from tests.fuzz.wire_targets import host_lines, http_requests, mutate_lines

INPUTS = int(os.environ.get("CKPTD_FUZZ_SOCKETS", "150"))
SEED = int(os.environ.get("CKPTD_SEED", "1"))
MIB = 1 << 20
GROWN_BYTES_MAX = 512 * MIB  # what the bounds of strangers, members and pages add up to (test_floods.py)
METRICS_PORT, DASH_PORT = 9470, 9471
PING_NULL = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
PING_CURVE = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)


@pytest.fixture
def node() -> Iterator[Node]:
    """A daemon with every listener that it can have; it trusts ``friend``, whose messages are malformed."""
    address = f"127.{secrets.randbelow(200) + 20}.7.8"
    pages = {"metrics": f"{address}:{METRICS_PORT}", "dash": f"{address}:{DASH_PORT}"}
    made = Node("n0", address, peer_security="curve", **pages)
    made.runtime_dir.mkdir(parents=True, mode=0o700)
    Keys.create(made.keys_dir)
    trust(made.keys_dir, "friend", Keys.create(made.folder / "friend").public)
    try:
        made.spawn()
        eventually(lambda: answers(made.endpoint), "the daemon answers")
        yield made
    finally:
        made.clean_up()


class Attacker:
    """Sends inputs to one socket; ``heard`` counts the answers on a connection that stays."""

    def __init__(self, send: Callable[[Random], None], connection: zmq.Socket[bytes] | None = None) -> None:
        self._random, self._send, self._connection = Random(f"{SEED} {send.__name__}"), send, connection
        self.heard = 0

    def go_on(self) -> None:
        self._send(self._random)
        self.listen()

    def listen(self) -> bool:
        """Take the answers that have come; whether they are enough to show that handlers saw inputs."""
        while self._connection is not None and self._connection.poll(0):
            self._connection.recv_multipart()
            self.heard += 1
        return self._connection is None or self.heard > INPUTS // 10


def raw(address: str, port: int, data: bytes) -> None:
    """One connection that says this, and does not wait for an answer."""
    with suppress(OSError), socket.create_connection((address, port), timeout=5) as connection:
        connection.sendall(data)


@contextmanager
def attackers(node: Node) -> Iterator[list[Attacker]]:
    """One at each listener of a daemon, and at that of peers one with a trusted key besides."""
    controls = [encode(1, message) for message in examples_of(messages.Request | messages.OneWay)]
    peers = [peer_messages.encode_peer(message) for message in examples_of(peer_messages.PeerRequest)]
    asks = [frames.encode(message) for message in examples_of(frames.Ask)]
    keys = Keys.load(node.folder / "friend")
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        trainer = stack.enter_context(context.socket(zmq.DEALER))
        trainer.connect(node.endpoint)
        friend = stack.enter_context(context.socket(zmq.DEALER))
        friend.curve_publickey, friend.curve_secretkey = keys.public.encode(), keys.secret.encode()
        friend.curve_serverkey = Keys.load(node.keys_dir).public.encode()
        friend.connect(f"tcp://{node.address}:{PORT}")
        for each in (trainer, friend):
            each.linger, each.sndtimeo = 0, 10_000

        def control(random: Random) -> None:
            envelope, body = random.choice(controls)
            if random.randrange(8):
                trainer.send_multipart([envelope, in_msgpack(random, body)])
            else:
                trainer.send_multipart([changed_bytes(random, envelope)] * random.choice((1, 2, 3)))

        def member(random: Random) -> None:
            if not random.randrange(8):  # also after it was cut
                friend.send(
                    frames.encode(frames.Open(frames.PROTOCOL, "friend", "n0", bool(random.randrange(2))))
                )
            if random.randrange(4):
                friend.send_multipart(
                    [frames.encode(frames.Request(7)), in_msgpack(random, random.choice(peers))]
                )
            else:
                header = in_msgpack(random, random.choice(asks))
                friend.send_multipart(
                    [header, random.randbytes(random.randrange(99))][: random.choice((1, 2))]
                )

        def stranger(random: Random) -> None:
            begin = random.choice((PING_NULL, PING_CURVE))
            raw(node.address, PORT, changed_bytes(random, begin) + random.randbytes(200))

        def stream(random: Random) -> None:
            preamble = encode_preamble(random.randbytes(32))
            raw(node.address, DATA_PORT, changed_bytes(random, preamble) + random.randbytes(200))

        def page(random: Random) -> None:
            port = random.choice((METRICS_PORT, DASH_PORT))
            raw(node.address, port, changed_bytes(random, random.choice(http_requests())))

        strangers = [Attacker(send) for send in (stranger, stream, page)]
        yield [Attacker(control, trainer), Attacker(member, friend), *strangers]


def is_sealed(segment: Segment, index: int) -> bool:
    return state_of(segment, index) is SlotState.SEALED


def is_served(address: str) -> bool:
    """Whether a scraper is answered: connections of a flood may still come, and push an older one out."""
    try:
        return get(f"{address}:{METRICS_PORT}")[0].status == 200
    except (OSError, HTTPException):
        return False


def _most_resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def test_a_daemon_serves_its_honest_trainer_whatever_comes(node: Node) -> None:
    assert node.process is not None
    with node.client() as honest, attackers(node) as hostile:
        attach(honest, job="honest", needed_bytes=2 * MIB)
        wish = messages.Reserve(MIB // 4, 4, encode_descriptor(descriptor(job="honest")))
        segment = open_segment(Path(honest.ask(wish, messages.Reserved).segment.path))
        owner, before, slowest_s = own(segment), _most_resident(node.process.pid), 0.0
        for number in range(INPUTS):
            for attacker in hostile:
                attacker.go_on()
            if number % 50 == 0:
                index = number // 50 % segment.geometry.num_slots
                fill(segment, index, number)
                begun_s = time.monotonic()
                honest.send(messages.Filled(segment.generation, index, number))
                assert honest.ask(messages.Ping(), messages.Pong).attached
                slowest_s = max(slowest_s, time.monotonic() - begun_s)
                eventually(partial(is_sealed, segment, index), "it is sealed")
        eventually(lambda: all(each.listen() for each in hostile), "what is sent is answered")
        eventually(lambda: is_served(node.address), "metrics are served")
        assert node.process.poll() is None, node.log_text()
        grown = _most_resident(node.process.pid) - before
        os.close(owner)
        segment.close()
    told = f"slowest answer {slowest_s:.2f} s, {grown >> 20} MiB more"
    sys.stdout.write(f"{INPUTS} inputs to each of {len(hostile)} sockets: {told}\n")
    assert grown < GROWN_BYTES_MAX, f"{grown >> 20} MiB"
    assert "Traceback" not in node.log_text(), node.log_text()[-5000:]


TRAINER = """
import os, time
from pathlib import Path
Path(f"rank{os.environ['RANK']}").write_text("trained")
while not all(Path(f"rank{rank}").exists() for rank in range(3)):
    time.sleep(0.05)
"""


def test_hosts_find_each_other_whatever_comes(tmp_path: Path) -> None:
    """At the socket of rank 0's host, before and after the others have come."""
    hosting, random, lines = Hosting(tmp_path), Random(SEED), host_lines()
    hosting.write("train.py", TRAINER)
    hosting.known("train.py")
    world = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    with ExitStack() as stack:

        def host(rank: int) -> subprocess.Popen[str]:
            environ = {"RANK": str(rank), "LOCAL_RANK": str(rank), **world}
            process = hosting.start("--max-restarts", "0", "train.py", env=environ)
            stack.callback(process.kill)
            return process

        hosts = [host(0)]
        folder = hosting.runtime / "host"
        until(lambda: list(folder.glob("*.sock")), "rank 0's host listens")
        (path,) = folder.glob("*.sock")
        for number in range(INPUTS):
            with socket.socket(socket.AF_UNIX) as stranger, suppress(OSError):
                stranger.connect(str(path))
                line = lines[number % 2].replace(b"3", b"9")  # no rank of this job
                stranger.sendall(mutate_lines(random, random.choice((line, lines[2], b"\xff" * 99 + b"\n"))))
        assert _most_resident(hosts[0].pid) < GROWN_BYTES_MAX
        hosts += [host(1), host(2)]
        for process in hosts:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, out + err
            assert "Traceback" not in err, err
