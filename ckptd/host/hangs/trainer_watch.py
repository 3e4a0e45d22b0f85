"""A host watches its trainer: the page in which that shows how far it is, and what the kernel says of it."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptd.host.hangs.hang_inquiry import Position, TrainerState
from ckptd.host.hangs.step_watch import StepWatch
from ckptd.host.host_loop import HostLoop
from ckptd.host.host_options import HostOptions
from ckptd.progress_page import PAGE_VARIABLE, ProgressPage

logger = logging.getLogger(__name__)

Message = dict[str, Any]

_LOOK_S = 0.5
_STATE = re.compile(r"^State:\s+(\S)", re.MULTILINE)
_TRACER = re.compile(r"^TracerPid:\s+(\d+)", re.MULTILINE)


class TrainerWatch:
    """Tells the coordinator when the step of the trainer is overdue, and answers where the trainer is.

    Args:
        tell: the coordinator.
    """

    def __init__(self, options: HostOptions, loop: HostLoop, tell: Callable[[Message], None]) -> None:
        self._loop, self._tell = loop, tell
        self._steps = StepWatch(options.step_deadline_s)
        self._page: ProgressPage | None = None
        try:
            self._page = ProgressPage.make()
        except OSError as error:
            logger.warning("rank %d: hangs will not be noticed: %s", options.rank, error)
        self._pid, self._epoch = 0, 0

    @property
    def descriptors(self) -> list[int]:
        """That trainers inherit."""
        return [] if self._page is None else [self._page.descriptor]

    @property
    def environment(self) -> dict[str, str]:
        """What tells a trainer of them."""
        return {} if self._page is None else {PAGE_VARIABLE: str(self._page.descriptor)}

    def prepare(self, epoch: int, patience: int) -> None:
        """A trainer is to be started.

        Args:
            patience: deadlines count so many times.
        """
        self._epoch, self._steps.patience = epoch, patience
        if self._page is not None:
            self._page.reset()

    def begin(self, pid: int) -> None:
        """It was started."""
        self._pid = pid
        self._steps.begin_life(time.monotonic())
        if self._page is not None:
            self._loop.after(_LOOK_S, self._look)

    def end(self) -> None:
        """It has ended."""
        self._pid = 0
        self._loop.cancel(self._look)

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it."""
        return state_of(self._pid) is TrainerState.STOPPED

    def position(self) -> Position:
        """Where it is now."""
        state = state_of(self._pid)
        progress = self._steps.progress if self._page is None else self._page.read()
        if state is TrainerState.IN_STEP and not progress.running:
            state = TrainerState.OUTSIDE
        return Position(progress.step, progress.stage, state)

    def answer(self, inquiry: int) -> None:
        """Tell the coordinator where the trainer is."""
        self._tell({"told": "position", "inquiry": inquiry, **_as_message(self.position())})

    def _look(self) -> None:
        assert self._page is not None
        now_s = time.monotonic()
        if self._steps.look(self._page.read(), now_s):
            progress = self._steps.progress
            self._tell(
                {
                    "told": "overdue",
                    "epoch": self._epoch,
                    **_as_message(Position(progress.step, progress.stage)),
                    "idle_s": self._steps.idle_s(now_s),
                    "deadline_s": self._steps.deadline_s,
                }
            )
        self._loop.after(_LOOK_S, self._look)

    def close(self) -> None:
        """The page is needed no longer."""
        self.end()
        if self._page is not None:
            os.close(self._page.descriptor)
            self._page = None


def _as_message(position: Position) -> Message:
    return {"step": position.step, "stage": int(position.stage), "state": str(position.state)}


def state_of(pid: int) -> TrainerState:
    """What the kernel says of a process; 0: of none. In a step, as far as the kernel can know."""
    if not pid:
        return TrainerState.ENDED
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return TrainerState.ENDED
    tracer, state = _TRACER.search(status), _STATE.search(status)
    if tracer is not None and tracer[1] != "0":
        return TrainerState.TRACED
    if state is not None and state[1] == "T":
        return TrainerState.STOPPED
    return TrainerState.ENDED if state is not None and state[1] in "ZX" else TrainerState.IN_STEP
