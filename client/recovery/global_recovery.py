"""How all ranks start, and the global recovery: all ranks go back to the newest suffix that every rank
can have, from this node or from others.

A start is a loop of four steps (`agree_on_plan`):

1. *Inventory*: the ranks exchange what their nodes hold. A collective call.
2. *Plan*: each rank computes the same plan from that. The planners are pure, in `ckptd.core`:
   `recovery.global_plan` (all ranks go back), `recovery.localized_plan` (only some do),
   `elastic.incarnation_plan` (an elastic job goes on with other ranks).
3. *Retrieve*: each rank verifies or requests what its part of the plan needs.
4. *Vote*: the plan counts if every rank has what it needs. Otherwise each rank gives back what it
   retrieved, and all begin again with another inventory: what one rank lacks changes the plan of all.

If a rank vanishes meanwhile, the next collective call fails on the others, the launcher starts the job
again, and that start plans from what is there then: nothing was freed.

A run that got somewhere does not begin anew because a node is late: what is missing may be there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.daemon_link.retrieval import Retrieved
from ckptd.client.daemon_link.run_inventory import RunView
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.log_lines import get_logger
from ckptd.client.ranks.collectives import Collectives, TryAgain
from ckptd.client.recovery.verification import Replayed
from ckptd.core.recovery.global_plan import (
    NoRecovery,
    RecoveryPlan,
    complete_suffixes,
    newer_anchors,
    plan_recovery,
)
from ckptd.core.recovery.held import STORE_NODE
from ckptd.core.recovery.localized_plan import NotLocalized
from ckptd.core.recovery.quarantine import (
    describe_failure,
    open_failures,
    quarantined_failures,
    reported_spans,
    snapshots_used,
)
from ckptd.core.recovery.recovery_phases import RecoveryPhase
from ckptd.core.recovery.snapshot_tables import SnapshotToLoad
from ckptd.core.slots.segment_format import WORLD_TOPOLOGY
from ckptd.core.slots.slots import SlotState
from ckptd.errors import CorruptionError, DaemonUnavailable

logger = get_logger(__name__)

# Nodes may come and go while a plan is made. One more is for storage, which is looked at only if memory is
# not enough, and one for nodes that are slow.
_ATTEMPTS = 9
_APART_PLANS = 2  # the first plans, too
_VERIFIED_PLANS = 2  # the first plans; snapshots for comparison alone must not keep the run from resuming
_NODES_SHOWN = 8
_FAILURES_SHOWN = 3

Inventory = TypeVar("Inventory")
Plan = TypeVar("Plan")
Vote = TypeVar("Vote")


class StartProcedure(Protocol[Inventory, Plan, Vote]):
    """One kind of start. Each method may raise `TryAgain`: `inventory` and `plan` on all ranks, `retrieve`
    on one of them.
    """

    attempts: int
    vote: type[Vote]

    def inventory(self, undo: ExitStack) -> Inventory:
        """What there is, the same on all ranks. A collective call.

        Args:
            undo: closed unless the plan counts.
        """

    def plan(self, inventory: Inventory) -> Plan:
        """The plan, the same on all ranks; `NoRecovery` or `NotLocalized` if there is none."""

    def retrieve(self, inventory: Inventory, plan: Plan, undo: ExitStack) -> Vote:
        """Verify or request what this rank needs; returns what the other ranks have to know of it."""


@dataclass(frozen=True, slots=True)
class AgreedPlan(Generic[Inventory, Plan, Vote]):
    """A plan for which every rank has what it needs; or the agreement that there is none, without votes.

    Attributes:
        votes: by rank.
        undo: gives back what was retrieved, unless it is emptied.
    """

    inventory: Inventory
    plan: Plan
    votes: list[Vote]
    undo: ExitStack


def agree_on_plan(
    ranks: Collectives, procedure: StartProcedure[Inventory, Plan, Vote]
) -> AgreedPlan[Inventory, Plan, Vote] | None:
    """Repeat the procedure until all ranks have what a plan needs; a collective call.

    Returns:
        None on all ranks if no plan held within ``procedure.attempts``.
    Raises:
        DaemonUnavailable: a rank cannot go on (`Collectives.agree`).
    """
    for _ in range(procedure.attempts):
        with ExitStack() as undo:
            try:
                inventory = procedure.inventory(undo)
                plan = procedure.plan(inventory)
                votes: list[Any] = []
                if not isinstance(plan, NoRecovery | NotLocalized):
                    votes = ranks.agree(
                        lambda: procedure.retrieve(inventory, plan, undo),  # noqa: B023 - called at once
                        procedure.vote,
                    )
            except TryAgain as error:
                if str(error):
                    logger.warning("%s; the ranks plan again", error)
                continue
            return AgreedPlan(inventory, plan, votes, undo.pop_all())
    return None


# -- all ranks go back -----------------------------------------------------------------------------


class Recovered(NamedTuple):
    """What this rank begins with, oldest first, how it was chosen, and what is replayed for it.

    ``unverified``: why no replay compares the newest snapshot; "" if one does. ``dense``: all ranks
    begin with everything, so nothing is frozen anywhere. ``new_from``: no snapshot shows that this
    iteration, or a later one, was done before. ``apart``: partial snapshots outside the chain of ``images``,
    newest first, with newer copies of some experts.
    """

    images: list[SnapshotImage]
    reason: str
    replayed: Replayed
    unverified: str = ""
    dense: bool = False
    new_from: int = 0
    apart: Sequence[SnapshotImage] = ()


def recover_global(
    memory: RankMemory,
    ranks: Collectives,
    at: int | None = None,
    *,
    verify_iterations: int = 0,
    seen: RunView | None = None,
    whole: bool = False,
    apart: bool = False,
) -> Recovered | str:
    """The newest suffix that every rank can have, and how it was chosen; or why there is none.

    Snapshots in this rank's memory are verified before use: a slot that fails its digests is quarantined
    and reported, and the ranks plan anew without it. The daemon may still be fetching other snapshots when
    this returns; their images block when they are needed.
    A collective call: it returns on all ranks, or raises on all.

    Args:
        at: go back to this iteration, from memory or storage, and give up what is newer, unless the last
            start was told the same; the same on all ranks.
        verify_iterations: how many iterations more than necessary may be replayed, to compare what
            is loaded; the same on all ranks.
        seen: an inventory that is as good as a new one, on all ranks or on none.
        whole: all ranks have a live state that is not older than any snapshot: beginning anew loses nothing.
        apart: whether this rank has use for `newer_anchors`.
    Raises:
        ValueError: iteration ``at`` cannot be had; nothing was given up.
        AttachRefused: there is no memory for what must be fetched, or the run was recovered again
            meanwhile.
        DaemonUnavailable: a daemon is away, or another rank was refused so, or nodes are missing
            without which the run would have to begin anew.
        CorruptionError: all that is left is quarantined, or cannot be compared after a replay that
            did not reproduce; on every rank.
    """
    procedure = _GlobalStart(memory, ranks, at, verify_iterations, seen, whole, apart)
    agreed = agree_on_plan(ranks, procedure)
    if agreed is None:
        # Every rank comes here. Starting over would free what the others hold safely.
        raise DaemonUnavailable(
            f"no plan for the recovery held after {procedure.tried} attempts",
            hint="a node cannot reach the holders of its ranks' snapshots (`ckptctl peers`, "
            "`ckptctl events`); nothing was "
            "lost: start again when it can, or `ckptctl forget` the run to begin anew",
        )
    agreed.undo.pop_all()  # it is used from here on
    view, plan = agreed.inventory, agreed.plan
    if isinstance(plan, NoRecovery):
        _report_new_run(memory, plan, view)
        with ranks.all_or_none():
            memory.begin_epoch_after(view, plan.epoch, -1)
        return plan.reason
    pieces = plan.per_rank[memory.identity.rank]
    with ranks.all_or_none():
        images, aside = memory.resume(
            pieces, procedure.retrieved, view, epoch=plan.epoch, end=plan.end, apart=procedure.apart
        )
    reason = plan.reason
    if quarantined := quarantined_failures(view.failures):
        reason += f"; {reported_spans(quarantined)} are quarantined, since no replay reproduced them"
    # All ranks have the same boundaries if they have snapshots of the same iterations.
    iterations = {tuple(piece.record.iteration for piece in of) for of in plan.per_rank.values()}
    replayed = Replayed(snapshots_used(pieces), everybody=len(iterations) == 1)
    new_from = plan.end if procedure.at is not None else max(plan.end, view.newest)
    return Recovered(images, reason, replayed, plan.unverified, plan.dense, new_from, aside)


class _GlobalStart:
    """The procedure of a start in which all ranks go back to snapshots.

    Attributes:
        tried: plans whose snapshots were requested.
        at: the iteration to go back to; None: the newest.
        apart: snapshots outside the plan's chain that were retrieved with it.
        retrieved: by the last of them, after those.
    """

    attempts = _ATTEMPTS
    vote: type[None] = type(None)

    def __init__(
        self,
        memory: RankMemory,
        ranks: Collectives,
        at: int | None,
        verify_iterations: int,
        seen: RunView | None,
        whole: bool,
        apart: bool,
    ) -> None:
        self._memory, self._ranks, self._wish, self._seen = memory, ranks, at, seen
        self.at = at
        self._whole, self._apart = whole, apart
        self.apart: Sequence[SnapshotToLoad] = ()
        self._verify_iterations = verify_iterations
        self._storage = self._patient = self._recoverable_before = False
        self.tried = 0
        self.retrieved = Retrieved([])

    def inventory(self, undo: ExitStack) -> RunView:
        """What the nodes hold of the run, and what is durable once memory has proved insufficient."""
        seen, self._seen = self._seen, None
        if seen is not None:
            return seen
        return self._memory.see(self._ranks, storage=self._storage, patient=self._patient)

    def plan(self, view: RunView) -> RecoveryPlan | NoRecovery:
        """The newest suffix that every rank can have."""
        memory, wanted = self._memory, self._verify_iterations
        verified = wanted if self.tried < _VERIFIED_PLANS else 0
        self.at = view.still_wanted(self._wish)
        with memory.planning(RecoveryPhase.PLAN):
            plan = plan_recovery(
                view.usable,
                memory.identity.world_size,
                homes=view.homes,
                epochs=view.epochs,
                at=self.at,
                verify_iterations=verified,
            )
        if isinstance(plan, NoRecovery):
            if self._may_ask_storage:
                # Every rank comes to the same conclusion, whether or not its own node has a store.
                self._storage = True
                raise TryAgain
            try:
                self._check_new_run(plan, view)
            except (ValueError, DaemonUnavailable, CorruptionError) as error:
                if not self._patient and {*view.silent} - {STORE_NODE}:
                    self._patient = True  # a node that is only slow may have what is missing
                    raise TryAgain from error
                if not self._whole:
                    raise
                logger.warning("a new history begins, with the state that is live: %s", error)
            return plan
        if self.at is None and plan.end < view.durable and self._may_ask_storage:
            # Replicas that lag must not bury it. If storage does not answer, memory counts.
            self._storage = True
            raise TryAgain
        if wanted and not verified:
            plan = replace(plan, unverified="the snapshots for it could not be had")
        if wanted:
            _refuse_what_cannot_be_compared(memory, plan, view)
        self._recoverable_before = True  # it may be no more, when what is damaged here is quarantined
        return plan

    @property
    def _may_ask_storage(self) -> bool:
        """Not for a new incarnation: what is durable of earlier ones was looked at when it was planned."""
        return not self._storage and self._memory.topology != WORLD_TOPOLOGY

    def _check_new_run(self, plan: NoRecovery, view: RunView) -> None:
        """Raise if the run must not begin anew."""
        if self.at is not None:
            raise ValueError(f"resume_at={self.at}: {plan.reason}. Nothing was changed")
        _refuse_what_is_quarantined(self._memory, plan, view)
        _refuse_to_forget(self._memory, plan, view, self._recoverable_before)

    def retrieve(self, view: RunView, plan: RecoveryPlan | NoRecovery, undo: ExitStack) -> None:
        """Verify this rank's snapshots, or request them."""
        assert isinstance(plan, RecoveryPlan), "without a plan nothing is retrieved"
        self.tried += 1
        rank = self._memory.identity.rank
        pieces, self.apart = plan.per_rank[rank], ()
        if self._apart and self.at is None:
            self.apart = newer_anchors(view.usable, plan, rank, homes=view.homes, epochs=view.epochs)
        try:
            self.retrieved = self._memory.retrieval.retrieve(
                (*self.apart, *pieces), view.everybody, undo, apart=len(self.apart)
            )
        except TryAgain:
            # The run can do without them.
            self._apart = self._apart and self.tried < _APART_PLANS
            raise
        except Exception as error:
            if self.apart:
                self._apart = False
                raise TryAgain from error
            if plan.start == plan.needed:
                raise
            # There may be memory for what the run needs, and none for the snapshots to compare with.
            raise TryAgain from error


