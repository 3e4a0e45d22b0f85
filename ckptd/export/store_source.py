"""Snapshots in storage as the source of an export: selected, completed with the parameters that other ranks
captured, and verified while they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

import xxhash
from blake3 import blake3

from ckptd.core.export_plan import (
    DamagedSnapshot,
    ExportError,
    JoinedSnapshot,
    RankImage,
    join,
    lacking,
    named_ranks,
    with_older,
)
from ckptd.core.slots.segment_format import decode_descriptor
from ckptd.errors import SegmentError
from ckptd.export.source import CHUNK_BYTES, Origin, check_older, facts_of
from ckptd.storage.checkpoints.catalog import Catalog, StoredCheckpoint
from ckptd.storage.checkpoints.manifest import RankManifest, StoredSnapshot
from ckptd.storage.checkpoints.reader import (
    SnapshotDamaged,
    read_catalog,
    read_image_bytes,
    read_image_header,
    read_manifest,
    vouched_tensors,
)
from ckptd.storage.checkpoints.sealed_json import ManifestError
from ckptd.storage.image_format import HeaderError, ImageTensor, ObjectHeader, parse_header
from ckptd.storage.stores.objects import Damaged, ObjectMissing, ObjectStore

_MOST_LISTED = 12
_GAP_BYTES = 256 << 10  # one larger request is faster than two
_THREADS = 8  # manifests and headers are small: their requests take the time
_ADVICE = "`ckptctl checkpoints verify` names the damaged objects and the whole checkpoints"


class StoredSource:
    """A snapshot of a committed checkpoint (a `TensorSource`).

    Args:
        layers: the images that contain its tensors, by rank.
    """

    def __init__(
        self,
        store: ObjectStore,
        origin: Origin,
        joined: JoinedSnapshot,
        layers: Mapping[int, _StoredLayers],
    ) -> None:
        older = {name: layers[rank].older(name) for name, rank in joined.ranks.items()}
        self.origin = replace(origin, older={n: i for n, i in older.items() if i is not None})
        self.facts = joined.facts
        self.tensors: Sequence[ImageTensor] = joined.tensors
        self.scalars_len = int(layers[origin.rank].images[0].header.metadata.get("scalars_len", "0"))
        images = [image for each in layers.values() for image in each.images]
        at = {id(image): number for number, image in enumerate(images)}
        self._images = images
        self._of = {name: at[id(layers[rank].of(name))] for name, rank in joined.ranks.items()}
        self._digests = {
            tensor.name: digest
            for number, image in enumerate(images)
            for tensor, digest in zip(image.header.tensors, image.header.digests, strict=True)
            if self._of.get(tensor.name) == number
        }
        self._ahead = _ReadAhead(lambda image, begin, end: images[image].read(store, begin, end))

    def close(self) -> None:
        """End the reading ahead."""
        self._ahead.close()

    def prepare(self, order: Sequence[ImageTensor]) -> None:
        """See `TensorSource.prepare`."""
        self._ahead.prepare((self._of[tensor.name], tensor) for tensor in order)

    def chunks(self, tensor: ImageTensor) -> Iterator[memoryview]:
        """See `TensorSource.chunks`."""
        image, digest, strong = self._of[tensor.name], xxhash.xxh3_128(), blake3()
        vouched = self._images[image].vouched.get(tensor.name)
        at, end = tensor.offset, tensor.offset + tensor.nbytes
        while at < end:
            begin, data = self._ahead.around(image, at)
            part = data[at - begin : end - begin]
            digest.update(part)
            if vouched is not None:
                strong.update(part)
            yield part
            at += len(part)
        good = digest.digest() == self._digests[tensor.name]
        if not good or vouched not in (None, strong.digest()):
            raise self._images[image].damaged(tensor)


@contextmanager
def open_stored(
    store: ObjectStore,
    shown_url: str,
    job: str,
    run: str,
    iteration: int | None,
    *,
    rank: int | None = None,
    older_experts: bool = False,
) -> Iterator[StoredSource]:
    """Open a snapshot of a committed checkpoint: the last one (of the newest checkpoint if ``iteration``
    is None), or an earlier one of its chain.

    Args:
        shown_url: the URL of the store, without secrets.
        rank: needed if the checkpoint has several ranks.
        older_experts: parameters that a partial snapshot lacks are taken from older ones of the checkpoint.
    Raises:
        ExportError: no snapshot matches, or ``older_experts`` of one that is not partial.
        DamagedSnapshot: a manifest or header is damaged.
    """
    catalog = read_catalog(store, job, run)
    where = f"{shown_url}/{job}/{run}"
    checkpoint, manifest, snapshot = _find(store, catalog, iteration, rank, where)
    facts = facts_of(_client_part(manifest.descriptor), manifest.rank)
    if older_experts:
        check_older(facts)
    own = _open_image(store, manifest, snapshot, older=older_experts)
    if facts.partial and snapshot.iteration < manifest.end:
        facts = replace(facts, newest=manifest.end)
    lacks = lacking(own.image.tensors, facts.shares)
    others = _open_images(store, checkpoint, snapshot, lacks, older=older_experts) if lacks else {}
    joined = join(manifest.rank, own.image, facts, lacks, {r: i.image for r, i in others.items()})
    origin = Origin(
        job, run, manifest.rank, manifest.world_size, snapshot.iteration, shown_url, tuple(others)
    )
    source = StoredSource(store, origin, joined, {manifest.rank: own, **others})
    try:
        yield source
    finally:
        source.close()


def _find(
    store: ObjectStore, catalog: Catalog, iteration: int | None, rank: int | None, where: str
) -> tuple[StoredCheckpoint, RankManifest, StoredSnapshot]:
    committed = [c for c in catalog.committed if iteration is None or c.id.end >= iteration]
    if iteration is None:
        committed = committed[:1]
    # The checkpoint that ends at the iteration, else the first one whose chain contains it: a
    # checkpoint can overlap only with later ones.
    for checkpoint in sorted(committed, key=lambda c: c.id.end):
        manifest = _manifest(store, checkpoint, rank)
        for snapshot in reversed(manifest.snapshots):
            if iteration is None or snapshot.iteration == iteration:
                return checkpoint, manifest, snapshot
        if iteration is not None and manifest.start > iteration:
            break
    ends = [str(c.id.end) for c in catalog.committed]
    more = f" and {len(ends) - _MOST_LISTED} older ones" if len(ends) > _MOST_LISTED else ""
    known = (
        f"committed checkpoints: {', '.join(ends[:_MOST_LISTED])}{more}"
        if ends
        else "no checkpoint is committed"
    )
    which = "checkpoint" if iteration is None else f"snapshot of iteration {iteration}"
    raise ExportError(f"no {which} in {where}; {known}")


def _manifest(store: ObjectStore, checkpoint: StoredCheckpoint, rank: int | None) -> RankManifest:
    if rank is None and checkpoint.world_size > 1:
        raise ExportError(
            f"{checkpoint.id} has {checkpoint.world_size} ranks: pass --rank (with pure data "
            "parallelism, any of them)"
        )
    if rank is not None and rank not in checkpoint.manifests:
        raise ExportError(f"{checkpoint.id} has ranks 0 to {checkpoint.world_size - 1}, not {rank}")
    return _read_rank_manifest(store, checkpoint, rank or 0)


def _client_part(descriptor: bytes) -> bytes:
    try:
        return decode_descriptor(descriptor).client
    except SegmentError:
        return b""  # of another version; its facts are optional


# -- images ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _StoredImage:
    """One rank's image with a verified header.

    ``vouched``: BLAKE3 digests of its tensors, computed while the whole image was verified against the
    cryptographic digest in the manifest; empty if it was not.
    """

    rank: int
    snapshot: StoredSnapshot
    header: ObjectHeader
    vouched: Mapping[str, bytes] = field(default_factory=dict)

    def read(self, store: ObjectStore, begin: int, end: int) -> memoryview:
        """These bytes; they are not verified."""
        into = memoryview(bytearray(end - begin))
        with _damage_of(self.rank, self.snapshot.iteration):
            read_image_bytes(store, self.snapshot, begin, into)
        return into

    def damaged(self, tensor: ImageTensor) -> DamagedSnapshot:
        """An error: this tensor differs from the sealed one."""
        return DamagedSnapshot(_text(self.rank, self.snapshot.iteration, repr(tensor.name)))


@dataclass(frozen=True)
class _StoredLayers:
    """A rank's image, and older ones for the experts that it lacks, the newest first.

    ``image``: the facts of the rank's chain, with the tensors of all of them; ``numbers``: which of the
    images, by the name of a tensor of an older one.
    """

    images: Sequence[_StoredImage]
    image: RankImage
    numbers: Mapping[str, int]

    def of(self, name: str) -> _StoredImage:
        """The image with this tensor."""
        return self.images[self.numbers.get(name, 0)]

    def older(self, name: str) -> int | None:
        """The iteration of a tensor of an older image; None: it is of the snapshot itself."""
        return self.of(name).snapshot.iteration if name in self.numbers else None


def _read_rank_manifest(store: ObjectStore, checkpoint: StoredCheckpoint, rank: int) -> RankManifest:
    """Read the manifest of a rank."""
    try:
        return read_manifest(store, checkpoint.manifests[rank].key)
    except (ManifestError, ObjectMissing, Damaged) as error:
        raise DamagedSnapshot(f"a manifest is damaged: {error}") from error


def _open_image(
    store: ObjectStore,
    manifest: RankManifest,
    snapshot: StoredSnapshot,
    *,
    whole: bool = True,
    older: bool = False,
) -> _StoredLayers:
    """An image of the manifest's chain; reads the headers of the chain.

    Args:
        whole: read all of it, and compare it with the cryptographic digest in the manifest.
        older: with the older ones of the chain.
    """
    wanted = [
        each
        for each in reversed(manifest.snapshots)
        if each is snapshot or (older and each.iteration < snapshot.iteration)
    ]
    headers: dict[int, ObjectHeader] = {}
    vouched: dict[int, Mapping[str, bytes]] = {}
    for each in manifest.snapshots:
        with _damage_of(manifest.rank, each.iteration):
            head = read_image_header(store, each)
            headers[each.iteration] = parse_header(head)
            if whole and each in wanted:
                vouched[each.iteration] = vouched_tensors(store, each, head, headers[each.iteration])
    images = [
        _StoredImage(manifest.rank, each, headers[each.iteration], vouched.get(each.iteration, {}))
        for each in wanted
    ]
    dense = snapshot.anchors == (1 << snapshot.num_operators) - 1
    tensors, numbers = with_older([image.header.tensors for image in images])
    image = RankImage(tensors, dense, [found.tensors for found in headers.values()])
    return _StoredLayers(images, image, numbers)


def _open_images(
    store: ObjectStore,
    checkpoint: StoredCheckpoint,
    snapshot: StoredSnapshot,
    ranks: Collection[int],
    *,
    older: bool,
) -> dict[int, _StoredLayers]:
    """The images of the same iteration as ``snapshot``, by rank.

    The export needs only their shares, which may be a hundredth of the images. A whole image is
    compared with its digest only if the manifest is signed: without a signature, whoever can change an
    object can change the digest, too.
    """
    unknown = [rank for rank in ranks if rank not in checkpoint.manifests]
    if unknown:
        raise ExportError(
            f"{named_ranks(unknown)} captured a part of the model, but {checkpoint.id} has ranks "
            f"0 to {checkpoint.world_size - 1}; choose another checkpoint"
        )

    def opened(rank: int) -> _StoredLayers:
        manifest = _read_rank_manifest(store, checkpoint, rank)
        same = _same(manifest, snapshot)
        return _open_image(store, manifest, same, whole=bool(manifest.signer), older=older)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ranks") as pool:
        return dict(zip(ranks, pool.map(opened, ranks), strict=True))


def _same(manifest: RankManifest, snapshot: StoredSnapshot) -> StoredSnapshot:
    # The manifests of one checkpoint have the same iterations, because their agreement covers these.
    # It covers only the last epoch.
    found = next(s for s in manifest.snapshots if s.iteration == snapshot.iteration)
    if (found.epoch, found.epoch_start) != (snapshot.epoch, snapshot.epoch_start):
        raise ExportError(
            f"iteration {snapshot.iteration} of rank {manifest.rank} belongs to another history "
            f"(epoch {found.epoch}, "
            f"not {snapshot.epoch}); choose another iteration"
        )
    return found


@contextmanager
def _damage_of(rank: int, iteration: int) -> Iterator[None]:
    """Convert read errors in the block to `DamagedSnapshot` of this snapshot."""
    try:
        yield
    except (SnapshotDamaged, HeaderError, ObjectMissing, Damaged) as error:
        raise DamagedSnapshot(_text(rank, iteration, str(error))) from error


def _text(rank: int, iteration: int, what: str) -> str:
    return f"the stored snapshot of iteration {iteration} of rank {rank} is damaged: {what}; {_ADVICE}"


# -- reading ahead --------------------------------------------------------------------------------


class _Span(NamedTuple):
    """A range of one image that is read at once; images have numbers."""

    image: int
    begin: int
    end: int


class _ReadAhead:
    """Keeps at most two spans of all images in memory: the present one and the next one.

    Args:
        read: returns bytes ``begin`` to ``end`` of an image; also called in a background thread.
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
        """Announce the tensors that will be read, each with the image that contains it."""
        self._spans = [
            _Span(image, begin, end)
            for image, run in groupby(order, key=lambda item: item[0])
            for begin, end in plan_spans([tensor for _, tensor in run], CHUNK_BYTES)
        ]
        self._coming.clear()
        self._current = (_Span(-1, 0, 0), memoryview(b""))
        self._next = 0

    def around(self, image: int, at: int) -> tuple[int, memoryview]:
        """The span of the image that contains this byte, and its offset; the next one is read ahead."""
        span, data = self._current
        if not _holds(span, image, at):
            index = self._index_of(image, at)
            coming = self._coming.pop(index, None)
            span = self._spans[index]
            data = coming.result() if coming else self._read(*span)
            self._current = span, data
            self._next = index + 1
            if self._next < len(self._spans):
                following = self._thread.submit(self._read, *self._spans[self._next])
                self._coming = {self._next: following}
        return span.begin, data

    def _index_of(self, image: int, at: int) -> int:
        """Usually the next one."""
        if self._next < len(self._spans) and _holds(self._spans[self._next], image, at):
            return self._next
        return next(i for i, span in enumerate(self._spans) if _holds(span, image, at))


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


def _holds(span: _Span, image: int, at: int) -> bool:
    return span.image == image and span.begin <= at < span.end
