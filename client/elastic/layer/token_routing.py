"""The way of tokens to the ranks that compute them, and back: plan, order and exchange of rows.

A rank's batch has ``T * K`` *pairs*: token t with its choice k is ``t * K + k``. They are sent as rows,

- sorted by target rank, then expert, then pair (``Route.sent``), and arrive
- sorted by source rank, then expert, then pair of the source. An expert computes its rows in one call,
- sorted by source rank, then pair of the source (``Route.by_expert``).

Each order follows from the counts alone: only counts and rows are exchanged, and a repeat with the
same placement has the same order. Rows are only ever gathered, in backward, too: a scatter that
adds would add in any order on a GPU.

Shapes: ``T`` tokens, ``K`` choices of each, ``H`` their width, ``S = T * K`` rows sent, ``M`` rows
received, ``R`` ranks, ``E`` experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from ckptd.client.log_lines import get_logger
from ckptd.core.elastic.token_dispatch import plan_dispatch
from ckptd.cuda.dispatch import DeviceDispatcher, KernelsUnavailable

logger = get_logger(__name__)

Ints = NDArray[np.int64]


# -- the plan ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The rows that one rank sends and receives, itself included; int64, on the host or the rank's device.

    Args:
        tokens_RE: tokens for each expert that go to each rank.
        first_RE: the index of the first of them among this rank's tokens of that expert; 0 without any.
        received_RE: tokens for each expert that come from each rank.
    """

    tokens_RE: Tensor
    first_RE: Tensor
    received_RE: Tensor

    def equals(self, other: RowCounts) -> bool:
        """Compare on the host."""
        return (
            torch.equal(self.tokens_RE.cpu(), other.tokens_RE.cpu())
            and torch.equal(self.first_RE.cpu(), other.first_RE.cpu())
            and torch.equal(self.received_RE.cpu(), other.received_RE.cpu())
        )


class Dispatcher:
    """Plans which rank computes which tokens, on the device of the counts: on the CPU
    (``ckptd.core.elastic.token_dispatch``) or a CUDA device (``ckptd.cuda.dispatch``).

    Both give the same integers, so ranks may differ in which they use. A rank with other results
    would make all of them hang in the exchange of tokens. Therefore the first plan on a device is
    made in both ways and compared. If the kernels cannot be compiled there, or give other numbers, a
    warning says so and the CPU plans from then on.

    Args:
        replicas_RE: the placement; every expert has a holder.
        nodes_R: the number of each rank's node; None: unknown.
        rank: for which `share` plans.
    """

    def __init__(self, replicas_RE: Ints, nodes_R: Ints | None, rank: int) -> None:
        self._replicas_RE = replicas_RE
        self._nodes_R = nodes_R
        self._rank = rank
        self._on_device: dict[torch.device, DeviceDispatcher | None] = {}

    def share(self, counts: Tensor) -> RowCounts:
        """The rows that this rank sends and receives.

        Args:
            counts: int64 ``[R, E]``, tokens of each rank for each expert, on any device.
        """
        device = counts.device
        if device.type != "cuda":
            return self._by_cpu(counts)
        if device not in self._on_device:
            self._on_device[device] = self._tried(counts)
        planner = self._on_device[device]
        return self._by_cpu(counts) if planner is None else self._by(planner, counts)

    def _by_cpu(self, counts: Tensor) -> RowCounts:
        plan = plan_dispatch(counts.cpu().numpy(), self._replicas_RE, nodes=self._nodes_R)
        sends = plan.sends(self._rank)
        arrays = (sends.tokens, sends.first, plan.receives(self._rank))
        return RowCounts(*(torch.from_numpy(array) for array in arrays))

    def _by(self, planner: DeviceDispatcher, counts: Tensor) -> RowCounts:
        sends, received = planner.plan(counts).share(self._rank)
        return RowCounts(sends.tokens, sends.first, received)

    def _tried(self, counts: Tensor) -> DeviceDispatcher | None:
        """The device's dispatcher, if it works on this machine."""
        nodes = None if self._nodes_R is None else torch.tensor(self._nodes_R)
        try:
            planner = DeviceDispatcher(torch.tensor(self._replicas_RE), counts.device, nodes=nodes)
            equal = self._by(planner, counts).equals(self._by_cpu(counts))
        except KernelsUnavailable as error:
            logger.warning(
                "tokens are dispatched by the CPU, which takes longer: the kernels do not run on %s: %s",
                counts.device,
                error,
            )
            return None
        if not equal:
            logger.warning(
                "tokens are dispatched by the CPU, which takes longer: on %s the kernels of this "
                "Triton gave other numbers; please report it",
                counts.device,
            )
            return None
        return planner


