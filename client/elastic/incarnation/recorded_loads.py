"""What a plan needs of the state itself, beside what the nodes tell of it: how many tokens each
expert got, and of which shapes experts are.

Shapes: ``L`` layers, ``E`` experts of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptd.client import values
from ckptd.client.elastic.incarnation.unit_reading import LocalState
from ckptd.client.elastic.sharded.shard_shapes import SHAPES
from ckptd.client.ranks.collectives import Collectives
from ckptd.core.elastic.elastic_types import Loads
from ckptd.core.elastic.incarnation_plan import Seat, nodes_of
from ckptd.core.elastic.incarnations import Chosen, ExpertLayers

__all__ = ["LOADS", "Recorded", "read_recorded"]

LOADS = "ckptd.loads"
"""The name in the user's state under which the load history is recorded."""


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
