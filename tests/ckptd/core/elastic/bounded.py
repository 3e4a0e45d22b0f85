"""The best placement of one layer, by branch and bound: as `exhaustive`, which tries everything,
for up to 7 nodes and 6 experts.

What survives depends only on the sets of nodes that hold each expert. They are chosen expert after
expert, the least replicated first, and a partial choice is kept only if what survives it is still
above a given floor: more experts never survive more. Besides:

- Nodes are alike. A state is one row for each node (its room, and which of the sets it is in), and
  rows are sorted.
- A set that contains another one is lost no earlier: it is forgotten, only the room that it took is
  kept. Then it does not matter whose sets the others are, so they are sorted, too, by what does not
  depend on the order of nodes. (Where that leaves a tie, a state may stand twice.)
- An expert is on fewer nodes than it has replicas only if all other nodes become full: else one
  replica more on one of them would not survive less.
- Room beyond the number of experts to come is as good as none.

``S`` states, ``N`` nodes, ``C`` sets of holders; a set of nodes is a bit mask, and so is what
survives: ``2^N`` bits in 64-bit words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from math import comb, lcm

import numpy as np
from numpy.typing import NDArray

__all__ = ["Optimum", "best_above", "mean_weights"]

Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]
_CHUNK = 20_000  # states that are continued at once
_ROOM_BITS = 3


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best that was found above the floor.

    Args:
        value: the highest, and the floor if nothing is above it.
        states: how many partial placements were kept, of all levels together.
    """

    value: int
    states: int


