"""The answers of `ckptctl checkpoints` as data. Pure: no I/O; times are arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ckptd.storage.checkpoints.catalog import Catalog, StoredCheckpoint
from ckptd.storage.checkpoints.manifest import RankManifest, StoredSnapshot
from ckptd.storage.checkpoints.names import (
    CheckpointId,
    IncarnationName,
    ObjectName,
    PinName,
    parse,
)
from ckptd.storage.stores.objects import ObjectInfo

__all__ = [
    "CheckpointRow",
    "CheckpointShown",
    "Manifests",
    "RankShown",
    "RunShown",
    "SnapshotShown",
    "is_whole",
    "matching",
    "rows_of",
    "runs_in",
    "show_checkpoint",
    "standing_of",
]

_Named = TypeVar("_Named", CheckpointId, PinName)


@dataclass(frozen=True, slots=True)
class Manifests:
    """The manifests of a run by key, and the errors of those that cannot be read."""

    read: Mapping[str, RankManifest]
    unreadable: Mapping[str, str]

    def objects_of(self, checkpoint: StoredCheckpoint) -> dict[str, int] | None:
        """Sizes of the objects that a checkpoint refers to; None if not all of its manifests can be read."""
        found: dict[str, int] = {}
        for info in checkpoint.manifests.values():
            manifest = self.read.get(info.key)
            if manifest is None:
                return None
            for snapshot in manifest.snapshots:
                found.update((stored.key, stored.size) for stored in snapshot.objects)
        return found


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One checkpoint in a list.

    Attributes:
        size_bytes: size of all objects that a restore needs; None if not known.
        own_bytes: size of the objects that no other checkpoint refers to.
        age_s: time since its last manifest was written, by the store's clock.
    """

    job: str
    run: str
    iteration: int
    epoch: int
    epoch_start: int
    agreement: str
    state: str
    reason: str
    world_size: int
    missing: tuple[int, ...]
    size_bytes: int | None
    own_bytes: int | None
    modified_ns: int
    age_s: float
    pinned: bool


@dataclass(frozen=True, slots=True)
class RunShown:
    """The checkpoints of a run, newest first; ``unreadable`` maps manifests to their errors.

    Attributes:
        elastic: the elastic run that this incarnation belongs to; "" for an ordinary run.
        standing: the role of this incarnation in its run; "" for an ordinary run.
    """

    job: str
    run: str
    checkpoints: tuple[CheckpointRow, ...]
    unreadable: Mapping[str, str]
    elastic: str = ""
    standing: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotShown:
    """One snapshot of a rank.

    Attributes:
        uploaded_bytes: size of the objects that were uploaded for it.
        shared_bytes: bytes of its image that are in objects of other snapshots or ranks.
    """

    iteration: int
    phase: int
    image_bytes: int
    num_anchors: int
    num_operators: int
    uploaded_bytes: int
    shared_bytes: int
    objects: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RankShown:
    """One rank's part of a checkpoint; ``damage`` is the error of its manifest ("": it can be read)."""

    rank: int
    manifest: str
    damage: str = ""
    tool: str = ""
    window: int = 0
    snapshots: tuple[SnapshotShown, ...] = ()
    num_objects: int = 0
    image_bytes: int = 0
    uploaded_bytes: int = 0
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointShown:
    """A checkpoint with all its ranks; a restore loads snapshots ``start`` to its iteration (-1:
    not known).
    """

    checkpoint: CheckpointRow
    start: int
    replayed: int
    ranks: tuple[RankShown, ...]

    @property
    def damaged(self) -> bool:
        """Whether a manifest cannot be read."""
        return any(rank.damage for rank in self.ranks)


def runs_in(listing: Iterable[ObjectInfo]) -> list[tuple[str, str]]:
    """The jobs and runs in a listing; each incarnation of an elastic run is a run."""
    names = (parse(info.key) for info in listing)
    real = (name for name in names if name is not None and not isinstance(name, IncarnationName))
    return sorted({(name.job, name.run) for name in real})


def standing_of(incarnation: int, committed: Mapping[int, int]) -> str:
    """The role of an incarnation in its elastic run, in words.

    Args:
        committed: the number of committed checkpoints of each incarnation.
    """
    latest = max((number for number, count in committed.items() if count), default=None)
    name = f"incarnation {incarnation}"
    if latest is None:
        return f"{name}; no incarnation has a committed checkpoint yet"
    if incarnation > latest:
        return f"{name}; it has no committed checkpoint yet: a restore from storage uses incarnation {latest}"
    if incarnation == latest:
        return f"{name}: a restore from storage uses it"
    return f"{name}: incarnation {latest} replaced it; retention keeps it as a fallback"


def matching(found: Iterable[_Named], iteration: int, epoch: int | None, agreement: str) -> list[_Named]:
    """The names that end at this iteration, with this epoch (None: any) and this prefix of the agreement."""
    return [
        name
        for name in found
        if name.end == iteration and epoch in (None, name.epoch) and name.agreement.startswith(agreement)
    ]


