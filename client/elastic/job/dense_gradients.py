"""Gradients of the dense part, summed over all ranks (those of the experts are the layers' own
affair), and the norm of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckptd.client.elastic import ElasticExperts, ExpertShards

__all__ = ["DenseGradients"]

# Of gradients that are summed in one call.
_BUCKET_BYTES = 32 << 20


class DenseGradients:
    """The gradients of parameters that all ranks have.

    A parameter that has no gradient on some rank counts as zero there; one that has none anywhere
    stays without.

    Args:
        params: the same on all ranks, in the same order.
        layers: whose experts' gradients are summed as well.
        shards: of these experts, if their optimizer is on shards: their gradients are summed into those.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        layers: Sequence[ElasticExperts],
        shards: ExpertShards | None = None,
    ) -> None:
        self._params = [param for param in params if param.requires_grad]
        self._layers, self._shards = list(layers), shards

    @torch.no_grad()
    def sum(self) -> None:
        """Sum them; a collective call."""
        if self._shards is not None:
            self._shards.reduce_gradients()
        else:
            for layer in self._layers:
                layer.sync_gradients()
        if dist.get_world_size() == 1:
            return
        for bucket in self._buckets():
            self._sum(bucket)

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``; the norm before, the same
        on all ranks. A collective call.

        Every parameter of the job counts once, however many ranks hold a replica of its expert; of
        shards each element, which one rank has.
        """
        experts = [p for one in self._trained() for p in one.parameters()]
        device = self._params[0].device if self._params else torch.device("cpu")
        first = torch.zeros((), dtype=torch.float64, device=device)
        for param in experts if self._shards is not None else self._of_first_holder():
            first += _square(param)
        if dist.get_world_size() > 1:
            dist.all_reduce(first)
        for param in self._params:  # alike on all ranks by now
            first += _square(param)
        norm = first.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for param in (*self._params, *experts):
            if param.grad is not None:
                param.grad.mul_(scale.to(param.grad.dtype))
        return norm

    def _trained(self) -> Iterator[nn.Module]:
        """What this rank's optimizers update of the experts: shards, or the replicas here."""
        if self._shards is not None:
            yield self._shards
        else:
            yield from (layer.experts for layer in self._layers)

    def _of_first_holder(self) -> Iterator[Tensor]:
        """The parameters of those experts of which this is the lowest rank that has them."""
        rank = dist.get_rank()
        for layer in self._layers:
            for number, expert in layer.experts.items():
                if int(layer.replicas_RE[:, int(number)].nonzero()[0][0]) == rank:
                    yield from expert.parameters()

    def _buckets(self) -> list[list[Tensor]]:
        """Of one dtype and device each."""
        found: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
        room: dict[tuple[torch.dtype, torch.device], int] = {}
        for param in self._params:
            key = param.dtype, param.device
            size = param.numel() * param.element_size()
            if size > room.get(key, 0):
                found.setdefault(key, []).append([])
                room[key] = max(_BUCKET_BYTES, size)
            found[key][-1].append(param)
            room[key] -= size
        return [bucket for buckets in found.values() for bucket in buckets]

    @staticmethod
    def _sum(params: Sequence[Tensor]) -> None:
        """One call for the numbers, with how many ranks have each gradient behind them."""
        like = params[0]
        there = torch.tensor([p.grad is not None for p in params], dtype=like.dtype, device=like.device)
        flat = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in params] + [there]
        )
        dist.all_reduce(flat)
        holders = flat[-len(params) :].tolist()
        at = 0
        for param, count in zip(params, holders, strict=True):
            summed = flat[at : at + param.numel()].view_as(param)
            at += param.numel()
            if count:
                if param.grad is None:
                    param.grad = torch.empty_like(param)
                param.grad.copy_(summed)


def _square(param: Tensor) -> Tensor:
    """The squared norm of its gradient."""
    if param.grad is None:
        return torch.zeros((), dtype=torch.float64, device=param.device)
    return param.grad.double().square().sum()
