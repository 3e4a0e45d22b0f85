"""A host that is lost while the ranks of the others wait for its rank: they fail, name it, and
torchrun starts them again without it.

Before, they waited for half an hour, since nobody told torchrun:
`ckptd.client.ranks.store_barrier`. No deadline of theirs is near here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Cluster
from tests.cluster.torchrun import SETTINGS, TorchrunJob
from tests.long import long

HOSTS = 3


def told(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return [found for line in lines if (found := json.loads(line))["event"] == event]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(HOSTS) as made:
        yield made


@long
@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("rank", [1, 0])
def test_ranks_that_wait_for_a_lost_host_start_without_it(
    cluster: Cluster, tmp_path: Path, rank: int, silent: bool
) -> None:
    """Rank 0 is the one that the job's store is in; ``silent``, as by a loss of power, no
    connection is ended.
    """
    if silent and cluster.network.kind != "network namespaces":
        pytest.skip("a host without a network namespace cannot vanish without a word")
    out = tmp_path / "out"
    out.mkdir()
    command = ["-m", "tests.cluster.barrier_job", str(out), str(rank), str(HOSTS)]
    # Two are enough: torchrun need not wait long for a third.
    settings = {**SETTINGS, "--rdzv-conf": SETTINGS["--rdzv-conf"] + ",last_call_timeout=3"}
    job = TorchrunJob(cluster, command, nnodes=f"2:{HOSTS}", folder=tmp_path, settings=settings)
    try:
        job.start()
        job.until(lambda: len(told(out, "begun")) == HOSTS, "the first barrier", timeout_s=90)
        # Hosts get their ranks in the order of their addresses.
        lost = sorted(cluster.hosts, key=lambda host: host.address)[rank]
        time.sleep(1.0)
        lost.destroy(silent=silent)
        job.lost(lost)
        took_s = job.until(lambda: len(told(out, "met")) == 2, "a barrier without", timeout_s=150)
        print(f"rank {rank} lost ({silent=}): met again after {took_s:.1f} s")  # noqa: T201
        job.wait(timeout_s=60)
    finally:
        job.stop()
    whys = {event["why"] for event in told(out, "failed")}
    gone = "the job's store is gone: " if rank == 0 else f"rank {rank} of {HOSTS} ({lost.address})"
    assert whys
    assert all(gone in why for why in whys), whys
    assert {event["of"] for event in told(out, "met")} == {2}
