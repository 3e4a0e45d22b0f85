"""One run in a store: how this node accesses it (`RunInStore`), lists it once for all of its ranks
(`SharedLook`), and deletes what retention does not keep (`RunRetention`).

Listing a large run takes a request per thousand keys, and all ranks of a node need a listing before they
write their manifests. For a rank only the time matters *when the listing began*, not who requested it. A
checkpoint that is staying in a listing can be replaced only by a checkpoint that becomes complete later. A
collector acts on that no earlier than the settle time after it (docs/format.md §8), with a listing of its
own that begins then. Every manifest that relies on our listing is written within half the settle time
after that listing began (§7), so the collector sees the manifest and keeps what it refers to. The age of
objects that were put after the listing began protects them in any case. Therefore ranks may share a
listing as long as its age counts: `Seen.begun_s` is the start of the time limit for the manifest.

A shared listing can lack only what did not exist yet, such as the manifest of a rank that is a checkpoint
behind. This leads to a refusal, never to a permission; a rank that a shared listing refuses requests a new
one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ckptd.storage.checkpoints.catalog import Catalog, StoredCheckpoint, Views
from ckptd.storage.checkpoints.manifest import RankManifest
from ckptd.storage.checkpoints.names import CheckpointId
from ckptd.storage.checkpoints.reader import MapFunction, read_manifest
from ckptd.storage.checkpoints.retention import (
    Deletion,
    References,
    RetentionPolicy,
    plan_retention,
)
from ckptd.storage.checkpoints.sealed_json import ManifestError
from ckptd.storage.checkpoints.signing import ManifestSigner
from ckptd.storage.stores.objects import ObjectMissing
from ckptd.storage.stores.resilience import Resilient

# Decisions are carried out within half the settle time, 300 s (docs/format.md §7, §8). An attempt that has
# begun may take the time of three requests; so none begins later than the sum of the first two after the
# listing.
_PROMPT_S = 60.0
_DELETE_WITHIN_S = 60.0
_READ_WITHIN_S = 10.0  # of `_DELETE_WITHIN_S`
_SHARE_S = 30.0  # of the minute between a listing and the put of a manifest
_BATCH = 500


@dataclass(frozen=True)
class RunInStore:
    """The names of a run, and how this node reads and writes it."""

    store: Resilient
    job: str
    run: str

    map_fn: MapFunction
    """Spreads requests and digests over threads."""

    report: Callable[[str, str, str], None]
    """Reports an event: level, kind, text."""

    read_back: bool = False
    """Read every stored snapshot back and compare it before it counts."""

    signer: ManifestSigner | None = None
    """Signs manifests; None: do not sign."""

    wall_ns: Callable[[], int] = time.time_ns
    """This node's clock, which may be wrong."""

    @cached_property
    def prompt(self) -> Resilient:
        """The same store with a deadline of a minute."""
        return self.store.within(_PROMPT_S)

    @property
    def title(self) -> str:
        """The run's name in log lines."""
        return f"{self.job}/{self.run}"


class Seen(NamedTuple):
    """A listing of the run, when it began, and whether another rank requested it."""

    views: Views
    begun_s: float
    shared: bool


