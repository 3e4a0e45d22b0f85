"""A daemon compares what its ranks and those of peers hold alike, and says what differs: to `ckptctl`, in
events and in metrics. Whom it does not know it does not heed.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from ckptd.core.sessions import RankKey
from ckptd.event_log import EventLog
from ckptd.memory.replicated_digests import ReplicatedDigests, ReplicatedSet
from ckptd.memory.slot_digests import SealOutcome, SealVerdict
from ckptd.peers.replica_audit import ReplicaAudit
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import ComparedRanks, Member, NodeCard
from tests.ckptd.replicated_ranks import ReplicatedRanks
from tests.ckptd.running import eventually, running_daemon
from tests.ckptd.scraped import metrics_address, scrape

NAMES = tuple(f"{i}.weight" for i in range(5))
REPLICATED = ReplicatedSet((0, 1, 2), "group", 5, NAMES, ("F32",) * 5, (0, 1, 2, 3, 4))
MEMBERS = (Member(NodeCard("here"), (0,)), Member(NodeCard("there"), (1, 2)))
EQUAL = bytes(8 * len(NAMES))
WRONG = EQUAL[:-1] + b"\1"


class Node:
    """The audit of one of two nodes; what it tells the other is in ``sent``."""

    def __init__(self, name: str = "here") -> None:
        self.events, self.sent = EventLog(100), list[p.TellDigests]()
        link = Mock(tell=self.sent.append)
        self.audit = ReplicaAudit(
            name, self.events, members_of=lambda *_: MEMBERS, epoch_of=lambda *_: 0, link=lambda _: link
        )

    def sealed(self, rank: int, iteration: int, digests: bytes = EQUAL, epoch: int = 0) -> None:
        segment: Any = SimpleNamespace(key=RankKey("job", "run", rank))
        found = (ReplicatedDigests(REPLICATED, digests),)
        self.audit.digested(
            segment, SealOutcome(SealVerdict.SEALED, iteration, epoch=epoch, replicated=found)
        )

    def hears(self, rank: int, iteration: int, digests: bytes = EQUAL, peer: str = "there") -> p.PeerReply:
        told = p.TellDigests("job", "run", rank, "group", 3, 0, iteration, 5, digests)
        return self.audit.heard(peer, told)

    def texts(self) -> list[str]:
        return [f"{e.kind}: {e.message}" for e in self.events.page(0, 100).events]


def test_other_nodes_tell_the_one_of_the_lowest_rank() -> None:
    here, there = Node(), Node("there")
    for iteration in range(4):
        here.sealed(0, iteration)
        for rank in (1, 2):
            there.sealed(rank, iteration, WRONG if (rank, iteration) == (2, 3) else EQUAL)
    assert (here.sent, there.texts()) == ([], [])
    assert there.audit.status() == ()
    for told in there.sent:
        assert p.decode_peer(p.encode_peer(told)) == told
        assert here.audit.heard("there", told) == p.PeerDone()
    (text,) = here.texts()
    assert text == (
        "replicas_differ: job/run: iteration 3: the ranks 0, 1, 2 should hold the same values and do not: "
        "4.weight (rank 2 against the others). They were the same at iteration 2: suspect the accelerator "
        "and the memory of rank 2"
    )
    assert here.events.counters["replicas.equal"] == 3
    assert here.audit.status() == (ComparedRanks("job", "run", (0, 1, 2), 3, ("4.weight",), 1, ()),)


def test_a_node_speaks_for_its_own_ranks_only() -> None:
    node = Node()
    node.sealed(0, 0)
    for rank, peer in ((0, "there"), (1, "elsewhere"), (3, "there")):
        refused = node.hears(rank, 0, peer=peer)
        assert isinstance(refused, p.PeerRefused), (rank, peer)
        assert refused.code == "forbidden"
    assert isinstance(node.hears(1, 0), p.PeerDone)


def test_what_a_member_says_of_groups_that_no_rank_of_this_node_is_in_is_not_kept() -> None:
    """A node of the run could have 64 GiB kept for each of its ranks: 4,096 groups, 16 snapshots, 1 MiB."""
    node = Node()
    node.sealed(0, 0)
    told = p.TellDigests("job", "run", 1, "group", 3, 0, 1, 5, EQUAL)
    assert node.audit.heard("there", told) == p.PeerDone()
    for changes in ({"group": "other"}, {"num_ranks": 2}, {"epoch": 1}):
        refused = node.audit.heard("there", msgspec.structs.replace(told, **changes))
        assert isinstance(refused, p.PeerRefused), changes
        assert refused.code == "forbidden"
    for iteration in range(1, 4):  # and it goes on as before
        node.sealed(0, iteration)
        node.hears(1, iteration)
        node.hears(2, iteration, WRONG if iteration == 3 else EQUAL)
    (text,) = node.texts()
    assert "4.weight (rank 2 against the others)" in text


def test_a_member_that_tells_of_iterations_to_come_does_not_end_the_comparison() -> None:
    """They took all places for snapshots that wait for ranks, so what was true went before it was complete."""
    node = Node()
    node.sealed(0, 0)
    for iteration in range(1 << 40, (1 << 40) + 40):
        node.hears(1, iteration)
    for iteration in range(1, 4):
        node.sealed(0, iteration)
        node.hears(1, iteration)
        node.hears(2, iteration, WRONG if iteration == 3 else EQUAL)
    (text,) = node.texts()
    assert "iteration 3" in text
    assert "4.weight (rank 2 against the others)" in text


def test_a_run_that_is_over_is_forgotten() -> None:
    node = Node()
    node.sealed(0, 0)
    node.audit.keep({("job", "run"): 1})
    assert len(node.audit.status()) == 1
    node.audit.keep({})
    assert node.audit.status() == ()


def test_ranks_that_never_were_equal_are_told_once() -> None:
    node = Node()
    for iteration in range(5):
        node.sealed(0, iteration)
        node.hears(1, iteration, WRONG)
        node.hears(2, iteration)
    (text,) = node.texts()
    assert text.startswith("replicas_diverged: job/run: iteration 0: param: most tensors are not the same")


@pytest.mark.slow
def test_a_daemon_says_what_differs_to_whoever_asks() -> None:
    with running_daemon(metrics="127.0.0.1:0") as daemon, ReplicatedRanks(daemon) as ranks:
        address = metrics_address(daemon.endpoint)

        def told(result: str) -> float:
            return scrape(address).by_labels("ckptd_replica_comparisons_total")[result,]

        for iteration in range(5):
            ranks.record(iteration)
        eventually(lambda: told("equal") == 5, "what is equal is counted")
        ranks.record(5, unlike=[(1, "optim/exp_avg/c")])
        eventually(lambda: told("differ") == 1, "what differs is counted")
        assert told("diverged") == 0
        events = json.loads(daemon.ctl("events", "--json").stdout)["events"]
        (event,) = [event for event in events if event["kind"] == "replicas_differ"]
        assert (
            "iteration 5: the ranks 0, 1 should hold the same values and do not: optim/exp_avg/c"
            in event["message"]
        )
        (row,) = json.loads(daemon.ctl("peers", "--json").stdout)["compared"]
        assert (row["ranks"], row["iteration"], row["differing"]) == ([0, 1], 5, ["optim/exp_avg/c"])
        shown = daemon.ctl("peers").stdout
        assert "job/replicas ranks 0 to 1" in shown
        assert "optim/exp_avg/c" in shown
