"""Buffers that are no longer what they were at the start: of another shape or dtype, new, or gone.

Observers of quantization-aware training, memory banks and caches begin empty, and get their shape in a
forward. A process that starts again has them as they were at the start, so that is what plans are made for,
and what tells a model from another one. Those that are otherwise at a top are in that snapshot by value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState, buffer_spec, named_modules
from ckptd.client.optimizers.value_trees import plain_tensor, same_objects

logger = get_logger(__name__)

# Its name among the objects of `state=`.
BUFFERS = "ckptd.buffers"
# All of them in one snapshot: the training thread copies them.
_WARNED_BYTES = 16 << 20


class ChangedBuffers:
    """The changed buffers of a model: an object for ``state=``."""

    def __init__(self, binding: LiveState) -> None:
        self._start = binding.buffer_specs
        self._modules = dict(named_modules(binding.model))
        self._tables = [module._buffers for module in self._modules.values()]
        self._lengths: list[int] = []
        self._places: list[tuple[str, dict[str, Tensor | None], str]] = []
        # At the last look: all buffers, their shapes, and the places of those that have changed.
        self._seen: list[Tensor | None] = []
        self._shapes: list[torch.Size | None] = []
        self._found: list[tuple[str, dict[str, Tensor | None], str]] = []
        self._warned = False

    def state_dict(self) -> dict[str, Any]:
        """By name: the tensor, and whether a ``state_dict`` of the model has it; None: it is gone."""
        found = {name: self._record(table, key) for name, table, key in self._changed()}
        size = sum(record[0].nbytes for record in found.values() if record is not None)
        if size > _WARNED_BYTES and not self._warned:
            self._warned = True
            logger.warning(
                "buffers of %.1f MiB changed their shape while they train (%s): the training thread copies "
                "them in each snapshot. Register them in their final shape",
                size / 2**20,
                ", ".join(list(found)[:3]),
            )
        return found

    def load_state_dict(self, recorded: Mapping[str, Any]) -> None:
        """Put them back. Those that have changed here, and had not when this was recorded, get their first
        shape again.
        """
        for name, table, key in [*self._changed()]:
            if name not in recorded:
                if name not in self._start:
                    del table[key]
                    continue
                shape, dtype = self._start[name]
                live = table.get(key)
                device = None if live is None else live.device
                table[key] = torch.zeros(shape, dtype=dtype, device=device)
        for name, record in recorded.items():
            self._put(name, record)

    def _put(self, name: str, record: list[Any] | None) -> None:
        path, _, key = name.rpartition(".")
        module = self._modules.get(path)
        if module is None:
            logger.warning("the snapshot has buffer %s, which this model has no place for", name)
        elif record is None:
            if key in module._buffers:
                module._buffers[key] = None
        else:
            tensor, persistent = record
            live = module._buffers.get(key)
            device = _device_of(module) if live is None else live.device
            if key in module._buffers:
                module._buffers[key] = tensor.to(device)
            else:
                module.register_buffer(key, tensor.to(device), persistent=persistent)

    def _record(self, table: dict[str, Tensor | None], key: str) -> list[Any] | None:
        buffer = table.get(key)
        if buffer is None:
            return None
        module = next(m for m in self._modules.values() if m._buffers is table)
        return [buffer.detach(), key not in module._non_persistent_buffers_set]

    def _changed(self) -> list[tuple[str, dict[str, Tensor | None], str]]:
        lengths = list(map(len, self._tables))
        if lengths != self._lengths:
            self._lengths = lengths
            there = {
                f"{path}.{key}" if path else key: (module._buffers, key)
                for path, module in self._modules.items()
                for key in module._buffers
            }
            for name in self._start.keys() - there.keys():
                path, _, key = name.rpartition(".")
                there[name] = self._modules[path]._buffers, key
            self._places = [(name, *place) for name, place in there.items()]
            self._seen = []
        now = [table.get(key) for _, table, key in self._places]
        shapes = [None if buffer is None else buffer.shape for buffer in now]  # one may be resized in place
        if shapes != self._shapes or not same_objects(now, self._seen):
            self._seen, self._shapes = now, shapes
            self._found = [
                place
                for place, buffer in zip(self._places, now, strict=True)
                if (None if buffer is None else buffer_spec(buffer)) != self._start.get(place[0])
                and (buffer is None or plain_tensor(buffer))
            ]
        return self._found


def _device_of(module: nn.Module) -> torch.device:
    """Where the tensors of a module are."""
    tensors = (*module.parameters(), *module.buffers())
    return tensors[0].device if tensors else torch.device("cpu")
