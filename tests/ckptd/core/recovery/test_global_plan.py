"""The recovery plan: against brute force over every small case, and on the wire."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.core.recovery.global_plan import (
    NoRecovery,
    RecoveryPlan,
    complete_suffixes,
    newer_anchors,
    plan_recovery,
)
from ckptd.core.recovery.held import STORE_NODE, HeldRecords, from_wire, to_wire
from ckptd.core.recovery.snapshot_tables import SnapshotCopy, SnapshotToLoad, in_order, tables_of
from ckptd.core.slots.ring import choose_slot, slots_for_window
from ckptd.core.slots.slots import SlotRecord, SlotState, epoch_table, stale_after
from ckptd.errors import RemoteProtocolError

EPOCH_0, EPOCH_1 = 0, 1


def snap(
    iteration: int,
    anchors: int,
    *,
    previous: int | None = None,
    state: SlotState = SlotState.SEALED,
    sequence: int | None = None,
    epoch: int = 0,
    epoch_start: int = -1,
    digest: bytes = b"",
) -> SlotRecord:
    return SlotRecord(
        generation=0,
        index=iteration,
        state=state,
        iteration=iteration,
        previous=iteration - 1 if previous is None else previous,
        sequence=iteration if sequence is None else sequence,
        image_len=10,
        anchors=anchors,
        epoch=epoch,
        epoch_start=epoch_start,
        header_digest=digest,
    )


def held(
    rank: int,
    records: Iterable[SlotRecord],
    *,
    node: str | None = None,
    own: bool = True,
    window: int = 1,
    table: str = "table",
    generation: int = 0,
    partial: bool = False,
) -> HeldRecords:
    """A segment of a rank; unless said otherwise on the node that is named as the rank."""
    kind = "seg" if own else "rep"
    where = str(rank) if node is None else node
    name = f"r{rank}~g{generation}.{kind}"
    return HeldRecords(where, name, own, rank, window, table, 4096, tuple(records), partial=partial)


def chain(window: int, first: int, last: int, *, missing: int = -1) -> list[SlotRecord]:
    """Snapshots that anchor operator t % window at iteration t."""
    return [snap(t, 1 << t % window) for t in range(first, last + 1) if t != missing]


def rank(number: int, window: int, first: int, last: int, *, missing: int = -1) -> HeldRecords:
    """All that there is of a rank, on its own node."""
    return held(number, chain(window, first, last, missing=missing), window=window)


def planned(known: Sequence[HeldRecords], **settings: dict[int, str] | set[str]) -> RecoveryPlan:
    plan = plan_recovery(known, 1 + max(h.rank for h in known), **settings)  # type: ignore[arg-type]
    assert isinstance(plan, RecoveryPlan), plan
    return plan


def refused(known: Sequence[HeldRecords], world_size: int) -> str:
    plan = plan_recovery(known, world_size)
    assert isinstance(plan, NoRecovery), plan
    return plan.reason


def iterations(pieces: Iterable[SnapshotToLoad]) -> list[int]:
    return [piece.record.iteration for piece in pieces]


# -- where all resume ----------------------------------------------------------------------------


def test_one_rank_resumes_from_its_newest_suffix() -> None:
    plan = planned([rank(0, 3, 0, 9)])
    assert (plan.start, plan.end, plan.replayed, plan.epoch) == (7, 9, 2, 0)
    assert iterations(plan.per_rank[0]) == [7, 8, 9]
    assert plan.reason == (
        "every rank has the snapshots of iterations 7 to 9, which hold the whole state of iteration 9"
    )


def test_the_rank_that_is_behind_decides_the_end() -> None:
    plan = planned([rank(0, 3, 0, 9), rank(1, 3, 0, 8)])
    assert (plan.start, plan.end) == (6, 8)
    assert "up to 9 are not complete on every rank" in plan.reason


def test_the_rank_with_the_longest_window_decides_the_start() -> None:
    plan = planned([rank(0, 1, 2, 9), rank(1, 4, 2, 9)])
    assert (plan.start, plan.end) == (6, 9)
    assert iterations(plan.per_rank[0]) == [6, 7, 8, 9]


def test_a_short_rank_must_still_hold_the_common_start() -> None:
    """Rank 0 alone could resume at 9, but rank 1 starts at 6, which rank 0 has no more."""
    assert "anchor all operators (rank 0: 8 to 9, whole from 9, rank 1: 2 to 9, whole from 6)" in refused(
        [rank(0, 1, 8, 9), rank(1, 4, 2, 9)], 2
    )
    plan = planned([rank(0, 1, 5, 9, missing=7), rank(1, 2, 2, 9)])
    assert (plan.start, plan.end) == (8, 9)


def test_ranks_replay_together_only_what_they_recorded_in_the_same_phases() -> None:
    """An operator that is frozen on one rank and not on the other would get half a gradient."""

    def phased(shift: Callable[[int], int]) -> list[SlotRecord]:
        return [replace(r, phase=(r.iteration + shift(r.iteration)) % 3) for r in chain(3, 2, 9)]

    apart = held(1, phased(lambda t: t > 6), window=3)
    plan = planned([held(0, phased(lambda t: 0), window=3), apart])
    assert (plan.start, plan.end) == (4, 6)
    out = held(1, phased(lambda t: 1), window=3)
    none = plan_recovery([held(0, phased(lambda t: 0), window=3), out], 2)
    assert isinstance(none, NoRecovery)
    assert none.different_schedules
    assert "different phases of their schedules" in none.reason


def test_dense_ranks_resume_where_all_have_a_snapshot() -> None:
    plan = planned([held(r, [snap(t, 1, previous=-1) for t in (0, 4, 8)]) for r in (0, 1)])
    assert (plan.start, plan.end) == (8, 8)


def test_refusals_name_what_is_missing() -> None:
    assert refused([], 0) == "world size 0"
    some = [rank(1, 1, 0, 1), held(2, [snap(0, 1, state=SlotState.FILLED)])]
    assert refused(some, 3) == "no node holds a snapshot of ranks 0, 2 (world size 3)"
    assert refused([rank(0, 1, 0, 1), rank(5, 1, 0, 1)], 1) == (
        "nodes hold snapshots of rank 5, beyond world size 1"
    )
    partly = [rank(0, 2, 0, 3), rank(1, 4, 0, 1), held(1, chain(4, 1, 1), node="b", window=4)]
    assert refused(partly, 2) == (
        "rank 1: no node holds a complete suffix; the newest snapshot is iteration 1 on nodes 1, b, and the "
        "snapshots up to it lack an anchor of 2 of 4 operators"
    )
    apart = [rank(0, 1, 0, 3), rank(1, 1, 6, 9)]
    assert "no iteration in common (rank 0: 0 to 3, rank 1: 6 to 9)" in refused(apart, 2)


def ring_after(number: int, window: int, last: int) -> HeldRecords:
    """What a ring of the advised size holds once snapshot ``last`` is being filled."""
    slots = {i: SlotRecord(0, i, SlotState.FREE) for i in range(slots_for_window(window))}
    for t in range(last + 1):
        index = choose_slot(slots.values(), window, generation=0).index
        assert index is not None
        state = SlotState.FILLING if t == last else SlotState.SEALED
        slots[index] = replace(snap(t, 1 << t % window, state=state), index=index)
    return held(number, slots.values(), window=window)


@pytest.mark.parametrize("window", range(1, 7))
@pytest.mark.parametrize("last", [20, 21])
def test_ranks_one_snapshot_apart_still_have_a_common_suffix(window: int, last: int) -> None:
    """Rank 0 is filling one snapshot more than rank 1 when all are killed."""
    plan = planned([ring_after(0, window, last), ring_after(1, window, last - 1)])
    assert (plan.start, plan.end) == (last - 1 - window, last - 2)


def test_whose_suffix_is_complete_does_not_depend_on_the_other_ranks() -> None:
    """It tells a run that got somewhere, and misses a node, from one that never did."""
    assert complete_suffixes([]) == {}
    half = rank(1, 4, 0, 2)
    assert complete_suffixes([half]) == {}
    assert list(complete_suffixes([rank(2, 3, 0, 9), half])) == [2]
    assert isinstance(plan_recovery([rank(2, 3, 0, 9), half], 3), NoRecovery)
    # Scattered over nodes it counts; where another history began anew, it does not.
    scattered = held(1, chain(4, 3, 3), node="b", own=False, window=4)
    told = complete_suffixes([scattered, half])
    assert told == {1: "iterations 0 to 3 on nodes 1, b"}
    begun_anew = held(0, [snap(0, 1, epoch=1, epoch_start=-1)], window=2)
    assert complete_suffixes([rank(1, 2, 0, 9), begun_anew]) == {}


# -- one snapshot earlier, to compare ------------------------------------------------------------


def verified(known: Sequence[HeldRecords], within: int = 16) -> RecoveryPlan:
    plan = plan_recovery(known, 1 + max(h.rank for h in known), verify_iterations=within)
    assert isinstance(plan, RecoveryPlan), plan
    return plan


def dense(number: int, *iterations: int, epoch: int = 0) -> HeldRecords:
    """Dense snapshots of a rank: none says what it goes on from."""
    return held(number, [snap(t, 1, previous=-1, epoch=epoch) for t in iterations])


@pytest.mark.parametrize("known", [dense(0, 7, 8, 9), rank(0, 1, 7, 9)])
def test_with_a_window_of_one_the_snapshot_before_is_replayed(known: HeldRecords) -> None:
    """A plan used to begin and end at the newest snapshot: it replayed, and compared, nothing."""
    plan = verified([known])
    assert (plan.start, plan.needed, plan.end, plan.replayed) == (8, 9, 9, 1)
    assert iterations(plan.per_rank[0]) == [8, 9]
    assert (plan.unverified, plan.dense) == ("", True)


def test_with_a_longer_window_what_the_newest_anchors_is_computed_too() -> None:
    plan = verified([rank(0, 3, 0, 9)])
    assert (plan.start, plan.needed, plan.end) == (6, 7, 9)
    assert iterations(plan.per_rank[0]) == [6, 7, 8, 9]
    assert not plan.dense


def test_ranks_begin_where_all_have_a_snapshot() -> None:
    plan = verified([dense(0, 6, 8, 9), dense(1, 6, 7, 9)])
    assert (plan.start, plan.needed, plan.end) == (6, 9, 9)
    assert [iterations(pieces) for pieces in plan.per_rank.values()] == [[6, 9], [6, 9]]


NONE_LEADS_TO_9 = "before iteration 9 leads to that of iteration 9"


@pytest.mark.parametrize(
    ("known", "why"),
    [
        ([dense(0, 9)], f"no snapshot of rank 0 {NONE_LEADS_TO_9}"),
        ([dense(0, 8, 9), dense(1, 9)], f"no snapshot of rank 1 {NONE_LEADS_TO_9}"),
        (
            [held(0, [snap(8, 1), snap(9, 1, previous=-1, epoch=1, epoch_start=8)])],
            f"no snapshot of rank 0 {NONE_LEADS_TO_9}",
        ),
        (
            [held(0, chain(2, 8, 9), window=2)],
            "no snapshot of rank 0 before iteration 8 leads to that of iteration 8",
        ),
        ([dense(0, 6, 8, 9), dense(1, 7, 9)], "the ranks have no snapshot before iteration 9 in common"),
        ([dense(0, 4, 9)], "the previous snapshot is 5 iterations older, and verify_iterations=4"),
    ],
)
def test_where_there_is_none_the_plan_is_as_without(known: list[HeldRecords], why: str) -> None:
    plan = verified(known, 4)
    assert plan.unverified == why
    without = planned(known)
    assert (plan.start, plan.end, plan.per_rank) == (without.start, without.end, without.per_rank)
    assert without.unverified == "verify_iterations=0"


def test_what_is_compared_must_be_of_the_same_phases() -> None:
    ahead = [snap(8, 1, previous=-1), replace(snap(9, 1), phase=0)]
    other = [replace(snap(8, 1, previous=-1), phase=1), replace(snap(9, 1), phase=0)]
    plan = verified([held(0, ahead), held(1, other)])
    assert (plan.start, plan.end) == (9, 9)
    assert plan.unverified == "before iteration 9 the ranks were in different phases of their schedules"


def test_a_damaged_snapshot_before_is_taken_from_where_it_is_whole() -> None:
    damaged = replace(snap(8, 1, previous=7), state=SlotState.QUARANTINED)
    own = held(0, [damaged, snap(9, 1)], node="a")
    replica = held(0, [snap(8, 1, previous=7), snap(9, 1)], node="b", own=False)
    assert "no snapshot of rank 0 before" in verified([own]).unverified
    plan = verified([own, replica])
    assert [source.node for source in plan.per_rank[0][0].sources] == ["b"]
    assert [source.node for source in plan.per_rank[0][1].sources] == ["a", "b"]


def test_only_where_all_ranks_begin_with_everything_a_plan_is_dense() -> None:
    """A rank with a window of 4 has frozen operators where one with a window of 1 has none."""
    assert not verified([rank(0, 1, 2, 9), rank(1, 4, 2, 9)]).dense
    assert verified([rank(0, 1, 2, 9), rank(1, 1, 2, 9)]).dense


# -- scattered copies ----------------------------------------------------------------------------


def test_a_chain_may_be_scattered_over_nodes_and_segments() -> None:
    a, b, c = (chain(3, t, t) for t in (7, 8, 9))
    plan = planned(
        [
            held(0, a, node="a", own=False, window=3),
            held(0, b, node="b", own=False, window=3),
            held(0, [*b, *c], node="c", own=False, window=3, generation=1),
        ],
        homes={0: "z"},
    )
    assert (plan.start, plan.end) == (7, 9)
    assert [{s.node for s in piece.sources} for piece in plan.per_rank[0]] == [
        {"a"},
        {"b", "c"},
        {"c"},
    ]
    assert plan.moved_bytes == {0: 30}
    assert "30 B of rank 0 comes from other nodes" in plan.reason


def test_the_home_comes_first_its_own_segment_before_a_replica() -> None:
    records = chain(1, 4, 4)
    known = [
        held(0, records, node="home", own=False),
        held(0, records, node="a", own=False),
        held(0, [replace(records[0], index=9)], node="home"),
        held(0, records, node="b", own=False),
    ]
    plan = planned(known, homes={0: "home"})
    (piece,) = plan.per_rank[0]
    assert piece.record.index == 9
    assert piece.sources == (
        SnapshotCopy("home", "r0~g0.seg", 9),
        SnapshotCopy("home", "r0~g0.rep", 4),
        SnapshotCopy("a", "r0~g0.rep", 4),
        SnapshotCopy("b", "r0~g0.rep", 4),
    )
    assert plan.moved_bytes == {0: 0}
    assert "other nodes" not in plan.reason


def test_lost_nodes_do_not_count_not_even_as_witnesses() -> None:
    known = [
        held(0, chain(1, 0, 5), node="a", own=False),
        held(0, [snap(9, 1, epoch=1, epoch_start=3)], node="b"),
    ]
    assert (planned(known).end, planned(known).epoch) == (9, 1)
    without = planned(known, lost={"b"})
    assert (without.end, without.epoch) == (5, 0)


@pytest.mark.parametrize("num_ranks", [8, 12, 64])
def test_the_ranks_of_a_lost_node_are_spread_over_the_holders(num_ranks: int) -> None:
    """Also where the targets follow the rank's number, as placements like to do."""
    for targets in (
        lambda r: ("t1", "t2"),
        lambda r: (f"t{(r + 1) % 4}", f"t{(r + 2) % 4}"),
        lambda r: (f"t{r % 4}", f"t{(r // 2) % 4}", f"t{(r + 1) % 4}"),
    ):
        known = [
            held(r, chain(2, 4, 7), node=node, own=False, window=2)
            for r in range(num_ranks)
            for node in set(targets(r))
        ]
        plan = planned(known, homes=dict.fromkeys(range(num_ranks), "spare"))
        asked = Counter(p.sources[0].node for pieces in plan.per_rank.values() for p in pieces)
        assert max(asked.values()) - min(asked.values()) <= 2, asked
        assert len(asked) == len({h.node for h in known})
        assert plan.moved_bytes == dict.fromkeys(range(num_ranks), 20)


