"""Finding in a store what a user of `ckptctl` names, and reading what there is of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckptd.ctl.store.store_access import OpenedStore, StoreProblem
from ckptd.ctl.store.store_views import Manifests, is_whole, matching, runs_in
from ckptd.storage.checkpoints.catalog import (
    Catalog,
    CheckpointState,
    StoredCheckpoint,
    build_catalog,
)
from ckptd.storage.checkpoints.manifest import ManifestError, RankManifest
from ckptd.storage.checkpoints.names import (
    CheckpointId,
    PinName,
    WorldName,
    parse,
    run_of_world,
    world_of_run,
    worlds_prefix,
)
from ckptd.storage.checkpoints.reader import read_catalog, read_manifest
from ckptd.storage.checkpoints.retention import References
from ckptd.storage.stores.objects import ObjectInfo, ObjectMissing, TooLarge

__all__ = [
    "Family",
    "catalogs_of",
    "choose_checkpoint",
    "choose_pin",
    "families_of",
    "find_catalog",
    "object_sizes",
    "read_manifests_of",
    "references_of",
    "whole_ones",
]

_TOLD = 8


def find_catalog(opened: OpenedStore, job: str, run: str) -> Catalog:
    """What is stored of a run.

    Raises:
        StoreProblem: nothing is; says of which runs something is.
    """
    catalog = read_catalog(opened.store, job, run)
    if catalog.checkpoints or catalog.objects or catalog.identity or catalog.pins:
        return catalog
    raise _nothing(opened, f"of {job}/{run}")


def catalogs_of(opened: OpenedStore, job: str | None, run: str | None) -> list[Catalog]:
    """What is stored of one run, of all runs of a job, or of all; of an elastic run, of all its
    worlds, the latest first.

    Raises:
        StoreProblem: a job or run is named of which nothing is stored.
    """
    if job is not None and run is not None:
        worlds = _worlds_of(opened, job, run)
        if not worlds:
            return [find_catalog(opened, job, run)]
        return [read_catalog(opened.store, job, run_of_world(run, world)) for world in worlds]
    by_run: dict[tuple[str, str], list[ObjectInfo]] = {}
    for info in opened.store.list("" if job is None else f"{job}/"):
        first, _, rest = info.key.partition("/")
        by_run.setdefault((first, rest.partition("/")[0]), []).append(info)
    known = runs_in(info for infos in by_run.values() for info in infos)
    if job is not None and not known:
        raise _nothing(opened, f"of job {job}")
    return [build_catalog(by_run[names], *names) for names in known]


@dataclass(frozen=True, slots=True)
class Family:
    """Runs that are looked at together: one ordinary run, or all worlds of an elastic one.

    Args:
        chosen: the runs of it that were asked for; of worlds the latest first.
        elastic: the name of the elastic run; "" for an ordinary one.
        worlds: the run of each world by number, the latest first; empty for an ordinary run.
    """

    job: str
    chosen: tuple[str, ...]
    elastic: str = ""
    worlds: Mapping[int, str] = field(default_factory=dict)

    @property
    def runs(self) -> tuple[str, ...]:
        """All that must be known to tell what goes."""
        return tuple(self.worlds.values()) or self.chosen


def families_of(opened: OpenedStore, job: str | None, run: str | None) -> list[Family]:
    """What is asked for, worlds of one elastic run together: one run, all runs of a job, or all.

    The name of an elastic run means all of its worlds; a world that is named itself is chosen alone.

    Raises:
        StoreProblem: a job or run is named of which nothing is stored.
    """
    if job is not None and run is not None and (worlds := _worlds_of(opened, job, run)):
        return [_elastic(job, run, worlds)]
    found: dict[tuple[str, str], Family] = {}
    for catalog in catalogs_of(opened, job, run):
        named = world_of_run(catalog.run)
        worlds = [] if named is None else _worlds_of(opened, catalog.job, named[0])
        if named is None or named[1] not in worlds:  # it may be called like a world, and be none
            found[catalog.job, catalog.run] = Family(catalog.job, (catalog.run,))
        elif run is not None:
            found[catalog.job, named[0]] = _elastic(catalog.job, named[0], worlds, catalog.run)
        else:
            found[catalog.job, named[0]] = _elastic(catalog.job, named[0], worlds)
    return list(found.values())


def _elastic(job: str, run: str, worlds: Iterable[int], only: str = "") -> Family:
    runs = {number: run_of_world(run, number) for number in worlds}
    return Family(job, (only,) if only else tuple(runs.values()), run, runs)


def _worlds_of(opened: OpenedStore, job: str, run: str) -> list[int]:
    """The worlds of an elastic run, the latest first; none if it is no elastic run."""
    names = [parse(info.key) for info in opened.store.list(worlds_prefix(job, run))]
    return sorted((n.world for n in names if isinstance(n, WorldName)), reverse=True)


def read_manifests_of(
    opened: OpenedStore,
    checkpoints: Iterable[StoredCheckpoint],
    known: Mapping[str, RankManifest] | None = None,
) -> Manifests:
    """Their manifests, several at a time; ``known`` ones, by key, are not read again: they never change."""
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
    """What retention must know of those that were read."""
    return {key: References.of(manifest) for key, manifest in manifests.read.items()}


def object_sizes(catalog: Catalog) -> dict[str, int]:
    """Of every object, as listed."""
    return {o.info.key: o.info.size for listed in catalog.objects.values() for o in listed}


def whole_ones(catalog: Catalog, manifests: Manifests) -> set[CheckpointId]:
    """The complete checkpoints all of whose objects are listed, as long as they were; also stale ones."""
    sizes = object_sizes(catalog)
    return {c.id for c in catalog.checkpoints if c.complete and is_whole(c, manifests, sizes)}


def choose_checkpoint(
    catalog: Catalog,
    iteration: int,
    epoch: int | None,
    agreement: str,
    *,
    prefer_committed: bool,
) -> StoredCheckpoint:
    """The one that ends at an iteration.

    Args:
        prefer_committed: of several, the one that is committed is meant.
    Raises:
        StoreProblem: there is none, or several.
    """
    wanted = matching([c.id for c in catalog.checkpoints], iteration, epoch, agreement)
    found = [c for c in catalog.checkpoints if c.id in wanted]
    if len(found) > 1 and prefer_committed:
        committed = [c for c in found if c.state is CheckpointState.COMMITTED]
        found = committed if len(committed) == 1 else found
    if len(found) == 1:
        return found[0]
    name = f"{catalog.job}/{catalog.run}"
    if not found:
        ends = _told(str(c.id.end) for c in catalog.checkpoints) or "none"
        raise StoreProblem(f"{name} has no such checkpoint of iteration {iteration}; it has {ends}")
    raise _several(name, [c.id for c in found])


def choose_pin(
    catalog: Catalog, iteration: int, epoch: int | None, agreement: str
) -> PinName | None:
    """The pin of a checkpoint, which may be there without it; None if there is none.

    Raises:
        StoreProblem: there are several.
    """
    found = matching(catalog.pins, iteration, epoch, agreement)
    if len(found) > 1:
        raise _several(f"{catalog.job}/{catalog.run}", found)
    return found[0] if found else None


def _several(name: str, found: Iterable[CheckpointId | PinName]) -> StoreProblem:
    told = _told(f"--epoch {each.epoch} --agreement {each.agreement[:8]}" for each in found)
    return StoreProblem(f"{name} has several of that iteration; pass one of: {told}")


def _nothing(opened: OpenedStore, what: str) -> StoreProblem:
    known = _told(f"{job}/{run}" for job, run in runs_in(opened.store.list("")))
    there = f"there is {known}" if known else "there is nothing of any job"
    return StoreProblem(f"nothing is stored {what} in {opened.place.shown}; {there}")


def _told(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - _TOLD} more" if len(found) > _TOLD else ""
    return ", ".join(found[:_TOLD]) + more
