"""The floor: one node at a time, and whole trees over a network that loses, repeats and reorders."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.core.replication.floor import (
    FAN_OUT,
    NO_RANKS,
    Carried,
    FloorKind,
    FloorMessage,
    FloorTree,
)
from ckptd.errors import LocalProtocolError, RemoteProtocolError

BELOW, FLOOR = FloorKind.BELOW, FloorKind.FLOOR


def names(count: int) -> list[str]:
    return [f"n{index:03}" for index in range(count)]


def said(messages: Iterable[FloorMessage]) -> list[tuple[str, FloorKind, int]]:
    return [(message.to_node, message.kind, message.value) for message in messages]


def test_a_single_node_is_its_own_floor() -> None:
    tree = FloorTree(["a"], "a", ranks=[0, 1])
    assert tree.set_rank(0, 7) == []
    assert tree.floor == -1
    assert tree.set_rank(1, 5) == []
    assert tree.floor == 5
    assert tree.resend(now_s=0.0) == []


def test_a_root_without_any_rank_announces_nothing() -> None:
    root = FloorTree(["a", "b"], "a")
    assert root.on_below("b", NO_RANKS, 1) == []
    assert root.floor == -1


def test_the_tree_follows_the_order_of_names() -> None:
    members = names(40)
    shuffled = random.Random(1).sample(members, 40)
    root = FloorTree(shuffled, "n000")
    assert (root.parent, root.children) == (None, tuple(members[1 : 1 + FAN_OUT]))
    inner = FloorTree(members, "n001")
    assert (inner.parent, inner.children) == ("n000", tuple(members[17:33]))
    assert FloorTree(members, "n039").parent == "n002"
    assert root.members_id == inner.members_id == FloorTree([*members, "n003"], "n002").members_id


def test_another_membership_or_shape_has_another_id() -> None:
    trees = [
        FloorTree(["a", "b"], "a"),
        FloorTree(["a", "b", "c"], "a"),
        FloorTree(["a", "bc"], "a"),
        FloorTree(["a", "b"], "a", fan_out=2),
    ]
    assert len({tree.members_id for tree in trees}) == len(trees)


def test_the_members_id_is_fixed_over_versions() -> None:
    """Two daemons of different builds must name the same tree alike."""
    assert FloorTree(["b", "a"], "a").members_id == "10dd65a101fe4cfd"


@pytest.mark.parametrize("node", ["", "c"])
def test_a_node_outside_the_membership_is_refused(node: str) -> None:
    with pytest.raises(ValueError, match="not among the 2 members"):
        FloorTree(["a", "b"], node)


@pytest.mark.parametrize("options", [{"fan_out": 0}, {"started": -1}, {"resend_s": 0.0}])
def test_numbers_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="fan_out"):
        FloorTree(["a"], "a", **options)


def test_a_leaf_reports_changes_only() -> None:
    leaf = FloorTree(["a", "b"], "b", ranks=[2, 3], started=100)
    assert leaf.set_rank(2, 4) == [FloorMessage("a", BELOW, -1, 101, counted=1)]
    assert leaf.set_rank(3, 9) == [FloorMessage("a", BELOW, 4, 102, counted=1)]
    assert leaf.set_rank(3, 10) == []
    assert leaf.set_rank(2, 3) == [FloorMessage("a", BELOW, 3, 103, counted=1)]
    assert leaf.set_rank(2, 12) == [FloorMessage("a", BELOW, 10, 104, counted=1)]


def test_nothing_is_announced_on_the_word_of_suffixes_that_are_too_short() -> None:
    """A rank that had not heard of another's longer window counted suffixes of one snapshot; a
    floor rested on one.
    """
    root = FloorTree(["a", "b"], "a", ranks=[0])
    leaf = FloorTree(["a", "b"], "b", ranks=[1])
    root.set_rank(0, 5, first=2, span=3)
    (short,) = leaf.set_rank(1, 4, first=4)
    (told,) = root.on_below("b", short.value, short.sequence, horizon=short.horizon, counted=1)
    assert (told.value, told.span, root.floor) == (-1, 3, -1)
    leaf.on_floor(told.value, horizon=told.horizon, span=told.span)
    (long,) = leaf.set_rank(1, 6, first=6)
    root.on_below("b", long.value, long.sequence, horizon=long.horizon, counted=long.counted)
    assert (long.counted, root.floor) == (3, -1)
    root.set_rank(0, 6, first=2, span=3)
    assert root.floor == 6


def test_a_node_with_a_silent_child_says_nothing() -> None:
    inner = FloorTree(names(7), "n001", ranks=[1], fan_out=2)
    assert inner.children == ("n003", "n004")
    assert inner.set_rank(1, 9) == []
    assert inner.on_below("n003", 6, 1) == []
    assert inner.resend(now_s=0.0) == []
    assert said(inner.on_below("n004", NO_RANKS, 1)) == [("n000", BELOW, 6)]


def test_the_root_announces_when_all_have_reported_and_never_takes_it_back() -> None:
    root = FloorTree(["a", "b", "c"], "a", ranks=[0])
    root.set_rank(0, 8)
    assert root.on_below("b", 6, 1) == []
    assert said(root.on_below("c", 7, 1)) == [("b", FLOOR, 6), ("c", FLOOR, 6)]
    assert root.on_below("b", 2, 2) == []
    assert root.floor == 6
    assert root.on_below("c", 9, 2) == []
    assert said(root.on_below("b", 9, 3)) == [("b", FLOOR, 8), ("c", FLOOR, 8)]


def test_a_late_copy_of_a_withdrawn_report_is_ignored() -> None:
    """The floor once passed an iteration whose only copies had died with a target before it was announced."""
    root = FloorTree(["a", "b", "c"], "a")
    root.on_below("b", 9, 1)
    root.on_below("b", 3, 2)
    root.on_below("b", 9, 1)
    root.on_below("c", 9, 1)
    assert root.floor == 3


def test_a_restarted_child_is_believed_at_once() -> None:
    """Its sequence began at the time of its start: after a clock that stepped back its reports were
    ignored for good, and the floor stayed.
    """
    root = FloorTree(["a", "b"], "a")
    for message in FloorTree(["a", "b"], "b", ranks=[0], started=5000).set_rank(0, 12):
        root.on_below("b", message.value, message.sequence)
    assert root.floor == 12
    root.restarted("b")
    assert root.floor == 12
    child = FloorTree(["a", "b"], "b", ranks=[0], started=10)
    (again,) = child.resend(now_s=0.0)
    root.on_below("b", again.value, again.sequence)
    root.set_rank(7, 20)
    assert (again.value, root.floor) == (-1, 12)
    for message in child.set_rank(0, 15):
        root.on_below("b", message.value, message.sequence)
    assert root.floor == 15


def test_a_floor_is_handed_on_once() -> None:
    inner = FloorTree(names(7), "n001", fan_out=2)
    assert said(inner.on_floor(4)) == [("n003", FLOOR, 4), ("n004", FLOOR, 4)]
    assert inner.on_floor(4) == []
    assert inner.on_floor(3) == []
    assert inner.floor == 4


def test_the_heartbeat_repeats_everything_once_per_period() -> None:
    inner = FloorTree(["a", "b", "c"], "b", fan_out=1, resend_s=1.0, started=10)
    inner.on_below("c", 5, 1)
    inner.on_floor(4)
    up = FloorMessage("a", BELOW, 5, 12, carried=Carried(0, 4))  # 11 was the report of 5 alone
    expected = [up, FloorMessage("c", FLOOR, 4, 12)]
    assert inner.resend(now_s=100.0) == expected
    assert inner.resend(now_s=100.9) == []
    assert inner.resend(now_s=101.0) == expected


def test_the_first_heartbeat_of_a_leaf_without_ranks_reports() -> None:
    assert FloorTree(["a", "b"], "b").resend(now_s=0.0) == [FloorMessage("a", BELOW, NO_RANKS, 1)]


def test_what_breaks_the_protocol_is_refused() -> None:
    root = FloorTree(["a", "b"], "a")
    leaf = FloorTree(["a", "b"], "b")
    with pytest.raises(RemoteProtocolError, match="not a child"):
        root.on_below("x", 1, 1)
    with pytest.raises(RemoteProtocolError, match="report of -2"):
        root.on_below("b", -2, 1)
    with pytest.raises(RemoteProtocolError, match="root"):
        root.on_floor(1)
    with pytest.raises(RemoteProtocolError, match="floor of"):
        leaf.on_floor(NO_RANKS)
    with pytest.raises(LocalProtocolError, match="replicated up to -2"):
        leaf.set_rank(0, -2)
    assert (root.floor, leaf.floor) == (-1, -1)


class Network:
    """Trees of one run, and the messages between them in a bag that a seed empties.

    Each life of a node counts its reports from 0. Nodes learn of a restart by a `hello`, and take
    messages of the life that they know; those of a life before may still be on their way.
    """

    def __init__(self, ranks_of: Mapping[str, list[int]], fan_out: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.ranks_of = ranks_of
        self.fan_out = fan_out
        self.boots = dict.fromkeys(ranks_of, 0)
        self.known = {node: dict.fromkeys(ranks_of, 1) for node in ranks_of}
        self.trees = {node: self.boot(node) for node in ranks_of}
        self.values = {rank: -1 for ranks in ranks_of.values() for rank in ranks}
        self.best = dict.fromkeys(self.values, -1)
        self.flying: list[tuple[str, int, FloorMessage]] = []
        self.floors = dict.fromkeys(ranks_of, -1)
        self.now_s = 0.0

    def boot(self, node: str) -> FloorTree:
        self.boots[node] += 1
        return FloorTree(list(self.ranks_of), node, ranks=self.ranks_of[node], fan_out=self.fan_out)

    def restart(self, node: str) -> None:
        """The node forgets its floor and what it was told; its ranks are set anew."""
        self.trees[node] = self.boot(node)
        self.known[node] = {}
        self.floors[node] = -1
        for rank in self.ranks_of[node]:
            self.send(node, self.trees[node].set_rank(rank, self.values[rank]))

    def send(self, node: str, messages: Iterable[FloorMessage]) -> None:
        self.flying += [(node, self.boots[node], message) for message in messages]
        self.check()

    def set_rank(self, node: str, rank: int, value: int) -> None:
        self.values[rank] = value
        self.best[rank] = max(self.best[rank], value)
        self.send(node, self.trees[node].set_rank(rank, value))

    def deliver(self, *, faulty: bool) -> None:
        """One message: any of those on their way, perhaps lost, perhaps kept for another time."""
        sender, boot, message = self.flying.pop(self.random.randrange(len(self.flying)))
        if faulty and self.random.random() < 0.2:
            return
        if faulty and self.random.random() < 0.2:
            self.flying.append((sender, boot, message))
        if not faulty or self.random.random() < 0.5:
            self.hello(message.to_node, sender)
        if self.known[message.to_node].get(sender) != boot:
            return
        tree = self.trees[message.to_node]
        if message.kind is BELOW:
            self.send(message.to_node, tree.on_below(sender, message.value, message.sequence))
        else:
            self.send(message.to_node, tree.on_floor(message.value))

    def hello(self, node: str, other: str) -> None:
        if self.known[node].get(other) != self.boots[other]:
            self.known[node][other] = self.boots[other]
            self.trees[node].restarted(other)

    def heartbeat(self) -> None:
        self.now_s += 1.0
        for node, tree in self.trees.items():
            self.send(node, tree.resend(now_s=self.now_s))

    def check(self) -> None:
        limit = min(self.best.values(), default=NO_RANKS)
        for node, tree in self.trees.items():
            assert self.floors[node] <= tree.floor <= limit, (node, tree.floor, limit)
            self.floors[node] = tree.floor

    def settle(self) -> None:
        """No more faults: as many heartbeats as the tree is deep, twice."""
        for _ in range(2 * len(self.trees)):
            while self.flying:
                self.deliver(faulty=False)
            self.heartbeat()
        while self.flying:
            self.deliver(faulty=False)

    def smallest(self) -> int | None:
        return min(self.values.values(), default=None)


def network(seed: int) -> Network:
    rng = random.Random(seed)
    ranks_of: dict[str, list[int]] = {}
    rank = 0
    for node in names(rng.randint(1, 12)):
        count = rng.choice([0, 1, 2, 3])
        ranks_of[node] = list(range(rank, rank + count))
        rank += count
    return Network(ranks_of, rng.choice([1, 2, 3, 16]), seed)


def disturb(net: Network, steps: int, *, shrinking: bool) -> None:
    """Random progress, deliveries, heartbeats; with ``shrinking`` also losses and restarts."""
    home = {rank: node for node, ranks in net.ranks_of.items() for rank in ranks}
    for _ in range(steps):
        dice = net.random.random()
        if dice < 0.3 and home:
            rank = net.random.choice(list(home))
            net.set_rank(home[rank], rank, new_value(net, rank, shrinking=shrinking))
        elif dice < 0.4:
            net.heartbeat()
        elif dice < 0.42 and shrinking:
            net.restart(net.random.choice(list(net.trees)))
        elif net.flying:
            net.deliver(faulty=True)


def new_value(net: Network, rank: int, *, shrinking: bool) -> int:
    value = net.values[rank]
    if shrinking and net.random.random() < 0.2:
        return net.random.choice([-1, max(-1, value - 1)])
    return value + net.random.randint(0, 3)


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=60, deadline=None)
def test_the_floor_converges_to_the_minimum_and_never_exceeds_it(seed: int) -> None:
    """Values only grow, so the limit that `Network.check` holds is the minimum at that moment."""
    net = network(seed)
    disturb(net, 300, shrinking=False)
    assert all(net.best[rank] == value for rank, value in net.values.items())
    net.settle()
    smallest = net.smallest()
    assert {tree.floor for tree in net.trees.values()} == {-1 if smallest is None else smallest}


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=60, deadline=None)
def test_withdrawals_and_restarts_never_take_a_floor_back(seed: int) -> None:
    """Ranks lose replicas, and nodes restart; then everything grows beyond all that."""
    net = network(seed)
    disturb(net, 300, shrinking=True)
    announced = max(tree.floor for tree in net.trees.values())
    for node, ranks in net.ranks_of.items():
        for rank in ranks:
            net.set_rank(node, rank, max(announced, 1000) + rank)
    net.settle()
    smallest = net.smallest()
    assert {tree.floor for tree in net.trees.values()} == {-1 if smallest is None else smallest}


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=30, deadline=None)
def test_what_is_withdrawn_before_it_was_announced_holds_the_floor_back(seed: int) -> None:
    net = network(seed)
    ranked = [(node, ranks[0]) for node, ranks in net.ranks_of.items() if ranks]
    if not ranked:
        return
    node, rank = net.random.choice(ranked)
    late_node, late = net.random.choice(ranked)
    for owner, ranks in net.ranks_of.items():
        for other in ranks:
            net.set_rank(owner, other, 2 if other == late else 10)
    net.settle()
    net.set_rank(node, rank, 1)
    net.settle()
    net.set_rank(late_node, late, 10)
    net.settle()
    expected = 10 if rank == late else 2
    assert {tree.floor for tree in net.trees.values()} == {expected}


def test_the_floor_waits_for_the_horizon() -> None:
    """A target begun anew holds no suffix that ends before its first: that iteration cannot be the floor."""
    root = FloorTree(["a", "b"], "a", ranks=[0])
    root.set_rank(0, 9)
    root.on_below("b", 14, 1, horizon=12, span=3)
    assert (root.floor, root.horizon, root.span) == (-1, 12, 3)
    root.set_rank(0, 11)
    assert root.floor == -1
    assert said(root.set_rank(0, 12, first=5, span=2)) == [("b", FLOOR, 12)]


def test_horizon_and_span_only_grow_and_travel_both_ways() -> None:
    inner = FloorTree(names(3), "n001", fan_out=1)
    (up,) = inner.on_below("n002", 4, 1, horizon=3, span=2)
    assert (up.to_node, up.value, up.horizon, up.span) == ("n000", 4, 3, 2)
    down, again = inner.on_floor(-1, horizon=7, span=5)
    assert (down.to_node, down.kind, down.horizon, down.span) == ("n002", FLOOR, 7, 5)
    assert (again.to_node, again.kind, again.horizon, again.span) == ("n000", BELOW, 7, 5)
    assert inner.on_floor(-1, horizon=6, span=4) == []
    assert (inner.horizon, inner.span) == (7, 5)


def test_a_restarted_root_takes_up_the_floor_before_it_tells_the_horizon() -> None:
    """It once told a horizon beyond a floor that it had announced itself in its life before: that
    floor was given away.
    """
    leaf = FloorTree(["a", "b"], "b", ranks=[1])
    leaf.set_rank(1, 9)
    leaf.on_floor(7)
    (report,) = leaf.resend(now_s=0.0)
    again = FloorTree(["a", "b"], "a", ranks=[0])
    assert again.set_rank(0, 12, first=11) == []
    (told,) = again.on_below("b", report.value, report.sequence, carried=report.carried)
    assert (told.value, told.horizon) == (7, 11)


def test_a_floor_of_the_epoch_before_is_carried_to_the_root_and_the_later_epoch_counts() -> None:
    inner = FloorTree(names(7), "n001", fan_out=2, epoch=9, carried=Carried(5, 30))
    inner.on_below("n003", 40, 1, horizon=35, carried=Carried(8, 20))
    (up,) = inner.on_below("n004", 50, 1)
    assert up.carried == Carried(8, 20)
    root = FloorTree(names(2), "n000", epoch=9)
    (down,) = root.on_below("n001", up.value, up.sequence, horizon=45, carried=up.carried)
    assert (down.value, down.horizon) == (20, 45)


def test_what_is_carried_must_be_a_floor() -> None:
    root = FloorTree(["a", "b"], "a")
    with pytest.raises(RemoteProtocolError, match="report of 3"):
        root.on_below("b", 3, 1, carried=Carried(1, -2))
