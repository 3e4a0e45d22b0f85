"""Parts of an image handed out to holders: everything arrives once, from whoever can."""

from __future__ import annotations

import itertools
import random

import pytest

from ckptd.core.recovery.striping import MIXES, Cancel, Pull, Stripes, next_mix


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
    """Nothing has arrived yet, so what is usual is not known; where both are slow each try gets
    twice the time.
    """
    stripes = Stripes(10, ["a", "b"], part_bytes=10)
    (first,) = pulls(stripes, 0.0)
    assert stripes.next_pulls(2.0) == []
    assert stripes.next_pulls(3.5) == [Cancel("a", first.part), Pull("b", first.part)]
    assert stripes.next_pulls(9.0) == []
    assert stripes.next_pulls(10.0) == [Cancel("b", first.part), Pull("a", first.part)]
    stripes.delivered("a", first.part, 15.0)
    assert stripes.complete


# -- what does not match -------------------------------------------------------------------------


def deliver_all(stripes: Stripes[str]) -> list[tuple[str, int, int]]:
    """Everything that is asked for arrives; who was asked for which bytes."""
    asked = []
    while started := pulls(stripes):
        for pull in started:
            asked.append((pull.holder, pull.part.start, pull.part.stop))
            stripes.delivered(pull.holder, pull.part, 0.1)
    return asked


def test_only_what_is_wrong_is_fetched_again_and_from_another() -> None:
    """A holder used to be given up with all that it had delivered, and with what only it may have whole."""
    stripes = Stripes(40, ["a", "b"], part_bytes=10)
    deliver_all(stripes)
    completed = [stripes.complete]
    assert stripes.blame([(12, 15), (20, 23)]) == {(12, 15): ["b"], (20, 23): ["a"]}
    completed.append(stripes.complete)
    assert deliver_all(stripes) == [("a", 12, 15), ("b", 20, 23)]
    assert [*completed, stripes.complete] == [True, False, True]
    assert stripes.holders_left() == ["a", "b"]
    assert stripes.bytes_by_holder == {"a": 20, "b": 20}
    assert (stripes.bringers((12, 15)), stripes.bringers((10, 20))) == (["a"], ["b", "a"])


def test_what_hid_behind_a_smaller_range_is_mixed_with_it() -> None:
    """A header whose length is damaged: how far it reaches shows only when that is mended. Bytes 3
    and 7 of a are damaged.
    """
    stripes = Stripes(20, ["a", "b"], part_bytes=20)
    deliver_all(stripes)
    stripes.blame([(0, 5)])
    assert deliver_all(stripes) == [("b", 0, 5)]
    stripes.blame([(0, 10)])  # because of 7, which is of a; but that is not known
    assert deliver_all(stripes) == [("a", 0, 5), ("a", 5, 10)]
    stripes.blame([(0, 5)])
    assert not stripes.failed
    assert sorted(deliver_all(stripes)) == [("b", 0, 5), ("b", 5, 10)]
    assert stripes.bringers((0, 10)) == ["b"]
    assert stripes.bringers((10, 20)) == ["a"]


def test_parts_cover_the_image_when_they_were_cut() -> None:
    stripes = Stripes(25, ["a", "b"], part_bytes=10)
    deliver_all(stripes)
    stripes.blame([(3, 5), (8, 12), (20, 25)])
    found = [(p.start, p.stop) for p in stripes.parts]
    assert found == [(0, 3), (3, 5), (5, 8), (8, 10), (10, 12), (12, 20), (20, 25)]


def test_nobody_is_asked_twice_for_what_it_brought_wrong() -> None:
    stripes = Stripes(10, ["a", "b", "c"], part_bytes=10)
    asked = []
    for _ in range(3):
        asked += deliver_all(stripes)
        stripes.blame([(2, 4)])
    assert asked == [("a", 0, 10), ("b", 2, 4), ("c", 2, 4)]
    assert stripes.failed
    assert [(p.start, p.stop) for p in stripes.hopeless()] == [(2, 4)]
    assert pulls(stripes) == []


def test_what_nobody_brought_is_not_blamed() -> None:
    stripes = Stripes(10, ["a"], part_bytes=10)
    deliver_all(stripes)
    assert stripes.blame([(10, 11)]) == {}
    assert stripes.complete


def test_a_holder_that_cannot_deliver_a_part_is_not_asked_for_it_again_and_stays() -> None:
    stripes = Stripes(30, ["store", "b"], part_bytes=10)
    first = pulls(stripes)[0]
    assert first.holder == "store"
    stripes.cannot("store", first.part)
    assert stripes.holders_left() == ["store", "b"]
    assert not stripes.failed
    stripes.lose("b")
    assert [p.part for p in pulls(stripes)] == [stripes.parts[1]]
    assert stripes.hopeless() == [first.part]


