"""How long it takes to plan a schedule for very many operators (goal: 100,000 in under 0.1 s)."""

from __future__ import annotations

import random

from bench.common import clock_ms, emit, median, parser
from ckptd.core.schedule import order_operators, plan_schedule
from ckptd.core.snapshot_policy import OperatorCost, OperatorKind, Schedule

__all__ = ["main", "operators"]

EXPERT_BYTES = 12_000_000
FLOOR_AND_A_QUARTER = 1.25


def operators(count: int, *, seed: int) -> list[OperatorCost]:
    """`count` operators: mostly experts of slightly different sizes, some gates, a few dense parts."""
    rng = random.Random(seed)
    out = []
    for index in range(count):
        kind = (
            OperatorKind.DENSE
            if index % 130 == 0
            else OperatorKind.GATE
            if index % 130 == 1
            else OperatorKind.EXPERT
        )
        scale = {OperatorKind.DENSE: 10.0, OperatorKind.GATE: 0.01}.get(kind, 1.0)
        anchor = int(EXPERT_BYTES * scale * (0.9 + 0.2 * rng.random()))
        out.append(
            OperatorCost(
                name=f"layers.{index // 130}.op{index % 130}",
                kind=kind,
                anchor_bytes=anchor,
                compute_bytes=anchor // 6,
                group=None,
            )
        )
    return out


def plan(count: int, *, seed: int) -> tuple[Schedule, float]:
    """A schedule under a budget that needs a window of several phases, and the time to order and plan."""
    costs = operators(count, seed=seed)
    rng = random.Random(seed + 1)
    popularity = [rng.random() for _ in costs]
    floor = sum(cost.compute_bytes for cost in costs)
    planned: list[Schedule] = []

    def work() -> None:
        order = order_operators(costs, popularity)
        planned.append(plan_schedule(costs, budget_bytes=int(floor * FLOOR_AND_A_QUARTER), order=order))

    took_ms = clock_ms(work)
    return planned[-1], took_ms


def main() -> None:
    args = parser(__doc__).parse_args()
    metrics: dict[str, float | int | str] = {}
    for count in (1_000, 10_000, 100_000):
        runs = [plan(count, seed=seed) for seed in range(args.rounds)]
        schedule = runs[-1][0]
        metrics[f"plan_s_{count}"] = median([took for _, took in runs]) / 1e3
        metrics[f"window_{count}"] = schedule.window
        metrics[f"imbalance_{count}"] = max(schedule.phase_bytes) / (
            sum(schedule.phase_bytes) / len(schedule.phase_bytes)
        )
    emit("schedule", metrics, as_json=args.json)


if __name__ == "__main__":
    main()
