"""Two hosts, one replica of each rank on the other, and no word between their daemons for longer
than rings have slots for.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from ckptd.transport.messages import GetPeers, Peers
from ckptd.transport.wire import ControlClient
from tests.cluster.daemons import PEER_PORT, HostDaemon, provision_keys
from tests.cluster.hosts import Cluster, Host
from tests.cluster.network import NOBODY, why_no_namespaces
from tests.cluster.training import ClusterTraining, undisturbed
from tests.long import long

NUM_RANKS = 2
TOTAL = 160
FIRST = 12  # iterations: the window is full and has been replicated several times
UNHEARD = 60  # iterations without a word: rings have 7 slots, and may grow by 9 twice

pytestmark = pytest.mark.slow


class Run(ClusterTraining):
    """One job, whose daemons have an address of their own on every host: what is between them can
    be cut, and training not.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        settings = {"replicas": "1", "memory": "64MiB", "peer_deadline_s": "1"}
        super().__init__(cluster, folder, num_ranks=NUM_RANKS, total=TOTAL, settings=settings, soon_s=90.0)
        for host in cluster.hosts:
            self.add_address(host)
            listen = f"tcp://{daemon_address(host)}:{PEER_PORT}"
            self.daemons[host.name].env["CKPTD_PEER_LISTEN"] = listen
        provision_keys(self.daemons.values())

    def add_address(self, host: Host) -> None:
        """For its daemon, beside the one by which ranks reach one another."""
        self.ip(host, "addr", "add", f"{daemon_address(host)}/24", "dev", "eth0")

    def cut_daemons(self) -> None:
        """What daemons send to one another vanishes."""
        one, other = self.cluster.hosts
        for host, target in ((one, other), (other, one)):
            to = (daemon_address(target), "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")
            self.ip(host, "neigh", "replace", *to)

    def heal(self, host: Host, target: Host) -> None:
        """What it sends to the other's daemon arrives again."""
        self.ip(host, "neigh", "del", daemon_address(target), "dev", "eth0")

    def ip(self, host: Host, *words: str) -> None:
        namespace = self.cluster.network.namespace_of(host.index)
        subprocess.run(["ip", "-n", str(namespace), *words], check=True, timeout=20)

    def floors(self) -> set[int]:
        """Of all ranks, as their daemons know them."""
        return {floor for daemon in self.daemons.values() for floor in floors_of(daemon)}


def daemon_address(host: Host) -> str:
    net, _, last = host.address.rpartition(".")
    return f"{net}.{int(last) + 100}"


def floors_of(daemon: HostDaemon) -> list[int]:
    with ControlClient(daemon.endpoint, timeout_s=20) as client:
        return [status.floor for status in client.ask(GetPeers(), Peers).ranks]


@long
def test_daemons_that_do_not_hear_one_another_lose_nothing_with_a_node(tmp_path: Path) -> None:
    """Rings gave away what the run had agreed on as soon as no floor could move: one node held only
    new snapshots of its rank and an old replica of the other's. The loss of the other node was then
    the loss of all ("rank 0: 11 to 15, rank 1: 0 to 3").
    """
    if why := why_no_namespaces():
        pytest.skip(f"daemons cannot be cut from one another here: {why}")
    (tmp_path / "undisturbed").mkdir()
    reference = undisturbed(tmp_path / "undisturbed", num_ranks=NUM_RANKS, total=TOTAL)
    with Cluster(NUM_RANKS, kind="namespaces") as cluster, Run(cluster, tmp_path) as run:
        run.reach(FIRST)
        run.job.until(lambda: min(run.floors()) > 3, "a floor", timeout_s=run.soon_s)
        run.cut_daemons()
        unheard = run.newest_step
        run.reach(unheard + UNHEARD)
        floor, begun_s = max(run.floors()), time.time()
        assert 3 < floor <= unheard + 1, "no floor moves while nothing is replicated"
        left, lost = cluster.hosts
        newest = run.destroy(lost)  # its daemon and trainer are SIGKILLed, its memory is gone
        run.heal(left, lost)
        lost.boot()
        run.add_address(lost)
        run.daemons[lost.name].start()
        run.job.join(lost)
        run.reach(newest + 1)
        assert run.resumed_from(since_s=begun_s) == {floor}
        run.check_end(reference)
