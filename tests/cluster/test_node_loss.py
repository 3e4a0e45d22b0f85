"""Training across hosts that are lost for real, with daemons that replicate over CurveZMQ: every
rank ends at the exact bits.

Three hosts train, the others wait as spares. What happens to the hosts differs between the tests;
what is asserted does not: all tensors, optimizer states, random states and positions of all ranks
are equal, byte by byte, to those of ranks that nobody disturbed and that know nothing of ckptd.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from ckptd.transport.messages import GetPeers, Peers, ReplicationStatus
from ckptd.transport.wire import ControlClient
from tests.cluster.daemons import provision_keys
from tests.cluster.hosts import Cluster, Host
from tests.cluster.training import ClusterTraining, undisturbed
from tests.long import long

NUM_RANKS = 3
TOTAL = 100
FIRST_LOSS = 15  # iterations: the window is full and has been replicated several times
BACK_S = 60.0

pytestmark = pytest.mark.slow


class Run(ClusterTraining):
    """One job over a cluster with a daemon on every host; use as a context manager."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        settings = {"replicas": "2", "memory": "64MiB"}
        super().__init__(cluster, folder, num_ranks=NUM_RANKS, total=TOTAL, settings=settings, soon_s=BACK_S)

    def __enter__(self) -> Self:
        provision_keys(self.daemons.values())
        return super().__enter__()

    # -- looking ---------------------------------------------------------------------------------

    def host_of(self, rank: int) -> Host:
        """Where the rank lives now."""
        name = self.events(rank, "meeting")[-1]["host"]
        return next(host for host in self.cluster.hosts if host.name == name)

    def working(self) -> set[str]:
        """The hosts that have a rank now."""
        return {self.host_of(rank).name for rank in range(NUM_RANKS)}

    def fetched(self) -> list[str]:
        """What daemons have brought to their nodes from others, in the order in which they told it."""
        told = [
            (event.time_ns, event.message)
            for daemon in self.daemons.values()
            if daemon.host.up
            for event in daemon.events("fetched")
        ]
        return [message for _, message in sorted(told)]

    def replication(self) -> dict[int, ReplicationStatus]:
        """By rank, as the daemons of the ranks' hosts tell it."""
        found: dict[int, ReplicationStatus] = {}
        for name in self.working():
            with ControlClient(self.daemons[name].endpoint, timeout_s=20) as client:
                told = client.ask(GetPeers(), Peers).ranks
            found |= {status.rank: status for status in told if status.kind == "snapshots"}
        return found

    def replicated(self) -> bool:
        """Whether all ranks have a state in common on two other hosts each: what is promised to survive."""
        found = self.replication()
        counted = {rank: sum(t.counted for t in status.targets) for rank, status in found.items()}
        return counted == dict.fromkeys(range(NUM_RANKS), 2) and all(s.floor >= 0 for s in found.values())

    # -- doing -----------------------------------------------------------------------------------

    def reach_first_loss(self) -> None:
        """On a slow machine the daemons come to less than the ranks, and what is promised is there later."""
        self.reach(FIRST_LOSS)
        self.job.until(self.replicated, "a state of all ranks on two other hosts each", timeout_s=BACK_S)

    def stop_processes(self, host: Host) -> int:
        """SIGKILL all processes of a host, the daemon among them; its memory stays."""
        host.kill_all()
        self.job.lost(host)
        return self.newest_step

    def come_back(self, newest: int, *, since_s: float) -> None:
        """Wait until all ranks are beyond an iteration, and look at how they came back."""
        self.reach(newest + 1)
        ends = self.resumed_from(since_s=since_s)
        print(f"after iteration {newest}: resumed at {ends}, {time.time() - since_s:.1f} s")  # noqa: T201
        assert len(ends) == 1, "all ranks go on from the same iteration"
        assert None not in ends, "the run has started over"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The end of ranks that nobody disturbs, without hosts and without ckptd."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), num_ranks=NUM_RANKS, total=TOTAL)


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """As many hosts as the test asks for."""
    with Cluster(request.param) as made:
        print(made)  # noqa: T201 - shown with the output of a test that fails
        yield made


