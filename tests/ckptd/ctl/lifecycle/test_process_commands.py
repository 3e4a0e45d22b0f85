"""`ckptctl stop` and `ckptctl logs` with real daemons."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ckptd.ctl.lifecycle.daemon_process import DaemonLog, SystemdUnit, unit_of
from ckptd.launch import ensure_daemon
from tests.ckptd.running import DaemonProcess, running_daemon


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with running_daemon() as started:
        yield started


# -- stop -----------------------------------------------------------------------------------------


def test_stop_ends_the_daemon_in_order_and_waits_for_that(daemon: DaemonProcess) -> None:
    assert daemon.process is not None
    answer = json.loads(daemon.ctl("stop", "--wait", "--json").stdout)
    assert answer == {"pid": daemon.process.pid, "ended": True}
    assert daemon.process.wait(5) == 0
    assert "SIGTERM" in daemon.log_text()
    assert daemon.ctl("stop", check=False).returncode == 3


def test_stop_of_a_daemon_that_does_not_end_says_so(daemon: DaemonProcess) -> None:
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)  # it answers nobody, and is found nevertheless
    done = daemon.ctl("stop", "--wait", "--timeout", "0.3", check=False)
    assert (done.returncode, "has not ended in 0.3 s" in done.stdout) == (1, True), done.stderr
    daemon.process.send_signal(signal.SIGCONT)
    assert daemon.process.wait(20) == 0


def test_stop_after_a_kill_finds_nobody(daemon: DaemonProcess) -> None:
    daemon.kill()  # its socket stays
    done = daemon.ctl("stop", check=False)
    assert (done.returncode, "no daemon serves" in done.stderr) == (3, True), done.stderr


# -- the unit -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "unit"),
    [
        ("0::/system.slice/ckptd.service", SystemdUnit("ckptd.service", False)),
        (
            "0::/system.slice/system-ckptd.slice/ckptd@alice.service",
            SystemdUnit("ckptd@alice.service", False),
        ),
        (
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/ckptd.service",
            SystemdUnit("ckptd.service", True),
        ),
        ("12:cpuset:/\n1:name=systemd:/system.slice/ckptd.service", SystemdUnit("ckptd.service", False)),
        ("0::/user.slice/user-1000.slice/session-3.scope", None),
        ("0::/system.slice/slurmd.service", None),
        ("0::/system.slice/not-ckptd.service", None),
        ("0::/docker/0123", None),
    ],
)
def test_a_unit_is_found_in_the_control_group(tmp_path: Path, group: str, unit: SystemdUnit | None) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text(group + "\n")
    assert unit_of(7, tmp_path) == unit
    assert unit_of(8, tmp_path) is None


def test_the_commands_for_a_unit_name_its_manager() -> None:
    assert SystemdUnit("ckptd@alice.service", False).stop_command == "systemctl stop ckptd@alice.service"
    assert SystemdUnit("ckptd.service", True).stop_command == "systemctl --user stop ckptd.service"
    assert SystemdUnit("ckptd.service", True).journal_option == "--user-unit=ckptd.service"


def test_a_journal_is_read_by_journalctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in its place prints its arguments: no journal of systemd runs where tests do."""
    program = tmp_path / "journalctl"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    lines = DaemonLog(None, SystemdUnit("ckptd.service", False)).lines(7, follow=True)
    assert list(lines) == ["--unit=ckptd.service", "--lines=7", "--no-pager", "--follow"]


# -- logs -----------------------------------------------------------------------------------------


def test_logs_are_those_of_the_process_wherever_it_writes_them(daemon: DaemonProcess) -> None:
    answer = json.loads(daemon.ctl("logs", "--json", "--lines", "2").stdout)
    assert answer == {"log": str(daemon.log), "lines": daemon.log_text().splitlines()[-2:]}
    assert daemon.ctl("logs").stdout == daemon.log_text()


def test_logs_of_an_operators_daemon_are_found_when_it_has_ended(daemon: DaemonProcess) -> None:
    """They were those of an earlier daemon, which a trainer had started, and nothing said so."""
    (daemon.runtime_dir / "ckptd.log").write_text("an earlier daemon's\n")
    daemon.kill()
    done = daemon.ctl("logs")
    assert done.stdout == daemon.log_text()
    assert "no daemon answers; this is the end of the log of the last one" in done.stderr
    (daemon.runtime_dir / "operated").write_text("/dev/pts/7\n")
    done = daemon.ctl("logs", check=False)
    assert (done.returncode, "the last one logged to /dev/pts/7" in done.stderr) == (3, True), done.stderr


def test_logs_of_a_daemon_that_a_trainer_started_are_there_when_it_is_gone(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.terminate()
    (daemon.runtime_dir / "operated").unlink()
    for name, text in daemon.settings.items():
        monkeypatch.setenv(name, text)
    ensure_daemon()
    log = daemon.runtime_dir / "ckptd.log"
    assert daemon.ctl("logs").stdout == log.read_text()
    assert json.loads(daemon.ctl("stop", "--wait", "--json").stdout)["ended"] is True
    assert daemon.ctl("logs").stdout == log.read_text()
    log.unlink()
    done = daemon.ctl("logs", check=False)
    assert (done.returncode, f"there is no {log}" in done.stderr) == (3, True), done.stderr


def test_following_prints_new_lines_until_it_is_interrupted(daemon: DaemonProcess) -> None:
    command = [sys.executable, "-m", "ckptd.ctl", "logs", "-f", "--lines", "0", "--json"]
    with subprocess.Popen(command, env=daemon.env, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        written = 0
        with daemon.log.open("a") as log:
            while not select_readable(following):  # it begins at the end of what it finds
                written += 1
                print(f"line {written}", file=log, flush=True)
        assert json.loads(following.stdout.readline())["line"].startswith("line ")
        following.send_signal(signal.SIGINT)
        assert following.wait(20) == 130


def select_readable(process: subprocess.Popen[str]) -> bool:
    """Whether it prints something within a fifth of a second."""
    assert process.stdout is not None
    return bool(select.select([process.stdout], [], [], 0.2)[0])


def test_a_file_that_is_replaced_or_emptied_is_followed_by_name(tmp_path: Path) -> None:
    path = tmp_path / "ckptd.log"
    path.write_text("a\nb\nc\n")
    with closing(DaemonLog(path).lines(2, follow=True)) as lines:
        assert [next(lines), next(lines)] == ["b", "c"]
        path.rename(tmp_path / "ckptd.log.old")
        path.write_text("d\n")
        assert next(lines) == "d"
        path.write_text("")
        with path.open("a") as log:
            log.write("e")
        assert next(lines) == "e"
