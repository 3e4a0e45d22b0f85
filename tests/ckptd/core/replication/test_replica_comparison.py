"""What differs between ranks that should hold the same values is named once, with the ranks that are in the
minority; what differs by the way a job trains is no alarm.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from ckptd.core.replication.replica_comparison import (
    DIGEST_BYTES,
    MAX_PENDING,
    Differing,
    Diverged,
    Equal,
    Finding,
    RankDigests,
    ReplicaComparison,
    family_of,
)

WEIGHTS = tuple(f"block.{i}.weight" for i in range(5))
NAMES = tuple(sorted([*WEIGHTS, *(f"optim/exp_avg/{name}" for name in WEIGHTS)]))
MOMENT = "optim/exp_avg/block.1.weight"
WHOLE = 7


class Training:
    """Ranks whose tensors are replaced at every iteration, by equal ones but for those in ``unlike``."""

    def __init__(self, num_ranks: int, sets: Sequence[Sequence[str]] = (NAMES,)) -> None:
        self.num_ranks, self.iteration, self.epoch = num_ranks, 0, 0
        self.comparison = ReplicaComparison()
        self.use(sets)
        self.unlike: dict[tuple[str, int], int] = {}  # by tensor and rank: what is added to it

    def use(self, sets: Sequence[Sequence[str]], first: int = WHOLE, dtype: str = "F32") -> None:
        """The tensors of the snapshots from here on."""
        self.sets, self.first = sets, first
        for number, names in enumerate(sets):
            self.comparison.name(first + number, names, [dtype] * len(names))

    def digests(self, rank: int) -> RankDigests:
        number = self.iteration % len(self.sets)
        values = [
            (self.iteration << 20) + row * 1000 + self.unlike.get((name, rank), 0)
            for row, name in enumerate(self.sets[number])
        ]
        packed = b"".join(value.to_bytes(DIGEST_BYTES, "little") for value in values)
        return RankDigests(rank, self.num_ranks, self.epoch, self.iteration, self.first + number, packed)

    def iterate(self, times: int = 1, ranks: Iterable[int] | None = None) -> list[Finding]:
        """What is found in so many iterations, but for what is equal."""
        found: list[Finding] = []
        for _ in range(times):
            for rank in range(self.num_ranks) if ranks is None else ranks:
                found += self.comparison.note(self.digests(rank))
            self.iteration += 1
        return [each for each in found if not isinstance(each, Equal)]

    def flip(self, name: str, rank: int, by: int = 1) -> None:
        self.unlike[name, rank] = by

    def all_unlike(self, rank: int, names: Iterable[str] = NAMES) -> None:
        self.unlike |= {(name, rank): 1 + rank for name in names}


def test_equal_ranks_are_equal() -> None:
    training = Training(3)
    assert training.comparison.note(training.digests(2)) == []
    assert training.comparison.note(training.digests(0)) == []
    assert training.comparison.note(training.digests(1)) == [Equal(0, (0, 1, 2))]
    assert training.comparison.note(training.digests(1)) == []  # again
    assert training.iterate(50) == []
    assert (training.comparison.compared_up_to, training.comparison.differing) == (49, {})


@pytest.mark.parametrize("name", [WEIGHTS[3], MOMENT])
def test_two_ranks_of_which_one_has_a_flipped_bit_differ(name: str) -> None:
    training = Training(2)
    training.iterate(5)
    training.flip(name, 1)
    assert training.iterate(20) == [Differing(5, 4, (0, 1), {name: ()})]
    assert training.comparison.differing == {name: ()}


def test_of_three_ranks_the_one_in_the_minority_is_named() -> None:
    training = Training(3)
    training.iterate(5)
    training.flip(MOMENT, 0)
    assert training.iterate() == [Differing(5, 4, (0, 1, 2), {MOMENT: (0,)})]
    training.flip(WEIGHTS[1], 0)
    assert training.iterate(9) == [Differing(6, 5, (0, 1, 2), {WEIGHTS[1]: (0,)})]
    assert training.comparison.differing == {MOMENT: (0,), WEIGHTS[1]: (0,)}
    training.flip(WEIGHTS[2], 1, by=1)
    training.flip(WEIGHTS[2], 2, by=2)
    assert training.iterate() == [Differing(15, 14, (0, 1, 2), {WEIGHTS[2]: ()})]  # all differ


def test_what_is_equal_again_is_told_again() -> None:
    training = Training(2)
    training.iterate(3)
    for iteration in (3, 5):
        training.flip(MOMENT, 1)
        assert training.iterate() == [Differing(iteration, iteration - 1, (0, 1), {MOMENT: ()})]
        training.unlike.clear()
        assert training.iterate() == []
        assert training.comparison.differing == {}


def test_a_rank_of_three_that_is_all_wrong_is_named() -> None:
    """It got another learning rate, say: the others agree, so the reason is with that rank."""
    training = Training(3)
    training.iterate(3)
    training.all_unlike(2)
    assert training.iterate(3) == [Differing(3, 2, (0, 1, 2), dict.fromkeys(NAMES, (2,)))]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_diverge_are_no_alarm(num_ranks: int) -> None:
    """Local SGD, or an optimizer that begins to draw random numbers."""
    training = Training(num_ranks)
    training.iterate(10)
    for rank in range(num_ranks):
        training.all_unlike(rank)
    ranks = tuple(range(num_ranks))
    assert training.iterate(30) == [Diverged(10, ranks, ("optim/exp_avg", "param"))]
    training.unlike.clear()
    training.iterate(2)
    training.flip(MOMENT, 0)  # they were averaged, and are compared again
    assert [type(each) for each in training.iterate()] == [Differing]


def test_what_never_was_equal_is_no_alarm_and_hides_no_other() -> None:
    training = Training(2)
    training.flip(WEIGHTS[4], 1)
    assert training.iterate(20) == [Diverged(0, (0, 1), ("param",))]
    training.flip(WEIGHTS[0], 1)
    assert training.iterate(20) == [Differing(20, 19, (0, 1), {WEIGHTS[0]: ()})]


def test_equal_once_is_not_enough() -> None:
    """All begin with rank 0's weights; an unreduced gradient shows in the first update."""
    training = Training(2)
    training.iterate(1)
    training.flip(WEIGHTS[4], 1)
    assert training.iterate(20) == [Diverged(1, (0, 1), ("param",))]


