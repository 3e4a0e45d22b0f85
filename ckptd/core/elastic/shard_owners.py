"""Which elements of the experts' shards go from whom to whom, when other ranks own them. Pure.

Every rank of a world owns a shard of every parameter of every expert, wherever that is:
``ceil(numel / ranks)`` elements of the flat parameter, the last ones padded with zeros. In a world
of another number of ranks the borders lie elsewhere. So units are counted in elements of the flat
parameter: a rank gets each element that it is to own once, from the shard that had it, and of
nobody's shard more than that. Padding does not travel: it is zeros.

Complexity: for each parameter as many units as there are ranks before and after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckptd.core.elastic.incarnations import Chosen, Unit
from ckptd.errors import LocalProtocolError

__all__ = ["ShardGive", "common_rows", "shard_gives", "shard_length", "shard_rows"]

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
