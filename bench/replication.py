"""Iteration time of the demo model on two nodes: without ckptd, with snapshots kept on the node,
and with replication.

Two data-parallel ranks over gloo, each with a daemon of its own; the daemons hold each other's
replicas. Both "nodes" are addresses of this machine, so the two trainers, the two daemons, the
encryption and both ends of every transfer share its cores: on a machine with few of them this is an
upper bound of what replication costs, and no measure of a network.

Three jobs take turns block by block, each in processes of its own (see `bench.overhead`). Lag is
looked at ten times a second during the blocks with replication; after each, the next job waits
until the peers have caught up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from bench.common import emit, in_shared_environment, interleave, median, parser, scratch_folder
from bench.overhead import Job
from ckptd.demo.data import load_corpus
from ckptd.demo.train import distribute, gradients_to_masters, masters_to_model
from ckptd.transport.messages import GetPeers, GetStatus, Peers, Status
from ckptd.transport.wire import ControlClient
from tests.cluster.daemons import HostDaemon, exchange_keys
from tests.cluster.hosts import Cluster

__all__ = ["main"]

NUM_RANKS = 2
VARIANTS = ("plain", "local", "replicated")
REPLICAS = {"local": 0, "replicated": 1}
DRAIN_S = 30.0
POLL_S = 0.02
LOOK_S = 0.1
ASK_S = 20.0


# --- a rank ----------------------------------------------------------------------------------------------


class DataParallelJob(Job):
    """The demo model under DDP, with data of this rank's own."""

    def __init__(self, *, batch_size: int) -> None:
        super().__init__(device="cpu", batch_size=batch_size, corpus=load_corpus())
        self.net = distribute(self.model, 0)

    def iterate(self) -> None:
        next(self.steps)
        inputs, targets = next(self.loader)
        self.net(inputs, targets).backward()
        gradients_to_masters(self.model, self.masters)
        clip_grad_norm_(self.masters.values(), 1.0)
        self.optimizer.step()
        masters_to_model(self.model, self.masters)
        self.model.zero_grad()


def work(args: Any) -> None:
    """One rank of one job: settles, then answers each line on stdin, a number of iterations, with
    ms per iteration.
    """
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=rank, world_size=NUM_RANKS)
    job = DataParallelJob(batch_size=args.batch_size)
    if args.worker != "plain":
        job.attach(args.worker, args.endpoint, args.window, REPLICAS[args.worker])
    for _ in range(args.settle):
        job.iterate()
    print("ready", flush=True)
    for line in sys.stdin:
        begun = time.perf_counter()
        for _ in range(int(line)):
            job.iterate()
        print(1e3 * (time.perf_counter() - begun) / int(line), flush=True)
    print(json.dumps(job.ckpt.stats() if job.ckpt is not None else {}), flush=True)
    if job.ckpt is not None:
        job.ckpt.close()
    dist.destroy_process_group()


