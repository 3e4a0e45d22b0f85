"""A store whose manifests are believed by their signatures: what was written there by anybody else
is damaged, and passed over as such.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptd.storage.checkpoints.manifest import MAX_MANIFEST_BYTES, ManifestError, RankManifest
from ckptd.storage.checkpoints.names import ManifestName, parse
from ckptd.storage.checkpoints.signing import Signers
from ckptd.storage.stores.objects import ObjectInfo, ObjectStore, Range, StoreFacts

__all__ = ["SignedStore"]


class SignedStore:
    """Implements `ObjectStore`. Objects are covered by the digests in a manifest, which readers compare.

    Args:
        signers: whose manifests are believed.
        required: every manifest must be signed, and have a digest of every image. Otherwise one
            that claims to be of a signer that is known must be his.
    """

    def __init__(self, store: ObjectStore, signers: Signers, *, required: bool = True) -> None:
        self._store, self._signers, self._required = store, signers, required

    @property
    def facts(self) -> StoreFacts:
        return self._store.facts

    def put(self, key: str, parts: Sequence[memoryview], *, if_absent: bool = False) -> ObjectInfo:
        return self._store.put(key, parts, if_absent=if_absent)

    def read(self, key: str, *, limit: int) -> bytes:
        """As `ObjectStore.read`.

        Raises:
            ManifestError: it is a manifest that is not believed.
        """
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
