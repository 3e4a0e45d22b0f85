"""A local search for the placement of one layer on few units: many chains of exchanges at once.

A chain exchanges the contents of two slots on different units: two replicas, or a replica and nothing;
in every fourth step two experts, wherever they are.
The value of a placement is a sum of integer weights over the losses that it and all other layers
survive. A chain accepts what is worse by less than a threshold, which sinks to nothing (threshold
accepting), so that it leaves the traps between two good placements; then it goes on from the best
that it has seen and only evens out the load. Half of the chains may put an expert twice on a unit,
which frees a slot where others may overlap. Draws are raw words of a PCG64, whose stream NumPy never
changes, and all values are integers: every rank finds the same.

``C`` chains, ``U`` units, ``K`` slots, ``E`` experts. A set of units is a bit mask; what survives is
``2^U`` bits in 64-bit words.

Complexity: a step tries one exchange in each chain: O(C * (E + U) * 2^U / 64) word operations, in
about forty array operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Words = NDArray[np.uint64]

CHAINS = 32
_WARMEST = 40  # at first, a fortieth of the whole value may be lost in a step
_EVENING = 3  # a third of the steps evens out the load
_BITS = 20  # of a unit's tokens, where their squares are summed


@dataclass(frozen=True, slots=True)
class Judge:
    """``weights`` ``[2^U]`` of each set of lost units; ``ranks`` and ``capacity`` are ``[U]``. Every expert
    on ``least`` units stays on as many.
    """

    weights: Ints
    ranks: Ints
    capacity: Ints
    least: int

    def busiest(self, counts_UE: NDArray[np.int32], shares_E: Ints) -> int:
        return int((counts_UE @ shares_E // self.ranks).max())


def improved(
    judge: Judge,
    counts_UE: NDArray[np.int32],
    shares_E: Ints,
    others: Bools,
    *,
    limit: int | None,
    doubles: bool,
    moves: int,
    seed: int,
) -> NDArray[np.int32]:
    """A placement of the same replicas that is not worse, after so many steps of all chains.

    Better is, in this order: less above the limit, a higher value, less on the busiest unit.

    Args:
        others: ``[2^U]``, the losses that the other layers survive.
        limit: of the busiest unit's tokens, in the fixed point of the shares.
        doubles: True if an expert may get twice onto a unit.
    """
    if len(counts_UE) < 2 or moves < 1:
        return counts_UE.copy()
    chains = _Chains(judge, counts_UE, shares_E, others, limit, doubles)
    words = np.random.PCG64(seed).random_raw(moves * CHAINS).reshape(moves, CHAINS)
    warm = max(moves - moves // _EVENING, 1)
    for step, row in enumerate(words):
        if step == warm:
            chains.go_back()
        # The last quarter of the warm part accepts nothing that is worse.
        left = max(warm - step - warm // 4, 0)
        threshold = chains.whole * left // (warm * _WARMEST)
        chains.step(row, threshold, names=step % 4 == 3, even=step >= warm)
    return chains.best()


class _Chains:
    """The placements of all chains, and the best that each has seen."""

    def __init__(
        self,
        judge: Judge,
        counts_UE: NDArray[np.int32],
        shares_E: Ints,
        others: Bools,
        limit: int | None,
        doubles: bool,
    ) -> None:
        self._judge, self._limit = judge, limit
        self._values = _Values(judge, others)
        self.whole = self._values.whole
        num_units, self._num_experts = counts_UE.shape
        self._unit_of = np.repeat(np.arange(num_units), judge.capacity)
        self._shares = shares_E
        shift = max(int((counts_UE @ shares_E).sum()).bit_length() - _BITS, 0)
        self._shift = shift
        self._all = np.arange(CHAINS)
        # An empty slot holds one more expert.
        row = np.full(len(self._unit_of), self._num_experts, dtype=np.int64)
        starts = np.cumsum(judge.capacity) - judge.capacity
        for unit, start in enumerate(starts.tolist()):
            here = np.repeat(np.arange(self._num_experts), counts_UE[unit])
            row[start : start + len(here)] = here
        self._slots = np.tile(row, (CHAINS, 1))
        distinct_E = (counts_UE > 0).sum(axis=0)
        fewer = np.minimum(distinct_E, judge.least)
        may = (self._all % 2 == 0) & doubles
        self._least = np.where(may[:, None], fewer, distinct_E)
        self._bits = 1 << np.arange(num_units, dtype=np.int64)
        self._score = self._scored(*self._read(self._slots))
        self._best_slots, self._best_score = self._slots.copy(), self._score.copy()

    def step(self, words: Words, threshold: int, *, names: bool, even: bool) -> None:
        """Try one change in each chain: of two slots, or of the names of two experts."""
        slots = self._renamed(words) if names else self._exchanged(words)
        holders, tokens = self._read(slots)
        score = self._scored(holders, tokens)
        enough = (np.bitwise_count(holders) >= self._least).all(axis=1)
        taken = enough & self._accepts(score, threshold, even)
        self._slots[taken], self._score[taken] = slots[taken], score[taken]
        better = taken & _above(score, self._best_score)
        self._best_slots[better], self._best_score[better] = slots[better], score[better]

    def _exchanged(self, words: Words) -> Ints:
        slots, number = self._slots.copy(), np.uint64(self._slots.shape[1])
        first = (words % number).astype(np.int64)
        second = ((words >> np.uint64(32)) % number).astype(np.int64)
        slots[self._all, first], slots[self._all, second] = (
            slots[self._all, second],
            slots[self._all, first],
        )
        return slots

    def _renamed(self, words: Words) -> Ints:
        """Two experts change places, as many replicas as both have."""
        slots, number = self._slots.copy(), np.uint64(self._num_experts)
        pair = [(words % number).astype(np.int64), ((words >> np.uint64(32)) % number).astype(np.int64)]
        first, second = ((slots == expert[:, None]) for expert in pair)
        upto = [np.cumsum(mask, axis=1) for mask in (first, second)]
        both = np.minimum(upto[0][:, -1:], upto[1][:, -1:])
        first, second = first & (upto[0] <= both), second & (upto[1] <= both)
        return np.where(first, pair[1][:, None], np.where(second, pair[0][:, None], slots))

    def _read(self, slots: Ints) -> tuple[Ints, Ints]:
        """``[C, E]``, the holders of each expert, and ``[C, U]``, the tokens of each unit."""
        num_units = len(self._bits)
        key = (self._all[:, None] * num_units + self._unit_of) * (self._num_experts + 1) + slots
        shape = (CHAINS, num_units, self._num_experts + 1)
        counts = np.bincount(key.ravel(), minlength=shape[0] * shape[1] * shape[2]).reshape(shape)[:, :, :-1]
        return (self._bits[:, None] * (counts > 0)).sum(axis=1), counts @ self._shares

    def _accepts(self, score: Ints, threshold: int, even: bool) -> Bools:
        now = self._score
        if even:
            return ~_above(now, score)
        close = score[:, 1] >= now[:, 1] - threshold
        return np.asarray((score[:, 0] > now[:, 0]) | ((score[:, 0] == now[:, 0]) & close))

    def _scored(self, holders: Ints, tokens: Ints) -> Ints:
        """``[C, 4]``: what counts first, the higher the better."""
        each = tokens // self._judge.ranks
        over = np.zeros(len(each), dtype=np.int64)
        if self._limit is not None:
            over = np.maximum(each - self._limit, 0).sum(axis=1)
        uneven = ((each >> self._shift) ** 2).sum(axis=1)
        value = self._values.of(holders)
        return np.stack([-over, value, -each.max(axis=1), -uneven], axis=1)

    def go_back(self) -> None:
        """Every chain goes on from the best that it has seen."""
        self._slots, self._score = self._best_slots.copy(), self._best_score.copy()

    def best(self) -> NDArray[np.int32]:
        """``[U, E]``: the best of all chains, the first of equals."""
        chain = max(self._all.tolist(), key=lambda c: ([*self._best_score[c].tolist()], -c))
        out = np.zeros((len(self._bits), self._num_experts + 1), dtype=np.int32)
        np.add.at(out, (self._unit_of, self._best_slots[chain]), 1)
        return np.ascontiguousarray(out[:, : self._num_experts])


class _Values:
    """The weight of what sets of holders survive."""

    def __init__(self, judge: Judge, others: Bools) -> None:
        masks = np.arange(len(others), dtype=np.int64)
        self._survives = _packed((masks[None, :] & masks[:, None]) != masks[:, None])
        weights = np.where(others, judge.weights, 0)
        present = np.unique(weights[weights > 0])
        self._weights = present
        self._with_weight = _packed(weights[None, :] == present[:, None])
        self.whole = int(weights.sum())

    def of(self, holders: Ints) -> Ints:
        """``[C]``, of ``[C, E]`` masks."""
        survived = np.bitwise_and.reduce(self._survives[holders], axis=1)
        number = np.bitwise_count(survived[:, None, :] & self._with_weight).sum(axis=2, dtype=np.int64)
        return np.asarray(number @ self._weights)


def _packed(bits: Bools) -> Words:
    padded = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 64)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint64)


def _above(first: Ints, second: Ints) -> Bools:
    """Rows of the first that come after those of the second, compared from the left."""
    differ = first != second
    at = differ.argmax(axis=1)
    rows = np.arange(len(first))
    return np.asarray(differ.any(axis=1) & (first[rows, at] > second[rows, at]))
