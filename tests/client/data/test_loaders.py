"""Loaders as they are given to ``batches``: taken to a position in another process's state, or
refused with what to do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ckptd.client import values
from ckptd.client.data import Batches, BatchLedger
from ckptd.client.data.loaders import check_loader, repeats_by_index
from ckptd.client.data.position import Reach
from ckptd.client.rng_state import capture_rng, restore_rng
from ckptd.client.training_state import check_state

# torchdata calls what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

MODULE_NOISE = np.random.default_rng(3)


class Noisy(Dataset[Tensor]):
    """Draws from every kind of generator."""

    def __init__(self, seed: int) -> None:
        self.torch, self.numpy = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
        self.legacy, self.python = np.random.RandomState(seed), random.Random(seed)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        own = torch.rand((), generator=self.torch) + float(self.numpy.random())
        own += float(self.legacy.rand()) + self.python.random() + augmented()
        return own + torch.rand(()) + float(np.random.rand()) + random.random() + index


def augmented() -> float:
    return float(MODULE_NOISE.random())


def scaled(samples: list[Tensor], factor: random.Random) -> Tensor:
    return torch.stack(samples) * factor.random()


class Turning(Sampler[int]):
    """Goes on in each epoch where it ended in the last."""

    def __init__(self) -> None:
        self.turn = 0

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[int]:
        self.turn += 1
        yield from torch.randperm(7).roll(self.turn).tolist()


class Seeded(Sampler[int]):
    """Its seed is drawn when it is built, as one of a process that nobody seeds."""

    def __init__(self) -> None:
        self.seed = int(torch.randint(1 << 30, ()))

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(7, generator=torch.Generator().manual_seed(self.seed)).tolist()


class Late(Sampler[int]):
    """Makes its generator with its first iterator, as Accelerate's does."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(5)
        yield from torch.randperm(7, generator=self.generator).tolist()


class Ahead:
    """Makes a batch ahead, in this process."""

    def __init__(self, loader: DataLoader[Tensor]) -> None:
        self.dataset, self.sampler, self._loader = loader.dataset, loader.sampler, loader

    def __iter__(self) -> Iterator[Tensor]:
        iterator = iter(self._loader)
        current = next(iterator)
        for following in iterator:
            yield current
            current = following
        yield current


