"""Lightning's ``Trainer`` with one callback of ckptd's, over data that is augmented in workers, or
is a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ckptd.client.frameworks.lightning import CkptdCallback
from tests.habits.leaves import names_of
from tests.habits.life import Life
from tests.habits.pipelines import BATCH, WIDTH, Augmented, Stream

__all__ = ["main"]


class Module(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, life: Life, callback: CkptdCallback) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 12), nn.Dropout(0.1), nn.Linear(12, WIDTH))
        self._told = [(life, callback)]
        self._begun = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = batch["points"] if isinstance(batch, dict) else batch
        life, callback = self._told[0]
        if not self._begun and callback.checkpointer is not None:
            self._begun = True
            life.follow(callback.checkpointer)
        life.top(self.trainer.global_step)
        life.batch(batch)
        loss: Tensor = (self.layers(batch) - batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(argv: Sequence[str]) -> None:
    life = Life(argv)
    callback = CkptdCallback(**life.options())
    module = Module(life, callback)
    trainer = pl.Trainer(
        max_steps=life.steps,
        accelerator="cpu",
        devices=life.ranks,
        strategy="ddp" if life.ranks > 1 else "auto",
        callbacks=[callback] if life.protected else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    workers = 2 if "workers" in life.row else 0
    stream = "stream" in life.row
    data: Any = Stream() if stream else Augmented()
    if "datasets" in life.row:
        from tests.habits.hub_datasets import hub_data

        data = hub_data("stream" if stream else "indexed")
    loader: Any = DataLoader(
        data,
        BATCH,
        shuffle=not stream,
        num_workers=workers,
        persistent_workers="persistent" in life.row,
    )
    trainer.fit(module, loader)
    final = {
        "model": module.state_dict(),
        "optimizer": trainer.optimizers[0],
        "progress": trainer.fit_loop.epoch_progress.state_dict(),
    }
    life.end(final, names_of(model=module))
