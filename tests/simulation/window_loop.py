"""A simulated device, link, digest pool and training loop, under the real schedule planner and control of the window.

Time is that of the device; one iteration is one turn of `Loop.go_on`. What is real: `plan_schedule`, the
window control, and when either is asked. What is made up: the machine, by the numbers that were measured on an
H100 (bench/results/one_gpu_h100_202611.md) where there are any.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache

from ckptd.core.schedule import (
    HEADROOM_ESTIMATED,
    HEADROOM_MEASURED,
    least_loss_window,
    plan_schedule,
    worthwhile_window,
)
from ckptd.core.snapshot_policy import OperatorCost, OperatorKind, Schedule
from ckptd.core.window_control import SnapshotReading, WindowControl

__all__ = [
    "FIRST_RUN",
    "GB",
    "H100",
    "Control",
    "Loop",
    "Machine",
    "Past",
    "Shape",
    "Told",
    "best_window",
    "operators",
]

GB = 1e9
MAX_WINDOW = 64
SLACK_SLOTS = 2  # of a ring, beyond the window
MEASURED_STEPS = 6  # without a snapshot, before the first plan
COMPUTE_SHARE = 1 / 7  # bf16 weights of 14 bytes a parameter: weight, master, two moments


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates in GB/s.

    Attributes:
        capture: of the link, the share that copies beside training reach.
        digest: of all digest threads of the daemon together.
        seal: of the training thread, if it seals itself.
        make: at which new slots are made and pinned, beside training.
        slowdown: seconds by which an iteration takes longer for each second of copying, before copies count
            as waited for.
        noise: standard deviation of an iteration, as a share.
    """

    link: float = 55.0
    capture: float = 0.87
    digest: float = 24.0
    seal: float = 8.0
    make: float = 5.0
    slowdown: float = 0.0
    noise: float = 0.01


H100 = Machine()
# Fitted to the first run: iterations of 88 ms took 356 ms with 4 GB at each, for 136 ms of which the host waited.
FIRST_RUN = Machine(digest=8.0, seal=14.7, slowdown=1.5)


@dataclass(frozen=True, slots=True)
class Shape:
    """A job: GB of dense state, seconds of an iteration, and the part of it before the optimizer's step."""

    state_gb: float
    iteration_s: float
    before_optimizer: float = 0.75


@lru_cache
def operators(state_gb: float, count: int = 256) -> list[OperatorCost]:
    """Experts and layers of a model with bf16 weights and fp32 masters and moments; some are larger than others."""
    sizes = [1.0 + (i % 8 == 0) * 2.0 for i in range(count)]
    unit = state_gb * GB / sum(sizes)
    return [
        OperatorCost(
            str(i),
            OperatorKind.EXPERT,
            anchor_bytes=int(size * unit),
            compute_bytes=int(size * unit * COMPUTE_SHARE),
        )
        for i, size in enumerate(sizes)
    ]


class Control:
    """The control of today, for one rank: first by rates, then by what was measured."""

    def __init__(self, *, bound: float = 0.01) -> None:
        self.control = WindowControl(bound=bound, regular=True)
        self.misfit = False

    def budget(self, shape: Shape, machine: Machine) -> int:
        """Bytes of a snapshot of the first plan: what crosses the link before the optimizer's step."""
        return int(shape.before_optimizer * shape.iteration_s * machine.link * GB)

    def note(self, reading: SnapshotReading) -> None:
        self.control.note(reading)

    def wider(self, step: int, costs: list[OperatorCost], now: Schedule) -> Schedule | None:
        if not self.control.due(step):
            return None
        shortage = self.control.shortage()
        found = None if shortage is None else plan_for(costs, shortage.affordable_bytes, shortage.iteration_s)
        self.misfit |= found is not None and not found.fits
        helps = found is not None and found.window > now.window and found.peak_bytes < now.peak_bytes
        self.control.looked(step, in_vain=shortage is not None and not helps)
        return found if helps else None

    def changed(self) -> None:
        self.control.changed()


class Past(Control):
    """The control of the first run on a device: only waits of the host counted, of which there are none."""

    def wider(self, step: int, costs: list[OperatorCost], now: Schedule) -> Schedule | None:
        return None


def plan_for(costs: list[OperatorCost], budget_bytes: int, iteration_s: float = 0.0) -> Schedule:
    """The plan for this budget, as `make_plan` makes it."""
    otherwise = (
        least_loss_window(costs, 0, MAX_WINDOW, affordable_bytes=budget_bytes, iteration_s=iteration_s)
        if iteration_s
        else worthwhile_window(costs, 0, MAX_WINDOW)
    )
    tight = int((HEADROOM_MEASURED if iteration_s else HEADROOM_ESTIMATED) * budget_bytes)
    for budget, window in ((tight, None), (budget_bytes, None), (budget_bytes, otherwise)):
        found = plan_schedule(
            costs, budget_bytes=budget, order=range(len(costs)), max_window=MAX_WINDOW, window=window
        )
        if found.fits:
            return found
    return found


@dataclass(frozen=True, slots=True)
class Told:
    """One iteration: the window, its length, and what of it was lost."""

    window: int
    iteration_s: float
    copy_wait_s: float
    seal_wait_s: float
    plain_s: float
    snapshot: bool

    @property
    def lost(self) -> float:
        """The share that training waited."""
        return (self.copy_wait_s + self.seal_wait_s) / self.iteration_s


