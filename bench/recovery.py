"""From the loss of a node to the first iteration that had not been done before, and where the seconds go.

Two hosts train data-parallel and a third waits; each has a daemon, and every snapshot has a replica
on the other working host. Again and again the host of the last rank is destroyed (`tests.cluster`):
torchrun notices, the spare takes its place, brings the rank's snapshots from the surviving peer,
and replays. The destroyed host returns as the next spare.

Two variants in one run: `plain` under torchrun alone, and `hosted` with `ckptd.host` before the script, where
each machine has imported ahead of its torchrun (`--warm`).

The phases are those that the lost rank tells of itself on its new host (`Checkpointer.stats()`; what
each means is in docs/recovery.md). This benchmark adds the moment of the loss: the first phase,
`process_there`, lasts from there, since the daemon of a new host knows of no failure, and contains
torchrun's heartbeat and rendezvous. The last iteration takes both ranks. `transfer_s` is what the daemon
needed for all snapshots, beside the trainer. Everything shares this machine's cores, and hosts are
connected by memory: import and replay are real, bandwidth is not a network's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.common import build_stack, emit, median, parser, scratch_folder, table
from ckptd.client import Checkpointer, RunOptions, SnapshotOptions
from ckptd.core.recovery.recovery_phases import RecoveryPhase, phases_in_metrics
from ckptd.demo.lab import SHARED_CORES, Event, read_events
from ckptd.transport.messages import GetPeers, Peers
from ckptd.transport.wire import ControlClient
from tests.cluster.daemons import HostDaemon, exchange_keys
from tests.cluster.hosts import Cluster, Host
from tests.cluster.torchrun import TorchrunJob

__all__ = ["main"]

NUM_RANKS = 2
LAST = NUM_RANKS - 1
VARIANTS = ("plain", "hosted")
WAIT_S = 180.0
STEP_S = 0.02
SPARE_S = 8.0
STEPS_BETWEEN = 15
TOKENS = 64
BEFORE = (RecoveryPhase.DETECTED, RecoveryPhase.OTHERS_STOPPED, RecoveryPhase.PROCESS_THERE)
IN_PROCESS = [phase for phase in RecoveryPhase if phase not in BEFORE]


# --- a rank ----------------------------------------------------------------------------------------------


class Log:
    """One JSON line per event, whole as soon as it is written; each life begins a line of its own."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._file.write("\n")

    def write(self, event: str, **fields: object) -> None:
        self._file.write(json.dumps({"event": event, "time_s": time.time(), **fields}) + "\n")


