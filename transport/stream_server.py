"""The data port: streams that peers open with a ticket, each served by a thread of its own.

A stream is STRANGER (connected, no ticket yet) → SERVING → OVER. A ticket is valid once and for a few seconds, and its
stream belongs to the peer that the control connection authenticated. Each stream has a slot, named by the peer: a new
ticket for a slot is only given when the stream that had it is OVER, so that nothing sent before a connection broke can
arrive after what was sent again.

What is put is received directly into the region, after everything but its digest was checked. Damaged bytes lie there until
the chunk comes again: the owner shows a region only after the transfer.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ckptd.transport import streams
from ckptd.transport.garbage import GarbageLog
from ckptd.transport.regions import LocalRegion, Refusal, Regions
from ckptd.transport.stream_frames import (
    ASK_BYTES,
    PREAMBLE_BYTES,
    StreamAnswer,
    StreamAsk,
    StreamKind,
    decode_ask,
    decode_preamble,
    encode_answer,
    encode_fault,
)
from ckptd.transport.verbs import Access, FabricCounters, Fault

__all__ = ["StreamServer", "StreamServerParts"]

logger = logging.getLogger(__name__)

TICKET_S = 5.0
MAX_TICKETS = 1024
MAX_STRANGERS = 64
MAX_STREAMS = 1024
MAX_WINDOW = 8  # chunks; more than fills the connection while an acknowledgement is on its way
SCRATCH_BYTES = 64 << 10
ACCEPT_RETRY_S = 0.2  # no descriptors left, say
ENDING_S = 2.0

SlotKey = tuple[str, bytes]  # node, slot: nobody can end another's stream
Answer = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class StreamServerParts:
    """What the data port needs of its fabric."""

    name: str
    regions: Regions
    counters: FabricCounters
    garbage: GarbageLog
    credits: int
    node_of: Callable[[str], str | None] | None = None  # as in `ServerParts`


@dataclass(frozen=True, slots=True)
class _Ticket:
    key: SlotKey
    public_key: str
    valid_until: float


class StreamServer:
    """Listens at once.

    Args:
        host: numeric address to listen on.
        port: 0 takes a free one (see ``port``).
    Raises:
        OSError: cannot listen there.
    """

    def __init__(self, parts: StreamServerParts, host: str, port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        both = host == "::" and socket.has_dualstack_ipv6()  # as ZeroMQ does
        self._parts = parts
        self._lock = threading.Lock()
        self._tickets: dict[bytes, _Ticket] = {}
        self._serving: dict[SlotKey, _ServedStream] = {}
        self._strangers: set[_ServedStream] = set()
        self._closed = threading.Event()
        self._listener = socket.create_server(
            (host, port), family=family, backlog=64, dualstack_ipv6=both
        )
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(
            target=self._accept, name=f"streams-{parts.name}", daemon=True
        )
        self._acceptor.start()

    def grant(self, node: str, public_key: str, slot: bytes, answer: Answer) -> None:
        """Give ``node`` a ticket, when the stream that it had in this slot is over. Answered from any thread.

        The ticket, and the stream, count while ``public_key`` is trusted as that node's ("" without keys).
        """
        key = (node, slot)
        with self._lock:
            self._withdraw(key)
            old = self._serving.get(key)
            if old is not None:
                old.successor = answer
                old.successor_key = public_key
        if old is None:
            answer(self._issue(key, public_key))
        else:
            old.break_off()

    def revoke_untrusted(self) -> None:
        """End the streams whose key is trusted no more, and forget their tickets."""
        with self._lock:
            streams_ = [
                s for s in self._serving.values() if not self._trusted(s.key[0], s.public_key)
            ]
            for ticket, entry in list(self._tickets.items()):
                if not self._trusted(entry.key[0], entry.public_key):
                    del self._tickets[ticket]
        for stream in streams_:
            self.count("revoked")
            logger.warning("a stream of %s is over: its key is not trusted any more", stream.key[0])
            stream.break_off()

    def _trusted(self, node: str, public_key: str) -> bool:
        return self._parts.node_of is None or self._parts.node_of(public_key) == node

    def close(self) -> None:
        """End all streams. Waits a moment for their threads; whoever still holds a region is waited for there."""
        self._closed.set()
        streams.shut(self._listener)
        self._listener.close()
        with self._lock:
            ours = [*self._serving.values(), *self._strangers]
            self._tickets.clear()
        for stream in ours:
            stream.break_off()
        give_up_at = time.monotonic() + ENDING_S
        for thread in (self._acceptor, *(stream.thread for stream in ours)):
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(max(0.0, give_up_at - time.monotonic()))

    # --- for streams, on their threads ---

    def redeem(self, stream: _ServedStream, ticket: bytes) -> bool:
        """Let a stranger in; false if the ticket is not valid (any more)."""
        with self._lock:
            self._strangers.discard(stream)
            found = self._tickets.pop(ticket, None)
            if found is None or found.valid_until < time.monotonic() or self._closed.is_set():
                return False
            if len(self._serving) >= MAX_STREAMS or found.key in self._serving:
                return False
            if not self._trusted(found.key[0], found.public_key):
                return False
            stream.key, stream.public_key = found.key, found.public_key
            self._serving[found.key] = stream
            return True

    def over(self, stream: _ServedStream) -> None:
        """The thread ends, and touches no region any more."""
        with self._lock:
            self._strangers.discard(stream)
            if self._serving.get(stream.key) is stream:
                del self._serving[stream.key]
        if stream.successor is not None and not self._closed.is_set():
            stream.successor(self._issue(stream.key, stream.successor_key))

    def window(self) -> int:
        return max(1, min(MAX_WINDOW, self._parts.credits // max(1, len(self._serving))))

    def count(self, counter: str, amount: int = 1) -> None:
        """Streams count on threads of their own."""
        with self._lock:
            counters = self._parts.counters
            setattr(counters, counter, getattr(counters, counter) + amount)

    # --- tickets and strangers ---

    def _issue(self, key: SlotKey, public_key: str) -> bytes:
        ticket = secrets.token_bytes(32)
        now = time.monotonic()
        with self._lock:
            self._withdraw(key)
            for old in [t for t, entry in self._tickets.items() if entry.valid_until < now]:
                del self._tickets[old]
            if len(self._tickets) >= MAX_TICKETS:
                del self._tickets[next(iter(self._tickets))]
            self._tickets[ticket] = _Ticket(key, public_key, now + TICKET_S)
        return ticket

    def _withdraw(self, key: SlotKey) -> None:
        for old in [ticket for ticket, entry in self._tickets.items() if entry.key == key]:
            del self._tickets[old]

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closed.wait(ACCEPT_RETRY_S):
                    logger.warning("a stream could not be accepted: %s", error)
                continue
            stream = _ServedStream(self, self._parts, connection)
            with self._lock:
                welcome = len(self._strangers) < MAX_STRANGERS and not self._closed.is_set()
                if welcome:
                    self._strangers.add(stream)
            if welcome:
                stream.thread.start()
            else:
                connection.close()


class _ServedStream:
    """One stream, from the first byte on. Its thread owns the socket; `break_off` is for any thread."""

    def __init__(
        self, server: StreamServer, parts: StreamServerParts, connection: socket.socket
    ) -> None:
        self.key: SlotKey = ("", b"")
        self.public_key = ""
        self.successor: Answer | None = None  # who waits for our end
        self.successor_key = ""
        self._server = server
        self._parts = parts
        self._connection = connection
        self._ending = False
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.thread = threading.Thread(target=self._run, name=f"stream-{parts.name}", daemon=True)

    def break_off(self) -> None:
        """End soon, whatever the peer does."""
        self._ending = True
        streams.shut(self._connection)

    def _run(self) -> None:
        try:
            streams.configure(self._connection)
            if self._welcome():
                self._serve()
        except OSError as error:
            logger.debug("a stream of %s ended: %s", self.key[0], error)
        except Exception:  # the thread's main: the peer must see the end, and its successor come in
            logger.exception("a stream of %s failed", self.key[0])
        finally:
            self._connection.close()
            self._server.over(self)

    def _welcome(self) -> bool:
        streams.set_patience(self._connection, TICKET_S)
        try:
            # One call: whoever sends a byte now and then is not waited for longer.
            data = self._connection.recv(PREAMBLE_BYTES, socket.MSG_WAITALL)
            ticket = decode_preamble(data)
        except (OSError, ValueError) as error:
            self._parts.garbage.seen(f"on the data port: {error}")
            return False
        if not self._server.redeem(self, ticket):
            self._server.count("unauthenticated")
            logger.warning("a stream with a ticket that is not valid was refused")
            return False
        streams.set_patience(self._connection, streams.STALL_S)
        hello = StreamAnswer(StreamKind.WELCOME, 0, self._server.window())
        self._connection.sendall(encode_answer(hello))
        return True

    def _serve(self) -> None:
        header = bytearray(ASK_BYTES)
        view = memoryview(header)
        while not self._ending and streams.receive_header(self._connection, view):
            try:
                ask = decode_ask(header)
            except ValueError as error:
                self._parts.garbage.seen(f"on a stream of {self.key[0]}: {error}")
                return
            if ask.kind is StreamKind.WRITE:
                self._write(ask)
            else:
                self._read(ask)

    def _write(self, ask: StreamAsk) -> None:
        digest = streams.PayloadDigest(ask.region, ask.offset, ask.length)
        try:
            with self._use(ask, Access.WRITE) as (_, target), target:
                good = streams.receive_payload(self._connection, target, digest)
        except Refusal as refusal:
            streams.drain(self._connection, ask.length, self._scratch)
            self._refuse(ask, refusal)
            return
        if not good:
            self._server.count("bad_digests")
            self._fault(ask, Fault.DIGEST, "the digest does not match")
            return
        self._server.count("received_bytes", ask.length)
        window = self._server.window()
        self._answer(StreamAnswer(StreamKind.ACK, ask.op, window, 0, digest.value))

    def _read(self, ask: StreamAsk) -> None:
        digest = streams.PayloadDigest(ask.region, ask.offset, ask.length)
        head = StreamAnswer(StreamKind.DATA, ask.op, self._server.window(), ask.length)
        try:
            with self._use(ask, Access.READ) as (_, source), source:
                streams.send_payload(self._connection, encode_answer(head), source, digest)
        except Refusal as refusal:
            self._refuse(ask, refusal)
            return
        self._server.count("served_bytes", ask.length)

    def _use(
        self, ask: StreamAsk, access: Access
    ) -> AbstractContextManager[tuple[LocalRegion, memoryview]]:
        return self._parts.regions.use(
            ask.region, ask.token, self.key[0], access, ask.offset, ask.length, self.break_off
        )

    def _refuse(self, ask: StreamAsk, refusal: Refusal) -> None:
        self._server.count("refused")
        self._fault(ask, refusal.fault, refusal.detail)

    def _fault(self, ask: StreamAsk, fault: Fault, detail: str) -> None:
        self._connection.sendall(encode_fault(ask.op, self._server.window(), fault, detail))

    def _answer(self, answer: StreamAnswer) -> None:
        self._connection.sendall(encode_answer(answer))
