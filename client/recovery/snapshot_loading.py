"""Recorded optimizer state and masters, put into the live optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ckptd.client.capture.row_ranges import Rows, merge
from ckptd.client.capture.step_state import apply_packed
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.model.host_bytes import DTYPES
from ckptd.client.model.live_state import LiveState, local
from ckptd.client.model.operators import Operator
from ckptd.client.model.snapshot_layout import EntrySource

__all__ = ["Activity", "load_scalar_state", "round_frozen_masters", "state_tensor"]


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


def state_tensor(binding: LiveState, source: EntrySource, recorded: Tensor) -> Tensor:
    """The live optimizer state tensor for a recorded one, created (zero) where it does not exist yet."""
    held = binding.held(source.name)
    state = binding.keeper(source.name).state[held]
    if not isinstance(state.get(source.key), Tensor):
        # All rows of a whole tensor are about to be loaded: zeros would be written for nothing.
        if source.start is not None:
            state[source.key] = torch.zeros_like(held, dtype=recorded.dtype, requires_grad=False)
        elif recorded.shape == local(held).shape:
            state[source.key] = torch.empty_like(held, dtype=recorded.dtype, requires_grad=False)
        else:
            state[source.key] = torch.empty_like(recorded, device=held.device)
    found: Tensor = state[source.key]
    return found


def load_scalar_state(
    binding: LiveState, image: SnapshotImage, scalars: dict[str, Any], names: Sequence[str]
) -> None:
    """0-dimensional and plain state of newly activated parameters; the key order is the optimizer's own.

    Args:
        scalars: the step scalars of the image.
        names: of the parameters.
    """
    layout = image.state_layout()
    packed = {s.dtype: image.tensor(entry) for s, entry in image.sources() if s.kind == "packed"}
    for name in names:
        held = binding.held(name)
        keeper = binding.keeper(name)
        state = keeper.state[held]
        for key, (dtype, on_host) in layout["scalars"].get(name, {}).items():
            if not isinstance(state.get(key), Tensor):
                device = "cpu" if on_host else held.device
                state[key] = torch.zeros((), dtype=DTYPES[dtype], device=device)
        for key, value in scalars["python"].get(name, {}).items():
            state[key] = value
        ordered = {k: state[k] for k in layout["keys"].get(name, ()) if k in state}
        ordered.update({k: v for k, v in state.items() if k not in ordered})
        keeper.state[held] = ordered
    apply_packed(binding, packed, names, layout["packed"])


def round_frozen_masters(binding: LiveState, frozen: Rows) -> None:
    """A frozen master holds the rounded weight: the user's own copy-back then leaves the weight as
    recorded.
    """
    with torch.no_grad():
        for name, ranges in frozen.items():
            if name not in binding.masters or name in binding.elsewhere:
                continue
            master, param = local(binding.masters[name]), local(binding.params[name])
            for start, stop in ranges:
                if param.ndim:
                    master[start:stop].copy_(param[start:stop])
                else:
                    master.copy_(param)
