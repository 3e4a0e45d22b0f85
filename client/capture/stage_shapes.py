"""What the stages of a pipeline find out in their first step, kept with the snapshots, and put in
after a localized restart.

A schedule whose stages were made without example inputs and outputs rehearses in its first step:
shapes go from stage to stage, and stages vote on whether to do it at all. When not all neighbours
are there, nobody answers. So every rank of such a restart puts in what it found out when the run
began, and nobody asks.

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

__all__ = ["StageShapes", "sends_dtensors", "shapes_of", "without_rehearsal"]

# By role (inputs, outputs, and in the newer layout their gradients): of each tensor shape, stride,
# dtype and whether it requires grad, None for one that is not sent; plain values, as they are kept
# in the step scalars. A role that is unknown is absent.
StageShapes = dict[str, list[list[Any] | None]]

_ROLES = ("inputs", "outputs", "input_grads", "output_grads")


def shapes_of(stage: Any) -> StageShapes | None:
    """What this stage has found out, or was told; nothing where it need not ask, as a traced one.

    None before its first step, and where it sends what we do not keep: DTensors, or no tensors at all.
    """
    if not (hasattr(stage, "_user_meta") or hasattr(stage, "inputs_meta")):
        return {}
    meta = getattr(stage, "_stage_meta", None)
    if meta is not None:
        told: dict[str, Any] = {role: getattr(meta, role, None) for role in _ROLES}
    else:
        told = {
            "inputs": getattr(stage, "inputs_meta", None),
            "outputs": getattr(stage, "_outputs_meta", None),
        }
    if told["inputs"] is None or told["outputs"] is None or sends_dtensors(stage):
        return None
    everything = [each for found in told.values() for each in found or () if each is not None]
    if not all(hasattr(each, "stride") for each in everything):
        return None
    return {role: [_told(each) for each in found] for role, found in told.items() if found is not None}


def sends_dtensors(stage: Any) -> bool:
    """Whether DTensors cross its boundaries, as far as it is known by now."""
    meta = getattr(stage, "_stage_meta", None)
    has_dtensors = getattr(meta, "has_dtensors", None)
    return has_dtensors is not None and bool(has_dtensors())


@contextmanager
def without_rehearsal(stage: Any, shapes: StageShapes) -> Iterator[None]:
    """During the body, and if it begins in it, this stage takes its shapes from ``shapes``; no
    message is sent for them.

    What was put in stays: it is what the stage would have found out.
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


def _told(meta: Any) -> list[Any] | None:
    """Of a meta tensor, or of torch's own record of one."""
    if meta is None:
        return None
    stride = meta.stride() if callable(meta.stride) else meta.stride
    return [
        list(meta.shape),
        list(stride),
        str(meta.dtype).removeprefix("torch."),
        bool(meta.requires_grad),
    ]


def _metadata(like: Any, shapes: StageShapes) -> Any:
    from torch.distributed.pipelining._utils import _TensorMeta  # only in the newer layout

    def metas(told: Iterable[Sequence[Any] | None]) -> tuple[Any, ...]:
        return tuple(
            None
            if each is None
            else _TensorMeta(torch.Size(each[0]), tuple(each[1]), getattr(torch, each[2]), bool(each[3]))
            for each in told
        )

    return type(like)(**{role: metas(told) for role, told in shapes.items()})


def _tensor(told: Sequence[Any] | None) -> Tensor:
    assert told is not None  # only gradients may be absent
    shape, stride, dtype, requires_grad = told
    made = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device="meta")
    return made.requires_grad_(bool(requires_grad))
