"""Combinations of holders for a range of several parts: likely ones first, each once, all of them
where they are few.
"""

from __future__ import annotations

import pytest

from ckptd.core.recovery.mixes import MIXES, next_mix


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
