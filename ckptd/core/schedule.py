"""Schedules: which operators are anchored in which phase, and how that is planned and changed. Pure.

With ``extra = anchor - compute`` bytes, the snapshot of a phase of a sliding window has

    bytes(phase) = fixed + sum(compute of all) + sum(extra of the phase)

The plan has the smallest window whose largest snapshot fits the budget. Phases are contiguous in a given
order (`order_operators`), and among all such cuts the peak is the smallest possible: a binary search over
prefix sums for the lowest capacity with which ``window`` phases suffice. `ckptd.core.snapshot_policy` defines
what phases mean; its public names can be imported from here, too.

Source: MoEvement (NSDI '26), 3.5 and Algorithm 1; corrected: bytes instead of counts, no floor of two
operators, and the plan says what cannot fit.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter, sub

from ckptd.core.snapshot_policy import (
    OperatorCost,
    OperatorKind,
    PolicyKind,
    Schedule,
)

# Of the bytes that can be copied, the part that a plan asks for first: rates vary, and first estimates err.
HEADROOM_ESTIMATED, HEADROOM_MEASURED = 0.9, 0.95
# Of a large job; what a window costs in recoveries matters where iterations take many seconds.
_MTBF_S = 3600.0


def plan_schedule(
    operators: Sequence[OperatorCost],
    *,
    budget_bytes: int | None,
    fixed_bytes: int = 0,
    order: Sequence[int],
    max_window: int = 64,
    window: int | None = None,
) -> Schedule:
    """Plan the smallest sliding window whose largest snapshot fits the budget, cut for the lowest peak.

    Args:
        budget_bytes: the bytes that can be copied per iteration; None for no limit.
        fixed_bytes: the bytes of every snapshot besides operators: scalars, buffers, header.
        order: a permutation of the operator ids, in the order of their anchors.
        max_window: the largest window to consider.
        window: use this window, whatever the budget (but never more phases than operators).
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
    """Plan the paper's schedule: phases of equal operator counts, as few as fit the budget.

    Arguments as for `plan_schedule`. If no window fits, the one with the lowest peak is returned.
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


def worthwhile_window(operators: Sequence[OperatorCost], fixed_bytes: int, max_window: int) -> int:
    """The window to use where none fits: its largest snapshot is at most 1.5 times what every one holds."""
    floor = fixed_bytes + sum(operator.compute_bytes for operator in operators)
    return max(1, min(max_window, -(-2 * sum(_extras(operators)) // max(floor, 1))))


def least_loss_window(
    operators: Sequence[OperatorCost],
    fixed_bytes: int,
    max_window: int,
    *,
    affordable_bytes: int,
    iteration_s: float,
) -> int:
    """The window to use where none has snapshots of ``affordable_bytes``, and larger ones cost time.

    What is lost is the part of an iteration that larger snapshots take, and the iterations of a window that
    are replayed after each failure: one an hour.
    """
    floor = fixed_bytes + sum(operator.compute_bytes for operator in operators)
    extra = sum(_extras(operators))

    def lost(window: int) -> float:
        return 1.0 - affordable_bytes / max(floor + extra / window, 1) + window * iteration_s / _MTBF_S

    return min(range(1, max_window + 1), key=lost)


def max_piece_bytes(operators: Sequence[OperatorCost], window: int, fixed_bytes: int = 0) -> int | None:
    """The anchor size above which splitting an operator would lower the peak; None if none would.

    A phase is at least as heavy as its heaviest operator, so one above the average of a phase sets the peak.
    A gain of less than a sixty-fourth of the snapshot is not worth a split.
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
    """The bytes that anchors add, as prefix sums in the order of anchoring, and the floor of a snapshot."""

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
        """The number of phases of ``capacity`` that are needed, or limit + 1 if more than ``limit``."""
        end, at, phases = len(self.prefix) - 1, 0, 0
        while at < end and phases <= limit:
            at = bisect_right(self.prefix, self.prefix[at] + capacity) - 1
            phases += 1
        return phases

    def lowest(self, window: int) -> int:
        """The lowest capacity with which ``window`` phases suffice."""
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
        """The borders of the phases: the lowest possible peak, no empty phase, otherwise as even as possible.

        From the back: the earliest cut from which the later phases still suffice. From the front: the cut
        nearest to an equal share of the remainder, between that earliest cut and the one that capacity
        allows.
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
    """The bytes that the anchor of each operator adds to a snapshot."""
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


@dataclass(frozen=True, slots=True)
class SharedOperator:
    """An operator that all members of a group have, its bytes with and without anchor, and its phase."""

    name: str
    anchor_bytes: int
    compute_bytes: int
    phase: int = 0


def spread(
    operators: Sequence[SharedOperator], members: Sequence[int], own_bytes: Mapping[int, int]
) -> list[int]:
    """The member of a replicate group that captures each operator: each one once, bytes spread evenly.

    Every member computes the same answer from what all members know: names, sizes and phases of the shared
    operators, and the bytes that each member captures besides. In phase p a rank's snapshot takes the compute
    weights of all that it captures and the rest of the anchors of p. Operators are assigned from the largest
    to the smallest, each to the member whose snapshot of that phase is the smallest so far.

    Args:
        operators: of one group; their names are distinct.
        members: the group's ranks.
        own_bytes: the bytes of each member's snapshots besides this group's operators; 0 where not given.
    Source: MoC-System (ASPLOS '25), section 4: fully sharded checkpointing, "equal" where every member starts
    from nothing, and "adaptive" where members that capture more of their own (experts) are given less.
    """
    ranks = sorted(members)
    # The bytes of a member's snapshots in every phase, and those that a phase adds.
    always = {rank: own_bytes.get(rank, 0) for rank in ranks}
    extra: dict[tuple[int, int], int] = {}
    found = [ranks[0]] * len(operators)
    order = sorted(range(len(operators)), key=lambda i: (-operators[i].anchor_bytes, operators[i].name))
    for index in order:
        operator = operators[index]
        phase = operator.phase
        chosen = min(ranks, key=lambda r: (always[r] + extra.get((r, phase), 0), r))
        found[index] = chosen
        always[chosen] += operator.compute_bytes
        extra[chosen, phase] = extra.get((chosen, phase), 0) + operator.anchor_bytes - operator.compute_bytes
    return found


class Ordering(StrEnum):
    """How the popularity of an expert is measured (paper 3.5 and appendix B)."""

    HARD = "hard"  # tokens routed to it
    SOFT = "soft"  # its gate probabilities, summed
    DECAYED = "decayed"  # tokens routed to it, as a moving average
    CAPACITY = "capacity"  # tokens routed to it per token of its capacity


def update_popularity(
    previous: Sequence[float], observed: Sequence[float], *, ordering: Ordering, alpha: float = 0.9
) -> list[float]:
    """Popularity after one more mini-batch.

    Args:
        observed: in this mini-batch, per operator: the tokens routed to it, or for `Ordering.SOFT` the sum of
            its gate probabilities over the tokens.
        alpha: the weight of the past for `Ordering.DECAYED`, 0 to 1.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}, must be 0 to 1")
    if ordering is Ordering.DECAYED:
        return [alpha * old + (1 - alpha) * new for old, new in zip(previous, observed, strict=True)]
    return [old + new for old, new in zip(previous, observed, strict=True)]


