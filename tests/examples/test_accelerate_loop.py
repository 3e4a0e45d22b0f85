"""``examples/accelerate_loop`` is killed and started again: it goes on, and ends at the loss of a
program that nobody killed.
"""

from __future__ import annotations

import os
import re
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from ckptd.saved import saved_iterations
from tests.e2e.harness import own_daemon
from tests.forked_hosts import ForkedProgram

pytestmark = pytest.mark.skipif(
    not find_spec("accelerate"), reason="accelerate is not installed: pip install ckptd[test]"
)

REPOSITORY = Path(__file__).resolve().parents[2]
# The example does not seed itself, so each start has another random state. The last loss is told to the bit.
PROGRAM = """
import sys, torch
from examples.accelerate_loop import train
if __name__ == "__main__":  # workers of its loader import this
    torch.manual_seed(int(sys.argv[1]))
    print("ends at", train.main(sys.argv[2:]).hex(), flush=True)
"""


class Start:
    """One start of the example, of 120 steps."""

    def __init__(self, log: Path, seed: int, *options: str) -> None:
        self._log = log
        script = log.parent / "loop.py"  # the job is named after it
        script.write_text(PROGRAM)
        self.process = ForkedProgram(
            [str(script), str(seed), "--steps", "120", *options],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            log=log,
        )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def last_loss(self) -> str:
        assert self.process.wait(timeout=200) == 0, self.said
        found = re.search(r"^ends at (.*)$", self.said, re.MULTILINE)
        assert found is not None, self.said
        return found[1]

    def kill_when_saved(self, iteration: int, endpoint: str) -> None:
        """SIGKILL, as soon as the daemon has this iteration or a later one."""
        deadline = time.monotonic() + 200
        while self.process.poll() is None and time.monotonic() < deadline:
            named = re.search(r"ckptd: job (\S+), run (\S+), rank", self.said)
            found = saved_iterations(named[1], named[2], daemon=endpoint) if named else []
            if any(each.iteration >= iteration for each in found):
                self.process.kill()
                break
            time.sleep(0.01)
        assert self.process.wait(timeout=60) == -signal.SIGKILL, self.said


def test_it_goes_on_at_the_exact_bits(tmp_path: Path) -> None:
    """The example had no test: nothing would have told that it does not run any more, or does not come back."""
    with own_daemon() as daemon:
        protected = ("--run", "first", "--daemon", daemon.endpoint)
        plain = Start(tmp_path / "plain.log", 3, "--daemon", "none")
        killed = Start(tmp_path / "killed.log", 3, *protected)
        try:
            killed.kill_when_saved(20, daemon.endpoint)
            again = Start(tmp_path / "again.log", 9, *protected)
            try:
                assert again.last_loss() == plain.last_loss(), again.said
            finally:
                again.process.kill()
        finally:
            plain.process.kill()
            killed.process.kill()
    # Steps of milliseconds may outrun a busy daemon, which leaves no snapshot before the newest one to compare with.
    resumed = re.search(r"resuming at iteration (\d+), replay begins at", again.said)
    assert resumed is not None, again.said
    assert int(resumed[1]) >= 20, again.said
