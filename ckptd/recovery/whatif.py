"""What would be left if nodes were lost: the recovery plan of the nodes that would remain.

Nothing here knows more than a real recovery would: the same holdings go through the same plan
(`ckptd.recovery.plan`), without those of the lost nodes. Pure, so that it can be asked at any time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptd.memory.ring import epoch_table, live
from ckptd.recovery.plan import HeldRecords, NoRecovery, Piece, RecoveryPlan, plan_recovery

__all__ = ["NODE_LABEL", "RankOutcome", "WhatIf", "select_nodes", "what_if"]

NODE_LABEL = "node"  # every node has it, and its value is the node's name
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """What one rank would go through.

    Args:
        home_lost: whether the node it runs on is among the lost ones.
        sources: the nodes from which it would be recovered; empty if it cannot be.
        replayed: iterations that it repeats from snapshots, to be exact again.
        lost_iterations: iterations between where it would resume and its newest snapshot now.
        moved_bytes: what would come from other nodes; all of it where the home is lost.
    """

    rank: int
    home: str
    home_lost: bool
    sources: tuple[str, ...]
    replayed: int
    lost_iterations: int
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The answer: which nodes were meant, the plan (or why there is none), and what it costs each rank."""

    lost_nodes: tuple[str, ...]
    plan: RecoveryPlan | NoRecovery
    ranks: tuple[RankOutcome, ...]

    @property
    def recoverable(self) -> bool:
        """Whether the job would go on from a snapshot."""
        return isinstance(self.plan, RecoveryPlan)


def what_if(
    held: Iterable[HeldRecords],
    world_size: int,
    homes: Mapping[int, str],
    labels: Mapping[str, Mapping[str, str]],
    lose: Sequence[str],
) -> WhatIf:
    """What losing all these nodes at once would mean.

    Args:
        held: what the nodes hold now.
        homes: the node on which each rank runs.
        labels: of each node, such as ``{"node-3": {"rack": "A"}}``.
        lose: selectors ``label=value``; ``node=<name>`` needs no label. A node that any of them fits is lost.
    Raises:
        ValueError: a selector fits no node, or is none.
    """
    known = list(held)
    nodes = {h.node for h in known} | set(homes.values()) | set(labels)
    lost = select_nodes(nodes, labels, lose)
    # A rank whose node is gone runs elsewhere: nothing is at home there.
    left = {rank: node for rank, node in homes.items() if node not in lost}
    plan = plan_recovery(known, world_size, homes=left, lost=set(lost))
    newest = _newest(known)
    ranks = tuple(
        _outcome(rank, plan, homes.get(rank, ""), lost, newest.get(rank, -1))
        for rank in range(world_size)
    )
    return WhatIf(lost, plan, ranks)


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


def _newest(held: Iterable[HeldRecords]) -> dict[int, int]:
    """The newest sealed iteration of every rank, on whatever node; stale ones do not count."""
    known = list(held)
    epochs = epoch_table(record for h in known for record in h.records)
    newest: dict[int, int] = {}
    for h in known:
        sealed = (r.iteration for r in live(h.records, epochs) if r.sealed)
        newest[h.rank] = max(newest.get(h.rank, -1), max(sealed, default=-1))
    return newest


def _outcome(
    rank: int, plan: RecoveryPlan | NoRecovery, home: str, lost: Collection[str], newest: int
) -> RankOutcome:
    gone = home in lost
    if isinstance(plan, NoRecovery):
        return RankOutcome(rank, home, gone, (), 0, newest + 1, 0)
    nodes = _preferred(plan.per_rank[rank])
    behind = max(0, newest - plan.end)
    return RankOutcome(rank, home, gone, nodes, plan.replayed, behind, plan.moved_bytes[rank])


def _preferred(pieces: Iterable[Piece]) -> tuple[str, ...]:
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
