"""SIGTERM parks first, and then has its usual effect.

While the main thread hangs in a collective of a lost rank, no Python handler runs. The C handler does: it
writes the signal's number to the wakeup descriptor, which a thread of ours reads. When all have parked, the
process ends as it would have: by the default action, which the thread triggers, or by the user's handler,
which runs in the main thread as soon as that can. A second SIGTERM does not wait. A previous owner of the
wakeup descriptor still gets every byte.

A forked child (a data loader's worker) has the previous handlers, and no wakeup descriptor: its signals do
not concern us.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from ckptd.client.log_lines import get_logger
from ckptd.client.parking.parker import PATIENCE_S, Parked, Parking

logger = get_logger(__name__)

_NUMBER = signal.SIGTERM
_LOOK_S = 0.05


class _Sigterm:
    """This process' SIGTERM while any rank parks; the process has one, so there is one instance."""

    def __init__(self) -> None:
        self._parkings: list[Parking] = []
        self._pid = os.getpid()
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._previous: Any = None
        self._previous_fd = -1
        self._settled = threading.Event()
        self._masks = threading.local()
        self._knows_forks = False

    def add(self, parking: Parking) -> str:
        """Park this one, too (main thread); returns why that is impossible, or ""."""
        if not self._sockets and (why := self._install()):
            return why
        self._parkings.append(parking)
        return ""

    def remove(self, parking: Parking) -> None:
        """Do not park it any more; after the last one, everything is as before the first."""
        if parking in self._parkings and os.getpid() == self._pid:
            self._parkings.remove(parking)
            # In another thread the handler stays, and has the previous effect.
            if not self._parkings and threading.current_thread() is threading.main_thread():
                self._uninstall()

    # -- installing (main thread) ----------------------------------------------------------------

    def _install(self) -> str:
        if threading.current_thread() is not threading.main_thread():
            return "handlers can be installed in the main thread only"
        previous = signal.getsignal(_NUMBER)
        if previous is None:
            return "it has a handler that is not of Python"
        if previous == signal.SIG_IGN:
            return "it is ignored"
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._pid, self._previous = os.getpid(), previous
        self._sockets, self._settled = (reader, writer), threading.Event()
        self._previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        signal.signal(_NUMBER, self._on_signal)
        if not self._knows_forks:
            self._knows_forks = True
            os.register_at_fork(
                before=self._before_fork,
                after_in_parent=self._after_fork,
                after_in_child=self._after_fork_in_child,
            )
        threading.Thread(target=self._listen, args=(reader,), name="ckptd-term", daemon=True).start()
        return ""

    def _uninstall(self) -> None:
        assert self._sockets is not None
        writer = self._sockets[1]
        if signal.getsignal(_NUMBER) == self._on_signal:
            signal.signal(_NUMBER, self._previous)
        now = signal.set_wakeup_fd(-1)
        ours = now == writer.fileno()
        _set_wakeup_fd(self._previous_fd if ours else now)
        self._sockets = None
        writer.close()  # the thread reads the end, closes the reader, and ends

    def _before_fork(self) -> None:
        """Block SIGTERM: until its clean-up, the child would write its own to our descriptor."""
        if self._sockets is not None and os.getpid() == self._pid:
            self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {_NUMBER})

    def _after_fork(self) -> None:
        before = getattr(self._masks, "before", None)
        if before is not None:
            self._masks.before = None
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _after_fork_in_child(self) -> None:
        if self._sockets is not None:
            if signal.getsignal(_NUMBER) == self._on_signal:
                signal.signal(_NUMBER, self._previous)
            _set_wakeup_fd(-1)
            for end in self._sockets:
                end.close()
            self._sockets = None
            self._parkings.clear()
        self._after_fork()

    # -- the signal ------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The handler, in the main thread, if that can run. Our thread triggers the default action."""
        self._make_heard(number)
        if callable(self._previous):
            self._wait_for_copies()
            self._previous(number, frame)

    def _make_heard(self, number: int) -> None:
        """Pass the signal to our thread if another wakeup descriptor (asyncio's, say) replaced ours."""
        if self._sockets is None:
            return
        writer = self._sockets[1]
        now = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if now != writer.fileno():
            _set_wakeup_fd(now)
            writer.send(bytes([number]))

    def _wait_for_copies(self) -> None:
        """Park before the user's handler, which may end this process at once; bounded."""
        waits = any(p.possible or p.copying for p in self._parkings)
        # The signal may have interrupted the lock that the thread would wait for.
        if waits and not any(p.locked for p in self._parkings):
            self._settled.wait(PATIENCE_S)

    def _listen(self, reader: socket.socket) -> None:
        reader.settimeout(None)
        while data := reader.recv(64):
            self._pass_on(data)
            if _NUMBER in data:
                try:
                    self._park_all(reader)
                except Exception:
                    logger.exception("parking before SIGTERM")  # the signal must have its effect
                self._settled.set()
                self._end()
        reader.close()

    def _pass_on(self, data: bytes) -> None:
        if self._previous_fd < 0:
            return
        try:
            os.write(self._previous_fd, data)
        except OSError as error:  # full or closed: for its owner to notice, as without us
            logger.debug("the wakeup descriptor of before takes nothing: %s", error)

    def _park_all(self, reader: socket.socket) -> None:
        """Wait until all have parked or refused, or a second SIGTERM arrives."""
        waiting = list(self._parkings)

        def one_of(parking: Parking) -> Callable[[Parked], None]:
            return lambda outcome: waiting.remove(parking)

        for parking in list(waiting):
            if not parking.ask("SIGTERM", one_of(parking)):
                waiting.remove(parking)
        reader.settimeout(_LOOK_S)
        until = time.monotonic() + 3 * PATIENCE_S
        while waiting and time.monotonic() < until:
            try:
                data = reader.recv(64)
            except TimeoutError:
                continue
            self._pass_on(data)
            if not data or _NUMBER in data:
                break
        reader.settimeout(None)

    def _end(self) -> None:
        """Trigger the default action, if there was no other handler."""
        if self._previous == signal.SIG_DFL and signal.getsignal(_NUMBER) == self._on_signal:
            # Python lets only the main thread set handlers, and that hangs.
            ctypes.CDLL(None).signal(int(_NUMBER), ctypes.c_void_p(0))
            os.kill(os.getpid(), _NUMBER)


_process = _Sigterm()


def park_on_sigterm(parking: Parking) -> Callable[[], None]:
    """Park before SIGTERM ends this process; returns what undoes it. Logs once why that is impossible."""
    why = _process.add(parking)
    if why:
        logger.warning("SIGTERM will not park: %s", why)
        return lambda: None
    return lambda: _process.remove(parking)


def _set_wakeup_fd(fd: int) -> None:
    try:
        signal.set_wakeup_fd(fd)
    except (ValueError, OSError) as error:  # it was closed meanwhile
        logger.debug("the wakeup descriptor of before is gone: %s", error)
        signal.set_wakeup_fd(-1)
