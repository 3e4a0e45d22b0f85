"""Where in its data a loop is, and how a successor comes to the very same batches.

The order of an epoch, and what a collator draws (masks, augmentations), follow from the random state at the epoch's beginning and
at the time of each fetch. Loaders fetch ahead: when a step begins, the next batch may be there already, made from a random state
that is gone. So two states are kept: that before the epoch's iterator was created, and that before the newest fetch. A successor
creates the iterator from the one and repeats the newest fetch from the other. One fetch yields one batch, and the very first one
possibly two, so the two newest batches are fetched again; the others may be skipped without being made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ckptd.client.rng import capture_rng, restore_rng

__all__ = ["DataPosition"]

# Batches that must really be fetched again: the one that a first fetch hands out, and the one that it has made in advance.
_AGAIN = 2


class DataPosition:
    """Epoch, batches handed out in it, and the random states from which they come again; goes into ``state=``."""

    def __init__(self) -> None:
        self.epoch = 0
        self.consumed = 0
        self.loader: Any = None
        self._at_epoch: dict[str, Any] = {}
        self._at_fetch: dict[str, Any] = {}

    def begin_epoch(self, epoch: int, *, consumed: int = 0, loader: Any = None) -> None:
        """The epoch's iterator is about to be created.

        Args:
            loader: what else the order of the epoch depends on (seeds, generators), of the types that ``state=`` takes.
        """
        self.epoch, self.consumed, self.loader = epoch, consumed, loader
        self._at_epoch, self._at_fetch = capture_rng(), {}

    def return_to_epoch(self) -> None:
        """Random state as it was when this epoch's iterator was created."""
        restore_rng(self._at_epoch)

    def about_to_fetch(self) -> dict[str, Any]:
        """To be given to ``fetched``."""
        return capture_rng()

    def fetched(self, before: dict[str, Any]) -> None:
        """A batch was handed out; ``before`` is the random state before that."""
        self.consumed += 1
        self._at_fetch = before

    def watch(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """``iterator``, counted; like it, it can be asked again after its end."""
        return _Watched(self, iterator)

    @property
    def skippable(self) -> int:
        """How many batches of this epoch need not be made again, where a loader can skip."""
        return max(self.consumed - _AGAIN, 0)

    def fast_forward(self, fetch: Callable[[], object], skipped: int) -> None:
        """Fetch again what this position lies behind, after ``skipped`` batches; the epoch's iterator was just created.

        Raises:
            ValueError: the data ends before the position.
        """
        for left in range(self.consumed - skipped, 0, -1):
            if left == 1:
                restore_rng(self._at_fetch)
            try:
                fetch()
            except StopIteration:
                raise ValueError(
                    f"the training data ended before batch {self.consumed} of epoch {self.epoch}, where this run was: is it another "
                    "dataset? Pass run= a new name to begin anew"
                ) from None

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "loader": self.loader,
            "at_epoch": self._at_epoch,
            "at_fetch": self._at_fetch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.consumed = state["epoch"], state["consumed"]
        self.loader = state["loader"]
        self._at_epoch, self._at_fetch = state["at_epoch"], state["at_fetch"]


class _Watched(Iterator[Any]):
    def __init__(self, position: DataPosition, inner: Iterator[Any]) -> None:
        self._position, self._inner = position, inner

    def __next__(self) -> Any:
        before = self._position.about_to_fetch()
        batch = next(self._inner)
        self._position.fetched(before)
        return batch
