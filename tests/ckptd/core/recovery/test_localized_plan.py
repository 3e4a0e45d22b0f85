"""The localized plan: named cases, and every plan of random jobs executed and compared with what
else was possible.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ckptd.core.recovery.global_plan import RecoveryPlan, plan_recovery
from ckptd.core.recovery.held import HeldRecords, RunHoldings
from ckptd.core.recovery.localized_plan import (
    LocalizedPlan,
    NotLocalized,
    RankKind,
    RankPlan,
    plan_localized,
)
from ckptd.core.recovery.recovery_facts import RankFacts, Relations, relate
from ckptd.core.slots.slots import SlotRecord, SlotState, epoch_table
from tests.ckptd.core.recovery.pipeline_world import Execution, World, random_world, recorded

WINDOW = 3
EVERYTHING = (1 << WINDOW) - 1
T = 10  # the iteration that was cut off, where nothing else is said


# -- named cases: stages of a pipeline in a row, each a domain, on a node of its own ----------------------------------


def slot(iteration: int, anchors: int, *, epoch: int = 0, epoch_start: int = -1) -> SlotRecord:
    return SlotRecord(
        0,
        iteration,
        SlotState.SEALED,
        iteration,
        iteration - 1,
        iteration,
        10,
        anchors=anchors,
        phase=iteration % WINDOW,
        epoch=epoch,
        epoch_start=epoch_start,
    )


class Job:
    """What is held of ranks: `snapshots`, `parked` and `logs` by rank may be changed before `plan`."""

    def __init__(
        self,
        stops: Sequence[int],
        domains: Sequence[Sequence[int]] | None = None,
        window: int = WINDOW,
    ) -> None:
        ranks = range(len(stops))
        self.window = window
        self.domains = [tuple(d) for d in domains] if domains else [(r,) for r in ranks]
        self.snapshots = {r: [slot(t, 1 << t % window) for t in range(2, stops[r] + 1)] for r in ranks}
        self.parked = {r: [slot(stops[r], (1 << window) - 1)] for r in ranks}
        self.logs = {r: [slot(t, 0) for t in range(2, stops[r])] for r in ranks}
        self.tables = dict.fromkeys(ranks, "table")  # by which snapshots name operators
        self.facts: dict[int, RankFacts] = {}
        self.homes: dict[int, str] = {}
        for members in self.domains:
            for r in members:
                self.facts[r] = RankFacts(self._beside(r), members, members)

    def _beside(self, rank: int) -> tuple[int, ...]:
        """Whoever has the same place in the domains beside; the smaller domain in turn."""
        found = set()
        for one, other in itertools.pairwise(self.domains):
            for at in range(max(len(one), len(other))):
                pair = one[at % len(one)], other[at % len(other)]
                found |= {p for p in pair if rank in pair and p != rank}
        return tuple(sorted(found))

    def trainer_lost(self, *ranks: int) -> Job:
        """Killed before it could park; what its daemon holds is there."""
        for rank in ranks:
            self.parked[rank] = []
        return self

    def node_lost(self, *ranks: int, replicas: bool = True) -> Job:
        """With its parked state, its logs and its facts; snapshots have replicas elsewhere."""
        for rank in ranks:
            self.parked[rank] = self.logs[rank] = []
            del self.facts[rank]
            if not replicas:
                self.snapshots[rank] = []
        return self

    def plan(self, verify_iterations: int = 0) -> LocalizedPlan | NotLocalized:
        return plan_localized(
            RunHoldings(
                self._held("seg", self.snapshots, self.window),
                self._held("parked", self.parked, self.window),
                self._held("boundary", self.logs, 1),
            ),
            self.facts,
            len(self.snapshots),
            homes=self.homes,
            verify_iterations=verify_iterations,
        )

    def planned(self, verify_iterations: int = 0) -> LocalizedPlan:
        plan = self.plan(verify_iterations)
        assert isinstance(plan, LocalizedPlan), plan
        return plan

    def refused(self) -> str:
        plan = self.plan()
        assert isinstance(plan, NotLocalized), plan
        return plan.reason

    def _held(self, kind: str, records: Mapping[int, Iterable[SlotRecord]], count: int) -> list[HeldRecords]:
        return [
            HeldRecords(f"n{r}", f"r{r}.{kind}", True, r, count, table, 4096, tuple(found))
            for r, found in records.items()
            for table in [self.tables[r] if kind == "seg" else "table"]
        ]


def outline(plan: LocalizedPlan) -> list[str]:
    """Each rank in a word: ``parked 10``, ``replays 8-10 < 1[8:10]``."""
    return [one_line(plan.per_rank[rank]) for rank in sorted(plan.per_rank)]


def one_line(plan: RankPlan) -> str:
    span = f"{plan.start}" if plan.start == plan.exact_at else f"{plan.start}-{plan.exact_at}"
    feeds = "".join(f" < {f.neighbour}[{f.first}:{f.end}]" for f in plan.feeds)
    for feed in plan.feeds:
        assert [p.record.iteration for p in feed.pieces] == list(range(feed.first, feed.end))
    return f"{plan.kind} {span}{feeds}"


def test_a_lost_stage_replays_alone_fed_by_both_neighbours() -> None:
    plan = Job([T] * 4).trainer_lost(1).planned()
    assert outline(plan) == [
        "parked 10",
        "replays 8-10 < 0[8:10] < 2[8:10]",
        "parked 10",
        "parked 10",
    ]
    assert plan.resume == T
    assert [p.record.iteration for p in plan.per_rank[1].pieces] == [8, 9, 10]
    assert [p.record.iteration for p in plan.per_rank[0].pieces] == [10]
    assert plan.per_rank[0].pieces[0].sources[0].segment == "r0.parked"
    logs = plan.per_rank[1].logs
    assert {n: {t: p.sources[0].segment for t, p in of.items()} for n, of in logs.items()} == {
        0: {8: "r0.boundary", 9: "r0.boundary"},
        2: {8: "r2.boundary", 9: "r2.boundary"},
    }
    assert plan.bases == {0: 10, 1: 8, 2: 10, 3: 10}
    assert plan.reason == (
        "all ranks run together again from iteration 10: ranks 0, 2, 3 parked at 10, "
        "rank 1 replaying from 8, exact at 10"
    )


def test_who_replays_begins_one_iteration_earlier_to_compare_all_that_it_loads() -> None:
    """With a window of 1 a lost stage replayed nothing that was compared, and a wrong snapshot was
    trained on.
    """
    job = Job([T] * 4, window=1).trainer_lost(1)
    del job.snapshots[1][-1]
    assert outline(job.planned())[1] == "replays 9 < 0[9:10] < 2[9:10]"
    assert job.planned().per_rank[1].unverified == "verify_iterations=0"
    plan = job.planned(16)
    assert outline(plan) == [
        "parked 10",
        "replays 8-9 < 0[8:10] < 2[8:10]",
        "parked 10",
        "parked 10",
    ]
    assert plan.per_rank[1].unverified == ""


@pytest.mark.parametrize("lacks", ["snapshot", "log"])
def test_for_comparing_alone_nobody_else_starts_earlier(lacks: str) -> None:
    job = Job([T] * 4, window=1).trainer_lost(1)
    job.snapshots[1] = [slot(t, 1) for t in ((9,) if lacks == "snapshot" else (8, 9))]
    if lacks == "log":
        job.logs[2] = [log for log in job.logs[2] if log.iteration != 8]
    plan = job.planned(16)
    assert outline(plan) == outline(job.planned())
    why = {
        "snapshot": "the ranks that replay have no snapshots of iteration 8 that lead to those of 9",
        "log": "rank 1 needs the log of rank 2 of iteration 8, which no node holds",
    }
    assert plan.per_rank[1].unverified == why[lacks]


def test_the_nodes_logs_may_be_lost_with_it() -> None:
    """What a lost rank sent is not needed: whoever would read it is parked."""
    plan = Job([T] * 4).node_lost(1).planned()
    assert outline(plan)[1] == "replays 8-10 < 0[8:10] < 2[8:10]"


def test_contiguous_stages_replay_jointly() -> None:
    job = Job([T] * 4).trainer_lost(1, 2)
    job.snapshots[2].pop()  # rank 2 died before its snapshot of 10 was sealed
    assert outline(job.planned()) == [
        "parked 10",
        "replays 7-9 < 0[7:10]",
        "replays 7-9 < 3[7:10]",
        "parked 10",
    ]


def test_stages_that_are_not_adjacent_replay_each_from_its_own_start() -> None:
    job = Job([T] * 5).trainer_lost(1, 3)
    job.snapshots[3].pop()
    assert outline(job.planned())[1:4] == [
        "replays 8-10 < 0[8:10] < 2[8:10]",
        "parked 10",
        "replays 7-9 < 2[7:10] < 4[7:10]",
    ]


def test_stages_that_were_a_step_behind_run_it_again_apart() -> None:
    plan = Job([T, T, T + 1, T + 1]).trainer_lost(2).planned()
    assert plan.resume == T + 1
    assert outline(plan) == [
        "parked 10",
        "parked 10",
        "replays 9-11 < 1[9:10] < 3[9:11]",
        "parked 11",
    ]


def test_a_stage_behind_is_fed_by_a_parked_one_that_is_through_with_the_step() -> None:
    assert outline(Job([T, T + 1]).planned()) == ["parked 10 < 1[10:11]", "parked 11"]


def values_of(plan: LocalizedPlan) -> dict[int, dict[int, str]]:
    """By rank and iteration, whose log has what all ranks computed together."""
    return {
        rank: {f.first: f.pieces[0].sources[0].segment for f in mine.values}
        for rank, mine in plan.per_rank.items()
        if mine.values
    }


def test_who_runs_a_step_again_and_is_fed_by_nobody_is_told_who_logged_shared_values() -> None:
    """Ranks 0 and 1 run the step again; to compute a norm over all stages with ranks 2 and 3, which
    do not, rank 0 would wait for ever.
    """
    plan = Job([T, T, T + 1, T + 1]).planned()
    assert outline(plan)[:2] == ["parked 10", "parked 10 < 2[10:11]"]
    assert plan.together == T + 1
    assert values_of(plan) == {0: {T: "r2.boundary"}}


def test_nobody_waits_for_shared_values_where_all_run_the_step_again() -> None:
    """Rank 2 was parked a step later, but its peer was not, and it takes back the peer's state."""
    plan = Job([T, T, T + 1, T], [(0, 1), (2, 3)]).planned()
    assert (plan.together, plan.resume) == (T, T + 1)
    assert values_of(plan) == {}