@long
@pytest.mark.parametrize("cluster", [NUM_RANKS + 1], indirect=True)
def test_a_destroyed_host_comes_back_from_its_peers(
    cluster: Cluster, reference: Path, tmp_path: Path
) -> None:
    """The first host goes: the spare is the last, so that every rank moves on to another host than its own."""
    with Run(cluster, tmp_path) as run:
        run.reach_first_loss()
        lost, begun_s = run.host_of(0), time.time()
        newest = run.destroy(lost)
        run.come_back(newest, since_s=begun_s)
        assert run.working() == {host.name for host in cluster.hosts if host is not lost}
        assert run.fetched(), "nothing came from a peer"
        run.check_end(reference)


@pytest.mark.parametrize("cluster", [NUM_RANKS + 1], indirect=True)
def test_two_hosts_destroyed_at_once_come_back_from_the_third(
    cluster: Cluster, reference: Path, tmp_path: Path
) -> None:
    """With two replicas, one host of three is enough; beside the spare, one of the lost hosts returns, empty.

    If the two are both targets of the rank whose host is left, its own memory has what all ranks agreed on.
    On a slow machine it had not: the others' copies were nine iterations behind, and its ring had rolled on.
    """
    with Run(cluster, tmp_path) as run:
        run.reach_first_loss()
        first, _, other = map(run.host_of, range(NUM_RANKS))
        begun_s = time.time()
        newest = run.destroy(first, other)
        run.return_empty(other)
        run.come_back(newest, since_s=begun_s)
        assert run.working() == {host.name for host in cluster.hosts if host is not first}
        fetched = run.fetched()
        assert fetched, "nothing came from a peer"
        # Where ranks meet once more, what has come may be fetched on from where it came to.
        spares = [host.name for host in cluster.hosts if host not in (first, other)]
        assert any(f"from {name}" in fetched[0] for name in spares), fetched
        run.check_end(reference)


@long
@pytest.mark.parametrize("cluster", [NUM_RANKS + 1], indirect=True)
def test_a_second_host_is_destroyed_while_the_first_one_is_recovered(
    cluster: Cluster, reference: Path, tmp_path: Path
) -> None:
    """As soon as the rank on the spare goes on, a host goes from which it may still be fetching.

    The first host returns, empty, in its place. It could not be a second spare that has waited
    since the start: torchrun restarts for ever when there are more waiting agents than places.
    """
    with Run(cluster, tmp_path) as run:
        run.reach_first_loss()
        first, second, begun_s = run.host_of(2), run.host_of(0), time.time()
        newest = run.destroy(first)
        run.job.until(
            lambda: any(run.events(rank, "attached", since_s=begun_s) for rank in range(NUM_RANKS)),
            "a rank attached after the first loss",
            timeout_s=BACK_S,
        )
        again_s = time.time()
        newest = max(newest, run.destroy(second))
        run.return_empty(first)
        run.come_back(newest, since_s=again_s)
        assert run.working() == {host.name for host in cluster.hosts if host is not second}
        run.check_end(reference)


@long
@pytest.mark.parametrize("cluster", [NUM_RANKS], indirect=True)
def test_a_host_whose_processes_are_killed_comes_back_from_its_own_memory(
    cluster: Cluster, reference: Path, tmp_path: Path
) -> None:
    """Trainer, agent and daemon are SIGKILLed; the memory stays, and nothing is fetched from anywhere."""
    with Run(cluster, tmp_path) as run:
        run.reach_first_loss()
        host, begun_s = run.host_of(1), time.time()
        newest = run.stop_processes(host)
        run.daemons[host.name].start()
        run.job.join(host)
        run.come_back(newest, since_s=begun_s)
        assert run.fetched() == []
        run.check_end(reference)
