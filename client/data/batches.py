"""An endless iterator over a data loader that a restarted job restores to the exact same batches."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from ckptd.client.data.ledger import BatchLedger
from ckptd.client.data.loaders import (
    forget_prepared,
    has_indices,
    makes_ahead,
    repeats_by_index,
    reuses_workers,
    skipping,
    torch_loader,
)
from ckptd.client.data.position import DataPosition, Reach, log_refetched
from ckptd.client.rng_state import capture_rng, restore_rng


class Batches(Iterator[Any]):
    """All epochs of ``loader``, with an inner iterator for each epoch and after ``rewind``.

    Args:
        ledger: the ledger of the checkpointer; None if no position is recorded.
        own_state: the loader keeps its position itself, in ``state=``.
        skip: skip batches of the interrupted epoch without creating them; None: only if they
            provably follow from their indices.
    Raises:
        ValueError: an epoch has no batches, or a batch is fetched before the first step.
    """

    def __init__(
        self,
        loader: Any,
        ledger: BatchLedger | None = None,
        *,
        own_state: bool = False,
        skip: bool | None = None,
    ) -> None:
        self._loader, self._ledger = loader, ledger
        self._inner: Iterator[Any] | None = None
        self._skips = repeats_by_index(loader) if skip is None else skip
        self._begun = self._reused = False
        self._position: DataPosition | None = None
        if ledger is not None and not own_state:
            self._reach = Reach(loader)
            self._position = DataPosition(self._reach, ahead=makes_ahead(loader))
        if ledger is not None:
            self.go_to(ledger.add(self))
            self.rewind()

    @property
    def loader(self) -> Any:
        """What is iterated over."""
        return self._loader

    def is_of(self, loader: Any) -> bool:
        """Whether these are the batches of that loader."""
        return self._loader is loader

    def generators(self) -> list[object]:
        """The random generators that the loader reaches: they are captured with its position."""
        return [] if self._position is None else self._reach.objects

    # -- for the ledger --------------------------------------------------------------------------

    def position(self) -> dict[str, Any] | None:
        """The position in the data; before the first batch, the state from which the first epoch starts."""
        if self._position is None:
            return {} if self._begun else None
        if not self._begun:
            return {"unbegun": self._reach.capture()}
        return {**self._position.state_dict(), "reused": self._reused}

    def go_to(self, position: dict[str, Any] | None) -> None:
        """Move to a recorded position: the next batch is the one that follows it."""
        self._inner, self._begun = None, position is not None and "unbegun" not in position
        if self._position is None or not position:
            return
        if self._begun:
            self._reused = position["reused"]
            self._position.load_state_dict(position)
        else:
            self._reach.restore(position["unbegun"])

    def rewind(self) -> None:
        """The loader's state was replaced: start a new inner iterator, immediately if it has a position.

        It must not wait for the next batch: Accelerate reads the end of an epoch from its loader
        earlier.
        """
        self._inner = self._return() if self._begun and self._ledger is not None else None

    # -- batches ---------------------------------------------------------------------------------

    def __next__(self) -> Any:
        if self._ledger is not None and not self._ledger.begun:
            raise ValueError(
                "a batch was fetched before the first step: call next(batches) in the body of "
                "`for step in ckpt.steps(total)`, so that a replayed step gets the same batches"
            )
        if self._inner is None:
            self._inner = self._new_epoch()
        for _ in range(2):
            before = {} if self._position is None else self._position.about_to_fetch()
            try:
                batch = next(self._inner)
            except StopIteration:
                self._inner = self._new_epoch()
                continue
            if self._position is not None:
                self._position.fetched(before)
            if self._ledger is not None:
                self._ledger.note(batch)
            return batch
        self._inner = None
        once = isinstance(self._loader, Iterator)
        raise ValueError(
            f"{type(self._loader).__name__} returned no batch in a whole epoch"
            + once
            * ": it is an iterator, which has only one epoch; pass its loader or dataset, batches(loader)"
        )

    def _new_epoch(self) -> Iterator[Any]:
        position = self._position
        if position is not None:
            forget_prepared(self._loader)
            self._reused = reuses_workers(self._loader)
            position.begin_epoch(position.epoch + 1 if self._begun else 0)
        self._begun = True
        return iter(self._loader)

    def _return(self) -> Iterator[Any]:
        """The restored epoch at its position; keeps the random state, which belongs to the current step."""
        position, now = self._position, capture_rng()
        if position is None:
            # It resumes at the position of its own state; the original run did not draw the numbers
            # that it draws now.
            iterator: Iterator[Any] = iter(self._loader)
            restore_rng(now)
            return iterator
        started_s = time.perf_counter()
        forget_prepared(self._loader)
        skipped = position.skippable if self._skips and has_indices(self._loader) else 0
        with contextlib.ExitStack() as stack:
            after = stack.enter_context(skipping(self._loader, 0)) if has_indices(self._loader) else None
            if self._reused and not reuses_workers(self._loader):
                inner = torch_loader(self._loader)
                assert inner is not None
                iter(inner)
            if after is not None:
                after.count = skipped
            position.return_to_epoch()
            iterator = iter(self._loader)
            position.fast_forward(lambda: next(iterator), skipped)
        restore_rng(now)
        option = "batches(loader, skip=True)" if has_indices(self._loader) else ""
        if not self._skips:
            log_refetched(position, skipped, time.perf_counter() - started_s, option)
        return iterator
