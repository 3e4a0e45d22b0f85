"""Loops with Accelerate: prepared loaders, accumulation, with ``use_stateful_dataloader`` and without."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader

from ckptd.client.frameworks.accelerate import checkpointer
from tests.habits.leaves import names_of
from tests.habits.life import Life
from tests.habits.pipelines import BATCH, WIDTH, Augmented, mixed

__all__ = ["main"]


def points_of(rows: list[dict[str, Any]]) -> Any:
    return mixed([torch.as_tensor(row["points"]) for row in rows])


def main(argv: Sequence[str]) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    life = Life(argv)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader="stateful" in life.row),
    )
    workers = 2 if "workers" in life.row else 0
    if "datasets" in life.row:
        from tests.habits.hub_datasets import hub_data

        stream = "stream" in life.row
        data = hub_data("stream" if stream else "indexed")
        loader = DataLoader(data, BATCH, shuffle=not stream, collate_fn=points_of)
    else:
        loader = DataLoader(Augmented(), BATCH, shuffle=True, num_workers=workers, collate_fn=mixed)
    inner = nn.Sequential(nn.Linear(WIDTH, 12), nn.Dropout(0.1), nn.Linear(12, WIDTH))
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, life.steps)
    model, optimizer, loader, scheduler = accelerator.prepare(inner, optimizer, loader, scheduler)
    state = {"scheduler": scheduler}
    if "in state=" in life.row:
        state["loader"] = loader
    ckpt = checkpointer(accelerator, model, optimizer, state, **life.options())
    life.follow(ckpt)
    batches = ckpt.batches(loader)
    for step in ckpt.steps(life.steps):
        life.top(step)
        if "fetched within" not in life.row:
            points = next(batches)
        with accelerator.accumulate(model):
            if "fetched within" in life.row:
                points = next(batches)
            life.batch(points)
            accelerator.backward((model(points) - points).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    final = {"model": inner.state_dict(), "optimizer": optimizer.optimizer}
    final["scheduler"] = scheduler.scheduler.state_dict()
    life.end(final, names_of(model=inner))
    accelerator.end_training()
