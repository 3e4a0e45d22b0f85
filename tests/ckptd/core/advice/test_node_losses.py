"""The chance of a loss against every loss tried on the placement, and what follows for the conditions."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache

import pytest

from ckptd.core.advice.node_losses import NodeLosses, chance_of_loss
from ckptd.core.advice.outlook import Conditions
from ckptd.core.placement import NodeFacts, PlacedRank, plan_placement

CONDITIONS = Conditions(2.0, 600.0, link_Bps=1e4, network_Bps=1e3)
STORED = Conditions(2.0, 600.0, link_Bps=1e4, network_Bps=1e3, storage_Bps=100.0, loss_mtbf_s=1e6)


@cache
def taken(nodes: int, lost: int, replicas: int) -> int:
    """How many losses of so many nodes take a rank's own node and all that hold its replicas."""
    names = [f"node{n}" for n in range(nodes)]
    ranks = [PlacedRank(2 * n + i, name, 100) for n, name in enumerate(names) for i in range(2)]
    targets = plan_placement([NodeFacts(name) for name in names], ranks, replicas=replicas).targets
    copies = [{rank.node, *targets[rank.rank]} for rank in ranks]
    return sum(any(each <= set(gone) for each in copies) for gone in itertools.combinations(names, lost))


@pytest.mark.parametrize("nodes", range(2, 10))
def test_every_loss_is_tried_on_the_placement(nodes: int) -> None:
    for replicas, lost in itertools.product(range(1, nodes), range(1, nodes + 1)):
        expected = taken(nodes, lost, replicas) / math.comb(nodes, lost)
        assert chance_of_loss(nodes, lost, replicas) == pytest.approx(expected, abs=1e-12)


def test_what_replicas_cannot_lose() -> None:
    assert chance_of_loss(4, 3, 3) == 0.0
    assert chance_of_loss(4, 4, 3) == 1.0
    assert 0 < chance_of_loss(2048, 3, 2) < 1e-5


def test_a_rack_takes_no_state_while_there_are_enough_of_them() -> None:
    """As the module says: 9 nodes in 3 racks; of the losses of 3 nodes, those of a rack take none."""
    facts = [NodeFacts(f"node{n}", {"rack": f"r{n % 3}"}) for n in range(9)]
    ranks = [PlacedRank(n, f"node{n}", 100) for n in range(9)]
    targets = plan_placement(facts, ranks, replicas=2).targets
    for rack in range(3):
        gone = {f"node{n}" for n in range(rack, 9, 3)}
        assert not any({rank.node, *targets[rank.rank]} <= gone for rank in ranks)


def test_what_is_survived_is_a_failure_and_the_rest_a_loss() -> None:
    losses = NodeLosses(4, ((2, 1000.0), (4, 9000.0)), storage_Bps=50.0)
    found = losses.conditions(CONDITIONS)
    # One replica: 4 of 6 pairs take a state, and the loss of all four nodes does.
    assert 1 / found.mtbf_s == pytest.approx(1 / 600 + (1 / 3) / 1000)
    assert 1 / found.loss_mtbf_s == pytest.approx((2 / 3) / 1000 + 1 / 9000)
    assert found.storage_Bps == 50.0
    found = losses.conditions(STORED)
    assert 1 / found.loss_mtbf_s == pytest.approx(1e-6 + (2 / 3) / 1000 + 1 / 9000)
    assert found.storage_Bps == 100.0


def test_where_all_are_survived_storage_is_of_no_use() -> None:
    losses = NodeLosses(4, ((2, 1000.0),), storage_Bps=50.0)
    found = losses.conditions(replace(CONDITIONS, replicas=2))
    assert (found.storage_Bps, found.loss_mtbf_s) == (0.0, math.inf)
    assert 1 / found.mtbf_s == pytest.approx(1 / 600 + 1 / 1000)
    with pytest.raises(ValueError, match="storage_Bps is 0 and loss_mtbf_s is"):
        NodeLosses(4, ((2, 1000.0),)).conditions(CONDITIONS)


@pytest.mark.parametrize(
    ("nodes", "lost", "given", "expected"),
    [
        (8, (2, 3), (), [1, 2, 3]),
        (8, (1,), (), [1]),
        (2, (2,), (), [1]),
        (100, (40,), (), list(range(1, 17))),
        (8, (3,), (2,), [2]),
    ],
)
def test_candidates(nodes: int, lost: tuple[int, ...], given: tuple[int, ...], expected: list[int]) -> None:
    losses = NodeLosses(nodes, tuple((each, 1e6) for each in lost), 1e9, given)
    assert list(losses.candidates) == expected


@pytest.mark.parametrize(
    ("nodes", "together", "replicas", "message"),
    [
        (4, ((0, 1e6),), (), "a loss of 0 nodes at once, of 4 nodes of the job"),
        (4, ((5, 1e6),), (), "a loss of 5 nodes at once, of 4 nodes of the job"),
        (4, ((2, 0.0),), (), "0 s between losses of 2 nodes; it must be above 0"),
        (4, ((2, 1e6),), (4,), "4 replicas on other nodes, of 4 nodes: pass at least 1, and fewer"),
        (4, ((2, 1e6),), (0,), "0 replicas on other nodes"),
    ],
)
def test_what_cannot_be(
    nodes: int, together: tuple[tuple[int, float], ...], replicas: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        NodeLosses(nodes, together, 1e9, replicas)
