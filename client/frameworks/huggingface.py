"""Integration with transformers' ``Trainer``: ``Trainer(..., callbacks=[CkptdCallback()])``."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch.utils.data import IterableDataset

try:
    from accelerate import skip_first_batches
    from accelerate.data_loader import DataLoaderShard
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import has_length
except ImportError as missing:
    raise ModuleNotFoundError(
        f"ckptd.client.frameworks.huggingface needs transformers and accelerate ({missing}): pip "
        "install 'ckptd[hf]'"
    ) from missing

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

_REFUSED_ARGUMENTS = {
    "auto_find_batch_size": "it changes the batch size during training; set per_device_train_batch_size",
    "ignore_data_skip": "the data would start again after a failure; leave it off (CkptdCallback skips)",
}
# Parameters of the Trainer's ``_run_epoch`` that the callback uses.
_NEEDED = (
    "epoch",
    "epochs_trained",
    "model",
    "resume_from_checkpoint",
    "steps_in_epoch",
    "steps_trained_in_current_epoch",
    "train_dataloader",
)


class CkptdCallback(TrainerCallback):  # type: ignore[misc]
    """Take a snapshot at every optimizer step; the same command, restarted after a failure, resumes with the
    exact bits.

    ``resume_from_checkpoint=`` is not needed. The snapshots contain the model, optimizer, scheduler, scaler,
    random state, position in the data, ``TrainerState`` with its log, and the state of callbacks that can
    export theirs. With ``TrainingArguments(deepspeed=...)`` (ZeRO stage 0, 1 or 2) they contain what
    ``ckptd.client.frameworks.deepspeed`` captures.

    Args:
        refetch: True: fetch the batches of the interrupted epoch again, which takes as long as fetching
            them took. False: skip them; correct if a sample depends only on its index (collators may draw
            random numbers, but not in workers). None: skip them only if they provably follow from their
            indices.
        log_scalars: with each log of the Trainer, give ``Checkpointer.scalars`` to what it reports to. They
            are not in its ``log_history``, which a resumed training repeats.
        state: more objects to capture, by name (see ``Checkpointer``).
        options: ``run=``, ``daemon=``, ``snapshots=``, ``recovery=`` and ``layout=``, as for
            ``Checkpointer``. The default of ``run=`` is the name of ``output_dir``; the name of a second
            training in the same process ends with its number.
    Raises:
        TypeError: a keyword is not one of ``Checkpointer``, or a group has another type.
        ValueError: when the Trainer is created or starts training, a setting prevents an exact
            resumption.
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
        self._named = self._options
        self._loop: TrainerLoop | None = None
        self.checkpointer: Checkpointer | None = None
        # Of all Trainers: nothing reports which one gets this callback, or when (`add_callback`).
        layers = ExitStack()
        layers.enter_context(layered(Trainer, "train", partial(_train, weakref.ref(self))))
        weakref.finalize(self, layers.close)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the arguments early."""
        _check_arguments(args)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach to the training loop, which is about to start."""
        _check_arguments(args)
        trainer = _trainer_of(self)
        _check_trainer(trainer)
        self._leave()  # a previous training ended with an exception
        who = self._options.run.completed(
            name=_run_name(args.output_dir), rank=args.process_index, world_size=args.world_size
        )
        self._named = replace(self._options, run=name_of_this_training(who))
        make = self._make_of_deepspeed if trainer.is_deepspeed_enabled else self._make
        self._loop = TrainerLoop(trainer, make, refetch=self._refetch, log_scalars=self._log_scalars)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach; the end of the last epoch took the last snapshot."""
        self._leave()

    def _make(self, model: Any, optimizer: Any, state: dict[str, Stateful]) -> Checkpointer:
        whole = whole_state(state, self._state)
        self.checkpointer = Checkpointer(model, optimizer, whole, **self._named.keywords())
        return self.checkpointer

    def _make_of_deepspeed(self, engine: Any, optimizer: Any, state: dict[str, Stateful]) -> Checkpointer:
        # Only where it is used: DeepSpeed is large, and need not be installed.
        from ckptd.client.frameworks.deepspeed import of_engine

        self.checkpointer = of_engine(engine, state, self._state, self._named)
        return self.checkpointer

    def _leave(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = None


def _train(
    reference: weakref.ref[CkptdCallback],
    below: Callable[..., Any],
    trainer: Trainer,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``Trainer.train``, which loads no half-written checkpoint if the trainer has this callback."""
    if any(each is reference() for each in trainer.callback_handler.callbacks):
        args, kwargs = _complete_checkpoints_only(trainer, args, kwargs)
    return below(trainer, *args, **kwargs)


