"""Whether one checkpoint may be removed, and what goes with it (pure: the result is a plan with reasons).

All of its manifests go first, and only then objects: a death in between leaves it incomplete, and
never damages another one. An object goes only if no other manifest refers to it and nobody can be
about to write one that does (``docs/format.md`` section 7); what may still be wanted is left to
`ckptctl checkpoints gc`. ``force`` says that no job writes to the run.
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
    """First all of ``manifests`` go, then ``objects``; ``left`` are objects that only it refers to
    and that stay, and why.
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
    """Why it must not be removed; "" if it may.

    Args:
        catalog: of its run.
        verified: the complete ones that were found whole.
    """
    if checkpoint.pinned:
        return "it is pinned: `ckptctl checkpoints unpin` it first"
    if force:
        return ""
    newest = next((c for c in catalog.committed if c.id in verified), None)
    if newest is None:
        return "none of this run is whole, and it may be all that is left: --force removes it"
    if newest.id == checkpoint.id:
        return (
            "it is the newest whole one, from which the job would be restored: --force removes it"
        )
    if checkpoint.state is CheckpointState.INCOMPLETE and checkpoint.id.end > newest.id.end:
        return "it may be being written just now: --force removes it"
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
    """What goes with a checkpoint against which there is no objection.

    Args:
        manifests: of all the run.
        policy: its times count.
        now_ns: by the store's clock.
    """
    gone = {info.key: info.size for info in checkpoint.manifests.values()}
    rest = replace(
        catalog, checkpoints=tuple([c for c in catalog.checkpoints if c is not checkpoint])
    )
    references = {key: References.of(m) for key, m in manifests.read.items() if key not in gone}
    only = _only_there(catalog, manifests, gone, references)
    unread = sorted(key for key in manifests.unreadable if key not in gone)
    if unread:
        free, reason = set[str](), f"it is not known what {unread[0]} refers to"
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
    """Sizes of the objects to which only the manifests refer that go."""
    wanted = {
        key for name in gone if name in manifests.read for key in manifests.read[name].object_keys
    }
    used = {key for each in references.values() for key in each.objects}
    listed = {o.info.key: o.info.size for found in catalog.objects.values() for o in found}
    return {key: listed[key] for key in sorted(wanted - used) if key in listed}


def _free(
    rest: Catalog, references: Mapping[str, References], policy: RetentionPolicy, now_ns: int
) -> tuple[set[str], str]:
    """The objects to which no job can be about to refer, by the rule of retention; and why it may to others."""
    newest = rest.newest
    if newest is None:
        return set(), "no other checkpoint is committed"
    if now_ns - newest.modified_ns < policy.settle_ns:
        return set(), f"{newest.id} is committed for less than {format_age(policy.settle_ns / 1e9)}"
    # Nothing is ever settled for so long: this finds what nobody needs, and no checkpoint to delete.
    patient = replace(policy, settle_ns=_NEVER_NS)
    plan = plan_retention(rest, patient, verified=(), references=references, now_ns=now_ns)
    grace = format_age(policy.grace_ns / 1e9)
    reason = f"they are younger than {grace}, or near to what a running job is storing"
    return {deletion.key for deletion in plan.objects}, reason
