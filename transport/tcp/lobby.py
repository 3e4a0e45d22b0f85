"""Where connections to the data port wait until they have said their first bytes: one thread for
all, and nothing else is read.

Who says them is handed on; who does not, or comes when there are too many, is closed (`Admission`).
Those that may come because they were given a ticket have places of their own.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ckptd.transport.access.admission import Admission, AdmissionLimits, TurnedAway, source_of
from ckptd.transport.access.doorkeeper import TOLD
from ckptd.transport.access.refusals import RefusalLog
from ckptd.transport.tcp import streams

__all__ = ["Lobby", "Visit"]

logger = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 64
ACCEPT_RETRY_S = 0.2  # no descriptors left, say
LOOK_S = 1.0


@dataclass(slots=True, eq=False)
class Visit:
    """One connection, and what it has said so far."""

    connection: socket.socket
    source: str
    said: bytearray = field(default_factory=bytearray)


class Lobby:
    """Listens from `start` to `close`.

    Args:
        first_bytes: how many a visitor has to say.
        expected: how many may come from an address because they have tickets.
        enter: called on the lobby's thread with a visit that is complete. Returns whose it is, and
            what to call then: from there on its connection is the callee's, which calls `gone` in
            the end. Or None: it is nobody's, and was closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        limits: AdmissionLimits,
        refusals: RefusalLog,
        *,
        first_bytes: int,
        expected: Callable[[str], int],
        enter: Callable[[Visit], tuple[str, Callable[[], None]] | None],
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._refusals = refusals
        self._first_bytes = first_bytes
        self._expected = expected
        self._enter = enter
        self._lock = threading.Lock()
        self._admission = Admission(limits)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lobby", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Listen no more, and send everybody away who waits."""
        self._closed.set()
        streams.shut(self._listener)  # wakes the thread
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join()
        self._listener.close()

    def gone(self, visit: Visit) -> None:
        """A connection that was handed on is closed. Any thread."""
        with self._lock:
            self._admission.gone(visit)

    # --- the thread ---

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                due_s = self._admission.due_s(time.monotonic())
            try:
                for key, _ in self._selector.select(min(due_s, LOOK_S)):
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._hear(key.data)
                with self._lock:
                    turned = self._admission.overdue(time.monotonic())
                self._turn(turned)
            except Exception:  # the thread's main: nobody gets in without it
                logger.exception("looking after new streams failed")
                self._closed.wait(ACCEPT_RETRY_S)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Visit):
                key.data.connection.close()
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if not self._closed.wait(ACCEPT_RETRY_S):
                    self._refusals.refused("descriptors", "", f"a stream was not accepted: {error}")
                return
            connection.setblocking(False)
            visit = Visit(connection, source_of(address[0]))
            self._selector.register(connection, selectors.EVENT_READ, visit)
            expected = self._expected(visit.source)
            with self._lock:
                turned = self._admission.arrived(
                    visit, visit.source, now_s=time.monotonic(), expected=expected
                )
            self._turn(turned)

    def _hear(self, visit: Visit) -> None:
        if visit.connection.fileno() < 0:
            return  # turned away in the same round
        try:
            said = visit.connection.recv(self._first_bytes - len(visit.said))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        visit.said += said
        if said and len(visit.said) < self._first_bytes:
            return
        self._selector.unregister(visit.connection)
        if not said:
            self._leave(visit)
            text = f"on the data port: {len(visit.said)} bytes that do not begin a stream"
            self._refusals.seen(text, visit.source)
            return
        visit.connection.setblocking(True)
        entered = self._enter(visit)
        if entered is None:
            self.gone(visit)
            return
        node, begin = entered
        with self._lock:
            turned = self._admission.identified(visit, node)
        begin()
        self._turn(turned)

    def _leave(self, visit: Visit) -> None:
        visit.connection.close()
        self.gone(visit)

    def _turn(self, turned: list[TurnedAway]) -> None:
        for each in turned:
            visit = each.visitor
            assert isinstance(visit, Visit)
            self._refusals.stranger(each.reason, each.source, TOLD[each.reason])
            try:
                self._selector.unregister(visit.connection)
            except (KeyError, ValueError):
                streams.shut(visit.connection)  # it was handed on: its owner closes it
            else:
                self._leave(visit)