# -- refusals --------------------------------------------------------------------------------------
# Every rank raises the same, from the same data.

Refusal = TypeVar("Refusal", CorruptionError, DaemonUnavailable)


def _refusal(kind: type[Refusal], memory: RankMemory, what: str, hint: str) -> Refusal:
    ids = {"job": memory.identity.job, "run": memory.identity.run}
    return kind(what, operation="recover", ids=ids, hint=hint)


def _refuse_what_is_quarantined(memory: RankMemory, plan: NoRecovery, view: RunView) -> None:
    """Raise CorruptionError if only snapshots that no replay reproduces are left: a person has to decide."""
    quarantined = quarantined_failures(view.failures)
    if not quarantined:
        return
    job, run = memory.identity.job, memory.identity.run
    away = f"; {_nodes(view.silent)} did not answer" if view.silent else ""
    shown = "; ".join(describe_failure(failure) for failure in quarantined[-_FAILURES_SHOWN:])
    raise _refusal(
        CorruptionError,
        memory,
        "there is no state left that a replay reproduces. Quarantined are "
        f"{reported_spans(quarantined)}, because two replays of each "
        f"came to the same result and not to what was recorded ({shown}). Memory, peers and "
        f"storage hold nothing else: {plan.reason}{away}",
        "Nothing was deleted: `ckptctl snapshots` shows it. If the program or the machine "
        f"has changed since, start it as it was after `ckptctl unquarantine {job} {run}` on every node. "
        "To train on from what was recorded all the same, do that and pass "
        f'recovery=RecoveryOptions(on_mismatch="warn"). To begin anew, `ckptctl forget {job} '
        f"{run}` on every node, or pass run= a new name",
    )


