"""Snapshots in storage: which one is meant, read ahead in the order of its bytes, and verified as it passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import xxhash

from ckptd.errors import SegmentError
from ckptd.exporting.errors import DamagedSnapshot, ExportError
from ckptd.exporting.plan import SnapshotFacts
from ckptd.exporting.source import CHUNK_BYTES, Origin, facts_of
from ckptd.memory.segment_format import decode_descriptor
from ckptd.storage.catalog import Catalog, StoredCheckpoint
from ckptd.storage.headers import HeaderError, ObjectHeader, parse_header
from ckptd.storage.image import ImageTensor
from ckptd.storage.manifest import ManifestError, RankManifest, StoredSnapshot
from ckptd.storage.objects import ObjectStore
from ckptd.storage.reader import (
    SnapshotDamaged,
    read_catalog,
    read_image_bytes,
    read_image_header,
    read_manifest,
)

__all__ = ["StoredSource", "open_stored", "plan_spans"]

_GAP_BYTES = 256 << 10  # reading on is quicker than a further request
_TOLD = 12


class StoredSource:
    """A snapshot of a committed checkpoint (a `TensorSource`)."""

    def __init__(
        self,
        store: ObjectStore,
        snapshot: StoredSnapshot,
        header: ObjectHeader,
        origin: Origin,
        facts: SnapshotFacts,
    ) -> None:
        self.origin, self.facts = origin, facts
        self.tensors: Sequence[ImageTensor] = header.tensors
        self.scalars_len = int(header.metadata.get("scalars_len", "0"))
        self._store, self._snapshot = store, snapshot
        self._digests = {t.name: d for t, d in zip(header.tensors, header.digests, strict=True)}
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._spans: list[tuple[int, int]] = []
        self._coming: dict[int, Future[memoryview]] = {}
        self._current: tuple[int, memoryview] = (-1, memoryview(b""))
        self._next = 0

    def close(self) -> None:
        """End the reading ahead."""
        self._ahead.shutdown(cancel_futures=True)

    def prepare(self, order: Sequence[ImageTensor]) -> None:
        """See `TensorSource.prepare`."""
        self._spans = plan_spans(order, CHUNK_BYTES)
        self._coming.clear()
        self._current = (-1, memoryview(b""))
        self._next = 0

    def chunks(self, tensor: ImageTensor) -> Iterator[memoryview]:
        """See `TensorSource.chunks`."""
        digest = xxhash.xxh3_128()
        at, end = tensor.offset, tensor.offset + tensor.nbytes
        while at < end:
            begin, data = self._around(at)
            part = data[at - begin : end - begin]
            digest.update(part)
            yield part
            at += len(part)
        if digest.digest() != self._digests[tensor.name]:
            raise DamagedSnapshot(
                f"the stored snapshot of iteration {self.origin.iteration} of rank {self.origin.rank} is "
                f"damaged: {tensor.name!r}; `ckptctl checkpoints verify` tells which object, and what is whole"
            )

    def _around(self, at: int) -> tuple[int, memoryview]:
        """The span that holds this byte, and where it begins; the next one is asked for meanwhile."""
        begin, data = self._current
        if begin <= at < begin + len(data):
            return self._current
        index = self._span_of(at)
        coming = self._coming.pop(index, None)
        self._current = self._spans[index][0], coming.result() if coming else self._read(index)
        self._next = index + 1
        if self._next < len(self._spans):
            self._coming = {self._next: self._ahead.submit(self._read, self._next)}
        return self._current

    def _span_of(self, at: int) -> int:
        """Usually the next one."""
        likely = self._next
        if likely < len(self._spans) and self._spans[likely][0] <= at < self._spans[likely][1]:
            return likely
        return next(i for i, (first, last) in enumerate(self._spans) if first <= at < last)

    def _read(self, index: int) -> memoryview:
        begin, end = self._spans[index]
        into = memoryview(bytearray(end - begin))
        read_image_bytes(self._store, self._snapshot, begin, into)
        return into


@contextmanager
def open_stored(
    store: ObjectStore,
    shown_url: str,
    job: str,
    run: str,
    iteration: int | None,
    *,
    rank: int | None = None,
) -> Iterator[StoredSource]:
    """A snapshot of a committed checkpoint: of its end (the newest if None), or of an iteration on the way to one.

    Args:
        shown_url: of the store, without secrets.
        rank: needed where there are several.
    Raises:
        ExportError: there is no such snapshot.
        DamagedSnapshot: a manifest or header is not as it was written.
    """
    catalog = read_catalog(store, job, run)
    manifest, snapshot = _find(store, catalog, iteration, rank, f"{shown_url}/{job}/{run}")
    try:
        headers = {s.iteration: _header(store, s) for s in manifest.snapshots}
    except (SnapshotDamaged, HeaderError) as error:
        raise DamagedSnapshot(str(error)) from error
    dense = snapshot.anchors == (1 << snapshot.num_operators) - 1
    facts = facts_of(
        _client_part(manifest.descriptor), dense=dense, alike=[h.tensors for h in headers.values()]
    )
    origin = Origin(job, run, manifest.rank, manifest.world_size, snapshot.iteration, shown_url)
    source = StoredSource(store, snapshot, headers[snapshot.iteration], origin, facts)
    try:
        yield source
    finally:
        source.close()


def plan_spans(order: Iterable[ImageTensor], max_bytes: int) -> list[tuple[int, int]]:
    """Which ranges of the image to read, one after the other: neighbours together, large tensors in parts.

    Every byte of the tensors is in one of them, and each part of a large tensor has whole items: it
    begins at a multiple of ``max_bytes`` within it.
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


