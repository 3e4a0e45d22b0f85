"""Parts of an image handed out to holders: everything arrives once, from whoever can."""

from __future__ import annotations

import random

import pytest

from ckptd.recovery.striping import Cancel, Pull, Stripes


def pulls(stripes: Stripes[str], now_s: float = 0.0) -> list[Pull[str]]:
    return [e for e in stripes.next_pulls(now_s) if isinstance(e, Pull)]


def test_parts_cover_the_image_exactly() -> None:
    stripes = Stripes(25, ["a"], part_bytes=10)
    assert [(p.start, p.stop) for p in stripes.parts] == [(0, 10), (10, 20), (20, 25)]


def test_an_empty_image_is_one_empty_part() -> None:
    stripes = Stripes(0, ["a"], part_bytes=10)
    (pull,) = pulls(stripes)
    stripes.delivered("a", pull.part, 0.0)
    assert stripes.complete


def test_every_holder_gets_work_and_nobody_more_than_two_parts() -> None:
    stripes = Stripes(100, ["a", "b"], part_bytes=10)
    started = pulls(stripes)
    assert [p.holder for p in started] == ["a", "b", "a", "b"]
    assert pulls(stripes) == []


def test_the_fast_one_delivers_more() -> None:
    stripes = Stripes(1000, ["slow", "fast"], part_bytes=10)
    now = 0.0
    in_flight = pulls(stripes, now)
    while not stripes.complete:
        now += 0.001
        turn = [p for p in in_flight if p.holder == "fast"] or in_flight
        if int(now * 1000) % 10 == 0:
            turn = [p for p in in_flight if p.holder == "slow"] or turn
        stripes.delivered(turn[0].holder, turn[0].part, now)
        in_flight.remove(turn[0])
        in_flight += pulls(stripes, now)
    by = stripes.bytes_by_holder
    assert by["fast"] > 3 * by["slow"]
    assert by["fast"] + by["slow"] == 1000


def test_a_failed_part_is_fetched_from_another() -> None:
    stripes = Stripes(10, ["a", "b"], part_bytes=10)
    (first,) = pulls(stripes)
    stripes.failed_part("a", first.part, gone=True)
    assert pulls(stripes) == [Pull("b", first.part)]


def test_without_anybody_left_it_failed() -> None:
    stripes = Stripes(30, ["a"], part_bytes=10)
    pulls(stripes)
    assert len(stripes.lose("a")) == 2
    assert stripes.failed
    assert pulls(stripes) == []


def test_three_failures_in_a_row_end_a_holder() -> None:
    stripes = Stripes(10, ["a", "b"], part_bytes=10)
    for _ in range(3):
        (pull,) = pulls(stripes)
        assert pull.holder == "a"
        assert stripes.failed_part("a", pull.part) == []
    assert stripes.holders_left() == ["b"]
    assert pulls(stripes)[0].holder == "b"


def test_what_a_holder_still_had_to_deliver_when_it_failed_for_good_is_to_be_cancelled() -> None:
    """Or it would land in an image that is being verified."""
    stripes = Stripes(20, ["a"], part_bytes=10)
    first, second = pulls(stripes)
    assert stripes.failed_part("a", first.part, gone=True) == [second.part]
    assert stripes.failed


def test_a_slow_part_is_taken_over() -> None:
    stripes = Stripes(20, ["a", "b"], part_bytes=10)
    first, second = pulls(stripes, 0.0)
    stripes.delivered(second.holder, second.part, 0.1)
    assert stripes.next_pulls(0.5) == []
    assert stripes.next_pulls(5.0) == [Cancel("a", first.part), Pull("b", first.part)]
    completed = []
    for holder in ("a", "b"):  # the first is too late: it was cancelled
        stripes.delivered(holder, first.part, 5.1)
        completed.append(stripes.complete)
    assert completed == [False, True]


def test_the_only_part_is_taken_over_too_and_not_for_ever() -> None:
    """Nothing has arrived yet, so what is usual is not known; where both are slow each try gets twice the time."""
    stripes = Stripes(10, ["a", "b"], part_bytes=10)
    (first,) = pulls(stripes, 0.0)
    assert stripes.next_pulls(2.0) == []
    assert stripes.next_pulls(3.5) == [Cancel("a", first.part), Pull("b", first.part)]
    assert stripes.next_pulls(9.0) == []
    assert stripes.next_pulls(10.0) == [Cancel("b", first.part), Pull("a", first.part)]
    stripes.delivered("a", first.part, 15.0)
    assert stripes.complete


def test_a_liar_is_found_and_all_it_delivered_is_fetched_again() -> None:
    stripes = Stripes(40, ["a", "b"], part_bytes=10)
    for pull in pulls(stripes):
        stripes.delivered(pull.holder, pull.part, 0.1)
    assert stripes.blame([(12, 15)]) == ["b"]
    assert not stripes.complete
    again = pulls(stripes)
    assert [(p.holder, p.part.index) for p in again] == [("a", 1), ("a", 3)]


@pytest.mark.parametrize("seed", range(50))
def test_with_losses_in_any_order_all_parts_arrive_once_if_one_holder_stays(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"n{i}" for i in range(rng.randint(1, 5))]
    stripes = Stripes(rng.randint(1, 500), names, part_bytes=7)
    keeper = rng.choice(names)
    in_flight: list[Pull[str]] = []
    now = 0.0
    for _ in range(10_000):
        now += rng.random()
        for effect in stripes.next_pulls(now):
            if isinstance(effect, Cancel):
                in_flight.remove(Pull(effect.holder, effect.part))
            else:
                in_flight.append(effect)
        if stripes.complete:
            break
        pull = in_flight.pop(rng.randrange(len(in_flight)))
        if pull.holder != keeper and rng.random() < 0.3:
            stripes.failed_part(pull.holder, pull.part, gone=rng.random() < 0.3)
            left = set(stripes.holders_left())
            in_flight = [p for p in in_flight if p.holder in left]
        else:
            stripes.delivered(pull.holder, pull.part, now)
    assert stripes.complete
    assert not stripes.failed
    assert sum(stripes.bytes_by_holder.values()) >= sum(p.stop - p.start for p in stripes.parts)
