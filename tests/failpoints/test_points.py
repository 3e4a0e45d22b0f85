"""Points are found in the source, cost nothing where they are not compiled in, and do what the plan says."""

from __future__ import annotations

import builtins
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ckptd.memory.locks
from tests.failpoints.points import CALL, REACH, Kind, all_points, compiled, in_scope, points_of
from tests.failpoints.runtime import (
    CLOCK_STEPS_S,
    Arm,
    Runtime,
    answers,
    arm,
    disarm,
    fired,
    forget_reached,
    reached,
)

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """
import os
from dataclasses import replace

def first(path, memory):
    os.replace(path, path + "2")
    os.replace(path, path + "3")
    memory[0:4] = b"abcd"

class Room:
    def second(self, text, path, item):
        path.replace(item)
        text.replace("a", "b")
        replace(item, size=3)
        item.tell(path.tell())
        table = {}
        table["a"] = 1
"""
SMALL = """
import sys
from pathlib import Path
from ckptd.memory import locks
path = Path(sys.argv[1])
path.write_bytes(bytes(8))
fd = path.open("r+b").fileno()
import os
fd = os.open(path, os.O_RDWR)
for _ in range(5):
    locks.try_lock(fd, 1, True)
    locks.unlock(fd, 1)
    print("round", flush=True)
with locks.lock_file(path, 2, True):
    print("locked", flush=True)
"""
ANSWERS = """
import os, sys
from pathlib import Path
from ckptd.memory import locks
path = Path(sys.argv[1])
path.write_bytes(bytes(8))
try:
    with locks.lock_file(path, 1, True):
        pass
except OSError:
    locks.try_lock(os.open(path, os.O_RDWR), 1, True)
print("lives")
"""
TRY_LOCK = "ckptd.memory.locks.try_lock/fcntl.fcntl"


def test_points_are_calls_and_stores_in_functions() -> None:
    """By name and what they do; what only looks like one is none."""
    found = {point.name: point.kind for point in points_of(SOURCE, "m")}
    assert found == {
        "m.first/os.replace": Kind.RENAME,
        "m.first/os.replace#2": Kind.RENAME,
        "m.first/=": Kind.STORE,
        "m.Room.second/replace": Kind.RENAME,
        "m.Room.second/tell": Kind.REQUEST,
    }


def test_an_instrumented_module_does_what_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each point is reached before and after, in the order of the code."""
    seen: list[str] = []

    def call(name: str, function: object, /, *args: object) -> object:
        seen.append(f"{name} before")
        assert callable(function)
        result = function(*args)
        seen.append(f"{name} after")
        return result

    monkeypatch.setattr(builtins, CALL, call, raising=False)
    monkeypatch.setattr(builtins, REACH, lambda name, when: seen.append(f"{name} {when}"), raising=False)
    namespace: dict[str, object] = {"__name__": "m"}
    exec(compiled(SOURCE.replace('path + "3"', 'path + "2"'), "m", "m.py"), namespace)  # noqa: S102
    first = namespace["first"]
    assert callable(first)
    memory = bytearray(8)
    (tmp_path / "x").touch()
    with pytest.raises(FileNotFoundError):
        first(str(tmp_path / "x"), memory)
    assert (tmp_path / "x2").exists()
    assert seen == ["m.first/os.replace before", "m.first/os.replace after", "m.first/os.replace#2 before"]
    assert memory == bytes(8)


def test_what_decides_over_data_has_points() -> None:
    """Each kind, in trainer, daemon and keeper; names are unique by construction."""
    points = all_points()
    assert {point.kind for point in points.values()} == set(Kind)
    for name in (
        TRY_LOCK,
        "ckptd.core.slots.segment_format.set_slot_state/=",
        "ckptd.client.daemon_link.mapped_segment.MappedSegment._seal/write_slot_header",
        "ckptd.private_files.replace_private_file/replace",
        "ckptd.peers.slot_grants.WriteGrants._verified/write_slot_header",
    ):
        assert name in points
    assert in_scope("ckptd.memory.locks")
    assert not in_scope("ckptd.ctl.main")
    assert not in_scope("ckptd.nodes")


def test_they_cost_nothing_when_off() -> None:
    """A process without the campaign's environment has the code that is in the source, and none of ours."""
    plain = compile((ROOT / "ckptd/memory/locks.py").read_text(), ckptd.memory.locks.__file__, "exec")
    ours = next(c for c in plain.co_consts if getattr(c, "co_name", "") == "try_lock")
    assert ckptd.memory.locks.try_lock.__code__.co_code == ours.co_code
    names = "import sys; sys.exit(any('failpoint' in n for n in (*dir(__builtins__), *sys.modules)))"
    environment = {key: value for key, value in os.environ.items() if key != "FAILPOINTS_DIR"}
    subprocess.run(
        [sys.executable, "-c", f"import ckptd.memory.locks; {names}"], env=environment, cwd=ROOT, check=True
    )


