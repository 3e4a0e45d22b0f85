"""Planning a schedule: the smallest window whose largest snapshot fits, cut for the lowest peak.

With ``extra = anchor - compute`` bytes, the snapshot of a phase of a sliding window takes

    bytes(phase) = fixed + sum(compute of all) + sum(extra of the phase)

Phases are contiguous in the given order (`ckptd.core.schedules.popularity`), and among all such
cuts the peak is the smallest possible: a binary search for the lowest capacity with which
``window`` phases are enough, over prefix sums. What the phases mean is in
`ckptd.core.schedules.policy`, how an order changes in `ckptd.core.schedules.reorder`; their public
names are here too, so that one import serves.

Source: MoEvement (NSDI '26), 3.5 and Algorithm 1; corrected: bytes instead of counts, no floor of two
operators, and what cannot fit is said. Pure: no clock, no I/O.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, sub

from ckptd.core.schedules.policy import (
    AlignedPolicy,
    DensePolicy,
    Level,
    OperatorCost,
    OperatorKind,
    PhaseLevels,
    PolicyKind,
    Schedule,
    SlidingPolicy,
    SnapshotPolicy,
    levels,
    policy_for,
)
from ckptd.core.schedules.popularity import (
    Ordering,
    needs_reorder,
    order_operators,
    update_popularity,
)
from ckptd.core.schedules.reorder import reorder

__all__ = [
    "AlignedPolicy",
    "DensePolicy",
    "Level",
    "OperatorCost",
    "OperatorKind",
    "Ordering",
    "PhaseLevels",
    "PolicyKind",
    "Schedule",
    "SlidingPolicy",
    "SnapshotPolicy",
    "levels",
    "max_piece_bytes",
    "needs_reorder",
    "order_operators",
    "plan_aligned",
    "plan_schedule",
    "policy_for",
    "reorder",
    "update_popularity",
]


def plan_schedule(
    operators: Sequence[OperatorCost],
    *,
    budget_bytes: int | None,
    fixed_bytes: int = 0,
    order: Sequence[int],
    max_window: int = 64,
    window: int | None = None,
) -> Schedule:
    """The smallest sliding window whose largest snapshot fits the budget, cut for the lowest peak.

    Args:
        budget_bytes: what can be copied per iteration; None for no limit.
        fixed_bytes: what every snapshot holds besides operators: scalars, buffers, header.
        order: a permutation of the operator ids, in the order in which to anchor them.
        max_window: the largest window to consider.
        window: take this one, whatever the budget (but never more phases than operators).
    """
    _check_order(order, len(operators))
    _check_windows(window, max_window)
    costs = _Costs.of(operators, order, fixed_bytes)
    at_most = max(1, len(order))
    if window is not None:
        chosen, note = min(window, at_most), ""
        if chosen < window:
            note = f" (asked for {window}, there are only {len(order)} operators)"
    else:
        chosen, note = _smallest_window(costs, budget_bytes, min(max_window, at_most))
    cuts = costs.cut(chosen)
    phases = tuple(tuple(order[a:b]) for a, b in itertools.pairwise(cuts))
    phase_bytes = tuple(costs.floor + costs.extra(a, b) for a, b in itertools.pairwise(cuts))
    peak = max(phase_bytes)
    fits = budget_bytes is None or peak <= budget_bytes
    return Schedule(
        window=chosen,
        phases=phases,
        phase_bytes=phase_bytes,
        peak_bytes=peak,
        dense_bytes=costs.floor + costs.prefix[-1],
        fits=fits,
        reason=_fit_text(fits, chosen, peak, budget_bytes)
        + note
        + ("" if fits else _misfit_text(costs, operators)),
    )


def plan_aligned(
    operators: Sequence[OperatorCost],
    *,
    budget_bytes: int | None,
    fixed_bytes: int = 0,
    order: Sequence[int],
    max_window: int = 64,
    window: int | None = None,
) -> Schedule:
    """The paper's schedule: phases of equal operator counts, as few as fit the budget.

    Arguments as for `plan_schedule`. Where none fits, the window with the lowest peak is returned.
    """
    _check_order(order, len(operators))
    _check_windows(window, max_window)
    anchor = list(itertools.accumulate((operators[i].anchor_bytes for i in order), initial=0))
    compute = list(itertools.accumulate((operators[i].compute_bytes for i in order), initial=0))
    count = len(order)

    def sizes(size: int) -> list[int]:
        ends = [min(at + size, count) for at in range(0, max(count, 1), size)]
        return [
            fixed_bytes + anchor[b] - anchor[a] + compute[-1] - compute[b]
            for a, b in itertools.pairwise([0, *ends])
        ]

    candidates = [window] if window is not None else range(1, min(max_window, max(count, 1)) + 1)
    best: list[int] = []
    best_size = max(count, 1)
    for candidate in candidates:
        size = max(1, math.ceil(count / candidate))
        found = sizes(size)
        if not best or max(found) < max(best):
            best, best_size = found, size
        if budget_bytes is None or max(best) <= budget_bytes:
            break
    fits = budget_bytes is None or max(best) <= budget_bytes
    return Schedule(
        window=len(best),
        phases=tuple(tuple(order[k * best_size : (k + 1) * best_size]) for k in range(len(best))),
        phase_bytes=tuple(best),
        peak_bytes=max(best),
        dense_bytes=fixed_bytes + anchor[-1],
        fits=fits,
        reason=_fit_text(fits, len(best), max(best), budget_bytes),
        policy=PolicyKind.ALIGNED,
    )


def max_piece_bytes(operators: Sequence[OperatorCost], window: int, fixed_bytes: int = 0) -> int | None:
    """The anchor size above which splitting an operator would lower the peak; None if none would.

    A phase cannot be lighter than its heaviest operator: one above the average of a phase sets the
    peak alone. A gain of less than a sixty-fourth of the snapshot is not worth a split.
    """
    extras = _extras(operators)
    ideal = max(1, math.ceil(sum(extras) / window))
    heaviest = max(extras, default=0)
    peak = fixed_bytes + sum(operator.compute_bytes for operator in operators) + heaviest
    if (heaviest - ideal) * 64 <= peak:
        return None
    return min(
        ideal * operator.anchor_bytes // extra
        for operator, extra in zip(operators, extras, strict=True)
        if extra > ideal
    )


@dataclass(frozen=True, slots=True)
class _Costs:
    """Prefix sums of what anchoring adds, in the order of anchoring, on a floor per snapshot."""

    prefix: list[int]
    floor: int
    heaviest: int

    @classmethod
    def of(cls, operators: Sequence[OperatorCost], order: Sequence[int], fixed: int) -> _Costs:
        extras = _extras(operators)
        heaviest = max(extras, default=0)
        floor = fixed + sum(map(attrgetter("compute_bytes"), operators))
        ordered = map(extras.__getitem__, order)
        return cls(list(itertools.accumulate(ordered, initial=0)), floor, heaviest)

    def extra(self, begin: int, end: int) -> int:
        return self.prefix[end] - self.prefix[begin]

    def count(self, capacity: int, limit: int) -> int:
        """How many phases of ``capacity`` it takes, or limit + 1 if more than ``limit``."""
        end, at, phases = len(self.prefix) - 1, 0, 0
        while at < end and phases <= limit:
            at = bisect_right(self.prefix, self.prefix[at] + capacity) - 1
            phases += 1
        return phases

    def lowest(self, window: int) -> int:
        """The lowest capacity with which ``window`` phases are enough."""
        low = max(self.heaviest, -(-self.prefix[-1] // window))
        high = low + self.heaviest  # a phase that is not the last leaves less than that unused
        while low < high:
            middle = (low + high) // 2
            if self.count(middle, window) <= window:
                high = middle
            else:
                low = middle + 1
        return low

    def cut(self, window: int) -> list[int]:
        """Where phases begin and end: peak as low as can be, none empty, the rest as even as can be.

        From the back: the earliest cut from which the later phases still suffice. From the front:
        the cut nearest to an equal share of what is left, between that and what capacity allows.
        """
        count, capacity = len(self.prefix) - 1, self.lowest(window)
        earliest = [count]
        for _ in range(window - 1):
            reach = self.prefix[earliest[-1]] - capacity
            earliest.append(bisect_left(self.prefix, reach, hi=earliest[-1]))
        cuts = [0]
        for left in range(window - 1, 0, -1):
            at = cuts[-1]
            full = bisect_right(self.prefix, self.prefix[at] + capacity, lo=at) - 1
            low = max(earliest[left], min(at + 1, count))
            high = max(low, min(full, count - left))
            share = self.prefix[at] + self.extra(at, count) / (left + 1)
            cuts.append(self._nearest(share, low, high))
        return [*cuts, count]

    def _nearest(self, target: float, low: int, high: int) -> int:
        at = bisect_left(self.prefix, target, lo=low, hi=high)
        if at > low and target - self.prefix[at - 1] <= self.prefix[at] - target:
            return at - 1
        return at


def _smallest_window(costs: _Costs, budget: int | None, max_window: int) -> tuple[int, str]:
    if budget is None:
        return 1, ""
    room = budget - costs.floor
    if room >= costs.heaviest:
        count = max(1, costs.count(room, max_window))
        if count <= max_window:
            return count, ""
    # Nothing fits: the smallest window that has the lowest peak of all.
    return max(1, costs.count(costs.lowest(max_window), max_window)), f" (of at most {max_window})"


def _fit_text(fits: bool, window: int, peak: int, budget: int | None) -> str:
    if budget is None:
        return f"window {window}: the largest snapshot has {peak:,} bytes, no budget given"
    compared = "fits" if fits else "does not fit"
    return f"window {window}: the largest snapshot has {peak:,} bytes, {compared} {budget:,}"


def _misfit_text(costs: _Costs, operators: Sequence[OperatorCost]) -> str:
    heaviest = operators[_extras(operators).index(costs.heaviest)].name if operators else "none"
    return (
        f"; weights and fixed parts alone are {costs.floor:,} bytes, the largest operator "
        f"({heaviest}) adds {costs.heaviest:,}"
    )


def _extras(operators: Sequence[OperatorCost]) -> list[int]:
    """What anchoring adds to a snapshot, per operator."""
    anchor = map(attrgetter("anchor_bytes"), operators)
    return list(map(sub, anchor, map(attrgetter("compute_bytes"), operators)))


def _check_order(order: Sequence[int], count: int) -> None:
    if len(order) != count or (count and (min(order) != 0 or max(order) != count - 1)):
        raise ValueError(f"order is not a permutation of the {count} operators")
    if len(set(order)) != count:
        raise ValueError("order names an operator twice")


def _check_windows(window: int | None, max_window: int) -> None:
    for name, value in (("window", window), ("max_window", max_window)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, must be at least 1")