# -- the order of rows -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Order:
    """A permutation of rows: ``index`` is the row at each place, ``inverse`` the place of each row."""

    index: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, index: Tensor) -> Order:
        """The order of the permutation ``index``."""
        places = torch.arange(len(index), device=index.device)
        return cls(index, torch.empty_like(index).scatter_(0, index, places))

    def undone(self) -> Order:
        """The inverse permutation."""
        return Order(self.inverse, self.index)


@dataclass(frozen=True, slots=True)
class Route:
    """The rows of this rank in one call of the layer.

    Args:
        sends: rows to each rank.
        receives: rows from each rank.
        sent: ``[S]``, pairs in the order in which they are sent.
        by_expert: ``[M]``, received rows in the order in which experts compute them.
        computes: each expert with its number of rows, in that order; experts without rows are left out.
    """

    sends: list[int]
    receives: list[int]
    sent: Order
    by_expert: Order
    computes: list[tuple[int, int]]


def plan_route(experts_TK: Tensor, share: RowCounts) -> Route:
    """The orders of this rank's rows; waits once for the device, for the numbers of rows.

    Args:
        experts_TK: the expert of every pair of this rank's batch.
        share: of this rank, planned from the counts of all ranks.
    """
    sends, receives, by_expert = _on_host(
        share.tokens_RE.sum(1), share.received_RE.sum(1), share.received_RE.sum(0)
    )
    counts_E = share.tokens_RE.sum(0)
    begins_E = counts_E.cumsum(0) - counts_E
    sorted_S = torch.argsort(experts_TK.reshape(-1), stable=True)
    places_S = _laid_out(begins_E + share.first_RE, share.tokens_RE, sum(sends))
    sent_S = sorted_S[places_S.to(sorted_S.device)]
    got_RE = share.received_RE
    got_at_RE = got_RE.reshape(-1).cumsum(0).view_as(got_RE) - got_RE
    by_expert_M = _laid_out(got_at_RE.T, got_RE.T, sum(receives)).to(sorted_S.device)
    return Route(
        sends,
        receives,
        Order.of(sent_S),
        Order.of(by_expert_M),
        [(expert, rows) for expert, rows in enumerate(by_expert) if rows],
    )


def _on_host(*counts: Tensor) -> list[list[int]]:
    """Their numbers, in one transfer."""
    numbers = torch.cat(counts).cpu()
    return [part.tolist() for part in numbers.split([len(some) for some in counts])]


def _laid_out(begins: Tensor, lengths: Tensor, total: int) -> Tensor:
    """The numbers of all intervals, one interval after the other; ``total`` is the sum of their lengths.

    Example: begins 5, 0 and lengths 2, 3 give 5, 6, 0, 1, 2.
    """
    length = lengths.reshape(-1)
    shift = begins.reshape(-1) - (length.cumsum(0) - length)
    shifts = torch.repeat_interleave(shift, length, output_size=total)
    return shifts + torch.arange(total, device=length.device)


def spread(tokens_TH: Tensor, pairs: Order, choices: int) -> Tensor:
    """``[S, H]``: the token of each pair, in that order; its gradient is the sum over a token's choices."""
    rows: Tensor = _Spread.apply(tokens_TH, pairs, choices)
    return rows


def reorder(rows: Tensor, order: Order) -> Tensor:
    """The rows in that order."""
    reordered: Tensor = _Reorder.apply(rows, order)
    return reordered


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return rows.index_select(0, order.index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.order.inverse), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_TH: Tensor, pairs: Order, choices: int) -> Tensor:
        ctx.pairs, ctx.shape_TKH = pairs, (len(tokens_TH), choices, tokens_TH.shape[1])
        return tokens_TH.index_select(0, pairs.index // choices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        by_pair = grad.index_select(0, ctx.pairs.inverse)
        return by_pair.view(ctx.shape_TKH).sum(1), None, None


# -- the exchange of rows ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowExchange:
    """One exchange.

    Args:
        sends: rows to each rank, in this order.
        receives: rows from each rank.
        group: the process group.
        before_backward: called on the backward's thread before gradients are exchanged.
    """

    sends: list[int]
    receives: list[int]
    group: Any
    before_backward: Callable[[], None] | None = None


def swap_rows(rows: Tensor, ticket: Tensor, swap: RowExchange) -> tuple[Tensor, Tensor]:
    """The received rows, and the ticket for the next exchange of this call; a collective call, in
    backward, too.

    Backward needs every rank, but autograd only visits what needs a gradient: a rank whose tokens
    need none, or whose experts got none, would stay away, and the others would wait for it.
    Therefore a *ticket* goes with the rows through both exchanges of a call: a scalar that needs a
    gradient on all ranks if the rows do on any. The second exchange takes the ticket of the first, so each
    rank's backward makes both exchanges, in the same order.
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
