"""The best that any placement of one layer can do, by trying all of them.

Nodes are alike, so a placement is a multiset of node contents: a sorted row of bit masks, one bit
for each expert. Experts are added one after the other, to every set of at most as many nodes as
they have replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, combinations_with_replacement, permutations
from math import comb

import numpy as np
from numpy.typing import NDArray

__all__ = ["best_joint", "best_ways", "instances", "ways"]


def instances(num_nodes: int, num_experts: int, slots: int) -> Iterator[tuple[int, ...]]:
    """All ascending numbers of replicas that fit, up to one on each node."""
    for replicas in combinations_with_replacement(range(1, num_nodes + 1), num_experts):
        if sum(replicas) <= num_nodes * slots:
            yield replicas


def best_ways(replicas: tuple[int, ...], num_nodes: int, slots: int) -> tuple[list[int], float]:
    """For each number k of lost nodes, the most choices of k that any placement survives.

    The second value is the highest mean over 1 … N - 1 of the probability that one placement reaches.
    """
    states = np.zeros((1, num_nodes), dtype=np.uint8)
    for expert, most in enumerate(replicas):
        states = _with(states, expert, most, slots)
    survived = ways(states, (1 << len(replicas)) - 1)
    chances = survived / np.array([comb(num_nodes, k) for k in range(num_nodes + 1)])
    mean = chances[:, 1:num_nodes].mean(axis=1).max() if num_nodes > 1 else 0.0
    return survived.max(axis=0).tolist(), float(mean)


def _with(states: NDArray[np.uint8], expert: int, most: int, slots: int) -> NDArray[np.uint8]:
    num_nodes = states.shape[1]
    room = np.bitwise_count(states) < slots
    out = []
    for size in range(1, min(most, num_nodes) + 1):
        for nodes in combinations(range(num_nodes), size):
            fits = states[room[:, nodes].all(axis=1)].copy()
            fits[:, nodes] |= np.uint8(1 << expert)
            fits.sort(axis=1)
            out.append(_distinct(fits))
    return _distinct(np.concatenate(out))


def _distinct(states: NDArray[np.uint8]) -> NDArray[np.uint8]:
    padded = np.zeros((len(states), 8), dtype=np.uint8)
    padded[:, : states.shape[1]] = states
    return np.unique(padded.view(np.uint64)).view(np.uint8).reshape(-1, 8)[:, : states.shape[1]]


def ways(states: NDArray[np.uint8], everything: int) -> NDArray[np.int64]:
    """``[S, N + 1]``: for each state and each k, how many choices of k lost nodes leave every expert."""
    survived = _survived(states, everything)
    size = np.bitwise_count(np.arange(survived.shape[1]))
    return np.stack([survived[:, size == k].sum(axis=1) for k in range(states.shape[1] + 1)], 1)


def best_joint(layers: tuple[tuple[int, ...], ...], num_nodes: int, slots: int) -> float:
    """The highest mean probability, over 1 … N - 1 lost nodes, that several layers survive together."""
    joint = np.ones((1, 1 << num_nodes), dtype=np.bool_)
    for replicas in layers:
        states = np.zeros((1, num_nodes), dtype=np.uint8)
        for expert, most in enumerate(replicas):
            states = _with(states, expert, most, slots)
        anyhow = np.concatenate([states[:, order] for order in permutations(range(num_nodes))])
        survived = np.unique(_survived(anyhow, (1 << len(replicas)) - 1), axis=0)
        joint = np.unique((joint[:, None] & survived).reshape(-1, 1 << num_nodes), axis=0)
    size = np.bitwise_count(np.arange(1 << num_nodes))
    weight = np.array([1 / comb(num_nodes, k) if 0 < k < num_nodes else 0 for k in size.tolist()])
    return float((joint @ weight).max()) / (num_nodes - 1)


def _survived(states: NDArray[np.uint8], everything: int) -> NDArray[np.bool_]:
    """``[S, 2^N]``: for each state and each set of lost nodes, whether every expert is left."""
    num_nodes = states.shape[1]
    columns = []
    for lost in range(1 << num_nodes):
        alive = [node for node in range(num_nodes) if not lost >> node & 1]
        columns.append(np.bitwise_or.reduce(states[:, alive], axis=1) == everything)
    return np.stack(columns, axis=1)
