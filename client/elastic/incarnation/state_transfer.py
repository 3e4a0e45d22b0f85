"""A rank takes over what it is to have of the state: from its node, and from the ranks that hold the rest."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ckptd.client.elastic import ExpertShards
from ckptd.client.elastic.incarnation.incarnation_start import Started
from ckptd.client.elastic.incarnation.optimizer_extras import check_recorded_equal
from ckptd.client.elastic.incarnation.sharded_job import check_strategy, firsts_of
from ckptd.client.elastic.incarnation.unit_loading import Loader, check_fits
from ckptd.client.elastic.incarnation.unit_reading import LocalState
from ckptd.client.elastic.incarnation.whole_state import WholeState
from ckptd.client.log_lines import get_logger
from ckptd.client.ranks.collectives import Collectives, ship_bytes
from ckptd.core.elastic.handover import Handover
from ckptd.core.elastic.incarnations import ExpertLayers

__all__ = ["take_over"]

logger = get_logger(__name__)


def take_over(
    world: Started,
    whole: WholeState,
    shards: ExpertShards | None,
    layers: ExpertLayers,
    ranks: Collectives,
) -> tuple[Loader, dict[str, float]]:
    """Fill the live model as the world's handover says; all ranks or none go on. A collective call.

    Returns:
        What is to begin when the first step does, and where the time went, in seconds.
    Raises:
        ValueError: something does not fit the model here.
        DaemonUnavailable: another rank could not.
    """
    handover, rank = world.plan.handover, ranks.rank
    assert handover is not None, "a world that begins takes over nothing"
    firsts = firsts_of(whole.binding, shards, layers, rank, len(world.plan.node_of))
    loader = Loader(whole.binding, whole.stateful, whole.kept, firsts)
    with ranks.all_or_none():
        check_strategy(world.shapes, shards, layers)
        mine = [give.unit for give in handover.gives if give.target == rank]
        check_fits(whole.binding, mine, set(whole.binding.params))
        loader.clear()
    return loader, _fill(world, handover, loader, ranks)


def _fill(world: Started, handover: Handover, loader: Loader, ranks: Collectives) -> dict[str, float]:
    """What this rank's node holds is read there, the rest comes from other ranks; where the time
    went, in seconds.
    """
    local, rank = world.local, ranks.rank
    began = time.perf_counter()
    with ranks.all_or_none():
        units, scalars = _outgoing(local, handover, rank, len(world.plan.node_of))
    came = ship_bytes(units), ship_bytes(scalars)
    shipped = time.perf_counter()
    with ranks.all_or_none():
        for give in handover.gives:
            if give.source == rank == give.target:
                assert local is not None, "it was verified"
                loader.units(b"".join(local.unit(give.unit)))
        for stream in came[0]:
            loader.units(stream)
        loader.scalars(b"".join(came[1]), rank)
    check_recorded_equal(loader.digests(), loader.whose, ranks)
    with ranks.all_or_none():
        loader.finish()
    if local is not None:
        local.close()
    seconds = {"ship_s": shipped - began, "load_s": time.perf_counter() - began}
    logger.info(
        "rank %d loaded %d bytes in %.3f s; %d replicas of experts travelled, %d experts come from "
        "snapshots alone",
        rank,
        loader.nbytes,
        seconds["load_s"],
        handover.expert_moves,
        handover.from_snapshots,
    )
    return seconds


def _outgoing(
    local: LocalState | None, handover: Handover, rank: int, ranks: int
) -> tuple[Sequence[list[bytes | memoryview]], Sequence[list[bytes]]]:
    """For each rank the units and the step scalars that this one gives it."""
    units: list[list[bytes | memoryview]] = [[] for _ in range(ranks)]
    scalars: list[list[bytes]] = [[] for _ in range(ranks)]
    if local is not None:
        for give in handover.gives:
            if give.source == rank != give.target:
                units[give.target] += local.unit(give.unit)
        for target, (giver, whose) in enumerate(handover.scalars):
            if giver == rank:
                scalars[target].append(local.scalars(whose))
    return units, scalars
