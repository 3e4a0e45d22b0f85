"""One rank's uploads: its snapshots, and its manifest once all snapshots of a checkpoint are stored.

The rules are those of docs/format.md §7. A rank does not upload again what its *base* refers to (its last
manifest, if that is sure to stay) or what this node has stored since. Each stored snapshot remembers the
manifests that it relies on; they are checked once more before the manifest that refers to it is written.

Several threads of the store keeper use a `RankStore`. They store one snapshot of a rank at a time, and the
snapshots of one iteration of several ranks one after the other, so that the second rank finds what it
shares with the first.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import xxhash

import ckptd
from ckptd.core.durable_experts import Listed
from ckptd.core.slots.segment_format import SegmentDescriptor, SlotHeader, slot_lock_byte
from ckptd.core.slots.slots import SlotState, SnapshotKey
from ckptd.errors import SegmentError
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment, open_segment
from ckptd.persistence.durable_plan import DurablePlan, NewestSnapshot, choice_after, read_newest
from ckptd.persistence.keeper_wire import CommitRank, SlotPlace
from ckptd.persistence.run_in_store import RunInStore, Seen
from ckptd.storage.checkpoints.catalog import Views
from ckptd.storage.checkpoints.manifest import RankManifest, StoredSnapshot
from ckptd.storage.checkpoints.names import CheckpointId
from ckptd.storage.checkpoints.reader import (
    read_image_header,
    read_manifest,
    restore_snapshot,
)
from ckptd.storage.checkpoints.sealed_json import ManifestError
from ckptd.storage.checkpoints.upload_plan import StoredIndex, UploadPlan, plan_upload
from ckptd.storage.image import DigestMismatch, ImageView, verify
from ckptd.storage.image_format import ImageError
from ckptd.storage.reduced_image import NewerSnapshots, StorableImage, bare, reduced
from ckptd.storage.stores.objects import Damaged, ObjectExists, ObjectInfo, Unavailable
from ckptd.storage.strong_digest import strong_digest_of

logger = logging.getLogger(__name__)


class SlotLost(RuntimeError):
    """The slot holds another snapshot, or its segment was removed."""


@dataclass(frozen=True, slots=True)
class LockedSlot:
    """A slot that does not change while it is held."""

    header: SlotHeader
    image: memoryview
    descriptor: SegmentDescriptor
    num_slots: int
    digest: str = ""  # the image's cryptographic digest if it is kept in the segment, else ""


class SlotFiles:
    """Maps segment files, each once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readable: dict[str, Segment] = {}
        self._writable: dict[str, Segment] = {}

    @contextmanager
    def hold(self, path: str, index: int, snapshot: SnapshotKey) -> Iterator[LockedSlot]:
        """Lock the slot for reading; SlotLost if it is not sealed or not of this snapshot any more."""
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
            yield LockedSlot(
                header,
                segment.image(index, header),
                segment.descriptor,
                segment.geometry.num_slots,
                kept,
            )

    def of_checkpoint(
        self, newest: SlotPlace | None, another: SlotPlace | None
    ) -> tuple[NewestSnapshot, NewerSnapshots] | None:
        """What the newest snapshot of a checkpoint says of durable experts, and what another one has; None:
        store all experts.
        """
        if newest is None or another is None:
            return None
        try:
            with self.hold(newest.path, newest.index, newest.snapshot) as slot:
                says = read_newest(slot.image, slot.header, slot.descriptor, slot.num_slots)
            if says is None:
                return None
            has = NewerSnapshots()
            with self.hold(another.path, another.index, another.snapshot) as slot:
                if _add_readable(has, slot):
                    return says, has
            reason = f"the header of iteration {another.snapshot.iteration} is damaged in memory"
        except (SlotLost, ImageError) as error:
            reason = str(error)
        logger.warning("all experts of checkpoint %d are stored: %s", newest.snapshot.iteration, reason)
        return None

    def newer(self, places: Iterable[SlotPlace]) -> NewerSnapshots:
        """What these snapshots have; of one whose slot is lost, nothing."""
        found = NewerSnapshots()
        for place in places:
            try:
                with self.hold(place.path, place.index, place.snapshot) as slot:
                    _add_readable(found, slot)
            except (SlotLost, ImageError) as error:
                logger.warning(
                    "what iteration %d has is stored once more: %s", place.snapshot.iteration, error
                )
        return found

    def writable(self, path: str, offset: int, length: int) -> memoryview:
        """Writable bytes of a segment file; SlotLost if the file was removed or is too short."""
        segment = self._open(path, self._writable, readonly=False)
        if not 0 <= offset <= offset + length <= len(segment.buffer):
            raise SlotLost(f"{segment.path.name} has no bytes {offset} to {offset + length}")
        return segment.buffer[offset : offset + length]

    def forget_removed(self) -> None:
        """Unmap removed files, so that the system frees their memory."""
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
# A collector may delete an unreferenced object after the grace time, 24 h; a writer commits within half of
# that after the put (docs/format.md §7). An object may be this old when it is found, is committed at most
# this much later, and as much is left for wrong clocks. A suffix that takes longer to upload is never
# committed.
_FORGET_S = 4 * 3600.0
# A listing is valid for half the settle time, 300 s (docs/format.md §7). An attempt that has begun may
# take the time of three requests, so the listing, and all but the last attempt to put the manifest, have a
# minute each.
_LIST_WITHIN_S = 60.0

