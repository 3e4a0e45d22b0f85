"""Whether any placement of one layer is better than a plan, by trying all of them: ``python -m
tests.ckptd.core.elastic.dominance``.

A placement dominates a plan if it survives no number of lost nodes less likely and its busiest node has
no more to do, and one of both is better. Nodes are alike: a placement is a multiset of node contents,
each a multiset of experts. So an expert may lie twice on a node, unlike in `exhaustive`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import comb

import numpy as np
from numpy.typing import NDArray

from ckptd.core.elastic.allocation import allocate, token_shares
from ckptd.core.elastic.elastic_types import Cluster
from ckptd.core.elastic.expert_placement import place

__all__ = ["EVERYWHERE", "Comparison", "Placements", "comparisons"]

EVERYWHERE = 0.02
MOVES = 2000


class Placements:
    """All placements of so many experts on nodes of so many slots: ``counts`` ``[M, N, E]``, and ``ways``
    ``[M, N - 1]``, the numbers of choices of 1 … N - 1 lost nodes that each survives.
    """

    def __init__(self, num_nodes: int, num_experts: int, slots: int) -> None:
        contents = list(combinations_with_replacement(range(num_experts + 1), slots))
        held = np.array([[one.count(e) for e in range(num_experts)] for one in contents], dtype=np.int8)
        chosen = np.array(list(combinations_with_replacement(range(len(held)), num_nodes)), dtype=np.int16)
        everything = (1 << num_experts) - 1
        masks = ((held > 0) @ (1 << np.arange(num_experts))).astype(np.uint8)[chosen]
        whole = np.bitwise_or.reduce(masks, axis=1) == everything
        chosen, masks = chosen[whole], masks[whole]
        self.counts = held[chosen]
        self.replicas = self.counts.sum(axis=1, dtype=np.int64)
        self.ways = np.zeros((len(chosen), max(num_nodes - 1, 0)), dtype=np.int64)
        for lost in range(1, (1 << num_nodes) - 1):
            alive = [node for node in range(num_nodes) if not lost >> node & 1]
            there = np.bitwise_or.reduce(masks[:, alive], axis=1) == everything
            self.ways[:, num_nodes - len(alive) - 1] += there

    def of(self, replicas: NDArray[np.int64]) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
        """``counts`` and ``ways`` of those with so many replicas of each expert."""
        these = (self.replicas == replicas).all(axis=1)
        return self.counts[these], self.ways[these]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A plan and all placements of the same replicas.

    Args:
        lacks: the most probability, at any number of lost nodes, by which the best for that number is better.
        dominated: True if some placement dominates it.
        busier: by what factor its busiest node has more to do than that of one which dominates it.
    """

    loads: tuple[int, ...]
    num_nodes: int
    slots: int
    lacks: float
    dominated: bool
    busier: float


def compare(
    everything: Placements, loads: tuple[int, ...], num_nodes: int, slots: int, threshold: int, moves: int
) -> Comparison:
    """Plan one instance and compare."""
    cluster = Cluster.uniform(num_nodes, slots)
    allocation = allocate([loads], cluster, threshold)
    plan = place(allocation, [loads], cluster, moves=moves).placement
    shares, _ = token_shares(np.array([loads]), allocation.replicas)
    counts, ways = everything.of(allocation.replicas[0])
    busy = (counts.astype(np.int64) @ shares[0]).max(axis=1)
    # The plan is one of them, up to the order of its nodes.
    rows = {tuple(sorted(map(tuple, one))): index for index, one in enumerate(counts.tolist())}
    mine = rows[tuple(sorted(map(tuple, plan.counts[0].tolist())))]
    choices = np.array([comb(num_nodes, k) for k in range(1, num_nodes)])
    lacks = float(((ways.max(axis=0) - ways[mine]) / choices).max(initial=0.0))
    above = (ways >= ways[mine]).all(axis=1) & (busy <= busy[mine])
    above &= (ways > ways[mine]).any(axis=1) | (busy < busy[mine])
    least = int(busy[above].min()) if above.any() else int(busy[mine])
    return Comparison(loads, num_nodes, slots, lacks, bool(above.any()), int(busy[mine]) / max(least, 1))


def comparisons(
    num_nodes: int, num_experts: int, slots: int, *, seeds: int, moves: int = MOVES
) -> Iterator[Comparison]:
    """Plans for loads of every skew, drawn with these seeds, at thresholds 1 and 2."""
    if num_nodes * slots < num_experts:
        return
    everything = Placements(num_nodes, num_experts, slots)
    for seed in range(seeds):
        rng = np.random.default_rng([seed, num_nodes, num_experts, slots])
        shares = rng.dirichlet(np.full(num_experts, (0.2, 1.0, 5.0)[seed % 3]))
        loads = tuple(np.floor(1000 * shares).astype(int).tolist())
        yield compare(everything, loads, num_nodes, slots, 1 + seed % 2, moves)


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--nodes", type=int, default=5)
    options.add_argument("--experts", type=int, default=4)
    options.add_argument("--slots", type=int, default=3)
    options.add_argument("--seeds", type=int, default=30)
    options.add_argument("--moves", type=int, default=MOVES)
    args = options.parse_args()
    total: list[Comparison] = []
    for num_nodes in range(2, args.nodes + 1):
        for num_experts in range(2, args.experts + 1):
            for slots in range(1, args.slots + 1):
                total += comparisons(num_nodes, num_experts, slots, seeds=args.seeds, moves=args.moves)
    worst = sorted(total, key=lambda one: (one.dominated, one.lacks, one.busier), reverse=True)[:5]
    sys.stdout.write(
        f"{len(total)} plans, {sum(one.dominated for one in total)} dominated, up to "
        f"{max(one.busier for one in total):.2f} times as busy; at most {max(one.lacks for one in total):.4f} "
        "below the best at one number of lost nodes\n" + "".join(f"{one}\n" for one in worst)
    )


if __name__ == "__main__":
    main()
