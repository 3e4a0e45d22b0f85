"""One rank's way into a store: its snapshots, and its manifest when all of a checkpoint are there (docs/format.md).

What is not uploaded again is what this rank's last manifest refers to, or what was stored since for the same checkpoint, by itself
or by another rank of this node: so whatever a manifest refers to is referred to by a manifest that stays as long (docs/format.md §7).

Used by several threads of the store keeper. A snapshot is stored by one thread at a time; so are the snapshots that several ranks of
a node have of one iteration, because the second one finds there what it shares with the first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import ckptd
from ckptd.persistence.slot_source import HeldSlot, SlotLost
from ckptd.persistence.wire import CommitRank, SnapshotId
from ckptd.storage.image import DigestMismatch, ImageError, ImageView, verify
from ckptd.storage.manifest import RankManifest, StoredSnapshot
from ckptd.storage.objects import Damaged, ObjectExists, ObjectInfo, ObjectStore
from ckptd.storage.reader import (
    MapFunction,
    read_image_header,
    read_manifest,
    restore_snapshot,
)
from ckptd.storage.upload_plan import StoredIndex, UploadPlan, plan_upload

__all__ = ["RankStore", "UnknownSnapshot", "Uploaded"]

# What belongs to no manifest is collected one day; long before, nothing new may refer to it any more.
_FORGET_S = 3600.0
TOOL = f"ckptd {ckptd.__version__}"


class UnknownSnapshot(LookupError):
    """It was not stored by this process, or was forgotten since."""


class Uploaded(NamedTuple):
    """Bytes of an image, and how many of them had to travel."""

    size_bytes: int
    uploaded_bytes: int


@dataclass(frozen=True, slots=True)
class _Kept:
    """A stored snapshot, and its image's header: what tells where its tensors lie."""

    snapshot: StoredSnapshot
    header: bytes
    since_s: float = 0.0


class RankStore:
    """Stores and commits.

    Args:
        run_id: of the run that the names stand for.
        last: what this rank's last manifest refers to, if it has one that is not stale.
        neighbours: the other ranks of this run on this node.
        read_back: compare what was stored, byte for byte, before it counts.
    """

    def __init__(
        self,
        store: ObjectStore,
        job: str,
        run: str,
        rank: int,
        *,
        run_id: str,
        last: Iterable[StoredSnapshot],
        neighbours: Callable[[], Iterable[RankStore]],
        read_back: bool,
        map_fn: MapFunction,
    ) -> None:
        self._store, self._job, self._run, self.rank = store, job, run, rank
        self._run_id, self._neighbours = run_id, neighbours
        self._read_back, self._map = read_back, map_fn
        self._lock = threading.Lock()
        self._last = [_Kept(s, read_image_header(store, s)) for s in last]
        self._since: dict[SnapshotId, _Kept] = {}

    def stored_of(self, iteration: int) -> list[_Kept]:
        """What was stored of an iteration since the last manifest."""
        with self._lock:
            return [kept for key, kept in self._since.items() if key.iteration == iteration]

    def put(self, snapshot: SnapshotId, slot: HeldSlot) -> Uploaded:
        """Bring the snapshot in a slot to the store.

        Raises:
            SlotLost: it is not any more what was sealed.
            StoreError: the store does not take it.
        """
        with self._lock:
            known = self._since.get(snapshot)
        if known is not None:
            return Uploaded(known.snapshot.image_len, 0)
        header = slot.header
        try:
            verify(slot.image, header.header_digest, map_fn=self._map)
        except ImageError as error:
            what = error.tensor if isinstance(error, DigestMismatch) else str(error)
            raise SlotLost(f"iteration {header.iteration} is damaged in memory: {what}") from error
        plan = plan_upload(
            slot.image,
            self._index(header.iteration),
            job=self._job,
            run=self._run,
            rank=self.rank,
            epoch=header.epoch,
            sequence=header.sequence,
        )
        info, uploaded = self._upload(plan, slot.image)
        view = ImageView(slot.image)
        stored = StoredSnapshot(
            header.iteration,
            header.previous,
            header.sequence,
            header.phase,
            header.epoch,
            header.epoch_start,
            header.filled_at_ns,
            header.header_digest,
            header.image_len,
            header.layout_id,
            view.num_operators,
            view.anchors,
            plan.objects(info.etag),
            plan.extents,
        )
        if self._read_back:
            restore_snapshot(self._store, stored, memoryview(bytearray(stored.image_len)))
        head = bytes(slot.image[: view.data_offset])
        now_s = time.monotonic()
        with self._lock:
            self._since[snapshot] = _Kept(stored, head, now_s)
            for key in [k for k, old in self._since.items() if now_s - old.since_s > _FORGET_S]:
                del self._since[key]
        return Uploaded(header.image_len, uploaded)

    def commit(self, message: CommitRank) -> RankManifest:
        """Write this rank's manifest.

        Raises:
            UnknownSnapshot: a snapshot of it was not stored by this process.
            StoreError: the store does not take it.
        """
        with self._lock:
            missing = [key for key in message.snapshots if key not in self._since]
            if missing:
                raise UnknownSnapshot(f"iteration {missing[0].iteration} was not stored yet")
            kept = [self._since[key] for key in message.snapshots]
        manifest = RankManifest(
            self._job,
            self._run,
            self._run_id,
            self.rank,
            message.world_size,
            message.window,
            message.stride,
            time.time_ns(),
            message.slot_bytes,
            message.descriptor,
            TOOL,
            tuple(k.snapshot for k in kept),
        )
        try:
            self._store.put(manifest.key, [memoryview(manifest.to_bytes())], if_absent=True)
        except ObjectExists:
            # Ours, of a life before this one: the key says job, run, epoch and all that ranks agree on. What it refers to
            # stays, and not what we would have referred to.
            manifest = read_manifest(self._store, manifest.key)
            kept = [_Kept(s, read_image_header(self._store, s)) for s in manifest.snapshots]
        with self._lock:
            self._last = kept
            staying = set(message.snapshots)
            self._since = {
                k: v for k, v in self._since.items() if k in staying or k.iteration > message.end
            }
        return manifest

    def _index(self, iteration: int) -> StoredIndex:
        """Where the tensors lie to which a new object may refer."""
        index = StoredIndex()
        with self._lock:
            own = [*self._since.values(), *self._last]
        for kept in own:
            index.add(kept.header, kept.snapshot)
        for other in self._neighbours():
            for kept in other.stored_of(iteration):
                index.add(kept.header, kept.snapshot)
        return index

    def _upload(self, plan: UploadPlan, image: memoryview) -> tuple[ObjectInfo, int]:
        """Put what is new. The key stands for the content: if it is there already, it was we who put it, in a life before."""
        there = self._store.info(plan.key)
        if there is not None and there.size == plan.size:
            return there, 0
        info = self._store.put(plan.key, plan.parts(image))
        if info.size != plan.size:
            raise Damaged(plan.key, f"it has {info.size} bytes, {plan.size} were put")
        return info, plan.size
