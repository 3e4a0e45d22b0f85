"""How often a rank persists: alone, and beside ranks that measured something else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.persistence.cadence import Cadence


def test_every_is_what_the_user_wants_while_the_store_sustains_it() -> None:
    cadence = Cadence(every=10)
    cadence.note_iterations(5, 5.0)
    cadence.note_upload(2.0)
    assert [i for i in range(41) if cadence.due(i)] == [10, 20, 30, 40]


def test_seconds_become_the_next_doubling_of_the_base() -> None:
    cadence = Cadence(every=10, every_s=60.0)
    cadence.note_iterations(100, 100.0)
    assert cadence.stride == 80  # 10, 20 and 40 s would be more often than is wanted


def test_a_slow_store_makes_strides_longer_and_a_fast_one_shorter_again() -> None:
    cadence = Cadence()
    cadence.note_iterations(10, 1.0)
    cadence.note_upload(1.0)
    slow = cadence.stride
    assert slow * 0.1 >= 1.25
    for _ in range(3):
        cadence.note_upload(0.01)
    assert cadence.stride == 1


def test_strides_do_not_go_to_and_fro() -> None:
    cadence = Cadence()
    cadence.note_iterations(1, 1.0)
    strides = []
    for upload_s in (3.1, 3.3, 3.0, 3.25, 3.1, 3.15, 3.05, 3.3):  # around what a stride of 4 allows
        cadence.note_upload(upload_s)
        strides.append(cadence.stride)
    assert len(set(strides[3:])) == 1


def test_nothing_is_due_at_the_beginning() -> None:
    assert not Cadence().due(0)


@given(st.integers(1, 50), st.lists(st.integers(0, 8), min_size=2, max_size=5))
def test_ranks_with_different_strides_meet_at_the_longest(every: int, doublings: list[int]) -> None:
    ranks = []
    for j in doublings:
        cadence = Cadence(every=every)
        cadence.note_iterations(1, 1.0)
        cadence.note_upload(every * 2**j / 1.25)
        ranks.append(cadence)
    longest = max(cadence.stride for cadence in ranks)
    assert all(cadence.due(longest * n) for cadence in ranks for n in (1, 2, 7))


def test_a_fast_rank_follows_the_strides_of_the_others_and_tries_its_own_again() -> None:
    cadence = Cadence(every=10)
    cadence.note_left_alone(10)
    cadence.note_committed(20)
    cadence.note_left_alone(30)
    assert cadence.stride == 10  # once may be chance
    cadence.note_left_alone(50)
    assert cadence.stride == 20
    for n in range(16):
        assert cadence.stride == 20
        cadence.note_committed(20 * n)
    assert cadence.stride == 10


def test_what_longer_strides_would_not_have_avoided_changes_nothing() -> None:
    cadence = Cadence(every=10)
    for _ in range(5):
        cadence.note_left_alone(40)
    assert cadence.stride == 10


@pytest.mark.parametrize(("every", "every_s"), [(0, 0.0), (1, -1.0)])
def test_impossible_wishes_are_refused(every: int, every_s: float) -> None:
    with pytest.raises(ValueError, match="every"):
        Cadence(every, every_s)
