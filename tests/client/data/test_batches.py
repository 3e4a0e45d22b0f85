"""Endless batches that follow a restored loader."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckptd.client.data import Batches


class Loader:
    """Goes on where its state says, as stateful loaders do."""

    def __init__(self, size: int) -> None:
        self.size, self.position, self.iterators = size, 0, 0

    def __iter__(self) -> Iterator[int]:
        self.iterators += 1
        while self.position < self.size:
            self.position += 1
            yield self.position - 1
        self.position = 0


def test_epoch_after_epoch() -> None:
    batches = Batches(Loader(3))
    assert [next(batches) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_iterators_are_made_when_a_batch_is_wanted() -> None:
    """A restore comes between the creation and the first batch; an eager iterator would ignore it."""
    loader = Loader(3)
    batches = Batches(loader)
    assert loader.iterators == 0
    loader.position = 2
    assert next(batches) == 2


def test_rewind_follows_a_replaced_state() -> None:
    loader = Loader(5)
    batches = Batches(loader)
    assert [next(batches), next(batches)] == [0, 1]
    loader.position = 4
    batches.rewind()
    assert [next(batches), next(batches)] == [4, 0]


def test_a_loader_restored_at_the_end_of_its_epoch() -> None:
    loader = Loader(3)
    loader.position = 3
    assert next(Batches(loader)) == 0


def test_an_empty_loader_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(ValueError, match="Loader returned no batch in a whole epoch"):
        next(Batches(Loader(0)))


def test_an_iterator_that_is_through_is_named() -> None:
    """A process that ckptd does not protect takes an iterator, too: its second epoch has no batch,
    and the error said no more than that.
    """
    batches = Batches(iter([1]))
    assert next(batches) == 1
    with pytest.raises(ValueError, match=r"it is an iterator, which has only one epoch; pass its loader"):
        next(batches)
