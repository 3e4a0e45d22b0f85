"""One tensor on each of several ranks, summed: every holder adds up one part of it, and gives that
to the others.

Two uneven all-to-alls over a process group of which the holders are a part, for many tensors with
different holders at once. A rank sends and receives as much as in a ring all-reduce among the
holders. Additions are in the order of ranks, and each is done by one holder only: a repeat gives
the same bits, and all holders have the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ckptd.client.elastic.layer.expert_tensors import Held
from ckptd.client.elastic.layer.row_exchange import all_to_all

__all__ = ["added", "sum_over_holders"]


def sum_over_holders(
    held: Sequence[Held],
    flats: Sequence[Tensor],
    *,
    divisor: int,
    dtype: torch.dtype,
    device: torch.device,
    group: Any,
) -> None:
    """Replace each tensor by the sum over its holders; a collective call, also for ranks that hold nothing.

    Args:
        held: what this rank holds; the holders of a tensor name it in the same order.
        flats: the tensors, each ``[numel]``; written in place.
        divisor: by which the sum is divided, before it is rounded to ``dtype``.
        dtype: of all tensors; 16-bit ones are added in float32.
        device: of all tensors.
    """
    rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
    shared = [[n for n, tensor in enumerate(held) if other in tensor.holders] for other in ranks]
    mine = [[held[n].length_of(rank) for n in numbers] for numbers in shared]
    theirs = [[held[n].length_of(other) for n in shared[other]] for other in ranks]
    cut = [[flats[n][held[n].part_of(other)] for n in shared[other]] for other in ranks]
    summed = added(_exchanged(cut, mine, dtype, device, group), shared, len(held), divisor)
    given = [[summed[n] for n in numbers] for numbers in shared]
    got = _exchanged(given, theirs, dtype, device, group)
    for other in ranks:
        for n, part in zip(shared[other], got[other], strict=True):
            flats[n][held[n].part_of(other)] = part


def _exchanged(
    given: Sequence[Sequence[Tensor]],
    lengths: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
    group: Any,
) -> list[tuple[Tensor, ...]]:
    """By rank, the tensors that it gave to this one, whose lengths are known."""
    # A tensor that is always there: a rank that holds nothing takes part, too.
    nothing = torch.empty(0, dtype=dtype, device=device)
    row = torch.cat([nothing, *(tensor for tensors in given for tensor in tensors)])
    sends = [sum(len(tensor) for tensor in tensors) for tensors in given]
    received = all_to_all(row, sends, [sum(each) for each in lengths], group)
    by_rank = received.split([sum(each) for each in lengths])
    return [part.split(list(each)) for part, each in zip(by_rank, lengths, strict=True)]


def added(
    parts: Sequence[Sequence[Tensor]], shared: Sequence[Sequence[int]], count: int, divisor: int
) -> list[Tensor]:
    """This rank's part of each tensor, added up in the order of ranks; 16-bit ones in float32.

    Args:
        parts: by rank, its parts of the tensors that it holds.
        shared: by rank, the numbers of these tensors.
        count: of all tensors; each has a holder.
        divisor: of the sums, before they are rounded to the dtype of the parts.
    """
    sums: list[Tensor | None] = [None] * count
    dtype = torch.float32
    for numbers, tensors in zip(shared, parts, strict=True):
        for n, part in zip(numbers, tensors, strict=True):
            dtype = part.dtype
            wide = part.to(torch.float32 if dtype.itemsize < 4 else dtype)
            before = sums[n]
            sums[n] = wide if before is None else before + wide
    whole = [one for one in sums if one is not None]
    assert len(whole) == count, "each tensor has a holder"
    return [(one / divisor if divisor > 1 else one).to(dtype) for one in whole]
