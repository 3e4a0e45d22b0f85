"""The state of transformers' ``Trainer`` besides model, optimizer and scheduler, as objects for
``state=``.
"""

from __future__ import annotations

from typing import Any

import torch

from ckptd.client import values
from ckptd.client.log_lines import get_logger

__all__ = ["LogHistory", "TrainerProgress", "load_sampler_state", "sampler_state"]

logger = get_logger(__name__)

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
    """``TrainerState`` without its log, running sums, and the attributes of other callbacks that
    can export them.

    Args:
        shape: the settings that must not change for the batches to stay the same, by their
            user-visible names.
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
        """Restore the state.

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
        from transformers.trainer_callback import ExportableState

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
    """Restore the result of ``sampler_state``."""
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
