"""What would be left if nodes were lost: the recovery plan of the nodes that would remain.

Nothing here knows more than a real recovery would: the same holdings go through the same plans
(`ckptd.core.recovery.global_plan`, and for a job that logs its boundaries
`ckptd.core.recovery.localized_plan`), without those of the lost nodes. For the latter it is assumed
that whoever is left parks, at the newest iteration of which all of them have a snapshot; what a
later step has logged by now is not counted on. Pure, so that it can be asked at any time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptd.core.recovery.global_plan import (
    NoRecovery,
    RecoveryPlan,
    SnapshotToLoad,
    plan_recovery,
)
from ckptd.core.recovery.held import HeldRecords, RunHoldings
from ckptd.core.recovery.localized_plan import LocalizedPlan, NotLocalized, RankKind, plan_localized
from ckptd.core.recovery.log_facts import facts_from_logs
from ckptd.core.recovery.tables import listed
from ckptd.core.slots.ring import SlotRecord, SlotState, epoch_table, live

__all__ = ["NODE_LABEL", "FedBy", "RankOutcome", "WhatIf", "select_nodes", "what_if"]

NODE_LABEL = "node"  # every node has it, and its value is the node's name
_SHOWN = 8
_NOT_THERE_YET = "to be parked"  # a segment's name, as no file has it


@dataclass(frozen=True, slots=True)
class FedBy:
    """Whose log a rank would be fed from, in the iterations from ``first`` to before ``end``, and
    the nodes where it would be read.
    """

    rank: int
    first: int
    end: int
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """What one rank would go through.

    Args:
        home_lost: whether the node it runs on is among the lost ones.
        sources: the nodes from which it would be recovered; empty if it cannot be.
        replayed: iterations that it repeats from snapshots, those included that only compare.
        lost_iterations: iterations between where it would resume and its newest snapshot now.
        moved_bytes: what would come from other nodes; all of it where the home is lost. Of a state that is yet to be parked this is a guess: as much
            as the rank's largest snapshot.
        kind: in a localized recovery: where its state comes from; None where all ranks recover together.
        copies: whose parked state it copies; -1: nobody's.
        fed_by: whose logs it is fed from.
    """

    rank: int
    home: str
    home_lost: bool
    sources: tuple[str, ...]
    replayed: int
    lost_iterations: int
    moved_bytes: int
    kind: RankKind | None = None
    copies: int = -1
    fed_by: tuple[FedBy, ...] = ()


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The answer: which nodes were meant, the plans (or why there is none), and what it costs each rank.

    Args:
        plan: of all ranks together, from snapshots.
        ranks: by the localized plan if there is one, else by the other.
        localized: None for a job that does not log its boundaries.
    """

    lost_nodes: tuple[str, ...]
    plan: RecoveryPlan | NoRecovery
    ranks: tuple[RankOutcome, ...]
    localized: LocalizedPlan | NotLocalized | None = None

    @property
    def recoverable(self) -> bool:
        """Whether the job would go on from where it was."""
        return isinstance(self.plan, RecoveryPlan) or isinstance(self.localized, LocalizedPlan)

    @property
    def reason(self) -> str:
        """Of the plan that counts."""
        if isinstance(self.localized, LocalizedPlan):
            return self.localized.reason
        return self.plan.reason


def what_if(
    held: RunHoldings,
    world_size: int,
    homes: Mapping[int, str],
    labels: Mapping[str, Mapping[str, str]],
    lose: Sequence[str],
    *,
    verify_iterations: int = 0,
) -> WhatIf:
    """What losing all these nodes at once would mean.

    Args:
        held: what the nodes hold now; logs with the facts that they tell.
        homes: the node on which each rank runs.
        labels: of each node, such as ``{"node-3": {"rack": "A"}}``.
        lose: selectors ``label=value``; ``node=<name>`` needs no label. A node that any of them fits is lost.
        verify_iterations: of the trainers: how many iterations more than necessary they replay to compare what they load.
    Raises:
        ValueError: a selector fits no node, or is none.
        RemoteProtocolError: the facts of a log cannot be read.
    """
    nodes = {h.node for each in (held.snapshots, held.logs, held.parked) for h in each}
    lost = select_nodes(nodes | set(homes.values()) | set(labels), labels, lose)
    # A rank whose node is gone runs elsewhere: nothing is at home there.
    left = {rank: node for rank, node in homes.items() if node not in lost}
    epochs = epoch_table(
        (r for each in (held.logs, held.parked) for h in each for r in h.records), held.begun
    )
    plan = plan_recovery(
        held.snapshots,
        world_size,
        homes=left,
        lost=set(lost),
        epochs=epochs,
        verify_iterations=verify_iterations,
    )
    newest = _newest(held.snapshots, epochs)
    localized, whose = None, {}
    if held.logs:
        there = held.without(lost)
        states = [*there.parked, *_to_be_parked(there.snapshots, left, newest, epochs)]
        there = replace(there, parked=states)
        localized = _localized(there, world_size, left, newest, verify_iterations)
        whose = {(h.node, h.segment): h.rank for h in states}
    ranks = tuple(
        _apart(rank, localized, homes.get(rank, ""), lost, newest.get(rank, -1), whose)
        if isinstance(localized, LocalizedPlan)
        else _outcome(rank, plan, homes.get(rank, ""), lost, newest.get(rank, -1))
        for rank in range(world_size)
    )
    return WhatIf(lost, plan, ranks, localized)