def order_operators(
    operators: Sequence[OperatorCost],
    popularity: Mapping[int, float] | Sequence[float],
    ordering: Ordering = Ordering.HARD,
    *,
    capacities: Sequence[float] | None = None,
    dense_last: bool = False,
) -> list[int]:
    """The order of anchors: dense parts and gates, then experts, the popular ones last.

    Popular experts then stay frozen longest during replay, where replay saves most (MoEvement, NSDI '26, 3.5
    and appendix B). The slices of a fused tensor stay together, because its weight gradient is skipped only
    while all of them are frozen: groups are ordered by their mean popularity, the slices of a group by their
    own. Ties keep the order of the ids.

    Args:
        popularity: per operator id; only that of experts counts. Operators that a mapping omits were never
            used.
        capacities: tokens that each operator takes per batch, for `Ordering.CAPACITY`.
        dense_last: dense parts and gates come after the experts, as in the paper's figure 6. In aligned
            windows an operator is absent once it is anchored, so what computes most should be anchored last:
            it stays frozen longest, and the first snapshot, which has the compute weights of all others, is
            smaller. In sliding windows each snapshot has the compute weights of all operators, and the cuts
            even out the rest.
    """
    weight = _weights(len(operators), popularity, ordering, capacities)
    dense: list[int] = []
    experts: list[int] = []
    expert = OperatorKind.EXPERT
    for i, kind in enumerate(map(attrgetter("kind"), operators)):
        (experts if kind is expert else dense).append(i)
    experts.sort(key=weight.__getitem__)
    experts = _blockwise(experts, list(map(attrgetter("group"), operators)), weight)
    return experts + dense if dense_last else dense + experts


