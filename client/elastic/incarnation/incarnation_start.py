"""The start of an incarnation: the inventory, the plan and the retrieval of an elastic job
(`ckptd.client.recovery.start_procedure`).

No controller takes part. One rank of each node tells what the daemon's files there hold
(`discovery`); all compute the same plan from that, and compare its digest. An image that turns out to
be damaged is left out of the next inventory. Where storage has a newer state than memory, or memory
none, that is brought into memory first, and all begin again (`checkpoint_selection`, `store_start`).
"""

from __future__ import annotations

import importlib.metadata
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ckptd.client import values
from ckptd.client.elastic.incarnation.checkpoint_selection import DurableState, Storage, choose_with_storage
from ckptd.client.elastic.incarnation.image_inventory import ImageKey, Inventory, LocalImage, settle
from ckptd.client.elastic.incarnation.unit_reading import LocalState, Unreadable
from ckptd.client.elastic.incarnation.whole_state import LOADS, SHAPES, numels_of
from ckptd.client.options import PlacementOptions
from ckptd.client.ranks.collectives import Collectives
from ckptd.client.recovery.start_procedure import agree_on_plan
from ckptd.core.elastic.elastic_types import Loads
from ckptd.core.elastic.incarnation_plan import IncarnationPlan, Seat, nodes_of, plan_world
from ckptd.core.elastic.incarnations import Chosen, ExpertLayers, NodeHeld
from ckptd.errors import DaemonUnavailable, LocalProtocolError
from ckptd.launch import connect
from ckptd.transport.control.messages import Hello, Welcome
from ckptd.transport.control.wire import RequestTimeout, WireError

__all__ = [
    "Discovery",
    "Here",
    "Recorded",
    "Started",
    "Wishes",
    "find_here",
    "look",
    "read_recorded",
    "start_world",
]


_DRAWN = 1000
_SETTLE_S = 5.0
_ANSWER_S = 10.0


@dataclass(frozen=True, slots=True)
class Wishes:
    """What must be the same on all ranks.

    Args:
        placement: how many replicas experts have, and at which steps the ranks meet to look at the
            load: one that does not would leave the others waiting.
    """

    job: str
    run: str
    layers: ExpertLayers
    placement: PlacementOptions


@dataclass(frozen=True, slots=True)
class Here:
    """This rank's node; ``folder`` is None where there is no daemon, and nothing is held."""

    seat: Seat
    folder: Path | None
    endpoint: Callable[[], str] | None = None


class _RankHere(msgspec.Struct, frozen=True):
    """What a rank tells first; ``kept``: it has a daemon; ``drawn``: by lot, at least 1."""

    seat: Seat
    wishes: str
    clock_s: int
    drawn: int
    kept: bool


@dataclass(frozen=True, slots=True, eq=False)
class Discovery:
    """What all have told, the same on all ranks, and what lies on this node.

    Args:
        seats: of each rank.
        speakers: the rank of each node that tells what it holds: its first one.
        held: what lies on each node, in the order of ``speakers``.
        inventory: of this node; None where nothing is kept.
        clock_s, drawn: of the first rank: the time there, and a number of at least 1 that it drew by lot.
    """

    seats: Sequence[Seat]
    speakers: Sequence[int]
    held: Sequence[NodeHeld]
    inventory: Inventory | None
    clock_s: int
    drawn: int

    def next_world(self, stored: Sequence[int]) -> int:
        """The number of the new world: higher than all that are known here, ``stored`` ones among them."""
        seen = max((*stored, *(world for node in self.held for world in node.worlds)), default=-1)
        # A clock that is behind does not tell worlds apart: nodes that are away may know of one
        # with the next number, and their images would be taken for those of this one when they are
        # back.
        return self.clock_s if self.clock_s > seen else seen + self.drawn


def find_here(
    find_endpoint: Callable[[], str] | None, rank: int, slots: int, domain: str
) -> Here | Exception:
    """Where this rank is; or why that cannot be found out: the other ranks wait to hear of it, and
    raise it, too.

    Args:
        find_endpoint: of this node's daemon; None: nothing is kept, and the rank is a node of its own.
    """
    if find_endpoint is None:
        return Here(Seat(f"rank-{rank}", f"rank-{rank}", slots), None)
    try:
        return _ask_daemon(find_endpoint, importlib.metadata.version("ckptd"), slots, domain)
    except Exception as error:  # noqa: BLE001 - told to the others, and raised, in `look`
        return error


def _ask_daemon(find_endpoint: Callable[[], str], version: str, slots: int, domain: str) -> Here:
    """Ask the daemon of this node who it is.

    Raises:
        DaemonUnavailable: none answers.
    """
    try:
        with connect(find_endpoint(), _ANSWER_S) as client:
            welcome = client.ask(Hello(version, os.getpid()), Welcome)
    except (RequestTimeout, WireError, OSError) as error:
        raise DaemonUnavailable(str(error), operation="start a world") from error
    label = "" if welcome.card is None else welcome.card.labels.get(domain, "")
    seat = Seat(welcome.node_id, label or welcome.node_id, slots)
    return Here(seat, Path(welcome.segment_dir), find_endpoint)


