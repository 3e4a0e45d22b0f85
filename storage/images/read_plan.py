"""Which ranged reads bring bytes of an image to where they belong. Pure.

Large extents are read straight into place, split so that several requests share the work. Small ones that
lie close together in an object are read at once and copied into place: a request costs as much as about a
megabyte of bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckptd.storage.checkpoints.manifest import StoredSnapshot

__all__ = ["ObjectReads", "RangeRead", "ReadTarget", "plan_reads"]

SPLIT_BYTES = 16 << 20
_SMALL_BYTES = 1 << 20
_GAP_BYTES = 64 << 10
_JOINED_BYTES = 8 << 20
_STAGED_BYTES = 64 << 20  # what one job may hold in buffers of its own


class ReadTarget(NamedTuple):
    """Bytes of a read: from ``at`` in it to ``image_offset`` in the image."""

    at: int
    image_offset: int
    length: int


class RangeRead(NamedTuple):
    """One range of an object, and where its bytes belong."""

    offset: int
    length: int
    targets: tuple[ReadTarget, ...]

    @property
    def staged(self) -> bool:
        """Whether it needs a buffer of its own: it does not go to one place as a whole."""
        return len(self.targets) != 1


class ObjectReads(NamedTuple):
    """Reads of one object that are asked for at once."""

    key: str
    reads: tuple[RangeRead, ...]


class _Piece(NamedTuple):
    offset: int
    length: int
    image_offset: int


def plan_reads(snapshot: StoredSnapshot, begin: int, end: int) -> list[ObjectReads]:
    """The reads that bring bytes [begin, end) of the image, and none of them twice."""
    pieces: dict[str, list[_Piece]] = {}
    for extent in snapshot.extents:
        first = max(extent.image_offset, begin)
        last = min(extent.image_offset + extent.length, end)
        if first < last:
            offset = extent.object_offset + first - extent.image_offset
            key = snapshot.objects[extent.object].key
            pieces.setdefault(key, []).append(_Piece(offset, last - first, first))
    return [
        ObjectReads(key, reads)
        for key, found in pieces.items()
        for reads in _batches(_joined(_split(_merged(sorted(found)))))
    ]


def _merged(pieces: Iterable[_Piece]) -> Iterator[_Piece]:
    """Neighbours in the object that are neighbours in the image, too, become one."""
    last: _Piece | None = None
    for piece in pieces:
        follows = last is not None and (piece.offset, piece.image_offset) == (
            last.offset + last.length,
            last.image_offset + last.length,
        )
        if last is not None and follows:
            last = last._replace(length=last.length + piece.length)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _split(pieces: Iterable[_Piece]) -> Iterator[_Piece]:
    for piece in pieces:
        for at in range(0, piece.length, SPLIT_BYTES):
            length = min(SPLIT_BYTES, piece.length - at)
            yield _Piece(piece.offset + at, length, piece.image_offset + at)


def _joined(pieces: Iterable[_Piece]) -> Iterator[RangeRead]:
    """Small ones that lie close together become one read."""
    group: list[_Piece] = []
    for piece in pieces:
        if group and not _fits(group, piece):
            yield _read(group)
            group = []
        group.append(piece)
    if group:
        yield _read(group)


def _fits(group: list[_Piece], piece: _Piece) -> bool:
    last = group[-1]
    gap = piece.offset - last.offset - last.length
    return (
        max(last.length, piece.length) < _SMALL_BYTES
        and 0 <= gap <= _GAP_BYTES
        and piece.offset + piece.length - group[0].offset <= _JOINED_BYTES
    )


def _read(group: list[_Piece]) -> RangeRead:
    begin = group[0].offset
    targets = tuple([ReadTarget(p.offset - begin, p.image_offset, p.length) for p in group])
    return RangeRead(begin, group[-1].offset + group[-1].length - begin, targets)


def _batches(reads: Iterable[RangeRead]) -> Iterator[tuple[RangeRead, ...]]:
    """As many at once as their own buffers allow."""
    batch: list[RangeRead] = []
    staged = 0
    for read in reads:
        more = read.length if read.staged else 0
        if batch and staged + more > _STAGED_BYTES:
            yield tuple(batch)
            batch, staged = [], 0
        batch.append(read)
        staged += more
    if batch:
        yield tuple(batch)
