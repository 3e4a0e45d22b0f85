"""The answers of `ckptctl elastic`: plans, their rating, the transfers that they need, and the
result of a loss of nodes. A running job uses the same planners.

The input is a file, or the report of a running job, checked and converted to arrays (`Situation`). An
error in a file names the place in the file and the values that are allowed there.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.core.elastic.allocation import allocate, split_over_ranks, straggler_by_layer, straggler_factor
from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement, Loads, checked_loads
from ckptd.core.elastic.expert_placement import place
from ckptd.core.elastic.expert_transfers import SNAPSHOT, TransferPlan, plan_transfers
from ckptd.core.elastic.mapping import place_near
from ckptd.core.elastic.survival import Chance, recovery_probability
from ckptd.core.recovery.whatif import select_nodes
from ckptd.ctl.command import CommandError
from ckptd.errors import ElasticError
from ckptd.transport.messages import Elastic, ElasticNode

Ints = NDArray[np.int64]

_ALL_UP_TO = 8  # up to this many lost units every number is shown; above, doublings

# -- the input ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Situation:
    """An `Elastic` as arrays.

    Args:
        loads_LE: tokens of the newest period.
        report: the file or the message from which the arrays come.
        held: the experts that the nodes hold; None: not given.
        expert_bytes_LE: the size of one replica of each expert; None: not given.
        speeds_N: bytes per second of every node; None: not given.
        max_straggler: None: no bound.
    """

    report: Elastic
    cluster: Cluster
    loads_LE: Loads
    held: ExpertPlacement | None
    expert_bytes_LE: Ints | None
    speeds_N: Ints | None
    max_straggler: float | None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the nodes."""
        return tuple(node.name for node in self.report.nodes)

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers; "layer 0" and so on if the input gives none."""
        return self.report.layers or tuple(f"layer {number}" for number in range(len(self.loads_LE)))

    def only(self, nodes: Ints) -> Situation:
        """The same situation with only these nodes, given by their numbers.

        Raises:
            CommandError: ``nodes`` is empty.
        """
        if not len(nodes):
            raise CommandError("no node is left on which experts could be placed")
        report = msgspec.structs.replace(
            self.report, nodes=tuple(self.report.nodes[n] for n in nodes.tolist())
        )
        return dataclasses.replace(
            self,
            report=report,
            cluster=_cluster(report),
            held=None if self.held is None else ExpertPlacement(self.held.counts[:, nodes]),
            speeds_N=None if self.speeds_N is None else self.speeds_N[nodes],
        )


def read_file(path: str) -> Elastic:
    """The `Elastic` in a JSON file. The output of `ckptctl elastic show --json` for one run is
    accepted, too.

    ``nodes`` may be a number: that many nodes, named by their numbers, with ``slots`` slots and
    ``ranks`` ranks each. ``expert_bytes`` may be one number for all experts, ``max_straggler``
    null.

    Raises:
        CommandError: the file cannot be read, is not JSON, or a value is not allowed.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} cannot be read: {error}") from error
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path} is not JSON: {error}") from error
    try:
        return msgspec.convert(_spelled_out(found), Elastic, strict=True)
    except (msgspec.ValidationError, CommandError) as error:
        raise CommandError(f"{path}: {error}") from error


