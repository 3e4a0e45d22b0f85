"""Train in torchtitan's manner: a config of dataclasses, parallel dims to a DeviceMesh, components
built one by one, then the loop.

ckptd is three lines: the import, the ``Checkpointer`` among the components, and the ``for`` of the
loop. There is no load, no save and no ``if resuming``. Each rank captures its own shards; all come
back to the same step.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2
    --max-restarts 3 -m -- examples.torchtitan_style.train --fault.at_step 15

(Without the variable, torchrun's next life finds gloo's addresses of the life before, with torch
2.13.) Rank 1 kills itself in step 15 (once). torchrun starts both ranks again, which go on at the
bits that they would have had without it: with ``--output.folder`` the final states of two runs,
with and without the fault, can be compared.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from ckptd.client import Checkpointer, RunOptions, SnapshotOptions
from ckptd.demo.data import ByteLoader, load_corpus
from examples.torchtitan_style.config import JobConfig, parse_config
from examples.torchtitan_style.model import Transformer
from examples.torchtitan_style.parallelize import ParallelDims, parallelize

__all__ = ["Trainer", "main"]


class Trainer:
    """Everything that a training consists of; a DTensor's local shard is what this rank holds of it."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self.rank, world_size = dist.get_rank(), dist.get_world_size()
        self.parallel_dims = ParallelDims.of(config.parallelism, world_size)
        self.model = self.build_model()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.optimizer.lr,
            weight_decay=config.optimizer.weight_decay,
        )
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.lr_factor)
        self.loader = ByteLoader(
            load_corpus(512 * 1024),
            batch_size=config.training.local_batch_size,
            context=config.model.max_seq_len,
            seed=1 + self.rank,  # each data-parallel rank has an order of its own
        )
        self.ckpt = Checkpointer(
            self.model,
            self.optimizer,
            {"lr_scheduler": self.lr_scheduler, "data": self.loader},
            run=RunOptions(
                job=config.checkpoint.job,
                name=config.checkpoint.run,
                topology=str(self.parallel_dims),
            ),
            daemon=None if config.checkpoint.daemon == "none" else config.checkpoint.daemon,
            snapshots=SnapshotOptions(window=config.checkpoint.window or None),
        )

    def build_model(self) -> Transformer:
        torch.manual_seed(self.config.training.seed)
        model = Transformer(self.config.model)
        parallelize(model, self.parallel_dims.build_mesh("cpu"))
        torch.manual_seed(1000 + self.rank)  # dropout differs between ranks
        return model

    def lr_factor(self, step: int) -> float:
        """Linear warm-up, then linear decay, as in torchtitan."""
        steps, warmup = self.config.training.steps, self.config.optimizer.warmup_steps
        return min((step + 1) / warmup, max(steps - step, 1) / max(steps - warmup, 1))

    def train(self) -> None:
        for step in self.ckpt.steps(self.config.training.steps):
            loss, norm = self.train_step(step)
            if self.rank == 0:
                kind = "replay" if self.ckpt.replaying else "train"
                print(f"{kind} step {step}: loss {loss:.4f}, grad norm {norm:.4f}", flush=True)

    def train_step(self, step: int) -> tuple[float, float]:
        """One optimizer step: the mean loss over all ranks and micro-batches, and the gradients' norm."""
        parts = self.config.training.gradient_accumulation_steps
        total = torch.zeros(())
        for part in range(parts):
            cast(FSDPModule, self.model).set_requires_gradient_sync(part == parts - 1)
            loss = self.forward_backward(*next(self.loader)) / parts
            total += loss
        self.break_down(step)
        norm: Any = clip_grad_norm_(self.model.parameters(), self.config.training.max_norm)
        self.optimizer.step()
        self.lr_scheduler.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size(), float(norm.full_tensor())

    def forward_backward(self, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        logits_BTV = self.model(tokens_BT)
        loss = cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())
        share: Any = loss / self.config.training.gradient_accumulation_steps
        share.backward()
        return loss.detach()

    def break_down(self, step: int) -> None:
        fault = self.config.fault
        if (self.rank, step) == (fault.rank, fault.at_step) and self.ckpt.resumed_from is None:
            os.kill(os.getpid(), signal.SIGKILL)

    def final_state(self) -> dict[str, Any]:
        """All that a further step of this rank would depend on."""
        found: dict[str, Any] = {f"model/{n}": _local(p) for n, p in self.model.named_parameters()}
        for name, param in self.model.named_parameters():
            state = self.optimizer.state[param]
            found.update({f"optim/{k}/{name}": _local(v) for k, v in state.items()})
        found["lr"] = self.lr_scheduler.state_dict()
        found["data"] = self.loader.state_dict()
        found["rng"] = torch.get_rng_state()
        return found


def _local(tensor: Any) -> Tensor:
    own: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own.detach().clone()


def main(argv: Sequence[str] | None = None) -> None:
    config = parse_config(argv)
    torch.set_num_threads(1)  # two ranks share a small machine; another number changes the bits of a sum
    dist.init_process_group("gloo")
    trainer = Trainer(config)
    trainer.train()
    if config.output.folder:
        torch.save(trainer.final_state(), Path(config.output.folder) / f"rank{trainer.rank}.pt")
    trainer.ckpt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
