"""From the SIGKILL of one of four ranks to the first new step, under a host and under torchrun alone.

One machine, gloo, a small mixture of experts whose every iteration is snapshotted. Again and again one rank is
killed, and the time until every rank has done an optimizer's step that none had done before is measured:

    host    torchrun … -m ckptd.host: the hosts fork new trainers, torchrun notices nothing
    stays   the same, and the ranks that are left restart in their processes
    bare    the hosts alone: no checkpointer, nothing is loaded, and as many steps as a recovery does again
            and one. What is left of `host` beyond that is ours to make shorter
    stock   torchrun restarts the workers, with its defaults
    tuned   the same, with what makes it quicker on one machine: it looks for dead workers every 20 ms

Each variant is one job with a run of its own, and the same daemon. `process` is the part until the script's
first line has run on all ranks that start: detection, the end of the others, and fork or interpreter. `imports` are those
of the script after that line. Survivors have no parked state, so what follows is an ordinary recovery.
"""

import time

BEGUN_S = time.time()  # before the imports, which are measured

import argparse
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.common import REPOSITORY, build_stack, emit, median, own_daemon, parser, scratch_folder, table
from ckptd.client import Checkpointer, RecoveryOptions, RunOptions, SnapshotOptions
from ckptd.demo.lab import SHARED_CORES, read_events

__all__ = ["main"]

IMPORTED_S = time.time()
NUM_RANKS = 4
TOKENS = 64
STEP_S = 0.01
STEPS_BETWEEN = 12
# Until the zygotes have imported what the first trainers did.
SETTLE_S = 12.0
WAIT_S = 120.0
VARIANTS: dict[str, tuple[list[str], list[str]]] = {
    "host": ([], ["ckptd.host", "-m"]),
    "stays": ([], ["ckptd.host", "-m"]),
    "bare": ([], ["ckptd.host", "-m"]),
    "stock": ([], []),
    "tuned": (["--monitor-interval", "0.02"], []),
}


# --- a rank ----------------------------------------------------------------------------------------------


def work(args: argparse.Namespace) -> None:
    """Trains until it is ended."""
    torch.set_num_threads(1)
    net: nn.Module

    def connect() -> nn.Module:
        nonlocal net
        dist.init_process_group("gloo")
        net = DistributedDataParallel(model, find_unused_parameters=True)
        return net

    torch.manual_seed(0)
    model = build_stack(args.state_mib)
    net = connect()
    rank = dist.get_rank()
    log = (args.worker / f"{rank}.jsonl").open("a", buffering=1)

    def write(event: str, **fields: object) -> None:
        log.write(json.dumps({"event": event, "pid": os.getpid(), "time_s": time.time(), **fields}) + "\n")

    log.write("\n")  # a line that a SIGKILL tore ends here
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    made_s = time.time()
    ckpt = Checkpointer(
        net,
        optimizer,
        daemon=None if args.bare else args.daemon,
        run=RunOptions(job="recovery-host", name=args.worker.name),
        snapshots=SnapshotOptions(window=args.window),
        recovery=RecoveryOptions(in_process=connect if args.stays else None),
    )
    write(
        "attached",
        begun_s=BEGUN_S,
        imported_s=IMPORTED_S,
        made_s=made_s,
        resumed_from=ckpt.resumed_from,
    )
    for step in ckpt.steps(10**9):
        with ckpt.restartable():
            net(torch.randn(TOKENS, model.width)).backward()
            optimizer.step()
            optimizer.zero_grad()
            write("step", step=step)
            time.sleep(STEP_S)


# --- a job -----------------------------------------------------------------------------------------------


