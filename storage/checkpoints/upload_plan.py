"""Plans the upload of a snapshot, given the tensors that are already stored. ``docs/format.md`` section 5.

An object has one of two shapes: *verbatim*, the object is the image; or a *part*, which contains the new
tensors and the image's header, while older objects contain the other bytes. This module performs no I/O;
it reads only the header of the image.

Invariants: the extents of a plan cover the image without gap or overlap; a tensor that a part leaves out
has, by digest and length, the same bytes where its extent points; an object's key identifies its contents.

The objects that a plan refers to must exist as long as the manifest that will name them. Therefore the
index of a rank consists of its last manifest (if that is not stale) and of the objects stored since then
for the same checkpoint, by itself or, according to their manifests, by other ranks: see
``docs/format.md`` section 7.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from ckptd.storage.checkpoints.manifest import Extent, StoredObject, StoredSnapshot
from ckptd.storage.checkpoints.names import ObjectName
from ckptd.storage.image_format import (
    FORMAT,
    LENGTH_BYTES,
    HeaderError,
    ImageTensor,
    ObjectHeader,
    data_offset_of,
    parse_header,
    render_header,
    tag_of,
)
from ckptd.storage.reduced_image import cut

_PART_FORMAT = "ckptd.part/1"
IMAGE_HEADER = "ckptd.image_header"
_MAX_REUSED = 32  # limit of older objects per image, so that few requests read it
_OWN_METADATA = ("scalars_len", "num_operators", "anchors")  # in the image's header, which the part contains


@dataclass(frozen=True, slots=True)
class PartLimits:
    """When a part is worth more than a whole image."""

    min_tensor_bytes: int = 64 << 10
    """Smaller tensors are stored again: a request costs more than the bytes."""

    min_saving: float = 0.05
    """Fraction of the image. Below it, a verbatim file, which any tool can read, is worth more."""


class _Place(NamedTuple):
    stored: StoredObject
    offset: int


class StoredIndex:
    """The places of the tensors that are already stored, by digest and length."""

    def __init__(self) -> None:
        self._places: dict[tuple[bytes, int], _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def add(self, header: bytes, snapshot: StoredSnapshot) -> None:
        """Add the tensors of a stored snapshot; HeaderError if ``header`` is not that of its image."""
        if xxhash.xxh3_128_digest(header) != snapshot.header_digest:
            raise HeaderError(f"it is not the header of the image of {snapshot.iteration}")
        parsed = parse_header(header)
        starts = [extent.image_offset for extent in snapshot.extents]
        for tensor, digest in zip(parsed.tensors, parsed.digests, strict=True):
            extent = snapshot.extents[bisect_right(starts, tensor.offset) - 1]
            inside = tensor.offset - extent.image_offset
            if tensor.nbytes and inside + tensor.nbytes <= extent.length:
                place = _Place(snapshot.objects[extent.object], extent.object_offset + inside)
                self._places.setdefault((digest, tensor.nbytes), place)

    def find(self, digest: bytes, nbytes: int) -> _Place | None:
        """The object with such a tensor, and the offset in it; None if there is none."""
        return self._places.get((digest, nbytes))


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """The new object, and the extents of the image.

    Attributes:
        key, size: of the new object.
        header: the first bytes of the new object; empty if the object is the image itself.
        ranges: (offset, length) of the image's ranges that follow, in order.
        reused: the older objects of the extents, with the numbers 1, 2, and so on.
        extents: the places of the image's bytes; object 0 is the new one.
        saved_bytes: number of bytes that need no upload.
    """

    key: str
    size: int
    header: bytes
    ranges: tuple[tuple[int, int], ...]
    reused: tuple[StoredObject, ...]
    extents: tuple[Extent, ...]
    saved_bytes: int
    reason: str

    def parts(self, image: Sequence[memoryview]) -> list[memoryview]:
        """The parts of the new object, without a copy; ``image`` is the planned one, in pieces."""
        head = [memoryview(self.header)] if self.header else []
        return head + [piece for at, length in self.ranges for piece in cut(image, at, length)]

    def objects(self, etag: str) -> tuple[StoredObject, ...]:
        """The snapshot's objects, once the new one is stored under ``etag``."""
        return (StoredObject(self.key, self.size, etag), *self.reused)


