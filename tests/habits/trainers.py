"""Hugging Face's ``Trainer`` with one callback of ckptd's, over data that is augmented in workers,
or is a stream.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from ckptd.client.frameworks.huggingface import CkptdCallback
from tests.habits.leaves import names_of
from tests.habits.life import Life
from tests.habits.pipelines import BATCH, SAMPLES, WIDTH, Augmented, sample

__all__ = ["main"]


class Rows(Dataset[dict[str, Tensor]]):
    """Augmented samples, as the Trainer takes them."""

    def __init__(self) -> None:
        self._points = Augmented()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"points": self._points[index]}


class Streamed(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for index in range(SAMPLES):
            yield {"points": sample(index) + 0.1 * torch.randn(WIDTH)}


class Model(nn.Module):
    """Tells the life what it trains on."""

    def __init__(self, life: Life) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 12), nn.Dropout(0.1), nn.Linear(12, WIDTH))
        self._told = [life]  # in a list: it is no part of the model

    def forward(self, points: Tensor) -> dict[str, Tensor]:
        self._told[0].batch(points)
        return {"loss": (self.layers(points) - points).square().mean()}


class Tops(TrainerCallback):  # type: ignore[misc]
    def __init__(self, life: Life, callback: CkptdCallback) -> None:
        self._life, self._callback, self._begun = life, callback, False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._begun and self._callback.checkpointer is not None:
            self._begun = True
            self._life.follow(self._callback.checkpointer)
        self._life.top(state.global_step)


def main(argv: Sequence[str]) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    life = Life(argv)
    callback = CkptdCallback(**life.options())
    persistent = "persistent" in life.row
    arguments = TrainingArguments(
        output_dir=str(life.folder),
        per_device_train_batch_size=BATCH,
        max_steps=life.steps,
        seed=torch.initial_seed() % 1000,
        use_cpu=True,
        ddp_backend="gloo" if life.ranks > 1 else None,
        dataloader_num_workers=2 if "workers" in life.row else 0,
        dataloader_persistent_workers=persistent,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    data: Any = Streamed() if "stream" in life.row else Rows()
    if "datasets" in life.row:
        from tests.habits.hub_datasets import hub_data

        data = hub_data("stream" if "stream" in life.row else "indexed")
    callbacks = [Tops(life, callback), callback] if life.protected else [Tops(life, callback)]
    trainer = Trainer(model=Model(life), args=arguments, train_dataset=data, callbacks=callbacks)
    trainer.train()
    final = {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.optimizer,
        "scheduler": trainer.lr_scheduler.state_dict(),
        "step": [trainer.state.global_step, trainer.state.epoch],
    }
    life.end(final, names_of(model=trainer.model))
