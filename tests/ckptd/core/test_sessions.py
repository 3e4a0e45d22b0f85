"""The admission decision: facts in, a verdict with its reason out."""

from __future__ import annotations

import dataclasses

import pytest

from ckptd.core.sessions import (
    Admitted,
    AttachWish,
    FailureTimes,
    MemoryFacts,
    ParkRequests,
    RankKey,
    Rejected,
    SegmentFacts,
    SessionTable,
    TrainerSession,
    decide_attach,
    reject_if_too_large,
    room_for_replicas,
    wrong_members,
)
from ckptd.ctl import daemon_commands
from ckptd.transport.messages import Member, NodeCard, Parks

GIB = 1 << 30
KEY = RankKey("moe", "run7", 3)
WISH = AttachWish(KEY, 8, "ep8", 1, 2 * GIB, "4 slots of 512 MiB")
MEMORY = MemoryFacts(8 * GIB, 16 * GIB, 16 * GIB, "/dev/shm/x")


def segment(
    key: RankKey = KEY,
    *,
    generation: int = 0,
    world_size: int = 8,
    topology: str = "ep8",
    layout_version: int = 1,
    total_bytes: int = GIB,
    owned: bool = False,
    ready: bool = True,
) -> SegmentFacts:
    return SegmentFacts(key, generation, world_size, topology, layout_version, total_bytes, owned, ready)


def test_an_empty_node_admits() -> None:
    assert decide_attach(WISH, [], MEMORY) == Admitted((), 8 * GIB, ())


def test_own_segments_are_served_oldest_first_and_unfinished_ones_are_not() -> None:
    own = [segment(generation=2), segment(generation=0), segment(generation=3, ready=False)]
    decision = decide_attach(WISH, own, MEMORY)
    assert isinstance(decision, Admitted)
    assert decision.generations == (0, 2)


def test_an_owned_rank_is_taken() -> None:
    decision = decide_attach(WISH, [segment(owned=True)], MEMORY, owner_pid=42, open_in=[42])
    assert isinstance(decision, Rejected)
    assert decision.code == "rank_taken"
    assert "moe/run7 rank 3 is owned by process 42" in decision.message


def test_an_owner_lock_without_a_session_is_enough_to_refuse() -> None:
    decision = decide_attach(WISH, [segment(owned=True)], MEMORY, open_in=[7, 5])
    assert isinstance(decision, Rejected)
    assert "another live process; open in process 5, 7" in decision.message


def test_who_holds_the_owner_lock_itself_may_attach_again() -> None:
    wish = dataclasses.replace(WISH, held=frozenset({0, 1}))
    segments = [segment(generation=0, owned=True), segment(generation=1, owned=True)]
    assert isinstance(decide_attach(wish, segments, MEMORY), Admitted)
    wish = dataclasses.replace(WISH, held=frozenset({0}))
    assert isinstance(decide_attach(wish, segments, MEMORY), Rejected)


@pytest.mark.parametrize(
    ("found", "code", "words"),
    [
        (segment(world_size=4), "topology", ["world size 4", "world size 8"]),
        (segment(topology="tp2"), "topology", ["'tp2'", "'ep8'"]),
        (segment(layout_version=9), "layout_version", ["layout version 9", "version 1"]),
    ],
)
def test_snapshots_of_another_shape_are_refused_by_name(
    found: SegmentFacts, code: str, words: list[str]
) -> None:
    decision = decide_attach(WISH, [found], MEMORY)
    assert isinstance(decision, Rejected)
    assert decision.code == code
    assert all(word in decision.message for word in words)
    assert "ckptctl forget moe run7" in decision.hint


def test_another_rank_of_another_shape_does_not_matter() -> None:
    other = segment(RankKey("moe", "run7", 2), world_size=4)
    assert isinstance(decide_attach(WISH, [other], MEMORY), Admitted)


