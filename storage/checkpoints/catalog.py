"""The checkpoints of one run in a store and their states, built from a listing alone.

* *committed*: every rank's manifest exists. No process decides that, and no object has to be read.
* *incomplete*: some manifests are missing; a job may still be writing them, or its writers are gone.
* *stale*: it belongs to an abandoned history (``docs/replication.md`` section 2): a later epoch began at
  an iteration before its end. It is never restored, even if it is complete.

Pure: the listing is given, in any order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from ckptd.storage.checkpoints.names import (
    CheckpointId,
    IncarnationName,
    ManifestName,
    ObjectName,
    PinName,
    RunName,
    parse,
    run_prefix,
)
from ckptd.storage.stores.objects import ObjectInfo

_MOST_LISTED = 8


class CheckpointState(StrEnum):
    COMMITTED = "committed"
    INCOMPLETE = "incomplete"
    STALE = "stale"


class Epoch(NamedTuple):
    """A history: the iteration at which it left the one before, and since when the store shows it."""

    start: int
    since_ns: int | None


class ListedObject(NamedTuple):
    """An object of the run: its name and its entry in the listing."""

    name: ObjectName
    info: ObjectInfo


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint, as the listing shows it.

    Attributes:
        missing: the ranks without a manifest.
        modified_ns: when the last of its manifests was written, by the store's clock.
        stale_since_ns: since when the store shows the history that made it stale; None if it is not stale,
            or if only the caller knows of that history.
    """

    id: CheckpointId
    state: CheckpointState
    reason: str
    world_size: int
    manifests: Mapping[int, ObjectInfo]
    missing: tuple[int, ...]
    modified_ns: int
    stale_since_ns: int | None
    pinned: bool

    @property
    def complete(self) -> bool:
        """Whether every rank's manifest exists; a stale checkpoint may be complete, too."""
        return not self.missing


@dataclass(frozen=True, slots=True)
class Catalog:
    """The contents of a run; ``checkpoints`` are newest first.

    Attributes:
        objects: by (rank, iteration).
        epochs: the known histories by number; ``known_epochs`` are those that the caller passed.
        identity: ``run.json``, if it exists.
        foreign: keys below the run's prefix that ckptd did not write.
    """

    job: str
    run: str
    checkpoints: tuple[StoredCheckpoint, ...]
    objects: Mapping[tuple[int, int], Sequence[ListedObject]]
    epochs: Mapping[int, Epoch]
    pins: tuple[PinName, ...]
    identity: ObjectInfo | None
    foreign: tuple[str, ...]
    known_epochs: Mapping[int, int]

    @property
    def committed(self) -> tuple[StoredCheckpoint, ...]:
        """The checkpoints that can be restored, newest first."""
        return tuple([c for c in self.checkpoints if c.state is CheckpointState.COMMITTED])

    @property
    def newest(self) -> StoredCheckpoint | None:
        return next((c for c in self.checkpoints if c.state is CheckpointState.COMMITTED), None)

    @property
    def last_resort(self) -> tuple[StoredCheckpoint, ...]:
        """The complete checkpoints, newest first, that only histories without any complete one abandoned. If
        nothing is committed, and memory is lost, these histories are lost, too.
        """
        complete = [c for c in self.checkpoints if c.complete]
        begun = {c.id.epoch: c.id.epoch_start for c in complete}
        left = {c.id for c in complete if any(e > c.id.epoch and s < c.id.end for e, s in begun.items())}
        return tuple([c for c in complete if c.id not in left])

    @property
    def highest_epoch(self) -> int:
        """Of all checkpoints and objects, also of a history that ended before its first one; -1: none."""
        of_objects = (found.name.epoch for listed in self.objects.values() for found in listed)
        return max((*self.epochs, *of_objects), default=-1)

    def last_of(self, rank: int) -> StoredCheckpoint | None:
        """The newest checkpoint that is not stale and has this rank's manifest, committed or not."""
        for checkpoint in self.checkpoints:
            if checkpoint.state is not CheckpointState.STALE and rank in checkpoint.manifests:
                return checkpoint
        return None

    def leaving(self, epoch: int, iteration: int) -> Epoch | None:
        """The history (that shown for longest) that made a record of this epoch and iteration stale."""
        return _leaving(self.epochs, epoch, iteration)

    def only(self, ids: Collection[CheckpointId]) -> Catalog:
        """The catalog with only these checkpoints, and the histories that they show."""
        manifests = {c.id: {c.world_size: dict(c.manifests)} for c in self.checkpoints if c.id in ids}
        epochs = _epochs(manifests, self.known_epochs)
        return replace(self, checkpoints=_checkpoints(manifests, epochs, self.pins), epochs=epochs)


