"""Ranks' images of one checkpoint in a store: their manifests and headers, and ranges of their bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from ckptd.core.export.export_errors import DamagedSnapshot, ExportError
from ckptd.core.export.joining import RankImage
from ckptd.core.export.wording import named_ranks
from ckptd.storage.checkpoints.catalog import StoredCheckpoint
from ckptd.storage.checkpoints.manifest import ManifestError, RankManifest, StoredSnapshot
from ckptd.storage.checkpoints.reader import (
    SnapshotDamaged,
    read_image_bytes,
    read_image_header,
    read_manifest,
    vouched_tensors,
)
from ckptd.storage.image_format import HeaderError, ImageTensor, ObjectHeader, parse_header
from ckptd.storage.stores.objects import Damaged, ObjectMissing, ObjectStore

__all__ = ["StoredImage", "open_image", "open_images", "rank_manifest"]

_THREADS = 8  # manifests and headers are small: it is the requests that take time
_ADVICE = "`ckptctl checkpoints verify` names the damaged objects and the whole checkpoints"


@dataclass(frozen=True)
class StoredImage:
    """One rank's image with a verified header; ``image`` contains its facts and those of the rank's
    chain.

    ``vouched``: BLAKE3 digests of its tensors, computed while the whole image was verified against the
    cryptographic digest in the manifest; empty if it was not.
    """

    rank: int
    snapshot: StoredSnapshot
    header: ObjectHeader
    image: RankImage
    vouched: Mapping[str, bytes] = field(default_factory=dict)

    def read(self, store: ObjectStore, begin: int, end: int) -> memoryview:
        """These bytes; they are not verified.

        Raises:
            DamagedSnapshot: an object is missing, or too short.
        """
        into = memoryview(bytearray(end - begin))
        with _damage_of(self.rank, self.snapshot.iteration):
            read_image_bytes(store, self.snapshot, begin, into)
        return into

    def damaged(self, tensor: ImageTensor) -> DamagedSnapshot:
        """An error: this tensor differs from the sealed one."""
        return DamagedSnapshot(_text(self.rank, self.snapshot.iteration, repr(tensor.name)))


def rank_manifest(store: ObjectStore, checkpoint: StoredCheckpoint, rank: int) -> RankManifest:
    """Read the manifest of a rank.

    Raises:
        DamagedSnapshot: the manifest cannot be read.
    """
    try:
        return read_manifest(store, checkpoint.manifests[rank].key)
    except (ManifestError, ObjectMissing, Damaged) as error:
        raise DamagedSnapshot(f"a manifest is damaged: {error}") from error


def open_image(
    store: ObjectStore, manifest: RankManifest, snapshot: StoredSnapshot, *, whole: bool = True
) -> StoredImage:
    """An image of the manifest's chain; reads the headers of the chain.

    Args:
        whole: read all of the image, and compare it with the cryptographic digest in the manifest.
    Raises:
        DamagedSnapshot: a header is not as it was written, or the image is not the one of the manifest.
    """
    headers: dict[int, ObjectHeader] = {}
    vouched: Mapping[str, bytes] = {}
    for each in manifest.snapshots:
        with _damage_of(manifest.rank, each.iteration):
            head = read_image_header(store, each)
            headers[each.iteration] = parse_header(head)
            if whole and each is snapshot:
                vouched = vouched_tensors(store, each, head, headers[each.iteration])
    header = headers[snapshot.iteration]
    dense = snapshot.anchors == (1 << snapshot.num_operators) - 1
    image = RankImage(header.tensors, dense, [found.tensors for found in headers.values()])
    return StoredImage(manifest.rank, snapshot, header, image, vouched)


def open_images(
    store: ObjectStore,
    checkpoint: StoredCheckpoint,
    snapshot: StoredSnapshot,
    ranks: Collection[int],
) -> dict[int, StoredImage]:
    """The images of the same iteration as ``snapshot``, by rank.

    Of these only shares are needed, which may be a hundredth of them. All of them is compared with
    its digest where the manifest is signed: where it is not, who can change an object can change
    the digest, too.

    Raises:
        ExportError: the checkpoint has no such ranks, or theirs are of another epoch.
        DamagedSnapshot: a manifest or header is not as it was written.
    """
    unknown = [rank for rank in ranks if rank not in checkpoint.manifests]
    if unknown:
        raise ExportError(
            f"{named_ranks(unknown)} captured a part of the model, but {checkpoint.id} has ranks "
            f"0 to {checkpoint.world_size - 1}; choose another checkpoint"
        )

    def opened(rank: int) -> StoredImage:
        manifest = rank_manifest(store, checkpoint, rank)
        return open_image(store, manifest, _same(manifest, snapshot), whole=bool(manifest.signer))

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ranks") as pool:
        return dict(zip(ranks, pool.map(opened, ranks), strict=True))


def _same(manifest: RankManifest, snapshot: StoredSnapshot) -> StoredSnapshot:
    # Manifests of one checkpoint are of the same iterations: their agreement says so. Of epochs it
    # tells the last.
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
