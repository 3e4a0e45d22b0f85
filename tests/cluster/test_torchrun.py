"""torchrun across hosts: a job survives the loss of hosts, with a spare and with those that come back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Cluster, Host
from tests.cluster.torchrun import TorchrunJob
from tests.long import long

NNODES = 3


class Lives:
    """What the ranks of `tests.cluster.ddp_job` have written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def events(self, name: str) -> list[tuple[int, dict[str, Any]]]:
        """(rank, event) of every whole line of that kind; a line torn by a SIGKILL is none."""
        found = []
        for path in sorted(self._folder.glob("*.jsonl")):
            for line in path.read_text().splitlines():
                try:
                    event = json.loads(line)
                except json.JSONDecodeError:
                    continue
                if event["event"] == name:
                    found.append((int(path.stem), event))
        return found

    def training_since(self, time_s: float) -> bool:
        """All ranks have met after that time, and have stepped since."""
        met = {rank: e["time_s"] for rank, e in self.events("life") if e["time_s"] > time_s}
        stepped = {r for r, e in self.events("step") if e["time_s"] > met.get(r, float("inf"))}
        return len(met) == NNODES and stepped == set(met)

    def hosts(self) -> dict[int, str]:
        """Which host each rank is on now."""
        return {rank: event["host"] for rank, event in self.events("life")}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(NNODES + 1) as made:
        print(made)  # noqa: T201 - shown with the output of a test that fails
        yield made


@long
@pytest.mark.slow
def test_a_job_survives_two_destroyed_hosts(cluster: Cluster, tmp_path: Path) -> None:
    """First the host of rank 0, replaced by the spare; then another without power, replaced by the
    first one's next life.
    """
    out = tmp_path / "out"
    out.mkdir()
    lives = Lives(out)
    command = ["-m", "tests.cluster.ddp_job", str(out)]
    job = TorchrunJob(cluster, command, nnodes=NNODES, folder=tmp_path)
    silent = cluster.network.kind == "network namespaces"
    try:
        job.start()
        job.until(lambda: lives.training_since(0), "the first life", timeout_s=90)
        spare = _spare(cluster, lives)
        lost = _host(cluster, lives.hosts()[0])
        _lose_and_restart(job, lives, lost, silent=False)
        assert spare.name in lives.hosts().values(), "the spare took the lost host's place"
        lost.boot()
        job.join(lost)
        other = _host(cluster, lives.hosts()[1])
        _lose_and_restart(job, lives, other, silent=silent)
        assert lost.name in lives.hosts().values(), "the returned host is the next spare"
        (out / "stop").touch()
        job.wait(timeout_s=60)
    finally:
        job.stop()
    ends = [event["digest"] for _, event in lives.events("end")]
    assert len(ends) == NNODES
    assert len(set(ends)) == 1, "the ranks have trained together"


def _lose_and_restart(job: TorchrunJob, lives: Lives, host: Host, *, silent: bool) -> None:
    begun = time.time()
    host.destroy(silent=silent)
    job.lost(host)
    took_s = job.until(lambda: lives.training_since(begun), f"life without {host}", timeout_s=60)
    print(f"{host} lost ({silent=}): training again after {took_s:.1f} s")  # noqa: T201
    assert host.name not in lives.hosts().values()


def _host(cluster: Cluster, name: str) -> Host:
    return next(host for host in cluster.hosts if host.name == name)


def _spare(cluster: Cluster, lives: Lives) -> Host:
    (spare,) = [host for host in cluster.hosts if host.name not in lives.hosts().values()]
    return spare


def test_a_job_whose_worker_cannot_start_fails_with_its_log(tmp_path: Path) -> None:
    """Not by a timeout: the agent ends, and what it said is in the error."""
    from tests.cluster.torchrun import JobFailed

    with Cluster(1) as cluster:
        job = TorchrunJob(cluster, ["--no-such-option", "x"], nnodes=1, folder=tmp_path)
        try:
            job.start()
            with pytest.raises(JobFailed, match="no-such-option"):
                job.wait(timeout_s=60)
        finally:
            job.stop()