class Job:
    """One torchrun, and what its ranks have logged."""

    def __init__(self, args: argparse.Namespace, variant: str, folder: Path, endpoint: str) -> None:
        self._folder = folder / variant
        self._folder.mkdir()
        self.output = folder / f"{variant}.log"
        options, host = VARIANTS[variant]
        own = ["--worker", str(self._folder), "--daemon", endpoint]
        own += ["--state-mib", str(args.state_mib), "--window", str(args.window)]
        self._stays = variant == "stays"
        # Of a window, all but the last snapshot's iteration is replayed; the one that the kill cut off is new.
        self._again = args.window if variant == "bare" else 0
        own += [f"--{variant}"] if variant in ("stays", "bare") else []
        runtime = folder / "runtime"
        runtime.mkdir(mode=0o700, exist_ok=True)
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                    *("--nproc-per-node", str(NUM_RANKS), "--max-restarts", "100000", *options),
                    *("-m", "--", *host, "bench.recovery_host", *own),
                ],
                cwd=REPOSITORY,
                env={
                    **os.environ,
                    **SHARED_CORES,
                    "OMP_NUM_THREADS": "1",
                    # Without it gloo finds addresses of the life before, under torchrun alone.
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                    "CKPTD_RUNTIME_DIR": str(runtime),
                    "CKPTD_HOST_MAX_RESTARTS": "100000",
                },
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def events(self, rank: int, kind: str, since_s: float = 0.0) -> list[dict[str, Any]]:
        found = read_events(self._folder / f"{rank}.jsonl")
        return [e for e in found if e["event"] == kind and e["time_s"] > since_s]

    def steps(self, rank: int, since_s: float) -> list[dict[str, Any]]:
        return self.events(rank, "step", since_s)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                tail = self.output.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{what}: it never came; torchrun says:\n{tail}")
            time.sleep(0.005)

    def settle(self, since_s: float) -> None:
        self.until(
            lambda: all(len(self.steps(rank, since_s)) >= STEPS_BETWEEN for rank in range(NUM_RANKS)),
            "training between two kills",
        )

    def kill(self, rank: int) -> dict[str, float]:
        """SIGKILL a rank; seconds per phase, of the rank that was last in it."""
        # Without a checkpointer each life counts from 0.
        newest = self._again or max(self.steps(each, 0.0)[-1]["step"] for each in range(NUM_RANKS))
        pid = self.events(rank, "attached")[-1]["pid"]
        killed_s = time.time()
        os.kill(pid, signal.SIGKILL)
        ranks = range(NUM_RANKS)
        self.until(
            lambda: all(any(e["step"] > newest for e in self.steps(each, killed_s)) for each in ranks),
            f"a step beyond {newest}",
        )
        started = [rank] if self._stays else ranks
        lives = [self.events(each, "attached", killed_s)[-1] for each in started]
        if not self._again and any(life["resumed_from"] is None for life in lives):
            raise RuntimeError("the run has started over")
        # A survivor may have done one more step before it noticed: only those of the new life count.
        fresh = max(
            next(e["time_s"] for e in self.steps(each, killed_s) if e["step"] > newest) for each in ranks
        )
        marks = [
            killed_s,
            max(life["begun_s"] for life in lives),
            max(life["imported_s"] for life in lives),
            max(life["made_s"] for life in lives),
            max(life["time_s"] for life in lives),
            fresh,
        ]
        names = ("process", "imports", "groups and model", "attach and load", "replay and step")
        found = {name: marks[n + 1] - marks[n] for n, name in enumerate(names)}
        return {**found, "total": fresh - killed_s}

    def memory_mib(self) -> tuple[float, float]:
        """RSS of the largest host, and private memory of the largest zygote."""
        hosts, zygotes = [0.0], [0.0]
        for folder in Path("/proc").iterdir():
            try:
                if f"{self._folder}" not in (folder / "cmdline").read_text():
                    continue
                name = (folder / "comm").read_text().strip()
                if name == "ckptd-host":
                    hosts += _fields_mib(folder / "status", r"VmRSS:\s+(\d+)")
                elif name == "ckptd-zygote":
                    zygotes.append(sum(_fields_mib(folder / "smaps_rollup", r"Private_\w+:\s+(\d+)")))
            except OSError:
                continue  # no process, or it has ended
        return max(hosts), max(zygotes)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def _fields_mib(path: Path, pattern: str) -> list[float]:
    return [int(number) / 1024 for number in re.findall(pattern, path.read_text())]


