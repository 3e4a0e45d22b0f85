"""An endless iterator over a data loader that can be taken back to a restored state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["Batches"]


class Batches(Iterator[Any]):
    """Epoch after epoch of ``loader``; a new inner iterator is made when one ends or after ``rewind``.

    Raises:
        ValueError: an epoch has no batch at all.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._inner: Iterator[Any] | None = None

    def rewind(self) -> None:
        """The loader's state was replaced: start a new inner iterator at the next batch."""
        self._inner = None

    def __next__(self) -> Any:
        for _ in range(2):
            if self._inner is None:
                self._inner = iter(self._loader)
            try:
                return next(self._inner)
            except StopIteration:
                self._inner = None
        raise ValueError(f"{type(self._loader).__name__} gave no batch in a whole epoch")
