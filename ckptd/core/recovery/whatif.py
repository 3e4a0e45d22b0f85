"""Prediction of the recovery after a loss of nodes: the plan of the remaining nodes.

The prediction uses the same inventories and the same planners as a real recovery
(`ckptd.core.recovery.global_plan`, and `ckptd.core.recovery.localized_plan` for a job with boundary
logs), without the lost nodes. A localized recovery assumes that the surviving ranks park at the newest
iteration of which all of them have a snapshot, and does not rely on logs of later steps. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptd.core.recovery.global_plan import NoRecovery, RecoveryPlan, plan_recovery
from ckptd.core.recovery.held import HeldRecords, RunHoldings
from ckptd.core.recovery.localized_plan import LocalizedPlan, NotLocalized, RankKind, plan_localized
from ckptd.core.recovery.recovery_facts import facts_from_logs
from ckptd.core.recovery.snapshot_tables import SnapshotToLoad, listed
from ckptd.core.slots.slots import SlotRecord, SlotState, epoch_table, live

NODE_LABEL = "node"  # a label of every node; its value is the node's name
_SHOWN = 8
_NOT_THERE_YET = "to be parked"  # a segment name that no file has


@dataclass(frozen=True, slots=True)
class FedBy:
    """The rank whose log feeds another one from iteration ``first`` to before ``end``, and the nodes that
    hold the log.
    """

    rank: int
    first: int
    end: int
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """The predicted recovery of one rank.

    Args:
        home_lost: whether its node is one of the lost ones.
        sources: the nodes from which it is recovered; empty if it cannot be recovered.
        replayed: iterations that it replays, including those that only verify.
        lost_iterations: iterations between its resumption and its newest present snapshot.
        moved_bytes: bytes that come from other nodes; all bytes if the home is lost. For a state
            that is yet to be parked this is an estimate: the size of the rank's largest snapshot.
        kind: in a localized recovery, the source of its state; None in a global recovery.
        copies: the rank whose parked state it copies; -1: none.
        fed_by: the logs that feed it.
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
    """The prediction: the lost nodes, the plans (or the reason why none exists), and the cost for each rank.

    Args:
        plan: the global recovery, from snapshots.
        ranks: according to the localized plan if it exists, else to the global plan.
        localized: None for a job without boundary logs.
    """

    lost_nodes: tuple[str, ...]
    plan: RecoveryPlan | NoRecovery
    ranks: tuple[RankOutcome, ...]
    localized: LocalizedPlan | NotLocalized | None = None

    @property
    def recoverable(self) -> bool:
        """Whether the job could resume."""
        return isinstance(self.plan, RecoveryPlan) or isinstance(self.localized, LocalizedPlan)

    @property
    def reason(self) -> str:
        """The reason of the plan that applies."""
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
    """Predict the recovery after the loss of all these nodes at once.

    Args:
        held: the present inventories of the nodes; logs with their facts.
        homes: the node on which each rank runs.
        labels: the labels of each node, such as ``{"node-3": {"rack": "A"}}``.
        lose: selectors ``label=value``; ``node=<name>`` needs no label. Every node that matches any
            of them is lost.
        verify_iterations: the setting of the trainers: additional iterations that they replay for
            verification.
    Raises:
        ValueError: a selector matches no node, or is malformed.
        RemoteProtocolError: the facts of a log cannot be read.
    """
    nodes = {h.node for each in (held.snapshots, held.logs, held.parked) for h in each}
    lost = select_nodes(nodes | set(homes.values()) | set(labels), labels, lose)
    # A rank whose node is lost runs on another one, which has no copies of it.
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
        _localized_outcome(rank, localized, homes.get(rank, ""), lost, newest.get(rank, -1), whose)
        if isinstance(localized, LocalizedPlan)
        else _outcome(rank, plan, homes.get(rank, ""), lost, newest.get(rank, -1))
        for rank in range(world_size)
    )
    return WhatIf(lost, plan, ranks, localized)


def select_nodes(
    nodes: Collection[str], labels: Mapping[str, Mapping[str, str]], lose: Sequence[str]
) -> tuple[str, ...]:
    """The nodes that match any of the selectors, sorted.

    Raises:
        ValueError: a selector matches no node, or is malformed; the message lists the known labels.
    """
    by_node = {node: {**labels.get(node, {}), NODE_LABEL: node} for node in nodes}
    found: set[str] = set()
    for selector in lose:
        label, separator, value = selector.partition("=")
        if not separator or not label:
            raise ValueError(f"{selector!r} is not label=value; {_known_labels(by_node)}")
        fitting = {node for node, own in by_node.items() if own.get(label) == value}
        if not fitting:
            raise ValueError(f"no node has {selector!r}; {_known_labels(by_node)}")
        found |= fitting
    return tuple(sorted(found))


def _localized(
    held: RunHoldings,
    world_size: int,
    homes: Mapping[int, str],
    newest: Mapping[int, int],
    verify_iterations: int,
) -> LocalizedPlan | NotLocalized:
    """The plan of the surviving ranks after they have parked."""
    if not homes:
        return NotLocalized("no node is left on which a rank trains")
    without = sorted(rank for rank in homes if newest.get(rank, -1) < 0)
    if without:
        return NotLocalized(f"no node holds a snapshot of {listed('rank', without)} yet")
    facts = facts_from_logs(range(world_size), held.logs, held.parked)
    return plan_localized(held, facts, world_size, homes=homes, verify_iterations=verify_iterations)


def _to_be_parked(
    snapshots: Sequence[HeldRecords],
    homes: Mapping[int, str],
    newest: Mapping[int, int],
    known_epochs: Mapping[int, int],
) -> list[HeldRecords]:
    """The inventories after these ranks have parked at the iteration of the slowest one."""
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
        place = (homes[rank], f"{_NOT_THERE_YET}: rank {rank}", True, rank)
        table = (like.num_operators, like.operators_id, like.slot_bytes)
        states.append(HeldRecords(*place, *table, (state,)))
    return states


def _newest(held: Iterable[HeldRecords], known_epochs: Mapping[int, int]) -> dict[int, int]:
    """The newest sealed iteration of every rank on any node; stale ones do not count."""
    known = list(held)
    epochs = epoch_table((record for h in known for record in h.records), known_epochs)
    newest: dict[int, int] = {}
    for h in known:
        sealed = (r.iteration for r in live(h.records, epochs) if r.sealed)
        newest[h.rank] = max(newest.get(h.rank, -1), max(sealed, default=-1))
    return newest


def _localized_outcome(
    rank: int,
    plan: LocalizedPlan,
    home: str,
    lost: Collection[str],
    newest: int,
    whose: Mapping[tuple[str, str], int],
) -> RankOutcome:
    """The outcome of a rank in the localized plan; ``whose``: of each parked state, by node and segment."""
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


def _preferred(images: Iterable[SnapshotToLoad]) -> tuple[str, ...]:
    return tuple(sorted({image.sources[0].node for image in images}))


def _known_labels(labels: Mapping[str, Mapping[str, str]]) -> str:
    """Every label with its values, for a message."""
    values: dict[str, set[str]] = {}
    for own in labels.values():
        for label, value in own.items():
            values.setdefault(label, set()).add(value)
    texts = [f"{label}={_some(sorted(found))}" for label, found in sorted(values.items())]
    return f"known labels: {'; '.join(texts)}" if texts else "no nodes are known"


def _some(values: Sequence[str]) -> str:
    return "|".join(values[:_SHOWN]) + ("|…" if len(values) > _SHOWN else "")
