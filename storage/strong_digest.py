"""Cryptographic digests of images, which detect forgery. (xxh3 detects damage, three to ten times as fast.)

A digest is spelled ``blake3:<64 hex digits>`` or ``sha256:<64 hex digits>``. A writer uses the
algorithm that is faster on its machine (BLAKE3 with AVX2 or AVX-512, SHA-256 if the CPU has only
SHA instructions); a reader uses the one that the digest names.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from blake3 import blake3

STRONG_DIGEST = r"(blake3|sha256):[0-9a-f]{64}"
_PATTERN = re.compile(STRONG_DIGEST)
_PROBE_BYTES = 4 << 20  # some milliseconds

Buffer = bytes | bytearray | memoryview

_WORTH_THREADS = 16 << 20  # below this, starting threads takes longer than they save

_HEX: dict[str, Callable[[Buffer, int], str]] = {
    "blake3": lambda data, threads: blake3(data, max_threads=threads).hexdigest(),
    "sha256": lambda data, threads: hashlib.sha256(data).hexdigest(),
}


_HASHES: dict[str, Callable[[], Any]] = {"blake3": blake3, "sha256": hashlib.sha256}


def strong_digest(data: Buffer, algorithm: str = "", *, threads: int = 1) -> str:
    """The digest of ``data``; other threads run meanwhile.

    Args:
        algorithm: "blake3", "sha256", or "" for the one that is faster on this machine.
        threads: number of threads for BLAKE3; SHA-256 uses one.
    """
    name = algorithm or fastest_algorithm()
    return f"{name}:{_HEX[name](data, threads if len(data) >= _WORTH_THREADS else 1)}"


def strong_digest_of(pieces: Iterable[Buffer]) -> str:
    """The digest of bytes that lie apart; the algorithm is the one that is faster on this machine."""
    name = fastest_algorithm()
    made = _HASHES[name]()
    for piece in pieces:
        made.update(piece)
    return f"{name}:{made.hexdigest()}"


def matches(data: Buffer, digest: str, *, threads: int = 1) -> bool:
    """Whether ``data`` has this digest; ``threads`` as in `strong_digest`. ValueError if it is malformed."""
    algorithm, _ = _split(digest)
    return hmac.compare_digest(strong_digest(data, algorithm, threads=threads), digest)


class Digesting:
    """Compares bytes that arrive in chunks with a digest; ValueError if the digest is malformed."""

    def __init__(self, digest: str) -> None:
        algorithm, self._wanted = _split(digest)
        self._made = _HASHES[algorithm]()

    def update(self, data: Buffer) -> None:
        self._made.update(data)

    @property
    def agrees(self) -> bool:
        """Whether the bytes added so far have the digest."""
        return hmac.compare_digest(self._made.hexdigest(), self._wanted)


def is_strong_digest(text: str) -> bool:
    return _PATTERN.fullmatch(text) is not None


def _split(digest: str) -> tuple[str, str]:
    """The algorithm and the hexadecimal digits."""
    if not is_strong_digest(digest):
        raise ValueError(f"{digest[:80]!r} is not a digest: use blake3: or sha256: and 64 hex digits")
    algorithm, _, digits = digest.partition(":")
    return algorithm, digits


@functools.cache
def fastest_algorithm() -> str:
    """The algorithm that is faster on this machine, measured once per process."""
    data = bytes(_PROBE_BYTES)
    return min(_HEX, key=lambda name: min(_seconds(_HEX[name], data) for _ in range(2)))


def _seconds(digest: Callable[[Buffer, int], str], data: bytes) -> float:
    begun = time.perf_counter()
    digest(data, 1)
    return time.perf_counter() - begun
