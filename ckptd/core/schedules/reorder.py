"""Changing the order of a running schedule without ever losing coverage.

At a window boundary one schedule follows another. An operator that was anchored in phase p and now is
in phase q waits ``window + q - p`` snapshots for its next anchor. With q <= p + 1, always, any
window + 1 consecutive snapshots anchor everything, across every change; so a new order is approached
in steps, one at each boundary, and the ring needs no more slots than it has.

The step must start from the schedule that the newest snapshots were taken with. A trainer that is
restored therefore goes back to the schedule of its suffix's end: two steps from one boundary would
postpone an operator by two phases.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptd.core.schedules.policy import OperatorCost, PolicyKind, Schedule

__all__ = ["reorder"]


def reorder(
    schedule: Schedule,
    operators: Sequence[OperatorCost],
    new_order: Sequence[int],
    *,
    capacity_bytes: int,
) -> Schedule:
    """One step from ``schedule`` towards ``new_order``, to take effect where a window begins.

    No operator is postponed by more than one phase (it may come earlier by any number), so any
    window + 1 consecutive snapshots still anchor everything, also across the change. Applied at each
    following boundary it gets closer each time, until the returned schedule is the one given.

    One pass of a bubble sort over phases, last pair first: two neighbours are pooled and shared out
    anew, earlier operators to the earlier phase. What moves back a phase is not touched again.
    A pair changes only if that leaves fewer operators out of order and no phase above capacity.

    Args:
        new_order: a permutation of the operator ids.
        capacity_bytes: what a slot can hold.
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
    """Both phases (each sorted by rank) shared out anew, or None if that gains nothing."""
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
    """Where to cut so that both halves fit, none is empty, and the heavier one is lightest."""
    prefix = list(itertools.accumulate((extra[i] for i in pool), initial=0))
    middle = bisect_left(prefix, prefix[-1] / 2)
    cuts = [cut for cut in (middle - 1, middle) if 0 < cut < len(pool)]
    heavier = {cut: max(prefix[cut], prefix[-1] - prefix[cut]) for cut in cuts}
    best = min(cuts, key=heavier.__getitem__, default=None)
    return best if best is not None and heavier[best] <= room else None


def _first_fit(pool: Sequence[int], extra: Mapping[int, int], room: int) -> list[int]:
    """What goes into the earlier phase if each operator in turn takes its place where it fits."""
    taken: list[int] = []
    for i in pool:
        if extra[i] <= room:
            taken.append(i)
            room -= extra[i]
    return taken


def _last_fit(pool: Sequence[int], extra: Mapping[int, int], room: int) -> list[int]:
    """The same from the back: what is left for the earlier phase once the later one is full."""
    late = set(_first_fit(pool[::-1], extra, room))
    return [i for i in pool if i not in late]


def _load(ids: Sequence[int], extra: Mapping[int, int]) -> int:
    return sum(extra[i] for i in ids)


def _inversions(early: Sequence[int], late: Sequence[int], rank: Sequence[int]) -> int:
    """How many pairs stand the wrong way round; both are sorted by rank."""
    late_ranks = [rank[i] for i in late]
    return sum(bisect_left(late_ranks, rank[i]) for i in early)
