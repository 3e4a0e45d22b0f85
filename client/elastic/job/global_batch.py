"""A step's global batch: the samples that each rank takes, and the gradients summed over all ranks.

The batch of a step and its order follow from the step's number, for any number of ranks, and from no
position: a run that continues with other ranks, or a repeated step, sees the same samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ckptd.client.elastic import ElasticExperts, ExpertShards

_BUCKET_BYTES = 32 << 20  # of gradients that are summed in one call


def share_of(total: int, rank: int, world_size: int) -> range:
    """The part of ``range(total)`` that a rank takes: consecutive, in the order of ranks, in sizes
    that differ by one at most.

    With more ranks than samples some get none: they still take part in collective calls.

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
    batch may span two passes. Losses of ranks with different numbers of samples add up to that of
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
        """Of a pass over the data; the last two are kept."""
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


class DenseGradients:
    """The gradients of the dense part, summed over all ranks, and the norm of all gradients.

    A parameter without a gradient on some ranks counts as zero there; one without a gradient on all
    ranks stays without.

    Args:
        params: the same on all ranks, in the same order.
        layers: whose experts' gradients are summed as well.
        shards: of these experts; their gradients are then summed into the shards.
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
            _sum(bucket)

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients to a norm of at most ``max_norm``; returns the norm before, the same on
        all ranks. A collective call.

        Every parameter counts once, however many ranks hold a replica of its expert; of shards
        each element, which one rank has.
        """
        sharded = self._shards is not None
        trained = [self._shards] if self._shards is not None else [layer.experts for layer in self._layers]
        experts = [param for module in trained for param in module.parameters()]
        device = self._params[0].device if self._params else torch.device("cpu")
        square = torch.zeros((), dtype=torch.float64, device=device)
        for param in experts if sharded else self._of_first_holder():
            square += _square(param)
        if dist.get_world_size() > 1:
            dist.all_reduce(square)
        for param in self._params:  # equal on all ranks by now
            square += _square(param)
        norm = square.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for param in (*self._params, *experts):
            if param.grad is not None:
                param.grad.mul_(scale.to(param.grad.dtype))
        return norm

    def _of_first_holder(self) -> Iterator[Tensor]:
        """The parameters of the experts of which this rank is the lowest holder."""
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


def _sum(params: Sequence[Tensor]) -> None:
    """Sum in one call the gradients, followed by the number of ranks that have each."""
    like = params[0]
    there = torch.tensor([p.grad is not None for p in params], dtype=like.dtype, device=like.device)
    flat = torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in params] + [there]
    )
    dist.all_reduce(flat)
    counts = flat[-len(params) :].tolist()
    at = 0
    for param, count in zip(params, counts, strict=True):
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