def _trainer_of(callback: TrainerCallback) -> Trainer:
    """The Trainer that is calling ``callback``, searched in the calling frames: callbacks do not get it."""
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and callback in found.callback_handler.callbacks:
            return found
        frame = frame.f_back  # type: ignore[assignment]
    raise ValueError("CkptdCallback works only in transformers.Trainer.train()")


def _run_name(output_dir: str | None) -> str | None:
    """A run name derived from the output folder, so that other commands have other names."""
    if not output_dir:
        return None
    path = Path(output_dir).absolute()
    digest = hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9._-]', '-', path.name)[:48]}-{digest}"


def _check_arguments(args: Any) -> None:
    for name, advice in _REFUSED_ARGUMENTS.items():
        if getattr(args, name, None):
            raise ValueError(f"CkptdCallback cannot resume training with {name}=: {advice}")


def _check_trainer(trainer: Trainer) -> None:
    parameters = inspect.signature(Trainer._run_epoch).parameters if hasattr(Trainer, "_run_epoch") else {}
    if not all(name in parameters for name in _NEEDED):
        import transformers

        raise ValueError(
            f"CkptdCallback does not support the training loop of transformers {transformers.__version__}: "
            "install a supported version with `pip install 'ckptd[hf]'`"
        )
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"Trainer uses {trainer.args.n_gpu} GPUs in one process (DataParallel), which ckptd cannot "
            "capture: start one process per GPU with torchrun"
        )
    if trainer.is_deepspeed_enabled:
        from ckptd.client.frameworks.deepspeed import check_engine

        check_engine(trainer.model_wrapped)
    plugin = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    if plugin is not None and getattr(plugin, "fsdp_version", 1) != 2:
        raise ValueError(
            "FSDP1 flattens parameters, so ckptd cannot distinguish experts and their optimizer "
            "state: set fsdp_config={'version': 2}"
        )


_NAME = re.compile(r"checkpoint-(\d+)")
_ARGUMENT = "resume_from_checkpoint"
_WRITTEN_LAST = "trainer_state.json"


