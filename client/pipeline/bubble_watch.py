"""Bubbles of a schedule of ``torch.distributed.pipelining``: watched on this rank, and used for its copies.

A rank of a pipeline is in a bubble while its schedule waits for messages of other stages. Hooks note when it
enters and leaves such a wait, and how long its actions take: two readings of the host's clock each. So this
is for ranks that compute on CPU; on a device the host is ahead, and does not know when the device waits.

``CopyPacer`` lets the copy thread begin a piece while the rank waits, and holds it while the rank computes,
as long as the copy can be complete before the optimizer's step (`ckptd.core.bubbles` has the arithmetic).

Puts to peers go in bubbles, too: while the rank computes, it asks its daemon for a quiet network, unless a
peer lags behind. The daemon holds puts for half a second at most.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from ckptd.client.model.hooks import layered
from ckptd.client.pipeline.stage_hooks import SCHEDULES, stages_of
from ckptd.core.bubbles import (
    UNIT_DURATIONS,
    ActionKind,
    GapMeter,
    PipelineAction,
    RankBubbles,
    by_kind,
    gpipe_orders,
    one_f_one_b_orders,
    parse_actions,
    rank_bubbles,
    split_bytes,
)

# A shorter gap is not worth waking a thread that takes 0.1 ms to begin and may be in a piece at its end.
_SHORTEST_S = 1e-3
# A schedule that waits less than that is one without bubbles.
_LEAST_FRACTION = 0.01
# Of a bubble, and of the time until the optimizer's step: gaps and rates vary.
_USED = 0.9
_CAUTION = 1.5

# All waits of a schedule for messages go through it (torch 2.13); a version without it is not watched.
_WAIT = "_wait_batch_p2p"


class Unwatchable(ValueError):
    """There are no bubbles in which copies could run; the message says why."""


def orders_of(schedule: Any) -> dict[int, tuple[PipelineAction, ...]]:
    """The actions of each rank of a schedule's pipeline.

    Schedules with several stages on a rank have lists. Those with one run their order without one; what
    torch 2.13 lists for 1F1B lacks a forward of the last stage.

    Raises:
        Unwatchable: the actions of such a schedule are not known.
    """
    names = [base.__name__ for base in type(schedule).__mro__]
    for name, orders in (("ScheduleGPipe", gpipe_orders), ("Schedule1F1B", one_f_one_b_orders)):
        if name in names:
            return orders(int(schedule._num_stages), int(schedule._n_microbatches))
    listed = getattr(schedule, "pipeline_order", None)
    if not isinstance(listed, Mapping) or not listed:
        raise Unwatchable(f"the actions of a {type(schedule).__name__} are not known")
    return {int(rank): parse_actions(actions) for rank, actions in listed.items()}


class CopyPacer:
    """Says when the copy thread may copy the next piece; thread-safe.

    The bytes that exceed what fits into bubbles are copied at once, beside training. The others wait for
    bubbles, as long as the rest can still be copied before the optimizer's step.

    Args:
        gaps_s: the bubbles of an iteration that may be used.
        window_s: from the begin of a copy to the optimizer's step, as a rule.

    Attributes:
        enabled: False: copies are not paced.
        bytes_inside: copied in bubbles so far.
    """

    def __init__(
        self,
        gaps_s: Callable[[], list[float]],
        window_s: Callable[[], float],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._gaps_s, self._window_s, self._clock = gaps_s, window_s, clock
        self._changed = threading.Condition()
        self._open = self._hurried = False
        self._left = self._outside = 0
        self._until_s = 0.0
        self._rate = 0.0
        self.enabled = False
        self.bytes_inside = 0

    def begin(self) -> None:
        """A copy begins (training thread)."""
        with self._changed:
            self._hurried = False
            self._until_s = self._clock() + _USED * self._window_s()

    def plan(self, total_bytes: int) -> None:
        """It has so many bytes (copy thread). Training may be waiting for them already."""
        with self._changed:
            _, self._outside = split_bytes(total_bytes, self._gaps_s(), _USED * self._rate)
            self._left = total_bytes

    def admit(self, size_bytes: int) -> None:
        """Return when a piece of this size may be copied (copy thread)."""
        with self._changed:
            while not (self._open or self._hurried):
                if self._outside > 0:
                    self._outside -= size_bytes
                    break
                patience_s = self._until_s - self._clock() - _CAUTION * self._left / max(self._rate, 1.0)
                if patience_s <= 0:
                    self._hurried = True
                    break
                self._changed.wait(patience_s)
            self.bytes_inside += size_bytes if self._open else 0
            self._left -= size_bytes

    def copied(self, size_bytes: int, seconds: float) -> None:
        """A whole copy took so long, without the time in which it was held (copy thread)."""
        if size_bytes and seconds > 0:
            now = size_bytes / seconds
            self._rate = now if not self._rate else self._rate + (now - self._rate) / 4

    def hurry(self) -> None:
        """Training waits for the copy: hold nothing (any thread)."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Nobody watches bubbles any more (any thread)."""
        self.enabled = False
        self.hurry()

    def bubble(self, is_open: bool) -> None:
        """A bubble begins or ends (training thread)."""
        with self._changed:
            self._open = is_open
            if is_open:
                self._changed.notify_all()