def test_another_run_is_not_served_and_named() -> None:
    stale = segment(RankKey("moe", "run6", 3), total_bytes=GIB)
    decision = decide_attach(WISH, [stale], MEMORY)
    assert isinstance(decision, Admitted)
    assert decision.generations == ()
    assert len(decision.notes) == 1
    assert "of run 'run6' (1 GiB) of the same job" in decision.notes[0]


def test_a_quota_refusal_has_the_numbers_and_the_way_out() -> None:
    stale = segment(RankKey("moe", "run6", 3), total_bytes=7 * GIB)
    decision = decide_attach(WISH, [stale], MEMORY)
    assert isinstance(decision, Rejected)
    assert decision.code == "quota"
    assert decision.message == (
        "moe/run7 rank 3 needs 2 GiB (4 slots of 512 MiB); the quota is 8 GiB, of which 7 GiB is "
        "in use by moe/run6 (7 GiB)"
    )
    assert decision.hint == (
        "free some with `ckptctl forget moe run6`, or start the daemon with a larger CKPTD_MEMORY"
    )


def test_a_quota_refusal_does_not_advise_to_forget_a_live_run() -> None:
    live = segment(RankKey("moe", "run6", 3), total_bytes=7 * GIB, owned=True)
    decision = decide_attach(WISH, [live], MEMORY)
    assert isinstance(decision, Rejected)
    assert decision.hint == "start the daemon with a larger CKPTD_MEMORY"


def test_what_a_rank_has_counts_for_what_it_needs() -> None:
    own = [segment(total_bytes=2 * GIB)]
    full = dataclasses.replace(MEMORY, quota_bytes=2 * GIB, fs_available_bytes=0)
    assert isinstance(decide_attach(WISH, own, full), Admitted)


def test_promises_to_other_ranks_count_before_they_reserve() -> None:
    promised = {RankKey("moe", "run7", rank): 2 * GIB for rank in (0, 1, 2)}
    memory = dataclasses.replace(MEMORY, promised=promised)
    assert isinstance(decide_attach(WISH, [], memory), Admitted)
    promised[RankKey("moe", "run7", 4)] = 2 * GIB
    decision = decide_attach(WISH, [], memory)
    assert isinstance(decision, Rejected)
    assert "8 GiB is in use by moe/run7 (8 GiB)" in decision.message


def test_replicas_of_others_count_as_used_and_are_named() -> None:
    memory = dataclasses.replace(MEMORY, replica_bytes=6 * GIB)
    decision = decide_attach(WISH, [], memory)
    assert isinstance(decision, Admitted)
    assert decision.available_bytes == 2 * GIB
    memory = dataclasses.replace(MEMORY, replica_bytes=7 * GIB)
    decision = decide_attach(WISH, [], memory)
    assert isinstance(decision, Rejected)
    assert decision.code == "quota"
    assert decision.message == (
        "moe/run7 rank 3 needs 2 GiB (4 slots of 512 MiB); the quota is 8 GiB, of which 7 GiB is "
        "in use, 7 GiB of it by replicas of other nodes' ranks"
    )


def test_room_for_replicas_is_what_is_neither_in_use_nor_promised() -> None:
    other = RankKey("moe", "run7", 0)
    own = [segment(other, total_bytes=GIB)]
    assert room_for_replicas([], MEMORY) == 8 * GIB
    assert room_for_replicas(own, MEMORY) == 7 * GIB
    memory = dataclasses.replace(MEMORY, promised={other: 3 * GIB}, replica_bytes=GIB)
    assert room_for_replicas(own, memory) == 4 * GIB
    memory = dataclasses.replace(memory, fs_available_bytes=5 * GIB)
    assert room_for_replicas(own, memory) == 3 * GIB
    memory = dataclasses.replace(memory, quota_bytes=2 * GIB)
    assert room_for_replicas(own, memory) == 0


