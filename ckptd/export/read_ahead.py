"""Reads stored images in the order in which their tensors are needed, one span ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from typing import NamedTuple

from ckptd.export.source import CHUNK_BYTES
from ckptd.storage.image_format import ImageTensor

__all__ = ["ReadAhead", "plan_spans"]

_GAP_BYTES = 256 << 10  # reading on is quicker than a further request


class _Span(NamedTuple):
    """A range of one rank's image that is read at once."""

    rank: int
    begin: int
    end: int


class ReadAhead:
    """Keeps at most two spans of all images in memory: the present one and the next one.

    Args:
        read: returns bytes ``begin`` to ``end`` of a rank's image; also called in a background thread.
    """

    def __init__(self, read: Callable[[int, int, int], memoryview]) -> None:
        self._read = read
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._spans: list[_Span] = []
        self._coming: dict[int, Future[memoryview]] = {}
        self._current = (_Span(-1, 0, 0), memoryview(b""))
        self._next = 0

    def close(self) -> None:
        """End the reading ahead."""
        self._thread.shutdown(cancel_futures=True)

    def prepare(self, order: Iterable[tuple[int, ImageTensor]]) -> None:
        """Announce the tensors that will be read, each with the rank whose image contains it."""
        self._spans = [
            _Span(rank, begin, end)
            for rank, run in groupby(order, key=lambda item: item[0])
            for begin, end in plan_spans([tensor for _, tensor in run], CHUNK_BYTES)
        ]
        self._coming.clear()
        self._current = (_Span(-1, 0, 0), memoryview(b""))
        self._next = 0

    def around(self, rank: int, at: int) -> tuple[int, memoryview]:
        """The span of the rank's image that contains this byte, and its offset; requests the next one in the
        background.
        """
        span, data = self._current
        if not _holds(span, rank, at):
            index = self._index_of(rank, at)
            coming = self._coming.pop(index, None)
            span = self._spans[index]
            data = coming.result() if coming else self._read(*span)
            self._current = span, data
            self._next = index + 1
            if self._next < len(self._spans):
                following = self._thread.submit(self._read, *self._spans[self._next])
                self._coming = {self._next: following}
        return span.begin, data

    def _index_of(self, rank: int, at: int) -> int:
        """Usually the next one."""
        if self._next < len(self._spans) and _holds(self._spans[self._next], rank, at):
            return self._next
        return next(i for i, span in enumerate(self._spans) if _holds(span, rank, at))


def plan_spans(order: Iterable[ImageTensor], max_bytes: int) -> list[tuple[int, int]]:
    """Plan the spans to read, in order: adjacent tensors at once, large tensors in parts.

    Every byte of the tensors is in one span, and each part of a large tensor has whole items: it begins
    at a multiple of ``max_bytes`` within the tensor.
    """
    spans: list[tuple[int, int]] = []
    for tensor in order:
        begin, end = tensor.offset, tensor.offset + tensor.nbytes
        if begin == end:
            continue
        first, last = spans[-1] if spans else (-1, -1)
        if last >= 0 and last <= begin <= last + _GAP_BYTES and end - first <= max_bytes:
            spans[-1] = (first, end)
            continue
        spans += [(at, min(at + max_bytes, end)) for at in range(begin, end, max_bytes)]
    return spans


def _holds(span: _Span, rank: int, at: int) -> bool:
    return span.rank == rank and span.begin <= at < span.end
