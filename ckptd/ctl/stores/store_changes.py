"""`ckptctl checkpoints pin`, `unpin`, `rm` and `gc`: plans with reasons, and how they are carried out.

**rm** deletes all manifests of the checkpoint first, then its objects: a crash in between leaves the
checkpoint incomplete and damages no other one. An object is deleted only if no other manifest
refers to it and no job can be about to write one that does (``docs/format.md`` section 7); `gc`
deletes the others later. ``force`` means that no job writes to the run.

**gc** deletes the checkpoints that the policy does not keep. An ordinary run is collected by itself.
The incarnations of an elastic run are collected together, by the rule of the daemon's keeper
(`ckptd.storage.checkpoints.retention`): the latest incarnation with a verified and settled
checkpoint replaces all earlier ones. That incarnation, and later ones without a whole checkpoint, are
collected like ordinary runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptd.config.settings import DaemonConfig
from ckptd.ctl.command import EXIT_REFUSED, CommandError
from ckptd.ctl.stores.store_access import OpenedStore, store_clock_ns
from ckptd.ctl.stores.store_lookup import (
    Family,
    Manifests,
    NamedCheckpoint,
    choose_checkpoint,
    choose_pin,
    families_of,
    find_catalog,
    object_sizes,
    read_manifests_of,
    references_of,
    whole_ones,
)
from ckptd.storage.checkpoints.catalog import Catalog, CheckpointState, StoredCheckpoint
from ckptd.storage.checkpoints.manifest import RankManifest
from ckptd.storage.checkpoints.names import CheckpointId, PinName, run_of_incarnation
from ckptd.storage.checkpoints.reader import read_catalog
from ckptd.storage.checkpoints.retention import (
    Deletion,
    IncarnationRemoval,
    References,
    RetentionPolicy,
    StoredIncarnation,
    plan_incarnations,
    plan_retention,
    replacing_incarnation,
    run_of,
)
from ckptd.storage.stores.objects import ObjectStore
from ckptd.units import format_age

_NEVER_NS = 1 << 62
_BATCH = 500
# Deletions happen within this time after the start of the listing, or not at all: writers rely on it
# (docs/format.md section 8).
_DELETE_WITHIN_S = RetentionPolicy().settle_ns / 2e9
_READ_WITHIN_S = 60.0  # rounds; manifests never change, so they are read before the listing that decides


def policy_of(args: argparse.Namespace, config: DaemonConfig) -> RetentionPolicy:
    """The retention policy: from the arguments, else from the configuration."""
    last, every, keep_s = args.keep_last, args.keep_every, args.keep_for
    return RetentionPolicy(
        keep_last=config.persist_keep_last if last is None else last,
        keep_every=config.persist_keep_every if every is None else every,
        keep_younger_than_ns=int((config.persist_keep_for_s if keep_s is None else keep_s) * 1e9),
        grace_ns=int(args.grace * 1e9),
        settle_ns=int(args.settle * 1e9),
    )


def _delete_soon(store: ObjectStore, steps: Iterable[Sequence[str]], listed_s: float) -> None:
    """Delete the keys, one step after the other."""
    for keys in steps:
        for begin in range(0, len(keys), _BATCH):
            if time.monotonic() - listed_s > _DELETE_WITHIN_S:
                raise CommandError(
                    f"stopped after {_DELETE_WITHIN_S:.0f} s with objects left: a job may need "
                    "them meanwhile; run `ckptctl checkpoints gc` again",
                    EXIT_REFUSED,
                )
            store.delete(keys[begin : begin + _BATCH])


# -- pin and unpin --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pinned(NamedCheckpoint):
    """A checkpoint that is ``pinned`` now, or not; ``changed``: the command changed that."""

    pinned: bool
    changed: bool


def pin(opened: OpenedStore, args: argparse.Namespace) -> Pinned:
    """Pin a checkpoint: retention does not delete it."""
    catalog = find_catalog(opened, args.job, args.run)
    chosen = choose_checkpoint(catalog, args.iteration, args.epoch, args.agreement, prefer_committed=False)
    name = _pin_of(catalog, chosen.id)
    if not chosen.pinned:
        opened.store.put(name.key, [])
        now = read_catalog(opened.store, args.job, args.run)
        there = next((c for c in now.checkpoints if c.id == chosen.id), None)
        if there is None or len(there.manifests) < len(chosen.manifests):
            opened.store.delete([name.key])
            raise CommandError(f"{chosen.id} was removed before it was pinned", EXIT_REFUSED)
    return Pinned(*name, pinned=True, changed=not chosen.pinned)


def unpin(opened: OpenedStore, args: argparse.Namespace) -> Pinned:
    """Remove the pin of a checkpoint."""
    catalog = find_catalog(opened, args.job, args.run)
    name = choose_pin(catalog, args.iteration, args.epoch, args.agreement)
    if name is not None:
        opened.store.delete([name.key])
        return Pinned(*name, pinned=False, changed=True)
    chosen = choose_checkpoint(catalog, args.iteration, args.epoch, args.agreement, prefer_committed=True)
    return Pinned(*_pin_of(catalog, chosen.id), pinned=False, changed=False)


def _pin_of(catalog: Catalog, chosen: CheckpointId) -> PinName:
    return PinName(catalog.job, catalog.run, chosen.end, chosen.epoch, chosen.agreement)


# -- rm -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Removed(NamedCheckpoint):
    """The numbers of deleted manifests and objects of a checkpoint; ``left`` objects that belong only to
    it stay for now because of ``reason``.
    """

    num_manifests: int
    num_objects: int
    freed_bytes: int
    left: int
    reason: str


def remove(opened: OpenedStore, args: argparse.Namespace) -> Removed:
    """Remove one checkpoint, and the objects that no other checkpoint needs.

    Raises:
        CommandError: the checkpoint must not be removed.
    """
    listed_s = time.monotonic()
    catalog = find_catalog(opened, args.job, args.run)
    chosen = choose_checkpoint(catalog, args.iteration, args.epoch, args.agreement, prefer_committed=False)
    manifests = read_manifests_of(opened, catalog.checkpoints)
    verified = whole_ones(catalog, manifests)
    # Checkpoints of another run do not replace it.
    mine = run_of(catalog, chosen.id, references_of(manifests))
    named = next(c for c in mine.checkpoints if c.id == chosen.id)
    reason = _objection(mine, named, verified, force=args.force)
    if reason:
        raise CommandError(f"{chosen.id} is not removed: {reason}", EXIT_REFUSED)
    now_ns = store_clock_ns(opened.store, args.job, args.run)
    policy = RetentionPolicy(grace_ns=int(args.grace * 1e9))
    steps, removed = _plan_removal(catalog, chosen, manifests, policy=policy, now_ns=now_ns, force=args.force)
    _delete_soon(opened.store, steps, listed_s)
    return removed


def _objection(
    catalog: Catalog, checkpoint: StoredCheckpoint, verified: Collection[CheckpointId], *, force: bool
) -> str:
    """Why a checkpoint must not be removed; "" if it may be. ``verified``: the whole ones of its run."""
    if checkpoint.pinned:
        return "it is pinned: run `ckptctl checkpoints unpin` first"
    if force:
        return ""
    newest = next((c for c in catalog.committed if c.id in verified), None)
    if newest is None:
        return "no checkpoint of this run is whole, so it may be the last usable state: --force removes it"
    if newest.id == checkpoint.id:
        return "it is the newest whole checkpoint, which a restore would use: --force removes it"
    if checkpoint.state is CheckpointState.INCOMPLETE and checkpoint.id.end > newest.id.end:
        return "a job may be writing it now: --force removes it"
    return ""


def _plan_removal(
    catalog: Catalog,
    checkpoint: StoredCheckpoint,
    manifests: Manifests,
    *,
    policy: RetentionPolicy,
    now_ns: int,
    force: bool,
) -> tuple[tuple[list[str], list[str]], Removed]:
    """The manifests to delete, then the objects, and the answer; `_objection` allows the removal."""
    gone = {info.key: info.size for info in checkpoint.manifests.values()}
    rest = replace(catalog, checkpoints=tuple([c for c in catalog.checkpoints if c is not checkpoint]))
    references = {key: found for key, found in references_of(manifests).items() if key not in gone}
    only = _only_there(catalog, manifests, gone, references)
    unread = sorted(key for key in manifests.unreadable if key not in gone)
    if unread:
        free, reason = set[str](), f"the references of {unread[0]} are not known"
    elif force:
        free, reason = set(only), ""
    else:
        free, reason = _free(rest, references, policy, now_ns)
    going = [key for key in only if key in free]
    freed = sum(gone.values()) + sum(only[key] for key in going)
    left = len(only) - len(going)
    removed = Removed(
        *_pin_of(catalog, checkpoint.id),
        num_manifests=len(gone),
        num_objects=len(going),
        freed_bytes=freed,
        left=left,
        reason=reason if left else "",
    )
    return (sorted(gone), going), removed


def _only_there(
    catalog: Catalog,
    manifests: Manifests,
    gone: Collection[str],
    references: Mapping[str, References],
) -> dict[str, int]:
    """The sizes of the objects that only the deleted manifests refer to."""
    wanted = {key for name in gone if name in manifests.read for key in manifests.read[name].object_keys}
    used = {key for each in references.values() for key in each.objects}
    listed = object_sizes(catalog)
    return {key: listed[key] for key in sorted(wanted - used) if key in listed}


def _free(
    rest: Catalog, references: Mapping[str, References], policy: RetentionPolicy, now_ns: int
) -> tuple[set[str], str]:
    """The objects that no job can be about to refer to, by the rule of retention; and why others may stay."""
    newest = rest.newest
    if newest is None:
        return set(), "no other checkpoint is committed"
    if now_ns - newest.modified_ns < policy.settle_ns:
        return (
            set(),
            f"{newest.id} has been committed for less than {format_age(policy.settle_ns / 1e9)}",
        )
    # No checkpoint is settled for so long: the plan finds unreferenced objects, and no checkpoint to delete.
    patient = replace(policy, settle_ns=_NEVER_NS)
    plan = plan_retention(rest, patient, verified=(), references=references, now_ns=now_ns)
    grace = format_age(policy.grace_ns / 1e9)
    reason = f"they are younger than {grace}, or near the iterations that a running job is storing"
    return {deletion.key for deletion in plan.objects}, reason


# -- gc -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
    """A checkpoint that stays, with the reason."""

    iteration: int
    epoch: int
    agreement: str
    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A key that is deleted, with the reason."""

    key: str
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class Collected:
    """The plan for one run; ``refused`` is the reason why it is not carried out, ``done`` is true
    after it was.

    Attributes:
        names: the mark and ``run.json`` of an incarnation without any other object.
        uploads_ended: number of ended uploads of dead writers; -1: the store does not report it.
    """

    job: str
    run: str
    refused: str = ""
    kept: tuple[KeptCheckpoint, ...] = ()
    manifests: tuple[Gone, ...] = ()
    objects: tuple[Gone, ...] = ()
    names: tuple[Gone, ...] = ()
    freed_bytes: int = 0
    uploads_ended: int = 0
    done: bool = False


