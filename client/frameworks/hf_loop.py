"""Integration with the training loop of transformers' ``Trainer``: it finds the tops of steps, and
starts the loop at a restored position.

Callbacks suffice for recording, but not for resuming: the loop chooses its first epoch before
``on_train_begin``. Therefore two methods of the Trainer object are wrapped while it trains:

* ``get_batch_samples`` starts each optimizer step: it is the top of our loop. Logging, evaluation and
  saving of the previous step are complete, and the data of this step are not fetched yet.
* ``_run_epoch``: epochs before the restored one are skipped. The restored epoch is entered in its
  middle, as Trainer does with ``resume_from_checkpoint=``, but with an iterator at the exact position.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from accelerate import skip_first_batches
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.trainer_utils import has_length

from ckptd.client.capture.step_state import Stateful
from ckptd.client.checkpointer import Checkpointer
from ckptd.client.data.loaders import check_loader, repeats_by_index
from ckptd.client.data.position import DataPosition, Reach, log_refetched
from ckptd.client.frameworks.hf_state import (
    LogHistory,
    TrainerProgress,
    load_sampler_state,
    sampler_state,
)
from ckptd.client.frameworks.step_driver import StepDriver
from ckptd.client.log_lines import get_logger
from ckptd.client.model.hooks import layered

__all__ = ["TrainerLoop"]

logger = get_logger(__name__)

_SKIPS = "CkptdCallback(refetch=False)"

# Creates the Checkpointer when all its arguments exist.
Make = Callable[[Any, Any, dict[str, Stateful]], Checkpointer]


class TrainerLoop:
    """Drives the steps of one ``Trainer.train()``.

    Args:
        make: called with model, optimizer and state before the first epoch.
        refetch: fetch all batches of the interrupted epoch again instead of skipping them; None:
            only if they do not provably follow from their indices.
    """

    def __init__(self, trainer: Trainer, make: Make, *, refetch: bool | None) -> None:
        self._trainer, self._make, self._refetch = trainer, make, refetch
        self._position = DataPosition()
        self._driver: StepDriver | None = None
        self._resuming = False
        self._rewound: Iterator[Any] | None = None
        self._arguments = inspect.signature(trainer._run_epoch)
        self._layers = ExitStack()
        self._layers.enter_context(layered(trainer, "_run_epoch", self._run_epoch))
        self._layers.enter_context(layered(trainer, "get_batch_samples", self._get_batch_samples))

    def close(self) -> None:
        """Restore the Trainer's methods; the daemon keeps the snapshots."""
        self._layers.close()
        if self._driver is not None:
            self._driver.close()

    # -- an epoch --------------------------------------------------------------------------------

    def _run_epoch(self, below: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        given = dict(self._arguments.bind(*args, **kwargs).arguments)
        trainer = self._trainer
        if self._driver is None:
            try:
                self._driver = self._begin(given)
            except BaseException:
                self.close()
                raise
        if self._resuming and trainer.state.global_step >= trainer.state.max_steps:
            trainer.control.should_training_stop = True  # it had ended
            return
        self._rewound = None
        if not self._resuming:
            resumed_here = given["resume_from_checkpoint"] is not None and (
                given["epoch"] == given["epochs_trained"]
            )
            self._position.begin_epoch(
                given["epoch"],
                consumed=given["steps_trained_in_current_epoch"] if resumed_here else 0,
                loader=sampler_state(given["train_dataloader"]),
            )
        elif not self._enter(given):
            return
        below(**given)
        if trainer.control.should_training_stop or self._is_last(given["epoch"]):
            self._driver.finish(trainer.state.global_step)

    def _is_last(self, epoch: int) -> bool:
        last: int = self._trainer.state.num_train_epochs
        return epoch + 1 >= last

    def _begin(self, given: dict[str, Any]) -> StepDriver:
        trainer, loader = self._trainer, given["train_dataloader"]
        self._check_loader(loader)
        self._position.reach = Reach(loader, counts=False)
        shape = {
            "gradient_accumulation_steps": trainer.args.gradient_accumulation_steps,
            "per_device_train_batch_size": trainer.args.per_device_train_batch_size,
        }
        if has_length(loader):
            shape["the number of batches of an epoch"] = given["steps_in_epoch"]
        state: dict[str, Stateful] = {
            "trainer": TrainerProgress(trainer, shape),
            "log": LogHistory(trainer),
            "data": self._position,
            "lr_scheduler": trainer.lr_scheduler,
        }
        if trainer.accelerator.scaler is not None:
            state["scaler"] = trainer.accelerator.scaler
        checkpointer = self._make(given["model"], trainer.optimizer, state)
        self._resuming = checkpointer.resumed_from is not None
        return StepDriver(
            checkpointer,
            trainer.state.max_steps,
            start=0 if self._resuming else trainer.state.global_step,
        )

    def _enter(self, given: dict[str, Any]) -> bool:
        """Whether this is the epoch of the restored state; if so, change ``given`` to run the rest of it."""
        position = self._position
        if given["epoch"] < position.epoch:
            return False
        if given["epoch"] > position.epoch:
            raise ValueError(
                f"the snapshots of this run end in epoch {position.epoch}, but "
                "resume_from_checkpoint= starts in epoch "
                f"{given['epoch']}: pass a new name to CkptdCallback(run=...) to resume from that checkpoint"
            )
        self._resuming = False
        load_sampler_state(given["train_dataloader"], position.loader)
        position.return_to_epoch()
        given["epochs_trained"] = position.epoch
        given["steps_trained_in_current_epoch"] = position.consumed
        # Trainer checks only that it is not None, and looks for random states in it; it has none.
        given["resume_from_checkpoint"] = os.devnull if position.consumed else None
        if position.consumed:
            self._rewound = self._fast_forward(given["train_dataloader"])
            position.return_global_state()
        return True

    # -- a step ----------------------------------------------------------------------------------

    def _get_batch_samples(
        self, below: Callable[..., Any], epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any
    ) -> Any:
        assert self._driver is not None
        self._driver.top(self._trainer.state.global_step)
        source = epoch_iterator if self._rewound is None else self._rewound
        note = self._driver.checkpointer.note_batch
        return below(self._position.watch(source, note), *args, **kwargs)

    # -- data ------------------------------------------------------------------------------------

    def _check_loader(self, loader: Any) -> None:
        if not hasattr(loader, "dataset"):
            raise ValueError(
                f"the training data comes from a {type(loader).__name__}, which is not a "
                "DataLoader: ckptd cannot record its position; "
                "return a torch DataLoader from get_train_dataloader()"
            )
        check_loader(loader, skip=self._refetch is False, in_state=False, option=_SKIPS)
        if isinstance(loader.dataset, IterableDataset):
            logger.warning(
                "the training data is an IterableDataset: after a failure, ckptd fetches the "
                "batches of the interrupted epoch again "
                "up to the position; the dataset must return the same items in the same order each time"
            )
        if self._refetch is None:
            self._refetch = not repeats_by_index(loader)

    def _fast_forward(self, loader: Any) -> Iterator[Any]:
        """An iterator over ``loader`` at the recorded position; leaves the random state as the
        fetches changed it.
        """
        position, started_s = self._position, time.perf_counter()
        skips = type(loader) is DataLoaderShard and not isinstance(loader.dataset, IterableDataset)
        skipped = position.skippable if skips and not self._refetch else 0
        source = skip_first_batches(loader, skipped) if skipped else loader
        holders: list[Any] = [source, *_inner_batch_sampler(source)]
        for holder in holders:
            if hasattr(holder, "set_epoch"):
                holder.set_epoch(position.epoch)
        iterator: Iterator[Any] = iter(source)
        position.fast_forward(lambda: next(iterator), skipped)
        if self._refetch:
            took_s = time.perf_counter() - started_s
            log_refetched(position, skipped, took_s, _SKIPS if skips else "")
        return iterator


def _inner_batch_sampler(loader: Any) -> list[Any]:
    """The inner batch sampler, to which Accelerate's loaders do not pass the epoch number."""
    inner = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
    return [] if inner is None else [inner]
