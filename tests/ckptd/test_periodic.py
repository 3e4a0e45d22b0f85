"""What happens now and then on the loop thread: trouble in one place does not reach the others, and
what is over is told.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from ckptd.config.settings import DaemonConfig
from ckptd.core.sessions import RankKey
from ckptd.event_log import EventLog
from ckptd.memory.segment_store import SegmentStore
from ckptd.node.daemon import Daemon
from ckptd.node.peering import Peering
from ckptd.node_context import NodeContext, NodeWorkers
from ckptd.peers.replica_server import Host
from ckptd.peers.runs import Run
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import Join, Member, NodeCard, RunRecord
from ckptd.workers import Workers
from tests.ckptd.running import eventually

RANK = RankKey("job", "run", 0)


@dataclass
class Node:
    """A node's part among peers, without a listener; the clock is a number."""

    events: EventLog
    now_s: float = 1000.0
    peering: Peering = field(init=False)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    store = SegmentStore(tmp_path, 1 << 30, "node", mlock="off", hugepages="off")
    events = EventLog(100)
    workers = Workers("test", 1, 10, lambda: None)
    made = Node(events)
    made.peering = Peering(
        NodeContext(DaemonConfig(), store, events, lambda work: work(), clock=lambda: made.now_s),
        NodeWorkers(workers, workers),
        doubt=lambda segment, index, sequence: None,
    )
    yield made
    made.peering.close()
    workers.close(1.0)


class Broken:
    """Whatever it is asked to do at a tick fails."""

    job, run, joined_at_s = "broken", "run", 0.0

    def tick(self, *_: object) -> None:
        raise OverflowError("too large")

    def close(self) -> None:
        """There is nothing to end."""


def test_trouble_in_one_part_does_not_keep_the_others_from_their_work(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One replica with numbers that cannot be kept everything after it from being looked after, at
    every tick.
    """
    worked: list[str] = []
    peering = node.peering
    peering.runs.by_name["broken", "run"] = cast("Run", Broken())
    assert peering.runs.join(RANK, Join(1, -1, ())) == ""
    monkeypatch.setattr(peering.runs.by_name["job", "run"], "tick", lambda: worked.append("run"))
    monkeypatch.setattr(peering.neighbours, "tick", Broken().tick)
    monkeypatch.setattr(peering.fetches, "tick", lambda: worked.append("fetches"))
    monkeypatch.setattr(peering, "host", cast("Host", Broken()))
    peering.tick(node.now_s)
    assert worked == ["run", "fetches"]
    told = [event.message for event in node.events.page(0, 100).events if event.kind == "internal"]
    assert len(told) == 3, "each is told"
    assert all("too large" in message for message in told)


def test_a_run_without_segments_for_long_is_ended_at_its_peers(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job crashed for good, and its segments expired: who holds replicas for it need not any more."""
    told: list[p.PeerMessage] = []
    monkeypatch.setattr(node.peering.neighbours, "tell_all", told.append)
    node.peering.runs.join(RANK, Join(1, -1, ()))
    node.now_s += 3000
    node.peering.tick(node.now_s)
    assert told == []
    node.now_s += 3000
    node.peering.tick(node.now_s)
    assert told == [p.EndRun("job", "run")]
    assert not node.peering.runs.by_name


def test_trouble_at_the_end_of_a_trainer_does_not_stop_the_daemon(tmp_path: Path) -> None:
    """The one place in the loop where an exception got out of it."""
    config = DaemonConfig(
        runtime_dir=str(tmp_path / "run"),
        segment_dir=str(tmp_path / "segments"),
        allow_disk_segments=True,
        memory="64MiB",
    )
    daemon = Daemon(config)
    ended: list[str] = []

    def broken() -> None:
        ended.append("broken")
        raise OSError("no more files")

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as trainer:
        for work in (broken, lambda: ended.append("next")):
            assert daemon._watcher.watch(trainer.pid, work)
        assert trainer.stdin is not None
        trainer.stdin.write(b"\n")

    def has_ended() -> bool:
        daemon._wait(0.0)
        return len(ended) == 2

    eventually(has_ended, "both are told")
    assert ended == ["broken", "next"]
    assert any("no more files" in event.message for event in daemon._events.page(0, 100).events)


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ((("other", (0,)), ("node", ())), ""),
        ((("other", (0,)), ("other", (1,)), ("node", ())), "node other is named twice"),
        ((("other", (0,)), ("node", (0,))), "rank 0 is on two nodes"),
    ],
)
def test_members_that_cannot_be_are_not_believed_of_a_peer(
    node: Node, members: tuple[tuple[str, tuple[int, ...]], ...], why: str
) -> None:
    """What trainers tell was checked, and what peers tell of runs without a rank here was not."""
    told = tuple(Member(NodeCard(name), ranks) for name, ranks in members)
    record = RunRecord("job", "run", 0, 0, told, (), ((0, 0, -1),))
    reply = node.peering.runs.learn_from_member("other", record)
    if why:
        assert isinstance(reply, p.PeerRefused)
        assert (reply.code, why in reply.message) == ("bad_message", True)
    else:
        assert isinstance(reply, p.PeerDone)
