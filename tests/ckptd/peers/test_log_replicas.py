"""Boundary logs with replicas, among real daemons: what lies where, what is read when a node is
gone, and what a full node means.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptd.client.pipeline.log_reader import LogFacts, log_payload
from ckptd.client.pipeline.upstream_feed import FedLogs
from ckptd.core.recovery.held import HeldRecords
from ckptd.core.recovery.recovery_facts import RankFacts, facts_from_logs
from ckptd.core.recovery.snapshot_tables import SnapshotCopy, SnapshotToLoad
from ckptd.core.slots.boundary import RecordKey, SentKind, record_name
from ckptd.core.slots.segment_format import SlotHeader
from ckptd.core.slots.slots import SlotRecord, SlotState
from ckptd.ctl.main import main as ckptctl
from ckptd.holdings import held_from_segments
from ckptd.memory.segment_file import open_segment
from ckptd.storage.image import ImageLayout
from ckptd.storage.image_format import TensorEntry
from ckptd.transport.messages import RunSeen, SeeRun
from tests.ckptd.nodes import Net, Node
from tests.ckptd.peers_harness import Job, Trainer
from tests.ckptd.running import eventually

pytestmark = pytest.mark.timeout(120)

SLOTS = 6
SENT = RecordKey(SentKind.ACTIVATION, 0, 0, 0, 0)
SENT_BYTES = 3000


class Log:
    """The boundary log of a rank of a chain."""

    def __init__(self, trainer: Trainer, *, replicated: bool = True, slot_bytes: int = 1 << 18) -> None:
        self.trainer, rank, world_size = trainer, trainer.rank, trainer.job.world_size
        beside = tuple(r for r in (rank - 1, rank + 1) if 0 <= r < world_size)
        payload = log_payload(4096, LogFacts(beside, (rank,), (rank,), ()))
        asked = trainer.memory.reserve_auxiliary("log", slot_bytes, SLOTS, payload, replicated=replicated)
        self.segment = trainer.memory.add_auxiliary(asked.result(20))

    def sent(self, iteration: int) -> bytes:
        return np.random.default_rng((self.trainer.rank, iteration)).bytes(SENT_BYTES)

    def log(self, *iterations: int) -> None:
        for iteration in iterations:
            self._log(iteration)

    def _log(self, iteration: int) -> None:
        index, segment = iteration % SLOTS, self.segment
        eventually(lambda: segment.try_lock_slot(index), f"slot {index} is not being read")
        entries = [TensorEntry(record_name(SENT), "U8", (SENT_BYTES,))]
        layout = ImageLayout.build(entries, identity={"job": "job"}, num_operators=1, anchors=0)
        table = self.trainer.memory.table
        header = SlotHeader(
            state=SlotState.FILLING,
            iteration=iteration,
            image_len=layout.image_len,
            sequence=1 + iteration,
            filled_at_ns=time.time_ns(),
            writer_pid=os.getpid(),
            epoch=table.epoch,
            epoch_start=table.epoch_start,
        )
        segment.set_state(index, SlotState.FREE)  # what nobody needs is not sealed either
        segment.begin_filling(index, header)
        slot = segment.slot(index)
        layout.write_header(slot, iteration=iteration, previous=-1, scalars_len=0)
        at = layout.offset_of(record_name(SENT))
        slot[at : at + SENT_BYTES] = self.sent(iteration)
        segment.write_header(index, replace(header, state=SlotState.FILLED))
        segment.unlock_slot(index)
        self.trainer.memory.session.filled(segment.generation, index, iteration)

    def holders(self, iterations: range) -> list[Node]:
        """The nodes that hold a replica with exactly these iterations, each equal to what is here,
        byte for byte.
        """
        (path,) = self.trainer.node.segment_dir.glob(f"*~r{self.trainer.rank}~*.boundary")
        own = sealed(path)
        nodes = [node for node in self.trainer.job.net.nodes if node.process is not None]
        return [
            node
            for node in nodes
            for path in log_replicas(node, self.trainer.rank)
            if (there := sealed(path)).keys() == {*iterations} and all(there[i] == own[i] for i in iterations)
        ]

    def await_replica(self, iterations: range) -> Node:
        eventually(
            lambda: len(self.holders(iterations)) == 1,
            f"a replica of what rank {self.trainer.rank} sent in {iterations}",
        )
        return self.holders(iterations)[0]


def log_replicas(node: Node, rank: int) -> list[Path]:
    return sorted(node.segment_dir.glob(f"*~r{rank}~*.logrep"))


def sealed(path: Path) -> dict[int, bytes]:
    segment = open_segment(path, readonly=True)
    found = {
        header.iteration: bytes(segment.image(index, header))
        for index, header in segment.headers()
        if header.state is SlotState.SEALED
    }
    segment.close()
    return found


def see(node: Node) -> RunSeen:
    with node.client() as client:
        return client.ask(SeeRun("job", "run"), RunSeen, timeout_s=20)


def ctl(node: Node, *args: str) -> str:
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert ckptctl([*args, "--endpoint", node.endpoint]) == 0
    return told.getvalue()


def what_if(node: Node, lose: str) -> Any:
    """As JSON, with the text beside it."""
    command = ("whatif", "--lose", lose)
    return {**json.loads(ctl(node, *command, "--json")), "text": ctl(node, *command)}


@pytest.fixture
def net() -> Iterator[Net]:
    with Net(3).up() as net:
        yield net


@pytest.fixture
def job(net: Net) -> Iterator[Job]:
    """A rank on each node; one replica each."""
    job = Job(net, net.nodes, window=2, replicas=1, slack=4)
    job.start()
    yield job
    job.end()


def test_a_log_goes_where_the_snapshots_go_and_is_read_from_there_when_its_node_is_gone(
    net: Net, job: Job
) -> None:
    """The replica follows its primary around its slots. What rank 1 sent is read by the others: by
    one where the replica lies, by one from there.
    """
    logs = [Log(trainer) for trainer in job.trainers]
    job.record(0, 1)
    job.await_replicas(1, 1)
    for log in logs:
        log.log(*range(SLOTS + 3))
    last = range(3, SLOTS + 3)
    holders = [log.await_replica(last) for log in logs]
    homes = [node for rank in range(3) for node in job.holders(rank, 1)]
    assert holders == homes, "snapshots and logs have the same targets"
    assert job.check_all(), "and no log is taken for a snapshot"

    leave(job, net[1])
    left = [job[0], job[1]]
    seen = see(holders[1])
    held = [h for told in seen.holdings for h in held_from_segments(told.node, told.logs)]
    (replica,) = [h for h in held if h.rank == 1]
    assert (replica.node, replica.own) == (holders[1].name, False)
    cards = tuple(trainer.memory.session.card for trainer in left)
    for reader in left:
        fed = FedLogs(reader.memory.session, {1: pieces_of(replica)}, cards)
        for iteration in last:
            assert bytes(fed(1, iteration)[SENT].numpy()) == logs[1].sent(iteration)
        fed.close()
    told = facts_from_logs([1], held, [parked_at(last.stop, replica.records[0])])
    assert told[1] == RankFacts((0, 2), (1,), (1,))

    job.end()
    ctl(holders[1], "forget", "job", "run", "--yes")
    kept = {path.name for path in holders[1].segment_dir.glob("job~*")}
    assert kept <= {"job~run.run"}, "only which epochs there were is remembered"


def leave(job: Job, node: Node) -> None:
    """The node is lost with its trainer."""
    node.lose()
    (gone,) = [trainer for trainer in job.trainers if trainer.node is node]
    gone.memory.close()
    job.trainers.remove(gone)


def pieces_of(replica: HeldRecords) -> dict[int, SnapshotToLoad]:
    """What a plan would name, if this is the only copy."""
    ordered = sorted(replica.records, key=lambda record: record.iteration)
    source = (replica.node, replica.segment)
    return {r.iteration: SnapshotToLoad(r, (SnapshotCopy(*source, r.index),)) for r in ordered}


def parked_at(iteration: int, beside: SlotRecord) -> HeldRecords:
    """A parked state of the history of this record."""
    state = replace(beside, iteration=iteration)
    return HeldRecords("n0", "parked", True, 0, 1, "", 4096, (state,))


def test_whatif_tells_who_would_replay_and_from_where_it_would_be_fed(net: Net, job: Job) -> None:
    """As long as only rank 1 logs, it could not be fed."""
    logs = [Log(job[1])]
    job.record(*range(5))
    job.await_replicas(4, 1)
    logs[0].log(*range(4))
    logs[0].await_replica(range(4))
    found = what_if(net[0], "node=n1")
    assert found["recovery"] == "together"
    assert "every rank would replay; rank 1 needs the log of rank 0" in found["localized"]["reason"]
    assert {rank["kind"] for rank in found["ranks"]} == {None}
    assert "all ranks recover (global recovery), because" in found["text"]

    logs += [Log(job[0]), Log(job[2])]
    for log in logs[1:]:
        log.log(*range(4))
        log.await_replica(range(4))
    found = what_if(net[0], "node=n1")
    assert found["recovery"] == "localized"
    assert found["localized"]["resume"] == 4
    assert [rank["kind"] for rank in found["ranks"]] == ["parked", "replays", "parked"]
    (replica,) = job.holders(1, 4)
    assert found["ranks"][1]["sources"] == [replica.name]
    fed = [(f["rank"], f["first"], f["end"]) for f in found["ranks"][1]["fed_by"]]
    assert fed == [(0, 3, 4), (2, 3, 4)]
    assert "ranks 0, 2 parked at 4, rank 1 replaying from 3, exact at 4" in found["text"]
    assert "rank 2 3-3 (" in found["text"]
    assert "job/run rank 0 log" in ctl(net[0], "peers")


def test_a_node_without_memory_for_it_holds_no_log_and_all_else_goes_on() -> None:
    """Told once here and there. And a log that does not ask has no replica."""
    with Net(2, of={"n1": {"memory": "24MiB"}}).up() as net:
        job = Job(net, net.nodes, window=1, replicas=1)
        job.start()
        large = Log(job[0], slot_bytes=4 << 20)
        silent = Log(job[1], replicated=False)
        for iteration in range(4):
            job.record(iteration)
            large.log(iteration)
            silent.log(iteration)
        job.await_replicas(3, 1)
        eventually(lambda: net[0].saw("replication_refused", "n1 has no memory"), "it is refused")
        assert [node for node in net.nodes for rank in (0, 1) if log_replicas(node, rank)] == []
        assert len(net[0].events("replication_refused")) == 1
        job.end()
