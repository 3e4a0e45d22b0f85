"""The daemon's side of the process that computes: it starts, dies, cannot be had, and ends with the daemon."""

from __future__ import annotations

import gc
import os
import queue
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ckptd.config.settings import DaemonConfig
from ckptd.event_log import EventLog
from ckptd.memory.segment_store import SegmentStore
from ckptd.node_context import NodeContext
from ckptd.recompute.recomputation import PlacedSnapshot, Recomputation
from tests.ckptd.running import eventually

# Answers as the process does, without torch: what is asked of a path, by the last part of its name.
_STAND_IN = """
import json, os, sys, time
print(json.dumps({"torch": "stand-in"}), flush=True)
for line in sys.stdin:
    name = os.path.basename(json.loads(line)["path"])
    if name == "hangs":
        time.sleep(1000)
    if name == "slow":
        time.sleep(0.5)
    if name == "dies":
        sys.exit("out of memory")
    answer = {"failed": "no gradients"} if name == "fails" else {"computed_bytes": 12}
    print("no JSON" if name == "garbage" else json.dumps(answer), flush=True)
"""
_PLACE = PlacedSnapshot(0, 10, 1, 1)


@dataclass
class Side:
    """A `Recomputation` on a loop that turns when the test says so."""

    recomputation: Recomputation
    events: EventLog
    posted: queue.SimpleQueue[Callable[[], None]]
    now_s: float = 100.0
    answers: list[int | str] = field(default_factory=list)

    def turn(self) -> None:
        while not self.posted.empty():
            self.posted.get()()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        def turned() -> bool:
            self.turn()
            return condition()

        eventually(turned, what)

    def ready(self) -> bool:
        return self.recomputation.why_not() == ""

    def ask(self, name: str, *, timeout_s: float = 60.0) -> int | str:
        before = len(self.answers)
        self.submit(name, timeout_s)
        self.until(lambda: len(self.answers) > before, "an answer")
        return self.answers[-1]

    def submit(self, name: str, timeout_s: float = 60.0) -> None:
        self.recomputation.compute(
            f"/{name}",
            4096,
            _PLACE,
            _PLACE,
            timeout_s=timeout_s,
            done=self.answers.append,
            failed=self.answers.append,
        )


@contextmanager
def side_with(folder: Path, command: list[str], *, idle_s: float = 600.0) -> Iterator[Side]:
    events, posted = EventLog(100), queue.SimpleQueue[Callable[[], None]]()
    store = SegmentStore(folder, 1 << 20, "here", mlock="off", hugepages="off")
    node = NodeContext(DaemonConfig(), store, events, posted.put, clock=lambda: made.now_s)
    made = Side(Recomputation(node, command=command, idle_s=idle_s), events, posted)
    try:
        yield made
    finally:
        made.recomputation.close()


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Side]:
    with side_with(tmp_path, [sys.executable, "-c", _STAND_IN]) as found:
        yield found


def test_it_starts_when_it_is_asked_for_and_answers(side: Side) -> None:
    assert side.recomputation.pid == 0
    assert "starting" in side.recomputation.why_not()
    side.until(side.ready, "a process")
    assert side.ask("slot") == 12
    assert side.ask("fails") == "no gradients"
    assert side.events.counters["event.recompute_started"] == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [("dies", "out of memory"), ("hangs", "did not answer in time"), ("garbage", "is no JSON")],
)
def test_a_process_that_is_gone_is_started_again_after_a_while(side: Side, name: str, why: str) -> None:
    side.until(side.ready, "a process")
    assert why in str(side.ask(name, timeout_s=60.0 if name != "hangs" else 2.0))
    assert side.recomputation.pid == 0
    assert why in side.recomputation.why_not()
    side.now_s += 120.0
    side.until(side.ready, "another process")
    assert side.ask("slot") == 12


def test_a_request_that_waited_behind_one_without_an_answer_fails_with_it(side: Side) -> None:
    """Its thread must not talk with a process that is being ended, whose descriptors others have by then."""
    side.until(side.ready, "a process")
    gc.collect()  # what earlier tests have left must not be closed meanwhile
    files = set(os.listdir("/proc/self/fd"))
    process = side.recomputation.pid
    side.submit("hangs", 2.0)  # half of it must be left when the thread begins
    assert side.recomputation.why_not() == ""
    side.submit("slot")
    assert side.recomputation.why_not() == "other snapshots wait to be computed"
    side.until(lambda: len(side.answers) == 2, "both answers")
    assert side.answers == ["its process for this is gone: it did not answer in time, and was killed"] * 2
    assert side.events.counters["event.recompute_unavailable"] == 1
    assert not os.path.exists(f"/proc/{process}")
    assert len(set(os.listdir("/proc/self/fd"))) == len(files) - 3, "the pipes, and its error output"
    assert side.recomputation.pid == 0


def test_a_request_does_not_end_the_process_for_the_time_that_others_took(side: Side) -> None:
    side.until(side.ready, "a process")
    process = side.recomputation.pid
    side.submit("slow")
    side.submit("slot", 0.2)
    side.until(lambda: len(side.answers) == 2, "both answers")
    assert side.answers == [12, "snapshots before it took too long"]
    assert side.recomputation.pid == process
    assert side.ask("slot") == 12


def test_a_process_that_is_killed_fails_its_request(side: Side) -> None:
    side.until(side.ready, "a process")
    os.kill(side.recomputation.pid, signal.SIGKILL)
    assert "its process for this is gone" in str(side.ask("slot"))


def test_without_torch_the_reason_is_said_once_and_to_whoever_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real process, where torch cannot be imported."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text("raise ImportError('No module named torch here')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(broken), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "segments").mkdir()
    with side_with(tmp_path / "segments", [sys.executable, "-m", "ckptd.recompute.recompute_worker"]) as side:
        side.until(lambda: "starting" not in side.recomputation.why_not(), "the end of the process")
        assert "ImportError: No module named torch here" in side.recomputation.why_not()
        assert side.events.counters["event.recompute_unavailable"] == 1
        side.now_s += 120.0
        assert "starting" in side.recomputation.why_not()
        side.until(lambda: "starting" not in side.recomputation.why_not(), "the end of the second process")
        assert side.events.counters["event.recompute_unavailable"] == 1
        side.now_s += 61.0
        assert "starting" not in side.recomputation.why_not(), "the second pause is twice as long"
        side.recomputation.compute(
            "/slot", 1, _PLACE, _PLACE, timeout_s=1.0, done=side.answers.append, failed=side.answers.append
        )
        side.turn()
        assert side.answers == ["its process for this is not running"]


def test_a_command_that_is_not_there_is_a_reason_too(tmp_path: Path) -> None:
    with side_with(tmp_path, ["/nonexistent/python"]) as side:
        assert "cannot be started" in side.recomputation.why_not()


def test_it_ends_when_nobody_needs_it_and_with_the_daemon(tmp_path: Path) -> None:
    with side_with(tmp_path, [sys.executable, "-c", _STAND_IN], idle_s=60.0) as side:
        side.until(side.ready, "a process")
        first = side.recomputation.pid
        side.recomputation.tick(side.now_s + 59.0)
        assert side.recomputation.pid == first
        side.recomputation.tick(side.now_s + 61.0)
        assert side.recomputation.pid == 0
        eventually(lambda: not os.path.exists(f"/proc/{first}"), "its end")
        side.until(side.ready, "another process")
        second = side.recomputation.pid
        side.recomputation.close()
        assert not os.path.exists(f"/proc/{second}")