class Numbers(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for i in range(7):
            yield torch.rand(()) + i


def replacement(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    data = TensorDataset(torch.arange(9.0))
    return DataLoader(data, 2, shuffle=True, generator=generator)


LOADERS: dict[str, Callable[[int], Any]] = {
    "noisy": lambda seed: DataLoader(
        Noisy(seed), 3, shuffle=True, collate_fn=partial(scaled, factor=random.Random(seed))
    ),
    "generator": replacement,
    "sampler": lambda seed: DataLoader(Noisy(seed), 2, sampler=Turning()),
    "seed": lambda seed: DataLoader(Noisy(seed), 2, sampler=Seeded()),
    "ahead": lambda seed: Ahead(DataLoader(Noisy(seed), 2, sampler=Seeded())),
    "late and ahead": lambda seed: Ahead(DataLoader(Noisy(seed), 2, sampler=Late())),
    "iterable": lambda seed: DataLoader(Numbers(), 2),
    "stateful": lambda seed: StatefulDataLoader(Noisy(seed), 3, shuffle=True),
    "no collation": lambda seed: DataLoader(Noisy(seed), None, shuffle=True),
    "list": lambda seed: [torch.tensor(i) for i in range(5)],
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("consumed", [0, 1, 2, 3, 4, 5, 9, 14])
def test_a_successor_comes_to_the_same_batches(name: str, consumed: int) -> None:
    """In another random state, with other seeds: everything that batches follow from is found and put back."""
    MODULE_NOISE.bit_generator.state = np.random.default_rng(3).bit_generator.state
    torch.manual_seed(1)
    random.seed(1)
    ledger = BatchLedger()
    batches = Batches(LOADERS[name](1), ledger)
    for step in range(consumed):
        ledger.begin(step)
        next(batches)
        torch.rand(3)  # what training draws
    recorded, top = values.pack(ledger.state_dict()), capture_rng()
    ledger.begin(consumed)
    expected, after = [next(batches) for _ in range(11)], values.pack(ledger.state_dict())

    torch.manual_seed(99)
    random.seed(99)
    MODULE_NOISE.random()
    successor = BatchLedger()
    successor.load_state_dict(values.unpack(recorded))
    others = Batches(LOADERS[name](2), successor)
    restore_rng(top)
    successor.begin(consumed)
    found = [next(others) for _ in range(11)]
    assert all(_equal(a, b) for a, b in zip(expected, found, strict=True))
    assert values.pack(successor.state_dict()) == after


def _equal(a: Any, b: Any) -> bool:
    return all(map(_equal, a, b)) if isinstance(a, list | tuple) else torch.equal(a, b)


def test_what_is_in_reach_is_found_by_looking() -> None:
    loader = LOADERS["noisy"](1)
    assert Reach(loader).generators == [
        "loader.dataset.torch",
        "loader.dataset.numpy",
        "loader.dataset.legacy",
        "loader.dataset.python",
        "loader.dataset.__getitem__().augmented.MODULE_NOISE",
        "loader.collate_fn.keywords.factor",
    ]


def test_skipping_is_for_what_follows_from_its_index() -> None:
    stored = TensorDataset(torch.arange(4))
    assert repeats_by_index(DataLoader(Subset(stored, [0, 1])))
    assert not repeats_by_index(DataLoader(stored, collate_fn=lambda samples: samples))
    assert not repeats_by_index(DataLoader(Noisy(1)))


class Keeps:
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...

    def __iter__(self) -> Iterator[int]:
        return iter([1])


@pytest.mark.parametrize(
    ("loader", "advice"),
    [
        (iter([1]), r"cannot start again.*batches\(loader\)"),
        (Keeps(), r"state=\{'loader': loader\}"),
        (DataLoader(Noisy(1), num_workers=1, persistent_workers=True), "persistent_workers=False"),
        (DataLoader(Noisy(1), num_workers=1, in_order=False), "in_order=True"),
    ],
)
def test_what_cannot_come_back_is_refused(loader: Any, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        check_loader(loader, skip=False, in_state=False)


def test_workers_of_a_stateful_loader_have_random_numbers_that_no_state_holds() -> None:
    loader = StatefulDataLoader(Noisy(1), num_workers=2)
    with pytest.raises(ValueError, match="remove it from state="):
        check_loader(loader, skip=False, in_state=True)
    check_loader(loader, skip=True, in_state=True)
    check_loader(loader, skip=False, in_state=False)


@pytest.mark.parametrize("item", [DataLoader([1]), iter([1])])  # type: ignore[arg-type]
def test_a_loader_in_state_is_told_where_it_belongs(item: Any) -> None:
    with pytest.raises(ValueError, match=r"remove it from state=.*ckpt\.batches\(loader\)"):
        check_state({"loader": item})


def test_a_batch_before_the_first_step_belongs_to_none() -> None:
    with pytest.raises(ValueError, match=r"in the body of `for step in ckpt.steps"):
        next(Batches([1], BatchLedger()))


class Shared(IterableDataset[int]):
    """Its epoch is a tensor that its workers share, as that of Hugging Face's streams is."""

    def __init__(self) -> None:
        self._epoch = torch.tensor(0).share_memory_()

    def __iter__(self) -> Iterator[int]:
        return iter(range(int(self._epoch), 9))


def test_an_epoch_that_workers_share_comes_back_in_place() -> None:
    """It was lost: in an epoch other than the first, a stream began anew with the order of the first."""
    dataset = Shared()
    reach = Reach(DataLoader(dataset))
    dataset._epoch.fill_(2)
    state = reach.capture()
    again = Shared()
    shared = again._epoch
    Reach(DataLoader(again)).restore(state)
    assert again._epoch is shared
    assert int(shared) == 2


@pytest.fixture
def stream() -> Any:
    datasets = pytest.importorskip(
        "datasets", reason="datasets is not installed: pip install 'ckptd[habits]'"
    )
    return datasets.Dataset.from_dict({"x": list(range(8))}).to_iterable_dataset(num_shards=2)


@pytest.mark.parametrize("wrap", [lambda data: data, DataLoader])
def test_a_stream_that_is_shuffled_without_a_seed(stream: Any, wrap: Callable[[Any], Any]) -> None:
    for mixed in (stream.shuffle(buffer_size=4), stream.shuffle().filter(bool)):
        with pytest.raises(ValueError, match=r"without a seed.*shuffle\(seed=42\)"):
            check_loader(wrap(mixed), skip=False, in_state=False)
    seeded = stream.shuffle(seed=7, buffer_size=4).filter(bool)
    seeded.set_epoch(3)
    check_loader(wrap(seeded), skip=False, in_state=False)


@pytest.mark.parametrize("wrap", [lambda data: data, StatefulDataLoader])
def test_a_stream_in_state(stream: Any, wrap: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"remove it from state=.*ckpt.batches"):
        check_state({"data": wrap(stream)})


class FromTheSystem(Dataset[int]):
    def __init__(self) -> None:
        self.names = random.SystemRandom()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index


def test_a_source_of_entropy_without_a_state_is_left_alone() -> None:
    """Libraries hold one for names of files; asking for its state ended the training."""
    reach = Reach(DataLoader(FromTheSystem()))
    assert reach.generators == []
    assert reach.capture() == {}
