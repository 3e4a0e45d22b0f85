"""Whose job a name is, and what a user's quota leaves for a rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core.sessions import (
    Admitted,
    AttachWish,
    MemoryFacts,
    RankKey,
    Rejected,
    SegmentFacts,
    bytes_of_user,
    decide_attach,
    room_for_replicas,
    users_of,
)
from ckptd.core.users import UserQuotas, job_prefix, owner_of, same_owner
from ckptd.transport.messages import RefusalCode

GIB = 1 << 30
ALICES, BOBS = RankKey("u1002.gpt", "run", 0), RankKey("u1003.gpt", "run", 0)
MEMORY = MemoryFacts(64 * GIB, 64 * GIB, 64 * GIB, "/dev/shm/x", quotas=UserQuotas(8 * GIB, {1003: 16 * GIB}))
WISH = AttachWish(ALICES, 1, "dp1", 1, 6 * GIB, "3 slots of 2 GiB")


def segment(key: RankKey, gib: int, *, owned: bool = False) -> SegmentFacts:
    return SegmentFacts(key, 0, 1, "dp1", 1, gib * GIB, owned)


@pytest.mark.parametrize(
    ("job", "owner"),
    [
        ("u1002.gpt", 1002),
        ("u0.x", 0),
        ("u4294967294.x", 4_294_967_294),
        ("u1002.", 1002),
        ("u4294967295.x", None),  # the kernel's "no user"
        ("u01002.gpt", None),  # each user has one beginning
        ("u1002", None),
        ("u1002-gpt", None),
        ("U1002.gpt", None),
        ("xu1002.gpt", None),
        ("u.gpt", None),
        ("", None),
    ],
)
def test_the_owner_of_a_job_is_in_its_name(job: str, owner: int | None) -> None:
    assert owner_of(job) == owner
    assert owner is None or job.startswith(job_prefix(owner))


def test_no_user_s_jobs_begin_like_those_of_another() -> None:
    assert owner_of("u1.u2.job") == 1
    assert not same_owner("u1.job", "u11.job")
    assert same_owner("gpt", "other")


def test_a_user_gets_no_more_than_its_quota() -> None:
    for used, fits in ((2, True), (3, False)):
        decision = decide_attach(WISH, [segment(replace(ALICES, run="old"), used)], MEMORY)
        assert isinstance(decision, Admitted if fits else Rejected)
    assert isinstance(decision, Rejected)
    assert decision.code is RefusalCode.USER_QUOTA
    assert decision.message == (
        "u1002.gpt/run rank 0 needs 6 GiB (3 slots of 2 GiB); user 1002 may have 8 GiB on this node, of which "
        "3 GiB is in use by u1002.gpt/old (3 GiB)"
    )
    assert decision.hint.startswith("free some with `ckptctl forget u1002.gpt old`, or ask the operator")


def test_what_others_have_counts_for_the_node_only() -> None:
    theirs = [segment(BOBS, 60)]
    decision = decide_attach(WISH, theirs, MEMORY)
    assert isinstance(decision, Rejected)
    assert decision.code is RefusalCode.QUOTA
    assert "of which 60 GiB is in use by jobs of other users (60 GiB)" in decision.message
    assert "u1003" not in decision.message + decision.hint, "nobody learns the names of others' jobs"


def test_replicas_and_promises_count_as_the_user_s() -> None:
    memory = replace(
        MEMORY, promised={replace(ALICES, rank=1): 2 * GIB}, replicas_of={1002: GIB}, replica_bytes=GIB
    )
    assert bytes_of_user(1002, [], memory) == 3 * GIB
    assert bytes_of_user(1002, [], memory, but=replace(ALICES, rank=1)) == GIB
    assert bytes_of_user(None, [segment(RankKey("gpt", "run", 0), 4)], memory) == 0
    decision = decide_attach(WISH, [], memory)
    assert isinstance(decision, Rejected)
    assert decision.message.endswith(
        "3 GiB is in use by u1002.gpt/run (2 GiB), 1 GiB of it by replicas of its ranks on other nodes"
    )
    assert room_for_replicas([], memory, 1002) == 5 * GIB
    assert room_for_replicas([], memory, 1003) == 16 * GIB
    assert room_for_replicas([], memory) == 61 * GIB
    assert users_of([segment(BOBS, 1)], memory) == [1002, 1003]


def test_a_rank_learns_how_much_its_user_may_still_have() -> None:
    decision = decide_attach(WISH, [segment(replace(ALICES, rank=1), 1)], MEMORY)
    assert isinstance(decision, Admitted)
    assert decision.available_bytes == 7 * GIB


def test_notes_about_jobs_of_the_same_script_name_no_job_of_another_user() -> None:
    alices = replace(WISH, key=RankKey("u1002.train-00000000", "run", 0))
    others = [
        segment(RankKey("u1003.train-11111111", "run", 0), 1),
        segment(RankKey("u1002.train-22222222", "run", 0), 1),
    ]
    decision = decide_attach(alices, others, MEMORY)
    assert isinstance(decision, Admitted)
    (note,) = decision.notes if decision.notes else ("",)
    assert "u1003" not in note


@pytest.mark.parametrize(("user", "limit"), [(1002, 8 * GIB), (1003, 16 * GIB), (None, 0)])
def test_the_quota_of_a_user(user: int | None, limit: int) -> None:
    assert MEMORY.quotas is not None
    assert MEMORY.quotas.of(user) == limit


def test_without_isolation_names_say_nothing() -> None:
    memory = replace(MEMORY, quotas=None)
    assert users_of([segment(ALICES, 1)], memory) == []
    decision = decide_attach(replace(WISH, needed_bytes=60 * GIB), [segment(BOBS, 60)], memory)
    assert isinstance(decision, Rejected)
    assert "u1003.gpt/run (60 GiB)" in decision.message
