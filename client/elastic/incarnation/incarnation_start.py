"""The start of an incarnation of an elastic job: inventory, plan and retrieval
(`ckptd.client.recovery.global_recovery`).

There is no controller. One rank of each node reports what the files of its daemon hold. All ranks
compute the same plan from the reports, and compare its digest. The next attempt leaves out an
image that proves damaged. Where storage has a newer state than memory, or memory has none, the
daemons bring that state into memory first, and the ranks begin again (`checkpoint_selection`).

Shapes: ``L`` layers, ``E`` experts of each.
"""

from __future__ import annotations

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

import ckptd
from ckptd.client import values
from ckptd.client.elastic.incarnation.checkpoint_selection import DurableState, Storage, choose_state
from ckptd.client.elastic.incarnation.image_inventory import (
    ImageKey,
    Inventory,
    LocalState,
    Unreadable,
    settle,
)
from ckptd.client.elastic.incarnation.whole_state import LOADS, SHAPES, numels_of
from ckptd.client.options import PlacementOptions
from ckptd.client.ranks.collectives import Collectives
from ckptd.client.recovery.global_recovery import agree_on_plan
from ckptd.core.elastic.elastic_types import Loads
from ckptd.core.elastic.incarnation_plan import IncarnationPlan, Seat, nodes_of, plan_incarnation
from ckptd.core.elastic.incarnations import ChosenState, ExpertLayers, NodeHeld
from ckptd.errors import DaemonUnavailable, LocalProtocolError
from ckptd.launch import connect
from ckptd.transport.messages import Hello, Welcome
from ckptd.transport.wire import RequestTimeout, WireError

# In each a rank may find one more damaged image: after trouble with a host's memory there are many.
_PLANS = 20
_DRAWN = 1000
_SETTLE_S = 5.0
_ANSWER_S = 10.0
_OPERATION = "start an incarnation"


@dataclass(frozen=True, slots=True)
class JobSettings:
    """What must be the same on all ranks.

    Args:
        placement: also sets the steps at which the ranks meet to look at the load: a rank with other
            steps would leave the others waiting.
    """

    job: str
    run: str
    layers: ExpertLayers
    placement: PlacementOptions


@dataclass(frozen=True, slots=True)
class LocalNode:
    """This rank's node; ``folder`` is None without a daemon: then the node holds nothing."""

    seat: Seat
    folder: Path | None
    endpoint: Callable[[], str] | None = None


@dataclass(slots=True)
class Started:
    """A planned incarnation.

    Args:
        local: holds what this rank will read, until it is closed.
        seconds: the duration of each part of the start.
        shapes: of the experts whose shards are in the state (`ShardShapes`); None: it has no shards.
    """

    plan: IncarnationPlan
    chosen: ChosenState | None
    loads_LE: Loads
    local: LocalState | None
    seconds: dict[str, float] = field(default_factory=dict)
    shapes: Mapping[str, Any] | None = None


def start_incarnation(node: LocalNode | Exception, settings: JobSettings, ranks: Collectives) -> Started:
    """Plan this incarnation; a collective call that returns on all ranks or raises on all.

    Args:
        node: this rank's node, or the error that prevented finding it, which the other ranks must learn.
    Raises:
        ValueError: ranks have different settings.
        ElasticError: fewer slots than experts, or a state that is only held in part and not durable.
        DaemonUnavailable: a rank has no daemon, or cannot read what only its node holds; or storage
            is needed and does not answer.
    """
    procedure = _Procedure(node, settings, ranks)
    agreed = agree_on_plan(ranks, procedure)
    if agreed is None:
        raise DaemonUnavailable(
            f"no plan held after {_PLANS} attempts",
            operation=_OPERATION,
            hint="The ranks' logs name the images that are damaged; nothing was freed: start again",
        )
    with agreed.undo as undo:
        digests, found = agreed.votes, agreed.inventory
        other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if other:
            raise LocalProtocolError(
                f"rank {other[0]} has made another plan than rank 0",
                operation=_OPERATION,
                hint="Are NumPy and SciPy the same versions on all nodes?",
            )
        undo.pop_all()  # the state is read from until all is loaded
    return Started(agreed.plan, found.chosen, found.loads_LE, found.local, procedure.clock.laps, found.shapes)


@dataclass(frozen=True, slots=True, eq=False)
class _Inventory:
    """The inventory of all nodes, the same on all ranks; ``local``: the part that lies on this node."""

    discovery: Discovery
    chosen: ChosenState | None
    stored: DurableState
    loads_LE: Loads
    shapes: Mapping[str, Any] | None
    local: LocalState | None


