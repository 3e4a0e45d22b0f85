"""The gradient of an expert, summed over the ranks that hold replicas of it: exactly once, and the same bits on each.

After a backward a holder has the part of the gradient that came from the tokens it computed. The whole is the sum over the holders, taken for all
experts together over the process group that the tokens travel on (``holders``). There are no process groups for sets of holders: asymmetric
placements have up to as many sets as experts, other ones after each new placement, and an all-reduce promises no order of additions.

A replica that computed no token may have no gradient. Which parameters have one on any rank is told first: these are summed, and the
others stay without, as they would in a model that is not replicated.

This is a call of its own, not a hook of backward: only the loop knows which backward is the last before the optimizer's step, and hooks of
parameters that got no gradient would not run.

Shapes: ``R`` ranks, ``E`` experts, ``P`` parameters of the expert that has most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckptd.client.elastic.agreeing import Agreed
from ckptd.client.elastic.holders import Held, sum_over_holders
from ckptd.client.elastic.inputs import DTYPES

__all__ = ["ReplicaGradients"]

# Of the busiest rank in one round: bounds what is needed beside the gradients, two to three times this.
_ROUND_BYTES = 64 << 20


_Params: TypeAlias = dict[int, list[nn.Parameter]]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A parameter of an expert, and who holds it."""

    expert: int
    index: int
    held: Held


class ReplicaGradients:
    """The gradients of the experts that this rank holds.

    Args:
        experts: by number; the modules of this rank.
        agreed: placement and parameters, the same on all ranks.
        mean: gradients of the mean of the ranks' losses instead of their sum.
        group: the process group.
    """

    def __init__(
        self, experts: Mapping[int, nn.Module], agreed: Agreed, *, mean: bool, group: Any
    ) -> None:
        self._experts = dict(experts)
        self._agreed = agreed
        self._divisor = len(agreed.replicas_RE) if mean else 1
        self._group = group
        self._rank = dist.get_rank(group)
        self._unsummed = False
        self._must_be_zero = False
        self._version = 0
        self._pieces = [
            _Piece(expert, index, Held(shape.numel, holders))
            for expert, shapes in enumerate(agreed.shapes_E)
            for holders in [tuple(agreed.replicas_RE[:, expert].nonzero()[0].tolist())]
            for index, shape in enumerate(shapes)
        ]

    @property
    def trained(self) -> bool:
        """Whether a parameter of this rank's experts needs a gradient."""
        return any(param.requires_grad for param in self._all())

    @property
    def changed_unsummed(self) -> bool:
        """Whether weights were changed after a backward whose gradients were not summed."""
        return self._unsummed and self._version != self._versions()

    def backward_begins(self) -> None:
        """A backward has come to the layer: there will be gradients to sum, on all ranks.

        Raises:
            ValueError: there still are those that were summed before: they would be summed again.
        """
        if not self._unsummed:
            self._unsummed, self._version = True, self._versions()
        if self._must_be_zero:
            self._must_be_zero = False
            self._check_zero()

    def sum(self, device: torch.device) -> None:
        """Sum what backwards have added since the last time; a collective call. Without any, nothing happens.

        Args:
            device: of the layer's tokens.
        """
        if not self._unsummed:
            return
        with torch.no_grad():
            # Asked anew each time: a layer that is moved or converted may have other parameters.
            params = {expert: list(module.parameters()) for expert, module in self._experts.items()}
            for dtype, present in self._present(params, device).items():
                for piece in present:
                    self._alone(piece, params)
                shared = [piece for piece in present if len(piece.held.holders) > 1]
                for pieces in self._rounds(shared, dtype.itemsize):
                    self._sum_round(pieces, params, dtype, device)
        self._unsummed, self._must_be_zero = False, True

    def _all(self) -> Iterator[nn.Parameter]:
        for module in self._experts.values():
            yield from module.parameters()

    def _versions(self) -> int:
        return sum(param._version for param in self._all())

    def _check_zero(self) -> None:
        for expert, module in self._experts.items():
            for param in module.parameters():
                if param.grad is not None and bool(param.grad.count_nonzero()):
                    raise ValueError(
                        f"expert {expert} still has the gradient that sync_gradients() summed, and the next one would sum it again: "
                        "call zero_grad() before the next backward, and sync_gradients() after the last one of a step"
                    )

    def _present(self, params: _Params, device: torch.device) -> dict[torch.dtype, list[_Piece]]:
        """Those that have a gradient on any rank, by its dtype; the same on all ranks."""
        most = max(len(shapes) for shapes in self._agreed.shapes_E)
        mine_EP = torch.zeros((len(self._agreed.shapes_E), most), dtype=torch.uint8)
        for expert, own in params.items():
            for index, param in enumerate(own):
                mine_EP[expert, index] = 0 if param.grad is None else _code_of(param.grad)
        row = mine_EP.reshape(-1).to(device)
        rows = row.new_empty((len(self._agreed.replicas_RE), len(row)))
        dist.all_gather(list(rows.unbind()), row, group=self._group)
        code_EP = rows.amax(dim=0).view(mine_EP.shape).tolist()
        found: dict[torch.dtype, list[_Piece]] = {dtype: [] for dtype in DTYPES}
        for piece in self._pieces:
            if code := code_EP[piece.expert][piece.index]:
                found[DTYPES[code - 1]].append(piece)
        return found

    def _alone(self, piece: _Piece, params: _Params) -> None:
        """The only holder has the sum already."""
        if piece.held.holders == (self._rank,) and self._divisor > 1:
            grad = params[piece.expert][piece.index].grad
            assert grad is not None, "present, and on no other rank"
            grad.div_(self._divisor)

    def _rounds(self, pieces: Sequence[_Piece], itemsize: int) -> Iterator[list[_Piece]]:
        """As many at once as fit; the same on all ranks, also on those that hold none of them."""
        taken: list[_Piece] = []
        sizes = [0] * len(self._agreed.replicas_RE)
        for piece in pieces:
            size = piece.held.numel * itemsize
            if taken and max(sizes[holder] for holder in piece.held.holders) + size > _ROUND_BYTES:
                yield taken
                taken, sizes = [], [0] * len(sizes)
            taken.append(piece)
            for holder in piece.held.holders:
                sizes[holder] += size
        if taken:
            yield taken

    def _sum_round(
        self, pieces: Sequence[_Piece], params: _Params, dtype: torch.dtype, device: torch.device
    ) -> None:
        mine = [piece for piece in pieces if self._rank in piece.held.holders]
        own = [params[piece.expert][piece.index] for piece in mine]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in own]
        # In place where a gradient is contiguous, else a copy.
        flats = [grad.to(dtype).reshape(-1) for grad in grads]
        sum_over_holders(
            [piece.held for piece in mine],
            flats,
            divisor=self._divisor,
            dtype=dtype,
            device=device,
            group=self._group,
        )
        for param, grad, flat in zip(own, grads, flats, strict=True):
            if flat.data_ptr() != grad.data_ptr():
                grad.copy_(flat.view(grad.shape))
            if param.requires_grad:
                param.grad = grad


def _code_of(grad: Tensor) -> int:
    return DTYPES.index(grad.dtype) + 1
