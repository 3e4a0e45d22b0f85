"""Which policy to take: all are rated, the best is named, and what the others would lose. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ckptd.core.advice.job_shape import RankShape
from ckptd.core.advice.outlook import (
    Choice,
    Conditions,
    PolicyOutlook,
    dense_outlook,
    partial_outlook,
    window_outlook,
)
from ckptd.core.partial_experts import LOST_TOKENS_LIMIT
from ckptd.core.snapshot_policy import OperatorKind
from ckptd.units import format_bytes

__all__ = [
    "Advice",
    "advise",
    "arguments",
    "interval_of_bounded_stall",
    "interval_of_copies",
    "interval_of_young_daly",
]

_WINDOWS = 64
_STALL_BOUND = 0.03
# Two policies that differ by less are the same to a user: the simpler one is taken, with the smaller window.
_EQUAL = 1e-4


@dataclass(frozen=True, slots=True)
class Advice:
    """The best of all choices, and the best of each other policy.

    Attributes:
        best: None if none fits the memory and the network.
        others: the best of each policy, and dense snapshots at the intervals that papers choose, with their
            names; the best first, each choice once, and not ``best``.
        rejected: how many choices do not fit, and why; "" if all do.
        lossy: the best partial snapshots whose losses stay within the limit; None if there are none. They are
            never ``best``.
    """

    best: PolicyOutlook | None
    others: tuple[tuple[str, PolicyOutlook], ...]
    rejected: str
    lossy: PolicyOutlook | None = None


def interval_of_bounded_stall(rank: RankShape, conditions: Conditions, bound: float = _STALL_BOUND) -> int:
    """As CheckFreq chooses: the shortest interval whose stalls take no more than ``bound`` of the time.

    Raises:
        ValueError: ``bound`` is not between 0 and 1.
    """
    if not 0 < bound < 1:
        raise ValueError(f"a bound of {bound:g} for stalls; it must be between 0 and 1")
    once = dense_outlook(rank, conditions, 1).stall_s
    return max(1, math.ceil(once / (bound * conditions.iteration_s)))


def interval_of_copies(rank: RankShape, conditions: Conditions) -> int:
    """As Gemini chooses: the shortest interval in which the copies to the host, and from there to the peers,
    can be made.
    """
    to_host = rank.dense_bytes / conditions.link_Bps
    to_peers = rank.dense_bytes * conditions.replicas / conditions.network_Bps
    return max(1, math.ceil(max(to_host, to_peers) / conditions.iteration_s))


def interval_of_young_daly(rank: RankShape, conditions: Conditions) -> int:
    """The interval that loses least by stalls and by failures together, if either is small: sqrt(2 s M), with
    s seconds of stall of one snapshot and M seconds between failures.
    """
    once = dense_outlook(rank, conditions, 1).stall_s
    return max(1, round(math.sqrt(2 * once * conditions.mtbf_s) / conditions.iteration_s))


def advise(
    rank: RankShape,
    conditions: Conditions,
    *,
    memory_bytes: int | None = None,
    longest_window: int = _WINDOWS,
) -> Advice:
    """Rate sliding and aligned windows of every length, and dense snapshots of every interval.

    Args:
        memory_bytes: for the rank on its node, replicas included; None: as much as is needed.
    """
    longest = max(1, min(longest_window, len(rank.operators)))
    copies = interval_of_copies(rank, conditions)
    named = {
        "CheckFreq's interval": max(copies, interval_of_bounded_stall(rank, conditions)),
        "Gemini's interval": copies,
        "Young and Daly's interval": max(copies, interval_of_young_daly(rank, conditions)),
    }
    found = {
        "sliding": [window_outlook(rank, conditions, "sliding", w) for w in range(1, longest + 1)],
        "aligned": [window_outlook(rank, conditions, "aligned", w) for w in range(2, longest + 1)],
        "dense": [dense_outlook(rank, conditions, n) for n in sorted({*_intervals(copies), *named.values()})],
    }
    everything = [each for outlooks in found.values() for each in outlooks]
    too_large = [] if memory_bytes is None else [e for e in everything if e.memory_bytes > memory_bytes]
    misfits = {id(each) for each in everything if each.behind} | set(map(id, too_large))
    fitting = {
        policy: [each for each in outlooks if id(each) not in misfits] for policy, outlooks in found.items()
    }
    best_of = {policy: _best(outlooks) for policy, outlooks in fitting.items() if outlooks}
    best = _best(list(best_of.values())) if best_of else None
    others = list(best_of.items())
    others += [(name, dense_outlook(rank, conditions, every)) for name, every in named.items()]
    lossy = [
        each
        for each in _partial(rank, conditions, longest)
        if not each.behind and (memory_bytes is None or each.memory_bytes <= memory_bytes)
    ]
    return Advice(
        best,
        _once(others, best),
        _rejected(everything, too_large, memory_bytes),
        _best(lossy) if lossy else None,
    )


def _partial(rank: RankShape, conditions: Conditions, longest: int) -> list[PolicyOutlook]:
    """Of every window in which each snapshot has an expert of a layer, and which loses within the limit."""
    layers = Counter(op.layer for op in rank.operators if op.kind is OperatorKind.EXPERT)
    windows = range(2, min(longest, max(layers.values(), default=0)) + 1)
    found = [partial_outlook(rank, conditions, window) for window in windows]
    return [each for each in found if each.lost_share <= LOST_TOKENS_LIMIT]


def _once(
    named: Sequence[tuple[str, PolicyOutlook]], best: PolicyOutlook | None
) -> tuple[tuple[str, PolicyOutlook], ...]:
    """Each choice once, with all of its names."""
    names: dict[Choice, list[str]] = {}
    found: dict[Choice, PolicyOutlook] = {}
    for name, each in named:
        names.setdefault(each.choice, []).append(name)
        found[each.choice] = each
    if best is not None:
        del found[best.choice]
    ordered = sorted(found.values(), key=lambda each: -each.ettr)
    return tuple((", ".join(names[each.choice]), each) for each in ordered)


def _rejected(
    everything: Sequence[PolicyOutlook], too_large: Sequence[PolicyOutlook], memory_bytes: int | None
) -> str:
    behind = [each for each in everything if each.behind]
    reasons = []
    if behind:
        reasons.append(f"{len(behind)} of {len(everything)} choices send more than the network carries")
    if too_large:
        least = min(each.memory_bytes for each in everything)
        reasons.append(
            f"{len(too_large)} need more than {format_bytes(memory_bytes or 0)} of memory (the smallest: "
            f"{format_bytes(least)})"
        )
    return "; ".join(reasons)


def arguments(outlook: PolicyOutlook) -> str:
    """What to pass to ``Checkpointer`` for this choice."""
    choice = outlook.choice
    if choice.policy == "dense":
        return f'snapshots=SnapshotOptions(policy="dense", every={choice.every})'
    policy = "" if choice.policy == "sliding" else f'policy="{choice.policy}", '
    every = f"every={choice.every}, " if choice.every > 1 else ""
    return f"snapshots=SnapshotOptions({policy}{every}window={choice.window})"


def _intervals(first: int) -> list[int]:
    """Each, at first; later ones a twentieth apart."""
    found = [first]
    while found[-1] < 20_000:
        found.append(found[-1] + max(1, found[-1] // 20))
    return found


def _best(outlooks: Sequence[PolicyOutlook]) -> PolicyOutlook:
    most = max(each.ettr for each in outlooks)
    near = [each for each in outlooks if each.ettr >= most - _EQUAL]
    return min(near, key=lambda each: (each.choice.window, each.memory_bytes, -each.ettr))
