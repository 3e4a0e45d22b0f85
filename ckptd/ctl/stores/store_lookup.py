"""Runs, checkpoints and manifests in a store, as a user of `ckptctl` names them and sees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from ckptd.core.slots.segment_format import decode_descriptor
from ckptd.core.snapshot_policy import PolicyKind
from ckptd.ctl.command import EXIT_REFUSED, CommandError, near
from ckptd.ctl.stores.store_access import OpenedStore
from ckptd.errors import SegmentError
from ckptd.holdings import policy_of
from ckptd.storage.checkpoints.catalog import (
    Catalog,
    CheckpointState,
    StoredCheckpoint,
    build_catalog,
)
from ckptd.storage.checkpoints.manifest import RankManifest, StoredSnapshot
from ckptd.storage.checkpoints.names import (
    CheckpointId,
    IncarnationName,
    ObjectName,
    PinName,
    incarnation_of_run,
    incarnations_prefix,
    parse,
    run_of_incarnation,
)
from ckptd.storage.checkpoints.reader import read_catalog, read_manifest
from ckptd.storage.checkpoints.retention import References
from ckptd.storage.checkpoints.sealed_json import ManifestError
from ckptd.storage.stores.objects import ObjectInfo, ObjectMissing, TooLarge
from ckptd.units import first_of

_Named = TypeVar("_Named", CheckpointId, PinName)
_MOST_LISTED = 8


# -- runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Family:
    """Runs that are collected together: one ordinary run, or all incarnations of an elastic one.

    Args:
        chosen: the runs that the arguments select; incarnations with the latest first.
        elastic: the name of the elastic run; "" for an ordinary one.
        incarnations: the run of each incarnation by number, the latest first; empty for an ordinary run.
    """

    job: str
    chosen: tuple[str, ...]
    elastic: str = ""
    incarnations: Mapping[int, str] = field(default_factory=dict)

    @property
    def runs(self) -> tuple[str, ...]:
        """All runs of the family: a plan needs the catalogs of all."""
        return tuple(self.incarnations.values()) or self.chosen


def families_of(opened: OpenedStore, job: str | None, run: str | None) -> list[Family]:
    """The families of one run, of all runs of a job, or of all runs.

    The name of an elastic run selects all its incarnations; the name of an incarnation only itself.

    Raises:
        CommandError: the store contains nothing of the named job or run.
    """
    if job is not None and run is not None and (incarnations := _incarnations_of(opened, job, run)):
        return [_elastic(job, run, incarnations)]
    found: dict[tuple[str, str], Family] = {}
    for catalog in _catalogs_of(opened, job, run):
        named = incarnation_of_run(catalog.run)
        incarnations = [] if named is None else _incarnations_of(opened, catalog.job, named[0])
        # An ordinary run may have the name of an incarnation.
        if named is None or named[1] not in incarnations:
            found[catalog.job, catalog.run] = Family(catalog.job, (catalog.run,))
        else:
            only = "" if run is None else catalog.run
            found[catalog.job, named[0]] = _elastic(catalog.job, named[0], incarnations, only)
    return list(found.values())


def _elastic(job: str, run: str, incarnations: Iterable[int], only: str = "") -> Family:
    runs = {number: run_of_incarnation(run, number) for number in incarnations}
    return Family(job, (only,) if only else tuple(runs.values()), run, runs)


def _incarnations_of(opened: OpenedStore, job: str, run: str) -> list[int]:
    """The incarnations of an elastic run, the latest first; empty for an ordinary run."""
    names = [parse(info.key) for info in opened.store.list(incarnations_prefix(job, run))]
    return sorted((n.number for n in names if isinstance(n, IncarnationName)), reverse=True)


def _catalogs_of(opened: OpenedStore, job: str | None, run: str | None) -> list[Catalog]:
    """The catalogs of one run, of all runs of a job, or of all."""
    if job is not None and run is not None:
        return [find_catalog(opened, job, run)]
    by_run: dict[tuple[str, str], list[ObjectInfo]] = {}
    for info in opened.store.list("" if job is None else f"{job}/"):
        first, _, rest = info.key.partition("/")
        by_run.setdefault((first, rest.partition("/")[0]), []).append(info)
    known = runs_in(info for infos in by_run.values() for info in infos)
    if job is not None and not known:
        raise _nothing(opened, job)
    return [build_catalog(by_run[names], *names) for names in known]


def find_catalog(opened: OpenedStore, job: str, run: str) -> Catalog:
    """The catalog of a run.

    Raises:
        CommandError: the store contains nothing of it; the message lists the known runs.
    """
    catalog = read_catalog(opened.store, job, run)
    if catalog.checkpoints or catalog.objects or catalog.identity or catalog.pins:
        return catalog
    raise _nothing(opened, job, run)


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


def _nothing(opened: OpenedStore, job: str, run: str | None = None) -> CommandError:
    known = runs_in(opened.store.list(""))
    listed = first_of(map("/".join, known), _MOST_LISTED) or "no run of any job"
    if run is None:
        what, like = f"job {job}", near(job, (each[0] for each in known))
    else:
        what, like = f"{job}/{run}", near(f"{job}/{run}", ("/".join(each) for each in known))
    text = f"nothing is stored of {what} in {opened.place.shown}; it contains {listed}{like}"
    return CommandError(text, EXIT_REFUSED)


# -- manifests ------------------------------------------------------------------------------------


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


def read_manifests_of(
    opened: OpenedStore,
    checkpoints: Iterable[StoredCheckpoint],
    known: Mapping[str, RankManifest] | None = None,
) -> Manifests:
    """Read the manifests, several at a time; those in ``known`` (by key) are not read again: they
    never change.
    """
    there = known or {}

    def read(key: str) -> RankManifest | str:
        try:
            return there.get(key) or read_manifest(opened.store, key)
        except (ManifestError, ObjectMissing, TooLarge) as error:
            return str(error)

    keys = [info.key for c in checkpoints for _, info in sorted(c.manifests.items())]
    manifests: dict[str, RankManifest] = {}
    unreadable: dict[str, str] = {}
    for key, found in zip(keys, opened.map(read, keys), strict=True):
        if isinstance(found, RankManifest):
            manifests[key] = found
        else:
            unreadable[key] = found
    return Manifests(manifests, unreadable)


def references_of(manifests: Manifests) -> dict[str, References]:
    """The references of the manifests that were read; retention needs them."""
    return {key: References.of(manifest) for key, manifest in manifests.read.items()}


def object_sizes(catalog: Catalog) -> dict[str, int]:
    """The size of every object in the listing."""
    return {o.info.key: o.info.size for listed in catalog.objects.values() for o in listed}


def whole_ones(catalog: Catalog, manifests: Manifests) -> set[CheckpointId]:
    """The complete checkpoints (also stale ones) whose manifests can all be read, and whose objects
    are all listed with their recorded sizes.
    """
    sizes = object_sizes(catalog)
    found = set()
    for checkpoint in catalog.checkpoints:
        objects = manifests.objects_of(checkpoint) if checkpoint.complete else None
        if objects is not None and all(sizes.get(key) == size for key, size in objects.items()):
            found.add(checkpoint.id)
    return found


# -- choice of one checkpoint ---------------------------------------------------------------------


def choose_checkpoint(
    catalog: Catalog,
    iteration: int,
    epoch: int | None,
    agreement: str,
    *,
    prefer_committed: bool,
) -> StoredCheckpoint:
    """The checkpoint that ends at an iteration.

    Args:
        prefer_committed: choose the committed one of several.

    Raises:
        CommandError: none matches, or several do.
    """
    wanted = _matching([c.id for c in catalog.checkpoints], iteration, epoch, agreement)
    found = [c for c in catalog.checkpoints if c.id in wanted]
    if len(found) > 1 and prefer_committed:
        committed = [c for c in found if c.state is CheckpointState.COMMITTED]
        found = committed if len(committed) == 1 else found
    if len(found) == 1:
        return found[0]
    name = f"{catalog.job}/{catalog.run}"
    if not found:
        ends = first_of((c.id.end for c in catalog.checkpoints), _MOST_LISTED) or "none"
        raise CommandError(
            f"{name} has no such checkpoint of iteration {iteration}; its checkpoints end at {ends}",
            EXIT_REFUSED,
        )
    raise _several(name, [c.id for c in found])


def choose_pin(catalog: Catalog, iteration: int, epoch: int | None, agreement: str) -> PinName | None:
    """The pin of a checkpoint, or None; a pin may exist without its checkpoint.

    Raises:
        CommandError: several pins match.
    """
    found = _matching(catalog.pins, iteration, epoch, agreement)
    if len(found) > 1:
        raise _several(f"{catalog.job}/{catalog.run}", found)
    return found[0] if found else None


def _matching(found: Iterable[_Named], iteration: int, epoch: int | None, agreement: str) -> list[_Named]:
    """The names that end at this iteration, with this epoch (None: any) and this prefix of the agreement."""
    return [
        name
        for name in found
        if name.end == iteration and epoch in (None, name.epoch) and name.agreement.startswith(agreement)
    ]


def _several(name: str, found: Iterable[CheckpointId | PinName]) -> CommandError:
    options = (f"--epoch {each.epoch} --agreement {each.agreement[:8]}" for each in found)
    choices = first_of(options, _MOST_LISTED)
    return CommandError(f"{name} has several checkpoints of that iteration; pass one of: {choices}")


# -- answers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NamedCheckpoint:
    """The name of a checkpoint in an answer."""

    job: str
    run: str
    iteration: int
    epoch: int
    agreement: str

    def __str__(self) -> str:
        """The name in a text."""
        return f"{self.job}/{self.run} iteration {self.iteration} (epoch {self.epoch})"


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
    not known). Of a ``partial`` one it replays nothing, and takes experts from ``start`` on.
    """

    checkpoint: CheckpointRow
    start: int
    replayed: int
    ranks: tuple[RankShown, ...]
    partial: bool = False

    @property
    def damaged(self) -> bool:
        """True if a manifest cannot be read."""
        return any(rank.damage for rank in self.ranks)


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
    """The row of one checkpoint; ``objects`` None, ``users`` empty: they are not known."""
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
    start, partial = -1, False
    for rank, info in sorted(checkpoint.manifests.items()):
        manifest = manifests.read.get(info.key)
        if manifest is None:
            ranks.append(RankShown(rank, info.key, manifests.unreadable.get(info.key, "not read")))
        else:
            start, partial = manifest.start, _is_partial(manifest)  # all ranks agree on it
            ranks.append(_rank_shown(manifest, info.key))
    replayed = checkpoint.id.end - start if start >= 0 else -1
    return CheckpointShown(row, start, 0 if partial else replayed, tuple(ranks), partial)


def _is_partial(manifest: RankManifest) -> bool:
    """Whether nothing is replayed: each expert is that of the newest image that has it."""
    try:
        return policy_of(decode_descriptor(manifest.descriptor)) == PolicyKind.PARTIAL
    except SegmentError:
        return False  # another version wrote it


def _rank_shown(manifest: RankManifest, key: str) -> RankShown:
    snapshots = tuple([_snapshot_shown(manifest.rank, snapshot) for snapshot in manifest.snapshots])
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


def _snapshot_shown(rank: int, snapshot: StoredSnapshot) -> SnapshotShown:
    own = _own_objects(rank, snapshot)
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


def _own_objects(rank: int, snapshot: StoredSnapshot) -> set[int]:
    """The numbers of the objects that were uploaded for this snapshot."""
    wanted = (snapshot.iteration, rank, snapshot.epoch, snapshot.sequence)
    names = [parse(stored.key) for stored in snapshot.objects]
    return {
        number
        for number, name in enumerate(names)
        if isinstance(name, ObjectName) and (name.iteration, name.rank, name.epoch, name.sequence) == wanted
    }
