"""The experts of each partial snapshot, where they are selected by tokens at risk.

The counts of one snapshot's top decide on the next snapshot. That is computed beside training, when the
snapshot is filled. The first snapshots of a chain take the experts whose turn it is, until each was in one.

Ranks select by what each has counted, without a message. Replicas of an expert must be recovered from one
iteration, so of the ranks that hold one its owner selects it, by its own tokens, and captures it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptd.client.schedule.expert_losses import listed
from ckptd.client.schedule.snapshot_plan import SnapshotPlan
from ckptd.core.partial_experts import Selection, select_by_risk

_PENDING = 4  # snapshots that may be on their way

Places = npt.NDArray[np.int64]


class ExpertSelection:
    """The selection of one rank, under one plan.

    Args:
        captured: the tokens of experts in the newest snapshot that has them, by container and index; an
            expert that is missing was in none.
    """

    def __init__(self, plan: SnapshotPlan, captured: Mapping[tuple[str, int], float]) -> None:
        self.plan = plan
        self._lock = threading.Lock()
        self._number = 0  # of the newest snapshot in the chain
        self._pending: dict[int, tuple[int, int, list[int], Mapping[str, Any]]] = {}
        self._next: tuple[int, frozenset[int]] = 0, frozenset()
        # By place among the experts that may be selected: tokens as counted last, those in the newest
        # snapshot that has the expert, and the number of that snapshot (0: none has).
        self._experts = sorted(plan.selected_here)
        self._place_of = {operator: place for place, operator in enumerate(self._experts)}
        named = [plan.operators[i].expert or ("", 0) for i in self._experts]  # all are experts
        self._tokens = np.zeros(len(named))
        self._captured = np.array([captured.get(expert, 0.0) for expert in named])
        self._last = np.zeros(len(named), np.int64)
        # By container, the places of its experts and their numbers there.
        cells: dict[str, list[tuple[int, int]]] = {}
        for place, (name, index) in enumerate(named):
            cells.setdefault(name, []).append((place, index))
        self._cells: dict[str, Places] = {name: np.array(pairs).T for name, pairs in cells.items()}
        self._pools = self._pools_of(plan)

    def experts(self, ordinal: int) -> frozenset[int] | None:
        """What the ``ordinal``-th snapshot anchors; None: the experts whose turn it is."""
        with self._lock:
            if not self._experts or not self._last.all():
                return None
            number, found = self._next
            return found if number == self._number + 1 else self._select(ordinal)

    def begun(
        self, step: int, ordinal: int, anchored: frozenset[int], given: Mapping[str, Any], *, follows: bool
    ) -> None:
        """A snapshot begins (training thread).

        Args:
            given: the tokens of each expert at its top; tensors are not written to any more.
            follows: the newest one; otherwise a chain begins.
        """
        if not self._experts:
            return
        with self._lock:
            if not follows:
                self._last[:] = 0
            self._number += 1
            places = [self._place_of[i] for i in anchored & self._place_of.keys()]
            self._last[places] = self._number
            self._pending[step] = self._number, ordinal, places, given
            while len(self._pending) > _PENDING:  # what is that old was never complete
                self._pending.pop(min(self._pending))

    def filled(self, step: int) -> tuple[int, frozenset[int]] | None:
        """It is complete: choose for the next one; returns its number and its experts (beside training)."""
        with self._lock:
            pending = self._pending.pop(step, None)
        if pending is None:
            return None
        number, ordinal, captured, given = pending
        counts = {name: np.array(listed(given[name])) for name in self._cells.keys() & given.keys()}
        with self._lock:
            for name, counted in counts.items():
                places, indices = self._cells[name]
                self._tokens[places] = counted[indices]
            self._captured[captured] = self._tokens[captured]
            if number != self._number or not self._last.all():
                return None
            following = ordinal + self.plan.every
            found = self._select(following)
            self._next = number + 1, found
        return following, found

    def _select(self, ordinal: int) -> frozenset[int]:
        plan = self.plan
        found = {i for i in plan.turns(ordinal) if i not in plan.selectable}
        at_risk, ages = np.maximum(self._tokens - self._captured, 0), self._number + 1 - self._last
        phase = ordinal // plan.every % plan.schedule.window
        for places, rooms in self._pools:
            following = [*rooms[phase:], *rooms[:phase]]
            chosen = select_by_risk(at_risk[places], ages[places], following, plan.policy.window)
            found.update(map(self._experts.__getitem__, places[chosen].tolist()))
        return frozenset(found)

    def _pools_of(self, plan: SnapshotPlan) -> list[tuple[Places, list[int]]]:
        """The experts that compete for room, by place, and the room for them in each phase."""
        phases = plan.schedule.phases
        if plan.selection is Selection.MODEL:
            rooms = [plan.selected_room(plan.ordinal_of(phase)) for phase in range(len(phases))]
            return [(np.arange(len(self._experts)), rooms)]
        turn_of = np.zeros(len(plan.operators), np.int64)
        for phase, operators in enumerate(phases):
            turn_of[list(operators)] = phase
        of = turn_of[self._experts]
        return [
            (places, np.bincount(of[places], minlength=len(phases)).tolist())
            for places, _ in self._cells.values()
        ]
