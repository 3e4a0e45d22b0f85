"""Asks for further generations of slots, one at a time: the daemon makes the memory while training goes on.

A generation is used from the boundary on at which it is there. Where there is none to be had, what
is complete stays recoverable, what comes is not protected, and it is tried again later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState
from ckptd.client.schedule.planner import note_prepared
from ckptd.client.schedule.snapshot_plan import SnapshotPlan
from ckptd.client.schedule.step_timing import StepTiming
from ckptd.client.stats import Stats
from ckptd.cuda.engine import CopyEngine
from ckptd.errors import AttachRefused, DaemonUnavailable

__all__ = ["RETRY_STEPS", "NewSlots"]

logger = get_logger(__name__)

RETRY_STEPS = 50


@dataclass(frozen=True, slots=True)
class _Asked:
    """What was asked for: slots of a plan, why, and whether snapshots go on without them."""

    plan: SnapshotPlan
    why: str
    slots: int
    optional: bool


class NewSlots:
    """Of one rank.

    Args:
        in_use: the plan that snapshots go by now; None: there are none yet.
        use: called when a generation is there: snapshots go by this plan from now on.

    Attributes:
        retry_at: the step from which on it is worth asking again.
        optional_at: the same for slots without which snapshots go on.
    """

    def __init__(
        self,
        binding: LiveState,
        memory: RankMemory,
        engine: CopyEngine,
        *,
        pace: StepTiming,
        stats: Stats,
        in_use: Callable[[], SnapshotPlan | None],
        use: Callable[[SnapshotPlan], None],
    ) -> None:
        self._binding, self._memory, self._engine = binding, memory, engine
        self._pace, self._stats = pace, stats
        self._in_use, self._use = in_use, use
        self._asked: _Asked | None = None
        self.retry_at = self.optional_at = 0

    @property
    def coming(self) -> bool:
        """Whether a generation is on its way."""
        return self._asked is not None

    @property
    def pending(self) -> bool:
        """Whether there are as many generations as may be.

        With several ranks one may hold what they agreed on, one what they may agree on next, and
        one the chain that is built.
        """
        most = 2 if self._memory.identity.world_size == 1 else 3
        return len(self._memory.table.segments) >= most

    def ask(
        self,
        plan: SnapshotPlan,
        step: int,
        why: str,
        *,
        slots: int | None = None,
        optional: bool = False,
    ) -> None:
        """Ask for a generation; it may be there at once.

        Args:
            slots: how many, if not as many as the plan has.
            optional: snapshots go on without it.
        """
        self._asked = _Asked(plan, why, slots or plan.num_slots, optional)
        self.collect(step)

    def collect(self, step: int) -> None:
        """Go over to the generation that was asked for, if it is there."""
        asked = self._asked
        if asked is None or self._memory.session.reserving:
            return
        try:
            self._reserve(asked)
        except TimeoutError as error:
            logger.info("new slots come later: %s", error)
            return
        except (AttachRefused, DaemonUnavailable) as error:
            self._refused(asked, step, error)
            return
        self._asked = None

    def forget(self) -> None:
        """What is on its way is not wanted any more."""
        self._asked = None

    def failed(self, step: int, why: str, error: Exception) -> None:
        """No new slots: it is told, and tried again later."""
        # A daemon that went away is worth another try as soon as it is back; a refusal is not.
        self.retry_at = step + (1 if isinstance(error, DaemonUnavailable) else RETRY_STEPS)
        kept = (
            "the last complete suffix is kept, newer steps are not protected"
            if self._in_use() is not None
            else "nothing is protected yet"
        )
        text = f"no slots ({why}): {error}; {kept}; trying again at step {self.retry_at}"
        logger.error("%s", text)
        self._memory.session.notice("error", "not_protected", text)

    def _reserve(self, asked: _Asked) -> None:
        started, plan = time.perf_counter(), asked.plan
        segment = self._memory.reserve(
            plan.slot_bytes,
            asked.slots,
            patient=self._in_use() is None,
            window=plan.schedule.window,
            num_operators=len(plan.operators),
            payload=plan.payload(self._binding),
        )
        self._engine.register(segment.memory, segment.regions())
        plan.num_slots = asked.slots
        self._use(plan)
        note_prepared(self._pace, self._stats, started)
        logger.info("protected once %d snapshots from here on are sealed", plan.policy.window)

    def _refused(self, asked: _Asked, step: int, error: Exception) -> None:
        self._asked = None
        plan = asked.plan
        if isinstance(error, AttachRefused) and plan.upload_slots:
            slots = asked.slots - plan.upload_slots
            plan.leave_no_room_for_uploads()
            logger.warning("no memory for slots that wait to be uploaded: %s", error)
            self.ask(plan, step, asked.why, slots=slots, optional=asked.optional)
        elif asked.optional:
            self.optional_at = step + RETRY_STEPS
            logger.info("%s: no memory for more slots (%s)", asked.why, error)
        else:
            self.failed(step, asked.why, error)
