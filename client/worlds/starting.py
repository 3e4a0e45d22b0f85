"""What the ranks do together when a world begins: tell what their nodes hold, plan, and make sure that what is to be read can be.

No controller takes part. One rank of each node tells what the daemon's files there hold; all compute the same plan from that, and compare its
digest. An image that turns out to be damaged is left out, and all plan again. Where a rank vanishes meanwhile, the
process group fails on the others, the launcher starts the job again, and the next start plans from what is there then: nothing was freed.
Where storage has a newer state than memory, or memory none, that is brought into memory first, and all plan again (`stored`).
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np

from ckptd.client import values
from ckptd.client.agreement import Exchange, Failure, raise_together
from ckptd.client.worlds.inventory import Inventory, settle
from ckptd.client.worlds.planning import Seat, WorldPlan, nodes_of, plan_world
from ckptd.client.worlds.reading import LocalState, Unreadable
from ckptd.client.worlds.shard_shapes import SHAPES, numels_of
from ckptd.client.worlds.stored import Storage, Stored, missing_ranks, newer_than
from ckptd.elastic.types import Loads
from ckptd.elastic.worlds import Chosen, ExpertLayers, NodeHeld, choose
from ckptd.errors import DaemonUnavailable, ElasticError, LocalProtocolError
from ckptd.transport.messages import Hello, Welcome
from ckptd.transport.wire import ControlClient, RequestTimeout, WireError

__all__ = ["Here", "Started", "Wishes", "meet_daemon", "start_world"]

logger = logging.getLogger(__name__)

# In each a rank may come upon one more damaged image: after trouble with a host's memory there are many.
_PLANS = 20
_DRAWN = 1000
# A job that ended within its first steps has parts of a state, if a rank died before it had a snapshot: whoever was left is parked. To do
# these few steps again costs less than somebody who has to look at it.
_FEW_STEPS = 10
_SETTLE_S = 5.0
_ANSWER_S = 10.0
LOADS = "ckptd.loads"
"""The name in the user's state under which the load history is recorded."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What must be the same on all ranks.

    Args:
        domain: the label of a node's card that names its failure domain; empty: each node is one.
    """

    job: str
    run: str
    layers: ExpertLayers
    threshold: int
    max_straggler: float | None
    domain: str = ""


@dataclass(frozen=True, slots=True)
class Here:
    """This rank's node; ``folder`` is None where there is no daemon, and nothing is held."""

    seat: Seat
    folder: Path | None
    endpoint: Callable[[], str] | None = None


@dataclass(slots=True)
class Started:
    """A world that is planned; ``local`` holds what this rank will read until it is closed."""

    plan: WorldPlan
    chosen: Chosen | None
    loads_LE: Loads
    local: LocalState | None
    seconds: dict[str, float] = field(default_factory=dict)
    # Of the experts whose shards are in the state (`ShardShapes`); None: it has none.
    shapes: Mapping[str, Any] | None = None


class _Told(msgspec.Struct, frozen=True):
    """What a rank tells first; ``kept``: it has a daemon; ``drawn``: by lot, at least 1."""

    seat: Seat
    wishes: str
    clock_s: int
    drawn: int
    kept: bool
    failure: Failure


class _Recorded(msgspec.Struct, frozen=True):
    """What a rank has read that all need for a plan; ``again``: all are to look anew."""

    packed: bytes = b""
    again: bool = False
    failure: Failure = Failure()


class _Read(msgspec.Struct, frozen=True):
    """Whether a rank can read what it is to read, or why not; ``again``: not this image, perhaps another."""

    digest: str
    again: bool = False
    failure: Failure = Failure()


def meet_daemon(find_endpoint: Callable[[], str], version: str, slots: int, domain: str) -> Here:
    """Ask the daemon of this node who it is.

    Raises:
        DaemonUnavailable: none answers.
    """
    try:
        with ControlClient(find_endpoint(), _ANSWER_S) as client:
            welcome = client.ask(Hello(version, os.getpid()), Welcome)
    except (RequestTimeout, WireError, OSError) as error:
        raise DaemonUnavailable(str(error), operation="start a world") from error
    label = "" if welcome.card is None else welcome.card.labels.get(domain, "")
    seat = Seat(welcome.node_id, label or welcome.node_id, slots)
    return Here(seat, Path(welcome.segment_dir), find_endpoint)


