"""Daemons whose wall clocks step: nothing between them is ordered by time.

The daemons are real; a `sitecustomize` on their path puts their wall clock off by as much as
`Clock.off_s` says at their start.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.transport.messages import GetPeers, Peers
from tests.ckptd.nodes import Net, Node
from tests.ckptd.peers_harness import Job
from tests.ckptd.running import eventually

pytestmark = pytest.mark.timeout(90)
HOUR = 3600

_STEP = """
import os, time
off_ns = int(os.environ.get("TEST_CLOCK_OFF_S", "0")) * 1_000_000_000
if off_ns:
    time_ns, seconds = time.time_ns, time.time
    time.time_ns = lambda: time_ns() + off_ns
    time.time = lambda: seconds() + off_ns / 1e9
"""


class Clock:
    """The wall clock of daemons that start from now on."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        (folder / "sitecustomize.py").write_text(_STEP, encoding="ascii")
        patch.setenv("PYTHONPATH", str(folder))
        self._patch = patch

    def off(self, seconds: int) -> None:
        self._patch.setenv("TEST_CLOCK_OFF_S", str(seconds))


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(tmp_path, monkeypatch)


def floors(node: Node) -> set[int]:
    with node.client() as client:
        return {status.floor for status in client.ask(GetPeers(), Peers).ranks}


def moves(job: Job, iteration: int) -> None:
    """The floor follows, everywhere."""
    for node in job.homes:
        eventually(
            lambda n=node: floors(n) == {iteration},  # type: ignore[misc]
            f"the floor {iteration} on {node.name}",
            20.0,
        )


@pytest.mark.parametrize("restarted", [0, 1])
def test_replication_goes_on_after_the_restart_of_a_daemon_whose_clock_stepped_back(
    clock: Clock, restarted: int
) -> None:
    """NTP corrected it by an hour, and the daemon was restarted. What it reported had numbers that
    began at the time of its start: the parent ignored them as old for an hour. The floor stayed,
    every replica slot was promised, and no limit ended it.
    """
    with Net(2).up() as net:
        job = Job(net, net.nodes, replicas=1)
        job.start()
        job.record(0, 1)
        moves(job, 1)
        net[restarted].kill()
        clock.off(-HOUR)
        net[restarted].launch()
        for iteration in range(2, 10):
            job.record(iteration)
            job.await_replicas(iteration, 1)
        moves(job, 9)
        job.check_all()
        job.end()
