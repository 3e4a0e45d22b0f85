"""The recovery of all ranks together: the newest suffix that every rank can have, from here or from
other nodes.

What one rank lacks changes the plan of all, so a plan counts when every rank has what it needs. A
run that got somewhere does not begin anew because a node is late: what is missing may lie there.
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
from ckptd.core.slots.ring import SlotState
from ckptd.core.slots.segment_format import WORLD_TOPOLOGY
from ckptd.errors import CorruptionError, DaemonUnavailable

__all__ = ["AgreedPlan", "Recovered", "StartProcedure", "agree_on_plan", "recover_global"]

logger = get_logger(__name__)


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
        """Have what this rank needs; returns what the other ranks have to know of it."""


@dataclass(frozen=True, slots=True)
class AgreedPlan(Generic[Inventory, Plan, Vote]):
    """A plan of which every rank has what it needs; or that there is none, and then no rank has voted.

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
    """Go through the procedure until all ranks have what a plan needs; a collective call.

    Returns:
        None on all ranks where no plan held in so many attempts.
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


# Nodes may come and go while a plan is made. One more is for storage, which is looked at only if
# memory is not enough.
_ATTEMPTS = 8
_VERIFIED_PLANS = 2  # of these the first: what is only for comparing must not keep the run from coming back
_NODES_SHOWN = 8
_FAILURES_SHOWN = 3
_BESIDE = (
    "To go on from them, stop this trainer and pass run=RunOptions(name=RUN, job=JOB); to "
    "free their memory, `ckptctl forget JOB RUN`"
)


class Recovered(NamedTuple):
    """What this rank begins with, oldest first, how it was chosen, and what is replayed for it.

    ``unverified``: why nothing is replayed by which what is loaded last could be compared; "" where
    it is. ``dense``: all ranks begin with everything, so nothing is frozen anywhere.
    """

    images: list[SnapshotImage]
    reason: str
    replayed: Replayed
    unverified: str = ""
    dense: bool = False


def recover_global(
    memory: RankMemory, ranks: Collectives, at: int | None = None, *, verify_iterations: int = 0
) -> Recovered | str:
    """The newest suffix that every rank can have, and how it was chosen; or why there is none.

    What lies here is verified before use: a slot that fails its digests is quarantined and
    reported, and the ranks plan anew without it. What lies elsewhere is being brought here when
    this returns; its images are waited for when needed.
    A collective call: it returns on all ranks, or raises on all.

    Args:
        at: go back to this iteration, from memory or storage; what is newer is given up.
        verify_iterations: how many iterations more than necessary may be replayed, to compare what
            is loaded; the least of all ranks' counts.
    Raises:
        ValueError: iteration ``at`` cannot be had; nothing was given up.
        AttachRefused: there is no memory for what must be brought here, or the run was recovered
            again meanwhile.
        DaemonUnavailable: a daemon is away, or so was refused on another rank, or nodes are missing
            without which the run would have to begin anew.
        CorruptionError: all that is left is quarantined, or cannot be compared after a replay that
            did not reproduce; on every rank.
    """
    procedure = _GlobalStart(memory, ranks, at, min(ranks.gather(verify_iterations, int)))
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
        _tell_start(memory, plan, view)
        with ranks.all_or_none():
            memory.begin_epoch_after(view, plan.epoch, -1)
        return plan.reason
    rank = memory.identity.rank
    with ranks.all_or_none():
        images = memory.resume(plan.per_rank[rank], procedure.retrieved, view, epoch=plan.epoch, end=plan.end)
    return Recovered(images, _why(plan, view), _replayed(plan, rank), plan.unverified, plan.dense)


class _GlobalStart:
    """The start of a run of which all ranks go back to snapshots.

    Attributes:
        tried: plans whose snapshots were asked for.
        retrieved: of the last of them.
    """

    attempts = _ATTEMPTS
    vote: type[None] = type(None)

    def __init__(
        self, memory: RankMemory, ranks: Collectives, at: int | None, verify_iterations: int
    ) -> None:
        self._memory, self._ranks, self._at = memory, ranks, at
        self._verify_iterations = verify_iterations
        self._storage = self._recoverable_before = False
        self.tried = 0
        self.retrieved = Retrieved([])

    def inventory(self, undo: ExitStack) -> RunView:
        """What the nodes hold of the run; and what is durable, once memory has turned out not to be
        enough.
        """
        return self._memory.see(self._ranks, storage=self._storage)

    def plan(self, view: RunView) -> RecoveryPlan | NoRecovery:
        """The newest suffix that every rank can have.

        Raises:
            ValueError, AttachRefused, DaemonUnavailable, CorruptionError: as `recover_global`.
        """
        memory, wanted = self._memory, self._verify_iterations
        verified = wanted if self.tried < _VERIFIED_PLANS else 0
        with memory.planning():
            plan = plan_recovery(
                view.usable,
                memory.identity.world_size,
                homes=view.homes,
                epochs=view.epochs,
                at=self._at,
                verify_iterations=verified,
            )
        if isinstance(plan, NoRecovery):
            # A world of an elastic job is a new run. What is durable of those before was looked at
            # when it was planned.
            if not self._storage and memory.topology != WORLD_TOPOLOGY:
                # Every rank comes to the same conclusion, whether or not its own node has a store.
                self._storage = True
                raise TryAgain
            if self._at is not None:
                raise ValueError(f"resume_at={self._at}: {plan.reason}. Nothing was changed")
            _refuse_what_is_quarantined(memory, plan, view)
            _refuse_to_forget(memory, plan, view, self._recoverable_before)
            return plan
        if wanted and not verified:
            plan = replace(plan, unverified="the snapshots for it could not be had")
        if wanted:
            _refuse_what_cannot_be_compared(memory, plan, view)
        self._recoverable_before = True  # it may be no more, when what is damaged here is quarantined
        return plan

    def retrieve(self, view: RunView, plan: RecoveryPlan | NoRecovery, undo: ExitStack) -> None:
        """Have this rank's snapshots, or have them on their way."""
        assert isinstance(plan, RecoveryPlan), "without a plan nothing is retrieved"
        self.tried += 1
        pieces = plan.per_rank[self._memory.identity.rank]
        try:
            self.retrieved = self._memory.retrieve(pieces, view, undo)
        except TryAgain:
            raise
        except Exception as error:
            if plan.start == plan.needed:
                raise
            # There may be memory for what the run needs, and none for what is to be compared with it.
            raise TryAgain from error


