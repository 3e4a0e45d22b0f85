"""Iteration time of the demo model with a snapshot every iteration, against the same loop without ckptd.

Two training runs, each in a process of its own as in real life, take turns block by block, so that
both see the same machine. (In one process they would share thread pools, and the plain one would
pay for the other.) On CPU all cores belong to the trainer as well: what the copies cost is what
they take from it. `overhead_floor_fraction_cpu` says how much that must be at least, from the bytes
of a snapshot and the measured copy bandwidth. What it is on a GPU, `bench.gpu` measures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from bench.common import (
    GB,
    clock_ms,
    copy_gb_per_s,
    emit,
    in_shared_environment,
    interleave,
    median,
    own_daemon,
    parser,
)
from ckptd.client import Checkpointer, DaemonOptions, LayoutOptions, RunOptions, SnapshotOptions
from ckptd.demo.data import ByteLoader, load_corpus
from ckptd.demo.model import MoEConfig, MoETransformer, native_precision
from ckptd.demo.train import gradients_to_masters, masters_to_model

__all__ = ["Job", "Worker", "fraction", "main", "pinned_link_gb_per_s"]

PAUSE_S = 0.3
LINK_BYTES = 256 << 20


class Job:
    """One training run of the demo model, advanced block by block."""

    def __init__(
        self, *, device: str, batch_size: int, corpus: Tensor, config: MoEConfig | None = None
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        with torch.device(device):  # a large one takes minutes to be made on the host
            model = MoETransformer(config or MoEConfig())
        self.masters: dict[str, Tensor] = dict(model.named_parameters())
        self.mixed = device != "cpu" or native_precision() == "bf16"
        if self.mixed:
            self.masters = {name: param.detach().clone() for name, param in self.masters.items()}
            model = model.bfloat16()
        self.model = model
        # The weights stay as they are: runs that are compared are not at the same iteration, and a router that
        # learns sends its tokens to other experts, of which each costs the host its kernels.
        self.optimizer = torch.optim.AdamW(list(self.masters.values()), lr=0.0)
        self.loader = ByteLoader(corpus, batch_size=batch_size, context=128, seed=7)
        self.steps: Iterator[int] = iter(range(10**9))
        self.ckpt: Checkpointer | None = None
        # Milliseconds of each iteration of the last block.
        self.each_ms: list[float] = []

    def attach(
        self,
        run: str,
        daemon: str,
        window: int | None,
        replicas: int | None = None,
        policy: Literal["sliding", "dense"] = "sliding",
    ) -> Checkpointer:
        """From here on this run is snapshotted at every iteration."""
        self.ckpt = Checkpointer(
            self.model,
            self.optimizer,
            state={"loader": self.loader},
            run=RunOptions(name=run, job="bench-overhead"),
            daemon=DaemonOptions(endpoint=daemon, replicas=replicas),
            snapshots=SnapshotOptions(policy=policy, window=window),
            layout=LayoutOptions(masters=self.masters if self.mixed else None),
        )
        self.steps = iter(self.ckpt.steps(10**9))
        return self.ckpt

    def iterate(self) -> None:
        next(self.steps)
        inputs, targets = (part.to(self.device) for part in next(self.loader))
        self.model(inputs, targets).backward()
        gradients_to_masters(self.model, self.masters)
        clip_grad_norm_(self.masters.values(), 1.0)
        self.optimizer.step()
        masters_to_model(self.model, self.masters)
        self.model.zero_grad()

    def block_ms(self, iterations: int) -> tuple[float, float]:
        """Wall and CPU time per iteration over a block; the machine is left to settle afterwards."""
        begun, cpu = time.perf_counter(), time.process_time()
        clock = _DeviceClock() if self.device == "cuda" else _HostClock()
        clock.mark()
        for _ in range(iterations):
            self.iterate()
            clock.mark()
        if self.device == "cuda":
            torch.cuda.synchronize()
        took_ms = 1e3 * (time.perf_counter() - begun) / iterations
        cpu_ms = 1e3 * (time.process_time() - cpu) / iterations
        self.each_ms = clock.each_ms()
        time.sleep(PAUSE_S)  # digests of this block must not be charged to the other run
        return took_ms, cpu_ms


class _HostClock:
    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def each_ms(self) -> list[float]:
        """Milliseconds between the marks."""
        return [1e3 * (end - begin) for begin, end in itertools.pairwise(self._marks)]


class _DeviceClock:
    """The same as the device sees it: when its stream gets to a mark."""

    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def each_ms(self) -> list[float]:
        """Call it when the device is idle."""
        return [begin.elapsed_time(end) for begin, end in itertools.pairwise(self._marks)]


def work(args: Any) -> None:
    """A process of one run: settles, then answers each line on stdin, a number of iterations, with
    milliseconds.
    """
    torch.set_num_threads(args.threads)
    job = Job(device=args.device, batch_size=args.batch_size, corpus=load_corpus())
    if args.worker != "plain":
        job.attach(args.device, args.worker, args.window)
    for _ in range(args.settle):  # ckptd measures, settles on its window, and on where copies run
        job.iterate()
    print("ready", flush=True)
    for line in sys.stdin:
        print(*job.block_ms(int(line)), flush=True)
    if job.ckpt is not None:
        print(json.dumps(job.ckpt.stats()), flush=True)
        job.ckpt.close()


class Worker:
    """The other end of ``work``: a process of one run, by its command."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.cpu_ms: list[float] = []
        # Milliseconds of each iteration, by block, from those that say so.
        self.blocks: list[list[float]] = []

    def read(self) -> str:
        """Its next line; the first tells that it is ready."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with code {self._process.wait()}")
        return line

    def block_ms(self, iterations: int) -> float:
        """Milliseconds for each of so many iterations."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{iterations}\n")
        took_ms, cpu_ms, *each_ms = map(float, self.read().split())
        self.cpu_ms.append(cpu_ms)
        self.blocks.append(each_ms)
        return took_ms

    def close(self, timeout_s: float = 300) -> str:
        """End it; returns what it says last."""
        rest, _ = self._process.communicate(timeout=timeout_s)
        return rest