def work(args: argparse.Namespace) -> None:
    """One rank: trains until the file `stop` appears."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    log = Log(args.worker / f"{rank}.jsonl")
    torch.manual_seed(rank)
    model = build_stack(args.state_mib)
    net = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ckpt = Checkpointer(
        net,
        optimizer,
        run=RunOptions(job="bench", name="recovery"),
        snapshots=SnapshotOptions(window=args.window),
    )
    log.write("attached", host=os.environ["CKPTD_NODE_ID"], resumed_from=ckpt.resumed_from)
    train(args.worker, ckpt, net, optimizer, model.width, log)
    ckpt.close()
    # The wrapper goes before the group: held by it last, the group's end waits for its threads with
    # the interpreter's lock held.
    del ckpt, net
    dist.destroy_process_group()


def train(
    folder: Path,
    ckpt: Checkpointer,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    width: int,
    log: Log,
) -> None:
    stop = torch.zeros(1)
    phases: dict[RecoveryPhase, float] = {}
    for step in ckpt.steps(10**9):
        net(torch.randn(TOKENS, width)).backward()
        optimizer.step()
        if not phases and (phases := phases_in_metrics(stats := ckpt.stats())):
            log.write("phases", phases=phases, ended_s=stats["first_new_step_at"])
        optimizer.zero_grad()
        stop[0] = float(dist.get_rank() == 0 and (folder / "stop").exists())
        dist.all_reduce(stop)
        log.write("step", step=step)
        if stop.item():
            break
        time.sleep(STEP_S)


# --- the job over the hosts ------------------------------------------------------------------------------


class Job:
    """Two working hosts and a spare with their daemons, and what the ranks have logged."""

    def __init__(self, args: argparse.Namespace, cluster: Cluster, folder: Path, *, hosted: bool) -> None:
        self._cluster, self._folder, self._hosted = cluster, folder, hosted
        settings = {"replicas": "1", "memory": f"{16 * args.state_mib + 64}MiB"}
        self._daemons = {host.name: HostDaemon(host, folder, settings=settings) for host in cluster.hosts}
        self.torchrun = TorchrunJob(
            cluster,
            [
                *("-m", "--", *(("ckptd.host", "-m") if hosted else ())),
                *("bench.recovery", "--worker", str(folder)),
                *("--state-mib", str(args.state_mib), "--window", str(args.window)),
            ],
            nnodes=NUM_RANKS,
            folder=folder,
            env=lambda host: {**SHARED_CORES, **self._daemons[host.name].env},
        )

    def start(self) -> None:
        exchange_keys(self._daemons.values())
        for daemon in self._daemons.values():
            daemon.start()
        self._warm(self._cluster.hosts)
        self.torchrun.start()

    def _warm(self, hosts: Sequence[Host]) -> None:
        """Before their torchrun starts."""
        warming = [self.torchrun.warm(host) for host in hosts if self._hosted]
        self.torchrun.until(
            lambda: all(process.poll() is not None for process in warming),
            "imports ahead of torchrun",
            timeout_s=WAIT_S,
        )
        if any(process.returncode for process in warming):
            raise RuntimeError("nothing was imported ahead")

    def events(self, rank: int, kind: str, *, since_s: float = 0.0) -> list[Event]:
        found = read_events(self._folder / f"{rank}.jsonl")
        return [e for e in found if e["event"] == kind and e["time_s"] > since_s]

    def last_step(self) -> int:
        """The newest iteration that any rank has done."""
        steps = [e["step"] for rank in range(NUM_RANKS) for e in self.events(rank, "step")]
        return max(steps, default=-1)

    def settle(self, since_s: float) -> None:
        """Wait until both ranks have trained for a while, all of it replicated, and a returned host
        can be the spare.
        """
        self.torchrun.until(
            lambda: (
                time.time() > since_s + SPARE_S
                and all(
                    len(self.events(rank, "step", since_s=since_s)) >= STEPS_BETWEEN
                    for rank in range(NUM_RANKS)
                )
            ),
            "training between two losses",
            timeout_s=WAIT_S,
        )
        newest = self.last_step()
        self.torchrun.until(
            lambda: self.floor() >= newest,
            f"replicas of iteration {newest}",
            timeout_s=WAIT_S,
        )

    def floor(self) -> int:
        """Up to which iteration every rank is replicated, as the last rank's daemon knows it; -1: none."""
        daemon = self._daemons[self.events(LAST, "attached")[-1]["host"]]
        with ControlClient(daemon.endpoint, timeout_s=20) as client:
            told = client.ask(GetPeers(), Peers)
        return max((rank.floor for rank in told.ranks), default=-1)

    def lose_a_host(self) -> dict[str, float]:
        """Destroy the last rank's host, and return it once the job goes on; seconds per phase."""
        host = self._host(self.events(LAST, "attached")[-1]["host"])
        lost_s = time.time()
        host.destroy()
        self.torchrun.lost(host)
        newest = self.last_step()
        self.torchrun.until(
            lambda: all(
                any(e["step"] > newest for e in self.events(rank, "step", since_s=lost_s))
                for rank in range(NUM_RANKS)
            ),
            f"both ranks beyond iteration {newest}",
            timeout_s=WAIT_S,
        )
        found = self._phases(lost_s, newest)
        host.boot()
        self._daemons[host.name].start()
        self._warm([host])
        self.torchrun.join(host)
        return found

    def _phases(self, lost_s: float, newest: int) -> dict[str, float]:
        lives = self.events(LAST, "attached", since_s=lost_s)
        told = lives[-1]
        if told["resumed_from"] is None:
            raise RuntimeError(f"the run has started over after iteration {newest}")
        recorded = self.events(LAST, "phases", since_s=told["time_s"])[-1]
        total = recorded["ended_s"] - lost_s
        in_process = {phase: recorded["phases"].get(phase) for phase in IN_PROCESS}
        known = {str(phase): seconds for phase, seconds in in_process.items() if seconds is not None}
        recovery = sum(known.values())
        found = {str(RecoveryPhase.PROCESS_THERE): total - recovery, **known}
        found |= {"recovery": recovery, "total": total}
        found["transfer"] = self._transfer_s(self._host(told["host"]), lost_s)
        found["lives"] = len(lives)
        found["redone"] = newest + 1 - told["resumed_from"]
        return found

    def _transfer_s(self, host: Host, since_s: float) -> float:
        """What the daemon there says it took to bring the last rank's snapshots."""
        for event in self._daemons[host.name].events("fetched"):
            match = re.search(rf"rank {LAST}: \d+ snapshots in ([\d.]+) s", event.message)
            if match and event.time_ns > since_s * 1e9:
                return float(match[1])
        raise RuntimeError(f"the daemon on {host} has not fetched rank {LAST}'s snapshots")

    def _host(self, name: str) -> Host:
        return next(host for host in self._cluster.hosts if host.name == name)


