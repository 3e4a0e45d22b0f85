"""Loops that change more than weights, each killed twice, and exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import DaemonProcess
from tests.habits.driver import Parents, Row, check, play
from tests.habits.loops import LOOPS

MODULE = "tests.habits.loops"
# DDP is told at its beginning which parameters are trained.
ON_TWO_RANKS = ("buffers that grow", "objects of one's own", "compressed gradients")
ROWS = [Row(MODULE, name, window) for name in LOOPS for window in (1, 3)]
ROWS += [Row(MODULE, name, 1, 2) for name in ON_TWO_RANKS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_loop(row: Row, tmp_path: Path, daemon: DaemonProcess, parents: Parents) -> None:
    check(row, play(row, tmp_path, daemon.endpoint, parents))