def test_shared_values_are_not_looked_for_where_a_replay_knows_them() -> None:
    """Rank 1's own snapshots tell them up to its last one, of 9; in iteration 9 it is fed. In that
    one the others are not there.
    """
    job = Job([T] * 4).trainer_lost(1)
    job.snapshots[1].pop()
    assert values_of(job.planned()) == {}
    job = Job([T] * 5).trainer_lost(1, 2, 3)
    for rank in (1, 2, 3):
        job.snapshots[rank].pop()
    assert values_of(job.planned()) == {2: {9: "r4.boundary"}}


def test_a_domain_starts_where_all_its_members_can() -> None:
    """Of ranks 2 and 3 one ended its step, the other not, and they hold shards: both have only
    snapshots in common.
    """
    job = Job([T, T, T + 1, T, T], [(0, 1), (2, 3), (4,)])
    for rank in (2, 3):
        job.facts[rank] = RankFacts(job.facts[rank].neighbours, (2, 3), ())
    plan = job.planned()
    assert outline(plan)[2:4] == [
        "replays 8-10 < 0[8:10] < 4[8:10]",
        "replays 8-10 < 1[8:10] < 4[8:10]",
    ]


def test_a_lost_replica_copies_from_its_peer() -> None:
    plan = Job([T] * 4, [(0, 1), (2, 3)]).trainer_lost(3).planned()
    assert outline(plan) == ["parked 10", "parked 10", "parked 10", "copied 10"]
    tensors, own = plan.per_rank[3].pieces
    assert [s.segment for p in (tensors, own) for s in p.sources] == ["r2.parked", "r3.seg"]
    assert own.record.iteration == T
    assert "rank 3 with a peer's state of 10" in plan.reason


