"""The answers of `ckptctl elastic`: plans, their rating, the transfers that they need, and the
result of a loss of nodes.

Pure functions of the input (`ckptd.ctl.elastic.elastic_input`). A running job uses the same
planners.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckptd.core.elastic.allocation import (
    allocate,
    split_over_ranks,
    straggler_by_layer,
    straggler_factor,
)
from ckptd.core.elastic.elastic_types import ExpertPlacement
from ckptd.core.elastic.expert_placement import place
from ckptd.core.elastic.expert_transfers import SNAPSHOT, TransferPlan, plan_transfers
from ckptd.core.elastic.mapping import map_nodes
from ckptd.core.elastic.survival import Chance, recovery_probability
from ckptd.core.recovery.whatif import select_nodes
from ckptd.ctl.elastic.elastic_input import InputProblem, Situation
from ckptd.errors import ElasticError

__all__ = [
    "ExpertFetch",
    "LossReport",
    "NextTime",
    "Outlook",
    "PlacementMove",
    "Planned",
    "as_planned",
    "lose",
    "lost_nodes",
    "next_time",
    "outlook",
    "plan",
]

_ALL_UP_TO = 8  # up to this many lost units every number is shown; above, doublings


@dataclass(frozen=True, slots=True, eq=False)
class Outlook:
    """The rating of a placement under the load.

    Args:
        recovery: pairs of a number of lost nodes and the probability that every expert survives;
            ends with the first probability of 0.
        domain_recovery: the same for lost domains; empty if every node is a domain.
        straggler, straggler_by_layer: tokens of the busiest rank over the mean; of all layers, and of each.
        tokens_LR: predicted tokens of every rank, in the order of the nodes.
    """

    placement: ExpertPlacement
    recovery: tuple[tuple[int, Chance], ...]
    domain_recovery: tuple[tuple[int, Chance], ...]
    straggler: float
    straggler_by_layer: tuple[float, ...]
    tokens_LR: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExpertFetch:
    """The experts that one node fetches from another node, or from snapshots (``source`` is empty);
    ``bytes`` is -1 if the sizes are not known.
    """

    receiver: str
    source: str
    replicas: int
    bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class PlacementMove:
    """The transfers from the present placement to a planned one.

    Args:
        replicas: number of replicas that nodes fetch.
        from_snapshots: number of these that no node holds any more.
        total_bytes, largest_bytes: size of all fetches, and of the node that fetches most; -1: the
            sizes of experts are not known.
        snapshot_bytes: the part of the total that comes from snapshots; -1 likewise.
        seconds: time until the last node has all its experts; -1: the speeds of nodes are not known.
        lost: layer and expert of the replicas that no node holds.
        fetches: the transfers by receiver and source.
    """

    replicas: int
    from_snapshots: int
    total_bytes: int
    largest_bytes: int
    snapshot_bytes: int
    seconds: float
    lost: tuple[tuple[int, int], ...]
    fetches: tuple[ExpertFetch, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A new placement for a situation.

    Args:
        guarantee: the guarantee of `allocate`, in a sentence.
        move: the transfers; None: the input does not say which experts the nodes hold.
    """

    situation: Situation
    method: str
    guarantee: str
    outlook: Outlook
    move: PlacementMove | None


@dataclass(frozen=True, slots=True, eq=False)
class LossReport:
    """The result of a loss of nodes.

    Args:
        nodes: the lost nodes.
        gone: layer and number of the experts that lose every replica.
        planned: the placement on the remaining nodes, or the reason why none exists.
    """

    nodes: tuple[str, ...]
    gone: tuple[tuple[int, int], ...]
    planned: Planned | str


