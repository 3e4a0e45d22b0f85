"""What the ranks do together when a world begins: tell what their nodes hold, plan, and make sure
that what is to be read can be.

No controller takes part. One rank of each node tells what the daemon's files there hold
(`looking`); all compute the same plan from that, and compare its digest. An image that turns out to
be damaged is left out, and all plan again. Where a rank vanishes meanwhile, the process group fails
on the others, the launcher starts the job again, and the next start plans from what is there then:
nothing was freed. Where storage has a newer state than memory, or memory none, that is brought into
memory first, and all plan again (`choosing`, `stored`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ckptd.client.elastic.incarnation.checkpoint_selection import choose_with_storage
from ckptd.client.elastic.incarnation.collective_read import read_on_all
from ckptd.client.elastic.incarnation.discovery import Here, Wishes, look
from ckptd.client.elastic.incarnation.image_inventory import ImageKey, LocalImage
from ckptd.client.elastic.incarnation.incarnation_plan import IncarnationPlan, plan_world
from ckptd.client.elastic.incarnation.recorded_loads import read_recorded
from ckptd.client.elastic.incarnation.store_start import Storage
from ckptd.client.elastic.incarnation.unit_reading import LocalState
from ckptd.client.elastic.sharded.shard_shapes import numels_of
from ckptd.client.ranks.collectives import Collectives
from ckptd.core.elastic.elastic_types import Loads
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
        DaemonUnavailable: a rank has no daemon, or cannot read what only its node holds; or storage is needed, and does not answer.
    """
    unusable: frozenset[ImageKey] = frozenset()
    storage = _storage(here, wishes, ranks)
    for _ in range(_PLANS):
        found = _attempt(here, wishes, ranks, unusable, storage)
        if isinstance(found, Started):
            return found
        unusable |= found
    raise DaemonUnavailable(
        f"no plan held after {_PLANS} attempts",
        operation="start a world",
        hint="The ranks' logs name the images that are damaged; nothing was freed: start again",
    )


def _storage(here: Here | Exception, wishes: Wishes, ranks: Collectives) -> Storage:
    if isinstance(here, Exception):  # raised on all ranks before storage is looked at
        return Storage(None, wishes.job, wishes.run, ranks)
    endpoint = here.endpoint if here.folder is not None else None
    return Storage(endpoint, wishes.job, wishes.run, ranks)


def _attempt(
    here: Here | Exception,
    wishes: Wishes,
    ranks: Collectives,
    unusable: frozenset[ImageKey],
    storage: Storage,
) -> Started | frozenset[ImageKey]:
    """A world; or what this rank has found to be unusable, where any has found something, or
    something came from storage.
    """
    clock = _Clock()
    looked = look(here, wishes, ranks, unusable)
    clock.lap("inventory_s")
    found = choose_with_storage(looked.held, wishes.layers, looked.speakers, storage)
    clock.lap("storage_s")
    if found is None:
        return frozenset()
    chosen, stored = found
    local = None
    if chosen is not None and looked.inventory is not None:
        local = LocalState(_images_of(chosen, looked.inventory.images), wishes.layers)
    with ExitStack() as given_up:
        if local is not None:
            given_up.callback(local.close)
        recorded = read_recorded(local, chosen, looked.seats, wishes.layers, ranks)
        if isinstance(recorded, frozenset):
            return recorded
        plan = plan_world(
            looked.next_world(stored.worlds),
            looked.seats,
            wishes.layers,
            recorded.loads_LE,
            chosen,
            threshold=wishes.threshold,
            max_straggler=wishes.max_straggler,
            numels=numels_of(recorded.shapes, wishes.layers),
        )
        clock.lap("plan_s")
        bad = _verify(local, plan, ranks)
        clock.lap("verify_s")
        if bad is not None:
            return bad
        given_up.pop_all()  # it is read from until all is loaded
    return Started(plan, chosen, recorded.loads_LE, local, clock.laps, recorded.shapes)


def _images_of(chosen: Chosen, images: Sequence[LocalImage]) -> list[LocalImage]:
    wanted = chosen.world, chosen.iteration
    return [image for image in images if (image.told.world, image.told.iteration) == wanted]


class _Clock:
    """Where the time goes."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now


def _verify(
    local: LocalState | None, plan: IncarnationPlan, ranks: Collectives
) -> frozenset[ImageKey] | None:
    """Hold and verify what this rank is to read; None if all ranks could, and have made the same plan."""
    handover, rank = plan.handover, ranks.rank

    def read() -> bytes:
        if local is not None and handover is not None:
            units = [give.unit for give in handover.gives if give.source == rank]
            local.open_for(units, [whose for giver, whose in handover.scalars if giver == rank])
        return plan.digest.encode()

    digests = read_on_all(read, ranks)
    if isinstance(digests, frozenset):
        return digests
    other = [r for r, digest in enumerate(digests) if digest != digests[0]]
    if other:
        raise LocalProtocolError(
            f"rank {other[0]} has made another plan than rank 0",
            operation="start a world",
            hint="Are NumPy and SciPy the same versions on all nodes?",
        )
    return None
