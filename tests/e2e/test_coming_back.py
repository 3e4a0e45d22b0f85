"""Coming back by choice: to an older iteration, or not at all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.saved import saved_iterations
from tests.e2e.habits import SCRIPT, environment, start
from tests.e2e.harness import DaemonProcess, own_daemon

# Steps of a millisecond may outrun a busy daemon, and snapshots are left out then: each step waits
# for the snapshot before.
WAIT = """
import time
from ckptd.saved import saved_iterations

def wait_for(iteration):
    deadline = time.monotonic() + 120
    while not (found := saved_iterations("back", "r")) or found[0].iteration < iteration:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
"""
# The end of the program tells its weights.
TOLD = WAIT + SCRIPT.replace(
    "ckpt.close()",
    "print('weights', [p.double().sum().item() for p in model.parameters()], ckpt.stats()['unprotected'])\nckpt.close()",
).replace("window=2)", 'window=2), run=RunOptions(name="r", job="back")').replace(
    "    loss.backward()",
    "    loss.backward()\n    if step > 3 and not ckpt.stats()['unprotected']: wait_for(step - 1)",
)


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with own_daemon() as process:
        yield process


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TOLD)
    return path


def resuming_at(iteration: int) -> str:
    back = f"recovery=RecoveryOptions(resume_at={iteration})"
    return TOLD.replace("window=2)", f"window=2), {back}")


def weights(printed: str) -> str:
    (line,) = [line for line in printed.splitlines() if line.startswith("weights ")]
    return line


def test_a_run_goes_back_to_an_iteration_that_is_chosen(daemon: DaemonProcess, script: Path) -> None:
    """After a loss spike: there was no way but to write an export, and begin another run with it."""
    first = start(script, daemon)
    assert first.code == 0, first.printed
    found = saved_iterations("back", "r", daemon=daemon.endpoint)
    assert found[0].iteration == 12
    older = found[1].iteration
    assert older < 12
    listed = subprocess.run(
        [sys.executable, "-m", "ckptd.ctl", "iterations"],
        env=environment(daemon),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    assert [line.split()[0] for line in listed.splitlines()[1:] if line[:1].isdigit()] == [
        str(each.iteration) for each in found
    ]
    # What is not there changes nothing.
    script.write_text(resuming_at(3))
    refused = start(script, daemon)
    assert refused.code == 1
    assert (
        f"resume_at=3: iteration 3 is not available on all ranks; what can be gone back to is 12, {older}"
        in refused.printed
    )
    script.write_text(resuming_at(older))
    again = start(script, daemon, variables={"KILL_AT": "11"} if older < 11 else {})
    assert again.about(f"resuming at iteration {older}"), again.printed
    # What was newer is given up, also for who starts after that.
    script.write_text(TOLD)
    last = start(script, daemon)
    assert last.code == 0, last.printed
    assert weights(last.printed) == weights(first.printed)


def test_a_restart_by_torchrun_does_not_go_back_again(daemon: DaemonProcess, script: Path) -> None:
    """The same command would have gone back after each failure, and never come any further."""
    first = start(script, daemon)
    assert first.code == 0, first.printed
    found = saved_iterations("back", "r", daemon=daemon.endpoint)
    assert len(found) > 1, (found, first.printed)
    older = found[1].iteration
    script.write_text(resuming_at(older))
    again = start(script, daemon, variables={"TORCHELASTIC_RESTART_COUNT": "1"})
    assert again.about("this one goes on from the newest state"), again.printed
    assert again.about("resuming at iteration 12")


def test_the_same_command_started_again_does_not_go_back_again(daemon: DaemonProcess, script: Path) -> None:
    """torchrun does not count a restart because of another node, and a shell, Slurm or Kubernetes count none."""
    first = start(script, daemon)
    assert first.code == 0, first.printed
    older = saved_iterations("back", "r", daemon=daemon.endpoint)[1].iteration
    script.write_text(resuming_at(older).replace("steps(12)", "steps(16)"))
    cut_off = start(script, daemon, variables={"KILL_AT": "14"})
    assert cut_off.about(f"resuming at iteration {older}"), cut_off.printed
    again = start(script, daemon)
    assert again.code == 0, again.printed
    assert again.about(f"resume_at={older} was for an earlier start"), again.printed
    (line,) = again.about("resuming at iteration")
    assert int(line.partition("resuming at iteration ")[2].partition(",")[0]) >= 13, line


def test_training_goes_on_unprotected_where_the_user_says_so(daemon: DaemonProcess, script: Path) -> None:
    """A refused attach ended the training; now that is the user's choice, said loudly and in a counter."""
    assert start(script, daemon).code == 0
    other = TOLD.replace('job="back"', 'job="back", topology="other"')
    script.write_text(other)
    refused = start(script, daemon)
    assert refused.code == 1
    assert "attach refused (topology)" in refused.printed
    script.write_text(other.replace("window=2)", "window=2), daemon=DaemonOptions(required=False)"))
    found = start(script, daemon)
    assert found.code == 0, found.printed
    assert found.steps == list(range(12))
    (line,) = found.about("TRAINING IS UNPROTECTED")
    assert "attach refused (topology)" in line
    assert weights(found.printed).endswith(" 1.0")