def _replayed(plan: RecoveryPlan, rank: int) -> Replayed:
    """All ranks have the same boundaries where they have snapshots of the same iterations."""
    iterations = {tuple(piece.record.iteration for piece in pieces) for pieces in plan.per_rank.values()}
    return Replayed(snapshots_used(plan.per_rank[rank]), len(iterations) == 1)


def _why(plan: RecoveryPlan, view: RunView) -> str:
    quarantined = quarantined_failures(view.failures)
    if not quarantined:
        return plan.reason
    return f"{plan.reason}; {reported_spans(quarantined)} are quarantined, since no replay reproduced them"


def _refuse_what_is_quarantined(memory: RankMemory, plan: NoRecovery, view: RunView) -> None:
    """Raise where nothing is left but what no replay reproduces: somebody has to decide.

    Raises:
        CorruptionError: so it is; every rank decides this from the same data.
    """
    quarantined = quarantined_failures(view.failures)
    if not quarantined:
        return
    job, run = memory.identity.job, memory.identity.run
    away = f"; {_nodes(view.silent)} did not answer" if view.silent else ""
    shown = "; ".join(describe_failure(failure) for failure in quarantined[-_FAILURES_SHOWN:])
    raise CorruptionError(
        "there is no state left that a replay reproduces. Quarantined are "
        f"{reported_spans(quarantined)}, because two replays of each "
        f"came to the same result and not to what was recorded ({shown}). Memory, peers and "
        "storage hold nothing else: "
        f"{plan.reason}{away}",
        operation="recover",
        ids={"job": job, "run": run},
        hint="Nothing was deleted: `ckptctl snapshots` shows it. If the program or the machine "
        "has changed since, start it as it was "
        f"after `ckptctl unquarantine {job} {run}` on every node. To train on from what was "
        "recorded all the same, do that and pass "
        f'recovery=RecoveryOptions(on_mismatch="warn"). To begin anew, `ckptctl forget {job} '
        f"{run}` on every node, or pass run= a new name",
    )


