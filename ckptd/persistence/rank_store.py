"""One rank's way into a store: its snapshots, and its manifest when all of a checkpoint are there.

The rules are those of docs/format.md §7. What is not uploaded again is what this rank's *base*
refers to (its last manifest, if it is sure to stay), or what was stored since, by itself or by
another rank of this node. Which manifests were relied on is remembered with each snapshot, and
looked at once more before the manifest that refers to it is written.

Used by several threads of the store keeper. A snapshot is stored by one thread at a time; so are
the snapshots that several ranks of a node have of one iteration, because the second one finds there
what it shares with the first.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import ckptd
from ckptd.core.slots.ring import SlotState
from ckptd.core.slots.segment_format import SegmentDescriptor, SlotHeader, slot_lock_byte
from ckptd.errors import SegmentError
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment, open_segment
from ckptd.persistence.keeper_wire import CommitRank, SnapshotId
from ckptd.persistence.run_in_store import RunInStore, Seen
from ckptd.storage.checkpoints.catalog import Views
from ckptd.storage.checkpoints.manifest import RankManifest, StoredSnapshot
from ckptd.storage.checkpoints.reader import (
    read_image_header,
    read_manifest,
    restore_snapshot,
)
from ckptd.storage.checkpoints.upload_plan import StoredIndex, UploadPlan, plan_upload
from ckptd.storage.image import DigestMismatch, ImageView, verify
from ckptd.storage.image_format import ImageError
from ckptd.storage.stores.objects import Damaged, ObjectExists, ObjectInfo, Unavailable
from ckptd.storage.strong_digest import strong_digest

__all__ = [
    "TOOL",
    "LockedSlot",
    "Overtaken",
    "RankStore",
    "SlotFiles",
    "SlotLost",
    "UnknownSnapshot",
    "Uploaded",
]


class SlotLost(RuntimeError):
    """The slot holds something else, or its segment is gone."""


@dataclass(frozen=True, slots=True)
class LockedSlot:
    """A slot that stays as it is for as long as it is held."""

    header: SlotHeader
    image: memoryview
    descriptor: SegmentDescriptor
    digest: str = ""  # the cryptographic one that was kept of it; "": it was not made yet


class SlotFiles:
    """The segment files that were asked for, mapped once; safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readable: dict[str, Segment] = {}
        self._writable: dict[str, Segment] = {}

    @contextmanager
    def hold(self, path: str, index: int, snapshot: SnapshotId) -> Iterator[LockedSlot]:
        """The slot, if it is sealed and still of this snapshot.

        Raises:
            SlotLost: it is not.
        """
        segment = self._open(path, self._readable, readonly=True)
        with ExitStack() as stack:
            try:
                taken = stack.enter_context(
                    locks.lock_file(segment.path, slot_lock_byte(index), exclusive=False)
                )
            except OSError as error:
                raise SlotLost(f"{segment.path.name} is gone: {error}") from error
            header = segment.header(index) if taken else None
            if header is None or header.state is not SlotState.SEALED:
                raise SlotLost(f"slot {index} of {segment.path.name} is being filled again")
            found = (header.iteration, header.epoch, header.sequence)
            if found != (snapshot.iteration, snapshot.epoch, snapshot.sequence):
                raise SlotLost(f"slot {index} of {segment.path.name} holds iteration {found[0]}")
            kept = segment.kept_digest(index, header)
            yield LockedSlot(header, segment.image(index, header), segment.descriptor, kept)

    def writable(self, path: str, offset: int, length: int) -> memoryview:
        """Bytes of a segment file, to be written.

        Raises:
            SlotLost: the file is gone, or ends before.
        """
        segment = self._open(path, self._writable, readonly=False)
        if not 0 <= offset <= offset + length <= len(segment.buffer):
            raise SlotLost(f"{segment.path.name} has no bytes {offset} to {offset + length}")
        return segment.buffer[offset : offset + length]

    def forget_removed(self) -> None:
        """Unmap files that are no longer there: their memory is free only then."""
        with self._lock:
            for known in (self._readable, self._writable):
                for path, segment in list(known.items()):
                    if not segment.in_place():
                        del known[path]
                        segment.close()

    def _open(self, path: str, known: dict[str, Segment], *, readonly: bool) -> Segment:
        with self._lock:
            segment = known.get(path)
            if segment is not None and segment.in_place():
                return segment
            if segment is not None:
                del known[path]
                segment.close()
            try:
                known[path] = open_segment(Path(path), readonly=readonly)
            except (OSError, ValueError, SegmentError) as error:
                raise SlotLost(f"{path} cannot be opened: {error}") from error
            return known[path]


