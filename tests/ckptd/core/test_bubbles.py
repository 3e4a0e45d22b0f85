"""Bubbles: the closed forms of GPipe and 1F1B, an independent clock that ticks, and bad lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.core.bubbles import (
    UNIT_DURATIONS,
    ActionKind,
    GapMeter,
    PipelineAction,
    by_kind,
    gpipe_orders,
    one_f_one_b_orders,
    parse_actions,
    play,
    rank_bubbles,
    split_bytes,
)

SIZES = st.integers(1, 6)
SECONDS = st.integers(1, 9)


@settings(deadline=None)
@given(SIZES, SIZES, SECONDS, SECONDS, st.booleans())
def test_gpipe_and_1f1b_wait_as_long_as_their_closed_form_says(
    stages: int, more: int, forward: int, backward: int, steady: bool
) -> None:
    """(P - 1) / (M + P - 1), for each stage."""
    micro_batches = stages - 1 + more
    expected = Fraction(stages - 1, micro_batches + stages - 1)
    durations = by_kind({ActionKind.FORWARD: forward, ActionKind.BACKWARD: backward})
    for orders in (gpipe_orders(stages, micro_batches), one_f_one_b_orders(stages, micro_batches)):
        for found in rank_bubbles(orders, durations, steady=steady).values():
            assert found.fraction == pytest.approx(float(expected), abs=1e-12)
            assert found.period_s == (micro_batches + stages - 1) * (forward + backward)
            assert len(found.gaps_s) == 2 * micro_batches


def test_where_the_bubbles_are() -> None:
    """In GPipe the first stage waits between its forwards and backwards, the last one before and after."""
    found = rank_bubbles(gpipe_orders(3, 2), by_kind(UNIT_DURATIONS))
    assert (found[0].gaps_s, found[0].tail_s) == ((0, 0, 6, 0), 0)
    assert (found[2].gaps_s, found[2].tail_s) == ((2, 0, 0, 0), 4)
    again = rank_bubbles(gpipe_orders(3, 2), by_kind(UNIT_DURATIONS), steady=True)
    assert (again[2].gaps_s, again[2].tail_s) == ((6, 0, 0, 0), 0)


def ticking(
    orders: Mapping[int, Sequence[PipelineAction]], seconds: Mapping[PipelineAction, int], link: int
) -> dict[PipelineAction, int] | None:
    """When each action starts, found by a clock that ticks; None: nothing moves any more."""
    last = max(a.stage for order in orders.values() for a in order)
    rank_of = {a.stage: rank for rank, order in orders.items() for a in order}
    started: dict[PipelineAction, int] = {}
    todo = {rank: list(order) for rank, order in orders.items()}
    for now in range(2000):
        for rank, queue in todo.items():
            busy = any(started[a] + seconds[a] > now for a in started if rank_of[a.stage] == rank)
            if busy or not queue:
                continue
            action = queue[0]
            stage, m = action.stage, action.micro_batch
            needed: list[list[tuple[int, str]]] = []
            if action.kind == "F":
                needed = [[(stage - 1, "F")]] if stage else []
            elif action.kind == "W":
                needed = [[(stage, "I")]]
            else:
                needed = [[(stage, "F")]] + ([[(stage + 1, "B"), (stage + 1, "I")]] if stage < last else [])

            def there(where: int, kind: str, m: int = m, rank: int = rank, now: int = now) -> bool:
                a = PipelineAction(where, ActionKind(kind), m)
                late = link if rank_of.get(where) != rank else 0
                return a in started and started[a] + seconds[a] + late <= now

            if all(any(there(*each) for each in some) for some in needed):
                started[queue.pop(0)] = now
        if not any(todo.values()):
            return started
    return None


@st.composite
def schedules(draw: st.DrawFn) -> tuple[dict[int, list[PipelineAction]], dict[PipelineAction, int], int]:
    """Stages dealt to ranks, and each rank's actions in any order: not all can be run."""
    ranks, micro_batches = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    stages = draw(st.permutations(range(draw(st.integers(ranks, 4)))))
    split = draw(st.booleans())
    kinds = (
        [ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT]
        if split
        else [ActionKind.FORWARD, ActionKind.BACKWARD]
    )
    orders: dict[int, list[PipelineAction]] = {}
    for rank in range(ranks):
        mine = stages[rank::ranks]
        actions = [
            PipelineAction(s, kind, m) for kind in kinds for s in sorted(mine) for m in range(micro_batches)
        ]
        orders[rank] = draw(st.permutations(actions)) if draw(st.booleans()) else actions
    seconds = {a: draw(st.integers(1, 3)) for order in orders.values() for a in order}
    return orders, seconds, draw(st.integers(0, 2))


