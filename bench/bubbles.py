"""What snapshots cost a pipeline whose copies run in its bubbles, against copies as in any other job.

The same pipeline, each stage a process, runs several times over, in turns, block by block: without snapshots
(`off`), with copies beside training (`beside`), in the training thread (`inline`), and in bubbles (`bubbles`).
Ratios are of the fastest iterations of two blocks of a round, which other load on the machine disturbs least;
their quartiles show how much it does. Predicted bubbles follow from the schedule's actions and each rank's
own durations; measured ones are the time in which a rank waits for messages of others.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from bench.common import MIB, emit, in_shared_environment, interleave, median, own_daemon, parser, percentile
from bench.logging import Stage
from bench.stage_processes import StageProcesses, stage_options
from ckptd.client import Checkpointer, RunOptions, SnapshotOptions
from ckptd.client.pipeline.bubble_watch import BubbleWatch

__all__ = ["main"]

VARIANTS = ("off", "beside", "inline", "bubbles")
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
PAUSE_S = 0.1


def work(args: Any) -> None:
    """One stage of one variant: settles, then answers each line on stdin, a number of iterations, with the
    milliseconds of each.
    """
    torch.set_num_threads(1)
    torch.manual_seed(args.rank)
    dist.init_process_group("gloo", init_method=f"file://{args.meet}", rank=args.rank, world_size=args.stages)
    model = Stage(
        width=args.width, hidden=2 * args.width, num_experts=args.experts, num_layers=args.layers, fused=True
    )
    stage = PipelineStage(model, args.rank, args.stages, torch.device("cpu"))
    schedule = SCHEDULES[args.schedule](
        stage, args.micro_batches, loss_fn=lambda output, target: (output - target).square().mean()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ckpt, watch, steps = _protection(args, model, optimizer, schedule)
    batch = torch.randn(args.micro_batches * args.tokens, args.width)

    def block(iterations: int) -> list[float]:
        times = [time.perf_counter()]
        for _ in range(iterations):
            next(steps)
            if args.rank == 0:
                schedule.step(batch)
            else:
                schedule.step(target=batch if args.rank == args.stages - 1 else None)
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in itertools.pairwise(times)]

    block(args.settle)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(block(int(line))), flush=True)
        time.sleep(PAUSE_S)  # digests of this block must not be charged to the other variants
    told: dict[str, float] = {} if ckpt is None else ckpt.stats()
    if watch is not None:
        told |= {"predicted": watch.predicted_fraction, "measured": watch.measured_fraction}
    print(json.dumps(told), flush=True)
    steps.close()
    if ckpt is not None:
        ckpt.close()


def _protection(
    args: Any, model: Stage, optimizer: torch.optim.Optimizer, schedule: Any
) -> tuple[Checkpointer | None, BubbleWatch | None, Any]:
    if args.variant == "off":
        return None, None, (step for step in range(10**9))
    ckpt = Checkpointer(
        model,
        optimizer,
        run=RunOptions(job="bench-bubbles", name=args.variant, rank=args.rank, world_size=args.stages),
        daemon=args.endpoint,
        snapshots=SnapshotOptions(window=args.window, inline_copy=args.variant == "inline"),
    )
    if args.variant == "bubbles":
        ckpt.copy_in_bubbles(schedule, always=True)
    return ckpt, ckpt._pipeline._bubbles, iter(ckpt.steps(10**9))


def block_ms(run: StageProcesses, iterations: int) -> float:
    """Milliseconds of the fastest iteration, each as long as on its slowest stage."""
    return float(min(map(max, zip(*run.ask(iterations), strict=True))))


def summarise(
    samples: dict[str, list[float]], told: dict[str, list[dict[str, float]]], args: Any
) -> dict[str, float | int | str]:
    found: dict[str, float | int | str] = {f"iteration_ms_{v}": median(samples[v]) for v in VARIANTS}
    for above, below in (*((v, "off") for v in VARIANTS[1:]), ("bubbles", "beside")):
        ratios = [a / b for a, b in zip(samples[above], samples[below], strict=True)]
        found[f"{above}_vs_{below}"] = median(ratios)
        found |= {f"{above}_vs_{below}_p{p}": percentile(ratios, p / 100) for p in (25, 75)}
    watched = told["bubbles"]
    inside = sum(s["bubble_bytes"] for s in watched) / sum(s["captured_bytes"] for s in watched)
    closed_form = (args.stages - 1) / (args.micro_batches + args.stages - 1)
    found |= {"bytes_in_bubbles_fraction": inside, "bubble_closed_form": closed_form}
    for rank, stage in enumerate(watched):
        found |= {
            f"bubble_predicted_{rank}": stage["predicted"],
            f"bubble_measured_{rank}": stage["measured"],
        }
    for variant in VARIANTS[1:]:
        found[f"stall_ms_{variant}"] = max(s["stall_ms_mean"] for s in told[variant])
        found[f"snapshots_{variant}"] = int(min(s["snapshots"] for s in told[variant]))
        found[f"left_out_{variant}"] = int(sum(s["no_slot"] + s["torn"] + s["failed"] for s in told[variant]))
    found["snapshot_mib"] = max(s["snapshot_bytes"] for s in watched) / MIB
    return found


def main() -> None:
    in_shared_environment()
    options = parser(__doc__)
    options.add_argument("--stages", type=int, default=4)
    options.add_argument("--schedule", choices=sorted(SCHEDULES), default="1f1b")
    stage_options(options, VARIANTS, block=6, layers=1, tokens=128, micro_batches=8, window=1)
    args = options.parse_args()
    if args.variant is not None:
        work(args)
        return
    with own_daemon(memory_mib=12288) as endpoint, tempfile.TemporaryDirectory() as folder:
        runs = {
            name: StageProcesses(
                "bench.bubbles",
                name,
                endpoint,
                Path(folder, name),
                args,
                names=("stages", "schedule"),
                ranks=args.stages,
            )
            for name in VARIANTS
        }
        variants: dict[str, Callable[[], float]] = {
            name: (lambda run=run: block_ms(run, args.block))  # type: ignore[misc]
            for name, run in runs.items()
        }
        samples = interleave(variants, rounds=args.rounds)
        metrics = summarise(samples, {name: run.close() for name, run in runs.items()}, args)
    metrics |= {"schedule": args.schedule, "stages": args.stages, "micro_batches": args.micro_batches}
    metrics |= {"window": args.window, "rounds": args.rounds}
    emit("bubbles", metrics, as_json=args.json)


if __name__ == "__main__":
    main()
