"""The number of replicas of each expert, and the balance of load of a placement (docs/elastic.md, sections
1 and 4).

**Allocation** is equation 1 of Lazarus (§4.1) on integers: with experts in ascending order of load t
(ties by index), S slots and threshold f,

    r_e = max( floor( (S - r_1 - … - r_{e-1}) * t_e / (t_e + … + t_E) ), f )

and the last takes the rest. f is clamped to what distinct nodes and domains can hold. No expert gets
more replicas than there are ranks; the other experts get the rest. Experts without load share evenly.

**Balance.** The dispatcher splits an expert's tokens evenly over its replicas, so a node's load is
the sum over its replicas of tokens / replicas, which its ranks share. All ranks wait for the busiest
in every layer: the straggler factor of several layers is the sum of the busiest over the sum of the
means. Loads are compared in fixed point: floats that differ in the last bit on another machine
would break ties differently.

**Ranks.** A node's replicas are dealt out to its ranks in turn, in descending order of their tokens,
those of one expert together. So no rank gets more than its slots (the first ones have one more if
they do not divide), a rank has an expert twice only if the node has more replicas of it than ranks,
and heavy and light replicas are mixed.

Complexity: O(E log E) for a layer, and O(E) more each time that the limit is newly reached; for
ranks O(L * R * E) in array operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement, Loads, checked_loads
from ckptd.errors import ElasticError


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """Replicas of every expert, ``[L, E]``, read-only, and their guarantee.

    Every expert can be placed on ``node_threshold`` distinct nodes in ``domain_threshold`` distinct
    domains: the loss of fewer nodes, or of fewer domains, loses no expert. Neither exceeds the
    requested ``threshold``.
    """

    replicas: NDArray[np.int64]
    threshold: int
    node_threshold: int
    domain_threshold: int

    @property
    def met(self) -> bool:
        """True if the requested threshold is guaranteed."""
        return self.threshold == self.domain_threshold

    @property
    def reason(self) -> str:
        """The guarantee, in a sentence for the log and the operator."""
        nodes, domains = self.node_threshold - 1, self.domain_threshold - 1
        kept = f"any {nodes} node{'s' * (nodes != 1)} may be lost" if nodes else "no node may be lost"
        if domains != nodes:
            kept += f", any {domains} domain{'s' * (domains != 1)}" if domains else ", but no domain"
        if self.met:
            return f"every expert has {self.threshold} places to live: {kept}"
        return (
            f"asked for {self.threshold} replicas of every expert in distinct domains, the slots hold "
            f"{self.domain_threshold} (on distinct nodes {self.node_threshold}): {kept}"
        )


def allocate(loads: ArrayLike, cluster: Cluster, threshold: int, *, limit: int | None = None) -> Allocation:
    """Give every expert of every layer its number of replicas; see the module.

    Args:
        loads: ``[L, E]`` integers, tokens routed to each expert; not negative.
        threshold: f, the minimum number of places of each expert. Fewer nodes may be lost.
        limit: the most replicas of an expert; default: the number of ranks. The number of slots gives
            equation 1 as printed.
    Raises:
        ValueError: invalid loads, threshold or limit.
        ElasticError: there are fewer slots than experts.
    """
    loads_LE = checked_loads(loads)
    if threshold < 1:
        raise ValueError(f"threshold is {threshold}; every expert needs a replica: at least 1")
    num_experts = loads_LE.shape[1]
    if cluster.num_slots < num_experts:
        raise ElasticError(
            f"{cluster.num_slots} slots on {cluster.num_nodes} nodes cannot hold {num_experts} experts",
            operation="allocate",
            ids={"slots": cluster.num_slots, "experts": num_experts},
            hint="Give the ranks more slots, or wait for more nodes",
        )
    nodes = reachable_threshold(cluster.slots, num_experts, threshold)
    if limit is not None and limit < nodes:
        raise ValueError(f"limit is {limit}, below the {nodes} replicas that every expert gets")
    slots, most = useful_slots(cluster, num_experts), cluster.num_ranks
    if limit is not None:
        slots, most = min(cluster.num_slots, limit * num_experts), limit
    rows = [_shares(row, slots, nodes, most) for row in loads_LE.tolist()]
    replicas = np.array(rows, dtype=np.int64)
    replicas.flags.writeable = False
    in_domains = reachable_threshold(domain_slots(cluster), num_experts, threshold)
    return Allocation(replicas, threshold, nodes, in_domains)


def reachable_threshold(slots: NDArray[np.int64], num_experts: int, wanted: int) -> int:
    """The number of distinct places, with these slots, that every expert can have; at most ``wanted``.

    Source: the condition of Gale and Ryser for equal rows; the case of all rows is the tightest.
    """
    held = sum(min(int(n), num_experts) for n in slots)
    return min(wanted, held // num_experts)


def domain_slots(cluster: Cluster) -> NDArray[np.int64]:
    """``[D]``: slots of each domain in each layer."""
    out = np.zeros(cluster.num_domains, dtype=np.int64)
    np.add.at(out, cluster.domain_ids, cluster.slots)
    return out


def useful_slots(cluster: Cluster, num_experts: int) -> int:
    """Slots of a layer that can hold an expert which their rank does not already hold."""
    total = 0
    for slots, ranks in zip(cluster.slots.tolist(), cluster.ranks, strict=True):
        each, more = divmod(slots, ranks)
        total += more * min(each + 1, num_experts) + (ranks - more) * min(each, num_experts)
    return total


def _shares(loads: list[int], slots: int, least: int, most: int) -> list[int]:
    """One layer: equation 1 for the experts below the limit, the limit for the others."""
    ascending = sorted(range(len(loads)), key=loads.__getitem__)
    out = [0] * len(loads)
    rest = len(ascending)
    while rest:
        shares = _equation_1([loads[e] for e in ascending[:rest]], slots, least)
        under = sum(share <= most for share in shares)  # ascending, like the loads
        if under == rest:
            for expert, share in zip(ascending, shares, strict=False):
                out[expert] = share
            return out
        for expert in ascending[under:rest]:
            out[expert] = most
        slots -= most * (rest - under)
        rest = under
    return out


def _equation_1(ascending: list[int], slots: int, least: int) -> list[int]:
    """Replicas in the given order; they ascend, too, because each expert's share grows with its load."""
    out = []
    tokens = sum(ascending)
    for index, load in enumerate(ascending):
        share = slots * load // tokens if tokens else slots // (len(ascending) - index)
        out.append(max(share, least))
        slots -= out[-1]
        tokens -= load
    return out


