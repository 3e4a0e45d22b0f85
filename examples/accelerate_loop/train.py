"""A training loop with Accelerate: prepared loader, accumulation, augmentation in workers. Kill it
and start it again.

    $ python -m examples.accelerate_loop.train --run first
    $ torchrun --nproc-per-node 2 -m examples.accelerate_loop.train --run second

Three lines are ckptd's: the checkpointer, its batches, and the ``for``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ckptd.client.frameworks.accelerate import checkpointer

__all__ = ["Points", "main"]


class Points(Dataset[Tensor]):
    """Points of a curve, moved at random each time that they are looked at."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Tensor:
        x = torch.tensor([index / 100 - 1.0])
        return torch.cat([x + 0.01 * torch.randn(1), x.sin() + x**3])


def main(argv: Sequence[str] | None = None) -> float:
    """Train; returns the last loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", default="accelerate-loop")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--daemon", default="auto", help="auto, an endpoint, or none")
    args = parser.parse_args(argv)

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    loader = DataLoader(Points(), batch_size=16, shuffle=True, num_workers=1)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    daemon = None if args.daemon == "none" else args.daemon
    ckpt = checkpointer(accelerator, model, optimizer, {"scheduler": scheduler}, run=args.run, daemon=daemon)
    batches = ckpt.batches(loader)
    loss = torch.zeros(())
    for step in ckpt.steps(args.steps):
        points = next(batches)
        with accelerator.accumulate(model):
            loss = (model(points[:, :1]) - points[:, 1:]).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step % 50 == 0:
            accelerator.print(f"step {step}: loss {loss.item():.4f}")
    ckpt.close()
    return loss.item()


if __name__ == "__main__":
    main()
