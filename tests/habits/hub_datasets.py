"""Hugging Face's ``datasets`` as people write them: with an index or streamed, shuffled, mapped and
transformed at random.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import torch.distributed as dist
from datasets.distributed import split_dataset_by_node
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from ckptd.client import Checkpointer
from tests.habits.leaves import names_of
from tests.habits.life import Life
from tests.habits.pipelines import BATCH, SAMPLES, WIDTH, sample

__all__ = ["PIPELINES", "hub_data", "main"]

# Batches of an epoch: each worker cuts its own samples into batches. An epoch is told when none is
# being made ahead.
EPOCH_STEPS, EPOCH_STEPS_OF_WORKERS = 7, 8


def rows() -> dict[str, list[Any]]:
    return {"points": [sample(index).tolist() for index in range(SAMPLES)]}


def noise() -> float:
    """From torch's, numpy's and Python's global generators."""
    return float(torch.randn(())) + float(np.random.normal()) + random.random()


def noisy(row: dict[str, Any]) -> dict[str, Any]:
    return {"points": (torch.as_tensor(row["points"]) + 0.1 * noise()).tolist()}


def noisy_batch(batch: dict[str, Any]) -> dict[str, Any]:
    return {"points": [torch.as_tensor(p) + 0.1 * noise() for p in batch["points"]]}


def indexed() -> Any:
    return datasets.Dataset.from_dict(rows()).with_format("torch")


def streamed() -> Any:
    return datasets.Dataset.from_dict(rows()).to_iterable_dataset(num_shards=2).with_format("torch")


def buffered(**seed: int) -> Any:
    return streamed().shuffle(buffer_size=8, **seed)


def seeded() -> Any:
    """Mapped once, when the program begins; which seeds itself, as most do."""
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    return datasets.Dataset.from_dict(rows()).map(noisy).with_format("torch")


def cached(life: Life) -> Any:
    """Mapped once at random, without a seed: a later life finds the result in the cache beside the file."""
    path = life.folder / "points.parquet"
    if not path.exists():
        datasets.Dataset.from_dict(rows()).to_parquet(path)
    data = datasets.Dataset.from_parquet(str(path), cache_dir=str(life.folder / "cache"))
    return data.map(noisy).with_format("torch")


def interleaved() -> Any:
    halves = [streamed().take(13), streamed().skip(13)]
    mixed = datasets.interleave_datasets(halves, probabilities=[0.4, 0.6], seed=3)
    return mixed.with_format("torch")


def split(data: Any, life: Life) -> Any:
    return split_dataset_by_node(data, life.rank, life.ranks)


def hub_data(kind: str) -> Any:
    """For the loops of other libraries: with an index, or a stream; both draw while they are read."""
    if kind == "stream":
        return buffered(seed=7).map(noisy)
    return datasets.Dataset.from_dict(rows()).with_transform(noisy_batch)


PIPELINES: dict[str, Callable[[Life], Any]] = {
    "datasets": lambda life: DataLoader(indexed().shuffle(seed=7), BATCH),
    "datasets, shuffled by the loader, 2 workers": lambda life: DataLoader(
        indexed(), BATCH, shuffle=True, num_workers=2
    ),
    "datasets, split": lambda life: DataLoader(split(indexed(), life), BATCH, shuffle=True),
    "datasets, transform": lambda life: DataLoader(hub_data("indexed"), BATCH, shuffle=True),
    "datasets, transform, 2 workers": lambda life: DataLoader(
        hub_data("indexed"), BATCH, shuffle=True, num_workers=2
    ),
    "datasets, mapped": lambda life: DataLoader(seeded(), BATCH, shuffle=True),
    "datasets, mapped, cached": lambda life: DataLoader(cached(life), BATCH, shuffle=True),
    "datasets, stream": lambda life: DataLoader(buffered(seed=7), BATCH),
    "datasets, stream, 2 workers": lambda life: DataLoader(buffered(seed=7), BATCH, num_workers=2),
    "datasets, stream, split": lambda life: DataLoader(split(buffered(seed=7), life), BATCH),
    "datasets, stream, mapped": lambda life: DataLoader(buffered(seed=7).map(noisy), BATCH),
    "datasets, stream, mapped, 2 workers": lambda life: DataLoader(
        buffered(seed=7).map(noisy), BATCH, num_workers=2
    ),
    "datasets, stream, no seed": lambda life: DataLoader(buffered(), BATCH),
    "datasets, stream, interleaved": lambda life: DataLoader(interleaved(), BATCH),
    "datasets, stream, set_epoch": lambda life: DataLoader(buffered(seed=7), BATCH),
    "datasets, stream, set_epoch, 2 workers": lambda life: DataLoader(buffered(seed=7), BATCH, num_workers=2),
    "datasets, stream, no loader": lambda life: buffered(seed=7).map(noisy).batch(BATCH),
    "datasets, stream, stateful": lambda life: StatefulDataLoader(buffered(seed=7), BATCH),
    "datasets, stream in state=": lambda life: buffered(seed=7).batch(BATCH),
    "datasets, stream, stateful in state=": lambda life: StatefulDataLoader(buffered(seed=7), BATCH),
    "datasets, stream without a buffer, stateful in state=": lambda life: StatefulDataLoader(
        streamed().map(noisy), BATCH
    ),
}


def _short_folder(life: Life) -> str:
    """For temporary files of the library, and for the sockets of its workers, whose paths may have 107 bytes: the row's own folder is too deep.

    The same in each life of a rank, so that the last one, which nobody kills, leaves nothing behind.
    """
    name = hashlib.sha256(f"{life.folder}/{life.rank}".encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"hub-{name}"
    folder.mkdir(exist_ok=True)
    return str(folder)


def main(argv: Sequence[str]) -> None:
    life = Life(argv)
    tempfile.tempdir = _short_folder(life)
    try:
        _train(life)
    finally:
        shutil.rmtree(tempfile.tempdir, ignore_errors=True)


def _train(life: Life) -> None:
    datasets.disable_progress_bars()
    loader = PIPELINES[life.row](life)
    model: nn.Module = nn.Sequential(
        nn.Linear(WIDTH, 12), nn.Dropout(0.1), nn.Linear(12, 12), nn.Linear(12, WIDTH)
    )
    inner = model
    if life.ranks > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    state = {"data": loader} if "in state=" in life.row else {}
    ckpt = Checkpointer(model, optimizer, state, **life.options())
    life.follow(ckpt)
    batches = ckpt.batches(loader)
    epoch_steps = EPOCH_STEPS_OF_WORKERS if "workers" in life.row else EPOCH_STEPS
    for step in ckpt.steps(life.steps):
        life.top(step)
        if "set_epoch" in life.row and step % epoch_steps == 0:
            loader.dataset.set_epoch(step // epoch_steps)
        points: Any = next(batches)["points"]
        life.batch(points)
        if not isinstance(points, Tensor):
            points = torch.stack([torch.as_tensor(p) for p in points])
        optimizer.zero_grad()
        (model(points) - points).square().mean().backward()
        optimizer.step()
    life.end({"model": inner.state_dict(), "optimizer": optimizer}, names_of(model=inner))
    if life.ranks > 1:
        dist.destroy_process_group()
