"""How many replicas each expert gets, from its load.

Problem: split the slots of a layer over its experts in proportion to their tokens, so that replicas of all
experts have about as much to do, but give each enough replicas to outlive the loss of nodes.

Method: equation 1 of Lazarus (§4.1). With experts in ascending order of load t (ties by index), S slots and
threshold f,

    r_e = max( floor( (S - r_1 - … - r_{e-1}) * t_e / (t_e + … + t_E) ), f )

and the last takes what is left, so that all slots are used. What we add:

- All arithmetic is on integers; a floor of floats is another number on another machine.
- Experts without load share what is left evenly: 0/0 never arises.
- **The threshold is what the nodes can hold.** A node holds an expert once for this purpose, so the
  most that all experts can have is ``floor(sum over nodes of min(slots, E) / E)`` distinct nodes,
  and alike for domains. That is at most f, the slots per expert and the number of nodes, and less
  where a few nodes have most of the slots. It is exact: dealing the experts out in turn reaches it
  (see ``placement``).
- **No more replicas than ranks.** With one on every rank, an expert's tokens are spread evenly over all
  compute there is, and another replica neither speeds it up nor makes it safer. What such experts do
  not take is shared by the others, which get safer. Where no expert is over the limit, the result is
  equation 1's. A rank with more slots than experts leaves some empty.

Complexity: O(E log E) for a layer, and O(E) more for each time that the limit is newly reached.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ckptd.core.elastic.elastic_types import Cluster, checked_loads
from ckptd.errors import ElasticError

__all__ = ["Allocation", "allocate", "domain_slots", "reachable_threshold", "useful_slots"]


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """Replicas of every expert, and what they can guarantee.

    ``replicas`` is ``[L, E]``, read-only. Every expert can be placed on ``node_threshold`` distinct nodes
    that lie in ``domain_threshold`` distinct domains: the loss of fewer nodes, or of fewer domains, loses
    no expert. Neither is above ``threshold``, which was asked for.
    """

    replicas: NDArray[np.int64]
    threshold: int
    node_threshold: int
    domain_threshold: int

    @property
    def met(self) -> bool:
        """Whether what was asked for is guaranteed."""
        return self.threshold == self.domain_threshold

    @property
    def reason(self) -> str:
        """What is guaranteed, in a sentence for the log and the operator."""
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
        threshold: f, in how many places each expert shall be at least. Fewer nodes than that may be lost.
        limit: the most replicas of an expert; default: the number of ranks. As many as there are slots is
            equation 1 as printed.
    Raises:
        ValueError: loads, threshold or limit are not what they must be.
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
    """On how many distinct places, of so many slots each, every expert can be; at most ``wanted``.

    Source: the condition of Gale and Ryser for equal rows, whose tightest case is that of all rows.
    """
    held = sum(min(int(n), num_experts) for n in slots)
    return min(wanted, held // num_experts)


def domain_slots(cluster: Cluster) -> NDArray[np.int64]:
    """``[D]``: slots of each domain in each layer."""
    out = np.zeros(cluster.num_domains, dtype=np.int64)
    np.add.at(out, cluster.domain_ids, cluster.slots)
    return out


def useful_slots(cluster: Cluster, num_experts: int) -> int:
    """Slots of a layer that can hold something which their rank does not hold already."""
    total = 0
    for slots, ranks in zip(cluster.slots.tolist(), cluster.ranks, strict=True):
        each, more = divmod(slots, ranks)
        total += more * min(each + 1, num_experts) + (ranks - more) * min(each, num_experts)
    return total


def _shares(loads: list[int], slots: int, least: int, most: int) -> list[int]:
    """One layer: equation 1 for those that stay under the limit, the limit for the others."""
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
    """Replicas in the order given; they ascend too, because what is left for each grows with its load."""
    out = []
    tokens = sum(ascending)
    for index, load in enumerate(ascending):
        share = slots * load // tokens if tokens else slots // (len(ascending) - index)
        out.append(max(share, least))
        slots -= out[-1]
        tokens -= load
    return out