class BubbleWatch:
    """Notes what this rank does in its schedule, and opens the pacer in its bubbles.

    Call ``top`` at the top of each iteration. Everything but the pacer belongs to the training thread.

    Args:
        schedule: of ``torch.distributed.pipelining``.
        quiet: asks the daemon to let puts to peers wait (True), or takes that back.
    Raises:
        ValueError: it is no such schedule.
        Unwatchable: it has no bubbles, or cannot be watched.
    """

    def __init__(
        self,
        schedule: Any,
        window_s: Callable[[], float],
        clock: Callable[[], float] = time.perf_counter,
        quiet: Callable[[bool], object] = bool,
    ) -> None:
        self._name, self._clock = type(schedule).__name__, clock
        self._quiet, self._holds_puts = quiet, False
        self._stages = _stages_of_schedule(schedule)
        self._orders = orders_of(schedule)
        mine = {int(stage.stage_index) for stage in self._stages}
        self._rank = next((r for r, o in self._orders.items() if mine & {a.stage for a in o}), -1)
        try:
            predicted = self._predict(UNIT_DURATIONS)
        except ValueError as error:
            raise Unwatchable(f"{self._name}: {error}") from error
        if predicted is None or predicted.fraction < _LEAST_FRACTION:
            raise Unwatchable(f"{self._name} with {len(self._orders)} rank(s) has no bubbles on this one")
        self._meter = GapMeter(len(predicted.gaps_s))
        self._took: dict[ActionKind, deque[float]] = {}
        self._periods: deque[float] = deque(maxlen=9)
        self._top_s: float | None = None
        self._last_s = 0.0
        self._gaps: list[float] = [0.0]
        self.pacer = CopyPacer(self._usable, window_s, clock)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Watch in the body."""
        hooks = {
            "forward_one_chunk": lambda kwargs: ActionKind.FORWARD,
            "backward_one_chunk": lambda kwargs: (
                ActionKind.BACKWARD if kwargs.get("full_backward", True) else ActionKind.BACKWARD_INPUT
            ),
            "backward_weight_one_chunk": lambda kwargs: ActionKind.BACKWARD_WEIGHT,
        }
        with ExitStack() as stack:
            for stage in self._stages:
                for name, kind_of in hooks.items():
                    if hasattr(stage, name):
                        stack.enter_context(layered(stage, name, self._acting(kind_of)))
            stack.enter_context(layered(sys.modules[SCHEDULES], _WAIT, self._waiting))
            stack.callback(self._hold_puts, False)
            stack.callback(self.pacer.stop)
            yield

    def top(self, *, lagging: bool = False) -> None:
        """An iteration begins.

        Args:
            lagging: a peer has too little time for its puts.
        """
        now = self._clock()
        if self._top_s is not None and self._meter.note(self._gaps[:-1]):
            self._periods.append(self._last_s - self._top_s)
        self._gaps, self._top_s = [0.0], now
        self._hold_puts(self.pacer.enabled and not lagging and bool(self._usable()))

    def _hold_puts(self, holds: bool) -> None:
        """From here on puts to peers go in bubbles only, or at any time."""
        if holds or self._holds_puts:
            self._quiet(holds)
        self._holds_puts = holds

    def _bubble(self, is_open: bool) -> None:
        self.pacer.bubble(is_open)
        if self._holds_puts:
            self._quiet(not is_open)

    def _acting(self, kind_of: Callable[[dict[str, Any]], ActionKind]) -> Callable[..., Any]:
        def acting(below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            started = self._clock()
            try:
                return below(*args, **kwargs)
            finally:
                self._last_s = self._clock()
                kind = kind_of(kwargs)
                self._took.setdefault(kind, deque(maxlen=64)).append(self._last_s - started)
                if len(self._gaps) <= self._meter.num_actions + 1:  # no top comes in a replay
                    self._gaps.append(0.0)

        return acting

    def _waiting(self, below: Callable[..., Any], works: Any) -> Any:
        if not works:
            return below(works)
        number = len(self._gaps) - 1
        expected = self._meter.gaps_s
        opens = self.pacer.enabled and number < len(expected) and expected[number] >= _SHORTEST_S
        started = self._clock()
        if opens:
            self._bubble(True)
        try:
            return below(works)
        finally:
            if opens:
                self._bubble(False)
            self._gaps[-1] += self._clock() - started

    def _usable(self) -> list[float]:
        """Gaps that are worth a piece."""
        return [gap for gap in self._meter.gaps_s if gap >= _SHORTEST_S]

    def _predict(self, seconds: Mapping[ActionKind, float]) -> RankBubbles | None:
        return rank_bubbles(self._orders, by_kind(seconds), steady=True).get(self._rank)

    @property
    def predicted_fraction(self) -> float:
        """The part of an iteration that is bubble, by the schedule and this rank's durations of actions."""
        found = self._predict(self._durations())
        return found.fraction if found is not None else 0.0

    def _durations(self) -> Mapping[ActionKind, float]:
        """Medians of what this rank measured: other stages are taken to be like its own."""
        seconds = {kind: statistics.median(took) for kind, took in self._took.items()}
        return seconds if ActionKind.FORWARD in seconds and len(seconds) > 1 else UNIT_DURATIONS

    @property
    def measured_fraction(self) -> float:
        """The part of an iteration that this rank waited for other stages; 0: not measured yet."""
        return sum(self._meter.gaps_s) / statistics.median(self._periods) if self._periods else 0.0

    @property
    def bytes_inside(self) -> int:
        """Copied in bubbles so far."""
        return self.pacer.bytes_inside

    def describe(self) -> str:
        """One line: how much of an iteration is bubble."""
        measured = f"{self.measured_fraction:.1%} measured" if self._periods else "not measured yet"
        return f"bubbles of {self._name}: {self.predicted_fraction:.1%} predicted, {measured}"


def _stages_of_schedule(schedule: Any) -> list[Any]:
    if not hasattr(schedule, "_n_microbatches"):
        raise ValueError(
            f"copy_in_bubbles({type(schedule).__name__}): pass a schedule of torch.distributed.pipelining"
        )
    if not hasattr(sys.modules.get(SCHEDULES), _WAIT):
        raise Unwatchable("this version of torch hides when its schedules wait")
    return stages_of(schedule)