def test_a_replica_is_told_by_its_peer_when_its_node_is_lost() -> None:
    assert outline(Job([T] * 4, [(0, 1), (2, 3)]).node_lost(3).planned())[3] == "copied 10"


def test_a_rank_that_runs_on_another_node_now_takes_its_parked_state_along() -> None:
    """A node was replaced, and the launcher has numbered the ranks anew. With a snapshot its ring
    begins there, whether or not that is of the step that was cut off: a stage that waits for what a
    lost one sends has none of it.
    """
    job = Job([T] * 4).trainer_lost(3)
    job.homes = {0: "n0", 1: "n2", 2: "n1", 3: "n3"}
    job.snapshots[2].pop()
    plan = job.planned()
    assert outline(plan) == ["parked 10", "moved 10", "moved 10", "replays 8-10 < 2[8:10]"]
    state, own = plan.per_rank[1].pieces
    assert [s.segment for p in (state, own) for s in p.sources] == ["r1.parked", "r1.seg"]
    assert [p.record.iteration for p in plan.per_rank[1].snapshots] == [10]
    assert [p.record.iteration for p in plan.per_rank[2].snapshots] == [9]
    assert "ranks 1, 2 parked at 10 on another node, rank 0 parked at 10, rank 3" in plan.reason
    assert plan.moved_bytes == {0: 0, 1: 20, 2: 20, 3: 20}  # and what rank 3 is fed


