"""How long it takes to plan a schedule for very many operators (goal: 100,000 in under 0.1 s).

And to lay out the image of one of its phases, of a model of 24 layers with 64 experts (4,704 parameters with
AdamW's state), for which the training thread waits when a phase is new: against writing the same names and
sizes with the safetensors library, in CPU time.
"""

from __future__ import annotations

import random
import time

import torch
from safetensors.torch import save
from torch import nn

from bench.common import clock_ms, emit, median, parser
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.operators import discover_operators
from ckptd.client.model.snapshot_layout import PhasePlan
from ckptd.client.schedule.planner import PlanInputs, make_plan
from ckptd.core.schedule import Ordering, order_operators, plan_schedule
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


class _Layer(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.attention, self.gate = nn.Linear(16, 16), nn.Linear(16, experts)
        self.experts = nn.ModuleList(
            nn.ModuleList(nn.Linear(*size, bias=False) for size in ((16, 8), (16, 8), (8, 16)))
            for _ in range(experts)
        )


def phase_ms(layers: int, experts: int, window: int = 8) -> tuple[list[float], float]:
    """CPU time of the layout of each phase after the first, and of the library for the first one's tensors."""
    model = nn.ModuleList(_Layer(experts) for _ in range(layers))
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    binding = LiveState(model, [optimizer], None)
    found = discover_operators(model, rows_allowed=binding.rows_allowed)
    inputs = PlanInputs(
        policy="sliding",
        window=window,
        every=1,
        budget_bytes=None,
        available_bytes=None,
        popularity=None,
        ordering=Ordering.HARD,
        compute_dtypes={},
        identity={"job": "j", "run": "r", "rank": "0", "world_size": "1"},
        scalars_capacity=1 << 20,
    )
    plan = make_plan(binding, found, inputs)
    plan.use_phases([phase[::-1] for phase in plan.schedule.phases[::-1]])
    times, plans = [], []
    for number in range(window):
        started = time.thread_time()
        made = plan.phase_plan(binding, number)
        times.append((time.thread_time() - started) * 1e3)
        assert made is not None
        plans.append(made[0])
    return times[1:], _library_ms(plans[0])


def _library_ms(plan: PhasePlan) -> float:
    tensors = {entry.name: torch.zeros(entry.shape, dtype=torch.uint8) for entry in plan.layout.entries}
    started = time.thread_time()
    save(tensors)
    return (time.thread_time() - started) * 1e3


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
    phases, library = zip(*(phase_ms(24, 64) for _ in range(args.rounds)), strict=True)
    took_ms = median([each for times in phases for each in times])
    metrics |= {"phase_ms": took_ms, "phase_vs_library": took_ms / median(list(library))}
    emit("schedule", metrics, as_json=args.json)


if __name__ == "__main__":
    main()