def test_who_cannot_deliver_a_part_may_have_a_piece_of_it() -> None:
    """One of the objects that a part lies in is gone. What was damaged of the other copy is in another one."""
    stripes = Stripes(10, ["store", "b"], part_bytes=10)
    stripes.cannot("store", pulls(stripes)[0].part)
    assert deliver_all(stripes) == [("b", 0, 10)]
    stripes.blame([(7, 9)])
    assert deliver_all(stripes) == [("store", 7, 9)]


def test_who_had_a_part_wrong_may_have_a_piece_of_it_right() -> None:
    """Where very much is wrong, neighbours are told as one range, with what lies between them."""
    stripes = Stripes(10, ["a", "b"], part_bytes=10)
    deliver_all(stripes)
    stripes.blame([(0, 10)])
    assert deliver_all(stripes) == [("b", 0, 10)]
    stripes.blame([(4, 6)])
    assert deliver_all(stripes) == [("a", 4, 6)]
    stripes.blame([(4, 6)])
    assert stripes.failed


def test_a_part_is_not_taken_over_by_a_holder_that_had_it_wrong() -> None:
    stripes = Stripes(10, ["a", "b"], part_bytes=10)
    deliver_all(stripes)
    stripes.blame([(0, 10)])
    assert [p.holder for p in pulls(stripes, 1.0)] == ["b"]
    assert stripes.next_pulls(100.0) == []


def test_who_took_a_part_over_is_not_blamed_for_what_landed_late() -> None:
    """The last bytes of the transfer that was cancelled came after those of the other holder, and
    only they were wrong.
    """
    stripes = Stripes(10, ["liar", "honest"], part_bytes=10)
    (first,) = pulls(stripes, 0.0)
    assert stripes.next_pulls(10.0) == [Cancel("liar", first.part), Pull("honest", first.part)]
    stripes.delivered("honest", first.part, 11.0)
    stripes.blame([(2, 4)])
    assert deliver_all(stripes) == [("liar", 2, 4)]
    stripes.blame([(2, 4)])
    assert deliver_all(stripes) == [("honest", 2, 4)]
    stripes.blame([(2, 4)])
    assert stripes.failed, "it is excused once"


def test_a_holder_that_is_wrong_again_and_again_is_asked_last() -> None:
    """It is still asked for what nobody else can bring: those may be the only bytes there are."""
    stripes = Stripes(30, ["a", "b", "c"], part_bytes=10)
    deliver_all(stripes)  # ten bytes each
    for at in (0, 2, 4):
        stripes.blame([(at, at + 1)])
        deliver_all(stripes)
    stripes.blame([(12, 13), (14, 15)])
    assert deliver_all(stripes) == [("c", 12, 13), ("c", 14, 15)]
    stripes.blame([(12, 13)])
    assert deliver_all(stripes) == [("a", 12, 13)]


