"""Threads in a trainer that never run Python's cyclic garbage collector.

A collection on one thread while another one is inside an operation of torch can clear the context of a
custom autograd function that is alive: torch shows a tensor's ``grad_fn`` to the collector if the tensor is
its only owner, the collector looks twice, and an operation takes a further reference in between without the
GIL. The backward then fails, for instance in DDP with ``'NoneType' object has no attribute 'reducer'`` (torch
2.13; docs/decisions/quiet-threads.md). A thread that computes is not inside an operation when it collects, so
the threads of ckptd leave it the collecting.

CPython collects on whichever thread allocates a container when a threshold is passed. So the thresholds are
out of reach while a quiet thread runs, and as the user has set them while all of them wait. No container is
allocated between the two, which is why `quietly` takes only functions written in C.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Bell", "quietly", "start_quiet"]

Result = TypeVar("Result")

_NEVER = (2**31 - 1,) * 3


class _Pause:
    """Counts the threads that must not collect.

    It sets thresholds, and so leaves ``gc.disable()``, ``gc.enable()`` and ``gc.collect()`` to the user, and
    keeps thresholds that are set meanwhile. What was put off happens at the next allocation of another
    thread.
    """

    def __init__(self) -> None:
        self._before = _NEVER
        self._set, self._get = gc.set_threshold, gc.get_threshold
        self._begin()

    def _begin(self) -> None:
        self._depth = 0
        lock = threading.Lock()
        self._acquire, self._release = lock.acquire, lock.release  # `with` would allocate bound methods

    def enter(self) -> None:
        self._acquire()
        if self._depth == 0:
            self._before = self._get()
            self._set(*_NEVER)
        self._depth += 1
        self._release()

    def leave(self) -> None:
        self._acquire()
        self._depth -= 1
        if self._depth == 0 and self._get() == _NEVER:
            self._set(*self._before)
        self._release()

    def over_in_child(self) -> None:
        """A forked child has none of the threads."""
        if self._depth and gc.get_threshold() == _NEVER:
            gc.set_threshold(*self._before)
        self._begin()


_pause = _Pause()
_enter, _leave = _pause.enter, _pause.leave
os.register_at_fork(after_in_child=_pause.over_in_child)


def start_quiet(target: Callable[..., object], *args: object, name: str) -> threading.Thread:
    """Start a daemon thread that does not collect before its end. It should wait by `quietly` or a `Bell`,
    not otherwise for long: no thread of the process collects meanwhile, unless it asks for it.
    """

    def run() -> None:
        _enter()
        try:
            target(*args)
        finally:
            _leave()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def quietly(wait: Callable[..., Result], *args: object) -> Result:
    """Call a function that waits, on a quiet thread; other threads may collect meanwhile.

    Args:
        wait: written in C, and allocates no container: ``lock.acquire``, ``queue.SimpleQueue().get``.
    """
    _leave()
    try:
        return wait(*args)
    finally:
        _enter()


class Bell:
    """Wakes one quiet thread. Like a `threading.Event` that a wait clears."""

    def __init__(self) -> None:
        self._silent = threading.Lock()
        self._silent.acquire()

    def ring(self) -> None:
        """End the wait that goes on, or the next one. Any thread may call it."""
        with contextlib.suppress(RuntimeError):  # it has rung already
            self._silent.release()

    def wait(self, timeout_s: float) -> None:
        """Wait, on a quiet thread, until it rings."""
        quietly(self._silent.acquire, True, timeout_s)