def test_a_recovery_begins_anew() -> None:
    training = Training(2)
    training.iterate(5)
    old = training.digests(0)
    training.epoch, training.iteration = 1, 3
    training.flip(WEIGHTS[4], 1)
    assert training.iterate(3) == [Diverged(3, (0, 1), ("param",))]
    assert training.comparison.note(old) == []


PHASES = [[*WEIGHTS, f"optim/exp_avg/{name}"] for name in WEIGHTS]


def test_a_moment_that_is_alone_in_its_snapshot_is_judged_with_those_of_the_next_ones() -> None:
    training = Training(2, PHASES)
    training.iterate(10)
    training.flip(MOMENT, 1)
    assert training.iterate(4) == []  # of 10 to 13: in 11
    assert training.iterate(30) == [Differing(11, 6, (0, 1), {MOMENT: ()})]


def test_ranks_that_diverge_are_no_alarm_with_few_tensors_a_snapshot() -> None:
    training = Training(2, PHASES)
    training.iterate(10)
    moments = [f"optim/exp_avg/{name}" for name in WEIGHTS]
    training.all_unlike(1, moments)
    assert training.iterate(40) == [Diverged(13, (0, 1), ("optim/exp_avg",))]


ORDERED_ANEW = [[*WEIGHTS, f"optim/exp_avg/{name}"] for name in reversed(WEIGHTS)]


def test_what_was_equal_counts_at_once_in_another_order_of_anchors() -> None:
    training = Training(2, PHASES)
    training.iterate(20)
    training.use(ORDERED_ANEW, first=100)
    training.flip(WEIGHTS[0], 1)
    assert training.iterate(10) == [Differing(20, -1, (0, 1), {WEIGHTS[0]: ()})]
    training.iterate(20)
    training.use(PHASES, first=200)
    assert training.iterate(20) == []  # it is known


def test_what_diverged_does_not_count_in_another_order() -> None:
    training = Training(2, PHASES)
    training.flip(WEIGHTS[0], 1)
    assert training.iterate(20) == [Diverged(0, (0, 1), ("param",))]
    training.use(ORDERED_ANEW, first=100)
    assert training.iterate(20) == []


