"""A job that was killed tells how long each phase of its recovery took: in its counters, in an event, in ``ckptctl``."""

from __future__ import annotations

import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from ckptd.core.recovery.recovery_phases import RecoveryPhase, describe_phases, phases_in_metrics
from tests.ckptd.running import eventually
from tests.e2e.habits import SCRIPT, environment, start
from tests.e2e.harness import DaemonProcess, Jobs
from tests.e2e.ranks import KILL_AT, Ranks, story

Phase = RecoveryPhase
# Forked with everything imported.
FORKED_PHASES = [phase for phase in Phase if phase not in (Phase.DETECTED, Phase.IMPORTS)]
OF_RANKS = re.compile(r"the first new iteration is (\d+): ([\d.]+) s from detected to first_new_step: (.+)")

# Each step waits for the snapshot before: a busy daemon would be outrun. `ckptctl status` is asked at the end,
# while the trainer is attached.
SCRIPT_OF = (
    SCRIPT.replace("window=2)", "window=2), run=RunOptions(name='RUN', job='phases')")
    .replace(
        "    loss.backward()",
        """    loss.backward()
    deadline = time.monotonic() + 120
    while step > 3 and not any(each.iteration >= step - 1 for each in saved_iterations("phases", "RUN")):
        assert time.monotonic() < deadline
        time.sleep(0.01)""",
    )
    .replace(
        "ckpt.close()",
        """status = [sys.executable, "-m", "ckptd.ctl", "status"]
print(subprocess.run(status, capture_output=True, text=True).stdout)
ckpt.close()""",
    )
    .replace("import os,", "import subprocess, time\nfrom ckptd.saved import saved_iterations\nimport os,")
)


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
    found = [OF_RANKS.fullmatch(text) for text in said]
    assert None not in found, said
    told = sorted(match[3] for match in found if match is not None)
    assert told == sorted(describe_phases(phases_in_metrics(report)) for report in reports)
    for report in reports:
        phases = phases_in_metrics(report)
        assert list(phases) == FORKED_PHASES, story(daemon, run, before, after)
        assert all(seconds >= 0.0 for seconds in phases.values())
    for match in found:
        assert match is not None
        # The whole is its parts.
        parts = [float(seconds) for seconds in re.findall(r" ([\d.]+) s", match[3])]
        assert float(match[2]) == pytest.approx(sum(parts), abs=1e-3 * len(parts))
        # The other rank may have completed the step in which one was killed.
        assert reports[0]["resumed_from"] <= int(match[1]) <= KILL_AT + 1, story(daemon, run, before, after)
    assert daemon.events("start_phases", run), "the first start had phases, too"


@pytest.mark.slow
def test_a_script_that_was_killed_tells_of_its_imports_and_ckptctl_shows_it(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    run = uuid.uuid4().hex[:8]
    script.write_text(SCRIPT_OF.replace("RUN", run))
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
        [sys.executable, "-m", "ckptd.ctl", "events", "--limit", "10000"],
        env=environment(daemon),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    assert any("recovery_phases" in each and text in each for each in listed.splitlines()), listed
