"""The inventory of an incarnation: where its ranks are, what they were started with, and what their
nodes hold.

One rank of each node speaks for it. What is wrong with any rank is raised by all of them here.
"""

from __future__ import annotations

import importlib.metadata
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ckptd.client.elastic.incarnation.image_inventory import ImageKey, Inventory, settle
from ckptd.client.options import PlacementOptions
from ckptd.client.ranks.collectives import Collectives
from ckptd.core.elastic.incarnation_plan import Seat, nodes_of
from ckptd.core.elastic.incarnations import ExpertLayers, NodeHeld
from ckptd.errors import DaemonUnavailable
from ckptd.launch import connect
from ckptd.transport.messages import Hello, Welcome
from ckptd.transport.wire import RequestTimeout, WireError

__all__ = ["Discovery", "Here", "Wishes", "find_here", "look"]

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
