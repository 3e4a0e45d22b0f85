"""Watching processes: who waits for the end of a trainer is called back on the daemon's loop thread."""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Callable, Container
from typing import Protocol

import zmq

__all__ = ["PidWatcher", "PidfdWatcher"]

logger = logging.getLogger(__name__)


class PidWatcher(Protocol):
    """Tells the service when a process ends."""

    def watch(self, pid: int, ended: Callable[[], None]) -> bool:
        """Call `ended` once when the process ends; false if it cannot be watched."""

    def has_ended(self, pid: int) -> bool:
        """Has a watched process ended, even if `ended` was not called yet?"""

    def forget(self, pid: int) -> None:
        """No longer call."""


class PidfdWatcher:
    """Learns of the end of any process of this user, child or not, through its pidfd."""

    def __init__(self, poller: zmq.Poller) -> None:
        self._poller = poller
        self._by_fd: dict[int, tuple[int, list[Callable[[], None]]]] = {}
        self._by_pid: dict[int, int] = {}

    def watch(self, pid: int, ended: Callable[[], None]) -> bool:
        """Call `ended` once when the process ends; false if it cannot be watched."""
        if pid not in self._by_pid:
            try:
                fd = os.pidfd_open(pid)
            except OSError as error:  # gone already, another namespace, or an old kernel
                logger.info("process %d cannot be watched: %s", pid, error)
                return False
            self._by_pid[pid] = fd
            self._by_fd[fd] = (pid, [])
            self._poller.register(fd, zmq.POLLIN)
        self._by_fd[self._by_pid[pid]][1].append(ended)
        return True

    def has_ended(self, pid: int) -> bool:
        """Has a watched process ended?"""
        fd = self._by_pid.get(pid)
        if fd is None:
            return False
        now = select.poll()  # not select(): the descriptor may be beyond its 1024
        now.register(fd, select.POLLIN)
        return bool(now.poll(0))

    def forget(self, pid: int) -> None:
        """No longer watch; nothing happens if it was not watched."""
        fd = self._by_pid.pop(pid, None)
        if fd is not None:
            del self._by_fd[fd]
            self._poller.unregister(fd)
            os.close(fd)

    def run(self, ready: Container[object], call: Callable[[Callable[[], None]], None]) -> None:
        """Have everybody called back who waits for a process that has ended."""
        for fd in [fd for fd in self._by_fd if fd in ready]:
            pid, callbacks = self._by_fd[fd]
            self.forget(pid)
            for ended in callbacks:
                call(ended)