@pytest.mark.parametrize("why", ["no snapshot", "cut otherwise"])
def test_where_a_moved_rank_has_no_ring_to_begin_with_it_replays_or_copies(why: str) -> None:
    """A snapshot tells by which plan it went on. Later ones are of a history that is left behind."""
    job = Job([T] * 3)
    job.homes = {0: "n0", 1: "n9", 2: "n2"}
    if why == "cut otherwise":
        job.tables[1] = "another table"
        assert outline(job.planned())[1] == "replays 8-10 < 0[8:10] < 2[8:10]"
    else:
        job.snapshots[1] = [slot(T + 1, 1)]
        assert "rank 1 must replay" in job.refused()
    replicas = Job([T] * 4, [(0, 1), (2, 3)])
    replicas.homes = {0: "n0", 1: "n1", 2: "n2", 3: "n9"}
    replicas.snapshots[3] = [r for r in replicas.snapshots[3] if r.iteration < 5]
    assert outline(replicas.planned())[3] == "moved 10"


def test_nobody_copies_from_peers_none_of_which_can_go_on() -> None:
    job = Job([T] * 4, [(0, 1), (2, 3)]).trainer_lost(3)
    job.homes = {2: "n9"}
    job.tables[2] = "another table"
    job.snapshots[2] = [slot(T, EVERYTHING)]
    job.snapshots[3] = [slot(T, EVERYTHING)]
    assert [line.split(" <")[0] for line in outline(job.planned())[2:]] == ["replays 10"] * 2


def test_those_who_copy_take_turns_with_their_peers() -> None:
    plan = Job([T] * 5, [(0, 1, 2, 3), (4,)]).trainer_lost(2, 3).planned()
    taken = {plan.per_rank[rank].pieces[0].sources[0].segment for rank in (2, 3)}
    assert taken == {"r0.parked", "r1.parked"}


def test_of_a_domain_in_which_some_are_behind_those_copy_who_have_the_snapshot() -> None:
    """Rank 2 ended its step; it takes back the state of rank 3, which did not."""
    plan = Job([T, T, T + 1, T], [(0, 1), (2, 3)]).planned()
    assert outline(plan)[2:] == ["copied 10", "parked 10"]


@pytest.mark.parametrize("why", ["no snapshot", "not alike", "denied", "cut otherwise"])
def test_what_cannot_be_copied_is_replayed(why: str) -> None:
    job = Job([T] * 4, [(0, 1), (2, 3)]).trainer_lost(3)
    if why == "no snapshot":
        job.snapshots[3].pop()  # of T: its random generator is not known there
    elif why == "cut otherwise":
        job.tables[3] = "another table"  # what the peer anchors means something else here
    else:
        neighbours = job.facts[3].neighbours
        job.facts[3] = RankFacts(neighbours, (2, 3), (3,))
        if why == "not alike":
            job.facts[2] = RankFacts(job.facts[2].neighbours, (2, 3), (2,))
    first = 7 if why == "no snapshot" else 8
    expected = f"replays {first}-{first + 2} < "
    assert [line[: len(expected)] for line in outline(job.planned())[2:]] == [expected] * 2


def test_a_neighbour_whose_log_is_missing_replays_too() -> None:
    job = Job([T] * 4).trainer_lost(1)
    job.logs[2] = [r for r in job.logs[2] if r.iteration != 9]
    plan = job.planned()
    assert outline(plan) == [
        "parked 10",
        "replays 8-10 < 0[8:10]",
        "replays 8-10 < 3[8:10]",
        "parked 10",
    ]
    assert "rank 1 needs the log of rank 2 of iteration 9, which no node holds" in plan.reason


def test_widening_goes_on_until_nothing_is_missing() -> None:
    job = Job([T] * 5).trainer_lost(1)
    job.logs[2] = job.logs[3] = []
    assert [line.split(" <")[0] for line in outline(job.planned())] == [
        "parked 10",
        *["replays 8-10"] * 3,
        "parked 10",
    ]


def test_the_neighbour_of_a_lost_stage_lost_its_node() -> None:
    """Nobody has its logs, and it has no parked state: both replay; their facts are told by those
    beside them.
    """
    plan = Job([T] * 4).node_lost(1, 2).planned()
    assert outline(plan) == [
        "parked 10",
        "replays 8-10 < 0[8:10]",
        "replays 8-10 < 3[8:10]",
        "parked 10",
    ]
    assert "ranks 1, 2 reported no facts, and start together to be safe" in plan.reason


