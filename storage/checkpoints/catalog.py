"""What lies in a store of one run, from a listing alone: which checkpoints are there, and in which state.

* *committed*: a manifest of every rank is there. Nobody decides that, and nothing has to be read for it.
* *incomplete*: some are missing; it may yet be written, or its writers are gone.
* *stale*: it belongs to an abandoned history (``docs/replication.md`` section 2): a later epoch began at
  an iteration before its end. It is never restored, whatever it holds.

Pure: the listing is given, in any order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from ckptd.storage.checkpoints.names import (
    CheckpointId,
    ManifestName,
    ObjectName,
    PinName,
    RunName,
    WorldName,
    parse,
    run_prefix,
)
from ckptd.storage.stores.objects import ObjectInfo

__all__ = [
    "Catalog",
    "CheckpointState",
    "Epoch",
    "ListedObject",
    "StoredCheckpoint",
    "build_catalog",
]

_TOLD = 8


class CheckpointState(StrEnum):
    """See the module."""

    COMMITTED = "committed"
    INCOMPLETE = "incomplete"
    STALE = "stale"


class Epoch(NamedTuple):
    """A history: at which iteration it left the one before, and since when the store shows it."""

    start: int
    since_ns: int | None


class ListedObject(NamedTuple):
    """An object of the run, as named and as listed."""

    name: ObjectName
    info: ObjectInfo


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint as far as a listing tells.

    Attributes:
        manifests: by rank.
        missing: the ranks whose manifest is not there.
        modified_ns: when the last of its manifests was written, by the store's clock.
        stale_since_ns: since when the store shows the history that made it stale; None if it is not
            stale, or if only the caller knows of that history.
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
        """Whether every rank's manifest is there; a stale one may be complete, too."""
        return not self.missing


@dataclass(frozen=True, slots=True)
class Catalog:
    """What there is of a run; ``checkpoints`` are newest first.

    Attributes:
        identity: ``run.json``, if it is there.
        objects: by (rank, iteration).
        epochs: the known histories by number.
        known_epochs: those of which the caller knew from elsewhere.
        foreign: keys below the run's prefix that are none of ours; they are left alone.
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
        """What can be restored, newest first."""
        return tuple([c for c in self.checkpoints if c.state is CheckpointState.COMMITTED])

    @property
    def newest(self) -> StoredCheckpoint | None:
        """The newest committed one."""
        return next((c for c in self.checkpoints if c.state is CheckpointState.COMMITTED), None)

    def last_of(self, rank: int) -> StoredCheckpoint | None:
        """The newest one that is not stale and has this rank's manifest, committed or not."""
        for checkpoint in self.checkpoints:
            if checkpoint.state is not CheckpointState.STALE and rank in checkpoint.manifests:
                return checkpoint
        return None

    def leaving(self, epoch: int, iteration: int) -> Epoch | None:
        """The history that made a record of this epoch and iteration stale; None if none did.

        Of several, the one that the store has shown for longest.
        """
        return _leaving(self.epochs, epoch, iteration)

    def only(self, ids: Collection[CheckpointId]) -> Catalog:
        """The same with these checkpoints alone; no other one tells of a history that makes one of
        them stale.
        """
        manifests = {
            c.id: {c.world_size: dict(c.manifests)} for c in self.checkpoints if c.id in ids
        }
        epochs = _epochs(manifests, self.known_epochs)
        return replace(self, checkpoints=_checkpoints(manifests, epochs, self.pins), epochs=epochs)


_Worlds = dict[int, dict[int, ObjectInfo]]  # of one checkpoint: manifests by world size and rank


class _Found:
    """What a listing shows, sorted by kind."""

    def __init__(self) -> None:
        self.manifests: dict[CheckpointId, _Worlds] = {}
        self.objects: dict[tuple[int, int], list[ListedObject]] = {}
        self.pins: list[PinName] = []
        self.identity: ObjectInfo | None = None
        self.foreign: list[str] = []

    def add(self, info: ObjectInfo) -> None:
        name = parse(info.key)
        if isinstance(name, ManifestName):
            worlds = self.manifests.setdefault(name.checkpoint, {})
            worlds.setdefault(name.world_size, {})[name.rank] = info
        elif isinstance(name, ObjectName):
            listed = ListedObject(name, info)
            self.objects.setdefault((name.rank, name.iteration), []).append(listed)
        elif isinstance(name, PinName):
            self.pins.append(name)
        elif isinstance(name, RunName):
            self.identity = info
        elif not isinstance(name, WorldName):  # of other runs' names, and of no checkpoint
            self.foreign.append(info.key)


def build_catalog(
    listing: Iterable[ObjectInfo],
    job: str,
    run: str,
    *,
    known_epochs: Mapping[int, int] | None = None,
) -> Catalog:
    """What ``listing`` shows of a run; other runs' keys are passed over.

    Args:
        known_epochs: epoch_start by epoch, of which the caller knows from elsewhere.
    Raises:
        ValueError: ``job`` or ``run`` is no name.
    """
    prefix = run_prefix(job, run)
    found = _Found()
    for info in listing:
        if info.key.startswith(prefix):
            found.add(info)
    known = dict(known_epochs or {})
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
    manifests: Mapping[CheckpointId, _Worlds], epochs: Mapping[int, Epoch], pins: Iterable[PinName]
) -> tuple[StoredCheckpoint, ...]:
    """Newest first; of two that end alike, the one that was written last."""
    pinned = {(pin.end, pin.epoch, pin.agreement) for pin in pins}
    found = [_checkpoint(name, worlds, epochs, pinned) for name, worlds in manifests.items()]
    found.sort(key=lambda c: (c.id.end, c.id.epoch, c.modified_ns, c.id), reverse=True)
    return tuple(found)


def _epochs(
    manifests: Mapping[CheckpointId, _Worlds], known: Mapping[int, int]
) -> dict[int, Epoch]:
    """Every history that is known; where its beginning is told differently, the earliest counts."""
    epochs = {number: Epoch(start, None) for number, start in known.items()}
    for checkpoint, worlds in manifests.items():
        since = min([i.modified_ns for infos in worlds.values() for i in infos.values()])
        told = epochs.get(checkpoint.epoch)
        if told is not None:
            since = since if told.since_ns is None else min(since, told.since_ns)
        start = checkpoint.epoch_start if told is None else min(checkpoint.epoch_start, told.start)
        epochs[checkpoint.epoch] = Epoch(start, since)
    return epochs


def _leaving(epochs: Mapping[int, Epoch], epoch: int, iteration: int) -> Epoch | None:
    left = [e for number, e in epochs.items() if number > epoch and e.start < iteration]
    shown = [e for e in left if e.since_ns is not None]
    return min(shown or left, key=lambda e: e.since_ns or 0, default=None)


def _checkpoint(
    checkpoint: CheckpointId,
    worlds: _Worlds,
    epochs: Mapping[int, Epoch],
    pinned: set[tuple[int, int, str]],
) -> StoredCheckpoint:
    world_size = _one_world(worlds)
    manifests = worlds[world_size]
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
        reason = f"all {world_size} ranks are there"
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


def _one_world(worlds: _Worlds) -> int:
    """The size of the world whose manifests count.

    The agreement is about the world size, too, so there is only one, unless somebody copied a file to
    where it does not belong. Then the one that is nearest to being complete counts.
    """
    return max(worlds, key=lambda world: (len(worlds[world]) / world, world))


def _listed(ranks: tuple[int, ...]) -> str:
    more = f" and {len(ranks) - _TOLD} more" if len(ranks) > _TOLD else ""
    return ", ".join(map(str, ranks[:_TOLD])) + more