def test_equal_weights_of_a_smaller_dtype_say_nothing_of_the_larger_one() -> None:
    training = Training(2, PHASES)
    training.iterate(20)
    training.use(PHASES, first=100, dtype="F64")
    training.flip(WEIGHTS[0], 1)
    assert training.iterate(20) == [Diverged(20, (0, 1), ("param",))]


def test_a_rank_whose_snapshot_is_missing_is_not_waited_for() -> None:
    training = Training(3)
    training.iterate(3)
    training.flip(MOMENT, 0)
    found = training.iterate(MAX_PENDING + 1, ranks=(0, 1))
    assert found == [Differing(3, 2, (0, 1), {MOMENT: ()})]
    assert training.comparison.note(training.digests(2)) == []


def test_only_what_all_ranks_have_counts_as_equal() -> None:
    """Rank 2 never was equal, and its first snapshots are missing."""
    training = Training(3)
    training.flip(MOMENT, 2)
    assert training.iterate(2 * MAX_PENDING, ranks=(0, 1)) == []
    assert training.iterate(2 * MAX_PENDING) == [Diverged(32, (0, 1, 2), ("optim/exp_avg",))]


def test_one_rank_alone_is_compared_with_nobody() -> None:
    training = Training(2)
    assert training.iterate(3 * MAX_PENDING, ranks=(0,)) == []
    assert training.comparison.compared_up_to == -1


def test_digests_of_another_length_or_of_unknown_tensors_are_ignored() -> None:
    comparison = ReplicaComparison()
    for rank, digests in enumerate((bytes(16), bytes(8))):
        assert comparison.note(RankDigests(rank, 2, 0, 0, WHOLE, digests)) == []
    comparison.name(WHOLE, ["weight"], ["F32"])
    for rank, digests in enumerate((bytes(16), bytes(8))):
        assert comparison.note(RankDigests(rank, 2, 0, 1, WHOLE, digests)) == []


def test_many_different_ranks_are_diverged() -> None:
    training = Training(100)
    training.iterate(3)
    for rank in range(100):
        training.all_unlike(rank)
    found = training.iterate(3)
    assert {type(each) for each in found} == {Diverged}, found


def test_ranks_that_train_apart_are_not_compared_tensor_by_tensor_with_each_other() -> None:
    """64 ranks with 20,000 tensors took a second of the daemon's loop, at every snapshot."""
    names, looks = [f"block.{i}.weight" for i in range(100)], 0

    class Digests(bytes):
        def __getitem__(self, at: Any) -> Any:
            nonlocal looks
            looks += 1
            return super().__getitem__(at)

    comparison = ReplicaComparison()
    comparison.name(WHOLE, names, ["F32"] * len(names))
    for rank in range(60):
        apart = Digests(rank.to_bytes(DIGEST_BYTES, "little") * len(names))
        found = comparison.note(RankDigests(rank, 60, 0, 5, WHOLE, apart))
    assert found == [Diverged(5, tuple(range(60)), ("param",))]
    assert looks == 2 * len(names)


def test_families() -> None:
    names = ["a.weight", "master/a.weight", "optim/exp_avg/a.weight[0:4]", "optim/exp_avg:codes/b"]
    assert [family_of(name) for name in names] == ["param", "master", "optim/exp_avg", "optim/exp_avg:codes"]


@pytest.mark.parametrize("seed", range(5))
def test_whatever_order_digests_come_in_nothing_equal_is_an_alarm_and_a_flip_is_one(seed: int) -> None:
    """Seals of different ranks overtake each other, and some are lost."""
    rng = random.Random(seed)
    training = Training(4)
    messages: list[tuple[float, RankDigests]] = []
    for iteration in range(400):
        training.iteration = iteration
        if iteration == 300:
            training.flip(MOMENT, 3)
        late = [(iteration + 4 * rng.random(), training.digests(rank)) for rank in range(4)]
        messages += [each for each in late if rng.random() > 0.05]
    found = [
        each
        for _, told in sorted(messages, key=lambda message: message[0])
        for each in training.comparison.note(told)
    ]
    alarms: list[Mapping[str, tuple[int, ...]]] = [each.odd for each in found if isinstance(each, Differing)]
    assert alarms == [{MOMENT: (3,)}]
    first = next(each for each in found if isinstance(each, Differing))
    assert 300 <= first.iteration < 310
    assert not any(isinstance(each, Diverged) for each in found)
    compared = [each.iteration for each in found if isinstance(each, Equal)]
    assert all(a < b for a, b in itertools.pairwise(compared))
