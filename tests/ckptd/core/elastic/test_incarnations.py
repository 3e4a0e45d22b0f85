"""Where a job goes on: the newest iteration of the newest world of which everything is held; and
who gives what to whom.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from ckptd.core.elastic.incarnation_plan import Give, plan_handover
from ckptd.core.elastic.incarnations import (
    BUFFER,
    ChosenState,
    ExpertLayers,
    HeldImage,
    NodeHeld,
    Unit,
    choose,
)
from ckptd.errors import ElasticError

LAYERS = ExpertLayers(("a.moe", "b.moe"), 4)
DENSE = [Unit("dense", 0, 3), Unit("dense", 3, 6), Unit("gate")]


def experts(*numbers: int) -> list[Unit]:
    """All units of these experts, in both layers."""
    return [
        Unit(f"{layer}.experts.{number}.{name}")
        for layer in LAYERS.names
        for number in numbers
        for name in ("up", "down")
    ]


ALL = [*DENSE, *experts(0, 1, 2, 3)]


def node(*images: tuple[int, int, int, bool, Sequence[Unit]], knows: Sequence[Unit] = ()) -> NodeHeld:
    """A node with these images: world, rank, iteration, whether parked, and what is in it;
    ``knows``: what its segments tell besides.
    """
    units = sorted({unit for *_, covered in images for unit in covered})
    expected: dict[int, set[Unit]] = {}
    for world, *_, covered in images:
        expected.setdefault(world, set()).update(covered, knows)
    return NodeHeld(
        tuple((unit, 10) for unit in units),
        tuple(tuple(units.index(unit) for unit in covered) for *_, covered in images),
        tuple(
            HeldImage(world, rank, iteration, parked, layout)
            for layout, (world, rank, iteration, parked, _) in enumerate(images)
        ),
        {world: tuple(sorted(known)) for world, known in expected.items()},
        tuple(sorted({world for world, *_ in images})),
    )


def chosen(*held: NodeHeld) -> ChosenState:
    found = choose(held, LAYERS)
    assert found is not None
    return found


def test_an_expert_is_known_by_its_number_and_a_buffer_by_its_owner() -> None:
    assert LAYERS.expert_of("b.moe.experts.3.up") == (1, 3)
    assert LAYERS.expert_of(BUFFER + "a.moe.experts.0.seen") == (0, 0)
    for dense in ("b.moe.experts.4.up", "b.moe.gate", "xb.moe.experts.1.up", "a.moe.experts.x.up"):
        assert LAYERS.expert_of(dense) is None, dense


def test_nothing_held_is_a_beginning() -> None:
    assert choose([NodeHeld(), NodeHeld()], LAYERS) is None


def test_where_all_are_parked_it_goes_on_there() -> None:
    found = chosen(
        node((5, 0, 9, True, [*DENSE, *experts(0, 1)])),
        node((5, 1, 9, True, [*DENSE, *experts(2, 3, 0)])),
    )
    assert (found.world, found.iteration) == (5, 9)
    assert found.experts_LNE[0].tolist() == [[True, True, False, False], [True, False, True, True]]
    assert found.parked_LNE.tolist() == found.experts_LNE.tolist()
    assert found.holders[DENSE[0]] == (0, 1)
    assert found.expert_bytes_LE.tolist() == [[20] * 4] * 2
    assert "8 of 8 experts are parked" in found.reason


def test_an_expert_without_holder_comes_from_a_replica_of_the_same_iteration() -> None:
    """Node 0 holds the lost rank's snapshot; its shares of the dense part are in that, too."""
    found = chosen(
        node((5, 0, 9, True, [*DENSE, *experts(0, 1)]), (5, 2, 9, False, [DENSE[1], *experts(3)])),
        node((5, 1, 9, True, [*DENSE, *experts(2)])),
    )
    assert found.iteration == 9
    assert found.experts_LNE[1, 0].tolist() == [True, True, False, True]
    assert not found.parked_LNE[:, :, 3].any()
    assert "6 of 8 experts are parked" in found.reason
    assert "first a.moe.experts.3" in found.reason


def test_one_iteration_counts_for_all() -> None:
    """The lost expert is held at 8 only: what is parked at 9 does not go with it, and the snapshots of 8 do."""
    found = chosen(
        node(
            (5, 0, 9, True, [*DENSE, *experts(0, 1)]),
            (5, 0, 8, False, [DENSE[0], *experts(0, 1)]),
            (5, 2, 8, False, [DENSE[2], *experts(3)]),
        ),
        node(
            (5, 1, 9, True, [*DENSE, *experts(2)]),
            (5, 1, 8, False, [DENSE[1], *experts(2)]),
        ),
    )
    assert found.iteration == 8


def test_a_survivor_that_ended_its_step_goes_back_to_the_others() -> None:
    """It was parked one iteration later, and its snapshot is that of the step that was cut off."""
    found = chosen(
        node((5, 0, 10, True, [*DENSE, *experts(0, 1)]), (5, 0, 9, False, experts(0, 1))),
        node((5, 1, 9, True, [*DENSE, *experts(2, 3)])),
    )
    assert found.iteration == 9


def test_what_a_later_world_left_counts_before_a_higher_iteration_of_an_earlier_one() -> None:
    found = chosen(
        node((5, 0, 30, True, ALL), (6, 0, 20, True, ALL)),
    )
    assert (found.world, found.iteration) == (6, 20)


