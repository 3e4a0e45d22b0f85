"""Encrypted records of a data stream: ciphers, keys, records.

Each direction of each stream has a key of its own. Both sides draw 32 random bytes for a stream and exchange
them over the control connection, which CURVE encrypts and authenticates. The ticket, which goes over the wire
in clear, is no part of the secret:

    key of a direction = HKDF-SHA256(secret: asker's 32 bytes | server's 32 bytes, salt: ticket,
                                     info: "ckptd stream" 0 cipher 0 direction 0 asker 0 server), 32 bytes

Direction is "up" (from the asker) or "down". A record is ciphertext and a tag of 16 bytes. Its nonce is its
number in its direction (12 bytes, little-endian, from 0), which does not go over the wire: a record that was
changed, repeated, left out or moved does not open. After `RECORDS_PER_KEY` records both sides continue with
HKDF-SHA256(secret: key, info: "ckptd next").

A record that does not open is `Forged`. Then its stream must end, and its chunk must be sent again.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

SECRET_BYTES = 32
TAG_BYTES = 16
# Of a payload; larger records fall out of the second level cache. GB/s of a bare loop with 128, 256, 512 and
# 1024 KiB: 2.5, 2.7, 2.7 and 3.0 (AES-256-GCM at both ends, two cores).
RECORD_BYTES = 1 << 20
# 256 GiB: 2^34 blocks of one key, which let an attacker distinguish AES-GCM from random with 2^-61.
RECORDS_PER_KEY = 1 << 18


class Cipher(IntEnum):
    """How the bytes of a stream are protected; the numbers go over the wire."""

    PLAINTEXT = 0
    AES_256_GCM = 1
    CHACHA20_POLY1305 = 2

    @property
    def title(self) -> str:
        """The name in logs and commands."""
        return {0: "plaintext", 1: "AES-256-GCM", 2: "ChaCha20-Poly1305"}[self]


class Forged(Exception):
    """The bytes are not the peer's next record: changed, repeated, moved, or somebody else's."""


def offered_ciphers(*, plaintext: bool) -> tuple[Cipher, ...]:
    """The ciphers that this machine accepts for its streams, the best first.

    A processor without AES instructions offers ChaCha20 only: AES would take ten times as long, at either
    end.

    Args:
        plaintext: streams need no encryption if the peer says so too.
    Raises:
        ValueError: the package `cryptography` is missing or too old.
    """
    if not _has_library():
        if plaintext:
            return (Cipher.PLAINTEXT,)
        raise ValueError(
            "data streams are encrypted by the package `cryptography`, 47 or newer, which is not installed: "
            "run `pip install 'cryptography>=47'`, or set peer_data to zmq (slower) or stream-plaintext"
        )
    fast = (Cipher.AES_256_GCM,) if _has_aes_instructions() else ()
    return (*((Cipher.PLAINTEXT,) if plaintext else ()), *fast, Cipher.CHACHA20_POLY1305)


def common_cipher(offered: tuple[int, ...], ours: tuple[Cipher, ...]) -> Cipher | None:
    """The first of ours that the peer offers, or None. Plaintext only if both sides put it first."""
    return next((cipher for cipher in ours if cipher in offered), None)


def _has_library() -> bool:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        return False
    return hasattr(AESGCM, "encrypt_into")


def _has_aes_instructions() -> bool:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return True
    flags = [line for line in lines if line.startswith(("flags", "Features"))]
    return not flags or "aes" in flags[0].split()


class StreamKey:
    """One direction of a stream, at one end: seals, or opens, its records in their order. One thread."""

    def __init__(self, cipher: Cipher, key: bytes) -> None:
        self._cipher, self._key = cipher, key
        self._number = 0
        self._aead = _make_aead(cipher, key)

    def seal(self, content: bytes | memoryview, record: memoryview, bound: bytes = b"") -> None:
        """Fill ``record``, `TAG_BYTES` longer than ``content``; ``bound`` is authenticated and not sent."""
        nonce = self._next_nonce()  # first: it may replace the cipher
        self._aead.encrypt_into(nonce, content, bound, record)

    def open(self, record: memoryview, content: memoryview, bound: bytes = b"") -> None:
        """Fill ``content`` with the plaintext; it may overlap ``record``.

        Raises:
            Forged: this is not the next record; ``content`` is zeros.
        """
        from cryptography.exceptions import InvalidTag

        nonce = self._next_nonce()
        try:
            self._aead.decrypt_into(nonce, record, bound, content)
        except InvalidTag:
            # OpenSSL writes the plaintext before it checks the tag: bytes that an attacker may have chosen.
            content[:] = bytes(len(content))
            raise Forged("a record failed authentication") from None

    def _next_nonce(self) -> bytes:
        if self._number and self._number % RECORDS_PER_KEY == 0:
            self._key = _derive(self._key, b"", b"ckptd next")
            self._aead = _make_aead(self._cipher, self._key)
        nonce = self._number.to_bytes(12, "little")
        self._number += 1
        return nonce


def stream_keys(
    cipher: Cipher, ticket: bytes, secrets: tuple[bytes, bytes], ends: tuple[str, str]
) -> tuple[StreamKey, StreamKey]:
    """The keys of a new stream: up, from the asker, and down.

    Args:
        secrets: the random bytes of the asker and of the server, `SECRET_BYTES` each.
        ends: the node ids of the asker and of the server.
    """
    asker, server = (node.encode() for node in ends)
    up, down = (
        _derive(
            b"".join(secrets),
            ticket,
            b"\0".join((b"ckptd stream", str(int(cipher)).encode(), direction, asker, server)),
        )
        for direction in (b"up", b"down")
    )
    return StreamKey(cipher, up), StreamKey(cipher, down)


def _derive(secret: bytes, salt: bytes, info: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, salt, info).derive(secret)


def _make_aead(cipher: Cipher, key: bytes) -> AESGCM | ChaCha20Poly1305:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

    return AESGCM(key) if cipher is Cipher.AES_256_GCM else ChaCha20Poly1305(key)