SHARE_BITS = 60  # of a layer's tokens in fixed point: a node's sum stays within int64


def straggler_factor(placement: ExpertPlacement, loads: ArrayLike, cluster: Cluster) -> float:
    """Load of the busiest rank over the mean, over all layers; 1.0 is perfect balance (or no load).

    Raises:
        ValueError: loads are of another shape than the placement, or not what loads must be.
    """
    most, total = _most_and_total(placement, loads, cluster)
    return cluster.num_ranks * sum(most) / sum(total) if sum(total) else 1.0


def straggler_by_layer(placement: ExpertPlacement, loads: ArrayLike, cluster: Cluster) -> tuple[float, ...]:
    """``straggler_factor`` of each layer for itself."""
    most, total = _most_and_total(placement, loads, cluster)
    return tuple(cluster.num_ranks * m / t if t else 1.0 for m, t in zip(most, total, strict=True))


def _most_and_total(
    placement: ExpertPlacement, loads: ArrayLike, cluster: Cluster
) -> tuple[list[int], list[int]]:
    loads_LE = checked_loads(loads)
    if loads_LE.shape != (placement.num_layers, placement.num_experts):
        raise ValueError(
            f"loads of shape {loads_LE.shape} for {placement.num_layers} layers "
            f"of {placement.num_experts} experts"
        )
    placement.check(cluster)
    shares, bits = token_shares(loads_LE, placement.replicas)
    most = busiest(placement.counts, shares, np.array(cluster.ranks)).tolist()
    total = [sum(row) for row in loads_LE.tolist()]
    return most, [t << bits if bits >= 0 else t >> -bits for t in total]


def token_shares(loads_LE: Loads, replicas_LE: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """``[L, E]``: tokens of one replica, times 2 to the power of the second value."""
    bits = SHARE_BITS - max(sum(row) for row in loads_LE.tolist()).bit_length()
    scaled = loads_LE << bits if bits >= 0 else loads_LE >> -bits
    return scaled // np.maximum(replicas_LE, 1), bits


def node_tokens(counts_LNE: NDArray[np.int32], shares_LE: NDArray[np.int64]) -> NDArray[np.int64]:
    """``[L, N]``: tokens of every node, in the fixed point of the shares."""
    layers = zip(counts_LNE, shares_LE, strict=True)
    return np.stack([counts_NE @ shares_E for counts_NE, shares_E in layers])


def busiest(
    counts_LNE: NDArray[np.int32], shares_LE: NDArray[np.int64], ranks_N: NDArray[np.int64]
) -> NDArray[np.int64]:
    """``[L]``: tokens of a rank of the busiest node, whose ranks share them evenly."""
    return np.asarray((node_tokens(counts_LNE, shares_LE) // ranks_N).max(axis=1))


def split_over_ranks(
    placement: ExpertPlacement, cluster: Cluster, loads: ArrayLike | None = None
) -> NDArray[np.int32]:
    """``[L, R, E]``: replicas of each rank; the ranks of node 0 first, then those of node 1.

    Args:
        loads: ``[L, E]``, to tell heavy replicas from light ones; default: all equal.
    Raises:
        ValueError: arrays of different shapes.
        ElasticError: the placement is not for this cluster.
    """
    placement.check(cluster)
    replicas_LE = placement.replicas
    loads_LE = checked_loads(np.zeros_like(replicas_LE) if loads is None else loads)
    if loads_LE.shape != replicas_LE.shape:
        raise ValueError(f"loads of shape {loads_LE.shape} for {replicas_LE.shape} experts")
    shares_LE, _ = token_shares(loads_LE, replicas_LE)
    order_LE = np.argsort(-shares_LE, axis=1, kind="stable")
    back_LE = np.argsort(order_LE, axis=1)
    num_layers, num_experts = replicas_LE.shape
    out = np.zeros((num_layers, cluster.num_ranks, num_experts), dtype=np.int32)
    at = 0
    for node, ranks in enumerate(cluster.ranks):
        sorted_LE = np.take_along_axis(placement.counts[:, node], order_LE, axis=1)
        stop_LE = np.cumsum(sorted_LE, axis=1, dtype=np.int64)
        for rank in range(ranks):
            # Positions before p that are this rank's turn: ceil((p - rank) / ranks).
            before = -((rank - np.stack([stop_LE - sorted_LE, stop_LE])) // ranks)
            out[:, at] = np.take_along_axis(before[1] - before[0], back_LE, axis=1)
            at += 1
    return out
