"""Phases follow from the number of the iteration and from what was agreed on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.snapshot_policy import Calendar, Strides

A, B, C = (((0,), (1,)), ((1,), (0,)), ((0, 1), ()))


def test_phases_go_round() -> None:
    assert [Calendar(base=5).ordinal(i) % 3 for i in range(3, 9)] == [1, 2, 0, 1, 2, 0]


def test_iterations_between_two_snapshots_share_a_phase() -> None:
    calendar = Calendar(base=1, stride=3)
    assert [calendar.ordinal(i) for i in (1, 3, 4, 6, 7)] == [0, 0, 1, 1, 2]


@given(
    stride=st.integers(1, 7),
    window=st.integers(1, 9),
    first=st.integers(0, 50),
    base=st.integers(0, 50),
)
def test_boundaries_a_stride_apart_pass_through_all_phases(
    stride: int, window: int, first: int, base: int
) -> None:
    """Wherever the clean ones lie within their strides."""
    calendar = Calendar(base, stride)
    clean = [first + stride * n for n in range(window)]
    assert {calendar.ordinal(i) % window for i in clean} == set(range(window))


@given(st.integers(0, 100), st.integers(0, 20), st.integers(1, 5), st.integers(1, 9))
def test_it_may_begin_anew_in_any_phase(last: int, ordinal: int, stride: int, window: int) -> None:
    phase = ordinal % window
    calendar = Calendar(3, 2).from_here(last, phase=phase, stride=stride)
    assert calendar.ordinal(last) % window == phase
    assert calendar.ordinal(last + stride) % window == (phase + 1) % window
    assert calendar.stride == stride


def test_orders_follow_one_another_at_the_beginnings_of_windows() -> None:
    calendar = Calendar(base=1).ordered((A, B, C), since=4)
    found = [calendar.phases(i, 2) for i in range(1, 13)]
    assert found == [None] * 4 + [A, A, B, B, C, C, C, C]


@pytest.mark.parametrize("since", range(20, 24))
def test_an_order_never_changes_within_a_window(since: int) -> None:
    calendar = Calendar(stride=2).ordered((A, B), since=since)
    for window in range(30):
        inside = {calendar.phases(4 * window + i, 2) for i in range(4)}
        assert len(inside) == 1
        if 4 * window < since:
            assert inside == {None}


def test_without_orders_the_schedule_stays() -> None:
    assert Calendar().phases(7, 2) is None


class TestStrides:
    def test_the_shortest_that_was_seen(self) -> None:
        strides = Strides()
        assert strides.shortest == 1
        for iteration in (0, 4, 7, 11):
            strides.note(iteration)
        assert strides.shortest == 3

    def test_one_has_settled_once_it_was_seen_each_time(self) -> None:
        strides = Strides()
        for iteration in [0, 1, *range(3, 17, 2)]:
            strides.note(iteration)
            assert strides.settled() == 0
        strides.note(17)
        assert strides.settled() == 2
        strides.note(20)
        assert strides.settled() == 0

    def test_a_boundary_that_is_seen_again_is_none_in_between(self) -> None:
        strides = Strides()
        for iteration in (4, 6, 6, 8):
            strides.note(iteration)
        assert strides.shortest == 2

    def test_what_is_forgotten_does_not_count(self) -> None:
        strides = Strides()
        for iteration in (0, 2, 4):
            strides.note(iteration)
        strides.forget()
        strides.note(100)
        assert strides.shortest == 1
