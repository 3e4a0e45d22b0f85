"""The state from which an elastic job continues when its ranks have changed, and what lies where.

An *incarnation* is one life of an elastic job: its ranks and a placement of experts. (Fields of
messages call it *world*.) It records in a run of its own; later incarnations have higher numbers.
At a start every node reports the images that it holds: parked states, snapshots, replicas of other
nodes' snapshots. An image covers *units*: whole parameters or ranges of their rows, with their
optimizer state.

**One iteration for the whole model.** An expert of iteration S does not go with a dense part of
iteration T. The state is that of the newest iteration of which some node holds each unit. After a
loss that is the iteration where the survivors were parked, if every expert has a survivor or a
replica of a lost node's snapshot of that iteration exists. If an expert only exists at an earlier
iteration, the whole model goes back to that iteration. The bits of a unit do not depend on the node
from which they come.

**Of the newest incarnation** that has a whole iteration: it continued from an earlier one, which
may hold iterations that were abandoned since. An incarnation that ended before all of it was sealed
yields to the one before.

**Shards.** With the experts' optimizer on shards, every rank owns a shard of every parameter of
every expert: ``ceil(numel / ranks)`` elements of the flat parameter, the last ones padded with
zeros. With another number of ranks the borders lie elsewhere, so units count elements of the flat
parameter: a rank gets each element of its new shard once, from the old shard that contains it.
Padding is not sent.

Complexity: images times their units, once; for each parameter with shards the number of ranks
before and after.

Shapes: ``L`` layers, ``N`` nodes, ``E`` experts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.errors import ElasticError, LocalProtocolError

BUFFER = "buffer/"
"""Prefix of the name of an expert's buffer, as a unit."""
SHARDS = "expert_shards.shards."
"""Prefix of the names of shards; layer, expert and parameter follow."""

_NAMED = 4


class Unit(NamedTuple):
    """A parameter (``stop`` 0), or its rows from ``start`` up to ``stop``.

    The rows of a parameter with shards are the elements of all shards, one after the other: those
    of rank r begin at ``r * length``.
    """

    param: str
    start: int = 0
    stop: int = 0

    def __str__(self) -> str:
        return f"{self.param}[{self.start}:{self.stop}]" if self.stop else self.param


class HeldImage(msgspec.Struct, frozen=True, array_like=True):
    """One complete, sealed image on a node.

    Args:
        world: the incarnation.
        rank: whose state it is, in that incarnation.
        layout: the index of its list of units in ``NodeHeld.layouts``.
    """

    world: int
    rank: int
    iteration: int
    parked: bool
    layout: int


class NodeHeld(msgspec.Struct, frozen=True, array_like=True):
    """A node's report.

    Args:
        units: what its images cover, with the bytes of each unit.
        layouts: lists of indices into ``units``, shared by images.
        expected: by incarnation, the units that its ranks have, as their segments describe them:
            more than their images cover where one rank captures for others.
        worlds: all incarnations of which the node has a trace, with or without images.
        ranks: the number of ranks of each.
    """

    units: tuple[tuple[Unit, int], ...] = ()
    layouts: tuple[tuple[int, ...], ...] = ()
    images: tuple[HeldImage, ...] = ()
    expected: dict[int, tuple[Unit, ...]] = {}
    worlds: tuple[int, ...] = ()
    ranks: dict[int, int] = {}


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """The mixture layers of a model: the names of their modules and the number of experts of each.

    The parameters of an expert are ``<layer>.experts.<number>.…``, its shards
    ``expert_shards.shards.<layer>.<number>.…``.
    """

    names: tuple[str, ...]
    num_experts: int

    def expert_of(self, param: str) -> tuple[int, int] | None:
        """The layer and expert of a parameter or buffer; None if it is dense."""
        return self._below(param.removeprefix(BUFFER), [f"{name}.experts." for name in self.names])

    def shard_of(self, param: str) -> tuple[int, int] | None:
        """The layer and expert of a shard; None if the name is not that of a shard."""
        if not param.startswith(SHARDS):
            return None
        return self._below(param, [f"{SHARDS}{name}." for name in self.names])

    def name_of(self, layer: int, expert: int) -> str:
        return f"{self.names[layer]}.experts.{expert}"

    def _below(self, param: str, prefixes: Sequence[str]) -> tuple[int, int] | None:
        for layer, prefix in enumerate(prefixes):
            if param.startswith(prefix):
                number = param[len(prefix) :].partition(".")[0]
                if number.isdecimal() and int(number) < self.num_experts:
                    return layer, int(number)
        return None


