"""How fast runs go, and how long trainers wait for ckptd, from one answer of the daemon to the next. Pure."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ckptd.transport import messages as m

RunName = tuple[str, str]  # job and run

_KEPT_S = 300.0
_POINTS = 300
_STEPS = 60


@dataclass(frozen=True, slots=True)
class RunPace:
    """How fast a run goes, and how long it waits.

    Args:
        step_s: seconds per iteration; 0: not known yet.
        stalls: points, oldest first: unix time, milliseconds of stall per iteration, and the share of time
            that this is; both of the rank that waited longest.
    """

    step_s: float = 0.0
    stalls: tuple[tuple[float, float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class _Counted:
    at_s: float
    steps: float
    stall_ms: float


class PaceHistory:
    """Counters of trainers over the last minutes."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, str, int], _Counted] = {}
        self._steps: dict[RunName, deque[tuple[float, int]]] = defaultdict(lambda: deque(maxlen=_STEPS))
        self._stalls: dict[RunName, deque[tuple[float, float, float]]] = defaultdict(
            lambda: deque(maxlen=_POINTS)
        )

    def add(self, sessions: Sequence[m.SessionStatus], at_s: float) -> None:
        """Take in the trainers' newest counters."""
        live = {(s.job, s.run, s.rank) for s in sessions}
        self._counted = {key: value for key, value in self._counted.items() if key in live}
        ordered = sorted(sessions, key=lambda s: (s.job, s.run))
        for name, group in groupby(ordered, key=lambda s: (s.job, s.run)):
            ranks = list(group)
            self._add_step(name, max(s.step for s in ranks), at_s)
            points = [point for s in ranks if (point := self._stall(s, at_s))]
            if points:
                self._stalls[name].append((at_s, *max(points)))
        for name in [n for n, points in self._stalls.items() if points[-1][0] < at_s - _KEPT_S]:
            del self._stalls[name]
        for name in [n for n in self._steps if n not in {key[:2] for key in live}]:
            del self._steps[name]

    def _add_step(self, name: RunName, step: int, at_s: float) -> None:
        steps = self._steps[name]
        if steps and step < steps[-1][1]:
            steps.clear()  # the run was resumed at an earlier iteration
        if not steps or step > steps[-1][1]:
            steps.append((at_s, step))

    def _stall(self, session: m.SessionStatus, at_s: float) -> tuple[float, float] | None:
        """Milliseconds per iteration and the share of time since the last report; None without a new one."""
        key, metrics = (session.job, session.run, session.rank), session.metrics
        now = _Counted(at_s, metrics.get("steps", 0.0), metrics.get("stall_ms_sum", 0.0))
        before = self._counted.get(key)
        if not math.isfinite(now.steps) or (before is not None and now.steps == before.steps):
            return None
        self._counted[key] = now
        if before is None or now.steps < before.steps or at_s <= before.at_s:
            return None  # the first report of a process
        # A trainer may report anything; of a number that is none, max() returns the other one.
        waited_ms = min(max(0.0, now.stall_ms - before.stall_ms), _KEPT_S * 1e3)
        share = waited_ms / 1e3 / (at_s - before.at_s)
        return round(waited_ms / (now.steps - before.steps), 4), round(share, 6)

    def paces(self) -> dict[RunName, RunPace]:
        """Of every run with a trainer now or in the last minutes."""
        return {
            name: RunPace(self._step_s(name), tuple(self._stalls.get(name, ())))
            for name in self._steps.keys() | self._stalls.keys()
        }

    def _step_s(self, name: RunName) -> float:
        steps = self._steps.get(name)
        if not steps or len(steps) < 2:
            return 0.0
        return (steps[-1][0] - steps[0][0]) / (steps[-1][1] - steps[0][1])
