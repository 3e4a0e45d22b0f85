"""Which device has which unit of each layer, for any number of devices (FailSafe; pure).

A *unit* is what is not split further: a KV head with its query heads, a block of MLP columns, an expert.
All units of a kind have the same size. With U units in each of L layers on n devices, let b = U // n and
r = U - n * b. A placement is of one of two forms:

* **cyclic**: in each layer r devices have b + 1 units and the others b. Which ones these are rotates with
  the layer, so over all layers two devices differ by one unit at most.
* **hybrid**: in each layer each device has b units by itself (tensor-parallel). The other r are *shared*:
  every device has their weights, and each request chooses for itself which device computes them
  (data-parallel). The r shared units of a layer stand in *slots*. A request that chose a device for a slot
  has that device in all layers.

If n divides U, both are the usual tensor-parallel layout.

`move_units` follows losses and arrivals with the least movement. In a cyclic placement a layer has r units
beyond n * b to give away; a device that already has more than b loses nothing where it gets one of these.
So the most units stay where the most (layer, device) pairs of that kind are chosen, with r in each layer and
an even number for each device. This is a minimum-cost flow with convex costs at the devices: it begins with
the best choice of each layer by itself, and moves choices along the cheapest paths until devices are even.
In a hybrid placement layers do not depend on each other.

Complexity: O(L * n^2 + n^3) for each of the choices that must be moved, at most L * r, in practice few.

Source: FailSafe (arXiv:2511.14116), of which the abstract was available: cyclic placement, and hybrid
    attention. Slots, least movement and its proof by flow are our own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, slots=True)
class UnitPlacement:
    """Units of one kind.

    Attributes:
        devices: numbers of those that are there, ascending; a number stays with its device.
        owners: ``[L][U]``, the device of each unit; of a shared one -1 - its slot.
        hybrid: of which form it is.
    """

    devices: tuple[int, ...]
    owners: tuple[tuple[int, ...], ...]
    hybrid: bool

    @property
    def layers(self) -> int:
        """L."""
        return len(self.owners)

    @property
    def units(self) -> int:
        """U, of each layer."""
        return len(self.owners[0])

    @property
    def slots(self) -> int:
        """The number of shared units in a layer."""
        return sum(owner < 0 for owner in self.owners[0])

    def shared(self, layer: int) -> tuple[int, ...]:
        """``[r]``, the shared unit in each slot."""
        slots = sorted((-1 - owner, unit) for unit, owner in enumerate(self.owners[layer]) if owner < 0)
        return tuple(unit for _, unit in slots)

    def owned(self, device: int, layer: int) -> tuple[int, ...]:
        """The units that a device has by itself, ascending."""
        return tuple(unit for unit, owner in enumerate(self.owners[layer]) if owner == device)

    def weights_of(self, device: int, layer: int) -> frozenset[int]:
        """The units whose weights a device has: its own and shared ones; none if it is not there."""
        if device not in self.devices:
            return frozenset()
        row = enumerate(self.owners[layer])
        return frozenset(unit for unit, owner in row if owner == device or owner < 0)

    def holder(self, layer: int, unit: int, homes: Sequence[int] = ()) -> int:
        """Which device computes a unit.

        Args:
            homes: ``[r]``, what the request chose for each slot.
        """
        owner = self.owners[layer][unit]
        return homes[-1 - owner] if owner < 0 else owner

    @property
    def straggler(self) -> float:
        """The time of a layer as a multiple of that of an even split, if shared units are evenly routed."""
        even = self.units / len(self.devices)
        most = max(len(self.owned(d, layer)) for layer in range(self.layers) for d in self.devices)
        return (most + self.slots / len(self.devices)) / even


def place_units(layers: int, units: int, devices: Iterable[int], *, hybrid: bool = False) -> UnitPlacement:
    """Place units from scratch; those of a device are consecutive in each layer.

    Raises:
        ValueError: there is no layer, unit or device, or a device is there twice or negative.
    """
    there = _checked_devices(devices)
    if layers < 1 or units < 1:
        raise ValueError(
            f"{layers} layers of {units} units: there is nothing to place, both must be at least 1"
        )
    n = len(there)
    base, rest = divmod(units, n)
    owners = []
    for layer in range(layers):
        first = layer * rest % n
        row = []
        for i, device in enumerate(there):
            row += [device] * (base + (not hybrid and (i - first) % n < rest))
        owners.append((*row, *(-1 - slot for slot in range(units - len(row)))))
    return UnitPlacement(there, tuple(owners), hybrid)


def move_units(
    before: UnitPlacement, *, lost: Collection[int] = (), joined: Collection[int] = ()
) -> UnitPlacement:
    """Place units on other devices so that the fewest change their device.

    Slots that are there afterwards, and were before, have the same units.

    Args:
        lost: devices whose memory is gone.
        joined: devices whose memory is empty. A device that came back at once is in both.
    Raises:
        ValueError: a lost device is not in the placement, a joined one is already, or none is left.
    """
    if strange := sorted(set(lost) - set(before.devices)):
        raise ValueError(f"devices {strange} are lost, but the placement has {list(before.devices)}")
    kept = [d for d in before.devices if d not in set(lost)]
    if twice := sorted(set(joined) & set(kept)):
        raise ValueError(f"devices {twice} join, but are in the placement: name them as lost, too")
    there = _checked_devices([*kept, *joined])
    have = [
        {d: list(before.owned(d, layer)) if d in kept else [] for d in there}
        for layer in range(before.layers)
    ]
    counts = _counts(before, there, have)
    owners = [_moved_row(before, layer, have[layer], counts[layer]) for layer in range(before.layers)]
    return UnitPlacement(there, tuple(owners), before.hybrid)


def _moved_row(
    before: UnitPlacement, layer: int, have: dict[int, list[int]], count: dict[int, int]
) -> tuple[int, ...]:
    """Owners of a layer's units; each device keeps of those that it has as many as it may."""
    slots = list(before.shared(layer))
    mine = {d: have[d][:number] for d, number in count.items()}
    placed = {unit for units in mine.values() for unit in units} | set(slots)
    free = [unit for unit in range(before.units) if unit not in placed]
    turn = layer % len(free) if free else 0
    free = free[turn:] + free[:turn]  # so that no device sends, or receives, most of them
    for d, number in count.items():
        while len(mine[d]) < number:  # no unit is free: the last slot's unit is the device's own from now on
            mine[d].append(free.pop(0) if free else slots.pop())
    owner_of = {unit: d for d, units in mine.items() for unit in units}
    owner_of |= {unit: -1 - slot for slot, unit in enumerate((*slots, *free))}
    return tuple(owner_of[unit] for unit in range(before.units))