@dataclass(frozen=True, slots=True, eq=False)
class ChosenState:
    """The state from which the job continues.

    Args:
        world: the incarnation that recorded it.
        holders: the nodes that hold each unit, ascending.
        experts_LNE: the nodes that hold an expert, in any image.
        parked_LNE: the nodes that hold it in a parked state.
        expert_bytes_LE: of one replica.
        scalars: by rank of that incarnation, the nodes that hold an image of the rank, and with it
            its step scalars and buffers.
        ranks: the number of ranks of that incarnation.
        shards: the units that are shards of experts; empty: each replica of an expert has its own
            optimizer state.
        all_parked: every shard is in a parked state.
    """

    world: int
    iteration: int
    holders: Mapping[Unit, tuple[int, ...]]
    unit_bytes: Mapping[Unit, int]
    experts_LNE: NDArray[np.bool_]
    parked_LNE: NDArray[np.bool_]
    expert_bytes_LE: NDArray[np.int64]
    scalars: Mapping[int, tuple[int, ...]]
    reason: str
    ranks: int
    shards: tuple[Unit, ...] = ()
    all_parked: bool = False

    def is_of(self, image: HeldImage) -> bool:
        """True if the image is part of this state."""
        return (image.world, image.iteration) == (self.world, self.iteration)


@dataclass(slots=True)
class _Found:
    """What the nodes hold of one iteration of one incarnation: of each unit its nodes and bytes."""

    world: int
    iteration: int
    holders: dict[Unit, set[int]] = field(default_factory=dict)
    parked: dict[Unit, set[int]] = field(default_factory=dict)
    scalars: dict[int, set[int]] = field(default_factory=dict)
    bytes: dict[Unit, int] = field(default_factory=dict)

    def add(self, node: int, held: NodeHeld, image: HeldImage) -> None:
        self.scalars.setdefault(image.rank, set()).add(node)
        for number in held.layouts[image.layout]:
            unit, size = held.units[number]
            self.bytes[unit] = size
            self.holders.setdefault(unit, set()).add(node)
            if image.parked:
                self.parked.setdefault(unit, set()).add(node)

    def __str__(self) -> str:
        return f"iteration {self.iteration} of incarnation {self.world}"


def choose(held: Sequence[NodeHeld], layers: ExpertLayers) -> ChosenState | None:
    """The newest whole state; None if nothing is held: the job begins.

    Args:
        held: of each node, in the same order on all ranks.
    Raises:
        ElasticError: the nodes hold parts of states, but no whole one; names what is missing.
    """
    states: dict[tuple[int, int], _Found] = {}
    for node, inventory in enumerate(held):
        for image in inventory.images:
            key = image.world, image.iteration
            states.setdefault(key, _Found(*key)).add(node, inventory, image)
    if not states:
        return None
    newest = max(world for world, _ in states)
    missing = ""
    expected = {
        world: frozenset(unit for node in held for unit in node.expected.get(world, ()))
        for world in {world for world, _ in states}
    }
    for (world, _), found in sorted(states.items(), reverse=True):
        ranks = max(node.ranks.get(world, 0) for node in held)
        lacks = _lacks(found, expected[world], layers, ranks)
        if not lacks:
            skipped = "" if world == newest else f"; left out is incarnation {newest}, the newest: {missing}"
            return _chosen(found, expected[world], layers, len(held), ranks, skipped)
        missing = missing or f"at {found} no node holds {_listed(lacks)}"
    raise ElasticError(
        f"no iteration is held as a whole: {missing}",
        operation="find the state to go on from",
        hint=(
            "Nothing was freed: start again when the nodes that took part are back. To begin "
            "anew, pass run= a new name"
        ),
    )


