"""One stream to a peer, as seen by the side that asks: a thread that sends and a thread that receives.

The sender connects, shows the ticket, and sends what it is given, in that order; the receiver reads
the answers, payloads directly into the buffers that they are for. The stream is OVER when both have
ended, and refers to no buffer then.
"""

from __future__ import annotations

import itertools
import logging
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from ckptd.transport.fabric.chunks import Chunk, ChunkUse
from ckptd.transport.fabric.frames import Ticket
from ckptd.transport.tcp import streams
from ckptd.transport.tcp.sealing import Forged, StreamKey
from ckptd.transport.tcp.stream_frames import (
    ANSWER_BYTES,
    StreamAnswer,
    StreamAsk,
    StreamKind,
    decode_answer,
    encode_ask,
    encode_preamble,
)
from ckptd.transport.verbs import Fault

__all__ = ["ClientStream", "Operation", "StreamEvents", "StreamVerdict"]

logger = logging.getLogger(__name__)

CONNECT_S = 5.0


class StreamVerdict(StrEnum):
    """What became of an operation."""

    DONE = "done"
    DAMAGED = "damaged"
    FAILED = "failed"
    SKIPPED = "skipped"  # its transfer had ended before


class Operation(ChunkUse):
    """A chunk under way on one stream; ``lock`` is the stream's."""

    __slots__ = ("digest", "number")

    def __init__(self, number: int, chunk: Chunk, lock: threading.Lock) -> None:
        super().__init__(chunk, lock)
        self.number = number
        self.digest = streams.PayloadDigest(chunk.transfer.key.region, chunk.offset, chunk.length)


@dataclass(frozen=True, slots=True)
class StreamEvents:
    """What a stream tells its owner, on the fabric's thread; nothing any more when that has ended."""

    call: Callable[[Callable[[], None]], bool]
    up: Callable[[ClientStream, int], None]
    answered: Callable[[ClientStream, int, StreamVerdict, StreamAnswer | None, str], None]
    over: Callable[[ClientStream], None]
    garbage: Callable[[str], None]
    forged: Callable[[str], None]


class ClientStream:
    """Connects at once. `send`, ``operations`` and `break_off` are for the fabric's thread.

    Args:
        keys: of this stream, up and down; None in plaintext.
    """

    def __init__(
        self,
        events: StreamEvents,
        ticket: Ticket,
        name: str,
        keys: tuple[StreamKey, StreamKey] | None,
    ) -> None:
        self.operations: dict[int, Operation] = {}
        self.was_useful = False  # something that was asked on it was done
        self._events = events
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
        """Put the chunk, or ask for it; `StreamEvents.answered` says what became of it, unless the
        stream ends.
        """
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
        except Exception:  # the thread's main: the owner must hear of the end
            logger.exception("a stream to %s failed", self._ticket.host)
        self._events.call(lambda: self._events.over(self))

    def _connect(self) -> socket.socket:
        where = socket.getaddrinfo(self._ticket.host, self._ticket.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = where[0]
        self._connection = connection = socket.socket(family, kind, protocol)
        try:
            if self._ending:
                raise ConnectionAbortedError("not wanted any more")
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
            self._events.call(lambda: self._events.up(self, window))
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
            self._tell(operation, StreamVerdict.SKIPPED, None)

    # --- the receiver ---

    def _receive(self, connection: socket.socket, answers: streams.StreamReceiver) -> None:
        header = bytearray(ANSWER_BYTES)
        view = memoryview(header)
        try:
            while not self._ending and answers.receive_header(view):
                self._answered(decode_answer(header), answers)
        except ValueError as error:
            what = f"on a stream to {self._ticket.host}: {error}"
            self._events.call(lambda: self._events.garbage(what))
        except OSError as error:
            logger.debug("a stream to %s ended: %s", self._ticket.host, error)
        except Forged as error:
            self._forged(error)
        except Exception:  # the thread's main: the sender must hear of the end
            logger.exception("a stream to %s failed", self._ticket.host)
        finally:
            self._ending = True
            self._to_send.put(None)
            streams.shut(connection)

    def _forged(self, error: Forged) -> None:
        what = f"on a stream to {self._name}: {error}"
        self._events.call(lambda: self._events.forged(what))

    def _answered(self, answer: StreamAnswer, answers: streams.StreamReceiver) -> None:
        operation = self.operations.get(answer.op)
        if operation is None:
            raise ValueError(f"an answer to {answer.op}, which is not open")
        is_put = operation.chunk.transfer.is_put
        if answer.kind is StreamKind.FAULT:
            self._failed(answer, operation, answers)
        elif answer.kind is StreamKind.ACK and is_put:
            if operation.digest.value != answer.digest:
                raise ValueError("an acknowledgement of something else")
            self._tell(operation, StreamVerdict.DONE, answer)
        elif answer.kind is StreamKind.DATA and not is_put:
            if answer.length != operation.chunk.length:
                raise ValueError(f"{answer.length} bytes instead of {operation.chunk.length}")
            self._arrived(answer, operation, answers)
        else:
            raise ValueError(f"an answer of kind {answer.kind} that was not asked for")

    def _failed(self, answer: StreamAnswer, operation: Operation, answers: streams.StreamReceiver) -> None:
        detail = answers.receive(answer.length).decode(errors="replace")
        self._tell(operation, StreamVerdict.FAILED, answer, detail)

    def _arrived(self, answer: StreamAnswer, operation: Operation, answers: streams.StreamReceiver) -> None:
        if not operation.claim():
            answers.drain(answer.length)
            self._tell(operation, StreamVerdict.SKIPPED, answer)
            return
        try:
            good = answers.receive_payload(operation.view, operation.digest)
        except Forged:
            self._tell(operation, StreamVerdict.DAMAGED, answer)
            raise
        finally:
            operation.finish()
        self._tell(operation, StreamVerdict.DONE if good else StreamVerdict.DAMAGED, answer)

    def _tell(
        self,
        operation: Operation,
        verdict: StreamVerdict,
        answer: StreamAnswer | None,
        detail: str = "",
    ) -> None:
        if verdict is StreamVerdict.FAILED and answer is not None and answer.fault is Fault.DIGEST:
            verdict = StreamVerdict.DAMAGED
        number = operation.number
        self._events.call(lambda: self._events.answered(self, number, verdict, answer, detail))


def _welcome(answers: streams.StreamReceiver) -> int:
    """The window."""
    try:
        answer = decode_answer(answers.receive(ANSWER_BYTES))
    except ValueError as error:
        raise ConnectionRefusedError(f"this is no data port: {error}") from error
    if answer.kind is not StreamKind.WELCOME:
        raise ConnectionRefusedError(f"this is no welcome: kind {answer.kind}")
    return answer.window