def is_whole(checkpoint: StoredCheckpoint, manifests: Manifests, sizes: Mapping[str, int]) -> bool:
    """Whether every rank's manifest can be read, and every object in it is listed with its recorded size."""
    objects = manifests.objects_of(checkpoint)
    if objects is None or not checkpoint.complete:
        return False
    return all(sizes.get(key) == size for key, size in objects.items())


def rows_of(catalog: Catalog, manifests: Manifests | None, now_ns: int) -> tuple[CheckpointRow, ...]:
    """The checkpoints of a run, newest first; without sizes if ``manifests`` is None."""
    objects: dict[CheckpointId, dict[str, int] | None] = {}
    if manifests is not None:
        objects = {c.id: manifests.objects_of(c) for c in catalog.checkpoints}
    known = [found for found in objects.values() if found is not None]
    users = Counter(key for found in known for key in found)
    if len(known) < len(catalog.checkpoints):
        users.clear()  # the objects of one checkpoint alone are known only if all manifests are
    return tuple([_row_of(catalog, c, objects.get(c.id), users, now_ns) for c in catalog.checkpoints])


def _row_of(
    catalog: Catalog,
    checkpoint: StoredCheckpoint,
    objects: Mapping[str, int] | None,
    users: Mapping[str, int],
    now_ns: int,
) -> CheckpointRow:
    """The row of one checkpoint.

    Args:
        objects: the sizes of its objects; None if not known.
        users: the number of checkpoints that refer to an object; empty if not known.
    """
    name = checkpoint.id
    own = None
    if objects is not None and (users or not objects):
        own = sum(size for key, size in objects.items() if users[key] == 1)
    return CheckpointRow(
        job=catalog.job,
        run=catalog.run,
        iteration=name.end,
        epoch=name.epoch,
        epoch_start=name.epoch_start,
        agreement=name.agreement,
        state=str(checkpoint.state),
        reason=checkpoint.reason,
        world_size=checkpoint.world_size,
        missing=checkpoint.missing,
        size_bytes=None if objects is None else sum(objects.values()),
        own_bytes=own,
        modified_ns=checkpoint.modified_ns,
        age_s=max(0, now_ns - checkpoint.modified_ns) / 1e9,
        pinned=checkpoint.pinned,
    )


def show_checkpoint(
    row: CheckpointRow, checkpoint: StoredCheckpoint, manifests: Manifests
) -> CheckpointShown:
    """A checkpoint with the details of its manifests."""
    ranks = []
    start = -1
    for rank, info in sorted(checkpoint.manifests.items()):
        manifest = manifests.read.get(info.key)
        if manifest is None:
            ranks.append(RankShown(rank, info.key, manifests.unreadable.get(info.key, "not read")))
        else:
            start = manifest.start  # all ranks agree on it
            ranks.append(_rank(manifest, info.key))
    replayed = checkpoint.id.end - start if start >= 0 else -1
    return CheckpointShown(row, start, replayed, tuple(ranks))


def _rank(manifest: RankManifest, key: str) -> RankShown:
    snapshots = tuple([_snapshot(manifest, snapshot) for snapshot in manifest.snapshots])
    return RankShown(
        rank=manifest.rank,
        manifest=key,
        tool=manifest.tool,
        window=manifest.window,
        snapshots=snapshots,
        num_objects=len(manifest.object_keys),
        image_bytes=sum(snapshot.image_bytes for snapshot in snapshots),
        uploaded_bytes=sum(snapshot.uploaded_bytes for snapshot in snapshots),
        shared_bytes=sum(snapshot.shared_bytes for snapshot in snapshots),
    )


def _snapshot(manifest: RankManifest, snapshot: StoredSnapshot) -> SnapshotShown:
    own = _own(manifest.rank, snapshot)
    return SnapshotShown(
        iteration=snapshot.iteration,
        phase=snapshot.phase,
        image_bytes=snapshot.image_len,
        num_anchors=snapshot.anchors.bit_count(),
        num_operators=snapshot.num_operators,
        uploaded_bytes=sum(snapshot.objects[number].size for number in own),
        shared_bytes=sum(e.length for e in snapshot.extents if e.object not in own),
        objects={stored.key: stored.size for stored in snapshot.objects},
    )


def _own(rank: int, snapshot: StoredSnapshot) -> set[int]:
    """The numbers of the objects that were uploaded for this snapshot."""
    wanted = (snapshot.iteration, rank, snapshot.epoch, snapshot.sequence)
    names = [parse(stored.key) for stored in snapshot.objects]
    return {
        number
        for number, name in enumerate(names)
        if isinstance(name, ObjectName) and (name.iteration, name.rank, name.epoch, name.sequence) == wanted
    }