def test_a_stage_that_must_be_there_earlier_takes_a_snapshot_from_before() -> None:
    """Rank 0 runs iteration 10 again. Rank 1 is through with it, but what it sent is lost; it has
    to be there, too.
    """
    job = Job([T, T + 1, T + 1], window=1)
    job.logs[1].pop()
    assert outline(job.planned()) == [
        "parked 10",
        "replays 10-11 < 2[10:11]",
        "parked 11",
    ]
    job.snapshots[1] = [r for r in job.snapshots[1] if r.iteration > T]
    assert job.refused() == (
        "rank 1 must replay, but have no complete suffix in common that starts at 10 or before and ends at 11 or "
        "before (rank 0 needs the log of rank 1 of iteration 10, which no node holds)"
    )


def test_of_those_who_lack_a_log_the_one_that_needs_most_counts() -> None:
    """Ranks 0 and 2 have nothing but their parked states, of 7 and of 8; what rank 1 sent since is lost."""
    job = Job([7, T, 8])
    job.snapshots = {rank: [] for rank in job.snapshots}
    job.parked[1] = [slot(t, EVERYTHING) for t in (7, 8, T)]
    job.logs[1] = []
    job.logs[2] = [slot(7, 0)]
    assert outline(job.planned()) == ["parked 7", "parked 7 < 2[7:8]", "parked 8"]


def test_where_everybody_would_replay_all_recover_together() -> None:
    job = Job([T] * 3).trainer_lost(1)
    job.logs = {rank: [] for rank in job.logs}
    assert job.refused().startswith("every rank would replay; rank 1 needs the log of rank 0")


def test_without_parked_states_or_facts_there_is_no_localized_plan() -> None:
    assert Job([T] * 3).trainer_lost(0, 1, 2).refused() == "no rank was parked"
    job = Job([T] * 3)
    job.facts = {}
    assert job.refused() == "no rank reported with which ranks it communicates (is the boundary log enabled?)"
    nothing = plan_localized(RunHoldings([]), {}, 0)
    assert nothing == NotLocalized("world size 0", -1)


def test_a_stage_without_snapshots_cannot_replay() -> None:
    reason = Job([T] * 3).node_lost(1, replicas=False).refused()
    assert reason.startswith("rank 1 must replay, but")


def test_a_domain_whose_parks_are_incomplete_does_not_stand() -> None:
    job = Job([T] * 3)
    job.parked[1] = [replace(job.parked[1][0], anchors=EVERYTHING >> 1)]
    assert outline(job.planned())[1].startswith("replays 8-10")
    job.parked[1] = [replace(slot(T, EVERYTHING), state=SlotState.FILLING)]
    assert outline(job.planned())[1].startswith("replays 8-10")


# -- histories -------------------------------------------------------------------------------------------


def test_what_an_abandoned_history_left_does_not_count() -> None:
    """A recovery at 9 ran 9 and 10 again. Logs of 9 of before are outdated, snapshots of 9 are not;
    parks of 10 are stale.
    """
    job = Job([T] * 4).trainer_lost(1)
    for rank in range(4):
        for records in (job.snapshots[rank], job.logs[rank], job.parked[rank]):
            records[-1:] = [replace(r, epoch=7, epoch_start=9) for r in records[-1:]]
    assert outline(job.planned())[1] == "replays 8-10 < 0[8:10] < 2[8:10]"
    job.logs[2][-1] = slot(9, 0)  # sent before the recovery
    assert outline(job.planned())[2] == "replays 8-10 < 3[8:10]"
    job.parked[0] = [slot(10, EVERYTHING)]  # of a 10 that was left behind
    assert outline(job.planned())[0] == "replays 8-10"
    assert job.planned().epoch == 7


def test_an_epoch_that_only_a_log_tells_of_counts() -> None:
    job = Job([T] * 3).trainer_lost(1)
    job.logs[0].append(slot(5, 0, epoch=9, epoch_start=5))
    assert "no rank was parked" in job.refused()  # all of them are of what was left at 5


def test_a_second_failure_during_a_recovery_plans_from_the_same_parks() -> None:
    """Rank 1 ran 8 and 9 apart in a new epoch, that begins at 10, when rank 2, which waited parked, was lost."""
    job = Job([T] * 4).trainer_lost(1)
    job.logs[1] += [slot(t, 0, epoch=7, epoch_start=T) for t in (8, 9)]
    job.trainer_lost(2)
    assert outline(job.planned()) == [
        "parked 10",
        "replays 8-10 < 0[8:10]",
        "replays 8-10 < 3[8:10]",
        "parked 10",
    ]