def _complete_checkpoints_only(
    trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of ``trainer.train``, where ``resume_from_checkpoint=True`` means the newest complete
    checkpoint, or none if there is none. Snapshots of the run take precedence over both.

    The Trainer writes the files of ``checkpoint-N`` one after the other into the folder of that name,
    ``trainer_state.json`` last; a kill may leave half of them. With ``resume_from_checkpoint=True`` it takes
    the folder with the highest N, and fails if that file is missing, before it calls any callback. A run with
    newer snapshots then could not resume.

    Raises:
        ValueError: ``resume_from_checkpoint`` names a half-written checkpoint.
    """
    if args:
        return (_complete(trainer, args[0]), *args[1:]), kwargs
    if _ARGUMENT in kwargs:
        return args, {**kwargs, _ARGUMENT: _complete(trainer, kwargs[_ARGUMENT])}
    return args, kwargs


def _complete(trainer: Any, given: Any) -> Any:
    if given is True:
        return _newest_complete(Path(trainer.args.output_dir))
    if isinstance(given, str) and _half_written(Path(given)):
        raise ValueError(
            f"resume_from_checkpoint={given!r} is half-written: its last file, {_WRITTEN_LAST}, is missing "
            "or truncated. Pass another checkpoint, or omit the argument: ckptd finds the snapshots of this "
            "run without it"
        )
    return given


def _newest_complete(folder: Path) -> str | bool | None:
    """The path of the newest complete checkpoint, or None; True if none is half-written."""
    numbered = [
        (int(found[1]), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.is_dir() and (found := _NAME.fullmatch(path.name))
    ]
    torn = {path for _, path in numbered if _half_written(path)}
    if not torn:
        return True
    complete = max((each for each in numbered if each[1] not in torn), default=None)
    logger.warning(
        "ignoring the half-written checkpoint %s (the Trainer was killed while it saved it). Snapshots of "
        "this run take precedence; without any, training starts %s. You may delete the folder",
        ", ".join(sorted(str(path) for path in torn)),
        f"at {complete[1]}" if complete else "at the beginning",
    )
    return str(complete[1]) if complete else None


def _half_written(folder: Path) -> bool:
    """Whether the Trainer started to write the folder and did not finish."""
    if not folder.is_dir():
        return False
    try:
        json.loads((folder / _WRITTEN_LAST).read_text())
    except (FileNotFoundError, ValueError):
        return True
    return False


# Fields of TrainerState that training changes; the others follow from the arguments.
_FIELDS = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
# The sums behind the mean losses in the Trainer's log. `_tr_loss` is on the device; the Trainer's NaN
# filter waits for it in each step, so reading it adds no cost.
_ATTRIBUTES = (
    "_tr_loss",
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
    "current_flos",
)


class TrainerProgress:
    """``TrainerState`` without its log, running sums, and the attributes of other callbacks that can export
    them.

    Args:
        shape: as in `check_shape`.
    """

    def __init__(self, trainer: Any, shape: dict[str, int]) -> None:
        self._trainer, self._shape = trainer, shape
        self._left_out: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        state = self._trainer.state
        return {
            "shape": self._shape,
            "state": {name: getattr(state, name) for name in _FIELDS},
            "trainer": {name: getattr(self._trainer, name) for name in _ATTRIBUTES},
            "callbacks": [[type(c).__name__, _attributes(c)] for c in self._exporting()],
        }

    def load_state_dict(self, recorded: dict[str, Any]) -> None:
        check_shape(recorded["shape"], self._shape)
        for name, value in recorded["state"].items():
            setattr(self._trainer.state, name, value)
        for name, value in recorded["trainer"].items():
            on_device = isinstance(value, torch.Tensor)
            setattr(self._trainer, name, value.to(self._trainer.args.device) if on_device else value)
        exporting = self._exporting()
        for name, attributes in recorded["callbacks"]:
            found = next((c for c in exporting if type(c).__name__ == name), None)
            if found is not None:
                exporting.remove(found)
                for key, value in attributes.items():
                    setattr(found, key, value)

    def _exporting(self) -> list[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [c for c in callbacks if isinstance(c, ExportableState) and self._packs(c)]

    def _packs(self, callback: Any) -> bool:
        """Whether a snapshot can contain the callback's state; logs a warning once if not."""
        name = type(callback).__name__
        try:
            values.pack(_attributes(callback), name)
        except values.UnsupportedValue as error:
            if name not in self._left_out:
                self._left_out.add(name)
                logger.warning("the state of the callback %s is not captured: %s", name, error)
            return False
        return True


def _attributes(callback: Any) -> dict[str, Any]:
    found: dict[str, Any] = callback.state().get("attributes", {})
    return found


class LogHistory:
    """``TrainerState.log_history``. It contains run times, so a replay is not compared with it.

    It only grows, and is in every snapshot, so each entry is packed once.
    """

    reproducible = False

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._packed = bytearray()
        self._count = 0

    def state_dict(self) -> dict[str, Any]:
        history = self._trainer.state.log_history
        if len(history) < self._count:
            self._packed, self._count = bytearray(), 0
        for entry in history[self._count :]:
            packed = _pack_entry(entry)
            self._packed += len(packed).to_bytes(4, "little") + packed
        self._count = len(history)
        return {"count": self._count, "entries": bytes(self._packed)}

    def load_state_dict(self, recorded: dict[str, Any]) -> None:
        packed, history, at = recorded["entries"], [], 0
        while at < len(packed):
            size = int.from_bytes(packed[at : at + 4], "little")
            history.append(values.unpack(packed[at + 4 : at + 4 + size]))
            at += 4 + size
        self._trainer.state.log_history = history
        self._packed, self._count = bytearray(packed), len(history)


def _pack_entry(entry: dict[str, Any]) -> bytes:
    try:
        return values.pack(entry)
    except values.UnsupportedValue:
        # A value that a user logged; a log entry is for reading, so its text suffices.
        return values.pack({str(k): _plain(v) for k, v in entry.items()})


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def sampler_state(loader: Any) -> dict[str, Any]:
    """The state of the loader's samplers that determines the order of an epoch: seeds, and their own
    generators.
    """
    found: dict[str, Any] = {}
    for name, owner in _owners(loader).items():
        seed, generator = getattr(owner, "initial_seed", None), getattr(owner, "generator", None)
        if isinstance(seed, int):
            found[f"{name}.seed"] = seed
        if isinstance(generator, torch.Generator):
            found[f"{name}.generator"] = generator.get_state()
    return found


def load_sampler_state(loader: Any, recorded: dict[str, Any]) -> None:
    for name, owner in _owners(loader).items():
        if f"{name}.seed" in recorded:
            owner.initial_seed = recorded[f"{name}.seed"]
        if f"{name}.generator" in recorded:
            if not isinstance(getattr(owner, "generator", None), torch.Generator):
                owner.generator = torch.Generator()
            owner.generator.set_state(recorded[f"{name}.generator"])


def _owners(loader: Any) -> dict[str, Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    # Accelerate wraps the batch sampler if there are several processes.
    inner = getattr(batch_sampler, "batch_sampler", batch_sampler)
    found = {"loader": loader, "batches": inner, "sampler": getattr(inner, "sampler", None)}
    return {name: owner for name, owner in found.items() if owner is not None}


class TrainerLoop:
    """Drives the steps of one ``Trainer.train()``: finds the tops of steps, and starts the loop at a restored
    position.

    Callbacks suffice for recording, but not for resuming: the loop chooses its first epoch before
    ``on_train_begin``. Therefore two methods of the Trainer object are wrapped while it trains:

    * ``get_batch_samples`` starts each optimizer step: it is the top of our loop. Logging, evaluation and
      saving of the previous step are complete, and the data of this step are not fetched yet.
    * ``_run_epoch``: epochs before the restored one are skipped. The restored epoch is entered in its middle,
      as Trainer does with ``resume_from_checkpoint=``, but with an iterator at the exact position.

    Args:
        make: called with model, optimizer and state before the first epoch.
        refetch: fetch all batches of the interrupted epoch again instead of skipping them; None: only if
            they do not provably follow from their indices.
        log_scalars: add ours to what all callbacks are told to log.
    """

    def __init__(self, trainer: Trainer, make: Make, *, refetch: bool | None, log_scalars: bool) -> None:
        self._trainer, self._make, self._refetch = trainer, make, refetch
        self._position = DataPosition()
        self._driver: StepDriver | None = None
        self._resuming = False
        self._rewound: Iterator[Any] | None = None
        self._arguments = inspect.signature(trainer._run_epoch)
        self._layers = ExitStack()
        self._layers.enter_context(layered(trainer, "_run_epoch", self._run_epoch))
        self._layers.enter_context(layered(trainer, "get_batch_samples", self._get_batch_samples))
        if log_scalars:
            # Of the handler: `on_log` of our callback comes after those of the loggers.
            handler = trainer.callback_handler
            self._layers.enter_context(layered(handler, "on_log", self._on_log))

    def close(self) -> None:
        """Restore the Trainer's methods; the daemon keeps the snapshots."""
        self._layers.close()
        if self._driver is not None:
            self._driver.close()

    def _on_log(
        self, below: Callable[..., Any], args: Any, state: Any, control: Any, logs: Any, **kwargs: Any
    ) -> Any:
        scalars = {} if self._driver is None else self._driver.checkpointer.scalars()
        return below(args, state, control, {**logs, **scalars}, **kwargs)

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
        if trainer.control.should_training_stop or given["epoch"] + 1 >= trainer.state.num_train_epochs:
            self._driver.finish(trainer.state.global_step)

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
            "attributes": of_trainer((*trainer.callback_handler.callbacks, trainer), given["model"]),
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
                f"the snapshots of this run end in epoch {position.epoch}, but resume_from_checkpoint= "
                f"starts in epoch {given['epoch']}: pass a new name to CkptdCallback(run=...) to resume from "
                "that checkpoint"
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
                f"the training data comes from a {type(loader).__name__}, which is not a DataLoader: ckptd "
                "cannot record its position; return a torch DataLoader from get_train_dataloader()"
            )
        check_loader(loader, skip=self._refetch is False, in_state=False, option=SKIPS)
        if isinstance(loader.dataset, IterableDataset):
            logger.warning(
                "the training data is an IterableDataset: after a failure, ckptd fetches the batches of the "
                "interrupted epoch again up to the position; the dataset must return the same items in the "
                "same order each time"
            )
        if self._refetch is None:
            self._refetch = not repeats_by_index(loader)

    def _fast_forward(self, loader: Any) -> Iterator[Any]:
        """An iterator at the recorded position; leaves the random state as the fetches changed it."""
        position, started_s = self._position, time.perf_counter()
        skips = type(loader) is DataLoaderShard and not isinstance(loader.dataset, IterableDataset)
        skipped = position.skippable if skips and not self._refetch else 0
        source = skip_first_batches(loader, skipped) if skipped else loader
        # Accelerate's loaders do not pass the epoch number to the inner batch sampler.
        inner = getattr(getattr(source, "batch_sampler", None), "batch_sampler", None)
        holders: list[Any] = [source, inner]
        for holder in holders:
            if hasattr(holder, "set_epoch"):
                holder.set_epoch(position.epoch)
        iterator: Iterator[Any] = iter(source)
        position.fast_forward(lambda: next(iterator), skipped)
        if self._refetch:
            took_s = time.perf_counter() - started_s
            log_refetched(position, skipped, took_s, SKIPS if skips else "")
        return iterator
