"""What of one run goes from the store: seen by one listing, decided by `ckptd.storage`, and done
soon or not at all (docs/format.md §8).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptd.persistence.run_in_store import RunInStore
from ckptd.storage.checkpoints.catalog import Catalog, StoredCheckpoint
from ckptd.storage.checkpoints.manifest import ManifestError, RankManifest
from ckptd.storage.checkpoints.names import CheckpointId
from ckptd.storage.checkpoints.reader import read_manifest
from ckptd.storage.checkpoints.retention import (
    Deletion,
    References,
    RetentionPolicy,
    plan_retention,
)
from ckptd.storage.stores.objects import ObjectMissing

__all__ = ["RunRetention", "Surveyed", "newest_ns"]

_BATCH = 500
# What was decided is done within half the settle time, 300 s (docs/format.md §7, §8): no attempt
# begins later than the sum of these, and one that has begun may take three requests' time.
_DELETE_WITHIN_S = 60.0
_READ_WITHIN_S = 10.0  # of these


class Surveyed(NamedTuple):
    """A run as one listing shows it.

    Args:
        listed_s: when that was begun.
        verified: the complete checkpoints whose objects are all there, and of which none is known
            to be damaged.
        references: by key what the manifests say; one that cannot be read is missing.
    """

    listed_s: float
    catalog: Catalog
    verified: set[CheckpointId]
    references: dict[str, References]


class RunRetention:
    """Deletes what need not stay.

    Args:
        look: lists the run.
        doubted: checkpoints that are known to be damaged; it grows.
    """

    def __init__(
        self,
        at: RunInStore,
        policy: RetentionPolicy,
        *,
        look: Callable[[], Catalog],
        doubted: Collection[CheckpointId],
    ) -> None:
        self._at, self._policy = at, policy
        self._look, self._doubted = look, doubted
        self._manifests: dict[str, RankManifest] = {}  # of all ranks

    def collect(self) -> None:
        """Delete what the policy does not keep.

        Raises:
            StoreError: the store cannot be read, or does not delete; what was begun goes on the next time.
        """
        seen = self.survey()
        plan = plan_retention(
            seen.catalog,
            self._policy,
            verified=seen.verified,
            references=seen.references,
            now_ns=newest_ns(seen.catalog),  # the store's clock, by the newest thing in it
        )
        self.delete(plan.manifests, plan.objects, listed_s=seen.listed_s)

    def survey(self) -> Surveyed:
        """List the run, and read its manifests.

        Raises:
            StoreError: the store cannot be read.
        """
        listed_s, catalog = time.monotonic(), self._look()
        self._read_all(catalog)
        if time.monotonic() - listed_s > _READ_WITHIN_S:  # what was read is remembered
            listed_s, catalog = time.monotonic(), self._look()
            self._read_all(catalog)
        # Its writers saw all of it in the store before they wrote their manifests. It must be there still.
        sizes = {o.info.key: o.info.size for listed in catalog.objects.values() for o in listed}
        complete = [c for c in catalog.checkpoints if c.complete]  # stale ones of another run, too
        verified = {c.id for c in complete if self._is_whole(c, sizes)}.difference(self._doubted)
        references = {key: References.of(found) for key, found in self._manifests.items()}
        return Surveyed(listed_s, catalog, verified, references)

    def delete(self, *plan: Sequence[Deletion], listed_s: float) -> None:
        """Carry out a plan that was made of what was listed then, part after part.

        Raises:
            StoreError: the store does not delete; what was begun goes on the next time.
        """
        for doomed in plan:
            for begin in range(0, len(doomed), _BATCH):
                if time.monotonic() - listed_s > _DELETE_WITHIN_S:
                    return  # what was seen is too old to act upon; the next time goes on
                self._at.prompt.delete([gone.key for gone in doomed[begin : begin + _BATCH]])
        gone = [deletion for doomed in plan for deletion in doomed]
        if gone:
            freed = sum(deletion.size for deletion in gone)
            text = f"{self._at.title}: {len(gone)} objects deleted, {freed} bytes"
            self._at.tell("info", "retained", text)

    def _read_all(self, catalog: Catalog) -> None:
        """Know every manifest; they never change, so each is read once. Where one cannot be read,
        no object is deleted.
        """
        keys = [info.key for c in catalog.checkpoints for info in c.manifests.values()]
        known = self._manifests
        found = zip(
            keys,
            self._at.map_fn(lambda key: known.get(key) or self._manifest(key), keys),
            strict=True,
        )
        self._manifests = {key: manifest for key, manifest in found if manifest is not None}

    def _manifest(self, key: str) -> RankManifest | None:
        try:
            return read_manifest(self._at.store, key)
        except (ManifestError, ObjectMissing) as error:
            self._at.tell("warning", "store_damaged", f"{error}; no object of the run is deleted")
            return None

    def _is_whole(self, checkpoint: StoredCheckpoint, sizes: Mapping[str, int]) -> bool:
        """Whether every object that its manifests name is listed, with the size that it had."""
        for info in checkpoint.manifests.values():
            manifest = self._manifests.get(info.key)
            if manifest is None:
                return False
            for snapshot in manifest.snapshots:
                if any(sizes.get(stored.key) != stored.size for stored in snapshot.objects):
                    return False
        return True


def newest_ns(catalog: Catalog) -> int:
    """When the newest thing in it was written, by the store's clock; 0 if there is nothing."""
    return max(_times(catalog), default=0)


def _times(catalog: Catalog) -> Iterator[int]:
    for checkpoint in catalog.checkpoints:
        yield checkpoint.modified_ns
    for listed in catalog.objects.values():
        yield from (found.info.modified_ns for found in listed)
