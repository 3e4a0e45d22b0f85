"""Experts that are rows of two tensors, as transformers 5 keeps them: Mixtral, Qwen2-MoE,
Qwen3-MoE, OLMoE, DeepSeek, GLM-4 and others.

What is needed of such a module is told by its form, not by its class: ``gate_up_proj [E, 2F, H]``,
``down_proj [E, H, F]``, an activation, and a call with ``(tokens, experts, weights)``, the one that
``ElasticExperts`` has. That an expert is ``down(act(gate) * up)`` is tried on a few rows: modules
of the same form may clamp, scale, or interleave gate and up.

Nothing of transformers is imported.

Shapes: ``E`` experts, ``H`` width of tokens, ``F`` width inside.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["FusedExpert", "fused_problem", "has_fused_names"]

_NAMES = ("gate_up_proj", "down_proj")
_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]
_ROWS = 4
# Of two ways to compute the same few products, in units of the dtype's rounding and relative to the
# largest output.
_ROUNDINGS = 64


class FusedExpert(nn.Module):
    """One expert out of such a module; its parameters are views of the rows until ``own_rows``.

    Args:
        experts: the module.
        number: of the expert.
    """

    def __init__(self, experts: nn.Module, number: int) -> None:
        super().__init__()
        for name in _NAMES:
            whole = experts.get_parameter(name)
            row = nn.Parameter(whole.detach()[number], requires_grad=whole.requires_grad)
            self.register_parameter(name, row)
        self.act_fn: Any = experts.act_fn

    def forward(self, rows: Tensor) -> Tensor:
        """``[n, H]`` of ``[n, H]``."""
        gate, up = functional.linear(rows, self.get_parameter("gate_up_proj")).chunk(2, dim=-1)
        return functional.linear(self.act_fn(gate) * up, self.get_parameter("down_proj"))

    def own_rows(self) -> None:
        """Copy them, so that the module with all experts can be freed."""
        for param in self.parameters():
            param.data = param.data.clone()


def has_fused_names(module: nn.Module) -> bool:
    """Whether this may be such a module."""
    return all(name in module._parameters for name in _NAMES)


def fused_problem(module: nn.Module) -> str:
    """Why this module, which has the names, is not one whose experts can be taken; empty if it is."""
    more = [n for n, _ in module.named_parameters() if n not in _NAMES]
    more += [n for n, _ in module.named_buffers()]
    if more:
        return f"it also has {', '.join(more[:3])}"
    if getattr(module, "_is_expert_parallel", False):
        return "it is spread over ranks already (expert parallelism)"
    gate_up, down = (module.get_parameter(name) for name in _NAMES)
    for name, param in zip(_NAMES, (gate_up, down), strict=True):
        if type(param) is not nn.Parameter:
            return f"{name} is a {type(param).__name__}: replace the blocks before parameters are sharded"
        if not param.is_floating_point() or param.ndim != 3:
            return f"{name} is {param.dtype} {list(param.shape)}, not floating point [E, ., .]"
    if gate_up.shape != (down.shape[0], 2 * down.shape[2], down.shape[1]):
        return (
            f"gate_up_proj {list(gate_up.shape)} and down_proj {list(down.shape)} are not [E, "
            "2F, H] and [E, H, F]"
        )
    arguments = list(inspect.signature(module.forward).parameters)
    if arguments != _ARGUMENTS:
        return f"it is called with ({', '.join(arguments)}), not ({', '.join(_ARGUMENTS)})"
    if not callable(getattr(module, "act_fn", None)):
        return "it has no act_fn"
    return "" if gate_up.is_meta else _other_result(module, gate_up)


@torch.no_grad()
def _other_result(module: nn.Module, gate_up: Tensor) -> str:
    """Whether the first expert and the last one compute something else than ``FusedExpert``."""
    count, width = gate_up.shape[0], gate_up.shape[2]
    # Some of each sign and size; no random generator is touched.
    grid = torch.linspace(-3, 3, _ROWS * width, dtype=torch.float64).sin() * 2
    rows = grid.view(_ROWS, width).to(gate_up)
    for number in sorted({0, count - 1}):
        experts = torch.full((_ROWS, 1), number, dtype=torch.int64, device=rows.device)
        try:
            wanted = module(rows, experts, rows.new_ones(_ROWS, 1))
        except Exception as error:  # noqa: BLE001
            # Not our code: whatever it raises, it cannot be compared with.
            return f"it raised {type(error).__name__} when it was tried: {error}"
        found = FusedExpert(module, number)(rows)
        tolerance = _ROUNDINGS * torch.finfo(rows.dtype).eps * float(wanted.abs().max())
        if found.shape != wanted.shape or not bool(((found - wanted).abs() <= tolerance).all()):
            return f"its expert {number} computes something else than down(act(gate) * up)"
    return ""
