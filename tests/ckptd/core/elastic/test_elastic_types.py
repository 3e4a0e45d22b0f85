"""What the planners take: refused where it is not what it must be, and never changed."""

from __future__ import annotations

import numpy as np
import pytest

from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement, checked_loads
from ckptd.errors import ElasticError


def test_domains_are_numbered_as_they_appear() -> None:
    cluster = Cluster(np.array([4, 2, 3]), ("b", "a", "b"), (2, 1, 1))
    assert cluster.domain_ids.tolist() == [0, 1, 0]
    assert (cluster.num_nodes, cluster.num_domains, cluster.num_slots, cluster.num_ranks) == (
        3,
        2,
        9,
        4,
    )


def test_a_node_is_its_own_domain_and_has_one_rank_unless_said() -> None:
    cluster = Cluster.uniform(3, 2)
    assert cluster.num_domains == cluster.num_ranks == 3
    assert cluster == Cluster(np.array([2, 2, 2]))
    assert cluster != Cluster.uniform(3, 2, ranks=2)
    assert cluster != Cluster.uniform(3, 2, ("a", "a", "b"))
    assert cluster != Cluster.uniform(3, 3)


@pytest.mark.parametrize(
    ("slots", "domains", "ranks", "said"),
    [
        ([], (), (), "needs a node"),
        ([2, 0], (), (), "node 1 has 0 slots"),
        ([2, 2], ("a",), (), "1 domains for 2 nodes"),
        ([2, 2], (), (1,), "each node has at least 1"),
        ([2, 2], (), (1, 0), "each node has at least 1"),
        ([2.5], (), (), "must be integers"),
        ([[2]], (), (), "must have 1 dimensions"),
        ([2**63], (), (), "does not fit int64"),
    ],
)
def test_a_cluster_says_what_is_wrong(
    slots: list[float], domains: tuple[str, ...], ranks: tuple[int, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Cluster(np.array(slots), domains, ranks)


def test_a_cluster_of_no_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a node"):
        Cluster.uniform(0, 4)


@pytest.mark.parametrize(
    ("loads", "said"),
    [
        ([[1.0, 2.0]], "must be integers, not float64"),
        ([[1.0, float("nan")]], "must be integers"),
        ([[True, False]], "must be integers, not bool"),
        ([[1, 2], [3, -4]], r"loads\[1, 1\] is -4"),
        ([1, 2], "must have 2 dimensions"),
        ([[]], "needs a layer and an expert"),
        ([[2**64 - 1]], "does not fit int64"),
    ],
)
def test_loads_say_what_is_wrong(loads: list[list[float]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        checked_loads(loads)


def test_arrays_cannot_be_written_afterwards() -> None:
    placement, loads = ExpertPlacement(np.ones((1, 2, 3), dtype=np.int32)), checked_loads([[1, 2]])
    for array in (placement.counts, loads, Cluster.uniform(2, 2).slots):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7


def test_a_placement_counts_replicas_and_used_slots() -> None:
    placement = ExpertPlacement(np.array([[[2, 0], [1, 1]]]))
    assert placement.replicas.tolist() == [[3, 1]]
    assert placement.used.tolist() == [[2, 2]]
    assert placement == ExpertPlacement(np.array([[[2, 0], [1, 1]]]))
    assert placement != ExpertPlacement(np.array([[[2, 0], [1, 2]]]))
    with pytest.raises(ValueError, match="negative"):
        ExpertPlacement(np.array([[[1, -1]]]))


def test_a_placement_is_checked_against_its_cluster() -> None:
    placement = ExpertPlacement(np.array([[[2, 0], [1, 1]]]))
    placement.check(Cluster.uniform(2, 2))
    with pytest.raises(ElasticError, match=r"layer=0 node=0.*2 replicas on a node with 1 slots"):
        placement.check(Cluster(np.array([1, 2])))
    with pytest.raises(ElasticError, match=r"layer=0 expert=1.*no replica"):
        ExpertPlacement(np.array([[[2, 0], [1, 0]]])).check(Cluster.uniform(2, 2))
    with pytest.raises(ValueError, match="on 2 nodes, a cluster of 3"):
        placement.check(Cluster.uniform(3, 2))
