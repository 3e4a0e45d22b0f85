"""Decides which objects of a run may be deleted. Pure: the result is a plan with reasons.

A plan is carried out in its order: all manifests first, then the objects. A crash in between leaves a
checkpoint incomplete, never damaged, and the next plan continues from there.

Invariants, for every policy and after any interrupted plan:

* a committed checkpoint is deleted only if a newer one is committed *and verified*, and has been for
  some time. So the newest verified checkpoint stays, and is whole;
* only a checkpoint of the same run replaces another. The same names may stand for another run if
  ``run.json`` was removed, or if somebody copied checkpoints. The manifests identify the run
  (``run_id``); a listing does not;
* an object is deleted only if no remaining manifest of any run refers to it, and no job can be about to
  write one that does (``docs/format.md`` section 7). If a remaining manifest could not be read, no
  object is deleted.

All times come from the store's listing; no other clock is compared with them.

Incarnations (`plan_incarnations`): an incarnation is one life of an elastic job; in the store it is a run
of its own, marked by an `IncarnationName`. The newest incarnation with a committed checkpoint is the
history of the job. Once that checkpoint is verified and has settled, earlier incarnations are not needed
any more, whatever iterations they reached. Checkpoints that retention keeps for other reasons (pins,
``keep_every``, age) stay, and ``keep_last`` counts over all incarnations: while the newest one has fewer,
the newest whole checkpoints of the one before stay as a fallback. A node that does not know yet that an
incarnation is over may still write into it; therefore objects are deleted only after the grace time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ckptd.storage.checkpoints.catalog import (
    Catalog,
    CheckpointState,
    ListedObject,
    StoredCheckpoint,
)
from ckptd.storage.checkpoints.manifest import RankManifest
from ckptd.storage.checkpoints.names import (
    CheckpointId,
    IncarnationName,
    RunName,
    incarnation_of_run,
)


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Which committed checkpoints stay in addition to the newest one; one reason is sufficient."""

    keep_last: int = 2
    """Keep this many of the newest checkpoints."""
    keep_every: int = 0
    """Keep the first checkpoint of every this many iterations; 0: off."""
    keep_younger_than_ns: int = 0
    """Keep checkpoints written within this time."""
    grace_ns: int = 24 * 3600 * 10**9
    """The longest time that a writer may need for one checkpoint: younger unfinished objects stay."""
    settle_ns: int = 600 * 10**9
    """How long a checkpoint must have been committed to replace others: readers may be using those, and
    writers that have not seen it yet may be about to refer to them."""

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, but is {self.keep_last}")
        times = (self.keep_younger_than_ns, self.grace_ns, self.settle_ns)
        if min(self.keep_every, *times) < 0:
            raise ValueError("keep_every and the times of a retention policy must not be negative")


class References(NamedTuple):
    """The facts of a manifest that retention needs."""

    start: int
    objects: frozenset[str]
    run_id: str

    @classmethod
    def of(cls, manifest: RankManifest) -> References:
        """The references of a manifest."""
        return cls(manifest.start, manifest.object_keys, manifest.run_id)


class Deletion(NamedTuple):
    """A key that may be deleted, the bytes that this frees, and the reason."""

    key: str
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointChoice:
    """The checkpoints that stay and those that are deleted, with reasons; the manifests of ``kept`` count."""

    kept: Mapping[CheckpointId, str]
    doomed: Mapping[CheckpointId, str]


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """Deletes all ``manifests`` first, then ``objects``; ``notes`` name what could not be decided."""

    manifests: tuple[Deletion, ...]
    objects: tuple[Deletion, ...]
    kept: Mapping[CheckpointId, str]
    notes: tuple[str, ...]

    @property
    def freed_bytes(self) -> int:
        """The number of bytes that the plan frees."""
        return sum(deletion.size for deletion in (*self.manifests, *self.objects))


