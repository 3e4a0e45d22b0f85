"""The report of an elastic job's placement to its node's daemon, for `ckptctl elastic`.

Nothing depends on it: a job that sends no report trains as well. A restarted daemon has lost it, so
each measured load repeats the placement. One rank of each node reports, so that any daemon can be asked.

Shapes: ``L`` layers, ``E`` experts of each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ckptd.client.log_lines import get_logger
from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement, Loads, checked_loads
from ckptd.core.elastic.incarnation_plan import IncarnationPlan
from ckptd.core.elastic.incarnations import ChosenState, ExpertLayers
from ckptd.core.elastic.mapping import checked_bytes
from ckptd.errors import ElasticError
from ckptd.transport.messages import Elastic, ElasticNode, ElasticWhen

logger = get_logger(__name__)


PERIODS = 8  # of earlier loads in a report


@dataclass(frozen=True, slots=True, eq=False)
class Placing:
    """A placement that is in use.

    Args:
        placement: in the order of the cluster's nodes.
        names: node IDs of the daemons.
        expert_bytes: ``[L, E]``, of a replica with its optimizer state.
        threshold: minimum number of nodes of every expert.
        max_straggler: the bound under which it was made; None: no bound.
        layers: names of the layers; empty: they are numbered.
        labels: of each node; the cluster's domains are added as the label ``domain``.
        bytes_per_s: each node's rate of sending and receiving; empty: not measured.
        method, reason: of the plan.
    """

    placement: ExpertPlacement
    cluster: Cluster
    names: tuple[str, ...]
    expert_bytes: ArrayLike
    threshold: int
    max_straggler: float | None = None
    layers: tuple[str, ...] = ()
    labels: Sequence[Mapping[str, str]] = ()
    bytes_per_s: tuple[int, ...] = ()
    method: str = ""
    reason: str = ""


DOMAIN_LABEL = "domain"


def reported_placement(
    placing: Placing,
    loads: ArrayLike,
    *,
    step: int,
    history: Sequence[ArrayLike] = (),
    when: ElasticWhen | None = None,
) -> Elastic:
    """The report of a placement and its loads.

    Args:
        loads: ``[L, E]``, tokens of the newest period.
        history: of earlier periods, the oldest first.
    Raises:
        ValueError: arrays of different shapes, another number of names, labels or speeds than of
            nodes, or values that the message does not allow.
        ElasticError: the placement is not for the cluster.
    """
    placement, cluster = placing.placement, placing.cluster
    placement.check(cluster)
    loads_LE = checked_loads(loads)
    bytes_LE = checked_bytes(placing.expert_bytes, placement)
    periods = [checked_loads(period) for period in history]
    if {one.shape for one in (loads_LE, *periods)} != {bytes_LE.shape}:
        raise ValueError(
            f"loads of shape {loads_LE.shape} for a placement of {bytes_LE.shape} layers and experts"
        )
    labels = placing.labels or [{}] * cluster.num_nodes
    speeds = placing.bytes_per_s or (0,) * cluster.num_nodes
    numbers = (len(placing.names), len(labels), len(speeds))
    if set(numbers) != {cluster.num_nodes}:
        raise ValueError(f"{numbers} names, labels and speeds for {cluster.num_nodes} nodes: one for each")
    nodes_are_domains = cluster.num_domains == cluster.num_nodes
    nodes = [
        ElasticNode(
            name,
            int(slots),
            ranks,
            dict(own) if nodes_are_domains else {**own, DOMAIN_LABEL: domain},
            _experts(placement.counts[:, number]),
            int(speed),
        )
        for number, (name, slots, ranks, own, domain, speed) in enumerate(
            zip(
                placing.names,
                cluster.slots.tolist(),
                cluster.ranks,
                labels,
                cluster.domains,
                speeds,
                strict=True,
            )
        )
    ]
    report = Elastic(
        _rows(loads_LE),
        tuple(nodes),
        step=step,
        threshold=placing.threshold,
        max_straggler=placing.max_straggler or 0.0,
        domain="" if nodes_are_domains else DOMAIN_LABEL,
        expert_bytes=_rows(bytes_LE),
        layers=placing.layers,
        history=tuple(_rows(period) for period in periods),
        method=placing.method[:4000],
        reason=placing.reason[:4000],
        when=when or ElasticWhen(),
    )
    try:
        msgspec.convert(msgspec.to_builtins(report), Elastic)  # here, and not refused by the daemon
    except msgspec.ValidationError as error:
        raise ValueError(f"the placement cannot be reported: {error}") from error
    return report


def _experts(counts_LE: NDArray[np.int32]) -> tuple[tuple[int, ...], ...]:
    experts = np.arange(counts_LE.shape[1])
    return tuple(tuple(np.repeat(experts, row).tolist()) for row in counts_LE)


def _rows(array: NDArray[np.int64]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in array.tolist())


class PlacementTeller:
    """Sends the placement and the last loads whenever one of them is new.

    The nodes' part of a report is made once for each placement, so that a measured load costs
    little with many nodes.

    Args:
        send: sends a report without blocking, such as ``Session.tell_elastic``.
        periods: number of earlier loads in a report.
    """

    def __init__(self, send: Callable[[Elastic], None], *, periods: int = PERIODS) -> None:
        self._send = send
        self._report: Elastic | None = None
        self._loads: deque[NDArray[np.int64]] = deque(maxlen=periods)

    def placed(
        self, step: int, placing: Placing, loads: ArrayLike, *, when: ElasticWhen | None = None
    ) -> None:
        """Report that a placement made for ``loads`` ``[L, E]`` is in use from this step on.

        Raises:
            ValueError, ElasticError: as `reported_placement`; nothing is sent.
        """
        # Loads of other shapes are of another model.
        history = [one for one in self._loads if one.shape == np.shape(loads)]
        self._report = reported_placement(placing, loads, step=step, history=history, when=when)
        self._loads.append(checked_loads(loads))
        self._send(self._report)

    def measured(self, step: int, loads: ArrayLike, *, when: ElasticWhen | None = None) -> None:
        """Report the tokens ``[L, E]`` routed in a period; without a placement they only enter the history.

        Raises:
            ValueError: no loads, or of other layers or experts than the placement; nothing is sent.
        """
        loads_LE = checked_loads(loads)
        report = self._report
        if report is not None:
            shape = len(report.loads), len(report.loads[0])
            if loads_LE.shape != shape:
                raise ValueError(f"loads of shape {loads_LE.shape}, a placement of {shape}")
            self._report = msgspec.structs.replace(
                report,
                step=step,
                loads=_rows(loads_LE),
                history=tuple(_rows(one) for one in self._loads if one.shape == shape),
                when=when or report.when,
            )
            self._send(self._report)
        self._loads.append(loads_LE)


_EVERY_STEPS = 50


class IncarnationReporter:
    """Reports an incarnation's placement when it begins, and the loads every 50 steps.

    Args:
        send: sends a report without blocking.
        chosen: gives the sizes of experts; None: unknown before they are trained.
    """

    def __init__(
        self,
        send: Callable[[Elastic], None],
        plan: IncarnationPlan,
        layers: ExpertLayers,
        chosen: ChosenState | None,
        loads_LE: Loads,
        *,
        threshold: int,
        max_straggler: float | None,
    ) -> None:
        self._sender = PlacementTeller(send)
        self._steps = 0
        sizes = np.zeros_like(loads_LE) if chosen is None else chosen.expert_bytes_LE
        self._placing = Placing(
            plan.placement,
            plan.cluster,
            plan.nodes,
            sizes,
            threshold,
            max_straggler,
            layers.names,
            reason=plan.reason,
        )
        self._report_placement(plan.start, loads_LE)

    def _report_placement(self, step: int, loads_LE: Loads) -> None:
        try:
            self._sender.placed(step, self._placing, loads_LE)
        except (ValueError, ElasticError) as error:  # `ckptctl` shows less; training goes on
            logger.warning("the placement is not reported to the daemon: %s", error)

    def step_over(
        self, step: int, placement: Callable[[], ExpertPlacement], loads_LE: Callable[[], Loads]
    ) -> None:
        """With shards the placement may change in any step: a change is reported with the loads."""
        self._steps += 1
        if self._steps % _EVERY_STEPS:
            return
        now = placement()
        if not np.array_equal(now.counts, self._placing.placement.counts):
            self._placing = replace(self._placing, placement=now)
            self._report_placement(step, loads_LE())
            return
        try:
            self._sender.measured(step, loads_LE())
        except ValueError as error:
            logger.warning("the loads are not reported to the daemon: %s", error)
