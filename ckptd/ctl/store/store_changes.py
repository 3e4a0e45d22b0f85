"""`ckptctl checkpoints pin`, `unpin` and `rm`. `gc` is in `ckptd.ctl.store.store_gc`."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

from ckptd.config.settings import DaemonConfig
from ckptd.ctl.store.store_access import EXIT_REFUSED, OpenedStore, StoreProblem, store_clock_ns
from ckptd.ctl.store.store_gc import delete_soon
from ckptd.ctl.store.store_lookup import (
    choose_checkpoint,
    choose_pin,
    find_catalog,
    read_manifests_of,
    references_of,
    whole_ones,
)
from ckptd.ctl.store.store_removal import objection, plan_removal
from ckptd.storage.checkpoints.catalog import Catalog
from ckptd.storage.checkpoints.names import CheckpointId, PinName
from ckptd.storage.checkpoints.reader import read_catalog
from ckptd.storage.checkpoints.retention import RetentionPolicy, run_of

__all__ = ["Pinned", "Removed", "pin", "policy_of", "remove", "unpin"]


@dataclass(frozen=True, slots=True)
class Pinned:
    """Whether a checkpoint is pinned now; ``changed`` is true if the command changed that."""

    job: str
    run: str
    iteration: int
    epoch: int
    agreement: str
    pinned: bool
    changed: bool


@dataclass(frozen=True, slots=True)
class Removed:
    """The deleted manifests and objects of a checkpoint; ``left`` objects stay for now because of
    ``reason``.
    """

    job: str
    run: str
    iteration: int
    epoch: int
    agreement: str
    num_manifests: int
    num_objects: int
    freed_bytes: int
    left: int
    reason: str


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
            raise StoreProblem(f"{chosen.id} was removed before it was pinned", EXIT_REFUSED)
    return _pinned(name, pinned=True, changed=not chosen.pinned)


def unpin(opened: OpenedStore, args: argparse.Namespace) -> Pinned:
    """Remove the pin of a checkpoint."""
    catalog = find_catalog(opened, args.job, args.run)
    name = choose_pin(catalog, args.iteration, args.epoch, args.agreement)
    if name is not None:
        opened.store.delete([name.key])
        return _pinned(name, pinned=False, changed=True)
    chosen = choose_checkpoint(catalog, args.iteration, args.epoch, args.agreement, prefer_committed=True)
    return _pinned(_pin_of(catalog, chosen.id), pinned=False, changed=False)


def remove(opened: OpenedStore, args: argparse.Namespace) -> Removed:
    """Remove one checkpoint, and the objects that no other checkpoint needs.

    Raises:
        StoreProblem: the checkpoint must not be removed.
    """
    listed_s = time.monotonic()
    catalog = find_catalog(opened, args.job, args.run)
    chosen = choose_checkpoint(catalog, args.iteration, args.epoch, args.agreement, prefer_committed=False)
    manifests = read_manifests_of(opened, catalog.checkpoints)
    verified = whole_ones(catalog, manifests)
    references = references_of(manifests)
    # Checkpoints of another run do not replace it.
    mine = run_of(catalog, chosen.id, references)
    named = next(c for c in mine.checkpoints if c.id == chosen.id)
    reason = objection(mine, named, verified=verified, force=args.force)
    if reason:
        raise StoreProblem(f"{chosen.id} is not removed: {reason}", EXIT_REFUSED)
    now_ns = store_clock_ns(opened.store, args.job, args.run)
    plan = plan_removal(
        catalog,
        chosen,
        manifests,
        policy=RetentionPolicy(grace_ns=int(args.grace * 1e9)),
        now_ns=now_ns,
        force=args.force,
    )
    delete_soon(opened.store, (plan.manifests, plan.objects), listed_s)
    return Removed(
        args.job,
        args.run,
        chosen.id.end,
        chosen.id.epoch,
        chosen.id.agreement,
        len(plan.manifests),
        len(plan.objects),
        plan.freed_bytes,
        len(plan.left),
        plan.reason,
    )


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


def _pin_of(catalog: Catalog, chosen: CheckpointId) -> PinName:
    return PinName(catalog.job, catalog.run, chosen.end, chosen.epoch, chosen.agreement)


def _pinned(name: PinName, *, pinned: bool, changed: bool) -> Pinned:
    return Pinned(name.job, name.run, name.end, name.epoch, name.agreement, pinned, changed)
