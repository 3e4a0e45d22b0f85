"""Replicas by load: equation 1 on integers, its limits, its promise; the balance of load; ranks of a node."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import floor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.core.elastic.allocation import (
    allocate,
    reachable_threshold,
    split_over_ranks,
    straggler_by_layer,
    straggler_factor,
    useful_slots,
)
from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement
from ckptd.core.elastic.expert_placement import spread
from ckptd.errors import ElasticError

LOADS = st.lists(st.integers(0, 2**40) | st.integers(0, 50), min_size=1, max_size=12)
CLUSTERS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 3), st.sampled_from("abcd")),
    min_size=1,
    max_size=7,
).map(
    lambda nodes: Cluster(
        np.array([slots for slots, _, _ in nodes]),
        tuple(domain for _, _, domain in nodes),
        tuple(ranks for _, ranks, _ in nodes),
    )
)


def equation_1(loads: list[int], slots: int, threshold: int) -> list[int]:
    """As the paper states it, with fractions."""
    ascending = sorted(range(len(loads)), key=lambda e: (loads[e], e))
    out = [0] * len(loads)
    for index, expert in enumerate(ascending):
        tokens = sum(loads[e] for e in ascending[index:])
        left = slots - sum(out)
        out[expert] = max(floor(Fraction(left * loads[expert], tokens)), threshold)
    return out


def test_the_paper_s_skew_on_many_nodes_is_equation_1() -> None:
    loads = [3, 400, 7, 90, 90, 12, 5, 1]
    wanted = equation_1(loads, 60 * 4, 2)
    assert max(wanted) <= 200
    assert allocate([loads], Cluster.uniform(60, 4, ranks=4), 2).replicas.tolist() == [wanted]


@given(st.lists(LOADS, min_size=1, max_size=3), CLUSTERS, st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_what_always_holds(layers: list[list[int]], cluster: Cluster, threshold: int) -> None:
    num_experts = min(len(row) for row in layers)
    loads = [row[:num_experts] for row in layers]
    if cluster.num_slots < num_experts:
        return
    got = allocate(loads, cluster, threshold)
    for row, replicas in zip(loads, got.replicas.tolist(), strict=True):
        assert sum(replicas) == useful_slots(cluster, num_experts) <= cluster.num_slots
        assert min(replicas) >= got.node_threshold >= got.domain_threshold >= 1
        assert max(replicas) <= cluster.num_ranks
        pairs = sorted(zip(row, replicas, strict=True))
        assert all(a[1] <= b[1] for a, b in pairwise(pairs) if a[0] < b[0])
    assert got.node_threshold <= min(threshold, cluster.num_nodes, cluster.num_slots // num_experts)
    assert got.domain_threshold <= cluster.num_domains


def test_a_hot_expert_has_one_replica_a_rank_and_leaves_the_rest_to_the_others() -> None:
    """By equation 1 alone it had 54 of 60 and no other more than two."""
    got = allocate([[97, 1, 1, 1]], Cluster.uniform(10, 3), 2)
    assert got.replicas.tolist() == [[10, 6, 7, 7]]


@given(LOADS, CLUSTERS, st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_without_the_limit_it_is_equation_1_as_printed(
    loads: list[int], cluster: Cluster, threshold: int
) -> None:
    if cluster.num_slots < len(loads) or sum(loads) == 0:
        return
    got = allocate([loads], cluster, threshold, limit=cluster.num_slots)
    wanted = equation_1(loads, cluster.num_slots, got.node_threshold)
    assert got.replicas.tolist() == [wanted]


def test_a_limit_is_kept_and_cannot_break_the_threshold() -> None:
    got = allocate([[97, 1, 1, 1]], Cluster.uniform(10, 3), 2, limit=4)
    assert got.replicas.tolist() == [[4, 4, 4, 4]]
    with pytest.raises(ValueError, match="limit is 1, below the 2 replicas"):
        allocate([[97, 1, 1, 1]], Cluster.uniform(10, 3), 2, limit=1)


def test_no_rank_has_an_expert_twice_where_it_could_have_all_of_them() -> None:
    got = allocate([[97, 2, 1]], Cluster.uniform(2, 12, ranks=2), 1)
    assert got.replicas.tolist() == [[4, 4, 4]]


def test_zero_loads_share_evenly() -> None:
    cluster = Cluster.uniform(5, 4)
    assert allocate([[0, 0, 0]], Cluster.uniform(5, 2), 2).replicas.tolist() == [[3, 3, 4]]
    assert allocate([[0, 0, 9, 0, 0, 0]], cluster, 2).replicas.tolist() == [[3, 3, 5, 3, 3, 3]]
    assert allocate([[0, 0, 9, 0, 0, 0, 0]], cluster, 2).replicas.tolist() == [[2, 2, 5, 2, 3, 3, 3]]


def test_integers_are_exact_where_floats_are_not() -> None:
    assert floor(44 * (15 / 44)) == 14
    assert allocate([[15, 29]], Cluster.uniform(44, 1), 1).replicas.tolist() == [[15, 29]]


def test_a_threshold_out_of_reach_is_lowered_and_said() -> None:
    got = allocate([[1] * 7], Cluster.uniform(5, 4), 4)
    assert (got.node_threshold, got.domain_threshold, got.met) == (2, 2, False)
    assert got.reason == (
        "asked for 4 replicas of every expert in distinct domains, the slots hold 2 "
        "(on distinct nodes 2): any 1 node may be lost"
    )


def test_one_large_node_does_not_make_experts_safe() -> None:
    """Slots for two replicas of each, but all but two of them on one node."""
    got = allocate([[1] * 6], Cluster(np.array([10, 1, 1])), 2)
    assert got.node_threshold == 1
    assert "no node may be lost" in got.reason


def test_domains_have_a_threshold_of_their_own() -> None:
    cluster = Cluster.uniform(6, 4, ("a", "a", "a", "b", "b", "b"))
    got = allocate([[1] * 8], cluster, 3)
    assert (got.node_threshold, got.domain_threshold, got.met) == (3, 2, False)
    assert "any 2 nodes may be lost, any 1 domain" in got.reason
    one_rack = allocate([[1] * 8], Cluster.uniform(6, 4, ("a",) * 6), 2)
    assert "any 1 node may be lost, but no domain" in one_rack.reason
    fine = allocate([[1] * 8], cluster, 2)
    assert fine.met
    assert fine.reason == "every expert has 2 places to live: any 1 node may be lost"


def test_one_node_holds_each_expert_once() -> None:
    got = allocate([[5, 1, 0]], Cluster.uniform(1, 8), 2)
    assert got.replicas.tolist() == [[1, 1, 1]]
    assert (got.node_threshold, got.met) == (1, False)


def test_fewer_slots_than_experts_are_refused() -> None:
    with pytest.raises(ElasticError, match="6 slots on 3 nodes cannot hold 7 experts"):
        allocate([[1] * 7], Cluster.uniform(3, 2), 1)


def test_a_threshold_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        allocate([[1]], Cluster.uniform(3, 2), 0)


def test_bad_loads_are_refused() -> None:
    for loads in ([[1.5]], [[float("nan")]], [[-1]]):
        with pytest.raises(ValueError, match="loads"):
            allocate(loads, Cluster.uniform(3, 2), 1)


def test_the_threshold_is_the_most_that_slots_can_hold() -> None:
    assert reachable_threshold(np.array([10, 1, 1]), 6, 9) == 1  # 6 + 1 + 1 = 8 < 2 * 6
    assert reachable_threshold(np.array([10, 3, 3]), 6, 9) == 2
    assert reachable_threshold(np.array([6, 6, 6]), 6, 9) == 3


@given(st.integers(0, 2**32), st.sampled_from([3, 1000, 2**40, 2**62]))
@settings(max_examples=30, deadline=None)
def test_it_is_the_busiest_rank_over_the_mean(seed: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (2, int(rng.integers(1, 6)), int(rng.integers(1, 5)))
    counts = rng.integers(0, 3, shape).astype(np.int32)
    counts[:, 0] += counts.sum(axis=1) == 0
    loads = rng.integers(0, most, shape[::2])
    ranks = tuple(rng.integers(1, 4, shape[1]).tolist())
    cluster = Cluster(np.full(shape[1], 20), ranks=ranks)
    busy, means = [], []
    for layer in range(2):
        replicas = counts[layer].sum(axis=0).tolist()
        tokens = [
            sum(
                Fraction(int(loads[layer, e]), replicas[e]) * int(counts[layer, n, e])
                for e in range(shape[2])
            )
            / ranks[n]
            for n in range(shape[1])
        ]
        busy.append(max(tokens))
        means.append(Fraction(sum(loads[layer].tolist()), sum(ranks)))
    placement = ExpertPlacement(counts)
    wanted = [float(b / m) if m else 1.0 for b, m in zip(busy, means, strict=True)]
    assert straggler_by_layer(placement, loads, cluster) == pytest.approx(wanted, rel=1e-6)
    joint = float(sum(busy) / sum(means)) if sum(means) else 1.0
    assert straggler_factor(placement, loads, cluster) == pytest.approx(joint, rel=1e-6)


def test_loads_of_another_shape_are_refused() -> None:
    placement = ExpertPlacement(np.ones((1, 3, 2), dtype=np.int32))
    with pytest.raises(ValueError, match=r"loads of shape \(1, 3\) for 1 layers of 2 experts"):
        straggler_factor(placement, [[1, 2, 3]], Cluster.uniform(3, 2))


@given(st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_every_replica_is_on_one_rank_of_its_node(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = tuple(rng.integers(1, 5, 4).tolist())
    cluster = Cluster(rng.integers(2, 9, 4), ranks=ranks)
    loads = rng.integers(0, 100, (2, 5))
    placement = spread(allocate(loads, cluster, 2), cluster)
    split = split_over_ranks(placement, cluster, loads)
    begin = 0
    for node, size in enumerate(ranks):
        part = split[:, begin : begin + size]
        begin += size
        counts = placement.counts[:, node]
        assert (part.sum(axis=1) == counts).all()
        assert (part.max(axis=1) == -(-counts // size)).all()  # twice on a rank only if it must
        used = part.sum(axis=2)
        assert (used.max(axis=1) - used.min(axis=1) <= 1).all()
    assert begin == split.shape[1] == cluster.num_ranks
    slots = zip(cluster.slots.tolist(), cluster.ranks, strict=True)
    slots_R = np.array([n // k + (i < n % k) for n, k in slots for i in range(k)])
    assert (split.sum(axis=2) <= slots_R).all()
    assert slots_R.sum() == cluster.num_slots


def test_heavy_and_light_replicas_are_mixed() -> None:
    placement = ExpertPlacement(np.ones((1, 1, 4), dtype=np.int32))
    cluster = Cluster.uniform(1, 4, ranks=2)
    plain = split_over_ranks(placement, cluster)
    assert plain.tolist() == [[[1, 0, 1, 0], [0, 1, 0, 1]]]
    by_load = split_over_ranks(placement, cluster, [[9, 1, 8, 2]])
    assert by_load.tolist() == [[[1, 0, 0, 1], [0, 1, 1, 0]]]


def test_another_cluster_or_other_loads_are_refused() -> None:
    placement = ExpertPlacement(np.ones((1, 2, 2), dtype=np.int32))
    with pytest.raises(ElasticError, match="2 replicas on a node with 1 slots"):
        split_over_ranks(placement, Cluster.uniform(2, 1))
    with pytest.raises(ValueError, match="loads of shape"):
        split_over_ranks(placement, Cluster.uniform(2, 2), [[1, 2, 3]])