def plan_upload(
    image: Sequence[memoryview],
    index: StoredIndex,
    *,
    job: str,
    run: str,
    rank: int,
    epoch: int,
    sequence: int,
    limits: PartLimits = PartLimits(),
) -> UploadPlan:
    """Plan the upload of a sealed image; HeaderError if it is not whole.

    Args:
        image: its bytes in pieces, the first of which has the header. More may follow (a slot is longer).
    """
    first, size = image[0], sum(len(piece) for piece in image)
    head = bytes(first[: data_offset_of(bytes(first[:LENGTH_BYTES]))])
    parsed = parse_header(head)
    if parsed.metadata.get("format") != FORMAT or parsed.size > size:
        raise HeaderError(f"the buffer of {size} bytes does not hold a whole image")
    name = ObjectName(job, run, _iteration(parsed), rank, epoch, sequence, tag_of(head))
    found = _found(parsed, index, limits.min_tensor_bytes)
    if not found:
        return _verbatim(name.key, parsed.size, "none of its tensors is stored already")
    part = _part(name, head, parsed, found)
    if part.saved_bytes < limits.min_saving * parsed.size:
        return _verbatim(name.key, parsed.size, f"a part would save only {part.saved_bytes} bytes")
    return part


def _iteration(parsed: ObjectHeader) -> int:
    text = parsed.metadata.get("iteration", "").strip()
    if not (text.isascii() and text.isdigit()):
        raise HeaderError(f"the iteration of the image is {text[:20]!r}, which is not a number")
    return int(text)


def _found(parsed: ObjectHeader, index: StoredIndex, min_tensor_bytes: int) -> dict[int, _Place]:
    """The places of stored tensors by tensor number, in at most the allowed number of objects."""
    if any(tensor.name == IMAGE_HEADER for tensor in parsed.tensors):
        return {}  # a tensor of the image has the name that a part needs
    found: dict[int, _Place] = {}
    per_object: Counter[str] = Counter()
    for number, (tensor, digest) in enumerate(zip(parsed.tensors, parsed.digests, strict=True)):
        place = index.find(digest, tensor.nbytes)
        if place is not None and tensor.nbytes >= max(min_tensor_bytes, 1):
            found[number] = place
            per_object[place.stored.key] += tensor.nbytes
    worth = {key for key, _ in per_object.most_common(_MAX_REUSED)}
    return {number: place for number, place in found.items() if place.stored.key in worth}


def _verbatim(key: str, size: int, reason: str) -> UploadPlan:
    return UploadPlan(key, size, b"", ((0, size),), (), (Extent(0, size, 0, 0),), 0, reason)


def _part(name: ObjectName, head: bytes, parsed: ObjectHeader, found: dict[int, _Place]) -> UploadPlan:
    """A safetensors file with the image's header and its new tensors."""
    new = [tensor for number, tensor in enumerate(parsed.tensors) if number not in found]
    digests = [digest for number, digest in enumerate(parsed.digests) if number not in found]
    metadata = {key: value for key, value in parsed.metadata.items() if key not in _OWN_METADATA}
    metadata |= {
        "format": _PART_FORMAT,
        "iteration": str(name.iteration),
        "previous": parsed.metadata.get("previous", "").strip(),
        "image_len": str(parsed.size),
        "image_digest": xxhash.xxh3_128_hexdigest(head),
        "digests": b"".join([xxhash.xxh3_128_digest(head), *digests]).hex(),
    }
    whole = ImageTensor(IMAGE_HEADER, "U8", (len(head),), 0, len(head))
    header = render_header(metadata, [whole, *new])
    numbers: dict[StoredObject, int] = {}
    spread = _Spread(len(header))
    spread.add_new(len(head))
    for number, tensor in enumerate(parsed.tensors):
        if number in found:
            stored, offset = found[number]
            spread.add_old(tensor.nbytes, numbers.setdefault(stored, len(numbers) + 1), offset)
        else:
            spread.add_new(tensor.nbytes)
    saved = parsed.size - spread.size
    reason = f"{len(found)} of {len(parsed.tensors)} tensors are stored already"
    key = name._replace(tag=tag_of(header)).key
    reused, extents = tuple(numbers), tuple(spread.extents)
    return UploadPlan(key, spread.size, header, _ranges(extents), reused, extents, saved, reason)


class _Spread:
    """Builds the extents of an image from its first byte to its last; merges adjacent ones."""

    def __init__(self, size: int) -> None:
        self.size = size  # size of the new object so far
        self.extents: list[Extent] = []
        self._at = 0

    def add_new(self, length: int) -> None:
        """Append the image's next bytes to the new object."""
        self._add(length, 0, self.size)
        self.size += length

    def add_old(self, length: int, number: int, offset: int) -> None:
        """The image's next bytes are in an older object."""
        self._add(length, number, offset)

    def _add(self, length: int, number: int, offset: int) -> None:
        if length == 0:
            return
        last = self.extents[-1] if self.extents else None
        if last and last.object == number and last.object_offset + last.length == offset:
            self.extents[-1] = last._replace(length=last.length + length)
        else:
            self.extents.append(Extent(self._at, length, number, offset))
        self._at += length


def _ranges(extents: Sequence[Extent]) -> tuple[tuple[int, int], ...]:
    """The ranges of the image in the new object, in the order of that object."""
    return tuple([(e.image_offset, e.length) for e in extents if e.object == 0])
