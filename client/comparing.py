"""What was recomputed against what was recorded, bit for bit, and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ckptd.client import values
from ckptd.client.binding import Binding, local
from ckptd.client.layout import Source
from ckptd.client.operators import Operator
from ckptd.client.rng import capture_rng
from ckptd.client.scalars import Stateful, gather_groups, reproducible

__all__ = ["describe", "live_tensor", "same_bits", "scalar_differences"]


def scalar_differences(
    binding: Binding, stateful: Mapping[str, Stateful], scalars: Mapping[str, Any]
) -> list[str]:
    """What of random state, group options and the user's state is not as these step scalars have it."""
    found = []
    if capture_rng() != scalars["rng"]:
        found.append(
            "the random number generators (was a data iterator created before Checkpointer, or other code drawing?)"
        )
    if not values.equal(gather_groups(binding), scalars["groups"]):
        found.append("the optimizer's parameter group options (is a scheduler missing in state=?)")
    for name, item in stateful.items():
        if reproducible(item) and values.pack(item.state_dict()) != scalars["state"][name]:
            found.append(f"state[{name!r}] (was its iterator created before Checkpointer?)")
    return found


def live_tensor(binding: Binding, source: Source) -> Tensor | None:
    """The live tensor of which an entry is a record; None if there is none, or not yet."""
    if source.kind == "param":
        return local(binding.params[source.name])
    if source.kind == "master":
        return local(binding.masters[source.name])
    if source.kind == "buffer":
        return local(binding.buffers()[source.name])
    if source.kind == "optim":
        value = binding.state(source.name).get(source.key)
        return local(value) if isinstance(value, Tensor) else None
    return None


def describe(operators: Sequence[Operator], piece: Source) -> str:
    """Which operator's what, in words."""
    for op in operators:
        for m in op.members:
            if m.param == piece.name and (
                m.start is None or piece.start is None or m.start <= piece.start < (m.stop or 0)
            ):
                what = f"{piece.kind} {piece.key}".strip()
                return f"operator {op.name}: {what} of {piece.name}"
    return f"{piece.kind} {piece.name}"


def same_bits(live: Tensor, recorded: Tensor) -> bool:
    """Equal to the bit, after rounding to the recorded dtype."""
    rounded = live.to(recorded.dtype) if live.dtype is not recorded.dtype else live
    host = rounded.cpu() if rounded.device.type != "cpu" else rounded
    if host.numel() == 0:
        return True
    return torch.equal(_bits(host.contiguous()), _bits(recorded))


def _bits(tensor: Tensor) -> Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        tensor.element_size()
    ]
    return tensor.reshape(-1).view(integer)
