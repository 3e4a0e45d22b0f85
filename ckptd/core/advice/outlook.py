"""What a policy would cost a job: stalls, traffic, memory, what a failure costs, and what is left. Pure.

With an iteration of T seconds, a mean time M between failures of the job, stalls of s seconds in an
iteration, and R seconds that a failure costs on average, of the time

    ETTR = 1 / (1 + s / T) * 1 / (1 + R / M)

is spent on iterations that count (MoEvement, NSDI '26, 2.4 and appendix C). R is the sum of

    lost      iterations that no restorable snapshot has: half of an iteration (sliding), of a window
              (aligned), of an interval (dense, partial); and what had not reached the host and the peer yet
    restart   until all ranks run again
    load      of the rank that was lost, over the network
    replay    W - 1 iterations of a window of W, and those that a resume repeats only to compare: one with
              sliding windows, an interval with dense snapshots. A frozen operator computes no gradients of
              its weights, which are a third of its work.

Where a pipeline keeps boundary logs (localized recovery), only the stage of the lost rank goes back, and
its replay has no bubbles: of m micro-batches over s stages, an iteration takes it m / (m + s - 1) of its
time. The others lose the iteration that was cut off.

The paper takes 3/2 W iterations for all of it (aligned), and half of an interval (dense); its printed tables
contain restarts, which it does not tell.

A failure that takes a state with all of its copies in memory sends the job back to storage. If such *losses*
come every L seconds beside the other failures, and one costs S seconds, the second factor is

    1 / (1 + R / M + S / L)

S has the same parts. Lost is half of the interval of durable checkpoints, and an upload; all state is loaded
from storage; all ranks replay. Uploads run beside training, and nothing is taken for them but the memory of
one more window. They bound the interval: a quarter more than an upload lies between two checkpoints
(`ckptd.core.persister.Cadence`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ckptd.core.advice.job_shape import RankShape
from ckptd.core.partial_experts import LOST_TOKENS_LIMIT, iterations_at_risk
from ckptd.core.persister import UPLOAD_HEADROOM
from ckptd.core.schedule import order_operators, plan_aligned, plan_schedule
from ckptd.core.snapshot_policy import OperatorKind, PolicyKind, Schedule, policy_for

EQUAL_ETTR = 1e-4
"""Two choices that differ by less are the same to a user: the simpler one is taken."""
LOSSY = ("partial", "selected")
"""The policies that lose updates of experts."""
HIDDEN = 0.9
"""Of an iteration, before the optimizer's step: until then a snapshot's copy is hidden."""
_WEIGHT_GRADIENTS = 1 / 3
# Between two durable checkpoints: rare losses would allow months.
_LONGEST_S = 86400.0


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under which a job runs.

    Args:
        iteration_s: without snapshots.
        mtbf_s: between two failures of the job, without losses.
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
        storage_Bps: bytes a second of a rank to storage, and back; 0: there is none.
        loss_mtbf_s: between two losses: failures that take a state with all of its copies in memory.
        skew: of the tokens of a layer's experts (`popularity`): 0 if all have as many, below 1.
        top_s: that training loses by each snapshot, however large: it is planned, a slot is claimed, samples
            are read and compared.

    Raises:
        ValueError: one of them is not above 0; all from ``restart_s`` on may be 0. Or only one of storage's
            rate and of losses is given, or the skew is 1 or more.
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
    storage_Bps: float = 0.0
    loss_mtbf_s: float = math.inf
    skew: float = 0.0
    top_s: float = 2e-4

    def __post_init__(self) -> None:
        for name in ("iteration_s", "mtbf_s", "link_Bps", "network_Bps", "replicas"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value:g}; it must be above 0")
        for name in ("restart_s", "drag", "alone", "storage_Bps", "skew", "top_s"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value:g}; it must be 0 or more")
        if self.skew >= 1:
            raise ValueError(f"skew is {self.skew:g}; it must be below 1")
        if not self.loss_mtbf_s > 0:
            raise ValueError(f"loss_mtbf_s is {self.loss_mtbf_s:g}; it must be above 0")
        if (self.storage_Bps > 0) != math.isfinite(self.loss_mtbf_s):
            raise ValueError(
                f"storage_Bps is {self.storage_Bps:g} and loss_mtbf_s is {self.loss_mtbf_s:g}: what storage "
                "is good for follows from both; pass both, or none"
            )


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy with its window, or for dense and partial snapshots with their interval.

    Attributes:
        parts: of partial snapshots: the parts of the experts, of ``window``, that a durable checkpoint stores
            (K_persist); 0: all.
        replicas: copies of each snapshot on other nodes.
    """

    policy: Literal["sliding", "aligned", "dense", "partial", "selected"]
    window: int = 1
    every: int = 1
    parts: int = 0
    replicas: int = 1

    @property
    def replicas_text(self) -> str:
        """The number of replicas in words."""
        return f"{self.replicas} replica{'s' * (self.replicas != 1)}"

    def __str__(self) -> str:
        if self.policy == "dense":
            return f"dense, every {self.every}"
        every = f", every {self.every}" if self.every > 1 else ""
        parts = f", stores {self.parts} of {self.window} parts" if self.parts else ""
        return f"{self.policy}, W={self.window}{every}{parts}"


