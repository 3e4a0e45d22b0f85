"""Which policy to take: all are rated, the best is named, and what others lose, at any MTBF. Pure."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ckptd.core.advice.job_shape import RankShape
from ckptd.core.advice.node_losses import NodeLosses
from ckptd.core.advice.outlook import (
    EQUAL_ETTR,
    LOSSY,
    Choice,
    Conditions,
    PolicyOutlook,
    at_mtbf,
    dense_outlook,
    partial_outlook,
    selected_outlook,
    window_outlook,
)
from ckptd.core.interval_control import MAX_STALL, IntervalRule, SnapshotCost, interval_of
from ckptd.core.partial_experts import LOST_TOKENS_LIMIT
from ckptd.core.snapshot_policy import OperatorKind
from ckptd.units import format_bytes

_WINDOWS = 64
_EVERY = 16  # of partial snapshots: longer intervals lose more than is within the limit
_NAMED = {
    "CheckFreq's interval": IntervalRule.CHECKFREQ,
    "Gemini's interval": IntervalRule.GEMINI,
    "Young and Daly's interval": IntervalRule.YOUNG_DALY,
}
_SHORTEST_S, _LONGEST_S, _AXIS_POINTS = 60.0, 86400.0, 64


@dataclass(frozen=True, slots=True)
class Advice:
    """The best of all choices, and the best of each other policy.

    Attributes:
        best: None if none fits the memory and the network.
        others: the best of each policy, of each number of replicas, and dense snapshots at the intervals that
            papers choose, with their names; the best first, each choice once, and not ``best``.
        rejected: how many choices do not fit, and why; "" if all do.
        lossy: the best partial and the best selected snapshots whose losses stay within the limit, the better
            first. They are never ``best``.
        lossy_rejected: why there are no partial or no selected ones, although the rank has experts; "" if
            there are.
    """

    best: PolicyOutlook | None
    others: tuple[tuple[str, PolicyOutlook], ...]
    rejected: str
    lossy: tuple[PolicyOutlook, ...] = ()
    lossy_rejected: str = ""


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
    losses: NodeLosses | None = None,
) -> Advice:
    """Rate sliding, aligned and partial windows of every length, and dense snapshots of every interval, with
    each number of replicas.

    If the conditions have storage, durable checkpoints of partial snapshots store all experts, or a part of
    them that goes into the window without a remainder.

    Args:
        memory_bytes: for the rank on its node, replicas included; None: as much as is needed.
        losses: of several nodes at once, and the numbers of replicas to choose from; None: the conditions'
            number of replicas.
    Raises:
        ValueError: as of `NodeLosses.conditions`.
    """
    rated: dict[str, list[PolicyOutlook]] = {}
    named: list[tuple[str, PolicyOutlook]] = []
    for each in _by_replicas(conditions, losses):
        for policy, outlooks in _rated(rank, each).items():
            rated.setdefault(policy, []).extend(outlooks)
        named += [
            (name, dense_outlook(rank, each, every)) for name, every in _named_intervals(rank, each).items()
        ]
    inexact = {policy: rated.pop(policy) for policy in LOSSY}
    lossy = {policy: _best_fitting(outlooks, memory_bytes) for policy, outlooks in inexact.items()}
    without = {policy: outlooks for policy, outlooks in inexact.items() if outlooks and not lossy[policy]}
    everything = [each for outlooks in rated.values() for each in outlooks]
    too_large = [] if memory_bytes is None else [e for e in everything if e.memory_bytes > memory_bytes]
    bests = [(policy, _best_fitting(outlooks, memory_bytes)) for policy, outlooks in rated.items()]
    bests += [(name, _best_fitting(found, memory_bytes)) for name, found in _replica_names(everything)]
    fitting = [(name, each) for name, each in bests if each is not None]
    best = _best_fitting([each for _, each in fitting], None)
    return Advice(
        best,
        _once([*fitting, *_best_named(named)], best),
        _rejected(everything, too_large, memory_bytes),
        tuple(sorted((each for each in lossy.values() if each is not None), key=lambda each: -each.ettr)),
        "; ".join(_none_fits(rank, policy, found, memory_bytes) for policy, found in without.items()),
    )


def _by_replicas(conditions: Conditions, losses: NodeLosses | None) -> list[Conditions]:
    """The conditions with each number of replicas."""
    if losses is None:
        return [conditions]
    return [losses.conditions(replace(conditions, replicas=each)) for each in losses.candidates]


def _rated(rank: RankShape, conditions: Conditions) -> dict[str, list[PolicyOutlook]]:
    named = _named_intervals(rank, conditions)
    every = sorted({*_intervals(named["Gemini's interval"]), *named.values()})
    dense = [dense_outlook(rank, conditions, n) for n in every]
    return {**_windows(rank, conditions), "dense": dense}


def _replica_names(everything: Sequence[PolicyOutlook]) -> list[tuple[str, list[PolicyOutlook]]]:
    """All choices by the number of their replicas, if there are several."""
    found: dict[int, list[PolicyOutlook]] = {}
    for each in everything:
        found.setdefault(each.choice.replicas, []).append(each)
    if len(found) == 1:
        return []
    return [(outlooks[0].choice.replicas_text, outlooks) for outlooks in found.values()]


def _best_named(named: Sequence[tuple[str, PolicyOutlook]]) -> list[tuple[str, PolicyOutlook]]:
    """Of each name the best."""
    return [(wanted, _best([each for name, each in named if name == wanted])) for wanted in dict(named)]


def _named_intervals(rank: RankShape, conditions: Conditions) -> dict[str, int]:
    """Those that papers choose for dense snapshots, by name."""
    return {name: interval_by(rule, rank, conditions) for name, rule in _NAMED.items()}


def _windows(rank: RankShape, conditions: Conditions) -> dict[str, list[PolicyOutlook]]:
    """Sliding, aligned, partial and selected snapshots in windows of every length, by policy."""
    longest = max(1, min(_WINDOWS, len(rank.operators)))
    # Partial: of every window in which each snapshot has an expert of a layer.
    layers = Counter(op.layer for op in rank.operators if op.kind is OperatorKind.EXPERT)
    experts = min(longest, rank.experts_here or longest, max(layers.values(), default=0))
    stores = bool(conditions.storage_Bps)
    partial = [
        (window, parts)
        for window in range(2, experts + 1)
        for parts in range(window)
        if parts == 0 or (stores and window % parts == 0)
    ]
    selected = [each for each in _intervals(2, experts) if rank.selectable]
    return {
        "sliding": [window_outlook(rank, conditions, "sliding", w) for w in range(1, longest + 1)],
        "aligned": [window_outlook(rank, conditions, "aligned", w) for w in range(2, longest + 1)],
        "partial": [
            _carried(functools.partial(partial_outlook, rank, conditions, w, parts=p)) for w, p in partial
        ],
        "selected": [_carried(functools.partial(selected_outlook, rank, conditions, w)) for w in selected],
    }


def _carried(rated: Callable[[int], PolicyOutlook]) -> PolicyOutlook:
    """With the shortest interval of snapshots that the network carries; if none is, with the first."""
    return next((found for n in range(1, _EVERY + 1) if not (found := rated(n)).behind), rated(1))


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
    rank: RankShape,
    conditions: Conditions,
    mtbfs_s: Sequence[float],
    *,
    memory_bytes: int | None = None,
    losses: NodeLosses | None = None,
) -> tuple[EttrCurve, ...]:
    """The curves of sliding and aligned windows, of dense snapshots at the intervals that papers choose, and
    of partial and selected snapshots, if the rank has experts.

    The best choice of a policy depends on the MTBF. What a choice costs does not: each is rated once.

    Args:
        conditions: their MTBF does not count.
        memory_bytes, losses: as for `advise`.
    """
    rated = [(each.replicas, _windows(rank, each)) for each in _by_replicas(conditions, losses)]

    def there(replicas: int, mtbf_s: float) -> Conditions:
        base = replace(conditions, mtbf_s=mtbf_s, replicas=replicas)
        return base if losses is None else losses.conditions(base)

    def best(policy: str, mtbf_s: float) -> PolicyOutlook | None:
        found = [at_mtbf(each, there(n, mtbf_s)) for n, windows in rated for each in windows[policy]]
        return _best_fitting(found, memory_bytes)

    def dense(name: str, mtbf_s: float) -> PolicyOutlook | None:
        every = [(c, _named_intervals(rank, c)[name]) for c in (there(n, mtbf_s) for n, _ in rated)]
        return _best_fitting([dense_outlook(rank, c, n) for c, n in every], memory_bytes)

    policies = [policy for policy, found in rated[0][1].items() if found]
    points = {policy: tuple(best(policy, m) for m in mtbfs_s) for policy in policies}
    points |= {f"dense, {name}": tuple(dense(name, m) for m in mtbfs_s) for name in _NAMED}
    curves = [EttrCurve(name, name not in LOSSY, found) for name, found in points.items()]
    return tuple(sorted(curves, key=lambda curve: not curve.exact))


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


def _none_fits(
    rank: RankShape, policy: str, outlooks: Sequence[PolicyOutlook], memory_bytes: int | None
) -> str:
    """Why no choice of a policy that loses updates fits; with what its snapshots have besides experts."""
    behind = sum(each.behind for each in outlooks)
    too_large = sum(memory_bytes is not None and each.memory_bytes > memory_bytes for each in outlooks)
    losing = sum(each.lost_share > LOST_TOKENS_LIMIT for each in outlooks)
    always = sum(op.anchor_bytes for op in rank.operators if op.kind is not OperatorKind.EXPERT)
    reasons = [
        f"{behind} send more than the network carries, also every {_EVERY} iterations" if behind else "",
        f"{too_large} need more than {format_bytes(memory_bytes or 0)} of memory" if too_large else "",
        f"{losing} lose more than {LOST_TOKENS_LIMIT:.2%} of all updates" if losing else "",
    ]
    return (
        f"no {policy} snapshots, which have {format_bytes(always)} besides experts: of {len(outlooks)} "
        f"choices {', '.join(filter(None, reasons))}"
    )


def arguments(outlook: PolicyOutlook, rank: RankShape) -> str:
    """What to pass to ``Checkpointer`` for this choice."""
    choice = outlook.choice
    if choice.policy == "dense":
        return f'snapshots=SnapshotOptions(policy="dense", every={choice.every})'
    policy = "" if choice.policy == "sliding" else f'policy="{choice.policy}", '
    every = f"every={choice.every}, " if choice.every > 1 else ""
    options = _partial_options(choice, rank) if choice.policy in LOSSY else []
    partial = f", partial=PartialOptions({', '.join(options)})" if options else ""
    return f"snapshots=SnapshotOptions({policy}{every}window={choice.window}{partial})"


def _partial_options(choice: Choice, rank: RankShape) -> list[str]:
    """Those that differ from the defaults, as far as the rank's experts are known."""
    options = []
    if rank.experts_here < rank.num_experts:
        options.append(f"num_experts={rank.num_experts}")
    if choice.parts and rank.num_experts:
        # The most that are in so many parts.
        options.append(f"persist_experts={rank.num_experts * choice.parts // choice.window}")
    return options


def settings(outlook: PolicyOutlook) -> dict[str, int]:
    """What to set for the daemons, so that there are as many replicas as this choice has, and durable
    checkpoints at its interval.
    """
    stored = outlook.storage
    durable = {} if stored is None else {"persist_every": stored.every, "persist_every_s": 0}
    return {"replicas": outlook.choice.replicas, **durable}


def _intervals(first: int, last: int = 20_000) -> Iterator[int]:
    """Each, at first; later ones a twentieth apart."""
    while first <= last:
        yield first
        first += max(1, first // 20)


def _best(outlooks: Sequence[PolicyOutlook]) -> PolicyOutlook:
    most = max(each.ettr for each in outlooks)
    # The simplest one: with the smallest window, and durable checkpoints that have everything.
    near = [each for each in outlooks if each.ettr >= most - EQUAL_ETTR]
    return min(
        near, key=lambda each: (each.choice.window, each.memory_bytes, each.choice.parts > 0, -each.ettr)
    )