def start_world(here: Here | Exception, wishes: Wishes, rank: int, meet: Exchange) -> Started:
    """Plan this world; a collective call: it returns on all ranks, or raises on all.

    Args:
        here: where this rank is; or why that could not be found out, which the others have to hear.
    Raises:
        ValueError: ranks have other wishes.
        ElasticError: fewer slots than experts, or a state that is held in part only, and not durable either.
        DaemonUnavailable: a rank has no daemon, or cannot read what only its node holds; or storage is needed, and does not answer.
    """
    unusable: frozenset[tuple[str, int, int]] = frozenset()
    storage = _storage(here, wishes, rank, meet)
    for _ in range(_PLANS):
        found = _attempt(here, wishes, rank, meet, unusable, storage)
        if isinstance(found, Started):
            return found
        unusable |= found
    raise DaemonUnavailable(
        f"no plan held after {_PLANS} attempts",
        operation="start a world",
        hint="The ranks' logs name the images that are damaged; nothing was freed: start again",
    )


def _attempt(
    here: Here | Exception,
    wishes: Wishes,
    rank: int,
    meet: Exchange,
    unusable: frozenset[tuple[str, int, int]],
    storage: Storage,
) -> Started | frozenset[tuple[str, int, int]]:
    """A world; or what this rank has found to be unusable, where any has found something, or something came from storage."""
    clock = _Clock()
    inventory, told, held = _look(here, wishes, rank, meet, unusable)
    clock.lap("inventory_s")
    seats = [one.seat for one in told]
    found = _choose(held, wishes, _speakers(seats), storage)
    clock.lap("storage_s")
    if found is None:
        return frozenset()
    chosen, stored = found
    local = None
    if chosen is not None and inventory is not None:
        images = [
            i
            for i in inventory.images
            if (i.told.world, i.told.iteration) == (chosen.world, chosen.iteration)
        ]
        local = LocalState(images, wishes.layers)
    with ExitStack() as given_up:
        if local is not None:
            given_up.callback(local.close)
        recorded = _recorded(local, chosen, seats, rank, meet)
        if isinstance(recorded, frozenset):
            return recorded
        loads = _loads(recorded, wishes.layers)
        shapes = values.unpack(recorded[SHAPES]) if SHAPES in recorded else None
        known = [world for node in held for world in node.worlds]
        plan = plan_world(
            _number(told[0], [*known, *stored.worlds]),
            seats,
            wishes.layers,
            loads,
            chosen,
            threshold=wishes.threshold,
            max_straggler=wishes.max_straggler,
            numels=numels_of(shapes, wishes.layers),
        )
        clock.lap("plan_s")
        bad = _open(local, plan, seats[rank].node, rank, meet)
        clock.lap("verify_s")
        if bad is not None:
            return bad
        given_up.pop_all()  # it is read from until all is loaded
    return Started(plan, chosen, loads, local, clock.laps, shapes)


def _number(first: _Told, known: Sequence[int]) -> int:
    """Of the new world: higher than all that are known here."""
    seen = max(known, default=-1)
    # A clock that is behind does not tell worlds apart: nodes that are away may know of one with the next number, and their images would be
    # taken for those of this one when they are back.
    return first.clock_s if first.clock_s > seen else seen + first.drawn