@settings(max_examples=100, deadline=None)
@given(schedules())
def test_any_schedule_runs_as_under_a_clock_that_ticks(
    drawn: tuple[dict[int, list[PipelineAction]], dict[PipelineAction, int], int],
) -> None:
    orders, seconds, link = drawn
    expected = ticking(orders, seconds, link)
    if expected is None:
        with pytest.raises(ValueError, match="wait\\(s\\) for a result that never comes"):
            play(orders, seconds.__getitem__, link_s=link)
        return
    timed = play(orders, seconds.__getitem__, link_s=link)
    assert {t.action: t.start_s for rounds in timed.values() for t in rounds[0]} == expected
    for rank, found in rank_bubbles(orders, seconds.__getitem__, link_s=link).items():
        busy = sum(seconds[a] for a in orders[rank])
        assert found.period_s == busy + sum(found.gaps_s) + found.tail_s
        assert min(found.gaps_s) >= 0


def test_a_backward_in_halves_can_leave_no_bubble() -> None:
    """The V-shaped zero-bubble schedule of two ranks and four micro-batches, as torch 2.13 lists it."""
    whole = {0: "0F0 0F1 0B0 0B1", 1: "1F0 1B0 1F1 1B1"}
    halves = {
        0: "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3",
        1: "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3",
    }
    for texts, waits in ((whole, True), (halves, False)):
        orders = {rank: parse_actions(each.split()) for rank, each in texts.items()}
        found = rank_bubbles(orders, by_kind(UNIT_DURATIONS), steady=True)
        assert all((bubbles.fraction > 0) == waits for bubbles in found.values()), found


def test_of_torchs_notation_computations_count() -> None:
    texts = [
        "0UNSHARD",
        None,
        "0F0",
        "0SEND_F0",
        "2RECV_F11",
        "(0F7;12B3)OVERLAP_F_B",
        "2I11",
        "2W11",
        "0REDUCE_GRAD",
    ]
    assert [(a.stage, str(a.kind), a.micro_batch) for a in parse_actions(texts)] == [
        (0, "F", 0),
        (0, "F", 7),
        (12, "B", 3),
        (2, "I", 11),
        (2, "W", 11),
    ]


def test_what_cannot_be_run_is_named() -> None:
    orders = {0: parse_actions(["0F0", "0B0"]), 1: parse_actions(["1B0", "1F0"])}
    with pytest.raises(ValueError, match="rank 0 at 0B0, rank 1 at 1B0"):
        rank_bubbles(orders, by_kind(UNIT_DURATIONS))
    with pytest.raises(ValueError, match="link_s=-1"):
        play(orders, by_kind(UNIT_DURATIONS), link_s=-1)


def test_durations_of_halves_follow_from_the_whole() -> None:
    of = by_kind({ActionKind.FORWARD: 1.0, ActionKind.BACKWARD: 3.0})
    assert [of(PipelineAction(0, kind, 0)) for kind in ActionKind] == [1.0, 3.0, 1.5, 1.5]
    assert (
        by_kind({ActionKind.BACKWARD_INPUT: 2.0, ActionKind.BACKWARD_WEIGHT: 0.5})(
            PipelineAction(0, ActionKind.BACKWARD, 0)
        )
        == 2.5
    )


def test_the_update_moves_the_next_iteration_and_is_no_bubble() -> None:
    one = gpipe_orders(1, 2)
    timed = play(one, by_kind(UNIT_DURATIONS), update_s=5.0, iterations=2)
    assert [t.start_s for t in timed[0][1]] == [11.0, 12.0, 13.0, 15.0]
    found = rank_bubbles(one, by_kind(UNIT_DURATIONS), update_s=5.0, steady=True)[0]
    assert (found.fraction, found.period_s) == (0.0, 6.0)


def test_what_does_not_fit_into_bubbles_is_the_rest() -> None:
    assert split_bytes(100, [0.5, 0.25], 80.0) == (60, 40)
    assert split_bytes(100, [2.0], 80.0) == (100, 0)
    assert split_bytes(100, [], 80.0) == split_bytes(100, [1.0], 0.0) == (0, 100)


def test_gaps_are_medians_of_the_newest_iterations() -> None:
    meter = GapMeter(2, kept=3)
    assert list(meter.gaps_s) == []
    assert meter.note([3.0, 0.0])
    assert not meter.note([3.0])
    assert meter.gaps_s == (3.0, 0.0)
    for gaps in ([3.0, 1.0], [9.0, 0.5], [4.0, 0.75]):
        assert meter.note(gaps)
    assert meter.gaps_s == (4.0, 0.75)  # the first has gone
