"""Layouts by cores: complete, few lethal sets in all layers together, within the limit, and domains first."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.core.elastic.allocation import allocate, straggler_factor, token_shares
from ckptd.core.elastic.core_layout import CoreProblem, lay_out_cores, settle
from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement
from ckptd.core.elastic.expert_layout import LayoutProblem
from ckptd.core.elastic.expert_placement import place
from ckptd.core.elastic.survival import holder_sets


def skewed(layers: int, experts: int, seed: int = 0) -> np.ndarray:
    shares = np.random.default_rng(seed).dirichlet(np.full(experts, 0.5), layers)
    return np.floor(1e6 * shares).astype(np.int64)


def racks(nodes: int, each: int) -> tuple[str, ...]:
    return tuple(f"rack-{node // each}" for node in range(nodes))


def problem_of(loads: np.ndarray, cluster: Cluster, horizon: int = 16) -> CoreProblem:
    replicas = allocate(loads, cluster, 2).replicas
    shares, _ = token_shares(loads, replicas)
    nodes = LayoutProblem(replicas, shares, cluster.slots)
    return CoreProblem(nodes, cluster.domain_ids, np.array(cluster.ranks), horizon)


def sizes_of_sets(placement: ExpertPlacement, units: np.ndarray | None = None) -> list[int]:
    """How many minimal sets of each size lose an expert."""
    sizes = holder_sets(placement, units).sum(axis=1)
    return [int(number) for number in np.bincount(sizes)]


@given(st.integers(0, 2**32), st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_replica_has_a_slot(seed: int, bounded: bool, domains: bool) -> None:
    rng = np.random.default_rng(seed)
    num_nodes, num_experts = int(rng.integers(1, 40)), int(rng.integers(1, 30))
    slots = rng.integers(1, 9, num_nodes) + -(-num_experts // num_nodes)
    names = tuple(rng.choice(list("abcdefgh"), num_nodes).tolist()) if domains else ()
    cluster = Cluster(slots, names, tuple(rng.integers(1, 3, num_nodes).tolist()))
    loads = rng.integers(0, 1000, (int(rng.integers(1, 4)), num_experts))
    problem = problem_of(loads, cluster, horizon=int(rng.integers(1, 20)))
    tokens = (problem.nodes.shares * problem.nodes.replicas).sum(axis=1)
    counts = lay_out_cores(problem, tokens // cluster.num_ranks if bounded else None)
    assert counts.min() >= 0
    assert (counts.sum(axis=2) <= slots).all()
    assert (counts.sum(axis=1) == problem.nodes.replicas).all()


def test_a_bounded_plan_of_a_thousand_nodes_keeps_the_bound_and_few_pairs_are_lethal() -> None:
    loads, cluster = skewed(8, 256), Cluster.uniform(1024, 8)
    allocation = allocate(loads, cluster, 2)
    plan = place(allocation, loads, cluster, max_straggler=1.1)
    assert (plan.placement.replicas == allocation.replicas).all()
    assert plan.node_threshold == 2
    assert straggler_factor(plan.placement, loads, cluster) <= 1.1
    # As many pairs of nodes as the layer with most experts of two replicas fills, eight to a node.
    pairs = -(-int((allocation.replicas == 2).sum(axis=1).max()) // 8)
    assert sizes_of_sets(plan.placement)[2] == pairs


def test_racks_come_first() -> None:
    """All experts of two replicas are in one pair of racks, whatever their layer."""
    loads, cluster = skewed(8, 256), Cluster.uniform(1024, 8, racks(1024, 16))
    plan = place(allocate(loads, cluster, 2), loads, cluster, max_straggler=1.1)
    assert plan.domain_threshold == 2
    assert straggler_factor(plan.placement, loads, cluster) <= 1.1
    sets = sizes_of_sets(plan.placement, cluster.domain_ids)
    assert sets[:3] == [0, 0, 1]
    assert sum(sets[3:5]) == 0


def test_ranks_share_a_node() -> None:
    loads, cluster = skewed(4, 256), Cluster.uniform(128, 64, ranks=8)
    allocation = allocate(loads, cluster, 2)
    plan = place(allocation, loads, cluster, max_straggler=1.1).placement
    assert straggler_factor(plan, loads, cluster) <= 1.1
    # An expert is twice on a node only where no other has room beside its cores.
    assert ((plan.counts > 0).sum(axis=1) >= np.minimum(allocation.replicas, 80)).all()


def test_a_bound_out_of_reach_gets_about_the_best_balance() -> None:
    loads = np.array([[10_000, *[1] * 511]] * 2)
    cluster = Cluster.uniform(300, 2)
    plan = place(allocate(loads, cluster, 1), loads, cluster, max_straggler=1.0)
    best = 300 * Fraction(10_000, int(allocate(loads, cluster, 1).replicas[0, 0])) / 10_511
    assert straggler_factor(plan.placement, loads, cluster) <= 1.01 * float(best)


def test_what_is_left_over_is_on_nodes_without_that_expert() -> None:
    """In one round after the other, heavy replicas to the nodes that have least."""
    replicas = np.array([[4, 4, 4]])
    problem = CoreProblem(
        LayoutProblem(replicas, np.array([[9, 5, 1]]), np.full(6, 2)), np.arange(6), np.ones(6, int), 3
    )
    counts = np.zeros((6, 3), dtype=np.int32)
    counts[:2, 0] = 1
    settle(problem, 0, counts)
    assert counts.sum(axis=0).tolist() == [4, 4, 4]
    assert counts.max() == 1
    assert (counts.sum(axis=1) == 2).all()


@pytest.mark.parametrize("turned", [False, True])
def test_the_largest_domains_have_the_cores(turned: bool) -> None:
    slots = np.array([8] * 6 + [3] * 6)
    cluster = Cluster(slots[::-1] if turned else slots, tuple("aabbccddeeff"))
    loads = np.arange(1, 33)[None]
    problem = problem_of(loads, cluster, horizon=5)
    counts = lay_out_cores(problem, None)[0]
    twice = problem.nodes.replicas[0] == 2
    assert twice.sum() >= 16
    # The first two domains have sixteen slots each.
    assert (counts[cluster.slots == 8].sum(axis=0)[twice] == 2).sum() >= 16
