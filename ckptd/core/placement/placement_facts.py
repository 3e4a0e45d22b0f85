"""Input and output of the placement of replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["DOMAINS", "NodeFacts", "PlacedRank", "ReplicaPlacement", "check"]

DOMAINS = ("zone", "rack", "host")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node that can hold replicas. ``capacity_bytes`` is the limit for replicas of other nodes'
    ranks; None: no limit.
    """

    node: str
    labels: Mapping[str, str] = field(default_factory=dict)
    capacity_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PlacedRank:
    """A rank, its node, the size of a replica, and the group of ranks with equal live state ("": none)."""

    rank: int
    node: str
    ring_bytes: int
    state_group: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaPlacement:
    """The nodes of all replicas, and the shortcomings of the placement.

    Attributes:
        targets: the nodes of each rank's replicas, in the order of their choice; () for ranks of dead
            nodes, whose replicas no node could send.
        received_bytes: the total size of the replicas on each usable node.
        warnings: sentences about some ranks or nodes, at most 32.
        reason: one line for the log.
    """

    targets: Mapping[int, tuple[str, ...]]
    received_bytes: Mapping[str, int]
    warnings: tuple[str, ...]
    reason: str


def check(nodes: Sequence[NodeFacts], ranks: Sequence[PlacedRank], replicas: int) -> None:
    known = {facts.node for facts in nodes}
    if len(known) < len(nodes) or len({facts.rank for facts in ranks}) < len(ranks):
        raise ValueError("a node or a rank is listed twice")
    if replicas < 0 or any(facts.capacity_bytes is not None and facts.capacity_bytes < 0 for facts in nodes):
        raise ValueError("the number of replicas or a capacity is negative")
    for facts in ranks:
        if facts.node not in known or facts.ring_bytes < 0:
            raise ValueError(f"rank {facts.rank}: node {facts.node!r}, {facts.ring_bytes} bytes")
