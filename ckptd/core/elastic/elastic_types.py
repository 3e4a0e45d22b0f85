"""The input and output of all elastic planners: nodes, loads, and placements of experts.

Shapes: ``L`` mixture layers, ``N`` nodes, ``E`` experts of a layer, ``R`` ranks. A *node* is lost as
a whole and has slots; a *rank* is one GPU of it. A *domain* fails together (a host, a rack).

All planners are pure functions of these arrays. Ranks compute them independently and must agree to
the bit, so only exact integers decide: no float, no order of a dict or a set, no clock, no global seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ckptd.errors import ElasticError

Loads: TypeAlias = NDArray[np.int64]
"""``[L, E]``: tokens routed to each expert of each layer in a period; never negative."""


@dataclass(frozen=True, slots=True, eq=False)
class Cluster:
    """The nodes of a plan, in the order in which every array counts them.

    Args:
        slots: ``[N]``, replicas of experts that a node can hold *in each layer*, at least 1.
        domains: the failure domain of each node; empty: every node is a domain.
        ranks: the number of ranks of each node, which share its slots evenly; empty: one.
    Raises:
        ValueError: no node, a node without slot or rank, a wrong number of domains or ranks.
    """

    slots: NDArray[np.int64]
    domains: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        slots = integers(self.slots, "slots", ndim=1)
        if not len(slots):
            raise ValueError("a cluster needs a node: slots is empty")
        if int(slots.min()) < 1:
            where = int(slots.argmin())
            raise ValueError(f"node {where} has {slots[where]} slots; leave out nodes without one")
        domains = tuple(self.domains) or tuple(f"node-{index}" for index in range(len(slots)))
        if len(domains) != len(slots):
            raise ValueError(
                f"{len(domains)} domains for {len(slots)} nodes: name one for each node, or none"
            )
        ranks = tuple(self.ranks) or (1,) * len(slots)
        if len(ranks) != len(slots) or min(ranks) < 1:
            raise ValueError(f"ranks are {ranks} for {len(slots)} nodes: each node has at least 1")
        object.__setattr__(self, "slots", slots)
        object.__setattr__(self, "domains", domains)
        object.__setattr__(self, "ranks", ranks)

    @classmethod
    def uniform(cls, num_nodes: int, slots: int, domains: Sequence[str] = (), *, ranks: int = 1) -> Cluster:
        """``num_nodes`` equal nodes."""
        if num_nodes < 1:
            raise ValueError(f"a cluster needs a node, not {num_nodes}")
        return cls(np.full(num_nodes, slots, dtype=np.int64), tuple(domains), (ranks,) * num_nodes)

    @property
    def num_nodes(self) -> int:
        return len(self.slots)

    @property
    def num_slots(self) -> int:
        """Of all nodes, in each layer."""
        return sum(self.slots.tolist())

    @property
    def num_ranks(self) -> int:
        return sum(self.ranks)

    @property
    def num_domains(self) -> int:
        return len(set(self.domains))

    @property
    def domain_ids(self) -> NDArray[np.int64]:
        """``[N]``: the domain of each node as a number, in the order in which domains first appear."""
        number: dict[str, int] = {}
        return np.array([number.setdefault(d, len(number)) for d in self.domains], dtype=np.int64)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Cluster):
            return NotImplemented
        same = self.domains == other.domains and self.ranks == other.ranks
        return same and np.array_equal(self.slots, other.slots)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPlacement:
    """The replicas of every expert of every layer on every node.

    Args:
        counts: ``[L, N, E]``. The array belongs to the placement from then on and is read-only.
    Raises:
        ValueError: another shape, no integers, a negative number.
    """

    counts: NDArray[np.int32]

    def __post_init__(self) -> None:
        counts = _read_only(self.counts, "counts", 3, np.dtype(np.int32))
        if counts.size and int(counts.min()) < 0:
            raise ValueError("counts has negative numbers of replicas")
        object.__setattr__(self, "counts", counts)

    @property
    def num_layers(self) -> int:
        return int(self.counts.shape[0])

    @property
    def num_nodes(self) -> int:
        return int(self.counts.shape[1])

    @property
    def num_experts(self) -> int:
        return int(self.counts.shape[2])

    @property
    def replicas(self) -> NDArray[np.int64]:
        """``[L, E]``: replicas of each expert over all nodes."""
        return np.asarray(self.counts.sum(axis=1, dtype=np.int64))

    @property
    def used(self) -> NDArray[np.int64]:
        """``[L, N]``: slots of each node that hold a replica."""
        return np.asarray(self.counts.sum(axis=2, dtype=np.int64))

    def check(self, cluster: Cluster) -> None:
        """Raise unless every expert has a replica and no node holds more than it has slots.

        Raises:
            ValueError: another number of nodes.
            ElasticError: an expert without replica, or a node with more replicas than slots.
        """
        if self.num_nodes != cluster.num_nodes:
            raise ValueError(f"a placement on {self.num_nodes} nodes, a cluster of {cluster.num_nodes}")
        over = np.argwhere(self.used > cluster.slots)
        if len(over):
            layer, node = over[0].tolist()
            raise ElasticError(
                f"{self.used[layer, node]} replicas on a node with {cluster.slots[node]} slots",
                operation="placement",
                ids={"layer": layer, "node": node},
                hint="Plan again for the cluster as it is",
            )
        missing = np.argwhere(self.replicas == 0)
        if len(missing):
            layer, expert = missing[0].tolist()
            raise ElasticError(
                "the expert has no replica",
                operation="placement",
                ids={"layer": layer, "expert": expert},
                hint="Plan again with at least as many slots as experts",
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ExpertPlacement):
            return NotImplemented
        return np.array_equal(self.counts, other.counts)

    __hash__ = None  # type: ignore[assignment]


def checked_loads(loads: ArrayLike) -> Loads:
    """The loads as a read-only int64 array ``[L, E]``.

    Raises:
        ValueError: another shape, no layer or no expert, floats (NaN among them), negative numbers.
    """
    array = integers(loads, "loads", ndim=2)
    if not array.size:
        raise ValueError(f"loads of shape {array.shape}: a plan needs a layer and an expert")
    if int(array.min()) < 0:
        layer, expert = (int(i) for i in np.unravel_index(int(array.argmin()), array.shape))
        raise ValueError(
            f"loads[{layer}, {expert}] is {array[layer, expert]}; a number of tokens is never negative"
        )
    return array


def integers(values: ArrayLike, name: str, *, ndim: int) -> NDArray[np.int64]:
    """``values`` as a read-only int64 array.

    Raises:
        ValueError: floats, bools or objects; another number of dimensions; too large.
    """
    return _read_only(values, name, ndim, np.dtype(np.int64))


def _read_only(values: ArrayLike, name: str, ndim: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and array.size:
        raise ValueError(
            f"{name} must be integers, not {array.dtype}: round once, before the ranks exchange them, "
            "so that all of them plan from the same numbers"
        )
    if array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, not the shape {array.shape}")
    limits = np.iinfo(dtype)
    if array.size and (int(array.max()) > limits.max or int(array.min()) < limits.min):
        raise ValueError(f"{name} does not fit {dtype}")
    out = np.ascontiguousarray(array, dtype=dtype).view()
    out.flags.writeable = False
    return out
