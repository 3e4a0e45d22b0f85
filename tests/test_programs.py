"""Forked programs are what fresh ones would be: real processes."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests import programs
from tests.ckptd.running import ROOT, running_daemon


def test_a_command_says_what_a_fresh_one_says() -> None:
    env = {name: text for name, text in os.environ.items() if not name.startswith("CKPTD_")}
    env["CKPTD_LISTEN"] = "ipc:///nowhere.sock"
    for words in (("status", "--json"), ("--version",), ("status", "--wrong")):
        command = [sys.executable, "-m", "ckptd.ctl", *words]
        fresh = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        forked = programs.run("ckptd.ctl", *words, env=env, timeout=60)
        assert (forked.returncode, forked.stdout, forked.stderr) == (
            fresh.returncode,
            fresh.stdout,
            fresh.stderr,
        )


def test_a_daemon_has_its_own_environment_files_and_mask() -> None:
    os.umask(before := os.umask(0o27))  # what it was
    with running_daemon() as daemon:
        program = daemon.process
        assert program is not None
        assert program.poll() is None
        status = Path(f"/proc/{program.pid}/status").read_text()
        assert int(status.split("Umask:")[1].split()[0], 8) == before
        limits = resource.prlimit(program.pid, resource.RLIMIT_NOFILE)
        assert limits == resource.getrlimit(resource.RLIMIT_NOFILE)
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(0.01)
        program.kill()
        assert program.wait(60) == -signal.SIGKILL
        program.terminate()  # of one that has ended: nothing
        assert program.poll() == -signal.SIGKILL


def test_fewer_files_and_an_end_by_a_signal_that_is_caught() -> None:
    with running_daemon() as daemon:
        daemon.kill()
        program = daemon.spawn(files=200)
        daemon.ctl("wait", "--timeout", "60")
        assert resource.prlimit(program.pid, resource.RLIMIT_NOFILE) == (200, 200)
        assert daemon.terminate() == 0


def test_nothing_of_the_zygote_is_open_in_what_it_forks() -> None:
    env = {name: text for name, text in os.environ.items() if not name.startswith("CKPTD_")}
    with running_daemon() as daemon, tempfile.TemporaryFile() as out:
        program = programs.start(
            "ckptd.ctl", "events", "--follow", env=env | daemon.settings, stdout=out, stderr=out
        )
        deadline = time.monotonic() + 60
        while not out.seek(0, os.SEEK_END):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        links = [os.readlink(each) for each in Path(f"/proc/{program.pid}/fd").iterdir()]
        assert not [each for each in links if each.startswith("pipe:")], links
        program.send_signal(signal.SIGINT)
        assert program.wait(60) == 130
