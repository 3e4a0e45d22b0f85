"""Records of encrypted streams: keys, numbers, and what is not the next record."""

from __future__ import annotations

import hashlib
import hmac
import socket
import threading
from contextlib import closing
from itertools import product

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.transport.tcp import sealing, streams
from ckptd.transport.tcp.sealing import (
    TAG_BYTES,
    Cipher,
    Forged,
    StreamKey,
    common_cipher,
    offered_ciphers,
    stream_keys,
)
from ckptd.transport.tcp.stream_frames import decode_answer, decode_ask, decode_preamble

TICKET = b"t" * 32
SECRETS = (b"a" * 32, b"s" * 32)
CIPHERS = (Cipher.AES_256_GCM, Cipher.CHACHA20_POLY1305)


def sealed(key: StreamKey, content: bytes, bound: bytes = b"") -> bytes:
    record = bytearray(len(content) + TAG_BYTES)
    key.seal(content, memoryview(record), bound)
    return bytes(record)


def opened(key: StreamKey, record: bytes, bound: bytes = b"") -> bytes:
    content = bytearray(len(record) - TAG_BYTES)
    key.open(memoryview(record), memoryview(content), bound)
    return bytes(content)


def up(cipher: Cipher = Cipher.AES_256_GCM) -> StreamKey:
    return stream_keys(cipher, TICKET, SECRETS, ("here", "there"))[0]


# --- keys ------------------------------------------------------------------------------------------------


def hkdf(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """RFC 5869 with SHA-256, for one block."""
    extracted = hmac.digest(salt or bytes(32), secret, "sha256")
    return hmac.new(extracted, info + b"\x01", hashlib.sha256).digest()


def test_the_keys_and_records_are_those_of_the_documentation() -> None:
    info = b"ckptd stream\x001\x00up\x00here\x00there"
    cipher = AESGCM(hkdf(SECRETS[0] + SECRETS[1], TICKET, info))
    key = up()
    for number, content in enumerate((b"", b"first", b"second")):
        nonce = number.to_bytes(12, "little")
        assert sealed(key, content) == cipher.encrypt(nonce, content, None)


def test_a_key_is_replaced_after_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "RECORDS_PER_KEY", 3)
    first = hkdf(SECRETS[0] + SECRETS[1], TICKET, b"ckptd stream\x001\x00up\x00here\x00there")
    second = hkdf(first, b"", b"ckptd next")
    third = hkdf(second, b"", b"ckptd next")
    key, other = up(), up()
    for number, secret in enumerate([first] * 3 + [second] * 3 + [third] * 3):
        record = sealed(key, b"content")
        assert record == AESGCM(secret).encrypt(number.to_bytes(12, "little"), b"content", None)
        assert opened(other, record) == b"content"


def test_whatever_differs_makes_other_keys() -> None:
    """Streams, ciphers, directions and ends have none in common."""
    other = bytes(32)
    variants = [
        (Cipher.CHACHA20_POLY1305, TICKET, SECRETS, ("here", "there")),
        *(
            (Cipher.AES_256_GCM, *rest)
            for rest in product(
                (TICKET, other),
                (SECRETS, (SECRETS[0], other), (other, SECRETS[1])),
                (("here", "there"), ("there", "here"), ("her", "ethere")),
            )
        ),
    ]
    keys = [key for variant in variants for key in stream_keys(*variant)]
    assert len({sealed(key, b"content") for key in keys}) == len(keys) == 2 * len(variants)


@pytest.mark.parametrize("cipher", CIPHERS)
def test_nothing_but_the_next_record_opens_and_what_does_not_leaves_zeros(cipher: Cipher) -> None:
    """OpenSSL writes what it decrypted before it knows the tag: an attacker's choice would lie in a
    region until it is filled anew.
    """
    sender = up(cipher)
    first, second = sealed(sender, b"x" * 100), sealed(sender, b"y" * 100)
    changed = [bytes((*first[:at], first[at] ^ 1, *first[at + 1 :])) for at in range(len(first))]
    for record in (*changed, second, first[:50] + first[-50:], bytes(116), first[:-1]):
        key = up(cipher)
        target = bytearray(b"?" * (len(record) - TAG_BYTES))
        with pytest.raises(Forged):
            key.open(memoryview(record), memoryview(target))
        assert target == bytes(len(target))
    key = up(cipher)
    assert opened(key, first) == b"x" * 100
    with pytest.raises(Forged):
        opened(key, first)  # repeated
    with pytest.raises(Forged):
        opened(up(cipher), first, b"bound to something")


# --- which cipher ----------------------------------------------------------------------------------------