def start(folder: Path, plan: Arm | None = None, program: str = SMALL) -> subprocess.Popen[str]:
    """A process that locks five times, or another one."""
    if plan is not None:
        arm(folder, plan)
    environment = {
        **os.environ,
        "FAILPOINTS_DIR": str(folder),
        "PYTHONPATH": str(Path(__file__).parent / "site"),
    }
    return subprocess.Popen(
        [sys.executable, "-c", program, str(folder / "file")],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_process_counts_what_it_reaches(tmp_path: Path) -> None:
    """In powers of two, before and after."""
    process = start(tmp_path)
    assert process.communicate()[0].count("round") == 5
    found = reached(tmp_path)
    assert found["trainer", TRY_LOCK, "before"] == found["trainer", TRY_LOCK, "after"] == 4
    assert found["trainer", "ckptd.memory.locks.lock_file/os.open", "after"] == 1
    assert fired(tmp_path) is None
    descriptor = os.open(tmp_path / "hits", os.O_WRONLY | os.O_APPEND)  # as the fork server has it
    forget_reached(tmp_path)
    assert reached(tmp_path) == {}
    os.write(descriptor, b"trainer a before 1\n")
    os.close(descriptor)
    assert reached(tmp_path) == {("trainer", "a", "before"): 1}


@pytest.mark.parametrize(("when", "rounds"), [("before", 2), ("after", 2)])
def test_kill(tmp_path: Path, when: str, rounds: int) -> None:
    """SIGKILL where the plan says, at the time that it says."""
    process = start(tmp_path, Arm(TRY_LOCK, "trainer", when, 3, "kill"))
    assert process.communicate()[0].count("round") == rounds
    assert process.returncode == -signal.SIGKILL
    who = fired(tmp_path)
    assert who is not None
    assert (who.who, who.pid) == ("r0", process.pid)
    # Once for each plan: the next process lives.
    again = start(tmp_path)
    assert again.communicate()[0].count("round") == 5
    assert disarm(tmp_path) == who
    assert fired(tmp_path) is None
    assert disarm(tmp_path) is None


def test_an_error_is_raised_in_place_of_the_call(tmp_path: Path) -> None:
    """As the system would raise it."""
    process = start(tmp_path, Arm("ckptd.memory.locks.lock_file/os.open", "trainer", "before", 1, "ENOSPC"))
    out, err = process.communicate()
    assert out.count("round") == 5
    assert "locked" not in out
    assert f"[Errno {errno.ENOSPC}]" in err


def test_a_stopped_process_goes_on(tmp_path: Path) -> None:
    """SIGSTOP is seen by who waits for it."""
    process = start(tmp_path, Arm(TRY_LOCK, "trainer", "before", 1, "stop"))
    while fired(tmp_path) is None:
        time.sleep(0.01)
    assert os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT) is not None
    process.send_signal(signal.SIGCONT)
    assert process.communicate()[0].count("round") == 5


@pytest.mark.parametrize("action", CLOCK_STEPS_S)
def test_a_clock_steps_by_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    """What the process reads, in seconds and in nanoseconds; not what it waits by."""
    monkeypatch.setattr(time, "time", time.time)  # put back afterwards
    monkeypatch.setattr(time, "time_ns", time.time_ns)
    wall, monotonic = time.time(), time.monotonic()
    Runtime(tmp_path).fire(Arm("a", "trainer", "before", 1, action))
    stepped = CLOCK_STEPS_S[action]
    assert time.time() - wall - stepped == pytest.approx(time.monotonic() - monotonic, abs=30)
    assert time.time_ns() / 1e9 == pytest.approx(time.time(), abs=30)


def test_a_plan_is_for_one_kind_of_process_and_one_of_them(tmp_path: Path) -> None:
    """Others pass by."""
    for other in (
        Arm(TRY_LOCK, "daemon", "before", 1, "kill"),
        Arm(TRY_LOCK, "trainer", "before", 1, "kill", who="r7"),
    ):
        process = start(tmp_path, other)
        assert process.communicate()[0].count("round") == 5
        assert fired(tmp_path) is None


def test_nobody_fires_after_the_plan_is_withdrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even who has read it, and comes to the point a moment too late; the next plan has another number."""
    arm(tmp_path, Arm("a", "trainer", "before", 1, "EIO"))
    monkeypatch.setenv("FAILPOINTS_DIR", str(tmp_path))
    plan = Arm(**json.loads((tmp_path / "plan").read_text()))
    assert disarm(tmp_path) is None
    late = Runtime(tmp_path)
    late.fire(plan)  # it raises nothing
    arm(tmp_path, plan)
    newer = Arm(**json.loads((tmp_path / "plan").read_text()))
    assert newer.number > plan.number
    with pytest.raises(OSError, match="of a failpoint"):
        late.fire(newer)
    assert disarm(tmp_path) is not None


def test_a_torn_line_of_a_killed_process_is_no_hit(tmp_path: Path) -> None:
    """The last write of a process may be cut off."""
    (tmp_path / "hits").write_text("trainer a before 4\ntrainer a bef\ntrainer a before 2\n")
    assert reached(tmp_path) == {("trainer", "a", "before"): 4}


def test_a_process_is_killed_in_its_answer_to_an_error(tmp_path: Path) -> None:
    """At a point that it comes to after the injected one; what it reaches there is known for the next plan."""
    open_it = "ckptd.memory.locks.lock_file/os.open"
    monitor = Runtime(tmp_path)
    arm(tmp_path, Arm(open_it, "trainer", "before", 1, "EIO"))
    with pytest.raises(OSError, match="of a failpoint"):
        monitor.reach(open_it, "before")
    monitor.reach("answer", "before")
    assert answers(tmp_path) == {("trainer", "answer", "before"): f"EIO@{open_it}"}
    process = start(tmp_path, Arm(open_it, "trainer", "before", 1, "EIO", then=(TRY_LOCK, "after")), ANSWERS)
    assert process.communicate()[0] == ""
    assert process.returncode == -signal.SIGKILL
    for what in ("fired", "then"):
        who = fired(tmp_path, what)
        assert who is not None
        assert who.pid == process.pid
