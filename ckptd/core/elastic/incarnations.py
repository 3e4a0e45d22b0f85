"""At which iteration a job goes on whose ranks have changed, and what of it lies where.

A *world* is one life of an elastic job: its ranks, and a placement of experts. Each has a run of
its own, so what was recorded in it belongs to ranks of it; worlds are numbered, later ones higher.
At a start every node tells which images of which worlds it holds: parked states, snapshots,
replicas of other nodes' snapshots. An image covers *units*: whole parameters, or ranges of their
rows, with all their optimizer state.

**One iteration for the whole model.** An expert of iteration S does not go with a dense part of
iteration T: a state is taken at the newest iteration of which everything is held, each unit by some
node. After a loss that is where the survivors were parked, if every expert has a survivor, or a
replica of a lost node's snapshot of that iteration is there. Where an expert can only be had at an
earlier iteration, all of the model goes back to that one. The units are those bits, whichever node
they come from, so it does not matter from which.

**Of the newest world** that can be had: a later world went on from an earlier one, which may hold
iterations that were abandoned since. A world that ended before everything of it was sealed gives
way to the one before.

Complexity: the number of images times their units, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.errors import ElasticError, LocalProtocolError

__all__ = [
    "BUFFER",
    "SHARDS",
    "Chosen",
    "ExpertLayers",
    "HeldImage",
    "NodeHeld",
    "ShardGive",
    "Unit",
    "choose",
    "common_rows",
    "shard_gives",
    "shard_length",
    "shard_rows",
]


BUFFER = "buffer/"
"""Before the name of a buffer, where it is a unit: those of experts are."""
SHARDS = "expert_shards.shards."
"""Before the names of the experts' shards: what follows is the layer, the expert and the parameter."""

_NAMED = 4


class Unit(NamedTuple):
    """A parameter (``stop`` 0), or its rows from ``start`` up to ``stop``.

    Of a parameter of which each rank has a shard, rows are the elements of all shards, one after
    the other: those of rank r's, which are ``length``, begin at ``r * length``.
    """

    param: str
    start: int = 0
    stop: int = 0

    def __str__(self) -> str:
        """As it is called in messages."""
        return f"{self.param}[{self.start}:{self.stop}]" if self.stop else self.param


class HeldImage(msgspec.Struct, frozen=True, array_like=True):
    """One complete, sealed image on a node.

    Args:
        rank: whose state it is, in its world.
        layout: the number of its list of units in ``NodeHeld.layouts``.
    """

    world: int
    rank: int
    iteration: int
    parked: bool
    layout: int