def test_operator_tables_never_mix() -> None:
    """A replanned window numbers its operators anew: the old and the new half make no whole."""
    halves = [
        held(0, chain(2, 4, 4), window=2, table="old"),
        held(0, chain(2, 5, 5), window=2, table="new", generation=1),
    ]
    assert "lack an anchor of 1 of 2" in refused(halves, 1)
    whole = [held(0, chain(2, 3, 4), window=2, table="old"), halves[1]]
    assert planned(whole).end == 4
    both = [held(0, chain(2, 3, 6), window=2, table="old"), rank(1, 2, 3, 6)]
    newer = [snap(t, 1 << t % 2, sequence=50 + t) for t in (5, 6)]
    plan = planned([*both, held(0, newer, window=2, table="new", generation=1)])
    assert [p.record.sequence for p in plan.per_rank[0]] == [55, 56], "the table written last wins"


# -- durable copies of partial snapshots ---------------------------------------------------------


def durable(number: int, *listed: int) -> HeldRecords:
    """What storage has of a rank with three operators: of each a copy, and the newest snapshot without any.
    Each image links to the one that is listed before it.
    """
    records = [
        snap(t, 1 << t % 3 if t != listed[-1] else 0, previous=before, digest=b"stored %02d" % t)
        for before, t in zip((2, *listed), listed, strict=False)
    ]
    return replace(
        held(number, records, node=STORE_NODE, own=False, window=3, partial=True),
        segment=f"{listed[-1]}/{number}",
    )


