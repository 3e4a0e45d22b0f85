"""Accelerate: ``ckpt = checkpointer(accelerator, model, optimizer, ...)`` after
``accelerator.prepare``, in a loop of your own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
except ImportError as missing:
    raise ModuleNotFoundError(
        f"ckptd.client.frameworks.accelerate needs accelerate ({missing}): pip install 'ckptd[hf]'"
    ) from missing

from ckptd.client.capture.step_state import Stateful
from ckptd.client.checkpointer import Checkpointer

__all__ = ["checkpointer"]

_REFUSED = {
    "DEEPSPEED": "DeepSpeed keeps weights and optimizer state where no hook sees them; use FSDP2 or DDP",
    "MEGATRON_LM": "Megatron-LM keeps weights and optimizer state where no hook sees them; use FSDP2 or DDP",
}


def checkpointer(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    state: Mapping[str, Stateful] | None = None,
    **options: Any,
) -> Checkpointer:
    """A ``Checkpointer`` of what ``accelerator.prepare`` returned; loop over its ``steps``, and
    fetch from ``ckpt.batches(loader)``.

    Who this process is, the loss scaler, and the count by which ``accelerator.accumulate`` knows
    when to update are taken from the accelerator. ``accelerator.save_state`` and
    ``skip_first_batches`` are not needed.

    Args:
        optimizer: a prepared one, or a list of them.
        state: schedulers, and objects of your own. A prepared data loader does not belong here: give it to ``ckpt.batches``,
            with ``use_stateful_dataloader`` or without.
        options: of ``Checkpointer``.
    Raises:
        ValueError: something with which an exact resumption is not possible; the message says what to do.
    """
    _check(accelerator)
    own: dict[str, Stateful] = {"accelerator": _Counts(accelerator)}
    if accelerator.scaler is not None:
        own["scaler"] = accelerator.scaler
    twice = sorted(own.keys() & (state or {}).keys())
    if twice:
        raise ValueError(
            f"state= has {', '.join(twice)}, which is taken from the accelerator: leave it out, or choose another name"
        )
    who = {"rank": accelerator.process_index, "world_size": accelerator.num_processes}
    return Checkpointer(model, optimizer, {**own, **(state or {})}, **{**who, **options})


class _Counts:
    """Micro-batches since the last update: by it ``accumulate`` decides whether a step updates."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._accelerator.step = state["step"]


def _check(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    reason = _REFUSED.get(kind.name)
    if reason is not None:
        raise ValueError(f"ckptd cannot capture a training with {kind.value}: {reason}")
    plugin = accelerator.state.fsdp_plugin if kind == DistributedType.FSDP else None
    if plugin is not None and getattr(plugin, "fsdp_version", 1) != 2:
        raise ValueError(
            "FSDP1 flattens parameters, so that experts and optimizer state cannot be told apart: set fsdp_version=2"
        )
