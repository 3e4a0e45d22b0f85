"""A job of torchrun under DDP on two hosts, with daemons that replicate to each other and persist
to a real S3 server.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster
from tests.cluster.training import ClusterTraining, undisturbed
from tests.e2e.bucket import Bucket, keeper_pid
from tests.e2e.s3.training import SOON_S, long, needs_server
from tests.storage.s3_server import S3Server

NUM_RANKS = 2
TOTAL = 120

pytestmark = [pytest.mark.slow, needs_server]


class Nodes(ClusterTraining):
    """The job; a context manager."""

    def __init__(self, cluster: Cluster, folder: Path, bucket: Bucket) -> None:
        settings = {
            **bucket.settings(),
            "memory": "64MiB",
            "replicas": "1",
            "peer_security": "plain",
        }
        super().__init__(cluster, folder, num_ranks=NUM_RANKS, total=TOTAL, settings=settings, soon_s=SOON_S)

    def keepers(self) -> list[int]:
        """The store keepers of all daemons."""
        pids = [d.process.pid for d in self.daemons.values() if d.process is not None]
        return [keeper for pid in pids if (keeper := keeper_pid(pid))]


@pytest.fixture(scope="module")
def ranks_reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The end of both ranks without hosts and without ckptd."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), num_ranks=NUM_RANKS, total=TOTAL)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """On loopback addresses, where the S3 server is, too."""
    with Cluster(NUM_RANKS, kind="loopback") as made:
        yield made


@pytest.fixture
def ranks_bucket(server: S3Server) -> Bucket:
    return Bucket(server, job="cluster")


@long
def test_all_nodes_are_lost_at_once_and_every_rank_comes_back_from_s3(
    cluster: Cluster, ranks_bucket: Bucket, tmp_path: Path, ranks_reference: Path
) -> None:
    """Also those that held the replicas. All ranks go on from the newest checkpoint that all of them have."""
    with Nodes(cluster, tmp_path, ranks_bucket) as nodes:
        nodes.job.until(
            lambda: ranks_bucket.committed("r")[:1] > [12],
            "a durable checkpoint",
            timeout_s=SOON_S,
        )
        lost = nodes.destroy(*cluster.hosts)
        newest = ranks_bucket.committed("r")[0]
        nodes.return_empty(*cluster.hosts)
        nodes.reach(lost + 1)
        assert nodes.resumed_from() == {newest}
        nodes.check_end(ranks_reference)
    assert ranks_bucket.verify("r").ok


@long
def test_hanging_keepers_hold_up_neither_training_nor_replication(
    cluster: Cluster, ranks_bucket: Bucket, tmp_path: Path, ranks_reference: Path
) -> None:
    """While both are stopped, a host is destroyed: its rank comes back from its peer's memory, at a
    newer iteration.
    """
    with Nodes(cluster, tmp_path, ranks_bucket) as nodes:
        nodes.job.until(lambda: bool(ranks_bucket.committed("r")), "a durable checkpoint", timeout_s=SOON_S)
        stopped = nodes.keepers()
        assert len(stopped) == NUM_RANKS
        for keeper in stopped:
            os.kill(keeper, signal.SIGSTOP)
        at = nodes.newest_step
        nodes.reach(at + 12)
        durable = ranks_bucket.committed("r")[0]
        lost = nodes.destroy(cluster.hosts[1])
        nodes.return_empty(cluster.hosts[1])
        nodes.reach(lost + 1)
        (resumed,) = nodes.resumed_from()
        assert resumed is not None
        assert resumed > max(durable, at)
        for keeper in set(stopped) & set(nodes.keepers()):
            os.kill(keeper, signal.SIGCONT)
        nodes.check_end(ranks_reference)
