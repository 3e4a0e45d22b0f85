"""Integration with Lightning (``lightning`` and ``pytorch_lightning``): ``Trainer(...,
callbacks=[CkptdCallback()])``.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Unpack

from torch import Tensor
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from ckptd.client import values
from ckptd.client.capture.object_attributes import of_trainer
from ckptd.client.capture.step_state import Stateful
from ckptd.client.checkpointer import Checkpointer
from ckptd.client.data.loaders import check_loader, repeats_by_index
from ckptd.client.data.position import DataPosition, Reach, log_refetched
from ckptd.client.frameworks.step_driver import (
    SKIPS,
    Make,
    StepDriver,
    check_shape,
    name_of_this_training,
    whole_state,
)
from ckptd.client.log_lines import get_logger
from ckptd.client.model.hooks import layered
from ckptd.client.options import CheckpointerOptions, OptionGroups, check_keywords

logger = get_logger(__name__)


_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_UNSUPPORTED = {
    "DeepSpeedStrategy": "hooks cannot see the weights and optimizer state that it keeps",
    "FSDPStrategy": "it flattens parameters (FSDP1)",
}


def _callback_classes() -> tuple[type, ...]:
    """``Callback`` of the imported packages, or of all installed ones: each accepts only its own."""
    wanted = [name for name in _PACKAGES if name in sys.modules] or _PACKAGES
    found, missing = [], []
    for name in wanted:
        try:
            found.append(importlib.import_module(name).Callback)
        except ImportError as error:
            missing.append(str(error))
    if not found:
        raise ModuleNotFoundError(
            "ckptd.client.frameworks.lightning needs lightning or pytorch_lightning "
            f"({'; '.join(missing)}): pip install 'ckptd[lightning]'"
        )
    return tuple(found)


class CkptdCallback(*_callback_classes()):  # type: ignore[misc]
    """Take a snapshot at every optimizer step; the same command, restarted after a failure, resumes with the
    exact bits.

    With ``automatic_optimization = False`` a step is a batch, however many updates it makes. ``ckpt_path=``
    is not needed. The snapshots contain the model, optimizer, schedulers, scaler, random state, position in
    the data, the loops' counters, the values logged with ``on_epoch=True`` in the running epoch, and the
    state of other callbacks.

    Args:
        refetch: True: fetch the batches of the interrupted epoch again, which takes as long as fetching
            them took. False: skip them; correct if a sample depends only on its index. None: skip them
            only if they provably follow from their indices.
        log_scalars: every ``log_every_n_steps`` give ``Checkpointer.scalars`` to the Trainer's loggers.
        state: more objects to capture, by name (see ``Checkpointer``).
        options: ``run=``, ``daemon=``, ``snapshots=``, ``recovery=`` and ``layout=``, as for
            ``Checkpointer``. The run name of a second ``fit()`` in the same process ends with its number.
    Raises:
        TypeError: a keyword is not one of ``Checkpointer``, or a group has another type.
        ValueError: when training starts, a setting prevents an exact resumption.
    """

    def __init__(
        self,
        *,
        refetch: bool | None = None,
        log_scalars: bool = False,
        state: Mapping[str, Stateful] | None = None,
        **options: Unpack[OptionGroups],
    ) -> None:
        check_keywords("CkptdCallback()", options)
        self._refetch, self._state, self._log_scalars = refetch, dict(state or {}), log_scalars
        self._options = CheckpointerOptions.of(options)
        self._who: dict[str, int] = {}
        self._loop: LightningLoop | None = None
        self.checkpointer: Checkpointer | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the settings early."""
        if stage == "fit":
            _check(trainer, pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the loop, which is about to start, and restore."""
        if "_DataLoaderIter" in type(trainer.fit_loop._data_fetcher).__name__:
            raise ValueError(
                "training_step(dataloader_iter) fetches batches itself, so ckptd cannot record "
                "their position: use training_step(batch)"
            )
        self._leave()
        # Lightning's own launcher does not set RANK.
        self._who = {"rank": trainer.global_rank, "world_size": trainer.world_size}
        self._loop = LightningLoop(trainer, self, self._make, refetch=self._refetch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the scalars where Lightning logs its own."""
        if self._log_scalars and self._loop is not None:
            self._loop.log_scalars()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach; the last snapshot has been taken."""
        self._leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach; the daemon keeps the snapshots."""
        self._leave()

    def _make(self, model: Any, optimizer: Any, state: dict[str, Stateful]) -> Checkpointer:
        whole = whole_state(state, self._state)
        who = name_of_this_training(self._options.run.completed(**self._who))
        options = replace(self._options, run=who).keywords()
        self.checkpointer = Checkpointer(model, optimizer, whole, **options)
        return self.checkpointer

    def _leave(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()


def _check(trainer: Any, pl_module: Any) -> None:
    reason = _UNSUPPORTED.get(type(trainer.strategy).__name__)
    if reason is not None:
        raise ValueError(
            f"CkptdCallback cannot capture {type(trainer.strategy).__name__}: {reason}; use DDP, "
            "or ModelParallelStrategy (FSDP2)"
        )
    loop = trainer.fit_loop.epoch_loop
    if not all(hasattr(loop, name) for name in ("advance", "on_run_start", "automatic_optimization")):
        raise ValueError(
            "CkptdCallback does not support the loops of this version of Lightning: install a "
            "supported one with `pip install 'ckptd[lightning]'`"
        )


class LoopProgress:
    """The counters of all loops: epochs, batches, optimizer steps, schedulers.

    They are restored twice, because entering an epoch resets its counters: when training starts, and in the
    epoch.

    Args:
        shape: as in `check_shape`.
    """

    def __init__(self, trainer: Any, shape: dict[str, int]) -> None:
        self._trainer, self._shape = trainer, shape
        self._recorded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        loops = self._trainer.fit_loop.state_dict()
        # Batches are fetched again, so a stateful loader must not resume after them.
        loops["state_dict"].pop("combined_loader", None)
        return {"shape": self._shape, "loops": loops}

    def load_state_dict(self, recorded: dict[str, Any]) -> None:
        """Keep the state for ``start`` and ``resume_epoch``."""
        check_shape(recorded["shape"], self._shape)
        self._recorded = recorded["loops"]

    def start(self) -> None:
        """Restore before the first epoch, as if it had not started, so that its hooks run."""
        self.resume_epoch()
        progress = self._trainer.fit_loop.epoch_progress
        for counts in (progress.total, progress.current):
            if counts.ready > counts.processed:
                counts.ready -= 1
                counts.started -= 1

    def resume_epoch(self) -> None:
        """Restore in the epoch, after it has started."""
        _load(self._trainer.fit_loop, self._recorded, "")


def _load(loop: Any, recorded: dict[str, Any], prefix: str) -> None:
    """``loop.load_state_dict`` without marking a restart: Lightning's own restart is not exact."""
    loop._load_from_state_dict(recorded, prefix)
    for name, child in list(vars(loop).items()):
        if hasattr(child, "_load_from_state_dict"):
            _load(child, recorded, f"{prefix}{name}.")


class EpochSums:
    """The sums of ``self.log(..., on_epoch=True)`` in this epoch, and the newest metrics that callbacks
    monitor.

    Users may log times, so a replay is not compared with them. A sum is restored when its key is logged
    again, because only then Lightning knows its reduction.
    """

    reproducible = False

    def __init__(self, trainer: Any, layers: ExitStack) -> None:
        self._trainer = trainer
        self._results = trainer.fit_loop.epoch_loop._results
        self._pending: dict[str, list[Any]] = {}
        layers.enter_context(layered(self._results, "update_metrics", self._update_metrics))

    def state_dict(self) -> dict[str, Any]:
        sums = {
            key: [item.value, getattr(item, "cumulated_batch_size", None)]
            for key, item in self._results.items()
            if item.is_tensor and item.meta.on_epoch and not item.has_reset
        }
        monitored = self._trainer._logger_connector._callback_metrics
        return {
            "sums": {**self._pending, **sums},
            "monitored": {k: v for k, v in monitored.items() if isinstance(v, Tensor)},
        }

    def load_state_dict(self, recorded: dict[str, Any]) -> None:
        self._pending = dict(recorded["sums"])
        self._trainer._logger_connector._callback_metrics.update(recorded["monitored"])

    def _update_metrics(self, below: Any, key: str, value: Any, batch_size: int) -> None:
        if key in self._pending:
            item = self._results[key]
            total, count = self._pending.pop(key)
            item.value = total.to(item.value.device)
            if count is not None:
                item.cumulated_batch_size = count.to(item.cumulated_batch_size.device)
        below(key, value, batch_size)


class CallbackStates:
    """``state_dict()`` of the other callbacks (early stopping, model checkpoints). Some contain times, so a
    replay is not compared with them. A callback whose state cannot be packed is left out with a warning.
    """

    reproducible = False

    def __init__(self, trainer: Any, own: Any) -> None:
        self._callbacks = [c for c in trainer.callbacks if c is not own and _packs(c)]

    def state_dict(self) -> dict[str, Any]:
        states = {c.state_key: c.state_dict() for c in self._callbacks}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, recorded: dict[str, Any]) -> None:
        for callback in self._callbacks:
            if callback.state_key in recorded:
                callback.load_state_dict(recorded[callback.state_key])


def _packs(callback: Any) -> bool:
    try:
        values.pack(callback.state_dict(), type(callback).__name__)
    except values.UnsupportedValue as error:
        logger.warning("the state of the callback %s is not captured: %s", type(callback).__name__, error)
        return False
    return True


class LightningLoop:
    """Drives the steps of one ``Trainer.fit()``: finds the tops of steps, and starts the loop at a restored
    position.

    Lightning calls callbacks after it has fetched the batch, and cannot enter an epoch in its middle.
    Therefore methods of this Trainer's loops are wrapped while it trains:

    * ``epoch_loop.advance`` fetches and trains one batch: the first batch of an accumulation is the top of
      our loop. Logging and validation of the previous step are complete, and the data of this step are not
      fetched yet.
    * ``epoch_loop.on_run_start`` creates the epoch's iterator: that of the restored epoch is moved to the
      exact position.
    * ``fit_loop.on_run_end`` takes the last snapshot, before callbacks change the weights (weight averaging).
    * ``precision_plugin.train_step_context`` is the forward; Lightning does not call the model as a module.

    A step is an optimizer step with all batches of an accumulation. In manual optimization, in which a batch
    may update several times or not at all, a step is a batch.

    Args:
        own: the callback, whose own state is not captured.
        make: called with model, optimizer and state.
        refetch: fetch all batches of the interrupted epoch again instead of skipping them; None: only if
            they do not provably follow from their indices.
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
            "attributes": of_trainer([c for c in trainer.callbacks if c is not own], trainer.strategy.model),
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

    def log_scalars(self) -> None:
        """Give ours to the loggers, in the steps in which Lightning gives them its own."""
        trainer, connector = self._trainer, self._trainer._logger_connector
        if (not self._manual and trainer.fit_loop._should_accumulate()) or not connector.should_update_logs:
            return
        scalars, step = self._driver.checkpointer.scalars(), trainer.fit_loop.epoch_loop._batches_that_stepped
        for logger in trainer.loggers if scalars else ():
            logger.log_metrics(scalars, step=step)

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
            # Lightning's set-up created the first epoch's iterator from a random state that is lost. Create
            # it again from a known one, and leave the random state as if this had not happened. Not if
            # Lightning started from its own checkpoint (``ckpt_path=``): its loader state must not be lost.
            own_checkpoint = bool(self._trainer.fit_loop.is_resuming)
            position.loader = _iterator_of(fetcher) is created_before and not own_checkpoint
        if position.loader:
            position.return_to_epoch()
            iter(fetcher)
            position.return_to_epoch()
        if resuming:
            self._progress.resume_epoch()
            started_s, skipped = time.perf_counter(), self._skip(fetcher)
            position.fast_forward(lambda: next(fetcher), skipped)
            if self._refetch:
                log_refetched(position, skipped, time.perf_counter() - started_s, SKIPS)

    def _skip(self, fetcher: Any) -> int:
        """Skip the batches that need not be created again; returns their number."""
        count, combined = self._position.skippable, _iterator_of(fetcher)
        if self._refetch or len(combined.iterators) != 1 or fetcher.length is None:
            return 0
        iterator = combined.iterators[0]
        single = type(iterator) is _SingleProcessDataLoaderIter
        if not single or not hasattr(iterator._dataset, "__getitem__"):
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


def _total(trainer: Any) -> int:
    """The number of optimizer steps; a very large number if it depends on the data."""
    steps = trainer.estimated_stepping_batches
    return int(steps) if 0 < steps < math.inf else sys.maxsize


def _check_data(loaders: list[Any], *, skip: bool) -> None:
    for loader in loaders:
        dataset = getattr(loader, "dataset", None)
        if dataset is None or isinstance(dataset, IterableDataset):
            logger.warning(
                "the training data is a %s, which cannot skip batches: after a failure, ckptd fetches the "
                "batches of the interrupted epoch again up to the position; it must return the same items "
                "in the same order each time",
                type(loader if dataset is None else dataset).__name__,
            )
        check_loader(loader, skip=skip, in_state=False, option=SKIPS)
