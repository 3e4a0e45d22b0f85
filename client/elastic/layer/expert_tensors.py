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

# Of the busiest rank in one round: bounds the extra memory, two to three times this.
_ROUND_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """A parameter of an expert, by its index in the expert's ``parameters()``: its elements, and the
    ranks that have one, in ascending order.
    """

    expert: int
    index: int
    numel: int
    holders: tuple[int, ...]

    @property
    def key(self) -> tuple[int, int]:
        return self.expert, self.index

    def part_of(self, rank: int) -> slice:
        """The elements that this holder adds up."""
        number, count = self.holders.index(rank), len(self.holders)
        return slice(self.numel * number // count, self.numel * (number + 1) // count)


def expert_tensors_of(agreed: LayerAgreement) -> list[ExpertTensor]:
    """Every parameter of every expert."""
    return [
        ExpertTensor(expert, index, shape.numel, holders)
        for expert, shapes in enumerate(agreed.shapes_E)
        for holders in [tuple(agreed.replicas_RE[:, expert].nonzero()[0].tolist())]
        for index, shape in enumerate(shapes)
    ]


def rounds(entries: Sequence[ExpertTensor], ranks: int, itemsize: int) -> Iterator[list[ExpertTensor]]:
    """As many entries at a time as fit into `_ROUND_BYTES`."""
    taken: list[ExpertTensor] = []
    sizes = [0] * ranks
    for entry in entries:
        size = entry.numel * itemsize
        if taken and max(sizes[holder] for holder in entry.holders) + size > _ROUND_BYTES:
            yield taken
            taken, sizes = [], [0] * ranks
        taken.append(entry)
        for holder in entry.holders:
            sizes[holder] += size
    if taken:
        yield taken


def rounds_by_dtype(
    entries: Sequence[ExpertTensor], agreed: LayerAgreement, device: torch.device, group: Any
) -> Iterator[tuple[TensorExchange, list[ExpertTensor]]]:
    """The rounds of each dtype on which the ranks agreed; the same on all ranks."""
    found: dict[torch.dtype, list[ExpertTensor]] = {}
    for entry in entries:
        name = agreed.shapes_E[entry.expert][entry.index].dtype
        found.setdefault(getattr(torch, name), []).append(entry)
    for dtype, of_dtype in found.items():
        exchange = TensorExchange(dtype, device, group)
        for some in rounds(of_dtype, exchange.ranks, dtype.itemsize):
            yield exchange, some


class TensorExchange:
    """Exchanges tensors of one dtype and device; each method is a collective call, also for ranks that
    hold nothing.

    Args:
        divisor: of sums, before they are rounded to ``dtype``; 16-bit tensors are added in float32.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, group: Any, *, divisor: int = 1) -> None:
        self.ranks = dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        self.dtype, self._device, self._group, self._divisor = dtype, device, group, divisor

    def held(self, entries: Sequence[ExpertTensor]) -> list[ExpertTensor]:
        """The entries of which this rank is a holder."""
        return [entry for entry in entries if self._rank in entry.holders]

    def row(self, tensors: Sequence[Tensor]) -> Tensor:
        """The tensors ``[numel]`` one after the other; may be empty."""
        return torch.cat([torch.empty(0, dtype=self.dtype, device=self._device), *tensors])

    def sum_over_holders(self, entries: Sequence[ExpertTensor], flats: Sequence[Tensor]) -> None:
        """Replace each tensor by the sum over its holders.

        Args:
            entries: of this rank; the holders of a tensor list it in the same order.
            flats: the tensors, each ``[numel]``; written in place.
        """
        shared = self._by_holder(entries)
        mine = [[_length(entries[n], self._rank) for n in numbers] for numbers in shared]
        theirs = [[_length(entries[n], rank) for n in numbers] for rank, numbers in enumerate(shared)]
        parts = [[flats[n][entries[n].part_of(rank)] for n in numbers] for rank, numbers in enumerate(shared)]
        summed = self._added(self._exchanged(parts, mine), shared, len(entries))
        got = self._exchanged([[summed[n] for n in numbers] for numbers in shared], theirs)
        for rank, numbers in enumerate(shared):
            for n, part in zip(numbers, got[rank], strict=True):
                flats[n][entries[n].part_of(rank)] = part

    def sums_to_owners(self, entries: Sequence[ExpertTensor], flats: Sequence[Tensor]) -> list[Tensor]:
        """This rank's shard of the sum of every tensor over its holders; each element has the same bits
        as from `sum_over_holders`.

        Args:
            entries: the same on all ranks.
            flats: those of `held`, in that order, each ``[numel]``.
        """
        shared = self._by_holder(entries)
        lengths = [shard_length(entry.numel, self.ranks) for entry in entries]
        widths = [sum(lengths[n] for n in numbers) for numbers in shared]
        nothing = torch.empty((self.ranks, 0), dtype=self.dtype, device=self._device)
        sent_RC = torch.cat([nothing, *(cut(flat, self.ranks) for flat in flats)], dim=1)
        row = all_to_all(sent_RC.reshape(-1), [sent_RC.shape[1]] * self.ranks, widths, self._group)
        parts = [
            from_rank.split([lengths[n] for n in numbers])
            for from_rank, numbers in zip(row.split(widths), shared, strict=True)
        ]
        return self._added(parts, shared, len(entries))

    def shards_to_holders(self, entries: Sequence[ExpertTensor], shards: Sequence[Tensor]) -> list[Tensor]:
        """The whole tensors of `held`, each ``[numel]``.

        Args:
            entries: the same on all ranks.
            shards: this rank's shard of each.
        """
        given = [self.row([shards[n] for n in numbers]) for numbers in self._by_holder(entries)]
        mine = self.held(entries)
        lengths = [shard_length(entry.numel, self.ranks) for entry in mine]
        width = sum(lengths)
        sends = [len(each) for each in given]
        row = all_to_all(torch.cat(given), sends, [width] * self.ranks, self._group)
        columns = row.view(self.ranks, width).split(lengths, dim=1)
        return [part.reshape(-1)[: entry.numel] for part, entry in zip(columns, mine, strict=True)]

    def _by_holder(self, entries: Sequence[ExpertTensor]) -> list[list[int]]:
        """By rank, the numbers of the entries that it holds."""
        return [[n for n, entry in enumerate(entries) if rank in entry.holders] for rank in range(self.ranks)]

    def _exchanged(
        self, given: Sequence[Sequence[Tensor]], lengths: Sequence[Sequence[int]]
    ) -> list[tuple[Tensor, ...]]:
        """By rank, the tensors that it gave to this one, of these lengths."""
        row = self.row([tensor for tensors in given for tensor in tensors])
        sends = [sum(len(tensor) for tensor in tensors) for tensors in given]
        receives = [sum(each) for each in lengths]
        by_rank = all_to_all(row, sends, receives, self._group).split(receives)
        return [part.split(list(each)) for part, each in zip(by_rank, lengths, strict=True)]

    def _added(
        self, parts: Sequence[Sequence[Tensor]], shared: Sequence[Sequence[int]], count: int
    ) -> list[Tensor]:
        """This rank's part of each of ``count`` tensors, added up in the order of ranks.

        Args:
            parts: by rank, its parts of the tensors that it holds.
            shared: by rank, the numbers of these tensors.
        """
        wide = torch.float32 if self.dtype.itemsize < 4 else self.dtype
        sums: dict[int, Tensor] = {}
        for numbers, tensors in zip(shared, parts, strict=True):
            for n, part in zip(numbers, tensors, strict=True):
                sums[n] = sums[n] + part.to(wide) if n in sums else part.to(wide)
        assert len(sums) == count, "each tensor has a holder"
        divided = (sums[n] / self._divisor if self._divisor > 1 else sums[n] for n in range(count))
        return [one.to(self.dtype) for one in divided]


def _length(entry: ExpertTensor, rank: int) -> int:
    part = entry.part_of(rank)
    return int(part.stop - part.start)


def cut(flat: Tensor, ranks: int) -> Tensor:
    """``[R, length]``: the shards of a tensor ``[numel]``, padded with zeros."""
    length = shard_length(len(flat), ranks)
    padding = flat.new_zeros(ranks * length - len(flat))
    return (torch.cat([flat, padding]) if len(padding) else flat).view(ranks, length)


def joined(shards: Sequence[Tensor], numel: int) -> Tensor:
    """``[numel]``: the tensor of the shards of all ranks, in their order."""
    return torch.cat(list(shards))[:numel]
