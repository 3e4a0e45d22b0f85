"""Tensors between those who hold them and those who own a shard of them: sums of gradients there,
weights back.

Every rank owns a *shard* of every tensor, whoever holds it: ``ceil(numel / R)`` elements, the last
ones padded with zeros. The shards of all ranks, one after the other, are the tensor and its
padding. As all shards of a tensor have one length, what goes to an owner is a column of the tensors
laid side by side as ``[R, length]``, and no rank cuts every tensor into as many slices as there are
ranks.

Shapes: ``R`` ranks, ``C`` elements of a rank's shards of several tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ckptd.client.elastic.layer.expert_tensors import Held
from ckptd.client.elastic.layer.holder_sums import added
from ckptd.client.elastic.layer.row_exchange import all_to_all
from ckptd.core.elastic.shard_owners import shard_length

__all__ = ["cut", "joined", "shard_length", "shards_to_holders", "sums_to_owners"]


def cut(flat: Tensor, ranks: int) -> Tensor:
    """``[R, length]``: the shards of a tensor ``[numel]``, padded with zeros."""
    length = shard_length(len(flat), ranks)
    padding = flat.new_zeros(ranks * length - len(flat))
    return (torch.cat([flat, padding]) if len(padding) else flat).view(ranks, length)


def joined(shards: Sequence[Tensor], numel: int) -> Tensor:
    """``[numel]``: the tensor of which these are the shards of all ranks, in their order."""
    return torch.cat(list(shards))[:numel]


def sums_to_owners(
    held: Sequence[Held],
    flats: Sequence[Tensor],
    *,
    divisor: int,
    dtype: torch.dtype,
    device: torch.device,
    group: Any,
) -> list[Tensor]:
    """This rank's shard of the sum over its holders of every tensor; a collective call, also for
    ranks that hold nothing.

    Added in the order of ranks, as ``holders.sum_over_holders`` adds: each element has the same bits.

    Args:
        held: all tensors, the same on all ranks.
        flats: those that this rank holds, in that order, each ``[numel]``.
        divisor: by which a sum is divided, before it is rounded to ``dtype``.
        dtype: of all tensors; 16-bit ones are added in float32.
        device: of all tensors.
    """
    ranks = dist.get_world_size(group)
    shared = [[n for n, one in enumerate(held) if rank in one.holders] for rank in range(ranks)]
    lengths = [shard_length(one.numel, ranks) for one in held]
    widths = [sum(lengths[n] for n in numbers) for numbers in shared]
    nothing = torch.empty((ranks, 0), dtype=dtype, device=device)
    sent_RC = torch.cat([nothing, *(cut(flat, ranks) for flat in flats)], dim=1)
    row = all_to_all(sent_RC.reshape(-1), [sent_RC.shape[1]] * ranks, widths, group)
    parts = [
        list(from_rank.split([lengths[n] for n in numbers]))
        for from_rank, numbers in zip(row.split(widths), shared, strict=True)
    ]
    return added(parts, shared, len(held), divisor)


def shards_to_holders(
    held: Sequence[Held],
    shards: Sequence[Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: Any,
) -> list[Tensor]:
    """The whole tensors that this rank holds, each ``[numel]``, in their order; a collective call,
    also for ranks that hold nothing.

    Args:
        held: all tensors, the same on all ranks.
        shards: this rank's shard of each, of ``dtype`` and on ``device``.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    nothing = torch.empty(0, dtype=dtype, device=device)
    given = [
        torch.cat([nothing, *(s for s, one in zip(shards, held, strict=True) if to in one.holders)])
        for to in range(ranks)
    ]
    mine = [one.numel for one in held if rank in one.holders]
    lengths = [shard_length(numel, ranks) for numel in mine]
    row = all_to_all(torch.cat(given), [len(each) for each in given], [sum(lengths)] * ranks, group)
    columns = row.view(ranks, sum(lengths)).split(lengths, dim=1)
    return [part.reshape(-1)[:numel] for part, numel in zip(columns, mine, strict=True)]
