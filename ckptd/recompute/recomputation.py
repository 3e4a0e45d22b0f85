"""The daemon's side of the process that computes snapshots from gradients
(`ckptd.recompute.recompute_worker`).

The process is started when a peer offers gradients for the first time, ends when nobody has for long, and
is started again after it died. While it starts, and where it cannot (torch is not there, or broken),
snapshots come whole, and the reason goes to the peer that offered. All methods are called on the daemon's
loop thread, and all callbacks run there; one thread talks with the process, so requests come one after the
other.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckptd.node_context import NodeContext
from ckptd.workers import Workers

_COMMAND = (sys.executable, "-m", "ckptd.recompute.recompute_worker")
_WAITING = 1024
_START_S = 180.0  # importing torch takes seconds, on a busy machine much longer
_AGAIN_S, _AGAIN_MAX_S = 60.0, 3840.0  # after an end that nobody asked for; twice as long after the next
_IDLE_S = 600.0
_LAST_WORDS_BYTES = 64 << 10
_CLOSE_S = 5.0


class _Gone(Exception):
    """The process does not answer any more; the text says why."""


class _TooLate(Exception):
    """Others took the time of a request, which has not begun; the text says so."""


@dataclass(frozen=True, slots=True)
class PlacedSnapshot:
    """A slot of a segment file and its snapshot; ``offset`` in bytes from the beginning of the file."""

    offset: int
    image_len: int
    iteration: int
    sequence: int

    def as_dict(self) -> dict[str, int]:
        """For the process."""
        return {name: getattr(self, name) for name in ("offset", "image_len", "iteration", "sequence")}


class _Life:
    """One process. All that talks with it or ends it runs on its thread, one after the other."""

    def __init__(self, command: Sequence[str]) -> None:
        self._words = os.memfd_create("ckptd-recompute", os.MFD_CLOEXEC)
        self._rest, self._gone = b"", ""
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                start_new_session=True,  # a Ctrl-C at the daemon's terminal is for the daemon alone
            )
        except OSError:
            os.close(self._words)
            raise

    def ask(self, line: bytes, timeout_s: float, until_s: float) -> dict[str, Any]:
        """Write a line, and return the answer. A process that does not answer as it should is ended: what
        it says later is no answer to the next request.

        Args:
            until_s: of the monotonic clock. Half of ``timeout_s`` must be left, so that a process is not
                ended for the time that others took.
        Raises:
            _TooLate, _Gone
        """
        if self._gone:
            raise _Gone(self._gone)
        if until_s - time.monotonic() < timeout_s / 2:
            raise _TooLate("snapshots before it took too long")
        try:
            return self._ask(line, until_s)
        except _Gone as error:
            self.end(str(error))
            raise

    def _ask(self, line: bytes, until_s: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            if line:
                self.process.stdin.write(line + b"\n")
                self.process.stdin.flush()
            answer = json.loads(self._read_line(until_s))
        except OSError as error:
            raise _Gone(self._last_words(str(error))) from error
        except ValueError as error:
            raise _Gone(f"its answer is no JSON: {error}") from error
        if not isinstance(answer, dict):
            raise _Gone("its answer is no object")
        return answer

    def _read_line(self, until_s: float) -> bytes:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while b"\n" not in self._rest:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                raise _Gone("it did not answer in time, and was killed")
            read = os.read(fd, 65536)
            if not read:
                raise _Gone(self._last_words("it ended"))
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _last_words(self, otherwise: str) -> str:
        """The last line of its standard error."""
        size = os.fstat(self._words).st_size
        start = max(0, size - _LAST_WORDS_BYTES)
        lines = os.pread(self._words, size - start, start).decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), otherwise)

    def end(self, why: str = "it was ended") -> None:
        """Kill it, if it is not gone already."""
        if self._gone:
            return
        self._gone = why
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what it did not read any more
                pipe.close()
        self.process.wait()
        os.close(self._words)


class Recomputation:
    """Computes snapshots from gradients in a process of its own.

    Args:
        command: starts the process.
        idle_s: after so many seconds without a request it ends.
    """

    def __init__(
        self, node: NodeContext, *, command: Sequence[str] = _COMMAND, idle_s: float = _IDLE_S
    ) -> None:
        self._node, self._command, self._idle_s = node, command, idle_s
        self._workers: Workers | None = None
        self._life: _Life | None = None
        self._starting = False
        self._why = self._said = ""
        self._again_s = _AGAIN_S
        self._not_before_s = self._used_s = 0.0
        self._closed = False

    @property
    def pid(self) -> int:
        """The process id; 0 if it does not run."""
        return 0 if self._life is None else self._life.process.pid

    def why_not(self) -> str:
        """Why nothing can be computed now; "": it can be. Starts the process if it does not run."""
        now_s = self._node.clock()
        self._used_s = now_s
        if self._life is not None and not self._starting:
            waits = self._workers is not None and self._workers.pending > 1
            return "other snapshots wait to be computed" if waits else ""
        if not self._starting and not self._closed and now_s >= self._not_before_s:
            self._start()
        return "its process for this is starting" if self._starting else self._why

    def compute(
        self,
        path: str,
        slot_bytes: int,
        base: PlacedSnapshot,
        slot: PlacedSnapshot,
        *,
        timeout_s: float,
        done: Callable[[int], None],
        failed: Callable[[str], None],
    ) -> None:
        """Fill in a slot from its gradients; ``done(computed bytes)`` or ``failed(reason)`` is called later.

        Args:
            path: the segment file with both slots, which must not change meanwhile.
            timeout_s: from now on. A process that computes for so long, or for half as long after it waited
                for others, is ended.
        """
        told = {"path": path, "slot_bytes": slot_bytes, "base": base.as_dict(), "slot": slot.as_dict()}
        life, workers = self._life, self._workers
        if life is None or workers is None or self._starting:
            self._node.post(partial(failed, "its process for this is not running"))
            return

        def answered(answer: dict[str, Any]) -> None:
            if "failed" in answer:
                failed(str(answer["failed"])[:4000])
            else:
                self._said, self._again_s = "", _AGAIN_S
                done(int(answer.get("computed_bytes", 0)))

        def gone(error: BaseException) -> None:
            if isinstance(error, _TooLate):
                failed(str(error))
                return
            self._over(life, error)
            failed(f"its process for this is gone: {error}")

        ask = partial(life.ask, json.dumps(told).encode(), timeout_s, time.monotonic() + timeout_s)
        if not workers.submit(ask, answered, gone):
            self._node.post(partial(failed, "too many snapshots wait to be computed"))

    def tick(self, now_s: float) -> None:
        """End a process that nobody needs."""
        idle = self._workers is not None and not self._workers.pending
        if self._life is not None and idle and now_s - self._used_s > self._idle_s:
            self._end()

    def close(self) -> None:
        """End the process, and wait for that (not for ever), so that it does not write to slots any more."""
        self._closed = True
        if self._life is not None:
            self._end()
        if self._workers is not None:
            self._workers.close(timeout_s=_CLOSE_S)

    def _end(self) -> None:
        life, self._life = self._life, None
        if life is not None and self._workers is not None:
            life.process.kill()  # its thread, which may wait for an answer, sees the end
            # Refused only while requests wait, whose failure ends it, too.
            self._workers.submit(life.end, lambda _: None, partial(self._node.failed, "ending a process"))

    # -- the process -----------------------------------------------------------------------------

    def _start(self) -> None:
        if self._workers is None:
            made = self._workers = Workers("recompute", 1, _WAITING, lambda: self._node.post(made.collect))
        try:
            life = self._life = _Life(self._command)
        except OSError as error:
            self._failed(f"cannot be started: {error}")
            return
        greeting = partial(life.ask, b"", _START_S, time.monotonic() + _START_S)
        over = partial(self._over, life)
        self._starting = self._workers.submit(greeting, self._started, over)
        if not self._starting:
            over(_Gone("too many requests wait for the one before"))

    def _started(self, greeting: dict[str, Any]) -> None:
        self._starting, self._why = False, ""
        text = f"a process with torch {greeting.get('torch')} computes snapshots from gradients"
        self._node.events.add("info", "recompute_started", text)

    def _over(self, life: _Life, error: BaseException) -> None:
        if life is not self._life:
            return
        self._end()  # if it is not the process that failed, but what was to be done
        self._starting = False
        self._failed(str(error))

    def _failed(self, reason: str) -> None:
        self._not_before_s = self._node.clock() + self._again_s
        self._again_s = min(2 * self._again_s, _AGAIN_MAX_S)
        self._why = f"its process for this does not run: {reason}"
        if reason != self._said:
            self._said = reason
            text = f"snapshots cannot be computed from gradients here, so they come whole: {reason}"
            self._node.events.add("warning", "recompute_unavailable", text)