class _Clock:
    """Where the time goes."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now


def _look(
    here: Here | Exception,
    wishes: Wishes,
    rank: int,
    meet: Exchange,
    unusable: frozenset[tuple[str, int, int]],
) -> tuple[Inventory | None, list[_Told], list[NodeHeld]]:
    """What lies on this node, where all ranks are, and what lies on all nodes."""
    inventory, failed = None, here if isinstance(here, Exception) else None
    seat = Seat("unknown", "", 0) if isinstance(here, Exception) else here.seat
    try:
        if not isinstance(here, Exception) and here.folder is not None:
            settle(here.folder, wishes.job, wishes.run, _SETTLE_S)
            inventory = Inventory(here.folder, wishes.job, wishes.run, wishes.layers, unusable)
    except Exception as error:  # noqa: BLE001 - the others wait to hear of it; raised below
        failed = error
    kept = not isinstance(here, Exception) and here.folder is not None
    mine = _Told(
        seat,
        repr(wishes),
        int(time.time()),
        1 + secrets.randbelow(_DRAWN),
        kept,
        Failure.of(seat.node, failed),
    )
    told = [msgspec.msgpack.decode(data, type=_Told) for data in meet(msgspec.msgpack.encode(mine))]
    raise_together([one.failure for one in told], failed)
    for other, one in enumerate(told):
        if one.wishes != told[0].wishes:
            raise ValueError(
                f"rank {other} was started with {one.wishes}, rank 0 with {told[0].wishes}: they must be the same"
            )
        if one.kept != told[0].kept:
            without = 0 if one.kept else other
            raise ValueError(
                f"rank {without} was started with daemon=None, rank {other - without} was not: pass it on all ranks or on none"
            )
    speaks = _speakers([one.seat for one in told])
    words = NodeHeld() if inventory is None else inventory.told
    said = meet(msgspec.msgpack.encode(words) if rank in speaks else b"")
    return inventory, told, [msgspec.msgpack.decode(said[r], type=NodeHeld) for r in speaks]


def _speakers(seats: Sequence[Seat]) -> list[int]:
    """The rank of each node that tells what it holds: its first one."""
    return [next(r for r, seat in enumerate(seats) if seat.node == n) for n in nodes_of(seats)]


def _storage(here: Here | Exception, wishes: Wishes, rank: int, meet: Exchange) -> Storage:
    if isinstance(here, Exception):  # raised on all ranks before storage is looked at
        return Storage(None, "unknown", wishes.job, wishes.run, rank, meet)
    endpoint = here.endpoint if here.folder is not None else None
    return Storage(endpoint, here.seat.node, wishes.job, wishes.run, rank, meet)


def _choose(
    held: Sequence[NodeHeld], wishes: Wishes, speakers: Sequence[int], storage: Storage
) -> tuple[Chosen | None, Stored] | None:
    """Where to go on, and what is durable; None: something was brought from storage, or could not be, so all look again.

    Raises:
        ElasticError: something is held, and of no iteration all; and nothing is durable.
    """
    chosen, lacking = None, None
    try:
        chosen = choose(held, wishes.layers)
    except ElasticError as error:  # the same on all ranks; storage may have what is lacking
        lacking = error
    stored = storage.look(speakers, enough=chosen is not None)
    wanted = newer_than(chosen, stored)
    if wanted is not None:
        if lacking is not None:
            logger.warning("%s", lacking.message)
        missing = missing_ranks(wanted, held)
        if not missing:
            _explain(held, wishes, (wanted.world, wanted.iteration))
        storage.bring(wanted, missing, stored, speakers)
        return None
    reached = max((image.iteration for node in held for image in node.images), default=-1)
    if lacking is not None and reached <= _FEW_STEPS:
        logger.warning("%s; these are the job's first steps: it begins anew", lacking.message)
        return None, stored
    if lacking is not None and stored.nodes:
        raise ElasticError(
            f"{lacking.message}; and no checkpoint of this run is durable",
            operation=lacking.operation,
            hint=lacking.hint,
        )
    if lacking is not None:
        raise lacking
    if chosen is not None and (chosen.world, chosen.iteration) == storage.brought:
        chosen = replace(chosen, reason=f"{chosen.reason}; it was brought from storage")
    return chosen, stored


def _explain(held: Sequence[NodeHeld], wishes: Wishes, which: tuple[int, int]) -> NoReturn:
    """All ranks' images of a durable checkpoint are here, and make up no whole state.

    Raises:
        ElasticError: names what is lacking.
    """
    choose(
        [
            msgspec.structs.replace(
                node, images=tuple(i for i in node.images if (i.world, i.iteration) == which)
            )
            for node in held
        ],
        wishes.layers,
    )
    raise LocalProtocolError(f"{which} is whole, and was not chosen", operation="start a world")


def _recorded(
    local: LocalState | None,
    chosen: Chosen | None,
    seats: Sequence[Seat],
    rank: int,
    meet: Exchange,
) -> dict[str, bytes] | frozenset[tuple[str, int, int]]:
    """What a plan needs of the state of the lowest rank that is held, read by the first rank on a node that holds it: the load history, and
    the shapes of experts of which there are shards, each packed."""
    if chosen is None:
        return {}
    whose = min(chosen.scalars)
    nodes = nodes_of(seats)
    reads = next(
        r for r, seat in enumerate(seats) if nodes.index(seat.node) in chosen.scalars[whose]
    )
    packed, bad, again, failed = b"", frozenset[tuple[str, int, int]](), False, None
    try:
        if rank == reads:
            assert local is not None, "its node holds an image"
            state = local.state(whose)
            found = {name: state[name] for name in (LOADS, SHAPES) if name in state}
            packed = values.pack(found, "what a plan needs")
    except Unreadable as error:
        logger.error("%s; the ranks plan without it", error)
        again, bad = True, frozenset([error.image.key])
    except KeyError as error:  # it was given up between two looks at the folder
        logger.warning("%s any more; the ranks plan again", error)
        again = True
    except Exception as error:  # noqa: BLE001 - the others wait to hear of it; raised below
        failed = error
    mine = _Recorded(packed, again, Failure.of(seats[rank].node, failed))
    said = [
        msgspec.msgpack.decode(data, type=_Recorded) for data in meet(msgspec.msgpack.encode(mine))
    ]
    raise_together([one.failure for one in said], failed)
    if said[reads].again:
        return bad
    recorded: dict[str, bytes] = values.unpack(said[reads].packed)
    return recorded


def _loads(recorded: Mapping[str, bytes], layers: ExpertLayers) -> Loads:
    """The load history; zeros, where none was recorded that fits."""
    shape = len(layers.names), layers.num_experts
    if LOADS not in recorded:
        return np.zeros(shape, dtype=np.int64)
    loads = np.array(values.unpack(recorded[LOADS])["loads"])
    return loads if loads.shape == shape else np.zeros(shape, dtype=np.int64)


def _open(
    local: LocalState | None, plan: WorldPlan, node: str, rank: int, meet: Exchange
) -> frozenset[tuple[str, int, int]] | None:
    """Hold and verify what this rank is to read; None if all ranks could."""
    bad, failed, again = frozenset[tuple[str, int, int]](), None, False
    handover = plan.handover
    try:
        if local is not None and handover is not None:
            units = [give.unit for give in handover.gives if give.source == rank]
            local.open_for(units, [whose for giver, whose in handover.scalars if giver == rank])
    except Unreadable as error:
        logger.error("%s; the ranks plan without it", error)
        bad, again = frozenset([error.image.key]), True
    except KeyError as error:  # it was given up between two looks at the folder
        logger.warning("%s any more; the ranks plan again", error)
        again = True
    except Exception as error:  # noqa: BLE001 - the others wait to hear of it; raised below
        failed = error
    mine = _Read(plan.digest, again, Failure.of(node, failed))
    said = [msgspec.msgpack.decode(data, type=_Read) for data in meet(msgspec.msgpack.encode(mine))]
    raise_together([one.failure for one in said], failed)
    if any(one.again for one in said):
        return bad
    other = [r for r, one in enumerate(said) if one.digest != said[0].digest]
    if other:
        raise LocalProtocolError(
            f"rank {other[0]} has made another plan than rank 0",
            operation="start a world",
            hint="Are NumPy and SciPy the same versions on all nodes?",
        )
    return None
