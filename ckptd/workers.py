"""A bounded pool of threads whose results are delivered on the thread that collects them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Job:
    task: Callable[[], Any]
    done: Callable[[Any], None]
    failed: Callable[[BaseException], None]
    result: Any = None
    error: BaseException | None = None


class Workers:
    """Threads for work that may take long; the submitting thread calls `collect` after each wake.

    Args:
        wake: called from a worker when a result waits; must be safe from any thread.
        limit: how many jobs may wait or run at a time.
    """

    def __init__(self, name: str, threads: int, limit: int, wake: Callable[[], None]) -> None:
        self._limit = limit
        self._wake = wake
        self._todo: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(threads)
        ]
        self.pending = 0
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        task: Callable[[], Any],
        done: Callable[[Any], None],
        failed: Callable[[BaseException], None],
    ) -> bool:
        """Run ``task`` on a worker, then ``done`` or ``failed`` in `collect`; false if the pool is full."""
        if self.pending >= self._limit:
            return False
        self.pending += 1
        self._todo.put(_Job(task, done, failed))
        return True

    def collect(self) -> None:
        """Deliver every result that waits."""
        while True:
            try:
                job = self._finished.get_nowait()
            except queue.Empty:
                return
            self.pending -= 1
            if job.error is not None:
                job.failed(job.error)
            else:
                job.done(job.result)

    def close(self, timeout_s: float) -> None:
        """End the threads after their current jobs; those that take longer are left behind."""
        for _ in self._threads:
            self._todo.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (job := self._todo.get()) is not None:
            try:
                job.result = job.task()
            # The pool must survive any job; `failed` gets the error.
            except Exception as error:  # noqa: BLE001
                job.error = error
            self._finished.put(job)
            self._wake()
