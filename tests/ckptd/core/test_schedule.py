"""Schedules: the window, the cut, the order, and that coverage survives every reorder."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.core.schedule import (
    Ordering,
    SharedOperator,
    max_piece_bytes,
    needs_reorder,
    order_operators,
    plan_aligned,
    plan_schedule,
    reorder,
    spread,
    update_popularity,
)
from ckptd.core.snapshot_policy import (
    AlignedPolicy,
    DensePolicy,
    OperatorCost,
    OperatorKind,
    PhaseLevels,
    PolicyKind,
    Schedule,
    SlidingPolicy,
    SnapshotPolicy,
    policy_for,
)


def op(extra: int, compute: int = 0, *, group: str | None = None, name: str = "e") -> OperatorCost:
    """An expert that takes ``extra`` bytes more where it is anchored."""
    return OperatorCost(name, OperatorKind.EXPERT, compute + extra, compute, group)


def dense(extra: int, kind: OperatorKind = OperatorKind.DENSE) -> OperatorCost:
    return OperatorCost("d", kind, extra, 0)


def plan(extras: Sequence[int], window: int | None = None, budget: int | None = None) -> Schedule:
    operators = [op(extra) for extra in extras]
    return plan_schedule(operators, budget_bytes=budget, order=range(len(operators)), window=window)


def brute_peak(extras: Sequence[int], window: int) -> int:
    """The lowest peak over all contiguous cuts into at most ``window`` phases."""
    places = range(1, len(extras))
    return min(
        max(sum(extras[a:b]) for a, b in itertools.pairwise([0, *cuts, len(extras)]))
        for count in range(min(window, len(extras)))
        for cuts in itertools.combinations(places, count)
    )


EXTRAS = st.lists(st.integers(0, 30), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(EXTRAS, st.integers(1, 9))
def test_the_cut_has_the_lowest_peak_there_is(extras: list[int], window: int) -> None:
    schedule = plan(extras, window)
    assert schedule.window == min(window, len(extras))
    assert schedule.order == list(range(len(extras)))
    assert all(schedule.phases)
    assert schedule.phase_bytes == tuple(sum(extras[i] for i in p) for p in schedule.phases)
    assert schedule.peak_bytes == max(schedule.phase_bytes) == brute_peak(extras, window)
    assert [schedule.phase_of[i] for i in range(len(extras))] == sorted(schedule.phase_of)


@settings(max_examples=200, deadline=None)
@given(EXTRAS, st.integers(0, 120))
def test_the_window_is_the_smallest_that_fits(extras: list[int], budget: int) -> None:
    schedule = plan(extras, budget=budget)
    fitting = [w for w in range(1, len(extras) + 1) if brute_peak(extras, w) <= budget]
    assert schedule.fits is bool(fitting)
    if fitting:
        assert schedule.window == fitting[0]
        assert schedule.peak_bytes <= budget
    else:
        lowest = brute_peak(extras, len(extras))
        assert schedule.peak_bytes == lowest
        assert schedule.window == next(
            w for w in range(1, len(extras) + 1) if brute_peak(extras, w) == lowest
        )
        assert "does not fit" in schedule.reason


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 10))
def test_phases_are_balanced(extras: list[int], window: int) -> None:
    """No phase is heavier than an even share plus one operator, and none is empty."""
    schedule = plan(extras, window)
    share = sum(extras) / schedule.window
    assert schedule.peak_bytes < share + max(extras)
    assert min(map(len, schedule.phases)) >= 1


def test_equal_operators_are_shared_out_evenly() -> None:
    """The lowest peak alone would leave 3+3+3+1; what is left over is spread too."""
    assert sorted(map(len, plan([5] * 10, 4).phases)) == [2, 2, 3, 3]


def test_bytes_count_weights_of_the_others_and_what_is_fixed() -> None:
    operators = [op(30, 10), op(20, 10), op(10, 5)]
    schedule = plan_schedule(operators, budget_bytes=70, fixed_bytes=7, order=[2, 1, 0])
    assert schedule.window == 2
    assert schedule.phases == ((2, 1), (0,))
    assert schedule.phase_bytes == (7 + 25 + 30, 7 + 25 + 30)
    assert schedule.dense_bytes == 7 + 25 + 60
    assert schedule.fits


def test_what_cannot_fit_is_said_with_the_numbers() -> None:
    operators = [op(1000, 10, name="embedding"), op(5, 10)]
    schedule = plan_schedule(operators, budget_bytes=500, fixed_bytes=3, order=[0, 1])
    assert not schedule.fits
    assert "the largest snapshot has 1,023 bytes, does not fit 500" in schedule.reason
    assert "weights and fixed parts alone are 23 bytes" in schedule.reason
    assert "(embedding) adds 1,000" in schedule.reason


def test_the_largest_window_is_a_limit() -> None:
    operators = [op(1) for _ in range(10)]
    schedule = plan_schedule(operators, budget_bytes=1, order=range(10), max_window=4)
    assert (schedule.fits, schedule.window, schedule.peak_bytes) == (False, 4, 3)


def test_no_budget_is_dense_and_no_operators_is_a_schedule() -> None:
    assert plan([3, 4]).phases == ((0, 1),)
    empty = plan_schedule([], budget_bytes=5, fixed_bytes=2, order=[])
    assert (empty.window, empty.phases, empty.phase_bytes) == (1, ((),), (2,))
    assert plan_schedule([], budget_bytes=1, fixed_bytes=2, order=[]).fits is False


def test_more_phases_than_operators_are_not_made() -> None:
    schedule = plan([1, 1], window=5)
    assert schedule.window == 2
    assert "asked for 5" in schedule.reason


def test_operators_without_bytes_still_get_a_phase() -> None:
    assert plan([0, 0, 0], window=3).phases == ((0,), (1,), (2,))


@pytest.mark.parametrize("order", [[0], [0, 0], [0, 2], [1, 2], [-1, 0], [0, 1, 2]])
def test_an_order_must_be_a_permutation(order: list[int]) -> None:
    for planner in (plan_schedule, plan_aligned):
        with pytest.raises(ValueError, match="order"):
            planner([op(1), op(1)], budget_bytes=None, order=order)


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="window is 0"):
        plan([1], window=0)
    with pytest.raises(ValueError, match="cannot contain"):
        OperatorCost("w", OperatorKind.DENSE, 4, 8)
    with pytest.raises(ValueError, match="every is 0"):
        DensePolicy(1, every=0)


def test_sliding_levels() -> None:
    policy: SnapshotPolicy = SlidingPolicy(plan([1, 1, 1], window=3))
    assert policy.levels_for(4) == PhaseLevels(1, (1,), (0, 2))
    assert policy.levels_for(7) is policy.levels_for(4)
    assert (policy.window, policy.num_slots) == (3, 5)
    assert policy.levels_for(5) == PhaseLevels(2, (2,), (0, 1))


def test_any_window_of_consecutive_sliding_snapshots_anchors_everything_once() -> None:
    schedule = plan(range(1, 12), window=4)
    policy = policy_for(schedule)
    for first in range(10):
        snaps = [policy.levels_for(t) for t in range(first, first + 4)]
        assert sorted(i for s in snaps for i in s.anchored) == list(range(11))
        for s in snaps:
            assert sorted(s.anchored + s.compute) == list(range(11))


def test_aligned_levels_are_those_of_the_paper() -> None:
    schedule = plan_aligned([op(4, 2) for _ in range(5)], budget_bytes=None, order=[4, 3, 2, 1, 0])
    assert schedule.window == 1
    schedule = plan_aligned(
        [op(4, 2) for _ in range(5)], budget_bytes=18, order=[4, 3, 2, 1, 0], fixed_bytes=0
    )
    assert schedule.phases == ((4, 3), (2, 1), (0,))
    assert schedule.phase_bytes == (12 + 6, 12 + 2, 6)
    assert schedule.policy is PolicyKind.ALIGNED
    policy: SnapshotPolicy = AlignedPolicy(schedule)
    assert policy.levels_for(3) == PhaseLevels(0, (4, 3), (2, 1, 0), begins_chain=True)
    assert policy.levels_for(4) == PhaseLevels(1, (2, 1), (0,))
    assert policy.levels_for(5) == PhaseLevels(2, (0,), ())
    assert policy.num_slots == 7


@settings(max_examples=100, deadline=None)
@given(EXTRAS, st.integers(0, 10), st.integers(0, 150))
def test_aligned_takes_the_smallest_window_that_fits(extras: list[int], compute: int, budget: int) -> None:
    operators = [op(extra, compute) for extra in extras]
    count = len(operators)

    def peak(window: int) -> int:
        size = math.ceil(count / window)
        parts = [range(a, min(a + size, count)) for a in range(0, count, size)]
        return max(
            sum(operators[i].anchor_bytes for i in part) + compute * (count - part.stop) for part in parts
        )

    schedule = plan_aligned(operators, budget_bytes=budget, order=range(count))
    fitting = [w for w in range(1, count + 1) if peak(w) <= budget]
    assert schedule.fits is bool(fitting)
    assert schedule.peak_bytes == peak(fitting[0] if fitting else schedule.window)
    if not fitting:
        assert schedule.peak_bytes == min(map(peak, range(1, count + 1)))
    assert schedule.order == list(range(count))


def test_dense_every_k() -> None:
    policy: SnapshotPolicy = DensePolicy(3, every=2)
    assert policy.levels_for(1) is None
    assert policy.levels_for(4) == PhaseLevels(0, (0, 1, 2), (), begins_chain=True)
    assert (policy.window, policy.num_slots) == (1, 3)


def test_dense_first_and_popular_experts_last() -> None:
    operators = [op(1), dense(1), op(1), dense(1, OperatorKind.GATE), op(1)]
    assert order_operators(operators, [9, 99, 1, 99, 5]) == [1, 3, 2, 4, 0]
    assert order_operators(operators, {0: 9.0, 4: 5.0}) == [1, 3, 2, 4, 0]


def test_in_aligned_windows_dense_parts_come_last() -> None:
    """The paper's figure 6: what computes most is frozen longest, and the largest snapshot is smaller."""
    operators = [op(1), dense(1), op(1), dense(1, OperatorKind.GATE), op(1)]
    assert order_operators(operators, [9, 99, 1, 99, 5], dense_last=True) == [2, 4, 0, 1, 3]
    expert = OperatorCost("e", OperatorKind.EXPERT, 14 * 3, 2 * 3)
    attention = OperatorCost("a", OperatorKind.DENSE, 14 * 4, 2 * 4)
    operators = [attention, *[expert] * 7] * 6
    first, last = (
        plan_aligned(
            operators,
            budget_bytes=None,
            order=order_operators(operators, [0.0] * len(operators), dense_last=dense_last),
            window=6,
        )
        for dense_last in (False, True)
    )
    assert set(first.phases[0][:6]) == set(last.phases[-1][-6:]) == {0, 8, 16, 24, 32, 40}
    assert first.peak_bytes == first.phase_bytes[0] > last.peak_bytes == last.phase_bytes[0]


