"""The probability that every expert of every layer survives the loss of nodes, or of whole domains.

``k`` of U units are lost, each choice of k equally likely. Only the minimal sets of units that hold
an expert matter: the choices are counted that contain no whole minimal set.

Units are taken one by one, in an order that keeps the holders of an expert together (reverse
Cuthill-McKee). The state is the set of begun sets that are lost so far; for every state the number of
ways by k is kept, as the digits of one long integer. A set that is complete and lost ends its ways; a
unit that lives clears its sets. Disjoint sets, as in a strict maximum rank overlap, have two states,
windows of a ring as many as they are long: 1,024 nodes take tens of milliseconds. Few units are
enumerated at once (``2^U`` masks). With more states than ``STATES_MAX``, choices of k are sampled and
the standard error is stated.

Complexity: O(U * states) operations on integers of U * (U + 1) bits; sampling O(samples * U * sets).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import reverse_cuthill_mckee

from ckptd.core.elastic.elastic_types import ExpertPlacement, integers

ENUMERATED_MAX = 12  # 4,096 masks: less work than any bookkeeping
STATES_MAX = 4096
SAMPLES = 20_000
MINIMAL_MAX = 2048  # sets: finding all would take longer than what they save


@dataclass(frozen=True, slots=True)
class Chance:
    """A probability: everything survives ``ways`` of ``choices`` equally likely losses."""

    ways: int
    choices: int
    exact: bool

    @property
    def value(self) -> float:
        return self.ways / self.choices

    @property
    def error(self) -> float:
        """Standard error of a sampled value (Wilson's interval at one sigma: not 0 at 0 and 1)."""
        if self.exact:
            return 0.0
        n, p = self.choices, self.value
        return sqrt(p * (1 - p) / n + 1 / (4 * n * n)) / (1 + 1 / n)

    def __str__(self) -> str:
        return f"{self.value:.4f}" + ("" if self.exact else f" ± {self.error:.4f}")


def recovery_probability(
    placement: ExpertPlacement,
    lost: int,
    *,
    units: NDArray[np.int64] | None = None,
    samples: int = SAMPLES,
    seed: int = 0,
) -> Chance:
    """The probability that every expert of every layer survives the loss of ``lost`` units.

    Args:
        units: ``[N]``, the unit of each node, numbered from 0: ``Cluster.domain_ids`` for the loss of
            whole domains. Default: nodes are lost one by one.
        samples: the number of sampled choices if counting takes too much; ``seed`` makes them
            reproducible.
    Raises:
        ValueError: an impossible number of lost units, units of another shape, no samples.
    """
    held_MU = holder_sets(placement, units)
    num_units = held_MU.shape[1]
    if not 0 <= lost <= num_units:
        raise ValueError(f"{lost} lost of {num_units}: there are no such choices")
    if samples < 1:
        raise ValueError(f"samples is {samples}; a probability needs at least 1")
    smallest = int(held_MU.sum(axis=1).min())
    if lost < smallest or smallest == 0:  # no expert can be lost, or one has no holder
        return Chance(int(lost < smallest), 1, exact=True)
    if lost == num_units:
        return Chance(0, 1, exact=True)
    counts = survivor_counts(held_MU, lost)
    if counts is not None:
        return Chance(counts[lost], comb(num_units, lost), exact=True)
    return Chance(sampled_survivors(held_MU, lost, samples, seed), samples, exact=False)


# --- the sets --------------------------------------------------------------------------------------------


def holder_sets(placement: ExpertPlacement, units: NDArray[np.int64] | None = None) -> NDArray[np.bool_]:
    """``[M, U]``: the minimal sets of units whose loss loses an expert of some layer, in a fixed order."""
    held_LNE = placement.counts > 0
    held_MN = np.ascontiguousarray(held_LNE.transpose(0, 2, 1)).reshape(-1, placement.num_nodes)
    return minimal_sets(held_MN if units is None else _merged(held_MN, units))


def _merged(held_MN: NDArray[np.bool_], units: NDArray[np.int64]) -> NDArray[np.bool_]:
    number = integers(units, "units", ndim=1)
    present = np.unique(number)
    if len(number) != held_MN.shape[1] or not np.array_equal(present, np.arange(len(present))):
        raise ValueError(f"units must number the units of {held_MN.shape[1]} nodes from 0 without gaps")
    order = np.argsort(number, kind="stable")
    starts = np.searchsorted(number[order], present)
    return np.asarray(np.logical_or.reduceat(held_MN[:, order], starts, axis=1))


def minimal_sets(held_MU: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The rows that contain no other row, each once, smallest first; after ``MINIMAL_MAX`` all rows."""
    packed = np.unique(np.packbits(held_MU, axis=1), axis=0)
    sizes = np.bitwise_count(packed).sum(axis=1, dtype=np.int64)
    packed = packed[np.argsort(sizes, kind="stable")]
    kept: list[NDArray[np.uint8]] = []
    while len(packed) and len(kept) < MINIMAL_MAX:
        least = packed[0]
        kept.append(least)
        packed = packed[((packed & least) != least).any(axis=1)]
    rows = np.unpackbits(np.array([*kept, *packed]), axis=1, count=held_MU.shape[1])
    return rows.astype(np.bool_)


# --- counting --------------------------------------------------------------------------------------------


def survivor_counts(held_MU: NDArray[np.bool_], up_to: int, states_max: int = STATES_MAX) -> list[int] | None:
    """For k = 0 … ``up_to``, the number of sets of k lost units that contain no whole row; None: too
    many states.
    """
    num_units = held_MU.shape[1]
    if num_units > ENUMERATED_MAX:
        return _count_along(held_MU[:, _narrow_order(held_MU)], up_to, states_max)
    sizes = _POPCOUNT[: 1 << num_units][surviving_masks(held_MU)]
    return [int(n) for n in np.bincount(sizes, minlength=num_units + 1)[: up_to + 1]]


_POPCOUNT = np.bitwise_count(np.arange(1 << ENUMERATED_MAX, dtype=np.uint32)).astype(np.int64)


def surviving_masks(held_MU: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """``[2^U]``: True if everything survives the loss of the units whose bits are set."""
    num_units = held_MU.shape[1]
    masks = np.arange(1 << num_units, dtype=np.int64)
    rows = held_MU @ (1 << np.arange(num_units, dtype=np.int64))
    out = np.ones(1 << num_units, dtype=np.bool_)
    for row in rows.tolist():
        out &= (masks & row) != row
    return out


def _narrow_order(held_MU: NDArray[np.bool_]) -> NDArray[np.int64]:
    """An order of units in which those that share a set are near each other."""
    overlap = held_MU.T.astype(np.float32) @ held_MU.astype(np.float32) > 0
    order = reverse_cuthill_mckee(csr_matrix(overlap), symmetric_mode=True)
    return np.asarray(order, dtype=np.int64)


def _count_along(held_MU: NDArray[np.bool_], up_to: int, states_max: int) -> list[int] | None:
    """Count in the order of the columns; digit k of a state's integer is the number of ways with k lost."""
    num_units = held_MU.shape[1]
    digit = comb(num_units, min(up_to, num_units // 2)).bit_length()
    mask = (1 << (digit * (up_to + 1))) - 1
    first = held_MU.argmax(axis=1)
    last = num_units - 1 - held_MU[:, ::-1].argmax(axis=1)
    ways = {0: 1}
    for unit in range(num_units):
        members, opened, closed = (
            sum(1 << int(i) for i in np.flatnonzero(which))
            for which in (held_MU[:, unit], first == unit, last == unit)
        )
        after: dict[int, int] = {}
        for state, count in ways.items():
            lost = state | opened  # sets that are begun, not complete, and lost so far
            lives = lost & ~members
            after[lives] = after.get(lives, 0) + count
            if not lost & closed:  # else a set that ends here is lost whole
                after[lost] = after.get(lost, 0) + (count << digit & mask)
        ways = after
        if len(ways) > states_max:
            return None
    total = sum(ways.values())
    return [total >> (digit * k) & ((1 << digit) - 1) for k in range(up_to + 1)]


# --- sampling --------------------------------------------------------------------------------------------


def sampled_survivors(held_MU: NDArray[np.bool_], lost: int, samples: int, seed: int) -> int:
    """The number of ``samples`` random choices of ``lost`` units that everything survives.

    Uses raw words of a PCG64 only, whose stream NumPy never changes: every rank counts the same.
    """
    num_units = held_MU.shape[1]
    words = np.random.PCG64(seed)
    held_UM = held_MU.T.astype(np.float32)
    survived = 0
    batch = max(1, 4_000_000 // (num_units + len(held_MU)))
    for begin in range(0, samples, batch):
        size = min(batch, samples - begin)
        keys = words.random_raw(size * num_units).reshape(size, num_units)
        alive = np.ones((size, num_units), dtype=np.float32)
        chosen = np.argpartition(keys, lost - 1, axis=1)[:, :lost] if lost else keys[:, :0]
        np.put_along_axis(alive, chosen.astype(np.int64), 0, axis=1)
        # Sums of at most 2^24 ones: exact in single precision, in any order.
        survived += int(((alive @ held_UM) > 0).all(axis=1).sum())
    return survived
