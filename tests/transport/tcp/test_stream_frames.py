"""Headers of streams: what is packed comes back, and nothing damaged does."""

from __future__ import annotations

import random

import pytest

from ckptd.transport.tcp.stream_frames import (
    ANSWER_BYTES,
    ASK_BYTES,
    MAX_DETAIL_BYTES,
    PREAMBLE_BYTES,
    StreamAnswer,
    StreamAsk,
    StreamKind,
    decode_answer,
    decode_ask,
    decode_preamble,
    encode_answer,
    encode_ask,
    encode_fault,
    encode_preamble,
)
from ckptd.transport.verbs import Fault

ASK = StreamAsk(StreamKind.WRITE, 7, (1 << 62) - 1, bytes(range(16)), 12345678901, 16 << 20)
ACK = StreamAnswer(StreamKind.ACK, (1 << 64) - 1, 8, 0, (1 << 64) - 1)


def test_headers_have_the_bytes_that_are_specified() -> None:
    ask, answer = encode_ask(ASK), encode_answer(ACK)
    assert (len(ask), len(answer)) == (ASK_BYTES, ANSWER_BYTES) == (64, 40)
    assert ask[:24] == b"CKQ1" + b"\1\0\0\0" + (7).to_bytes(8, "little") + b"\xff" * 7 + b"\x3f"
    assert ask[24:40] == ASK.token
    assert int.from_bytes(ask[40:48], "little") == ASK.offset
    assert answer[:8] == b"CKA1" + b"\4\0\x08\0"
    assert encode_preamble(b"t" * 32) == b"CKT2" + bytes(4) + b"t" * 32 + bytes(16)


def test_what_is_packed_comes_back() -> None:
    assert decode_ask(encode_ask(ASK)) == ASK
    assert decode_answer(encode_answer(ACK)) == ACK
    assert decode_preamble(encode_preamble(b"t" * 32))[:2] == (b"t" * 32, bytes(16))


@pytest.mark.parametrize("fault", [Fault.REGION, Fault.BOUNDS, Fault.ACCESS, Fault.DIGEST])
def test_a_fault_brings_its_detail(fault: Fault) -> None:
    message = encode_fault(9, 3, fault, "x" * 9999)
    answer = decode_answer(message[:ANSWER_BYTES])
    assert (answer.kind, answer.op, answer.window, answer.fault) == (StreamKind.FAULT, 9, 3, fault)
    assert message[ANSWER_BYTES:] == b"x" * MAX_DETAIL_BYTES
    assert answer.length == MAX_DETAIL_BYTES


def test_any_damaged_bit_is_found() -> None:
    for header, decode in ((encode_ask(ASK), decode_ask), (encode_answer(ACK), decode_answer)):
        for bit in range(len(header) * 8):
            damaged = bytearray(header)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(ValueError, match="digest"):
                decode(damaged)


def test_random_bytes_are_no_headers() -> None:
    rng = random.Random(3)
    for _ in range(200):
        for size, decode in ((ASK_BYTES, decode_ask), (ANSWER_BYTES, decode_answer)):
            with pytest.raises(ValueError, match="header"):
                decode(rng.randbytes(size))
        with pytest.raises(ValueError, match="no preamble"):
            decode_preamble(rng.randbytes(rng.randrange(PREAMBLE_BYTES + 1)))


def test_kinds_are_not_mistaken_for_one_another() -> None:
    with pytest.raises(ValueError, match="not an ask"):
        decode_ask(encode_ask(ASK._replace(kind=StreamKind.ACK)))
    with pytest.raises(ValueError, match="not an ask"):
        decode_ask(encode_ask(ASK._replace(length=(16 << 20) + 1)))
    with pytest.raises(ValueError, match="not an answer"):
        decode_answer(encode_answer(ACK._replace(kind=StreamKind.WRITE)))
    with pytest.raises(ValueError, match="not an answer"):
        decode_answer(encode_answer(ACK._replace(kind=StreamKind.FAULT)))
