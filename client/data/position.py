"""The position of a loop in its data, and its restoration to the exact same batches.

The order of an epoch and the random numbers of a collator (masks, augmentations) follow from the random
state at the start of the epoch and at each fetch. Loaders fetch ahead: when a step begins, the next
batch may exist already, created from a random state that is lost. Therefore two states are kept: the
state before the epoch's iterator was created, and the state before the newest fetch. A restarted job
creates the iterator from the first and repeats the newest fetch from the second. One fetch yields one
batch, the very first one possibly two, so the two newest batches are fetched again; earlier ones may be
skipped without creating them.

The random state is that of the global generators, and of the generators that the loader reaches
(`ckptd.client.data.reach`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ckptd.client.data.reach import Reach
from ckptd.client.log_lines import get_logger
from ckptd.client.rng_state import capture_rng, restore_rng

__all__ = ["DataPosition", "log_refetched"]

logger = get_logger(__name__)

# Batches that must be fetched again: the one that the first fetch returns, and the one that it
# creates in advance.
_AGAIN = 2


class DataPosition:
    """The epoch, the number of its batches returned so far, and the random states to repeat them; an
    object for ``state=``.

    Args:
        ahead: whether this process may create a batch before it is requested. If not, the state
            before the newest fetch is not needed.
    Attributes:
        reach: the reach of the loader; None if there is none yet.
    """

    def __init__(self, reach: Reach | None = None, *, ahead: bool = True) -> None:
        self.reach, self._ahead = reach, ahead
        self.epoch = 0
        self.consumed = 0
        self.loader: Any = None
        self._at_epoch: dict[str, Any] = {}
        self._at_fetch: dict[str, Any] = {}

    def begin_epoch(self, epoch: int, *, consumed: int = 0, loader: Any = None) -> None:
        """Record the start of an epoch; call it before the epoch's iterator is created.

        Args:
            loader: other state that determines the order of the epoch (seeds, generators), of types
                that ``state=`` accepts.
        """
        self.epoch, self.consumed, self.loader = epoch, consumed, loader
        if self.reach is not None:
            self.reach.look()
        self._at_epoch, self._at_fetch = self._capture(), {}

    def return_to_epoch(self) -> None:
        """Restore the random state before this epoch's iterator was created."""
        self._restore(self._at_epoch)

    def return_global_state(self) -> None:
        """Restore only the global generators; the generators that the loader reaches stay with its
        iterator.
        """
        restore_rng(self._at_epoch)

    def about_to_fetch(self) -> dict[str, Any]:
        """The random state before a fetch; pass it to ``fetched``."""
        return self._capture() if self._ahead else {}

    def fetched(self, before: dict[str, Any]) -> None:
        """Record that a batch was returned; ``before`` is the random state before the fetch."""
        self.consumed += 1
        self._at_fetch = before

    def watch(self, iterator: Iterator[Any], note: Callable[[Any], object] | None = None) -> Iterator[Any]:
        """Wrap ``iterator`` and count its batches; it can be called again after its end. Calls
        ``note`` with each batch.
        """
        return _Watched(self, iterator, note)

    @property
    def skippable(self) -> int:
        """The number of batches of this epoch that a loader may skip."""
        return max(self.consumed - _AGAIN, 0)

    def fast_forward(self, fetch: Callable[[], object], skipped: int) -> None:
        """Fetch the batches before this position again, except the ``skipped`` first ones, from a newly
        created iterator.

        Raises:
            ValueError: the data ends before the position.
        """
        for left in range(self.consumed - skipped, 0, -1):
            if left == 1 and self._at_fetch:
                self._restore(self._at_fetch)
            try:
                fetch()
            except StopIteration:
                raise ValueError(
                    f"the training data ended before batch {self.consumed} of epoch {self.epoch}, "
                    "the position of this run: is it another "
                    "dataset? Pass a new name to run= to start from the beginning"
                ) from None

    def _capture(self) -> dict[str, Any]:
        state = capture_rng()
        if self.reach is not None and (found := self.reach.capture()):
            state["reach"] = found
        return state

    def _restore(self, state: dict[str, Any]) -> None:
        restore_rng(state)
        if self.reach is not None:
            self.reach.restore(state.get("reach", {}))

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


def log_refetched(position: DataPosition, skipped: int, took_s: float, option: str) -> None:
    """Log the cost of the restoration to ``position``, and the ``option`` that avoids it, if any."""
    fetched = position.consumed - skipped
    if fetched > _AGAIN:
        logger.warning(
            "fetched %d batches of epoch %d again in %.1f s and discarded them, because samples "
            "may depend on random numbers%s",
            fetched,
            position.epoch,
            took_s,
            f"; if a sample depends only on its index, {option} avoids this" if option else "",
        )


class _Watched(Iterator[Any]):
    def __init__(
        self,
        position: DataPosition,
        inner: Iterator[Any],
        note: Callable[[Any], object] | None,
    ) -> None:
        self._position, self._inner, self._note = position, inner, note

    def __next__(self) -> Any:
        before = self._position.about_to_fetch()
        batch = next(self._inner)
        self._position.fetched(before)
        if self._note is not None:
            self._note(batch)
        return batch
