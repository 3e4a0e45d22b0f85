"""What is fuzzed, and what one input may cost."""

from __future__ import annotations

import atexit
import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

from tests.fuzz.mutations import Mutate, changed_bytes

__all__ = ["CPU_S_MAX", "GROWN_BYTES_MAX", "Finding", "Target", "in_scratch", "play", "scratch"]

GROWN_BYTES_MAX = 96 << 20  # by an input of at most 64 KiB; a few readers make room for 64 MiB first
CPU_S_MAX = 2.0


class Finding(AssertionError):
    """An input cost more than any input may."""


@dataclass(frozen=True)
class Target:
    """A parser of bytes that others have written, or that were damaged.

    Attributes:
        name: of the target, and of its corpus' folder.
        seeds: valid inputs, made by our own encoders.
        feed: parses an input, and does with the result what the product does before it trusts it.
        refusals: the exceptions that its contract names. Whatever else escapes is a finding.
        mutate: knows the format; it makes checksums anew.
    """

    name: str
    seeds: Callable[[], Sequence[bytes]]
    feed: Callable[[bytes], object]
    refusals: tuple[type[BaseException], ...]
    mutate: Mutate = changed_bytes


def play(target: Target, data: bytes, *, cpu_s_max: float = float("inf")) -> bool:
    """Feed an input to the target; whether it was accepted.

    Memory is what `tracemalloc` counts, if it runs, else the growth of the process' largest resident size.

    Raises:
        Finding: it took more memory or processor time than an input may.
    """
    traced = tracemalloc.is_tracing()
    if traced:
        tracemalloc.reset_peak()
    before, begun_s = _memory(traced)[0], time.process_time()
    accepted = True
    try:
        target.feed(data)
    except target.refusals:
        accepted = False
    spent_s, grown = time.process_time() - begun_s, _memory(traced)[1] - before
    if grown > GROWN_BYTES_MAX:
        raise Finding(f"{target.name}: {grown >> 20} MiB for an input of {len(data)} bytes")
    if spent_s > cpu_s_max:
        raise Finding(f"{target.name}: {spent_s:.1f} s of CPU time for an input of {len(data)} bytes")
    return accepted


def _memory(traced: bool) -> tuple[int, int]:
    """Bytes now, and at most since the last reset."""
    if traced:
        return tracemalloc.get_traced_memory()
    largest = getrusage(RUSAGE_SELF).ru_maxrss << 10
    return largest, largest


@cache
def scratch() -> Path:
    """A private folder of this process, in memory, for parsers that read files."""
    memory = Path("/dev/shm")
    folder = tempfile.TemporaryDirectory(prefix="ckptd-fuzz-", dir=memory if memory.is_dir() else None)
    atexit.register(folder.cleanup)
    return Path(folder.name)


def in_scratch(name: str, data: bytes) -> Path:
    """A file there with this content, as a parser wants it: nobody else reads it."""
    path = scratch() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
    return path