def test_a_rank_that_came_as_far_as_its_own_park_uses_it() -> None:
    """In the second life rank 1 reached 10 and was parked there when rank 2 was lost."""
    job = Job([T] * 4)
    job.parked[1] = [replace(r, epoch=7, epoch_start=T) for r in job.parked[1]]
    assert outline(job.trainer_lost(2).planned())[1:3] == [
        "parked 10",
        "replays 8-10 < 1[8:10] < 3[8:10]",
    ]


def test_parks_of_ranks_that_went_on_do_not_hold_anybody_back() -> None:
    """All were parked at 6 because a step took long, and went on. Rank 1 was killed in 10, before
    the others were parked.
    """
    job = Job([T] * 3).trainer_lost(1)
    for rank in range(3):
        job.parked[rank].append(slot(6, EVERYTHING))
    assert outline(job.planned()) == ["parked 10", "replays 8-10 < 0[8:10] < 2[8:10]", "parked 10"]
    for rank in range(3):
        job.parked[rank] = [slot(6, EVERYTHING)]
    assert job.refused() == "snapshots make all ranks exact at 10, later than the newest parked state (6)"


def test_a_park_is_better_than_a_suffix_that_begins_before_it() -> None:
    """Rank 1 went on for one step after it was parked at 9; a replay would begin at 8."""
    job = Job([T] * 3)
    job.parked[1] = [slot(9, EVERYTHING)]
    assert outline(job.planned())[1] == "parked 9 < 0[9:10] < 2[9:10]"


def test_where_nobody_would_replay_all_recover_together() -> None:
    job = Job([T] * 3, window=1).trainer_lost(1)
    assert job.refused() == ("every rank has a complete snapshot of iteration 10: none replays")
    job.snapshots[1].pop()
    assert outline(job.planned())[1] == "replays 9 < 0[9:10] < 2[9:10]"


def test_ranks_that_replay_together_recorded_the_same_phases() -> None:
    job = Job([T] * 4).trainer_lost(1, 2)
    job.snapshots[2] = [replace(r, phase=(r.phase + (r.iteration > 8)) % 3) for r in job.snapshots[2]]
    assert outline(job.planned())[1:3] == ["replays 6-8 < 0[6:10]", "replays 6-8 < 3[6:10]"]
    # Those that do not replay together need not.
    alone = Job([T] * 4).trainer_lost(1, 3)
    alone.snapshots[3] = [replace(r, phase=(r.phase + 1) % 3) for r in alone.snapshots[3]]
    assert outline(alone.planned())[3] == "replays 8-10 < 2[8:10]"


def test_the_newest_start_counts_not_the_newest_end() -> None:
    """They run on to where all meet anyway, so a suffix that ends later is not worth starting earlier."""
    job = Job([T] * 3).trainer_lost(1)
    dense = replace(slot(8, EVERYTHING), previous=-1)
    job.snapshots[1] = [*job.snapshots[1][:-3], dense, replace(slot(10, 2), previous=7)]
    assert outline(job.planned())[1] == "replays 8 < 0[8:10] < 2[8:10]"
    job.snapshots[1].remove(dense)  # 5, 6, 7, 10 anchor everything
    assert outline(job.planned())[1] == "replays 5-10 < 0[5:10] < 2[5:10]"


# -- where things come from -------------------------------------------------------------------------


def test_logs_come_from_every_node_that_has_them_and_near_ones_first() -> None:
    job = Job([T] * 3).trainer_lost(1)
    held = job._held
    copies = [replace(h, node="n1", own=False) for h in held("boundary", {0: job.logs[0]}, 1)]
    logs = [*held("boundary", job.logs, 1), *copies]
    snapshots, parked = held("seg", job.snapshots, 3), held("parked", job.parked, 3)
    homes = {r: f"n{r}" for r in range(3)}
    known = RunHoldings(snapshots, parked, logs)
    plan = plan_localized(known, job.facts, 3, homes=homes)
    assert isinstance(plan, LocalizedPlan)
    near, far = plan.per_rank[1].feeds
    assert [[s.node for s in p.sources] for p in near.pieces] == [["n1", "n0"]] * 2
    assert [[s.node for s in p.sources] for p in far.pieces] == [["n2"]] * 2
    assert plan.moved_bytes == {0: 0, 1: 20, 2: 0}
    assert "20 B of rank 1 comes from other nodes" in plan.reason
    without = plan_localized(known, job.facts, 3, lost={"n0"})
    assert isinstance(without, NotLocalized)  # rank 0's snapshots had no replica
    assert "ranks 0, 1 must replay" in without.reason


