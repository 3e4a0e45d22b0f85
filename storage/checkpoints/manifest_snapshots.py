"""A snapshot in a manifest: the facts of its slot, and the objects that contain its image.

Constructors check their arguments: the extents cover the image without gap or overlap, every extent
lies within its object, and every object is used and has a valid key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptd.storage.checkpoints.names import (
    MAX_EPOCH,
    MAX_ITERATION,
    MAX_SEQUENCE,
    ObjectName,
    parse,
)
from ckptd.storage.checkpoints.sealed_json import MAX_TEXT, ManifestError, in_range
from ckptd.storage.images.strong_digest import is_strong_digest

__all__ = [
    "MAX_BYTES",
    "MAX_LAYOUT_ID",
    "MAX_OPERATORS",
    "Extent",
    "StoredObject",
    "StoredSnapshot",
]

MAX_BYTES = 1 << 50  # of an image or an object; a store's own limits are lower
MAX_OPERATORS = 10**9 - 1  # what an image accepts
MAX_LAYOUT_ID = 2**64 - 1
_MAX_PHASE = 2**32 - 1
_MAX_TIME_NS = 2**63 - 1
_DIGEST_BYTES = 16


class StoredObject(NamedTuple):
    """An object as the store reported it after the upload; ``etag`` is "" if the store has none."""

    key: str
    size: int
    etag: str


class Extent(NamedTuple):
    """A range of an image and its place; ``object`` is an index into the snapshot's objects."""

    image_offset: int
    length: int
    object: int
    object_offset: int


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """One snapshot of a rank: the facts of its slot, and the extents of its image."""

    iteration: int
    previous: int
    sequence: int
    phase: int
    epoch: int
    epoch_start: int
    filled_at_ns: int
    header_digest: bytes
    image_len: int
    layout_id: int
    num_operators: int
    anchors: int
    objects: tuple[StoredObject, ...]
    extents: tuple[Extent, ...]
    image_digest: str = ""  # see `ckptd.storage.images.strong_digest`; "" in manifests of version 1

    def __post_init__(self) -> None:
        in_range("iteration", self.iteration, 0, MAX_ITERATION)
        in_range("previous", self.previous, -1, self.iteration - 1)
        in_range("sequence", self.sequence, 0, MAX_SEQUENCE)
        in_range("phase", self.phase, 0, _MAX_PHASE)
        in_range("epoch", self.epoch, 0, MAX_EPOCH)
        in_range("epoch_start", self.epoch_start, -1, MAX_ITERATION)
        in_range("filled_at_ns", self.filled_at_ns, 0, _MAX_TIME_NS)
        in_range("image_len", self.image_len, 1, MAX_BYTES)
        in_range("layout_id", self.layout_id, 0, MAX_LAYOUT_ID)
        in_range("num_operators", self.num_operators, 0, MAX_OPERATORS)
        if len(self.header_digest) != _DIGEST_BYTES:
            raise ManifestError(f"a header digest has {len(self.header_digest)} bytes")
        if self.image_digest and not is_strong_digest(self.image_digest):
            raise ManifestError(f"{self.image_digest[:80]!r} is not the digest of an image")
        if self.anchors < 0 or self.anchors >> self.num_operators:
            raise ManifestError(f"iteration {self.iteration} anchors operators that do not exist")
        _check_objects(self.objects)
        _check_extents(self)


def _check_objects(objects: Sequence[StoredObject]) -> None:
    for stored in objects:
        if not isinstance(parse(stored.key), ObjectName):
            raise ManifestError(f"{stored.key[:120]!r} is not the key of an object")
        in_range("the size of an object", stored.size, 1, MAX_BYTES)
        in_range("characters of an etag", len(stored.etag), 0, MAX_TEXT)
    if len({stored.key for stored in objects}) != len(objects):
        raise ManifestError("an object is listed twice")


def _check_extents(snapshot: StoredSnapshot) -> None:
    """The extents cover the image from the first byte to the last, and all objects are used."""
    objects, at = snapshot.objects, 0
    for extent in snapshot.extents:
        if extent.image_offset != at or extent.length < 1:
            raise ManifestError(f"an extent leaves a gap at byte {at} of the image, or overlaps")
        if not 0 <= extent.object < len(objects) or extent.object_offset < 0:
            raise ManifestError(f"the extent at byte {at} of the image is in no object")
        if extent.object_offset + extent.length > objects[extent.object].size:
            raise ManifestError(f"the extent at byte {at} of the image exceeds its object")
        at += extent.length
    if at != snapshot.image_len:
        raise ManifestError(f"extents cover {at} bytes of an image of {snapshot.image_len}")
    if {extent.object for extent in snapshot.extents} != set(range(len(objects))):
        raise ManifestError("an object is listed but not used")
