"""The headers of a stream: fixed binary, with payloads behind them; docs/transport.md has their bytes.

The client sends a preamble of 56 bytes once, then asks of 64 bytes (WRITE, READ). The server sends answers of
40 bytes (WELCOME, ACK, DATA, FAULT), in the order of the asks. A WRITE and a DATA are followed by ``length``
bytes, a FAULT by its detail in UTF-8. A header that does not match its own digest ends the stream, because
the start of the next one is unknown.

Between nodes with keys all bytes after the preamble are in records (`ckptd.transport.tcp.sealing`): one for
each header, one for a detail, and one for each 2^20 bytes of a payload and one for the rest. The proof is the
first record up: of no bytes, and bound to the 40 bytes before it.

In plaintext a payload is followed by its digest, 8 bytes, as in `frames.digest_of`. It comes last, so that
both sides compute it piece by piece while the bytes are in their caches.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import NamedTuple

import xxhash

from ckptd.transport.fabric.frames import MAX_CHUNK_BYTES
from ckptd.transport.tcp.sealing import TAG_BYTES, StreamKey
from ckptd.transport.verbs import Fault

PREAMBLE = Struct("<4s4x32s16s")
ASK = Struct("<4sB3xQQ16sQQQ")
ANSWER = Struct("<4sBBHQQQQ")
TRAILER = Struct("<Q")
PREAMBLE_BYTES = PREAMBLE.size
ASK_BYTES = ASK.size
ANSWER_BYTES = ANSWER.size
TICKET_MAGIC, ASK_MAGIC, ANSWER_MAGIC = b"CKT2", b"CKQ1", b"CKA1"
MAX_DETAIL_BYTES = 500
FAULTS: dict[int, Fault] = {1: Fault.REGION, 2: Fault.BOUNDS, 3: Fault.ACCESS, 4: Fault.DIGEST}
NUMBERS = {fault: number for number, fault in FAULTS.items()}


class StreamKind(IntEnum):
    WRITE = 1
    READ = 2
    WELCOME = 3
    ACK = 4
    DATA = 5
    FAULT = 6


ASKS = frozenset((StreamKind.WRITE, StreamKind.READ))
SIZES = {
    StreamKind.WELCOME: 0,
    StreamKind.ACK: 0,
    StreamKind.DATA: MAX_CHUNK_BYTES,
    StreamKind.FAULT: MAX_DETAIL_BYTES,
}


class StreamAsk(NamedTuple):
    kind: StreamKind
    op: int
    region: int
    token: bytes
    offset: int
    length: int


class StreamAnswer(NamedTuple):
    kind: StreamKind
    op: int
    window: int = 0
    length: int = 0
    digest: int = 0
    fault: Fault | None = None


class Preamble(NamedTuple):
    ticket: bytes
    proof: bytes
    proven: bytes  # the bytes that the proof is bound to: all before it


def encode_preamble(ticket: bytes, key: StreamKey | None = None) -> bytes:
    """With the proof that the asker has the ticket's key, if there is one."""
    proof = bytearray(TAG_BYTES)
    if key is not None:
        key.seal(b"", memoryview(proof), encode_preamble(ticket)[:-TAG_BYTES])
    return PREAMBLE.pack(TICKET_MAGIC, ticket, proof)


def decode_preamble(data: bytes | bytearray) -> Preamble:
    """The ticket, and a proof that is not checked yet.

    Raises:
        ValueError: this is no preamble.
    """
    if len(data) != PREAMBLE_BYTES or not data.startswith(TICKET_MAGIC):
        raise ValueError(f"{len(data)} bytes that are no preamble")
    _, ticket, proof = PREAMBLE.unpack(data)
    return Preamble(ticket, proof, bytes(data[:-TAG_BYTES]))


def encode_ask(ask: StreamAsk) -> bytes:
    kind, op, region, token, offset, length = ask
    return _sealed(ASK.pack(ASK_MAGIC, kind, op, region, token, offset, length, 0))


def decode_ask(data: bytes | bytearray) -> StreamAsk:
    """Decode an ask.

    Raises:
        ValueError: it is damaged, or nothing of ours.
    """
    magic, kind, op, region, token, offset, length, _ = ASK.unpack(_checked(data))
    if magic != ASK_MAGIC or kind not in ASKS or length > MAX_CHUNK_BYTES:
        raise ValueError(f"not an ask: {magic!r}, kind {kind}, {length} bytes")
    return StreamAsk(StreamKind(kind), op, region, token, offset, length)


def encode_answer(answer: StreamAnswer) -> bytes:
    kind, op, window, length, digest, fault = answer
    number = 0 if fault is None else NUMBERS[fault]
    return _sealed(ANSWER.pack(ANSWER_MAGIC, kind, number, window, op, length, digest, 0))


def encode_fault(op: int, window: int, fault: Fault, detail: str) -> bytes:
    """A FAULT followed by its detail."""
    text = detail.encode()[:MAX_DETAIL_BYTES]
    digest = xxhash.xxh3_64_intdigest(text)
    head = StreamAnswer(StreamKind.FAULT, op, window, len(text), digest, fault)
    return encode_answer(head) + text


def decode_answer(data: bytes | bytearray) -> StreamAnswer:
    """Decode an answer.

    Raises:
        ValueError: it is damaged, or nothing of ours.
    """
    magic, number, fault, window, op, length, digest, _ = ANSWER.unpack(_checked(data))
    if magic != ANSWER_MAGIC or number not in set(SIZES):
        raise ValueError(f"not an answer: {magic!r}, kind {number}")
    kind = StreamKind(number)
    if length > SIZES[kind] or (kind is StreamKind.FAULT) != (fault in FAULTS):
        raise ValueError(f"not an answer: kind {number}, fault {fault}, {length} bytes")
    return StreamAnswer(kind, op, window, length, digest, FAULTS.get(fault))


def _sealed(header: bytes) -> bytes:
    content = header[: -TRAILER.size]
    return content + TRAILER.pack(xxhash.xxh3_64_intdigest(content))


def _checked(data: bytes | bytearray) -> bytes | bytearray:
    content, seal = data[: -TRAILER.size], data[-TRAILER.size :]
    if TRAILER.pack(xxhash.xxh3_64_intdigest(content)) != bytes(seal):
        raise ValueError("the digest of a header does not match")
    return data
