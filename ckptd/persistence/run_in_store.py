"""One run in a store, and how this node reads and writes it: what all that acts on the run shares."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ckptd.storage.checkpoints.catalog import Catalog, StoredCheckpoint, Views
from ckptd.storage.checkpoints.manifest import ManifestError, RankManifest
from ckptd.storage.checkpoints.names import CheckpointId
from ckptd.storage.checkpoints.reader import MapFunction, read_manifest
from ckptd.storage.checkpoints.retention import (
    Deletion,
    References,
    RetentionPolicy,
    plan_retention,
)
from ckptd.storage.checkpoints.signing import ManifestSigner
from ckptd.storage.stores.objects import ObjectMissing
from ckptd.storage.stores.resilience import Resilient

__all__ = ["RunInStore", "RunRetention", "Seen", "SharedLook", "Surveyed", "newest_ns"]


# What was decided is done within half the settle time, 300 s (docs/format.md §7, §8;
# `ckptd.persistence.run_in_store`): one that has begun may take three requests' time.
_PROMPT_S = 60.0


@dataclass(frozen=True)
class RunInStore:
    """See the module."""

    store: Resilient
    job: str
    run: str

    map_fn: MapFunction
    """Spreads requests and digests over threads."""

    tell: Callable[[str, str, str], None]
    """Reports an event: level, kind, text."""

    read_back: bool = False
    """Compare what was stored, byte for byte, before it counts."""

    signer: ManifestSigner | None = None
    """Signs manifests; None: they are not signed."""

    wall_ns: Callable[[], int] = time.time_ns
    """This node's clock, which may be wrong."""

    @cached_property
    def prompt(self) -> Resilient:
        """The same store; gives up after a minute."""
        return self.store.within(_PROMPT_S)

    @property
    def title(self) -> str:
        """How log lines name the run."""
        return f"{self.job}/{self.run}"


_SHARE_S = 30.0  # of the minute within which a listing must have led to a manifest's put


class Seen(NamedTuple):
    """A listing of the run, when it was begun, and whether somebody else had asked for it."""

    views: Views
    begun_s: float
    shared: bool


class SharedLook:
    """Keeps the newest listing for those who have not seen it yet. Called from several threads.

    Args:
        clock: as of `Seen.begun_s`.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # held while listing: who asks meanwhile waits for that one
        self._key: Hashable = None
        self._seen: Seen | None = None
        self._left = 0

    def get(self, key: Hashable, look: Callable[[], Views], *, sharers: int, fresh: bool = False) -> Seen:
        """What ``look`` shows, now or (if it was begun for the same ``key``) a short while ago.

        Args:
            sharers: how many will ask for it; after that it is forgotten, since it is large.
            fresh: now.
        Raises:
            StoreError: of ``look``; whoever waited for it tries for himself.
        """
        with self._lock:
            seen = self._seen
            known = seen is not None and key == self._key and self._left > 0
            if seen is None or not known or fresh or self._clock() - seen.begun_s > _SHARE_S:
                self._seen = None  # not kept while the next one is made
                begun_s = self._clock()
                seen, self._key, self._left = Seen(look(), begun_s, True), key, sharers
                self._keep(seen)
                return seen._replace(shared=False)
            self._keep(seen)
            return seen

    def _keep(self, seen: Seen) -> None:
        self._left -= 1
        self._seen = seen if self._left > 0 else None


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