def measure(args: argparse.Namespace, job: Job) -> list[dict[str, float]]:
    job.start()
    found, since_s = [], 0.0
    for number in range(args.rounds):
        job.settle(since_s)
        found.append(job.lose_a_host())
        since_s = time.time()
        print(f"loss {number + 1}: {found[-1]['total']:.2f} s", flush=True)
    return found


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(rounds=3)
    options.add_argument("--state-mib", type=int, default=64, help="weights and optimizer, per rank")
    options.add_argument("--window", type=int, default=4)
    options.add_argument("--worker", type=Path, help="used by the benchmark itself")
    args = options.parse_args()
    if args.worker is not None:
        work(args)
        return
    samples: dict[str, list[dict[str, float]]] = {}
    for variant in VARIANTS:
        with Cluster(NUM_RANKS + 1) as cluster, scratch_folder() as scratch, ExitStack() as stack:
            print(f"-- {variant}: {cluster}")
            job = Job(args, cluster, Path(scratch), hosted=variant == "hosted")
            stack.callback(job.torchrun.stop)
            samples[variant] = measure(args, job)
    columns = [sample for found in samples.values() for sample in found]
    phases = [phase for phase in RecoveryPhase if any(phase in sample for sample in columns)]
    rows = [
        [phase, *(f"{sample[phase]:.2f}" if phase in sample else "-" for sample in columns)]
        for phase in [*phases, "total"]
    ]
    names = [f"{variant} {n + 1}" for variant, found in samples.items() for n in range(len(found))]
    print("\n" + table(["phase, s", *names], rows))
    medians = {
        variant: {
            name: median([sample[name] for sample in found if name in sample])
            for name in {name: None for sample in found for name in sample}
        }
        for variant, found in samples.items()
    }
    plain, hosted = medians["plain"], medians["hosted"]
    metrics: dict[str, float | int | str] = {
        "recovery_node_s": hosted["total"],
        "recovery_node_plain_s": plain["total"],
        "recovery_node_vs_plain": hosted["total"] / plain["total"],
        "recovery_s": plain.pop("recovery"),
        "loss_to_fresh_s": plain.pop("total"),
        "iterations_redone": plain.pop("redone"),
        "lives": plain.pop("lives"),
        **{f"{name}_s": value for name, value in plain.items()},
        **{f"hosted_{name}_s": hosted[name] for name in hosted if name not in ("total", "redone", "lives")},
        "state_mib": args.state_mib,
        "window": args.window,
        "network": cluster.network.kind,
        "rounds": args.rounds,
    }
    emit("recovery", metrics, as_json=args.json)


if __name__ == "__main__":
    main()
