"""A host sees of its trainer what the trainer shows, and what the kernel says: with real processes."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckptd.host.hangs.hang_inquiry import TrainerState
from ckptd.host.hangs.trainer_watch import TrainerWatch, state_of
from ckptd.host.host_loop import HostLoop
from ckptd.host.host_options import options_from
from ckptd.progress_page import StepStage
from tests.ckptd.host.hosting import ROOT, until

TRAINER = """
import sys
from ckptd.progress_page import StepStage, inherited_page
page = inherited_page()
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Watched:
    """A process that shows what it is told to show, its watch, and what that has told."""

    def __init__(self, deadline_s: float) -> None:
        self.told: list[dict[str, Any]] = []
        self.loop = HostLoop()
        options = dataclasses.replace(options_from(["t.py"], {}), step_deadline_s=deadline_s)
        self.watch = TrainerWatch(options, self.loop, self.told.append)
        self.watch.prepare(3, 1)
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAINER],
            env={**os.environ, "PYTHONPATH": str(ROOT), **self.watch.environment},
            pass_fds=self.watch.descriptors,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.watch.begin(self.process.pid)

    def does(self, code: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{code}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def looks_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.loop.turn()

    def close(self) -> None:
        self.watch.close()
        self.loop.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched(deadline_s=0.6)
    yield made
    made.close()


def test_a_step_that_does_not_end_is_told_with_its_number(watched: Watched) -> None:
    watched.does("for step in range(5): page.begins(step)")
    watched.looks_until(lambda: bool(watched.told))
    told = watched.told[0]
    assert (told["told"], told["epoch"], told["deadline_s"]) == ("overdue", 3, 0.6)
    assert (told["step"], told["stage"], told["state"]) == (4, StepStage.TOP, "in_step")
    assert told["idle_s"] >= 0.6


def test_where_a_trainer_is(watched: Watched) -> None:
    assert watched.watch.position().state is TrainerState.OUTSIDE
    watched.does("page.begins(8)")
    watched.does("page.reaches(StepStage.BACKWARD)")
    watched.watch.answer(5)
    assert watched.told[-1] == {
        "told": "position",
        "inquiry": 5,
        "step": 8,
        "stage": 2,
        "state": "in_step",
    }
    os.kill(watched.process.pid, signal.SIGSTOP)
    until(lambda: watched.watch.stopped, "it is stopped")
    assert watched.watch.position().state is TrainerState.STOPPED
    os.kill(watched.process.pid, signal.SIGCONT)
    until(lambda: not watched.watch.stopped, "it goes on")
    watched.does("page.left(9)")
    assert watched.watch.position().state is TrainerState.OUTSIDE
    os.kill(watched.process.pid, signal.SIGKILL)
    until(lambda: watched.watch.position().state is TrainerState.ENDED, "it has ended")
    watched.watch.end()
    assert state_of(0) is TrainerState.ENDED


TRACE = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
assert libc.ptrace(0x4206, int(sys.argv[1]), 0, 0) == 0, ctypes.get_errno()  # PTRACE_SEIZE
print("traced", flush=True)
sys.stdin.read()
"""


def test_a_debugger_is_seen(watched: Watched) -> None:
    debugger = subprocess.Popen(
        [sys.executable, "-c", TRACE, str(watched.process.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert debugger.stdout is not None
    if debugger.stdout.readline() != "traced\n":
        pytest.skip(f"no process may trace another here: {debugger.communicate()[1]}")
    watched.does("page.begins(8)")
    assert watched.watch.position().state is TrainerState.TRACED
    debugger.communicate("")
    assert watched.watch.position().state is TrainerState.IN_STEP