class _Procedure:
    """The start of an elastic job on the present ranks; ``clock``: durations of the last attempt."""

    attempts = _PLANS
    vote = str

    def __init__(self, node: LocalNode | Exception, settings: JobSettings, ranks: Collectives) -> None:
        self._node, self._settings, self._ranks = node, settings, ranks
        self._unusable: frozenset[ImageKey] = frozenset()
        endpoint = node.endpoint if isinstance(node, LocalNode) and node.folder is not None else None
        self._storage = Storage(endpoint, settings.job, settings.run, ranks)
        self.clock = _Clock()

    def inventory(self, undo: ExitStack) -> _Inventory:
        """What the nodes hold of the job, and the state from which it continues."""
        layers, ranks, self.clock = self._settings.layers, self._ranks, _Clock()
        found = discover(self._node, self._settings, ranks, self._unusable)
        self.clock.lap("inventory_s")
        chosen, stored = choose_state(found.held, layers, found.reporters, self._storage)
        self.clock.lap("storage_s")
        local = None
        if chosen is not None and found.inventory is not None:
            images = [one for one in found.inventory.images if chosen.is_of(one.held)]
            local = LocalState(images, layers)
            undo.callback(local.close)
        with self._noting_damage():
            loads_LE, shapes = _read_recorded(local, chosen, found.seats, layers, ranks)
        return _Inventory(found, chosen, stored, loads_LE, shapes, local)

    def plan(self, found: _Inventory) -> IncarnationPlan:
        """The place of each expert, and the source of each part of the state."""
        settings = self._settings
        plan = plan_incarnation(
            found.discovery.next_incarnation(found.stored.worlds),
            found.discovery.seats,
            settings.layers,
            found.loads_LE,
            found.chosen,
            threshold=settings.placement.threshold,
            max_straggler=settings.placement.max_straggler,
            numels=numels_of(found.shapes, settings.layers),
        )
        self.clock.lap("plan_s")
        return plan

    def retrieve(self, found: _Inventory, plan: IncarnationPlan, undo: ExitStack) -> str:
        """Hold and verify the images that this rank is to read; returns the digest of its plan."""
        handover, rank = plan.handover, self._ranks.rank
        with self._noting_damage():
            if found.local is not None and handover is not None:
                units = [give.unit for give in handover.gives if give.source == rank]
                recorders = [recorder for reader, recorder in handover.scalars if reader == rank]
                found.local.open_for(units, recorders)
        self.clock.lap("verify_s")
        return plan.digest

    @contextmanager
    def _noting_damage(self) -> Iterator[None]:
        """Leave an unreadable image out of the next inventory."""
        try:
            yield
        except Unreadable as error:
            self._unusable |= {error.image.key}
            raise


class _Clock:
    """The duration of each part, in seconds."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now


# -- discovery ---------------------------------------------------------------------------------------


def find_local_node(
    find_endpoint: Callable[[], str] | None, rank: int, slots: int, domain: str
) -> LocalNode | Exception:
    """This rank's node, or the error that prevented finding it: `discover` raises it on all ranks.

    Args:
        find_endpoint: of this node's daemon; None: nothing is kept, and the rank is a node of its own.
    """
    if find_endpoint is None:
        return LocalNode(Seat(f"rank-{rank}", f"rank-{rank}", slots), None)
    try:
        return _ask_daemon(find_endpoint, ckptd.__version__, slots, domain)
    except Exception as error:  # noqa: BLE001 - raised on all ranks, in `discover`
        return error


def _ask_daemon(find_endpoint: Callable[[], str], version: str, slots: int, domain: str) -> LocalNode:
    try:
        with connect(find_endpoint(), _ANSWER_S) as client:
            welcome = client.ask(Hello(version, os.getpid()), Welcome)
    except (RequestTimeout, WireError, OSError) as error:
        raise DaemonUnavailable(str(error), operation=_OPERATION) from error
    label = "" if welcome.card is None else welcome.card.labels.get(domain, "")
    seat = Seat(welcome.node_id, label or welcome.node_id, slots)
    return LocalNode(seat, Path(welcome.segment_dir), find_endpoint)


class _RankReport(msgspec.Struct, frozen=True):
    """A rank's first message; ``kept``: it has a daemon; ``drawn``: by lot, at least 1."""

    seat: Seat
    settings: str
    clock_s: int
    drawn: int
    kept: bool


