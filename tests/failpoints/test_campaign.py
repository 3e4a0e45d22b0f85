"""A few strikes of the campaign, in a process of its own: it changes the environment of all that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEED = os.environ.get("CKPTD_SEED", "1")


@pytest.mark.slow
def test_a_job_that_is_hurt_at_failpoints_ends_with_the_same_bits() -> None:
    """Two ranks on two nodes with replicas and a store; ``CKPTD_SEED`` draws other points."""
    command = [sys.executable, "-m", "tests.failpoints.campaign", "--kills", "6", "--seed", SEED, "--short"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4000:]
    assert "6 strikes" in done.stdout
    assert "\n0 failed rounds" in done.stdout
