"""The chance of survival against plain enumeration of all losses."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckptd.core.elastic.elastic_types import ExpertPlacement
from ckptd.core.elastic.survival import (
    holder_sets,
    recovery_probability,
    survivor_counts,
)


def survivors(counts_LNE: NDArray[np.int32], units: list[int], lost: int) -> int:
    """How many choices of lost units leave every expert of every layer somewhere."""
    found = 0
    for gone in combinations(range(max(units) + 1), lost):
        alive = [node for node, unit in enumerate(units) if unit not in gone]
        found += bool((counts_LNE[:, alive].sum(axis=1) > 0).all())
    return found


@st.composite
def placements(draw: st.DrawFn) -> NDArray[np.int32]:
    shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(1, 5)))
    size = int(np.prod(shape))
    numbers = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    return np.array(numbers, dtype=np.int32).reshape(shape)


@given(placements())
@settings(max_examples=50, deadline=None)
def test_it_is_the_share_of_losses_survived(counts_LNE: NDArray[np.int32]) -> None:
    placement, num_nodes = ExpertPlacement(counts_LNE), counts_LNE.shape[1]
    for lost in range(num_nodes + 1):
        got = recovery_probability(placement, lost)
        assert got.exact
        wanted = survivors(counts_LNE, list(range(num_nodes)), lost)
        assert got.ways * comb(num_nodes, lost) == wanted * got.choices
        for layer in range(len(counts_LNE)):
            counts = counts_LNE[layer : layer + 1]
            chance = recovery_probability(ExpertPlacement(counts), lost)
            alone = survivors(counts, list(range(num_nodes)), lost)
            assert chance.ways * comb(num_nodes, lost) == alone * chance.choices


@given(placements(), st.data())
@settings(max_examples=40, deadline=None)
def test_nodes_of_a_domain_are_lost_together(counts_LNE: NDArray[np.int32], data: st.DataObject) -> None:
    num_nodes = counts_LNE.shape[1]
    some = data.draw(st.lists(st.integers(0, 3), min_size=num_nodes, max_size=num_nodes))
    units = [sorted(set(some)).index(unit) for unit in some]
    for lost in range(max(units) + 2):
        got = recovery_probability(ExpertPlacement(counts_LNE), lost, units=np.array(units))
        wanted = survivors(counts_LNE, units, lost)
        assert got.ways * comb(max(units) + 1, lost) == wanted * got.choices
        if lost == max(units) + 1:
            break


def test_counting_along_the_units_agrees_with_enumerating_them() -> None:
    """More units than are enumerated, so that the other way of counting is taken."""
    rng = np.random.default_rng(0)
    for _ in range(4):
        held_MU = rng.random((6, 14)) < 0.3
        held_MU[np.arange(6), rng.integers(14, size=6)] = True
        masks = np.arange(1 << 14)
        rows = held_MU @ (1 << np.arange(14))
        lives = ~((masks[:, None] & rows) == rows).any(axis=1)
        wanted = np.bincount(np.bitwise_count(masks)[lives], minlength=15)
        for up_to in (14, 5):
            assert survivor_counts(held_MU, up_to) == wanted[: up_to + 1].tolist()


def test_disjoint_groups_follow_the_formula_at_any_size() -> None:
    """300 nodes in 100 groups of three: lost are the choices that hold a group whole."""
    counts = np.repeat(np.eye(100, dtype=np.int32), 3, axis=0)[None]
    got = recovery_probability(ExpertPlacement(counts), 4)
    assert got.exact
    assert got.choices == comb(300, 4)
    assert got.ways == comb(300, 4) - 100 * 297


def test_what_cannot_be_counted_is_sampled_with_its_error() -> None:
    rng = np.random.default_rng(1)
    counts = (rng.random((2, 40, 60)) < 0.1).astype(np.int32)
    counts[:, 0] += counts.sum(axis=1) == 0
    placement = ExpertPlacement(counts)
    assert survivor_counts(holder_sets(placement), 4) is None
    got = recovery_probability(placement, 2, samples=3000)
    wanted = survivors(counts, list(range(40)), 2) / comb(40, 2)
    assert not got.exact
    assert 0 < got.error < 0.02
    assert abs(got.value - wanted) < 4 * got.error
    assert got == recovery_probability(placement, 2, samples=3000)
    assert got.ways != recovery_probability(placement, 2, samples=3000, seed=1).ways
    assert str(got) == f"{got.value:.4f} ± {got.error:.4f}"


def test_a_sampled_certainty_still_has_an_error() -> None:
    rng = np.random.default_rng(1)
    counts = (rng.random((1, 40, 60)) < 0.5).astype(np.int32)
    got = recovery_probability(ExpertPlacement(counts), 14, samples=500)
    assert (got.value, got.exact) == (1.0, False)
    assert got.error > 0


def test_only_minimal_sets_are_kept() -> None:
    counts = np.array([[[1, 1, 0], [1, 0, 1], [0, 0, 1]]])  # holders {0, 1}, {0}, {1, 2}
    assert holder_sets(ExpertPlacement(counts)).tolist() == [
        [True, False, False],
        [False, True, True],
    ]


@pytest.mark.parametrize(
    ("lost", "units", "samples", "said"),
    [
        (-1, None, 9, "-1 lost of 3"),
        (4, None, 9, "4 lost of 3"),
        (2, [0, 0, 0], 9, "2 lost of 1"),
        (1, [0, 1], 9, "units must number"),
        (1, [0, 2, 2], 9, "without gaps"),
        (1, [-1, 0, 1], 9, "without gaps"),
        (1, None, 0, "samples is 0"),
    ],
)
def test_bad_questions_are_refused(lost: int, units: list[int] | None, samples: int, said: str) -> None:
    placement = ExpertPlacement(np.ones((1, 3, 2), dtype=np.int32))
    numbers = None if units is None else np.array(units)
    with pytest.raises(ValueError, match=said):
        recovery_probability(placement, lost, units=numbers, samples=samples)
