"""Threads of ckptd begin no collection, and leave the collector as the user has set it."""

from __future__ import annotations

import gc
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from ckptd.cuda.quiet_threads import Bell, quietly, start_quiet

THRESHOLDS = (50, 5, 5)


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
