"""Which samples a rank takes of a step's global batch: the same batch in the same order, however
many ranks there are.

Nothing in here has a position: what a step trains on follows from its number. So a run that goes on
with more or fewer ranks, or a step that is done again, sees what it would have seen.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["GlobalBatches", "share_of"]


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
