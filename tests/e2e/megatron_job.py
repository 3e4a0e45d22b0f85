"""A training with Megatron-Core that kills itself: a small GPT of experts, as two ranks, on the CPU."""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from tests.e2e.lives import join
from tests.e2e.megatron_on_cpu import install
from tests.e2e.patience import let_memory_come, let_them_come
from tests.e2e.program import Losses, life_parser, optimizer_state

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says what it does not find: apex, Transformer Engine
    install()
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

from ckptd.client import Checkpointer, LayoutOptions, RunOptions, SnapshotOptions
from ckptd.client.frameworks.megatron import checkpointer
from ckptd.client.rng_state import capture_rng

LENGTH, VOCABULARY, EXPERTS, MICRO_BATCHES = 12, 64, 4, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def experts_of(args: argparse.Namespace) -> int | None:
    """With tensor parallelism experts need sequence parallelism, which torch's LayerNorm does not have."""
    return EXPERTS if args.tensor_parallel == 1 else None


def config_of(args: argparse.Namespace) -> TransformerConfig:
    dtype = DTYPES[args.precision]
    return TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=experts_of(args),
        moe_router_topk=2,
        moe_token_dispatcher_type="allgather",
        moe_aux_loss_coeff=1e-2 if experts_of(args) else 0.0,
        expert_model_parallel_size=args.expert_parallel,
        tensor_model_parallel_size=args.tensor_parallel,
        pipeline_model_parallel_size=args.pipeline,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=args.precision == "bf16",
        fp16=args.precision == "fp16",
        attention_dropout=0.1,
        hidden_dropout=0.1,
        add_bias_linear=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=True,
    )


def build(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """The wrapped model, its optimizer, and the scheduler."""
    config, dtype = config_of(args), DTYPES[args.precision]
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(
            num_experts=experts_of(args), moe_grouped_gemm=False, normalization="LayerNorm"
        ),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).to(dtype)
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=args.distributed_optimizer,
        ),
        model,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer=args.optimizer,
            lr=3e-3,
            min_lr=1e-4,
            weight_decay=0.01,
            params_dtype=dtype,
            bf16=config.bf16,
            fp16=config.fp16,
            initial_loss_scale=2.0**16,
            loss_scale_window=3,
            use_distributed_optimizer=args.distributed_optimizer,
            clip_grad=0.5,
        ),
        [wrapped],
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=3e-3,
        min_lr=1e-4,
        lr_warmup_steps=4,
        lr_decay_steps=40,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.02,
        wd_incr_steps=40,
        wd_incr_style="linear",
    )
    return wrapped, optimizer, scheduler


def samples() -> DataLoader[tuple[torch.Tensor, ...]]:
    """What this data-parallel rank reads."""
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    texts = torch.randint(VOCABULARY, (28, LENGTH), generator=generator)
    return DataLoader(TensorDataset(texts), batch_size=2, shuffle=True)


def forward_step(batches: Iterator[Sequence[torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
    (tokens,) = next(batches)
    positions = torch.arange(LENGTH).expand_as(tokens)
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not()
    output = model(tokens, positions, mask, labels=tokens.roll(-1, 1))

    def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return output, loss_of


def final_state(model: Any, optimizer: Any, scheduler: Any, losses: list[float]) -> dict[str, Any]:
    found: dict[str, Any] = {f"param/{n}": p.detach().clone() for n, p in model.module.named_parameters()}
    found.update({f"buffer/{n}": b.clone() for n, b in model.module.named_buffers()})
    for number, part in enumerate(optimizer.chained_optimizers):
        found.update({f"{number}/{name}": v for name, v in optimizer_state(part.optimizer).items()})
        if getattr(part, "grad_scaler", None) is not None:
            found[f"scaler/{number}"] = part.grad_scaler.state_dict()
    found["scheduler"], found["losses"] = scheduler.state_dict(), losses
    found["rng"], found["tracker"] = capture_rng(), get_cuda_rng_tracker().get_states()
    return found


def train(args: argparse.Namespace) -> None:
    model, optimizer, scheduler = build(args)
    loader, losses = samples(), Losses()
    ckpt: Checkpointer | None = None
    steps: Iterable[int] = range(args.total)
    batches: Iterator[Sequence[torch.Tensor]] = (batch for _ in range(args.total) for batch in loader)
    if args.daemon:
        ckpt = checkpointer(
            [model],
            optimizer,
            {"scheduler": scheduler, "losses": losses},
            run=RunOptions(job="e2e", name=args.run),
            daemon=args.daemon,
            snapshots=SnapshotOptions(policy=args.policy, window=4 if args.policy == "sliding" else None),
            layout=LayoutOptions(capture_once=not args.capture_each),
        )
        batches, steps = ckpt.batches(loader), ckpt.steps(args.total)
    schedule = get_forward_backward_func()
    for step in steps:
        if ckpt is not None and step < args.kill_at and ckpt.resumed_from is None:
            let_memory_come(ckpt)
            let_them_come(ckpt)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        told = schedule(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=[model],
            num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        finalize_model_grads([model])
        if step == args.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        done, _, _ = optimizer.step()
        if done:
            scheduler.step(increment=1)
        losses.values.append(float(sum(part["loss"] for part in told)) if told else -1.0)
    if ckpt is not None:
        print(ckpt.describe())  # noqa: T201
        ckpt.close()
    torch.save(final_state(model, optimizer, scheduler, losses.values), args.out)


def main(argv: Sequence[str]) -> None:
    parser = life_parser()
    parser.add_argument("--total", type=int, default=14)
    parser.add_argument("--policy", default="sliding")
    parser.add_argument("--precision", default="bf16", choices=DTYPES)
    parser.add_argument("--optimizer", default="adam", choices=["adam", "sgd"])
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--capture-each", action="store_true")
    for axis in ("expert-parallel", "tensor-parallel", "pipeline"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)  # the stand-in has one generator, not two
    join(args.rank, args.port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        args.tensor_parallel, args.pipeline, expert_model_parallel_size=args.expert_parallel
    )
    for seed in (random.seed, np.random.seed, torch.manual_seed, model_parallel_cuda_manual_seed):
        seed(args.seed)
    try:
        train(args)
    finally:
        dist.destroy_process_group()