@pytest.mark.parametrize(("of_a", "of_b"), [((0,), (1,)), ((0,), (2,)), ((0, 1), (2,)), ((1,), ())])
def test_a_large_tensor_that_is_damaged_in_each_copy_is_put_together(
    of_a: tuple[int, ...], of_b: tuple[int, ...]
) -> None:
    """It has one digest for all its parts, so which of them are wrong has to be tried."""
    stripes = Stripes(30, ["a", "b"], part_bytes=10)
    damaged = {"a": of_a, "b": of_b}
    tries = 0
    while True:
        tries += 1
        deliver_all(stripes)
        assert not stripes.failed
        if not any(p.start // 10 in damaged[stripes.bringers((p.start, p.stop))[0]] for p in stripes.parts):
            break
        stripes.blame([(0, 30)])
    assert tries <= 8


def test_a_large_tensor_that_cannot_be_put_together_is_given_up() -> None:
    stripes = Stripes(30, ["a", "b"], part_bytes=10)
    tries = 0
    while not stripes.failed:
        tries += 1
        deliver_all(stripes)
        stripes.blame([(0, 30)])
    assert tries == 2**3, "each combination once"


def test_a_holder_that_is_lost_in_a_combination_ends_those_that_need_it() -> None:
    stripes = Stripes(20, ["a", "b"], part_bytes=10)
    for _ in range(2):
        deliver_all(stripes)
        stripes.blame([(0, 20)])
    assert {p.holder for p in pulls(stripes)} == {"a"}
    stripes.lose("b")
    stripes.lose("a")
    assert stripes.failed
    assert pulls(stripes) == []


class Copies:
    """Of one image, at random: which bytes of them are damaged or gone, and where its tensors lie."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.size, self.part_bytes = rng.randint(1, 60), rng.choice([15, 20, 60])
        cuts = (rng.randrange(self.size) for _ in range(rng.randint(0, 12)))
        self.tensors = list(itertools.pairwise(sorted({0, self.size, *cuts})))
        self.names = ["a", "b", "c"][: rng.randint(1, 3)]
        self.damaged = {name: self._some(rng.choice([0, 0.03, 0.1])) for name in self.names}
        self.gone = {name: self._some(rng.choice([0, 0, 0.02])) for name in self.names}
        self.image = [""] * self.size  # by byte, whose copy it is from
        self.rounds = 0

    def _some(self, share: float) -> set[int]:
        return {byte for byte in range(self.size) if self.rng.random() < share}

    def fetch(self, stripes: Stripes[str]) -> None:
        """Until all matches, or nobody is left."""
        in_flight: list[Pull[str]] = []
        now_s = 0.0
        while not stripes.failed:
            if stripes.complete:
                wrong = self.wrong()
                if not wrong:
                    return
                self.rounds += 1
                stripes.blame(wrong)
                continue
            now_s += self.rng.random()
            for effect in stripes.next_pulls(now_s):
                if isinstance(effect, Cancel):
                    in_flight.remove(Pull(effect.holder, effect.part))
                else:
                    in_flight.append(effect)
            self._answer(stripes, in_flight.pop(self.rng.randrange(len(in_flight))), now_s)

    def _answer(self, stripes: Stripes[str], pull: Pull[str], now_s: float) -> None:
        span = range(pull.part.start, pull.part.stop)
        if self.gone[pull.holder].intersection(span):
            stripes.cannot(pull.holder, pull.part)
            return
        self.image[span.start : span.stop] = [pull.holder] * len(span)
        stripes.delivered(pull.holder, pull.part, now_s)

    def wrong(self) -> list[tuple[int, int]]:
        """What a verification finds."""
        bad = [byte in self.damaged[name] for byte, name in enumerate(self.image)]
        return [(start, stop) for start, stop in self.tensors if any(bad[start:stop])]

    def somewhere_right(self) -> bool:
        """Whether what each tensor has in each part is right in some copy."""
        places = range(0, self.size, self.part_bytes)
        edges = sorted({*places, *itertools.chain.from_iterable(self.tensors)})
        return all(
            any(not (self.damaged[n] | self.gone[n]).intersection(range(*cell)) for n in self.names)
            for cell in itertools.pairwise(edges)
        )


@pytest.mark.parametrize("seed", range(300))
def test_an_image_is_whole_again_exactly_if_all_of_it_is_right_in_some_copy(seed: int) -> None:
    copies = Copies(seed)
    stripes = Stripes(copies.size, copies.names, part_bytes=copies.part_bytes)
    copies.fetch(stripes)
    assert copies.rounds <= 150, "it ends"
    assert stripes.complete is not stripes.failed
    if stripes.complete:
        assert not copies.wrong()
        assert copies.somewhere_right()
        assert sum(stripes.bytes_by_holder.values()) == copies.size
    elif not any(copies.gone.values()):  # who cannot deliver a part may have some of it
        assert not copies.somewhere_right()


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
    assert sum(stripes.bytes_by_holder.values()) == sum(p.stop - p.start for p in stripes.parts)


def all_of(num_parts: int, holders: list[str], cannot: dict[int, str] | None = None) -> list[tuple[str, ...]]:
    """What is tried if everything is wrong."""
    unable = [(cannot or {}).get(part, "") for part in range(num_parts)]
    tried: list[tuple[str, ...]] = []
    while (mix := next_mix(unable, holders, tried)) is not None:
        tried.append(mix)
    return tried


def test_all_of_one_comes_first_and_then_all_but_one_part() -> None:
    found = ["".join(mix) for mix in all_of(3, ["a", "b"])]
    assert found == ["aaa", "bbb", "baa", "aba", "aab", "abb", "bab", "bba"]


@pytest.mark.parametrize(("parts", "holders"), [(2, 2), (7, 2), (4, 3), (3, 4), (3, 5)])
def test_where_they_are_few_all_are_tried_and_each_once(parts: int, holders: int) -> None:
    found = all_of(parts, [f"n{i}" for i in range(holders)])
    assert len(found) == len(set(found)) == holders**parts <= MIXES


def test_of_many_so_many_are_tried_and_each_single_part_of_two_copies() -> None:
    found = all_of(60, ["a", "b"])
    assert len(found) == len(set(found)) == MIXES
    for part in range(60):
        assert tuple("b" if i == part else "a" for i in range(60)) in found
        assert tuple("a" if i == part else "b" for i in range(60)) in found


def test_a_single_part_and_a_single_holder_have_nothing_to_mix() -> None:
    assert all_of(1, ["a", "b"]) == []
    assert all_of(60, ["a"]) == [("a",) * 60]
    assert all_of(2, []) == []


def test_nobody_is_to_bring_what_it_cannot() -> None:
    assert ["".join(mix) for mix in all_of(2, ["a", "b"], {0: "a"})] == ["bb", "ba"]