def test_slices_of_a_fused_tensor_stay_together() -> None:
    operators = [op(1, group=group) for group in ("a", "b", "a", "b", "a")] + [op(1)]
    order = order_operators(operators, [10, 4, 1, 6, 1, 4.5])
    assert order == [2, 4, 0, 5, 1, 3]  # a: mean 4, the lone one: 4.5, b: mean 5


@given(
    st.lists(st.tuples(st.sampled_from([None, "a", "b", "c"]), st.integers(0, 9)), max_size=20),
)
def test_any_order_is_a_permutation_with_whole_groups(
    experts: list[tuple[str | None, int]],
) -> None:
    operators = [op(1, group=group) for group, _ in experts]
    order = order_operators(operators, [float(popularity) for _, popularity in experts])
    assert sorted(order) == list(range(len(experts)))
    runs = [group for group, _ in itertools.groupby(operators[i].group for i in order) if group]
    assert len(runs) == len(set(runs))


def test_capacity_ordering_is_relative_use() -> None:
    operators = [op(1), op(1)]
    assert order_operators(operators, [10, 8]) == [1, 0]
    assert order_operators(operators, [10, 8], Ordering.CAPACITY, capacities=[10, 4]) == [0, 1]
    for capacities in (None, [1.0], [1.0, 0.0]):
        with pytest.raises(ValueError, match="capacity"):
            order_operators(operators, [1, 1], Ordering.CAPACITY, capacities=capacities)


