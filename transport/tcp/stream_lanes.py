"""Chunks over streams on the asking side: a stream and its two threads, a lane that keeps one stream, and a
link whose control connection asks for the lanes' tickets.

A lane is IDLE → WANTED (something is to be sent) → ASKED (`Dial` sent) → DIALING (the ticket came) → UP. When
a stream ends, its unanswered chunks stay in LIMBO: they are sent again only after the peer has granted the
next ticket. By then the peer is done with the old stream, so nothing that was sent on it can arrive late. A
stream ends with the control connection that it was granted on, whose heartbeats find a peer that hangs.

The sender thread of a stream connects, shows the ticket, and sends operations in their order. The receiver
thread reads the answers, payloads directly into their buffers. The stream is OVER when both have ended; it
refers to no buffer then.
"""

from __future__ import annotations

import itertools
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from enum import StrEnum

from ckptd.transport.access.refusals import ForgeryLog
from ckptd.transport.fabric import frames as f
from ckptd.transport.fabric.frames import Ticket
from ckptd.transport.fabric.lanes import ChunkLane, FabricParts, Lane, LaneOwner, LaneState
from ckptd.transport.fabric.links import FabricPeer, LinkParts
from ckptd.transport.fabric.transfers import Chunk, ChunkUse
from ckptd.transport.tcp import streams
from ckptd.transport.tcp.sealing import SECRET_BYTES, Cipher, Forged, StreamKey, stream_keys
from ckptd.transport.tcp.stream_frames import (
    ANSWER_BYTES,
    StreamAnswer,
    StreamAsk,
    StreamKind,
    decode_answer,
    encode_ask,
    encode_preamble,
)
from ckptd.transport.verbs import Fault, PeerAddress

logger = logging.getLogger(__name__)

CONNECT_S = 5.0
ASK_TIMEOUT_S = 5.0
ASK_RETRY_S = 1.0
REDIAL_S = 0.05  # doubled with each failure
REDIAL_MAX_S = 1.0


class StreamVerdict(StrEnum):
    """The result of an operation."""

    DONE = "done"
    DAMAGED = "damaged"
    FAILED = "failed"
    SKIPPED = "skipped"  # its transfer had ended before


class Operation(ChunkUse):
    """A chunk in flight on one stream; ``lock`` is the stream's."""

    __slots__ = ("digest", "number")

    def __init__(self, number: int, chunk: Chunk, lock: threading.Lock) -> None:
        super().__init__(chunk, lock)
        self.number = number
        self.digest = streams.PayloadDigest(chunk.transfer.key.region, chunk.offset, chunk.length)


