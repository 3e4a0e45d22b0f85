"""Kinds of loaders: whether ckptd can restore their position, and at what cost."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)


class After:
    """A sampler whose iterators skip the first ``count`` indices.

    They start immediately, because the inner sampler may draw random numbers then.
    """

    def __init__(self, inner: Any, count: int) -> None:
        self.inner, self.count = inner, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # such as set_epoch

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.inner), self.count, None)


# Number of sources of a stream that are checked.
_SOURCES = 256


def torch_loader(loader: Any) -> DataLoader[Any] | None:
    """The torch (or torchdata) ``DataLoader``, also inside Accelerate's loaders; None for other objects."""
    inner = vars(loader).get("base_dataloader", loader) if hasattr(loader, "__dict__") else loader
    return inner if isinstance(inner, DataLoader) else None


def repeats_by_index(loader: Any) -> bool:
    """True if a batch provably follows from its indices alone: stored samples, collated by torch."""
    inner = torch_loader(loader)
    if inner is None:
        return isinstance(loader, list | tuple | range)
    collates = inner.collate_fn in (default_collate, default_convert)
    return collates and inner.worker_init_fn is None and _stored(inner.dataset)


def _stored(dataset: Any) -> bool:
    if type(dataset) is Subset:
        return _stored(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(_stored(d) for d in dataset.datasets)
    return type(dataset) in (TensorDataset, list, tuple, range, torch.Tensor, np.ndarray)


def check_loader(
    loader: Any, *, skip: bool, in_state: bool, option: str = "batches(loader, skip=True)"
) -> None:
    """Refuse loaders that cannot be restored to the exact same batches.

    Args:
        skip: the user states that a sample depends only on its index.
        in_state: the loader keeps its position itself, and ``state=`` contains it.
        option: the option with which the user states that.
    Raises:
        ValueError: the loader is not supported; the message says what to do.
    """
    stateful = callable(getattr(loader, "load_state_dict", None))
    inner = torch_loader(loader)
    _check_seeds(loader if inner is None else inner.dataset)
    if inner is None:
        if in_state or _hub_stream(loader):
            return
        if stateful:
            raise ValueError(
                f"the {type(loader).__name__} passed to batches() keeps its own position: pass it in state=, "
                "too: Checkpointer(..., state={'loader': loader})"
            )
        if not (hasattr(type(loader), "__iter__") or hasattr(type(loader), "__getitem__")):
            raise ValueError(f"batches() got {loader!r}, which has no batches: pass a DataLoader")
        if isinstance(loader, Iterator):
            raise ValueError(
                f"batches() got an iterator ({type(loader).__name__}), which cannot start again after a "
                "failure: pass its loader or dataset, batches(loader)"
            )
        return
    sure = skip or repeats_by_index(loader)
    _check_torch_loader(loader, inner, sure=sure, in_state=in_state, option=option)


def _check_torch_loader(
    loader: Any, inner: DataLoader[Any], *, sure: bool, in_state: bool, option: str
) -> None:
    kind = type(loader).__name__
    if inner.num_workers and not getattr(inner, "in_order", True):
        raise ValueError(
            f"the {kind} has in_order=False: the order of its batches depends on the speed of its "
            "workers. Set in_order=True"
        )
    if in_state and inner is not loader:
        raise ValueError(
            f"state= contains the {kind} of Accelerate, whose state does not keep the order of its samples: "
            "remove it from state=; batches(loader) keeps its position"
        )
    if in_state and inner.num_workers and not sure:
        raise ValueError(
            f"state= contains a {kind} with num_workers={inner.num_workers}, whose state does not contain "
            "its workers' random state: remove it from state=; batches(loader) keeps its position. (If a "
            f"sample depends only on its index: {option})"
        )
    if inner.num_workers and inner.persistent_workers and not sure:
        raise ValueError(
            f"the {kind} has persistent_workers=True: its workers' random numbers depend on all "
            "earlier epochs, so ckptd cannot "
            f"repeat them. Set persistent_workers=False; or, if a sample depends only on its index, {option}"
        )


def _hub_stream(data: Any) -> bool:
    """True for an ``IterableDataset`` of Hugging Face's ``datasets``, which can be iterated repeatedly."""
    return any(
        kind.__module__.partition(".")[0] == "datasets" and kind.__name__ == "IterableDataset"
        for kind in type(data).__mro__
    )


def _check_seeds(data: Any) -> None:
    """Refuse a stream shuffled without a seed: it draws its order when it is built, and stores it nowhere."""
    if not _hub_stream(data):
        return
    left, seen = [getattr(data, "_ex_iterable", None)], 0
    while left and seen < _SOURCES:
        source, seen = left.pop(), seen + 1
        seeds = getattr(getattr(getattr(source, "generator", None), "bit_generator", None), "seed_seq", None)
        entropy = getattr(seeds, "entropy", None)
        if isinstance(entropy, int) and entropy >> 64:  # a seed from the operating system has 128 bits
            raise ValueError(
                "the dataset is shuffled (or interleaved) without a seed, so the next start has another "
                "order: pass a seed, shuffle(seed=42)"
            )
        left += [getattr(source, "ex_iterable", None), *getattr(source, "ex_iterables", ())]


def check_in_state(item: Any) -> None:
    """Refuse objects in ``state=`` that would not resume at the position of their ``state_dict()``.

    Raises:
        ValueError: the object is not supported; the message says what to do.
    """
    loads = torch_loader(item)
    if _hub_stream(item if loads is None else loads.dataset) and hasattr(item, "load_state_dict"):
        raise ValueError(
            f"state= contains a stream of Hugging Face's datasets ({type(item).__name__}), whose "
            "state_dict() contains neither its shuffle buffer nor its "
            "read-ahead: remove it from state= and fetch from ckpt.batches(it), which keeps the position"
        )


def advice_for_state(item: Any) -> str:
    """The advice for a loader or iterator without a state in ``state=``; empty for other objects."""
    if isinstance(item, DataLoader) or (isinstance(item, Iterator) and not hasattr(item, "state_dict")):
        return (
            "remove it from state= and fetch from ckpt.batches(loader), which keeps the position in the data"
        )
    return ""


def forget_prepared(loader: Any) -> None:
    """Drop an iterator that torchdata's ``state_dict`` created early, from a random state that is lost."""
    inner = torch_loader(loader)
    if inner is not None and getattr(inner, "_initial_iter_for_state_dict", False):
        inner._iterator = None
        inner._initial_iter_for_state_dict = False


@contextlib.contextmanager
def skipping(loader: Any, count: int) -> Iterator[After]:
    """An iterator that is created in the block starts after ``count`` batches without creating them.

    Only for loaders that ``torch_loader`` accepts, over a dataset with indices.
    """
    inner = torch_loader(loader)
    assert inner is not None
    name = "batch_sampler" if inner.batch_sampler is not None else "sampler"
    attributes = vars(inner)  # DataLoader does not allow setting it
    kept = attributes[name]
    attributes[name] = found = After(kept, count)
    try:
        yield found
    finally:
        found.count = 0  # persistent workers iterate over it in each epoch
        attributes[name] = kept


def has_indices(loader: Any) -> bool:
    """True if batches can be skipped without creating them."""
    inner = torch_loader(loader)
    return inner is not None and not isinstance(inner.dataset, IterableDataset)


def makes_ahead(loader: Any) -> bool:
    """True if iterating may create a batch here before it is requested: Accelerate's do, torch's do not."""
    return torch_loader(loader) is not loader and not isinstance(loader, list | tuple | range)


def reuses_workers(loader: Any) -> bool:
    """True if the next epoch uses an existing iterator, which draws one random number less."""
    inner = torch_loader(loader)
    return inner is not None and inner.persistent_workers and inner._iterator is not None
