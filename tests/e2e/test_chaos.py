"""Jobs and daemons killed at random moments end with the bits of a job that was never hurt.

``CKPTD_KILLS`` makes this a campaign of that many kills over many more cases; ``CKPTD_SEED``
repeats a failed one.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.campaign import Moment, Plan, Target, campaign, run_cell, table
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon
from tests.long import long

KILLS = int(os.environ.get("CKPTD_KILLS", "0"))
SEED = int(os.environ.get("CKPTD_SEED") or random.SystemRandom().randrange(1 << 20))


@pytest.fixture
def chaos(tmp_path: Path) -> Iterator[tuple[Jobs, DaemonProcess]]:
    with own_daemon() as daemon:
        yield Jobs(tmp_path, daemon.endpoint), daemon


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "targets"),
    [
        pytest.param("plain", [Target.TRAINER], marks=long),
        ("fused", [Target.TRAINER, Target.DAEMON]),
        pytest.param("masters", [Target.BOTH], marks=long),
        ("scaler", [Target.DAEMON, Target.BOTH, Target.TRAINER]),
    ],
)
def test_random_kills_leave_no_trace(
    chaos: tuple[Jobs, DaemonProcess], case: str, targets: list[Target]
) -> None:
    """Three kills anywhere, restore, replay and first steps included, then everything is compared to the bit."""
    jobs, daemon = chaos
    sys.stdout.write(f"CKPTD_SEED={SEED} repeats this\n")
    cell = run_cell(case, SEED, 3, jobs, daemon, Plan(targets=targets))
    assert not cell.failures, "\n".join([f"CKPTD_SEED={SEED}", *cell.failures])
    assert len(cell.kills) == 3


@pytest.mark.slow
@pytest.mark.skipif(not KILLS, reason="a campaign runs where CKPTD_KILLS says how many kills")
@pytest.mark.timeout(14_400)
def test_campaign(chaos: tuple[Jobs, DaemonProcess]) -> None:
    """A few hundred kills over many cases; the table tells at which moments they came and what they cost."""
    sys.stdout.write(f"\nCKPTD_SEED={SEED} repeats this\n")
    cells = campaign(KILLS, SEED, *chaos, sys.stdout.write)
    sys.stdout.write(table(cells) + "\n")
    assert not [text for cell in cells for text in cell.failures], f"CKPTD_SEED={SEED}"
    if KILLS >= 100:
        reached = {kill.moment for cell in cells for kill in cell.kills}
        assert reached == set(Moment), f"never killed while {set(Moment) - reached}"
