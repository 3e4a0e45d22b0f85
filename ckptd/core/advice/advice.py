"""Which policy to take: all are rated, the best is named, and what others lose, at any MTBF. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckptd.core.advice.job_shape import RankShape
from ckptd.core.advice.outlook import (
    Choice,
    Conditions,
    PolicyOutlook,
    at_mtbf,
    dense_outlook,
    partial_outlook,
    window_outlook,
)
from ckptd.core.interval_control import MAX_STALL, IntervalRule, SnapshotCost, interval_of
from ckptd.core.partial_experts import LOST_TOKENS_LIMIT
from ckptd.core.snapshot_policy import OperatorKind
from ckptd.units import format_bytes

__all__ = [
    "Advice",
    "EttrCurve",
    "advise",
    "arguments",
    "ettr_curves",
    "interval_by",
    "mtbf_axis",
]

_WINDOWS = 64
_NAMED = {
    "CheckFreq's interval": IntervalRule.CHECKFREQ,
    "Gemini's interval": IntervalRule.GEMINI,
    "Young and Daly's interval": IntervalRule.YOUNG_DALY,
}
# Two policies that differ by less are the same to a user: the simpler one is taken, with the smaller window.
_EQUAL = 1e-4
_SHORTEST_S, _LONGEST_S, _AXIS_POINTS = 60.0, 86400.0, 64


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


def interval_by(rule: IntervalRule, rank: RankShape, conditions: Conditions) -> int:
    """The interval of dense snapshots that this rule chooses."""
    to_host = rank.dense_bytes / conditions.link_Bps
    to_peers = rank.dense_bytes * conditions.replicas / conditions.network_Bps
    stall_s = dense_outlook(rank, conditions, 1).stall_s
    cost = SnapshotCost(stall_s, max(to_host, to_peers), conditions.iteration_s)
    return interval_of(rule, cost, bound=MAX_STALL, mtbf_s=conditions.mtbf_s)


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
    named = _named_intervals(rank, conditions)
    every = sorted({*_intervals(named["Gemini's interval"]), *named.values()})
    found = _windows(rank, conditions, longest)
    partial = found.pop("partial")
    found["dense"] = [dense_outlook(rank, conditions, n) for n in every]
    everything = [each for outlooks in found.values() for each in outlooks]
    too_large = [] if memory_bytes is None else [e for e in everything if e.memory_bytes > memory_bytes]
    best_of = {policy: _best_fitting(outlooks, memory_bytes) for policy, outlooks in found.items()}
    bests = [(policy, each) for policy, each in best_of.items() if each is not None]
    best = _best_fitting([each for _, each in bests], None)
    others = bests + [(name, dense_outlook(rank, conditions, n)) for name, n in named.items()]
    return Advice(
        best,
        _once(others, best),
        _rejected(everything, too_large, memory_bytes),
        _best_fitting(partial, memory_bytes),
    )


def _named_intervals(rank: RankShape, conditions: Conditions) -> dict[str, int]:
    """Those that papers choose for dense snapshots, by name."""
    return {name: interval_by(rule, rank, conditions) for name, rule in _NAMED.items()}


def _windows(
    rank: RankShape, conditions: Conditions, longest: int = _WINDOWS
) -> dict[str, list[PolicyOutlook]]:
    """Sliding, aligned and partial snapshots in windows of every length, by policy."""
    longest = max(1, min(longest, len(rank.operators)))
    # Partial: of every window in which each snapshot has an expert of a layer.
    layers = Counter(op.layer for op in rank.operators if op.kind is OperatorKind.EXPERT)
    experts = min(longest, max(layers.values(), default=0))
    return {
        "sliding": [window_outlook(rank, conditions, "sliding", w) for w in range(1, longest + 1)],
        "aligned": [window_outlook(rank, conditions, "aligned", w) for w in range(2, longest + 1)],
        "partial": [partial_outlook(rank, conditions, w) for w in range(2, experts + 1)],
    }


def _best_fitting(outlooks: Sequence[PolicyOutlook], memory_bytes: int | None) -> PolicyOutlook | None:
    """The best of those that fit the memory and the network, and lose within the limit; None if none does."""
    fitting = [
        each
        for each in outlooks
        if not each.behind
        and (memory_bytes is None or each.memory_bytes <= memory_bytes)
        and each.lost_share <= LOST_TOKENS_LIMIT
    ]
    return _best(fitting) if fitting else None


@dataclass(frozen=True, slots=True)
class EttrCurve:
    """One policy over the MTBF.

    Attributes:
        exact: it loses no updates.
        points: the best choice at each MTBF; None where none fits the memory and the network, or its losses
            exceed the limit.
    """

    name: str
    exact: bool
    points: tuple[PolicyOutlook | None, ...]


def mtbf_axis(mtbf_s: float) -> tuple[float, ...]:
    """MTBFs from a minute to a day, and further if ``mtbf_s`` is beyond; evenly by their logarithm.

    ``mtbf_s`` is one of them.
    """
    first, last = min(_SHORTEST_S, mtbf_s), max(_LONGEST_S, mtbf_s)
    step = math.log(last / first) / (_AXIS_POINTS - 1)
    between = [first * math.exp(step * n) for n in range(1, _AXIS_POINTS - 1)]
    return tuple(sorted({first, *between, mtbf_s, last}))


def ettr_curves(
    rank: RankShape, conditions: Conditions, mtbfs_s: Sequence[float], *, memory_bytes: int | None = None
) -> tuple[EttrCurve, ...]:
    """The curves of sliding and aligned windows, of dense snapshots at the intervals that papers choose, and
    of partial snapshots, if the rank has experts.

    The best choice of a policy depends on the MTBF. What a choice costs does not: each is rated once.

    Args:
        conditions: their MTBF does not count.
        memory_bytes: as for `advise`.
    """
    rated = _windows(rank, conditions)

    def best(policy: str, mtbf_s: float) -> PolicyOutlook | None:
        found = [at_mtbf(each, conditions.iteration_s, mtbf_s) for each in rated[policy]]
        return _best_fitting(found, memory_bytes)

    def dense(name: str, mtbf_s: float) -> PolicyOutlook | None:
        there = replace(conditions, mtbf_s=mtbf_s)
        every = _named_intervals(rank, there)[name]
        return _best_fitting([dense_outlook(rank, there, every)], memory_bytes)

    points = {policy: tuple(best(policy, m) for m in mtbfs_s) for policy, found in rated.items() if found}
    partial = points.pop("partial", None)
    for name in _named_intervals(rank, conditions):
        points[f"dense, {name}"] = tuple(dense(name, m) for m in mtbfs_s)
    curves = [EttrCurve(name, True, found) for name, found in points.items()]
    return (*curves, EttrCurve("partial", False, partial)) if partial else tuple(curves)


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