class Ranks:
    """The other end of `work`: both ranks of one job."""

    def __init__(self, args: Any, variant: str, daemons: Sequence[HostDaemon], folder: Path) -> None:
        self._processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "bench.replication", "--worker", variant),
                    *("--store", str(folder / f"{variant}.store"), "--endpoint", daemon.endpoint),
                    *("--batch-size", str(args.batch_size), "--window", str(args.window)),
                    *("--settle", str(args.settle)),
                ],
                env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            for rank, daemon in enumerate(daemons)
        ]
        for process in self._processes:
            self._read(process)

    @staticmethod
    def _read(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a rank ended with code {process.wait()}")
        return line

    def block_ms(self, iterations: int) -> float:
        """Wall time per iteration over a block, of the slower rank."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{iterations}\n")
        return max(float(self._read(process)) for process in self._processes)

    def close(self) -> dict[str, float]:
        """End both; returns what rank 0 says of itself."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        said = [self._read(process) for process in self._processes]
        for process in self._processes:
            process.wait(timeout=60)
        stats: dict[str, float] = json.loads(said[0])
        return stats

    def stop(self) -> None:
        """SIGKILL what is left after an error."""
        for process in self._processes:
            process.kill()
            process.wait()


# --- the daemons' side -----------------------------------------------------------------------------------


class Replication:
    """What the daemons tell of the replicated run, block by block."""

    def __init__(self, daemons: Sequence[HostDaemon]) -> None:
        self._daemons = daemons
        self.lags: list[int] = []
        self.rates: list[float] = []
        self.drained_s: list[float] = []

    def lag(self) -> int:
        """Iterations by which the target that is furthest behind lags; every rank must have one."""
        ranks = []
        for daemon in self._daemons:
            with ControlClient(daemon.endpoint, timeout_s=ASK_S) as client:
                told = client.ask(GetPeers(), Peers)
            ranks += [rank for rank in told.ranks if rank.run == "replicated"]
        lags = [target.lag_iterations for rank in ranks for target in rank.targets]
        if len(lags) != NUM_RANKS:
            raise RuntimeError(f"{len(lags)} of {NUM_RANKS} ranks are replicated: {ranks}")
        return max(lags)

    def _sent_bytes(self) -> int:
        total = 0
        for daemon in self._daemons:
            with ControlClient(daemon.endpoint, timeout_s=ASK_S) as client:
                total += client.ask(GetStatus(), Status).counters.get("replicated_bytes", 0)
        return total

    def measured(self, ranks: Ranks, iterations: int) -> float:
        """A block during which lag is looked at; returns when the daemons have caught up."""
        before, begun = self._sent_bytes(), time.perf_counter()
        with ThreadPoolExecutor(1) as pool:
            block = pool.submit(ranks.block_ms, iterations)
            while not block.done():
                self.lags.append(self.lag())
                wait([block], timeout=LOOK_S)
        self.rates.append((self._sent_bytes() - before) / (time.perf_counter() - begun))
        self.drained_s.append(self._drain())
        return block.result()

    def _drain(self) -> float:
        begun = time.monotonic()
        while self.lag() > 0:
            if time.monotonic() > begun + DRAIN_S:
                raise RuntimeError(f"the peers lag behind by {self.lag()} after {DRAIN_S:.0f} s")
            time.sleep(POLL_S)
        return time.monotonic() - begun


def measure(args: Any, daemons: Sequence[HostDaemon], folder: Path) -> dict[str, float | int | str]:
    with ExitStack() as stack:
        jobs: dict[str, Ranks] = {}
        for variant in VARIANTS:
            jobs[variant] = Ranks(args, variant, daemons, folder)
            stack.callback(jobs[variant].stop)
        replication = Replication(daemons)
        variants: dict[str, Callable[[], float]] = {
            "plain": lambda: jobs["plain"].block_ms(args.block),
            "local": lambda: jobs["local"].block_ms(args.block),
            "replicated": lambda: replication.measured(jobs["replicated"], args.block),
        }
        samples = interleave(variants, rounds=args.rounds)
        stats = {variant: job.close() for variant, job in jobs.items()}["replicated"]
    return {
        "replication_fraction": fraction(samples, "local"),
        "overhead_fraction": fraction(samples, "plain"),
        **{f"iteration_ms_{name}": median(values) for name, values in samples.items()},
        "lag_iterations_median": median(replication.lags),
        "lag_iterations_max": max(replication.lags),
        "catch_up_s_median": median(replication.drained_s),
        "replicated_mb_per_s": median(replication.rates) / 1e6,
        "snapshot_bytes": int(stats["snapshot_bytes"]),
        "stall_ms_mean": stats["stall_ms_mean"],
        "no_slot": int(stats["no_slot"]),
    }


def fraction(samples: dict[str, list[float]], base: str) -> float:
    """Median over rounds of each round's own ratio: drift between rounds cancels."""
    pairs = zip(samples[base], samples["replicated"], strict=True)
    return median([ours / other - 1.0 for other, ours in pairs])


def main() -> None:
    in_shared_environment()
    options = parser(__doc__)
    options.add_argument("--batch-size", type=int, default=2, help="per rank")
    options.add_argument("--window", type=int, default=4)
    options.add_argument("--block", type=int, default=12, help="iterations measured at a time")
    options.add_argument("--settle", type=int, default=15, help="iterations before measuring")
    options.add_argument("--security", default="curve", choices=["curve", "plain"])
    options.add_argument("--worker", help="used by the benchmark itself")
    options.add_argument("--store", help="used by the benchmark itself")
    options.add_argument("--endpoint", help="used by the benchmark itself")
    args = options.parse_args()
    if args.worker:
        work(args)
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    settings = {"replicas": "1", "peer_security": args.security}
    with Cluster(NUM_RANKS, kind="loopback") as cluster, scratch_folder() as scratch:
        folder = Path(scratch)
        daemons = [HostDaemon(host, folder, settings=settings) for host in cluster.hosts]
        exchange_keys(daemons)
        for daemon in daemons:
            daemon.start()
        metrics = measure(args, daemons, folder)
    metrics |= {"nodes": NUM_RANKS, "security": args.security, "network": "loopback addresses"}
    emit("replication", metrics | {"rounds": args.rounds, "block": args.block}, as_json=args.json)


if __name__ == "__main__":
    main()
