"""Kinds of loaders: which can be taken back to a position, at what cost, and which cannot."""

from __future__ import annotations

import contextlib
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

from ckptd.client.data.after import After

__all__ = ["advice_for_state", "check_in_state", "check_loader", "forget_prepared", "has_indices", "makes_ahead", "repeats_by_index", "reuses_workers", "skipping", "torch_loader"]  # fmt: skip

# Sources of a stream that are looked at.
_SOURCES = 256


def torch_loader(loader: Any) -> DataLoader[Any] | None:
    """The torch ``DataLoader`` (or torchdata's) that ``loader`` is, or that it wraps as
    Accelerate's do; None: it is another thing.
    """
    inner = vars(loader).get("base_dataloader", loader) if hasattr(loader, "__dict__") else loader
    return inner if isinstance(inner, DataLoader) else None


def repeats_by_index(loader: Any) -> bool:
    """Whether a batch provably follows from its indices alone: stored samples, put together by torch."""
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
    """Refuse what cannot be taken back to the very same batches.

    Args:
        skip: the user says that a sample depends on its index only.
        in_state: it keeps its position itself, and ``state=`` has it.
        option: with which the user says so.
    Raises:
        ValueError: with what to do instead.
    """
    stateful = callable(getattr(loader, "load_state_dict", None))
    inner = torch_loader(loader)
    _check_seeds(loader if inner is None else inner.dataset)
    if inner is None:
        if in_state or _hub_stream(loader):
            return
        if stateful:
            raise ValueError(
                f"batches() was given a {type(loader).__name__}, which keeps its own position: pass it in state= as well, "
                "Checkpointer(..., state={'loader': loader})"
            )
        if isinstance(loader, Iterator):
            raise ValueError(
                f"batches() was given an iterator ({type(loader).__name__}), which cannot begin anew after a failure: pass the loader "
                "or dataset that it comes from, batches(loader)"
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
            f"the {kind} has in_order=False: which batch comes when depends on the speed of its workers. Leave in_order=True"
        )
    if in_state and inner is not loader:
        raise ValueError(
            f"state= has the {kind} of Accelerate, which loses the order of its samples: take it out of state=, batches(loader) keeps "
            "its position"
        )
    if in_state and inner.num_workers and not sure:
        raise ValueError(
            f"state= has a {kind} with num_workers={inner.num_workers}, whose state does not hold the random numbers of its workers: "
            f"take it out of state=, batches(loader) keeps its position. (If a sample depends on its index only: {option})"
        )
    if inner.num_workers and inner.persistent_workers and not sure:
        raise ValueError(
            f"the {kind} has persistent_workers=True: what its workers draw in an epoch depends on all epochs before, so it cannot be "
            f"repeated. Set persistent_workers=False; or, if a sample depends on its index only, {option}"
        )


def _hub_stream(data: Any) -> bool:
    """Whether it is an ``IterableDataset`` of Hugging Face's ``datasets``: it can be iterated over
    again, with or without its state.
    """
    return any(
        kind.__module__.partition(".")[0] == "datasets" and kind.__name__ == "IterableDataset"
        for kind in type(data).__mro__
    )


def _check_seeds(data: Any) -> None:
    """Refuse a stream that was shuffled without a seed: the order of its shards is drawn while it
    is built, and kept nowhere.
    """
    if not _hub_stream(data):
        return
    left, seen = [getattr(data, "_ex_iterable", None)], 0
    while left and seen < _SOURCES:
        source, seen = left.pop(), seen + 1
        seeds = getattr(getattr(getattr(source, "generator", None), "bit_generator", None), "seed_seq", None)  # fmt: skip
        entropy = getattr(seeds, "entropy", None)
        if isinstance(entropy, int) and entropy >> 64:  # of the operating system: 128 bits
            raise ValueError(
                "the dataset is shuffled (or interleaved) without a seed, so that the next start has another order: pass one, "
                "shuffle(seed=42)"
            )
        left += [getattr(source, "ex_iterable", None), *getattr(source, "ex_iterables", ())]


def check_in_state(item: Any) -> None:
    """Refuse in ``state=`` what would go on at another place than its ``state_dict()`` was taken.

    Raises:
        ValueError: with what to do instead.
    """
    loads = torch_loader(item)
    if _hub_stream(item if loads is None else loads.dataset) and hasattr(item, "load_state_dict"):
        raise ValueError(
            f"state= has a stream of Hugging Face's datasets ({type(item).__name__}), whose state_dict() holds neither its shuffle buffer nor what it "
            "has read ahead: take it out of state= and fetch from ckpt.batches(it), which keeps the position"
        )


def advice_for_state(item: Any) -> str:
    """What to do with a loader or an iterator that was passed in ``state=`` and has no state;
    empty: it is another thing.
    """
    if isinstance(item, DataLoader) or (
        isinstance(item, Iterator) and not hasattr(item, "state_dict")
    ):
        return "leave it out of state= and fetch from ckpt.batches(loader), which keeps the position in the data"
    return ""


def forget_prepared(loader: Any) -> None:
    """Give up an iterator that was made before its epoch began, from a random state that is gone
    (torchdata's ``state_dict`` does).
    """
    inner = torch_loader(loader)
    if inner is not None and getattr(inner, "_initial_iter_for_state_dict", False):
        inner._iterator = None
        inner._initial_iter_for_state_dict = False


@contextlib.contextmanager
def skipping(loader: Any, count: int) -> Iterator[After]:
    """In the body, an iterator over ``loader`` begins after ``count`` batches, which are not made.
    It must be begun there.

    Only for what ``torch_loader`` knows, over a dataset with indices.
    """
    inner = torch_loader(loader)
    assert inner is not None
    name = "batch_sampler" if inner.batch_sampler is not None else "sampler"
    attributes = vars(inner)  # DataLoader lets nobody set it
    kept = attributes[name]
    attributes[name] = found = After(kept, count)
    try:
        yield found
    finally:
        found.count = 0  # workers that stay go through it in each epoch
        attributes[name] = kept


def has_indices(loader: Any) -> bool:
    """Whether batches can be passed over without being made."""
    inner = torch_loader(loader)
    return inner is not None and not isinstance(inner.dataset, IterableDataset)


def makes_ahead(loader: Any) -> bool:
    """Whether iterating may make a batch in this process before it is asked for: torch's loaders do
    not, Accelerate's do.
    """
    return torch_loader(loader) is not loader and not isinstance(loader, list | tuple | range)


def reuses_workers(loader: Any) -> bool:
    """Whether the epoch that begins is one of an iterator that is there already: it draws one
    random number less.
    """
    inner = torch_loader(loader)
    return inner is not None and inner.persistent_workers and inner._iterator is not None
