"""Data pipelines as people write them, each a training through ``ckpt.batches``; nothing here is
arranged for ckptd.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from ckptd.client import Checkpointer
from tests.habits.leaves import names_of
from tests.habits.life import Life

__all__ = ["PIPELINES", "main"]

SAMPLES, WIDTH, BATCH = 26, 6, 4
# Of this module alone; `main` seeds it.
NOISE = np.random.default_rng()


def sample(index: int) -> Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


class Points(Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return sample(index)


class Augmented(Points):
    """With torch's, numpy's and Python's global generators."""

    def __getitem__(self, index: int) -> Tensor:
        noise = torch.randn(WIDTH) + float(np.random.normal()) + random.random()
        return sample(index) + 0.1 * noise


class OwnGenerator(Points):
    """With a generator that it keeps; as if nobody had seeded it, another one in each life."""

    def __init__(self) -> None:
        self.noise = np.random.default_rng(torch.initial_seed())

    def __getitem__(self, index: int) -> Tensor:
        return sample(index) + 0.1 * float(self.noise.normal())


class ModuleGenerator(Points):
    """With one that is a global of its module."""

    def __getitem__(self, index: int) -> Tensor:
        return sample(index) + 0.1 * float(NOISE.normal())


class Stream(IterableDataset[Tensor]):
    """Shares samples out among workers, and augments them."""

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        mine, all_of = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(mine, SAMPLES, all_of):
            yield sample(index) + 0.1 * torch.randn(WIDTH)


class Buckets(Sampler[list[int]]):
    """A batch sampler that goes on in each epoch where it ended in the last."""

    def __init__(self) -> None:
        self.turn = 0

    def __len__(self) -> int:
        return SAMPLES // BATCH

    def __iter__(self) -> Iterator[list[int]]:
        self.turn += 1
        order = torch.randperm(SAMPLES).roll(self.turn).tolist()
        for first in range(0, SAMPLES - BATCH + 1, BATCH):
            yield order[first : first + BATCH]


def mixed(samples: list[Tensor]) -> Tensor:
    """A collator that draws."""
    points = torch.stack(samples)
    return points * torch.rand(points.shape).round() + random.random()


def stored() -> TensorDataset:
    return TensorDataset(torch.stack([sample(i) for i in range(SAMPLES)]))


def sharded(life: Life) -> Any:
    data = Augmented()
    return DataLoader(data, BATCH, sampler=DistributedSampler(data, life.ranks, life.rank))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    """Epoch after epoch, as many write it themselves."""
    while True:
        yield from loader


def _shuffled(data: Dataset[Any], **options: Any) -> Any:
    return DataLoader(data, BATCH, shuffle=True, **options)


PIPELINES: dict[str, Callable[[Life], Any]] = {
    "stored tensors": lambda life: _shuffled(stored()),
    "stored tensors, 2 workers": lambda life: _shuffled(stored(), num_workers=2),
    "stored tensors, persistent workers": lambda life: _shuffled(
        stored(), num_workers=2, persistent_workers=True
    ),
    "augmented": lambda life: _shuffled(Augmented(), collate_fn=mixed),
    "augmented, 2 workers": lambda life: _shuffled(Augmented(), num_workers=2, collate_fn=mixed),
    "augmented, persistent workers": lambda life: _shuffled(
        Augmented(), num_workers=2, persistent_workers=True
    ),
    "augmented, any order of workers": lambda life: _shuffled(Augmented(), num_workers=2, in_order=False),
    "own generator": lambda life: _shuffled(OwnGenerator(), generator=generator()),
    "own generator, 2 workers": lambda life: _shuffled(OwnGenerator(), num_workers=2),
    "generator of the module": lambda life: _shuffled(ModuleGenerator()),
    "loader's generator": lambda life: _shuffled(Augmented(), generator=generator(), num_workers=1),
    "with replacement": lambda life: DataLoader(
        Augmented(), BATCH, sampler=RandomSampler(Points(), True, 50, generator())
    ),
    "batch sampler": lambda life: DataLoader(
        Augmented(),
        batch_sampler=BatchSampler(RandomSampler(Points()), BATCH, drop_last=True),
        num_workers=1,
    ),
    "own batch sampler": lambda life: DataLoader(Augmented(), batch_sampler=Buckets()),
    "stateful": lambda life: StatefulDataLoader(Augmented(), BATCH, shuffle=True),
    "stateful, 2 workers": lambda life: StatefulDataLoader(Augmented(), BATCH, shuffle=True, num_workers=2),
    "stateful in state=": lambda life: StatefulDataLoader(Augmented(), BATCH, shuffle=True),
    "stateful in state=, 2 workers": lambda life: StatefulDataLoader(
        Augmented(), BATCH, shuffle=True, num_workers=2
    ),
    "stream": lambda life: DataLoader(Stream(), BATCH),
    "stream, 2 workers": lambda life: DataLoader(Stream(), BATCH, num_workers=2),
    "sharded": sharded,
    "a loader in state=": lambda life: _shuffled(Points()),
    "an iterator": lambda life: endless(_shuffled(Points())),
    "fetched before the loop": lambda life: _shuffled(Points()),
}


def main(argv: Sequence[str]) -> None:
    life = Life(argv)
    NOISE.bit_generator.state = np.random.default_rng(torch.initial_seed()).bit_generator.state
    loader = PIPELINES[life.row](life)
    model: nn.Module = nn.Sequential(
        nn.Linear(WIDTH, 12), nn.Dropout(0.1), nn.Linear(12, 12), nn.Linear(12, WIDTH)
    )
    inner = model
    if life.ranks > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    state = {"loader": loader} if "in state=" in life.row else {}
    ckpt = Checkpointer(model, optimizer, state, **life.options())
    life.follow(ckpt)
    batches = ckpt.batches(loader)
    if life.row == "fetched before the loop":
        next(batches)
    for step in ckpt.steps(life.steps):
        life.top(step)
        if life.row == "sharded" and step % 7 == 0:
            loader.sampler.set_epoch(step // 7)
        batch = next(batches)
        life.batch(batch)
        points = batch if isinstance(batch, Tensor) else batch[0]
        optimizer.zero_grad()
        (model(points) - points).square().mean().backward()
        optimizer.step()
    life.end({"model": inner.state_dict(), "optimizer": optimizer}, names_of(model=inner))
    if life.ranks > 1:
        dist.destroy_process_group()
