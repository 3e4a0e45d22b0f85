"""A command that is given again goes on, and says under which names it looked and what it found."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.transport.messages import GetStatus, Status
from tests.e2e.habits import SCRIPT, Started, start
from tests.e2e.harness import DaemonProcess, own_daemon
from tests.long import long

STANDALONE = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
KILLED = {"KILL_AT": "8"}


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    """One without other jobs."""
    with own_daemon() as process:
        yield process


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine" / "train.py"
    path.write_text(SCRIPT)
    return path


def runs(daemon: DaemonProcess) -> set[tuple[str, str]]:
    """Job and run of everything in memory."""
    return {(s.job, s.run) for s in daemon.ask(GetStatus(), Status).segments}


def resumed(found: Started) -> str:
    """The line that tells of it."""
    assert found.code == 0, found.printed
    (line,) = found.about("resuming at iteration")
    assert line == found.lines[0], found.printed
    return line


def lr_by_step(found: Started) -> dict[int, float]:
    """The rate after each step."""
    lines = [line.split() for line in found.printed.splitlines() if line.startswith("step ")]
    return {int(words[1]): float(words[3]) for words in lines}


def test_standalone_torchrun_goes_on_when_the_same_command_is_given_again(
    daemon: DaemonProcess, script: Path
) -> None:
    """It makes up another run id at each start: as a name it made every start a new run, silently,
    beside the old segments.
    """
    killed = start(script, daemon, launcher=STANDALONE, variables=KILLED)
    assert killed.code != 0
    (line,) = killed.about("nothing to resume from was found")
    assert "run default" in line
    assert f"named after train.py in {script.parent}" in line
    assert "torchrun made up a run id" in line
    again = start(script, daemon, launcher=STANDALONE)
    assert "run default" in resumed(again)
    assert again.steps[0] > 0
    assert again.steps[-1] == 11
    assert len(runs(daemon)) == 1


def test_an_id_that_somebody_chose_names_the_run(daemon: DaemonProcess, script: Path) -> None:
    """Also one that looks made up: a job manager gives such ids, and they are on the command line."""
    chosen = "0b0a7a3c-6e1b-4d4e-9d58-0f3f6a1c2b3d"
    launcher = (
        *("-m", "torch.distributed.run", "--nproc-per-node", "1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", chosen),
    )
    done = start(script, daemon, launcher=launcher, fresh=True)
    assert done.code == 0, done.printed
    assert {run for _, run in runs(daemon)} == {chosen}


@long
def test_two_scripts_of_one_name_are_two_jobs(daemon: DaemonProcess, script: Path, tmp_path: Path) -> None:
    """They were one, `train`: the second was refused while the first ran, or went on from its snapshots."""
    other = tmp_path / "other" / "train.py"
    other.parent.mkdir()
    other.write_text(SCRIPT.replace("nn.Linear(8, 8), ", "nn.Linear(8, 9), nn.Linear(9, 8), "))
    killed = start(script, daemon, variables=KILLED)
    assert killed.code == -signal.SIGKILL, killed.printed
    beside = start(other, daemon)
    assert beside.code == 0, beside.printed
    assert beside.steps == list(range(12))
    (note,) = beside.about("A NEW RUN BEGINS BESIDE OTHER SNAPSHOTS")
    (mine,) = [job for job, _ in runs(daemon) if repr(job) in note]
    assert f"RunOptions(name='default', job={mine!r})" in note
    assert mine in resumed(start(script, daemon))


def test_a_new_run_beside_snapshots_of_its_job_says_so(daemon: DaemonProcess, script: Path) -> None:
    """A run that was named by mistake, or not named: what was there stayed unused without a word to
    the trainer.
    """
    assert start(script, daemon, variables=KILLED).code == -signal.SIGKILL
    script.write_text(SCRIPT.replace("window=2)", 'window=2), run="other"'))
    found = start(script, daemon)
    assert found.steps == list(range(12)), found.printed
    (note,) = found.about("A NEW RUN BEGINS BESIDE OTHER SNAPSHOTS")
    assert "of run 'default'" in note
    assert "ckptctl forget" in note


def test_an_edited_script_is_told_which_options_count(daemon: DaemonProcess, script: Path) -> None:
    """The new learning rate was without effect, and nothing said so."""
    assert start(script, daemon, variables=KILLED).code == -signal.SIGKILL
    script.write_text(SCRIPT.replace("lr=0.001", "lr=0.01"))
    found = start(script, daemon, "--lr", "0.01", "--hub-token", "t0psecret")
    assert resumed(found)
    (line,) = found.about("THIS PROGRAM DIFFERS")
    assert "initial_lr: recorded 0.001, here 0.01" in line
    assert f"the script {script} has digest" in line
    assert "arguments of the command: recorded 'none', here '--lr 0.01 --hub-token ***'" in line
    assert "What was recorded counts" in line
    assert f"step 11 lr {0.001 / 13}" in found.printed


@long
def test_the_scripts_options_count_where_it_says_so(daemon: DaemonProcess, script: Path) -> None:
    """From the iteration on at which the state is complete: what is replayed before is replayed as
    it was. A later life goes by them.
    """
    assert start(script, daemon, variables=KILLED).code == -signal.SIGKILL
    edited = SCRIPT.replace("lr=0.001", "lr=0.01").replace(
        "window=2)", 'window=2), recovery=RecoveryOptions(param_groups="script")'
    )
    script.write_text(edited)
    found = start(script, daemon, variables={"KILL_AT": "11"})
    assert found.code == -signal.SIGKILL
    (line,) = found.about("THIS PROGRAM DIFFERS")
    counted = re.search(r"The script's options count from iteration (\d+) on", line)
    assert counted is not None, line
    first = int(counted[1])
    rates = lr_by_step(found)
    assert rates[first - 1] == pytest.approx(0.001 / (first + 1)), "it is replayed"
    assert rates[first] == pytest.approx(0.01 / (first + 2))
    script.write_text(SCRIPT.replace("lr=0.001", "lr=0.01"))
    last = start(script, daemon)
    assert resumed(last)
    assert not last.about("lr: recorded")
    assert lr_by_step(last)[11] == pytest.approx(0.01 / 13)
