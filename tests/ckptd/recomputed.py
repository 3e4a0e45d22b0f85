"""Two snapshots in a row of a model that torch has stepped, with the gradients between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ckptd.storage.gradient_block import (
    UpdatedGroup,
    UpdatedParameter,
    UpdateRecord,
    aligned,
    first_gradient,
    write_block,
)
from ckptd.storage.image_format import TensorEntry
from tests.ckptd.snapshots import Snapshot, sealed_snapshot

__all__ = ["SLOT_BYTES", "Step", "step_of"]

SLOT_BYTES = 1 << 20
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}
_SCALARS = "ckptd.optim_scalars/F32"


@dataclass(frozen=True, slots=True)
class Step:
    """Snapshots before and after, and the slot of the second one with the gradients behind its image."""

    before: Snapshot
    after: Snapshot
    slot: bytes
    record: UpdateRecord

    @property
    def gradient_bytes(self) -> int:
        """Of the block, from the beginning to the end of the last gradient."""
        return first_gradient() + sum(aligned(4 * 37 * 11) for p in self.record.parameters if p.gradient >= 0)


def step_of(
    optimizer: str,
    *,
    iteration: int = 7,
    dtype: torch.dtype = torch.float32,
    small: bool = False,
    **options: Any,
) -> Step:
    """Three parameters, of which one has no gradient, after two steps and after a third.

    Args:
        small: the images have the tensors "small" (16 elements) and "empty" besides.
    """
    others = {"small": torch.zeros(16), "empty": torch.zeros(0)} if small else {}
    torch.manual_seed(iteration)
    params = {name: torch.nn.Parameter(torch.randn(37, 11, dtype=dtype)) for name in ("a", "b", "idle")}
    made = getattr(torch.optim, optimizer)(params.values(), **options)
    for name in ("a", "b", "idle"):
        params[name].grad = torch.randn(37, 11).to(dtype)
    made.step()
    params["idle"].grad = None
    made.step()
    before = _snapshot(iteration, _tensors(params, made) | others)
    for name in ("a", "b"):
        params[name].grad = torch.randn(37, 11).to(dtype)
    record = _record(iteration, params, made)
    gradients = {name: p.grad.clone() for name, p in params.items() if p.grad is not None}
    made.step()
    after = _snapshot(iteration + 1, _tensors(params, made) | others)
    slot = bytearray(SLOT_BYTES)
    slot[: len(after.image)] = after.image
    start, end = aligned(len(after.image)), first_gradient()
    for each in record.parameters:
        if each.gradient >= 0:
            data = _bytes(gradients[each.weight])
            slot[start + each.gradient : start + each.gradient + len(data)] = data
            end = max(end, each.gradient + aligned(len(data)))
    header = after.header
    assert write_block(
        memoryview(slot), len(after.image), record, end, iteration=header.iteration, sequence=header.sequence
    )
    return Step(before, after, bytes(slot), record)


def _tensors(params: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {name: p.detach() for name, p in params.items()}
    packed = []
    for name, p in params.items():
        for key, value in optimizer.state[p].items():
            if isinstance(value, Tensor) and value.ndim:
                found[f"optim/{key}/{name}"] = value
            elif isinstance(value, Tensor):
                packed.append(value)
    if packed:
        found[_SCALARS] = torch.stack(packed)
    found["buffer/seen"] = torch.randint(0, 255, (1000,), dtype=torch.uint8)
    found["ckptd.scalars"] = torch.zeros(5000, dtype=torch.uint8)
    return found


def _record(
    base: int, params: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> UpdateRecord:
    group = optimizer.param_groups[0]
    options = {k: list(v) if isinstance(v, tuple) else v for k, v in group.items() if k != "params"}
    parameters, at, position = [], first_gradient(), 0
    for name, p in params.items():
        state = {k: v for k, v in optimizer.state[p].items() if isinstance(v, Tensor)}
        states = {k: f"optim/{k}/{name}" for k, v in state.items() if v.ndim}
        scalars = {k: (_SCALARS, position) for k, v in state.items() if not v.ndim}
        position += len(scalars)
        offset = -1
        if p.grad is not None:
            offset, at = at, at + aligned(p.numel() * p.element_size())
        parameters.append(UpdatedParameter(name, states, scalars, offset))
    made = UpdatedGroup(type(optimizer).__name__, options, parameters)
    return UpdateRecord(base, torch.get_num_threads(), str(torch.__version__), [made])


def _snapshot(iteration: int, tensors: Mapping[str, Tensor]) -> Snapshot:
    return sealed_snapshot(
        iteration,
        [(TensorEntry(name, _DTYPES[t.dtype], tuple(t.shape)), _bytes(t)) for name, t in tensors.items()],
    )


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
