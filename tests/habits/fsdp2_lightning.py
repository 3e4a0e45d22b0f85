"""FSDP2 in Lightning: ``ModelParallelStrategy``, and ``fully_shard`` in ``configure_model``, as
Lightning's pages have it.
"""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from ckptd.client.frameworks.lightning import CkptdCallback
from tests.habits.leaves import names_of
from tests.habits.life import Life
from tests.habits.lightning_fits import Module
from tests.habits.pipelines import BATCH, WIDTH, Augmented

__all__ = ["main"]


class Sharded(Module):
    def configure_model(self) -> None:
        torch.manual_seed(4)  # all ranks shard the same weights
        self.layers = nn.Sequential(nn.Linear(WIDTH, 12), nn.Dropout(0.1), nn.Linear(12, WIDTH))
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.layers, mesh=mesh)


def main(argv: Sequence[str]) -> None:
    life = Life(argv)
    callback = CkptdCallback(**life.options())
    module = Sharded(life, callback)
    trainer = pl.Trainer(
        max_steps=life.steps,
        accelerator="cpu",
        devices=life.ranks,
        strategy=ModelParallelStrategy(
            data_parallel_size=life.ranks, tensor_parallel_size=1, process_group_backend="gloo"
        ),
        callbacks=[callback] if life.protected else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Augmented(), BATCH, shuffle=True))
    assert all(isinstance(p, DTensor) for p in module.parameters())
    final = {
        "model": module.state_dict(),
        "optimizer": trainer.optimizers[0],
        "progress": trainer.fit_loop.epoch_progress.state_dict(),
    }
    life.end(final, names_of(model=module))
