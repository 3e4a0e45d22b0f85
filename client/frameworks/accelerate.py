"""Integration with Accelerate: ``ckpt = checkpointer(accelerator, model, optimizer, ...)`` in your own
training loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
except ImportError as missing:
    raise ModuleNotFoundError(
        f"ckptd.client.frameworks.accelerate needs accelerate ({missing}): pip install 'ckptd[hf]'"
    ) from missing

from ckptd.client.capture.step_state import Stateful
from ckptd.client.checkpointer import Checkpointer
from ckptd.client.frameworks.step_driver import whole_state
from ckptd.client.options import CheckpointerOptions, OptionGroups, check_keywords

_REFUSED = {
    "MEGATRON_LM": "hooks cannot see the weights and optimizer state that Megatron-LM keeps; use FSDP2 or "
    "DDP",
}


def checkpointer(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    state: Mapping[str, Stateful] | None = None,
    **options: Unpack[OptionGroups],
) -> Checkpointer:
    """Create a ``Checkpointer`` for the objects that ``accelerator.prepare`` returned; loop over its
    ``steps``, and fetch from ``ckpt.batches(loader)``.

    The rank, the loss scaler and the micro-batch count of ``accelerator.accumulate`` come from the
    accelerator. ``accelerator.save_state`` and ``skip_first_batches`` are not needed. With its DeepSpeed
    plugin (ZeRO stage 0, 1 or 2) the prepared model is DeepSpeed's engine, of which is captured what
    ``ckptd.client.frameworks.deepspeed`` captures.

    Args:
        optimizer: a prepared optimizer, or a list of them.
        state: schedulers, and your own objects. Pass a prepared data loader to ``ckpt.batches`` instead,
            with or without ``use_stateful_dataloader``.
        options: ``run=``, ``daemon=``, ``snapshots=``, ``recovery=`` and ``layout=``, as for
            ``Checkpointer``.
    Raises:
        TypeError: a keyword is not one of ``Checkpointer``, or a group has another type.
        ValueError: an object prevents an exact resumption; the message says what to do.
    """
    check_keywords("checkpointer()", options)
    _check(accelerator)
    own: dict[str, Stateful] = {"accelerator": _Counts(accelerator)}
    if accelerator.scaler is not None:
        own["scaler"] = accelerator.scaler
    groups = CheckpointerOptions.of(options)
    who = groups.run.completed(rank=accelerator.process_index, world_size=accelerator.num_processes)
    groups = replace(groups, run=who)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return _of_deepspeed(model, optimizer, own, state or {}, groups)
    return Checkpointer(model, optimizer, whole_state(own, state or {}), **groups.keywords())


def _of_deepspeed(
    engine: Any,
    optimizer: Any,
    own: Mapping[str, Stateful],
    given: Mapping[str, Stateful],
    groups: CheckpointerOptions,
) -> Checkpointer:
    # Only where it is used: it is large, and need not be installed.
    from ckptd.client.frameworks import deepspeed

    deepspeed.check_engine(engine)
    if getattr(optimizer, "optimizer", None) is not engine.optimizer:
        raise ValueError(
            f"optimizer= is a {type(optimizer).__name__} that is not around the optimizer of DeepSpeed's "
            "engine: pass what the same accelerator.prepare() returned with the model"
        )
    return deepspeed.of_engine(engine, own, given, groups)


class _Counts:
    """Micro-batches since the last update; ``accumulate`` updates the weights according to this count."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._accelerator.step = state["step"]


def _check(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    why = _REFUSED.get(kind.name)
    if why is not None:
        raise ValueError(f"ckptd cannot capture training with {kind.value} here: {why}")
    plugin = accelerator.state.fsdp_plugin if kind == DistributedType.FSDP else None
    if plugin is not None and getattr(plugin, "fsdp_version", 1) != 2:
        raise ValueError(
            "FSDP1 flattens parameters, so ckptd cannot distinguish experts and their optimizer "
            "state: set fsdp_version=2"
        )
