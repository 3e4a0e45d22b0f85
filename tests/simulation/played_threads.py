"""Real threads of which one runs at a time, on a played clock: for code of the product that blocks.

A thread goes on until it pauses; so who goes on next is decided by the world's clock and its seed alone. A
process that is killed ends all of its threads where they pause, as a SIGKILL would: `Ended` passes every
``except Exception``.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, Self

__all__ = [
    "Clock",
    "Ended",
    "PlayedLock",
    "PlayedPool",
    "PlayedThreading",
    "PlayedTime",
    "Process",
    "Threads",
]


class Clock(Protocol):
    """What a world offers."""

    now_s: float

    def later(self, delay_s: float, what: Callable[[], None]) -> None: ...

    def skips(self, delay_s: float) -> bool:
        """Go on to that time, if nothing happens before; whether it did."""


class Ended(BaseException):
    """The process of this thread was killed."""


class Process:
    """One life of a process; it may be stopped for a while."""

    def __init__(self) -> None:
        self.alive = True
        self.stopped_s = 0.0  # until then it does nothing
        self.threads: dict[_Thread, None] = {}


class _Worker(threading.Thread):
    """A thread of the system, for one played thread after another: to begin one costs more than a request."""

    def __init__(self, idle: list[_Worker]) -> None:
        super().__init__(daemon=True)
        self._idle = idle
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self.task: Callable[[], None] | None = None
        self.start()

    def run(self) -> None:
        self._go.acquire()
        while self.task is not None:
            self.task()
            self.task = None
            self._idle.append(self)
            self.wait()

    def resume(self) -> None:
        self._go.release()
        self._back.acquire()

    def wait(self) -> None:
        self._back.release()
        self._go.acquire()

    def end(self) -> None:
        """It has no task, and gets none any more."""
        self._go.release()
        self.join()


class _Thread:
    def __init__(self, threads: Threads, process: Process, work: Callable[[], object]) -> None:
        self.process, self._threads, self._work = process, threads, work
        self._worker: _Worker | None = None  # None: it has not begun
        self.error: BaseException | None = None
        process.threads[self] = None

    def _run(self) -> None:
        try:
            self._work()
        except Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - it is raised again by `resume`
            self.error = error
        finally:
            self.process.threads.pop(self, None)

    def resume(self) -> None:
        """Let it run until it pauses or ends."""
        if self._worker is None:
            if not self.process.alive:
                self.process.threads.pop(self, None)
                return
            self._worker = self._threads.worker()
            self._worker.task = self._run
        before, self._threads.current = self._threads.current, self
        self._worker.resume()
        self._threads.current = before
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        assert self._worker is not None
        self._worker.wait()


class Threads:
    """All threads of a world."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.current: _Thread | None = None
        self._idle: list[_Worker] = []

    def worker(self) -> _Worker:
        return self._idle.pop() if self._idle else _Worker(self._idle)

    def close(self) -> None:
        """No thread runs any more."""
        while self._idle:
            self._idle.pop().end()

    def start(self, process: Process, work: Callable[[], object]) -> None:
        """Soon."""
        thread = _Thread(self, process, work)
        self.clock.later(0.0, lambda: self.wake(thread))

    def pause(self, seconds: float) -> None:
        """The thread that is running waits so long; if there is none, nothing happens.

        Raises:
            Ended: its process was killed meanwhile.
        """
        if (thread := self.current) is None:
            return
        process = thread.process
        goes_on = process.alive and process.stopped_s <= self.clock.now_s + seconds
        if goes_on and self.clock.skips(seconds):
            return  # the world would wake this thread next, so no other one need run meanwhile
        self.clock.later(seconds, lambda: self.wake(thread))
        self.wait()

    def wait(self) -> None:
        """The thread that is running waits until somebody wakes it; as `pause`."""
        thread = self.current
        assert thread is not None, "the world would wait for ever"
        if thread.process.alive:
            thread.wait()
        if not thread.process.alive:
            raise Ended

    def kill(self, process: Process) -> None:
        """All of its threads end where they are; not to be called by one of them."""
        process.alive = False
        for thread in list(process.threads):
            thread.resume()

    def wake(self, thread: _Thread) -> None:
        """It goes on; later if its process is stopped."""
        process = thread.process
        if thread not in process.threads:
            return  # it was killed
        if process.stopped_s > self.clock.now_s:
            self.clock.later(process.stopped_s - self.clock.now_s, lambda: self.wake(thread))
        else:
            thread.resume()


class PlayedPool:
    """`concurrent.futures.ThreadPoolExecutor`, as far as the store keeper uses it."""

    def __init__(self, threads: Threads, process: Process, most: int) -> None:
        self._threads, self._process, self._most = threads, process, most
        self._waiting: deque[Callable[[], object]] = deque()
        self._running = 0

    def submit(self, work: Callable[..., object], *args: object) -> None:
        self._waiting.append(lambda: work(*args))
        if self._running < self._most and self._process.alive:
            self._running += 1
            self._threads.start(self._process, self._work)

    def map(self, work: Callable[[Any], Any], *items: Iterable[Any]) -> Iterator[Any]:
        return iter([work(*each) for each in zip(*items, strict=False)])

    def _work(self) -> None:
        while self._waiting:
            self._waiting.popleft()()
        self._running -= 1


class PlayedLock:
    """`threading.Lock`; who waits for it lets others run."""

    def __init__(self, threads: Threads) -> None:
        self._threads, self._held = threads, False
        self._waiting: list[_Thread] = []

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> Self:
        while self._held:
            assert self._threads.current is not None, "the world would wait for ever"
            self._waiting.append(self._threads.current)
            self._threads.wait()
        self._held = True
        return self

    def __exit__(self, *_: object) -> None:
        self._held = False
        if self._waiting:
            thread = self._waiting.pop(0)
            self._threads.clock.later(0.0, lambda: self._threads.wake(thread))


class PlayedThreading:
    """The module ``threading``, as far as the store keeper uses it."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    def Lock(self) -> PlayedLock:
        return PlayedLock(self._threads)

    def Timer(self, seconds: float, work: Callable[[], object]) -> _Timer:
        assert self._threads.current is not None
        return _Timer(self._threads, self._threads.current.process, seconds, work)


class _Timer:
    daemon = False

    def __init__(
        self, threads: Threads, process: Process, seconds: float, work: Callable[[], object]
    ) -> None:
        self._threads, self._process = threads, process
        self._seconds, self._work = seconds, work

    def start(self) -> None:
        self._threads.clock.later(self._seconds, self._ring)

    def _ring(self) -> None:
        if self._process.alive:
            self._work()


class PlayedTime:
    """The modules ``time`` and ``secrets``, as far as the store keeper uses them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._numbers = itertools.count(1)

    def monotonic(self) -> float:
        return self._clock.now_s

    def token_hex(self, size: int) -> str:
        return f"{next(self._numbers):0{2 * size}x}"
