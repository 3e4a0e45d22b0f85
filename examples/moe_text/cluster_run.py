"""One run of `ckptd.demo.train` over the hosts of a cluster: what the demos of several hosts share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch

from ckptd.demo.lab import SHARED_CORES, Event, read_events
from ckptd.demo.report import differing_tensors, losses_by_step, redone_steps
from tests.cluster.daemons import HostDaemon, exchange_keys
from tests.cluster.hosts import Cluster, Host
from tests.cluster.torchrun import TorchrunJob

__all__ = ["JOB", "RUN_TIMEOUT_S", "ClusterRun", "what_differs"]

JOB = "demo"
BASE_INIT_SEED = 1234
RUN_TIMEOUT_S = 600.0


class ClusterRun:
    """Daemons on all hosts unless there are to be none, a torchrun job with a rank per host, logs.

    Args:
        args: `steps`, `window` and `batch_size` of the training.
        settings: of every daemon; None: no daemon runs, and ckptd takes no part.
        peers: the daemons replicate to each other.
    """

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        folder: Path,
        args: argparse.Namespace,
        *,
        num_ranks: int,
        settings: Mapping[str, str] | None,
        peers: bool,
    ) -> None:
        self.name, self.folder, self.num_ranks = name, folder / name, num_ranks
        self.folder.mkdir()
        self.cluster = cluster
        hosts = cluster.hosts if settings is not None else []
        self.daemons = {
            host.name: HostDaemon(host, self.folder, peers=peers, settings=settings) for host in hosts
        }
        self._peers = peers
        command = [
            # torchrun would take our options for abbreviations of its own without the dashes.
            *("-m", "--", "ckptd.demo.train", "--ddp", "--threads", "1"),
            *("--steps", str(args.steps), "--batch-size", str(args.batch_size)),
            *("--window", str(args.window), "--init-seed", str(BASE_INIT_SEED)),
            *("--job", JOB, "--run", name, "--daemon", "none" if settings is None else "auto"),
            *("--log", str(self.folder / "rank.jsonl"), "--final", str(self.folder / "rank.pt")),
        ]
        self.job = TorchrunJob(cluster, command, nnodes=num_ranks, folder=self.folder, env=self._environment)

    def _environment(self, host: Host) -> dict[str, str]:
        """What the agent of a host, and so its trainer, needs to find its daemon."""
        daemon = self.daemons.get(host.name)
        return {**SHARED_CORES, **(daemon.env if daemon else {}), "CKPTD_NODE_ID": host.name}

    def start(self) -> None:
        """Daemons first, then the job."""
        if self._peers:
            exchange_keys(self.daemons.values())
        for daemon in self.daemons.values():
            daemon.start()
        self.job.start()

    def stop(self) -> None:
        """End every process of the run; the hosts are empty for the next one."""
        self.job.stop()
        for host in self.cluster.hosts:
            if host.up:
                host.destroy()
            host.boot()

    def destroy(self, host: Host) -> None:
        """Nothing of the run is left on this host."""
        host.destroy()
        self.job.lost(host)

    def return_empty(self, hosts: list[Host]) -> None:
        """New hosts under the old names, with daemons; then the job goes on there."""
        for host in hosts:
            host.boot()
            if host.name in self.daemons:
                self.daemons[host.name].start()
        for host in hosts:
            self.job.join(host)

    def events(self, rank: int = 0) -> list[Event]:
        """The whole log of a rank."""
        return read_events(self.folder / f"rank-r{rank}.jsonl")

    def last_step(self, rank: int = 0) -> int:
        """The newest iteration that the rank has completed; -1 for none."""
        return max((e["step"] for e in self.events(rank) if e["event"] == "step"), default=-1)

    def host_of(self, rank: int) -> Host:
        """Where the rank's present life is."""
        node = [event["node"] for event in self.events(rank) if event["event"] == "attached"][-1]
        return next(host for host in self.cluster.hosts if host.name == node)

    def final(self, rank: int) -> dict[str, torch.Tensor]:
        """The rank's state at the end."""
        state: dict[str, torch.Tensor] = torch.load(self.folder / f"rank-r{rank}.pt", weights_only=True)
        return state


def what_differs(undisturbed: ClusterRun, disturbed: ClusterRun) -> list[str]:
    """Over all ranks: tensors of the final states, losses on the way, and iterations that were done again."""
    problems = []
    for rank in range(undisturbed.num_ranks):
        found = differing_tensors(undisturbed.final(rank), disturbed.final(rank))
        problems += [f"rank {rank}: {line}" for line in found]
        expected = losses_by_step(undisturbed.events(rank))
        actual = losses_by_step(disturbed.events(rank))
        problems += [
            f"rank {rank}: loss of iteration {step}: {expected.get(step)!r} and {actual.get(step)!r}"
            for step in sorted(expected.keys() | actual.keys())
            if expected.get(step) != actual.get(step)
        ]
        _, different = redone_steps(disturbed.events(rank))
        if different:
            problems.append(f"rank {rank}: {different} iterations differ when done again")
    return problems
