"""The daemon that an operator runs is nobody else's to replace; one that a trainer started makes
way for it, memory and all.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.errors import DaemonUnavailable
from ckptd.launch import answers, ensure_daemon
from ckptd.transport.messages import GetStatus, Hello, Status, Welcome
from ckptd.transport.wire import ControlClient, RequestTimeout
from tests.ckptd.running import eventually
from tests.e2e.habits import SCRIPT, environment, start
from tests.e2e.harness import DaemonProcess, own_daemon
from tests.forked_hosts import ForkedProgram

# Goes on until it is told to end, at a pace that leaves time for what happens beside it.
SLOW = SCRIPT.replace("ckpt.steps(12)", "ckpt.steps(100000)").replace(
    "    generator =", "    __import__('time').sleep(0.02)\n    generator ="
)


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    """One that an operator runs, and may be ended."""
    with own_daemon() as process:
        yield process


class Trainer:
    """A script that runs beside the test."""

    def __init__(self, script: Path, daemon: DaemonProcess, **variables: str) -> None:
        script.write_text(SLOW)
        self.log = script.with_suffix(".log")
        env = environment(daemon, **variables)
        self.process = ForkedProgram([str(script)], cwd=script.parent, env=env, log=self.log)

    def says(self, text: str, *, times: int = 1) -> None:
        """Wait until it has."""

        def said() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return self.log.read_text().count(text) >= times

        eventually(said, text, timeout_s=120)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine" / "train.py"


def status(daemon: DaemonProcess) -> Status:
    return daemon.ask(GetStatus(), Status)


def _serves(daemon: DaemonProcess, pid: int) -> bool:
    """Whether this process answers; one that makes way just now may leave a question without an answer."""
    try:
        return status(daemon).pid == pid
    except RequestTimeout:
        return False


def welcome(daemon: DaemonProcess) -> Welcome:
    with ControlClient(daemon.endpoint, timeout_s=20) as client:
        return client.ask(Hello("test", os.getpid()), Welcome)


def test_an_upgrade_in_mid_training_has_no_rival(daemon: DaemonProcess, script: Path) -> None:
    """The trainer started a daemon of its own, without store and peers and with another quota,
    before the operator's came back: that one ended with 3, and nothing was durable any more.
    """
    assert daemon.process is not None
    trainer = Trainer(script, daemon)
    try:
        trainer.says("step 10 ")
        daemon.process.send_signal(signal.SIGTERM)
        daemon.process.wait(60)
        trainer.says("ckptd: the daemon is away")
        # Also a trainer that has never seen it finds its folder.
        with pytest.raises(DaemonUnavailable, match="started by an operator and is away"):
            ensure_daemon(str(daemon.runtime_dir), timeout_s=0.5)
        trainer.says("step 60 ")
        assert not answers(daemon.endpoint), "nobody started one"
        daemon.start()
        trainer.says("ckptd: the daemon is back")
        assert status(daemon).pid == daemon.process.pid
        eventually(lambda: len(status(daemon).sessions) == 1, "it is attached")
    finally:
        trainer.kill()


def test_a_daemon_of_a_trainer_makes_way_memory_and_all(daemon: DaemonProcess, script: Path) -> None:
    """It held the folders until it was idle for an hour: `ckptd run` ended with 3."""
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGINT)  # an operator's, ended for good
    daemon.process.wait(60)
    trainer = Trainer(script, daemon)
    try:
        trainer.says("step 10 ")
        assert welcome(daemon).started_by_trainer
        before = status(daemon).segments
        daemon.start()
        new = daemon.process
        eventually(lambda: _serves(daemon, new.pid), "the operator's serves")
        assert not welcome(daemon).started_by_trainer
        assert {s.path for s in before} <= {s.path for s in status(daemon).segments}
        trainer.says("ckptd: the daemon is back")
        eventually(lambda: len(status(daemon).sessions) == 1, "it is attached")
        # Now it is the operator's, also for this trainer.
        daemon.kill()
        trainer.says("ckptd: the daemon is away", times=2)
        trainer.kill()
        assert not answers(daemon.endpoint)
        daemon.start()
    finally:
        trainer.kill()
    script.write_text(SLOW.replace("steps(100000)", "steps(ckpt.resumed_from + 1)"))
    again = start(script, daemon)
    assert again.code == 0, again.printed
    assert again.about("resuming at iteration")


def test_a_second_daemon_of_an_operator_is_still_refused(daemon: DaemonProcess) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ckptd", "run"],
        env=environment(daemon),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 3
    assert "already uses the runtime folder" in done.stderr


def test_a_daemon_without_the_store_that_the_trainer_was_told_is_an_error(
    daemon: DaemonProcess, script: Path, tmp_path: Path
) -> None:
    """Nothing was durable, silently: CKPTD_STORE was set where the daemon was not started."""
    script.write_text(SCRIPT)
    told = {"CKPTD_STORE": f"file://{tmp_path}/store", "CKPTD_MEMORY": "64MiB"}
    found = start(script, daemon, variables=told)
    assert found.code == 1
    assert "attach refused (daemon_differs)" in found.printed
    assert f"CKPTD_STORE is 'file://{tmp_path}/store' for this trainer and 'empty'" in found.printed
    assert "CKPTD_MEMORY is '64MiB' for this trainer" in found.printed
    # Told otherwise: with its endpoint the daemon is taken as it is.
    script.write_text(SCRIPT.replace("window=2)", f"window=2), daemon={daemon.endpoint!r}"))
    assert start(script, daemon, variables=told).code == 0


def test_advice_on_a_job_that_runs(daemon: DaemonProcess, script: Path) -> None:
    trainer = Trainer(script, daemon)
    try:
        eventually(lambda: any(s.step > 20 for s in status(daemon).sessions), "training", timeout_s=120)
        (session,) = status(daemon).sessions
        ckptctl = [sys.executable, "-m", "ckptd.ctl", "advise", "--endpoint", daemon.endpoint]
        job = [session.job, session.run, "--mtbf", "1h"]
        asked = [*ckptctl, *job, "--watch", "3s", "--json"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert [each["name"] for each in answer["policies"]][:2] == ["now", "best"]
        assert 0.02 < answer["iteration_s"] < 3.0
        assert answer["rank_state_bytes"] > 0
        asked = [*ckptctl, "nobody", "none", "--mtbf", "1h"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 4
        assert "no trainer of nobody/none is attached to this node's daemon" in done.stderr
        os.kill(trainer.process.pid, signal.SIGSTOP)
        asked = [*ckptctl, *job, "--watch", "1s"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 2
        assert "are too few to tell how long one lasts: pass a longer --watch" in done.stderr
    finally:
        trainer.kill()
