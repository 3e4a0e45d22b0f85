"""Data-parallel ranks that capture what they have alike once, against ranks that each capture all
of it, and against no capture.

Three jobs of ``--ranks`` processes (DistributedDataParallel over gloo, the demo model) take turns
block by block on the same machine; each has its window fixed, so that they differ in nothing else.
With n ranks a snapshot could be as small as 1/n (`floor_vs_each`); random states, buffers and the
image's header are in each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.common import emit, in_shared_environment, interleave, median, own_daemon, parser
from ckptd.client import Checkpointer, LayoutOptions, RunOptions, SnapshotOptions
from ckptd.demo.data import ByteLoader, load_corpus
from ckptd.demo.model import MoEConfig, MoETransformer

__all__ = ["main"]

PAUSE_S = 0.3
VARIANTS = ("plain", "each", "once")


def work(args: Any) -> None:
    """One rank of one job: answers each line on stdin, a number of iterations, with milliseconds for each."""
    torch.set_num_threads(args.threads)
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(MoETransformer(MoEConfig()), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = ByteLoader(load_corpus(), batch_size=args.batch_size, context=64, seed=rank)
    ckpt = Checkpointer(
        model,
        optimizer,
        state={"loader": loader},
        run=RunOptions(job="bench-sharing", name=args.worker),
        daemon=None if args.worker == "plain" else args.daemon,
        snapshots=SnapshotOptions(window=args.window),
        layout=LayoutOptions(capture_once=args.worker == "once"),
    )
    steps = iter(ckpt.steps(10**9))

    def iterate() -> None:
        next(steps)
        inputs, targets = next(loader)
        model(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(args.settle):
        iterate()
    print("ready", flush=True)
    for line in sys.stdin:
        begun, count = time.perf_counter(), int(line)
        for _ in range(count):
            iterate()
        print(1e3 * (time.perf_counter() - begun) / count, flush=True)
        time.sleep(PAUSE_S)  # digests of this block must not be charged to another job
    print(json.dumps({} if ckpt.off else ckpt.stats()), flush=True)
    ckpt.close()


class Job:
    """The ranks of one job, as this process drives them."""

    def __init__(self, variant: str, args: Any, endpoint: str, folder: Path) -> None:
        command = [sys.executable, "-m", "bench.sharing", "--worker", variant, "--daemon", endpoint]
        command += ["--store", str(folder / variant)]
        for name in ("batch_size", "threads", "settle", "window"):
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        world = {"WORLD_SIZE": str(args.ranks), "GLOO_SOCKET_IFNAME": "lo"}
        self._ranks = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                env={**os.environ, **world, "RANK": str(rank)},
            )
            for rank in range(args.ranks)
        ]
        self._answers()

    def block_ms(self, iterations: int) -> float:
        """Milliseconds per iteration over a block; the slowest rank's."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(f"{iterations}\n")
        return max(map(float, self._answers()))

    def close(self) -> list[dict[str, float]]:
        """End it; each rank's counters."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.close()
        found = [json.loads(answer) for answer in self._answers()]
        for process in self._ranks:
            process.wait(60)
        return found

    def _answers(self) -> list[str]:
        found = []
        for process in self._ranks:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"a rank ended with code {process.wait()}")
            found.append(line)
        return found


def main() -> None:
    in_shared_environment()
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--block", type=int, default=6, help="iterations between two changes")
    options.add_argument("--batch-size", type=int, default=4)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--settle", type=int, default=40, help="iterations before measuring")
    options.add_argument("--window", type=int, default=2)
    for name in ("--worker", "--daemon", "--store"):
        options.add_argument(name, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.worker is not None:
        work(args)
        return
    with own_daemon(memory_mib=2048) as endpoint, tempfile.TemporaryDirectory() as folder:
        jobs = {name: Job(name, args, endpoint, Path(folder)) for name in VARIANTS}
        turns: dict[str, Callable[[], float]] = {
            name: (lambda job=job: job.block_ms(args.block))  # type: ignore[misc]
            for name, job in jobs.items()
        }
        samples = interleave(turns, rounds=args.rounds, warmup=1)
        counters = {name: job.close() for name, job in jobs.items()}
    largest = {name: max(c["snapshot_bytes"] for c in counters[name]) for name in ("each", "once")}
    smallest = min(c["snapshot_bytes"] for c in counters["once"])
    emit(
        "sharing",
        {
            "snapshot_bytes_once_vs_each": largest["once"] / largest["each"],
            "floor_vs_each": 1 / args.ranks,
            "smallest_vs_largest_once": smallest / largest["once"],
            "added_ms_each": _added(samples, "each"),
            "added_ms_once": _added(samples, "once"),
            "overhead_fraction_each": _added(samples, "each") / median(samples["plain"]),
            "overhead_fraction_once": _added(samples, "once") / median(samples["plain"]),
            "iteration_ms_plain": median(samples["plain"]),
            "snapshot_bytes_each": int(largest["each"]),
            "snapshot_bytes_once": int(largest["once"]),
            "window": args.window,
            "ranks": args.ranks,
            "rounds": args.rounds,
        },
        as_json=args.json,
    )


def _added(samples: dict[str, list[float]], name: str) -> float:
    """Median over rounds of what a round took longer than without capture: drift between rounds cancels."""
    pairs = zip(samples["plain"], samples[name], strict=True)
    return median([ours - plain for plain, ours in pairs])


if __name__ == "__main__":
    main()
