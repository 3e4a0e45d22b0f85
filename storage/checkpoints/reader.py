"""Reading from a store: catalogs, manifests, and snapshots directly into memory.

Everything that can be checked is checked: a manifest must belong to its key, and the digests of a
snapshot must be those of the sealed image. A `StoreError` of the store is passed on unchanged.

``map_fn`` is ``map``, or the ``map`` of a thread pool. All of its tasks have ended when a call returns or
raises, so no thread writes to a buffer that its owner reuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

import xxhash

from ckptd.storage.checkpoints.catalog import Catalog, StoredCheckpoint, build_catalog
from ckptd.storage.checkpoints.manifest import (
    MAX_MANIFEST_BYTES,
    ManifestError,
    RankManifest,
    StoredSnapshot,
)
from ckptd.storage.checkpoints.names import RunName, run_prefix
from ckptd.storage.checkpoints.run_identity import MAX_RUN_BYTES, RunIdentity
from ckptd.storage.images.image import ImageView, verify
from ckptd.storage.images.image_format import LENGTH_BYTES, ImageError
from ckptd.storage.images.read_plan import ObjectReads, plan_reads
from ckptd.storage.images.safetensors_header import HeaderError
from ckptd.storage.images.stored_headers import data_offset_of, parse_header
from ckptd.storage.images.strong_digest import matches
from ckptd.storage.images.upload_plan import StoredIndex
from ckptd.storage.stores.objects import ObjectMissing, ObjectStore, Range

__all__ = [
    "MapFunction",
    "SnapshotDamaged",
    "index_of",
    "read_catalog",
    "read_identity",
    "read_image_bytes",
    "read_image_header",
    "read_manifest",
    "read_manifests",
    "restore_snapshot",
]

_A = TypeVar("_A")
_B = TypeVar("_B")
_HEADER_GUESS = 256 << 10  # most headers are smaller; reading this much costs less than a second request
_MOST_LISTED = 8


class MapFunction(Protocol):
    """``map``, or the ``map`` of a thread pool: results in the order of the arguments."""

    def __call__(self, function: Callable[[_A], _B], arguments: Iterable[_A], /) -> Iterable[_B]:
        """Call ``function`` for each argument."""


class SnapshotDamaged(ValueError):
    """The stored bytes differ from the sealed image.

    ``tensors`` are the tensors that differ ("header" for the image's header), ``objects`` the keys that
    contain their bytes.
    """

    def __init__(self, iteration: int, tensors: tuple[str, ...], objects: tuple[str, ...]) -> None:
        super().__init__(iteration, tensors, objects)
        self.iteration = iteration
        self.tensors = tensors
        self.objects = objects

    def __str__(self) -> str:
        """The damaged tensors and their objects."""
        return (
            f"the stored snapshot of iteration {self.iteration} is damaged: {_listed(self.tensors)} "
            f"in {_listed(self.objects)}"
        )


def read_catalog(
    store: ObjectStore, job: str, run: str, *, known_epochs: Mapping[int, int] | None = None
) -> Catalog:
    """List the store and build the catalog of a run."""
    listing = store.list(run_prefix(job, run))
    return build_catalog(listing, job, run, known_epochs=known_epochs)


def read_identity(store: ObjectStore, job: str, run: str) -> RunIdentity | None:
    """The identity of the run in the store; None if the store contains none.

    Raises:
        ManifestError: ``run.json`` is damaged, or belongs to another run.
    """
    try:
        data = store.read(RunName(job, run).key, limit=MAX_RUN_BYTES)
    except ObjectMissing:
        return None
    identity = RunIdentity.from_bytes(data)
    if (identity.job, identity.run) != (job, run):
        raise ManifestError(f"run.json of {job}/{run} is that of {identity.job}/{identity.run}")
    return identity


def read_manifest(store: ObjectStore, key: str) -> RankManifest:
    """Read the manifest at ``key``.

    Raises:
        ManifestError: it is damaged, or does not belong to ``key`` (its agreement is computed again).
    """
    try:
        manifest = RankManifest.from_bytes(store.read(key, limit=MAX_MANIFEST_BYTES))
    except ManifestError as error:
        raise ManifestError(f"{key}: {error}") from error
    if manifest.key != key:
        raise ManifestError(f"{key}: its contents belong to {manifest.key}")
    return manifest


def read_manifests(
    store: ObjectStore, checkpoint: StoredCheckpoint, *, map_fn: MapFunction = map
) -> dict[int, RankManifest]:
    """Read the manifests of a checkpoint, by rank; they agree because each belongs to its key.

    Raises:
        ManifestError: one of them is damaged.
    """
    keys = [checkpoint.manifests[rank].key for rank in sorted(checkpoint.manifests)]
    found = map_fn(lambda key: read_manifest(store, key), keys)
    return {manifest.rank: manifest for manifest in found}


def read_image_bytes(
    store: ObjectStore,
    snapshot: StoredSnapshot,
    begin: int,
    into: memoryview,
    *,
    map_fn: MapFunction = map,
) -> None:
    """Fill ``into`` with the image's bytes from ``begin`` on, without verifying them.

    Raises:
        ValueError: the image has fewer bytes.
    """
    end = begin + len(into)
    if not 0 <= begin <= end <= snapshot.image_len:
        raise ValueError(f"bytes {begin} to {end} of an image of {snapshot.image_len}")
    failures: list[BaseException] = []

    def fill(reads: ObjectReads) -> None:
        if failures:
            return  # the result is lost already
        try:
            _fill(store, reads, begin, into)
        except BaseException as failure:  # noqa: BLE001 - raised below, when no thread writes any more
            failures.append(failure)

    for _ in map_fn(fill, plan_reads(snapshot, begin, end)):
        pass
    if failures:
        raise failures[0]


def read_image_header(store: ObjectStore, snapshot: StoredSnapshot) -> bytes:
    """Read and verify the stored image's header.

    Raises:
        SnapshotDamaged: the header differs from the sealed one.
    """
    head = bytearray(min(_HEADER_GUESS, snapshot.image_len))
    read_image_bytes(store, snapshot, 0, memoryview(head))
    try:
        data_offset = data_offset_of(bytes(head[:LENGTH_BYTES]))
    except HeaderError as error:
        raise _damaged_header(snapshot, 1) from error
    if data_offset > snapshot.image_len:
        raise _damaged_header(snapshot, 1)
    known = len(head)
    if data_offset > known:
        head.extend(bytes(data_offset - known))
        read_image_bytes(store, snapshot, known, memoryview(head)[known:])
    header = bytes(head[:data_offset])
    if xxhash.xxh3_128_digest(header) != snapshot.header_digest:
        raise _damaged_header(snapshot, data_offset)
    return header


def index_of(
    store: ObjectStore, snapshots: Iterable[StoredSnapshot], *, map_fn: MapFunction = map
) -> StoredIndex:
    """An index of the tensors of these snapshots, which need not be uploaded again.

    Raises:
        SnapshotDamaged: the header of a snapshot differs from the sealed one.
    """
    index = StoredIndex()
    wanted = list(snapshots)
    headers = map_fn(lambda snapshot: read_image_header(store, snapshot), wanted)
    for snapshot, header in zip(wanted, headers, strict=True):
        index.add(header, snapshot)
    return index


def restore_snapshot(
    store: ObjectStore, snapshot: StoredSnapshot, into: memoryview, *, map_fn: MapFunction = map
) -> None:
    """Read a snapshot's image to the beginning of ``into``, and verify it.

    Args:
        into: at least as long as the image (a slot is longer). Bytes after the image stay unchanged.
    Raises:
        ValueError: ``into`` is too short.
        SnapshotDamaged: the stored bytes differ from the sealed image.
    """
    if len(into) < snapshot.image_len:
        raise ValueError(f"the image has {snapshot.image_len} bytes, the buffer {len(into)}")
    image = into[: snapshot.image_len]
    read_image_bytes(store, snapshot, 0, image, map_fn=map_fn)
    try:
        verify(image, snapshot.header_digest, map_fn=map_fn)
        view = ImageView(image)
    except ImageError as error:
        raise _damage(snapshot, image) from error
    if not _is_of(view, snapshot):
        raise _damaged_header(snapshot, view.data_offset)
    if snapshot.image_digest and not matches(image, snapshot.image_digest):
        everything = _objects_of(snapshot, [(0, snapshot.image_len)])
        raise SnapshotDamaged(snapshot.iteration, ("the image",), everything)


def _fill(store: ObjectStore, reads: ObjectReads, begin: int, into: memoryview) -> None:
    staged: list[memoryview] = []
    ranges: list[Range] = []
    for read in reads.reads:
        if read.staged:
            buffer = memoryview(bytearray(read.length))
        else:
            at = read.targets[0].image_offset - begin
            buffer = into[at : at + read.length]
        staged.append(buffer)
        ranges.append(Range(read.offset, buffer))
    store.read_ranges(reads.key, ranges)
    for read, buffer in zip(reads.reads, staged, strict=True):
        if read.staged:
            for at, image_offset, length in read.targets:
                place = image_offset - begin
                into[place : place + length] = buffer[at : at + length]


def _is_of(view: ImageView, snapshot: StoredSnapshot) -> bool:
    """Whether the image matches its description in the manifest."""
    return (view.iteration, view.image_len, view.layout_id, view.num_operators, view.anchors) == (
        snapshot.iteration,
        snapshot.image_len,
        snapshot.layout_id,
        snapshot.num_operators,
        snapshot.anchors,
    )


def _damaged_header(snapshot: StoredSnapshot, length: int) -> SnapshotDamaged:
    return SnapshotDamaged(snapshot.iteration, ("header",), _objects_of(snapshot, [(0, length)]))


def _damage(snapshot: StoredSnapshot, image: memoryview) -> SnapshotDamaged:
    """An error with all tensors that differ, not only the first."""
    try:
        head = bytes(image[: data_offset_of(bytes(image[:LENGTH_BYTES]))])
    except HeaderError:
        return _damaged_header(snapshot, 1)
    if xxhash.xxh3_128_digest(head) != snapshot.header_digest:
        return _damaged_header(snapshot, len(head))
    try:
        parsed = parse_header(head)
    except HeaderError:
        return _damaged_header(snapshot, len(head))
    bad = [
        tensor
        for tensor, digest in zip(parsed.tensors, parsed.digests, strict=True)
        if xxhash.xxh3_128_digest(image[tensor.offset : tensor.offset + tensor.nbytes]) != digest
    ]
    if not bad:
        return _damaged_header(snapshot, len(head))
    where = _objects_of(snapshot, [(tensor.offset, tensor.nbytes) for tensor in bad])
    return SnapshotDamaged(snapshot.iteration, tuple([tensor.name for tensor in bad]), where)


def _objects_of(snapshot: StoredSnapshot, ranges: Iterable[tuple[int, int]]) -> tuple[str, ...]:
    """The objects that contain these ranges of the image."""
    found: dict[str, None] = {}
    for begin, length in ranges:
        for extent in snapshot.extents:
            if extent.image_offset < begin + length and begin < extent.image_offset + extent.length:
                found[snapshot.objects[extent.object].key] = None
    return tuple(found)


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(map(repr, names[:_MOST_LISTED])) + more