def of_each_rank(plan: RecoveryPlan) -> list[list[int]]:
    return [[piece.record.iteration for piece in pieces] for _, pieces in sorted(plan.per_rank.items())]


def test_no_image_of_a_durable_chain_is_mixed_with_memory() -> None:
    """Rank 0 has all in memory, and more of iteration 12 than storage has; replicas must not differ."""
    listed = (4, 5, 9, 12)
    plan = planned([rank(0, 3, 2, 14), durable(0, *listed), durable(1, *listed)])
    assert of_each_rank(plan) == [[*listed]] * 2
    assert [{source.node for piece in of for source in piece.sources} for of in plan.per_rank.values()] == [
        {STORE_NODE}
    ] * 2
    assert "different snapshots" not in plan.reason
    # Memory of both is newer, and better.
    both = planned([rank(0, 3, 2, 14), rank(1, 3, 2, 12), durable(0, *listed), durable(1, *listed)])
    assert of_each_rank(both) == [[10, 11, 12]] * 2


def test_memory_has_newer_copies_of_what_a_durable_chain_has() -> None:
    """Up to the iteration at which all resume, and no more of them than have something newer."""
    listed = (4, 5, 9, 12)
    memory = replace(rank(0, 3, 2, 14), partial=True)
    known = [memory, durable(0, *listed), durable(1, *listed)]
    plan = planned(known)
    newer = newer_anchors(known, plan, 0, homes={0: "0"})
    # Of 12 storage has the newest snapshot without experts; 11 and 10 are the newest with the others.
    assert iterations(newer) == [12, 11, 10]
    assert {source.node for piece in newer for source in piece.sources[:1]} == {"0"}
    assert newer_anchors(known, plan, 1) == ()
    # A replica on another node does as well, and what storage has later than memory is not taken from there.
    on_peer = replace(memory, node="2", own=False, records=memory.records[:-4])
    assert iterations(newer_anchors([on_peer, *known[1:]], plan, 0)) == [10, 8]
    # Neither snapshots of another table, nor whole ones, nor those that were abandoned.
    for other in (
        replace(memory, operators_id="of another model"),
        replace(memory, partial=False),
        replace(
            memory, records=tuple(replace(r, epoch=1, epoch_start=r.iteration - 1) for r in memory.records)
        ),
    ):
        epochs = {2: 1} if other.records[0].epoch else {}
        assert newer_anchors([other, *known[1:]], plan, 0, epochs=epochs) == ()


