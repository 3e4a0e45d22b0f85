"""A training with DeepSpeed through Accelerate, or through transformers' ``Trainer``, that kills itself: two ranks
on CPUs, with gloo.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.e2e.lives import join
from tests.e2e.program import Losses, life_parser

os.environ.setdefault("DS_ACCELERATOR", "cpu")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import deepspeed

from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DeepSpeedPlugin,
    DummyOptim,
    DummyScheduler,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)
from transformers import Trainer, TrainerCallback, TrainingArguments, training_args

from ckptd.client import RunOptions
from ckptd.client.frameworks.accelerate import checkpointer
from ckptd.client.frameworks.huggingface import CkptdCallback
from tests.habits.deepspeed_jobs import LENGTH, VOCABULARY, Net, final_state

BATCH, MICRO_BATCHES = 2, 3


class Rows(Dataset[dict[str, Tensor]]):
    """44 samples: 11 batches of each rank in an epoch, so that its last update has a micro-batch less."""

    def __init__(self) -> None:
        self._texts = torch.randint(
            VOCABULARY, (11 * 2 * BATCH, LENGTH), generator=torch.Generator().manual_seed(3)
        )

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self._texts[index]}


class Model(Net):
    """As the Trainer takes it.

    Args:
        frozen: the first weights are not trained, as with adapters.
    """

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.embed.requires_grad_(not frozen)

    def forward(self, tokens: Tensor) -> Any:
        return {"loss": super().forward(tokens)}


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "zero_optimization": {"stage": args.stage},
        "gradient_clipping": 0.5,
    }
    if args.configured or args.hybrid:
        adam = {"lr": "auto", "weight_decay": "auto", "torch_adam": True}
        found["optimizer"] = {"type": "AdamW", "params": adam}
    if args.configured:
        names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
        found["scheduler"] = {"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto")}
    if args.offload:
        found["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        found["zero_force_ds_cpu_optimizer"] = False  # or it compiles one
    if args.precision == "bf16":
        found["bf16"] = {"enabled": True}
    return found


def configure(args: argparse.Namespace) -> dict[str, Any] | None:
    """What a program passes; None: ``accelerate launch`` tells the processes by their environment."""
    if not args.environment:
        return config_of(args)
    file = args.out.with_suffix(".json")
    file.write_text(json.dumps(config_of(args)))
    os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    return None


def groups_of(net: Net) -> list[dict[str, Any]]:
    decayed = [p for p in net.parameters() if p.ndim > 1 and p.requires_grad]
    others = [p for p in net.parameters() if p.ndim <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def seed_all(seed: int) -> None:
    for each in (random.seed, np.random.seed, torch.manual_seed):
        each(seed)


def through_accelerate(args: argparse.Namespace) -> dict[str, Any]:
    config = configure(args)
    accelerator = Accelerator(
        deepspeed_plugin=None if config is None else DeepSpeedPlugin(hf_ds_config=config),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=MICRO_BATCHES),
        # On a CPU Accelerate finds no backend.
        kwargs_handlers=[InitProcessGroupKwargs(backend=args.backend)],
    )
    net, losses = Model(args.frozen), Losses()
    if args.configured:
        optimizer: Any = DummyOptim(net.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler: Any = DummyScheduler(optimizer, warmup_num_steps=6, total_num_steps=80)
    else:
        optimizer = torch.optim.AdamW(groups_of(net), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    loader: Any = DataLoader(Rows(), batch_size=BATCH, shuffle=True)
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    seed_all(args.seed + args.rank)
    ckpt = None
    steps: Iterable[int] = range(args.total)
    batches: Any = (batch for _ in range(args.total) for batch in loader)
    if args.daemon:
        # A scheduler of DeepSpeed's is the engine's.
        state: dict[str, Any] = {"losses": losses} | ({} if args.configured else {"scheduler": scheduler})
        ckpt = checkpointer(
            accelerator,
            net,
            optimizer,
            state,
            run=RunOptions(job="habits", name=args.run),
            daemon=args.daemon,
        )
        batches, steps = ckpt.batches(loader), ckpt.steps(args.total)

    def micro_step(step: int) -> bool:
        batch = next(batches)  # before accumulate(), which asks whether it is the last one of its epoch
        with accelerator.accumulate(net):
            loss = net(**batch)["loss"]
            if step == args.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.values.append(float(loss))
        return bool(accelerator.sync_gradients)

    for step in steps:
        while not micro_step(step) and args.updates:
            pass
    if ckpt is not None:
        print(ckpt.describe(), ckpt.stats())  # noqa: T201
        ckpt.close()
    found = final_state(net, losses.values)
    found["lr_scheduler"] = scheduler.state_dict()
    found["accelerator"] = accelerator.step
    return found


class Killer(TrainerCallback):  # type: ignore[misc]
    """Kills this process in a step."""

    def __init__(self, at: int) -> None:
        self._at = at

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def through_trainer(args: argparse.Namespace) -> dict[str, Any]:
    config = configure(args)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend=args.backend)  # on a CPU Accelerate finds no backend
    if config is not None:
        del os.environ["ACCELERATE_USE_DEEPSPEED"]
    training_args.is_torch_bf16_gpu_available = lambda: True  # the CPU multiplies them, too
    options = TrainingArguments(
        output_dir=str(args.out.parent / (args.run or "plain")),
        deepspeed=config,
        accelerator_config={"use_configured_state": True},
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=MICRO_BATCHES,
        max_grad_norm=0.5,
        max_steps=args.total,
        learning_rate=1e-2,
        weight_decay=0.1,
        warmup_steps=6,
        lr_scheduler_type="cosine",
        bf16=args.precision == "bf16",
        logging_steps=1,
        save_strategy="steps" if args.checkpoints else "no",
        save_steps=5,
        report_to=[],
        seed=args.seed,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    callbacks: list[Any] = [Killer(args.kill_at)]
    if args.daemon:
        callbacks.append(CkptdCallback(run=RunOptions(job="habits", name=args.run), daemon=args.daemon))
    torch.manual_seed(7)
    trainer = Trainer(model=Model(args.frozen), args=options, train_dataset=Rows(), callbacks=callbacks)
    seed_all(args.seed + args.rank)
    trainer.train(resume_from_checkpoint=any(Path(options.output_dir).glob("checkpoint-*")) or None)
    if args.daemon:
        print(callbacks[-1].checkpointer.describe())  # noqa: T201
    found = final_state(trainer.model_wrapped, [])
    found["lr_scheduler"] = trainer.lr_scheduler.state_dict()
    found["log"] = [
        {k: v for k, v in entry.items() if "time" not in k and "per_second" not in k}
        for entry in trainer.state.log_history
    ]
    found["state"] = [trainer.state.global_step, trainer.state.epoch, trainer.state.total_flos]
    return found


def main(argv: Sequence[str]) -> None:
    parser = life_parser()
    parser.add_argument("--through", choices=["accelerate", "trainer"], required=True)
    parser.add_argument("--total", type=int, default=16)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--configured", action="store_true", help="optimizer and scheduler are DeepSpeed's")
    parser.add_argument("--hybrid", action="store_true", help="only the optimizer is")
    parser.add_argument("--checkpoints", action="store_true", help="the Trainer's own, too")
    parser.add_argument("--frozen", action="store_true", help="some weights are not trained")
    parser.add_argument("--environment", action="store_true", help="as with `accelerate launch`")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--no-backend", dest="backend", action="store_const", const=None, default="gloo")
    parser.add_argument("--updates", action="store_true", help="a step is an update, not a micro-batch")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    join(args.rank, args.port)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(7)  # the weights, which both ranks make alike
    try:
        found = (through_accelerate if args.through == "accelerate" else through_trainer)(args)
        torch.save(found, args.out)
    finally:
        dist.destroy_process_group()
