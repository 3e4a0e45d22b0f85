"""Rows to the ranks that compute them, and back: an uneven all-to-all that autograd takes the other way.

A collective needs every rank, in backward, too. But autograd only visits what needs a gradient: a
rank whose tokens need none, or whose experts got none, would stay away, and the others would wait
for it. Therefore a *ticket* goes with the rows, from the first exchange of a call through to the
second: a scalar that needs a gradient on all ranks if the rows do on any. So each rank's backward
comes through both exchanges, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["RowExchange", "all_to_all", "swap_rows"]


@dataclass(frozen=True, slots=True)
class RowExchange:
    """One exchange.

    Args:
        sends: rows to each rank; they stand in this order.
        receives: rows from each rank.
        group: the process group.
        before_backward: called on the backward's thread before gradients are exchanged.
    """

    sends: list[int]
    receives: list[int]
    group: Any
    before_backward: Callable[[], None] | None = None


def swap_rows(rows: Tensor, ticket: Tensor, swap: RowExchange) -> tuple[Tensor, Tensor]:
    """What this rank gets for its rows, and the ticket for the next exchange of this call; a
    collective call.
    """
    received, onward = _Swap.apply(rows, ticket, swap)
    return received, onward


def all_to_all(rows: Tensor, sends: list[int], receives: list[int], group: Any) -> Tensor:
    """Rows (along dimension 0) of every rank for this one, in the order of ranks; a collective call."""
    received = rows.new_empty((sum(receives), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
    return received


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ticket: Tensor, swap: RowExchange) -> tuple[Tensor, Tensor]:
        ctx.swap = swap
        return all_to_all(rows, swap.sends, swap.receives, swap.group), torch.zeros_like(ticket)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_ticket: Tensor) -> tuple[Tensor, Tensor, None]:
        swap = ctx.swap
        if swap.before_backward is not None:
            swap.before_backward()
        return all_to_all(grad, swap.receives, swap.sends, swap.group), grad_ticket, None
