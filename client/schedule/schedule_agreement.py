"""This rank's part in agreeing on changes of the schedule: a thread beside training asks the job's
store, training asks nobody.

What is said when is decided by ``ckptd.core.schedules.switching``; here is the thread that says it,
and the lock between the two.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ckptd.client.log_lines import get_logger
from ckptd.client.ranks.store_agreement import play
from ckptd.client.ranks.store_barrier import own_connection
from ckptd.core.schedules.registers import accesses
from ckptd.core.schedules.switching import (
    Ask,
    Change,
    Effect,
    Event,
    LookForAttempt,
    Prepared,
    RequestFailed,
    Stage,
    Switching,
    Unable,
)
from ckptd.errors import LocalProtocolError

__all__ = ["ScheduleAgreement"]

logger = get_logger(__name__)

# Between two looks while nothing is open, and while something is; each rank looks, and one store
# serves them all: it answers some 20,000 small requests per second.
_IDLE_S, _OPEN_S = 1.0, 0.1
_RANKS_PER_S = 4_000
_ANSWER_S = 10.0
_RETRY_S, _RETRY_MAX_S, _TOLD_OUTAGES = 0.5, 30.0, 3
# A promise leaves time for so many looks of everybody.
_MARGIN_LOOKS = 10
_PATIENCE_S, _APART_S, _APART_MAX_S = 120.0, 10.0, 600.0


class ScheduleAgreement:
    """Agreements of one rank in one epoch.

    Args:
        find_store: gives the job's store; called in the thread, again after it has failed.
        prefix: equal on all ranks, and new after each restart of the job.
        machine: for tests: with other delays.
    """

    def __init__(
        self,
        find_store: Callable[[], Any],
        *,
        prefix: str,
        world_size: int,
        machine: Switching | None = None,
    ) -> None:
        self._find_store, self._prefix, self._world_size = find_store, prefix, world_size
        self._machine = machine or Switching(
            patience_s=_PATIENCE_S, apart_s=_APART_S, apart_max_s=_APART_MAX_S
        )
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._open_s = max(_OPEN_S, world_size / _RANKS_PER_S)
        self._outages = 0
        threading.Thread(target=self._run, name="ckptd-switch", daemon=True).start()

    # -- training ------------------------------------------------------------------------------------

    def wish(self, change: Change) -> bool:
        """Propose a change, beside training; False if another one is open or was a moment ago."""
        margin_s = _MARGIN_LOOKS * self._open_s
        with self._lock:
            return self._machine.wish(change, margin_s=margin_s, now_s=time.monotonic())

    def boundary(self, step: int, *, iteration_s: float) -> list[Effect]:
        """The top of ``step``, before its snapshot: what is to be done now."""
        with self._lock:
            return self._machine.boundary(step, iteration_s=iteration_s)

    def knows(self, step: int) -> bool:
        """Whether this rank may snapshot ``step``."""
        with self._lock:
            return self._machine.knows(step)

    def prepared(self, number: int) -> None:
        """This rank could go over."""
        self._tell(Prepared(number))

    def unable(self, number: int, why: str) -> None:
        """This rank cannot go over."""
        self._tell(Unable(number, why))

    def close(self) -> None:
        """Take part no more. Whatever is open comes to nothing, unless all have promised."""
        self._closed.set()

    def _tell(self, event: Event) -> None:
        with self._lock:
            self._machine.handle(event, now_s=time.monotonic())

    # -- beside training -----------------------------------------------------------------------------

    def _run(self) -> None:
        store = None
        while not self._closed.is_set():
            with self._lock:
                ask = self._machine.ask(time.monotonic())
            if ask is None:
                self._closed.wait(self._open_s)
                continue
            try:
                if store is None:
                    store = own_connection(self._find_store(), answer_s=_ANSWER_S)
                event = play(store, self._prefix, accesses(ask, self._world_size))
                if event is not None:
                    self._tell(event)
            except LocalProtocolError as error:
                logger.error("the ranks cannot agree on changes any more: %s", error)
                return
            except Exception as error:  # noqa: BLE001 - see the next line
                # The store ends with the job, in as many ways as there are backends.
                store = None
                self._failed(ask, error)
                continue
            self._answers()
            if event is None:
                self._closed.wait(self._pause_s(ask))

    def _pause_s(self, ask: Ask) -> float:
        if isinstance(ask, LookForAttempt):
            return max(_IDLE_S, self._world_size / _RANKS_PER_S)
        return self._open_s

    def _failed(self, ask: Ask, error: Exception) -> None:
        self._tell(RequestFailed())
        self._outages += 1
        doubt = self._machine.stage is Stage.PROMISED
        # While nothing is open it may just be the end of the job: told if it lasts for some seconds.
        if self._outages == (1 if doubt else _TOLD_OUTAGES) and not self._closed.is_set():
            kept = (
                "whether the schedule changes is open, and no snapshots are taken until it answers"
                if doubt
                else "the schedule stays as it is"
            )
            logger.error("the job's store did not answer (%s): %s; %s", type(ask).__name__, error, kept)
        self._closed.wait(min(_RETRY_S * 2 ** min(self._outages, 10), _RETRY_MAX_S))

    def _answers(self) -> None:
        if self._outages >= _TOLD_OUTAGES:
            logger.info("the job's store answers again")
        self._outages = 0