@dataclass(frozen=True, slots=True)
class NextTime:
    """Whether a rebalance now would pay, and the step of the next check.

    Args:
        check_step: the next step at which the job checks its load; -1: the present step is not given.
        due_step: the step of the next rebalance that needs no minimum gain; -1: never.
        straggler_now, straggler_after: straggler factor without and with the rebalance.
        cost_s: time that the rebalance takes; -1: not known.
        gain_s: time that it saves within the horizon; -1: the part of the step time that grows with
            tokens was not measured.
        worth_from_s: the smallest such part with which it pays; -1: none, or the cost is not known.
        pays: None: not known.
    """

    check_step: int
    due_step: int
    straggler_now: float
    straggler_after: float
    cost_s: float
    gain_s: float
    worth_from_s: float
    pays: bool | None


def outlook(situation: Situation, placement: ExpertPlacement) -> Outlook:
    """Rate a placement on these nodes under this load.

    Raises:
        InputProblem: an expert has no replica, or a node has more replicas than slots.
    """
    cluster, loads_LE = situation.cluster, situation.loads_LE
    try:
        placement.check(cluster)
    except ElasticError as error:
        raise InputProblem(f"the experts that the nodes hold are not a valid placement: {error}") from error
    replicas_LRE = split_over_ranks(placement, cluster, loads_LE)
    each_LE = loads_LE / placement.replicas
    several = 1 < cluster.num_domains < cluster.num_nodes
    return Outlook(
        placement,
        _chances(placement, cluster.num_nodes, None),
        _chances(placement, cluster.num_domains, cluster.domain_ids) if several else (),
        straggler_factor(placement, loads_LE, cluster),
        straggler_by_layer(placement, loads_LE, cluster),
        np.asarray(np.einsum("lre,le->lr", replicas_LRE, each_LE)),
    )


def _chances(
    placement: ExpertPlacement, num_units: int, units: NDArray[np.int64] | None
) -> tuple[tuple[int, Chance], ...]:
    out = []
    for lost in _numbers(num_units):
        chance = recovery_probability(placement, lost, units=units)
        out.append((lost, chance))
        if not chance.ways:
            break
    return tuple(out)


def _numbers(num_units: int) -> list[int]:
    few = list(range(1, min(num_units - 1, _ALL_UP_TO) + 1))
    more = [2 * _ALL_UP_TO << power for power in range(20)]
    return few + [number for number in more if number < num_units]


def plan(situation: Situation) -> Planned:
    """Place the experts on the nodes, close to the present placement.

    Raises:
        ElasticError: there are fewer slots than experts.
    """
    cluster, loads_LE = situation.cluster, situation.loads_LE
    allocation = allocate(loads_LE, cluster, situation.report.threshold)
    found = place(allocation, loads_LE, cluster, max_straggler=situation.max_straggler)
    placement, move = found.placement, None
    if situation.held is not None:
        sizes_LE = _sizes(situation)
        placement = map_nodes(placement, situation.held, cluster, sizes_LE).apply(placement)
        move = _move(situation, situation.held, placement)
    worth = outlook(situation, placement)
    return Planned(situation, found.method, allocation.reason, worth, move)


def _sizes(situation: Situation) -> NDArray[np.int64]:
    known = situation.expert_bytes_LE
    return np.ones_like(situation.loads_LE) if known is None else known


def _move(situation: Situation, held: ExpertPlacement, wanted: ExpertPlacement) -> PlacementMove:
    sized = situation.expert_bytes_LE is not None
    transfers = plan_transfers(
        wanted, held, situation.cluster, _sizes(situation), bytes_per_s=situation.speeds_N
    )
    from_snapshots = transfers.source == SNAPSHOT
    fetched = transfers.received_bytes + transfers.snapshot_bytes
    gone = zip(
        transfers.layer[from_snapshots].tolist(),
        transfers.expert[from_snapshots].tolist(),
        strict=True,
    )
    return PlacementMove(
        replicas=len(transfers.source),
        from_snapshots=int(from_snapshots.sum()),
        total_bytes=int(fetched.sum()) if sized else -1,
        largest_bytes=int(fetched.max()) if sized else -1,
        snapshot_bytes=int(transfers.snapshot_bytes.sum()) if sized else -1,
        seconds=transfers.predicted_s if sized and situation.speeds_N is not None else -1.0,
        lost=tuple(sorted(set(gone))),
        fetches=_fetches(situation.names, transfers, sized=sized),
    )


