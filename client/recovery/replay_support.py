"""What a `Checkpointer` does after a restart: see the replay through in the user's own loop.

In every other step nothing of this is there, and each call returns at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from ckptd.client.capture.comparison import Differences
from ckptd.client.recovery.replay import Replay
from ckptd.client.recovery.start import Resumption
from ckptd.client.stats import Stats

__all__ = ["ReplayPart"]


class ReplayPart:
    """The replay that runs, if one does.

    Attributes:
        replay: None where the state is dense.
        cut_off: the checkpointer was closed in the middle of it.
    """

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._found: Resumption | None = None
        # Apart from `replay`: one of a single snapshot is over at the first top, and its first
        # forward comes then.
        self._unforwarded: Replay | None = None
        self._began_s = 0.0
        self.replay: Replay | None = None
        self.cut_off = False

    @property
    def frozen(self) -> bool:
        """Whether part of the operators is."""
        return self.replay is not None and not self.replay.dense

    @property
    def before_first_forward(self) -> bool:
        """Whether the first forward of a resumed run is still to come."""
        return self._unforwarded is not None

    def span(self, step: int) -> tuple[int, int]:
        """The step with which a loop begins that would begin with ``step``, and how far this run
        has come (-1: not known).
        """
        replay = self.replay
        return (step, -1) if replay is None or replay.begun else (replay.start, replay.end)

    def check_whole(self) -> None:
        """The model is not in the middle of a replay that was given up.

        Raises:
            ValueError: it is.
        """
        if self.cut_off:
            raise ValueError(
                "this Checkpointer was closed in the middle of a replay: part of the model is not restored; "
                "create a new one, which begins the replay again"
            )

    # -- after a restart -------------------------------------------------------------------------

    def resume(self, found: Resumption) -> None:
        """What was found is loaded; its replay begins at the loop's first top."""
        self._found = found
        self.replay = self._unforwarded = found.replay

    def top(self, step: int, sent: Differences) -> bool:
        """The top of a step; whether it is one of a replay.

        Args:
            sent: what the step before sent to other stages otherwise than when it ran first.
        Raises:
            ReplayMismatch: what was recomputed is not what was recorded, on any rank.
        """
        replay = self.replay
        if replay is not None and not replay.begun:
            # The first step after a restore: the loop, and the iterators it needs, exist now.
            replay.begin_first_step()
            self._began_s = time.perf_counter()
        elif replay is not None and step == replay.next_iteration:
            self._stats.replayed_steps += step - replay.reached
            assert self._found is not None
            self._found.verification.advance(replay, sent)
        return replay is not None

    def end(self) -> Resumption | None:
        """The state is dense: what was resumed, where this replay came of a restart."""
        self.replay = None
        found, self._found = self._found, None
        if found is not None:
            found.verification.reproduced()
        return found

    @property
    def took_s(self) -> float:
        """Since the first step of the replay began."""
        return time.perf_counter() - self._began_s

    # -- in a step -------------------------------------------------------------------------------

    def before_optimizer_step(self) -> None:
        """Weights are about to change."""
        if self.replay is not None:
            self.replay.before_optimizer_step()

    def after_optimizer_step(self, optimizer: int) -> None:
        """Optimizer number ``optimizer`` has updated its parameters."""
        if self.replay is not None:
            self.replay.after_optimizer_step(optimizer)

    def first_forward(self) -> None:
        """A forward of a step is about to run; the first one is told."""
        replay, self._unforwarded = self._unforwarded, None
        if replay is not None:
            replay.first_forward()

    # -- beside it -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def instead(self, replay: Replay) -> Iterator[None]:
        """The steps of the body are those of another replay, which is given up at the end."""
        self.replay = self._unforwarded = replay
        try:
            yield
        finally:
            replay.abandon()
            self.replay = self._unforwarded = None

    def abandon(self) -> None:
        """The patches of a replay must not outlive it, and what is still frozen is not the run's state."""
        if self.replay is not None:
            self.replay.abandon()
            self.replay = self._unforwarded = None
            self.cut_off = True