class NodeHeld(msgspec.Struct, frozen=True, array_like=True):
    """What a node tells.

    Args:
        units: what images there cover, and with how many bytes.
        layouts: the units of images of one layout, by their numbers.
        expected: of each world, which units its ranks have, as their segments tell: more than their
            images cover, where one rank captures for others.
        worlds: the numbers of all worlds of which it has a trace, images or not.
        ranks: how many each world had.
    """

    units: tuple[tuple[Unit, int], ...] = ()
    layouts: tuple[tuple[int, ...], ...] = ()
    images: tuple[HeldImage, ...] = ()
    expected: dict[int, tuple[Unit, ...]] = {}
    worlds: tuple[int, ...] = ()
    ranks: dict[int, int] = {}


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """The mixture layers of a model: the names of their modules, and how many experts each has.

    An expert's parameters are those below ``<layer>.experts.<number>``, its shards those below
    ``expert_shards.shards.<layer>.<number>``.
    """

    names: tuple[str, ...]
    num_experts: int

    def expert_of(self, param: str) -> tuple[int, int] | None:
        """The layer and expert that a parameter or buffer belongs to; None: it is dense."""
        return self._below(param.removeprefix(BUFFER), [f"{name}.experts." for name in self.names])

    def shard_of(self, param: str) -> tuple[int, int] | None:
        """The layer and expert of which each rank has a shard by this name; None: it is none."""
        if not param.startswith(SHARDS):
            return None
        return self._below(param, [f"{SHARDS}{name}." for name in self.names])

    def _below(self, param: str, prefixes: Sequence[str]) -> tuple[int, int] | None:
        for layer, prefix in enumerate(prefixes):
            if param.startswith(prefix):
                number = param[len(prefix) :].partition(".")[0]
                if number.isdecimal() and int(number) < self.num_experts:
                    return layer, int(number)
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """Where the job goes on.

    Args:
        holders: the nodes on which each unit lies, ascending.
        unit_bytes: of each unit.
        experts_LNE: which nodes hold an expert, in whichever image.
        parked_LNE: which do so in a parked state.
        expert_bytes_LE: of one replica.
        scalars: by rank of that world, the nodes that hold an image of it, and so its step scalars
            and buffers.
        ranks: how many that world had.
        shards: of the units, those that are shards of experts; empty: each replica of an expert has
            its own optimizer state.
        all_parked: whether each of these is in a parked state.
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


class _Found:
    """What is held of one iteration of one world."""

    def __init__(self) -> None:
        self.holders: dict[Unit, set[int]] = {}
        self.parked: dict[Unit, set[int]] = {}
        self.scalars: dict[int, set[int]] = {}
        self.bytes: dict[Unit, int] = {}

    def add(self, node: int, held: NodeHeld, image: HeldImage) -> None:
        self.scalars.setdefault(image.rank, set()).add(node)
        for number in held.layouts[image.layout]:
            unit, size = held.units[number]
            self.bytes[unit] = size
            self.holders.setdefault(unit, set()).add(node)
            if image.parked:
                self.parked.setdefault(unit, set()).add(node)


def choose(held: Sequence[NodeHeld], layers: ExpertLayers) -> Chosen | None:
    """The newest state that can be had as a whole; None: nothing is held, the job begins.

    Args:
        held: of each node, in the same order on all ranks.
    Raises:
        ElasticError: something is held, and of no iteration all; names what is lacking.
    """
    by_world: dict[int, dict[int, _Found]] = {}
    for node, inventory in enumerate(held):
        for image in inventory.images:
            at = by_world.setdefault(image.world, {}).setdefault(image.iteration, _Found())
            at.add(node, inventory, image)
    lacking = ""
    for world in sorted(by_world, reverse=True):
        expected = _expected(held, world)
        ranks = max(node.ranks.get(world, 0) for node in held)
        for iteration in sorted(by_world[world], reverse=True):
            found = by_world[world][iteration]
            lacks = _lacks(found, expected, layers, ranks)
            if not lacks:
                left = (
                    ""
                    if world == max(by_world)
                    else f"; left out is world {max(by_world)}, the newest: {lacking}"
                )
                found_here = _chosen(world, iteration, found, expected, layers, len(held), ranks)
                return replace(found_here, reason=found_here.reason + left)
            lacking = lacking or f"of iteration {iteration} of world {world} {_text(lacks)}"
    if not by_world:
        return None
    raise ElasticError(
        f"no iteration is held as a whole: {lacking}",
        operation="find the state to go on from",
        hint=(
            "Nothing was freed: start again when the nodes that took part are back. To begin "
            "anew, pass run= a new name"
        ),
    )


def _expected(held: Iterable[NodeHeld], world: int) -> frozenset[Unit]:
    return frozenset(unit for told in held for unit in told.expected.get(world, ()))


def _lacks(found: _Found, expected: frozenset[Unit], layers: ExpertLayers, ranks: int) -> list[str]:
    """What is not held at this iteration, by name: dense units, experts, shards of experts."""
    known, lacks = _missing_shards(found, layers, ranks)
    for unit in expected | found.holders.keys():
        owner = layers.expert_of(unit.param)
        if owner is not None:
            known.add(owner)
        if unit not in found.holders:
            lacks.add(str(unit) if owner is None else _expert_name(layers, *owner))
    # Of an expert that was lost with all that knew of it, nobody tells any unit.
    for layer in range(len(layers.names)):
        for expert in range(layers.num_experts):
            if (layer, expert) not in known:
                lacks.add(_expert_name(layers, layer, expert))
    return sorted(lacks)


def _missing_shards(found: _Found, layers: ExpertLayers, ranks: int) -> tuple[set[tuple[int, int]], set[str]]:
    """The experts of which there are shards, and whose shards are not held, by name.

    A rank that is lost with all that was held of it tells of none: how many there were, any of the
    others tells.
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


def _expert_name(layers: ExpertLayers, layer: int, expert: int) -> str:
    return f"{layers.names[layer]}.experts.{expert}"