def select_nodes(
    nodes: Collection[str], labels: Mapping[str, Mapping[str, str]], lose: Sequence[str]
) -> tuple[str, ...]:
    """The nodes, sorted, that any of the selectors fits.

    Raises:
        ValueError: a selector fits no node, or is none; the message names what there is.
    """
    told = {node: {**labels.get(node, {}), NODE_LABEL: node} for node in nodes}
    found: set[str] = set()
    for selector in lose:
        label, separator, value = selector.partition("=")
        if not separator or not label:
            raise ValueError(f"{selector!r} is not label=value; {_known_labels(told)}")
        fitting = {node for node, own in told.items() if own.get(label) == value}
        if not fitting:
            raise ValueError(f"no node has {selector!r}; {_known_labels(told)}")
        found |= fitting
    return tuple(sorted(found))


def _localized(
    held: RunHoldings,
    world_size: int,
    homes: Mapping[int, str],
    newest: Mapping[int, int],
    verify_iterations: int,
) -> LocalizedPlan | NotLocalized:
    """The plan of those who are left, when they have parked."""
    if not homes:
        return NotLocalized("no node is left on which a rank trains")
    without = sorted(rank for rank in homes if newest.get(rank, -1) < 0)
    if without:
        return NotLocalized(f"there is no snapshot yet of {listed('rank', without)}")
    facts = facts_from_logs(range(world_size), held.logs, held.parked)
    return plan_localized(held, facts, world_size, homes=homes, verify_iterations=verify_iterations)


def _to_be_parked(
    snapshots: Sequence[HeldRecords],
    homes: Mapping[int, str],
    newest: Mapping[int, int],
    known_epochs: Mapping[int, int],
) -> list[HeldRecords]:
    """What the nodes would hold if these ranks were parked where the slowest of them is."""
    epochs = epoch_table((r for h in snapshots for r in h.records), known_epochs)
    epoch = max(epochs, default=0)
    iteration = min((newest.get(rank, -1) for rank in homes), default=-1)
    states = []
    for rank in homes if iteration >= 0 else ():
        own = [h for h in snapshots if h.rank == rank and any(r.sealed for r in h.records)]
        like = max(own, key=lambda h: max((r.epoch, r.iteration) for r in h.records if r.sealed))
        state = SlotRecord(
            generation=0,
            index=0,
            state=SlotState.SEALED,
            iteration=iteration,
            image_len=max(r.image_len for h in own for r in h.records),
            anchors=(1 << like.num_operators) - 1,
            epoch=epoch,
            epoch_start=epochs.get(epoch, -1),
        )
        told = (homes[rank], f"{_NOT_THERE_YET}: rank {rank}", True, rank)
        table = (like.num_operators, like.operators_id, like.slot_bytes)
        states.append(HeldRecords(*told, *table, (state,)))
    return states


def _newest(held: Iterable[HeldRecords], known_epochs: Mapping[int, int]) -> dict[int, int]:
    """The newest sealed iteration of every rank, on whatever node; stale ones do not count."""
    known = list(held)
    epochs = epoch_table((record for h in known for record in h.records), known_epochs)
    newest: dict[int, int] = {}
    for h in known:
        sealed = (r.iteration for r in live(h.records, epochs) if r.sealed)
        newest[h.rank] = max(newest.get(h.rank, -1), max(sealed, default=-1))
    return newest


def _apart(
    rank: int,
    plan: LocalizedPlan,
    home: str,
    lost: Collection[str],
    newest: int,
    whose: Mapping[tuple[str, str], int],
) -> RankOutcome:
    """By the localized plan; ``whose``: the rank of each parked state, by node and segment."""
    mine = plan.per_rank[rank]
    state = mine.pieces[0].sources[0]
    feeds = tuple(FedBy(f.neighbour, f.first, f.end, _preferred(f.pieces)) for f in mine.feeds)
    return RankOutcome(
        rank,
        home,
        home in lost,
        _preferred(mine.pieces),
        plan.resume - mine.start if mine.kind is RankKind.REPLAYS else 0,
        max(0, newest - plan.resume),
        plan.moved_bytes[rank],
        mine.kind,
        whose[state.node, state.segment] if mine.kind is RankKind.COPIED else -1,
        feeds,
    )


def _outcome(
    rank: int, plan: RecoveryPlan | NoRecovery, home: str, lost: Collection[str], newest: int
) -> RankOutcome:
    gone = home in lost
    if isinstance(plan, NoRecovery):
        return RankOutcome(rank, home, gone, (), 0, newest + 1, 0)
    nodes = _preferred(plan.per_rank[rank])
    behind = max(0, newest - plan.end)
    return RankOutcome(rank, home, gone, nodes, plan.replayed, behind, plan.moved_bytes[rank])


def _preferred(pieces: Iterable[SnapshotToLoad]) -> tuple[str, ...]:
    return tuple(sorted({piece.sources[0].node for piece in pieces}))


def _known_labels(told: Mapping[str, Mapping[str, str]]) -> str:
    """Every label with its values, for a message."""
    values: dict[str, set[str]] = {}
    for own in told.values():
        for label, value in own.items():
            values.setdefault(label, set()).add(value)
    texts = [f"{label}={_some(sorted(found))}" for label, found in sorted(values.items())]
    return f"known are {'; '.join(texts)}" if texts else "no nodes are known"


def _some(values: Sequence[str]) -> str:
    return "|".join(values[:_SHOWN]) + ("|…" if len(values) > _SHOWN else "")
