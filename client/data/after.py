"""A sampler that skips its first indices: loaders use it to skip batches without creating them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["After"]


class After:
    """A sampler whose iterators skip the first ``count`` indices. They start immediately, because the
    inner sampler may draw random numbers then.
    """

    def __init__(self, inner: Any, count: int) -> None:
        self.inner, self.count = inner, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # such as set_epoch

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        return _passed(iter(self.inner), self.count)


def _passed(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    for _ in range(count):
        next(iterator, None)
    yield from iterator