def mean_weights(num_nodes: int) -> tuple[NDArray[np.int64], int]:
    """``[N + 1]``, the weight of a survived choice of k nodes, and by what their sum is the mean
    probability over 1 … N - 1.
    """
    sizes = range(1, num_nodes)
    total = lcm(*(comb(num_nodes, k) for k in sizes)) if num_nodes > 1 else 1
    weights = np.array([0, *(total // comb(num_nodes, k) for k in sizes), 0], dtype=np.int64)
    return weights, total * max(num_nodes - 1, 1)


def best_above(
    replicas: tuple[int, ...],
    num_nodes: int,
    slots: int,
    weights: NDArray[np.int64],
    floor: int,
) -> Optimum:
    """The highest sum of ``weights[k]`` over the choices of k lost nodes that a placement survives,
    if it is above ``floor``.

    Args:
        replicas: ascending; each expert is on at most as many nodes.
        weights: ``[N + 1]``, none negative.
    """
    tables = _Tables(num_nodes)
    levels = _weighted(tables, weights)
    sets = np.zeros((1, 0), dtype=np.uint8)
    room = np.full((1, num_nodes), min(slots, len(replicas)), dtype=np.uint8)
    best, kept = floor, 1
    for expert, most in enumerate(replicas):
        later = replicas[expert + 1 :]
        found = [_continued(tables, levels, part, at, most, later, best) for part, at in _chunks(sets, room)]
        if not later:
            best = max(chain([best], (int(value.max()) for _, _, value in found if len(value))))
            return Optimum(best, kept)
        sets, room = _distinct(
            np.concatenate([one[0] for one in found]), np.concatenate([one[1] for one in found])
        )
        kept += len(sets)
        if not len(sets):
            break
    return Optimum(best, kept)


def _chunks(sets: Bytes, room: Bytes) -> list[tuple[Bytes, Bytes]]:
    return [
        (sets[begin : begin + _CHUNK], room[begin : begin + _CHUNK]) for begin in range(0, len(sets), _CHUNK)
    ]


class _Tables:
    """For each set of nodes: what is left alive without it, as bits of which losses it survives."""

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self.masks = np.arange(1 << num_nodes, dtype=np.int64)
        self.sizes = np.bitwise_count(self.masks)
        survives = (self.masks[None, :] & self.masks[:, None]) != self.masks[:, None]
        self.survives = _packed(survives)

    def of_size(self, size: int) -> Words:
        """The losses of so many nodes."""
        words: Words = _packed((self.sizes == size)[None])[0]
        return words


def _packed(bits: NDArray[np.bool_]) -> Words:
    """``[S, 2^N]`` bools as 64-bit words."""
    short = -bits.shape[1] % 64
    padded = np.pad(bits, ((0, 0), (0, short)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint64)


def _weighted(tables: _Tables, weights: NDArray[np.int64]) -> Callable[[Words], NDArray[np.int64]]:
    chosen = [(int(w), tables.of_size(k)) for k, w in enumerate(weights.tolist()) if w]

    def value(survived: Words) -> NDArray[np.int64]:
        out = np.zeros(len(survived), dtype=np.int64)
        for weight, losses in chosen:
            out += weight * np.bitwise_count(survived & losses).sum(axis=1, dtype=np.int64)
        return out

    return value


def _survived(tables: _Tables, sets: Bytes) -> Words:
    out = np.broadcast_to(
        _packed(np.ones((1, len(tables.masks)), dtype=np.bool_)),
        (len(sets), tables.survives.shape[1]),
    ).copy()
    for column in sets.T:
        out &= np.where((column > 0)[:, None], tables.survives[column], ~np.uint64(0))
    return out


def _continued(
    tables: _Tables,
    value: Callable[[Words], NDArray[np.int64]],
    sets: Bytes,
    room: Bytes,
    most: int,
    later: tuple[int, ...],
    floor: int,
) -> tuple[Bytes, Bytes, NDArray[np.int64]]:
    """Every state with every set of holders of one more expert, if it is worth more than the floor."""
    survived = _survived(tables, sets)
    roomy = _mask_of(room > 0)
    fillable = _mask_of(room <= len(later))
    parents, holders, values = [], [], []
    for nodes in range(1, len(tables.masks)):
        size = int(tables.sizes[nodes])
        if size > most:
            continue
        fits = (roomy & nodes) == nodes
        if size < most:
            others = ~nodes & (len(tables.masks) - 1)
            outside = [n for n in range(tables.num_nodes) if others >> n & 1]
            fits &= (fillable & others) == others
            fits &= room[:, outside].sum(axis=1) <= sum(later)
        index = np.flatnonzero(fits)
        worth = value(survived[index] & tables.survives[nodes])
        above = worth > floor
        parents.append(index[above])
        values.append(worth[above])
        holders.append(np.full(int(above.sum()), nodes, dtype=np.uint8))
    parent, holder = np.concatenate(parents), np.concatenate(holders)
    taken = (holder[:, None] >> np.arange(tables.num_nodes, dtype=np.uint8)) & 1
    left = np.minimum(room[parent] - taken, len(later)).astype(np.uint8)
    return np.column_stack([sets[parent], holder]), left, np.concatenate(values)


def _mask_of(bits: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.asarray(bits @ (1 << np.arange(bits.shape[1], dtype=np.int64)))


def _distinct(sets: Bytes, room: Bytes) -> tuple[Bytes, Bytes]:
    """Each state once, up to the order of nodes and of sets."""
    if not len(sets):
        return sets, room
    sets = _sorted_sets(_minimal(sets), room)
    num_nodes, num_sets = room.shape[1], sets.shape[1]
    bits = (sets[:, None, :] >> np.arange(num_nodes, dtype=np.uint8)[:, None]) & 1
    rows = (bits.astype(np.uint64) << np.arange(num_sets, dtype=np.uint64)).sum(axis=2)
    rows |= room.astype(np.uint64) << np.uint64(num_sets)
    rows.sort(axis=1)
    width = num_sets + _ROOM_BITS
    shifts = np.arange(num_nodes, dtype=np.uint64) * np.uint64(width)
    keys = np.unique((rows << shifts).sum(axis=1, dtype=np.uint64))
    rows = (keys[:, None] >> shifts) & np.uint64((1 << width) - 1)
    bits = ((rows[:, :, None] >> np.arange(num_sets, dtype=np.uint64)) & np.uint64(1)).astype(np.uint8)
    back = (bits << np.arange(num_nodes, dtype=np.uint8)[:, None]).sum(axis=1, dtype=np.uint8)
    return back, (rows >> np.uint64(num_sets)).astype(np.uint8)


def _minimal(sets: Bytes) -> Bytes:
    """Sets that contain another one are emptied."""
    out = sets.copy()
    for i in range(sets.shape[1]):
        for j in range(sets.shape[1]):
            if i == j:
                continue
            inside = (sets[:, j] > 0) & ((sets[:, i] & sets[:, j]) == sets[:, j])
            inside &= (sets[:, i] != sets[:, j]) | (j < i)
            out[inside, i] = 0
    return out


def _sorted_sets(sets: Bytes, room: Bytes) -> Bytes:
    """By numbers that do not depend on the order of nodes or sets; empty ones first."""
    num_nodes = room.shape[1]
    member = ((sets[:, None, :] >> np.arange(num_nodes, dtype=np.uint8)[:, None]) & 1).astype(np.int64)
    mark = np.asarray(member.sum(axis=1))
    for _ in range(2):
        node = 97 * room.astype(np.int64) + (member * (mark * mark + 7 * mark)[:, None, :]).sum(axis=2)
        node %= 1_000_003
        seen = (member * (node * node + 3 * node)[:, :, None]).sum(axis=1) % 1_000_003
        mark = np.where(sets > 0, 1 + seen, 0)
    order = np.argsort(mark, axis=1, kind="stable")
    return np.take_along_axis(sets, order, axis=1)