def _checked_devices(devices: Iterable[int]) -> tuple[int, ...]:
    there = sorted(devices)
    if not there:
        raise ValueError("no device is left: a server needs at least one")
    if len(set(there)) < len(there) or there[0] < 0:
        raise ValueError(f"devices {there}: each has a number of its own, from 0 on")
    return tuple(there)


def _counts(
    before: UnitPlacement, there: tuple[int, ...], have: list[dict[int, list[int]]]
) -> list[dict[int, int]]:
    """How many units each device has in each layer afterwards."""
    base, rest = divmod(before.units, len(there))
    if before.hybrid or not rest:
        return [dict.fromkeys(there, base) for _ in have]
    gains = [[len(mine[d]) > base for d in there] for mine in have]
    chosen = _even_choices(gains, rest)
    return [{d: base + c for d, c in zip(there, row, strict=True)} for row in chosen]


def _even_choices(gains: Sequence[Sequence[bool]], rest: int) -> list[list[bool]]:
    """Choose ``rest`` of n in each of L rows, each column within one of the others, with the most gains.

    Args:
        gains: ``[L][n]``, whether a choice is worth something.
    """
    n = len(gains[0])
    total = [0] * n
    chosen = []
    for gain in gains:
        best = set(sorted(range(n), key=lambda d: (not gain[d], total[d], d))[:rest])
        for d in best:
            total[d] += 1
        chosen.append([d in best for d in range(n)])
    least = len(gains) * rest // n
    while True:
        path = _best_path(gains, chosen, total, least)
        if path is None:
            return chosen
        for layer, a, b in path:
            chosen[layer][a], chosen[layer][b] = False, True
        total[path[0][1]] -= 1
        total[path[-1][2]] += 1


def _best_path(
    gains: Sequence[Sequence[bool]], chosen: list[list[bool]], total: list[int], least: int
) -> list[tuple[int, int, int]] | None:
    """Choices (row, from, to) that together help most; None: nothing helps, so the choices are the best.

    No cycle of changes ever helps: the first choices are the best of each row, and a best path leaves none.
    """
    n, whole = len(total), len(gains) * len(total) + 1
    steps = _best_steps(gains, chosen)
    worth, after = _longest_paths(n, {ends: gain for ends, (gain, _) in steps.items()})
    best, ends = 0, None
    for (a, b), gain in worth.items():
        # A column is even with `least` choices or with one more.
        evened = (total[a] > least + 1) - (total[a] <= least) + (total[b] < least) - (total[b] > least)
        if evened * whole + gain > best:
            best, ends = evened * whole + gain, (a, b)
    if ends is None:
        return None
    at, path = ends[0], []
    while at != ends[1]:
        to = after[at, ends[1]]
        path.append((steps[at, to][1], at, to))
        at = to
    return path


def _best_steps(
    gains: Sequence[Sequence[bool]], chosen: list[list[bool]]
) -> dict[tuple[int, int], tuple[int, int]]:
    """Of each pair of columns: the gain of moving a choice from one to the other, and the best row for it."""
    steps: dict[tuple[int, int], tuple[int, int]] = {}
    for number, (gain, row) in enumerate(zip(gains, chosen, strict=True)):
        for a, b in product(range(len(row)), repeat=2):
            if row[a] and not row[b]:
                worth = int(gain[b]) - int(gain[a])
                if (a, b) not in steps or worth > steps[a, b][0]:
                    steps[a, b] = (worth, number)
    return steps


def _longest_paths(
    n: int, steps: dict[tuple[int, int], int]
) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    """Of each pair: the gain of the best path, and its next column (Floyd and Warshall)."""
    worth, after = dict(steps), {(a, b): b for a, b in steps}
    for k, a, b in product(range(n), repeat=3):
        if a != b and (a, k) in worth and (k, b) in worth:
            gain = worth[a, k] + worth[k, b]
            if (a, b) not in worth or gain > worth[a, b]:
                worth[a, b], after[a, b] = gain, after[a, k]
    return worth, after
