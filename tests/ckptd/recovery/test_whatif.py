"""What losing nodes would mean, told before it happens."""

from __future__ import annotations

import itertools

import pytest

from ckptd.memory.ring import SlotRecord, SlotState
from ckptd.recovery.plan import HeldRecords, NoRecovery, RecoveryPlan, plan_recovery
from ckptd.recovery.whatif import RankOutcome, select_nodes, what_if

HOMES = {0: "n0", 1: "n1", 2: "n2"}
LABELS = {
    "n0": {"rack": "A", "host": "x"},
    "n1": {"rack": "A", "host": "y"},
    "n2": {"rack": "B"},
    "n3": {"rack": "B"},
}


def held(rank: int, node: str, first: int, last: int, *, epoch: int = 0) -> HeldRecords:
    """Snapshots of 100 bytes that anchor operator t % 2 at iteration t."""
    records = tuple(
        SlotRecord(
            generation=0,
            index=t - first,
            state=SlotState.SEALED,
            iteration=t,
            previous=t - 1,
            sequence=t,
            image_len=100,
            anchors=1 << t % 2,
            epoch=epoch,
            epoch_start=first - 1 if epoch else -1,
        )
        for t in range(first, last + 1)
    )
    own = HOMES.get(rank) == node
    name = f"r{rank}.{'seg' if own else 'rep'}"
    return HeldRecords(node, name, own, rank, 2, "table", 4096, records)


# Three ranks at iteration 9, replicated one node further up to 8.
HELD = [
    *(held(rank, HOMES[rank], 6, 9) for rank in range(3)),
    *(held(rank, f"n{rank + 1}", 6, 8) for rank in range(3)),
]


def test_losing_nothing_costs_nothing_but_the_replay() -> None:
    answer = what_if(HELD, 3, HOMES, LABELS, [])
    assert answer.lost_nodes == ()
    assert answer.plan == plan_recovery(HELD, 3, homes=HOMES)
    assert answer.recoverable
    assert answer.ranks[1] == RankOutcome(1, "n1", False, ("n1",), 1, 0, 0)


def test_a_lost_node_costs_its_ranks_a_transfer_and_all_ranks_an_iteration() -> None:
    answer = what_if(HELD, 3, HOMES, LABELS, ["node=n1"])
    assert answer.lost_nodes == ("n1",)
    assert isinstance(answer.plan, RecoveryPlan)
    assert (answer.plan.start, answer.plan.end) == (7, 8)
    assert answer.ranks == (
        RankOutcome(0, "n0", False, ("n0",), 1, 1, 0),
        RankOutcome(1, "n1", True, ("n2",), 1, 1, 200),
        RankOutcome(2, "n2", False, ("n2",), 1, 1, 0),
    )


def test_a_lost_rack_takes_a_rank_with_its_only_replica() -> None:
    answer = what_if(HELD, 3, HOMES, LABELS, ["rack=A"])
    assert answer.lost_nodes == ("n0", "n1")
    assert answer.plan == NoRecovery("no node holds a snapshot of rank 0 (world size 3)", 0)
    assert not answer.recoverable
    assert answer.ranks[0] == RankOutcome(0, "n0", True, (), 0, 10, 0)
    assert answer.ranks[2] == RankOutcome(2, "n2", False, (), 0, 10, 0)


def test_selectors_add_up() -> None:
    nodes = list(LABELS)
    assert select_nodes(nodes, LABELS, ["host=x", "node=n3"]) == ("n0", "n3")
    assert select_nodes(nodes, LABELS, ["rack=B", "node=n3"]) == ("n2", "n3")
    assert select_nodes(nodes, {}, ["node=n3"]) == ("n3",)
    assert select_nodes(nodes, {"n0": {"node": "elsewhere"}}, ["node=n0"]) == ("n0",)


@pytest.mark.parametrize("selector", ["rack=C", "zone=A", "rack", "=A", "", "node=n9"])
def test_an_unknown_selector_is_told_what_there_is(selector: str) -> None:
    expected = r"known are host=x\|y; node=n0\|n1\|n2\|n3; rack=A\|B"
    with pytest.raises(ValueError, match=expected) as caught:
        what_if(HELD, 3, HOMES, LABELS, ["rack=A", selector])
    assert repr(selector) in str(caught.value)
    with pytest.raises(ValueError, match="no nodes are known"):
        what_if([], 1, {}, {}, [selector])


def test_an_abandoned_history_is_no_loss() -> None:
    """Iterations 6 to 9 of the first history came after what epoch 1 went on from."""
    known = [held(0, "n0", 2, 9), held(0, "n1", 5, 7, epoch=1)]
    answer = what_if(known, 1, {0: "n0"}, {}, [])
    assert isinstance(answer.plan, RecoveryPlan)
    assert (answer.plan.end, answer.ranks[0].lost_iterations) == (7, 0)
    assert answer.ranks[0].sources == ("n1",)
    assert answer.ranks[0].moved_bytes == 200


def test_every_combination_agrees_with_the_plan_of_what_is_left() -> None:
    for count in range(5):
        for lost in itertools.combinations(LABELS, count):
            answer = what_if(HELD, 3, HOMES, LABELS, [f"node={node}" for node in lost])
            left = [h for h in HELD if h.node not in lost]
            homes = {rank: node for rank, node in HOMES.items() if node not in lost}
            assert answer.plan == plan_recovery(left, 3, homes=homes)
            assert answer.lost_nodes == lost
            alone = all({HOMES[r], f"n{r + 1}"} - set(lost) for r in range(3))
            assert answer.recoverable is alone
            for outcome in answer.ranks:
                assert not set(outcome.sources) & set(lost)
