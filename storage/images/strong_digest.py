"""Cryptographic digests of images: what a forger cannot make, beside xxh3, which finds damage three
to ten times as fast.

A digest is spelled ``blake3:<64 hex digits>`` or ``sha256:<64 hex digits>``. Whoever makes one
takes what this machine computes faster (BLAKE3 with AVX2 or AVX-512, SHA-256 where only that has
instructions of its own); whoever checks one takes what it names.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import re
import time
from collections.abc import Callable

from blake3 import blake3

__all__ = [
    "STRONG_DIGEST",
    "Digesting",
    "fastest_algorithm",
    "is_strong_digest",
    "matches",
    "strong_digest",
]

STRONG_DIGEST = r"(blake3|sha256):[0-9a-f]{64}"
_PATTERN = re.compile(STRONG_DIGEST)
_PROBE_BYTES = 4 << 20  # some milliseconds

Buffer = bytes | bytearray | memoryview

_WORTH_THREADS = 16 << 20  # threads for less than this take longer to begin than to help

_HEX: dict[str, Callable[[Buffer, int], str]] = {
    "blake3": lambda data, threads: blake3(data, max_threads=threads).hexdigest(),
    "sha256": lambda data, threads: hashlib.sha256(data).hexdigest(),
}


def strong_digest(data: Buffer, algorithm: str = "", *, threads: int = 1) -> str:
    """The digest of ``data``; other threads run meanwhile.

    Args:
        algorithm: "blake3", "sha256", or "" for the faster one here.
        threads: for BLAKE3, which can be spread; SHA-256 uses one.
    """
    name = algorithm or fastest_algorithm()
    return f"{name}:{_HEX[name](data, threads if len(data) >= _WORTH_THREADS else 1)}"


def matches(data: Buffer, digest: str, *, threads: int = 1) -> bool:
    """Whether ``data`` has this digest; ``threads`` as in `strong_digest`.

    Raises:
        ValueError: it is none.
    """
    if not is_strong_digest(digest):
        raise ValueError(f"{digest[:80]!r} is no digest: blake3: or sha256: and 64 hex digits")
    return hmac.compare_digest(
        strong_digest(data, digest.partition(":")[0], threads=threads), digest
    )


class Digesting:
    """Compares bytes that come piece by piece with a digest.

    Raises:
        ValueError: it is none.
    """

    def __init__(self, digest: str) -> None:
        if not is_strong_digest(digest):
            raise ValueError(f"{digest[:80]!r} is no digest: blake3: or sha256: and 64 hex digits")
        name, _, self._wanted = digest.partition(":")
        self._made = blake3() if name == "blake3" else hashlib.sha256()

    def update(self, data: Buffer) -> None:
        """The bytes that come next."""
        self._made.update(data)

    @property
    def agrees(self) -> bool:
        """Whether what came has the digest."""
        return hmac.compare_digest(self._made.hexdigest(), self._wanted)


def is_strong_digest(text: str) -> bool:
    """Whether it is spelled like one."""
    return _PATTERN.fullmatch(text) is not None


@functools.cache
def fastest_algorithm() -> str:
    """What this machine computes faster, measured once per process."""
    data = bytes(_PROBE_BYTES)
    return min(_HEX, key=lambda name: min(_seconds(_HEX[name], data) for _ in range(2)))


def _seconds(digest: Callable[[Buffer, int], str], data: bytes) -> float:
    begun = time.perf_counter()
    digest(data, 1)
    return time.perf_counter() - begun
