"""The start of an incarnation: the inventory, the plan and the retrieval of an elastic job
(`ckptd.client.recovery.global_recovery`).

No controller takes part. One rank of each node tells what the daemon's files there hold
(`discovery`); all compute the same plan from that, and compare its digest. An image that turns out to
be damaged is left out of the next inventory. Where storage has a newer state than memory, or memory
none, that is brought into memory first, and all begin again (`checkpoint_selection`, `store_start`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ckptd.client.elastic.incarnation.checkpoint_selection import choose_with_storage
from ckptd.client.elastic.incarnation.discovery import Discovery, Here, Wishes, look
from ckptd.client.elastic.incarnation.image_inventory import ImageKey, LocalImage
from ckptd.client.elastic.incarnation.recorded_loads import Recorded, read_recorded
from ckptd.client.elastic.incarnation.store_start import DurableState, Storage
from ckptd.client.elastic.incarnation.unit_reading import LocalState, Unreadable
from ckptd.client.elastic.sharded.shard_shapes import numels_of
from ckptd.client.ranks.collectives import Collectives
from ckptd.client.recovery.global_recovery import agree_on_plan
from ckptd.core.elastic.elastic_types import Loads
from ckptd.core.elastic.incarnation_plan import IncarnationPlan, plan_world
from ckptd.core.elastic.incarnations import Chosen
from ckptd.errors import DaemonUnavailable, LocalProtocolError

__all__ = ["Started", "start_world"]

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
