"""FSDP2: ``fully_shard`` per block and at the root; parameters and optimizer state are DTensors,
each rank holds its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.e2e.cases import Data, Job, Model
from tests.e2e.parallel.registry import Family, build, job_of
from tests.e2e.precision_cases import BlockAdam

__all__ = ["CASES"]

CASES = Family("fsdp")

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3, foreach=True)


def sharded(model: Model, **options: Any) -> Model:
    """Each block by itself, and the rest at the root."""
    if "mesh" not in options:
        shape = (dist.get_world_size(),)
        options["mesh"] = init_device_mesh(Data.device, shape, mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def fsdp_job(seed: int, optimizer: Optimizer = adamw, *, fused: bool = True, **options: Any) -> Job:
    model = sharded(build(seed, fused=fused), **options)
    return job_of(model, optimizer([p for p in model.parameters() if p.requires_grad]))


@CASES.case()
def plain(seed: int) -> Job:
    """Fused experts: two of four on each rank. The embedding (31 rows) and the norm's clipping are
    uneven, too.
    """
    return fsdp_job(seed)


@CASES.case()
def mixed_precision(seed: int) -> Job:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp_job(seed, mp_policy=policy)


@CASES.case()
def kept_unsharded(seed: int) -> Job:
    return fsdp_job(seed, reshard_after_forward=False)


@CASES.case(ranks=3)
def empty_shards(seed: int) -> Job:
    """Three ranks and a parameter of two rows: the last rank holds nothing of it; four experts are
    cut 2, 2, 0.
    """
    model = build(seed, fused=True)
    model.head = nn.Linear(model.head.in_features, model.head.out_features)
    for block in model.blocks:
        block.register_parameter("pair", nn.Parameter(torch.ones(2, 1)))
        block.register_forward_hook(lambda m, a, out: out * m.pair.mean())
    model = sharded(model)
    return job_of(model, adamw(model.parameters()))


@CASES.case()
def listed_experts(seed: int) -> Job:
    """A ``ModuleList`` of experts; which get tokens differs by rank and step."""
    return fsdp_job(seed, fused=False)


@CASES.case()
def adamw_for_loop(seed: int) -> Job:
    return fsdp_job(seed, lambda ps: torch.optim.AdamW(ps, lr=3e-3, foreach=False))


@CASES.case()
def adamw_fused(seed: int) -> Job:
    return fsdp_job(seed, lambda ps: torch.optim.AdamW(ps, lr=3e-3, fused=True))


@CASES.case()
def sgd_momentum(seed: int) -> Job:
    return fsdp_job(seed, lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9))


@CASES.case(quick=True)
def moments_in_blocks(seed: int) -> Job:
    """DTensors of FP8 codes and scales, as torchao's 8-bit optimizers keep for sharded parameters."""
    return fsdp_job(seed, lambda ps: BlockAdam(ps, 3e-3))


@CASES.case()
def frozen_parameters(seed: int) -> Job:
    """Fine-tuning: the embedding and one block's router are not trained."""
    model = build(seed, fused=True)
    model.embed.weight.requires_grad_(False)
    for name, param in model.named_parameters():
        if name.startswith("blocks.0.moe.router"):
            param.requires_grad_(False)
    model = sharded(model)
    return job_of(model, adamw(p for p in model.parameters() if p.requires_grad))


@CASES.case()
def checkpointed(seed: int) -> Job:
    model = build(seed, fused=True)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    model = sharded(model)
    return job_of(model, adamw(model.parameters()))


@CASES.case(ranks=3)
def muon(seed: int) -> Job:
    """Matrices by Muon, which multiplies sharded matrices: it communicates within ``step()`` for
    each that has a gradient.

    The rest by AdamW. Shards are uneven, so the ranks' schedules freeze different operators.
    """
    model = sharded(build(seed, fused=True))
    params = list(model.parameters())
    matrices = [p for p in params if p.ndim == 2]
    rest = [p for p in params if p.ndim != 2]
    return job_of(model, [torch.optim.Muon(matrices, lr=0.02), adamw(rest)])


@CASES.case()
def second_dimension(seed: int) -> Job:
    """Fused experts are sharded along dimension 1: each rank has rows of every expert."""
    from torch.distributed.tensor import Shard

    def place(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.ndim == 3 else None

    return fsdp_job(seed, shard_placement_fn=place)


@CASES.case(ranks=4, quick=True)
def hsdp(seed: int) -> Job:
    """Two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fsdp_job(seed, mesh=mesh)
