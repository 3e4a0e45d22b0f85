"""Plays a demo as `make` does, away from whatever launcher runs the tests."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.ckptd.host.hosting import FOREIGN, ROOT

__all__ = ["play"]


def play(module: str, *options: str) -> str:
    """What the demo prints; it must succeed."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
    done = subprocess.run(
        [sys.executable, "-m", module, *options],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
