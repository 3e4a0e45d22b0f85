"""Requests go where the least work is, and stay where their KV is."""

from __future__ import annotations

import itertools
import random

import pytest

from ckptd.core.serving.request_routing import ServedRequest, route_requests


def request(name: object, tokens: int = 0, remaining: int = 10, *homes: int) -> ServedRequest:
    return ServedRequest(str(name), tokens, remaining, homes)


def test_work_is_counted_in_reads() -> None:
    """The first of three tokens reads 4 tokens before it and its own, and so on: 5 + 6 + 7."""
    assert request("a", 4, 3).work == 18
    assert request("a", 4, 3).final_tokens == 7


def test_routed_from_scratch_the_busiest_is_near_the_best_of_all_routings() -> None:
    draws = random.Random(11)
    for n, slots, count in itertools.product((2, 3), (1, 2), (1, 2, 3)):
        given = [request(i, draws.randrange(30), draws.randint(1, 30)) for i in range(count)]
        routing = route_requests(given, range(n), slots)
        works = [each.work for each in given for _ in range(slots)]
        best = min(
            max(sum(w for w, d in zip(works, at, strict=True) if d == k) for k in range(n))
            for at in itertools.product(range(n), repeat=len(works))
        )
        assert best <= max(routing.load.values()) <= (4 / 3 - 1 / (3 * n)) * best
        assert sum(routing.load.values()) == sum(works)
        assert [each.id for each in routing.requests] == [each.id for each in given]


def test_one_long_request_occupies_several_devices() -> None:
    routing = route_requests([request("long", 900, 100), request("a"), request("b")], range(4), 3)
    assert len(set(routing.requests[0].homes)) == 3
    assert {*routing.requests[1].homes, *routing.requests[2].homes} == {3}


def test_only_what_was_lost_and_what_is_new_is_routed() -> None:
    """Device 1 was lost, and there is a slot more."""
    given = [request("a", 50, 10, 0, 1), request("b", 5, 10, 2, 2), request("new", 0, 60)]
    routing = route_requests(given, [0, 2], 3)
    assert routing.requests[0].homes[0] == 0
    assert routing.requests[1].homes[:2] == (2, 2)
    assert all(len(each.homes) == 3 and set(each.homes) <= {0, 2} for each in routing.requests)
    assert route_requests(routing.requests, [0, 2], 3).requests == routing.requests
    assert [each.homes for each in route_requests(given, [0, 2], 0).requests] == [()] * 3


def test_equal_requests_are_even_within_one() -> None:
    for n, count in itertools.product(range(1, 9), (1, 5, 17)):
        load = route_requests([request(i) for i in range(count)], range(n), 1).load
        assert max(load.values()) - min(load.values()) <= request(0).work


def test_requests_without_room_wait_and_hold_nothing() -> None:
    given = [request("a", 0, 60), request("b", 0, 60), request("c", 0, 60), request("d", 0, 30)]
    routing = route_requests(given, [0, 1], 1, room_tokens=100)
    assert [each.id for each in routing.requests] == ["a", "b", "d"]
    assert [(each.id, each.homes) for each in routing.waiting] == [("c", ())]
    # A request that has room for one slot of two leaves that one, too.
    two = route_requests([request("a", 0, 60), request("b", 0, 50)], [0, 1], 2, room_tokens=109)
    assert [each.id for each in two.waiting] == ["b"]
    large = route_requests([request("a", 0, 120)], [0, 1], 1, room_tokens=100)
    assert (len(large.waiting), large.load) == (1, {0: 0, 1: 0})
    assert two.load == {0: given[0].work, 1: given[0].work}


def test_routings_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="no device is left"):
        route_requests([request("a")], [], 1)
    with pytest.raises(ValueError, match="a request is there twice"):
        route_requests([request("a"), request("a")], [0], 1)
    with pytest.raises(ValueError, match="request 'a' has -1 tokens and 10 remaining"):
        request("a", -1)


def test_requests_move_to_a_device_that_came_back_only_if_asked() -> None:
    given = [request(i, 10 * (i % 4), 20, i % 2, 1) for i in range(12)]
    kept = route_requests(given, [0, 1, 2], 2)
    assert kept.requests == tuple(given)
    even = route_requests(given, [0, 1, 2], 2, even_within=0.1)
    mean = sum(even.load.values()) / 3
    assert max(even.load.values()) <= 1.1 * mean < max(kept.load.values())
    assert sum(even.load.values()) == sum(kept.load.values())
    for d in even.load:
        assert even.load[d] == sum(each.work * each.homes.count(d) for each in even.requests)
    moved = [each for each, was in zip(even.requests, given, strict=True) if each.homes != was.homes]
    assert 0 < len(moved) < len(given)
    assert route_requests(even.requests, [0, 1, 2], 2, even_within=0.1).requests == even.requests


def test_evening_out_ends_where_no_move_helps() -> None:
    one = [request("a", 50, 50, 0)]
    assert route_requests(one, [0, 1], 1, even_within=0).requests == tuple(one)
    assert route_requests(one, [0], 1, even_within=0).requests == tuple(one)
    full = [request("a", 50, 50, 0), request("b", 50, 50, 0), request("c", 80, 0, 1)]
    assert route_requests(full, [0, 1], 1, room_tokens=200, even_within=0).load[1] > 0
    assert route_requests(full, [0, 1], 1, room_tokens=170, even_within=0).requests == tuple(full)
