"""The demo's training, held at a gate: a rank ends no step from the gate's on until the gate moves.

So a test that waits for snapshots cannot be overtaken by a job that is quicker than they are. The gate
is a file that holds a step's number, named by `GATE`; without one the job is not held.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from unittest import mock

from ckptd.demo import train

__all__ = ["GATE"]

GATE = "CKPTD_TEST_GATE"


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
    with mock.patch.object(train, "TrainingLog", GatedLog):
        train.main()
