"""One peer on the asking side: its transfers and requests, and the connections that carry them.

One connection is for control messages alone, so that they never wait behind data. Chunks go to the chunk
connection with the most room; chunks that can take the short cut within this host need no connection at all.
Connections are made when there is something to carry. All state belongs to the fabric's thread; the public
methods hand over to it.

A request is WAITING for its connection, then SENT, and ends with an answer, at its deadline, or when the
connection breaks. It is sent at most once; then whether the peer acted on it is unknown.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import zmq

from ckptd.transport.fabric import frames as f
from ckptd.transport.fabric.frames import MAX_FRAMES, Payload
from ckptd.transport.fabric.lanes import ChunkLane, FabricParts, Lane, LaneState, ZmqChunkLane
from ckptd.transport.fabric.short_cut import CopyLane
from ckptd.transport.fabric.transfers import DRAIN_POLL_S, Chunk, ChunkedTransfer, Pacer, Transfers
from ckptd.transport.verbs import Answered, Done, Fault, PeerAddress, RegionKey, Transfer

logger = logging.getLogger(__name__)

MAX_REQUESTS = 4096
FULL_RETRY_S = 0.01
RETRY_REFUSED_S = 0.5
LANE_RETRY_S = 1.0

Frames = Sequence[zmq.Frame]


@dataclass(slots=True)
class PendingRequest:
    """``answered`` is called once."""

    body: bytes
    answered: Answered
    deadline_at: float
    sent: bool = False

    def finish(self, outcome: bytes | Fault) -> None:
        try:
            self.answered(outcome)
        except Exception:  # a user's callback: the loop that carries all transfers must survive it
            logger.exception("the callback of a request failed")


class Requests:
    """The requests to one peer, in the order in which they were made. On the fabric's thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._requests: dict[int, PendingRequest] = {}
        self._unsent: deque[int] = deque()

    @property
    def wait_for_a_connection(self) -> bool:
        return bool(self._unsent)

    def add(self, request: PendingRequest) -> None:
        if len(self._requests) >= MAX_REQUESTS:
            request.finish(Fault.DEADLINE)  # the peer has answered none of so many
            return
        number = next(self._numbers)
        self._requests[number] = request
        self._unsent.append(number)

    def send(self, send: Callable[[int, bytes], bool]) -> float:
        """Send the waiting requests; ``send`` returns false if there is no room. Returns the seconds until a
        retry.
        """
        while self._unsent:
            number = self._unsent[0]
            request = self._requests.get(number)
            if request is not None:
                if not send(number, request.body):
                    return FULL_RETRY_S
                request.sent = True
                request.body = b""
            self._unsent.popleft()
        return float("inf")

    def expire(self, now_s: float) -> None:
        self._end_those(Fault.DEADLINE, lambda request: now_s >= request.deadline_at)

    def due_s(self, now_s: float) -> float:
        """Seconds until the first deadline."""
        deadlines = (request.deadline_at for request in self._requests.values())
        return min(deadlines, default=float("inf")) - now_s

    def connection_lost(self) -> None:
        """Sent requests are not sent again."""
        self._end_those(Fault.DEADLINE, lambda request: request.sent)

    def end(self, fault: Fault) -> None:
        self._unsent.clear()
        self._end_those(fault, lambda request: True)

    def replied(self, number: int, body: bytes) -> None:
        """An answer; it is dropped if the request has ended."""
        request = self._requests.pop(number, None)
        if request is not None:
            request.finish(body)

    def _end_those(self, fault: Fault, which: Callable[[PendingRequest], bool]) -> None:
        for number, request in list(self._requests.items()):
            if which(request):
                del self._requests[number]
                request.finish(fault)


@dataclass(frozen=True, slots=True)
class LinkParts:
    """What the links of a fabric share.

    Args:
        copier: one thread; None if the short cut is switched off.
        connections: of each link, for chunks.
        vouch: why an address is not trusted; "" if it is.
        forget: called on the fabric's thread when a closed link has nothing left to complete.
    """

    fabric: FabricParts
    pacer: Pacer
    copier: Executor | None
    chunk_bytes: int
    connections: int
    vouch: Callable[[PeerAddress], str]
    forget: Callable[[FabricPeer], None]


