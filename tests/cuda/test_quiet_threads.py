"""Threads of ckptd begin no collection, leave the collector as the user has set it, and let a process end."""

from __future__ import annotations

import gc
import os
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptd.cuda.quiet_threads import Bell, quietly, start_loud, start_quiet, waiting

THRESHOLDS = (50, 5, 5)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def collected() -> Iterator[Counter[str]]:
    """How many collections began, by thread."""
    found: Counter[str] = Counter()

    def note(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            found[threading.current_thread().name] += 1

    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.set_threshold(*before)


def allocate() -> list[list[int]]:
    return [[] for _ in range(1000)]


def work(jobs: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    while (job := quietly(jobs.get)) is not None:
        job()


def test_a_quiet_thread_never_collects_whatever_it_allocates(collected: Counter[str]) -> None:
    jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
    kept: list[object] = []
    thread = start_quiet(work, jobs, name="quiet")
    for _ in range(50):
        jobs.put(lambda: kept.append(allocate()))
    all_done = threading.Event()
    jobs.put(all_done.set)
    all_done.wait()
    assert len(kept) == 50
    assert collected["quiet"] == 0
    jobs.put(None)
    thread.join()
    loud = threading.Thread(target=allocate, name="loud")
    loud.start()
    loud.join()
    assert collected["loud"] > 0
    assert gc.get_threshold() == THRESHOLDS


def test_others_collect_while_it_waits_and_not_while_it_runs(collected: Counter[str]) -> None:
    jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
    begun_to_work, running, go_on = threading.Event(), threading.Event(), threading.Event()
    thread = start_quiet(work, jobs, name="quiet")
    jobs.put(begun_to_work.set)
    begun_to_work.wait()
    while gc.get_threshold() != THRESHOLDS:  # it waits
        pass
    kept = [allocate()]
    waiting = collected["MainThread"]
    assert waiting > 0
    jobs.put(running.set)
    jobs.put(go_on.wait)
    running.wait()
    begun = collected["MainThread"]
    kept.append(allocate())
    assert collected["MainThread"] == begun
    go_on.set()
    while gc.get_threshold() != THRESHOLDS:  # it waits again
        pass
    kept.append([[]])  # what was put off
    assert collected["MainThread"] > begun
    assert collected["quiet"] == 0
    jobs.put(None)
    thread.join()


def test_an_error_ends_the_pause(collected: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: failed.append(args.exc_value))
    start_quiet(int, "no number", name="quiet").join()
    assert len(failed) == 1
    assert gc.get_threshold() == THRESHOLDS


def test_what_the_user_sets_meanwhile_stays(collected: Counter[str]) -> None:
    def user() -> None:
        assert gc.isenabled()
        gc.set_threshold(70, 7, 7)

    start_quiet(user, name="quiet").join()
    assert gc.get_threshold() == (70, 7, 7)
    start_quiet(gc.disable, name="quiet").join()
    assert not gc.isenabled()
    gc.enable()
    gc.set_threshold(0)
    start_quiet(allocate, name="quiet").join()
    assert gc.get_threshold()[0] == 0


def test_a_forked_child_collects_again(collected: Counter[str]) -> None:
    running, over = threading.Event(), threading.Event()
    jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
    thread = start_quiet(work, jobs, name="quiet")
    jobs.put(running.set)
    jobs.put(over.wait)
    running.wait()
    pid = os.fork()
    if pid == 0:
        start_quiet(allocate, name="quiet").join()
        os._exit(gc.get_threshold() != THRESHOLDS)
    assert os.waitpid(pid, 0)[1] == 0
    over.set()
    jobs.put(None)
    thread.join()
    assert gc.get_threshold() == THRESHOLDS


def test_a_bell_ends_one_wait() -> None:
    bell, woken = Bell(), queue.SimpleQueue[int]()

    def wait() -> None:
        for number in range(3):
            bell.wait(60.0 if number < 2 else 0.0)
            woken.put(number)

    bell.ring()
    bell.ring()  # counts once
    thread = start_quiet(wait, name="quiet")
    assert woken.get() == 0
    bell.ring()
    assert [woken.get(), woken.get()] == [1, 2]
    thread.join()


def run(code: str) -> str:
    """What a fresh interpreter prints, which must end well."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


IN_TORCH = """
import atexit, threading, torch, torch.distributed as dist
from ckptd.cuda import quiet_threads
from ckptd.cuda.quiet_threads import start_{kind}
{prepare}
quiet_threads._END_S = 60.0
begun, at_the_end = threading.Event(), threading.Event()
atexit.register(at_the_end.set)  # the last thing before the threads are waited for

def work():
    while not at_the_end.is_set():
        {operation}
        begun.set()
    for _ in range(200):
        {operation}
    print("done")

start_{kind}(work, name="at-work")
begun.wait()
"""
TENSOR = {"prepare": "tensor = torch.zeros(300_000)", "operation": "tensor.add_(1)"}
STORE = {
    "prepare": "server = dist.TCPStore('127.0.0.1', 0, is_master=True); store = server.clone()",
    "operation": "store.check(['key'])",
}


@pytest.mark.parametrize(("kind", "words"), [("quiet", TENSOR), ("loud", STORE)])
def test_a_process_ends_while_a_thread_is_inside_torch(kind: str, words: dict[str, str]) -> None:
    """It ended by SIGABRT, `terminate called without an active exception`: the thread asked for the GIL of an
    interpreter that was ending, and CPython unwound its stack through a destructor.
    """
    assert run(IN_TORCH.format(kind=kind, **words)) == "done\n"


HANGS = """
import threading
from ckptd.cuda import quiet_threads
quiet_threads._END_S = 0.1
hangs = threading.Event()

def work():
    hangs.set()
    threading.Event().wait()

quiet_threads.start_quiet(work, name="hangs")
hangs.wait()
print("ends")
"""


def test_a_thread_that_hangs_keeps_no_process() -> None:
    assert run(HANGS) == "ends\n"


MANY = """
import threading
from ckptd.cuda import quiet_threads
quiet_threads._END_S = 600.0
begun = threading.Event()

def work():
    while True:
        quiet_threads.may_end_here()
        begun.set()

quiet_threads.start_{kind}(work, name="many")
begun.wait()
print("ends")
"""


@pytest.mark.parametrize("kind", ["quiet", "loud"])
def test_of_many_operations_the_end_waits_for_one(kind: str) -> None:
    assert run(MANY.format(kind=kind)) == "ends\n"


LATE = """
import atexit, os, threading

@atexit.register  # before the import, and so called after it
def late():
    jobs.put(ran.set)
    started = start_quiet(ran.set, name="late")
    assert not ran.wait(0.2)
    pid = os.fork()
    if pid == 0:
        start_quiet(ran.set, name="child").join()
        os._exit(not ran.is_set())
    print(os.waitpid(pid, 0)[1])

import queue
from ckptd.cuda.quiet_threads import quietly, start_quiet
jobs, ran = queue.SimpleQueue(), threading.Event()
served = threading.Event()

def serve():
    while True:
        quietly(jobs.get)()

start_quiet(serve, name="serves")
jobs.put(served.set)
served.wait()
"""


def test_no_thread_works_when_the_end_has_begun_but_those_of_a_child_do() -> None:
    assert run(LATE) == "0\n"


def test_a_loud_thread_may_collect(collected: Counter[str]) -> None:
    begun, over = threading.Event(), threading.Event()

    def work() -> None:
        with waiting():
            begun.set()
            over.wait()
        allocate()

    thread = start_loud(work, name="loud")
    begun.wait()
    over.set()
    thread.join()
    assert collected["loud"] > 0


# They call nothing of torch.
APART = {"ckptd-term", "ckptd-retire"}


def test_all_daemon_threads_of_a_trainer_are_counted() -> None:
    others = {
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("client", "cuda")
        for path in (ROOT / folder).rglob("*.py")
        for line in path.read_text().splitlines()
        if "daemon=True" in line
        and path.name != "quiet_threads.py"
        and not any(name in line for name in APART)
    }
    assert others == set()