def _refuse_what_cannot_be_compared(memory: RankMemory, plan: RecoveryPlan, view: RunView) -> None:
    """Raise CorruptionError if a replay did not reproduce, and no replay can check what is left."""
    failures = open_failures(view.failures)
    if not failures or plan.start < plan.end:
        return
    job, run = memory.identity.job, memory.identity.run
    shown = "; ".join(describe_failure(failure) for failure in failures[-_FAILURES_SHOWN:])
    raise _refusal(
        CorruptionError,
        memory,
        f"the only state left is that of iteration {plan.end}, and no replay can show whether a "
        f"job that goes on from there is exact: {plan.unverified}. Replays of this run did not "
        f"reproduce what was recorded ({shown})",
        "Most often the program keeps something that no snapshot holds: data that is not in "
        "state=, an optimizer that counts in an "
        "attribute. Nothing was deleted: `ckptctl snapshots` shows it. When the program is as it "
        f"should be, `ckptctl unquarantine {job} {run}` "
        "on every node brings back what was quarantined. To go on from that iteration without a "
        "comparison, pass recovery=RecoveryOptions(verify_iterations=0). "
        f"To begin anew, `ckptctl forget {job} {run}` on every node, or pass run= a new name",
    )


def _refuse_to_forget(memory: RankMemory, plan: NoRecovery, view: RunView, recoverable_before: bool) -> None:
    """Raise DaemonUnavailable if what is missing may be had later."""
    job, run = memory.identity.job, memory.identity.run
    if plan.different_schedules:
        raise _refusal(
            DaemonUnavailable,
            memory,
            plan.reason,
            "Nothing was lost, but no replay of it would be exact. Were the ranks of this run "
            f"started with different versions of ckptd? `ckptctl forget {job} {run}` on every node, or "
            "pass run= a new name, to begin anew",
        )
    if STORE_NODE in view.silent:
        raise _refusal(
            DaemonUnavailable,
            memory,
            f"{plan.reason}; and the store did not answer, or nothing that it holds of this run can be used",
            "The event store_silent (`ckptctl events`) has the reason. Start again when the store answers. "
            "What is damaged is named by `ckptctl checkpoints verify`; to begin anew remove it with "
            "`ckptctl checkpoints rm`, or pass run= a new name",
        )
    if why := _would_be_lost(view, recoverable_before):
        raise _refusal(DaemonUnavailable, memory, f"{plan.reason}; {why}", _how_to_go_on(job, run, view))


