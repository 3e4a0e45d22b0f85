"""Everything small that a snapshot keeps of the top of a step: random state, options, the user's
state, what the step asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptd.client.capture.ddp_buckets import Buckets
from ckptd.client.capture.program import Program
from ckptd.client.capture.stage_shapes import StageShapes, shapes_of
from ckptd.client.capture.step_state import Stateful, gather_groups, gather_state, grad_flags
from ckptd.client.model.freezing import Tape
from ckptd.client.model.live_state import LiveState
from ckptd.client.rng_state import capture_rng
from ckptd.client.schedule.snapshot_plan import SnapshotPlan

__all__ = ["StepScalars"]


class StepScalars:
    """Gathers them.

    Attributes:
        stages: of a pipeline whose boundaries are logged; what they find out is kept, too.
        stage_shapes: what they had found out in the life before.
        program: whose options, script and data the run goes by.
    """

    def __init__(
        self, binding: LiveState, stateful: Mapping[str, Stateful], tape: Tape, buckets: Buckets
    ) -> None:
        self._binding, self._stateful = binding, stateful
        self._tape, self._buckets = tape, buckets
        self.stages: list[Any] = []
        self.stage_shapes: Mapping[int, StageShapes] = {}
        self.program: Program = {}

    def gather(self, plan: SnapshotPlan, stride: int) -> dict[str, Any]:
        """Of the top of this step, at which ``KeptState.look`` has looked; the tape is taken.

        Args:
            stride: how many iterations lie between two snapshots.
        Raises:
            Refused: an optimizer keeps what no snapshot can hold.
        """
        return {
            "rng": capture_rng(),
            "groups": gather_groups(self._binding),
            "state": gather_state(self._stateful),
            "python": self._binding.kept.python(),
            "kept": self._binding.kept.gather(),
            "grads": grad_flags(self._binding),
            "tape": [list(pair) for pair in self._tape.take()],
            "buckets": self._buckets.layouts(),
            "senders": self._buckets.senders(),
            "phases": [list(p) for p in plan.schedule.phases],
            "stride": stride,
            "stages": self._found_by_stages(),
            "program": self.program,
        }

    def sample(self, num_operators: int) -> dict[str, Any]:
        """Some of about the size that they will have.

        Raises:
            Refused: an optimizer keeps what no snapshot can hold.
        """
        kept = self._binding.kept
        kept.look({name: self._binding.specs(name) for name in self._binding.owner})
        return {
            "rng": [capture_rng()] * 2,
            "groups": gather_groups(self._binding),
            "state": gather_state(self._stateful),
            "python": kept.python(),
            "kept": kept.gather(),
            "buckets": [list(range(len(self._binding.params)))],
            "phases": list(range(num_operators * 2)),
            "program": self.program,
        }

    def _found_by_stages(self) -> dict[int, StageShapes | None]:
        """Of each stage, as it has found out in this life, or in the one before."""
        indices = {int(stage.stage_index): stage for stage in self.stages}
        return {i: shapes_of(stage) or self.stage_shapes.get(i) for i, stage in indices.items()}
