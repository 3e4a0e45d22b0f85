"""A training job over a cluster with a daemon on every host: what it tells, what may happen to its
hosts, and how it must end.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from tests.cluster import job
from tests.cluster.daemons import HostDaemon
from tests.cluster.hosts import Cluster, Host, clean_environment
from tests.cluster.torchrun import TorchrunJob
from tests.e2e.compare import differences
from tests.forked import FORKED

__all__ = ["ClusterTraining", "undisturbed"]


class ClusterTraining:
    """`tests.cluster.job` under torchrun; use as a context manager.

    Args:
        settings: of every daemon.
        soon_s: how long anything may take.
        launch: what torchrun starts, with the job as its arguments.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        *,
        num_ranks: int,
        total: int,
        settings: Mapping[str, str],
        soon_s: float,
        launch: Sequence[str] = (),
    ) -> None:
        self.cluster, self.folder = cluster, folder
        self.num_ranks, self.soon_s = num_ranks, soon_s
        self.daemons = {
            host.name: HostDaemon(host, folder, settings=dict(settings)) for host in cluster.hosts
        }
        self.job = TorchrunJob(
            cluster,
            ["-m", "--", *launch, "tests.cluster.job", str(folder), "--total", str(total)],
            nnodes=num_ranks,
            folder=folder,
            env=lambda host: self.daemons[host.name].env,
            forked=True,
        )

    def __enter__(self) -> Self:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(HostDaemon.start, self.daemons.values()))
        self.job.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.job.stop()

    # -- looking ---------------------------------------------------------------------------------

    def events(self, rank: int, event: str, *, since_s: float = 0.0) -> list[dict[str, Any]]:
        """What a rank has written, of one kind and after a moment; a line torn by a SIGKILL is none."""
        path, found = self.folder / f"{rank}.jsonl", []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                told = json.loads(line)
            except json.JSONDecodeError:
                continue
            if told["event"] == event and told["time_s"] > since_s:
                found.append(told)
        return found

    def step_of(self, rank: int) -> int:
        """The newest iteration that the rank has done; -1 for none."""
        return max((told["step"] for told in self.events(rank, "step")), default=-1)

    @property
    def newest_step(self) -> int:
        """The newest iteration that any rank has done."""
        return max(self.step_of(rank) for rank in range(self.num_ranks))

    def resumed_from(self, *, since_s: float = 0.0) -> set[int | None]:
        """At which iterations the ranks have gone on when they started last."""
        attached = [self.events(r, "attached", since_s=since_s) for r in range(self.num_ranks)]
        return {told[-1]["resumed_from"] for told in attached}

    # -- doing -----------------------------------------------------------------------------------

    def reach(self, step: int) -> None:
        """Wait until every rank has done an iteration."""
        for rank in range(self.num_ranks):
            self.job.until(
                lambda rank=rank: self.step_of(rank) >= step,  # type: ignore[misc]
                f"iteration {step} of rank {rank}",
                timeout_s=self.soon_s,
            )

    def destroy(self, *hosts: Host) -> int:
        """Destroy hosts one right after the other; the newest iteration that any rank has done by then."""
        for host in hosts:
            host.destroy()
            self.job.lost(host)
        return self.newest_step

    def return_empty(self, *hosts: Host) -> None:
        """Destroyed hosts come back with nothing, and offer themselves to the job."""
        for host in hosts:
            host.boot()
            self.daemons[host.name].start()
        for host in hosts:
            self.job.join(host)

    def check_end(self, reference: Path) -> None:
        """Let the job end, and compare."""
        (self.folder / "hurry").touch()
        self.job.wait(timeout_s=self.soon_s)
        for rank in range(self.num_ranks):
            assert differences(reference / f"{rank}.pt", self.folder / f"{rank}.pt") == []


def undisturbed(folder: Path, *, num_ranks: int, total: int) -> Path:
    """The end of ranks that nobody disturbs, without hosts and without ckptd."""
    (folder / "hurry").touch()
    words = [str(folder), "--daemon", "none", "--total", str(total), "--store", str(folder / "store")]
    ranks = []
    for rank in range(num_ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(num_ranks)}
        env = {**clean_environment(), **own, "GLOO_SOCKET_IFNAME": "lo"}
        ranks.append(FORKED.Process(target=_run_rank, args=(words, env), daemon=False))
        ranks[-1].start()
    try:
        for process in ranks:
            process.join(120)
        assert [process.exitcode for process in ranks] == [0] * num_ranks
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return folder


def _run_rank(words: list[str], env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["job", *words]
    job.main()