def _would_be_lost(view: RunView, recoverable_before: bool) -> str:
    """What beginning anew would give up, or may; "" if there is nothing.

    A complete suffix of one rank counts, although it resumes nothing by itself: a person may know
    where the rest is.
    """
    complete = complete_suffixes(view.held)
    was = recoverable_before or view.was_recoverable(complete)
    if was is False:
        return ""
    there = [f"of rank {rank} there are {text}" for rank, text in complete.items()]
    shown = "; ".join(there[:_NODES_SHOWN]) + ("; …" if len(there) > _NODES_SHOWN else "")
    missing = ""
    # A configured peer that does not answer means nothing to a run that no node knows.
    if view.silent and (was or there or view.is_known):
        missing = f"{_nodes(view.silent)} took part in the run before and did not answer"
    elif lost := [] if view.is_known else _damaged_records(view):
        missing = f"the record of who took part is damaged on {_nodes(lost)}, and nobody else knows"
    elif shown:
        missing = (
            "no node is missing, and neither memory nor storage has a state from which all ranks can resume"
        )
    return "; ".join(text for text in (shown, missing) if text)


def _how_to_go_on(job: str, run: str, view: RunView) -> str:
    where = _nodes([record.node for record in view.records if record.holds])
    if not view.silent and not _damaged_records(view):
        return (
            f"Nothing was deleted, and waiting changes nothing. To begin anew, run `ckptctl forget {job} "
            f"{run}` on {where} and start again, or pass run= a new name"
        )
    first = "What is there stays"
    if view.silent:
        first = "Nothing was lost: start again when they are back. If they will not be"
    return (
        f"{first}, `ckptctl forget {job} {run}` on {where}, or pass run= a new name, to begin "
        "anew. A node that "
        f"refuses this job's nodes (event peer_refused) lets them in by `ckptctl admit {job} {run} NODE`"
    )