def test_a_rank_that_went_back_to_storage_and_one_whose_memory_is_older_do_not_mix() -> None:
    """After such a recovery the one has images of 4, 5, 9 and 12, the other one all snapshots since 2."""
    listed = (4, 5, 9, 12)
    back = replace(durable(1, *listed), node="1", segment="r1~g0.seg", own=True)
    assert isinstance(plan_recovery([rank(0, 3, 2, 12), back], 2), NoRecovery)
    stored = [durable(number, *listed) for number in range(2)]
    assert of_each_rank(planned([rank(0, 3, 2, 12), back, *stored])) == [[*listed]] * 2


def test_numbers_that_a_recovery_left_out_do_not_part_storage_from_memory() -> None:
    """When all went back to iteration 5, rank 1 had snapshots up to 7: its next one has number 8."""
    after = [snap(t, 1 << t % 3, sequence=t + 2, epoch=1, epoch_start=5) for t in (6, 7, 8)]
    level = held(0, [*chain(3, 4, 5), *(replace(r, sequence=r.iteration) for r in after)], window=3)
    stored = held(1, [*chain(3, 4, 5), after[0]], node=STORE_NODE, own=False, window=3)
    memory = held(1, after[1:], window=3)
    plan = planned([level, stored, memory])
    assert of_each_rank(plan) == [[6, 7, 8]] * 2
    assert [piece.sources[0].node for piece in plan.per_rank[1]] == [STORE_NODE, "1", "1"]
    # No iteration is left out, so partial snapshots are not of several durable checkpoints, either.
    assert planned([replace(each, partial=True) for each in (level, stored, memory)]) == plan