@dataclass(frozen=True, slots=True)
class StorageOutlook:
    """Durable checkpoints of a choice, and what a failure costs that takes all copies in memory.

    Attributes:
        every: iterations between two checkpoints; at least ``shortest``, which uploads allow. Both are
            multiples of ``multiple``: of the interval, of an aligned window, or where a checkpoint stores
            some of the experts, of the window, so that all end in one phase.
        upload_bytes: that the rank sends with each, which takes ``upload_s``.
        lost_s, load_s, replay_s: of such a failure, on average; see the module.
        lost_iterations: of all experts' updates, which it loses of partial snapshots, if tokens are even.
    """

    every: int
    shortest: int
    multiple: int
    upload_bytes: int
    upload_s: float
    lost_s: float
    load_s: float
    replay_s: float
    lost_iterations: float = 0.0


@dataclass(frozen=True, slots=True)
class PolicyOutlook:
    """The costs of a choice, for the rank with the most state.

    Attributes:
        snapshot_bytes: of the largest snapshot, and ``mean_bytes`` of an iteration.
        stall_s: of an iteration, on average.
        lag_s: until a snapshot has reached the host, and from there the peer.
        lost_s, load_s, replay_s: of a failure, on average; see the module.
        memory_bytes: on the rank's node, with the replicas that it keeps for others.
        replication_Bps: sent to peers.
        behind: peers cannot keep up: snapshots come faster than they are sent.
        ettr: the part of the time that counts.
        older_iterations: of partial snapshots: the iterations of all experts' updates that a failure loses.
        lost_share: of partial snapshots: of all experts' updates, those that failures lose (the PLT).
        localized: only the stage of the lost rank goes back.
        storage: None if the conditions have none.
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
    older_iterations: float = 0.0
    lost_share: float = 0.0
    localized: bool = False
    storage: StorageOutlook | None = None

    @property
    def recovery_s(self) -> float:
        """What a failure costs on average."""
        return self.lost_s + self.restart_s + self.load_s + self.replay_s

    @property
    def loss_s(self) -> float:
        """What a failure costs on average that takes all copies in memory; 0 without storage."""
        found = self.storage
        return 0.0 if found is None else found.lost_s + self.restart_s + found.load_s + found.replay_s


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

    def replay_s(replayed: int) -> float:
        return replayed * conditions.iteration_s * replay_share(schedule, rank.compute, replayed)

    return _outlook(
        Choice(policy, window),
        schedule.phase_bytes,
        conditions,
        lost_iterations=window / 2 if aligned else 0.5,
        load_bytes=sum(schedule.phase_bytes) + more * schedule.peak_bytes,
        replay_s=replay_s(window - 1 + more),
        slots=policy_for(schedule).num_slots,
        durable=_Durable(sum(schedule.phase_bytes), sum(schedule.phase_bytes), replay_s(window - 1)),
    )


def partial_outlook(
    rank: RankShape, conditions: Conditions, window: int, every: int = 1, parts: int = 0
) -> PolicyOutlook:
    """The costs of partial snapshots: each expert in one of ``window``, and everything else in each.

    A failure loses ``every * (window - 1) / 2`` iterations of all experts' updates, on average over the
    experts' turns. If a durable checkpoint stores p of the W parts of the experts every n iterations, a
    recovery from storage loses ``n * (W / p - 1) / 2`` more: exactly if p divides W and W divides n, and less
    if W is 2 and n such a window (`choose_durable`).

    Args:
        parts: that a durable checkpoint stores; 0: all.
    Raises:
        ValueError: the rank has no experts, or the window has not so many parts.
    """
    if not 0 <= parts <= window:
        raise ValueError(f"{parts} of {window} parts of the experts; pass at most as many")
    choice = Choice("partial", window, every, parts % window)
    return _partial_outlook(rank, conditions, choice, older=(window - 1) / 2, slots=window + 2)


def selected_outlook(rank: RankShape, conditions: Conditions, window: int, every: int = 1) -> PolicyOutlook:
    """The costs of partial snapshots of as many experts as `partial_outlook`'s, those that have the most
    tokens at risk. A failure loses fewer updates the more the popularity of experts differs; the ring holds
    two windows. If several ranks hold the same experts, each selects among those that it owns, and captures
    them whole: snapshots have one at least, and its experts may all have been in one before a window ends.

    Raises:
        ValueError: the rank has no experts.
    """
    here = [op for op in rank.operators if op.kind is OperatorKind.EXPERT]
    experts = rank.num_experts or max(Counter(op.layer for op in here).values(), default=0)
    until_all, part_bytes, ranks = window, 0, rank.expert_ranks
    if here and ranks > 1:
        at_once = math.ceil(math.ceil(len(here) / window) / ranks)
        part_bytes = at_once * ranks * max(op.anchor_bytes for op in here)
        until_all = min(window, math.ceil(math.ceil(len(here) / ranks) / at_once))
    older = iterations_at_risk(experts, conditions.skew, until_all) if experts else 0.0
    choice = Choice("selected", window, every)
    return _partial_outlook(
        rank, conditions, choice, older=older, slots=2 * window + 2, part_bytes=part_bytes
    )


def _partial_outlook(
    rank: RankShape,
    conditions: Conditions,
    choice: Choice,
    *,
    older: float,
    slots: int,
    part_bytes: int = 0,
) -> PolicyOutlook:
    """``older``: the snapshots since an expert was in one, on average over the tokens. ``part_bytes``: of the
    experts in a snapshot, if they are more than those of a window in equal parts.
    """
    experts = sum(op.anchor_bytes for op in rank.operators if op.kind is OperatorKind.EXPERT)
    if not experts:
        raise ValueError("partial snapshots leave experts out, and this rank has none")
    dense_bytes, even_bytes = rank.dense_bytes - experts, math.ceil(experts / choice.window)
    part_bytes = max(part_bytes, even_bytes)
    stored_bytes = dense_bytes + part_bytes * choice.parts if choice.parts else rank.dense_bytes
    found = _outlook(
        choice,
        (dense_bytes + part_bytes, *[0] * (choice.every - 1)),
        conditions,
        lost_iterations=choice.every / 2,
        load_bytes=rank.dense_bytes,
        replay_s=0.0,
        slots=slots,
        durable=_Durable(stored_bytes, rank.dense_bytes, 0.0),
    )
    return at_mtbf(replace(found, older_iterations=choice.every * older), conditions)


def at_mtbf(outlook: PolicyOutlook, conditions: Conditions) -> PolicyOutlook:
    """The same choice where failures come more or less often.

    Durable checkpoints are as rare as costs less than `EQUAL_ETTR`, but come once a day; if that loses too
    many updates, they come as often as uploads allow.

    Args:
        conditions: as of the outlook, but for their MTBF.
    """
    storage = outlook.storage
    if storage is None:
        return _rated(outlook, conditions)
    often = persisting(outlook, conditions, storage.shortest)
    # What an iteration between two checkpoints costs, as a part of 1 / ETTR.
    step_s = conditions.iteration_s + outlook.stall_s
    each = step_s / 2 / conditions.loss_mtbf_s * step_s / conditions.iteration_s
    more = (1 / max(often.ettr - EQUAL_ETTR, EQUAL_ETTR) - 1 / often.ettr) / each
    more = max(0, int(min(more, _LONGEST_S / step_s - storage.shortest)))
    rare = persisting(outlook, conditions, storage.shortest + more // storage.multiple * storage.multiple)
    return rare if rare.lost_share <= max(often.lost_share, LOST_TOKENS_LIMIT) else often


def persisting(outlook: PolicyOutlook, conditions: Conditions, every: int) -> PolicyOutlook:
    """The same choice, under the same conditions, with a durable checkpoint every so many iterations.

    Raises:
        ValueError: there is no storage, or uploads take longer.
    """
    storage, choice = outlook.storage, outlook.choice
    if storage is None or every < storage.shortest:
        raise ValueError(f"a durable checkpoint every {every} iterations, with {storage}")
    lost_iterations = outlook.older_iterations
    if choice.parts:
        lost_iterations += every * (choice.window / choice.parts - 1) / 2
    lost_s = every / 2 * (conditions.iteration_s + outlook.stall_s) + storage.upload_s
    found = replace(storage, every=every, lost_s=lost_s, lost_iterations=lost_iterations)
    return _rated(replace(outlook, storage=found), conditions)


def _rated(outlook: PolicyOutlook, conditions: Conditions) -> PolicyOutlook:
    iteration_s, mtbf_s, loss_mtbf_s = conditions.iteration_s, conditions.mtbf_s, conditions.loss_mtbf_s
    per_failure_s = outlook.recovery_s + outlook.loss_s * mtbf_s / loss_mtbf_s
    lost = outlook.older_iterations / mtbf_s
    lost += outlook.storage.lost_iterations / loss_mtbf_s if outlook.storage else 0.0
    lost_s = lost * iteration_s
    return replace(
        outlook,
        ettr=ettr(iteration_s, outlook.stall_s, per_failure_s, mtbf_s),
        lost_share=lost_s / (1 + lost_s),
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
        durable=_Durable(rank.dense_bytes, rank.dense_bytes, 0.0),
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


@dataclass(frozen=True, slots=True)
class _Durable:
    """Of durable checkpoints: the bytes of an upload and of a recovery, and how long that replays."""

    upload_bytes: int
    load_bytes: int
    replay_s: float


def _outlook(
    choice: Choice,
    snapshots: Sequence[int],
    conditions: Conditions,
    *,
    lost_iterations: float,
    load_bytes: int,
    replay_s: float,
    slots: int,
    durable: _Durable,
) -> PolicyOutlook:
    """``snapshots``: the bytes of each iteration's, over one round."""
    iteration_s, count = conditions.iteration_s, len(snapshots)
    hidden_s = HIDDEN * iteration_s
    copies = [size / conditions.link_Bps for size in snapshots if size]
    stalls = [conditions.top_s + max(0.0, s - hidden_s) + conditions.drag * min(s, hidden_s) for s in copies]
    stall_s = sum(stalls) / count
    peak, mean = max(snapshots), sum(snapshots) / count
    lag_s = peak / conditions.link_Bps + peak * conditions.replicas / conditions.network_Bps
    load_s = load_bytes / conditions.network_Bps
    lost_s = lost_iterations * iteration_s + lag_s
    localized = conditions.alone > 0 and choice.policy not in LOSSY
    if localized:
        cut_off_s = iteration_s / 2
        replay_s = conditions.alone * (replay_s + lost_s - cut_off_s)
        lost_s = cut_off_s
    storage = _storage(choice, durable, conditions, iteration_s + stall_s)
    # A rank with a store keeps one more window on its node, until it is stored.
    own_slots = slots + (choice.window if storage else 0)
    sent = mean * conditions.replicas / iteration_s
    found = PolicyOutlook(
        choice=replace(choice, replicas=conditions.replicas),
        snapshot_bytes=peak,
        mean_bytes=mean,
        stall_s=stall_s,
        lag_s=lag_s,
        lost_s=lost_s,
        load_s=load_s,
        replay_s=replay_s,
        restart_s=conditions.restart_s,
        memory_bytes=(own_slots + slots * conditions.replicas) * peak,
        replication_Bps=sent,
        behind=sent > conditions.network_Bps,
        ettr=0.0,
        localized=localized,
        storage=storage,
    )
    return at_mtbf(found, conditions)


def _storage(
    choice: Choice, durable: _Durable, conditions: Conditions, step_s: float
) -> StorageOutlook | None:
    """With the shortest interval; what that costs is not known yet. None without storage."""
    if not conditions.storage_Bps:
        return None
    multiple = choice.window if choice.policy == "aligned" else choice.every
    multiple *= choice.window if choice.parts else 1
    upload_s = durable.upload_bytes / conditions.storage_Bps
    shortest = multiple * max(1, math.ceil(UPLOAD_HEADROOM * upload_s / (multiple * step_s)))
    load_s = durable.load_bytes / conditions.storage_Bps
    return StorageOutlook(
        shortest, shortest, multiple, durable.upload_bytes, upload_s, 0.0, load_s, durable.replay_s
    )
