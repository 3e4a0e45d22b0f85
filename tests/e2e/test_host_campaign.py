"""Jobs under hosts that are killed at random moments end with the bits of a job that was never hurt.

``CKPTD_KILLS`` makes this a campaign of that many kills; ``CKPTD_SEED`` repeats a failed one.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

from ckptd.core.recovery.recovery_phases import RecoveryPhase
from tests.e2e import host_campaign
from tests.e2e.harness import own_daemon
from tests.e2e.host_campaign import CASES, HostRun, Strike, Target, campaign, draw, report, table
from tests.long import long

KILLS = int(os.environ.get("CKPTD_KILLS") or 5)
SEED = int(os.environ.get("CKPTD_SEED") or random.SystemRandom().randrange(1 << 20))

STRIKES = [
    Strike(Target.RANK, 1, 1.5, {RecoveryPhase.ATTACH: 0.25, RecoveryPhase.REPLAYED: 0.5}, 12, 600),
    Strike(Target.RANK, 1, 2.5, {RecoveryPhase.ATTACH: 0.75}, 0, 0),
    Strike(Target.ZYGOTE, 1, None),
    Strike(Target.HUNG_HOST, 1, 9.0, {RecoveryPhase.PROCESS_THERE: 7.0}, 12, 500, hung_s=3.0),
]


@pytest.mark.slow
@pytest.mark.timeout(14_400)
@long
@pytest.mark.parametrize("in_process", [False, True])
def test_random_kills_under_hosts_leave_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: bool
) -> None:
    """A few kills of one case; with ``CKPTD_KILLS`` many, of all cases."""
    sys.stdout.write(f"\nCKPTD_SEED={SEED} repeats this\n")
    if "CKPTD_KILLS" not in os.environ:
        monkeypatch.setattr(host_campaign, "TOTAL", 250)
    cases = CASES if "CKPTD_KILLS" in os.environ else (random.Random(SEED).choice(CASES),)
    with own_daemon() as daemon:
        runs = campaign(KILLS, SEED, tmp_path, daemon, sys.stdout.write, cases=cases, in_process=in_process)
    sys.stdout.write(table(runs) + "\n")
    assert not [text for run in runs for text in run.failures], f"CKPTD_SEED={SEED}"
    assert sum(run.kills for run in runs) >= KILLS
    strikes = [strike for run in runs for strike in run.strikes]
    assert all(strike.back_s is not None for strike in strikes if strike.target is not Target.ZYGOTE)
    assert all(run.lives == run.seeds for run in runs), "each life begins from another seed"


def test_the_table_tells_times_phases_and_who_ended_a_hang() -> None:
    run = HostRun("plain", 7, STRIKES, lives=4, seeds=4)
    lines = [line.split() for line in table([run]).splitlines()]
    assert ["a", "rank", "2", "2.00", "2.50", "2.50", "12", "600"] in lines
    assert ["a", "zygote", "1", "-", "-", "-", "0", "0"] in lines
    assert ["a", "host", "that", "hangs", "*", "1", "9.00", "9.00", "9.00", "12", "500"] in lines
    assert ["attach", "500", "-"] in lines
    assert "0 epochs began because a step was slow" in table([run])


def test_failures_are_named_with_their_seed() -> None:
    run = HostRun("plain", 7, STRIKES, failures=["rank 1 differs: param/x"])
    assert "FAILED plain seed 7: rank 1 differs: param/x" in table([run])
    assert "* FAILED plain seed 7: rank 1 differs: param/x" in report([run], how="how", picture="p.png")


def test_the_page_shows_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib (extra: demo)")
    run = HostRun("plain", 7, STRIKES)
    draw(tmp_path / "out" / "p.png", [run])
    assert (tmp_path / "out" / "p.png").read_bytes().startswith(b"\x89PNG")
    page = report([run], how="how it was run", picture="p.png")
    assert "](p.png)" in page
    assert "| a rank | 2 | 2.00 | 2.50 | 2.50 | 12 | 600 |" in page


def test_nothing_killed_is_a_table_too(tmp_path: Path) -> None:
    assert "0 kills in 0 runs" in table([])
