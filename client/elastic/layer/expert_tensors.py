"""Exchange of expert tensors: sums over their holders, sums to the owners of shards, weights back.

All ranks list the same entries in the same order and cut the list into the same rounds, whether or
not they hold any: so each takes part in the same collective calls.

**Holders** of a tensor are the ranks with a replica of its expert. Each adds up one part and gives
it to the others (`sum_over_holders`): two uneven all-to-alls over the whole process group, for many
tensors at once, which send as much as a ring all-reduce among the holders.

**Owners.** Every rank owns a *shard* of every tensor: ``ceil(numel / R)`` elements, the last ones
padded with zeros. The shards of all ranks, one after the other, are the tensor and its padding. As
all shards of a tensor have one length, what goes to an owner is a column of the tensors laid side
by side as ``[R, length]``: no rank cuts every tensor into as many slices as there are ranks.

Additions are in the order of ranks, and one rank does each: a repeat gives the same bits, and all
holders have the same.

Shapes: ``R`` ranks, ``C`` elements of a rank's shards of several tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ckptd.client.elastic.layer.layer_check import LayerAgreement
from ckptd.client.elastic.layer.token_routing import all_to_all
from ckptd.core.elastic.incarnations import shard_length

__all__ = [
    "ExpertTensor",
    "Held",
    "added",
    "by_dtype",
    "cut",
    "expert_tensors_of",
    "joined",
    "rounds",
    "shards_to_holders",
    "sum_over_holders",
    "sums_to_owners",
]

# Of the busiest rank in one round: bounds the extra memory, two to three times this.
_ROUND_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of ``numel`` elements, and the ranks that have one, in ascending order."""

    numel: int
    holders: tuple[int, ...]

    def part_of(self, rank: int) -> slice:
        """The elements that this holder adds up."""
        number, count = self.holders.index(rank), len(self.holders)
        return slice(self.numel * number // count, self.numel * (number + 1) // count)

    def length_of(self, rank: int) -> int:
        part = self.part_of(rank)
        return int(part.stop - part.start)


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """A parameter of an expert, by its index in the expert's ``parameters()``, and who holds it."""

    expert: int
    index: int
    held: Held


def expert_tensors_of(agreed: LayerAgreement) -> list[ExpertTensor]:
    """Every parameter of every expert."""
    return [
        ExpertTensor(expert, index, Held(shape.numel, holders))
        for expert, shapes in enumerate(agreed.shapes_E)
        for holders in [tuple(agreed.replicas_RE[:, expert].nonzero()[0].tolist())]
        for index, shape in enumerate(shapes)
    ]


def by_dtype(
    entries: Sequence[ExpertTensor], agreed: LayerAgreement
) -> dict[torch.dtype, list[ExpertTensor]]:
    """The entries by the dtype on which the ranks agreed; dtypes in the same order on all ranks."""
    found: dict[torch.dtype, list[ExpertTensor]] = {}
    for entry in entries:
        name = agreed.shapes_E[entry.expert][entry.index].dtype
        found.setdefault(getattr(torch, name), []).append(entry)
    return found


def rounds(entries: Sequence[ExpertTensor], ranks: int, itemsize: int) -> Iterator[list[ExpertTensor]]:
    """As many entries at a time as fit into `_ROUND_BYTES`."""
    taken: list[ExpertTensor] = []
    sizes = [0] * ranks
    for entry in entries:
        size = entry.held.numel * itemsize
        if taken and max(sizes[holder] for holder in entry.held.holders) + size > _ROUND_BYTES:
            yield taken
            taken, sizes = [], [0] * ranks
        taken.append(entry)
        for holder in entry.held.holders:
            sizes[holder] += size
    if taken:
        yield taken


# -- holders -----------------------------------------------------------------------------------------


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
        held: of this rank; the holders of a tensor list it in the same order.
        flats: the tensors, each ``[numel]``; written in place.
        divisor: of the sums, before they are rounded to ``dtype``.
        dtype, device: of all tensors; 16-bit ones are added in float32.
    """
    rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
    shared = [[n for n, tensor in enumerate(held) if other in tensor.holders] for other in ranks]
    mine = [[held[n].length_of(rank) for n in numbers] for numbers in shared]
    theirs = [[held[n].length_of(other) for n in shared[other]] for other in ranks]
    parts = [[flats[n][held[n].part_of(other)] for n in shared[other]] for other in ranks]
    summed = added(_exchanged(parts, mine, dtype, device, group), shared, len(held), divisor)
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
    """By rank, the tensors that it gave to this one, of these lengths."""
    # One tensor is always there: a rank that holds nothing takes part, too.
    nothing = torch.empty(0, dtype=dtype, device=device)
    row = torch.cat([nothing, *(tensor for tensors in given for tensor in tensors)])
    sends = [sum(len(tensor) for tensor in tensors) for tensors in given]
    receives = [sum(each) for each in lengths]
    by_rank = all_to_all(row, sends, receives, group).split(receives)
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


# -- owners of shards --------------------------------------------------------------------------------


def cut(flat: Tensor, ranks: int) -> Tensor:
    """``[R, length]``: the shards of a tensor ``[numel]``, padded with zeros."""
    length = shard_length(len(flat), ranks)
    padding = flat.new_zeros(ranks * length - len(flat))
    return (torch.cat([flat, padding]) if len(padding) else flat).view(ranks, length)


def joined(shards: Sequence[Tensor], numel: int) -> Tensor:
    """``[numel]``: the tensor of the shards of all ranks, in their order."""
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
    """This rank's shard of the sum of every tensor over its holders; a collective call, also for
    ranks that hold nothing. Each element has the same bits as from `sum_over_holders`.

    Args:
        held: all tensors, the same on all ranks.
        flats: those that this rank holds, in that order, each ``[numel]``.
        divisor, dtype, device: as for `sum_over_holders`.
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
