"""Snapshots in storage as the source of an export: selected, completed with the parameters that other ranks
captured, and verified while they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import xxhash
from blake3 import blake3

from ckptd.core.export.export_errors import ExportError
from ckptd.core.export.joining import JoinedSnapshot, join, lacking
from ckptd.core.slots.segment_format import decode_descriptor
from ckptd.errors import SegmentError
from ckptd.export.read_ahead import ReadAhead
from ckptd.export.source import Origin, facts_of
from ckptd.export.stored_images import StoredImage, open_image, open_images, rank_manifest
from ckptd.storage.checkpoints.catalog import Catalog, StoredCheckpoint
from ckptd.storage.checkpoints.manifest import RankManifest, StoredSnapshot
from ckptd.storage.checkpoints.reader import read_catalog
from ckptd.storage.image_format import ImageTensor
from ckptd.storage.stores.objects import ObjectStore

__all__ = ["StoredSource", "open_stored"]

_MOST_LISTED = 12


class StoredSource:
    """A snapshot of a committed checkpoint (a `TensorSource`).

    Args:
        images: those in which its tensors lie, by rank.
    """

    def __init__(
        self,
        store: ObjectStore,
        origin: Origin,
        joined: JoinedSnapshot,
        images: Mapping[int, StoredImage],
    ) -> None:
        self.origin, self.facts = origin, joined.facts
        self.tensors: Sequence[ImageTensor] = joined.tensors
        self.scalars_len = int(images[origin.rank].header.metadata.get("scalars_len", "0"))
        self._ranks, self._images = joined.ranks, images
        self._digests = {
            tensor.name: digest
            for rank, image in images.items()
            for tensor, digest in zip(image.header.tensors, image.header.digests, strict=True)
            if joined.ranks.get(tensor.name) == rank
        }
        self._ahead = ReadAhead(lambda rank, begin, end: images[rank].read(store, begin, end))

    def close(self) -> None:
        """End the reading ahead."""
        self._ahead.close()

    def prepare(self, order: Sequence[ImageTensor]) -> None:
        """See `TensorSource.prepare`."""
        self._ahead.prepare((self._ranks[tensor.name], tensor) for tensor in order)

    def chunks(self, tensor: ImageTensor) -> Iterator[memoryview]:
        """See `TensorSource.chunks`."""
        rank, digest, strong = self._ranks[tensor.name], xxhash.xxh3_128(), blake3()
        vouched = self._images[rank].vouched.get(tensor.name)
        at, end = tensor.offset, tensor.offset + tensor.nbytes
        while at < end:
            begin, data = self._ahead.around(rank, at)
            part = data[at - begin : end - begin]
            digest.update(part)
            if vouched is not None:
                strong.update(part)
            yield part
            at += len(part)
        good = digest.digest() == self._digests[tensor.name]
        if not good or vouched not in (None, strong.digest()):
            raise self._images[rank].damaged(tensor)


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
    """Open a snapshot of a committed checkpoint: the last one (of the newest checkpoint if ``iteration``
    is None), or an earlier one of its chain.

    Args:
        shown_url: the URL of the store, without secrets.
        rank: needed if the checkpoint has several ranks.
    Raises:
        ExportError: no snapshot matches.
        DamagedSnapshot: a manifest or header is damaged.
    """
    catalog = read_catalog(store, job, run)
    where = f"{shown_url}/{job}/{run}"
    checkpoint, manifest, snapshot = _find(store, catalog, iteration, rank, where)
    own = open_image(store, manifest, snapshot)
    facts = facts_of(_client_part(manifest.descriptor), manifest.rank)
    lacks = lacking(own.image.tensors, facts.shares)
    others = open_images(store, checkpoint, snapshot, lacks) if lacks else {}
    joined = join(own.rank, own.image, facts, lacks, {r: i.image for r, i in others.items()})
    origin = Origin(job, run, own.rank, manifest.world_size, snapshot.iteration, shown_url, tuple(others))
    source = StoredSource(store, origin, joined, {own.rank: own, **others})
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
    # The checkpoint that ends there; or the first that passes by: they overlap, if at all, with later ones.
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
    return rank_manifest(store, checkpoint, rank or 0)


def _client_part(descriptor: bytes) -> bytes:
    try:
        return decode_descriptor(descriptor).client
    except SegmentError:
        return b""  # of another version: it only would have told more
