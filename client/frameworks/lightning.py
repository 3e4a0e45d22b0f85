"""Integration with Lightning (``lightning`` and ``pytorch_lightning``):
``Trainer(..., callbacks=[CkptdCallback()])``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

from ckptd.client.capture.step_state import Stateful
from ckptd.client.checkpointer import Checkpointer
from ckptd.client.frameworks.lightning_loop import LightningLoop
from ckptd.client.frameworks.step_driver import name_of_this_training
from ckptd.client.options import CheckpointerOptions, OptionGroups, check_keywords

__all__ = ["CkptdCallback"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_UNSUPPORTED = {
    "DeepSpeedStrategy": "hooks cannot see the weights and optimizer state that it keeps",
    "FSDPStrategy": "it flattens parameters (FSDP1)",
}


def _callback_classes() -> tuple[type, ...]:
    """``Callback`` of the imported packages, or of all installed ones: each package accepts only
    its own class.
    """
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
    """Take a snapshot at every optimizer step; the same command, restarted after a failure, resumes
    with the exact bits.

    With ``automatic_optimization = False`` a step is a batch, however many updates it makes.
    ``ckpt_path=`` is not needed. The snapshots contain the model, optimizer, schedulers, scaler,
    random state, position in the data, the loops' counters, the values logged with ``on_epoch=True``
    in the running epoch, and the state of other callbacks.

    Args:
        refetch: True: fetch the batches of the interrupted epoch again, which takes as long as
            fetching them took. False: skip them; correct if a sample depends only on its index.
            None: skip them only if they provably follow from their indices.
        state: more objects to capture, by name (see ``Checkpointer``).
        options: ``run=``, ``daemon=``, ``snapshots=``, ``recovery=`` and ``layout=``, as for
            ``Checkpointer``. The run name of a second ``fit()`` in the same process ends with its
            number.
    Raises:
        TypeError: a keyword is not one of ``Checkpointer``, or a group has another type.
        ValueError: when training starts, a setting
            prevents an exact resumption.
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

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach; the last snapshot has been taken."""
        self._leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach; the daemon keeps the snapshots."""
        self._leave()

    def _make(self, model: Any, optimizer: Any, state: dict[str, Stateful]) -> Checkpointer:
        twice = sorted(state.keys() & self._state.keys())
        if twice:
            raise ValueError(
                f"state= contains {', '.join(twice)}, which CkptdCallback captures itself: choose "
                "another name"
            )
        who = name_of_this_training(self._options.run.completed(**self._who))
        options = replace(self._options, run=who).keywords()
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
            f"CkptdCallback cannot capture {type(trainer.strategy).__name__}: {reason}; use DDP, "
            "or ModelParallelStrategy (FSDP2)"
        )
    loop = trainer.fit_loop.epoch_loop
    if not all(hasattr(loop, name) for name in ("advance", "on_run_start", "automatic_optimization")):
        raise ValueError(
            "CkptdCallback does not support the loops of this version of Lightning: install a "
            "supported one with `pip install 'ckptd[lightning]'`"
        )
