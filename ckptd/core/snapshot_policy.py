"""What a schedule is, and the policies that carry it out.

A schedule is periodic: the snapshot of iteration t has phase ``t % window``. Three policies answer the
one question "which operators, at which level, at this iteration":

* *sliding* (default): the operators of the phase are anchored, of all others the compute weights are
  recorded. Any ``window`` consecutive snapshots are a suffix (DESIGN 4);
* *aligned*: the paper's windows. An operator is absent once anchored, so only a whole window, from
  phase 0 on, is a suffix: its first snapshot begins a chain (``PhaseLevels.begins_chain``);
* *dense*: everything anchored, every k iterations.

Operator ids are indices into the sequence of operators that was planned.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

__all__ = [
    "AlignedPolicy",
    "Calendar",
    "DensePolicy",
    "Level",
    "OperatorCost",
    "OperatorKind",
    "PhaseLevels",
    "PolicyKind",
    "Schedule",
    "SlidingPolicy",
    "SnapshotPolicy",
    "Strides",
    "levels",
    "policy_for",
]


class OperatorKind(StrEnum):
    """What an operator is in the model."""

    EXPERT = "expert"
    GATE = "gate"
    DENSE = "dense"


class PolicyKind(StrEnum):
    """How the snapshots of a window relate."""

    SLIDING = "sliding"
    ALIGNED = "aligned"


class Level(StrEnum):
    """How an operator is recorded in one snapshot."""

    ANCHOR = "anchor"
    COMPUTE = "compute"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """What an operator takes in a snapshot.

    Args:
        anchor_bytes: size where it is anchored, its weights included.
        compute_bytes: size where it is not.
        group: the fused tensor of which it is a slice; slices are kept together in time.
        layer: the layer it belongs to, -1 if none.
    """

    name: str
    kind: OperatorKind
    anchor_bytes: int
    compute_bytes: int
    group: str | None = None
    layer: int = -1

    def __post_init__(self) -> None:
        if not 0 <= self.compute_bytes <= self.anchor_bytes:
            raise ValueError(
                f"operator {self.name!r}: an anchor of {self.anchor_bytes} bytes cannot contain "
                f"compute weights of {self.compute_bytes}"
            )


@dataclass(frozen=True, slots=True)
class Schedule:
    """A plan of one window; ``phases[p]`` are the ids of the operators anchored in phase p."""

    window: int
    phases: tuple[tuple[int, ...], ...]
    phase_bytes: tuple[int, ...]
    peak_bytes: int
    dense_bytes: int
    fits: bool
    reason: str
    policy: PolicyKind = PolicyKind.SLIDING

    @property
    def num_operators(self) -> int:
        """How many operators it plans."""
        return sum(map(len, self.phases))

    @property
    def order(self) -> list[int]:
        """The operators in the order in which they are anchored."""
        return list(itertools.chain.from_iterable(self.phases))

    @property
    def phase_of(self) -> list[int]:
        """The phase of each operator."""
        result = [0] * self.num_operators
        for phase, operators in enumerate(self.phases):
            for operator in operators:
                result[operator] = phase
        return result


@dataclass(frozen=True, slots=True)
class PhaseLevels:
    """What one snapshot records; operators in neither list are absent.

    ``begins_chain``: the snapshot does not go on from the one before, so its ``previous`` is -1.
    """

    phase: int
    anchored: tuple[int, ...]
    compute: tuple[int, ...]
    begins_chain: bool = False


class SnapshotPolicy(Protocol):
    """The seam between capture and scheduling."""

    @property
    def window(self) -> int:
        """How many snapshots a suffix has."""

    @property
    def num_slots(self) -> int:
        """How many slots the ring needs so that it never runs out."""

    def levels_for(self, iteration: int) -> PhaseLevels | None:
        """What the snapshot of ``iteration`` records; None for no snapshot."""


class SlidingPolicy:
    """A snapshot every iteration, each with the compute weights of what it does not anchor."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._by_phase: dict[int, PhaseLevels] = {}

    @property
    def window(self) -> int:
        """How many snapshots a suffix has."""
        return self.schedule.window

    @property
    def num_slots(self) -> int:
        """The suffix, one slot being filled, one being digested."""
        return self.window + 2

    def levels_for(self, iteration: int) -> PhaseLevels:
        """What the snapshot of ``iteration`` records."""
        phase = iteration % self.window
        if phase not in self._by_phase:
            others = self.schedule.phases[:phase] + self.schedule.phases[phase + 1 :]
            compute = tuple(itertools.chain.from_iterable(others))
            self._by_phase[phase] = PhaseLevels(phase, self.schedule.phases[phase], compute)
        return self._by_phase[phase]


