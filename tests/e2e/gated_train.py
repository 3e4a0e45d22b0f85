"""The demo's training with a smaller model, held at a gate: a rank ends no step from the gate's on until the
gate moves.

So a test that waits for snapshots cannot be overtaken by a job that is quicker than they are. The gate
is a file that holds a step's number, named by `GATE`; without one the job is not held.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from unittest import mock

from ckptd.demo import train
from ckptd.demo.model import MoEConfig

__all__ = ["GATE"]

GATE = "CKPTD_TEST_GATE"
CONTEXT = 32
SMALL = partial(MoEConfig, context=CONTEXT, width=40, num_layers=2, num_experts=4, expert_hidden=80)


class GatedLog(train.TrainingLog):
    """Waits after it has written the line of a step."""

    def write(self, event: str, **fields: object) -> None:
        super().write(event, **fields)
        if event == "step" and GATE in os.environ:
            step = fields["step"]
            assert isinstance(step, int)
            while step >= int(Path(os.environ[GATE]).read_text()):
                time.sleep(0.01)


if __name__ == "__main__":
    with mock.patch.multiple(train, TrainingLog=GatedLog, MoEConfig=SMALL, CONTEXT=CONTEXT):
        train.main()