_ManifestsBySize = dict[int, dict[int, ObjectInfo]]  # of one checkpoint: manifests by world size and rank


class _Found:
    """The names in a listing, sorted by kind."""

    def __init__(self) -> None:
        self.manifests: dict[CheckpointId, _ManifestsBySize] = {}
        self.objects: dict[tuple[int, int], list[ListedObject]] = {}
        self.pins: list[PinName] = []
        self.identity: ObjectInfo | None = None
        self.foreign: list[str] = []

    def add(self, info: ObjectInfo) -> None:
        name = parse(info.key)
        if isinstance(name, ManifestName):
            by_size = self.manifests.setdefault(name.checkpoint, {})
            by_size.setdefault(name.world_size, {})[name.rank] = info
        elif isinstance(name, ObjectName):
            listed = ListedObject(name, info)
            self.objects.setdefault((name.rank, name.iteration), []).append(listed)
        elif isinstance(name, PinName):
            self.pins.append(name)
        elif isinstance(name, RunName):
            self.identity = info
        elif not isinstance(name, IncarnationName):  # it marks another run, and belongs to no checkpoint
            self.foreign.append(info.key)


def build_catalog(
    listing: Iterable[ObjectInfo], job: str, run: str, *, known_epochs: Mapping[int, int] | None = None
) -> Catalog:
    """Build the catalog of a run from ``listing``; ignores the keys of other runs.

    Args:
        known_epochs: histories that the caller knows: epoch_start by epoch.
    """
    return _catalog(_found_in(listing, job, run), job, run, dict(known_epochs or {}))


def _found_in(listing: Iterable[ObjectInfo], job: str, run: str) -> _Found:
    prefix = run_prefix(job, run)
    found = _Found()
    for info in listing:
        if info.key.startswith(prefix):
            found.add(info)
    return found


def _catalog(found: _Found, job: str, run: str, known: Mapping[int, int]) -> Catalog:
    epochs = _epochs(found.manifests, known)
    return Catalog(
        job,
        run,
        _checkpoints(found.manifests, epochs, found.pins),
        found.objects,
        epochs,
        tuple(sorted(found.pins)),
        found.identity,
        tuple(sorted(found.foreign)),
        known,
    )


def _checkpoints(
    manifests: Mapping[CheckpointId, _ManifestsBySize],
    epochs: Mapping[int, Epoch],
    pins: Iterable[PinName],
) -> tuple[StoredCheckpoint, ...]:
    """The checkpoints, newest first; of two with the same end, the one written last comes first."""
    pinned = {(pin.end, pin.epoch, pin.agreement) for pin in pins}
    found = [_checkpoint(name, by_size, epochs, pinned) for name, by_size in manifests.items()]
    found.sort(key=lambda c: (c.id.end, c.id.epoch, c.modified_ns, c.id), reverse=True)
    return tuple(found)


def _epochs(manifests: Mapping[CheckpointId, _ManifestsBySize], known: Mapping[int, int]) -> dict[int, Epoch]:
    """All known histories; if the checkpoints of one disagree about its start, the earliest counts."""
    epochs = {number: Epoch(start, None) for number, start in known.items()}
    for checkpoint, by_size in manifests.items():
        since = min([i.modified_ns for infos in by_size.values() for i in infos.values()])
        epoch = epochs.get(checkpoint.epoch)
        if epoch is not None:
            since = since if epoch.since_ns is None else min(since, epoch.since_ns)
        start = checkpoint.epoch_start if epoch is None else min(checkpoint.epoch_start, epoch.start)
        epochs[checkpoint.epoch] = Epoch(start, since)
    return epochs


def _leaving(epochs: Mapping[int, Epoch], epoch: int, iteration: int) -> Epoch | None:
    left = [e for number, e in epochs.items() if number > epoch and e.start < iteration]
    shown = [e for e in left if e.since_ns is not None]
    return min(shown or left, key=lambda e: e.since_ns or 0, default=None)


