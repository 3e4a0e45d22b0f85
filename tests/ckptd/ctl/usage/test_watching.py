"""`--watch` on a real daemon: documents on a pipe, one screen on a terminal, Ctrl-C, and a restart between."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ckptd.ctl.main import main
from tests.ckptd.running import DaemonProcess, running_daemon

WATCHING = [sys.executable, "-m", "ckptd.ctl", "--json", "status", "--watch", "0.1"]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with running_daemon() as started:
        yield started


def test_each_answer_is_a_line_and_a_restart_is_waited_for(daemon: DaemonProcess) -> None:
    with subprocess.Popen(WATCHING, env=daemon.env, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        assert daemon.terminate() == 0
        away = next(found for line in watching.stdout if "error" in (found := json.loads(line)))
        assert away["exit_status"] == 3
        daemon.start()
        again = next(found for line in watching.stdout if "pid" in (found := json.loads(line)))
        assert again["pid"] != first["pid"]
        watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 0


def test_on_a_terminal_an_answer_replaces_the_one_before_and_is_cut_to_the_screen(
    daemon: DaemonProcess,
) -> None:
    ours, theirs = pty.openpty()
    env = daemon.env | {"LINES": "4", "COLUMNS": "120"}
    command = [sys.executable, "-m", "ckptd.ctl", "status", "--watch", "0.1"]
    with subprocess.Popen(command, env=env, stdin=theirs, stdout=theirs) as watching:
        os.close(theirs)
        shown = ""
        while shown.count("\x1b[H\x1b[J") < 3:
            shown += os.read(ours, 65_536).decode()
        watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 0
    os.close(ours)
    screen = shown.split("\x1b[H\x1b[J")[1].splitlines()
    assert screen[0].startswith("ckptd ")
    assert (len(screen), screen[-1].endswith("more lines)")) == (3, True)


def test_without_a_daemon_at_first_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--watch", "--endpoint", "ipc:///nowhere/ckptd.sock"]) == 3
    assert "there is no socket" in capsys.readouterr().err


def test_a_period_that_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("0", "-1", "nan", "often"):
        with pytest.raises(SystemExit) as ended:
            main(["status", f"--watch={text}"])
        assert ended.value.code == 2
    assert "--watch" in capsys.readouterr().err
