"""A training as small as can be, whose names the Python blocks of the documentation use."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

import ckptd.client

__all__ = ["STEPS", "names_of_a_training"]

STEPS = 6
_WIDTH = 4


def names_of_a_training() -> dict[str, Any]:
    """Model, optimizer, data and what else a page takes for granted; made anew for each block."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(_WIDTH, 8), nn.ReLU(), nn.Linear(8, _WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(2, 64, _WIDTH)

    def train_step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        return loss

    public = {name: getattr(ckptd.client, name) for name in ckptd.client.__all__}
    return public | {
        "__name__": "__main__",
        "clip_grad_norm_": clip_grad_norm_,
        "dist": dist,
        "inputs": inputs,
        "loader": DataLoader(TensorDataset(inputs, targets), batch_size=4, shuffle=True),
        "model": model,
        "nn": nn,
        "optimizer": optimizer,
        "sched": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "targets": targets,
        "torch": torch,
        "total": STEPS,
        "train_step": train_step,
    }
