"""A progress line for long operations on a terminal; prints nothing elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from ckptd.printable import one_line
from ckptd.units import format_age, format_bytes

__all__ = ["ProgressBar", "progress_line"]

_EVERY_S = 0.1
_BAR_CELLS = 24
_CLEAR = "\r\x1b[K"
_RATE_AFTER_S = 0.5  # earlier, a rate is too noisy to show


class ProgressBar:
    """Shown on ``stream`` (stderr) if that is a terminal and ``quiet`` is not set; erased after the block.

    Called by one thread at a time.

    Args:
        what: name of the operation, in a few words.
        total_bytes: total size of the operation; 0 if not known.
    """

    def __init__(
        self,
        what: str,
        total_bytes: int = 0,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total_bytes = one_line(what), total_bytes
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._shown = not quiet and self._stream.isatty()
        self._began_s = clock()
        self._next_s = self._began_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._shown:
            self._write(_CLEAR)

    def update(self, done_bytes: int) -> None:
        """Report that ``done_bytes`` of the total are done."""
        now_s = self._clock()
        if not self._shown or now_s < self._next_s:
            return
        self._next_s = now_s + _EVERY_S
        width = shutil.get_terminal_size().columns
        elapsed_s = now_s - self._began_s
        line = progress_line(self._what, done_bytes, self._total_bytes, elapsed_s)
        self._write(_CLEAR + line[: width - 1])

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def progress_line(what: str, done_bytes: int, total_bytes: int, elapsed_s: float) -> str:
    """A bar if the total is known, the bytes done, the rate and the time left."""
    rate = done_bytes / elapsed_s if elapsed_s > _RATE_AFTER_S else 0.0
    speed = f", {format_bytes(int(rate))}/s" if rate else ""
    if not total_bytes:
        return f"{what}: {format_bytes(done_bytes)}{speed}"
    done = min(done_bytes, total_bytes)
    full = _BAR_CELLS * done // total_bytes
    bar = "#" * full + "." * (_BAR_CELLS - full)
    left = f", {format_age((total_bytes - done) / rate)} left" if rate else ""
    amount = f"{format_bytes(done)} of {format_bytes(total_bytes)}"
    return f"{what} [{bar}] {100 * done // total_bytes} %, {amount}{speed}{left}"
