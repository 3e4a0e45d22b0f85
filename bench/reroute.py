"""Throughput of a grid of pipelines that loses workers: re-routing against three others, simulated.

Nothing here was measured on devices. For each grid and number of lost workers, over several draws of *which*
are lost, an iteration with all micro-batches of an undisturbed one takes

- *ours*: what `ckptd.core.reroute.reroute_plan` predicts, with a list of actions for each worker;
- *drop*: the same planner for the pipelines that lost nobody; *drop 1F1B*: these under 1F1B, as is usual;
- *Bamboo* (NSDI '23): each worker also runs the forwards of the next stage, in bubbles of 1F1B as far as they
  fit; after a loss the previous worker runs both stages. Two neighbours lost: their pipeline is dropped;
- *Oobleck* (SOSP '23): survivors form pipelines of any lengths from half of P on, with all layers spread
  evenly, and micro-batches as suits them, under 1F1B.

The last two are closed forms in their favour: no costs of links, of moving state or of uneven layers. What
their authors measured is not compared with. Throughput is relative to our undisturbed schedule, which is not 1F1B:
`undisturbed_1f1b` says what 1F1B alone reaches of it.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from dataclasses import dataclass, replace

from bench.common import Metric, emit, median, parser, table
from ckptd.core.reroute.pipeline_grid import PipelineGrid, StageCosts, Worker
from ckptd.core.reroute.reroute_plan import PlanKind, drop_pipelines, plan_reroute

__all__ = ["bamboo_s", "main", "oobleck_s"]

# Workers: pipelines, stages, micro-batches of each.
GRIDS = {24: (6, 4, 16), 64: (8, 8, 32), 256: (16, 16, 64), 1024: (64, 16, 64)}
SHARES = (0.0, 0.01, 0.05, 0.10)
COST = StageCosts(1.0, 1.0, 1.0, optimizer_s=0.5, transfer_s=0.05, reduce_s=0.5)
NAMES = ("ours", "drop", "drop_1f1b", "bamboo", "oobleck")


@dataclass(frozen=True, slots=True)
class Draw:
    """One choice of lost workers: seconds of an iteration of each strategy; infinite: it cannot go on."""

    seconds: dict[str, float]
    bound_s: float
    plan_ms: float


def main() -> None:
    args = _arguments()
    metrics: dict[str, Metric] = {"draws": args.draws}
    rows = []
    for workers in args.grids:
        pipelines, stages, micro_batches = GRIDS[workers]
        base = plan_reroute(PipelineGrid(pipelines, (COST,) * stages, micro_batches)).iteration_s
        metrics[f"undisturbed_1f1b_{workers}"] = base / one_f_one_b_s(micro_batches, stages, 3 * stages)
        for lost in sorted({max(1, round(share * workers)) for share in SHARES}):
            draws = [_draw(workers, lost, seed) for seed in range(args.draws)]
            rows.append(_row(workers, lost, base, draws))
            metrics |= _metrics(f"{workers}_{lost}", base, draws)
    print(table(["workers", "lost", *NAMES, "above bound", "ours / drop", "plan cpu ms"], rows))
    print("\nThroughput as a part of an undisturbed grid's, median over draws; -: it cannot go on.")
    metrics |= _scarce_memory(args.grids[0])
    emit("reroute", metrics, as_json=args.json)


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--grids", type=int, nargs="+", choices=sorted(GRIDS), default=sorted(GRIDS))
    options.add_argument("--draws", type=int, default=5, help="of which workers are lost")
    args = options.parse_args()
    if args.draws < 1:
        options.error(f"--draws {args.draws}: at least 1")
    return args


def _draw(workers: int, lost: int, seed: int) -> Draw:
    pipelines, stages, micro_batches = GRIDS[workers]
    draw = random.Random(1000 * workers + 10 * lost + seed)
    every = [Worker(d, s) for d in range(pipelines) for s in range(stages)]
    grid = PipelineGrid(pipelines, (COST,) * stages, micro_batches, frozenset(draw.sample(every, lost)))
    begun = time.process_time()  # other load on the machine does not count
    plan = plan_reroute(grid)
    plan_ms = 1e3 * (time.process_time() - begun)
    whole = len(grid.whole)
    alone = math.ceil(grid.total / whole) if whole else 0
    seconds = {
        "ours": math.inf if plan.kind is PlanKind.RECOVER else plan.iteration_s,
        "drop": drop_pipelines(grid).iteration_s if whole else math.inf,
        "drop_1f1b": one_f_one_b_s(alone, stages, 3 * stages) if whole else math.inf,
        "bamboo": bamboo_s(grid),
        "oobleck": oobleck_s(grid),
    }
    return Draw(seconds, plan.bound_s, plan_ms)


def _scarce_memory(workers: int) -> dict[str, Metric]:
    """How far plans are above the bound if a worker holds only so many micro-batches; one worker is lost."""
    pipelines, stages, micro_batches = GRIDS[workers]
    found: dict[str, Metric] = {}
    rows = []
    for held in (stages, stages * 3 // 2, 2 * stages):
        cost = replace(COST, activation_bytes=1, kept_bytes=1, memory_bytes=held)
        lost = frozenset({Worker(0, stages // 2)})
        plan = plan_reroute(PipelineGrid(pipelines, (cost,) * stages, micro_batches, lost))
        found[f"above_bound_{workers}_holding_{held}"] = plan.iteration_s / plan.bound_s - 1
        rows.append([f"{held}", f"{100 * (plan.iteration_s / plan.bound_s - 1):.1f} %"])
    print(f"\n{workers} workers, {stages} stages, one lost:")
    print(table(["micro-batches in memory", "above bound"], rows))
    return found


def one_f_one_b_s(micro_batches: int, workers: int, work_s: float) -> float:
    """1F1B with ``work_s`` of one micro-batch spread evenly over workers, without links."""
    return (micro_batches + workers - 1) * work_s / workers + COST.optimizer_s + COST.reduce_s


def bamboo_s(grid: PipelineGrid) -> float:
    """All costs equal; a worker's forwards for the next stage fill bubbles first."""
    count, stages, cost = grid.micro_batches, grid.stages, grid.costs[0]
    kept, doubled = 0, False
    for d in range(grid.pipelines):
        lost = [s for s in range(stages) if (d, s) in grid.failed]
        if any((s + 1) % stages in lost for s in lost) and stages > 1:
            continue  # the one who has the other's parameters is gone, too
        kept, doubled = kept + 1, doubled or bool(lost)
    if not kept:
        return math.inf
    count = math.ceil(grid.total / kept)
    plain = (count + stages - 1) * cost.work_s
    busiest = count * (2 * cost.work_s if doubled else cost.work_s + cost.forward_s)
    if doubled:  # it waits for the way there and back, too
        busiest += (stages - 2) * cost.work_s
    return max(plain, busiest) + cost.optimizer_s + cost.reduce_s