def _spelled_out(found: Any) -> dict[str, Any]:
    """Replace the abbreviations that a file may contain."""
    if isinstance(found, dict) and "runs" in found:
        found = _of_one_run(found["runs"])
    if not isinstance(found, dict):
        raise CommandError(
            'the file must contain a JSON object, such as {"loads": [[5, 3]], "nodes": 2, "slots": 2}'
        )
    out = dict(found)
    for key in ("loads", "nodes"):
        if key not in out:
            raise CommandError(
                f"{key!r} is missing: pass the tokens of every expert of each layer (loads) and the nodes"
            )
    for name in ("loads", "expert_bytes"):
        _refuse_floats(out.get(name), name)
    slots, ranks = out.pop("slots", None), out.pop("ranks", 1)
    nodes = out["nodes"]
    if isinstance(nodes, int) and not isinstance(nodes, bool):
        if not 1 <= nodes <= 1 << 16 or slots is None:
            raise CommandError(
                f'"nodes": {nodes} must be a number from 1 to 65536, and needs "slots" in the same object'
            )
        nodes = [{"name": str(number)} for number in range(nodes)]
    if isinstance(nodes, list):
        every = {"ranks": ranks} | ({} if slots is None else {"slots": slots})
        out["nodes"] = [every | node if isinstance(node, dict) else node for node in nodes]
    if isinstance(out.get("expert_bytes"), int):
        out["expert_bytes"] = [[out["expert_bytes"]]]
    if out.get("max_straggler", 0) is None:
        out["max_straggler"] = 0.0
    return out


def _of_one_run(runs: Any) -> Any:
    if not isinstance(runs, list) or len(runs) != 1 or not isinstance(runs[0], dict):
        raise CommandError("the file must describe exactly one run: select it with `show --job … --run …`")
    return runs[0].get("told")


def _refuse_floats(value: Any, name: str) -> None:
    """Raise an error with the place; the decoder's own message for a NaN does not help."""
    for where, number in _numbers(value, name):
        if isinstance(number, float) and not math.isfinite(number):
            raise CommandError(f"{where} is {number}: tokens and bytes must be finite numbers")
        if isinstance(number, float):
            raise CommandError(f"{where} is {number}: tokens and bytes must be whole numbers; round them")
        if number < 0:
            raise CommandError(f"{where} is {number}: tokens and bytes cannot be negative")


def _numbers(value: Any, name: str) -> list[tuple[str, int | float]]:
    if isinstance(value, list):
        inner = (_numbers(one, f"{name}[{index}]") for index, one in enumerate(value))
        return [found for part in inner for found in part]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [(name, value)]
    return []


def situation(report: Elastic) -> Situation:
    """Check a report and convert it to arrays.

    Raises:
        CommandError: two values contradict each other; the message names both.
    """
    loads_LE = _rectangle(report.loads, "loads")
    names = [node.name for node in report.nodes]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise CommandError(f"two nodes have the name {twice}: names of nodes must be unique")
    if report.layers and len(report.layers) != len(loads_LE):
        raise CommandError(
            f"{len(report.layers)} names of layers for {len(loads_LE)} rows of loads: pass one "
            "name for each row"
        )
    if report.max_straggler and report.max_straggler < 1:
        raise CommandError(
            f"max_straggler is {report.max_straggler}: it must be at least 1 (1.1 is usual), or "
            "null for no bound"
        )
    for number, period in enumerate(report.history):
        if _rectangle(period, f"history[{number}]").shape != loads_LE.shape:
            raise CommandError(f"history[{number}] must have the shape of loads")
    known = all(node.bytes_per_s for node in report.nodes)
    return Situation(
        report,
        _cluster(report),
        loads_LE,
        _held(report, loads_LE.shape),
        _expert_bytes(report, loads_LE.shape),
        np.array([node.bytes_per_s for node in report.nodes]) if known else None,
        report.max_straggler or None,
    )


def _rectangle(rows: tuple[tuple[int, ...], ...], name: str) -> Loads:
    if not rows or not rows[0]:
        raise CommandError(f"{name} is empty: it needs a row for each layer, with a number for each expert")
    for number, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise CommandError(
                f"{name}[{number}] has {len(row)} experts, {name}[0] has {len(rows[0])}: all "
                "layers must have the same number"
            )
    return checked_loads(np.array(rows, dtype=np.int64))


def _cluster(report: Elastic) -> Cluster:
    domains = tuple(_domain(node, report.domain) for node in report.nodes) if report.domain else ()
    slots = np.array([node.slots for node in report.nodes], dtype=np.int64)
    return Cluster(slots, domains, tuple(node.ranks for node in report.nodes))


