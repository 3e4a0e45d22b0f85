"""What every rank brings to a call of the layer, told to all ranks before any tokens are exchanged.

The counts are needed anyway, to plan who computes which tokens. With them goes what would otherwise
fail or hang on some ranks only: an input that cannot be used, another width or dtype, a forward
without gradients. So all ranks go on, or all raise the same error.

Shapes: ``R`` ranks, ``E`` experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["DTYPES", "Inputs", "LayerInputProblem", "exchange_inputs"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What is sent; the ranks tell each other a dtype by its place here."""


class LayerInputProblem(IntEnum):
    """Why a rank cannot take part in a call."""

    NONE = 0
    TOKENS = 1
    EXPERTS = 2
    WEIGHTS = 3
    NO_SUCH_EXPERT = 4
    UNSUMMED = 5


_WORDS = {
    LayerInputProblem.TOKENS: "tokens are not a tensor [T, H] of float16, bfloat16, float32 or float64",
    LayerInputProblem.EXPERTS: (
        "experts are not a tensor [T, K] of int32 or int64, with a row for each token and a choice at least"
    ),
    LayerInputProblem.WEIGHTS: "weights are not floating point of the shape of experts, [T, K]",
    LayerInputProblem.NO_SUCH_EXPERT: (
        "a token is routed to an expert that there is not: experts are numbered from 0"
    ),
    LayerInputProblem.UNSUMMED: "an expert's weights were changed by a gradient that was not "
    "summed over its replicas, which now differ: "
    "call sync_gradients() after each backward, before the optimizer's step",
}

# Of a row, before the counts.
_PROBLEM, _WIDTH, _DTYPE, _GRAD_MODE, _TOKENS_LEARN, _EXPERTS_LEARN, _HEAD = range(7)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What all ranks know of a call.

    Args:
        counts_RE: tokens of each rank for each expert.
        counts: the same where this rank's tokens are; its rows may lie apart.
        tokens_learn: the tokens of some rank need gradients.
        experts_learn: the outputs of some rank's experts do.
    """

    counts_RE: NDArray[np.int64]
    counts: Tensor
    tokens_learn: bool
    experts_learn: bool


def exchange_inputs(
    tokens_TH: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor,
    *,
    num_experts: int,
    trained: bool,
    unsummed: bool,
    group: Any,
) -> Inputs:
    """Tell all ranks what this one brings, and learn what they bring; a collective call.

    Args:
        trained: a parameter of this rank's experts needs a gradient.
        unsummed: its experts' weights were changed by gradients that were not summed.
    Raises:
        ValueError: on every rank, if any of them cannot go on; says which, and why.
    """
    problem = _problem_of(tokens_TH, experts_TK, weights_TK)
    head = [problem, 0, 0, torch.is_grad_enabled(), 0, trained]
    if not problem:
        head[_WIDTH], head[_DTYPE] = tokens_TH.shape[1], DTYPES.index(tokens_TH.dtype)
        head[_TOKENS_LEARN] = tokens_TH.requires_grad
    if unsummed:
        head[_PROBLEM] = LayerInputProblem.UNSUMMED
    row = torch.zeros(_HEAD + num_experts, dtype=torch.int64, device=tokens_TH.device)
    row[:_HEAD] = torch.tensor([int(value) for value in head])
    if not head[_PROBLEM]:
        _count(experts_TK, row)
    everything = row.new_empty((dist.get_world_size(group), len(row)))
    dist.all_gather(list(everything.unbind()), row, group=group)
    return _agreed(everything.cpu().numpy(), everything)


def _problem_of(tokens_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> LayerInputProblem:
    if tokens_TH.ndim != 2 or tokens_TH.dtype not in DTYPES:
        return LayerInputProblem.TOKENS
    integer = experts_TK.dtype in (torch.int32, torch.int64)
    fits = experts_TK.ndim == 2 and len(experts_TK) == len(tokens_TH) and experts_TK.shape[1] > 0
    if not (integer and fits):
        return LayerInputProblem.EXPERTS
    if weights_TK.shape != experts_TK.shape or not weights_TK.is_floating_point():
        return LayerInputProblem.WEIGHTS
    return LayerInputProblem.NONE


def _count(experts_TK: Tensor, row: Tensor) -> None:
    """Write how many of the pairs are for each expert, or that some are for none; the device is not
    waited for.
    """
    num_experts = len(row) - _HEAD
    wrong = ((experts_TK < 0) | (experts_TK >= num_experts)).any()
    row[_PROBLEM] = torch.where(wrong, int(LayerInputProblem.NO_SUCH_EXPERT), 0)
    ids = experts_TK.reshape(-1).to(torch.int64).clamp(0, num_experts - 1)
    row[_HEAD:].scatter_add_(0, ids, torch.ones_like(ids))


def _agreed(rows: NDArray[np.int64], on_device: Tensor) -> Inputs:
    troubled = {rank: LayerInputProblem(code) for rank, code in enumerate(rows[:, _PROBLEM].tolist()) if code}
    if troubled:
        words = "; ".join(f"rank {rank}: {_WORDS[why]}" for rank, why in troubled.items())
        raise ValueError(f"the layer of experts was not computed: {words}")
    _same(rows, _WIDTH, "tokens have other widths", str)
    _same(rows, _DTYPE, "tokens have other dtypes", lambda code: str(DTYPES[code]))
    _same(rows, _GRAD_MODE, "some run it with gradients, some without", lambda on: _GRAD_WORDS[on])
    learning = bool(rows[0, _GRAD_MODE])
    tokens_learn = learning and bool(rows[:, _TOKENS_LEARN].any())
    experts_learn = tokens_learn or (learning and bool(rows[:, _EXPERTS_LEARN].any()))
    return Inputs(rows[:, _HEAD:], on_device[:, _HEAD:], tokens_learn, experts_learn)


_GRAD_WORDS = ("without", "with")


def _same(rows: NDArray[np.int64], column: int, trouble: str, word: Callable[[int], str]) -> None:
    values: Sequence[int] = rows[:, column].tolist()
    if len(set(values)) > 1:
        shown = ", ".join(f"rank {rank}: {word(value)}" for rank, value in enumerate(values))
        raise ValueError(f"the layer of experts was not computed: the ranks disagree, {trouble} ({shown})")
