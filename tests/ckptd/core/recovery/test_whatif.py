"""What losing nodes would mean, told before it happens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from ckptd.core.recovery.global_plan import NoRecovery, RecoveryPlan, plan_recovery
from ckptd.core.recovery.held import HeldRecords, RunHoldings
from ckptd.core.recovery.localized_plan import LocalizedPlan, NotLocalized, RankKind
from ckptd.core.recovery.recovery_facts import RankFacts, facts_to_wire
from ckptd.core.recovery.whatif import FedBy, RankOutcome, select_nodes, what_if
from ckptd.core.slots.slots import SlotRecord, SlotState
from ckptd.ctl.peers_command import what_if_text

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


@pytest.mark.parametrize("lose", [[], ["node=n1"]])
@pytest.mark.parametrize(("told", "replayed"), [(16, 2), (1, 2), (0, 1)])
def test_what_is_replayed_only_to_compare_counts(lose: list[str], told: int, replayed: int) -> None:
    """The numbers were those of a start that compares nothing with what it loads first."""
    answer = what_if(RunHoldings(HELD), 3, HOMES, LABELS, lose, verify_iterations=told)
    lost = {"n1"} if lose else set()
    left = {rank: node for rank, node in HOMES.items() if node not in lost}
    start = plan_recovery(HELD, 3, homes=left, lost=lost, verify_iterations=told)
    assert answer.plan == start
    assert {rank.replayed for rank in answer.ranks} == {replayed}
    text = what_if_text(answer)
    assert ("1 of the replayed iterations only verify" in text) == (told > 0)
    assert ("no additional iteration verifies the loaded values: verify_iterations=0" in text) == (told == 0)


def test_losing_nothing_costs_nothing_but_the_replay() -> None:
    answer = what_if(RunHoldings(HELD), 3, HOMES, LABELS, [])
    assert answer.lost_nodes == ()
    assert answer.plan == plan_recovery(HELD, 3, homes=HOMES)
    assert answer.recoverable
    assert answer.ranks[1] == RankOutcome(1, "n1", False, ("n1",), 1, 0, 0)


def test_a_lost_node_costs_its_ranks_a_transfer_and_all_ranks_an_iteration() -> None:
    answer = what_if(RunHoldings(HELD), 3, HOMES, LABELS, ["node=n1"])
    assert answer.lost_nodes == ("n1",)
    assert isinstance(answer.plan, RecoveryPlan)
    assert (answer.plan.start, answer.plan.end) == (7, 8)
    assert answer.ranks == (
        RankOutcome(0, "n0", False, ("n0",), 1, 1, 0),
        RankOutcome(1, "n1", True, ("n2",), 1, 1, 200),
        RankOutcome(2, "n2", False, ("n2",), 1, 1, 0),
    )


def test_a_lost_rack_takes_a_rank_with_its_only_replica() -> None:
    answer = what_if(RunHoldings(HELD), 3, HOMES, LABELS, ["rack=A"])
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
    expected = r"known labels: host=x\|y; node=n0\|n1\|n2\|n3; rack=A\|B"
    with pytest.raises(ValueError, match=expected) as caught:
        what_if(RunHoldings(HELD), 3, HOMES, LABELS, ["rack=A", selector])
    assert repr(selector) in str(caught.value)
    with pytest.raises(ValueError, match="no nodes are known"):
        what_if(RunHoldings([]), 1, {}, {}, [selector])


def test_an_abandoned_history_is_no_loss() -> None:
    """Iterations 6 to 9 of the first history came after what epoch 1 went on from."""
    known = [held(0, "n0", 2, 9), held(0, "n1", 5, 7, epoch=1)]
    answer = what_if(RunHoldings(known), 1, {0: "n0"}, {}, [])
    assert isinstance(answer.plan, RecoveryPlan)
    assert (answer.plan.end, answer.ranks[0].lost_iterations) == (7, 0)
    assert answer.ranks[0].sources == ("n1",)
    assert answer.ranks[0].moved_bytes == 200


def test_every_combination_agrees_with_the_plan_of_what_is_left() -> None:
    for count in range(5):
        for lost in itertools.combinations(LABELS, count):
            answer = what_if(RunHoldings(HELD), 3, HOMES, LABELS, [f"node={node}" for node in lost])
            left = [h for h in HELD if h.node not in lost]
            homes = {rank: node for rank, node in HOMES.items() if node not in lost}
            assert answer.plan == plan_recovery(left, 3, homes=homes)
            assert answer.lost_nodes == lost
            alone = all({HOMES[r], f"n{r + 1}"} - set(lost) for r in range(3))
            assert answer.recoverable is alone
            for outcome in answer.ranks:
                assert not set(outcome.sources) & set(lost)


# -- jobs that log their boundaries ---------------------------------------------------------------

CHAIN = {0: RankFacts((1,), (0,)), 1: RankFacts((0, 2), (1,)), 2: RankFacts((1,), (2,))}


def log(
    rank: int, node: str, first: int, last: int, facts: RankFacts | None, *, own: bool = True
) -> HeldRecords:
    """What a rank sent in these iterations, of 10 bytes each."""
    records = tuple(
        SlotRecord(0, t - first, SlotState.SEALED, t, sequence=t, image_len=10)
        for t in range(first, last + 1)
    )
    told = b"" if facts is None else facts_to_wire({rank: facts})
    name = f"r{rank}.boundary" if own else f"r{rank}~.logrep"
    return HeldRecords(node, name, own, rank, 1, "log", 4096, records, told)


LOGS = [log(rank, HOMES[rank], 5, 8, CHAIN[rank]) for rank in range(3)]


def test_of_a_job_that_logs_only_the_lost_stage_replays() -> None:
    """Those who are left park at 9. The replica of rank 1 ends at 8, so that it is fed in 7 and 8."""
    answer = what_if(RunHoldings(HELD, logs=LOGS), 3, HOMES, LABELS, ["node=n1"])
    assert isinstance(answer.localized, LocalizedPlan)
    assert (answer.localized.resume, answer.localized.together) == (9, 9)
    assert answer.reason == answer.localized.reason
    fed = (FedBy(0, 7, 9, ("n0",)), FedBy(2, 7, 9, ("n2",)))
    assert answer.ranks == (
        RankOutcome(0, "n0", False, ("n0",), 0, 0, 0, RankKind.PARKED),
        RankOutcome(1, "n1", True, ("n2",), 2, 0, 240, RankKind.REPLAYS, -1, fed),
        RankOutcome(2, "n2", False, ("n2",), 0, 0, 0, RankKind.PARKED),
    )
    assert isinstance(answer.plan, RecoveryPlan)
    assert answer.plan.end == 8


def test_a_log_that_is_missing_makes_its_rank_replay_too() -> None:
    logs = [LOGS[0], LOGS[1], log(2, "n2", 5, 7, CHAIN[2])]
    answer = what_if(RunHoldings(HELD, logs=logs), 3, HOMES, LABELS, ["node=n1"])
    kinds = [outcome.kind for outcome in answer.ranks]
    assert kinds == [RankKind.PARKED, RankKind.REPLAYS, RankKind.REPLAYS]
    assert "which no node holds" in answer.reason


def test_those_who_are_left_park_where_the_slowest_of_them_is() -> None:
    """Rank 0 is one step ahead: what it has beyond is not counted on."""
    ahead = [held(0, "n0", 6, 10), *HELD[1:]]
    answer = what_if(RunHoldings(ahead, logs=LOGS), 3, HOMES, LABELS, ["node=n1"])
    assert isinstance(answer.localized, LocalizedPlan)
    assert answer.localized.resume == 9
    assert [outcome.lost_iterations for outcome in answer.ranks] == [1, 0, 0]


def test_why_all_would_recover_together() -> None:
    """No log tells with whom anybody communicates; or nobody is left; or somebody has nothing yet.
    The answer is as of a job that does not log.
    """
    plain = what_if(RunHoldings(HELD), 3, HOMES, LABELS, ["node=n1"])
    assert plain.localized is None

    def told(held: Sequence[HeldRecords], lose: str, *facts: RankFacts | None) -> str:
        logs = [log(rank, HOMES[rank], 5, 8, of) for rank, of in enumerate(facts)]
        answer = what_if(RunHoldings(held, logs=logs), 3, HOMES, LABELS, lose.split(","))
        assert isinstance(answer.localized, NotLocalized)
        assert answer.reason == answer.plan.reason
        if held is HELD and lose == "node=n1":
            assert (answer.plan, answer.ranks) == (plain.plan, plain.ranks)
        return answer.localized.reason

    assert "no rank reported with which ranks it communicates" in told(HELD, "node=n1", None, None, None)
    everybody = tuple(CHAIN.values())
    assert "no node is left" in told(HELD, "rack=A,rack=B", *everybody)
    without = [h for h in HELD if h.rank]
    assert "no node holds a snapshot of rank 0 yet" in told(without, "node=n1", *everybody)


TWINS = {
    0: RankFacts((1,), (0, 2), (0, 2)),
    1: RankFacts((0,), (1, 3), (1, 3)),
    2: RankFacts((3,), (0, 2), (0, 2)),
    3: RankFacts((2,), (1, 3), (1, 3)),
}


@pytest.mark.parametrize("replicated", [False, True])
def test_a_log_whose_node_is_lost_is_read_from_its_replica(replicated: bool) -> None:
    """Both of stage 0 (ranks 0 and 2, on x) are lost, and rank 1 of stage 1. Its twin 3 is left: it
    copies that, if what it sent is to be had.
    """
    homes = {0: "x", 1: "y", 2: "x", 3: "z"}
    known = [
        *(held(rank, homes[rank], 6, 9) for rank in range(4)),
        *(held(rank, "z", 6, 9 if rank == 1 else 8) for rank in range(3)),
    ]
    logs = [log(rank, homes[rank], 5, 8, TWINS[rank]) for rank in range(4)]
    if replicated:
        logs += [log(rank, "z", 5, 8, TWINS[rank], own=False) for rank in range(3)]
    answer = what_if(RunHoldings(known, logs=logs), 4, homes, {}, ["node=x", "node=y"])
    assert answer.recoverable
    if not replicated:
        assert isinstance(answer.localized, NotLocalized)
        return
    kinds = [outcome.kind for outcome in answer.ranks]
    replays, copied, parked = RankKind.REPLAYS, RankKind.COPIED, RankKind.PARKED
    assert kinds == [replays, copied, replays, parked]
    assert answer.ranks[0].fed_by == (FedBy(1, 7, 9, ("z",)),)
    assert answer.ranks[2].fed_by == (FedBy(3, 7, 9, ("z",)),)
    assert [outcome.copies for outcome in answer.ranks] == [-1, 3, -1, -1]
