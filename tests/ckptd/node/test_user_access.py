"""Which user may ask for what: every message of the protocol, and what is cut from answers."""

from __future__ import annotations

import os
from typing import Any, get_args
from unittest.mock import Mock

import msgspec
import pytest

from ckptd.core.sessions import AttachWish, RankKey, TrainerSession
from ckptd.node.user_access import RULES, Rule, UserAccess
from ckptd.transport import messages as m
from ckptd.transport.messages import RefusalCode

ALICE, BOB = 1002, 1003
ALICES, BOBS = f"u{ALICE}.gpt", f"u{BOB}.gpt"
ACCESS = UserAccess(apart=True)
KINDS = get_args(m.Request) + get_args(m.OneWay)


def session_of(user: int, job: str) -> TrainerSession:
    key = RankKey(job, "run", 0)
    wish = AttachWish(key, 1, "dp1", 1, 0, "")
    return TrainerSession(b"t", 7, key, wish, 0.0, 0.0, "pidfd", writer_pid=7, user=user)


def about(kind: type, job: str) -> Any:
    """A message of this kind that names a job; its other fields do not matter here."""
    fields = msgspec.structs.fields(kind)
    values: dict[str, object] = {field.name: None for field in fields if field.required}
    return kind(**values | ({"job": job} if any(field.name == "job" for field in fields) else {}))


def test_every_message_of_a_trainer_and_of_ckptctl_has_a_rule() -> None:
    assert RULES.keys() == set(KINDS)


def test_a_message_that_names_a_job_is_for_its_owner_or_cut() -> None:
    named = {kind for kind in KINDS if "job" in kind.__struct_fields__}
    assert all(RULES[kind] in (Rule.OWNER, Rule.NARROWED) for kind in named)
    assert {kind for kind, rule in RULES.items() if rule is Rule.OWNER} <= named


@pytest.mark.parametrize("kind", [kind for kind in KINDS if RULES[kind] is Rule.OWNER])
def test_only_the_owner_of_a_job_acts_on_it(kind: type) -> None:
    assert ACCESS.refusal(ALICE, about(kind, ALICES), None) is None
    for job in (BOBS, "gpt", "", f"x{ALICES}", f"u{ALICE}0.gpt"):
        refused = ACCESS.refusal(ALICE, about(kind, job), None)
        assert refused is not None
        assert refused.code is RefusalCode.FOREIGN


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operator", [0, os.geteuid(), None])
def test_operators_may_ask_for_everything(kind: type, operator: int | None) -> None:
    assert ACCESS.refusal(operator, about(kind, ALICES), session_of(ALICE, ALICES)) is None


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_speaks_over_the_connection_of_another_user(kind: type) -> None:
    """A connection gives itself its name, and could take that of a trainer."""
    refused = ACCESS.refusal(BOB, about(kind, BOBS), session_of(ALICE, ALICES))
    assert refused is not None
    assert refused.code is RefusalCode.FOREIGN
    if RULES[kind] in (Rule.SESSION, Rule.ANYBODY):
        assert ACCESS.refusal(ALICE, about(kind, ""), session_of(ALICE, ALICES)) is None


def test_a_refusal_says_how_the_job_has_to_be_named() -> None:
    for job in ("gpt", BOBS):
        refused = ACCESS.refusal(ALICE, m.Forget(job, "run"), None)
        assert refused is not None
        assert f"the names of this user's jobs begin with 'u{ALICE}.'" in refused.message
        assert f"name the job '{ALICES}'" in refused.hint
    everything = ACCESS.refusal(ALICE, m.Park(), None)
    assert everything is not None
    assert everything.message.startswith(f"Park of all jobs by user {ALICE}")
    assert everything.hint.startswith("name one of these jobs")


def test_the_daemon_ends_for_its_operator_only() -> None:
    refused = ACCESS.refusal(ALICE, m.StepAside(), None)
    assert refused is not None
    assert "for the operator" in refused.message


@pytest.mark.parametrize("kind", KINDS)
def test_where_users_are_not_kept_apart_all_may_do_everything(kind: type) -> None:
    together = UserAccess(apart=False)
    assert together.refusal(ALICE, about(kind, BOBS), session_of(BOB, BOBS)) is None
    assert together.narrowed(ALICE, about(kind, BOBS), m.Done()) == m.Done()
    assert together.sees(ALICE)(BOBS)


# -- answers --------------------------------------------------------------------------------------


def segment(job: str) -> m.SegmentStatus:
    return m.SegmentStatus(
        *(job, "run", 0, 1, 0, f"/seg/{job}", 1, 1, 1, {}, -1, 1, 1, True, False, 0.0, "n", 0)
    )


