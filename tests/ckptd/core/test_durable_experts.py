"""Which experts a durable checkpoint stores: all in turn, the same on all ranks, within the limit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.durable_experts import (
    DurableChoice,
    DurableTurns,
    Listed,
    choose_durable,
    have_gaps,
    turns_of,
)

ONE = DurableTurns(1, 4, None)


def window_to(end: int, window: int = 4, every: int = 1) -> list[Listed]:
    """The snapshots in memory that end there."""
    ends = range(end - (window - 1) * every, end + 1, every)
    return [Listed(i, i // every % window) for i in ends]


def listed(choice: DurableChoice, last: Sequence[Listed], now: Sequence[Listed]) -> list[Listed]:
    phases = {each.iteration: each.phase for each in (*last, *now)}
    return [Listed(i, phases[i]) for i in choice.iterations]


def test_what_is_oldest_in_storage_is_stored_and_the_rest_is_taken_from_the_last_checkpoint() -> None:
    # Phases 1, 2, 3, 0 are those of 5 to 8; now 9 to 12 are in memory.
    found = choose_durable(window_to(8), window_to(12), 4, ONE)
    assert found == DurableChoice(kept=(6, 7, 8), stored=(9, 12), bare=True)
    two = choose_durable(window_to(8), window_to(12), 4, DurableTurns(2, 4, None))
    assert two == DurableChoice(kept=(7, 8), stored=(9, 10, 12), bare=True)
    assert choose_durable(window_to(8), window_to(12), 4, DurableTurns(4, 4, None)) is None


def test_the_newest_snapshot_is_stored_with_its_experts_if_their_turn_comes_with_each_such_checkpoint() -> (
    None
):
    last = [Listed(8, 0), Listed(13, 1), Listed(18, 2), Listed(23, 3), Listed(24, 0)]
    assert choose_durable(last, window_to(28), 4, ONE) == DurableChoice((13, 18, 23), (28,), bare=False)
    # The next one is of another phase: until then it can wait.
    last = [Listed(8, 1), Listed(13, 2), Listed(18, 3), Listed(23, 0)]
    found = choose_durable(last, window_to(25), 4, ONE)
    assert found == DurableChoice(kept=(8, 18, 23), stored=(22, 25), bare=True)


def test_what_a_checkpoint_lists_cannot_be_taken_for_consecutive_snapshots() -> None:
    """With 8 as it was stored, and 9, 10, 11, and 12 without experts, a rank that had these iterations in memory
    took the experts of 12 from there, and another one those of 8: replicas had different values from then on.
    """
    three = DurableTurns(3, 4, None)
    found = choose_durable(window_to(8), window_to(12), 4, three)
    assert found == DurableChoice(kept=(7,), stored=(9, 10, 12), bare=False)
    again = choose_durable(
        [Listed(7, 3), Listed(9, 1), Listed(10, 2), Listed(12, 0)], window_to(13), 4, three
    )
    assert again is None, "one phase has waited once, and so few are left that all are stored"
    later = choose_durable(window_to(8), window_to(13), 4, three)
    assert later == DurableChoice(kept=(5,), stored=(10, 11, 12, 13), bare=True), "5 and 10 are apart"


@pytest.mark.parametrize(
    ("images", "gaps"),
    [
        ([], False),
        ([(4, 4), (5, 5), (6, 6)], False),
        ([(4, 4), (5, 5), (9, 9)], True),
        ([(2, 1), (4, 2), (6, 3)], False),  # an interval of 2
        ([(2, 1), (6, 3)], True),
        ([(4, 4), (5, 5), (6, 8)], False),  # a recovery went back from iteration 7 to 5
    ],
)
def test_images_of_several_checkpoints_are_told_from_what_an_interval_or_a_recovery_leaves_out(
    images: list[tuple[int, int]], gaps: bool
) -> None:
    assert have_gaps(images) == gaps


@pytest.mark.parametrize(
    ("last", "now"),
    [
        ([], window_to(12)),
        (window_to(8)[1:], window_to(12)),  # a phase is nowhere
        (window_to(12), window_to(12)),  # it is this one
        (window_to(16), window_to(12)),
        (window_to(8), window_to(12)[1:]),
        (window_to(8), [Listed(8, 0), *window_to(12)]),  # more than a window, after a recovery
        ([Listed(4, 1), *window_to(8)], window_to(12)),
    ],
)
def test_all_experts_are_stored_where_the_last_checkpoint_does_not_go_with_this_one(
    last: Sequence[Listed], now: Sequence[Listed]
) -> None:
    assert choose_durable(last, now, 4, ONE) is None


def test_the_limit_counts_what_a_recovery_from_storage_would_lose_now() -> None:
    def at_limit(limit: float, lost: float = 0.0) -> DurableChoice | None:
        last = [Listed(85, 1), Listed(86, 2), Listed(87, 3), Listed(88, 0)]
        return choose_durable(last, window_to(100), 4, DurableTurns(1, 4, limit, lost))

    ages = [100 - 97, 100 - 86, 100 - 87, 100 - 88]
    exactly = sum(ages) / 4 / 100
    one = at_limit(exactly)
    assert one is not None
    assert one.stored == (97, 100)
    two = at_limit(exactly - 1e-9)
    assert two is not None
    assert two.stored == (97, 98, 100)
    assert at_limit(exactly, lost=1e-6) == two
    assert at_limit(0.0) is None


@given(
    st.integers(2, 9),
    st.integers(1, 3),
    st.integers(1, 9),
    st.lists(st.integers(1, 30), min_size=1, max_size=40),
)
def test_every_expert_gets_its_turn_and_every_checkpoint_has_all(
    window: int, every: int, experts: int, steps: list[int]
) -> None:
    """Whatever the distance between checkpoints is, overlapping windows included."""
    turns = DurableTurns(min(experts, window), window, None)
    end = 4 * window * every
    last = window_to(end, window, every)
    content = {each.phase: each.iteration for each in last}  # what storage has of the experts of each phase
    stored_at = dict.fromkeys(range(window), 0)
    number = turns_of(turns.experts, window, window)
    for count, step in enumerate(steps, start=1):
        end += step * every
        now = window_to(end, window, every)
        choice = choose_durable(last, now, window, turns)
        in_memory = {each.phase: each.iteration for each in now}
        if choice is None:
            content, last = dict(in_memory), now
        else:
            fresh = {e.phase for e in now if e.iteration in choice.stored}
            if choice.bare:
                fresh.discard(now[-1].phase)
            else:
                assert now[-1].phase in fresh
            moved = [p for p in in_memory if in_memory[p] > content[p]]
            assert len(fresh) == number <= len(moved)
            for phase in fresh:
                content[phase] = in_memory[phase]
            last = listed(choice, last, now)
            # Each image is of one iteration; a recovery takes the newest that has an expert.
            assert len({each.iteration for each in last}) == len(last) <= window + 1
            assert set(choice.kept) == {content[p] for p in content if p not in fresh}
            # Who has the same snapshots in memory must see that these have older experts.
            numbered = [(each.iteration, each.iteration // every) for each in last]
            assert have_gaps(numbered) or content == in_memory
        for phase, iteration in content.items():
            if iteration >= end - step * every and iteration > end - window * every:
                stored_at[phase] = count
            assert iteration <= end
        assert set(content) == set(range(window))
    if all(step >= window for step in steps):
        rounds = -(-window // number) + 1
        assert all(len(steps) - at <= rounds for at in stored_at.values())
