"""A node's replicas on its ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement
from ckptd.core.elastic.placement.allocation import allocate
from ckptd.core.elastic.placement.expert_placement import spread
from ckptd.core.elastic.placement.rank_split import rank_slots, split_over_ranks
from ckptd.errors import ElasticError


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
    assert (split.sum(axis=2) <= rank_slots(cluster)).all()
    assert rank_slots(cluster).sum() == cluster.num_slots


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
