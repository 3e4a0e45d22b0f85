"""A node's replicas, split over its ranks.

The nodes are what is lost, so placement knows nodes; tokens are computed by ranks. The ranks of a node
share its slots evenly, the first ones have one more where that does not come out even.

Method: the replicas of a node in descending order of their tokens, those of one expert together, are dealt
out to its ranks in turn. So no rank gets more than its slots, an expert is twice on a rank only
if it has more replicas on the node than that has ranks, and heavy and light replicas are mixed.

Complexity: O(L * R * E) in array operations.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement, checked_loads
from ckptd.core.elastic.placement.balance import token_shares

__all__ = ["rank_slots", "split_over_ranks"]


def split_over_ranks(
    placement: ExpertPlacement, cluster: Cluster, loads: ArrayLike | None = None
) -> NDArray[np.int32]:
    """``[L, R, E]``: replicas of each rank; the ranks of node 0 first, then those of node 1.

    Args:
        loads: ``[L, E]``, by which heavy replicas are told from light ones; default: all alike.
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
    parts = []
    for node, ranks in enumerate(cluster.ranks):
        sorted_LE = np.take_along_axis(placement.counts[:, node], order_LE, axis=1)
        stop_LE = np.cumsum(sorted_LE, axis=1, dtype=np.int64)
        for rank in range(ranks):
            # Positions before p that are this rank's turn: ceil((p - rank) / ranks).
            before = -((rank - np.stack([stop_LE - sorted_LE, stop_LE])) // ranks)
            parts.append(np.take_along_axis(before[1] - before[0], back_LE, axis=1))
    return np.stack(parts, axis=1).astype(np.int32)


def rank_slots(cluster: Cluster) -> NDArray[np.int64]:
    """``[R]``: slots of every rank in each layer."""
    slots = zip(cluster.slots.tolist(), cluster.ranks, strict=True)
    return np.array([n // k + (i < n % k) for n, k in slots for i in range(k)], dtype=np.int64)