@dataclass(frozen=True, slots=True, eq=False)
class Discovery:
    """The reports of all ranks, the same on all of them, and this node's inventory.

    Args:
        seats: of each rank.
        reporters: of each node the rank that reports what it holds: its first one.
        held: what each node holds, in the order of ``reporters``.
        inventory: of this node; None where nothing is kept.
        clock_s, drawn: the first rank's time, and a number of at least 1 that it drew by lot.
    """

    seats: Sequence[Seat]
    reporters: Sequence[int]
    held: Sequence[NodeHeld]
    inventory: Inventory | None
    clock_s: int
    drawn: int

    def next_incarnation(self, stored: Sequence[int]) -> int:
        """The number of the new incarnation: higher than all known ones, ``stored`` among them."""
        seen = max((*stored, *(number for node in self.held for number in node.worlds)), default=-1)
        # With a clock that is behind, numbers one above the last would collide: absent nodes may
        # know of an incarnation with that number, and their images would be taken for images of
        # this one when they return.
        return self.clock_s if self.clock_s > seen else seen + self.drawn


def discover(
    node: LocalNode | Exception,
    settings: JobSettings,
    ranks: Collectives,
    unusable: frozenset[ImageKey],
) -> Discovery:
    """Exchange what all ranks and nodes have; a collective call.

    Args:
        unusable: images to leave out.
    Raises:
        ValueError: on all ranks: ranks have different settings, or only some have a daemon.
        DaemonUnavailable: on all ranks: one did not find its node or cannot list what lies there
            (that rank raises its own error).
    """
    inventories: list[Inventory] = []

    def report() -> _RankReport:
        if isinstance(node, Exception):
            raise node
        if node.folder is not None:
            settle(node.folder, settings.job, settings.run, _SETTLE_S)
            inventories.append(Inventory(node.folder, settings.job, settings.run, settings.layers, unusable))
        drawn = 1 + secrets.randbelow(_DRAWN)
        return _RankReport(node.seat, repr(settings), int(time.time()), drawn, node.folder is not None)

    reports = ranks.agree(report, _RankReport)
    _check_equal(reports)
    seats = [one.seat for one in reports]
    reporters = [next(r for r, seat in enumerate(seats) if seat.node == name) for name in nodes_of(seats)]
    inventory = inventories[0] if inventories else None
    own = inventory.of_node if inventory is not None and ranks.rank in reporters else NodeHeld()
    by_rank = ranks.gather(own, NodeHeld)
    held = [by_rank[rank] for rank in reporters]
    return Discovery(seats, reporters, held, inventory, reports[0].clock_s, reports[0].drawn)


def _check_equal(reports: Sequence[_RankReport]) -> None:
    first = reports[0]
    for rank, one in enumerate(reports):
        if one.settings != first.settings:
            raise ValueError(
                f"rank {rank} was started with {one.settings}, rank 0 with {first.settings}: "
                "they must be the same"
            )
        if one.kept != first.kept:
            without = 0 if one.kept else rank
            raise ValueError(
                f"rank {without} was started with daemon=None, rank {rank - without} was not: "
                "pass it on all ranks or on none"
            )


# -- what the plan needs of the state ------------------------------------------------------------------


def _read_recorded(
    local: LocalState | None,
    chosen: ChosenState | None,
    seats: Sequence[Seat],
    layers: ExpertLayers,
    ranks: Collectives,
) -> tuple[Loads, Mapping[str, Any] | None]:
    """The recorded load history (zeros where none fits) and the shapes of shards; a collective call.

    Both come from the lowest rank of the state, read by the first rank on a node that holds it.

    Raises:
        TryAgain: on all ranks: the image to read is unusable.
        DaemonUnavailable: on all ranks: reading failed otherwise (the reader raises its own error).
    """
    loads_LE = np.zeros((len(layers.names), layers.num_experts), dtype=np.int64)
    if chosen is None:
        return loads_LE, None
    recorder = min(chosen.scalars)
    nodes = nodes_of(seats)
    reader = next(r for r, s in enumerate(seats) if nodes.index(s.node) in chosen.scalars[recorder])

    def read() -> bytes:
        if ranks.rank != reader:
            return b""
        assert local is not None, "its node holds an image"
        state = local.state(recorder)
        found = {name: state[name] for name in (LOADS, SHAPES) if name in state}
        return values.pack(found, "what a plan needs")

    recorded = values.unpack(ranks.agree(read, bytes)[reader])
    if LOADS in recorded:
        history = np.array(values.unpack(recorded[LOADS])["loads"])
        loads_LE = history if history.shape == loads_LE.shape else loads_LE
    return loads_LE, values.unpack(recorded[SHAPES]) if SHAPES in recorded else None