class ClientStream:
    """Connects at once. `send`, ``operations`` and `break_off` are for the fabric's thread, on which it also
    calls ``lane``.

    Args:
        keys: of this stream, up and down; None in plaintext.
    """

    def __init__(
        self, lane: StreamLane, ticket: Ticket, name: str, keys: tuple[StreamKey, StreamKey] | None
    ) -> None:
        self.operations: dict[int, Operation] = {}
        self.was_useful = False  # an operation was done on it
        self._lane = lane
        self._ticket = ticket
        self._name = name
        self._keys = keys
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._to_send: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._connection: socket.socket | None = None
        self._ending = False
        self._sender = threading.Thread(target=self._run, name=f"to-{name}", daemon=True)
        self._sender.start()

    def send(self, chunk: Chunk) -> None:
        """Put the chunk, or ask for it; `StreamLane.answered` gets the result, unless the stream ends."""
        operation = Operation(next(self._numbers), chunk, self._lock)
        self.operations[operation.number] = operation
        self._to_send.put(operation)

    def break_off(self) -> None:
        """End soon, whatever the peer does."""
        self._ending = True
        self._to_send.put(None)
        connection = self._connection
        if connection is not None:
            streams.shut(connection)

    # --- the sender ---

    def _run(self) -> None:
        try:
            with self._connect() as connection:
                self._talk(connection)
        except OSError as error:
            logger.debug("no stream to %s:%d: %s", self._ticket.host, self._ticket.port, error)
        except Forged as error:
            self._forged(error)
        except Exception:  # the thread's main: the lane must see the end
            logger.exception("a stream to %s failed", self._ticket.host)
        self._lane.call(lambda: self._lane.over(self))

    def _connect(self) -> socket.socket:
        where = socket.getaddrinfo(self._ticket.host, self._ticket.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = where[0]
        self._connection = connection = socket.socket(family, kind, protocol)
        try:
            if self._ending:
                raise ConnectionAbortedError("the stream was given up")
            streams.configure(connection)
            streams.set_patience(connection, CONNECT_S)
            connection.connect(address)
        except BaseException:
            connection.close()
            raise
        return connection

    def _talk(self, connection: socket.socket) -> None:
        up, down = (None, None) if self._keys is None else self._keys
        connection.sendall(encode_preamble(self._ticket.ticket, up))
        answers = streams.receiver_of(connection, down)
        window = _welcome(answers)
        sender = streams.sender_of(connection, up)
        streams.set_patience(connection, streams.STALL_S)
        receiver = threading.Thread(
            target=self._receive, args=(connection, answers), name=f"from-{self._name}", daemon=True
        )
        receiver.start()
        try:
            self._lane.call(lambda: self._lane.is_up(self, window))
            while not self._ending and (operation := self._to_send.get()) is not None:
                self._send(sender, operation)
        finally:
            self._ending = True
            streams.shut(connection)
            receiver.join()

    def _send(self, sender: streams.StreamSender, operation: Operation) -> None:
        chunk = operation.chunk
        key = chunk.transfer.key
        kind = StreamKind.WRITE if chunk.transfer.is_put else StreamKind.READ
        ask = StreamAsk(kind, operation.number, key.region, key.token, chunk.offset, chunk.length)
        if kind is StreamKind.READ:
            sender.send(encode_ask(ask))
        elif operation.claim():
            try:
                sender.send_payload(encode_ask(ask), operation.view, operation.digest)
            finally:
                operation.finish()
        else:
            self._finish(operation, StreamVerdict.SKIPPED, None)

    # --- the receiver ---

    def _receive(self, connection: socket.socket, answers: streams.StreamReceiver) -> None:
        header = bytearray(ANSWER_BYTES)
        view = memoryview(header)
        try:
            while not self._ending and answers.receive_header(view):
                self._answered(decode_answer(header), answers)
        except ValueError as error:
            what = f"on a stream to {self._ticket.host}: {error}"
            self._lane.call(lambda: self._lane.garbage(what))
        except OSError as error:
            logger.debug("a stream to %s ended: %s", self._ticket.host, error)
        except Forged as error:
            self._forged(error)
        except Exception:  # the thread's main: the sender must see the end
            logger.exception("a stream to %s failed", self._ticket.host)
        finally:
            self._ending = True
            self._to_send.put(None)
            streams.shut(connection)

    def _forged(self, error: Forged) -> None:
        what = f"on a stream to {self._name}: {error}"
        self._lane.call(lambda: self._lane.forged(what))

    def _answered(self, answer: StreamAnswer, answers: streams.StreamReceiver) -> None:
        operation = self.operations.get(answer.op)
        if operation is None:
            raise ValueError(f"an answer to operation {answer.op}, which is not open")
        is_put = operation.chunk.transfer.is_put
        if answer.kind is StreamKind.FAULT:
            detail = answers.receive(answer.length).decode(errors="replace")
            damaged = answer.fault is Fault.DIGEST
            verdict = StreamVerdict.DAMAGED if damaged else StreamVerdict.FAILED
            self._finish(operation, verdict, answer, detail)
        elif answer.kind is StreamKind.ACK and is_put:
            if operation.digest.value != answer.digest:
                raise ValueError("an acknowledgement with another digest")
            self._finish(operation, StreamVerdict.DONE, answer)
        elif answer.kind is StreamKind.DATA and not is_put:
            if answer.length != operation.chunk.length:
                raise ValueError(f"{answer.length} bytes instead of {operation.chunk.length}")
            self._arrived(answer, operation, answers)
        else:
            raise ValueError(f"an unexpected answer of kind {answer.kind}")

    def _arrived(self, answer: StreamAnswer, operation: Operation, answers: streams.StreamReceiver) -> None:
        if not operation.claim():
            answers.drain(answer.length)
            self._finish(operation, StreamVerdict.SKIPPED, answer)
            return
        try:
            good = answers.receive_payload(operation.view, operation.digest)
        except Forged:
            self._finish(operation, StreamVerdict.DAMAGED, answer)
            raise
        finally:
            operation.finish()
        self._finish(operation, StreamVerdict.DONE if good else StreamVerdict.DAMAGED, answer)

    def _finish(
        self, operation: Operation, verdict: StreamVerdict, answer: StreamAnswer | None, detail: str = ""
    ) -> None:
        number = operation.number
        self._lane.call(lambda: self._lane.answered(self, number, verdict, answer, detail))


def _welcome(answers: streams.StreamReceiver) -> int:
    """Read the first answer; returns its window."""
    try:
        answer = decode_answer(answers.receive(ANSWER_BYTES))
    except ValueError as error:
        raise ConnectionRefusedError(f"not a data port: {error}") from error
    if answer.kind is not StreamKind.WELCOME:
        raise ConnectionRefusedError(f"the first answer is of kind {answer.kind}, not a welcome")
    return answer.window


class StreamLaneState(StrEnum):
    IDLE = "idle"
    WANTED = "wanted"
    ASKED = "asked"
    DIALING = "dialing"
    UP = "up"


class StreamLane:
    """Implements `ChunkLane`. ``ask`` sends a `Dial` for this lane; false if it could not be sent now."""

    def __init__(
        self,
        parts: FabricParts,
        owner: LaneOwner,
        ask: Callable[[StreamLane], bool],
        forgeries: ForgeryLog,
    ) -> None:
        self.slot = secrets.token_bytes(16)
        self.state = StreamLaneState.IDLE
        self.call = parts.call
        self.garbage = owner.garbage
        self.forged = forgeries.seen
        self._owner = owner
        self._counters = parts.counters
        self._ask = ask
        self._window = 1
        self._stream: ClientStream | None = None
        self._ending: list[ClientStream] = []
        self._limbo: list[Chunk] = []
        self._asked_at = 0.0
        self._not_before = 0.0
        self._failures = 0
        self._opened_times = 0

    # --- ChunkLane ---

    @property
    def room(self) -> int:
        if self.state is not StreamLaneState.UP or self._stream is None:
            return 0
        return max(0, self._window - len(self._stream.operations))

    @property
    def started(self) -> bool:
        return self.state is not StreamLaneState.IDLE

    def start(self) -> None:
        self.state = StreamLaneState.WANTED

    def stop(self) -> None:
        """Break the stream off; its unanswered chunks are sent again if their transfers go on."""
        self.state = StreamLaneState.IDLE
        if self._stream is not None:
            self._stream.break_off()
            self._ending.append(self._stream)
            self._stream = None

    def send(self, chunk: Chunk) -> bool:
        if not self.room or self._stream is None:
            return False
        self._stream.send(chunk)
        return True

    def due_s(self, now_s: float) -> float:
        self._limbo = [chunk for chunk in self._limbo if chunk.transfer.outcome is None]
        if self._limbo and self.state is StreamLaneState.IDLE:
            self.state = StreamLaneState.WANTED
        if self.state is StreamLaneState.ASKED and now_s - self._asked_at >= ASK_TIMEOUT_S:
            self.state = StreamLaneState.WANTED
        if self.state is StreamLaneState.ASKED:
            return self._asked_at + ASK_TIMEOUT_S - now_s
        if self.state is not StreamLaneState.WANTED or self._ending:
            return float("inf")  # the end of the old stream wakes us
        if now_s < self._not_before:
            return self._not_before - now_s
        if not self._ask(self):
            return ASK_RETRY_S
        self.state, self._asked_at = StreamLaneState.ASKED, now_s
        return ASK_TIMEOUT_S

    # --- for the link ---

    def granted(self, ticket: Ticket, name: str, keys: tuple[StreamKey, StreamKey] | None) -> None:
        """The peer is done with the stream before; connect the next one. ``keys``: None in plaintext."""
        if self.state is not StreamLaneState.ASKED:
            return  # given up meanwhile
        self.release_limbo()
        self.state = StreamLaneState.DIALING
        try:
            self._stream = ClientStream(self, ticket, name, keys)
        except RuntimeError as error:  # no more threads
            logger.warning("cannot start a stream to %s: %s", name, error)
            self._wait_to_dial()

    def control_lost(self) -> None:
        """The control connection, which the tickets come over, broke."""
        if self.started:
            self.stop()
            self.state = StreamLaneState.WANTED

    def release_limbo(self) -> None:
        """The chunks in limbo can arrive no more: they may be sent again."""
        chunks, self._limbo = self._limbo, []
        for chunk in chunks:
            self._owner.chunk_lost(chunk)

    # --- events of streams ---

    def is_up(self, stream: ClientStream, window: int) -> None:
        if stream is not self._stream:
            return
        self.state, self._window = StreamLaneState.UP, max(1, window)
        self._opened_times += 1
        self._counters.reconnects += self._opened_times > 1

    def answered(
        self,
        stream: ClientStream,
        number: int,
        verdict: StreamVerdict,
        answer: StreamAnswer | None,
        detail: str,
    ) -> None:
        operation = stream.operations.pop(number, None)
        if operation is None:
            self.garbage("a second answer to an operation")
            return
        chunk = operation.chunk
        if answer is not None:
            self._window = max(1, answer.window)
        if verdict is StreamVerdict.DONE:
            stream.was_useful = True
            self._failures = 0
            self._owner.chunk_done(chunk)
        elif verdict is StreamVerdict.DAMAGED:
            self._owner.chunk_damaged(chunk)
        elif verdict is StreamVerdict.FAILED and answer is not None and answer.fault is not None:
            self._owner.chunk_failed(chunk, answer.fault.value, detail)

    def over(self, stream: ClientStream) -> None:
        for operation in stream.operations.values():
            operation.finish()
            self._limbo.append(operation.chunk)
        stream.operations.clear()
        if stream in self._ending:
            self._ending.remove(stream)
            return
        self._stream = None
        self.state = StreamLaneState.WANTED
        if (
            not stream.was_useful
        ):  # else an attacker who breaks each stream would have us dial without a pause
            self._wait_to_dial()

    def _wait_to_dial(self) -> None:
        self.state = StreamLaneState.WANTED
        self._failures = min(self._failures + 1, 10)
        delay_s = min(REDIAL_MAX_S, REDIAL_S * 2.0**self._failures)
        self._not_before = time.monotonic() + delay_s


class StreamLink(FabricPeer):
    """A link whose chunks go over streams; over ZeroMQ, encrypted as the control connection is, if the peer
    grants none.

    Args:
        ciphers: those that we accept.
    """

    def __init__(
        self, parts: LinkParts, address: PeerAddress, ciphers: tuple[Cipher, ...], forgeries: ForgeryLog
    ) -> None:
        self._ciphers, self._forgeries = ciphers, forgeries
        self._dials = itertools.count(1)
        self._asked: dict[int, tuple[StreamLane, bytes]] = {}  # by op: the lane, and our part of its keys
        super().__init__(parts, address)

    def _make_chunk_lane(self) -> ChunkLane:
        return StreamLane(self._fabric, self, self._dial, self._forgeries)

    def _dial(self, lane: StreamLane) -> bool:
        if not self._ensure(self._control, time.monotonic()):
            return False
        if self._control.state is not LaneState.UP:
            return False
        number, secret = next(self._dials), secrets.token_bytes(SECRET_BYTES)
        if not self._control.send(f.encode(f.Dial(number, lane.slot, self._ciphers, secret))):
            return False
        self._asked = {op: asked for op, asked in self._asked.items() if asked[0] is not lane}
        self._asked[number] = lane, secret
        return True

    def _other_answer(self, answer: f.Answer) -> bool:
        if isinstance(answer, Ticket):
            asked = self._asked.pop(answer.op, None)
            if asked is not None:
                self._granted(*asked, answer)
            return True
        if isinstance(answer, f.FaultReply) and self._asked.pop(answer.op, None) is not None:
            self._use_zmq(answer.detail)
            return True
        return False

    def _granted(self, lane: StreamLane, secret: bytes, ticket: Ticket) -> None:
        node = self.address.node
        if ticket.cipher not in self._ciphers:
            self._use_zmq(f"it chose cipher {ticket.cipher}, which was not offered")
            return
        cipher, keys = Cipher(ticket.cipher), None
        if cipher is not Cipher.PLAINTEXT:
            both = (secret, ticket.secret)
            keys = stream_keys(cipher, ticket.ticket, both, (self._fabric.node, node))
        lane.granted(ticket, node, keys)

    def _use_zmq(self, detail: str) -> None:
        """The peer has no data port, or none for us."""
        logger.warning("chunks for %s go over ZeroMQ: %s", self.address.node, detail)
        lanes = self._chunk_lanes
        self._chunk_lanes = [super(StreamLink, self)._make_chunk_lane() for _ in lanes]
        self._asked.clear()
        for lane in lanes:
            if isinstance(lane, StreamLane):
                lane.stop()
                lane.release_limbo()

    def lane_down(self, lane: Lane) -> None:
        super().lane_down(lane)
        if lane is self._control:
            self._asked.clear()
            for chunk_lane in self._chunk_lanes:
                if isinstance(chunk_lane, StreamLane):
                    chunk_lane.control_lost()