def needs_reorder(
    old: Sequence[float], new: Sequence[float], *, change: float = 0.10, share: float = 0.25
) -> bool:
    """Whether ``share`` of the experts or more changed by more than ``change`` of their frequency (3.5).

    Frequencies are shares of the total, so counters may have continued or begun anew.
    """
    if len(old) != len(new):
        raise ValueError(f"popularity of {len(old)} experts before and {len(new)} now")
    total_old, total_new = math.fsum(old), math.fsum(new)
    if not old or total_old <= 0 or total_new <= 0:
        return False
    changed = sum(
        abs(after / total_new - before / total_old) > change * before / total_old
        for before, after in zip(old, new, strict=True)
    )
    return changed >= share * len(old)


def _blockwise(experts: list[int], group_of: Sequence[str | None], weight: Sequence[float]) -> list[int]:
    """``experts`` (sorted by weight) with the members of each group together."""
    if set(group_of) <= {None}:
        return experts
    blocks: dict[str | int, list[int]] = {}
    for i in experts:
        group = group_of[i]
        blocks.setdefault(i if group is None else group, []).append(i)
    mean = {key: sum(weight[i] for i in block) / len(block) for key, block in blocks.items()}
    order = sorted(blocks, key=lambda key: (mean[key], min(blocks[key])))
    return list(itertools.chain.from_iterable(blocks[key] for key in order))


def _weights(
    count: int,
    popularity: Mapping[int, float] | Sequence[float],
    ordering: Ordering,
    capacities: Sequence[float] | None,
) -> list[float]:
    if isinstance(popularity, Mapping):
        weight = [popularity.get(i, 0.0) for i in range(count)]
    else:
        weight = list(popularity)
    if len(weight) != count:
        raise ValueError(f"popularity of {len(weight)} operators, there are {count}")
    if ordering is Ordering.CAPACITY:
        if capacities is None or len(capacities) != count or min(capacities, default=1) <= 0:
            raise ValueError("ordering by capacity needs a positive capacity for every operator")
        weight = [used / limit for used, limit in zip(weight, capacities, strict=True)]
    if any(map(math.isnan, weight)):
        raise ValueError("the popularity of an operator is NaN")
    return weight


def reorder(
    schedule: Schedule,
    operators: Sequence[OperatorCost],
    new_order: Sequence[int],
    *,
    capacity_bytes: int,
) -> Schedule:
    """One step from ``schedule`` towards ``new_order``, to be applied where a window begins.

    An operator that moves from phase p to phase q waits ``window + q - p`` snapshots for its next anchor. No
    operator is postponed by more than one phase (q <= p + 1), so any window + 1 consecutive snapshots anchor
    everything, also across the change, and the ring needs no more slots. Applied at each following boundary,
    the schedule gets closer to the new order each time, until the returned schedule equals the given one.

    The step must start from the schedule of the newest snapshots: two steps from one boundary would postpone
    an operator by two phases. So a restored trainer goes back to the schedule at the end of its suffix.

    One pass of a bubble sort over phases, last pair first: two neighbours are pooled and divided again,
    earlier operators to the earlier phase. An operator that moves back a phase does not move again. A pair
    changes only if that leaves fewer operators out of order and no phase above capacity.

    Args:
        new_order: a permutation of the operator ids.
        capacity_bytes: the size of a slot.
    """
    if sorted(new_order) != list(range(schedule.num_operators)):
        raise ValueError(f"new_order is not a permutation of {schedule.num_operators} operators")
    if schedule.policy is not PolicyKind.SLIDING:
        return _unchanged(schedule, "only sliding windows are reordered")
    if schedule.peak_bytes > capacity_bytes:
        return _unchanged(
            schedule,
            f"its peak of {schedule.peak_bytes} is above the slots' {capacity_bytes} bytes",
        )
    floor = schedule.phase_bytes[0] - _extra_of(operators, schedule.phases[0])
    rank = [0] * len(new_order)
    for place, operator in enumerate(new_order):
        rank[operator] = place
    phases = [sorted(phase, key=rank.__getitem__) for phase in schedule.phases]
    moved = 0
    for low in range(schedule.window - 2, -1, -1):
        split = _split_pair(phases[low], phases[low + 1], operators, rank, capacity_bytes - floor)
        if split is not None:
            moved += len(set(split[0]).symmetric_difference(phases[low]))
            phases[low], phases[low + 1] = split
    if not moved:
        return _unchanged(schedule, "no phase can come closer to the new order")
    phase_bytes = tuple(floor + _extra_of(operators, phase) for phase in phases)
    return replace(
        schedule,
        phases=tuple(map(tuple, phases)),
        phase_bytes=phase_bytes,
        peak_bytes=max(phase_bytes),
        reason=(
            f"{moved} operators change places with neighbours, since experts are used otherwise "
            f"than before; window {schedule.window}"
        ),
    )