@dataclass(slots=True)
class _Ring:
    """The slots of one generation, and how many snapshots it has had."""

    schedule: Schedule
    taken: int = 0


@dataclass(slots=True)
class Loop:
    """A training loop.

    Args:
        trainer_seals: as it was: a trainer without a slot digests one itself instead of waiting.
        window: fixed; None: the control decides.
    """

    machine: Machine
    shape: Shape
    control: Control
    seed: int = 0
    trainer_seals: bool = False
    window: int | None = None
    told: list[Told] = field(default_factory=list)
    decided: list[tuple[int, int]] = field(default_factory=list)  # snapshots taken, window chosen
    _rng: random.Random = field(init=False)
    _ring: _Ring = field(init=False)
    _coming: tuple[float, Schedule] | None = None  # slots are there at
    _old_until: int = 0  # snapshots after which the ring before is dropped
    _now: float = 0.0
    _seal_s: float = 0.0
    _idle_at: float = 0.0  # the digest pool has nothing left
    _queue: deque[tuple[float, float]] = field(default_factory=deque)  # slots: complete at, digest seconds
    _step: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def run(self, steps: int) -> list[Told]:
        """So many iterations from the start."""
        costs = operators(self.shape.state_gb)
        schedule = (
            plan_for(costs, self.control.budget(self.shape, self.machine))
            if self.window is None
            else plan_schedule(costs, budget_bytes=None, order=range(len(costs)), window=self.window)
        )
        self._ring = _Ring(schedule)
        return self.go_on(steps)

    def go_on(self, steps: int) -> list[Told]:
        """So many more."""
        for _ in range(steps):
            self._iterate()
        return self.told

    def _iterate(self) -> None:
        plain = self.shape.iteration_s * max(0.5, self._rng.gauss(1.0, self.machine.noise))
        if len(self.told) < MEASURED_STEPS:
            self._plain_step(plain, self._ring.schedule.window)
            return
        if self._coming is not None and self._now >= self._coming[0]:
            self._ring, self._coming = _Ring(self._coming[1]), None
            self._old_until = self._ring.schedule.window
            self.control.changed()
        if self.window is None and self._coming is None and self._ring.taken >= self._old_until:
            self._maybe_widen(len(self.told))
        self._snapshot_step(plain, self._ring)

    def _maybe_widen(self, step: int) -> None:
        wide = self.control.wider(step, operators(self.shape.state_gb), self._ring.schedule)
        if wide is not None:
            self.decided.append((step - MEASURED_STEPS, wide.window))
            nbytes = (wide.window + SLACK_SLOTS) * wide.peak_bytes
            self._coming = self._now + nbytes / GB / self.machine.make, wide

    def _plain_step(self, plain: float, window: int) -> None:
        self._now += plain
        self.told.append(Told(window, plain, 0.0, 0.0, plain, snapshot=False))
        self.control.note(SnapshotReading(plain))

    def _snapshot_step(self, plain: float, ring: _Ring) -> None:
        nbytes = ring.schedule.phase_bytes[ring.taken % ring.schedule.window]
        began = self._now
        self._finish(began)
        seal_wait = 0.0
        while len(self._queue) >= SLACK_SLOTS:
            seal_wait += self._wait_for_a_slot(began + seal_wait)
        rate = self.machine.link * self.machine.capture * GB
        copy_s = nbytes / rate
        free = self.shape.before_optimizer * plain
        slowed = self.machine.slowdown * min(copy_s, plain)
        copy_wait = max(0.0, copy_s - free - slowed)
        self._now = began + seal_wait + plain + slowed + copy_wait
        self._queue.append((began + seal_wait + copy_s, nbytes / (self.machine.digest * GB)))
        ring.taken += 1
        lasted = self._now - began
        self.told.append(Told(ring.schedule.window, lasted, copy_wait, seal_wait, plain, snapshot=True))
        self.control.note(
            SnapshotReading(
                lasted,
                nbytes,
                copy_s=copy_s,
                copy_wait_s=copy_wait,
                seal_wait_s=seal_wait,
                seal_s=self._seal_s,
            )
        )

    def _finish(self, now: float) -> None:
        """Digest until ``now``."""
        while self._queue and max(self._idle_at, self._queue[0][0]) + self._queue[0][1] <= now:
            self._seal_next()

    def _seal_next(self) -> None:
        complete, digest_s = self._queue.popleft()
        self._seal_s = digest_s if complete < self._idle_at else 0.0
        self._idle_at = max(self._idle_at, complete) + digest_s

    def _wait_for_a_slot(self, now: float) -> float:
        """Seconds until the oldest slot is sealed."""
        if not self.trainer_seals:
            self._seal_next()
            return max(0.0, self._idle_at - now)
        # The pool goes on with the next one; the trainer reads the whole slot by itself.
        complete, digest_s = self._queue.popleft()
        return max(0.0, complete - now) + digest_s * self.machine.digest / self.machine.seal


def best_window(machine: Machine, shape: Shape, *, bound: float = 0.01) -> int | None:
    """The smallest window that loses less than ``bound``, found by trying; None: there is none."""

    def costs_little(window: int) -> bool:
        told = Loop(machine, shape, Control(), window=window).run(60 + 3 * window)
        tail = told[len(told) // 2 :]
        return sum(t.lost for t in tail) / len(tail) <= bound

    found = bisect_left(range(1, MAX_WINDOW + 1), True, key=costs_little) + 1
    return found if found <= MAX_WINDOW else None