def test_durable_checkpoints_that_share_images_are_apart() -> None:
    older, newer = (4, 5, 9, 12), (5, 9, 13, 15)
    stored = [durable(number, *of) for number in range(2) for of in (older, newer)]
    assert of_each_rank(planned(stored)) == [[*newer]] * 2
    assert of_each_rank(planned(stored[:3])) == [[*older]] * 2


# -- histories -----------------------------------------------------------------------------------


def test_what_a_later_epoch_left_behind_is_out_on_every_rank() -> None:
    """Only rank 1 has begun the new epoch; rank 0's replica of the abandoned history is out too."""
    known = [
        held(0, chain(1, 0, 9), node="back", own=False),
        held(0, chain(1, 0, 6)),
        held(1, [*chain(1, 0, 6), snap(7, 1, epoch=1, epoch_start=6)]),
    ]
    plan = planned(known)
    assert (plan.end, plan.epoch) == (6, 1)
    known[1] = held(0, [*chain(1, 0, 6), snap(7, 1, epoch=1, epoch_start=6, sequence=3)])
    plan = planned(known)
    assert plan.end == 7
    assert [s.node for s in plan.per_rank[0][0].sources] == ["0"]


def test_a_slot_in_any_state_is_a_witness_of_its_epoch() -> None:
    known = [
        held(
            0,
            [*chain(1, 0, 9), snap(7, 0, state=SlotState.FILLING, epoch=1, epoch_start=6)],
        )
    ]
    assert (planned(known).end, planned(known).epoch) == (6, 1)


def test_the_epoch_seen_is_told_even_without_a_plan() -> None:
    stale = [held(0, [snap(7, 0, state=SlotState.FREE, epoch=4, epoch_start=6)])]
    assert plan_recovery(stale, 1) == NoRecovery("no node holds a snapshot of rank 0 (world size 1)", 4)
    assert plan_recovery([], 1) == NoRecovery("no node holds a snapshot of rank 0 (world size 1)")


def test_of_one_iteration_what_was_filled_last_counts() -> None:
    older, newer = snap(4, 1, sequence=9), snap(4, 1, sequence=3, epoch=1, epoch_start=3)
    plan = planned([held(0, [older]), held(0, [newer], node="b", own=False)])
    assert plan.per_rank[0][0].record == newer
    again = replace(older, sequence=10)
    plan = planned([held(0, [older]), held(0, [again], node="b", own=False)])
    assert plan.per_rank[0][0].record == again


def test_two_claims_of_one_place_are_told_and_the_owner_is_believed() -> None:
    mine, theirs = snap(4, 1, digest=b"a" * 16), snap(4, 1, digest=b"b" * 16)
    known = [
        held(0, [theirs], node="a", own=False),
        held(0, [theirs], node="b", own=False),
        held(0, [mine], node="c"),
    ]
    plan = planned(known)
    assert plan.per_rank[0][0].sources == (SnapshotCopy("c", "r0~g0.seg", 4),)
    assert (
        "rank 0: nodes a, b, c hold different snapshots of iteration 4 (epoch 0, sequence 4); "
        "that of node c counts"
    ) in plan.reason
    known[2] = held(0, [mine], node="c", own=False)
    plan = planned(known)
    assert [s.node for s in plan.per_rank[0][0].sources] == ["a", "b"]
    later = [held(0, [snap(4, 1, sequence=9)], node="d", own=False)]
    assert "different" not in planned([*known, *later]).reason, "the claims are both outdated"


def test_of_two_claims_of_one_place_the_audited_one_counts() -> None:
    """Neither the owner nor the number of nodes says which bits a step leads to; an audit does."""
    mine, theirs = snap(4, 1, digest=b"a" * 16), snap(4, 1, digest=b"b" * 16)
    known = [
        held(0, [mine], node="a"),
        held(0, [mine], node="b", own=False),
        held(0, [replace(theirs, audited=True)], node="c", own=False),
        held(0, [theirs], node="d", own=False),
    ]
    told = from_wire(to_wire(known))
    assert [record.audited for h in told for record in h.records] == [False, False, True, False]
    for each in (known, told):
        plan = planned(each)
        assert [s.node for s in plan.per_rank[0][0].sources] == ["c", "d"]
        assert "that of nodes c, d counts" in plan.reason
    later = held(0, [snap(4, 1, sequence=9)], node="e")
    assert planned([*known, later]).per_rank[0][0].record.sequence == 9, "what was filled last, all the same"


def test_what_was_reduced_for_storage_is_another_image_of_the_same_snapshot() -> None:
    """It counts where there is no whole one, and contradicts none."""
    whole = [snap(3, 0b011, digest=b"a" * 16), snap(4, 0b101, digest=b"b" * 16)]
    stored = [snap(3, 0b010, digest=b"c" * 16), whole[1]]
    known = [
        held(0, stored, node="a", window=3),
        held(0, whole, node="b", own=False, window=3),
        held(0, stored, node="c", own=False, window=3),
    ]
    plan = planned(known)
    assert [piece.record.anchors for piece in plan.per_rank[0]] == [0b011, 0b101]
    assert [s.node for s in plan.per_rank[0][0].sources] == ["b"]
    assert "different" not in plan.reason
    plan = planned([known[0], known[2]])
    assert [s.node for s in plan.per_rank[0][0].sources] == ["a", "c"]