_WRITTEN = 4  # newest manifests that are remembered, to find out which one all ranks have
_AFTER_DISAGREEMENT = 16  # checkpoints that a rank stores with all experts, as another one does
_PLANS = 4  # checkpoints that are remembered: the one under way, and late answers to earlier ones

_Name = tuple[int, int, int]  # iteration, epoch, sequence: unique among the snapshots of a rank


class Agreement(Enum):
    """Whether all ranks have a checkpoint."""

    YES = "yes"
    NOT_YET = "not yet"
    OTHERWISE = "otherwise"  # other ranks have listed other images for it


class UnknownSnapshot(LookupError):
    """This process has not stored the snapshot, or what it relies on may be deleted: store it again."""


class Overtaken(RuntimeError):
    """The checkpoint must not be committed any more."""


class Uploaded(NamedTuple):
    """The size of an image, the bytes of it that had to be uploaded, and whether a later checkpoint may refer
    to it.
    """

    size_bytes: int
    uploaded_bytes: int
    for_later: bool = True


@dataclass(frozen=True, slots=True)
class KeptSnapshot:
    """A stored snapshot with its image's header (which locates its tensors).

    Attributes:
        relied: the keys of the manifests that it relies on.
        since_s: when its oldest object without a manifest was put; infinite if manifests cover all of them.
    """

    snapshot: StoredSnapshot
    header: bytes
    relied: frozenset[str]
    since_s: float = math.inf

    @property
    def name(self) -> _Name:
        return self.snapshot.iteration, self.snapshot.epoch, self.snapshot.sequence


class _Written(NamedTuple):
    """A manifest of this rank, and its snapshots."""

    manifest: RankManifest
    kept: dict[_Name, KeptSnapshot]


class _Planned(NamedTuple):
    """What a checkpoint stores, and what it takes from the last one."""

    plan: DurablePlan
    kept: list[KeptSnapshot]