def _find(
    store: ObjectStore, catalog: Catalog, iteration: int | None, rank: int | None, where: str
) -> tuple[RankManifest, StoredSnapshot]:
    committed = [c for c in catalog.committed if iteration is None or c.id.end >= iteration]
    if iteration is None:
        committed = committed[:1]
    # The checkpoint that ends there; or the first that passes by: they overlap, if at all, with later ones.
    for checkpoint in sorted(committed, key=lambda c: c.id.end):
        manifest = _manifest(store, checkpoint, rank)
        for snapshot in reversed(manifest.snapshots):
            if iteration is None or snapshot.iteration == iteration:
                return manifest, snapshot
        if iteration is not None and manifest.start > iteration:
            break
    ends = [str(c.id.end) for c in catalog.committed]
    more = f" and {len(ends) - _TOLD} older ones" if len(ends) > _TOLD else ""
    known = f"committed are {', '.join(ends[:_TOLD])}{more}" if ends else "nothing is committed"
    which = "checkpoint" if iteration is None else f"snapshot of iteration {iteration}"
    raise ExportError(f"no {which} in {where}; {known}")


def _manifest(store: ObjectStore, checkpoint: StoredCheckpoint, rank: int | None) -> RankManifest:
    if rank is None and checkpoint.world_size > 1:
        raise ExportError(
            f"{checkpoint.id} has {checkpoint.world_size} ranks: choose --rank (under data parallelism any of them)"
        )
    if rank is not None and rank not in checkpoint.manifests:
        raise ExportError(f"{checkpoint.id} has ranks 0 to {checkpoint.world_size - 1}, not {rank}")
    try:
        return read_manifest(store, checkpoint.manifests[rank or 0].key)
    except ManifestError as error:
        raise DamagedSnapshot(f"a manifest is damaged: {error}") from error


def _header(store: ObjectStore, snapshot: StoredSnapshot) -> ObjectHeader:
    return parse_header(read_image_header(store, snapshot))


def _client_part(descriptor: bytes) -> bytes:
    try:
        return decode_descriptor(descriptor).client
    except SegmentError:
        return b""  # of another version: it only would have told more
