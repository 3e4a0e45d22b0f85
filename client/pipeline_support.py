"""The boundaries of pipeline stages: their log, and isolated stages after a localized restart.

In every other job none of this exists, and each call returns at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ckptd.client.capture.comparison import Differences
from ckptd.client.capture.recorder import Recorder
from ckptd.client.capture.stage_shapes import StageShapes
from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.identity import Identity
from ckptd.client.log_lines import get_logger
from ckptd.client.model.communication import Communication
from ckptd.client.pipeline.boundary_log import BoundaryLog
from ckptd.client.pipeline.bubble_watch import BubbleWatch, Unwatchable
from ckptd.client.pipeline.isolated_stage import IsolatedStage
from ckptd.client.pipeline.stage_hooks import listen
from ckptd.client.recovery.localized_recovery import LocalizedStart, end_localized
from ckptd.client.stats import Stats
from ckptd.cuda.cuda_engine import make_engine
from ckptd.errors import DaemonUnavailable

logger = get_logger(__name__)


class PipelinePart:
    """The boundary log of this rank, and the ranks present in each iteration.

    Attributes:
        log: None while nothing is logged.
        start: a localized start, until all ranks run together again.
    """

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._isolated: IsolatedStage | None = None
        self._logged: frozenset[int] = frozenset()
        self._bubbles: BubbleWatch | None = None
        self._no_bubbles = ""
        self._wants_quiet: set[str] = set()
        self.log: BoundaryLog | None = None
        self.start: LocalizedStart | None = None

    # -- setting up ------------------------------------------------------------------------------

    def open_log(self, memory: RankMemory, device: torch.device, **options: Any) -> BoundaryLog:
        """Start to log; ``options`` are those of `BoundaryLog`."""
        self.log = BoundaryLog(
            memory,
            make_engine(device, inline=True),
            self._stats,
            communication=_watch_communication(memory.identity),
            **options,
        )
        self.log.isolated = self._isolated
        return self.log

    def listen_to(self, stages: list[Any], log: BoundaryLog) -> contextlib.ExitStack:
        """Log what these stages send, and feed isolated ones; closing the result undoes it.

        Raises:
            ValueError: some are logged already.
        """
        if twice := self._logged & {id(stage) for stage in stages}:
            raise ValueError(f"{len(twice)} of these stages are logged already")
        self._logged |= {id(stage) for stage in stages}
        undo = contextlib.ExitStack()
        undo.enter_context(listen(stages, log))
        if self._isolated is not None:
            # After the log, which must see what is dropped.
            self._isolated.stand_in_for(stages)
        return undo

    def want_quiet(self, memory: RankMemory, who: str, wanted: bool) -> None:
        """``who`` wants puts of this node's snapshots to wait, or does not any more."""
        (self._wants_quiet.add if wanted else self._wants_quiet.discard)(who)
        memory.table.ask_quiet(bool(self._wants_quiet))

    def copy_in_bubbles(
        self, schedule: Any, recorder: Recorder, memory: RankMemory, device: torch.device, *, always: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Copy and put while this schedule waits for other stages; closing the result undoes it.

        Raises:
            ValueError: it is no schedule, or copies cannot wait for bubbles by other settings.
        """
        if self._bubbles is not None:
            raise ValueError("copy_in_bubbles() was called before: one schedule of a rank is watched")
        try:
            watch = BubbleWatch(
                schedule,
                lambda: recorder.copy_window_s,
                quiet=partial(self.want_quiet, memory, "bubbles"),
            )
            if device.type != "cpu":
                raise Unwatchable("a device copies on a stream of its own, and the host is ahead of it")
        except Unwatchable as why:
            self._no_bubbles = f"copies run as without a pipeline: {why}"
            logger.info("%s", self._no_bubbles)
            return contextlib.nullcontext()
        recorder.use_bubbles(watch, always=always)
        self._bubbles = watch
        return watch.listening()

    def run_isolated(
        self, rank: int, start: LocalizedStart, stages: Mapping[int, StageShapes | None]
    ) -> dict[int, StageShapes]:
        """Some ranks begin before others.

        Args:
            rank: this one.
            stages: the recorded shapes of this rank's stages.
        Returns:
            The known shapes.
        Raises:
            DaemonUnavailable: a shape is unknown, and this rank runs without its neighbours, which its
                schedule would ask.
        """
        shapes = {int(index): found for index, found in stages.items() if found is not None}
        if start.mine.feeds and len(shapes) < len(stages):
            raise DaemonUnavailable(
                "what a stage sends is not known (DTensors?): it would ask its neighbours, which "
                "are not there",
                operation="run isolated",
                hint="the third start in a row recovers all ranks together",
            )
        self.start = start
        self._isolated = IsolatedStage(
            (),
            rank,
            start.plan.bases,
            start.plan.together,
            start.feeds,
            shapes=shapes,
            shared=start.values,
        )
        return shapes

    # -- at the boundaries of steps --------------------------------------------------------------

    def begin(self, step: int, *, replaying: bool) -> None:
        """The body of a step begins."""
        if self.log is not None:
            self.log.begin(step, replaying=replaying)

    def end(self) -> Differences:
        """The body ended; returns what a replayed one sent otherwise than before."""
        return Differences() if self.log is None else self.log.end()

    def abandon(self) -> None:
        """The body was left before its update."""
        if self.log is not None:
            self.log.abandon()

    def end_localized(self, step: int, memory: RankMemory, wait: Callable[[], object]) -> None:
        """The top of a step; at the first one that all ranks run again, ``wait`` joins them.

        Raises:
            ValueError: nobody feeds this rank: boundaries are not logged in this life.
            DaemonUnavailable: not all ranks came in time.
        """
        start = self.start
        if start is None:
            return
        if step < start.plan.resume:
            if start.mine.feeds and self.log is None:
                raise ValueError(
                    f"this rank runs iterations {start.mine.start} to {start.plan.resume - 1} without its "
                    "neighbours, but their logs have nowhere to go: call ckpt.log_boundaries(schedule) or "
                    "ckpt.boundary_log() before the loop, as in the run before"
                )
            return
        self.start = None
        wait()
        end_localized(memory, start)
        text = f"all ranks run together again from iteration {start.plan.resume} on"
        logger.info("%s", text)
        if memory.identity.rank == 0:
            memory.session.notice("info", "together", text)

    def aside(self) -> contextlib.AbstractContextManager[object]:
        """Messages sent in the body belong to no step."""
        return contextlib.nullcontext() if self.log is None else self.log.aside()

    # -- the rest --------------------------------------------------------------------------------

    def describe(self) -> list[str]:
        """Lines for ``Checkpointer.describe``."""
        lines = [] if self.log is None else [self.log.describe(), *self.log.describe_domain()]
        bubbles = self._no_bubbles if self._bubbles is None else self._bubbles.describe()
        return [*lines, bubbles] if bubbles else lines

    def close(self) -> None:
        """Stop logging."""
        if self.log is not None:
            self.log.close()
            self.log = None


def _watch_communication(identity: Identity) -> Communication | None:
    """None if ranks differ from those of the process group, whose numbers are seen."""
    if identity.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return None
    here = (identity.rank, identity.world_size)
    return Communication() if here == (dist.get_rank(), dist.get_world_size()) else None