@dataclass(frozen=True, slots=True)
class _Seen:
    """The listing and the manifests of one run."""

    catalog: Catalog
    manifests: Manifests
    verified: set[CheckpointId]

    @property
    def incarnation(self) -> StoredIncarnation:
        return StoredIncarnation(self.catalog, self.verified, references_of(self.manifests))


def collect(
    opened: OpenedStore,
    args: argparse.Namespace,
    policy: RetentionPolicy,
    planned: Callable[[Collected], None],
) -> list[Collected]:
    """Delete the checkpoints that the policy does not keep, run by run; calls ``planned`` with each
    plan before it is carried out.

    An incarnation that is named itself is collected alone, with the state of the others as input.

    Raises:
        CommandError: the store contains nothing of the named job or run, or is too slow.
    """
    found = []
    for family in families_of(opened, args.job, args.run):
        listed_s, seen = _look(opened, family)
        for plan in _plans(opened, family, seen, policy, dry_run=args.dry_run):
            planned(plan)
            if args.dry_run or plan.refused:
                found.append(plan)
                continue
            steps = (plan.manifests, plan.objects, plan.names)
            _delete_soon(opened.store, [[gone.key for gone in each] for each in steps], listed_s)
            prefix = f"{plan.job}/{plan.run}/"
            ended = opened.store.abort_uploads(prefix, policy.grace_ns / 1e9)
            found.append(replace(plan, done=True, uploads_ended=ended))
    return found


