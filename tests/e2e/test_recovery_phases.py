"""A job that was killed tells how long each phase of its recovery took: in its counters, in an event, in ``ckptctl``."""

from __future__ import annotations

import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from ckptd.core.recovery.recovery_phases import RecoveryPhase, phases_in_metrics
from ckptd.transport.messages import GetStatus, Status
from tests.ckptd.running import eventually
from tests.e2e.habits import SCRIPT, environment, start
from tests.e2e.harness import DaemonProcess, Jobs
from tests.e2e.ranks import Ranks, story

Phase = RecoveryPhase
# Forked with everything imported.
FORKED_PHASES = [phase for phase in Phase if phase not in (Phase.DETECTED, Phase.IMPORTS)]
OF_RANKS = re.compile(r"the first new iteration is (\d+): ([\d.]+) s from detected to first_new_step: (.+)")


@pytest.mark.slow
def test_both_ranks_tell_where_the_time_went(jobs: Jobs, daemon: DaemonProcess) -> None:
    run = uuid.uuid4().hex[:8]
    before = Ranks(jobs, run, killed=0)
    before.end_by_the_death_of(0)
    # Both are found dead before others come.
    eventually(lambda: len(daemon.events("trainer_gone", run)) == 2, "the daemon knows of both deaths")
    after = Ranks(jobs, run, "--seed", "7")
    reports = [jobs.report(out) for out in after.end()]
    said = daemon.events("recovery_phases", run)
    assert len(said) == 2, story(daemon, run, before, after)
    for report in reports:
        phases = phases_in_metrics(report)
        assert list(phases) == FORKED_PHASES, story(daemon, run, before, after)
        assert all(seconds >= 0.0 for seconds in phases.values())
        # The whole is its parts, and what the event says is what the counters say.
        whole = sum(phases.values())
        (text,) = [each for each in said if f"first_new_step {phases[Phase.FIRST_NEW_STEP]:.3f} s" in each]
        found = OF_RANKS.fullmatch(text)
        assert found is not None, text
        assert float(found[2]) == pytest.approx(whole, abs=1e-3)
        assert found[3] == ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in phases.items())
        assert int(found[1]) >= report["resumed_from"]
        # No snapshot is newer than the iterations that were done: the new one is the first that is not.
        assert int(found[1]) <= report["resumed_from"] + 2, story(daemon, run, before, after)
    assert daemon.events("start_phases", run), "the first start had phases, too"


@pytest.mark.slow
def test_a_script_that_was_killed_tells_of_its_imports_and_ckptctl_shows_it(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    run = uuid.uuid4().hex[:8]
    # It stays attached at its end, for `ckptctl status`.
    named = SCRIPT.replace("window=2)", f"window=2), run=RunOptions(name='{run}', job='phases')")
    shown = """
import subprocess
print(subprocess.run([sys.executable, "-m", "ckptd.ctl", "status"], capture_output=True, text=True).stdout)
"""
    assert shown.count("status") == 1
    script.write_text(named.replace("ckpt.close()", f"{shown}ckpt.close()"))
    assert start(script, daemon, variables={"KILL_AT": "9"}).code != 0
    eventually(lambda: daemon.events("trainer_gone", run) != [], "the daemon knows of the death")
    again = start(script, daemon)
    assert again.code == 0, again.printed
    (text,) = daemon.events("recovery_phases", run)
    # Alone on its node it has no others.
    wanted = [phase for phase in Phase if phase not in (Phase.DETECTED, Phase.OTHERS_STOPPED)]
    assert re.findall(r"(\w+) [\d.]+ s(?:,|$)", text) == wanted, text
    assert " s from detected to first_new_step: process_there " in text
    (line,) = [
        each for each in again.printed.splitlines() if each.startswith(f"start     phases/{run} rank 0")
    ]
    assert text.partition("first_new_step: ")[2] in line
    listed = subprocess.run(
        [sys.executable, "-m", "ckptd.ctl", "events"],
        env=environment(daemon),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    assert any("recovery_phases" in each and text in each for each in listed.splitlines()), listed
    status = daemon.ask(GetStatus(), Status)
    assert all(session.run != run for session in status.sessions), "it has left"