def _text(lacks: Sequence[str]) -> str:
    more = len(lacks) - _NAMED
    names = ", ".join(lacks[:_NAMED])
    return f"no node holds {names}" + (f" and {more} more" if more > 0 else "")


def _chosen(
    world: int,
    iteration: int,
    found: _Found,
    expected: frozenset[Unit],
    layers: ExpertLayers,
    num_nodes: int,
    ranks: int,
) -> Chosen:
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
    reason = (
        _reason_of_shards(world, iteration, ranks, lost)
        if shards
        else _reason(world, iteration, experts, parked, layers)
    )
    return Chosen(
        world,
        iteration,
        {unit: tuple(sorted(nodes)) for unit, nodes in sorted(found.holders.items())},
        found.bytes,
        experts,
        parked,
        size,
        {rank: tuple(sorted(nodes)) for rank, nodes in sorted(found.scalars.items())},
        reason,
        ranks,
        shards,
        bool(shards) and not lost,
    )


def _reason_of_shards(world: int, iteration: int, ranks: int, lost: Sequence[int]) -> str:
    text = (
        f"iteration {iteration} of world {world}: the shards of {ranks - len(lost)} of {ranks} "
        "ranks are parked on nodes that are left"
    )
    return f"{text}, the others (first of rank {lost[0]}) come from snapshots" if lost else text


def _reason(
    world: int,
    iteration: int,
    experts: NDArray[np.bool_],
    parked: NDArray[np.bool_],
    layers: ExpertLayers,
) -> str:
    alive = int(parked.any(axis=1).sum())
    total = len(layers.names) * layers.num_experts
    text = (
        f"iteration {iteration} of world {world}: {alive} of {total} experts are parked on "
        "nodes that are left"
    )
    if alive == total:
        return text
    layer, expert = (int(i[0]) for i in np.nonzero(~parked.any(axis=1)))
    return f"{text}, the others (first {_expert_name(layers, layer, expert)}) come from snapshots"


ShardGive = tuple[int, int, Unit]
"""From which rank, to which, what."""


def shard_length(numel: int, ranks: int) -> int:
    """Elements of a shard, padding included."""
    return -(-numel // ranks)


def shard_rows(numel: int, ranks: int, rank: int) -> tuple[int, int]:
    """The elements that a rank's shard has, first and behind the last, without padding; of a small
    parameter the last ranks have none.
    """
    length = shard_length(numel, ranks)
    return min(numel, rank * length), min(numel, (rank + 1) * length)


def common_rows(numel: int, before: int, after: int) -> Iterator[tuple[int, int, int, int]]:
    """Rank before, rank after, first element and the one behind the last, of what goes from the one
    to the other.

    A rank whose shard is all padding gets no element of the last shard that has any: what its
    optimizer keeps beside elements (the number of steps) comes with that.

    Args:
        numel: elements of the parameter.
        before, after: how many ranks there were, and are.
    """
    length = max(1, shard_length(numel, before))
    for rank in range(after):
        start, stop = shard_rows(numel, after, rank)
        if start == stop:
            yield max(0, numel - 1) // length, rank, numel, numel
        for owner in range(start // length, -(-stop // length) if start < stop else 0):
            yield owner, rank, max(start, owner * length), min(stop, (owner + 1) * length)


def shard_gives(
    chosen: Chosen, numels: Mapping[str, int], node_of: Sequence[int], sent: list[int]
) -> list[ShardGive]:
    """Who gives which elements to whom: a rank reads what its node holds; of ranks that hold the
    rest the one gives that has least to send so far, the largest first.

    Args:
        numels: elements of each parameter of which there are shards.
        node_of: the node of each rank, as numbered in what was chosen.
        sent: bytes that each rank sends; added to.
    Raises:
        LocalProtocolError: nobody told how long a parameter is.
    """
    missing = {unit.param for unit in chosen.shards} - numels.keys()
    if missing:
        raise LocalProtocolError(f"the length of {min(missing)} is not known", operation="plan handover")
    found: list[ShardGive] = []
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
    here: dict[tuple[int, ...], list[int]] = {}
    for size, unit, target, nodes in sorted(travelling):
        givers = here.setdefault(nodes, [r for r, node in enumerate(node_of) if node in nodes])
        giver = min(givers, key=lambda rank: (sent[rank], rank))
        sent[giver] -= size
        found.append((giver, target, unit))
    return found