# -- against brute force -------------------------------------------------------------------------


class Reference:
    """The plan by its definition: all pairs are tried, no chain is walked."""

    def __init__(self, known: Sequence[HeldRecords], world_size: int) -> None:
        self.world_size = world_size
        self.every = [(h, r) for h in known for r in h.records]
        self.live = [(h, r) for h, r in self.every if r.sealed and not self._stale(r)]

    def _stale(self, record: SlotRecord) -> bool:
        return any(
            other.epoch > record.epoch and other.epoch_start < record.iteration for _, other in self.every
        )

    def counted(self, number: int, table: str) -> list[SlotRecord]:
        """One snapshot per iteration."""
        mine = [(h, r) for h, r in self.live if h.rank == number and h.operators_id == table]
        return [
            max((r for _, r in mine if r.iteration == t), key=lambda r: self._weight(r, mine))
            for t in sorted({r.iteration for _, r in mine})
        ]

    def _weight(
        self, record: SlotRecord, mine: Sequence[tuple[HeldRecords, SlotRecord]]
    ) -> tuple[int, int, int, bool, int, bytes]:
        same = [h for h, r in mine if identity(r) == identity(record)]
        nodes = {h.node for h in same}
        own = any(h.own for h in same)
        anchors = record.anchors.bit_count()
        return record.epoch, record.sequence, anchors, own, len(nodes), record.header_digest

    def runs(self, number: int, start: int, end: int) -> list[tuple[SlotRecord, ...]]:
        """Every linked run of counted snapshots from start to end that anchors everything."""
        tables = {(h.operators_id, h.num_operators) for h, _ in self.live if h.rank == number}
        found = []
        for table, operators in sorted(tables):
            records = [r for r in self.counted(number, table) if start <= r.iteration <= end]
            for size in range(1, len(records) + 1):
                for chosen in itertools.combinations(records, size):
                    ends = (chosen[0].iteration, chosen[-1].iteration) == (start, end)
                    linked = all(b.previous == a.iteration for a, b in itertools.pairwise(chosen))
                    covered = {i for r in chosen for i in range(16) if r.anchors >> i & 1}
                    if ends and linked and covered >= set(range(operators)):
                        found.append(chosen)
        return found

    def best(self) -> tuple[int, int] | None:
        """The best (end, start)."""
        times = {r.iteration for _, r in self.live}
        ranks = range(self.world_size)
        for end in sorted(times, reverse=True):
            starts = [start for start in times if all(self.runs(n, start, end) for n in ranks)]
            if not starts:
                continue
            chosen = [max(self.runs(n, max(starts), end), key=preferred) for n in ranks]
            skipping = any(
                b.sequence > a.sequence + 1 and b.iteration > a.iteration + 1 and self._partial(number, a)
                for number, run in enumerate(chosen)
                for a, b in itertools.pairwise(run)
            )
            if not skipping or len({tuple(r.iteration for r in run) for run in chosen}) == 1:
                return end, max(starts)
        return None

    def _partial(self, number: int, record: SlotRecord) -> bool:
        """Whether the table with this record has partial snapshots."""
        mine = [(h, r) for h, r in self.every if h.rank == number]
        tables = {h.operators_id for h, r in mine if identity(r) == identity(record)}
        return any(h.partial and h.operators_id in tables for h, _ in mine)

    def holders(self, number: int, record: SlotRecord, table: str) -> set[SnapshotCopy]:
        return {
            SnapshotCopy(h.node, h.segment, r.index)
            for h, r in self.live
            if h.rank == number and h.operators_id == table and identity(r) == identity(record)
        }


def preferred(run: Sequence[SlotRecord]) -> tuple[int, int, int]:
    """Of several operator tables that one written last, and of these the one with the fewest snapshots."""
    return run[-1].epoch, run[-1].sequence, -len(run)


def identity(record: SlotRecord) -> tuple[int, int, int, bytes]:
    return record.iteration, record.epoch, record.sequence, record.header_digest


def check(known: Sequence[HeldRecords], world_size: int, homes: dict[int, str]) -> bool:
    """Compare with the definition; whether there was a plan."""
    reference = Reference(known, world_size)
    best = reference.best()
    plan = plan_recovery(known, world_size, homes=homes)
    assert plan == plan_recovery(reversed(known), world_size, homes=homes)
    assert plan.epoch == max((r.epoch for _, r in reference.every), default=-1)
    assert plan.reason
    if isinstance(plan, NoRecovery):
        assert best is None, known
        return False
    assert (plan.end, plan.start) == best, known
    assert plan.replayed == plan.end - plan.start
    assert sorted(plan.per_rank) == list(range(world_size))
    for number, pieces in plan.per_rank.items():
        check_pieces(reference, number, pieces, plan, homes.get(number))
    return True


