"""What each of four ranks does with ``ElasticExperts``; what came of it goes to files, which the tests read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ckptd.client.elastic.layer.elastic_layer as layer_module
from ckptd.client.elastic import ElasticExperts
from ckptd.client.elastic.layer.token_routing import Order, spread
from ckptd.errors import CorruptionError
from tests.client.elastic.mixtures import WIDTH, Batch, Block, Case, batches, descend, expert
from tests.client.elastic.ranks import Found, elastic_layer, told, work_through
from tests.long import LONG

__all__ = ["CASES", "SPREAD", "run_all"]

SPREAD = Case([[2, 1, 0, 1, 0], [0, 1, 1, 1, 0], [1, 0, 0, 1, 1], [0, 0, 0, 1, 1]], [7, 5, 9, 6])

CASES = {
    "asymmetric": SPREAD,
    "mean": Case(SPREAD.replicas, SPREAD.tokens, reduce="mean"),
    "nodes": Case(SPREAD.replicas, SPREAD.tokens, nodes=[0, 1, 0, 1]),
    "a rank without tokens": Case(SPREAD.replicas, [6, 0, 11, 3]),
    "tokens on one rank": Case(SPREAD.replicas, [0, 0, 0, 13]),
    "no tokens at all": Case(SPREAD.replicas, [0, 0, 0, 0]),
    "an expert without tokens": Case(SPREAD.replicas, SPREAD.tokens, shares=[1, 1, 0, 1, 0]),
    "skewed": Case(SPREAD.replicas, [20, 3, 8, 1], shares=[90, 1, 5, 1, 1]),
    "all on one expert": Case(SPREAD.replicas, SPREAD.tokens, choices=1, shares=[0, 1, 0, 0, 0]),
    "a rank without experts": Case([[1, 1, 1], [0, 0, 0], [0, 3, 0], [1, 0, 0]], SPREAD.tokens),
    "more choices": Case(SPREAD.replicas, SPREAD.tokens, choices=4),
    "one expert twice": Case(SPREAD.replicas, SPREAD.tokens, twice=True),
    "gradients on one rank": Case(SPREAD.replicas, SPREAD.tokens, learns=[False, False, True, False]),
    "frozen experts": Case(SPREAD.replicas, SPREAD.tokens, learns=[True, False, False, False], trained=False),
    "inputs without gradients": Case(SPREAD.replicas, SPREAD.tokens, learns=[False] * 4),
    "micro-batches": Case(SPREAD.replicas, SPREAD.tokens, reduce="mean", micro_batches=3),
    "two layers": Case(SPREAD.replicas, SPREAD.tokens, layers=2),
    "two of the ranks": Case([[1, 0, 2], [1, 1, 0]], [5, 8], members=(1, 3)),
    "float32": Case(SPREAD.replicas, SPREAD.tokens, dtype=torch.float32),
    "bfloat16": Case(SPREAD.replicas, SPREAD.tokens, dtype=torch.bfloat16),
}
if LONG:  # DDP and checkpointing import the compiler: seconds on each rank
    CASES["two layers, recomputed"] = Case(SPREAD.replicas, [7, 0, 9, 6], layers=2, checkpointed=True)


def run_all(rank: int, folder: str) -> None:
    """Everything, one after the other; the results of this rank go to ``<folder>/<rank>.pt``."""
    groups = {
        members: dist.new_group(list(members))
        for members in sorted({tuple(case.members) for case in CASES.values()})
    }
    found: Found = {}
    for name, case in CASES.items():
        if rank in case.members:
            group = groups[tuple(case.members)]
            found[name] = [_computed(case, group) for _ in range(2)]
    works = (
        _faults,
        _beside_ddp,
        _converted,
        _training,
        _misuse,
        _refused,
        _bad_inputs,
        _loads,
    )
    work_through(rank, folder, found, works)


def _forward(case: Case, layer: ElasticExperts, batch: Batch) -> Tensor:
    out = batch.tokens
    for _ in range(case.layers):
        arguments = (out, batch.experts, batch.weights)
        out = checkpoint(layer, *arguments, use_reentrant=False) if case.checkpointed else layer(*arguments)
    return out


def _computed(case: Case, group: Any = None, meddle: Callable[[ElasticExperts], None] | None = None) -> Found:
    """Forward, backward and sum."""
    layer = elastic_layer(case, group=group)
    mine = dist.get_rank(group)
    outs, grads = [], []
    for micro_batch in range(case.micro_batches):
        batch = batches(case, micro_batch)[mine]
        out = _forward(case, layer, batch)
        (out * batch.target).sum().backward()
        outs.append(out.detach())
        grads.append((batch.tokens.grad, batch.weights.grad))
    layer.sync_gradients()
    if meddle is not None:
        meddle(layer)
    experts = {
        int(number): [param.grad for param in module.parameters()] for number, module in layer.experts.items()
    }
    return {"outs": outs, "inputs": grads, "experts": experts}


# -- faults that the comparison with the reference must notice -----------------------------------------


def _faults(rank: int) -> Found:
    def again(layer: ElasticExperts) -> None:
        layer._gradients._unsummed = True
        layer.sync_gradients()

    def twice(tokens: Tensor, pairs: Order, choices: int) -> Tensor:
        rows = spread(tokens, pairs, choices)
        return torch.cat([rows[:-1], rows[:1]]) if rank == 0 else rows

    found = {"summed twice": _computed(SPREAD, meddle=again)}
    with patch.object(layer_module, "spread", twice):
        found["sent twice"] = _computed(SPREAD)
    return found


# -- in a model ----------------------------------------------------------------------------------------


def _beside_ddp(rank: int) -> Found:
    """A model whose gate and dense part DDP averages, and whose experts it leaves out."""
    model = Block(elastic_layer(CASES["mean"]))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, [f"experts.{name}" for name, _ in model.experts.named_parameters()]
    )
    wrapped = DistributedDataParallel(model)
    batch = batches(CASES["mean"])[rank]
    (wrapped(batch.tokens) * batch.target).sum().backward()
    model.experts.sync_gradients()
    return {name: param.grad for name, param in model.named_parameters()}


def _converted(rank: int) -> dict[int, Any]:
    """Made in float32, trained in float64."""
    case = CASES["float32"]
    layer = elastic_layer(case).double()
    batch = batches(SPREAD)[rank]
    (layer(batch.tokens, batch.experts, batch.weights) * batch.target).sum().backward()
    layer.sync_gradients()
    return {int(n): [p.grad for p in m.parameters()] for n, m in layer.experts.items()}


# -- training ------------------------------------------------------------------------------------------


def _training(rank: int) -> Found:
    """Three steps; the replicas stay equal."""
    layer = elastic_layer(SPREAD)
    for step in range(3):
        batch = batches(SPREAD, step)[rank]
        layer.zero_grad(set_to_none=step < 2)
        (layer(batch.tokens, batch.experts, batch.weights) * batch.target).sum().backward()
        layer.sync_gradients()
        descend(layer)
    layer.check_replicas()
    with torch.no_grad():
        trained = copy.deepcopy({int(n): list(m.parameters()) for n, m in layer.experts.items()})
        for number, module in layer.experts.items():
            if number == "3" and rank == 2:
                next(module.parameters())[0, 0] += 1
    try:
        layer.check_replicas()
    except CorruptionError as error:
        return {"weights": trained, "damaged": str(error)}
    return {"weights": trained, "damaged": ""}


def _misuse(rank: int) -> Found:
    batch = batches(SPREAD)[rank]

    def step(layer: ElasticExperts) -> None:
        layer(batch.tokens, batch.experts, batch.weights).sum().backward()

    def not_summed() -> None:
        layer = elastic_layer(SPREAD)
        step(layer)
        step(layer)  # two micro-batches may add up
        descend(layer)
        layer.zero_grad()
        step(layer)

    def not_zeroed() -> None:
        layer = elastic_layer(SPREAD)
        step(layer)
        layer.sync_gradients()
        step(layer)

    def zeroed_in_place() -> None:
        layer = elastic_layer(SPREAD)
        step(layer)
        layer.sync_gradients()
        layer.zero_grad(set_to_none=False)
        step(layer)

    layer = elastic_layer(SPREAD)
    step(layer)
    layer.sync_gradients()
    summed = _gradients(layer)
    layer.sync_gradients()
    return {
        "not summed": told(not_summed),
        "not zeroed": told(not_zeroed),
        "zeroed in place": told(zeroed_in_place),
        "second call": (summed, _gradients(layer)),
    }


def _gradients(layer: ElasticExperts) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in layer.parameters()]


# -- what is refused -----------------------------------------------------------------------------------


def _refused(rank: int) -> dict[str, str]:
    """Layers that cannot be made; one rank is wrong, all are told."""
    two = [[1, 0], [0, 1], [1, 1], [0, 1]]

    def experts(of: list[list[int]], seed: int = 0) -> dict[int, nn.Module]:
        return {
            number: expert(number + (seed if rank == 2 else 0), torch.float64)
            for number, replicas in enumerate(of[rank])
            if replicas
        }

    def made(replicas: Any, modules: Any, **options: Any) -> str:
        return told(lambda: ElasticExperts(modules, replicas, **options))

    other = [[1, 0], [0, 1], [1, 1], [0, 2]]
    wide = experts(two)
    if rank == 2:
        wide[1] = nn.Linear(WIDTH, WIDTH).double()
    lacking = experts(two)
    if rank == 1:
        lacking = {0: expert(0, torch.float64)}
    shared = experts(two)
    if rank == 2:
        shared = {0: shared[0], 1: shared[0]}
    unholdable = [[1, 0, 0], [0, 0, 1], [1, 0, 1], [0, 0, 1]]
    return {
        "no holder": made(unholdable, experts(unholdable)),
        "other placement": made(other if rank == 3 else two, experts(two)),
        "other nodes": made(two, experts(two), nodes=[0, 0, 1, 1 if rank else 2]),
        "other reduce": made(two, experts(two), reduce="sum" if rank == 1 else "mean"),
        "no such reduce": made(two, experts(two), reduce="max" if rank == 1 else "mean"),
        "too few rows": made(two[:3] if rank == 0 else two, experts(two)),
        "floats": made([[1.0]] if rank == 0 else two, experts(two)),
        "too few nodes": made(two, experts(two), nodes=[0]),
        "other modules": made(two, lacking),
        "no modules": made(two, None if rank == 1 else experts(two)),
        "other parameters": made(two, wide),
        "other weights": made(two, experts(two, seed=9)),
        "shared parameter": made(two, shared),
    }


def _bad_inputs(rank: int) -> dict[str, str]:
    """Calls that cannot be computed; one rank brings something else."""
    layer = elastic_layer(SPREAD)
    tokens, experts = torch.zeros(3, WIDTH).double(), torch.zeros(3, 2, dtype=torch.int64)
    weights = torch.ones(3, 2).double()

    def called(*arguments: Tensor) -> str:
        return told(lambda: layer(*(arguments if rank == 1 else (tokens, experts, weights))))

    def without_gradients() -> None:
        with torch.set_grad_enabled(rank != 2):
            layer(tokens, experts, weights)

    return {
        "no such expert": called(tokens, experts + 5, weights),
        "negative": called(tokens, experts - 1, weights),
        "other rows": called(tokens, experts[:2], weights[:2]),
        "float experts": called(tokens, weights, weights),
        "one dimension": called(tokens, experts[:, 0], weights[:, 0]),
        "other weights": called(tokens, experts, weights[:, :1]),
        "three dimensions": called(tokens[None], experts, weights),
        "other width": called(tokens[:, :2], experts, weights),
        "other dtype": called(tokens.float(), experts, weights),
        "without gradients": told(without_gradients),
        "fine afterwards": told(lambda: layer(tokens, experts, weights)),
    }


def _loads(rank: int) -> Found:
    layer = elastic_layer(SPREAD)
    for micro_batch in range(2):
        batch = batches(SPREAD, micro_batch)[rank]
        layer(batch.tokens, batch.experts, batch.weights)
    first = layer.take_loads()
    layer.eval()
    with torch.no_grad():
        layer(batch.tokens, batch.experts, batch.weights)
    return {"loads": torch.from_numpy(first), "evaluated": torch.from_numpy(layer.take_loads())}