class FabricPeer:
    """Implements `Peer`, and `LaneOwner`."""

    def __init__(self, parts: LinkParts, address: PeerAddress) -> None:
        self._parts = parts
        self._fabric = parts.fabric
        self._counters = parts.fabric.counters
        self._address = address
        self._control = self._make_lane(data=False)
        self._chunk_lanes = [self._make_chunk_lane() for _ in range(parts.connections)]
        self._copies = CopyLane(
            self._fabric.node, parts.copier, self._counters, self._fabric.call, self.chunk_done
        )
        self._requests = Requests()
        self._transfers = Transfers()
        self._not_before = 0.0  # after a refusal
        self._closed = False
        self.closing = False  # then the fabric makes another link for this address

    @property
    def address(self) -> PeerAddress:
        return self._address

    # --- any thread ---

    def put(
        self,
        source: memoryview,
        target: RegionKey,
        *,
        offset: int = 0,
        deadline_s: float = 60.0,
        done: Done | None = None,
    ) -> Transfer:
        """Implements `Peer.put`.

        Raises:
            ValueError: ``source`` is not contiguous.
        """
        return self._begin(source, target, True, offset, deadline_s, done)

    def get(
        self,
        source: RegionKey,
        target: memoryview,
        *,
        offset: int = 0,
        deadline_s: float = 60.0,
        done: Done | None = None,
    ) -> Transfer:
        """Implements `Peer.get`.

        Raises:
            ValueError: ``target`` is not contiguous, or is read-only.
        """
        return self._begin(target, source, False, offset, deadline_s, done)

    def _begin(
        self,
        buffer: memoryview,
        key: RegionKey,
        is_put: bool,
        offset: int,
        deadline_s: float,
        done: Done | None,
    ) -> ChunkedTransfer:
        transfer = ChunkedTransfer(
            buffer,
            key,
            is_put=is_put,
            offset=offset,
            chunk_bytes=self._parts.chunk_bytes,
            deadline_s=deadline_s,
            done=done,
            on_cancel=self._cancel,
        )
        if not self._fabric.call(lambda: self._accept(transfer, offset)):
            transfer.end(Fault.CLOSED, "this fabric is closed")
            transfer.complete()
        return transfer

    def request(self, body: bytes, *, timeout_s: float, answered: Answered) -> None:
        """Implements `Peer.request`.

        Raises:
            ValueError: the body is larger than a control message may be.
        """
        if len(body) > f.MAX_BODY_BYTES:
            raise ValueError(f"a request of {len(body)} bytes; at most {f.MAX_BODY_BYTES}")
        request = PendingRequest(body, answered, time.monotonic() + timeout_s)
        if not self._fabric.call(lambda: self._accept_request(request)):
            request.finish(Fault.CLOSED)

    def close(self) -> None:
        self.closing = True
        self._fabric.call(self.shut)

    def _cancel(self, transfer: ChunkedTransfer) -> None:
        self._fabric.call(lambda: transfer.end(Fault.CANCELLED, "cancelled"))

    # --- the fabric's thread: what callers ask ---

    def _accept(self, transfer: ChunkedTransfer, offset: int) -> None:
        refusal = self._refusal(transfer, offset)
        if self._closed:
            transfer.end(Fault.CLOSED, "this peer is closed")
            transfer.complete()  # nobody pumps a link that was forgotten
            return
        if refusal is not None:
            transfer.end(*refusal)
        self._transfers.add(transfer)

    def _refusal(self, transfer: ChunkedTransfer, offset: int) -> tuple[Fault, str] | None:
        """Why the transfer is not sent: no header can express it, or the peer is not trusted."""
        objection = self._parts.vouch(self._address)
        if objection:
            return Fault.REFUSED, objection
        if not 0 <= transfer.key.region < f.MAX_NUMBER or len(transfer.key.token) != 16:
            return Fault.REGION, "not a region key"
        if not 0 <= offset < f.MAX_NUMBER - len(transfer.buffer):
            return Fault.BOUNDS, f"offset {offset} is out of range"
        return None

    def _accept_request(self, request: PendingRequest) -> None:
        if self._closed:
            request.finish(Fault.CLOSED)
        elif self._parts.vouch(self._address):
            request.finish(Fault.REFUSED)
        else:
            self._requests.add(request)

    def check_trust(self) -> None:
        """End all operations with a peer that is not trusted any more."""
        if self._closed or not (self._control.started or any(c.started for c in self._chunk_lanes)):
            return
        objection = self._parts.vouch(self._address)
        if objection:
            self._counters.revoked += 1
            self._refuse(objection)

    def shut(self) -> None:
        """End everything; later calls of `pump` complete what cannot complete at once."""
        if self._closed:
            return
        self._closed = True
        self._transfers.end(Fault.CLOSED, "the peer was closed")
        self._break_off()
        self._requests.end(Fault.CLOSED)

    def complete_all(self) -> None:
        """Complete at the end of the fabric, whatever an engine still holds."""
        self._transfers.complete_all()

    # --- the fabric's thread: the work ---

    def pump(self, now_s: float) -> float:
        """Send what may be sent, end what is due; returns the seconds until the next call, if nothing happens
        before.
        """
        self._transfers.expire(now_s, self._states())
        self._requests.expire(now_s)
        if self._transfers.settle(now_s):
            self._break_off_chunks()
        due = [DRAIN_POLL_S if self._transfers.draining else float("inf")]
        if self._closed:
            if not self._transfers.draining:
                self._parts.forget(self)
            return due[0]
        due.append(self._send_requests(now_s))
        due.append(self._send_chunks(now_s))
        if self._transfers.some_ended:
            return 0.0
        due += [lane.due_s(now_s) for lane in self._chunk_lanes]
        due += [self._transfers.due_s(now_s), self._requests.due_s(now_s)]
        return max(0.0, min(due))

    def _states(self) -> str:
        up = sum(lane.room > 0 for lane in self._chunk_lanes)
        return f"{up} of {len(self._chunk_lanes)} connections take chunks"

    def _send_requests(self, now_s: float) -> float:
        if not self._requests.wait_for_a_connection:
            return float("inf")
        if not self._ensure(self._control, now_s):
            return LANE_RETRY_S
        if self._control.state is not LaneState.UP:
            return float("inf")  # its answer wakes us
        return self._requests.send(self._send_request)

    def _send_request(self, number: int, body: bytes) -> bool:
        return self._control.send(f.encode(f.Request(number)), body)

    def _send_chunks(self, now_s: float) -> float:
        while (transfer := self._transfers.next()) is not None:
            if self._copies.takes(transfer):
                if self._copies.room == 0:
                    break  # the end of a copy wakes us
                self._copies.send(transfer.next_chunk())
                self._transfers.turn()
                continue
            if not all(self._ensure(lane, now_s) for lane in self._chunk_lanes):
                return LANE_RETRY_S
            lane = max(self._chunk_lanes, key=lambda lane: lane.room)
            if lane.room == 0:
                break  # an answer wakes us
            if transfer.is_put:
                delay_s = self._parts.pacer.delay_s(now_s)
                if delay_s > 0:
                    return delay_s if self._transfers.next_get() is None else 0.0
            chunk = transfer.next_chunk()
            if not lane.send(chunk):
                transfer.give_back(chunk)
                return 0.01
            if transfer.is_put:
                self._parts.pacer.spend(chunk.length)
            self._transfers.turn()
        return float("inf")

    # --- connections ---

    def _make_lane(self, *, data: bool) -> Lane:
        return Lane(
            self._fabric,
            self,
            endpoint=self._address.endpoint,
            target=self._address.node,
            server_key=self._address.public_key,
            data=data,
        )

    def _make_chunk_lane(self) -> ChunkLane:
        return ZmqChunkLane(self._make_lane(data=True), self)

    def _ensure(self, lane: Lane | ChunkLane, now_s: float) -> bool:
        """Whether the connection exists or is being made."""
        if lane.started:
            return True
        if now_s < self._not_before:
            return False
        try:
            lane.start()
        except ValueError as error:
            self._not_before = now_s + LANE_RETRY_S
            self._refuse(str(error))
            return False
        except OSError as error:  # our own shortage: requests and transfers wait, up to their deadlines
            self._not_before = now_s + LANE_RETRY_S
            self._fabric.refusals.refused("descriptors", "", f"a connection was not made: {error}")
            return False
        return True

    def _chunk_lane_of(self, lane: Lane) -> ZmqChunkLane | None:
        for candidate in self._chunk_lanes:
            if isinstance(candidate, ZmqChunkLane) and candidate.lane is lane:
                return candidate
        return None

    def message(self, lane: Lane, frames: Frames) -> None:
        try:
            if len(frames) > MAX_FRAMES:
                raise ValueError(f"{len(frames)} frames")
            answer = f.decode_answer(frames[0].buffer)
        except ValueError as error:
            self.garbage(str(error))
            return
        payload = Payload(frames[1:]) if len(frames) > 1 else None
        if isinstance(answer, f.Opened):
            self._opened(lane, answer)
        elif isinstance(answer, f.Refuse):
            self.lane_refused(lane, answer.detail)
        elif isinstance(answer, f.Reply):
            if payload is not None:
                self._requests.replied(answer.op, payload.join())
        elif (chunk_lane := self._chunk_lane_of(lane)) is not None:
            chunk_lane.answer(answer, payload)
        elif isinstance(answer, f.FaultReply) and answer.fault == "open":
            lane.reopen()
            self.lane_down(lane)
        elif not self._other_answer(answer):
            self.garbage("chunks on a control connection")

    def _other_answer(self, answer: f.Answer) -> bool:
        """For fabrics with more answers on the control connection; whether it was one of theirs."""
        return False

    def _opened(self, lane: Lane, answer: f.Opened) -> None:
        if answer.protocol != f.PROTOCOL:
            self.lane_refused(lane, f"the peer speaks protocol version {answer.protocol}")
        elif self._address.node not in ("", answer.node):
            self.lane_refused(lane, f"the peer is {answer.node}, not {self._address.node}")
        else:
            lane.opened()
            self._counters.reconnects += lane.opened_times > 1
            chunk_lane = self._chunk_lane_of(lane)
            if chunk_lane is not None:
                chunk_lane.window = max(1, answer.window)

    def lane_down(self, lane: Lane) -> None:
        chunk_lane = self._chunk_lane_of(lane)
        if chunk_lane is not None:
            chunk_lane.lose_all()
            return
        self._requests.connection_lost()

    def lane_refused(self, lane: Lane, detail: str) -> None:
        self._not_before = time.monotonic() + RETRY_REFUSED_S
        self._refuse(detail)

    def _refuse(self, detail: str) -> None:
        logger.info("no connection with %s at %s: %s", self._address.node, self._address.endpoint, detail)
        self._transfers.end(Fault.REFUSED, detail)
        self._requests.end(Fault.REFUSED)
        self._break_off()

    def _break_off(self) -> None:
        self._control.stop()
        self._break_off_chunks()

    def _break_off_chunks(self) -> None:
        for lane in self._chunk_lanes:
            if lane.started:
                lane.stop()

    # --- the events of chunks ---

    def chunk_done(self, chunk: Chunk) -> None:
        transfer = chunk.transfer
        if transfer.outcome is None:
            if transfer.is_put:
                self._counters.put_bytes += chunk.length
            else:
                self._counters.got_bytes += chunk.length
        transfer.chunk_done()

    def chunk_lost(self, chunk: Chunk) -> None:
        self._counters.chunk_retries += chunk.transfer.outcome is None
        chunk.transfer.lost(chunk)

    def chunk_damaged(self, chunk: Chunk) -> None:
        self._counters.chunk_retries += chunk.transfer.outcome is None
        self._counters.bad_digests += not chunk.transfer.is_put
        chunk.transfer.damaged(chunk)

    def chunk_failed(self, chunk: Chunk, fault: str, detail: str) -> None:
        if fault == Fault.DIGEST:
            self.chunk_damaged(chunk)
            return
        try:
            chunk.transfer.end(Fault(fault), detail)
        except ValueError:
            self.garbage(f"a fault named {fault!r}")
            self.chunk_lost(chunk)

    def garbage(self, what: str) -> None:
        self._fabric.refusals.seen(what)