def oobleck_s(grid: PipelineGrid) -> float:
    """The best number of pipelines out of all survivors."""
    survivors = grid.pipelines * grid.stages - len(grid.failed)
    work_s = sum(cost.work_s for cost in grid.costs)
    best = math.inf
    for number in range(1, grid.pipelines + 1):
        size, longer = divmod(survivors, number)
        sizes = [min(grid.stages, size + (i < longer)) for i in range(number)]
        if min(sizes) >= max(1, grid.stages // 2):
            best = min(best, _shared_s(sizes, grid.total, work_s))
    return best


def _shared_s(sizes: list[int], total: int, work_s: float) -> float:
    """The least time in which pipelines of these lengths run so many micro-batches."""
    times = sorted(one_f_one_b_s(m, size, work_s) for size in set(sizes) for m in range(1, total + 1))
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        after_s = COST.optimizer_s + COST.reduce_s
        done = sum(
            max(0, math.floor((times[middle] - after_s) * size / work_s + 1e-9) - size + 1) for size in sizes
        )
        low, high = (low, middle) if done >= total else (middle + 1, high)
    return times[low]


# --- what is printed -----------------------------------------------------------------------------------


def _row(workers: int, lost: int, base_s: float, draws: list[Draw]) -> list[str]:
    parts = [median([base_s / d.seconds[name] for d in draws]) for name in NAMES]
    cells = [f"{part:.3f}" if part else "-" for part in parts]
    above = max(_above(d) for d in draws)
    ratio = f"{parts[0] / parts[1]:.2f}" if parts[1] else "-"
    return [
        f"{workers}",
        f"{lost}",
        *cells,
        f"{100 * above:.1f} %",
        ratio,
        f"{max(d.plan_ms for d in draws):.0f}",
    ]


def _above(draw: Draw) -> float:
    return draw.seconds["ours"] / draw.bound_s - 1 if draw.bound_s else 0.0


def _metrics(of: str, base_s: float, draws: list[Draw]) -> dict[str, Metric]:
    found: dict[str, Metric] = {
        f"{name}_{of}": median([base_s / d.seconds[name] for d in draws]) for name in NAMES
    }
    for name in NAMES[1:]:
        ratios = [d.seconds[name] / d.seconds["ours"] for d in draws if math.isfinite(d.seconds["ours"])]
        finite = [ratio for ratio in ratios if math.isfinite(ratio)]
        found[f"stopped_{name}_{of}"] = len(draws) - len(finite)
        if finite:
            found[f"ours_vs_{name}_{of}"] = median(finite)
    found[f"above_bound_{of}"] = max(_above(d) for d in draws)
    found[f"plan_cpu_ms_{of}"] = max(d.plan_ms for d in draws)
    found[f"recoveries_{of}"] = sum(math.isinf(d.seconds["ours"]) for d in draws)
    return found


if __name__ == "__main__":
    main()
