"""Experts that a partial snapshot holds besides those whose turn it is: those with the most tokens at risk.

The counts of a snapshot's top decide on the next snapshot. That is computed beside training, when the snapshot
is filled; a snapshot that comes too early, or in another order, takes those whose turn is next.

Ranks select by what each has counted, without a message. So only experts that no other rank holds are
selected: replicas of an expert must be recovered from one iteration.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState
from ckptd.client.schedule.snapshot_plan import SnapshotPlan
from ckptd.core.partial_experts import RiskedExpert, Selection, select_by_risk

__all__ = ["ExpertSelection"]

logger = get_logger(__name__)


class ExpertSelection:
    """The selection of one rank, under one plan."""

    def __init__(self, binding: LiveState, plan: SnapshotPlan) -> None:
        self._binding, self.plan = binding, plan
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[int, frozenset[int], Mapping[str, Any]]] = {}
        # Counts of each expert in the newest snapshot that has it.
        self._captured: dict[tuple[str, int], float] = {}
        self._next: tuple[int, frozenset[int]] = -1, frozenset()

    def extras(self, ordinal: int) -> frozenset[int]:
        """What the ``ordinal``-th snapshot anchors besides its turns."""
        plan = self.plan
        if plan.selection is Selection.TURNS or plan.schedule.window == 1:
            return frozenset()
        with self._lock:
            known, found = self._next
        return found if known == ordinal % plan.span else plan.next_turns(ordinal)

    def begun(self, step: int, ordinal: int, anchored: frozenset[int], given: Mapping[str, Any]) -> None:
        """A snapshot begins (training thread).

        Args:
            given: the tokens of each expert at its top; tensors are not written to any more.
        """
        if self.plan.selection is not Selection.TURNS:
            with self._lock:
                self._pending = {step: (ordinal, anchored, given)}

    def filled(self, step: int) -> None:
        """It is complete: choose for the next one (beside training)."""
        with self._lock:
            pending = self._pending.pop(step, None)
        if pending is None:
            return
        ordinal, anchored, given = pending
        counts = {name: _listed(each) for name, each in given.items()}
        plan = self.plan
        following = ordinal + plan.every
        turns = {*plan.turns(following)}
        risked: list[RiskedExpert] = []
        for i, op in enumerate(plan.operators):
            if op.expert is None or op.expert[0] not in counts:
                continue
            now = counts[op.expert[0]][op.expert[1]]
            if i in anchored:
                self._captured[op.expert] = now
            elif i in plan.selectable and i not in turns:
                tokens = now - self._captured.get(op.expert, 0.0)
                risked.append(RiskedExpert(i, op.expert[0], tokens))
        rooms = plan.rooms(following)
        found = select_by_risk(risked, rooms, plan.selection)
        # Experts without tokens have nothing to lose: the rest of the room is for the next turns.
        rest = [i for i in plan.next_turns(following) if i not in found]
        chosen = frozenset((*found, *rest[: sum(rooms.values()) - len(found)]))
        plan.phase_plan(self._binding, following, chosen)  # so that the training thread finds it
        with self._lock:
            self._next = following % plan.span, chosen


def _listed(counts: Any) -> Sequence[float]:
    return counts.tolist() if isinstance(counts, Tensor) else counts
