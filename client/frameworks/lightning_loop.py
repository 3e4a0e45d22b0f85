"""Integration with Lightning's training loop: it finds the tops of steps, and starts the loop at a
restored position.

Lightning calls callbacks after it has fetched the batch, and cannot enter an epoch in its middle.
Therefore methods of this Trainer's loops are wrapped while it trains:

* ``epoch_loop.advance`` fetches and trains one batch: the first batch of an accumulation is the top of
  our loop. Logging and validation of the previous step are complete, and the data of this step are
  not fetched yet.
* ``epoch_loop.on_run_start`` creates the epoch's iterator: that of the restored epoch is moved to the
  exact position.
* ``fit_loop.on_run_end`` takes the last snapshot, before callbacks change the weights (weight averaging).
* ``precision_plugin.train_step_context`` is the forward; Lightning does not call the model as a module.

A step is an optimizer step with all batches of an accumulation. In manual optimization, in which a batch
may update several times or not at all, a step is a batch.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from ckptd.client.capture.step_state import Stateful
from ckptd.client.checkpointer import Checkpointer
from ckptd.client.data.loaders import check_loader, repeats_by_index
from ckptd.client.data.position import DataPosition, Reach, log_refetched
from ckptd.client.frameworks.lightning_state import CallbackStates, EpochSums, LoopProgress
from ckptd.client.frameworks.step_driver import StepDriver
from ckptd.client.log_lines import get_logger
from ckptd.client.model.hooks import layered

__all__ = ["LightningLoop"]

logger = get_logger(__name__)

_SKIPS = "CkptdCallback(refetch=False)"

# Creates the Checkpointer when all its arguments exist.
Make = Callable[[Any, Any, dict[str, Stateful]], Checkpointer]


class LightningLoop:
    """Drives the steps of one ``Trainer.fit()``; created when training starts.

    Args:
        own: the callback, whose own state is not captured.
        make: called with model, optimizer and state.
        refetch: fetch all batches of the interrupted epoch again instead of skipping them; None:
            only if they do not provably follow from their indices.
    """

    def __init__(self, trainer: Any, own: Any, make: Make, *, refetch: bool | None) -> None:
        fit_loop = trainer.fit_loop
        loaders = list(fit_loop._combined_loader.flattened)
        _check_data(loaders, skip=refetch is False)
        self._trainer = trainer
        self._manual = not trainer.lightning_module.automatic_optimization
        self._refetch = not all(map(repeats_by_index, loaders)) if refetch is None else refetch
        self._position = DataPosition(Reach(loaders, counts=False))
        self._layers = ExitStack()
        shape = {"accumulate_grad_batches": trainer.accumulate_grad_batches}
        if math.isfinite(fit_loop.max_batches):
            shape["the number of batches of an epoch"] = int(fit_loop.max_batches)
        self._progress = LoopProgress(trainer, shape)
        state: dict[str, Stateful] = {
            "loops": self._progress,
            "data": self._position,
            "sums": EpochSums(trainer, self._layers),
            "callbacks": CallbackStates(trainer, own),
        }
        for at, config in enumerate(trainer.lr_scheduler_configs):
            state[f"lr_scheduler.{at}"] = config.scheduler
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            state["scaler"] = scaler
        try:
            optimizers = list(trainer.optimizers) if self._manual else trainer.optimizers[0]
            checkpointer = make(trainer.strategy.model, optimizers, state)
        except BaseException:
            self._layers.close()
            raise
        self._resuming = checkpointer.resumed_from is not None
        if self._resuming:
            self._progress.start()
        total = sys.maxsize if self._manual else _total(trainer)
        self._driver = StepDriver(checkpointer, total, start=0 if self._resuming else self._done())
        for holder, name, layer in (
            (fit_loop.epoch_loop, "on_run_start", self._on_run_start),
            (fit_loop.epoch_loop, "advance", self._advance),
            (fit_loop, "on_run_end", self._on_run_end),
            (trainer.precision_plugin, "train_step_context", self._train_step_context),
            (trainer.strategy, "batch_to_device", self._batch_to_device),
        ):
            self._layers.enter_context(layered(holder, name, layer))

    def close(self) -> None:
        """Restore the Trainer's methods; the daemon keeps the snapshots."""
        self._layers.close()
        self._driver.close()

    # -- an epoch --------------------------------------------------------------------------------

    def _on_run_start(self, below: Callable[..., None], fetcher: Any) -> None:
        position, created_before = self._position, _iterator_of(fetcher)
        resuming, self._resuming = self._resuming, False
        if resuming:
            position.return_to_epoch()
        else:
            position.begin_epoch(self._trainer.current_epoch)
        below(fetcher)
        if not resuming:
            # Lightning's set-up created the first epoch's iterator from a random state that is lost.
            # Create it again from a known one, and leave the random state as if this had not happened.
            position.loader = _iterator_of(fetcher) is created_before and not _is_resumed(self._trainer)
        if position.loader:
            self._create_again(fetcher)
        if resuming:
            self._progress.resume_epoch()
            started_s, skipped = time.perf_counter(), self._skip(fetcher)
            position.fast_forward(lambda: next(fetcher), skipped)
            if self._refetch:
                log_refetched(position, skipped, time.perf_counter() - started_s, _SKIPS)

    def _create_again(self, fetcher: Any) -> None:
        self._position.return_to_epoch()
        iter(fetcher)
        self._position.return_to_epoch()

    def _skip(self, fetcher: Any) -> int:
        """Skip the batches that need not be created again; returns their number."""
        count, combined = self._position.skippable, _iterator_of(fetcher)
        if self._refetch or len(combined.iterators) != 1 or fetcher.length is None:
            return 0
        iterator = combined.iterators[0]
        if type(iterator) is not _SingleProcessDataLoaderIter or not hasattr(
            iterator._dataset, "__getitem__"
        ):
            return 0
        for _ in range(count):
            next(iterator._sampler_iter)
        iterator._num_yielded += count
        combined._idx += count
        fetcher.fetched += count
        return count

    def _on_run_end(self, below: Callable[..., None]) -> None:
        self._driver.finish(self._done())
        below()

    # -- a step ----------------------------------------------------------------------------------

    def _done(self) -> int:
        """The number of completed steps."""
        loop = self._trainer.fit_loop.epoch_loop
        return int(loop.batch_progress.total.ready if self._manual else self._trainer.global_step)

    def _advance(self, below: Callable[..., None], fetcher: Any) -> None:
        self._driver.top(self._done())
        before = self._position.about_to_fetch()
        below(fetcher)
        self._position.fetched(before)

    def _batch_to_device(self, below: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self._trainer.training:
            self._driver.checkpointer.note_batch(batch)
        return below(batch, *args, **kwargs)

    @contextmanager
    def _train_step_context(self, below: Callable[..., Any]) -> Iterator[None]:
        if self._manual:  # it contains backward and updates
            with below():
                yield
            return
        with below(), self._driver.checkpointer.forward():
            yield


def _iterator_of(fetcher: Any) -> Any:
    """The iterator in use, over all loaders; each epoch has a new one."""
    return fetcher.combined_loader._iterator


def _is_resumed(trainer: Any) -> bool:
    """Whether Lightning started from its own checkpoint (``ckpt_path=``), whose loader state must not
    be lost.
    """
    return bool(trainer.fit_loop.is_resuming)


def _total(trainer: Any) -> int:
    """The number of optimizer steps; a very large number if it depends on the data."""
    steps = trainer.estimated_stepping_batches
    return int(steps) if 0 < steps < math.inf else sys.maxsize


def _check_data(loaders: list[Any], *, skip: bool) -> None:
    for loader in loaders:
        dataset = getattr(loader, "dataset", None)
        if dataset is None or isinstance(dataset, IterableDataset):
            logger.warning(
                "the training data is a %s, which cannot skip batches: after a failure, ckptd "
                "fetches the batches of the interrupted epoch "
                "again up to the position; it must return the same items in the same order each time",
                type(loader if dataset is None else dataset).__name__,
            )
        check_loader(loader, skip=skip, in_state=False, option=_SKIPS)
