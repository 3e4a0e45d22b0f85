"""Plans the range requests that read an image. Pure.

Large extents are read directly into place, split over several requests. Small extents that are close
to each other in an object are read by one request and copied into place: a request costs as much as
about a megabyte of data.
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
_STAGED_BYTES = 64 << 20  # limit of the staging buffers of one job


class ReadTarget(NamedTuple):
    """A part of a read: from offset ``at`` in the read to ``image_offset`` in the image."""

    at: int
    image_offset: int
    length: int


class RangeRead(NamedTuple):
    """One range of an object, and the targets of its bytes."""

    offset: int
    length: int
    targets: tuple[ReadTarget, ...]

    @property
    def staged(self) -> bool:
        """Whether the read needs a staging buffer: its bytes have several targets."""
        return len(self.targets) != 1


class ObjectReads(NamedTuple):
    """Reads of one object that one request group performs."""

    key: str
    reads: tuple[RangeRead, ...]


class _ExtentRange(NamedTuple):
    offset: int
    length: int
    image_offset: int


def plan_reads(snapshot: StoredSnapshot, begin: int, end: int) -> list[ObjectReads]:
    """Plan the reads of bytes [begin, end) of the image; no byte is read twice."""
    ranges: dict[str, list[_ExtentRange]] = {}
    for extent in snapshot.extents:
        first = max(extent.image_offset, begin)
        last = min(extent.image_offset + extent.length, end)
        if first < last:
            offset = extent.object_offset + first - extent.image_offset
            key = snapshot.objects[extent.object].key
            ranges.setdefault(key, []).append(_ExtentRange(offset, last - first, first))
    return [
        ObjectReads(key, reads)
        for key, found in ranges.items()
        for reads in _batches(_joined(_split(_merged(sorted(found)))))
    ]


def _merged(ranges: Iterable[_ExtentRange]) -> Iterator[_ExtentRange]:
    """Merge ranges that are adjacent in the object and in the image."""
    last: _ExtentRange | None = None
    for part in ranges:
        follows = last is not None and (part.offset, part.image_offset) == (
            last.offset + last.length,
            last.image_offset + last.length,
        )
        if last is not None and follows:
            last = last._replace(length=last.length + part.length)
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last


def _split(ranges: Iterable[_ExtentRange]) -> Iterator[_ExtentRange]:
    for part in ranges:
        for at in range(0, part.length, SPLIT_BYTES):
            length = min(SPLIT_BYTES, part.length - at)
            yield _ExtentRange(part.offset + at, length, part.image_offset + at)


def _joined(ranges: Iterable[_ExtentRange]) -> Iterator[RangeRead]:
    """Join small ranges that are close to each other into one read."""
    group: list[_ExtentRange] = []
    for part in ranges:
        if group and not _fits(group, part):
            yield _read(group)
            group = []
        group.append(part)
    if group:
        yield _read(group)


def _fits(group: list[_ExtentRange], part: _ExtentRange) -> bool:
    last = group[-1]
    gap = part.offset - last.offset - last.length
    return (
        max(last.length, part.length) < _SMALL_BYTES
        and 0 <= gap <= _GAP_BYTES
        and part.offset + part.length - group[0].offset <= _JOINED_BYTES
    )


def _read(group: list[_ExtentRange]) -> RangeRead:
    begin = group[0].offset
    targets = tuple([ReadTarget(p.offset - begin, p.image_offset, p.length) for p in group])
    return RangeRead(begin, group[-1].offset + group[-1].length - begin, targets)


def _batches(reads: Iterable[RangeRead]) -> Iterator[tuple[RangeRead, ...]]:
    """Group the reads within the limit of the staging buffers."""
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