def _lacks(found: _Found, expected: frozenset[Unit], layers: ExpertLayers, ranks: int) -> list[str]:
    """The names of the dense units, experts and shards that no node holds."""
    known, lacks = _missing_shards(found, layers, ranks)
    for unit in expected | found.holders.keys():
        owner = layers.expert_of(unit.param)
        if owner is not None:
            known.add(owner)
        if unit not in found.holders:
            lacks.add(str(unit) if owner is None else layers.name_of(*owner))
    # No report names a unit of an expert that was lost with all nodes that knew it.
    for layer in range(len(layers.names)):
        for expert in range(layers.num_experts):
            if (layer, expert) not in known:
                lacks.add(layers.name_of(layer, expert))
    return sorted(lacks)


def _missing_shards(found: _Found, layers: ExpertLayers, ranks: int) -> tuple[set[tuple[int, int]], set[str]]:
    """The experts that have shards, and the names of the shards that no node holds.

    No report names a rank that was lost with all its images; the number of ranks is in every other report.
    """
    known: set[tuple[int, int]] = set()
    starts: dict[tuple[str, int], set[int]] = {}
    for unit in found.holders:
        owner = layers.shard_of(unit.param)
        if owner is not None:
            known.add(owner)
            starts.setdefault((unit.param, unit.stop - unit.start), set()).add(unit.start)
    lost = {
        rank for (_, length), there in starts.items() for rank in range(ranks) if rank * length not in there
    }
    return known, {f"the shards of rank {rank}" for rank in lost}


