"""What ranks of an elastic job may do wrong, each in a job of its own; every rank writes what it was told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ckptd.client import RunOptions, SnapshotOptions
from ckptd.client.elastic.job import ElasticJob, PlacementOptions
from ckptd.core.elastic.rebalance_policy import TimesConfig

__all__ = ["CASES", "work"]

LAYERS = {"moe": 2}


class Model(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate, self.moe = nn.Linear(2, 2), experts

    def forward(self, tokens: Tensor) -> Tensor:
        weights, chosen = self.gate(tokens).softmax(-1).topk(1)
        found: Tensor = self.moe(tokens, chosen, weights)
        return found


def make(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Linear(2, 2)


def named(name: str, rank: int) -> RunOptions:
    return RunOptions(name=name, job="j", rank=rank, world_size=2)


def begun(rank: int, **options: Any) -> ElasticJob:
    layers, slots = options.pop("layers", LAYERS), options.pop("slots", 2)
    run = options.pop("run", None) or named("r", rank)
    return ElasticJob(layers, slots=slots, run=run, daemon=None, placement=PlacementOptions(**options))


def trained(rank: int) -> tuple[ElasticJob, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    job = begun(rank)
    model = Model(job.layer("moe", make))
    return job, model, torch.optim.SGD(model.parameters(), lr=0.1)


def other_runs(rank: int) -> None:
    begun(rank, run=named(f"run-{rank}", rank))


def other_experts(rank: int) -> None:
    begun(rank, layers={"moe": 2 + rank})


def no_slot(rank: int) -> None:
    begun(rank, slots=2 - 2 * rank)


def half_a_slot(rank: int) -> None:
    begun(rank, slots=2.5 if rank else 2)


def true_slots(rank: int) -> None:
    begun(rank, slots=bool(rank) or 2)


def text_threshold(rank: int) -> None:
    begun(rank, threshold="2")


def text_straggler(rank: int) -> None:
    begun(rank, max_straggler="1.1" if rank else 1.1)


def bad_name(rank: int) -> None:
    begun(rank, run="a/b" if rank else None)


def too_few_slots(rank: int) -> None:
    begun(rank, layers={"moe": 9})


def expert_fails(rank: int) -> None:
    def fails(number: int) -> nn.Module:
        if rank:
            raise OSError(f"no weights for expert {number}")
        return make(number)

    begun(rank).layer("moe", fails)


def without_layer(rank: int) -> None:
    job, _, _ = trained(rank)
    model = nn.Linear(2, 2)
    job.checkpointer(model, torch.optim.SGD(model.parameters(), lr=0.1))


def steps_too_soon(rank: int) -> None:
    job, _, _ = trained(rank)
    next(job.steps(3))


def no_layers(rank: int) -> None:
    begun(rank, layers=None if rank else LAYERS)


def other_times(rank: int) -> None:
    begun(rank, when=TimesConfig() if rank else None)


def no_total(rank: int) -> None:
    job, model, optimizer = trained(rank)
    job.checkpointer(model, optimizer)
    next(job.steps(None if rank else 3))  # type: ignore[arg-type]


def other_totals(rank: int) -> None:
    job, model, optimizer = trained(rank)
    job.checkpointer(model, optimizer)
    next(job.steps(3 + rank))


def given_option(rank: int) -> None:
    job, model, optimizer = trained(rank)
    options: dict[str, Any] = {"snapshots": SnapshotOptions(window=4)} if rank else {}
    job.checkpointer(model, optimizer, **options)


def no_state_dict(rank: int) -> None:
    job, model, optimizer = trained(rank)
    job.checkpointer(model, optimizer, {"data": object()} if rank else {"data": optimizer})  # type: ignore[dict-item]


def own_loads(rank: int) -> None:
    job, model, optimizer = trained(rank)
    job.checkpointer(model, optimizer, {"ckptd.loads": optimizer})


def closed_twice(rank: int) -> None:
    job, model, optimizer = trained(rank)
    job.checkpointer(model, optimizer)
    assert list(job.steps(2)) == [0, 1]
    job.close()
    job.close()


CASES: dict[str, Callable[[int], None]] = {
    work.__name__: work
    for work in (
        other_runs,
        other_experts,
        no_slot,
        half_a_slot,
        true_slots,
        text_threshold,
        text_straggler,
        bad_name,
        too_few_slots,
        expert_fails,
        without_layer,
        steps_too_soon,
        no_layers,
        other_times,
        no_total,
        other_totals,
        given_option,
        no_state_dict,
        own_loads,
        closed_twice,
    )
}


def work(rank: int, folder: str) -> None:
    told = {}
    for name, case in CASES.items():
        try:
            case(rank)
        except Exception as error:  # noqa: BLE001 - it is what the test wants to see
            told[name] = f"{type(error).__name__}: {error}"
        else:
            told[name] = ""
        Path(folder, f"{rank}.json").write_text(json.dumps(told))
