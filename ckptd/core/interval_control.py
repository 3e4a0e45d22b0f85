"""The interval of dense snapshots, by what they are measured to cost. Pure.

A snapshot costs a stall of s seconds of an iteration of T: what training waits for its copy and for a free
slot, and what the iteration itself takes longer while the copy runs. It occupies the copy engine, the digests
and the peers for b seconds. The rules are those of three systems; none is shorter than b:

    checkfreq    s / (n T) within a bound (CheckFreq, FAST '21)
    gemini       as short as copies to the host and to the peers allow (Gemini, SOSP '23)
    young-daly   sqrt(2 s M) / T, with a failure every M seconds (Young, 1974; Daly, 2006)

How long a peer takes cannot be seen from here, only whether it has the last snapshot when the next one
begins. If it has not, twice in a row, the interval grows, and does not come back below that.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from ckptd.core.window_control import SnapshotReading

MAX_STALL = 0.03
"""CheckFreq's bound by default: the share of the time that stalls take."""

_KEPT, _FEW = 8, 3
_PLAIN = 40
_LAGGING_LOOKS = 2
# Intervals that differ by less are not worth a change, and measurements differ by as much.
_SAME = 1.25
_LONGEST = 100_000


class IntervalRule(StrEnum):
    """How the interval follows from the costs."""

    CHECKFREQ = "checkfreq"
    GEMINI = "gemini"
    YOUNG_DALY = "young-daly"


@dataclass(frozen=True, slots=True)
class SnapshotCost:
    """One snapshot, and the iterations around it, in seconds.

    Attributes:
        stall_s: what training takes longer because of it.
        busy_s: no other snapshot can begin for so long.
        iteration_s: of an iteration without snapshots.
    """

    stall_s: float
    busy_s: float
    iteration_s: float


def interval_of(rule: IntervalRule, cost: SnapshotCost, *, bound: float, mtbf_s: float | None = None) -> int:
    """The interval in iterations.

    Args:
        bound: of the share of the time that stalls take, for CheckFreq's rule.
        mtbf_s: between two failures of the job, for Young and Daly's.
    """
    shortest = math.ceil(cost.busy_s / cost.iteration_s)
    match rule:
        case IntervalRule.CHECKFREQ:
            found = math.ceil(cost.stall_s / (bound * cost.iteration_s))
        case IntervalRule.GEMINI:
            found = shortest
        case IntervalRule.YOUNG_DALY:
            assert mtbf_s is not None
            found = round(math.sqrt(2 * cost.stall_s * mtbf_s) / cost.iteration_s)
    return min(_LONGEST, max(1, shortest, found))


class IntervalControl:
    """Judges the interval in use by the snapshots that are taken.

    Args:
        bound, mtbf_s: see `interval_of`.
    """

    def __init__(self, rule: IntervalRule, *, bound: float, mtbf_s: float | None = None) -> None:
        self._rule, self._bound, self._mtbf_s = rule, bound, mtbf_s
        self._stalls: deque[float] = deque(maxlen=_KEPT)
        self._busy: deque[float] = deque(maxlen=_KEPT)
        self._with: deque[float] = deque(maxlen=_KEPT)  # iterations with a snapshot, without their waits
        self._plain: deque[float] = deque(maxlen=_PLAIN)
        self._waited: float | None = None  # since the last snapshot began; None: there was none
        self._since_change = 0
        self._behind = self._lagging = 0
        self._for_peers = 1

    def note(self, reading: SnapshotReading, *, behind: int, every: int) -> None:
        """Add the iteration that has ended.

        Args:
            behind: the iterations by which the slowest peer is behind now.
            every: the interval in use.
        """
        own_s = reading.iteration_s - reading.wait_s
        if reading.snapshot_bytes:
            self._ended(every)
            self._waited = 0.0
            self._with.append(own_s)
            self._busy.append(max(reading.copy_s or reading.copy_wait_s, reading.seal_s))
        else:
            self._plain.append(own_s)
        if self._waited is not None:
            self._waited += reading.wait_s
        self._behind = behind

    def changed(self) -> None:
        """The interval is another one."""
        self._since_change = self._lagging = 0
        self._waited = None

    @property
    def cost(self) -> SnapshotCost | None:
        """What a snapshot costs; None: too few were taken."""
        if len(self._stalls) < _FEW:
            return None
        own_s = statistics.median(self._with)
        plain_s = statistics.median(self._plain) if len(self._plain) >= _FEW else own_s
        stall_s = statistics.median(self._stalls) + max(0.0, own_s - plain_s)
        return SnapshotCost(stall_s, statistics.median(self._busy), max(1e-9, min(own_s, plain_s)))

    def needed(self, every: int) -> int:
        """The interval by all that is known; ``every`` if that is too little or much the same."""
        if self._since_change < _FEW or (cost := self.cost) is None:
            found = every
        else:
            found = interval_of(self._rule, cost, bound=self._bound, mtbf_s=self._mtbf_s)
        found = max(found, self._for_peers)
        return every if every / _SAME <= found <= every * _SAME else found

    def _ended(self, every: int) -> None:
        """Another snapshot has begun: what the last one cost is known."""
        if self._waited is None:
            return
        self._stalls.append(self._waited)
        self._since_change += 1
        self._lagging = self._lagging + 1 if self._behind >= every else 0
        if self._lagging >= _LAGGING_LOOKS:
            self._for_peers = max(self._for_peers, every + max(1, every // 2))
