"""Threads that work off what training hands over: the session with the daemon has two."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ckptd.client.log_lines import get_logger
from ckptd.errors import DaemonUnavailable

__all__ = ["LOOK_S", "WorkerThread"]

logger = get_logger(__name__)
T = TypeVar("T")

LOOK_S = 0.5
_QUEUE_LIMIT = 1024


class WorkerThread:
    """One thread that works off a bounded queue, and calls ``look`` after each piece of work and
    about twice a second.
    """

    def __init__(
        self,
        name: str,
        look: Callable[[], None],
        failed: Callable[[Exception], None],
        closed: threading.Event,
    ) -> None:
        self._look, self._failed, self._closed = look, failed, closed
        self._work: queue.Queue[tuple[Callable[[], Any], Future[Any] | None]] = queue.Queue(_QUEUE_LIMIT)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, work: Callable[[], Any]) -> bool:
        """Have ``work`` done; False if the queue is full (the work is dropped)."""
        try:
            self._work.put_nowait((work, None))
        except queue.Full:
            return False
        return True

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Have ``work`` done and its result kept.

        Raises:
            DaemonUnavailable: the queue is full.
        """
        future: Future[T] = Future()
        try:
            self._work.put_nowait((work, future))
        except queue.Full as error:
            raise DaemonUnavailable("session", hint="its queue is full") from error
        return future

    def call(self, work: Callable[[], T], timeout_s: float) -> T:
        """Have ``work`` done and wait for its result."""
        return self.begin(work).result(timeout_s)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                work, future = self._work.get(timeout=LOOK_S)
            except queue.Empty:
                pass
            else:
                self._perform(work, future)
            self._look_around()
        self._look_around()

    def _look_around(self) -> None:
        try:
            self._look()
        except Exception:
            logger.exception("in the session's thread")  # it must live: snapshots are finished here

    def _perform(self, work: Callable[[], Any], future: Future[Any] | None) -> None:
        try:
            result = work()
        # The work is the caller's: the thread must survive it and hand the error back.
        except Exception as error:
            self._failed(error)
            if future is not None:
                future.set_exception(error)
            else:
                logger.exception("in the session's thread")
        else:
            if future is not None:
                future.set_result(result)