def _domain(node: ElasticNode, label: str) -> str:
    if label not in node.labels:
        has = ", ".join(sorted(node.labels)) or "none"
        raise CommandError(
            f'"domain" is {label!r}, but node {node.name} has no such label (its labels: {has})'
        )
    return node.labels[label]


def _held(report: Elastic, shape: tuple[int, ...]) -> ExpertPlacement | None:
    if not any(node.holds for node in report.nodes):
        return None
    counts = np.zeros((shape[0], len(report.nodes), shape[1]), dtype=np.int32)
    for number, node in enumerate(report.nodes):
        if not node.holds:
            continue
        if len(node.holds) != shape[0]:
            raise CommandError(
                f"node {node.name} holds experts of {len(node.holds)} layers, but loads have "
                f"{shape[0]} layers"
            )
        for layer, experts in enumerate(node.holds):
            if any(expert >= shape[1] for expert in experts):
                raise CommandError(
                    f"node {node.name} holds expert {max(experts)} of layer {layer}: its experts "
                    f"are 0 to {shape[1] - 1}"
                )
            np.add.at(counts[layer, number], list(experts), 1)
    return ExpertPlacement(counts)


def _expert_bytes(report: Elastic, shape: tuple[int, ...]) -> Ints | None:
    if not report.expert_bytes:
        return None
    rows = _rectangle(report.expert_bytes, "expert_bytes")
    if rows.shape != (1, 1) and rows.shape != shape:
        raise CommandError(
            f"expert_bytes has the shape {rows.shape}, loads have {shape}: pass one number, or one "
            "for each expert"
        )
    return np.broadcast_to(rows, shape).copy()


# -- the answers ----------------------------------------------------------------------------------


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
        CommandError: an expert has no replica, or a node has more replicas than slots.
    """
    cluster, loads_LE = situation.cluster, situation.loads_LE
    try:
        placement.check(cluster)
    except ElasticError as error:
        raise CommandError(f"the experts that the nodes hold are not a valid placement: {error}") from error
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
    placement: ExpertPlacement, num_units: int, units: Ints | None
) -> tuple[tuple[int, Chance], ...]:
    few = list(range(1, min(num_units - 1, _ALL_UP_TO) + 1))
    more = [2 * _ALL_UP_TO << power for power in range(20)]
    out = []
    for lost in few + [number for number in more if number < num_units]:
        chance = recovery_probability(placement, lost, units=units)
        out.append((lost, chance))
        if not chance.ways:
            break
    return tuple(out)


def plan(situation: Situation) -> Planned:
    """Place the experts on the nodes, close to the present placement.

    Raises:
        ElasticError: there are fewer slots than experts.
    """
    cluster, loads_LE = situation.cluster, situation.loads_LE
    allocation = allocate(loads_LE, cluster, situation.report.threshold)
    bound, held, move = situation.max_straggler, situation.held, None
    if held is None:
        found = place(allocation, loads_LE, cluster, max_straggler=bound)
    else:
        found = place_near(held, allocation, loads_LE, cluster, _sizes(situation), max_straggler=bound)
        move = _move(situation, held, found.placement)
    worth = outlook(situation, found.placement)
    return Planned(situation, found.method, allocation.reason, worth, move)


def _sizes(situation: Situation) -> Ints:
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
        CommandError: a selector matches no node, or is malformed.
    """
    labels = {node.name: node.labels for node in situation.report.nodes}
    try:
        return select_nodes(situation.names, labels, lose.split(","))
    except ValueError as error:
        raise CommandError(str(error)) from error


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
    except (ElasticError, CommandError) as error:
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
    pays: bool | None = False
    if saved:
        pays = gain_s > needed_s if gain_s >= 0 and needed_s >= 0 else None
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
        pays=pays,
    )
