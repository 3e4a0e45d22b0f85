"""The search over few units: it leaves traps, keeps what it must keep, and mends balance at equal value."""

from __future__ import annotations

from math import comb, lcm

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckptd.core.elastic.placement_search import Judge, improved
from ckptd.core.elastic.survival import minimal_sets, surviving_masks


def judge(num_units: int, slots: int, least: int = 1) -> Judge:
    total = lcm(*(comb(num_units, k) for k in range(1, num_units)))
    size = np.bitwise_count(np.arange(1 << num_units)).tolist()
    weights = [total // comb(num_units, k) if 0 < k < num_units else 0 for k in size]
    ones = np.ones(num_units, dtype=np.int64)
    return Judge(np.array(weights), ones, slots * ones, least)


def value(of: Judge, counts_UE: NDArray[np.int32]) -> int:
    return int(of.weights[surviving_masks(minimal_sets(counts_UE.T > 0))].sum())


def test_a_spread_placement_is_pulled_into_pairs() -> None:
    """Six experts twice on six nodes, on a ring: three pairs of nodes are the best there is."""
    ring = np.zeros((6, 6), dtype=np.int32)
    for expert in range(6):
        ring[[expert, (expert + 1) % 6], expert] = 1
    of, shares = judge(6, 2), np.ones(6, dtype=np.int64)
    everything = np.ones(64, dtype=np.bool_)
    found = improved(of, ring, shares, everything, limit=None, doubles=False, moves=1500, seed=0)
    assert minimal_sets(found.T > 0).sum() == 6
    assert len(minimal_sets(found.T > 0)) == 3
    assert value(of, found) > value(of, ring)


def test_what_the_other_layers_do_not_survive_counts_for_nothing() -> None:
    """Two pairs of nodes either way; the other layers are lost with {0, 1} and {2, 3} anyhow."""
    crossed = np.array([[1, 0], [0, 1], [1, 0], [0, 1]], dtype=np.int32)
    aligned = np.array([[1, 0], [1, 0], [0, 1], [0, 1]], dtype=np.int32)
    others = surviving_masks(aligned.T > 0)
    of, shares = judge(4, 1), np.ones(2, dtype=np.int64)
    found = improved(of, crossed, shares, others, limit=None, doubles=False, moves=200, seed=0)
    assert sorted(map(tuple, found.T.tolist())) == sorted(map(tuple, aligned.T.tolist()))


def test_balance_is_mended_at_equal_recovery() -> None:
    """Two pairs of nodes either way; a heavy and a light expert can share one as well as two heavy ones."""
    heavy_together = np.array([[1, 1, 0, 0]] * 2 + [[0, 0, 1, 1]] * 2, dtype=np.int32)
    shares = np.array([100, 100, 1, 1], dtype=np.int64)
    everything, of = np.ones(16, dtype=np.bool_), judge(4, 2)
    found = improved(of, heavy_together, shares, everything, limit=101, doubles=False, moves=300, seed=0)
    assert of.busiest(found, shares) == 101
    assert value(of, found) == value(of, heavy_together)


def test_a_replica_too_many_is_doubled_where_that_helps() -> None:
    """5 nodes, replicas 3, 3, 3, 5: with the last on all nodes, no two others can share their nodes."""
    start = np.array([[1, 1, 0, 1], [1, 1, 0, 1], [1, 0, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1]], dtype=np.int32)
    of, shares = judge(5, 3, 3), np.ones(4, dtype=np.int64)
    everything = np.ones(32, dtype=np.bool_)
    found = improved(of, start, shares, everything, limit=None, doubles=True, moves=500, seed=0)
    assert value(of, found) > value(of, start)
    assert int((found > 0).sum(axis=0).min()) == 3


def test_under_a_limit_recovery_is_given_up_for_balance() -> None:
    """With both heavy experts on one pair of nodes one set is lethal; the limit parts them, and has two."""
    together = np.array([[1, 1]] * 2 + [[0, 0]] * 2, dtype=np.int32)
    shares = np.array([100, 100], dtype=np.int64)
    everything, of = np.ones(16, dtype=np.bool_), judge(4, 2)
    free = improved(of, together, shares, everything, limit=None, doubles=False, moves=300, seed=0)
    assert value(of, free) == value(of, together)
    found = improved(of, together, shares, everything, limit=100, doubles=False, moves=300, seed=0)
    assert of.busiest(found, shares) == 100
    assert value(of, found) < value(of, free)


@given(st.integers(0, 2**32), st.booleans(), st.booleans())
@settings(max_examples=30, deadline=None)
def test_replicas_slots_and_distinct_holders_are_kept(seed: int, bounded: bool, doubles: bool) -> None:
    rng = np.random.default_rng(seed)
    num_units, num_experts = int(rng.integers(1, 6)), int(rng.integers(1, 7))
    counts = rng.integers(0, 3, (num_units, num_experts)).astype(np.int32)
    slots = int(counts.sum(axis=1).max()) + int(rng.integers(0, 2))
    of, shares = (
        judge(num_units, slots, 2) if num_units > 1 else _one(slots),
        rng.integers(0, 99, num_experts),
    )
    everything = np.ones(1 << num_units, dtype=np.bool_)
    limit = int(of.busiest(counts, shares)) if bounded else None
    found = improved(of, counts, shares, everything, limit=limit, doubles=doubles, moves=60, seed=seed)
    assert (found.sum(axis=0) == counts.sum(axis=0)).all()
    assert (found.sum(axis=1) <= slots).all()
    assert found.min() >= 0
    distinct = (counts > 0).sum(axis=0)
    if doubles:
        distinct = np.minimum(distinct, of.least)
    assert ((found > 0).sum(axis=0) >= distinct).all()
    assert value(of, found) >= value(of, counts)
    assert limit is None or of.busiest(found, shares) <= limit


def _one(slots: int) -> Judge:
    return Judge(np.zeros(2, dtype=np.int64), np.ones(1, dtype=np.int64), np.array([slots]), 1)
