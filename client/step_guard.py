"""Whatever goes wrong on our side of a step must not reach the user's loop."""

from __future__ import annotations

from collections.abc import Callable

from ckptd.client.capture.recorder import Recorder
from ckptd.client.daemon_link.session import Session
from ckptd.client.log_lines import get_logger
from ckptd.client.stats import Stats

__all__ = ["Guard"]

logger = get_logger(__name__)

_FAILURES_IN_A_ROW = 3


class Guard:
    """Runs our side of a step. What is sealed stays; after a few failures in a row training is left
    alone for the rest of the run.
    """

    def __init__(self, session: Session, stats: Stats) -> None:
        self._session, self._stats = session, stats
        self._failures = 0

    def run(self, recorder: Recorder, step: int, work: Callable[..., object], *args: object) -> bool:
        """Call ``work``. False: that failed once too often, and ``recorder`` has given up."""
        try:
            work(*args)
        except Exception as error:  # whatever it is, it is told, and training goes on
            self._failures += 1
            logger.error("snapshots failed at step %d (%d in a row)", step, self._failures, exc_info=error)
            text = f"step {step}: {type(error).__name__}: {error}"
            self._session.notice("error", "snapshot_failed", text)
            recorder.abort()
            self._stats.failed += 1
            if self._failures >= _FAILURES_IN_A_ROW:
                logger.error("no more snapshots are taken in this run; training goes on unprotected")
                recorder.give_up()
                return False
        else:
            if work == recorder.top:
                self._failures = 0
        return True