def _fetches(names: tuple[str, ...], transfers: TransferPlan, *, sized: bool) -> tuple[ExpertFetch, ...]:
    pairs, which, replicas = np.unique(
        np.stack([transfers.receiver, transfers.source], axis=1),
        axis=0,
        return_inverse=True,
        return_counts=True,
    )
    size = np.zeros(len(pairs), dtype=np.int64)
    np.add.at(size, which, transfers.size_bytes)
    rows = zip(pairs.tolist(), replicas.tolist(), size.tolist(), strict=True)
    return tuple(
        ExpertFetch(
            names[receiver],
            "" if source == SNAPSHOT else names[source],
            number,
            total if sized else -1,
        )
        for (receiver, source), number, total in rows
    )


def lost_nodes(situation: Situation, lose: str) -> tuple[str, ...]:
    """The nodes that selectors such as ``node=3,rack=A`` match.

    Raises:
        InputProblem: a selector matches no node, or is malformed.
    """
    labels = {node.name: node.labels for node in situation.report.nodes}
    try:
        return select_nodes(situation.names, labels, lose.split(","))
    except ValueError as error:
        raise InputProblem(str(error)) from error


def as_planned(situation: Situation) -> Situation:
    """The same situation, with the planned placement as the present one; for an input without a placement.

    Raises:
        ElasticError: there are fewer slots than experts.
    """
    return dataclasses.replace(situation, held=plan(situation).outlook.placement)


def lose(situation: Situation, nodes: tuple[str, ...]) -> LossReport:
    """The experts lost with these nodes, and the placement on the remaining ones; needs
    ``situation.held``.
    """
    assert situation.held is not None, "call as_planned() first"
    left = np.array([n for n, name in enumerate(situation.names) if name not in nodes], np.int64)
    missing = situation.held.counts[:, left].sum(axis=1) == 0
    placed = situation.held.replicas > 0
    gone = tuple((int(at[0]), int(at[1])) for at in np.argwhere(missing & placed))
    try:
        return LossReport(nodes, gone, plan(situation.only(left)))
    except (ElasticError, InputProblem) as error:
        return LossReport(nodes, gone, str(error))


def next_time(situation: Situation, now: Outlook, planned: Planned) -> NextTime:
    """Whether the gain of the planned placement exceeds its cost, by the rule of
    `ckptd.core.elastic.rebalance_policy`.
    """
    when, step = situation.report.when, situation.report.step
    assert planned.move is not None, "the situation says which experts the nodes hold"
    cost_s = planned.move.seconds + when.pause_s if planned.move.seconds >= 0 else -1.0
    steps = when.horizon_steps
    if when.remaining_steps >= 0:
        steps = min(steps, when.remaining_steps)
    saved = max(0.0, 1 - planned.outlook.straggler / now.straggler) * steps
    gain_s = when.expert_s * saved if when.expert_s else -1.0
    needed_s = cost_s * (1 + when.margin)
    first = max(when.placed_step, 0)
    checked = first + (max(step - first, 0) // when.check_steps + 1) * when.check_steps
    return NextTime(
        check_step=checked if step >= 0 else -1,
        due_step=first + when.every_steps if when.every_steps else -1,
        straggler_now=now.straggler,
        straggler_after=planned.outlook.straggler,
        cost_s=cost_s,
        gain_s=gain_s,
        worth_from_s=needed_s / saved if saved and cost_s >= 0 else -1.0,
        pays=_pays(gain_s, needed_s, saved),
    )


def _pays(gain_s: float, needed_s: float, saved: float) -> bool | None:
    if not saved:
        return False
    return gain_s > needed_s if gain_s >= 0 and needed_s >= 0 else None