def _damaged_records(view: RunView) -> list[str]:
    """The nodes whose record of the run is damaged."""
    return [record.node for record in view.records if record.lost]


def _report_new_run(memory: RankMemory, plan: NoRecovery, view: RunView) -> None:
    """Log why this run begins at the beginning: normal for a new run, an error where slots are damaged."""
    damaged = sum(r.state is SlotState.QUARANTINED for r in memory.table.records())
    if not damaged and memory.descriptor is None and not view.held:
        # One rank speaks for all; a warning, so that it is seen without any logging set-up.
        level = logging.INFO if memory.identity.rank else logging.WARNING
        logger.log(level, "%s: nothing to resume from was found; a new run begins", memory.identity)
        for note in memory.session.notes:
            logger.log(level, "A NEW RUN BEGINS BESIDE OTHER SNAPSHOTS: %s", note)
        return
    why = f"{damaged} slots are damaged; {plan.reason}" if damaged else plan.reason
    if view.silent:
        why += f" ({_nodes(view.silent)} did not answer)"
    text = f"{memory.identity}: starting over from the beginning: {why}"
    logger.log(logging.ERROR if damaged else logging.WARNING, "%s", text)
    memory.session.notice("error" if damaged else "warning", "starting_over", text)


def _nodes(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NODES_SHOWN]) + (", …" if len(names) > _NODES_SHOWN else "")
    return f"node {shown}" if len(names) == 1 else f"nodes {shown}"
