"""The coordinator's part in finding out who hangs: it asks all hosts where their trainers are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ckptd.host.hangs.hang_inquiry import HangInquiry, Position, TrainerState
from ckptd.host.host_loop import HostLoop
from ckptd.progress_page import StepStage

logger = logging.getLogger(__name__)

Message = dict[str, Any]

# Hosts answer within milliseconds; one that takes longer than this is lost, or stopped.
_ANSWERS_S = 5.0


class JobHangs:
    """One inquiry at a time.

    Args:
        world_size: how many ranks there are now.
        ask: all hosts.
        judge: called with the step, the verdict, and whether a host did not answer: the epoch cannot go on.
    """

    def __init__(
        self,
        world_size: Callable[[], int],
        loop: HostLoop,
        ask: Callable[[Message], None],
        judge: Callable[[int, str, bool], None],
    ) -> None:
        self._world_size, self._loop, self._ask, self._judge = world_size, loop, ask, judge
        self._inquiry: HangInquiry | None = None
        self._number = 0

    def overdue(self, rank: int, message: Message) -> None:
        """A step of a rank is overdue."""
        if self._inquiry is not None:
            return
        self._number += 1
        self._inquiry = HangInquiry(
            self._world_size(),
            rank,
            _position(message),
            idle_s=float(message["idle_s"]),
            deadline_s=float(message["deadline_s"]),
        )
        self._loop.after(_ANSWERS_S, self._conclude)
        self._ask({"order": "report", "inquiry": self._number})

    def answered(self, rank: int, message: Message) -> None:
        """A host tells where its trainer is."""
        position = _position(message)
        if self._inquiry is None or int(message["inquiry"]) != self._number:
            return
        if self._inquiry.answer(rank, position):
            self._conclude()

    def cancel(self) -> None:
        """The epoch is over."""
        self._inquiry = None
        self._loop.cancel(self._conclude)

    def _conclude(self) -> None:
        inquiry = self._inquiry
        if inquiry is None:
            return
        self.cancel()
        if inquiry.settled:
            logger.info("step %d does not count as hanging: %s", inquiry.step, inquiry.settled)
        else:
            self._judge(inquiry.step, inquiry.verdict(), bool(inquiry.silent))


def _position(message: Message) -> Position:
    return Position(int(message["step"]), StepStage(int(message["stage"])), TrainerState(message["state"]))
