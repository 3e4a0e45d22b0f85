"""Everything small that a snapshot keeps of the top of a step: random state, options, the user's
state, what the step asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        tape: what the steps ask for is recorded on it.
        program: whose options, script and data the run goes by.
    """

    def __init__(
        self,
        binding: LiveState,
        stateful: Mapping[str, Stateful],
        tape: Tape,
        buckets: Buckets,
        program: Program,
    ) -> None:
        self._binding, self._stateful = binding, stateful
        self._buckets = buckets
        self._stages: list[Any] = []
        self._stage_shapes: Mapping[int, StageShapes] = {}
        self.tape, self.program = tape, program

    def follow_stages(self, stages: Sequence[Any]) -> None:
        """The boundaries of these stages of a pipeline are logged: what they find out is kept, too."""
        self._stages += stages

    def know_stages(self, shapes: Mapping[int, StageShapes]) -> None:
        """What stages had found out in the life before."""
        self._stage_shapes = shapes

    def go_by(self, program: Program) -> None:
        """From now on the run goes by this program."""
        self.program = program

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
            "tape": [list(pair) for pair in self.tape.take()],
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
        indices = {int(stage.stage_index): stage for stage in self._stages}
        return {i: shapes_of(stage) or self._stage_shapes.get(i) for i, stage in indices.items()}