def measure(job: Job, kills: int, rng: random.Random) -> list[dict[str, float]]:
    job.settle(0.0)
    job.settle(time.time() + SETTLE_S)
    found = []
    for number in range(kills):
        found.append(job.kill(rng.randrange(NUM_RANKS)))
        print(f"kill {number + 1}: {found[-1]['total']:.2f} s", flush=True)
        job.settle(time.time())
    return found


def quantile(samples: Sequence[float], part: float) -> float:
    """The smallest sample that this part of all does not exceed."""
    return sorted(samples)[max(0, math.ceil(part * len(samples)) - 1)]


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(rounds=50)
    options.add_argument("--torchrun-rounds", type=int, default=5, help="kills under torchrun alone")
    options.add_argument("--state-mib", type=int, default=16, help="weights and optimizer, per rank")
    options.add_argument("--window", type=int, default=2)
    options.add_argument("--worker", type=Path, help="used by the benchmark itself")
    options.add_argument("--daemon", help="used by the benchmark itself")
    options.add_argument("--stays", action="store_true", help="used by the benchmark itself")
    options.add_argument("--bare", action="store_true", help="used by the benchmark itself")
    args = options.parse_args()
    if args.worker is not None:
        work(args)
        return
    if args.rounds < 1 or args.torchrun_rounds < 1:
        options.error(
            "--rounds and --torchrun-rounds must be at least 1: each number is compared with another"
        )
    samples: dict[str, list[dict[str, float]]] = {}
    memory = (0.0, 0.0)
    # All runs stay in the daemon's memory: six snapshots of each rank, and as many in a new geometry.
    with own_daemon(4 * NUM_RANKS * 16 * (args.state_mib + 4)) as endpoint, scratch_folder() as scratch:
        for variant in ("stock", "host", "stays", "bare", "tuned"):
            print(f"-- {variant}", flush=True)
            job = Job(args, variant, Path(scratch), endpoint)
            try:
                kills = args.torchrun_rounds if variant in ("stock", "tuned") else args.rounds
                samples[variant] = measure(job, kills, random.Random(1))
                if variant == "host":
                    memory = job.memory_mib()
            finally:
                job.stop()
    totals = {variant: [s["total"] for s in found] for variant, found in samples.items()}
    phases = list(samples["host"][0])
    rows = [[phase, *(f"{median([s[phase] for s in samples[v]]):.2f}" for v in VARIANTS)] for phase in phases]
    print("\n" + table(["median, s", *VARIANTS], rows))
    metrics: dict[str, float | int | str] = {
        "recovery_host_p50_s": median(totals["host"]),
        "recovery_host_p99_s": quantile(totals["host"], 0.99),
        "recovery_host_max_s": max(totals["host"]),
        "recovery_stays_p50_s": median(totals["stays"]),
        "recovery_stays_p99_s": quantile(totals["stays"], 0.99),
        "recovery_bare_p50_s": median(totals["bare"]),
        "recovery_vs_bare": median(totals["host"]) / median(totals["bare"]),
        "recovery_stock_p50_s": median(totals["stock"]),
        "recovery_tuned_p50_s": median(totals["tuned"]),
        "recovery_vs_torchrun": median(totals["host"]) / median(totals["stock"]),
        "recovery_stays_vs_torchrun": median(totals["stays"]) / median(totals["stock"]),
        "recovery_vs_tuned": median(totals["host"]) / median(totals["tuned"]),
        "host_process_p50_s": median([s["process"] for s in samples["host"]]),
        "host_rss_mib": memory[0],
        "zygote_private_mib": memory[1],
        "state_mib": args.state_mib,
        "ranks": NUM_RANKS,
        "kills": args.rounds,
        "kills_torchrun": args.torchrun_rounds,
    }
    emit("recovery_host", metrics, as_json=args.json)


if __name__ == "__main__":
    main()