def look(
    here: Here | Exception,
    wishes: Wishes,
    ranks: Collectives,
    unusable: frozenset[ImageKey],
) -> Discovery:
    """Tell what this rank has, and hear what all have; a collective call.

    Args:
        unusable: images that are passed over.
    Raises:
        ValueError: on all ranks: they were started with other wishes, or some of them without a daemon.
        DaemonUnavailable: on all ranks: one cannot tell where it is, or what lies there (which that
            one raises itself).
    """
    inventories: list[Inventory] = []

    def of_rank() -> _RankHere:
        if isinstance(here, Exception):
            raise here
        if here.folder is not None:
            settle(here.folder, wishes.job, wishes.run, _SETTLE_S)
            inventories.append(Inventory(here.folder, wishes.job, wishes.run, wishes.layers, unusable))
        drawn = 1 + secrets.randbelow(_DRAWN)
        return _RankHere(here.seat, repr(wishes), int(time.time()), drawn, here.folder is not None)

    everybody = ranks.agree(of_rank, _RankHere)
    _check_equal(everybody)
    seats = [one.seat for one in everybody]
    speakers = _speakers(seats)
    inventory = inventories[0] if inventories else None
    mine = NodeHeld()
    if inventory is not None and ranks.rank in speakers:
        mine = inventory.of_node
    by_rank = ranks.gather(mine, NodeHeld)
    held = [by_rank[r] for r in speakers]
    clock_s, drawn = everybody[0].clock_s, everybody[0].drawn
    return Discovery(seats, speakers, held, inventory, clock_s, drawn)


def _check_equal(everybody: Sequence[_RankHere]) -> None:
    for other, one in enumerate(everybody):
        if one.wishes != everybody[0].wishes:
            raise ValueError(
                f"rank {other} was started with {one.wishes}, rank 0 with {everybody[0].wishes}: "
                "they must be the same"
            )
        if one.kept != everybody[0].kept:
            without = 0 if one.kept else other
            raise ValueError(
                f"rank {without} was started with daemon=None, rank {other - without} was not: "
                "pass it on all ranks or on none"
            )


def _speakers(seats: Sequence[Seat]) -> list[int]:
    return [next(r for r, seat in enumerate(seats) if seat.node == n) for n in nodes_of(seats)]


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """The same on all ranks.

    Args:
        loads_LE: the load history; zeros, where none was recorded that fits.
        shapes: of the experts whose shards are in the state (`ShardShapes`); None: it has none.
    """

    loads_LE: Loads
    shapes: Mapping[str, Any] | None


def read_recorded(
    local: LocalState | None,
    chosen: Chosen | None,
    seats: Sequence[Seat],
    layers: ExpertLayers,
    ranks: Collectives,
) -> Recorded:
    """Of the state of the lowest rank that is held, read by the first rank on a node that holds it;
    a collective call.

    Args:
        local: what this rank's node holds of it.
        chosen: where the job goes on; None: it begins, and nothing is recorded.
    Raises:
        TryAgain: on all ranks: the image that it was to be read from cannot be used.
        DaemonUnavailable: on all ranks: it failed otherwise (which the one that reads raises itself).
    """
    if chosen is None:
        return _unpacked({}, layers)
    whose = min(chosen.scalars)
    nodes = nodes_of(seats)
    reads = next(r for r, seat in enumerate(seats) if nodes.index(seat.node) in chosen.scalars[whose])

    def read() -> bytes:
        if ranks.rank != reads:
            return b""
        assert local is not None, "its node holds an image"
        state = local.state(whose)
        found = {name: state[name] for name in (LOADS, SHAPES) if name in state}
        return values.pack(found, "what a plan needs")

    return _unpacked(values.unpack(ranks.agree(read, bytes)[reads]), layers)


def _unpacked(recorded: Mapping[str, bytes], layers: ExpertLayers) -> Recorded:
    shapes = values.unpack(recorded[SHAPES]) if SHAPES in recorded else None
    shape = len(layers.names), layers.num_experts
    if LOADS in recorded:
        loads_LE = np.array(values.unpack(recorded[LOADS])["loads"])
        if loads_LE.shape == shape:
            return Recorded(loads_LE, shapes)
    return Recorded(np.zeros(shape, dtype=np.int64), shapes)


# In each a rank may come upon one more damaged image: after trouble with a host's memory there are many.
_PLANS = 20


@dataclass(slots=True)
class Started:
    """A world that is planned; ``local`` holds what this rank will read until it is closed."""

    plan: IncarnationPlan
    chosen: Chosen | None
    loads_LE: Loads
    local: LocalState | None
    seconds: dict[str, float] = field(default_factory=dict)
    # Of the experts whose shards are in the state (`ShardShapes`); None: it has none.
    shapes: Mapping[str, Any] | None = None