def check_pieces(
    reference: Reference,
    number: int,
    pieces: Sequence[SnapshotToLoad],
    plan: RecoveryPlan,
    home: str | None,
) -> None:
    runs = reference.runs(number, plan.start, plan.end)
    assert [identity(p.record) for p in pieces] in [[identity(r) for r in run] for run in runs]
    own = {(h.node, h.segment) for h, _ in reference.every if h.own}
    moved = 0
    for piece in pieces:
        first = piece.sources[0]
        found = [
            (h, r)
            for h, r in reference.live
            if (h.node, h.segment, r.index) == (first.node, first.segment, first.index)
        ]
        assert [r for _, r in found] == [piece.record]
        table = found[0][0].operators_id
        assert set(piece.sources) == reference.holders(number, piece.record, table)
        assert len(set(piece.sources)) == len(piece.sources)
        places = [(s.node != home, (s.node, s.segment) not in own) for s in piece.sources]
        near = [p for p in places if not p[0]]
        assert places[: len(near)] == sorted(near)
        moved += 0 if near else piece.record.image_len
    assert plan.moved_bytes[number] == moved


HOMES = {0: "a", 1: "b"}


def world(snapshots: Iterable[tuple[int, str, SlotRecord]], *, window: int = 2) -> list[HeldRecords]:
    """Segments from (rank, node, record) triples."""
    found: dict[tuple[int, str], list[SlotRecord]] = {}
    for number, node, record in snapshots:
        slots = found.setdefault((number, node), [])
        slots.append(replace(record, index=len(slots)))
    return [
        held(number, records, node=node, own=HOMES.get(number) == node, window=window)
        for (number, node), records in found.items()
    ]


def test_every_small_case_against_brute_force() -> None:
    """Two ranks of two operators: each iteration of three absent, or anchoring 0, 1 or both."""
    tables = [
        [snap(t, a) for t, a in enumerate(anchors) if a] for anchors in itertools.product(range(4), repeat=3)
    ]
    found = sum(
        check([held(0, a, window=2), held(1, b, window=2)], 2, {0: "0", 1: "1"})
        for a, b in itertools.product(tables, repeat=2)
    )
    assert 0 < found < len(tables) ** 2


@pytest.mark.slow
def test_every_distribution_of_copies_against_brute_force() -> None:
    """Two ranks, three iterations, each snapshot on any subset of the two nodes."""
    subsets = ["", "a", "b", "ab"]
    found = total = 0
    for places in itertools.product(subsets, repeat=6):
        known = world(
            (number, node, snap(t, 1 << t % 2, digest=bytes([16 * number + t]) * 16))
            for (number, t), nodes in zip(itertools.product((0, 1), range(3)), places, strict=True)
            for node in nodes
        )
        found += check(known, 2, HOMES)
        total += 1
    assert 0 < found < total


VERSIONS = (None, EPOCH_0, EPOCH_1)


def version(iteration: int, epoch: int, start: int) -> SlotRecord:
    """A snapshot of the first history, or of the one that left it at ``start``."""
    began = start if epoch else -1
    return snap(
        iteration,
        1 << iteration % 2,
        epoch=epoch,
        epoch_start=began,
        digest=bytes([iteration, epoch]) * 8,
    )


@pytest.mark.slow
@pytest.mark.parametrize("start", [-1, 0, 1, 2])
@pytest.mark.parametrize("shape", [(1, (1, 2, 3)), (2, (1, 2))])
def test_every_mixture_of_two_histories_against_brute_force(
    start: int, shape: tuple[int, tuple[int, ...]]
) -> None:
    """Each of two nodes holds of each rank and iteration nothing, the old or the new snapshot."""
    world_size, times = shape
    cells = list(itertools.product(range(world_size), "ab", times))
    found = total = 0
    for versions in itertools.product(VERSIONS, repeat=len(cells)):
        chosen = zip(cells, versions, strict=True)
        known = world(
            (number, node, version(t, epoch, start))
            for (number, node, t), epoch in chosen
            if epoch is not None and (epoch == EPOCH_0 or t > start)
        )
        found += check(known, world_size, HOMES)
        total += 1
    assert 0 < found < total


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_random_cases_against_brute_force(seed: int) -> None:
    """More of everything: ranks, nodes, tables, epochs, broken links, unsealed slots, conflicts."""
    rng = random.Random(seed)
    world_size = rng.randint(1, 3)
    operators = [rng.randint(1, 3) for _ in range(world_size)]
    starts = [-1, *(rng.randint(-1, 4) for _ in range(2))]
    known = []
    for number, node in itertools.product(range(world_size), "abc"):
        for generation in range(rng.choice([0, 1, 1, 2])):
            records = [some_record(rng, t, operators[number], starts) for t in range(6) if rng.random() < 0.8]
            rng.shuffle(records)
            known.append(
                held(
                    number,
                    [replace(r, index=i) for i, r in enumerate(records)],
                    node=node,
                    own=node == "abc"[number],
                    window=operators[number],
                    table=rng.choice(["old", "new"]),
                    generation=generation,
                    partial=rng.random() < 0.5,
                )
            )
    check(known, world_size, {n: rng.choice("abcd") for n in range(world_size)})


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_with_newer_anchors_each_operator_is_taken_from_its_newest_copy(seed: int) -> None:
    """Of all that counts, up to the end of the plan; against a search for each operator."""
    rng = random.Random(seed)
    operators, starts = rng.randint(1, 3), [-1, *(rng.randint(-1, 4) for _ in range(2))]
    known = []
    for node, generation in itertools.product("ab", range(2)):
        records = [some_record(rng, t, operators, starts) for t in range(7) if rng.random() < 0.7]
        of_rank = held(0, records, node=node, own=node == "a", window=operators, generation=generation)
        known.append(replace(of_rank, operators_id=rng.choice("xxy"), partial=rng.random() < 0.9))
    plan = plan_recovery(known, 1)
    if isinstance(plan, NoRecovery):
        return
    newer = newer_anchors(known, plan, 0)
    assert newer == newer_anchors(list(reversed(known)), plan, 0)
    chained, at = plan.per_rank[0], plan.per_rank[0][0].sources[0]
    (of_plan,) = [h for h in known if (h.node, h.segment) == (at.node, at.segment)]
    table = of_plan.operators_id if of_plan.partial else ""
    alike = in_order(h for h in known if h.partial and h.operators_id == table)
    seen = epoch_table(r for h in known for r in h.records)
    counting = [r for group in tables_of(alike, stale_after(seen)).get(0, ()) for r in group.newest.values()]
    taken = [piece.record for piece in (*chained, *newer)]

    def newest(records: Iterable[SlotRecord], operator: int) -> int:
        return max(r.iteration for r in records if r.anchors >> operator & 1 and r.iteration <= plan.end)

    for operator in range(operators):
        assert newest(taken, operator) == newest([*counting, *(p.record for p in chained)], operator)
    assert iterations(newer) == sorted(iterations(newer), reverse=True)
    for piece in newer:
        later = [r for r in taken if r.iteration > piece.record.iteration]
        assert piece.record.anchors & ~sum(
            {1 << i for r in later for i in range(operators) if r.anchors >> i & 1}
        )


