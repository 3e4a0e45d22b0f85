"""Who captures what several ranks have alike."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.schedules.shares import SharedOperator, spread


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
