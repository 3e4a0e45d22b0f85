"""How far plans are from the best placement there is, on every small instance: ``python -m
tests.ckptd.core.elastic.optima``.

Prints a row for each number of nodes, experts and slots: how many instances (numbers of replicas)
there are, for how many a strict plan exists, how many plans are the optimum for each number of lost
nodes, and the largest distance of the others from the best for one number. No placement at all is
left out, so the optimum need not keep the promise of `allocate`, and may be another for each number.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import comb

import numpy as np

from ckptd.core.elastic.allocation import Allocation, reachable_threshold
from ckptd.core.elastic.elastic_types import Cluster
from ckptd.core.elastic.expert_placement import PlacementPlan, place
from ckptd.core.elastic.survival import holder_sets, survivor_counts
from tests.ckptd.core.elastic.bounded import best_above
from tests.ckptd.core.elastic.exhaustive import instances

__all__ = ["WORST", "Distance", "distance", "planned"]

MOVES = 2000
WORST = 0.02


@dataclass(frozen=True, slots=True)
class Distance:
    """Of a plan from the optimum: the most probability that it lacks at one number of lost nodes."""

    replicas: tuple[int, ...]
    strict: bool
    lacks: float
    states: int


def planned(layers: list[tuple[int, ...]], num_nodes: int, slots: int, moves: int = 100) -> PlacementPlan:
    """A plan for given numbers of replicas, which promise what their smallest can."""
    replicas = np.array(layers)
    cluster = Cluster.uniform(num_nodes, slots)
    promised = reachable_threshold(cluster.slots, replicas.shape[1], int(replicas.min()))
    allocation = Allocation(replicas, promised, promised, promised)
    return place(allocation, np.ones_like(replicas), cluster, moves=moves)


def distance(replicas: tuple[int, ...], num_nodes: int, slots: int, *, moves: int = MOVES) -> Distance:
    """Plan one instance and look for anything better."""
    strict = sum(replicas[::slots]) <= num_nodes
    plan = planned([replicas], num_nodes, slots, 0 if strict else moves)
    assert plan.placement.replicas.tolist() == [list(replicas)]
    assert plan.method.startswith("strict") == strict
    ours = survivor_counts(holder_sets(plan.placement), num_nodes)
    assert ours is not None
    lacks, states = 0.0, 0
    for size in range(1, num_nodes):
        only = np.zeros(num_nodes + 1, dtype=np.int64)
        only[size] = 1
        found = best_above(replicas, num_nodes, slots, only, ours[size])
        lacks = max(lacks, (found.value - ours[size]) / comb(num_nodes, size))
        states += found.states
    return Distance(replicas, strict, lacks, states)


def _rows(most_nodes: int, most_experts: int, most_slots: int) -> Iterator[tuple[int, int, int]]:
    return product(range(1, most_nodes + 1), range(1, most_experts + 1), range(1, most_slots + 1))


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--nodes", type=int, default=7)
    options.add_argument("--experts", type=int, default=6)
    options.add_argument("--slots", type=int, default=4)
    args = options.parse_args()
    everything: list[Distance] = []
    _say("nodes experts slots  instances strict optimal  largest distance  seconds")
    for num_nodes, num_experts, slots in _rows(args.nodes, args.experts, args.slots):
        begun = time.monotonic()
        found = [
            distance(replicas, num_nodes, slots) for replicas in instances(num_nodes, num_experts, slots)
        ]
        if found:
            everything += found
            _say(_row((num_nodes, num_experts, slots), found, time.monotonic() - begun))
    loose = [d for d in everything if not d.strict]
    tight = [d for d in everything if d.strict]
    _say(
        f"all: {len(everything)} instances; {len(tight)} with a strict plan, {_optimal(tight)} of them optimal; "
        f"{len(loose)} without, {_optimal(loose)} of them optimal, the largest distance is {_worst(loose):.4f}"
    )


def _row(size: tuple[int, int, int], found: list[Distance], took_s: float) -> str:
    num_nodes, num_experts, slots = size
    strict = sum(d.strict for d in found)
    worst = max(found, key=lambda one: one.lacks)
    told = f"{worst.lacks:.4f} {worst.replicas}" if worst.lacks else "0"
    head = f"{num_nodes:5} {num_experts:7} {slots:5}  {len(found):9} {strict:6}"
    return f"{head} {_optimal(found):7}  {told}  {took_s:.1f}"


def _optimal(found: list[Distance]) -> int:
    return sum(d.lacks == 0 for d in found)


def _worst(found: list[Distance]) -> float:
    return max((d.lacks for d in found), default=0.0)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