# -- listing -------------------------------------------------------------------------------------


def _look(opened: OpenedStore, family: Family) -> tuple[float, dict[str, _Seen]]:
    """All runs of a family, and the start of their listing; listed again if reading took long."""
    known: dict[str, RankManifest] = {}
    listed_s, seen = _survey(opened, family, known)
    if len(family.runs) > 1 and time.monotonic() - listed_s > _READ_WITHIN_S:
        listed_s, seen = _survey(opened, family, known)
    return listed_s, seen


def _survey(
    opened: OpenedStore, family: Family, known: dict[str, RankManifest]
) -> tuple[float, dict[str, _Seen]]:
    listed_s, seen = time.monotonic(), {}
    for run in family.runs:
        catalog = read_catalog(opened.store, family.job, run)
        manifests = read_manifests_of(opened, catalog.checkpoints, known)
        known.update(manifests.read)
        seen[run] = _Seen(catalog, manifests, whole_ones(catalog, manifests))
    return listed_s, seen


# -- deciding ------------------------------------------------------------------------------------


def _plans(
    opened: OpenedStore,
    family: Family,
    seen: Mapping[str, _Seen],
    policy: RetentionPolicy,
    *,
    dry_run: bool,
) -> list[Collected]:
    """The plans of the chosen runs of a family, the latest first."""
    # A dry run writes nothing, not even to read the store's clock.
    clock = family.chosen[0]
    now_ns = time.time_ns() if dry_run else store_clock_ns(opened.store, family.job, clock)
    incarnations = {number: seen[run].incarnation for number, run in family.incarnations.items()}
    replaced: dict[str, IncarnationRemoval] = {}
    by = replacing_incarnation(incarnations, policy, now_ns=now_ns)
    if by is not None:
        earlier = {number: incarnation for number, incarnation in incarnations.items() if number < by}
        for plan in plan_incarnations(incarnations[by], earlier, policy, now_ns=now_ns):
            replaced[run_of_incarnation(family.elastic, plan.number)] = plan
    return [_plan_of(seen[run], replaced.get(run), policy, now_ns) for run in family.chosen]


