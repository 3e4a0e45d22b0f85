"""Integration with transformers' ``Trainer``: ``Trainer(..., callbacks=[CkptdCallback()])``."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

try:
    import accelerate  # noqa: F401 - Trainer cannot train without it
    from transformers import Trainer, TrainerCallback
except ImportError as missing:
    raise ModuleNotFoundError(
        f"ckptd.client.frameworks.huggingface needs transformers and accelerate ({missing}): pip "
        "install 'ckptd[hf]'"
    ) from missing

from ckptd.client.capture.step_state import Stateful
from ckptd.client.checkpointer import Checkpointer
from ckptd.client.frameworks.hf_checkpoints import complete_checkpoints_only
from ckptd.client.frameworks.hf_loop import TrainerLoop
from ckptd.client.frameworks.step_driver import name_of_this_training
from ckptd.client.model.hooks import layered
from ckptd.client.options import CheckpointerOptions, OptionGroups, check_keywords

__all__ = ["CkptdCallback"]

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
    """Take a snapshot at every optimizer step; the same command, restarted after a failure, resumes
    with the exact bits.

    ``resume_from_checkpoint=`` is not needed. The snapshots contain the model, optimizer, scheduler,
    scaler, random state, position in the data, ``TrainerState`` with its log, and the state of
    callbacks that can export theirs.

    Args:
        refetch: True: fetch the batches of the interrupted epoch again, which takes as long as
            fetching them took. False: skip them; correct if a sample depends only on its index
            (collators may draw random numbers, but not in workers). None: skip them only if they
            provably follow from their indices.
        state: more objects to capture, by name (see ``Checkpointer``).
        options: ``run=``, ``daemon=``, ``snapshots=``, ``recovery=`` and ``layout=``, as for
            ``Checkpointer``. The default of ``run=`` is the name of ``output_dir``; the name of a
            second training in the same process ends with its number.
    Raises:
        TypeError: a keyword is not one of ``Checkpointer``, or a group has another type.
        ValueError: when the Trainer is created or
            starts training, a setting prevents an exact resumption.
    """

    def __init__(
        self,
        *,
        refetch: bool | None = None,
        state: Mapping[str, Stateful] | None = None,
        **options: Unpack[OptionGroups],
    ) -> None:
        check_keywords("CkptdCallback()", options)
        self._refetch, self._state = refetch, dict(state or {})
        self._options = CheckpointerOptions.of(options)
        self._named = self._options
        self._loop: TrainerLoop | None = None
        self.checkpointer: Checkpointer | None = None
        # Of all Trainers: which one gets this callback, and when, is not told (`add_callback`).
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
        self._loop = TrainerLoop(trainer, self._make, refetch=self._refetch)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach; the end of the last epoch took the last snapshot."""
        self._leave()

    def _make(self, model: Any, optimizer: Any, state: dict[str, Stateful]) -> Checkpointer:
        twice = sorted(state.keys() & self._state.keys())
        if twice:
            raise ValueError(
                f"state= contains {', '.join(twice)}, which CkptdCallback captures itself: choose "
                "another name"
            )
        whole = {**state, **self._state}
        self.checkpointer = Checkpointer(model, optimizer, whole, **self._named.keywords())
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
    """``Trainer.train``, which loads no half-written checkpoint where the trainer has this callback."""
    mine = any(each is reference() for each in trainer.callback_handler.callbacks)
    train = partial(below, trainer)
    return complete_checkpoints_only(trainer, train, *args, **kwargs) if mine else train(*args, **kwargs)


def _trainer_of(callback: TrainerCallback) -> Trainer:
    """The Trainer that is calling ``callback``. The Trainer does not pass itself to callbacks, so it is
    searched in the calling frames.
    """
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
    for name, advice in (
        (
            "auto_find_batch_size",
            "it changes the batch size during training; set per_device_train_batch_size",
        ),
        (
            "ignore_data_skip",
            "the data would start again after a failure; leave it off (CkptdCallback skips)",
        ),
        (
            "deepspeed",
            "hooks cannot see the weights and optimizer state that DeepSpeed keeps; use FSDP2 or DDP",
        ),
    ):
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
            f"Trainer uses {trainer.args.n_gpu} GPUs in one process (DataParallel), which ckptd "
            "cannot capture: "
            "start one process per GPU with torchrun"
        )
    plugin = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    if plugin is not None and getattr(plugin, "fsdp_version", 1) != 2:
        raise ValueError(
            "FSDP1 flattens parameters, so ckptd cannot distinguish experts and their optimizer "
            "state: set fsdp_config={'version': 2}"
        )