def trainer(job: str) -> m.SessionStatus:
    return m.SessionStatus(job, "run", 0, 1, 7, 3, {}, 1, 1, 1, 0.0, "pidfd")


def durable(job: str) -> m.DurableRank:
    return m.DurableRank(job, "run", 0, 1, 0, -1, 0, 0, 1, 0, 0, 0, 0.0, "")


BOTH = (ALICES, BOBS)
USERS = tuple(m.UserStatus(user, 5, 9) for user in (ALICE, BOB))
STATUS = m.Status(
    *("0.4", "n", "b", 1, 1.0, "ipc:///x", "/run", "/seg", 64, 32, 9, 0, 0, 0, 0, 0, 0),
    *(tuple(map(trainer, BOTH)), tuple(map(segment, BOTH)), {"sealed_bytes": 3}),
    durable=m.DurableStatus("s3://b", 1, 0, 0, tuple(map(durable, BOTH))),
    users=USERS,
)


def test_a_status_shows_a_user_its_own_jobs_and_the_node() -> None:
    seen = ACCESS.narrowed(ALICE, m.GetStatus(), STATUS)
    assert isinstance(seen, m.Status)
    assert seen.durable is not None
    assert [one.job for one in seen.sessions] == [one.job for one in seen.segments] == [ALICES]
    assert [one.job for one in seen.durable.ranks] == [ALICES]
    assert seen.users == USERS[:1]
    assert (seen.used_bytes, seen.counters) == (32, {"sealed_bytes": 3})
    assert ACCESS.narrowed(0, m.GetStatus(), STATUS) == STATUS


ALL = (*BOTH, "gpt")
ABOUT_ALL: dict[type, tuple[m.Reply, tuple[str, ...]]] = {
    m.GetStatus: (STATUS, ("sessions", "segments")),
    m.GetPeers: (
        m.Peers(
            *("n", "tcp://n:1", "", (), tuple(m.ReplicationStatus(job, "run", 0, 1, 1, ()) for job in ALL)),
            *(tuple(m.HostedReplica(job, job, "run", 0, 1, 1, 1) for job in ALL), {}, ""),
            tuple(m.ComparedRanks(job, "run", (0, 1), 1) for job in ALL),
        ),
        ("ranks", "replicas", "compared"),
    ),
    m.GetSnapshots: (
        m.Snapshots(
            tuple(m.RankSnapshots(job, "run", 0, 1, 1, 1, (), (-1, -1), "") for job in ALL),
            tuple(m.RunFailures(job, "run", ()) for job in ALL),
        ),
        ("ranks", "replays"),
    ),
    m.GetEvents: (
        m.Events(tuple(m.EventInfo(n, 0, "info", "k", "", job) for n, job in enumerate(("", *ALL))), 0, 3),
        ("events",),
    ),
    m.GetElastic: (
        m.SeenElastic(tuple(m.ElasticTold(job, "run", 0, 0.0, Mock(spec=m.Elastic)) for job in ALL)),
        ("told",),
    ),
}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if RULES[kind] is Rule.NARROWED])
def test_an_answer_about_all_runs_is_cut_to_those_of_the_user(kind: type) -> None:
    """A new kind needs a row in the table above."""
    answer, fields = ABOUT_ALL[kind]
    seen = ACCESS.narrowed(ALICE, about(kind, ""), answer)
    for name in fields:
        assert [one.job for one in getattr(seen, name)] == [ALICES]
    refused = m.Refused(RefusalCode.NOT_FOUND, "")
    assert ACCESS.narrowed(ALICE, about(kind, ""), refused) is refused


def test_an_answer_that_cannot_be_cut_is_not_given() -> None:
    with pytest.raises(TypeError, match="Done cannot be cut to what a user may see"):
        ACCESS.narrowed(ALICE, m.GetStatus(), m.Done())
    assert ACCESS.narrowed(ALICE, m.Forget(ALICES, "run"), m.Done("freed")) == m.Done("freed")


@pytest.mark.parametrize("kind", [m.Ping, m.Report])
def test_a_message_without_a_rule_is_for_operators(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """As one that is added, and forgotten here."""
    message = about(kind, "")
    assert ACCESS.refusal(ALICE, message, None) is None
    monkeypatch.delitem(RULES, kind)
    refused = ACCESS.refusal(ALICE, message, session_of(ALICE, ALICES))
    assert refused is not None
    assert refused.code is RefusalCode.FOREIGN
    assert ACCESS.refusal(0, message, None) is None
    assert ACCESS.refusal(ALICE, m.Done(), None) is None, "a reply is refused by whoever would serve it"
