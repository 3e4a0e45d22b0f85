"""Durable checkpoints against the state in memory, and the node that brings each image. The rest is tested by
tests/e2e/test_elastic_stored.py.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from ckptd.client.elastic.incarnation.checkpoint_selection import (
    DurableState,
    Storage,
    missing_ranks,
    newer_than,
    share_out,
)
from ckptd.client.ranks.collectives import Collectives
from ckptd.core.elastic.incarnations import ChosenState, HeldImage, NodeHeld
from ckptd.errors import DaemonUnavailable
from ckptd.transport.messages import DurableWorld
from tests.client.rank_threads import outcomes


def stored(*checkpoints: tuple[int, int]) -> DurableState:
    return DurableState((0,), (), tuple(DurableWorld(*which, (10, 10)) for which in checkpoints))


def held(world: int, iteration: int) -> ChosenState:
    none = np.zeros((1, 1, 1), dtype=np.bool_)
    return ChosenState(world, iteration, {}, {}, none, none, np.zeros((1, 1), dtype=np.int64), {}, "", 1)


@pytest.mark.parametrize(
    ("memory", "durable", "expected"),
    [
        (None, [], None),
        (None, [(5, 40), (5, 36)], (5, 40)),
        ((5, 41), [(5, 40)], None),
        ((5, 40), [(5, 40)], None),
        ((5, 39), [(5, 40)], (5, 40)),
        ((5, 50), [(6, 40), (5, 48)], (6, 40)),
        ((6, 0), [(5, 48)], None),
    ],
)
def test_the_later_world_counts_first_and_of_one_world_the_later_iteration(
    memory: tuple[int, int] | None, durable: list[tuple[int, int]], expected: tuple[int, int] | None
) -> None:
    found = newer_than(None if memory is None else held(*memory), stored(*durable))
    assert (None if found is None else (found.world, found.iteration)) == expected


def test_only_images_of_that_very_iteration_and_world_need_not_be_brought() -> None:
    wanted = DurableWorld(5, 40, (1, 1, 1, 1))
    nodes = [
        NodeHeld(images=(HeldImage(5, 0, 40, False, 0), HeldImage(5, 1, 41, True, 0))),
        NodeHeld(images=(HeldImage(4, 2, 40, False, 0), HeldImage(5, 3, 40, True, 0))),
    ]
    assert missing_ranks(wanted, nodes) == [1, 2]


def test_images_are_shared_out_by_their_bytes_each_once() -> None:
    assert share_out([0, 1, 2, 3], [9, 1, 5, 5], [2, 4]) == {2: (0, 1), 4: (2, 3)}
    assert share_out([1], [0, 7], [3, 5]) == {3: (1,), 5: ()}
    draw = random.Random(7)
    for _ in range(50):
        sizes = [draw.randrange(1, 100) for _ in range(draw.randrange(1, 12))]
        nodes = sorted(draw.sample(range(9), draw.randrange(1, 5)))
        found = share_out(range(len(sizes)), sizes, nodes)
        assert sorted(rank for each in found.values() for rank in each) == list(range(len(sizes)))
        loads = [sum(sizes[rank] for rank in each) for each in found.values()]
        assert max(loads) - min(loads) <= max(sizes)


def gone() -> str:
    raise DaemonUnavailable("no daemon answers", operation="find")


@pytest.mark.parametrize("enough", [False, True])
def test_a_daemon_that_is_gone_when_storage_is_looked_at_is_heard_of_by_all(enough: bool) -> None:
    """The ranks of a node without a store, too; and where memory is enough all go on."""

    def look(ranks: Collectives) -> DurableState:
        storage = Storage(gone if ranks.rank == 0 else None, "job", "run", ranks)
        return storage.look([0, 1], enough=enough)

    found = outcomes([look, look])
    if enough:
        assert found == [DurableState(), DurableState()]
    else:
        assert all("no daemon answers" in str(one) for one in found), found
        assert all(isinstance(one, DaemonUnavailable) for one in found)