def test_a_world_that_is_held_in_part_gives_way_to_the_one_before() -> None:
    """It ended before everything of it was sealed."""
    found = chosen(node((5, 0, 30, True, ALL), (6, 0, 33, False, [*DENSE, *experts(0)])))
    assert (found.world, found.iteration) == (5, 30)
    assert (
        "left out is incarnation 6, the newest: at iteration 33 of incarnation 6 no node holds a.moe"
        in found.reason
    )


def test_what_is_missing_everywhere_is_named() -> None:
    held = [node((5, 0, 19, True, [*DENSE, *experts(0, 1, 2)]))]
    with pytest.raises(
        ElasticError,
        match=r"at iteration 19 of incarnation 5 no node holds a\.moe\.experts\.3, b\.moe\.experts\.3",
    ):
        choose(held, LAYERS)
    held = [node((5, 0, 19, False, [*DENSE[1:], *experts(0, 1, 2, 3)]), knows=DENSE)]
    with pytest.raises(ElasticError, match=r"no node holds dense\[0:3\]"):
        choose(held, LAYERS)


def test_a_part_of_an_expert_is_none() -> None:
    """Its other parameter is expected, since the segment tells of it."""
    covered = [unit for unit in ALL if unit.param != "a.moe.experts.2.up"]
    with pytest.raises(
        ElasticError, match=r"no node holds a\.moe\.experts\.2$|no node holds a\.moe\.experts\.2\."
    ):
        choose([node((5, 0, 19, True, covered), knows=ALL)], LAYERS)


def test_what_nodes_tell_survives_the_wire() -> None:
    told = node((5, 0, 9, True, ALL))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=NodeHeld) == told


# -- who gives what --------------------------------------------------------------------------------


def test_what_a_node_has_is_read_there_and_the_rest_comes_from_a_holder() -> None:
    found = chosen(
        node((5, 0, 9, True, [*DENSE, *experts(0, 1)])),
        node((5, 1, 9, True, [*DENSE, *experts(2, 3)])),
        NodeHeld(),
    )
    replicas = np.array([[[1, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]]] * 2)
    plan = plan_handover(found, LAYERS, replicas, [0, 1, 2])
    gives = {(give.unit, give.target): give.source for give in plan.gives}
    assert len(gives) == len(plan.gives)
    for unit in DENSE:
        assert gives[unit, 0] == 0
        assert gives[unit, 1] == 1
        assert gives[unit, 2] in (0, 1)
    for unit in experts(0):
        assert (gives[unit, 0], gives[unit, 2]) == (0, 0)
    for unit in experts(3):
        assert gives[unit, 2] == 1
        assert (unit, 1) not in gives
    assert plan.expert_moves == 4
    assert plan.from_snapshots == 0
    # Ranks 0 and 1 go on as they were; a third there was not gets what the lowest had.
    assert plan.scalars == ((0, 0), (1, 1), (0, 0))


def test_ranks_of_one_node_read_the_same_files() -> None:
    found = chosen(node((5, 0, 9, True, ALL)), NodeHeld())
    replicas = np.array([[[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]]] * 2)
    plan = plan_handover(found, LAYERS, replicas, [0, 0, 1])
    assert all(give.source == give.target for give in plan.gives if give.target < 2)
    assert {give.source for give in plan.gives if give.target == 2} == {0, 1}, "both give"


def test_every_rank_gets_everything_it_needs_once_from_who_has_it() -> None:
    """Random worlds; and the busiest giver of dense units gives at most one unit more than another
    that could have.
    """
    rng = random.Random(7)
    for _ in range(60):
        nodes = rng.randint(1, 5)
        held = [set[int]() for _ in range(nodes)]
        for number in range(4):
            held[rng.randrange(nodes)].add(number)
            held[rng.randrange(nodes)].add(number)
        told = [node((5, n, 9, True, [*DENSE, *experts(*sorted(held[n]))])) for n in range(nodes)]
        extra = rng.randint(0, 2)
        found = chosen(*told, *[NodeHeld()] * extra)
        ranks = nodes + extra
        replicas = np.zeros((2, ranks, 4), dtype=np.int64)
        for layer, number in itertools.product(range(2), range(4)):
            for rank in rng.sample(range(ranks), rng.randint(1, ranks)):
                replicas[layer, rank, number] = 1
        plan = plan_handover(found, LAYERS, replicas, list(range(ranks)))
        assert plan == plan_handover(found, LAYERS, replicas, list(range(ranks)))
        wanted = [Give(0, rank, unit) for rank in range(ranks) for unit in DENSE]
        for layer, rank, number in zip(*replicas.nonzero(), strict=True):
            wanted += [
                Give(0, int(rank), u)
                for u in experts(int(number))
                if LAYERS.expert_of(u.param) == (layer, number)
            ]
        assert sorted((g.target, g.unit) for g in plan.gives) == sorted((g.target, g.unit) for g in wanted)
        for give in plan.gives:
            assert give.source in found.holders[give.unit], "it reads what its node has"
            if give.target in found.holders[give.unit]:
                assert give.source == give.target
        sent = Counter(dict.fromkeys(range(ranks), 0))
        for give in plan.gives:
            sent[give.source] += 10 * (give.source != give.target)
        assert tuple(sent[rank] for rank in range(ranks)) == plan.sent_bytes
