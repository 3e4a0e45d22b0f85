"""The state of Lightning's ``Trainer`` besides model, optimizer and schedulers, as objects for ``state=``."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor

from ckptd.client import values
from ckptd.client.log_lines import get_logger
from ckptd.client.model.hooks import layered

__all__ = ["CallbackStates", "EpochSums", "LoopProgress"]

logger = get_logger(__name__)


class LoopProgress:
    """The counters of all loops: epochs, batches, optimizer steps, schedulers.

    They are restored twice, because entering an epoch resets its counters: when training starts, and
    in the epoch.

    Args:
        shape: the settings that must not change for the batches to stay the same, by their
            user-visible names.
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
        """Keep the state for ``start`` and ``resume_epoch``.

        Raises:
            ValueError: this training has other batches.
        """
        for name, before in recorded["shape"].items():
            now = self._shape.get(name)
            if now != before:
                raise ValueError(
                    f"{name} was {before} when this run was recorded and is {now} now, so the "
                    "batches would differ. "
                    f"Set it to {before}, or pass a new name to CkptdCallback(run=...)"
                )
        self._recorded = recorded["loops"]

    def start(self) -> None:
        """Restore before the first epoch, as if it had not started, so that its hooks run."""
        self._put_back()
        progress = self._trainer.fit_loop.epoch_progress
        for counts in (progress.total, progress.current):
            if counts.ready > counts.processed:
                counts.ready -= 1
                counts.started -= 1

    def resume_epoch(self) -> None:
        """Restore in the epoch, after it has started."""
        self._put_back()

    def _put_back(self) -> None:
        fit_loop = self._trainer.fit_loop
        _load(fit_loop, self._recorded, "")


def _load(loop: Any, recorded: dict[str, Any], prefix: str) -> None:
    """Like ``loop.load_state_dict``, without marking the loop as restarting: Lightning's restart is
    not exact.
    """
    loop._load_from_state_dict(recorded, prefix)
    for name, child in list(vars(loop).items()):
        if hasattr(child, "_load_from_state_dict"):
            _load(child, recorded, f"{prefix}{name}.")


class EpochSums:
    """The sums of ``self.log(..., on_epoch=True)`` in this epoch, and the newest metrics that callbacks
    monitor.

    Users may log times, so a replay is not compared with them. A sum is restored when its key is
    logged again, because only then Lightning knows its reduction.
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
    """``state_dict()`` of the other callbacks (early stopping, model checkpoints). Some contain times, so
    a replay is not compared with them.

    A callback whose state cannot be packed is left out with a warning.
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