def _refuse_what_cannot_be_compared(memory: RankMemory, plan: RecoveryPlan, view: RunView) -> None:
    """Raise where a replay did not reproduce, and what is left would be trained on without any.

    Raises:
        CorruptionError: so it is; every rank decides this from the same data.
    """
    failures = open_failures(view.failures)
    if not failures or plan.start < plan.end:
        return
    job, run = memory.identity.job, memory.identity.run
    shown = "; ".join(describe_failure(failure) for failure in failures[-_FAILURES_SHOWN:])
    raise CorruptionError(
        f"the only state left is that of iteration {plan.end}, and no replay can show whether a "
        "job that goes on from there is exact: "
        f"{plan.unverified}. Replays of this run did not reproduce what was recorded ({shown})",
        operation="recover",
        ids={"job": job, "run": run},
        hint="Most often the program keeps something that no snapshot holds: data that is not in "
        "state=, an optimizer that counts in an "
        "attribute. Nothing was deleted: `ckptctl snapshots` shows it. When the program is as it "
        f"should be, `ckptctl unquarantine {job} {run}` "
        "on every node brings back what was quarantined. To go on from that iteration without a "
        "comparison, pass recovery=RecoveryOptions(verify_iterations=0). "
        f"To begin anew, `ckptctl forget {job} {run}` on every node, or pass run= a new name",
    )


def _refuse_to_forget(memory: RankMemory, plan: NoRecovery, view: RunView, recoverable_before: bool) -> None:
    """Raise where what is missing may be had later.

    Raises:
        DaemonUnavailable: so it is; every rank decides this from the same data.
    """
    job, run = memory.identity.job, memory.identity.run
    if plan.different_schedules:
        raise DaemonUnavailable(
            plan.reason,
            operation="recover",
            ids={"job": job, "run": run},
            hint="Nothing was lost, but no replay of it would be exact. Were the ranks of this run "
            "started with different "
            f"versions of ckptd? `ckptctl forget {job} {run}` on every node, or pass run= a new "
            "name, to begin anew",
        )
    if STORE_NODE in view.silent:
        raise DaemonUnavailable(
            f"{plan.reason}; and the store did not answer, or nothing that it holds of this run can be used",
            operation="recover",
            ids={"job": job, "run": run},
            hint="`ckptctl events` says which. Start again when the store answers. What is damaged "
            "is named by "
            "`ckptctl checkpoints verify`; to begin anew remove it with `ckptctl checkpoints rm`, "
            "or pass run= a new name",
        )
    if why := _would_be_lost(view, recoverable_before):
        raise DaemonUnavailable(
            f"{plan.reason}; {why}",
            operation="recover",
            ids={"job": job, "run": run},
            hint=_how_to_go_on(job, run, view),
        )


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
    # A configured peer that does not answer means nothing to a run of which nobody has heard.
    if view.silent and (was or there or view.is_known):
        missing = f"{_nodes(view.silent)} took part in the run before and did not answer"
    elif not view.is_known and any(record.lost for record in view.records):
        lost = [record.node for record in view.records if record.lost]
        missing = f"the record of who took part is damaged on {_nodes(lost)}, and nobody else knows"
    elif shown:
        missing = (
            "no node is missing, and neither memory nor storage has a state from which all ranks can resume"
        )
    return "; ".join(text for text in (shown, missing) if text)


def _how_to_go_on(job: str, run: str, view: RunView) -> str:
    where = _nodes([record.node for record in view.records if record.holds])
    if not view.silent and not any(record.lost for record in view.records):
        return (
            "Nothing was deleted, and waiting changes nothing. To begin anew, run `ckptctl forget "
            f"{job} {run}` on {where} and "
            "start again, or pass run= a new name"
        )
    first = "What is there stays"
    if view.silent:
        first = "Nothing was lost: start again when they are back. If they will not be"
    return (
        f"{first}, `ckptctl forget {job} {run}` on {where}, or pass run= a new name, to begin "
        "anew. A node that "
        f"refuses this job's nodes (event peer_refused) lets them in by `ckptctl admit {job} {run} NODE`"
    )


def _tell_start(memory: RankMemory, plan: NoRecovery, view: RunView) -> None:
    """Normal for a new run, worth a word for one of which something was held, an error where there
    is damage.
    """
    damaged = sum(r.state is SlotState.QUARANTINED for r in memory.table.records())
    if not damaged and memory.descriptor is None and not view.held:
        # One rank speaks for all; a warning, so that it is seen without any logging set-up.
        level = logging.INFO if memory.identity.rank else logging.WARNING
        logger.log(level, "%s: nothing to resume from was found; a new run begins", memory.identity)
        for note in memory.session.notes:
            logger.log(level, "A NEW RUN BEGINS BESIDE OTHER SNAPSHOTS: %s. %s", note, _BESIDE)
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