# -- random jobs: executed, and compared with all that is possible ------------------------------------------------------


class Possible:
    """What could be done with what is left of a job, by brute force: every start of every domain."""

    def __init__(self, world: World, relations: Relations) -> None:
        self._world, self._relations = world, relations
        held = {kind: self._left(kind) for kind in ("seg", "parked", "boundary")}
        self.epochs = epoch_table(r for each in held.values() for h in each for r in h.records)
        self._snapshots = self._valid(held["seg"], 0)
        self._parks = self._valid(held["parked"], 0)
        self._logs = self._valid(held["boundary"], 1)
        self.resume = max((t for _, t in self._parks), default=-1)
        self._stands = [self._stands_of(d) for d in range(len(relations.domains))]

    def best(self) -> tuple[list[int], bool] | None:
        """The start of each domain in the plan that starts every domain as late as any plan; and
        whether none stands in it.
        """
        options = [
            [*((t, True) for t in self._stands[d]), *((t, False) for t in self._starts((d,)))]
            for d in range(len(self._stands))
        ]
        found = [choice for choice in itertools.product(*options) if self._feasible(choice)]
        if not found:
            return None
        latest = [max(choice[d][0] for choice in found) for d in range(len(options))]
        best = [choice for choice in found if [start for start, _ in choice] == latest]
        assert best, "no plan starts everybody as late as each could"
        return latest, not any(stands for choice in best for _, stands in choice)

    def _left(self, kind: str) -> list[HeldRecords]:
        return [h for h in self._world.store.holdings(kind) if h.node not in self._world.lost]

    def _valid(self, held: Iterable[HeldRecords], sent: int) -> dict[tuple[int, int], SlotRecord]:
        """By rank and iteration; ``sent`` is 1 for what came after the state of its iteration."""
        found: dict[tuple[int, int], SlotRecord] = {}
        for h in held:
            for r in h.records:
                if any(e > r.epoch and start < r.iteration + sent for e, start in self.epochs.items()):
                    continue
                other = found.get((h.rank, r.iteration))
                if other is None or r.epoch > other.epoch:
                    found[h.rank, r.iteration] = r
        return found

    def _stands_of(self, domain: int) -> list[int]:
        members = self._relations.domains[domain]
        newest_start = max(self._starts((domain,)), default=-1)
        return [
            t
            for t in range(max(newest_start, 0), self.resume + 1)
            if all(self._stands_at(rank, members, t) for rank in members)
        ]

    def _stands_at(self, rank: int, members: Sequence[int], t: int) -> bool:
        if (rank, t) in self._parks:
            return True
        peers = [m for m in members if (m, t) in self._parks and self._relations.have_same_operators(rank, m)]
        return bool(peers) and (rank, t) in self._snapshots

    def _starts(self, domains: Iterable[int]) -> list[int]:
        """From where these domains can replay together, exact at some iteration up to where all meet."""
        ranks = [rank for d in domains for rank in self._relations.domains[d]]
        window = self._world.shape.window
        return [
            start
            for start in range(self.resume + 1)
            if any(
                all(self._unbroken(rank, start, end) for rank in ranks)
                for end in range(start + window - 1, self.resume + 1)
            )
        ]

    def _unbroken(self, rank: int, start: int, end: int) -> bool:
        found = [self._snapshots.get((rank, t)) for t in range(start, end + 1)]
        return all(found) and all(r is not None and r.previous >= 0 for r in found[1:])

    def _feasible(self, choice: Sequence[tuple[int, bool]]) -> bool:
        relations = self._relations
        replaying = {d for d, (_, stands) in enumerate(choice) if not stands}
        for rank, others in enumerate(relations.neighbours):
            for other in others:
                mine, its = relations.domain_of[rank], relations.domain_of[other]
                if {mine, its} <= replaying and choice[mine] != choice[its]:
                    return False
                feed = range(choice[mine][0], min(choice[its][0], self.resume))
                if not all((other, t) in self._logs for t in feed):
                    return False
        return all(
            choice[min(component)][0] in self._starts(component) for component in self._components(replaying)
        )

    def _components(self, replaying: set[int]) -> list[set[int]]:
        components = [{d} for d in replaying]
        for rank, others in enumerate(self._relations.neighbours):
            for other in others:
                pair = {self._relations.domain_of[rank], self._relations.domain_of[other]}
                if pair <= replaying:
                    joined = [c for c in components if c & pair]
                    components = [c for c in components if not c & pair]
                    components.append(set().union(*joined))
        return components


