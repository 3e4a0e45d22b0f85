"""Every unit has one place, devices are even, and a loss or a return moves the least that keeps them even."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
from scipy.optimize import linprog

from ckptd.core.serving.unit_placement import UnitPlacement, move_units, place_units
from tests.ckptd.core.serving.models import total_spread

SIZES = [(n, units, layers) for n in range(1, 9) for units in range(1, 11) for layers in (1, 3, 4)]


def check(placement: UnitPlacement) -> None:
    """Coverage and balance, of each layer and of all."""
    n = len(placement.devices)
    base, rest = divmod(placement.units, n)
    for layer, row in enumerate(placement.owners):
        counts = [len(placement.owned(d, layer)) for d in placement.devices]
        shared = placement.shared(layer)
        assert sum(counts) + len(shared) == placement.units == len(row)
        assert sorted(-1 - owner for owner in row if owner < 0) == list(range(placement.slots))
        if placement.hybrid:
            assert counts == [base] * n
            assert len(shared) == rest
        else:
            assert not shared
            assert set(counts) <= {base, base + 1}
    assert total_spread(placement) <= (not placement.hybrid)


def moved(before: UnitPlacement, after: UnitPlacement) -> int:
    rows = zip(before.owners, after.owners, strict=True)
    return sum(a != b for row in rows for a, b in zip(*row, strict=True))


def total(placement: UnitPlacement, device: int) -> int:
    return sum(row.count(device) for row in placement.owners)


def most_staying(before: UnitPlacement, devices: tuple[int, ...]) -> int:
    """Units that may stay in an even cyclic placement, by a linear program of the counts ``[L, n]``."""
    n, layers = len(devices), before.layers
    base, rest = divmod(before.units, n)
    had = np.array([[len(before.owned(d, layer)) for d in devices] for layer in range(layers)])
    gain = (had > base).astype(float).ravel()
    rows = np.kron(np.eye(layers), np.ones(n))
    columns = np.kron(np.ones(layers), np.eye(n))
    least = layers * rest // n
    limit = np.concatenate([np.full(n, least + 1), np.full(n, -least)])
    found = linprog(
        -gain,
        A_ub=np.vstack([columns, -columns]),
        b_ub=limit,
        A_eq=rows,
        b_eq=np.full(layers, rest),
        bounds=(0, 1),
    )
    assert found.success
    assert found.fun is not None
    return int(np.minimum(had, base).sum()) + round(-found.fun)


@pytest.mark.parametrize("hybrid", [False, True])
def test_every_unit_has_one_place_and_devices_are_even(hybrid: bool) -> None:
    for n, units, layers in SIZES:
        placement = place_units(layers, units, range(n), hybrid=hybrid)
        check(placement)
        even = hybrid or units % n == 0
        assert placement.straggler == pytest.approx(1.0 if even else (units // n + 1) / (units / n))


def test_the_device_with_a_unit_more_rotates() -> None:
    placement = place_units(3, 4, [10, 11, 12])
    assert placement.owners == ((10, 10, 11, 12), (10, 11, 11, 12), (10, 11, 12, 12))


def test_eight_heads_on_seven_devices() -> None:
    """A usual layout gives one device two heads: it holds, and takes, 1.75 times an even share."""
    cyclic = place_units(7, 8, range(7))
    hybrid = place_units(7, 8, range(7), hybrid=True)
    assert [total(cyclic, d) for d in range(7)] == [8] * 7
    assert (cyclic.straggler, cyclic.slots) == (1.75, 0)
    assert (hybrid.straggler, hybrid.slots) == (1.0, 1)
    assert hybrid.weights_of(3, 0) == {3, 7}
    assert (hybrid.holder(0, 3), hybrid.holder(0, 7, (5,))) == (3, 5)


@pytest.mark.parametrize("hybrid", [False, True])
def test_what_divides_is_the_usual_tensor_parallel_layout(hybrid: bool) -> None:
    placement = place_units(2, 8, range(4), hybrid=hybrid)
    assert placement.owners == ((0, 0, 1, 1, 2, 2, 3, 3),) * 2


def test_a_loss_and_a_return_move_the_least_for_up_to_8_devices() -> None:
    """Mostly that is what was lost, or what the device gets back; elsewhere a linear program agrees."""
    losses = more = 0
    for n, units, layers in SIZES:
        before = place_units(layers, units, range(n))
        for d in range(n if n > 1 else 0):
            losses += 1
            after = move_units(before, lost=[d])
            check(after)
            back = move_units(after, joined=[d])
            check(back)
            if moved(before, after) > total(before, d):
                more += 1
                assert layers * units - moved(before, after) == most_staying(before, after.devices)
            assert moved(after, back) == total(back, d) == layers * units // n
    assert (losses, more) == (1050, 15)


def count_matrices(before: UnitPlacement, devices: tuple[int, ...]) -> Iterator[list[dict[int, int]]]:
    """All even ones."""
    base, rest = divmod(before.units, len(devices))
    rows = [{d: base + (d in more) for d in devices} for more in itertools.combinations(devices, rest)]
    for found in itertools.product(rows, repeat=before.layers):
        totals = [sum(row[d] for row in found) for d in devices]
        if max(totals) - min(totals) <= 1:
            yield list(found)


def test_from_any_placement_no_other_even_one_keeps_more() -> None:
    draws = random.Random(5)
    for _ in range(150):
        n, layers, units = draws.randint(2, 4), draws.randint(1, 3), draws.randint(1, 5)
        owners = tuple(tuple(draws.randrange(n) for _ in range(units)) for _ in range(layers))
        before = UnitPlacement(tuple(range(n)), owners, hybrid=False)
        lost, joined = [[], [0]][draws.randint(0, 1)], [[], [n], [n, n + 1]][draws.randint(0, 2)]
        after = move_units(before, lost=lost, joined=joined)
        check(after)
        stay = {d: [row.count(d) if d not in lost else 0 for row in owners] for d in after.devices}
        best = max(
            sum(min(row[d], stay[d][layer]) for layer, row in enumerate(counts) for d in row)
            for counts in count_matrices(before, after.devices)
        )
        assert layers * units - moved(before, after) == best


def test_shared_units_follow_losses_down_to_one_device_and_back() -> None:
    """What a device may keep it keeps, and requests keep what they have in slots that stay."""
    for n, units in itertools.product(range(2, 9), range(1, 13)):
        placement = place_units(3, units, range(n), hybrid=True)
        for d in range(n - 1):
            placement = follow(placement, move_units(placement, lost=[d]))
        for d in range(n - 1):
            placement = follow(placement, move_units(placement, joined=[d]))


def follow(before: UnitPlacement, after: UnitPlacement) -> UnitPlacement:
    check(after)
    slots = min(before.slots, after.slots)
    base = after.units // len(after.devices)
    for layer in range(after.layers):
        assert before.shared(layer)[:slots] == after.shared(layer)[:slots]
        for d in set(before.devices) & set(after.devices):
            had, has = set(before.owned(d, layer)), set(after.owned(d, layer))
            assert len(had & has) == min(len(had), base)
    return after


def copied(before: UnitPlacement, row: tuple[int, ...], devices: tuple[int, ...]) -> int:
    """Units, one for each device, whose weights a device does not have."""
    after = UnitPlacement(devices, (row,), hybrid=True)
    return sum(len(after.weights_of(d, 0) - before.weights_of(d, 0)) for d in devices)


def test_no_other_hybrid_placement_needs_fewer_weights() -> None:
    """All placements of up to 6 units: of n devices, after a loss, after the next, after both came back."""
    for n, units in itertools.product((2, 3, 4), range(1, 7)):
        before = place_units(1, units, range(n), hybrid=True)
        steps = [([0], []), ([1], []), ([], [0]), ([], [1])] if n > 2 else [([0], []), ([], [0])]
        for lost, joined in steps:
            after = move_units(before, lost=lost, joined=joined)
            base, rest = divmod(units, len(after.devices))
            owners = [d for d in after.devices for _ in range(base)] + [-1 - slot for slot in range(rest)]
            every = set(itertools.permutations(owners))
            best = min(copied(before, row, after.devices) for row in every)
            assert copied(before, after.owners[0], after.devices) == best
            before = after


def test_a_device_that_came_back_empty_is_lost_and_joins() -> None:
    before = place_units(2, 5, range(3))
    after = move_units(before, lost=[1], joined=[1])
    check(after)
    assert all(a == b for a, b in zip(before.owners[0], after.owners[0], strict=True) if a != 1)


def test_placements_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="no device is left"):
        place_units(1, 4, [])
    with pytest.raises(ValueError, match=r"devices \[1, 1\]: each has a number of its own"):
        place_units(1, 4, [1, 1])
    with pytest.raises(ValueError, match="0 layers of 4 units: there is nothing to place"):
        place_units(0, 4, [1])
    before = place_units(1, 4, [0, 1])
    with pytest.raises(ValueError, match=r"devices \[2\] are lost, but the placement has \[0, 1\]"):
        move_units(before, lost=[2])
    with pytest.raises(ValueError, match=r"devices \[1\] join, but are in the placement"):
        move_units(before, joined=[1])
    with pytest.raises(ValueError, match="no device is left"):
        move_units(before, lost=[0, 1])
