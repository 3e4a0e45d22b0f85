"""Lookup of the runs and checkpoints that a user of `ckptctl` names, and reading of their manifests."""

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
    IncarnationName,
    PinName,
    incarnation_of_run,
    incarnations_prefix,
    parse,
    run_of_incarnation,
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

_MOST_LISTED = 8


def find_catalog(opened: OpenedStore, job: str, run: str) -> Catalog:
    """The catalog of a run.

    Raises:
        StoreProblem: the store contains nothing of it; the message lists the known runs.
    """
    catalog = read_catalog(opened.store, job, run)
    if catalog.checkpoints or catalog.objects or catalog.identity or catalog.pins:
        return catalog
    raise _nothing(opened, f"of {job}/{run}")


def catalogs_of(opened: OpenedStore, job: str | None, run: str | None) -> list[Catalog]:
    """The catalogs of one run, of all runs of a job, or of all; an elastic run stands for all its
    incarnations, the latest first.

    Raises:
        StoreProblem: the store contains nothing of the named job or run.
    """
    if job is not None and run is not None:
        incarnations = _incarnations_of(opened, job, run)
        if not incarnations:
            return [find_catalog(opened, job, run)]
        return [
            read_catalog(opened.store, job, run_of_incarnation(run, incarnation))
            for incarnation in incarnations
        ]
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
        StoreProblem: the store contains nothing of the named job or run.
    """
    if job is not None and run is not None and (incarnations := _incarnations_of(opened, job, run)):
        return [_elastic(job, run, incarnations)]
    found: dict[tuple[str, str], Family] = {}
    for catalog in catalogs_of(opened, job, run):
        named = incarnation_of_run(catalog.run)
        incarnations = [] if named is None else _incarnations_of(opened, catalog.job, named[0])
        if (
            named is None or named[1] not in incarnations
        ):  # an ordinary run may have the name of an incarnation
            found[catalog.job, catalog.run] = Family(catalog.job, (catalog.run,))
        elif run is not None:
            found[catalog.job, named[0]] = _elastic(catalog.job, named[0], incarnations, catalog.run)
        else:
            found[catalog.job, named[0]] = _elastic(catalog.job, named[0], incarnations)
    return list(found.values())


def _elastic(job: str, run: str, incarnations: Iterable[int], only: str = "") -> Family:
    runs = {number: run_of_incarnation(run, number) for number in incarnations}
    return Family(job, (only,) if only else tuple(runs.values()), run, runs)


def _incarnations_of(opened: OpenedStore, job: str, run: str) -> list[int]:
    """The incarnations of an elastic run, the latest first; empty for an ordinary run."""
    names = [parse(info.key) for info in opened.store.list(incarnations_prefix(job, run))]
    return sorted((n.number for n in names if isinstance(n, IncarnationName)), reverse=True)


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
    """The complete checkpoints whose objects are all listed with their recorded sizes; stale ones
    included.
    """
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
    """The checkpoint that ends at an iteration.

    Args:
        prefer_committed: choose the committed one of several.

    Raises:
        StoreProblem: none matches, or several do.
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
        ends = _listed(str(c.id.end) for c in catalog.checkpoints) or "none"
        raise StoreProblem(
            f"{name} has no such checkpoint of iteration {iteration}; its checkpoints end at {ends}"
        )
    raise _several(name, [c.id for c in found])


def choose_pin(catalog: Catalog, iteration: int, epoch: int | None, agreement: str) -> PinName | None:
    """The pin of a checkpoint, or None; a pin may exist without its checkpoint.

    Raises:
        StoreProblem: several pins match.
    """
    found = matching(catalog.pins, iteration, epoch, agreement)
    if len(found) > 1:
        raise _several(f"{catalog.job}/{catalog.run}", found)
    return found[0] if found else None


def _several(name: str, found: Iterable[CheckpointId | PinName]) -> StoreProblem:
    choices = _listed(f"--epoch {each.epoch} --agreement {each.agreement[:8]}" for each in found)
    return StoreProblem(f"{name} has several checkpoints of that iteration; pass one of: {choices}")


def _nothing(opened: OpenedStore, what: str) -> StoreProblem:
    known = _listed(f"{job}/{run}" for job, run in runs_in(opened.store.list("")))
    there = f"there is {known}" if known else "there is nothing of any job"
    return StoreProblem(f"nothing is stored {what} in {opened.place.shown}; {there}")


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - _MOST_LISTED} more" if len(found) > _MOST_LISTED else ""
    return ", ".join(found[:_MOST_LISTED]) + more