def worker(args: Any, device: str, endpoint: str) -> Worker:
    command = [sys.executable, "-m", "bench.overhead", "--worker", endpoint]
    for name in ("batch_size", "threads", "settle", "window"):
        if getattr(args, name) is not None:
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    made = Worker([*command, "--device", device])
    made.read()
    return made


def compare(args: Any, device: str, endpoint: str) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Milliseconds per iteration without and with us, and ckptd's own statistics."""
    plain = worker(args, device, "plain")
    ours = worker(args, device, endpoint)
    variants: dict[str, Callable[[], float]] = {
        "plain": lambda: plain.block_ms(args.block),
        "ckptd": lambda: ours.block_ms(args.block),
    }
    samples = interleave(variants, rounds=args.rounds, warmup=2)
    plain.close()
    stats: dict[str, float] = json.loads(ours.close())
    stats["cpu_ms_plain"], stats["cpu_ms_ckptd"] = median(plain.cpu_ms), median(ours.cpu_ms)
    return samples, stats


def fraction(samples: dict[str, list[float]]) -> float:
    """Median over rounds of each round's own ratio: drift between rounds cancels."""
    pairs = zip(samples["plain"], samples["ckptd"], strict=True)
    return median([ours / plain - 1.0 for plain, ours in pairs])


def pinned_link_gb_per_s() -> float:
    """The best of a few large device-to-host copies into pinned memory."""
    source = torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)

    def once() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return LINK_BYTES / GB / (min(clock_ms(once) for _ in range(6)) / 1e3)


def main() -> None:
    in_shared_environment()
    options = parser(__doc__)
    options.add_argument("--block", type=int, default=8, help="iterations between two changes")
    options.add_argument("--batch-size", type=int, default=12)
    options.add_argument("--threads", type=int, default=min(4, len(os.sched_getaffinity(0))))
    options.add_argument("--settle", type=int, default=48, help="iterations before measuring")
    options.add_argument("--window", type=int, default=None, help="default: measured by ckptd")
    options.add_argument("--worker", help=argparse.SUPPRESS)
    options.add_argument("--device", default="cpu", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.worker is not None:
        work(args)
        return
    with own_daemon(memory_mib=1024) as endpoint:
        samples, stats = compare(args, "cpu", endpoint)
        plain_ms = median(samples["plain"])
        bandwidth = copy_gb_per_s(64 << 20, threads=1)
        copy_ms = stats["snapshot_bytes"] / GB / bandwidth * 1e3
        metrics: dict[str, float | int | str] = {
            "overhead_fraction_cpu": fraction(samples),
            "overhead_floor_fraction_cpu": copy_ms / args.threads / plain_ms,
            "iteration_ms_plain": plain_ms,
            "iteration_ms_ckptd": median(samples["ckptd"]),
            "trainer_cpu_ms_plain": stats["cpu_ms_plain"],
            "trainer_cpu_ms_ckptd": stats["cpu_ms_ckptd"],
            "trainer_cpu_fraction": stats["cpu_ms_ckptd"] / stats["cpu_ms_plain"] - 1.0,
            "stall_ms_mean": stats["stall_ms_mean"],
            "snapshot_bytes": int(stats["snapshot_bytes"]),
            "snapshot_bytes_vs_dense": stats["snapshot_bytes"] / stats["dense_bytes"],
            "copy_gb_per_s_one_thread": bandwidth,
            "threads": args.threads,
            "precision": native_precision(),
            "rounds": args.rounds,
        }
    emit("overhead", metrics, as_json=args.json)


if __name__ == "__main__":
    main()
