"""Where in its data a loop is, and how a successor comes to the very same batches.

The order of an epoch, and what a collator draws (masks, augmentations), follow from the random
state at the epoch's beginning and at the time of each fetch. Loaders fetch ahead: when a step
begins, the next batch may be there already, made from a random state that is gone. So two states
are kept: that before the epoch's iterator was created, and that before the newest fetch. A
successor creates the iterator from the one and repeats the newest fetch from the other. One fetch
yields one batch, and the very first one possibly two, so the two newest batches are fetched again;
the others may be skipped without being made.

Random state is that of the global generators, and of those that a loader has in reach
(`ckptd.client.data.reach`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ckptd.client.data.reach import Reach
from ckptd.client.log_lines import get_logger
from ckptd.client.rng_state import capture_rng, restore_rng

__all__ = ["DataPosition", "tell_refetched"]

logger = get_logger(__name__)

# Batches that must really be fetched again: the one that a first fetch hands out, and the one that
# it has made in advance.
_AGAIN = 2


class DataPosition:
    """Epoch, batches handed out in it, and the random states from which they come again; goes into
    ``state=``.

    Args:
        ahead: whether this process may make a batch before it is asked for. Otherwise the state before the newest fetch is not needed.

    Attributes:
        reach: of the loader; None where there is none yet.
    """

    def __init__(self, reach: Reach | None = None, *, ahead: bool = True) -> None:
        self.reach, self._ahead = reach, ahead
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
        if self.reach is not None:
            self.reach.look()
        self._at_epoch, self._at_fetch = self._capture(), {}

    def return_to_epoch(self) -> None:
        """Random state as it was when this epoch's iterator was created."""
        self._restore(self._at_epoch)

    def return_global_state(self) -> None:
        """The same of the global generators alone; those in reach of the loader are where its iterator is."""
        restore_rng(self._at_epoch)

    def about_to_fetch(self) -> dict[str, Any]:
        """To be given to ``fetched``."""
        return self._capture() if self._ahead else {}

    def fetched(self, before: dict[str, Any]) -> None:
        """A batch was handed out; ``before`` is the random state before that."""
        self.consumed += 1
        self._at_fetch = before

    def watch(
        self, iterator: Iterator[Any], note: Callable[[Any], object] | None = None
    ) -> Iterator[Any]:
        """``iterator``, counted; like it, it can be asked again after its end. ``note`` is told each batch."""
        return _Watched(self, iterator, note)

    @property
    def skippable(self) -> int:
        """How many batches of this epoch need not be made again, where a loader can skip."""
        return max(self.consumed - _AGAIN, 0)

    def fast_forward(self, fetch: Callable[[], object], skipped: int) -> None:
        """Fetch again what this position lies behind, after ``skipped`` batches; the epoch's
        iterator was just created.

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
                    f"the training data ended before batch {self.consumed} of epoch {self.epoch}, where this run was: is it another "
                    "dataset? Pass run= a new name to begin anew"
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


def tell_refetched(position: DataPosition, skipped: int, took_s: float, option: str) -> None:
    """Say what it has cost to come back to ``position``; ``option`` does without, if there is one."""
    fetched = position.consumed - skipped
    if fetched > _AGAIN:
        logger.warning(
            "%d batches of epoch %d were fetched again and thrown away in %.1f s, as samples may be made with random numbers%s",
            fetched,
            position.epoch,
            took_s,
            f"; if a sample depends on its index only, {option} does without" if option else "",
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
