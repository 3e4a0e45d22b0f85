"""What a node with a trusted key gets of a run that it takes no part in, from real daemons; and the
guard by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import pytest

from ckptd.core.replication.known_runs import RunAccess
from ckptd.core.slots.slots import SlotState
from ckptd.event_log import EventLog
from ckptd.peers.peer_requests import RunGuard
from ckptd.peers.run_survey import RecordUpdates
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import (
    AdmitNodes,
    Done,
    GetHoldings,
    Holdings,
    Member,
    NodeCard,
    RunRecord,
)
from tests.ckptd.nodes import Net, Node
from tests.ckptd.peers_harness import Job
from tests.ckptd.puppet import Puppet, open_replica
from tests.ckptd.snapshots import states_in

RECORD = RunRecord(
    "job",
    "run",
    epoch=3,
    members=(
        Member(NodeCard("a", "tcp://127.0.0.1:1"), (0,)),
        Member(NodeCard("b", "tcp://127.0.0.1:2"), (1,)),
    ),
    epochs=((3, -1, 0),),
)


def slots_of(node: Node) -> dict[str, list[SlotState]]:
    return {path.name: list(states_in(path)) for path in node.files()}


def last_epoch() -> p.OpenReplica:
    return open_replica("intruder", epoch=(1 << 32) - 1)


@pytest.mark.timeout(90)
def test_a_trusted_node_that_is_no_member_gets_nothing_and_ends_nothing() -> None:
    """Before, any node with a trusted key could list and read every snapshot of every run, and one
    `OpenReplica` with an epoch near 2^32 made all that a node held of the run stale, which freed
    it.
    """
    with Net(2).up() as net, Puppet("intruder") as intruder:
        job = Job(net, net.nodes, replicas=1)
        job.start()
        for iteration in range(4):
            job.record(iteration)
            job.await_replicas(iteration, 1)
        (name, *_) = [path.name for path in net[0].replicas()]
        before = slots_of(net[0])
        claim = msgspec.structs.replace(
            RECORD,
            epoch=(1 << 32) - 1,
            members=(
                Member(NodeCard("intruder", "tcp://127.0.0.1:1"), (0,)),
                Member(NodeCard(net[0].name, "tcp://127.0.0.1:2"), ()),
            ),
        )
        asked: list[p.PeerMessage] = [
            GetHoldings("job", "run", nodes=("intruder",)),
            p.OpenRead("job", "run", name, 0, 1),
            p.GetDescriptor("job", "run", name),
            p.DoubtSlot("job", "run", name, 0, 1),
            last_epoch(),
            p.TellDigests("job", "run", 0, "group", 2, 0, 1, 5, bytes(8)),
            p.TellRun(claim),
        ]
        for message in asked:
            refused = intruder.ask(net[0], message)
            assert isinstance(refused, p.PeerRefused), message
            assert refused.code == "forbidden", message
            assert "intruder is no member of job/run" in refused.message
        assert slots_of(net[0]) == before, "nothing was freed, replaced or made"
        assert net[0].saw("foreign_request", "intruder asked for GetHoldings")
        assert net[0].counters()["foreign_request"] == len(asked)
        job.record(4)
        job.await_replicas(4, 1)
        job.check_all()

        with net[0].client() as client:
            client.ask(AdmitNodes("job", "run", ("intruder",)), Done)
        assert isinstance(intruder.ask(net[0], GetHoldings("job", "run")), Holdings)
        job.end()


@pytest.mark.timeout(90)
def test_whoever_brings_a_run_first_keeps_others_from_it() -> None:
    """A node that lends its memory and knows no member of a run yet serves nobody else what it was brought."""
    with Net(1).up() as net, Puppet("p") as owner, Puppet("q") as other:
        (node,) = net.nodes
        owner.open(node)
        refused = other.ask(node, GetHoldings("job", "run"))
        assert isinstance(refused, p.PeerRefused)
        assert refused.code == "forbidden"
        assert isinstance(owner.ask(node, GetHoldings("job", "run")), Holdings)


@pytest.mark.timeout(90)
def test_an_operator_may_let_every_trusted_node_in() -> None:
    with (
        Net(1, peer_access="trusted").up() as net,
        Puppet("p") as one,
        Puppet("q") as other,
    ):
        one.open(net[0])
        assert isinstance(other.ask(net[0], GetHoldings("job", "run")), Holdings)


# -- the guard by itself ---------------------------------------------------------------------------------------


class Guarded:
    def __init__(self) -> None:
        self.now_s, self.events = 0.0, EventLog(100)
        access = RunAccess("here", (), record_of=lambda job, run: RECORD, holds=lambda job, run: True)
        self.guard = RunGuard(
            access, self.events, record_of=lambda job, run: RECORD, clock=lambda: self.now_s
        )

    def messages(self) -> list[str]:
        return [event.message for event in self.events.page(0, 100).events]


def test_a_member_replicates_only_ranks_that_run_on_it() -> None:
    """Or it could replace what another member sends."""
    guarded = Guarded()
    assert guarded.guard.refusal("a", open_replica("a", epoch=3)) is None
    refused = guarded.guard.refusal("b", open_replica("b", epoch=3))
    assert refused is not None
    assert "rank 0 does not run on b in epoch 3" in refused.message


def test_every_foreign_request_counts_and_few_write_an_event() -> None:
    guarded = Guarded()
    for _ in range(500):
        assert guarded.guard.refusal("x", GetHoldings("job", "run")) is not None
    assert len(guarded.messages()) == 1
    guarded.now_s = 61.0
    guarded.guard.refusal("x", GetHoldings("job", "run"))
    assert guarded.messages()[-1].endswith("(499 more since the last such event)")
    assert guarded.events.counters["foreign_request"] == 501


def test_a_members_reads_are_told_of() -> None:
    guarded = Guarded()
    assert guarded.guard.refusal("a", p.OpenRead("job", "run", "name", 0, 1)) is None
    assert guarded.messages() == ["job/run: a reads snapshots"]


class Asked:
    """Links that remember what was asked of whom."""

    def __init__(self) -> None:
        self.said: list[tuple[str, GetHoldings]] = []
        self.answers: dict[str, Holdings] = {}

    def reach(self, cards: Sequence[NodeCard]) -> Any:
        return [(card, partial(self._ask, card.node)) for card in cards]

    def _ask(self, node: str, message: Any, told: Any, failed: Any) -> None:
        self.said.append((node, message))
        answer = self.answers.get(node)
        told(answer) if answer is not None else failed("silent", "no answer")


def test_who_was_refused_is_asked_after_at_members_seldom_and_never_believed_itself() -> None:
    """A node that was away refused the new speaker of a run, which it did not know, until another
    member told it by chance.
    """
    now_s, asked, learned = [0.0], Asked(), list[tuple[str, RunRecord]]()
    updates = RecordUpdates(
        "b",
        record_of=lambda job, run: RECORD if (job, run) == ("job", "run") else None,
        reach=asked.reach,
        learn=lambda node, record: learned.append((node, record)),
        clock=lambda: now_s[0],
    )
    newer = msgspec.structs.replace(
        RECORD, epoch=9, members=(*RECORD.members, Member(NodeCard("c", "tcp://127.0.0.1:3"), (2,)))
    )
    claim = p.TellRun(newer)
    updates.refused(claim)
    assert (asked.said, learned) == ([("a", GetHoldings("job", "run"))], [])
    updates.refused(claim)
    updates.refused(p.TellRun(msgspec.structs.replace(newer, run="unknown")))
    assert len(asked.said) == 1, "at most every five seconds, and of runs that are known here"
    now_s[0] = 6.0
    asked.answers["a"] = Holdings("a", (), record=newer)
    updates.refused(claim)
    assert learned == [("a", newer)]
    asked.answers["a"] = Holdings("impostor", (), record=newer)
    now_s[0] = 12.0
    updates.refused(claim)
    assert len(learned) == 1


def test_after_a_start_members_are_asked_until_one_answers() -> None:
    now_s, asked, learned = [0.0], Asked(), list[str]()
    updates = RecordUpdates(
        "b",
        record_of=lambda *_: RECORD,
        reach=asked.reach,
        learn=lambda node, _: learned.append(node),
        clock=lambda: now_s[0],
    )
    updates.adopted([("job", "run")])
    for tick in range(20):
        now_s[0] = float(tick)
        updates.tick()
        if tick == 7:
            asked.answers["a"] = Holdings("a", (), record=RECORD)
    assert [node for node, _ in asked.said] == ["a", "a", "a"]
    assert learned == ["a"]
