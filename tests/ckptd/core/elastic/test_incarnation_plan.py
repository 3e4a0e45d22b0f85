"""Shards of experts on another number of ranks: every element goes once from its old owner to its new one."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.elastic.incarnation_plan import Give, plan_handover
from ckptd.core.elastic.incarnations import (
    SHARDS,
    ChosenState,
    ExpertLayers,
    HeldImage,
    NodeHeld,
    Unit,
    choose,
    common_rows,
    shard_length,
    shard_rows,
)
from ckptd.errors import ElasticError, LocalProtocolError

LAYERS = ExpertLayers(("a.moe", "b.moe"), 2)
DENSE = [Unit("model.gate"), Unit("model.head", 0, 3)]
NUMELS = {
    f"{SHARDS}{layer}.{number}.{name}": numel
    for layer in LAYERS.names
    for number in range(2)
    for name, numel in (("up", 12), ("bias", 1), ("odd", 7), ("none", 0))
}

counts = st.integers(1, 9)


@given(numel=st.integers(0, 60), before=counts, after=counts)
def test_every_element_comes_once_from_its_owner(numel: int, before: int, after: int) -> None:
    """What each rank puts together is what cutting the whole parameter gives it, padding aside."""
    length = shard_length(numel, before)
    whole = np.arange(1, numel + 1)
    padded = np.concatenate([whole, np.zeros(before * length - numel, dtype=np.int64)])
    old = padded.reshape(before, length)
    new = [np.zeros(shard_length(numel, after), dtype=np.int64) for _ in range(after)]
    touched = Counter[int]()
    for owner, rank, start, stop in common_rows(numel, before, after):
        first = rank * shard_length(numel, after)
        part = old[owner, start - owner * length : stop - owner * length]
        assert len(part) == stop - start, "all of it lies in the shard of its owner"
        if start < stop:
            new[rank][start - first : stop - first] += part
        touched[rank] += 1
    assert np.array_equal(np.concatenate(new)[:numel], whole)
    assert not np.concatenate(new)[numel:].any(), "padding stays zeros"
    assert touched.keys() == set(range(after)), "who gets no element hears of the optimizer's steps"


@given(numel=st.integers(0, 60), ranks=counts)
def test_the_same_ranks_keep_what_they_have(numel: int, ranks: int) -> None:
    for owner, rank, start, stop in common_rows(numel, ranks, ranks):
        assert (start, stop) == shard_rows(numel, ranks, rank)
        assert owner == rank or start == stop


def shards_of(rank: int, ranks: int) -> list[Unit]:
    """The units of a rank's shards."""
    found = []
    for name, numel in NUMELS.items():
        length = shard_length(numel, ranks)
        found.append(Unit(name, rank * length, (rank + 1) * length))
    return sorted(found)


def node(ranks: int, *images: tuple[int, int, bool]) -> NodeHeld:
    """A node with images of a world of so many ranks: whose, of which iteration, and whether parked."""
    covered = [[*DENSE, *shards_of(rank, ranks)] for rank, _, _ in images]
    units = sorted({unit for some in covered for unit in some})
    return NodeHeld(
        tuple((unit, 8 * (unit.stop - unit.start)) for unit in units),
        tuple(tuple(map(units.index, some)) for some in covered),
        tuple(
            HeldImage(5, rank, iteration, parked, layout)
            for layout, (rank, iteration, parked) in enumerate(images)
        ),
        {5: tuple(DENSE)} if images else {},
        (5,) if images else (),
        {5: ranks} if images else {},
    )


def chosen(*held: NodeHeld) -> ChosenState:
    found = choose(held, LAYERS)
    assert found is not None
    return found


def test_shards_are_known_by_layer_and_expert() -> None:
    assert LAYERS.shard_of(f"{SHARDS}b.moe.1.up.weight") == (1, 1)
    assert LAYERS.expert_of(f"{SHARDS}b.moe.1.up.weight") is None
    for other in ("b.moe.1.up", f"{SHARDS}c.moe.1.up", f"{SHARDS}a.moe.2.up", f"{SHARDS}a.moe"):
        assert LAYERS.shard_of(other) is None, other


