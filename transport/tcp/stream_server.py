"""The data port: streams that peers open with a ticket, each served by a thread of its own.

A connection waits in the `Lobby` until it has said its first bytes. Then its stream is STRANGER (no ticket
yet) → SERVING → OVER. A ticket is valid once, for a few seconds, and its stream belongs to the peer that the
control connection authenticated. On a sealed stream whoever shows the ticket must also have its keys, and
only records sealed with them are accepted. Each stream has a slot, named by the peer. A new ticket for a slot
is only given when its stream is OVER, so that nothing sent before a connection broke can arrive after it was
sent again.

What is put is received directly into the region, after everything but its digest was checked. Damaged bytes
lie there until the chunk comes again: the owner shows a region only after the transfer.
"""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field

from ckptd.transport.access.admission import Admission, AdmissionLimits, TurnedAway, source_of
from ckptd.transport.access.refusals import ForgeryLog, RefusalLog
from ckptd.transport.fabric.lanes import FabricParts
from ckptd.transport.fabric.regions import LocalRegion, Refusal
from ckptd.transport.tcp import streams
from ckptd.transport.tcp.sealing import SECRET_BYTES, Cipher, Forged, StreamKey, stream_keys
from ckptd.transport.tcp.stream_frames import (
    ANSWER_BYTES,
    ASK_BYTES,
    PREAMBLE_BYTES,
    Preamble,
    StreamAnswer,
    StreamAsk,
    StreamKind,
    decode_ask,
    decode_preamble,
    encode_answer,
    encode_fault,
)
from ckptd.transport.verbs import Access, Fault

logger = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 64
ACCEPT_RETRY_S = 0.2  # after a shortage of descriptors, say
LOOK_S = 1.0
TICKET_S = 5.0
MAX_TICKETS = 1024
MAX_TICKETS_PER_NODE = 64
MAX_WINDOW = 8  # chunks; more than enough to fill the connection while an acknowledgement travels
ENDING_S = 2.0
# A peer shows its ticket as soon as it connects, so strangers get little room and time.
LIMITS = AdmissionLimits(
    connections=1024, strangers=64, strangers_per_address=16, per_peer=64, patience_s=2.0
)


@dataclass(slots=True, eq=False)
class Visit:
    """One connection, and its first bytes so far."""

    connection: socket.socket
    source: str
    said: bytearray = field(default_factory=bytearray)


class Lobby:
    """Accepts connections from `start` to `close`, and reads their first bytes, in one thread; nothing else
    is read.

    `Admission` closes connections that stay silent, or are too many. Those expected because of a ticket have
    places of their own.

    Args:
        first_bytes: how many bytes a visitor has to say.
        expected: how many visitors may come from an address because they have tickets.
        enter: called on the lobby's thread with a complete visit. Returns the node, and a function that
            begins the stream; from then on the connection is the callee's, who calls `gone` in the end.
            None: it was closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        limits: AdmissionLimits,
        refusals: RefusalLog,
        *,
        first_bytes: int,
        expected: Callable[[str], int],
        enter: Callable[[Visit], tuple[str, Callable[[], None]] | None],
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._refusals = refusals
        self._first_bytes = first_bytes
        self._expected = expected
        self._enter = enter
        self._lock = threading.Lock()
        self._admission = Admission(limits)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lobby", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and close the connections that wait."""
        self._closed.set()
        streams.shut(self._listener)  # wakes the thread
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join()
        self._listener.close()

    def gone(self, visit: Visit) -> None:
        """A connection whose stream had begun is closed. Any thread."""
        with self._lock:
            self._admission.gone(visit)

    # --- the thread ---

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                due_s = self._admission.due_s(time.monotonic())
            try:
                for key, _ in self._selector.select(min(due_s, LOOK_S)):
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._hear(key.data)
                with self._lock:
                    turned = self._admission.overdue(time.monotonic())
                self._turn(turned)
            except Exception:  # the thread's main: no stream begins without it
                logger.exception("accepting streams failed")
                self._closed.wait(ACCEPT_RETRY_S)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Visit):
                key.data.connection.close()
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if not self._closed.wait(ACCEPT_RETRY_S):
                    self._refusals.refused("descriptors", "", f"a stream was not accepted: {error}")
                return
            connection.setblocking(False)
            visit = Visit(connection, source_of(address[0]))
            self._selector.register(connection, selectors.EVENT_READ, visit)
            expected = self._expected(visit.source)
            with self._lock:
                turned = self._admission.arrived(
                    visit, visit.source, now_s=time.monotonic(), expected=expected
                )
            self._turn(turned)

    def _hear(self, visit: Visit) -> None:
        if visit.connection.fileno() < 0:
            return  # turned away in the same round
        try:
            said = visit.connection.recv(self._first_bytes - len(visit.said))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        visit.said += said
        if said and len(visit.said) < self._first_bytes:
            return
        self._selector.unregister(visit.connection)
        if not said:
            self._leave(visit)
            text = f"on the data port: {len(visit.said)} bytes that are no preamble"
            self._refusals.seen(text, visit.source)
            return
        visit.connection.setblocking(True)
        entered = self._enter(visit)
        if entered is None:
            self.gone(visit)
            return
        node, begin = entered
        with self._lock:
            turned = self._admission.identified(visit, node)
        begin()
        self._turn(turned)

    def _leave(self, visit: Visit) -> None:
        visit.connection.close()
        self.gone(visit)

    def _turn(self, turned: list[TurnedAway]) -> None:
        for each in turned:
            visit = each.visitor
            assert isinstance(visit, Visit)
            self._refusals.stranger(each.reason, each.source, each.reason.text)
            try:
                self._selector.unregister(visit.connection)
            except (KeyError, ValueError):
                streams.shut(visit.connection)  # its stream closes it
            else:
                self._leave(visit)


