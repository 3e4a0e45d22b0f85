"""The gradient of an expert, summed over its holders: exactly once, with the same bits on each.

After a backward a holder has the part of the gradient that came from the tokens it computed. The
sum over the holders is taken for all experts together, over the process group of the tokens
(``expert_tensors``). Process groups of holders would not do: asymmetric placements have up to as
many sets of holders as experts, other ones after each new placement, and an all-reduce promises no
order of additions.

A replica that computed no token may have no gradient. The ranks first exchange which parameters
have a gradient on any of them: these are summed, and the others stay without, as in a model that is
not replicated.

The sum is an explicit call and no hook of backward: only the loop knows which backward is the last
before the optimizer's step, and hooks of parameters without a gradient would not run.

Shapes: ``R`` ranks, ``E`` experts, ``P`` parameters of the expert that has most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckptd.client.elastic.layer.expert_tensors import (
    ExpertTensor,
    TensorExchange,
    expert_tensors_of,
    rounds,
)
from ckptd.client.elastic.layer.layer_check import DTYPES, LayerAgreement

_Params: TypeAlias = dict[int, list[nn.Parameter]]


class ReplicaGradients:
    """The gradients of the experts that this rank holds.

    Args:
        experts: by number; the modules of this rank.
        agreed: placement and parameters, the same on all ranks.
        mean: gradients of the mean of the ranks' losses instead of their sum.
        group: the process group.
    """

    def __init__(
        self, experts: Mapping[int, nn.Module], agreed: LayerAgreement, *, mean: bool, group: Any
    ) -> None:
        self._experts = dict(experts)
        self._agreed = agreed
        self._ranks = len(agreed.replicas_RE)
        self._divisor = self._ranks if mean else 1
        self._group = group
        self._rank = dist.get_rank(group)
        self._unsummed = False
        self._must_be_zero = False
        self._version = 0
        self._entries = expert_tensors_of(agreed)

    @property
    def trained(self) -> bool:
        """True if a parameter of this rank's experts needs a gradient."""
        return any(param.requires_grad for param in self._all())

    @property
    def changed_unsummed(self) -> bool:
        """True if weights were changed after a backward whose gradients were not summed."""
        return self._unsummed and self._version != self._versions()

    def backward_begins(self) -> None:
        """Note that a backward reached the layer: all ranks will have gradients to sum.

        Raises:
            ValueError: gradients that were summed before are still there: they would be summed again.
        """
        if not self._unsummed:
            self._unsummed, self._version = True, self._versions()
        if self._must_be_zero:
            self._must_be_zero = False
            self._check_zero()

    def sum(self, device: torch.device) -> None:
        """Sum the gradients of the backwards since the last call; a collective call, or nothing without any.

        Args:
            device: of the layer's tokens.
        """
        if not self._unsummed:
            return
        with torch.no_grad():
            # Not cached: a layer that is moved or converted may have other parameters.
            params = self._params()
            for dtype, present in self._present(params, device).items():
                for entry in present:
                    self._divide_alone(entry, params)
                shared = [entry for entry in present if len(entry.holders) > 1]
                exchange = TensorExchange(dtype, device, self._group, divisor=self._divisor)
                for entries in rounds(shared, self._ranks, dtype.itemsize):
                    _sum_round(exchange.held(entries), params, dtype, exchange)
        self._unsummed, self._must_be_zero = False, True

    def to_owners(self, device: torch.device) -> dict[tuple[int, int], Tensor]:
        """Instead of ``sum``: this rank's shard of the sum of every parameter of the layer that has
        a gradient on any rank; a collective call.

        By expert and index of the parameter (empty without a backward since the last call). Each
        element has the same bits as from ``sum``. The replicas have no gradients afterwards.
        """
        sums: dict[tuple[int, int], Tensor] = {}
        if not self._unsummed:
            return sums
        with torch.no_grad():
            params = self._params()
            for dtype, present in self._present(params, device).items():
                exchange = TensorExchange(dtype, device, self._group, divisor=self._divisor)
                for entries in rounds(present, self._ranks, dtype.itemsize):
                    own = [params[entry.expert][entry.index] for entry in exchange.held(entries)]
                    flats = [_gradient_of(param).to(dtype).reshape(-1) for param in own]
                    parts = exchange.sums_to_owners(entries, flats)
                    sums.update(zip([entry.key for entry in entries], parts, strict=True))
            for param in self._all():
                param.grad = None
        self._unsummed = False
        return sums

    def _params(self) -> _Params:
        return {expert: list(module.parameters()) for expert, module in self._experts.items()}

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
                        f"expert {expert} still has the gradient that sync_gradients() summed, and "
                        "the next one would sum it again: call zero_grad() before the next backward, "
                        "and sync_gradients() after the last one of a step"
                    )

    def _present(self, params: _Params, device: torch.device) -> dict[torch.dtype, list[ExpertTensor]]:
        """The entries with a gradient on any rank, by its dtype; the same on all ranks."""
        most = max(len(shapes) for shapes in self._agreed.shapes_E)
        mine_EP = torch.zeros((len(self._agreed.shapes_E), most), dtype=torch.uint8)
        for expert, own in params.items():
            for index, param in enumerate(own):
                mine_EP[expert, index] = 0 if param.grad is None else DTYPES.index(param.grad.dtype) + 1
        row = mine_EP.reshape(-1).to(device)
        rows = row.new_empty((self._ranks, len(row)))
        dist.all_gather(list(rows.unbind()), row, group=self._group)
        code_EP = rows.amax(dim=0).view(mine_EP.shape).tolist()
        found: dict[torch.dtype, list[ExpertTensor]] = {dtype: [] for dtype in DTYPES}
        for entry in self._entries:
            if code := code_EP[entry.expert][entry.index]:
                found[DTYPES[code - 1]].append(entry)
        return found

    def _divide_alone(self, entry: ExpertTensor, params: _Params) -> None:
        """The only holder of a tensor already has the sum."""
        if entry.holders == (self._rank,) and self._divisor > 1:
            grad = params[entry.expert][entry.index].grad
            assert grad is not None, "present, and on no other rank"
            grad.div_(self._divisor)


def _sum_round(
    entries: Sequence[ExpertTensor], params: _Params, dtype: torch.dtype, exchange: TensorExchange
) -> None:
    own = [params[entry.expert][entry.index] for entry in entries]
    grads = [_gradient_of(param) for param in own]
    # In place where a gradient is contiguous, else a copy.
    flats = [grad.to(dtype).reshape(-1) for grad in grads]
    exchange.sum_over_holders(entries, flats)
    for param, grad, flat in zip(own, grads, flats, strict=True):
        if flat.data_ptr() != grad.data_ptr():
            grad.copy_(flat.view(grad.shape))
        if param.requires_grad:
            param.grad = grad


def _gradient_of(param: nn.Parameter) -> Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad
