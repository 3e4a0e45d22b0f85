"""Whole placements to choose from, for units first and for the nodes within each unit then."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ckptd.core.elastic.elastic_types import Cluster
from ckptd.core.elastic.placement.allocation import domain_slots
from ckptd.core.elastic.placement.expert_layout import (
    LayoutProblem,
    Shape,
    ascending,
    complete,
    lay_out,
    num_groups,
    spread_out,
)

__all__ = ["domain_problem", "guaranteed", "layouts", "within_domains"]


def domain_problem(cluster: Cluster, problem: LayoutProblem) -> LayoutProblem:
    """The same replicas on domains instead of nodes."""
    return LayoutProblem(problem.replicas, problem.shares, domain_slots(cluster))


def layouts(
    problem: LayoutProblem, threshold: int, *, whole_family: bool, balanced: bool
) -> Iterator[tuple[str, NDArray[np.int32]]]:
    """The layouts to try, with their names: the likely best first, each ``[L, U, E]``.

    Args:
        threshold: on how many units every expert has to be.
        whole_family: every shape there is, instead of a few.
        balanced: of the few, also those that give up recovery for balance.
    """
    shapes = _family(problem, threshold) if whole_family else _few(problem, balanced=balanced)
    for shape in shapes:
        yield _name(problem, shape), lay_out(problem, shape)
    yield "spread", spread_out(problem)


def _few(problem: LayoutProblem, *, balanced: bool) -> list[Shape]:
    groups, slots = num_groups(problem), int(problem.capacity.min())
    out = [Shape(groups), Shape(groups, len(problem.capacity))]
    if balanced:
        evens = {max(slots // 4, 1), slots // 2, slots * 3 // 4} & set(range(1, slots))
        out += [Shape(2 * groups, 0, 1, even) for even in sorted(evens)]
        out += [Shape(groups // 4), Shape(0)]
    return out


def _family(problem: LayoutProblem, threshold: int) -> list[Shape]:
    units, slots = len(problem.capacity), int(problem.capacity.min())
    levels = dict.fromkeys([0, units] if problem.uniform else [units, threshold, min(2 * threshold, units)])
    most = -(-problem.replicas.shape[1] // slots)  # groups, if all units are as small as the smallest
    bundles = [b for b in range(1, slots + 1) if slots % b == 0]
    return [
        *(Shape(most, level) for level in levels),
        *(Shape(n, level, b) for n in range(most - 1, 0, -1) for level in levels for b in bundles),
        *(Shape(0, 0, bundle) for bundle in bundles),
        *(Shape(problem.replicas.shape[1], 0, 1, even) for even in range(1, slots)),
    ]


def _name(problem: LayoutProblem, shape: Shape) -> str:
    if not shape.groups:
        return f"dealt out in bundles of {shape.bundle}"
    cut = "truncated" if shape.level else "levelled"
    name = f"{cut} maximum rank overlap"
    if shape.even:
        return f"{name} beside {shape.even} slots of the most replicated"
    if shape.groups < num_groups(problem):
        name += f" of {shape.groups} groups, the rest dealt out in bundles of {shape.bundle}"
    return name


def within_domains(
    cluster: Cluster, problem: LayoutProblem, counts_LDE: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Replicas of each domain onto its nodes, by maximum rank overlap among themselves: ``[L, N, E]``."""
    num_layers, _, num_experts = counts_LDE.shape
    out = np.zeros((num_layers, cluster.num_nodes, num_experts), dtype=np.int32)
    ids = cluster.domain_ids
    for domain in range(counts_LDE.shape[1]):
        nodes = np.flatnonzero(ids == domain)
        if len(nodes) == 1:
            out[:, nodes[0]] = counts_LDE[:, domain]
            continue
        for layer in range(num_layers):
            present = np.flatnonzero(counts_LDE[layer, domain])
            if not len(present):
                continue
            replicas = counts_LDE[layer, domain, present].astype(np.int64)[None]
            inner = LayoutProblem(replicas, problem.shares[layer, present][None], cluster.slots[nodes])
            laid = lay_out(inner, Shape(num_groups(inner)))[0]
            out[layer, nodes[:, None], present] = laid
    return out


def guaranteed(cluster: Cluster, problem: LayoutProblem, nodes_wanted: int) -> NDArray[np.int32]:
    """A placement that keeps the promise wherever one can: the experts in turn, node after node.

    Proof. A node takes ``min(slots, E)`` experts in a row, all different. A domain with E such
    slots or more gets every expert; the smaller domains stand together at the end, and one of them
    gets no expert twice. So every expert gets ``floor(sum of min(slots, E) / E)`` nodes, and as
    many domains by the same sum over domains: what ``allocation.reachable_threshold`` promises. Of
    these nodes, the first in each domain are taken first.
    """
    num_layers, num_experts = problem.replicas.shape
    ids = cluster.domain_ids
    small = domain_problem(cluster, problem).capacity[ids] < num_experts
    line = np.lexsort((ids, small))
    places = np.repeat(line, np.minimum(cluster.slots, num_experts)[line])
    counts = np.zeros((num_layers, cluster.num_nodes, num_experts), dtype=np.int32)
    order_LE = ascending(problem)
    for turn in range(num_experts):
        nodes = places[turn::num_experts]
        _, first = np.unique(ids[nodes], return_index=True)
        others = np.setdiff1d(np.arange(len(nodes)), first)
        chosen = nodes[np.concatenate([np.sort(first), others])[:nodes_wanted]]
        counts[np.arange(num_layers)[:, None], chosen, order_LE[:, turn, None]] = 1
    complete(problem, counts)
    return counts