def plan_of(
    world: World,
    homes: Mapping[int, str] = MappingProxyType({}),
    *,
    verify_iterations: int = 0,
) -> LocalizedPlan | NotLocalized:
    snapshots, parked, logs = map(world.store.holdings, ("seg", "parked", "boundary"))
    size = world.shape.world_size
    return plan_localized(
        RunHoldings(snapshots, parked, logs),
        world.facts,
        size,
        homes=homes,
        lost=world.lost,
        verify_iterations=verify_iterations,
    )


def newest_epoch_is_seen(world: World) -> bool:
    """Nobody can know of a recovery of which nothing is left (daemons tell each other; that is not
    part of this).
    """
    held = (h for kind in ("seg", "parked", "boundary") for h in world.store.holdings(kind))
    seen = {r.epoch for h in held if h.node not in world.lost for r in h.records}
    return world.epoch in seen


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**48), st.booleans())
def test_every_plan_brings_every_rank_to_the_state_that_it_had(seed: int, verifies: bool) -> None:
    """Executed on a job of numbers: whoever was fed, loaded or awaited something wrong would have
    other numbers.
    """
    world = random_world(random.Random(seed))
    assume(newest_epoch_is_seen(world))
    plan = plan_of(world, verify_iterations=16 * verifies)
    assume(isinstance(plan, LocalizedPlan))
    assert isinstance(plan, LocalizedPlan)
    states = Execution(world.shape, world.store, plan, world.truth.salts, world.lost).run()
    assert states == world.truth.states[plan.resume]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**48))
def test_who_compares_begins_one_iteration_earlier_and_moves_nobody_else(seed: int) -> None:
    world = random_world(random.Random(seed))
    plain, verified = plan_of(world), plan_of(world, verify_iterations=1)
    assume(isinstance(plain, LocalizedPlan))
    assert isinstance(plain, LocalizedPlan)
    assert isinstance(verified, LocalizedPlan)
    for rank, mine in plain.per_rank.items():
        its = verified.per_rank[rank]
        earlier = mine.kind is RankKind.REPLAYS and not its.unverified
        assert (its.kind, its.start, its.exact_at) == (
            mine.kind,
            mine.start - earlier,
            mine.exact_at,
        )
        assert [p.record.iteration for p in its.snapshots[earlier:]] == [
            p.record.iteration for p in mine.snapshots
        ]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**48))
def test_wherever_the_ranks_run_now_every_plan_brings_them_to_their_states(seed: int) -> None:
    """The launcher may put them anywhere; whoever was parked elsewhere begins its ring with
    something of the same history.
    """
    world = random_world(random.Random(seed))
    assume(newest_epoch_is_seen(world))
    nodes = [*sorted({*world.shape.nodes} - world.lost), "spare"]
    rng = random.Random(seed + 1)
    homes = {rank: rng.choice(nodes) for rank in range(world.shape.world_size)}
    plan = plan_of(world, homes)
    assume(isinstance(plan, LocalizedPlan))
    assert isinstance(plan, LocalizedPlan)
    states = Execution(world.shape, world.store, plan, world.truth.salts, world.lost).run()
    assert states == world.truth.states[plan.resume]
    for rank, mine in plan.per_rank.items():
        at_home = any(source.node == homes[rank] for source in mine.pieces[0].sources)
        if mine.kind is RankKind.PARKED:
            assert at_home
        if mine.kind is RankKind.MOVED:
            assert not at_home
            (ring,) = mine.snapshots
            at = ring.record.iteration
            assert at <= mine.start
            assert world.store.read(ring, world.lost) == recorded(world.truth, rank, at)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**48))
def test_nobody_starts_earlier_than_any_plan_needs_and_a_plan_is_found_if_there_is_one(
    seed: int,
) -> None:
    world = random_world(random.Random(seed), domains_max=3)
    relations = relate(world.facts, world.shape.world_size)
    assume(isinstance(relations, Relations))
    assert isinstance(relations, Relations)
    possible = Possible(world, relations)
    assume(possible.resume >= 0)
    best = possible.best()
    plan = plan_of(world)
    if isinstance(plan, LocalizedPlan):
        assert best is not None
        starts = [plan.per_rank[members[0]].start for members in relations.domains]
        assert (starts, plan.resume) == (best[0], possible.resume)
        return
    snapshots = world.store.holdings("seg")
    together = plan_recovery(snapshots, world.shape.world_size, lost=world.lost, epochs=possible.epochs)
    better = isinstance(together, RecoveryPlan) and (
        together.end > possible.resume or together.start >= possible.resume
    )
    assert best is None or best[1] or better, plan.reason
