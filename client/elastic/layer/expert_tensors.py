"""The parameters of a layer's experts as what is exchanged: which, how long, and who holds them.

All ranks list the same entries in the same order, and cut the list into the same rounds, whether or
not they hold any: so each takes part in the same collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ckptd.client.elastic.layer.layer_check import LayerAgreement

__all__ = ["ExpertTensor", "Held", "by_dtype", "expert_tensors_of", "rounds"]

# Of the busiest rank in one round: bounds what is needed beside the tensors, two to three times this.
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
        """How many these are."""
        part = self.part_of(rank)
        return int(part.stop - part.start)


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """A parameter of an expert, by its place in the expert's ``parameters()``, and who holds it."""

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
    """The entries of each dtype, as it was when the ranks agreed; the same order of dtypes on all ranks."""
    found: dict[torch.dtype, list[ExpertTensor]] = {}
    for entry in entries:
        name = agreed.shapes_E[entry.expert][entry.index].dtype
        found.setdefault(getattr(torch, name), []).append(entry)
    return found


def rounds(entries: Sequence[ExpertTensor], ranks: int, itemsize: int) -> Iterator[list[ExpertTensor]]:
    """As many at once as fit."""
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
