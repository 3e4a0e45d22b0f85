"""A successor comes to the very same batches, whatever a loader draws and however far it fetches ahead."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ckptd.client import values
from ckptd.client.data.position import DataPosition
from ckptd.client.rng_state import capture_rng, restore_rng

LENGTH = 9


def collate(samples: list[int]) -> Tensor:
    """Draws from torch's generator and from Python's."""
    return torch.tensor(samples) + torch.rand(len(samples)) + random.random()


class Ahead:
    """Fetches one batch ahead, as Accelerate's loader does; ``skip`` batches are passed over by index."""

    def __init__(self, loader: Any, ahead: bool, skip: int = 0) -> None:
        self._loader, self._ahead, self._skip = loader, ahead, skip

    def __iter__(self) -> Iterator[Tensor]:
        inner = iter(self._loader)
        for _ in range(self._skip):
            next(inner._sampler_iter)
        if not self._ahead:
            yield from inner
            return
        current = next(inner)
        for following in inner:
            yield current
            current = following
        yield current


def loader() -> DataLoader[int]:
    # Shuffled from the global generator: the order follows from the random state at the beginning.
    return DataLoader(range(LENGTH), batch_size=1, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("consumed", range(LENGTH + 1))
def test_the_same_batches(ahead: bool, skips: bool, consumed: int) -> None:
    torch.manual_seed(1)
    random.seed(1)
    torch.rand(3)
    position = DataPosition()
    position.begin_epoch(2)
    batches = position.watch(iter(Ahead(loader(), ahead)))
    for _ in range(consumed):
        next(batches)
        torch.rand(5)  # what training draws
    recorded = values.pack(position.state_dict())
    top = capture_rng()
    expected, after = list(batches), capture_rng()

    torch.manual_seed(99)
    random.seed(99)
    successor = DataPosition()
    successor.load_state_dict(values.unpack(recorded))
    assert (successor.epoch, successor.consumed) == (2, consumed)
    successor.return_to_epoch()
    skipped = successor.skippable if skips else 0
    iterator = iter(Ahead(loader(), ahead, skipped))
    successor.fast_forward(lambda: next(iterator), skipped)
    if consumed:
        restore_rng(top)  # what the first replayed step begins with
    found = list(successor.watch(iterator))
    assert len(found) == LENGTH - consumed
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert capture_rng() == after
    assert values.pack(successor.state_dict()) == values.pack(position.state_dict())


def test_data_that_ends_too_early() -> None:
    position = DataPosition()
    position.begin_epoch(0)
    batches = position.watch(iter(range(4)))
    for _ in range(4):
        next(batches)
    shorter = iter(range(3))
    with pytest.raises(ValueError, match=r"ended before batch 4 of epoch 0.*run="):
        position.fast_forward(lambda: next(shorter), 0)
