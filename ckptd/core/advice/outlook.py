"""What a policy would cost a job: stalls, traffic, memory, what a failure costs, and what is left. Pure.

With an iteration of T seconds, a mean time M between failures of the job, stalls of s seconds in an
iteration, and R seconds that a failure costs on average, of the time

    ETTR = 1 / (1 + s / T) * 1 / (1 + R / M)

is spent on iterations that count (MoEvement, NSDI '26, 2.4 and appendix C). R is the sum of

    lost      iterations that no restorable snapshot has: half of an iteration (sliding), of a window
              (aligned), of an interval (dense, partial); and what had not reached the peer yet
    restart   until all ranks run again
    load      of the rank that was lost, over the network
    replay    W - 1 iterations of a window of W, and those that a resume repeats only to compare: one with
              sliding windows, an interval with dense snapshots. A frozen operator computes no gradients of
              its weights, which are a third of its work.

Where a pipeline keeps boundary logs (localized recovery), only the stage of the lost rank goes back, and
its replay has no bubbles: of m micro-batches over s stages, an iteration takes it m / (m + s - 1) of its
time. The others lose the iteration that was cut off.

The paper takes 3/2 W iterations for all of it (aligned), and half of an interval (dense); its printed tables
contain restarts, which it does not tell. What is not here: the loss of a state with all of its replicas.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ckptd.core.advice.job_shape import RankShape
from ckptd.core.schedule import order_operators, plan_aligned, plan_schedule
from ckptd.core.snapshot_policy import OperatorKind, PolicyKind, Schedule, policy_for

__all__ = [
    "Choice",
    "Conditions",
    "PolicyOutlook",
    "at_mtbf",
    "dense_outlook",
    "ettr",
    "partial_outlook",
    "replay_share",
    "window_outlook",
]

# Of an iteration, before the optimizer's step: until then a snapshot's copy is hidden.
_HIDDEN = 0.9
# Planning and claiming a slot, on the training thread.
_TOP_S = 2e-4
_WEIGHT_GRADIENTS = 1 / 3


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under which a job runs.

    Args:
        iteration_s: without snapshots.
        mtbf_s: between two failures of the job.
        link_Bps: bytes a second from a device to its host.
        network_Bps: bytes a second of a rank to a peer.
        replicas: peers that keep a copy of each snapshot; at least one.
        restart_s: from a failure until all ranks run again.
        verify_iterations: the most iterations that a resume replays only to compare (a trainer's default is
            16; that is a choice beside the policy).
        drag: seconds that training loses in each second in which a copy runs beside it, for the link, the
            copy engine and memory are shared.
        alone: the part of an iteration's time that the stage of a lost rank takes to replay it alone, from
            boundary logs; 0: all ranks go back together. Partial snapshots know no boundary logs.

    Raises:
        ValueError: one of them is not above 0; the last four may be 0.
    """

    iteration_s: float
    mtbf_s: float
    link_Bps: float
    network_Bps: float
    replicas: int = 1
    restart_s: float = 3.0
    drag: float = 0.0
    verify_iterations: int = 0
    alone: float = 0.0

    def __post_init__(self) -> None:
        for name in ("iteration_s", "mtbf_s", "link_Bps", "network_Bps", "replicas"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value:g}; it must be above 0")
        for name in ("restart_s", "drag", "alone"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value:g}; it must be 0 or more")


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy with its window, or for dense and partial snapshots with their interval."""

    policy: Literal["sliding", "aligned", "dense", "partial"]
    window: int = 1
    every: int = 1

    def __str__(self) -> str:
        if self.policy == "dense":
            return f"dense, every {self.every}"
        return f"{self.policy}, W={self.window}" + (f", every {self.every}" if self.every > 1 else "")


@dataclass(frozen=True, slots=True)
class PolicyOutlook:
    """The costs of a choice, for the rank with the most state.

    Attributes:
        snapshot_bytes: of the largest snapshot, and ``mean_bytes`` of an iteration.
        stall_s: of an iteration, on average.
        lag_s: until a snapshot has reached the peer.
        lost_s, load_s, replay_s: of a failure, on average; see the module.
        memory_bytes: on the rank's node, with the replicas that it keeps for others.
        replication_Bps: sent to peers.
        behind: peers cannot keep up: snapshots come faster than they are sent.
        ettr: the part of the time that counts.
        lost_share: of partial snapshots: of all experts' updates, those that failures lose (the PLT).
        localized: only the stage of the lost rank goes back.
    """

    choice: Choice
    snapshot_bytes: int
    mean_bytes: float
    stall_s: float
    lag_s: float
    lost_s: float
    load_s: float
    replay_s: float
    restart_s: float
    memory_bytes: int
    replication_Bps: float
    behind: bool
    ettr: float
    lost_share: float = 0.0
    localized: bool = False

    @property
    def recovery_s(self) -> float:
        """What a failure costs on average."""
        return self.lost_s + self.restart_s + self.load_s + self.replay_s


def ettr(iteration_s: float, stall_s: float, recovery_s: float, mtbf_s: float) -> float:
    """The part of the time that is spent on iterations that count."""
    return 1 / (1 + stall_s / iteration_s) / (1 + recovery_s / mtbf_s)


def window_outlook(
    rank: RankShape, conditions: Conditions, policy: Literal["sliding", "aligned"], window: int
) -> PolicyOutlook:
    """The costs of a window: a snapshot every iteration, and all state in ``window`` of them."""
    aligned = policy == "aligned"
    planner = plan_aligned if aligned else plan_schedule
    order = order_operators(rank.operators, [0.0] * len(rank.operators), dense_last=aligned)
    schedule = planner(rank.operators, budget_bytes=None, order=order, window=window)
    window = schedule.window
    # From one snapshot earlier, if there is one that leads to the first.
    more = int(not aligned and conditions.verify_iterations >= 1)
    replayed = window - 1 + more
    return _outlook(
        Choice(policy, window),
        schedule.phase_bytes,
        conditions,
        lost_iterations=window / 2 if aligned else 0.5,
        load_bytes=sum(schedule.phase_bytes) + more * schedule.peak_bytes,
        replay_s=replayed * conditions.iteration_s * replay_share(schedule, rank.compute, replayed),
        slots=policy_for(schedule).num_slots,
    )


def partial_outlook(rank: RankShape, conditions: Conditions, window: int, every: int = 1) -> PolicyOutlook:
    """The costs of partial snapshots: each expert in one of ``window``, and everything else in each.

    A failure loses ``every * (window - 1) / 2`` iterations of all experts' updates, if tokens are even.

    Raises:
        ValueError: the rank has no experts.
    """
    experts = sum(op.anchor_bytes for op in rank.operators if op.kind is OperatorKind.EXPERT)
    if not experts:
        raise ValueError("partial snapshots leave experts out, and this rank has none")
    taken = rank.dense_bytes - experts + math.ceil(experts / window)
    found = _outlook(
        Choice("partial", window, every),
        (taken, *[0] * (every - 1)),
        conditions,
        lost_iterations=every / 2,
        load_bytes=rank.dense_bytes,
        replay_s=0.0,
        slots=window + 2,
    )
    return at_mtbf(found, conditions.iteration_s, conditions.mtbf_s)


def at_mtbf(outlook: PolicyOutlook, iteration_s: float, mtbf_s: float) -> PolicyOutlook:
    """The same choice where failures come more or less often."""
    choice, lost_s = outlook.choice, 0.0
    if choice.policy == "partial":
        lost_s = choice.every * (choice.window - 1) / 2 * iteration_s
    return replace(
        outlook,
        ettr=ettr(iteration_s, outlook.stall_s, outlook.recovery_s, mtbf_s),
        lost_share=lost_s / (mtbf_s + lost_s),
    )


def dense_outlook(rank: RankShape, conditions: Conditions, every: int) -> PolicyOutlook:
    """The costs of a snapshot of all state every few iterations."""
    more = int(every <= conditions.verify_iterations)
    return _outlook(
        Choice("dense", 1, every),
        (rank.dense_bytes, *[0] * (every - 1)),
        conditions,
        lost_iterations=every / 2,
        load_bytes=(1 + more) * rank.dense_bytes,
        replay_s=more * every * conditions.iteration_s,
        slots=3,
    )


def replay_share(schedule: Schedule, compute: Sequence[float], replayed: int) -> float:
    """The compute of a replayed iteration, as a part of a full one: the mean over a replay, and for sliding
    windows over the phases at which a failure may come.

    Args:
        compute: of each operator.
        replayed: the iterations of a replay, at most W.
    """
    window, total = schedule.window, sum(compute)
    if window == 1 or not total or not replayed:
        return 1.0
    shares = [sum(compute[i] for i in phase) / total for phase in schedule.phases]
    begins = (0,) if schedule.policy is PolicyKind.ALIGNED else range(window)
    active = [
        thawed
        for first in begins
        for thawed in itertools.accumulate(shares[(first + n) % window] for n in range(replayed))
    ]
    return 1.0 - _WEIGHT_GRADIENTS * (1.0 - sum(active) / len(active))


def _outlook(
    choice: Choice,
    snapshots: Sequence[int],
    conditions: Conditions,
    *,
    lost_iterations: float,
    load_bytes: int,
    replay_s: float,
    slots: int,
) -> PolicyOutlook:
    """``snapshots``: the bytes of each iteration's, over one round."""
    iteration_s, count = conditions.iteration_s, len(snapshots)
    hidden_s = _HIDDEN * iteration_s
    copies = [size / conditions.link_Bps for size in snapshots if size]
    stalls = [_TOP_S + max(0.0, s - hidden_s) + conditions.drag * min(s, hidden_s) for s in copies]
    stall_s = sum(stalls) / count
    peak, mean = max(snapshots), sum(snapshots) / count
    lag_s = peak * conditions.replicas / conditions.network_Bps
    load_s = load_bytes / conditions.network_Bps
    lost_s = lost_iterations * iteration_s + lag_s
    localized = conditions.alone > 0 and choice.policy != "partial"
    if localized:
        cut_off_s = iteration_s / 2
        replay_s = conditions.alone * (replay_s + lost_s - cut_off_s)
        lost_s = cut_off_s
    recovery_s = lost_s + conditions.restart_s + load_s + replay_s
    sent = mean * conditions.replicas / iteration_s
    return PolicyOutlook(
        choice=choice,
        snapshot_bytes=peak,
        mean_bytes=mean,
        stall_s=stall_s,
        lag_s=lag_s,
        lost_s=lost_s,
        load_s=load_s,
        replay_s=replay_s,
        restart_s=conditions.restart_s,
        memory_bytes=slots * peak * (1 + conditions.replicas),
        replication_Bps=sent,
        behind=sent > conditions.network_Bps,
        ettr=ettr(iteration_s, stall_s, recovery_s, conditions.mtbf_s),
        localized=localized,
    )
