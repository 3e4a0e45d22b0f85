"""What placement is given, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["DOMAINS", "NodeFacts", "PlacedRank", "ReplicaPlacement", "check"]

DOMAINS = ("zone", "rack", "host")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node that can hold replicas. ``capacity_bytes``: what it takes from others; None: any amount."""

    node: str
    labels: Mapping[str, str] = field(default_factory=dict)
    capacity_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PlacedRank:
    """A rank, its node, what a replica of it takes, and whose live state equals its own ("": nobody's)."""

    rank: int
    node: str
    ring_bytes: int
    state_group: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaPlacement:
    """Who holds whose replicas, and what that does not give.

    Attributes:
        targets: of every rank, the nodes of its replicas, in the order in which they were chosen; () for
            the ranks of dead nodes, which nobody could send.
        received_bytes: of every usable node, the sizes of all the replicas it holds.
        warnings: each a sentence on some ranks or nodes, at most 32.
        reason: one line for the log.
    """

    targets: Mapping[int, tuple[str, ...]]
    received_bytes: Mapping[str, int]
    warnings: tuple[str, ...]
    reason: str


def check(nodes: Sequence[NodeFacts], ranks: Sequence[PlacedRank], replicas: int) -> None:
    known = {facts.node for facts in nodes}
    if len(known) < len(nodes) or len({facts.rank for facts in ranks}) < len(ranks):
        raise ValueError("a node or a rank is given twice")
    if replicas < 0 or any(
        facts.capacity_bytes is not None and facts.capacity_bytes < 0 for facts in nodes
    ):
        raise ValueError("the number of replicas or a capacity is negative")
    for facts in ranks:
        if facts.node not in known or facts.ring_bytes < 0:
            raise ValueError(f"rank {facts.rank}: node {facts.node!r}, {facts.ring_bytes} bytes")
