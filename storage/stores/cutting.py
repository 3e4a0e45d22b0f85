"""Cutting: what is put into parts, what is read into requests. Pure, and nothing is copied."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckptd.storage.stores.objects import Range

__all__ = ["Filler", "RangeRequest", "cut", "flat", "part_size", "plan_reads", "total"]

MAX_PARTS = 10_000  # S3's limit
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """One request: neighbouring bytes of an object, and the buffers they go to, in order."""

    offset: int
    size: int
    into: tuple[memoryview, ...]


class Filler:
    """Fills the buffers of a piece from a stream of chunks."""

    __slots__ = ("_left", "_views")

    def __init__(self, piece: RangeRequest) -> None:
        self._views = list(reversed(piece.into))
        self._left = piece.size

    @property
    def left(self) -> int:
        """How many bytes are still missing."""
        return self._left

    def take(self, chunk: memoryview) -> None:
        """The next bytes.

        Raises:
            ValueError: more than are missing.
        """
        if len(chunk) > self._left:
            raise ValueError(f"{len(chunk)} bytes came where {self._left} are missing")
        self._left -= len(chunk)
        while chunk:
            view = self._views.pop()
            size = min(len(view), len(chunk))
            view[:size] = chunk[:size]
            chunk = chunk[size:]
            if size < len(view):
                self._views.append(view[size:])


def flat(parts: Sequence[memoryview]) -> list[memoryview]:
    """The parts as plain bytes, without empty ones.

    Raises:
        ValueError: one is not contiguous.
    """
    if not all(part.c_contiguous for part in parts):
        raise ValueError("what is stored must lie in one piece of memory")
    return [part.cast("B") for part in parts if part.nbytes]


def total(views: Iterable[memoryview]) -> int:
    """Bytes in all."""
    return sum(view.nbytes for view in views)


def part_size(size: int, wanted: int) -> int:
    """Bytes per part: those wanted, or more where an object would have too many parts."""
    return max(wanted, math.ceil(size / MAX_PARTS / _MIB) * _MIB)


def cut(views: Iterable[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Groups of exactly ``size`` bytes (the last one may have fewer), in order."""
    group: list[memoryview] = []
    room = size
    for each in views:
        view = each
        while view:
            head, view = view[:room], view[room:]
            group.append(head)
            room -= len(head)
            if room == 0:
                yield group
                group, room = [], size
    if group:
        yield group


def plan_reads(ranges: Sequence[Range], size: int) -> list[RangeRequest]:
    """The fewest requests of at most ``size`` bytes; ranges that adjoin share one.

    Raises:
        ValueError: a range that begins before the object, or a buffer that cannot be written.
    """
    pieces: list[RangeRequest] = []
    for offset, run in _runs(ranges):
        at = offset
        for group in cut(run, size):
            pieces.append(RangeRequest(at, total(group), tuple(group)))
            at += pieces[-1].size
    return pieces


def _runs(ranges: Sequence[Range]) -> Iterator[tuple[int, list[memoryview]]]:
    """Buffers whose ranges adjoin, with the offset of the first."""
    begin = end = 0
    run: list[memoryview] = []
    for each in sorted(ranges, key=lambda each: each.offset):
        if each.offset < 0 or each.into.readonly or not each.into.c_contiguous:
            raise ValueError(f"range at {each.offset} is not one that can be read into")
        if not each.into.nbytes:
            continue
        if run and each.offset != end:
            yield begin, run
            run = []
        if not run:
            begin = each.offset
        run.append(each.into.cast("B"))
        end = each.offset + each.into.nbytes
    if run:
        yield begin, run
