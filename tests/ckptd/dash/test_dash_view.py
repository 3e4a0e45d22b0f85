"""The view of made-up answers: grades, verdict, rings, recoveries, experts; and its size for 16,384 ranks."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from ckptd.dash.dash_view import Answers, RunSummary, SurveyedRank, TierGrade, placement_of, view_of
from ckptd.transport import messages as m
from tests.ckptd.dash.fabricated import (
    NAME,
    NEWEST,
    NOW_S,
    answers,
    durable,
    elastic,
    everything,
    hosted,
    peers,
    recovery,
    session,
    slot,
    status,
    target,
)

MIB = 1 << 20


def only_run(found: Answers) -> RunSummary:
    (run,) = view_of(found).runs
    return run


def grades(run: RunSummary) -> str:
    return "".join(tier.grade for tier in run.tiers)


def with_ring(found: Answers, **changes: object) -> Answers:
    (rank,) = found.snapshots.ranks
    return replace(found, snapshots=m.Snapshots((msgspec.structs.replace(rank, **changes),)))


def with_targets(found: Answers, *targets: m.TargetStatus) -> Answers:
    ranks = tuple(msgspec.structs.replace(each, targets=targets) for each in found.peers.ranks)
    return replace(found, peers=msgspec.structs.replace(found.peers, ranks=ranks))


def test_a_healthy_job_is_protected_and_says_where_it_would_resume() -> None:
    run = only_run(answers())
    assert (run.grade, run.verdict) == (TierGrade.CURRENT, "every rank known here is protected")
    assert [(t.grade, t.iteration, t.lag) for t in run.tiers] == [
        (TierGrade.CURRENT, NEWEST, 0),
        (TierGrade.CURRENT, NEWEST - 1, 1),
        (TierGrade.CURRENT, NEWEST - 20, 20),
    ]
    # The age of the snapshot is that of its slot; the others are reckoned with half a second an iteration.
    assert [tier.age_s for tier in run.tiers] == [0.0, 0.5, 10.0]
    assert (run.live, run.step, run.world_size, run.step_s) == (True, NEWEST, 1, 0.5)


def test_a_lag_counts_in_units_of_what_is_normal() -> None:
    found = answers()
    for lag, grade in ((4, "+"), (5, "~"), (16, "~"), (17, "!")):
        tier = only_run(with_targets(found, target(up_to=NEWEST - lag))).details[0].tiers[1]
        assert (tier.grade, tier.lag) == (grade, lag)
    # With a snapshot in every tenth iteration the same lag is nothing.
    seldom = replace(found, status=status(sessions=(session(0, 1, every=10.0),)))
    assert only_run(with_targets(seldom, target(up_to=NEWEST - 17))).details[0].tiers[1].grade == "+"


def test_no_complete_suffix_no_replica_and_no_checkpoint_is_nothing_to_resume_from() -> None:
    found = with_ring(answers(), suffix=(-1, -1), reason="no snapshot anchors operator 2")
    run = only_run(found)
    assert (grades(run), run.grade) == ("x++", TierGrade.FAR)
    assert run.tiers[0].note == "rank 0: no snapshot anchors operator 2"
    found = with_targets(found, target(up_to=-1))
    store = m.DurableStatus("s3://bucket/x", 9, 0, 0, (durable(0, -1),))
    run = only_run(replace(found, status=msgspec.structs.replace(found.status, durable=store)))
    assert (grades(run), run.grade) == ("xxx", TierGrade.NONE)
    assert run.verdict == "rank 0 can be recovered from nothing"


def test_a_node_alone_without_a_store_is_a_warning_and_with_one_is_not() -> None:
    alone = replace(answers(), peers=peers(endpoint=""))
    assert (grades(only_run(alone)), only_run(alone).grade) == ("+.+", TierGrade.CURRENT)
    verdict = "every rank known here is protected; if a node is lost, the run resumes from storage"
    assert only_run(alone).verdict == verdict
    unstored = replace(answers(), status=msgspec.structs.replace(answers().status, durable=None))
    assert (grades(only_run(unstored)), only_run(unstored).grade) == ("++.", TierGrade.CURRENT)
    assert only_run(unstored).verdict == "every rank known here is protected, except if all memory is lost"
    bare = replace(alone, status=msgspec.structs.replace(alone.status, durable=None))
    assert (grades(only_run(bare)), only_run(bare).grade) == ("+..", TierGrade.FAR)
    assert only_run(bare).verdict == "not protected if a node is lost or all memory is lost"


def test_without_peers_the_floor_of_the_own_ring_is_no_protection_from_the_loss_of_a_node() -> None:
    """A daemon alone reports a floor, too: `top` said of a job on one node that it outlives the node."""
    found = answers()
    ranks = tuple(
        msgspec.structs.replace(each, targets=(), wanted=0, floor=NEWEST) for each in found.peers.ranks
    )
    alone = msgspec.structs.replace(found.peers, endpoint="", peers=(), ranks=ranks)
    run = only_run(replace(found, peers=alone))
    assert grades(run) == "+.+"
    assert run.verdict.endswith("; if a node is lost, the run resumes from storage")


def test_a_target_that_is_lost_does_not_count_as_a_replica() -> None:
    run = only_run(with_targets(answers(), target(alive=False)))
    assert grades(run)[1] == "x"
    assert run.details[0].targets == ("n1, lost: 119",)


def test_the_floor_of_the_run_counts_for_the_loss_of_a_node() -> None:
    """All replicas of this node's rank are there; those of another node's are not."""
    found = answers()
    ranks = tuple(msgspec.structs.replace(each, floor=-1) for each in found.peers.ranks)
    run = only_run(replace(found, peers=msgspec.structs.replace(found.peers, ranks=ranks)))
    assert run.tiers[1].grade is TierGrade.NONE
    assert run.tiers[1].note == "not all ranks of the run have replicas yet"


def test_ranks_of_other_nodes_are_known_by_replicas_and_otherwise_unknown() -> None:
    found = answers()
    found = replace(
        found, peers=msgspec.structs.replace(found.peers, replicas=(hosted(5, 117), hosted(5, 90)))
    )
    run = only_run(found)
    assert (run.columns.ranks, run.columns.grades) == ((0, 5), ("+?", "++", "++"))
    assert run.columns.lags[1] == (1, 3)
    assert run.columns.counts[0] == {"+": 1, "?": 1}
    surveyed = replace(
        found, surveys={NAME: {5: SurveyedRank("n4", 98, 96, 100), 6: SurveyedRank("n4", -1, 99, 100)}}
    )
    run = only_run(surveyed)
    assert (run.columns.ranks, run.columns.grades[:2]) == ((0, 5, 6), ("++x", "+++"))
    # Nodes are asked seldom: what they hold is compared with how far the job was then.
    assert run.columns.lags[:2] == ((0, 2, -1), (1, 3, 1))
    assert (run.tiers[0].grade, run.tiers[0].note) == (TierGrade.NONE, "rank 6: when its node was asked")
    assert [rank.node for rank in run.details] == ["n4", "n0", "n4"], "the worst rank comes first"


def test_a_ring_has_slots_with_levels() -> None:
    (rank,) = only_run(answers()).details
    assert [(s.iteration, s.state, s.levels, s.in_suffix) for s in rank.slots] == [
        (120, "sealed", "900", True),
        (119, "sealed", "009", True),
        (118, "sealed", "090", True),
        (117, "sealed", "900", False),
        (-1, "free", "", False),
    ]


def test_many_operators_share_cells() -> None:
    slots = (slot(0, NEWEST, anchors=b"\xff" * 8),)
    (rank,) = only_run(with_ring(answers(), slots=slots, num_operators=1024)).details
    assert rank.slots[0].levels == "9999" + "0" * 60
    slots = (slot(0, NEWEST, anchors=b"\x01"),)
    (rank,) = only_run(with_ring(answers(), slots=slots, num_operators=1024)).details
    assert rank.slots[0].levels[0] == "1", "a single one of sixteen is seen"


def test_recoveries_are_read_from_their_events() -> None:
    other = m.EventInfo(9, 1, "info", "recovery_phases", "imports 1.000 s", "moe", "run-2", 0)
    run = only_run(replace(answers(), recoveries=[recovery(3), other]))
    (found,) = run.recoveries
    assert (found.rank, found.at_s, len(found.phases)) == (3, NOW_S, 11)
    assert found.phases[:2] == (("others_stopped", 0.25), ("process_there", 0.5))


def test_experts_on_too_few_nodes_are_counted() -> None:
    place = only_run(everything(1)).placement
    assert place is not None
    assert (place.copies, place.below, place.nodes) == (("12222222",) * 4, 4, 3)
    assert place.loads[0] == "".join(str(9 * (e + 1) // 8) for e in range(8))
    wide = only_run(replace(answers(), placements={NAME: placement_of(elastic(60, 300))})).placement
    assert wide is not None
    assert (len(wide.copies), len(wide.copies[0]), wide.below) == (48, 256, 60)
    assert wide.left_out == "60 layers of 300 experts in all"


def test_runs_with_trainers_come_first() -> None:
    found = answers()
    old = msgspec.structs.replace(found.snapshots.ranks[0], run="a-run")
    view = view_of(replace(found, snapshots=m.Snapshots((*found.snapshots.ranks, old))))
    assert [(run.run, run.live) for run in view.runs] == [("run-1", True), ("a-run", False)]


@pytest.mark.parametrize("every", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_trainer_may_report_any_number(every: float) -> None:
    found = replace(answers(), status=status(sessions=(session(0, 1, every=every),)))
    assert only_run(found).tiers[0].grade == "+"


def test_the_view_of_16384_ranks_is_small() -> None:
    view = view_of(everything(16_384))
    (run,) = view.runs
    assert len(run.columns.ranks) == 16_384
    assert sum(run.columns.counts[1].values()) == 16_384
    assert len(run.details) == 32
    assert all(rank.tiers[1].grade == "!" for rank in run.details), "the worst"
    encoded = msgspec.json.encode(view)
    assert len(encoded) < MIB // 2, f"{len(encoded)} bytes"
    assert len(msgspec.json.encode(view_of(everything(1)))) < 16_384
