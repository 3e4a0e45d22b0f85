"""Shapes that pipeline stages find out in their first step, kept with the snapshots for localized restarts.

A schedule whose stages were made without example inputs and outputs rehearses in its first step: shapes
go from stage to stage, and stages vote on whether to rehearse at all. When not all neighbours are there,
nobody answers. So every rank of a localized restart uses the shapes found out when the run began, and
nobody asks.

``torch.distributed.pipelining`` has two layouts: in newer versions a stage holds ``_user_meta`` and
``_stage_meta``, and votes; in older ones it holds ``inputs_meta`` and ``_outputs_meta``, and a
schedule begins with a message between all neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ckptd.client.model.hooks import layered

# By role (inputs, outputs, and in the newer layout their gradients): shape, stride, dtype and
# requires_grad of each tensor, None for one that is not sent; plain values, as in the step scalars. An
# unknown role is absent.
StageShapes = dict[str, list[list[Any] | None]]

_ROLES = ("inputs", "outputs", "input_grads", "output_grads")


def shapes_of(stage: Any) -> StageShapes | None:
    """The shapes that this stage has found out or was given; empty if it need not ask (a traced one).

    None before its first step, and if it sends DTensors or no tensors at all, which are not kept.
    """
    if not (hasattr(stage, "_user_meta") or hasattr(stage, "inputs_meta")):
        return {}
    meta = getattr(stage, "_stage_meta", None)
    if meta is not None:
        metas: dict[str, Any] = {role: getattr(meta, role, None) for role in _ROLES}
    else:
        metas = {
            "inputs": getattr(stage, "inputs_meta", None),
            "outputs": getattr(stage, "_outputs_meta", None),
        }
    if metas["inputs"] is None or metas["outputs"] is None or sends_dtensors(stage):
        return None
    everything = [each for found in metas.values() for each in found or () if each is not None]
    if not all(hasattr(each, "stride") for each in everything):
        return None
    return {role: [_plain(each) for each in found] for role, found in metas.items() if found is not None}


def sends_dtensors(stage: Any) -> bool:
    """True if DTensors are known to cross the stage's boundaries."""
    has_dtensors = getattr(getattr(stage, "_stage_meta", None), "has_dtensors", None)
    return has_dtensors is not None and bool(has_dtensors())


@contextmanager
def without_rehearsal(stage: Any, shapes: StageShapes) -> Iterator[None]:
    """In the body the stage takes its shapes from ``shapes`` and sends no message for them.

    They stay after the body: the stage would have found out the same.
    """
    with ExitStack() as stack:
        if shapes and hasattr(stage, "_user_meta"):
            stage._user_meta = _metadata(stage._user_meta, shapes)
        elif shapes and hasattr(stage, "inputs_meta") and stage.inputs_meta is None:
            stage.inputs_meta = tuple(_tensor(each) for each in shapes["inputs"])
            stage._configure_outputs_meta(tuple(_tensor(each) for each in shapes["outputs"]))
        for name, answer in _ANSWERS.items():
            if hasattr(stage, name):
                stack.enter_context(layered(stage, name, answer))
        yield


def _no_messages(below: Callable[..., Any]) -> list[Any]:
    return []


def _all_know(below: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    return torch.ones(1, dtype=torch.int32)


_ANSWERS: dict[str, Callable[..., Any]] = {
    "_get_init_p2p_neighbors_ops": _no_messages,
    "_warmup_forward_vote": _all_know,
    "_warmup_backward_result": _all_know,
}


def _plain(meta: Any) -> list[Any] | None:
    """Plain values of a meta tensor, or of torch's own record of one."""
    if meta is None:
        return None
    stride = meta.stride() if callable(meta.stride) else meta.stride
    dtype = str(meta.dtype).removeprefix("torch.")
    return [list(meta.shape), list(stride), dtype, bool(meta.requires_grad)]


def _metadata(like: Any, shapes: StageShapes) -> Any:
    from torch.distributed.pipelining._utils import _TensorMeta  # only in the newer layout

    def metas(found: Iterable[Sequence[Any] | None]) -> tuple[Any, ...]:
        return tuple(
            None
            if each is None
            else _TensorMeta(torch.Size(each[0]), tuple(each[1]), getattr(torch, each[2]), bool(each[3]))
            for each in found
        )

    return type(like)(**{role: metas(found) for role, found in shapes.items()})


def _tensor(plain: Sequence[Any] | None) -> Tensor:
    assert plain is not None  # only gradients may be absent
    shape, stride, dtype, requires_grad = plain
    made = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device="meta")
    return made.requires_grad_(bool(requires_grad))
