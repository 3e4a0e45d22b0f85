"""One line for Lightning: ``Trainer(..., callbacks=[CkptdCallback()])``; of ``lightning`` and of
``pytorch_lightning``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from ckptd.client.capture.step_state import Stateful
from ckptd.client.checkpointer import Checkpointer
from ckptd.client.frameworks.lightning_loop import LightningLoop
from ckptd.client.frameworks.step_driver import check_checkpointer_options, name_of_this_training

__all__ = ["CkptdCallback"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_UNSUPPORTED = {
    "DeepSpeedStrategy": "it keeps weights and optimizer state where no hook sees them",
    "FSDPStrategy": "it flattens parameters (FSDP1)",
}


def _callback_classes() -> tuple[type, ...]:
    """``Callback`` of the packages in use, or of all there are: each knows only its own."""
    wanted = [name for name in _PACKAGES if name in sys.modules] or _PACKAGES
    found, missing = [], []
    for name in wanted:
        try:
            found.append(importlib.import_module(name).Callback)
        except ImportError as error:
            missing.append(str(error))
    if not found:
        raise ModuleNotFoundError(
            f"ckptd.client.frameworks.lightning needs lightning or pytorch_lightning ({'; '.join(missing)}): pip install 'ckptd[lightning]'"
        )
    return tuple(found)


class CkptdCallback(*_callback_classes()):  # type: ignore[misc]
    """Snapshot every optimizer step; the same command, started again after a failure, goes on at
    the exact bits.

    With ``automatic_optimization = False`` a step is a batch, whatever number of updates of
    whatever optimizers it makes. Nothing else changes: no ``ckpt_path=``. Model, optimizer,
    schedulers, scaler, random state, the position in the data, the loops' counters, what was logged
    with ``on_epoch=True`` in the running epoch, and the state of other callbacks are captured.

    Args:
        refetch: fetch the batches of the interrupted epoch again instead of skipping them, which takes as long as fetching them took;
            False, if a sample depends on its index only. None: where batches do not provably follow
            from their indices.
        state: more objects to capture, by name (see ``Checkpointer``).
        options: of ``Checkpointer``. A second ``fit()`` of the same process has its number in its run's name.
    Raises:
        ValueError: an option that ``Checkpointer`` does not have; or, when training starts, something with which an exact resumption
            is not possible.
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
        self._who: dict[str, int] = {}
        self._loop: LightningLoop | None = None
        self.checkpointer: Checkpointer | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Say early what cannot work."""
        if stage == "fit":
            _check(trainer, pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Follow the loop, which is about to begin; restore."""
        if "_DataLoaderIter" in type(trainer.fit_loop._data_fetcher).__name__:
            raise ValueError(
                "training_step(dataloader_iter) fetches batches itself, so their position cannot be told: take a batch instead"
            )
        self._leave()
        # Lightning's own launcher sets no RANK.
        self._who = {"rank": trainer.global_rank, "world_size": trainer.world_size}
        self._loop = LightningLoop(trainer, self, self._make, refetch=self._refetch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The last snapshot is taken."""
        self._leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """What was captured stays with the daemon."""
        self._leave()

    def _make(self, model: Any, optimizer: Any, state: dict[str, Stateful]) -> Checkpointer:
        twice = sorted(state.keys() & self._state.keys())
        if twice:
            raise ValueError(
                f"state= has {', '.join(twice)}, which CkptdCallback captures itself: choose another name"
            )
        job, run = name_of_this_training(self._options.get("job"), self._options.get("run"))
        options = {**self._who, **self._options, "job": job, "run": run}
        self.checkpointer = Checkpointer(model, optimizer, {**state, **self._state}, **options)
        return self.checkpointer

    def _leave(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()


def _check(trainer: Any, pl_module: Any) -> None:
    reason = _UNSUPPORTED.get(type(trainer.strategy).__name__)
    if reason is not None:
        raise ValueError(
            f"CkptdCallback cannot capture {type(trainer.strategy).__name__}: {reason}; use DDP, or ModelParallelStrategy (FSDP2)"
        )
    loop = trainer.fit_loop.epoch_loop
    if not all(
        hasattr(loop, name) for name in ("advance", "on_run_start", "automatic_optimization")
    ):
        raise ValueError(
            "CkptdCallback does not know the loops of this version of Lightning: install one that `pip install 'ckptd[lightning]'` takes"
        )
