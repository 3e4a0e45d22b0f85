"""What an elastic job tells its node's daemon of its placement, so that `ckptctl elastic` can show
it and judge it.

Nothing depends on it: whoever does not tell trains as well. The daemon forgets it when it is
restarted, so it is told again with each measured load. One rank of each node is enough, and every
node's daemon should hear of it: any of them may be asked.

``told = PlacementTeller(session.tell_elastic)`` takes the place to send to as a function, so that
this module knows no session.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement, checked_loads
from ckptd.core.elastic.mapping import checked_bytes
from ckptd.transport.messages import Elastic, ElasticNode, ElasticWhen

__all__ = ["PlacementTeller", "Placing", "reported_placement"]

PERIODS = 8  # of the load that are kept beside the newest


@dataclass(frozen=True, slots=True, eq=False)
class Placing:
    """A placement that is in use.

    Args:
        placement: in the order of the cluster's nodes.
        names: of the nodes, as their daemons are called.
        expert_bytes: ``[L, E]``, of a replica with its optimizer state.
        threshold: on how many nodes every expert shall be.
        max_straggler: the bound it was made under; None: none.
        layers: names of the layers; empty: they are numbered.
        labels: of each node; the cluster's domains are told as the label ``domain`` beside them.
        bytes_per_s: how fast each node sends and gets; empty: not measured.
        method, reason: how it was found, and why it was made.
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
    """What is told of a placement under a load.

    Args:
        loads: ``[L, E]``, tokens of the newest period.
        history: those of earlier ones, the oldest first.
    Raises:
        ValueError: arrays of different shapes, another number of names, labels or speeds than of
            nodes, or values that no message may have.
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
        raise ValueError(f"the placement cannot be told: {error}") from error
    return report


def _experts(counts_LE: NDArray[np.int32]) -> tuple[tuple[int, ...], ...]:
    experts = np.arange(counts_LE.shape[1])
    return tuple(tuple(np.repeat(experts, row).tolist()) for row in counts_LE)


def _rows(array: NDArray[np.int64]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in array.tolist())


class PlacementTeller:
    """Remembers the placement and the last loads, and tells both whenever one of them is new.

    What is told of the nodes is made once for each placement, so that a measured load costs little
    where there are many.

    Args:
        send: takes what is told, and does not wait; ``Session.tell_elastic`` is one.
        periods: how many earlier loads are told beside the newest.
    """

    def __init__(self, send: Callable[[Elastic], None], *, periods: int = PERIODS) -> None:
        self._send = send
        self._report: Elastic | None = None
        self._loads: deque[NDArray[np.int64]] = deque(maxlen=periods)

    def placed(
        self, step: int, placing: Placing, loads: ArrayLike, *, when: ElasticWhen | None = None
    ) -> None:
        """Another placement is in use from this step on; ``loads`` ``[L, E]`` are what it was made for.

        Raises:
            ValueError, ElasticError: as `reported_placement`; nothing is told then.
        """
        # Loads of other shapes are of another model.
        history = [one for one in self._loads if one.shape == np.shape(loads)]
        self._report = reported_placement(placing, loads, step=step, history=history, when=when)
        self._loads.append(checked_loads(loads))
        self._send(self._report)

    def measured(self, step: int, loads: ArrayLike, *, when: ElasticWhen | None = None) -> None:
        """A period is over: these tokens ``[L, E]`` were routed in it. Before a placement is known,
        it is only remembered.

        Raises:
            ValueError: no loads, or of other layers or experts than the placement; nothing is told then.
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
