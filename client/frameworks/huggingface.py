"""One line for transformers' ``Trainer``: ``Trainer(..., callbacks=[CkptdCallback()])``."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

try:
    import accelerate  # noqa: F401 - Trainer cannot train without it
    from transformers import Trainer, TrainerCallback
except ImportError as missing:
    raise ModuleNotFoundError(
        f"ckptd.client.frameworks.huggingface needs transformers and accelerate ({missing}): pip install 'ckptd[hf]'"
    ) from missing

from ckptd.client.capture.step_state import Stateful
from ckptd.client.checkpointer import Checkpointer
from ckptd.client.frameworks.hf_checkpoints import complete_checkpoints_only
from ckptd.client.frameworks.hf_loop import TrainerLoop
from ckptd.client.frameworks.step_driver import check_checkpointer_options, name_of_this_training
from ckptd.client.model.function_patches import layered

__all__ = ["CkptdCallback"]

_NEEDED = ("epoch", "epochs_trained", "model", "resume_from_checkpoint", "steps_in_epoch",
           "steps_trained_in_current_epoch", "train_dataloader")  # fmt: skip


class CkptdCallback(TrainerCallback):  # type: ignore[misc]
    """Snapshot every optimizer step; the same command, started again after a failure, goes on at
    the exact bits.

    Nothing else changes: no ``resume_from_checkpoint=``. Model, optimizer, scheduler, scaler,
    random state, the position in the data, ``TrainerState`` with its log, and the state of
    callbacks that can export theirs are captured.

    Args:
        refetch: fetch the batches of the interrupted epoch again instead of skipping them, which takes as long as fetching them took;
            False, if a sample depends on its index only (collators may draw, but not in workers).
            None: where batches do not provably follow from their indices.
        state: more objects to capture, by name (see ``Checkpointer``).
        options: of ``Checkpointer``. Without ``run=`` the run is named after ``output_dir``; a
            second training of the same process has its number in its name.
    Raises:
        ValueError: an option that ``Checkpointer`` does not have; or, when the Trainer is made or begins to train, something with
            which an exact resumption is not possible.
    """

    def __init__(
        self,
        *,
        refetch: bool | None = None,
        state: Mapping[str, Stateful] | None = None,
        **options: Any,
    ) -> None:
        check_checkpointer_options(options)
        self._refetch, self._state, self._options = refetch, dict(state or {}), options
        self._loop: TrainerLoop | None = None
        self._named: dict[str, Any] = {}
        self._layers = ExitStack()
        self.checkpointer: Checkpointer | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say early what cannot work; see to it that no half-written checkpoint is loaded."""
        _check_arguments(args)
        trainer = _trainer_of(self)
        layer = partial(complete_checkpoints_only, trainer)
        self._layers.enter_context(layered(trainer, "train", layer))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Follow the loop that is about to begin."""
        _check_arguments(args)
        trainer = _trainer_of(self)
        _check_trainer(trainer)
        self._leave()  # a training that was left by an exception
        run = self._options.get("run") or _run_name(args.output_dir)
        job, run = name_of_this_training(self._options.get("job"), run)
        who = {"rank": args.process_index, "world_size": args.world_size}
        self._named = {**who, **self._options, "job": job, "run": run}
        self._loop = TrainerLoop(trainer, self._make, refetch=self._refetch)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last snapshot was taken at the end of the last epoch."""
        self._leave()

    def _make(self, model: Any, optimizer: Any, state: dict[str, Stateful]) -> Checkpointer:
        twice = sorted(state.keys() & self._state.keys())
        if twice:
            raise ValueError(
                f"state= has {', '.join(twice)}, which CkptdCallback captures itself: choose another name"
            )
        self.checkpointer = Checkpointer(model, optimizer, {**state, **self._state}, **self._named)
        return self.checkpointer

    def _leave(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = None


def _trainer_of(callback: TrainerCallback) -> Trainer:
    """The Trainer that is calling ``callback``: it is the one thing that callbacks are not given,
    so it is looked for in its frame.
    """
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and callback in found.callback_handler.callbacks:
            return found
        frame = frame.f_back  # type: ignore[assignment]
    raise ValueError("CkptdCallback works within transformers.Trainer.train() only")


def _run_name(output_dir: str | None) -> str | None:
    """A name that another command, which writes elsewhere, does not have."""
    if not output_dir:
        return None
    path = Path(output_dir).absolute()
    digest = hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9._-]', '-', path.name)[:48]}-{digest}"


def _check_arguments(args: Any) -> None:
    for name, advice in (
        (
            "auto_find_batch_size",
            "it changes the batches in the middle of training; set per_device_train_batch_size",
        ),
        (
            "ignore_data_skip",
            "the data would begin anew after a failure; leave it off, skipping is done by CkptdCallback",
        ),
        (
            "deepspeed",
            "DeepSpeed keeps weights and optimizer state where no hook sees them; use FSDP2 or DDP",
        ),
    ):
        if getattr(args, name, None):
            raise ValueError(f"CkptdCallback cannot resume a training with {name}=: {advice}")


def _check_trainer(trainer: Trainer) -> None:
    parameters = (
        inspect.signature(Trainer._run_epoch).parameters if hasattr(Trainer, "_run_epoch") else {}
    )
    if not all(name in parameters for name in _NEEDED):
        import transformers

        raise ValueError(
            f"CkptdCallback does not know the training loop of transformers {transformers.__version__}: "
            "install one of the versions that `pip install 'ckptd[hf]'` takes"
        )
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"Trainer runs {trainer.args.n_gpu} GPUs in one process (DataParallel), which cannot be captured: "
            "start one process per GPU with torchrun"
        )
    plugin = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    if plugin is not None and getattr(plugin, "fsdp_version", 1) != 2:
        raise ValueError(
            "FSDP1 flattens parameters, so that experts and optimizer state cannot be told apart: set fsdp_config={'version': 2}"
        )
