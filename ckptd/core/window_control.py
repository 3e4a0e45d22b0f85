"""The control of the window: how many bytes a snapshot may have, by what snapshots have cost. Pure.

A snapshot of S bytes costs training time in three ways, and each has a largest S that costs no more than is
allowed:

    copies      training waits for the copy at the optimizer's step. Of a copy that took c seconds and was
                waited for w of them, c - w were free: S (c - w) / c bytes would have been.
    sealing     digests come slower than snapshots, slots run out, and training waits for one. Of a slot
                that the daemon took d seconds to seal, S t / d bytes would be sealed in an iteration of t.
    slowdown    the model's own work takes longer while copies run, which share the link, the copy engine
                and memory with it. That grows with S.

A shortage of sealing is seen before the slots run out. Where even the smallest snapshots are too large, the
planner says so (`ckptd.core.schedule.plan_schedule`).

The window only grows, and only by measurement: a window that is wider than necessary lengthens a recovery,
one that is changed to and fro costs memory for two rings and is never complete.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

_KEPT = 20
# So many readings are enough where more than this share of a step is lost.
_FEW, _SEVERE = 6, 0.3
_REGULAR = 8
# Iterations between two looks, and where a remedy should not wait. After a look in vain: the former.
_LOOK_STEPS, _SOON_STEPS = 50, 8
_JUDGED_STEPS = 4  # it takes the training thread some 50 us
# A slowdown that is smaller may be the model's own: other batches, clocks, neighbours.
_SLOWDOWN = 0.05
# A slowdown says little about how many bytes would be without one: it is followed in steps.
_SLOWDOWN_STEP = 4.0


class Cause(StrEnum):
    """The way in which snapshots cost training time."""

    COPIES = "copies"
    SEALING = "sealing"
    SLOWDOWN = "slowdown"


@dataclass(frozen=True, slots=True)
class SnapshotReading:
    """One iteration, as measured.

    Attributes:
        iteration_s: from its top to the next.
        snapshot_bytes: of the snapshot that was taken; 0: none was.
        copy_s: from the first byte copied to the last; 0: unknown, or copied by the training thread.
        copy_wait_s: training (or the device's stream) waited so long for the copy, or made it.
        seal_wait_s: training waited so long for slots to be sealed, or sealed them.
        seal_s: what the daemon took to seal one slot while the next one waited already; 0: unknown.
    """

    iteration_s: float
    snapshot_bytes: int = 0
    copy_s: float = 0.0
    copy_wait_s: float = 0.0
    seal_wait_s: float = 0.0
    seal_s: float = 0.0

    @property
    def wait_s(self) -> float:
        return self.copy_wait_s + self.seal_wait_s


@dataclass(frozen=True, slots=True)
class Shortage:
    """Snapshots are larger than they may be.

    Attributes:
        share: of an iteration that is lost, or will be when the slots have run out.
        affordable_bytes: of the largest snapshot that would cost no more than the bound.
        iteration_s: an iteration without waits.
    """

    cause: Cause
    share: float
    affordable_bytes: int
    iteration_s: float

    @property
    def severe(self) -> bool:
        """True if a remedy must not wait."""
        return self.share > _SEVERE

    def __str__(self) -> str:
        found = {
            Cause.COPIES: "copies hold training up",
            Cause.SEALING: "digests are slower than snapshots come",
            Cause.SLOWDOWN: "training is slower while copies run",
        }[self.cause]
        return f"{found} ({self.share:.1%} of a step; a snapshot may have {self.affordable_bytes:,} bytes)"


class WindowControl:
    """Judges the snapshots of one window.

    Args:
        bound: the share of an iteration that may be lost.
        regular: iterations take the same time as long as nothing of ours is in their way, as they do on a
            device. Then fewer readings decide, and iterations with snapshots are compared with those before
            the first one.
    """

    def __init__(self, *, bound: float, regular: bool) -> None:
        self._bound, self._regular = bound, regular
        self._needed = _REGULAR if regular else _KEPT
        self._look_at = self._soon_at = 0
        self._plain: list[float] = []
        self._began = False  # there has been a snapshot
        self._readings: deque[SnapshotReading] = deque(maxlen=_KEPT)
        # Bytes and excess of the window for which a slowdown was followed last.
        self._followed: tuple[float, float] | None = None

    def note(self, reading: SnapshotReading) -> None:
        """Add the iteration that has ended."""
        if reading.snapshot_bytes:
            self._began = True
            self._readings.append(reading)
        elif not self._began and len(self._plain) < _KEPT:
            self._plain.append(reading.iteration_s)

    def changed(self) -> None:
        """The window is another one: earlier readings say nothing about it."""
        if (shortage := self._slowdown()) is not None:
            self._followed = self._median_bytes(), shortage.share
        self._readings.clear()

    def due(self, step: int) -> bool:
        """Whether to look for a remedy at the top of ``step``."""
        if step % _JUDGED_STEPS and step < self._look_at:
            return False
        shortage = self.shortage()
        soon = shortage is not None and (self._regular or shortage.severe) and step >= self._soon_at
        return soon or step >= self._look_at

    def looked(self, step: int, *, in_vain: bool) -> None:
        """Note a look at the top of ``step``: ``in_vain`` if there is a shortage and no remedy."""
        self._look_at = step + _LOOK_STEPS
        self._soon_at = self._look_at if in_vain else step + _SOON_STEPS

    def shortage(self) -> Shortage | None:
        """The shortage that asks for the smallest snapshots; None: there is none, or too few readings."""
        if len(self._readings) < _FEW:
            return None
        enough = len(self._readings) >= self._needed
        found = [
            each
            for each in (self._copies(), self._sealing(), self._slowdown())
            if each is not None and each.share > self._bound and (enough or each.severe)
        ]
        return min(found, key=lambda each: each.affordable_bytes, default=None)

    def _copies(self) -> Shortage | None:
        share = self._lost(attrgetter("copy_wait_s"))
        copy_s = statistics.median(r.copy_s for r in self._readings)
        if copy_s > 0:
            spare = (r.copy_s - r.copy_wait_s + self._bound * r.iteration_s for r in self._readings)
            free = max(0.0, statistics.median(spare)) / copy_s
        else:  # the training thread copies: what it costs is what it copies
            free = self._bound / share if share else 1.0
        return self._of(Cause.COPIES, share, free)

    def _sealing(self) -> Shortage | None:
        waited, own_s = self._lost(attrgetter("seal_wait_s")), self._own_s()
        known = [r.seal_s for r in self._readings if r.seal_s]
        if self._regular and len(known) >= _FEW // 2:
            share = max(waited, 1.0 - own_s / statistics.median(known))
        else:  # a busy machine's threads are late, which smaller snapshots do not change
            share = waited
        free = own_s / statistics.median(known) if known else 1.0 - waited
        return self._of(Cause.SEALING, share, min(1.0, free) / (1.0 - self._bound))

    def _slowdown(self) -> Shortage | None:
        plain = self._plain[1:]  # the first iteration of a process compiles, allocates and tunes
        if not self._regular or len(plain) < 2 or len(self._readings) < _FEW:
            return None
        share = 1.0 - statistics.median(plain) / self._own_s()
        if share <= max(_SLOWDOWN, self._bound) or self._is_not_ours(share):
            return None
        quick = statistics.quantiles((r.iteration_s - r.wait_s for r in self._readings), n=4)[0]
        if max(plain) > quick:
            return None  # iterations vary as much by themselves
        return self._of(Cause.SLOWDOWN, share, max(self._bound / share, 1 / _SLOWDOWN_STEP))

    def _is_not_ours(self, share: float) -> bool:
        """Whether smaller snapshots did not make it smaller, by half of what they should have."""
        if self._followed is None:
            return False
        nbytes, before = self._followed
        expected = before * (1.0 - self._median_bytes() / nbytes)
        return before - share < expected / 2

    def _own_s(self) -> float:
        """What an iteration takes without its waits; above 0: a device tells its waits some steps later."""
        return max(1e-9, statistics.median(r.iteration_s - r.wait_s for r in self._readings))

    def _lost(self, waited: Callable[[SnapshotReading], float]) -> float:
        return statistics.median(waited(r) / r.iteration_s for r in self._readings)

    def _median_bytes(self) -> float:
        return statistics.median(r.snapshot_bytes for r in self._readings)

    def _of(self, cause: Cause, share: float, factor: float) -> Shortage:
        return Shortage(cause, share, int(factor * self._median_bytes()), self._own_s())
