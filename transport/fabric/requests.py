"""Control messages to one peer that are not answered yet.

A request is WAITING for its connection, then SENT, and ends with an answer, at its deadline, or
when the connection breaks: it is sent at most once, and whether the peer acted on it is not known
then. All on the fabric's thread but `tell`.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ckptd.transport.verbs import Answered, Fault

__all__ = ["PendingRequest", "Requests"]

logger = logging.getLogger(__name__)

MAX_REQUESTS = 4096
FULL_RETRY_S = 0.01


@dataclass(slots=True)
class PendingRequest:
    """``answered`` is called once."""

    body: bytes
    answered: Answered
    deadline_at: float
    sent: bool = False

    def tell(self, outcome: bytes | Fault) -> None:
        try:
            self.answered(outcome)
        except Exception:  # a user's callback: the loop that carries all transfers must survive it
            logger.exception("the callback of a request failed")


class Requests:
    """Those of one peer, in the order in which they were made."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._requests: dict[int, PendingRequest] = {}
        self._unsent: deque[int] = deque()

    @property
    def wait_for_a_connection(self) -> bool:
        return bool(self._unsent)

    def add(self, request: PendingRequest) -> None:
        if len(self._requests) >= MAX_REQUESTS:
            request.tell(Fault.DEADLINE)  # the peer has answered none of so many
            return
        number = next(self._numbers)
        self._requests[number] = request
        self._unsent.append(number)

    def send(self, send: Callable[[int, bytes], bool]) -> float:
        """Send what waits, by ``send``, which says whether there was room; seconds until this is
        worth a retry.
        """
        while self._unsent:
            number = self._unsent[0]
            request = self._requests.get(number)
            if request is not None:
                if not send(number, request.body):
                    return FULL_RETRY_S
                request.sent = True
                request.body = b""
            self._unsent.popleft()
        return float("inf")

    def expire(self, now_s: float) -> None:
        self._end_those(Fault.DEADLINE, lambda request: now_s >= request.deadline_at)

    def due_s(self, now_s: float) -> float:
        """Seconds until the first deadline."""
        deadlines = (request.deadline_at for request in self._requests.values())
        return min(deadlines, default=float("inf")) - now_s

    def connection_lost(self) -> None:
        """What was sent is not sent again."""
        self._end_those(Fault.DEADLINE, lambda request: request.sent)

    def end(self, fault: Fault) -> None:
        self._unsent.clear()
        self._end_those(fault, lambda request: True)

    def replied(self, number: int, body: bytes) -> None:
        """An answer; nothing happens if the request ended before."""
        request = self._requests.pop(number, None)
        if request is not None:
            request.tell(body)

    def _end_those(self, fault: Fault, which: Callable[[PendingRequest], bool]) -> None:
        for number, request in list(self._requests.items()):
            if which(request):
                del self._requests[number]
                request.tell(fault)
