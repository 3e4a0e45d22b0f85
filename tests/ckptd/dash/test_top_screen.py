"""`ckptctl top`: its lines, and what it does with a real pseudo-terminal and a real daemon."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import pytest

from ckptd.dash.dash_view import DashView, TierGrade, view_of
from ckptd.dash.top_screen import screen_lines, screen_text
from ckptd.transport import messages as m
from tests.ckptd.dash.fabricated import answers, everything
from tests.ckptd.running import ROOT, DaemonProcess, busy_daemon, running_daemon


def test_what_matters_comes_first() -> None:
    lines = screen_lines(view_of(answers()))
    assert lines[0].text.startswith("ckptd 0.4.0 on n0, up 60 min; memory 256 MiB of 1 GiB (25%)")
    assert [line.text for line in lines[2:7]] == [
        "moe/run-1: 1 of 1 ranks known here, iteration 120, 0.5 s each",
        "OK: every rank known here is protected",
        "  if a process is lost   + resumes at iteration 120: 0 behind, about 0 s",
        "  if a node is lost      + resumes at iteration 119: 1 behind, about 0.5 s",
        "  if all memory is lost  + resumes at iteration 100: 20 behind, about 10 s",
    ]
    assert {line.grade for line in lines[3:7]} == {TierGrade.CURRENT}


def test_a_large_job_has_a_short_text_with_the_worst_ranks() -> None:
    text = screen_text(view_of(everything(16_384)))
    assert len(text.splitlines()) < 50
    assert "WARNING: far behind if a node is lost" in text
    assert "  and 16368 more ranks, none of them worse" in text
    assert "experts: 4 on fewer than 2 of 3 nodes" in text
    assert "1 of 2 answer; n2 silent for 42 s" in text
    assert "rank 3: 16.50 s, of which first_new_step 2.75, replayed 2.50" in text


def test_a_rank_of_this_node_without_replicas_is_not_one_of_another_node() -> None:
    found = answers()
    ranks = tuple(msgspec.structs.replace(each, targets=(), wanted=0) for each in found.peers.ranks)
    text = screen_text(view_of(replace(found, peers=msgspec.structs.replace(found.peers, ranks=ranks))))
    (row,) = (line for line in text.splitlines() if line.startswith("     0 "))
    assert row.endswith(" -")


def test_an_outage_of_the_daemon_is_said_in_words() -> None:
    view = view_of(replace(answers(), error="no answer to GetStatus"))
    line = screen_lines(view)[1]
    assert line == ("THE DAEMON DOES NOT ANSWER; this is old: no answer to GetStatus", TierGrade.NONE)


def test_a_daemon_without_runs_says_so() -> None:
    empty = DashView(0.0, "", "n", "0", 1.0, 0, 0, 0, "", (), (), ())
    assert "no run is known on this node" in screen_text(empty)


@pytest.fixture(scope="module")
def busy() -> Iterator[DaemonProcess]:
    """A daemon with an attached trainer and two sealed slots."""
    with busy_daemon() as (daemon, client):
        client.send(m.Report(7, {"steps": 7.0, "stall_ms_sum": 1.0}))
        yield daemon


class Terminal:
    """A pseudo-terminal with `ckptctl top` in it."""

    def __init__(self, daemon: DaemonProcess, rows: int, columns: int) -> None:
        self.ours, self.theirs = pty.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(self.theirs)
        command = [sys.executable, "-m", "ckptd.ctl", "top"]
        # The terminal is the controlling one, as a shell's is: Ctrl-C and resizes become signals.
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            ["setsid", "--ctty", *command],
            env=daemon.env | {"COLUMNS": "999"},
            cwd=ROOT,
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
        )
        self.seen = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, condition: Callable[[list[str]], bool], what: str) -> list[str]:
        """The rows of the first whole screen for which this holds."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if select.select([self.ours], [], [], 0.2)[0]:
                self.seen += os.read(self.ours, 65536).decode()
            for screen in self.seen.split("\x1b[H")[1:]:
                rows = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen).split("\r\n")
                if "\x1b[J" in screen and condition(rows):
                    return rows
        raise AssertionError(f"never shown: {what}\n{self.seen[-2000:]}")

    def press(self, key: str) -> int:
        """The exit code after this key."""
        os.write(self.ours, key.encode())
        deadline = time.monotonic() + 30
        while self.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if select.select([self.ours], [], [], 0.1)[0]:
                    self.seen += os.read(self.ours, 65536).decode()
        return self.process.wait(1)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture
def terminal(busy: DaemonProcess) -> Iterator[Terminal]:
    opened = Terminal(busy, 24, 80)
    yield opened
    opened.close()


def test_it_fits_the_terminal_follows_its_size_and_ends_by_q(terminal: Terminal) -> None:
    rows = terminal.until(lambda rows: "iteration 7" in rows[2], "the step of the trainer")
    assert len(rows) <= 24
    assert max(map(len, rows)) <= 80
    assert rows[-1] == "q: quit"
    assert "  if a process is lost   + resumes at iteration 6: 1 behind" in "\n".join(rows)
    terminal.resize(6, 40)
    rows = terminal.until(lambda rows: len(rows) == 6, "six rows")
    assert max(map(len, rows)) == 40
    assert terminal.press("q") == 0
    after = terminal.seen[terminal.seen.rindex("\x1b[?1049l") :]
    assert "job/run: 1 of 1 ranks known here" in after, "the last view stays in the terminal"
    assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_ctrl_c_ends_it_and_leaves_the_terminal_as_it_was(terminal: Terminal) -> None:
    terminal.until(lambda rows: len(rows) > 3, "a screen")
    assert terminal.press("\x03") == 130
    assert termios.tcgetattr(terminal.theirs) == terminal.before
    assert terminal.seen.endswith("\x1b[?25h\x1b[?1049l")


def test_without_a_terminal_it_prints_once(busy: DaemonProcess) -> None:
    text = busy.ctl("top").stdout
    assert "\x1b" not in text
    assert "WARNING: not protected if a node is lost or all memory is lost" in text
    (run,) = json.loads(busy.ctl("top", "--json").stdout)["runs"]
    assert [tier["grade"] for tier in run["tiers"]] == ["+", ".", "."]


def test_it_survives_an_outage_and_shows_the_next_daemon() -> None:
    with running_daemon() as daemon:
        terminal = Terminal(daemon, 24, 120)
        try:
            terminal.until(lambda rows: "no run is known" in rows[2], "a screen")
            assert daemon.process is not None
            daemon.process.send_signal(signal.SIGSTOP)
            terminal.until(lambda rows: "THE DAEMON DOES NOT ANSWER" in rows[1], "the outage")
            daemon.kill()
            daemon.start()
            terminal.seen = ""
            terminal.until(lambda rows: "DOES NOT ANSWER" not in rows[1], "it is back")
            assert terminal.press("q") == 0
        finally:
            terminal.close()


def test_without_a_daemon_it_ends_as_other_commands_do(busy: DaemonProcess) -> None:
    assert busy.ctl("top", "--endpoint", "ipc:///nowhere/s", check=False).returncode == 3