def test_a_lost_ranks_shards_come_from_its_snapshot() -> None:
    found = chosen(node(3, (0, 9, True), (1, 9, False), (1, 8, False)), node(3, (2, 9, True)))
    assert (found.iteration, found.ranks, found.all_parked) == (9, 3, False)
    assert "the shards of 2 of 3 ranks are parked" in found.reason
    assert "first of rank 1" in found.reason
    assert found.experts_LNE.sum() == 0, "replicas are in no image"
    assert plan_handover(found, LAYERS, np.ones((2, 2, 2)), [0, 1], NUMELS).from_snapshots == 4


def test_all_goes_back_to_the_iteration_of_which_all_shards_are_held() -> None:
    """Parked at 9, and of the lost rank only 8 is there."""
    snapshots = [(0, 8, False), (1, 8, False)]
    found = chosen(node(3, (0, 9, True), *snapshots), node(3, (2, 9, True), (2, 8, False)))
    assert found.iteration == 8


def test_shards_that_nobody_holds_are_named_by_their_rank() -> None:
    """Of the rank that is gone no node tells anything but how many there were."""
    with pytest.raises(ElasticError, match="no node holds the shards of rank 1"):
        choose([node(3, (0, 9, True)), node(3, (2, 9, True))], LAYERS)


def test_how_long_parameters_are_must_be_known() -> None:
    found = chosen(node(1, (0, 9, True)))
    with pytest.raises(LocalProtocolError, match=r"length of expert_shards\.shards\.a\.moe\.0"):
        plan_handover(found, LAYERS, np.ones((2, 1, 2)), [0], {})


def test_what_nodes_tell_of_their_worlds_survives_the_wire() -> None:
    told = node(3, (0, 9, True))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=NodeHeld) == told


@given(data=st.data(), before=st.integers(1, 4), nodes=st.integers(1, 4))
def test_ranks_read_what_their_node_has_and_get_the_rest_once(
    data: st.DataObject, before: int, nodes: int
) -> None:
    places = st.sets(st.integers(0, nodes - 1), min_size=1)
    held = [data.draw(places, label=f"nodes of rank {rank}") for rank in range(before)]
    images = [[(r, 9, bool(r % 2)) for r in range(before) if n in held[r]] for n in range(nodes)]
    found = chosen(*[node(before, *some) for some in images])
    node_of = [*range(nodes), *data.draw(st.lists(st.integers(0, nodes - 1), max_size=2))]
    replicas = np.ones((2, len(node_of), 2), dtype=np.int64)
    plan = plan_handover(found, LAYERS, replicas, node_of, NUMELS)
    assert plan == plan_handover(found, LAYERS, replicas, node_of, NUMELS)
    for name, numel in NUMELS.items():
        for rank in range(len(node_of)):
            mine = [g for g in plan.gives if g.target == rank and g.unit.param == name]
            assert_tiled(mine, shard_rows(numel, len(node_of), rank))
            for give in mine if numel else ():
                # An element, or where a rank has none the last one, lies in that rank's shard.
                lies_with = min(give.unit.start, numel - 1) // shard_length(numel, before)
                assert node_of[give.source] in held[lies_with]
                assert give.source == rank or node_of[rank] not in held[lies_with]
    for unit in DENSE:
        assert sorted(g.target for g in plan.gives if g.unit == unit) == list(range(len(node_of)))


def assert_tiled(gives: list[Give], rows: tuple[int, int]) -> None:
    """These are the rows, each of them once."""
    at = rows[0]
    for give in sorted(gives, key=lambda g: g.unit.start):
        assert give.unit.start == at
        at = give.unit.stop
    assert gives
    assert at == rows[1]
