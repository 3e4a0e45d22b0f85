"""Decides whether one checkpoint may be removed, and which keys to delete (pure: a plan with reasons).

All manifests of the checkpoint are deleted first, then its objects: a crash in between leaves the
checkpoint incomplete and damages no other one. An object is deleted only if no other manifest
refers to it and no job can be about to write one that does (``docs/format.md`` section 7);
`ckptctl checkpoints gc` deletes the others later. ``force`` means that no job writes to the run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from ckptd.ctl.store.store_views import Manifests
from ckptd.storage.checkpoints.catalog import Catalog, CheckpointState, StoredCheckpoint
from ckptd.storage.checkpoints.names import CheckpointId
from ckptd.storage.checkpoints.retention import References, RetentionPolicy, plan_retention
from ckptd.units import format_age

__all__ = ["Removal", "objection", "plan_removal"]

_NEVER_NS = 1 << 62


@dataclass(frozen=True, slots=True)
class Removal:
    """The keys to delete: ``manifests`` first, then ``objects``. The ``left`` objects belong only to
    this checkpoint and stay because of ``reason``.
    """

    manifests: tuple[str, ...]
    objects: tuple[str, ...]
    freed_bytes: int
    left: tuple[str, ...]
    reason: str


def objection(
    catalog: Catalog,
    checkpoint: StoredCheckpoint,
    *,
    verified: Collection[CheckpointId],
    force: bool,
) -> str:
    """The reason why a checkpoint must not be removed; "" if it may be.

    Args:
        catalog: the catalog of its run.
        verified: the complete checkpoints that were verified as whole.
    """
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


def plan_removal(
    catalog: Catalog,
    checkpoint: StoredCheckpoint,
    manifests: Manifests,
    *,
    policy: RetentionPolicy,
    now_ns: int,
    force: bool,
) -> Removal:
    """Plan the removal of a checkpoint that `objection` allows.

    Args:
        manifests: all manifests of the run.
        policy: its times apply.
        now_ns: the time of the store's clock.
    """
    gone = {info.key: info.size for info in checkpoint.manifests.values()}
    rest = replace(catalog, checkpoints=tuple([c for c in catalog.checkpoints if c is not checkpoint]))
    references = {key: References.of(m) for key, m in manifests.read.items() if key not in gone}
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
    left = tuple([key for key in only if key not in free])
    return Removal(tuple(sorted(gone)), tuple(going), freed, left, reason if left else "")


def _only_there(
    catalog: Catalog,
    manifests: Manifests,
    gone: Collection[str],
    references: Mapping[str, References],
) -> dict[str, int]:
    """The sizes of the objects that only the deleted manifests refer to."""
    wanted = {key for name in gone if name in manifests.read for key in manifests.read[name].object_keys}
    used = {key for each in references.values() for key in each.objects}
    listed = {o.info.key: o.info.size for found in catalog.objects.values() for o in found}
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
