"""What logging the boundaries of a pipeline costs per iteration and takes in memory, against the
same run without.

A pipeline of two stages under 1F1B, each stage a process, is run twice over, both times with
snapshots; one of the two also logs what it sends. They take turns block by block. On a shared
machine the difference of two runs drowns in noise when it is small, so the time that the training
thread spends in the log's own calls is measured, too: `own_ms` by the clock, `own_cpu_ms` of
processor time, which other load on the machine does not lengthen, and `own_cpu_fraction` of all
that the trainer uses. `floor_ms` is what a bare copy of the same bytes would take.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from bench.common import (
    GB,
    MoEStack,
    copy_gb_per_s,
    emit,
    in_shared_environment,
    interleave,
    median,
    own_daemon,
    parser,
)
from bench.stage_processes import StageProcesses, stage_options
from ckptd.client import Checkpointer, RunOptions, SnapshotOptions
from ckptd.client.pipeline.boundary_log import BoundaryLog

__all__ = ["main"]

STAGES = 2
PAUSE_S = 0.3
VARIANTS = ("without", "with")


class Stage(MoEStack):
    """Its layers' output goes on to the next stage."""

    def forward(self, x_ND: Tensor) -> Tensor:
        for layer in self.layers:
            x_ND = layer(x_ND)
        return x_ND


class OwnTime:
    """Seconds that the calling thread spends in the log's calls, by the clock and of processor time."""

    def __init__(self, log: BoundaryLog) -> None:
        self.seconds = self.cpu_s = 0.0
        for name in ("begin", "sent", "end"):
            setattr(log, name, self._timed(getattr(log, name)))

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any, **kwargs: Any) -> None:
            begun, cpu = time.perf_counter(), time.thread_time()
            call(*args, **kwargs)
            self.cpu_s += time.thread_time() - cpu
            self.seconds += time.perf_counter() - begun

        return timed


def work(args: Any) -> None:
    """One stage of one run: settles, then answers each line on stdin, a number of iterations, with
    milliseconds.
    """
    torch.set_num_threads(1)
    torch.manual_seed(args.rank)
    dist.init_process_group("gloo", init_method=f"file://{args.meet}", rank=args.rank, world_size=STAGES)
    model = Stage(
        width=args.width,
        hidden=2 * args.width,
        num_experts=args.experts,
        num_layers=args.layers,
        fused=True,
    )
    stage = PipelineStage(model, args.rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage, args.micro_batches, loss_fn=lambda output, target: (output - target).square().mean()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ckpt = Checkpointer(
        model,
        optimizer,
        run=RunOptions(job="bench-logging", name=args.variant, rank=args.rank, world_size=STAGES),
        daemon=args.endpoint,
        snapshots=SnapshotOptions(window=args.window),
    )
    own = None
    if args.variant == "with":
        log = ckpt.log_boundaries(schedule)
        assert isinstance(log, BoundaryLog)
        own = OwnTime(log)
    steps = iter(ckpt.steps(10**9))
    batch = torch.randn(args.micro_batches * args.tokens, args.width)

    def block(iterations: int) -> float:
        begun = time.perf_counter()
        for _ in range(iterations):
            next(steps)
            if args.rank == 0:
                schedule.step(batch)
            else:
                schedule.step(target=batch)
            optimizer.step()
            optimizer.zero_grad()
        return 1e3 * (time.perf_counter() - begun) / iterations

    block(args.settle)
    print("ready", flush=True)
    measured, cpu = 0, time.process_time()
    if own is not None:
        own.seconds = own.cpu_s = 0.0
    for line in sys.stdin:
        print(block(int(line)), flush=True)
        measured += int(line)
        time.sleep(PAUSE_S)  # digests of this block must not be charged to the other run
    each = 1e3 / max(measured, 1)
    told = {"cpu_ms": each * (time.process_time() - cpu)}
    if own is not None:
        told |= {"own_ms": each * own.seconds, "own_cpu_ms": each * own.cpu_s}
    print(json.dumps({**ckpt.stats(), **told}), flush=True)
    steps.close()
    ckpt.close()


def summarise(
    samples: dict[str, list[float]], stages: list[dict[str, float]], bandwidth: float
) -> dict[str, float | int | str]:
    pairs = zip(samples["without"], samples["with"], strict=True)
    if not all(stage["log_iterations"] for stage in stages):
        raise RuntimeError("nothing was logged: there was no memory for it, or --settle is too small")
    logged = [stage["log_bytes"] / stage["log_iterations"] for stage in stages]
    return {
        "logging_fraction": median([ours / plain - 1.0 for plain, ours in pairs]),
        "iteration_ms_without": median(samples["without"]),
        "iteration_ms_with": median(samples["with"]),
        "own_ms": max(stage["own_ms"] for stage in stages),
        "own_cpu_ms": max(stage["own_cpu_ms"] for stage in stages),
        "own_cpu_fraction": max(stage["own_cpu_ms"] / stage["cpu_ms"] for stage in stages),
        "floor_ms": 1e3 * max(logged) / GB / bandwidth,
        "log_bytes_per_iteration": int(max(logged)),
        "log_records_per_iteration": max(s["log_records"] / s["log_iterations"] for s in stages),
        "log_memory_bytes": int(max(stage["log_memory_bytes"] for stage in stages)),
        "log_slots": int(stages[0]["log_slots"]),
        "log_skipped": int(sum(stage["log_skipped"] for stage in stages)),
        "snapshot_bytes": int(max(stage["snapshot_bytes"] for stage in stages)),
        "copy_gb_per_s_one_thread": bandwidth,
    }


def main() -> None:
    in_shared_environment()
    options = parser(__doc__)
    stage_options(options, VARIANTS, block=8, layers=4, tokens=512, micro_batches=4, window=6)
    args = options.parse_args()
    if args.variant is not None:
        work(args)
        return
    with own_daemon(memory_mib=4096) as endpoint, tempfile.TemporaryDirectory() as folder:
        runs = {
            name: StageProcesses(
                "bench.logging", name, endpoint, Path(folder, name), args, names=(), ranks=STAGES
            )
            for name in VARIANTS
        }
        variants: dict[str, Callable[[], float]] = {
            name: (lambda run=run: max(run.ask(args.block)))  # type: ignore[misc]
            for name, run in runs.items()
        }
        samples = interleave(variants, rounds=args.rounds)
        runs["without"].close()
        metrics = summarise(samples, runs["with"].close(), copy_gb_per_s(64 << 20, threads=1))
    metrics |= {"micro_batches": args.micro_batches, "window": args.window, "rounds": args.rounds}
    emit("logging", metrics, as_json=args.json)


if __name__ == "__main__":
    main()