class AlignedPolicy:
    """The paper's windows: an operator is recorded until it is anchored, then no more."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._by_phase: dict[int, PhaseLevels] = {}

    @property
    def window(self) -> int:
        """How many snapshots a suffix has."""
        return self.schedule.window

    @property
    def num_slots(self) -> int:
        """A whole window promised, a whole one being built, one slot being digested."""
        return 2 * self.window + 1

    def levels_for(self, iteration: int) -> PhaseLevels:
        """What the snapshot of ``iteration`` records."""
        phase = iteration % self.window
        if phase not in self._by_phase:
            compute = tuple(itertools.chain.from_iterable(self.schedule.phases[phase + 1 :]))
            anchored = self.schedule.phases[phase]
            self._by_phase[phase] = PhaseLevels(phase, anchored, compute, begins_chain=phase == 0)
        return self._by_phase[phase]


class DensePolicy:
    """Everything, every ``every`` iterations."""

    def __init__(self, num_operators: int, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every is {every}, must be at least 1")
        self.every = every
        self._levels = PhaseLevels(0, tuple(range(num_operators)), (), begins_chain=True)

    @property
    def window(self) -> int:
        """How many snapshots a suffix has."""
        return 1

    @property
    def num_slots(self) -> int:
        """A triple buffer: promised, being filled, being digested."""
        return 3

    def levels_for(self, iteration: int) -> PhaseLevels | None:
        """Everything if ``iteration`` is a multiple of ``every``, else None."""
        return None if iteration % self.every else self._levels


def policy_for(schedule: Schedule) -> SlidingPolicy | AlignedPolicy:
    """The policy that carries out ``schedule``."""
    if schedule.policy is PolicyKind.ALIGNED:
        return AlignedPolicy(schedule)
    return SlidingPolicy(schedule)


def levels(schedule: Schedule, iteration: int) -> list[Level]:
    """The level of each operator in the snapshot of ``iteration``."""
    recorded = policy_for(schedule).levels_for(iteration)
    result = [Level.ABSENT] * schedule.num_operators
    for operator in recorded.compute:
        result[operator] = Level.COMPUTE
    for operator in recorded.anchored:
        result[operator] = Level.ANCHOR
    return result


Phases = tuple[tuple[int, ...], ...]

_SEEN = 8


@dataclass(frozen=True, slots=True)
class Calendar:
    """Phase 0 begins at iteration ``base``, each phase lasts ``stride`` iterations.

    ``orders``: the schedules that follow one another, one at each window's beginning from iteration
    ``since`` on; the last one stays.
    Empty: the schedule stays as it is.
    """

    base: int = 0
    stride: int = 1
    orders: tuple[Phases, ...] = ()
    since: int = 0

    def ordinal(self, iteration: int) -> int:
        """Which snapshot of the schedule this is; its phase is the remainder by the window."""
        return (iteration - self.base) // self.stride

    def phases(self, iteration: int, window: int) -> Phases | None:
        """The schedule that counts at ``iteration``; None: the one from before ``orders``."""
        if not self.orders:
            return None
        first_whole = -(-(self.since - self.base) // self.stride)
        begun = self.ordinal(iteration) // window - -(-first_whole // window)
        return None if begun < 0 else self.orders[min(begun, len(self.orders) - 1)]

    def from_here(self, iteration: int, *, phase: int = 0, stride: int = 0) -> Calendar:
        """Begin anew: ``iteration`` has this phase."""
        stride = stride or self.stride
        return Calendar(iteration - phase * stride, stride)

    def ordered(self, orders: tuple[Phases, ...], since: int) -> Calendar:
        """Go on with these schedules, from the first window that begins at ``since`` or later."""
        return replace(self, orders=orders, since=since)


class Strides:
    """How many iterations lie between clean boundaries: what was seen lately."""

    def __init__(self) -> None:
        self._last = -1
        self._seen: deque[int] = deque(maxlen=_SEEN)

    def note(self, iteration: int) -> None:
        """This boundary is clean."""
        if 0 <= self._last < iteration:
            self._seen.append(iteration - self._last)
        self._last = iteration

    def forget(self) -> None:
        """What comes next does not follow on what was seen."""
        self._last = -1
        self._seen.clear()

    @property
    def shortest(self) -> int:
        """The shortest seen; 1 if nothing was."""
        return min(self._seen, default=1)

    def settled(self) -> int:
        """The one that is seen now, each time; 0 if they differ, or too few were seen."""
        same = len(self._seen) == _SEEN and len(set(self._seen)) == 1
        return self._seen[0] if same else 0