def test_popularity_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="popularity of 1 operators, there are 2"):
        order_operators([op(1), op(1)], [1.0])
    with pytest.raises(ValueError, match="NaN"):
        order_operators([op(1)], [math.nan])


def test_popularity_over_time() -> None:
    assert update_popularity([1, 2], [3, 4], ordering=Ordering.HARD) == [4, 6]
    assert update_popularity([1, 2], [3, 4], ordering=Ordering.SOFT) == [4, 6]
    decayed = update_popularity([1, 2], [3, 4], ordering=Ordering.DECAYED, alpha=0.75)
    assert decayed == [1.5, 2.5]
    with pytest.raises(ValueError, match="alpha"):
        update_popularity([1], [1], ordering=Ordering.DECAYED, alpha=1.5)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ([10, 10, 10, 10], [10, 10, 10, 10], False),
        ([10, 10, 10, 10], [100, 100, 100, 100], False),  # the counters went on
        ([10, 10, 10, 10], [12, 9.4, 9.3, 9.3], True),  # one of four by a fifth
        ([100] * 5, [120, 95, 95, 95, 95], False),  # one of five is not a quarter
        ([0, 10, 10, 10], [1, 10, 10, 10], True),  # from never to ever
        ([0, 0], [1, 1], False),
        ([1, 1], [0, 0], False),
        ([], [], False),
    ],
)
def test_the_reorder_trigger_of_the_paper(old: list[float], new: list[float], expected: bool) -> None:
    assert needs_reorder(old, new) is expected