def _checkpoint(
    checkpoint: CheckpointId,
    by_size: _ManifestsBySize,
    epochs: Mapping[int, Epoch],
    pinned: set[tuple[int, int, str]],
) -> StoredCheckpoint:
    world_size = _counting_world_size(by_size)
    manifests = by_size[world_size]
    missing: tuple[int, ...] = ()
    if len(manifests) < world_size:
        missing = tuple([rank for rank in range(world_size) if rank not in manifests])
    left = _leaving(epochs, checkpoint.epoch, checkpoint.end)
    if left is not None:
        state = CheckpointState.STALE
        reason = f"a later history began at iteration {left.start}, before {checkpoint.end}"
    elif missing:
        state = CheckpointState.INCOMPLETE
        reason = f"{len(missing)} of {world_size} ranks are missing: {_listed(missing)}"
    else:
        state = CheckpointState.COMMITTED
        reason = f"the manifests of all {world_size} ranks exist"
    return StoredCheckpoint(
        checkpoint,
        state,
        reason,
        world_size,
        manifests,
        missing,
        max([info.modified_ns for info in manifests.values()]),
        None if left is None else left.since_ns,
        (checkpoint.end, checkpoint.epoch, checkpoint.agreement) in pinned,
    )


def _counting_world_size(by_size: _ManifestsBySize) -> int:
    """The world size whose manifests count.

    The agreement covers the world size, so there is only one, unless somebody copied a manifest into
    the wrong folder. Then the world size with the largest part of its manifests counts.
    """
    return max(by_size, key=lambda size: (len(by_size[size]) / size, size))


def _listed(ranks: tuple[int, ...]) -> str:
    more = f" and {len(ranks) - _MOST_LISTED} more" if len(ranks) > _MOST_LISTED else ""
    return ", ".join(map(str, ranks[:_MOST_LISTED])) + more


@dataclass(frozen=True, slots=True)
class Views:
    """One listing of a run as every process sees it (``shown``), and as the writer sees it (``own``).

    A garbage collector sees only the store; a writer also knows its own history, which the store may not
    show yet. An object that a writer refers to must stay in *both* views: if a newer checkpoint has
    replaced it in the store's view, a collector may be deleting it now (docs/format.md, section 7).
    """

    shown: Catalog
    own: Catalog

    def base_of(self, rank: int) -> StoredCheckpoint | None:
        """The checkpoint whose objects this rank need not upload again; None if none is sure to stay."""
        last = self.own.last_of(rank)
        return last if last is not None and last.id in self._staying() else None

    def committed_base(self) -> StoredCheckpoint | None:
        """The newest checkpoint of all ranks, whose images a new one may list; None if it may be deleted."""
        newest = self.own.newest
        return newest if newest is not None and newest.id in self._staying() else None

    def refusal(self, checkpoint: CheckpointId, relied: Collection[str]) -> str:
        """The reason why a rank must not write its manifest of ``checkpoint``; "" if it may.

        Args:
            relied: the keys of the manifests whose objects the rank did not upload again.
        """
        left = self.own.leaving(checkpoint.epoch, checkpoint.end)
        if left is not None:
            return f"a later history began at iteration {left.start}"
        newest = self.own.newest
        if newest is not None and newest.id.end >= checkpoint.end and newest.id != checkpoint:
            return f"{newest.id} is committed"
        staying = self._staying()
        sure = {info.key for c in self.own.checkpoints if c.id in staying for info in c.manifests.values()}
        lost = sorted(set(relied) - sure)
        return f"objects that it refers to may be deleted: {lost[0]} was replaced" if lost else ""

    def _staying(self) -> set[CheckpointId]:
        """The checkpoints that no collector may delete: stale in neither view, and replaced in no view.

        A collector may still act on an older listing, in which a stale checkpoint was not stale yet.
        Therefore every complete checkpoint counts as a replacement, stale or not, unless each view that
        shows the one shows the other as stale.
        """
        complete = [c.id for c in self.shown.checkpoints if c.complete]
        stale = {
            c.id for c in (*self.shown.checkpoints, *self.own.checkpoints) if c.state is CheckpointState.STALE
        }
        return {
            c.id
            for c in self.own.checkpoints
            if c.id not in stale and not any(_may_replace(other, c.id) for other in complete)
        }


def _may_replace(newer: CheckpointId, older: CheckpointId) -> bool:
    abandoned = newer.epoch < older.epoch and older.epoch_start < newer.end
    return newer.end > older.end and not abandoned


def see(listing: Iterable[ObjectInfo], job: str, run: str, *, known_epochs: Mapping[int, int]) -> Views:
    """Both views of one listing; ``known_epochs`` as in `build_catalog`, the writer's own among them."""
    found = _found_in(listing, job, run)  # once: a listing of a run has thousands of names
    return Views(_catalog(found, job, run, {}), _catalog(found, job, run, dict(known_epochs)))
