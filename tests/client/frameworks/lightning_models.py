"""Models and a callback for test_lightning.py, which imports this only when a test runs: Lightning
takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ckptd.client.frameworks.lightning import CkptdCallback

__all__ = ["CSVLogger", "CkptdCallback", "Fetching", "Manual", "Model", "Odd", "fit"]


class Model(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.linear(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Manual(Model):
    """Updates twice with each even batch, and not at all with the others. ``told`` is called in each."""

    def __init__(self, told: Callable[[], None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._called = told

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._called()
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2 == 0:
            optimizer = self.optimizers()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
        return loss


class Fetching(Model):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


class Odd(pl.Callback):  # type: ignore[misc]
    """Its state is nothing that a snapshot can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"file": object()}


def fit(model: Any, *callbacks: Any, **options: Any) -> Any:
    trainer = pl.Trainer(
        max_steps=5,
        accelerator="cpu",
        devices=1,
        callbacks=list(callbacks),
        **{"logger": False, **options},
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(torch.arange(12.0).reshape(6, 2), batch_size=2))  # type: ignore[arg-type]
    return trainer