def test_the_reorder_trigger_compares_the_same_experts() -> None:
    with pytest.raises(ValueError, match="2 experts before and 1 now"):
        needs_reorder([1, 1], [1])


def test_splitting_is_advised_where_one_operator_sets_the_peak() -> None:
    operators = [op(900, 100), *(op(10, 1) for _ in range(30))]
    piece = max_piece_bytes(operators, 4)
    assert piece == 1000 * 300 // 900
    pieces = [op(300, 33) for _ in range(3)] + operators[1:]
    before, after = (
        plan_schedule(ops, budget_bytes=None, order=range(len(ops)), window=4) for ops in (operators, pieces)
    )
    assert after.peak_bytes < before.peak_bytes
    assert max_piece_bytes(operators, 1) is None
    assert max_piece_bytes([op(10)] * 8, 4) is None
    assert max_piece_bytes([], 4) is None


def test_a_split_that_hardly_gains_is_not_advised() -> None:
    operators = [op(110), *(op(10) for _ in range(29))]
    assert max_piece_bytes(operators, 4) == 100
    assert max_piece_bytes(operators, 4, fixed_bytes=10_000) is None


def gaps_hold(schedules: Sequence[Schedule]) -> None:
    """Any window + 1 consecutive snapshots anchor every operator, one window per schedule."""
    anchored = [set(phase) for schedule in schedules for phase in schedule.phases]
    window, count = schedules[0].window, schedules[0].num_operators
    for first in range(len(anchored) - window):
        union = set().union(*anchored[first : first + window + 1])
        assert union == set(range(count)), f"snapshots from {first} on miss an operator"


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 20), min_size=2, max_size=14),
    st.integers(2, 6),
    st.integers(0, 20),
    st.randoms(use_true_random=False),
)
def test_coverage_survives_any_series_of_reorders(
    extras: list[int], window: int, headroom: int, rng: random.Random
) -> None:
    """The target changes at random boundaries; at the last one it converges and stays."""
    operators = [op(extra) for extra in extras]
    current = plan(extras, window)
    capacity = current.peak_bytes + headroom
    history = [current]
    target = list(range(len(extras)))
    for boundary in range(60):
        if boundary < 20 and rng.random() < 0.4:
            rng.shuffle(target)
        following = reorder(current, operators, target, capacity_bytes=capacity)
        old, new = current.phase_of, following.phase_of
        assert all(q <= p + 1 for p, q in zip(old, new, strict=True))
        assert following.peak_bytes <= capacity
        assert following.window == current.window
        assert sorted(following.order) == sorted(target)
        assert following.phase_bytes == tuple(sum(extras[i] for i in phase) for phase in following.phases)
        current = following
        history.append(current)
    gaps_hold(history)
    assert current.phases == history[-2].phases  # it came to rest
    assert "order unchanged" in current.reason


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(1, 5), st.randoms(use_true_random=False))
def test_equal_operators_reach_the_new_order(window: int, each: int, rng: random.Random) -> None:
    """With room for one operator more, every order is reached within a window of boundaries."""
    extras = [7] * (window * each)
    operators = [op(extra) for extra in extras]
    current = plan(extras, window)
    target = list(range(len(extras)))
    rng.shuffle(target)
    capacity = current.peak_bytes
    for _ in range(window):
        current = reorder(current, operators, target, capacity_bytes=capacity)
    rank = {operator: place for place, operator in enumerate(target)}
    assert [rank[i] // each for i in current.order] == [i // each for i in range(len(target))]


def test_reorder_moves_up_at_once_and_down_by_one() -> None:
    current = plan([1] * 4, window=4)
    operators = [op(1)] * 4
    following = reorder(current, operators, [3, 0, 1, 2], capacity_bytes=1)
    assert following.phases == ((3,), (0,), (1,), (2,))
    back = reorder(following, operators, [0, 1, 2, 3], capacity_bytes=1)
    assert back.phases == ((0,), (3,), (1,), (2,))


def test_reorder_keeps_the_old_schedule_with_a_reason() -> None:
    operators = [op(10), op(1)]
    current = plan([10, 1], window=2)
    for other, capacity, why in (
        ([0, 1], 10, "no phase can come closer"),
        ([1, 0], 5, "above the slots' 5 bytes"),
    ):
        result = reorder(current, operators, other, capacity_bytes=capacity)
        assert result.phases == current.phases
        assert why in result.reason
    aligned = plan_aligned(operators, budget_bytes=None, order=[0, 1], window=2)
    assert "only sliding" in reorder(aligned, operators, [1, 0], capacity_bytes=99).reason
    with pytest.raises(ValueError, match="permutation"):
        reorder(current, operators, [0, 0], capacity_bytes=99)


def test_reorder_finds_room_where_an_even_cut_has_none() -> None:
    """Phases {4, 4} and {6, 2}: in the new order 4 6 | 4 2 would be too much for one slot of 8."""
    operators = [op(4), op(4), op(6), op(2)]
    current = plan([4, 4, 6, 2], window=2)
    following = reorder(current, operators, [3, 2, 1, 0], capacity_bytes=8)
    assert following.phases == ((3, 2), (1, 0))


def test_many_operators() -> None:
    """100,000 operators are planned, ordered and reordered (the time is bench's affair)."""
    rng = random.Random(0)
    count = 100_000
    operators = [op(rng.randrange(1, 3000), 200, group=f"g{i // 64}") for i in range(count)]
    order = order_operators(operators, [rng.random() for _ in range(count)])
    budget = 200 * count + 20_000_000
    schedule = plan_schedule(operators, budget_bytes=budget, order=order)
    assert schedule.fits
    assert schedule.peak_bytes - min(schedule.phase_bytes) < 2 * 3000
    assert sorted(schedule.order) == list(range(count))


def loads(
    operators: list[SharedOperator], owners: list[int], own: dict[int, int], phase: int
) -> dict[int, int]:
    """What each member's snapshot of a phase takes."""
    found = dict(own)
    for operator, owner in zip(operators, owners, strict=True):
        anchored = operator.phase == phase
        found[owner] += operator.anchor_bytes if anchored else operator.compute_bytes
    return found


def test_equal_operators_are_dealt_out_evenly() -> None:
    operators = [SharedOperator(f"op{i}", 12, 2) for i in range(8)]
    owners = spread(operators, [3, 5, 7, 9], {})
    assert sorted(owners) == [3, 3, 5, 5, 7, 7, 9, 9]


def test_every_phase_is_even_not_only_their_sum() -> None:
    operators = [SharedOperator(f"op{i}", 12, 2, phase=i // 4) for i in range(8)]
    owners = spread(operators, [0, 1], {})
    for phase in (0, 1):
        assert loads(operators, owners, {0: 0, 1: 0}, phase) == {0: 28, 1: 28}


def test_who_captures_more_of_its_own_is_given_less() -> None:
    """The adaptive variant: rank 0 has experts that nobody else has."""
    operators = [SharedOperator(f"op{i}", 10, 10) for i in range(10)]
    assert spread(operators, [0, 1], {0: 60, 1: 0}).count(0) == 2


def test_one_member_alone_captures_everything() -> None:
    assert spread([SharedOperator("a", 1, 1), SharedOperator("b", 2, 1)], [4], {}) == [4, 4]


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 3)), max_size=30),
    st.sets(st.integers(0, 50), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_the_answer_depends_on_nothing_but_what_all_members_know(
    sizes: list[tuple[int, int]], members: set[int], rng: random.Random
) -> None:
    """Neither the order of the operators nor that of the members; and no snapshot is larger than it must be.

    Largest first leaves the fullest member, in the last phase it was given something for, above the
    emptiest by no more than what it was given last, which is no larger than the largest anchor.
    """
    operators = [SharedOperator(f"op{i}", size, size // 3, phase) for i, (size, phase) in enumerate(sizes)]
    owners = dict(zip(operators, spread(operators, sorted(members), {}), strict=True))
    assert set(owners.values()) <= members
    mixed = rng.sample(operators, len(operators))
    shuffled = rng.sample(sorted(members), len(members))
    again = dict(zip(mixed, spread(mixed, shuffled, {}), strict=True))
    assert again == owners
    if operators and len({o.phase for o in operators}) == 1:
        found = loads(
            operators, [owners[o] for o in operators], dict.fromkeys(members, 0), operators[0].phase
        )
        assert max(found.values()) - min(found.values()) <= max(o.anchor_bytes for o in operators)
