"""Trainers may write to their segments, so they can cut them short: that costs whose segment it is,
and not the daemon.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.core.slots.slots import SlotState
from ckptd.transport import messages as m
from tests.ckptd.nodes import Net, Node
from tests.ckptd.peers_harness import Job
from tests.ckptd.running import (
    ROOT,
    attach,
    eventually,
    fill,
    reserve,
    running_daemon,
    state_of,
)
from tests.long import long

pytestmark = pytest.mark.timeout(180)

# Nothing; the prologue and some headers; a part of some image.
LENGTHS = (0, 4096, 20 << 20)


def cut_one(net: Net, seed: int, length: int) -> Path:
    """Run a job that cuts the segment of its first rank, on the first node; the path of that."""
    command = [sys.executable, "-m", "tests.ckptd.cutting", str(seed), str(length)]
    hostile = subprocess.Popen(
        [*command, *(node.endpoint for node in net.nodes)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert hostile.stdout is not None
    path = Path(hostile.stdout.readline().strip())
    # Not what ends it matters (a signal of its own making, most often), but that it does.
    eventually(lambda: net[0].saw("segment_cut", path.name), f"{path.name} was missed")
    hostile.kill()
    hostile.communicate()
    return path


def is_alive(node: Node) -> bool:
    assert node.process is not None
    return node.process.poll() is None


@pytest.mark.parametrize(
    ("data", "short_cut"),
    [
        ("stream", "false"),
        pytest.param("zmq", "false", marks=long),
        pytest.param("stream", "true", marks=long),
    ],
)
def test_a_trainer_that_cuts_its_segment_costs_itself_and_not_the_daemon(
    data: str, short_cut: str, tmp_path: Path
) -> None:
    """While the daemon seals, scrubs, replicates and stores what is in it: before, SIGBUS ended the
    daemon and its store keeper.
    """
    nodes = Net(
        2,
        data=data,
        peer_short_cut=short_cut,
        store=f"file://{tmp_path}/store",
        persist_every_s="0",
        scrub_interval_s="0.05",
        memory="512MiB",
    )
    with nodes.up() as net:
        job = Job(net, net.nodes, replicas=1)
        job.start()
        job.record(0)
        pids = [node.process.pid for node in net.nodes if node.process is not None]
        for turn, length in enumerate(LENGTHS):
            path = cut_one(net, turn, length)
            (event, *_) = [e for e in net[0].events("segment_cut") if path.name in e.message]
            assert (event.job, event.run, event.rank) == ("job", f"cut-{turn}", 0)
            assert "bytes by a process that may write to it" in event.message
            eventually(lambda p=path: not p.exists(), "its memory is free")  # type: ignore[misc]
            job.record(turn + 1)
            job.await_replicas(turn + 1, 1)
            assert all(is_alive(node) for node in net.nodes)
            for node in net.nodes:
                node.ctl("forget", "job", f"cut-{turn}", "--yes")
        last = f"checkpoint {len(LENGTHS)} is durable on all 2 ranks"
        eventually(lambda: net[0].saw("persisted", last), "the others' snapshots are stored")
        job.end()
        assert [node.process.pid for node in net.nodes if node.process is not None] == pids
        assert not any(node.saw("internal") for node in net.nodes)
        for node in net.nodes:
            assert "store keeper is gone" not in node.log_text()
        # What was being stored of a segment when it was cut is no checkpoint, and so it is no damage.
        for asked in (("verify", f"{tmp_path}/store"), ("checkpoints", "verify", "job", "run")):
            done = net[0].ctl(*asked, "--json", check=False)
            assert done.returncode == 0, f"{asked}: {done.stdout}{done.stderr}"
            assert json.loads(done.stdout)["whole"]


def test_a_replica_that_is_cut_is_dropped_and_made_again() -> None:
    """By another process of the daemon's user: nobody else can open it."""
    with Net(2, scrub_interval_s="0.05").up() as net:
        job = Job(net, net.nodes, replicas=1)
        job.start()
        job.record(0)
        job.await_replicas(0, 1)
        (path,) = net[1].replicas(0)
        os.truncate(path, 5000)
        eventually(lambda: net[1].saw("segment_vanished", path.name), "told")
        job.record(1)
        job.await_replicas(1, 1)
        assert all(is_alive(node) for node in net.nodes)
        assert not any(node.saw("internal") for node in net.nodes)
        job.end()


def test_other_segments_of_the_same_rank_go_on() -> None:
    with running_daemon(scrub_interval_s="0.05") as daemon, daemon.client() as client:
        attach(client)
        bad, good = reserve(client), reserve(client)
        for segment in (bad, good):
            fill(segment, 0, 3)
            client.send(m.Filled(segment.generation, 0, 3))
        eventually(lambda: state_of(good, 0) is SlotState.SEALED, "sealed")
        os.ftruncate(bad.fd, 100)
        fill(good, 1, 4)
        client.send(m.Filled(good.generation, 1, 4))
        client.send(m.Filled(bad.generation, 1, 4))
        eventually(lambda: state_of(good, 1) is SlotState.SEALED, "sealed")

        def told() -> list[str]:
            events = client.ask(m.GetEvents(), m.Events).events
            return [event.message for event in events if event.kind == "segment_cut"]

        eventually(lambda: bool(told()), "told")
        assert f"cut from {bad.file_bytes} to 100 bytes" in told()[0]
        assert str(os.getpid()) in told()[0]  # who has it open
        status = client.ask(m.GetStatus(), m.Status)
        assert [segment.path for segment in status.segments] == [str(good.path)]
        assert not bad.path.exists()
