"""The loop of a host: one thread that sleeps until a descriptor is ready or a timer has run out.

A timer is known by what it calls: the same function has one timer at most.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable
from typing import Protocol


class Watched(Protocol):
    """A socket, or an object that has one."""

    def fileno(self) -> int: ...


class HostLoop:
    """Descriptors and timers, and what is called for each."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: dict[Callable[[], None], float] = {}

    def watch(self, source: Watched | int, act: Callable[[], None], *, writable: bool = False) -> None:
        """Call ``act`` each time the source can be read (or written to), until `forget`."""
        self._selector.register(source, selectors.EVENT_WRITE if writable else selectors.EVENT_READ, act)

    def forget(self, source: Watched | int) -> None:
        """Watch it no longer; before it is closed. Nothing to do for one that is not watched."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Call ``act`` once, that many seconds from now; replaces its last timer."""
        self._timers[act] = time.monotonic() + seconds

    def cancel(self, act: Callable[[], None]) -> None:
        """Its timer, if there is one, does not run out."""
        self._timers.pop(act, None)

    def is_timed(self, act: Callable[[], None]) -> bool:
        """Whether it has a timer."""
        return act in self._timers

    def turn(self) -> None:
        """Sleep until something happens, and act on it."""
        for key, _ in self._selector.select(self._wait_s()):
            if self._selector.get_map().get(key.fd) is key:  # nothing before has forgotten it
                key.data()
        now = time.monotonic()
        for act in [act for act, at in self._timers.items() if at <= now]:
            if self._timers.pop(act, None) is not None:
                act()

    def _wait_s(self) -> float | None:
        if not self._timers:
            return None
        return max(0.0, min(self._timers.values()) - time.monotonic())

    def close(self) -> None:
        """No descriptor is closed but the loop's own."""
        self._selector.close()
