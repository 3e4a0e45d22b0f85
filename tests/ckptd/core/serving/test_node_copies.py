"""Copies of blocks: on as many nodes as was asked, made once, and found by whoever reads."""

from __future__ import annotations

from itertools import product

import pytest

from ckptd.core.serving.node_copies import ServerNodes, copies_to_make, nearest_holders


def test_nodes_are_ordered_by_their_first_devices() -> None:
    nodes = ServerNodes.of({3: "a", 0: "z", 1: "a", 4: "m", 2: "z"})
    assert nodes.devices == ((0, 2), (1, 3), (4,))
    assert [nodes.node(device) for device in range(5)] == [0, 1, 0, 1, 2]


def test_a_node_copies_to_those_that_come_next() -> None:
    nodes = ServerNodes(((0, 1), (2, 3), (4,)))
    assert [nodes.next_nodes(node, 1) for node in range(3)] == [(1,), (2,), (0,)]
    assert nodes.next_nodes(1, 2) == (2, 0)
    assert nodes.next_nodes(1, 7) == (2, 0)  # there are no more
    assert nodes.next_nodes(1, 0) == ()
    assert ServerNodes(((0, 1),)).next_nodes(0, 1) == ()


def test_devices_of_a_node_share_the_work() -> None:
    nodes = ServerNodes(((0, 1), (2, 3), (4,)))
    assert [nodes.partner(device, 1) for device in (0, 1, 4)] == [2, 3, 2]
    assert {nodes.partner(device, 2) for device in (0, 1, 2, 3)} == {4}
    assert {nodes.bearer(1, block) for block in range(4)} == {2, 3}


def _all_combinations(nodes: int) -> list[int]:
    """A block for each set of nodes: which of them each node has."""
    return [sum(1 << block for block in range(1 << nodes) if block >> node & 1) for node in range(nodes)]


@pytest.mark.parametrize(("nodes", "copies"), list(product([1, 2, 3, 4], [0, 1, 2, 5])))
def test_every_block_comes_to_as_many_nodes_as_asked(nodes: int, copies: int) -> None:
    held = _all_combinations(nodes)
    made = copies_to_make(held, copies)
    after, keepers = list(held), [0] * nodes
    for (keeper, target), blocks in made.items():
        assert blocks & ~held[keeper] == 0
        assert blocks & after[target] == 0  # also not by another keeper
        after[target] |= blocks
        keepers[keeper] |= blocks
    for block in range(1 << nodes):
        before = block.bit_count()
        wanted = max(before, min(1 + copies, nodes)) if before else 0
        assert sum(each >> block & 1 for each in after) == wanted
        assert sum(each >> block & 1 for each in keepers) <= 1


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_new_blocks_go_to_the_next_nodes(nodes: int) -> None:
    """As they do beside generation."""
    place = ServerNodes(tuple((device,) for device in range(nodes)))
    for node, copies in product(range(nodes), range(3)):
        held = [int(each == node) for each in range(nodes)]
        assert set(copies_to_make(held, copies)) == {(node, to) for to in place.next_nodes(node, copies)}


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_a_block_is_read_from_one_node_that_has_it(nodes: int) -> None:
    held = _all_combinations(nodes)
    for node in range(nodes):
        found = nearest_holders(held, node)
        assert found[node] == held[node]
        for block in range(1, 1 << nodes):
            (holder,) = [each for each in range(nodes) if found[each] >> block & 1]
            assert held[holder] >> block & 1
