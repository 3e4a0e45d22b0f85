"""A bounded local search: exchange replicas between units while recovery gains, or balance at equal recovery.

A move takes two units and exchanges up to a whole bundle of replicas that the other does not hold
(one replica, or several at once: what a group has in common moves together), or moves a replica to
an empty slot. Some moves put a second replica of an expert on a unit, which frees a slot where
others may overlap; they leave it ``least`` units, so that a guarantee that held goes on holding.

A layer is judged together with all others: ``others`` are the losses that they survive. The judge
is a sum of integer weights over the losses survived, and then the loads of the units, the busiest
first; where these have a limit, what all units are above it counts before. A move that does not
make the layer worse is kept, so that plateaus are crossed. The moves come from raw words of a
PCG64, the same on every rank.

Complexity: O(2^U * distinct holder sets) for a move, so this is for few units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Judge", "improved"]


@dataclass(frozen=True, slots=True)
class Judge:
    """``weights`` is ``[2^U]``, for each set of lost units; ``ranks`` and ``capacity`` are ``[U]``.

    Every expert that is on ``least`` units stays on as many.
    """

    weights: NDArray[np.int64]
    ranks: NDArray[np.int64]
    capacity: NDArray[np.int64]
    least: int

    def busiest(self, counts_UE: NDArray[np.int32], shares_E: NDArray[np.int64]) -> int:
        return int((counts_UE @ shares_E // self.ranks).max())


class _Layer:
    """One layer's placement, with what each of its moves changes kept up to date."""

    def __init__(
        self,
        judge: Judge,
        counts_UE: NDArray[np.int32],
        shares_E: NDArray[np.int64],
        others: NDArray[np.bool_],
        limit: int | None,
    ) -> None:
        self.judge = judge
        self.limit = limit
        self.counts = counts_UE
        self.shares = shares_E
        self.weights = np.where(others, judge.weights, 0)
        self.masks = np.arange(len(others), dtype=np.int64)
        self.lost_with: dict[int, NDArray[np.bool_]] = {}
        self.holders = [sum(1 << int(u) for u in np.flatnonzero(column)) for column in counts_UE.T]
        self.tokens = counts_UE @ shares_E

    def value(self) -> tuple[int, int, list[int]]:
        lost = np.zeros(len(self.masks), dtype=np.bool_)
        for holders in set(self.holders):
            if holders not in self.lost_with:
                self.lost_with[holders] = (self.masks & holders) == holders
            lost |= self.lost_with[holders]
        survived = int(self.weights.sum()) - int(self.weights[lost].sum())
        tokens = self.tokens // self.judge.ranks
        over = 0 if self.limit is None else int(np.maximum(tokens - self.limit, 0).sum())
        return -over, survived, [-n for n in sorted(tokens.tolist(), reverse=True)]

    def move(self, unit: int, other: int, expert: int) -> None:
        """One replica from ``unit`` to ``other``."""
        self.counts[unit, expert] -= 1
        self.counts[other, expert] += 1
        self.tokens[unit] -= self.shares[expert]
        self.tokens[other] += self.shares[expert]
        if not self.counts[unit, expert]:
            self.holders[expert] &= ~(1 << unit)
        self.holders[expert] |= 1 << other


def improved(
    judge: Judge,
    counts_UE: NDArray[np.int32],
    shares_E: NDArray[np.int64],
    others: NDArray[np.bool_],
    *,
    limit: int | None,
    doubles: bool,
    moves: int,
    seed: int,
) -> NDArray[np.int32]:
    """A placement of the same replicas that is not worse, after at most ``moves`` tries.

    Args:
        others: ``[2^U]``, which losses the other layers survive.
        limit: of the busiest unit's tokens, in the fixed point of the shares.
        doubles: whether an expert may come to be twice on a unit.
    """
    layer = _Layer(judge, counts_UE.copy(), shares_E, others, limit)
    words = iter(np.random.PCG64(seed).random_raw(4 * moves).tolist())
    best = layer.value()
    for _ in range(moves):
        least = judge.least if doubles else len(counts_UE)
        change = _change(layer.counts, judge.capacity, least, [next(words) for _ in range(4)])
        for step in change:
            layer.move(*step)
        value = layer.value() if change else best
        if value < best:
            for unit, other, expert in reversed(change):
                layer.move(other, unit, expert)
        else:
            best = value
    return layer.counts


def _change(
    counts_UE: NDArray[np.int32], capacity_U: NDArray[np.int64], least: int, words: Sequence[int]
) -> list[tuple[int, int, int]]:
    """A random exchange, as single moves; empty if the two units have nothing to exchange."""
    num_units = len(counts_UE)
    unit = words[0] % num_units
    other = (unit + 1 + words[1] % max(num_units - 1, 1)) % num_units
    here, there = counts_UE[unit] > 0, counts_UE[other] > 0
    may_double = (counts_UE > 0).sum(axis=0) > (least if words[2] & 256 else len(counts_UE))
    gives = np.flatnonzero(here & (~there | may_double)).tolist()
    takes = np.flatnonzero(there & ~here).tolist()
    empty = int(capacity_U[other] - counts_UE[other].sum())
    size = 1 + words[2] % 4
    first = _some(gives, size, words[3])
    back = _some(takes, max(len(first) - empty, 0), words[3] >> 20)
    first = first[: len(back) + empty]
    return [(unit, other, e) for e in first] + [(other, unit, e) for e in back]


def _some(items: list[int], size: int, word: int) -> list[int]:
    """Up to ``size`` of the items; half of the time neighbours, which often are of one group."""
    if not items or not size:
        return []
    start, stride = word % len(items), 1 if word >> 10 & 1 else 1 + (word >> 11) % len(items)
    chosen = {items[(start + index * stride) % len(items)] for index in range(size)}
    return sorted(chosen)