def choose_checkpoints(
    catalog: Catalog,
    policy: RetentionPolicy,
    *,
    verified: Collection[CheckpointId],
    now_ns: int,
) -> CheckpointChoice:
    """Choose the checkpoints of one run to delete, from the listing alone.

    Args:
        catalog: if several runs have used the names, that of one of them (`Catalog.only`).
        verified: the checkpoints that were verified as whole.
        now_ns: the time of the store's clock.
    """
    committed = catalog.committed
    settled = [c for c in committed if now_ns - c.modified_ns >= policy.settle_ns]
    anchor = next((c for c in settled if c.id in verified), None)
    wanted = wanted_by(policy, committed, now_ns, last=policy.keep_last)
    kept: dict[CheckpointId, str] = {}
    doomed: dict[CheckpointId, str] = {}
    for checkpoint in catalog.checkpoints:
        if checkpoint.pinned:
            goes, reason = False, "pinned"
        elif checkpoint.state is CheckpointState.COMMITTED:
            goes, reason = _committed(checkpoint, anchor, wanted)
        elif checkpoint.state is CheckpointState.STALE:
            goes, reason = _stale(checkpoint, anchor, policy.grace_ns, now_ns)
        else:
            goes, reason = _incomplete(checkpoint, settled, policy.grace_ns, now_ns)
        (doomed if goes else kept)[checkpoint.id] = reason
    return CheckpointChoice(kept, doomed)


def plan_retention(
    catalog: Catalog,
    policy: RetentionPolicy,
    *,
    verified: Collection[CheckpointId],
    references: Mapping[str, References],
    now_ns: int,
) -> RetentionPlan:
    """Plan the deletions of a run.

    Args:
        verified: the checkpoints that were verified as whole.
        references: the references of the manifests by key, at least of those that
            `choose_checkpoints` keeps. If they belong to several runs, a checkpoint without a known
            manifest stays.
        now_ns: the time of the store's clock.
    """
    runs, unknown = _by_run(catalog, references)
    kept = dict.fromkeys(unknown, "its run is not known")
    doomed: dict[CheckpointId, str] = {}
    for each in runs:
        choice = choose_checkpoints(each, policy, verified=verified, now_ns=now_ns)
        kept |= choice.kept
        doomed |= choice.doomed
    manifests = [
        Deletion(info.key, info.size, doomed[checkpoint.id])
        for checkpoint in reversed(catalog.checkpoints)
        if checkpoint.id in doomed
        for _, info in sorted(checkpoint.manifests.items())
    ]
    staying = [c for c in catalog.checkpoints if c.id in kept]
    unread = [info.key for c in staying for info in c.manifests.values() if info.key not in references]
    if unread:
        note = (
            f"no object is deleted: {len(unread)} manifests could not be read "
            f"({', '.join(sorted(unread)[:3])})"
        )
        return RetentionPlan(tuple(manifests), (), kept, (note,))
    used: set[str] = set()
    for checkpoint in staying:
        for info in checkpoint.manifests.values():
            used |= references[info.key].objects
    live = max(runs, key=_committed_ns)
    objects = _orphans(live, used, _begin(live, references), policy.grace_ns, now_ns)
    return RetentionPlan(tuple(manifests), tuple(objects), kept, ())


def run_of(catalog: Catalog, checkpoint: CheckpointId, references: Mapping[str, References]) -> Catalog:
    """The catalog with only the checkpoints of this one's run; with all of them if its run is not known."""
    runs, unknown = _by_run(catalog, references)
    if checkpoint in unknown:
        return catalog
    return next(run for run in runs if any(c.id == checkpoint for c in run.checkpoints))


def _by_run(
    catalog: Catalog, references: Mapping[str, References]
) -> tuple[list[Catalog], Collection[CheckpointId]]:
    """The checkpoints by run, and those whose run is not known.

    The name of a folder is a hash that covers the run, so all of its manifests belong to one run. If
    all known checkpoints belong to one run, the others are assumed to belong to it, too: they are
    damaged, and deleted at their time.
    """
    found: dict[str, set[CheckpointId]] = {}
    unknown: set[CheckpointId] = set()
    for checkpoint in catalog.checkpoints:
        keys = [info.key for info in checkpoint.manifests.values()]
        run_id = next((references[key].run_id for key in keys if key in references), None)
        (unknown if run_id is None else found.setdefault(run_id, set())).add(checkpoint.id)
    if len(found) <= 1:
        return [catalog], ()
    return [catalog.only(ids) for ids in found.values()], unknown


def _committed_ns(run: Catalog) -> int:
    """The time of a run's newest committed checkpoint; the running job has the latest."""
    return -1 if run.newest is None else run.newest.modified_ns


