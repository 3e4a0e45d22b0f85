"""Threads of ckptd in a trainer: they never run Python's cyclic garbage collector, and never are inside torch
when the interpreter ends.

*The collector.* A collection on one thread while another one is inside an operation of torch can clear the
context of a custom autograd function that is alive: torch shows a tensor's ``grad_fn`` to the collector if
the tensor is its only owner, the collector looks twice, and an operation takes a further reference in
between without the GIL. The backward then fails, for instance in DDP with ``'NoneType' object has no
attribute 'reducer'`` (torch 2.13; docs/decisions/quiet-threads.md). A thread that computes is not inside an
operation when it collects, so the threads of ckptd leave it the collecting.

CPython collects on whichever thread allocates a container when a threshold is passed. So the thresholds are
out of reach while a quiet thread runs, and as the user has set them while all of them wait. No container is
allocated between the two, which is why `quietly` takes only functions written in C.

*The end.* Until Python 3.13 a daemon thread that asks for the GIL after the interpreter has begun to end is
ended by ``pthread_exit``, which unwinds its stack. An operation of torch, or of its stores, asks for the GIL
in a destructor, which must not be unwound: the whole process ends by SIGABRT (``terminate called without an
active exception``). So at the interpreter's end the main thread lets each thread come to its next wait, and
none goes on from there.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

Result = TypeVar("Result")

_NEVER = (2**31 - 1,) * 3
# For which the end of the interpreter waits for threads that work: an operation takes milliseconds. One that
# hangs in a store or on a device must not keep the process.
_END_S = 2.0


class _AtWork:
    """Counts the threads that work, and those of them that must not collect.

    It sets thresholds, and so leaves ``gc.disable()``, ``gc.enable()`` and ``gc.collect()`` to the user, and
    keeps thresholds that are set meanwhile. What was put off happens at the next allocation of another
    thread.
    """

    def __init__(self) -> None:
        self._before = _NEVER
        self._set, self._get = gc.set_threshold, gc.get_threshold
        self._begin()

    def _begin(self) -> None:
        self._working = self._quiet = 0
        self._over = False
        lock, all_wait, never = threading.Lock(), threading.Lock(), threading.Lock()
        all_wait.acquire()
        never.acquire()
        self._acquire, self._release = lock.acquire, lock.release  # `with` would allocate bound methods
        self._await_all, self._all_wait = all_wait.acquire, all_wait.release
        self._stay = never.acquire

    def enter(self, quiet: bool) -> None:
        """A thread works from here on; at the interpreter's end it stays here."""
        self._acquire()
        if self._over:
            self._release()
            self._stay()
        self._working += 1
        if quiet:
            if self._quiet == 0:
                self._before = self._get()
                self._set(*_NEVER)
            self._quiet += 1
        self._release()

    def leave(self, quiet: bool) -> None:
        """It waits from here on, or ends."""
        self._acquire()
        self._working -= 1
        if quiet:
            self._quiet -= 1
            if self._quiet == 0 and self._get() == _NEVER:
                self._set(*self._before)
        if self._over and self._working == 0:
            self._all_wait()
        self._release()

    def end(self) -> None:
        """The interpreter is about to end: no thread begins to work, and those that do come to a wait."""
        self._acquire()
        self._over, working = True, self._working
        self._release()
        if working:
            self._await_all(True, _END_S)

    def over_in_child(self) -> None:
        """A forked child has none of the threads."""
        if self._quiet and gc.get_threshold() == _NEVER:
            gc.set_threshold(*self._before)
        self._begin()


_at_work = _AtWork()
_enter, _leave = _at_work.enter, _at_work.leave
os.register_at_fork(after_in_child=_at_work.over_in_child)
# Before any `Checkpointer` registers its own, which so is closed before this.
atexit.register(_at_work.end)


class _Kind(threading.local):
    """Of the thread that runs."""

    quiet: bool | None = None  # None: none of these


_this = _Kind()


def start_quiet(target: Callable[..., object], *args: object, name: str) -> threading.Thread:
    """Start a daemon thread that does not collect before its end. It should wait by `quietly` or a `Bell`,
    not otherwise for long: no thread of the process collects meanwhile, unless it asks for it, and the
    interpreter's end waits for it.
    """
    return _start(target, args, name, quiet=True)


def start_loud(target: Callable[..., object], *args: object, name: str) -> threading.Thread:
    """Start a daemon thread that may collect: one that hardly ever works while the model trains. It waits
    in `waiting`.
    """
    return _start(target, args, name, quiet=False)


def _start(
    target: Callable[..., object], args: tuple[object, ...], name: str, *, quiet: bool
) -> threading.Thread:
    def run() -> None:
        nonlocal target, args
        _enter(quiet)
        _this.quiet = quiet
        try:
            target(*args)
        finally:
            del target, args  # as long as it works: they may be the last to hold tensors, or a store
            _leave(quiet)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def quietly(wait: Callable[..., Result], *args: object) -> Result:
    """Call a function that waits, on a quiet thread; other threads may collect meanwhile.

    Args:
        wait: written in C, and allocates no container: ``lock.acquire``, ``queue.SimpleQueue().get``. Nothing
            of torch: the interpreter may end meanwhile.
    """
    _leave(True)
    try:
        return wait(*args)
    finally:
        _enter(True)


def may_end_here() -> None:
    """Between two of several operations that belong together: the interpreter need not wait for the rest. On
    a thread that is none of these it does nothing.
    """
    quiet = _this.quiet
    if quiet is not None:
        _leave(quiet)
        _enter(quiet)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """The body waits, on a thread of `start_loud`, and calls nothing of torch: the interpreter may end
    meanwhile. On another thread it does nothing.
    """
    if _this.quiet is not False:
        yield
        return
    _leave(False)
    try:
        yield
    finally:
        _enter(False)


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
