"""Which nodes hold whose replicas: one pure function of a run's nodes and ranks.

Every daemon computes it from the same members and gets the same answer, whatever the order of its
input. In the order of what gives way last:

1. a replica is never on its rank's own node, and no node holds two of one rank;
2. no node is given more than its capacity;
3. the copies of a rank (its own, and every replica) lie in as many domains of the most significant label as
   there are, then of the next label, and so on; what cannot be had so is named in a warning;
4. no node receives more than the mean and one rank's ring, where 1 to 3 allow it;
5. a node that comes or goes changes the targets of few ranks.

How. Nodes stand on a ring in the order of a hash of their names, which a change of the membership leaves as
it is. Each takes the first nodes clockwise that lie in new domains and have room under a limit near the
mean, the nearest pairs first: all take their first target, then all their second. Where all that is eligible
is full, the limit of just that is raised by what is needed. At last, nodes above the mean and one ring
hand on what others can take. With many more domains than replicas, a node that goes concerns the few
before it; with hardly more (two or three zones), room has to be handed on from zone to zone, which
concerns the ranks of a few times the root of the number of nodes.

All ranks of one node go to the same peers, unless capacity or the balance splits them. What each
node receives is the same either way, and so is the time to restore a lost node, since its own link
is the narrow one. But there are fewer connections, and fewer sets of replicas + 1 nodes whose
simultaneous loss takes all copies of a rank: that is the reason behind Gemini's groups (SOSP '23).
Groups of replicas + 1 would have fewer such sets still than our one for each node, but a node that
comes or goes moves all their borders.

Ranks of the same ``state_group`` hold the same state (MoEtion §5.1: data-parallel peers), so a live one on
another node is a copy that need not be sent. It counts only if no usable node would lie in better
domains: redundancy that fails with the same rack is no reason to send nothing.

Sizes are bytes; ``domains`` are label keys, most significant first. A domain is named by the labels from the
most significant on, so that rack 1 of zone a is not rack 1 of zone b; a node without a label is a domain of
its own.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from ckptd.core.placement.bundles import bundles_of
from ckptd.core.placement.nodes import NodeRing
from ckptd.core.placement.placement_facts import (
    DOMAINS,
    NodeFacts,
    PlacedRank,
    ReplicaPlacement,
    check,
)
from ckptd.core.placement.relief import balance
from ckptd.core.placement.shortcomings import warnings_of
from ckptd.core.placement.spreading import Spreading
from ckptd.units import format_bytes

__all__ = ["DOMAINS", "NodeFacts", "PlacedRank", "ReplicaPlacement", "plan_placement"]


def plan_placement(
    nodes: Sequence[NodeFacts],
    ranks: Sequence[PlacedRank],
    *,
    replicas: int,
    domains: tuple[str, ...] = DOMAINS,
    without: Container[str] = (),
) -> ReplicaPlacement:
    """Place ``replicas`` replicas of every rank; see the module.

    Args:
        without: the nodes that are dead: they hold nothing, and their ranks count for nothing.
    Raises:
        ValueError: a node or a rank twice, a rank on an unknown node, a negative number.
    """
    check(nodes, ranks, replicas)
    ring = NodeRing([facts for facts in nodes if facts.node not in without], domains)
    live = [facts for facts in ranks if facts.node in ring.position]
    wanted = max(0, min(replicas, len(ring.names) - 1))
    bundles = bundles_of(ring, sorted(live, key=lambda facts: facts.rank), wanted)
    spreading = Spreading(ring, max((facts.ring_bytes for facts in live), default=0))
    spreading.place(bundles, wanted)
    balance(spreading)
    return _result(spreading, ranks, replicas, domains)


def _result(
    spreading: Spreading, ranks: Sequence[PlacedRank], replicas: int, domains: tuple[str, ...]
) -> ReplicaPlacement:
    ring = spreading.ring
    targets: dict[int, tuple[str, ...]] = {facts.rank: () for facts in sorted(ranks, key=lambda f: f.rank)}
    for bundle in spreading.bundles:
        names = tuple(ring.names[p] for p in bundle.members[1 + bundle.num_copies :])
        targets.update((facts.rank, names) for facts in bundle.ranks)
    received = dict(sorted(zip(ring.names, spreading.load, strict=True)))
    num_targets = sum(map(len, targets.values()))
    most, mean = max(received.values(), default=0), sum(received.values()) // (len(received) or 1)
    reason = (
        f"{num_targets} replicas ({replicas} wanted) of {len(ranks)} ranks on {len(received)} nodes, "
        f"of which one receives {format_bytes(most)} at most, {format_bytes(mean)} on average"
    )
    return ReplicaPlacement(targets, received, warnings_of(spreading, replicas, domains), reason)
