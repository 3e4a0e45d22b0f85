"""Look at a descriptor of this process that somebody else may close at any time: what has its
number is held for as long as one looks.

The number of a closed descriptor is given to the next one that is opened. So a copy is made first
(`dup`), and everything is asked of that copy. The copy takes the place of a descriptor that was
kept for it: it can be made where there are no free ones, which is when connections have to be ended
most of all.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Pin"]


class Pin:
    """Any thread; one looks at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._place = os.dup(self._nothing)

    @contextmanager
    def hold(self, fd: int) -> Iterator[socket.socket]:
        """The socket that has this number now.

        Raises:
            OSError: nothing has it, or something that is no socket.
        """
        with self._lock:
            os.dup2(fd, self._place, inheritable=False)
            try:
                connection = socket.socket(fileno=self._place)
                try:
                    yield connection
                finally:
                    connection.detach()
            finally:
                os.dup2(self._nothing, self._place, inheritable=False)

    def close(self) -> None:
        """Nobody looks any more."""
        with self._lock:
            os.close(self._place)
            os.close(self._nothing)