def wanted_by(
    policy: RetentionPolicy, committed: Iterable[StoredCheckpoint], now_ns: int, *, last: int
) -> dict[CheckpointId, str]:
    """The checkpoints that the policy names, of ``committed`` (newest first); ``last`` of the newest."""
    wanted: dict[CheckpointId, str] = {}
    firsts: dict[int, CheckpointId] = {}
    for number, checkpoint in enumerate(committed):
        if number < last:
            wanted[checkpoint.id] = f"one of the last {policy.keep_last}"
        elif now_ns - checkpoint.modified_ns < policy.keep_younger_than_ns:
            wanted[checkpoint.id] = "young"
        if policy.keep_every:  # newest first, so the first one of each group comes last
            firsts[checkpoint.id.end // policy.keep_every] = checkpoint.id
    for first in firsts.values():
        wanted.setdefault(first, f"the first of {policy.keep_every} iterations")
    return wanted


def _committed(
    checkpoint: StoredCheckpoint,
    anchor: StoredCheckpoint | None,
    wanted: Mapping[CheckpointId, str],
) -> tuple[bool, str]:
    if checkpoint.id in wanted:
        return False, wanted[checkpoint.id]
    if anchor is None:
        return False, "no newer one is verified (long enough ago)"
    if checkpoint.id == anchor.id:
        return False, "the newest verified one"
    if checkpoint.id.end >= anchor.id.end:
        return False, "no newer one is verified (long enough ago)"
    return True, f"replaced by {anchor.id}"


def _stale(
    checkpoint: StoredCheckpoint, anchor: StoredCheckpoint | None, grace_ns: int, now_ns: int
) -> tuple[bool, str]:
    """The other history must have been in the store for some time, so that all writers have seen it."""
    if anchor is None or anchor.id.epoch <= checkpoint.id.epoch:
        return False, f"stale ({checkpoint.reason}), but no checkpoint of a later history is verified"
    since = checkpoint.stale_since_ns
    if since is None or now_ns - max(since, checkpoint.modified_ns) < grace_ns:
        return False, f"stale ({checkpoint.reason}), within the grace time"
    return True, f"stale: {checkpoint.reason}"


def _incomplete(
    checkpoint: StoredCheckpoint,
    settled: Iterable[StoredCheckpoint],
    grace_ns: int,
    now_ns: int,
) -> tuple[bool, str]:
    newer = [c for c in settled if c.id.end > checkpoint.id.end and c.id.epoch >= checkpoint.id.epoch]
    if not newer:
        return False, "incomplete, and no newer one is committed (long enough ago)"
    if now_ns - checkpoint.modified_ns < grace_ns:
        return False, "incomplete, within the grace time"
    return True, f"incomplete ({checkpoint.reason}), and {newer[0].id} is committed"


def _begin(catalog: Catalog, references: Mapping[str, References]) -> tuple[int, int]:
    """Epoch and start of the newest committed checkpoint: no history up to this epoch needs older objects.
    A later history without a checkpoint may have begun before it.
    """
    newest = catalog.newest
    if newest is None:
        return -1, -1
    return newest.id.epoch, min([references[info.key].start for info in newest.manifests.values()])


def _orphans(
    catalog: Catalog, used: Collection[str], begin: tuple[int, int], grace_ns: int, now_ns: int
) -> list[Deletion]:
    orphans: list[Deletion] = []
    for listed in catalog.objects.values():
        for found in listed:
            if found.info.key in used or now_ns - found.info.modified_ns < grace_ns:
                continue
            reason = _useless(catalog, found, begin, grace_ns, now_ns)
            if reason:
                orphans.append(Deletion(found.info.key, found.info.size, reason))
    return sorted(orphans)


def _useless(
    catalog: Catalog, found: ListedObject, begin: tuple[int, int], grace_ns: int, now_ns: int
) -> str:
    """The reason why no job will ever refer to an unreferenced object; "" if one may."""
    epoch, start = begin
    if found.name.epoch <= epoch and found.name.iteration < start:
        return f"no manifest refers to it, and the newest checkpoint begins at {start}"
    left = catalog.leaving(found.name.epoch, found.name.iteration)
    if left is not None and left.since_ns is not None and now_ns - left.since_ns >= grace_ns:
        return f"no manifest refers to it, and a later history began at {left.start}"
    return ""


@dataclass(frozen=True, slots=True)
class StoredIncarnation:
    """One incarnation as the store shows it.

    Args:
        verified: the checkpoints whose objects are all listed and not known to be damaged.
        references: the references of its manifests by key; a missing manifest could not be read.
    """

    catalog: Catalog
    verified: Collection[CheckpointId]
    references: Mapping[str, References]

    @property
    def name(self) -> IncarnationName:
        """The name of its mark in the store."""
        found = incarnation_of_run(self.catalog.run)
        assert found is not None, "the run has the name of an incarnation"
        return IncarnationName(self.catalog.job, *found)


@dataclass(frozen=True, slots=True)
class IncarnationRemoval:
    """The deletions in incarnation ``number``: ``manifests``, then ``objects``, and its ``names`` at the
    end if nothing else is left. ``kept`` are the checkpoints that stay, with the reason.
    """

    number: int
    manifests: tuple[Deletion, ...]
    objects: tuple[Deletion, ...]
    names: tuple[Deletion, ...]
    kept: Mapping[CheckpointId, str]


def replacing_incarnation(
    incarnations: Mapping[int, StoredIncarnation], policy: RetentionPolicy, *, now_ns: int
) -> int | None:
    """The number of the latest incarnation with a verified and settled checkpoint; None if there is none."""
    return max((n for n, each in incarnations.items() if _replaces(each, policy, now_ns)), default=None)


def plan_incarnations(
    newest: StoredIncarnation,
    earlier: Mapping[int, StoredIncarnation],
    policy: RetentionPolicy,
    *,
    now_ns: int,
) -> list[IncarnationRemoval]:
    """Plan the deletions in earlier incarnations (by number), once the newest one replaces them."""
    if not _replaces(newest, policy, now_ns):
        return []
    left = policy.keep_last - len(newest.catalog.committed)
    plans = []
    for _, incarnation in sorted(earlier.items(), reverse=True):
        whole = [c for c in incarnation.catalog.committed if c.id in incarnation.verified]
        wanted = wanted_by(policy, whole, now_ns, last=max(0, left))
        left -= len(whole)
        plans.append(_plan(incarnation, wanted, newest.name.number, policy.grace_ns, now_ns))
    return plans


def _replaces(incarnation: StoredIncarnation, policy: RetentionPolicy, now_ns: int) -> bool:
    settled = [c for c in incarnation.catalog.committed if now_ns - c.modified_ns >= policy.settle_ns]
    return any(c.id in incarnation.verified for c in settled)


def _why_it_stays(
    checkpoint: StoredCheckpoint, wanted: Mapping[CheckpointId, str], grace_ns: int, now_ns: int
) -> str:
    """The reason why a checkpoint stays; "" if it is deleted."""
    if checkpoint.pinned:
        return "pinned"
    unfinished = checkpoint.state is CheckpointState.INCOMPLETE
    if unfinished and now_ns - checkpoint.modified_ns < grace_ns:
        return "incomplete, within the grace time"
    return wanted.get(checkpoint.id, "")


def _plan(
    incarnation: StoredIncarnation,
    wanted: Mapping[CheckpointId, str],
    by: int,
    grace_ns: int,
    now_ns: int,
) -> IncarnationRemoval:
    catalog, why = incarnation.catalog, f"incarnation {by} replaced it"
    reasons = {c.id: _why_it_stays(c, wanted, grace_ns, now_ns) for c in catalog.checkpoints}
    kept = [c for c in catalog.checkpoints if reasons[c.id]]
    manifests = [
        Deletion(info.key, info.size, why)
        for c in catalog.checkpoints
        if not reasons[c.id]
        for _, info in sorted(c.manifests.items())
    ]
    keys = [info.key for c in kept for info in c.manifests.values()]
    listed = [found.info for each in catalog.objects.values() for found in each]
    objects: list[Deletion] = []
    if all(key in incarnation.references for key in keys):
        used = frozenset[str]().union(*(incarnation.references[key].objects for key in keys))
        objects = [
            Deletion(info.key, info.size, why)
            for info in listed
            if info.key not in used and now_ns - info.modified_ns >= grace_ns
        ]
    names: list[Deletion] = []
    if not (kept or catalog.pins or catalog.foreign) and len(objects) == len(listed):
        run = RunName(catalog.job, catalog.run).key
        sizes = {} if catalog.identity is None else {run: catalog.identity.size}
        names = [Deletion(key, sizes.get(key, 0), why) for key in (run, incarnation.name.key)]
    stays = {checkpoint.id: reasons[checkpoint.id] for checkpoint in kept}
    return IncarnationRemoval(
        incarnation.name.number, tuple(manifests), tuple(sorted(objects)), tuple(names), stays
    )