def test_a_promise_and_its_segment_are_not_counted_twice() -> None:
    other = RankKey("moe", "run7", 0)
    memory = dataclasses.replace(
        MEMORY, promised={other: 5 * GIB}, fs_total_bytes=8 * GIB, fs_available_bytes=4 * GIB
    )
    decision = decide_attach(WISH, [segment(other, total_bytes=4 * GIB)], memory)
    assert isinstance(decision, Admitted)
    assert decision.available_bytes == 3 * GIB


def test_a_filesystem_that_is_too_small_is_refused_with_its_numbers() -> None:
    memory = dataclasses.replace(MEMORY, fs_total_bytes=64 << 20, fs_available_bytes=60 << 20)
    decision = decide_attach(WISH, [], memory)
    assert isinstance(decision, Rejected)
    assert decision.code == "segment_fs"
    assert "has 64 MiB, of which 60 MiB is free" in decision.message
    assert "--shm-size" in decision.hint


def test_a_second_generation_needs_room_beside_the_first() -> None:
    own = [segment(total_bytes=5 * GIB)]
    rejected = reject_if_too_large(KEY, 9 * GIB, "4 slots", own, MEMORY)
    assert rejected is not None
    assert rejected.code == "quota"


def session(identity: bytes, rank: int, *, attached_at_s: float = 0.0, run: str = "run7") -> TrainerSession:
    key = RankKey("moe", run, rank)
    wish = dataclasses.replace(WISH, key=key)
    return TrainerSession(identity, 100 + rank, key, wish, attached_at_s, 0.0, "pidfd", 100 + rank)


def test_sessions_are_found_by_connection_and_by_rank() -> None:
    table = SessionTable(limit=2)
    one, two = session(b"a", 0), session(b"b", 1)
    table.add(one)
    table.add(two)
    assert table.of_identity(b"b") is two
    assert table.of_rank(one.key) is one
    assert table.promised() == {one.key: 2 * GIB, two.key: 2 * GIB}
    replacement = session(b"a", 5)
    table.add(replacement)
    table.remove(one)  # was replaced: must not remove its successor
    assert len(table) == 2
    assert table.of_identity(b"a") is replacement


def member(node: str, *ranks: int, rings: int = 0) -> Member:
    return Member(NodeCard(node, "", "", {}, "", 0), ranks, (1,) * rings)


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ((member("a", 0), member("b", 1)), ""),
        ((member("a", 0), member("a", 1)), "node a is named twice"),
        ((member("a", 0), member("b", 0)), "rank 0 is on two nodes"),
        ((member("a", 0, 0),), "named twice"),
        ((member("a", 0, 2),), "rank 2 in a world of 2"),
        ((member("a", 0, rings=2),), "more rings than it has ranks"),
    ],
)
def test_members_that_cannot_be_are_refused(members: tuple[Member, ...], why: str) -> None:
    """A node that was named twice counted as two places for replicas, and as one copy more than there was."""
    found = wrong_members(members, 2)
    assert why in found
    assert bool(found) == bool(why)


A, B = RankKey("job", "run", 0), RankKey("job", "run", 1)


def told(answers: list[Parks]) -> list[list[tuple[int, int]]]:
    return [[(r.rank, r.iteration) for r in answer.ranks] for answer in answers]


def test_the_answer_comes_when_all_have_spoken() -> None:
    requests, answers = ParkRequests(), list[Parks]()
    requests.ask([B, A], 10.0, answers.append)
    number = requests.number_for(A)
    assert number > 0
    requests.outcome(A, number, 7, "")
    assert (answers, requests.number_for(A)) == ([], 0)  # it is not asked again
    assert requests.number_for(B) == number
    requests.outcome(B, number, -1, "no memory")
    assert told(answers) == [[(0, 7), (1, -1)]]
    text = daemon_commands.parks_text(answers[0])
    assert text.splitlines() == [
        "job/run rank 0: parked at iteration 7",
        "job/run rank 1: not parked: no memory",
    ]


