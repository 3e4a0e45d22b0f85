"""Which samples a rank takes of a step's global batch: the same batch in the same order, however
many ranks there are.

Nothing in here has a position: what a step trains on follows from its number. So a run that goes on
with more or fewer ranks, or a step that is done again, sees what it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckptd.client.elastic import ElasticExperts, ExpertShards

__all__ = ["DenseGradients", "GlobalBatches", "share_of"]


def share_of(total: int, rank: int, world_size: int) -> range:
    """The part of ``range(total)`` that a rank takes: consecutive, in the order of ranks, and of
    sizes that differ by one at most.

    Where there are more ranks than samples, some get none: they still take part in what ranks do together.

    Example: of 8 samples, three ranks take 0 to 1, 2 to 4, and 5 to 7.

    Raises:
        ValueError: no such rank, or a negative total.
    """
    if total < 0 or not 0 <= rank < world_size:
        raise ValueError(f"share {rank} of {world_size} of {total} samples: there is no such share")
    return range(total * rank // world_size, total * (rank + 1) // world_size)


class GlobalBatches:
    """The samples of every step, as indices into a data set.

    Each pass over the data has an order of its own, which follows from ``seed`` and its number; a
    batch may span two of them. Losses of ranks with different numbers of samples add up to that of
    the batch if each is divided by ``batch_size``, not by its own number.

    Args:
        num_samples: of the data set.
        batch_size: of all ranks together.
        shuffle: False: in the order of the data set.
    Raises:
        ValueError: no samples, or an empty batch.
    """

    def __init__(self, num_samples: int, batch_size: int, *, seed: int = 0, shuffle: bool = True) -> None:
        if num_samples < 1 or batch_size < 1:
            raise ValueError(f"num_samples={num_samples}, batch_size={batch_size}: each must be at least 1")
        self.num_samples, self.batch_size = num_samples, batch_size
        self._seed, self._shuffle = seed, shuffle
        self._known: dict[int, Tensor] = {}

    def of(self, step: int) -> Tensor:
        """``[batch_size]`` int64: the samples of a step, all ranks together."""
        return self._at(step, range(self.batch_size))

    def mine(self, step: int, rank: int, world_size: int) -> Tensor:
        """``[n]`` int64: the samples of a step that this rank takes (`share_of`)."""
        return self._at(step, share_of(self.batch_size, rank, world_size))

    def _at(self, step: int, places: range) -> Tensor:
        found, at = [], step * self.batch_size + places.start
        end = step * self.batch_size + places.stop
        while at < end:
            number, first = divmod(at, self.num_samples)
            count = min(end - at, self.num_samples - first)
            found.append(self._order(number)[first : first + count])
            at += count
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)

    def _order(self, number: int) -> Tensor:
        """Of a pass over the data; the last few are kept."""
        if number not in self._known:
            if len(self._known) > 1:
                self._known.pop(min(self._known))
            generator = torch.Generator().manual_seed((self._seed << 24) ^ number)
            self._known[number] = (
                torch.randperm(self.num_samples, generator=generator)
                if self._shuffle
                else torch.arange(self.num_samples)
            )
        return self._known[number]


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