def _plan_of(
    seen: _Seen, replaced: IncarnationRemoval | None, policy: RetentionPolicy, now_ns: int
) -> Collected:
    """The plan of one run; ``replaced``: the deletions in an incarnation that a later one replaced."""
    catalog, unreadable = seen.catalog, seen.manifests.unreadable
    if unreadable:
        why = min(unreadable.values())
        others = len(unreadable) - 1
        more = f" (and {others} more manifests)" if others else ""
        refused = f"its references are not known: {why}{more}"
        return Collected(catalog.job, catalog.run, refused)
    if replaced is not None:
        return _collected(catalog, replaced.kept, replaced.manifests, replaced.objects, replaced.names)
    plan = plan_retention(
        catalog,
        policy,
        verified=seen.verified,
        references=references_of(seen.manifests),
        now_ns=now_ns,
    )
    return _collected(catalog, plan.kept, plan.manifests, plan.objects)


def _collected(catalog: Catalog, kept: Mapping[CheckpointId, str], *steps: Sequence[Deletion]) -> Collected:
    manifests, objects, names = (*steps, ())[:3]
    return Collected(
        catalog.job,
        catalog.run,
        "",
        tuple([KeptCheckpoint(c.end, c.epoch, c.agreement, reason) for c, reason in kept.items()]),
        _gone(manifests),
        _gone(objects),
        _gone(names),
        sum(deletion.size for step in steps for deletion in step),
    )


def _gone(deletions: Iterable[Deletion]) -> tuple[Gone, ...]:
    return tuple([Gone(*deletion) for deletion in deletions])