def test_plaintext_needs_both_sides_and_slow_processors_decide() -> None:
    plain, aes, chacha = Cipher
    usual, asked, slow = (aes, chacha), (plain, aes, chacha), (chacha,)
    assert common_cipher(usual, usual) is aes
    assert common_cipher(asked, asked) is plain
    assert common_cipher(asked, usual) is common_cipher(usual, asked) is aes
    assert common_cipher(usual, slow) is common_cipher(slow, usual) is chacha
    assert common_cipher((plain,), usual) is common_cipher(usual, (plain,)) is None
    assert common_cipher((77,), usual) is common_cipher((), usual) is None


def test_what_a_machine_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, aes, chacha = Cipher
    monkeypatch.setattr(sealing, "_has_aes_instructions", lambda: True)
    assert offered_ciphers(plaintext=False) == (aes, chacha)
    assert offered_ciphers(plaintext=True) == (plain, aes, chacha)
    monkeypatch.setattr(sealing, "_has_aes_instructions", lambda: False)
    assert offered_ciphers(plaintext=False) == (chacha,)
    monkeypatch.setattr(sealing, "_has_library", lambda: False)
    assert offered_ciphers(plaintext=True) == (plain,)
    with pytest.raises(ValueError, match="pip install 'cryptography"):
        offered_ciphers(plaintext=False)


# --- any bytes at all ------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=100))
def test_headers_of_any_bytes_are_refused_by_name(data: bytes) -> None:
    for decode in (decode_preamble, decode_ask, decode_answer):
        with pytest.raises(ValueError, match=r"not an ask|not an answer|header|no preamble"):
            decode(data)


@pytest.fixture
def small_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "RECORD_BYTES", 32)


HEADER = b"a header of 24 bytes....".ljust(24)
MESSAGES = [bytes([65 + i]) * size for i, size in enumerate((0, 1, 31, 32, 33, 64, 100))]
edits = st.lists(
    st.tuples(
        st.sampled_from(["flip", "drop", "repeat", "insert", "cut", "move"]),
        st.integers(0, 2000),
        st.integers(1, 120),
    ),
    min_size=1,
    max_size=4,
)


def wire() -> bytes:
    """The messages, sealed one after the other."""
    near, far = socket.socketpair()
    with closing(near), closing(far):
        sender = streams.sender_of(near, up())
        for message in MESSAGES:
            digest = streams.PayloadDigest(1, 0, len(message))
            sender.send_payload(HEADER, memoryview(message), digest)
        near.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: far.recv(1 << 16), b""))


def edited(data: bytes, edit: tuple[str, int, int]) -> bytes:
    what, at, size = edit
    at %= len(data) or 1
    piece = data[at : at + size]
    rest = data[:at] + data[at + size :]
    match what:
        case "flip":
            return data[:at] + bytes(byte ^ 1 << size % 8 for byte in piece) + data[at + size :]
        case "drop":
            return rest
        case "repeat":
            return data[:at] + piece + data[at:]
        case "insert":
            return data[:at] + bytes([size]) * size + data[at:]
        case "cut":
            return data[:at]
        case _:
            to = (at * 7 + size) % (len(rest) or 1)
            return rest[:to] + piece + rest[to:]


@pytest.mark.usefixtures("small_records")
def test_whatever_is_done_to_a_stream_only_a_beginning_of_it_is_taken() -> None:
    """Changed, dropped, repeated, inserted, cut, moved, anywhere and several times: no byte arrives
    that was not sent there.
    """
    clean = wire()

    @settings(max_examples=300, deadline=None)
    @given(edits)
    def check(chosen: list[tuple[str, int, int]]) -> None:
        data = clean
        for edit in chosen:
            data = edited(data, edit)
        taken = read(data)
        assert taken == MESSAGES[: len(taken)]
        assert (len(taken) == len(MESSAGES)) <= data.startswith(clean)

    check()
    assert read(clean) == MESSAGES


def read(data: bytes) -> list[bytes]:
    """The messages up to the first that is none."""
    near, far = socket.socketpair()
    taken: list[bytes] = []
    with closing(near), closing(far):

        def write() -> None:
            near.sendall(data)
            near.shutdown(socket.SHUT_WR)

        writer = threading.Thread(target=write)
        writer.start()
        receiver = streams.receiver_of(far, up())
        header = bytearray(len(HEADER))
        try:
            for message in MESSAGES:
                if not receiver.receive_header(memoryview(header)):
                    break
                assert header == HEADER
                target = bytearray(b"?" * len(message))
                digest = streams.PayloadDigest(1, 0, len(message))
                before = bytes(target)
                try:
                    receiver.receive_payload(memoryview(target), digest)
                except (Forged, ConnectionResetError):
                    allowed = zip(target, message, before, strict=True)
                    assert all(byte in (0, sent, old) for byte, sent, old in allowed)
                    break
                taken.append(bytes(target))
        except (Forged, ConnectionResetError):
            pass  # what is not the next record ends the stream
        far.shutdown(socket.SHUT_RDWR)
        writer.join()
    return taken
