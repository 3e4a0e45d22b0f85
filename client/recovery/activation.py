"""Which operators are active in a replay, and which rows of which parameters are frozen therefore."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ckptd.client.model.live_state import LiveState
from ckptd.client.model.operators import Operator
from ckptd.client.model.snapshot_layout import Rows, merge

__all__ = ["Activity"]


class Activity:
    """Of one rank; operators are bits, by their number.

    Attributes:
        active: the operators whose anchors were reached.
        frozen_rows: by parameter.
        whole: everything was active from the start, on all ranks: nothing is frozen, not even what
            another rank updates.
    """

    def __init__(self, binding: LiveState, operators: Sequence[Operator]) -> None:
        self._binding, self._operators = binding, operators
        self.active = 0
        self.frozen_rows: Rows = {}
        self.whole = False

    @property
    def everything(self) -> int:
        """All operators."""
        return (1 << len(self._operators)) - 1

    def activate(self, anchors: int) -> int:
        """These are active from now on; those of them that were not before."""
        fresh = anchors & ~self.active
        self.active |= anchors
        self._note_frozen()
        return fresh

    def begin(self, *, dense: bool) -> None:
        """The snapshot with which the replay begins is loaded; ``dense``: it anchors everything, on
        all ranks.
        """
        self.whole = dense
        self._note_frozen()

    def rows_of(self, operators: int) -> Rows:
        """The rows that these operators consist of."""
        rows: Rows = {}
        for i, op in enumerate(self._operators):
            if operators >> i & 1:
                for m in op.members:
                    rows.setdefault(m.param, []).append(m.range(self._binding.num_rows(m.param)))
        return {name: merge(ranges) for name, ranges in rows.items()}

    def never_frozen(self) -> Rows:
        """What every snapshot anchors, whatever operators it names (see ``LiveState.inseparable``)."""
        return {n: self._all_of(n) for n in self._binding.inseparable}

    def is_frozen(self, name: str) -> bool:
        """Whether all of this parameter is frozen (partly frozen fused tensors are stepped and
        overwritten).
        """
        return self.frozen_rows.get(name, []) == self._all_of(name)

    def split_params(self) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters that gradients are wanted of, and those that are all frozen."""
        active: list[Tensor] = []
        frozen: list[Tensor] = []
        for name, param in self._binding.params.items():
            if param.requires_grad and param.is_leaf:
                (frozen if self.is_frozen(name) else active).append(param)
        return active, frozen

    def _note_frozen(self) -> None:
        self.frozen_rows = self.rows_of(self.everything & ~self.active)
        for name in () if self.whole else self._binding.elsewhere:
            self.frozen_rows[name] = self._all_of(name)
        for name in self.never_frozen():
            self.frozen_rows.pop(name, None)

    def _all_of(self, name: str) -> list[tuple[int, int]]:
        return [(0, self._binding.num_rows(name))]
