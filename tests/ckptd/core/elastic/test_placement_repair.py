"""Placements that keep what is held: they move little more than they must, and are as good as new ones."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.core.elastic.allocation import Allocation, allocate, straggler_factor
from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement
from ckptd.core.elastic.expert_placement import PlacementPlan, place
from ckptd.core.elastic.mapping import held_now, place_near
from ckptd.core.elastic.placement_repair import count_moves, expected_losses, small_sets
from ckptd.core.elastic.survival import recovery_probability
from tests.ckptd.core.elastic.test_core_layout import racks, skewed

BOUND = 1.1


def after(
    lost: int,
    came: int,
    each: int,
    *,
    nodes: int = 512,
    layers: int = 16,
    seed: int = 0,
    bound: float | None = BOUND,
) -> tuple[PlacementPlan, ExpertPlacement, Cluster, Allocation, np.ndarray]:
    """A plan after so many nodes were lost and so many came, with what they held and for what it is."""
    loads = skewed(layers, 128, seed)
    names = racks(nodes, each)
    before = Cluster.uniform(nodes, 8, names)
    first = place(allocate(loads, before, 2), loads, before, max_straggler=bound).placement
    gone = np.random.default_rng(seed).choice(nodes, lost, replace=False)
    alive = np.setdiff1d(np.arange(nodes), gone)
    was = np.concatenate([alive, np.full(came, -1)])
    cluster = Cluster.uniform(
        len(was), 8, tuple(names[n] for n in alive) + tuple(f"new-{i // each}" for i in range(came))
    )
    held = held_now(first, was)
    allocation = allocate(loads, cluster, 2)
    return place(allocation, loads, cluster, max_straggler=bound, held=held), held, cluster, allocation, loads


@pytest.mark.parametrize("each", [1, 16])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_after_a_loss_little_moves_and_the_plan_is_as_good(each: int, seed: int) -> None:
    """Placed anew, two thirds of all replicas moved."""
    plan, held, cluster, allocation, loads = after(5, 0, each, seed=seed)
    assert plan.in_place
    assert (plan.placement.replicas == allocation.replicas).all()
    assert (plan.node_threshold, plan.domain_threshold) == (2, 2)
    assert straggler_factor(plan.placement, loads, cluster) <= BOUND
    moves = count_moves(plan.placement, held)
    assert moves.moved <= 1.1 * moves.least
    anew = place(allocation, loads, cluster, max_straggler=BOUND).placement
    assert count_moves(anew, held).moved > 20 * moves.moved
    for units in {each: cluster.domain_ids, 1: np.arange(cluster.num_nodes)}.values():
        for lost in (2, 4, 8):
            ours, theirs = (
                recovery_probability(p, lost, units=units, samples=4000) for p in (plan.placement, anew)
            )
            assert ours.value >= theirs.value - 0.02 - 3 * (ours.error + theirs.error)


def test_where_nodes_came_hardly_another_fetches_anything() -> None:
    plan, held, cluster, _, loads = after(0, 8, 1)
    moves = count_moves(plan.placement, held)
    assert plan.in_place
    assert moves.least >= 16 * 8 * 8  # the slots of the new nodes
    assert moves.moved <= 1.1 * moves.least
    assert straggler_factor(plan.placement, loads, cluster) <= BOUND


def test_without_a_change_nothing_moves() -> None:
    plan, held, *_ = after(0, 0, 16)
    assert plan.in_place
    assert plan.placement == held


def test_without_a_bound_too() -> None:
    plan, held, *_ = after(5, 0, 1, bound=None)
    assert plan.in_place
    moves = count_moves(plan.placement, held)
    assert moves.moved <= 1.3 * moves.least


def test_where_little_is_left_all_is_placed_anew_and_mapped() -> None:
    loads, cluster = skewed(2, 32), Cluster.uniform(64, 4)
    allocation = allocate(loads, cluster, 2)
    counts = place(allocation, loads, cluster, max_straggler=BOUND).placement.counts.copy()
    counts[:, :40] = 0
    held, sizes = ExpertPlacement(counts[:, ::-1]), np.ones_like(loads)
    plan = place_near(held, allocation, loads, cluster, sizes, max_straggler=BOUND)
    assert not plan.in_place
    alone = place(allocation, loads, cluster, max_straggler=BOUND).placement
    assert count_moves(plan.placement, held).moved < count_moves(alone, held).moved


def test_experts_that_nobody_holds_come_back() -> None:
    loads, cluster = skewed(4, 64), Cluster.uniform(128, 8)
    allocation = allocate(loads, cluster, 2)
    counts = place(allocation, loads, cluster, max_straggler=BOUND).placement.counts.copy()
    counts[1, :, 5] = counts[3, :, 9] = 0
    plan = place(allocation, loads, cluster, max_straggler=BOUND, held=ExpertPlacement(counts))
    assert (plan.placement.replicas == allocation.replicas).all()
    assert plan.node_threshold == 2


@given(st.integers(0, 2**32), st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_whatever_is_held_the_plan_keeps_its_promise(seed: int, bounded: bool, domains: bool) -> None:
    rng = np.random.default_rng(seed)
    num_nodes, num_experts = int(rng.integers(1, 14)), int(rng.integers(1, 12))
    slots = rng.integers(1, 5, num_nodes) + -(-num_experts // num_nodes)
    names = tuple(rng.choice(list("abcd"), num_nodes).tolist()) if domains else ()
    cluster = Cluster(slots, names)
    loads = rng.integers(0, 100, (int(rng.integers(1, 4)), num_experts))
    allocation = allocate(loads, cluster, int(rng.integers(1, 4)))
    old = allocate(rng.permuted(loads, axis=1) if rng.integers(2) else loads, cluster, 1)
    bound = 1.2 if bounded else None
    counts = place(old, loads, cluster, max_straggler=bound, moves=8).placement.counts.copy()
    counts[:, rng.random(num_nodes) < 0.2] = 0
    held = ExpertPlacement(np.minimum(counts + (rng.random(counts.shape) < 0.02), 1).astype(np.int32))
    plan = place(allocation, loads, cluster, max_straggler=bound, held=held, moves=8)
    plan.placement.check(cluster)
    assert (plan.placement.replicas == allocation.replicas).all()
    assert plan.node_threshold >= allocation.node_threshold
    assert plan.domain_threshold >= allocation.domain_threshold


# --- the measures ----------------------------------------------------------------------------------------


def test_moves_are_counted_once_for_a_node() -> None:
    held = ExpertPlacement(np.array([[[1, 0], [1, 0], [0, 1]]], dtype=np.int32))
    wanted = ExpertPlacement(np.array([[[0, 2], [1, 0], [1, 0]]], dtype=np.int32))
    moves = count_moves(wanted, held)
    assert (moves.moved, moves.least) == (2, 0)
    more = ExpertPlacement(np.array([[[1, 1], [1, 0], [1, 1]]], dtype=np.int32))
    assert count_moves(more, held).least == count_moves(more, held).moved == 2
    with pytest.raises(ValueError, match="a placement of shape"):
        count_moves(wanted, ExpertPlacement(np.ones((1, 2, 2), dtype=np.int32)))


def test_expected_losses_are_those_of_all_choices() -> None:
    counts = np.array([[[1, 0, 1], [1, 0, 0], [0, 1, 0], [0, 1, 1]]], dtype=np.int32)
    sets = small_sets(ExpertPlacement(counts), np.arange(4), 3)
    assert sorted(map(tuple, sets.tolist())) == sorted(
        [(True, True, False, False), (False, False, True, True), (True, False, False, True)]
    )
    for lost in (1, 2, 3):
        choices = list(combinations(range(4), lost))
        whole = sum(bool(row[list(c)].sum() == row.sum()) for row in sets for c in choices)
        assert expected_losses(sets, lost) * len(choices) == whole


def test_another_shape_is_refused() -> None:
    cluster, loads = Cluster.uniform(3, 2), [[1, 2, 3]]
    held = ExpertPlacement(np.ones((1, 2, 3), dtype=np.int32))
    with pytest.raises(ValueError, match="held is of shape"):
        place(allocate(loads, cluster, 1), loads, cluster, held=held)
