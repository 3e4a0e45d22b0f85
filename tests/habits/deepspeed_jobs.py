"""A training with DeepSpeed that kills itself: two ranks on CPUs, with gloo."""

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
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.e2e.lives import join
from tests.e2e.program import Losses, life_parser, optimizer_state

os.environ.setdefault("DS_ACCELERATOR", "cpu")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import deepspeed

from ckptd.client import RunOptions
from ckptd.client.frameworks.deepspeed import checkpointer
from ckptd.client.rng_state import capture_rng

WIDTH, VOCABULARY, LENGTH, MICRO_BATCHES = 32, 64, 8, 2


class Net(nn.Module):
    """Weights with and without decay, of odd sizes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH + 1), nn.Linear(2 * WIDTH + 1, WIDTH)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = self.norm(hidden + self.down(self.drop(torch.relu(self.up(hidden)))))
        logits = self.head(hidden).float().flatten(0, 1)
        return nn.functional.cross_entropy(logits, tokens.roll(-1, 1).flatten())


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "zero_optimization": {"stage": args.stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.5,
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 6, "total_num_steps": 40}},
        "steps_per_print": 10**9,
    }
    if args.precision == "bf16":
        found["bf16"] = {"enabled": True}
    return found


def build(args: argparse.Namespace) -> Any:
    """The engine."""
    net = Net()
    decayed = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim <= 1]
    groups: Any = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(net.parameters() if args.one_group else groups, lr=1e-2)
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config_of(args))[0]


def samples(rank: int) -> DataLoader[tuple[Tensor, ...]]:
    texts = torch.randint(VOCABULARY, (52, LENGTH), generator=torch.Generator().manual_seed(rank))
    return DataLoader(TensorDataset(texts), batch_size=4, shuffle=True)


def final_state(engine: Any, losses: list[float]) -> dict[str, Any]:
    found: dict[str, Any] = {f"param/{n}": p.detach().clone() for n, p in engine.module.named_parameters()}
    found |= optimizer_state(getattr(engine.optimizer, "optimizer", engine.optimizer))
    counters = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
    found["counters"] = {name: getattr(engine, name) for name in counters}
    found["scheduler"] = None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()
    found["losses"] = losses
    found["rng"] = capture_rng()
    return found


def train(args: argparse.Namespace) -> None:
    engine, loader, losses = build(args), samples(args.rank), Losses()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(args.seed + args.rank)
    ckpt = None
    steps: Iterable[int] = range(args.total)
    batches: Iterator[Sequence[Tensor]] = (batch for _ in range(args.total) for batch in loader)
    if args.daemon:
        ckpt = checkpointer(
            engine, {"losses": losses}, run=RunOptions(job="habits", name=args.run), daemon=args.daemon
        )
        batches, steps = ckpt.batches(loader), ckpt.steps(args.total)
    for step in steps:
        for micro in (step % MICRO_BATCHES,) if args.micro_steps else range(MICRO_BATCHES):
            loss = engine(next(batches)[0])
            engine.backward(loss)
            if step == args.kill_at and micro == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            engine.step()
            losses.values.append(float(loss))
    if ckpt is not None:
        print(ckpt.describe())  # noqa: T201
        ckpt.close()
    torch.save(final_state(engine, losses.values), args.out)


def main(argv: Sequence[str]) -> None:
    parser = life_parser()
    parser.add_argument("--total", type=int, default=14)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--one-group", action="store_true")
    parser.add_argument("--micro-steps", action="store_true", help="a step is a micro-batch, not an update")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    join(args.rank, args.port)
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(7)  # the weights, which both ranks make alike
    try:
        train(args)
    finally:
        dist.destroy_process_group()
