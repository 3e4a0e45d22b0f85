"""Step scalars: everything small that a bit-exact repeat needs, besides the tensors (DESIGN vocabulary).

Gathered at the top of the loop on the training thread, so kept cheap: no synchronisation with a device but for what
the user's own ``state_dict`` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ckptd.client.binding import Binding, local
from ckptd.client.layout import SAFETENSORS_DTYPES, packed_scalars

__all__ = [
    "Stateful",
    "apply_groups",
    "apply_packed",
    "gather_groups",
    "grad_flags",
    "python_state",
    "stack_packed",
    "zero_grads",
]


class Stateful(Protocol):
    """What ``state=`` takes: a scheduler, a scaler, a data loader, anything with these two."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def gather_groups(binding: Binding) -> list[list[dict[str, Any]]]:
    """The options of every parameter group (learning rate, betas, …), without the parameters."""
    return [
        [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups]
        for o in binding.optimizers
    ]


def apply_groups(binding: Binding, groups: list[list[dict[str, Any]]]) -> None:
    """Write recorded group options into the live groups; tensors (a capturable ``lr``) are filled in place.

    Raises:
        ValueError: another number of optimizers or groups.
    """
    live = [o.param_groups for o in binding.optimizers]
    if [len(g) for g in live] != [len(g) for g in groups]:
        raise ValueError(
            f"parameter groups per optimizer: {[len(g) for g in live]} here, {[len(g) for g in groups]} in the snapshot"
        )
    for optimizer_groups, recorded in zip(live, groups, strict=True):
        for group, values in zip(optimizer_groups, recorded, strict=True):
            for key, value in values.items():
                if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                    with torch.no_grad():
                        group[key].copy_(value)
                else:
                    group[key] = value


def stack_packed(binding: Binding) -> dict[torch.dtype, Tensor]:
    """Every 0-dimensional optimizer state tensor, stacked per dtype in the order of ``packed_scalars`` (0 where absent)."""
    stacked = {}
    for dtype, names in packed_scalars(binding).items():
        values = [binding.state(name).get(key) for name, key in names]
        present = next((v for v in values if isinstance(v, Tensor)), None)
        zero = torch.zeros((), dtype=dtype, device=present.device if present is not None else "cpu")
        devices = {v.device for v in values if isinstance(v, Tensor)}
        if len(devices) > 1:
            values = [v.cpu() if isinstance(v, Tensor) else v for v in values]
            zero = zero.cpu()
        stacked[dtype] = torch.stack([local(v) if isinstance(v, Tensor) else zero for v in values])
    return stacked


def apply_packed(
    binding: Binding,
    packed: Mapping[torch.dtype, Tensor],
    names: Iterable[str],
    order: Mapping[str, list[list[str]]],
) -> None:
    """Write recorded 0-dimensional state into the live state of ``names`` (where that state exists).

    ``order`` comes from the image's ``state_layout``: (parameter, key) per element, by dtype.
    """
    wanted = set(names)
    for dtype, values in packed.items():
        for i, (name, key) in enumerate(order.get(SAFETENSORS_DTYPES[dtype], ())):
            if name in wanted and isinstance(live := binding.state(name).get(key), Tensor):
                with torch.no_grad():
                    local(live).copy_(values[i])


def python_state(binding: Binding) -> dict[str, dict[str, Any]]:
    """Plain values in the optimizers' per-parameter state (older optimizers keep ``step`` as an int)."""
    found: dict[str, dict[str, Any]] = {}
    for name in binding.owner:
        plain = {k: v for k, v in binding.state(name).items() if not isinstance(v, Tensor)}
        if plain:
            found[name] = plain
    return found


def grad_flags(binding: Binding) -> bytes:
    """One bit per parameter: it has a gradient tensor (a fresh process has none, and optimizers skip those)."""
    mask = 0
    for i, (name, param) in enumerate(binding.params.items()):
        if param.grad is not None:
            mask |= 1 << (2 * i)
        if name in binding.masters and binding.masters[name].grad is not None:
            mask |= 2 << (2 * i)
    return mask.to_bytes(len(binding.params) // 4 + 1, "little")


def zero_grads(binding: Binding, flags: bytes, names: Iterable[str]) -> None:
    """Give zero gradients to those of ``names`` that had a gradient tensor at the snapshot and have none now."""
    mask, wanted = int.from_bytes(flags, "little"), set(names)
    for i, (name, param) in enumerate(binding.params.items()):
        if name not in wanted:
            continue
        if mask >> (2 * i) & 1 and param.grad is None:
            param.grad = torch.zeros_like(param)
        if mask >> (2 * i + 1) & 1 and binding.masters[name].grad is None:
            binding.masters[name].grad = torch.zeros_like(binding.masters[name])
