"""A sampler that begins later: what a loader goes through where batches are passed over without being made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["After"]


class After:
    """A sampler whose iterators pass the first ``count`` indices over. They begin at once, as
    random numbers may be drawn then.
    """

    def __init__(self, inner: Any, count: int) -> None:
        self.inner, self.count = inner, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # whoever sets its epoch

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        return _passed(iter(self.inner), self.count)


def _passed(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    for _ in range(count):
        next(iterator, None)
    yield from iterator
