"""How much the busiest rank has to do, compared with the mean: what concentrating replicas costs.

The dispatcher splits an expert's tokens evenly over its replicas, so a node's load is the sum over its
replicas of tokens / replicas, and its ranks share it. All ranks wait for the busiest in every layer;
the factor of several layers is therefore the sum of the busiest over the sum of the means.

Loads are compared in fixed point, so that all ranks find the same plan: a tie of floats that differ
in the last bit on another machine would not be one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement, Loads, checked_loads

__all__ = ["busiest", "node_tokens", "straggler_by_layer", "straggler_factor", "token_shares"]

SHARE_BITS = 60  # of the tokens of a layer in fixed point: a node's sum stays within int64


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
    """``[L, E]``: tokens of one replica, times two to the second value; the same on every machine."""
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
    """``[L]``: tokens of a rank of the busiest node, if its ranks share them evenly."""
    return np.asarray((node_tokens(counts_LNE, shares_LE) // ranks_N).max(axis=1))
