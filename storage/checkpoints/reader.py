"""Reading from a store: catalogs, manifests, and snapshots directly into memory.

Everything that can be checked is checked: a manifest must belong to its key, and the digests of a snapshot
must be those of the sealed image. A `StoreError` of the store is passed on unchanged.

``map_fn`` is ``map``, or the ``map`` of a thread pool. All of its tasks have ended when a call returns or
raises, so no thread writes to a buffer that its owner reuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

import xxhash
from blake3 import blake3

from ckptd.storage.checkpoints.catalog import Catalog, build_catalog
from ckptd.storage.checkpoints.manifest import MAX_MANIFEST_BYTES, RankManifest, StoredSnapshot
from ckptd.storage.checkpoints.names import ManifestName, RunName, parse, run_prefix
from ckptd.storage.checkpoints.sealed_json import MAX_RUN_BYTES, ManifestError, RunIdentity
from ckptd.storage.checkpoints.signing import Signers
from ckptd.storage.image import ImageView, mismatches, verify
from ckptd.storage.image_format import (
    LENGTH_BYTES,
    HeaderError,
    ImageError,
    ObjectHeader,
    data_offset_of,
)
from ckptd.storage.stores.objects import ObjectInfo, ObjectMissing, ObjectStore, Range, StoreFacts
from ckptd.storage.strong_digest import Digesting, matches

_A = TypeVar("_A")
_B = TypeVar("_B")
_HEADER_GUESS = 256 << 10  # most headers are smaller; reading this much costs less than a second request
_MOST_LISTED = 8
_CHUNK_BYTES = 16 << 20
SPLIT_BYTES = 16 << 20
_SMALL_BYTES = 1 << 20
_GAP_BYTES = 64 << 10
_JOINED_BYTES = 8 << 20
_STAGED_BYTES = 64 << 20  # limit of the staging buffers of one job


class MapFunction(Protocol):
    """``map``, or the ``map`` of a thread pool: results in the order of the arguments."""

    def __call__(self, function: Callable[[_A], _B], arguments: Iterable[_A], /) -> Iterable[_B]: ...


class SnapshotDamaged(ValueError):
    """The stored bytes of ``tensors`` ("header": the image's header), which are in ``objects``, are
    damaged.
    """

    def __init__(self, iteration: int, tensors: tuple[str, ...], objects: tuple[str, ...]) -> None:
        super().__init__(iteration, tensors, objects)
        self.iteration = iteration
        self.tensors = tensors
        self.objects = objects

    def __str__(self) -> str:
        return (
            f"the stored snapshot of iteration {self.iteration} is damaged: {_listed(self.tensors)} "
            f"in {_listed(self.objects)}"
        )


def read_catalog(
    store: ObjectStore, job: str, run: str, *, known_epochs: Mapping[int, int] | None = None
) -> Catalog:
    listing = store.list(run_prefix(job, run))
    return build_catalog(listing, job, run, known_epochs=known_epochs)


def read_identity(store: ObjectStore, job: str, run: str) -> RunIdentity | None:
    """The contents of ``run.json``, None if missing; ManifestError if it is damaged or of another run."""
    try:
        data = store.read(RunName(job, run).key, limit=MAX_RUN_BYTES)
    except ObjectMissing:
        return None
    identity = RunIdentity.from_bytes(data)
    if (identity.job, identity.run) != (job, run):
        raise ManifestError(f"run.json of {job}/{run} is that of {identity.job}/{identity.run}")
    return identity


def read_manifest(store: ObjectStore, key: str) -> RankManifest:
    """Read a manifest; ManifestError if it is damaged or does not belong to ``key`` (agreement included)."""
    try:
        manifest = RankManifest.from_bytes(store.read(key, limit=MAX_MANIFEST_BYTES))
    except ManifestError as error:
        raise ManifestError(f"{key}: {error}") from error
    if manifest.key != key:
        raise ManifestError(f"{key}: its contents belong to {manifest.key}")
    return manifest


def read_image_bytes(
    store: ObjectStore,
    snapshot: StoredSnapshot,
    begin: int,
    into: memoryview,
    *,
    map_fn: MapFunction = map,
) -> None:
    """Fill ``into`` with the image's bytes from ``begin`` on, without verifying them."""
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


def read_head(read: Callable[[int, memoryview], None], size: int) -> bytes:
    """The bytes before the data of an image or object of ``size`` bytes; HeaderError if that is impossible.

    ``read`` fills a buffer from an offset.
    """
    guess = bytearray(min(_HEADER_GUESS, size))
    read(0, memoryview(guess))
    data_offset = data_offset_of(bytes(guess[:LENGTH_BYTES]))
    if data_offset > size:
        raise HeaderError(f"the header would end at {data_offset}, the object ends at {size}")
    rest = bytearray(max(0, data_offset - len(guess)))
    if rest:
        read(len(guess), memoryview(rest))
    return bytes(guess[:data_offset]) + bytes(rest)


def read_image_header(store: ObjectStore, snapshot: StoredSnapshot) -> bytes:
    """Read and verify the stored image's header; may raise SnapshotDamaged."""
    try:
        header = read_head(lambda at, into: read_image_bytes(store, snapshot, at, into), snapshot.image_len)
    except HeaderError as error:
        raise _damaged_header(snapshot, 1) from error
    if xxhash.xxh3_128_digest(header) != snapshot.header_digest:
        raise _damaged_header(snapshot, len(header))
    return header


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
        raise _damage(snapshot, image, map_fn) from error
    if not _is_of(view, snapshot):
        raise _damaged_header(snapshot, view.data_offset)
    if snapshot.image_digest and not matches(image, snapshot.image_digest):
        everything = _objects_of(snapshot, [(0, snapshot.image_len)])
        raise SnapshotDamaged(snapshot.iteration, ("the image",), everything)


def _fill(store: ObjectStore, reads: ObjectReads, begin: int, into: memoryview) -> None:
    buffers: list[memoryview] = []
    for read in reads.reads:
        if read.staged:
            buffers.append(memoryview(bytearray(read.length)))
        else:
            at = read.parts[0].image_offset - begin
            buffers.append(into[at : at + read.length])
    pairs = list(zip(reads.reads, buffers, strict=True))
    store.read_ranges(reads.key, [Range(read.offset, buffer) for read, buffer in pairs])
    for read, buffer in pairs:
        if read.staged:
            for offset, length, image_offset in read.parts:
                at, place = offset - read.offset, image_offset - begin
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


def _damage(snapshot: StoredSnapshot, image: memoryview, map_fn: MapFunction) -> SnapshotDamaged:
    """An error with all tensors that differ, not only the first."""
    try:
        changed = mismatches(image, snapshot.header_digest, map_fn=map_fn)
    except ImageError:  # of the sealed image itself
        changed = []
    if not changed:
        return _damaged_header(snapshot, 1)
    where = _objects_of(snapshot, [(each.start, each.stop - each.start) for each in changed])
    return SnapshotDamaged(snapshot.iteration, tuple([each.name for each in changed]), where)


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


# -- planning the range requests of an image -------------------------------------------------------
#
# Large extents are read directly into place, split over several requests. Small extents that are close to
# each other in an object are read by one request and copied into place: a request costs as much as about a
# megabyte of data.


class _Part(NamedTuple):
    """A range of an object, and its place in the image."""

    offset: int
    length: int
    image_offset: int


class RangeRead(NamedTuple):
    """One range of an object, and the parts of the image in it."""

    offset: int
    length: int
    parts: tuple[_Part, ...]

    @property
    def staged(self) -> bool:
        """Whether the read needs a staging buffer: its bytes have several targets."""
        return len(self.parts) != 1


class ObjectReads(NamedTuple):
    """Reads of one object that one request group performs."""

    key: str
    reads: tuple[RangeRead, ...]


def plan_reads(snapshot: StoredSnapshot, begin: int, end: int) -> list[ObjectReads]:
    """Plan the reads of bytes [begin, end) of the image; no byte is read twice."""
    parts: dict[str, list[_Part]] = {}
    for extent in snapshot.extents:
        first = max(extent.image_offset, begin)
        last = min(extent.image_offset + extent.length, end)
        if first < last:
            offset = extent.object_offset + first - extent.image_offset
            key = snapshot.objects[extent.object].key
            parts.setdefault(key, []).append(_Part(offset, last - first, first))
    return [
        ObjectReads(key, reads)
        for key, found in parts.items()
        for reads in _batches(_joined(_split(_merged(sorted(found)))))
    ]


def _merged(parts: Iterable[_Part]) -> list[_Part]:
    """Merge parts that are adjacent in the object and in the image."""
    merged: list[_Part] = []
    for part in parts:
        if merged:
            last = merged[-1]
            follows = (last.offset + last.length, last.image_offset + last.length)
            if follows == (part.offset, part.image_offset):
                merged[-1] = last._replace(length=last.length + part.length)
                continue
        merged.append(part)
    return merged


def _split(parts: Iterable[_Part]) -> Iterator[_Part]:
    for part in parts:
        for at in range(0, part.length, SPLIT_BYTES):
            length = min(SPLIT_BYTES, part.length - at)
            yield _Part(part.offset + at, length, part.image_offset + at)


def _joined(parts: Iterable[_Part]) -> Iterator[RangeRead]:
    """Join small parts that are close to each other into one read."""
    group: list[_Part] = []
    for part in parts:
        if group and not _fits(group, part):
            yield _range_read(group)
            group = []
        group.append(part)
    if group:
        yield _range_read(group)


def _fits(group: list[_Part], part: _Part) -> bool:
    last = group[-1]
    gap = part.offset - last.offset - last.length
    return (
        max(last.length, part.length) < _SMALL_BYTES
        and 0 <= gap <= _GAP_BYTES
        and part.offset + part.length - group[0].offset <= _JOINED_BYTES
    )


def _range_read(group: list[_Part]) -> RangeRead:
    begin, last = group[0].offset, group[-1]
    return RangeRead(begin, last.offset + last.length - begin, tuple(group))


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


# -- images in one pass, in bounded memory ---------------------------------------------------------


def has_its_digest(store: ObjectStore, snapshot: StoredSnapshot) -> bool:
    """Whether the image has the digest in its manifest; true if the manifest has none (version 1)."""
    if not snapshot.image_digest:
        return True
    made = Digesting(snapshot.image_digest)
    for chunk in _chunks(store, snapshot):
        made.update(chunk)
    return made.agrees


def vouched_tensors(
    store: ObjectStore, snapshot: StoredSnapshot, head: bytes, header: ObjectHeader
) -> dict[str, bytes]:
    """Verify an image against the digest in its manifest; returns BLAKE3 digests of its tensors, for later
    reads of single tensors. Empty if the manifest has no digest (version 1).

    Args:
        head: the bytes of the image's header, which may be forged; ``header`` is its contents.
    Raises:
        SnapshotDamaged: it is not the image of the manifest; names the tensors whose xxh3 digests differ.
        ObjectMissing, Damaged: an object is missing, or too short.
    """
    if not snapshot.image_digest:
        return {}
    made = Digesting(snapshot.image_digest)
    start = blake3()
    wanted = [(t.name, t.offset, t.offset + t.nbytes) for t in header.tensors]
    hashes = {name: (blake3(), xxhash.xxh3_128()) for name, _, _ in wanted}
    first, at = 0, 0
    for chunk in _chunks(store, snapshot):
        made.update(chunk)
        start.update(chunk[: max(0, len(head) - at)])
        while first < len(wanted) and wanted[first][2] <= at:
            first += 1
        for name, begin, end in wanted[first:]:
            if begin >= at + len(chunk):
                break
            for one in hashes[name]:
                one.update(chunk[max(0, begin - at) : end - at])
        at += len(chunk)
    if not made.agrees or start.digest() != blake3(head).digest():
        pairs = zip(header.tensors, header.digests, strict=True)
        bad = [t.name for t, digest in pairs if hashes[t.name][1].digest() != digest]
        keys = tuple(stored.key for stored in snapshot.objects)
        raise SnapshotDamaged(snapshot.iteration, tuple(bad) or ("the image",), keys)
    return {name: strong.digest() for name, (strong, _) in hashes.items()}


def _chunks(store: ObjectStore, snapshot: StoredSnapshot) -> Iterator[memoryview]:
    """All bytes of the image in chunks; reads the next chunk in the background."""

    def read(begin: int) -> memoryview:
        into = memoryview(bytearray(min(_CHUNK_BYTES, snapshot.image_len - begin)))
        read_image_bytes(store, snapshot, begin, into)
        return into

    with ThreadPoolExecutor(1, thread_name_prefix="image") as thread:
        coming = thread.submit(read, 0)
        for begin in range(_CHUNK_BYTES, snapshot.image_len, _CHUNK_BYTES):
            chunk, coming = coming.result(), thread.submit(read, begin)
            yield chunk
        yield coming.result()


class SignedStore:
    """Implements `ObjectStore`; refuses manifests without a valid signature. The digests in a manifest, which
    readers compare, cover the objects.

    Args:
        signers: the trusted signers.
        required: every manifest must be signed, and have a digest of every image. Otherwise only a manifest
            that names a trusted signer is checked.
    """

    def __init__(self, store: ObjectStore, signers: Signers, *, required: bool = True) -> None:
        self._store, self._signers, self._required = store, signers, required

    @property
    def facts(self) -> StoreFacts:
        return self._store.facts

    def put(self, key: str, parts: Sequence[memoryview], *, if_absent: bool = False) -> ObjectInfo:
        return self._store.put(key, parts, if_absent=if_absent)

    def read(self, key: str, *, limit: int) -> bytes:
        """As `ObjectStore.read`; raises ManifestError for a manifest that is not believed."""
        data = self._store.read(key, limit=limit)
        if isinstance(parse(key), ManifestName) and len(data) <= MAX_MANIFEST_BYTES:
            self._check(RankManifest.from_bytes(data))
        return data

    def _check(self, manifest: RankManifest) -> None:
        if not self._required and manifest.signer not in self._signers.names:
            return
        why = self._signers.objection(manifest.signer, manifest.signature, manifest.signed_bytes)
        bare = [s.iteration for s in manifest.snapshots if not s.image_digest]
        if not why and bare and self._required:
            why = f"it has no digest of the image of iteration {bare[0]}"
        if why:
            raise ManifestError(f"it is not believed: {why}")

    def read_ranges(self, key: str, ranges: Sequence[Range]) -> None:
        self._store.read_ranges(key, ranges)

    def info(self, key: str) -> ObjectInfo | None:
        return self._store.info(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._store.list(prefix)

    def delete(self, keys: Sequence[str]) -> None:
        self._store.delete(keys)

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        return self._store.abort_uploads(prefix, older_than_s)

    def close(self) -> None:
        self._store.close()