def test_who_is_gone_or_silent_is_not_waited_for_for_ever() -> None:
    requests, answers = ParkRequests(), list[Parks]()
    requests.ask([A, B], 10.0, answers.append)
    requests.gone(A)
    requests.tick(9.9)
    assert answers == []
    requests.tick(10.0)
    assert told(answers) == [[(0, -1), (1, -1)]]
    assert ["ended" in r.reason or "no answer" in r.reason for r in answers[0].ranks] == [True] * 2
    requests.outcome(B, 1, 5, "")  # too late: nobody waits any more
    assert len(answers) == 1


def test_one_word_of_a_rank_answers_everybody_who_asked_before() -> None:
    requests, first, second = ParkRequests(), list[Parks](), list[Parks]()
    requests.ask([A], 10.0, first.append)
    old = requests.number_for(A)
    requests.ask([A], 10.0, second.append)
    requests.outcome(A, old, 3, "")
    assert (told(first), second) == ([[(0, 3)]], [])
    requests.outcome(A, requests.number_for(A), 4, "")
    assert told(second) == [[(0, 4)]]


def test_nobody_to_ask_is_an_answer() -> None:
    answers: list[Parks] = []
    ParkRequests().ask([], 10.0, answers.append)
    assert told(answers) == [[]]
    assert "no attached trainer" in daemon_commands.parks_text(answers[0])


# -- failures of runs ----------------------------------------------------------------------------


def test_a_failure_lasts_from_the_first_death_to_the_end_of_the_last_of_the_others() -> None:
    failures = FailureTimes()
    assert failures.ago_s("moe", "run7", 5.0) == (-1.0, -1.0)
    failures.ended(session(b"b", 1), 10.0, in_order=False)
    assert failures.ago_s("moe", "run7", 11.0) == (1.0, -1.0), "there is no other yet"
    failures.ended(session(b"a", 0), 12.0, in_order=True)  # it was asked to end, and left
    failures.ended(session(b"c", 2), 12.5, in_order=False)
    assert failures.ago_s("moe", "run7", 14.0) == (4.0, 1.5)
    assert failures.ago_s("moe", "run6", 14.0) == (-1.0, -1.0)


def test_the_death_of_a_trainer_that_came_afterwards_is_the_next_failure() -> None:
    failures = FailureTimes()
    failures.ended(session(b"a", 0), 10.0, in_order=False)
    failures.ended(session(b"b", 1), 11.0, in_order=False)
    failures.ended(session(b"c", 1, attached_at_s=13.0), 20.0, in_order=False)
    assert failures.ago_s("moe", "run7", 21.0) == (1.0, -1.0), "nothing of the failure before is told"
    failures.ended(session(b"d", 0, attached_at_s=13.0), 22.0, in_order=False)
    assert failures.ago_s("moe", "run7", 23.0) == (3.0, 1.0)


def test_a_run_that_came_back_and_ended_has_not_failed() -> None:
    """Who starts it again hours later has not waited for hours to be back."""
    failures = FailureTimes()
    failures.ended(session(b"a", 0), 10.0, in_order=False)
    failures.ended(session(b"b", 0, attached_at_s=12.0), 20.0, in_order=True)
    assert failures.ago_s("moe", "run7", 9000.0) == (-1.0, -1.0)
    failures.ended(session(b"c", 0, attached_at_s=9000.0), 9010.0, in_order=True)
    assert failures.ago_s("moe", "run7", 9011.0) == (-1.0, -1.0), "to leave in order is no failure"


def test_failures_of_many_runs_are_forgotten_oldest_first() -> None:
    failures = FailureTimes(limit=2)
    for number in range(3):
        failures.ended(session(b"a", 0, run=f"run{number}"), 10.0 + number, in_order=False)
    assert failures.ago_s("moe", "run0", 20.0) == (-1.0, -1.0)
    assert failures.ago_s("moe", "run2", 20.0) == (8.0, -1.0)
    failures.forget("moe", "run2")
    failures.forget("moe", "run2")  # nobody knows it any more, and that is no error
    assert failures.ago_s("moe", "run2", 20.0) == (-1.0, -1.0)