def some_record(rng: random.Random, t: int, operators: int, starts: Sequence[int]) -> SlotRecord:
    epoch, anchors = rng.choice([0, 0, 1, 2]), rng.randrange(2**operators)
    return snap(
        t,
        anchors,
        previous=rng.choice([t - 1] * 6 + [t - 2, -1]),
        state=rng.choice([SlotState.SEALED] * 8 + [SlotState.FILLED]),
        sequence=t + rng.choice([0, 0, 0, 7]),
        epoch=epoch,
        epoch_start=starts[epoch],
        digest=rng.choice([b"x", b"x", b"y"]) * 15 + bytes([anchors]),  # images of one digest are equal
    )


# -- on the wire ---------------------------------------------------------------------------------

RECORD = st.builds(
    SlotRecord,
    generation=st.integers(0, 9),
    index=st.integers(0, 99),
    state=st.sampled_from(SlotState),
    iteration=st.integers(-1, 2**62),
    previous=st.integers(-1, 2**62),
    sequence=st.integers(0, 2**64 - 1),
    image_len=st.integers(0, 2**50),
    layout_id=st.integers(0, 2**64 - 1),
    anchors=st.integers(0, 2**100 - 1),
    phase=st.integers(0, 63),
    epoch=st.integers(0, 2**32 - 1),
    epoch_start=st.integers(-1, 2**62),
    header_digest=st.sampled_from([b"", bytes(range(16))]),
)
HELD = st.builds(
    HeldRecords,
    node=st.text(max_size=5),
    segment=st.text(max_size=5),
    own=st.booleans(),
    rank=st.integers(0, 2**24),
    num_operators=st.just(100),
    operators_id=st.text(max_size=5),
    slot_bytes=st.integers(0, 2**50),
    records=st.lists(RECORD, max_size=3).map(tuple),
    partial=st.booleans(),
)


@given(st.lists(HELD, max_size=3))
def test_holdings_travel(known: list[HeldRecords]) -> None:
    assert from_wire(to_wire(known)) == known


def wire(**changes: object) -> bytes:
    """A segment of one record on the wire, some of its fields changed."""
    record: dict[str, object] = {"g": 0, "i": 0, "state": 3, "t": 5, "p": 4, "s": 1, "n": 1}
    record |= {"layout": 1, "anchors": b"\x01", "phase": 0, "epoch": 2, "began": 3}
    record |= {"digest": bytes(16)}
    segment: dict[str, object] = {"node": "a", "name": "s", "own": True, "rank": 0}
    segment |= {"operators": 3, "table": "x", "slot_bytes": 9}
    record |= {k: v for k, v in changes.items() if k in record or k == "more"}
    segment |= {k: v for k, v in changes.items() if k in segment}
    return msgspec.msgpack.encode([[*segment.values(), [list(record.values())]]])


def test_the_wire_form_is_pinned() -> None:
    record = SlotRecord(0, 0, SlotState.SEALED, 5, 4, 1, 1, 1, 1, 0, 2, 3, bytes(16))
    assert from_wire(wire()) == [HeldRecords("a", "s", True, 0, 3, "x", 9, (record,))]


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "truncated"),
        (b"\xc1", "cannot be read"),
        (msgspec.msgpack.encode([3]), "cannot be read"),
        (wire(operators=-1), "Expected `int` >= 0"),
        (wire(operators=1 << 40), "Expected `int` <= 1048576"),  # a bitmap of that many takes 128 GiB
        (wire(rank=-1), "Expected `int` >= 0"),
        (wire(own=1), "Expected `bool`"),
        (wire(state=9), "9 is not a valid SlotState"),
        (wire(t="now"), "Expected `int`"),
        (wire(t=-2), "Expected `int` >= -1"),
        (wire(epoch=-1), "Expected `int` >= 0"),
        (wire(began=-2), "Expected `int` >= -1"),
        (wire(digest=b"short"), "a header digest of 5 bytes"),
        (wire(anchors=b"\x08"), "iteration 5 anchors operators beyond the 3"),
        (wire(more=1), "cannot be read"),
    ],
)
def test_what_is_not_holdings_is_the_peers_error(payload: bytes, message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        from_wire(payload)