TOOL = f"ckptd {ckptd.__version__}"
# What belongs to no manifest may be collected after the grace time, 24 h, and is committed within
# half of that after it was put (docs/format.md §7). It may have been there for this long when it is
# found, is committed at most as long after that, and as much is left for clocks that are wrong. A
# suffix that takes longer to upload is never committed.
_FORGET_S = 4 * 3600.0
# What a listing said of what stays holds for half the settle time, 300 s (docs/format.md §7). An
# attempt that has begun may take three requests' time, so the listing, and all but the last attempt
# to put the manifest, must be over in a minute each.
_LIST_WITHIN_S = 60.0

_Name = tuple[int, int, int]  # iteration, epoch, sequence: no two snapshots of a rank have the same


class UnknownSnapshot(LookupError):
    """It was not stored by this process, or what it relied on may be deleted: it must be stored anew."""


class Overtaken(RuntimeError):
    """This checkpoint must not be committed any more."""


class Uploaded(NamedTuple):
    """Bytes of an image, and how many of them had to travel."""

    size_bytes: int
    uploaded_bytes: int


@dataclass(frozen=True, slots=True)
class KeptSnapshot:
    """A stored snapshot, its image's header (which tells where its tensors lie), and the manifests
    that were relied on for it.
    """

    snapshot: StoredSnapshot
    header: bytes
    relied: frozenset[str]
    # When it was begun to be put; of what a manifest refers to, that manifest vouches for it.
    since_s: float = math.inf


class ListRun(Protocol):
    """Lists the run for a rank that is about to commit the checkpoint ``end``; ``fresh``: nobody
    else's listing will do.
    """

    def __call__(self, end: int, *, fresh: bool) -> Seen: ...