def _listed(lacks: Sequence[str]) -> str:
    more = len(lacks) - _NAMED
    return ", ".join(lacks[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _chosen(
    found: _Found,
    expected: frozenset[Unit],
    layers: ExpertLayers,
    num_nodes: int,
    ranks: int,
    skipped: str,
) -> ChosenState:
    shape = len(layers.names), num_nodes, layers.num_experts
    units_of: dict[tuple[int, int], list[Unit]] = {}
    for unit in sorted(expected | found.holders.keys()):
        if (owner := layers.expert_of(unit.param)) is not None:
            units_of.setdefault(owner, []).append(unit)
    experts, parked = np.zeros(shape, dtype=np.bool_), np.zeros(shape, dtype=np.bool_)
    size = np.zeros((shape[0], shape[2]), dtype=np.int64)
    for (layer, expert), units in units_of.items():
        size[layer, expert] = sum(found.bytes[unit] for unit in units)
        for holders, here in ((found.holders, experts), (found.parked, parked)):
            nodes = set.intersection(*(holders.get(unit, set()) for unit in units))
            here[layer, sorted(nodes), expert] = True
    shards = tuple(unit for unit in sorted(found.holders) if layers.shard_of(unit.param))
    lost = sorted(
        {unit.start // (unit.stop - unit.start) for unit in shards if unit.stop and unit not in found.parked}
    )
    reason = _reason_of_shards(ranks, lost) if shards else _reason_of_experts(parked, layers)
    return ChosenState(
        found.world,
        found.iteration,
        {unit: tuple(sorted(nodes)) for unit, nodes in sorted(found.holders.items())},
        found.bytes,
        experts,
        parked,
        size,
        {rank: tuple(sorted(nodes)) for rank, nodes in sorted(found.scalars.items())},
        f"{found}: {reason}{skipped}",
        ranks,
        shards,
        bool(shards) and not lost,
    )


def _reason_of_shards(ranks: int, lost: Sequence[int]) -> str:
    text = f"the shards of {ranks - len(lost)} of {ranks} ranks are parked on nodes that are left"
    return f"{text}, the others (first of rank {lost[0]}) come from snapshots" if lost else text


def _reason_of_experts(parked_LNE: NDArray[np.bool_], layers: ExpertLayers) -> str:
    parked_LE = parked_LNE.any(axis=1)
    alive, total = int(parked_LE.sum()), parked_LE.size
    text = f"{alive} of {total} experts are parked on nodes that are left"
    if alive == total:
        return text
    layer, expert = (int(i[0]) for i in np.nonzero(~parked_LE))
    return f"{text}, the others (first {layers.name_of(layer, expert)}) come from snapshots"


# -- shards on another number of ranks ---------------------------------------------------------------


def shard_length(numel: int, ranks: int) -> int:
    """Elements of a shard, padding included."""
    return -(-numel // ranks)


def shard_rows(numel: int, ranks: int, rank: int) -> tuple[int, int]:
    """The elements of a rank's shard without padding: first and end; the last ranks may have none."""
    length = shard_length(numel, ranks)
    return min(numel, rank * length), min(numel, (rank + 1) * length)


def common_rows(numel: int, before: int, after: int) -> Iterator[tuple[int, int, int, int]]:
    """Rank before, rank after, first element and end of everything that goes from one to the other.

    A rank whose new shard is all padding gets no element of the last shard that has any: that
    brings the optimizer's state besides elements (the number of steps).

    Args:
        numel: elements of the parameter.
        before, after: numbers of ranks.
    """
    length = max(1, shard_length(numel, before))
    for rank in range(after):
        start, stop = shard_rows(numel, after, rank)
        if start == stop:
            yield max(0, numel - 1) // length, rank, numel, numel
        for owner in range(start // length, -(-stop // length) if start < stop else 0):
            yield owner, rank, max(start, owner * length), min(stop, (owner + 1) * length)


def shard_gives(
    chosen: ChosenState, numels: Mapping[str, int], node_of: Sequence[int], sent: list[int]
) -> list[tuple[int, int, Unit]]:
    """Source, target and unit of every transfer: a rank reads what its node holds; the rest comes,
    largest first, from the rank on a holding node that has least to send so far.

    Args:
        numels: elements of each parameter with shards.
        node_of: the node of each rank, numbered as in ``chosen``.
        sent: bytes that each rank sends; updated.
    Raises:
        LocalProtocolError: ``numels`` lacks a parameter.
    """
    missing = {unit.param for unit in chosen.shards} - numels.keys()
    if missing:
        raise LocalProtocolError(f"the length of {min(missing)} is not known", operation="plan handover")
    found: list[tuple[int, int, Unit]] = []
    travelling: list[tuple[int, Unit, int, tuple[int, ...]]] = []
    rows: dict[int, list[tuple[int, int, int, int]]] = {}  # the same for all parameters of a length
    for param in sorted({unit.param for unit in chosen.shards}):
        numel = numels[param]
        length = shard_length(numel, chosen.ranks)
        if numel not in rows:
            rows[numel] = list(common_rows(numel, chosen.ranks, len(node_of)))
        for owner, target, start, stop in rows[numel]:
            unit = Unit(param, start, stop)
            whole = Unit(param, owner * length, (owner + 1) * length)
            nodes = chosen.holders[whole]
            if node_of[target] in nodes:
                found.append((target, target, unit))
            else:
                size = chosen.unit_bytes[whole] * (stop - start) // max(1, length)
                travelling.append((-size, unit, target, nodes))
    sources: dict[tuple[int, ...], list[int]] = {}
    for size, unit, target, nodes in sorted(travelling):
        holding = sources.setdefault(nodes, [r for r, node in enumerate(node_of) if node in nodes])
        source = min(holding, key=lambda rank: (sent[rank], rank))
        sent[source] -= size
        found.append((source, target, unit))
    return found