SlotKey = tuple[str, bytes]  # node, slot: no node can end another node's stream
DirectionKeys = tuple[StreamKey | None, StreamKey | None]  # up, down; None: in plaintext


@dataclass(frozen=True, slots=True)
class DialGrant:
    """A stream that a peer may open while ``public_key`` is trusted as that node's ("" without keys).

    ``answer`` is called, from any thread, with a ticket and our part of the stream's keys. ``source``: the
    address from which the stream is expected.
    """

    node: str
    public_key: str
    slot: bytes
    cipher: Cipher
    secret: bytes
    answer: Callable[[bytes, bytes], None]
    source: str = ""

    @property
    def key(self) -> SlotKey:
        return self.node, self.slot


@dataclass(frozen=True, slots=True)
class _Ticket:
    grant: DialGrant
    secret: bytes
    valid_until: float


class StreamServer:
    """Listens at once.

    Args:
        host: numeric address to listen on.
        port: 0 takes a free one (see ``port``).
        limits: of the streams, with and without a ticket.
    Raises:
        OSError: cannot listen there.
    """

    def __init__(
        self,
        parts: FabricParts,
        forgeries: ForgeryLog,
        host: str,
        port: int,
        limits: AdmissionLimits,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        both = host == "::" and socket.has_dualstack_ipv6()  # as ZeroMQ does
        self._parts = parts
        self.forgeries = forgeries
        self._lock = threading.Lock()
        self._tickets: dict[bytes, _Ticket] = {}
        self._serving: dict[SlotKey, _ServedStream] = {}
        self._expected: Counter[str] = Counter()  # tickets by the address that asked for them
        self._closed = threading.Event()
        listener = socket.create_server((host, port), family=family, backlog=64, dualstack_ipv6=both)
        self.port: int = listener.getsockname()[1]
        self._lobby = Lobby(
            listener,
            limits,
            parts.refusals,
            first_bytes=PREAMBLE_BYTES,
            expected=lambda source: self._expected[source],
            enter=self._enter,
        )
        self._lobby.start()

    def grant(self, grant: DialGrant) -> None:
        """Give the node a ticket once the stream that it had in this slot is over."""
        with self._lock:
            self._take_where(lambda entry: entry.grant.key == grant.key)
            old = self._serving.get(grant.key)
            if old is not None:
                old.successor = grant
        if old is None:
            self._issue(grant)
        else:
            old.break_off()

    def revoke_untrusted(self) -> None:
        """End the streams whose key is not trusted any more, and forget their tickets."""
        trusts = self._parts.trusts
        with self._lock:
            untrusted = [s for s in self._serving.values() if not trusts(s.key[0], s.public_key)]
            self._take_where(lambda entry: not trusts(entry.grant.node, entry.grant.public_key))
        for stream in untrusted:
            self.count("revoked")
            logger.warning("a stream of %s ended: its key is not trusted any more", stream.key[0])
            stream.break_off()

    def close(self) -> None:
        """End all streams. Waits a moment for their threads; a thread that still holds a region is waited for
        there.
        """
        self._closed.set()
        self._lobby.close()
        with self._lock:
            ours = list(self._serving.values())
            self._tickets.clear()
        for stream in ours:
            stream.break_off()
        give_up_at = time.monotonic() + ENDING_S
        for thread in (stream.thread for stream in ours):
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(max(0.0, give_up_at - time.monotonic()))

    # --- for streams, on their threads ---

    def redeem(self, stream: _ServedStream, shown: Preamble) -> DirectionKeys | None:
        """Let a stranger in, with the keys of its stream; None if the ticket is not valid (any more).

        Raises:
            Forged: it has no key for its ticket, which stays valid for its owner.
        """
        with self._lock:
            found = self._tickets.get(shown.ticket)
            if found is None or found.valid_until < time.monotonic() or self._closed.is_set():
                return None
            grant = found.grant
            if grant.key in self._serving:
                return None
            if not self._parts.trusts(grant.node, grant.public_key):
                return None
            keys = self._proven(shown, found)
            self._take(shown.ticket)
            stream.key, stream.public_key = grant.key, grant.public_key
            self._serving[grant.key] = stream
            return keys

    def _proven(self, shown: Preamble, ticket: _Ticket) -> DirectionKeys:
        grant = ticket.grant
        if grant.cipher is Cipher.PLAINTEXT:
            return None, None
        secrets_, ends = (grant.secret, ticket.secret), (grant.node, self._parts.node)
        up, down = stream_keys(grant.cipher, shown.ticket, secrets_, ends)
        up.open(memoryview(shown.proof), memoryview(bytearray()), shown.proven)
        return up, down

    def over(self, stream: _ServedStream) -> None:
        """The thread of the stream ends, and touches no region any more."""
        with self._lock:
            if self._serving.get(stream.key) is stream:
                del self._serving[stream.key]
        self._lobby.gone(stream.visit)
        if stream.successor is not None and not self._closed.is_set():
            self._issue(stream.successor)

    def window(self) -> int:
        return max(1, min(MAX_WINDOW, self._parts.credits // max(1, len(self._serving))))

    def count(self, counter: str, amount: int = 1) -> None:
        """Count for streams, on their threads."""
        with self._lock:
            counters = self._parts.counters
            setattr(counters, counter, getattr(counters, counter) + amount)

    # --- tickets and strangers ---

    def _issue(self, grant: DialGrant) -> None:
        ticket, secret = secrets.token_bytes(32), secrets.token_bytes(SECRET_BYTES)
        now = time.monotonic()
        with self._lock:
            self._take_where(lambda entry: entry.grant.key == grant.key or entry.valid_until < now)
            of_node = [t for t, entry in self._tickets.items() if entry.grant.node == grant.node]
            if len(of_node) >= MAX_TICKETS_PER_NODE:
                self._take(of_node[0])
            if len(self._tickets) >= MAX_TICKETS:
                self._take(next(iter(self._tickets)))
            self._tickets[ticket] = _Ticket(grant, secret, now + TICKET_S)
            self._expected[grant.source] += 1
        grant.answer(ticket, secret)

    def _take(self, ticket: bytes) -> None:
        self._expected[self._tickets.pop(ticket).grant.source] -= 1
        self._expected = +self._expected

    def _take_where(self, which: Callable[[_Ticket], bool]) -> None:
        for ticket in [ticket for ticket, entry in self._tickets.items() if which(entry)]:
            self._take(ticket)

    def _enter(self, visit: Visit) -> tuple[str, Callable[[], None]] | None:
        """A stranger has said its first bytes. On the lobby's thread."""
        stream = _ServedStream(self, self._parts, visit)
        if not stream.enter():
            visit.connection.close()
            return None
        return stream.key[0], stream.thread.start


class _ServedStream:
    """One stream, from its first byte on. Its thread owns the socket; `break_off` is for any thread."""

    _sender: streams.StreamSender  # both after `enter`
    _receiver: streams.StreamReceiver

    def __init__(self, server: StreamServer, parts: FabricParts, visit: Visit) -> None:
        self.key: SlotKey = ("", b"")
        self.public_key = ""
        self.successor: DialGrant | None = None  # waits for our end
        self._server = server
        self._parts = parts
        self.visit = visit
        self._keys: DirectionKeys = (None, None)
        self._connection = visit.connection
        self._ending = False
        self.thread = threading.Thread(target=self._run, name=f"stream-{parts.node}", daemon=True)

    def break_off(self) -> None:
        """End soon, whatever the peer does."""
        self._ending = True
        streams.shut(self._connection)

    def _run(self) -> None:
        try:
            streams.configure(self._connection)
            self._talk(*self._keys)
        except OSError as error:
            logger.debug("a stream of %s ended: %s", self.key[0], error)
        except Forged as error:
            self._server.forgeries.seen(f"on a stream of {self.key[0]}: {error}")
        except Exception:  # the thread's main: the peer must see the end, and its successor come in
            logger.exception("a stream of %s failed", self.key[0])
        finally:
            self._connection.close()
            self._server.over(self)

    def enter(self) -> bool:
        """Whether the stranger has a ticket and its keys. Called before the thread starts."""
        try:
            shown = decode_preamble(self.visit.said)
            keys = self._server.redeem(self, shown)
        except ValueError as error:
            self._parts.refusals.seen(f"on the data port: {error}", self.visit.source)
            return False
        except Forged as error:
            self._server.forgeries.seen(f"on the data port: {error}")
            return False
        if keys is None:
            text = "a stream with a ticket that is not valid"
            self._parts.refusals.stranger("ticket", self.visit.source, text)
            return False
        self._keys = keys
        return True

    def _talk(self, up: StreamKey | None, down: StreamKey | None) -> None:
        self._sender = streams.sender_of(self._connection, down)
        self._receiver = streams.receiver_of(self._connection, up)
        self._answer(StreamAnswer(StreamKind.WELCOME, 0, self._server.window()))
        self._serve()

    def _serve(self) -> None:
        header = bytearray(ASK_BYTES)
        view = memoryview(header)
        while not self._ending and self._receiver.receive_header(view):
            try:
                ask = decode_ask(header)
            except ValueError as error:
                self._parts.refusals.seen(f"on a stream of {self.key[0]}: {error}")
                return
            if ask.kind is StreamKind.WRITE:
                self._write(ask)
            else:
                self._read(ask)

    def _write(self, ask: StreamAsk) -> None:
        digest = streams.PayloadDigest(ask.region, ask.offset, ask.length)
        try:
            with self._use(ask, Access.WRITE) as (_, target), target:
                good = self._receiver.receive_payload(target, digest)
        except Refusal as refusal:
            self._receiver.drain(ask.length)
            self._refuse(ask, refusal)
            return
        except Forged:
            with suppress(OSError):  # then the peer finds the end of the stream
                self._fault(ask, Fault.DIGEST, "a record failed authentication")
            raise
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
                self._sender.send_payload(encode_answer(head), source, digest)
        except Refusal as refusal:
            self._refuse(ask, refusal)
            return
        self._server.count("served_bytes", ask.length)

    def _use(self, ask: StreamAsk, access: Access) -> AbstractContextManager[tuple[LocalRegion, memoryview]]:
        return self._parts.regions.use(
            ask.region, ask.token, self.key[0], access, ask.offset, ask.length, self.break_off
        )

    def _refuse(self, ask: StreamAsk, refusal: Refusal) -> None:
        self._server.count("refused")
        self._fault(ask, refusal.fault, refusal.detail)

    def _fault(self, ask: StreamAsk, fault: Fault, detail: str) -> None:
        message = encode_fault(ask.op, self._server.window(), fault, detail)
        self._sender.send(message[:ANSWER_BYTES], message[ANSWER_BYTES:])

    def _answer(self, answer: StreamAnswer) -> None:
        self._sender.send(encode_answer(answer))
