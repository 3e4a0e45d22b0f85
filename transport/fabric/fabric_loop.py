"""The thread of a fabric: one poller over its sockets, and a queue of calls from other threads.

``call`` hands a function to the thread, until `Loop.stop`; what was accepted is run, also while it stops.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

__all__ = ["Loop"]

logger = logging.getLogger(__name__)

MAX_WAIT_S = 60.0


class Loop:
    """Args:
    tick: called after each round with the time; returns the seconds until it should be called without news.
    last: called on the thread when it ends, once; nothing is accepted any more then.
    """

    def __init__(self, name: str, tick: Callable[[float], float], last: Callable[[], None]) -> None:
        self._tick = tick
        self._last = last
        self._lock = threading.Lock()
        self._calls: deque[Callable[[], None]] = deque()
        self._open = True
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        self._handlers: dict[zmq.Socket[bytes], Callable[[], None]] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, task: Callable[[], None]) -> bool:
        """Run it on the thread, soon; false if the loop was stopped. Any thread."""
        with self._lock:
            if not self._open:
                return False
            self._calls.append(task)
            if len(self._calls) == 1:
                os.eventfd_write(self._wake, 1)
            return True

    def stop(self) -> None:
        """Take no more calls, and end. Waits for the end, except on the thread itself."""
        with self._lock:
            if self._open:
                self._open = False
                os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def watch(self, socket: zmq.Socket[bytes], handler: Callable[[], None]) -> None:
        """Call ``handler`` whenever there is something to read. The loop's thread only."""
        self._handlers[socket] = handler
        self._poller.register(socket, zmq.POLLIN)

    def unwatch(self, socket: zmq.Socket[bytes]) -> None:
        if self._handlers.pop(socket, None) is not None:
            self._poller.unregister(socket)

    def _run(self) -> None:
        wait_s = 0.0
        while self._open:
            self._handle(self._poll(wait_s))
            self._run_calls()
            wait_s = self._guarded_tick()
        self._run_calls()
        self._last()
        with self._lock:  # `call` does not touch it any more: it is closed
            os.close(self._wake)

    def _poll(self, wait_s: float) -> list[tuple[zmq.Socket[bytes] | int, int]]:
        # Rounded up: a wait of less than a millisecond must not become a busy loop.
        wait_ms = 0 if wait_s <= 0 else int(min(wait_s, MAX_WAIT_S) * 1000) + 1
        return self._poller.poll(wait_ms)

    def _handle(self, events: list[tuple[zmq.Socket[bytes] | int, int]]) -> None:
        for source, _ in events:
            if isinstance(source, int):
                os.eventfd_read(self._wake)
            elif (handler := self._handlers.get(source)) is not None:
                self._guarded(handler)

    def _run_calls(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, deque()
        for task in calls:
            self._guarded(task)

    def _guarded(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception:  # all transfers of the node depend on this loop
            logger.exception("a fabric's event failed")

    def _guarded_tick(self) -> float:
        try:
            return self._tick(time.monotonic())
        except Exception:  # the same
            logger.exception("a fabric's tick failed")
            return 0.1