def _unchanged(schedule: Schedule, why: str) -> Schedule:
    return replace(schedule, reason=f"order unchanged: {why}")


def _extra_of(operators: Sequence[OperatorCost], ids: Sequence[int]) -> int:
    return sum(operators[i].anchor_bytes - operators[i].compute_bytes for i in ids)


def _split_pair(
    early: list[int],
    late: list[int],
    operators: Sequence[OperatorCost],
    rank: Sequence[int],
    room: int,
) -> tuple[list[int], list[int]] | None:
    """Both phases (each sorted by rank) divided again, or None if that gains nothing."""
    before = _inversions(early, late, rank)
    if before == 0:
        return None
    pool = sorted(early + late, key=rank.__getitem__)
    extra = {i: operators[i].anchor_bytes - operators[i].compute_bytes for i in pool}
    even = _even_split(pool, extra, room)
    if even is not None:
        return pool[:even], pool[even:]
    for front in (_first_fit(pool, extra, room), _last_fit(pool, extra, room)):
        chosen = set(front)
        back = [i for i in pool if i not in chosen]
        fits = front and back and max(_load(front, extra), _load(back, extra)) <= room
        if fits and _inversions(front, back, rank) < before:
            return front, back
    return None


def _even_split(pool: list[int], extra: Mapping[int, int], room: int) -> int | None:
    """The cut into two non-empty halves that fit, with the lightest heavier half; None: there is none."""
    prefix = list(itertools.accumulate((extra[i] for i in pool), initial=0))
    middle = bisect_left(prefix, prefix[-1] / 2)
    cuts = [cut for cut in (middle - 1, middle) if 0 < cut < len(pool)]
    heavier = {cut: max(prefix[cut], prefix[-1] - prefix[cut]) for cut in cuts}
    best = min(cuts, key=heavier.__getitem__, default=None)
    return best if best is not None and heavier[best] <= room else None


def _first_fit(pool: Sequence[int], extra: Mapping[int, int], room: int) -> list[int]:
    """The operators of the earlier phase if each in turn is put there where it fits."""
    taken: list[int] = []
    for i in pool:
        if extra[i] <= room:
            taken.append(i)
            room -= extra[i]
    return taken


def _last_fit(pool: Sequence[int], extra: Mapping[int, int], room: int) -> list[int]:
    """The operators that are left for the earlier phase once the later one was filled from the back."""
    late = set(_first_fit(pool[::-1], extra, room))
    return [i for i in pool if i not in late]


def _load(ids: Sequence[int], extra: Mapping[int, int]) -> int:
    return sum(extra[i] for i in ids)


def _inversions(early: Sequence[int], late: Sequence[int], rank: Sequence[int]) -> int:
    """The number of pairs in the wrong order; both phases are sorted by rank."""
    late_ranks = [rank[i] for i in late]
    return sum(bisect_left(late_ranks, rank[i]) for i in early)