class SharedLook:
    """Keeps the newest listing for the ranks that have not seen it yet. Thread-safe."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # held while listing, so that the others wait for this listing
        self._key: Hashable = None
        self._seen: Seen | None = None
        self._left = 0

    def get(self, key: Hashable, look: Callable[[], Views], *, sharers: int, fresh: bool = False) -> Seen:
        """The result of ``look``, called now or (for the same ``key``) a short time ago.

        Args:
            sharers: how many ranks will request it; then it is dropped, because it is large.
            fresh: call ``look`` now.
        Raises:
            StoreError: ``look`` raised it; each waiting rank then calls ``look`` itself.
        """
        with self._lock:
            seen = self._seen
            known = seen is not None and key == self._key and self._left > 0
            if seen is None or not known or fresh or self._clock() - seen.begun_s > _SHARE_S:
                self._seen = None  # to free its memory before the next listing
                begun_s = self._clock()
                seen, self._key, self._left = Seen(look(), begun_s, True), key, sharers
                self._keep(seen)
                return seen._replace(shared=False)
            self._keep(seen)
            return seen

    def _keep(self, seen: Seen) -> None:
        self._left -= 1
        self._seen = seen if self._left > 0 else None


class Surveyed(NamedTuple):
    """A run as one listing shows it.

    Args:
        listed_s: when the listing began.
        verified: the complete checkpoints whose objects are all listed and that are not known to be damaged.
        references: the contents of the readable manifests by key.
    """

    listed_s: float
    catalog: Catalog
    verified: set[CheckpointId]
    references: dict[str, References]


class RunRetention:
    """Deletes what the policy does not keep.

    Args:
        look: lists the run.
        doubted: the checkpoints that are known to be damaged; the caller adds to it.
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
        """Delete what the policy does not keep. After a StoreError the next call continues."""
        seen = self.survey()
        plan = plan_retention(
            seen.catalog,
            self._policy,
            verified=seen.verified,
            references=seen.references,
            now_ns=newest_ns(seen.catalog),  # by the store's clock
        )
        self.delete(plan.manifests, plan.objects, listed_s=seen.listed_s)

    def survey(self) -> Surveyed:
        """List the run, and read its manifests. May raise StoreError."""
        listed_s, catalog = time.monotonic(), self._look()
        self._read_all(catalog)
        if time.monotonic() - listed_s > _READ_WITHIN_S:  # now the manifests are cached
            listed_s, catalog = time.monotonic(), self._look()
            self._read_all(catalog)
        # The writers saw all objects in the store before they wrote their manifests.
        sizes = {o.info.key: o.info.size for listed in catalog.objects.values() for o in listed}
        complete = [c for c in catalog.checkpoints if c.complete]  # stale ones of another run, too
        verified = {c.id for c in complete if self._is_whole(c, sizes)}.difference(self._doubted)
        references = {key: References.of(found) for key, found in self._manifests.items()}
        return Surveyed(listed_s, catalog, verified, references)

    def delete(self, *plan: Sequence[Deletion], listed_s: float) -> None:
        """Carry out the parts of a plan in order; ``listed_s`` is when the plan's listing began.

        After a StoreError the next plan continues.
        """
        for doomed in plan:
            for begin in range(0, len(doomed), _BATCH):
                if time.monotonic() - listed_s > _DELETE_WITHIN_S:
                    return  # the listing is too old; the next plan continues
                self._at.prompt.delete([gone.key for gone in doomed[begin : begin + _BATCH]])
        gone = [deletion for doomed in plan for deletion in doomed]
        if gone:
            freed = sum(deletion.size for deletion in gone)
            text = f"{self._at.title}: {len(gone)} objects deleted, {freed} bytes"
            self._at.report("info", "retained", text)

    def _read_all(self, catalog: Catalog) -> None:
        """Read every new manifest; manifests never change. If one is unreadable, no object is deleted."""
        keys = [info.key for c in catalog.checkpoints for info in c.manifests.values()]
        known = self._manifests
        found = self._at.map_fn(lambda key: known.get(key) or self._manifest(key), keys)
        self._manifests = {
            key: manifest for key, manifest in zip(keys, found, strict=True) if manifest is not None
        }

    def _manifest(self, key: str) -> RankManifest | None:
        try:
            return read_manifest(self._at.store, key)
        except (ManifestError, ObjectMissing) as error:
            self._at.report("warning", "store_damaged", f"{error}; no object of the run is deleted")
            return None

    def _is_whole(self, checkpoint: StoredCheckpoint, sizes: Mapping[str, int]) -> bool:
        """Whether every object of its manifests is listed with its size."""
        for info in checkpoint.manifests.values():
            manifest = self._manifests.get(info.key)
            if manifest is None:
                return False
            for snapshot in manifest.snapshots:
                if any(sizes.get(stored.key) != stored.size for stored in snapshot.objects):
                    return False
        return True


def newest_ns(catalog: Catalog) -> int:
    """The time of the newest object by the store's clock; 0 if there is none."""
    times = [checkpoint.modified_ns for checkpoint in catalog.checkpoints]
    times += [found.info.modified_ns for listed in catalog.objects.values() for found in listed]
    return max(times, default=0)