def start_world(here: Here | Exception, wishes: Wishes, ranks: Collectives) -> Started:
    """Plan this world; a collective call: it returns on all ranks, or raises on all.

    Args:
        here: where this rank is; or why that could not be found out, which the others have to hear.
    Raises:
        ValueError: ranks have other wishes.
        ElasticError: fewer slots than experts, or a state that is held in part only, and not durable either.
        DaemonUnavailable: a rank has no daemon, or cannot read what only its node holds; or storage
            is needed, and does not answer.
    """
    procedure = _Procedure(here, wishes, ranks)
    agreed = agree_on_plan(ranks, procedure)
    if agreed is None:
        raise DaemonUnavailable(
            f"no plan held after {_PLANS} attempts",
            operation="start a world",
            hint="The ranks' logs name the images that are damaged; nothing was freed: start again",
        )
    with agreed.undo as undo:
        digests, found = agreed.votes, agreed.inventory
        other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if other:
            raise LocalProtocolError(
                f"rank {other[0]} has made another plan than rank 0",
                operation="start a world",
                hint="Are NumPy and SciPy the same versions on all nodes?",
            )
        undo.pop_all()  # it is read from until all is loaded
    laps, recorded = procedure.clock.laps, found.recorded
    return Started(agreed.plan, found.chosen, recorded.loads_LE, found.local, laps, recorded.shapes)


@dataclass(frozen=True, slots=True, eq=False)
class _Inventory:
    """What there is, the same on all ranks; ``local``: what this rank's node has of it."""

    discovery: Discovery
    chosen: Chosen | None
    stored: DurableState
    recorded: Recorded
    local: LocalState | None


class _Procedure:
    """The start of an elastic job with the ranks that there are now.

    Attributes:
        clock: where the time of the last attempt went.
    """

    attempts = _PLANS
    vote = str

    def __init__(self, here: Here | Exception, wishes: Wishes, ranks: Collectives) -> None:
        self._here, self._wishes, self._ranks = here, wishes, ranks
        self._unusable: frozenset[ImageKey] = frozenset()
        kept = not isinstance(here, Exception) and here.folder is not None
        endpoint = here.endpoint if kept and not isinstance(here, Exception) else None
        self._storage = Storage(endpoint, wishes.job, wishes.run, ranks)
        self.clock = _Clock()

    def inventory(self, undo: ExitStack) -> _Inventory:
        """What the nodes hold of the job's incarnations, and from which state the job goes on."""
        wishes, ranks, self.clock = self._wishes, self._ranks, _Clock()
        looked = look(self._here, wishes, ranks, self._unusable)
        self.clock.lap("inventory_s")
        chosen, stored = choose_with_storage(looked.held, wishes.layers, looked.speakers, self._storage)
        self.clock.lap("storage_s")
        local = None
        if chosen is not None and looked.inventory is not None:
            local = LocalState(_images_of(chosen, looked.inventory.images), wishes.layers)
            undo.callback(local.close)
        with self._noting_damage():
            recorded = read_recorded(local, chosen, looked.seats, wishes.layers, ranks)
        return _Inventory(looked, chosen, stored, recorded, local)

    def plan(self, found: _Inventory) -> IncarnationPlan:
        """Which expert is where, and which rank gives what to which."""
        wishes = self._wishes
        plan = plan_world(
            found.discovery.next_world(found.stored.worlds),
            found.discovery.seats,
            wishes.layers,
            found.recorded.loads_LE,
            found.chosen,
            threshold=wishes.placement.threshold,
            max_straggler=wishes.placement.max_straggler,
            numels=numels_of(found.recorded.shapes, wishes.layers),
        )
        self.clock.lap("plan_s")
        return plan

    def retrieve(self, found: _Inventory, plan: IncarnationPlan, undo: ExitStack) -> str:
        """Hold and verify the images that this rank is to read; returns the digest of its plan."""
        handover, rank = plan.handover, self._ranks.rank
        with self._noting_damage():
            if found.local is not None and handover is not None:
                units = [give.unit for give in handover.gives if give.source == rank]
                whose = [of for giver, of in handover.scalars if giver == rank]
                found.local.open_for(units, whose)
        self.clock.lap("verify_s")
        return plan.digest

    @contextmanager
    def _noting_damage(self) -> Iterator[None]:
        """The next inventory passes over an image that cannot be read."""
        try:
            yield
        except Unreadable as error:
            self._unusable |= {error.image.key}
            raise


def _images_of(chosen: Chosen, images: Sequence[LocalImage]) -> list[LocalImage]:
    wanted = chosen.world, chosen.iteration
    return [image for image in images if (image.held.world, image.held.iteration) == wanted]


class _Clock:
    """Where the time goes."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
