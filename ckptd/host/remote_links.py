"""How the hosts of a job on several machines talk: JSON lines over TCP, between hosts that share a token.

Both sides prove that they know the token before either reads a message. ``c`` and ``s`` are random, of the
side that connects and of the one that listens; ``proof`` and ``key`` are HMAC-SHA256 with the token over a
side's name, the purpose, ``c`` and ``s``:

    connects    c
    listens     s, its proof
    connects    its proof
    either      HMAC-SHA256 with the sender's key over the message's number and the message; the message

So a message of another connection, of another direction, or that was sent before, is none here. The token
itself is never sent. What is said (ranks, epochs, ports) is not secret.

A machine that has gone without a word is noticed by the kernel, not by a timer of a process that may be
slow: keep-alive probes and ``TCP_USER_TIMEOUT`` end the connection after about the given silence.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import socket
from typing import Any

from ckptd.host.host_links import Link, LinkError, parsed

Message = dict[str, Any]

TOKEN_BYTES = 32
_LINE_MAX = 64 << 10
_PROOF_MAX = 512  # a line of the first exchange
_BACKLOG = 1024
_HEX = re.compile(rb"[0-9a-f]{64}")
_LISTENS, _CONNECTS = b"listens", b"connects"


class RemoteLink(Link):
    """One end of a connection; `receive` also does the first exchange.

    Attributes:
        proven: the other side knows the token. Before, nothing can be sent, and nothing is received.
    """

    def __init__(self, connection: socket.socket, token: bytes, *, connects: bool) -> None:
        """
        Args:
            connects: this side has connected, and begins.
        Raises:
            LinkError: the other side has gone.
        """
        super().__init__(connection)
        self._token, self._connects = token, connects
        self._own, self._other = (_CONNECTS, _LISTENS) if connects else (_LISTENS, _CONNECTS)
        self._random = os.urandom(32).hex().encode()
        self._both = b""  # what both sides have drawn
        self._send_key = self._receive_key = b""
        self._sent = self._received_count = 0
        self.proven = False
        if connects:
            self._send_line(self._random)

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            LinkError: the other side has gone, does not read, or has proven nothing yet.
        """
        if not self.proven:
            raise LinkError("cannot send: the other side has not shown that it belongs to the job")
        text = json.dumps(message).encode()
        self._send_line(_seal(self._send_key, self._sent, text) + b" " + text)
        self._sent += 1

    def receive(self) -> list[Message]:
        """The messages that have arrived.

        Raises:
            LinkError: the other side has gone, does not know the token, or what arrived is no message of its.
        """
        messages = []
        for line in self._receive_lines(_LINE_MAX if self.proven else _PROOF_MAX):
            if self.proven:
                messages.append(self._opened(line))
            else:
                self._exchange(line)
        return messages

    def _opened(self, line: bytes) -> Message:
        seal, _, text = line.partition(b" ")
        if not hmac.compare_digest(seal, _seal(self._receive_key, self._received_count, text)):
            raise LinkError("a message is not from the other side, or not in its place")
        self._received_count += 1
        return parsed(text)

    def _exchange(self, line: bytes) -> None:
        if self._both:  # this side listens, and has proven itself
            self._check(line)
        elif self._connects:
            theirs, _, proof = line.partition(b" ")
            self._both = self._random + b" " + _drawn(theirs)
            self._check(proof)
            self._send_line(self._proof(b"proof", self._own))
        else:
            self._both = _drawn(line) + b" " + self._random
            self._send_line(self._random + b" " + self._proof(b"proof", self._own))

    def _check(self, proof: bytes) -> None:
        if not hmac.compare_digest(proof, self._proof(b"proof", self._other)):
            raise LinkError("the other side does not know the token of this job")
        self._send_key = self._proof(b"key", self._own)
        self._receive_key = self._proof(b"key", self._other)
        self.proven = True

    def _proof(self, purpose: bytes, side: bytes) -> bytes:
        words = b" ".join((side, purpose, self._both))
        return hmac.digest(self._token, words, "sha256").hex().encode()


def _drawn(text: bytes) -> bytes:
    if not _HEX.fullmatch(text):
        raise LinkError("the other side is no host")
    return text


def _seal(key: bytes, number: int, text: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + text, "sha256").hex().encode()


def address_towards(master: str, port: int) -> tuple[str, str]:
    """The address by which the machine of the job's store, and so the other machines, reach this one.

    Returns:
        what to publish, and what to listen on ("": every address of this machine).
    Raises:
        OSError: the name cannot be resolved, or there is no route.
    """
    family, _, _, _, target = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        own: str = probe.getsockname()[0]
    if not own.startswith("127.") and own != "::1":
        return own, own
    if master in ("localhost", target[0]):
        return master, own
    # The store is here, under a name that is a loopback address here (as Debian has it) and no other
    # machine's: they resolve it themselves.
    return master, ""


def listen_remotely(address: str) -> socket.socket:
    """A listening socket on a free port; on every address for "".

    Raises:
        OSError: it cannot be made.
    """
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(
            ("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
    else:
        listener = socket.create_server(("", 0), backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


def accept_remote(listener: socket.socket, token: bytes, silence_s: int) -> RemoteLink | None:
    """A new connection, which has proven nothing; None if it went away meanwhile."""
    try:
        connection, _ = listener.accept()
    except OSError:
        return None
    try:
        _notice_silence(connection, silence_s)
    except OSError:
        connection.close()
        return None
    return RemoteLink(connection, token, connects=False)


def start_connecting(address: str, port: int, silence_s: int) -> socket.socket:
    """A socket that is being connected: once it can be written to, it is, or it has an error (``SO_ERROR``).

    Raises:
        OSError: the address cannot be resolved or reached.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        _notice_silence(connection, silence_s)
        with contextlib.suppress(BlockingIOError):
            connection.connect(target)
    except OSError:
        connection.close()
        raise
    return connection


def _notice_silence(connection: socket.socket, silence_s: int) -> None:
    idle_s, every_s = max(1, silence_s // 2), max(1, silence_s // 4)
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, (silence_s - idle_s) // every_s)),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * silence_s),
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    ):
        connection.setsockopt(level, option, value)
