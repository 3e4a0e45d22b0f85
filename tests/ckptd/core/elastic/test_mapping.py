"""The mapping of plan nodes to nodes against all permutations."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement
from ckptd.core.elastic.mapping import NodeMapping, fetch_bytes, held_now, map_nodes
from ckptd.errors import ElasticError
from tests.long import LONG, long

Ints = NDArray[np.int64]


def _fetched(plan: ExpertPlacement, held: ExpertPlacement, sizes: Ints, p: int, q: int) -> int:
    """What node q lacks of plan node p, expert by expert."""
    return sum(
        int(sizes[layer, expert])
        for layer, expert in itertools.product(range(plan.num_layers), range(plan.num_experts))
        if plan.counts[layer, p, expert] and not held.counts[layer, q, expert]
    )


def _least(plan: ExpertPlacement, held: ExpertPlacement, cluster: Cluster, sizes: Ints) -> tuple[int, int]:
    """Largest and summed fetch of the best of all permutations that keep domains whole and fit the slots."""
    nodes = range(cluster.num_nodes)
    costs = [[_fetched(plan, held, sizes, p, q) for q in nodes] for p in nodes]
    return min(
        (max(fetched), sum(fetched))
        for order in itertools.permutations(nodes)
        if _allowed(plan, cluster, order)
        for fetched in [[costs[p][order[p]] for p in nodes]]
    )


def _allowed(plan: ExpertPlacement, cluster: Cluster, order: tuple[int, ...]) -> bool:
    used = plan.used.max(axis=0)
    ranks = cluster.ranks
    fits = all(used[p] <= cluster.slots[q] and ranks[p] == ranks[q] for p, q in enumerate(order))
    domains = cluster.domains
    together = all(
        (domains[a] == domains[b]) == (domains[order[a]] == domains[order[b]])
        for a, b in itertools.combinations(range(len(order)), 2)
    )
    return fits and together


def _check(plan: ExpertPlacement, held: ExpertPlacement, cluster: Cluster, sizes: Ints) -> NodeMapping:
    mapping = map_nodes(plan, held, cluster, sizes)
    order = tuple(mapping.node_of.tolist())
    assert sorted(order) == list(range(cluster.num_nodes))
    assert _allowed(plan, cluster, order)
    assert [mapping.fetched_bytes[q] for q in order] == [
        _fetched(plan, held, sizes, p, q) for p, q in enumerate(order)
    ]
    fetched = mapping.fetched_bytes.tolist()
    assert (max(fetched), sum(fetched)) == _least(plan, held, cluster, sizes)
    applied = mapping.apply(plan)
    applied.check(cluster)
    for p, q in enumerate(order):
        assert np.array_equal(applied.counts[:, q], plan.counts[:, p])
    return mapping


@st.composite
def instances(draw: st.DrawFn) -> tuple[ExpertPlacement, ExpertPlacement, Cluster, Ints]:
    layers, nodes, experts = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 5)),
        draw(st.integers(1, 4)),
    )
    shape = (layers, nodes, experts)

    def counts(most: int) -> ExpertPlacement:
        size = layers * nodes * experts
        values = draw(st.lists(st.integers(0, most), min_size=size, max_size=size))
        return ExpertPlacement(np.array(values, dtype=np.int32).reshape(shape))

    plan, held = counts(2), counts(1)
    assume(plan.replicas.all())
    spare = draw(st.lists(st.integers(0, 2), min_size=nodes, max_size=nodes))
    slots = np.maximum(plan.used.max(axis=0), 1) + np.array(spare)
    domains = draw(st.lists(st.sampled_from("abc"), min_size=nodes, max_size=nodes) | st.just([]))
    ranks = draw(st.lists(st.integers(1, 2), min_size=nodes, max_size=nodes) | st.just([]))
    sizes = draw(st.lists(st.integers(0, 4), min_size=layers * experts, max_size=layers * experts))
    cluster = Cluster(slots, tuple(domains), tuple(ranks))
    return plan, held, cluster, np.array(sizes, dtype=np.int64).reshape(layers, experts)


@settings(max_examples=2000 if LONG else 60, deadline=None)
@given(instances())
def test_no_permutation_is_better(
    instance: tuple[ExpertPlacement, ExpertPlacement, Cluster, Ints],
) -> None:
    _check(*instance)


def _all_placements(nodes: int, experts: int) -> list[ExpertPlacement]:
    size = nodes * experts
    return [
        ExpertPlacement(np.array(values, dtype=np.int32).reshape(1, nodes, experts))
        for values in itertools.product((0, 1), repeat=size)
    ]


@pytest.mark.parametrize(
    ("nodes", "experts"), [(2, 2), pytest.param(3, 2, marks=long), pytest.param(2, 3, marks=long)]
)
@pytest.mark.parametrize("wide", [False, True])
def test_all_small_instances(nodes: int, experts: int, *, wide: bool) -> None:
    """Every plan on every state; with as many slots as experts on each node, or on the first one only."""
    placements = _all_placements(nodes, experts)
    slots = np.full(nodes, experts)
    slots[1:] -= 0 if wide else 1
    cluster = Cluster(slots)
    sizes = np.arange(1, experts + 1, dtype=np.int64)[None]
    seen = 0
    for plan, held in itertools.product(placements, repeat=2):
        if plan.replicas.all() and (plan.used <= cluster.slots).all():
            _check(plan, held, cluster, sizes)
            seen += 1
    assert seen


def _somewhere(rng: np.random.Generator) -> ExpertPlacement:
    """Twelve experts on six nodes, each on one at least."""
    counts = rng.integers(0, 2, size=(1, 6, 12), dtype=np.int32)
    counts[0, rng.integers(0, 6, size=12), np.arange(12)] = 1
    return ExpertPlacement(counts)


@pytest.mark.parametrize("seed", range(40))
def test_many_different_costs(seed: int) -> None:
    """Experts of 1, 2, 4, … bytes: every pair of nodes costs something else, and many thresholds are tried."""
    rng = np.random.default_rng(seed)
    plan, held = (_somewhere(rng) for _ in range(2))
    sizes = 1 << np.arange(12, dtype=np.int64)[None]
    costs = fetch_bytes(plan, held, sizes)
    orders = np.array(list(itertools.permutations(range(6))))
    fetched = costs[np.arange(6), orders]
    mapping = map_nodes(plan, held, Cluster.uniform(6, 12), sizes)
    best = min(zip(fetched.max(axis=1).tolist(), fetched.sum(axis=1).tolist(), strict=True))
    fetched = mapping.fetched_bytes.tolist()
    assert (max(fetched), sum(fetched)) == best


@pytest.mark.parametrize("seed", range(16))
def test_racks_are_exchanged_whole(seed: int) -> None:
    """Three racks of two nodes: which rack is which, and who is who within it."""
    rng = np.random.default_rng(seed)
    cluster = Cluster.uniform(6, 12, tuple("abcabc"))
    _check(_somewhere(rng), _somewhere(rng), cluster, 1 << np.arange(12, dtype=np.int64)[None])


def test_domains_of_different_sizes_are_not_exchanged() -> None:
    """Node 2, a domain of its own, holds what one of two nodes of a rack is to hold, and the other way round."""
    plan = ExpertPlacement(np.eye(3, dtype=np.int32)[None])
    held = ExpertPlacement(np.array([[[0, 0, 1], [0, 0, 0], [1, 0, 0]]]))
    cluster = Cluster.uniform(3, 1, ("rack", "rack", "alone"))
    assert _check(plan, held, cluster, np.ones((1, 3), dtype=np.int64)).node_of[2] == 2


def test_the_largest_fetch_comes_before_the_sum() -> None:
    """Left as they are, node 0 fetches 3 and node 1 nothing; exchanged, both fetch 2."""
    plan = ExpertPlacement(np.array([[[1, 1, 1, 0, 0], [0, 0, 0, 1, 1]]]))
    held = ExpertPlacement(np.array([[[0, 0, 0, 0, 0], [0, 0, 1, 1, 1]]]))
    mapping = _check(plan, held, Cluster.uniform(2, 3), np.ones((1, 5), dtype=np.int64))
    assert mapping.node_of.tolist() == [1, 0]
    assert mapping.fetched_bytes.tolist() == [2, 2]


def test_after_the_loss_of_a_node_the_others_stay_where_they_are() -> None:
    """Five nodes hold an expert each; node 2 is lost, and a new one comes in its place, last in order."""
    before = ExpertPlacement(np.eye(5, dtype=np.int32)[None])
    held = held_now(before, [0, 1, 3, 4, -1])
    mapping = map_nodes(before, held, Cluster.uniform(5, 1), np.full((1, 5), 7))
    assert mapping.node_of.tolist() == [0, 1, 4, 2, 3]
    assert mapping.fetched_bytes.tolist() == [0, 0, 0, 0, 7]


def test_layers_are_mapped_together() -> None:
    """Layer 1 alone would exchange the nodes; with the heavier layer 0 they stay."""
    plan = ExpertPlacement(np.array([[[1, 0], [0, 1]], [[1, 0], [0, 1]]]))
    held = ExpertPlacement(np.array([[[1, 0], [0, 1]], [[0, 1], [1, 0]]]))
    mapping = map_nodes(plan, held, Cluster.uniform(2, 1), [[3, 3], [2, 2]])
    assert mapping.node_of.tolist() == [0, 1]
    assert mapping.fetched_bytes.tolist() == [2, 2]


def test_large_experts_are_counted_exactly() -> None:
    """Two exchanges that differ by one byte in 2^50."""
    plan = ExpertPlacement(np.array([[[1, 0, 1], [0, 1, 0]]]))
    held = ExpertPlacement(np.array([[[1, 0, 0], [0, 1, 1]]]))
    big = 1 << 50
    fetched = fetch_bytes(plan, held, [[big + 1, big, 3]])
    assert fetched.tolist() == [[3, big + 1], [big, 0]]
    with pytest.raises(ValueError, match=r"more than 2\^53 bytes"):
        fetch_bytes(plan, held, [[1 << 53, 0, 0]])


def test_a_node_without_the_slots_is_passed_over() -> None:
    plan = ExpertPlacement(np.array([[[1, 1], [1, 0]]]))
    held = ExpertPlacement(np.array([[[0, 0], [1, 1]]]))
    mapping = map_nodes(plan, held, Cluster(np.array([2, 1])), [[5, 5]])
    assert mapping.node_of.tolist() == [0, 1]
    with pytest.raises(ElasticError, match="2 replicas on a node with 1 slots"):
        map_nodes(plan, held, Cluster.uniform(2, 1), [[5, 5]])


@pytest.mark.parametrize("was", [[0, 0], [0, 2], [0, -2]])
def test_a_node_that_there_was_not(was: list[int]) -> None:
    with pytest.raises(ValueError, match=r"was=\[0, "):
        held_now(ExpertPlacement(np.ones((1, 2, 1), dtype=np.int32)), was)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([[1.5]], "expert_bytes must be integers"),
        ([[-1]], "expert_bytes has negative numbers"),
        ([[1, 2]], r"shape \(1, 2\) for 1 layers of 1 experts"),
    ],
)
def test_bad_sizes_are_named(sizes: list[list[float]], message: str) -> None:
    one = ExpertPlacement(np.ones((1, 1, 1), dtype=np.int32))
    with pytest.raises(ValueError, match=message):
        map_nodes(one, one, Cluster.uniform(1, 1), sizes)


def test_shapes_must_agree() -> None:
    plan = ExpertPlacement(np.ones((1, 2, 1), dtype=np.int32))
    with pytest.raises(ValueError, match="both tell of the same layers"):
        map_nodes(plan, ExpertPlacement(np.ones((1, 1, 1), dtype=np.int32)), Cluster.uniform(2, 1), [[1]])
