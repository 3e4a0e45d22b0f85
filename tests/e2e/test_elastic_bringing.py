"""What brings a checkpoint from storage is killed in the middle of it: the start goes on or fails
on all ranks alike, and the next one succeeds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ckptd.nodes import Net, Node
from tests.ckptd.running import eventually
from tests.e2e.bucket import keeper_pid
from tests.e2e.elastic import ElasticRun, Life
from tests.e2e.elastic_watch import Phase
from tests.e2e.test_elastic import assert_goes_on
from tests.e2e.test_elastic_stored import TOTAL, trains
from tests.e2e.world_store import WorldStore
from tests.long import long

pytestmark = pytest.mark.slow

_SOON_S = 25.0


@pytest.fixture
def store(tmp_path: Path) -> WorldStore:
    return WorldStore.folder(tmp_path / "store")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ElasticRun]:
    with contextlib.closing(ElasticRun(tmp_path)) as made:
        yield made


def keeper_of(node: Node) -> int:
    assert node.process is not None
    return keeper_pid(node.process.pid)


@contextlib.contextmanager
def bringing(run: ElasticRun, nodes: list[Node], stuck: Node, folder: Path) -> Iterator[tuple[Life, int]]:
    """A start whose ranks wait for what ``stuck`` brings; its keeper, which is stopped (SIGSTOP),
    and so brings nothing.
    """
    gate = folder / "gate"
    life = run.life(nodes, total=TOTAL + 1, gate=gate)

    def all_are_there() -> bool:
        told = [life.events("phase", rank) for rank in range(len(nodes))]
        return all(any(one["phase"] == Phase.BRINGING for one in each) for each in told)

    eventually(all_are_there, "all are about to bring", _SOON_S)
    keeper = keeper_of(stuck)
    assert keeper
    os.kill(keeper, signal.SIGSTOP)
    try:
        gate.touch()
        time.sleep(1.0)  # what it is asked for it does not answer
        assert all(process.exitcode is None for process in life.processes), life.logs
        yield life, keeper
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(keeper, signal.SIGKILL)


def empty(net: Net) -> None:
    """All memory of all hosts is lost; they come back."""
    for node in net.nodes:
        node.lose()
        node.launch()


def test_the_keeper_is_killed_while_it_brings_and_the_start_goes_on(
    store: WorldStore, run: ElasticRun, tmp_path: Path
) -> None:
    """Its daemon starts another one; the ranks ask again."""
    with Net(2, replicas="0", **store.settings).up() as net:
        first = trains(run, net.nodes, store, TOTAL)
        empty(net)
        with bringing(run, net.nodes, net[0], tmp_path) as (second, keeper):
            os.kill(keeper, signal.SIGKILL)
            second.ends()
        assert_goes_on(first, second, TOTAL)
        assert keeper_of(net[0]) not in (0, keeper)


@long
def test_a_daemon_is_killed_while_it_brings_and_the_start_fails_on_all_ranks_within_seconds(
    store: WorldStore, run: ElasticRun, tmp_path: Path
) -> None:
    """It took half a minute. The other node has brought its part by then; the next start finds
    that, and the rest in storage.
    """
    with Net(2, replicas="0", **store.settings).up() as net:
        first = trains(run, net.nodes, store, TOTAL)
        empty(net)
        with bringing(run, net.nodes, net[0], tmp_path) as (second, _):
            net[0].kill()
            killed_s = time.monotonic()
            eventually(lambda: all("DaemonUnavailable" in log for log in logs(second)), "all fail", _SOON_S)
            assert time.monotonic() - killed_s < _SOON_S
            for process in second.processes:
                process.join(_SOON_S)
        assert [process.exitcode for process in second.processes] == [1, 1], second.logs
        for log in logs(second):
            assert f"node {net[0].name}: bring what is durable: no answer from" in log, log
        net[0].launch()
        third = run.life(net.nodes, total=TOTAL + 1)
        third.ends()
        assert_goes_on(first, third, TOTAL)


@long
def test_a_daemon_that_is_started_again_while_it_brings_begins_anew_and_the_start_goes_on(
    store: WorldStore, run: ElasticRun, tmp_path: Path
) -> None:
    """As systemd does it: the ranks ask the new one, which knows nothing of what they had asked before."""
    with Net(2, replicas="0", **store.settings).up() as net:
        first = trains(run, net.nodes, store, TOTAL)
        empty(net)
        with bringing(run, net.nodes, net[0], tmp_path) as (second, _):
            net[0].kill()
            net[0].launch()
            second.ends()
        assert_goes_on(first, second, TOTAL)


def logs(life: Life) -> list[str]:
    return [(part.folder / f"{part.out}-{part.rank}.log").read_text() for part in life.parts]
