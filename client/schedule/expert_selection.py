"""The experts of each partial snapshot, where they are selected by tokens at risk.

The counts of one snapshot's top decide on the next snapshot. That is computed beside training, when the
snapshot is filled. The first snapshots of a chain take the experts whose turn it is, until each was in one.

Ranks select by what each has counted, without a message. So only experts that no other rank holds are
selected: replicas of an expert must be recovered from one iteration.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ckptd.client.model.live_state import LiveState
from ckptd.client.schedule.expert_losses import listed
from ckptd.client.schedule.snapshot_plan import SnapshotPlan
from ckptd.core.partial_experts import Selection, select_by_risk

__all__ = ["ExpertSelection"]

_PENDING = 4  # snapshots that may be on their way


class ExpertSelection:
    """The selection of one rank, under one plan.

    Args:
        captured: the tokens of experts in the newest snapshot that has them, by container and index; an
            expert that is missing was in none.
    """

    def __init__(
        self, binding: LiveState, plan: SnapshotPlan, captured: Mapping[tuple[str, int], float]
    ) -> None:
        self._binding, self.plan = binding, plan
        self._captured = dict(captured)
        self._lock = threading.Lock()
        self._counts: Mapping[str, Sequence[float]] = {}
        self._number = 0  # of the newest snapshot in the chain
        self._last: dict[int, int] = {}  # by operator, the number of the snapshot that had it last
        self._pending: dict[int, tuple[int, int, frozenset[int], Mapping[str, Any]]] = {}
        self._next: tuple[int, frozenset[int]] = 0, frozenset()

    def experts(self, ordinal: int) -> frozenset[int] | None:
        """What the ``ordinal``-th snapshot anchors; None: the experts whose turn it is."""
        with self._lock:
            if not self.plan.selectable or self._last.keys() < self.plan.selectable:
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
        if not self.plan.selectable:
            return
        with self._lock:
            if not follows:
                self._last.clear()
            self._number += 1
            self._last.update(dict.fromkeys(anchored & self.plan.selectable, self._number))
            self._pending[step] = self._number, ordinal, anchored, given
            while len(self._pending) > _PENDING:  # what is that old was never complete
                self._pending.pop(min(self._pending))

    def filled(self, step: int) -> None:
        """It is complete: choose for the next one (beside training)."""
        with self._lock:
            pending = self._pending.pop(step, None)
        if pending is None:
            return
        number, ordinal, anchored, given = pending
        counts = {name: listed(each) for name, each in given.items()}
        with self._lock:
            self._counts = counts
            for i in anchored:
                expert = self.plan.operators[i].expert
                if expert is not None and expert[0] in counts:
                    self._captured[expert] = counts[expert[0]][expert[1]]
            if number != self._number or self._last.keys() < self.plan.selectable:
                return
            following = ordinal + self.plan.every
            found = self._select(following)
            self._next = number + 1, found
        self.plan.phase_plan(self._binding, following, found)  # so that the training thread finds it

    def _select(self, ordinal: int) -> frozenset[int]:
        plan = self.plan
        pools: dict[str, list[int]] = {}
        for i in plan.selectable:
            pools.setdefault(self._pool(i), []).append(i)
        rooms = [self._rooms(ordinal + n * plan.every) for n in range(plan.schedule.window)]
        found = {i for i in plan.turns(ordinal) if i not in plan.selectable}
        for pool, experts in pools.items():
            chosen = select_by_risk(
                [self._at_risk(i) for i in experts],
                [self._number + 1 - self._last[i] for i in experts],
                [room.get(pool, 0) for room in rooms],
                plan.policy.window,
            )
            found.update(experts[number] for number in chosen)
        return frozenset(found)

    def _pool(self, operator: int) -> str:
        """The experts that compete with this one for room."""
        expert = self.plan.operators[operator].expert
        assert expert is not None
        return expert[0] if self.plan.selection is Selection.LAYER else ""

    def _rooms(self, ordinal: int) -> dict[str, int]:
        """By pool: of a layer as much room as its turns would take; of all together, all that there is."""
        if self.plan.selection is Selection.MODEL:
            return {self._pool(min(self.plan.selectable)): self.plan.selected_room(ordinal)}
        found: dict[str, int] = {}
        for i in self.plan.turns(ordinal):
            if i in self.plan.selectable:
                pool = self._pool(i)
                found[pool] = found.get(pool, 0) + 1
        return found

    def _at_risk(self, operator: int) -> float:
        expert = self.plan.operators[operator].expert
        assert expert is not None
        name, index = expert
        now = self._counts[name][index] if name in self._counts else 0.0
        return max(0.0, now - self._captured.get(expert, 0.0))