class RankStore:
    """Stores and commits.

    Args:
        run_id: of the run that the names stand for.
        base: the key of this rank's manifest that tells what need not be uploaded again; "" if none
            is sure to stay.
        look: lists the run, for several ranks at once.
        neighbours: the other ranks of this run on this node.
    """

    def __init__(
        self,
        at: RunInStore,
        rank: int,
        *,
        run_id: str,
        base: str,
        look: ListRun,
        neighbours: Callable[[], Iterable[RankStore]],
    ) -> None:
        self._at, self.rank = at, rank
        self._run_id, self._look, self._neighbours = run_id, look, neighbours
        self._lock = threading.Lock()
        self._since: dict[_Name, KeptSnapshot] = {}
        self._base: dict[_Name, KeptSnapshot] = {}
        if base:
            self._base = self._of_manifest(read_manifest(at.store, base))

    def stored_of(self, iteration: int) -> list[KeptSnapshot]:
        """What was stored of an iteration since the last manifest."""
        with self._lock:
            return [kept for name, kept in self._since.items() if name[0] == iteration]

    def put(self, snapshot: SnapshotId, slot: LockedSlot) -> Uploaded:
        """Bring the snapshot in a slot to the store.

        Raises:
            SlotLost: it is not any more what was sealed.
            StoreError: the store does not take it.
        """
        name = _name(snapshot)
        with self._lock:
            known = self._since.get(name) or self._base.get(name)
        if known is not None:
            return Uploaded(known.snapshot.image_len, 0)
        header = slot.header
        try:
            verify(slot.image, header.header_digest, map_fn=self._at.map_fn)
        except ImageError as error:
            what = error.tensor if isinstance(error, DigestMismatch) else str(error)
            raise SlotLost(f"iteration {header.iteration} is damaged in memory: {what}") from error
        begun_s = time.monotonic()
        index, relied, since_s = self._index(header.iteration)
        plan = plan_upload(
            slot.image,
            index,
            job=self._at.job,
            run=self._at.run,
            rank=self.rank,
            epoch=header.epoch,
            sequence=header.sequence,
        )
        info, uploaded = self._upload(plan, slot.image)
        stored, head = _stored(slot, plan, info)
        if self._at.read_back:
            restore_snapshot(self._at.store, stored, memoryview(bytearray(stored.image_len)))
        if plan.reused:
            kept = KeptSnapshot(stored, head, relied, since_s)
        else:
            kept = KeptSnapshot(stored, head, frozenset(), begun_s)
        with self._lock:
            self._since[name] = kept
            now_s = time.monotonic()
            for old in [n for n, k in self._since.items() if now_s - k.since_s > _FORGET_S]:
                del self._since[old]
        return Uploaded(header.image_len, uploaded)

    def commit(self, message: CommitRank) -> RankManifest:
        """Write this rank's manifest.

        Raises:
            UnknownSnapshot: a snapshot must be stored (anew) before.
            Overtaken: a newer checkpoint is committed, or another history has begun.
            StoreError: the store does not take it.
        """
        kept = self._chosen(message.snapshots)
        manifest = RankManifest(
            self._at.job,
            self._at.run,
            self._run_id,
            self.rank,
            message.world_size,
            message.window,
            message.stride,
            self._at.wall_ns(),
            message.slot_bytes,
            message.num_slots,
            message.descriptor,
            TOOL,
            tuple(k.snapshot for k in kept),
        ).signed_by(self._at.signer)
        relied = frozenset().union(*(k.relied for k in kept))
        seen = self._look(message.end, fresh=False)
        if seen.shared and seen.views.refusal(manifest.checkpoint, relied):
            # It may have been begun before what this rank relies on was there.
            seen = self._look(message.end, fresh=True)
        self._check_may_commit(seen.views, manifest, relied)
        if time.monotonic() - seen.begun_s > _LIST_WITHIN_S:
            raise Unavailable(manifest.key, "listing the run took too long to act upon it")
        try:
            self._at.prompt.put(manifest.key, [memoryview(manifest.to_bytes())], if_absent=True)
        except ObjectExists:
            # Ours, of a life before this one: the key says job, run, epoch and all that ranks agree
            # on. What it refers to stays, and not what we would have referred to.
            manifest = read_manifest(self._at.store, manifest.key)
            kept = list(self._of_manifest(manifest).values())
        with self._lock:
            self._base = self._based(manifest.key, kept)
            self._since = {n: k for n, k in self._since.items() if n not in self._base}
        return manifest

    def _chosen(self, snapshots: Iterable[SnapshotId]) -> list[KeptSnapshot]:
        now_s = time.monotonic()
        with self._lock:
            known = {**self._base, **self._since}
            found = []
            for snapshot in snapshots:
                kept = known.get(_name(snapshot))
                if kept is None or now_s - kept.since_s > _FORGET_S:
                    self._since.clear()
                    raise UnknownSnapshot(f"iteration {snapshot.iteration} was not stored lately")
                found.append(kept)
            return found

    def _check_may_commit(self, views: Views, manifest: RankManifest, relied: frozenset[str]) -> None:
        if not (reason := views.refusal(manifest.checkpoint, relied)):
            return
        if views.refusal(manifest.checkpoint, ()):
            raise Overtaken(f"checkpoint {manifest.end} is not committed: {reason}")
        with self._lock:
            self._since.clear()
            self._base.clear()
        raise UnknownSnapshot(f"checkpoint {manifest.end} must be stored anew: {reason}")

    def _of_manifest(self, manifest: RankManifest) -> dict[_Name, KeptSnapshot]:
        headers = [read_image_header(self._at.store, s) for s in manifest.snapshots]
        pairs = zip(manifest.snapshots, headers, strict=True)
        return self._based(manifest.key, [KeptSnapshot(s, h, frozenset()) for s, h in pairs])

    def _based(self, key: str, kept: Iterable[KeptSnapshot]) -> dict[_Name, KeptSnapshot]:
        """What a manifest of ours refers to: whoever uses it relies on that manifest."""
        return {
            (k.snapshot.iteration, k.snapshot.epoch, k.snapshot.sequence): KeptSnapshot(
                k.snapshot, k.header, frozenset({key})
            )
            for k in kept
        }

    def _index(self, iteration: int) -> tuple[StoredIndex, frozenset[str], float]:
        """Where the tensors lie to which a new object may refer; the manifests that are relied on
        by that; and since when the oldest object lies there that no manifest names.
        """
        index = StoredIndex()
        with self._lock:
            found = [*self._since.values(), *self._base.values()]
        for other in self._neighbours():
            found += other.stored_of(iteration)
        now_s = time.monotonic()
        found = [kept for kept in found if now_s - kept.since_s < _FORGET_S / 2]
        for kept in found:
            index.add(kept.header, kept.snapshot)
        since_s = min([now_s, *(kept.since_s for kept in found)])
        return index, frozenset().union(*(kept.relied for kept in found)), since_s

    def _upload(self, plan: UploadPlan, image: memoryview) -> tuple[ObjectInfo, int]:
        """Put what is new. The key stands for the content: if it has been there for a short time
        only, we put it in a life before; what is older may be taken for garbage, and is put again.

        A clock that is wrong by up to four hours puts it again in vain, or takes what is older for
        young: that is still committed before half the grace time is over (docs/format.md §7).
        """
        there = self._at.store.info(plan.key)
        if there is not None and there.size == plan.size:
            age_s = abs(self._at.wall_ns() - there.modified_ns) / 1e9
            if age_s < _FORGET_S:
                return there, 0
        info = self._at.store.put(plan.key, plan.parts(image))
        if info.size != plan.size:
            raise Damaged(plan.key, f"it has {info.size} bytes, {plan.size} were put")
        return info, plan.size


def _name(snapshot: SnapshotId) -> _Name:
    return snapshot.iteration, snapshot.epoch, snapshot.sequence


def _stored(slot: LockedSlot, plan: UploadPlan, info: ObjectInfo) -> tuple[StoredSnapshot, bytes]:
    """What the manifest will say of a snapshot, and its image's header."""
    header, view = slot.header, ImageView(slot.image)
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
        slot.digest or strong_digest(slot.image),
    )
    return stored, bytes(slot.image[: view.data_offset])