class RankStore:
    """Stores and commits the snapshots of one rank.

    Args:
        run_id: of the run that uses the names.
        base: the key of this rank's last manifest if it is sure to stay, else "".
        committed: the same of the last checkpoint that all ranks have.
        look: lists the run for a commit of the checkpoint that ends at an iteration; True: list it now.
        neighbours: the other ranks of this run on this node.
        state_of: whether all ranks have a checkpoint.
    """

    def __init__(
        self,
        at: RunInStore,
        rank: int,
        *,
        run_id: str,
        base: str,
        committed: str,
        look: Callable[[int, bool], Seen],
        neighbours: Callable[[], Iterable[RankStore]],
        state_of: Callable[[CheckpointId], Agreement],
    ) -> None:
        self._at, self.rank = at, rank
        self._run_id, self._look, self._neighbours = run_id, look, neighbours
        self._state_of = state_of
        self._all_experts_for = 0  # so many checkpoints
        self._lock, self._planning = threading.Lock(), threading.Lock()
        self._since: dict[_Name, KeptSnapshot] = {}
        self._base: dict[_Name, KeptSnapshot] = {}
        # The last manifests, oldest first, from the last one on that all ranks are known to have.
        self._written: list[_Written] = []
        # Of the newest checkpoints of partial snapshots; None: all experts are stored.
        self._plans: dict[tuple[_Name, ...], _Planned | None] = {}
        for key in dict.fromkeys([committed, base]):
            if key:
                manifest = read_manifest(at.store, key)
                self._written.append(_Written(manifest, self._of_manifest(manifest)))
        if base:
            self._base = self._written[-1].kept

    def stored_of(self, iteration: int) -> list[KeptSnapshot]:
        """The snapshots of an iteration that were stored since the last manifest."""
        with self._lock:
            return [kept for name, kept in self._since.items() if name[0] == iteration]

    def plan(
        self,
        checkpoint: Sequence[tuple[SnapshotKey, int]],
        read: Callable[[], tuple[NewestSnapshot, NewerSnapshots] | None],
    ) -> DurablePlan | None:
        """Which experts this checkpoint stores; None: all of them.

        All ranks must choose the same, so nothing depends on which of its snapshots is stored first.

        Args:
            checkpoint: its snapshots with their phases, oldest first.
            read: see `SlotFiles.of_checkpoint`.
        Raises:
            StoreError: whether all ranks have the last checkpoint is not known.
        """
        if not checkpoint:
            return None
        key = tuple([_name(snapshot) for snapshot, _ in checkpoint])
        with self._planning:
            if key not in self._plans:
                while len(self._plans) >= _PLANS:
                    del self._plans[next(iter(self._plans))]
                self._plans[key] = self._planned(checkpoint, read)
            planned = self._plans[key]
        return None if planned is None else planned.plan

    def _planned(
        self,
        checkpoint: Sequence[tuple[SnapshotKey, int]],
        read: Callable[[], tuple[NewestSnapshot, NewerSnapshots] | None],
    ) -> _Planned | None:
        found = read()
        if found is None:
            return None
        says, another = found
        last = self._last_committed()
        if self._all_experts_for:
            self._all_experts_for -= 1
            return None
        if last is None or last.manifest.run_id != self._run_id:
            return None
        now = [Listed(snapshot.iteration, phase) for snapshot, phase in checkpoint]
        choice = choice_after(last.manifest, now, says)
        if choice is None:
            return None
        kept = [each for name, each in last.kept.items() if name[0] in choice.kept]
        return _Planned(DurablePlan(choice, says, now[-1].iteration, another), kept)

    def _last_committed(self) -> _Written | None:
        """The last checkpoint that all ranks have: ranks that go by others would choose differently."""
        for number, written in reversed(list(enumerate(self._written))):
            state = self._state_of(written.manifest.checkpoint)
            if state is Agreement.YES:
                del self._written[:number]
                return written
            if state is Agreement.OTHERWISE:  # a rank that has to store all experts, perhaps for long
                self._all_experts_for = _AFTER_DISAGREEMENT
        return None

    def put(
        self,
        snapshot: SnapshotKey,
        slot: LockedSlot,
        newer: NewerSnapshots | None = None,
        plan: DurablePlan | None = None,
    ) -> Uploaded:
        """Store the snapshot in a slot, without what newer ones have.

        Args:
            plan: what its checkpoint stores of it.

        Raises:
            SlotLost: the bytes differ from the sealed ones.
            StoreError: the store does not accept it.
        """
        name = _name(snapshot)
        newer = newer or NewerSnapshots()
        header = slot.header
        if plan is not None and not plan.stores(header.iteration):
            return Uploaded(0, 0, for_later=False)
        is_bare = plan is not None and plan.stores_bare(header.iteration)
        with self._lock:
            known = self._since.get(name) or self._base.get(name)
        try:
            view = ImageView(slot.image)
            wanted = view.anchors & ~newer.anchors
            if plan is not None and is_bare:
                wanted &= ~plan.newest.experts
                # Other ranks may have replicas of the experts that it would have.
                if known is not None and known.snapshot.anchors & plan.newest.experts:
                    known = None
            # It may have been reduced for a checkpoint of a history that was abandoned.
            if known is not None and not wanted & ~known.snapshot.anchors:
                return Uploaded(known.snapshot.image_len, 0, not is_bare)
            verify(slot.image, header.header_digest, map_fn=self._at.map_fn)
        except ImageError as error:
            what = error.tensor if isinstance(error, DigestMismatch) else str(error)
            raise SlotLost(f"iteration {header.iteration} is damaged in memory: {what}") from error
        begun_s = time.monotonic()
        if plan is not None and is_bare:
            says = plan.newest
            image = bare(slot.image, view, says.experts, says.parameters, plan.another)
        else:
            image = reduced(slot.image, view, newer)
        image = image or StorableImage.whole(slot.image, view, header.header_digest)
        index, relied, since_s = self._index(header.iteration)
        upload = plan_upload(
            image.pieces,
            index,
            job=self._at.job,
            run=self._at.run,
            rank=self.rank,
            epoch=header.epoch,
            sequence=header.sequence,
        )
        info, uploaded = self._upload(upload, image)
        stored = _stored(slot, image, upload, info)
        if self._at.read_back:
            restore_snapshot(self._at.store, stored, memoryview(bytearray(stored.image_len)))
        if upload.reused:
            kept = KeptSnapshot(stored, image.header, relied, since_s)
        else:
            kept = KeptSnapshot(stored, image.header, frozenset(), begun_s)
        with self._lock:
            self._since[name] = kept
            now_s = time.monotonic()
            for old in [n for n, k in self._since.items() if now_s - k.since_s > _FORGET_S]:
                del self._since[old]
        return Uploaded(image.image_len, uploaded, not is_bare)

    def commit(self, message: CommitRank) -> RankManifest:
        """Write this rank's manifest.

        Raises:
            UnknownSnapshot: a snapshot must be stored (again) before.
            Overtaken: a newer checkpoint is committed, or a later history has begun.
            StoreError: the store does not accept it.
        """
        kept = self._listed(message)
        try:
            manifest = self._manifest_of(message, kept)
        except ManifestError as error:
            if not self._written:
                raise
            self._forget()  # it does not go with what the last checkpoint has of experts
            raise UnknownSnapshot(f"checkpoint {message.end} must be stored anew: {error}") from error
        relied = frozenset().union(*(k.relied for k in kept))
        seen = self._look(message.end, False)
        if seen.shared and seen.views.refusal(manifest.checkpoint, relied):
            # The shared listing may be older than a manifest that this rank relies on.
            seen = self._look(message.end, True)
        self._check_may_commit(seen.views, manifest, relied)
        if time.monotonic() - seen.begun_s > _LIST_WITHIN_S:
            raise Unavailable(manifest.key, "listing the run took too long to act upon it")
        try:
            self._at.prompt.put(manifest.key, [memoryview(manifest.to_bytes())], if_absent=True)
        except ObjectExists:
            # An earlier process of this rank wrote it: the key contains the run, the epoch and the
            # agreement. The objects that the existing manifest refers to stay; ours may be others.
            manifest = read_manifest(self._at.store, manifest.key)
            kept = list(self._of_manifest(manifest).values())
        with self._lock:
            self._base = self._based(manifest.key, kept)
            self._written.append(_Written(manifest, self._base))
            del self._written[1:-_WRITTEN]  # the first one is committed, unless none is
            self._since = {n: k for n, k in self._since.items() if n not in self._base}
        return manifest

    def _manifest_of(self, message: CommitRank, kept: Sequence[KeptSnapshot]) -> RankManifest:
        return RankManifest(
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

    def _listed(self, message: CommitRank) -> list[KeptSnapshot]:
        """The snapshots of the manifest, oldest first."""
        names = [_name(snapshot) for snapshot in message.snapshots]
        with self._planning:
            planned = self._plans.get(tuple(names))
        if planned is None:
            return self._chosen(names)
        stored = self._chosen([name for name in names if planned.plan.stores(name[0])])
        found = sorted((*planned.kept, *stored), key=lambda each: each.name)
        # In this checkpoint each follows the one before it.
        linked = found[:1]
        for before, each in pairwise(found):
            after = replace(each.snapshot, previous=before.snapshot.iteration)
            linked.append(replace(each, snapshot=after))
        return linked

    def _chosen(self, names: Iterable[_Name]) -> list[KeptSnapshot]:
        now_s = time.monotonic()
        with self._lock:
            known = {**self._base, **self._since}
            found = []
            for name in names:
                kept = known.get(name)
                if kept is None or now_s - kept.since_s > _FORGET_S:
                    self._since.clear()
                    raise UnknownSnapshot(f"iteration {name[0]} was not stored lately")
                found.append(kept)
            return found

    def _forget(self) -> None:
        """Upload everything anew."""
        with self._planning, self._lock:
            self._since.clear()
            self._base.clear()
            self._plans.clear()
            self._written.clear()

    def _check_may_commit(self, views: Views, manifest: RankManifest, relied: frozenset[str]) -> None:
        if not (reason := views.refusal(manifest.checkpoint, relied)):
            return
        if views.refusal(manifest.checkpoint, ()):
            raise Overtaken(f"checkpoint {manifest.end} is not committed: {reason}")
        self._forget()
        raise UnknownSnapshot(f"checkpoint {manifest.end} must be stored anew: {reason}")

    def _of_manifest(self, manifest: RankManifest) -> dict[_Name, KeptSnapshot]:
        headers = [read_image_header(self._at.store, s) for s in manifest.snapshots]
        pairs = zip(manifest.snapshots, headers, strict=True)
        return self._based(manifest.key, [KeptSnapshot(s, h, frozenset()) for s, h in pairs])

    def _based(self, key: str, kept: Iterable[KeptSnapshot]) -> dict[_Name, KeptSnapshot]:
        """The snapshots of our manifest at ``key``; using them means relying on that manifest."""
        return {k.name: KeptSnapshot(k.snapshot, k.header, frozenset({key})) for k in kept}

    def _index(self, iteration: int) -> tuple[StoredIndex, frozenset[str], float]:
        """The tensors to which a new object may refer, the manifests that it then relies on, and since
        when the oldest object without a manifest is stored.
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

    def _upload(self, plan: UploadPlan, image: StorableImage) -> tuple[ObjectInfo, int]:
        """Put the new object, unless a young one exists: a key stands for one content.

        A young object (less than ``_FORGET_S``) was put by an earlier process. An older one may be collected
        as garbage, so it is put again. If this node's clock is wrong by up to four hours, the object is put
        in vain, or an older one is used: that is still committed within half the grace time
        (docs/format.md §7).
        """
        there = self._at.store.info(plan.key)
        if there is not None and there.size == plan.size:
            age_s = abs(self._at.wall_ns() - there.modified_ns) / 1e9
            if age_s < _FORGET_S:
                return there, 0
        info = self._at.store.put(plan.key, plan.parts(image.pieces))
        if info.size != plan.size:
            raise Damaged(plan.key, f"it has {info.size} bytes, {plan.size} were put")
        return info, plan.size


def _add_readable(to: NewerSnapshots, slot: LockedSlot) -> bool:
    """Add what a snapshot has, if its header is undamaged; ImageError if it is none."""
    view = ImageView(slot.image)
    whole = xxhash.xxh3_128_digest(slot.image[: view.data_offset]) == slot.header.header_digest
    if whole:
        to.add(view)
    return whole


def _name(snapshot: SnapshotKey) -> _Name:
    return snapshot.iteration, snapshot.epoch, snapshot.sequence


def _stored(slot: LockedSlot, image: StorableImage, plan: UploadPlan, info: ObjectInfo) -> StoredSnapshot:
    """The snapshot for the manifest."""
    header = slot.header
    kept = slot.digest if image.header_digest == header.header_digest else ""
    return StoredSnapshot(
        header.iteration,
        header.previous,
        header.sequence,
        header.phase,
        header.epoch,
        header.epoch_start,
        header.filled_at_ns,
        image.header_digest,
        image.image_len,
        image.layout_id,
        image.num_operators,
        image.anchors,
        plan.objects(info.etag),
        plan.extents,
        kept or strong_digest_of(image.pieces),
    )
