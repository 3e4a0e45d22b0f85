"""How a schedule is carried out: which operators, at which level, the snapshot of an iteration records. Pure.

A schedule is periodic: the snapshot of iteration t has phase ``t % window`` (see `Calendar`). Operator ids
are indices into the sequence of operators that was planned. There are four policies:

* *sliding* (default): the operators of the phase are anchored, of all others the compute weights are
  recorded. Any ``window`` consecutive snapshots are a suffix (DESIGN 4);
* *aligned*: the paper's windows. An operator is absent once anchored, so only a whole window, from phase 0
  on, is a suffix: its first snapshot begins a chain (``PhaseLevels.begins_chain``);
* *dense*: everything is anchored, every k iterations;
* *partial*: MoC-System's. Everything is anchored but the experts, of which each snapshot anchors those of its
  phase. A recovery takes each expert from its newest snapshot and replays nothing: updates of experts are
  lost (`ckptd.core.partial_experts`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

MISSING_COUNTERS = ("failed", "torn", "no_slot", "undecided")
"""Counters of a trainer for snapshots that its schedule wanted, and that were not taken."""


class OperatorKind(StrEnum):
    """What an operator is in the model."""

    EXPERT = "expert"
    GATE = "gate"
    DENSE = "dense"


class PolicyKind(StrEnum):
    """How the snapshots of a window relate."""

    SLIDING = "sliding"
    ALIGNED = "aligned"
    PARTIAL = "partial"


class PartialScope(StrEnum):
    """What a partial snapshot holds of selected experts only (MoC-System's WO, O and W)."""

    BOTH = "both"  # weights and optimizer state
    OPTIMIZER = "optimizer"  # the weights of all experts are in every snapshot
    WEIGHTS = "weights"  # the optimizer state of all experts is


class Level(StrEnum):
    """How an operator is recorded in one snapshot."""

    ANCHOR = "anchor"
    COMPUTE = "compute"
    STATE = "state"  # the optimizer's state, without weights
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """The bytes of an operator in a snapshot.

    Args:
        anchor_bytes: size if it is anchored, including its weights.
        compute_bytes: size if it is not.
        group: the fused tensor of which it is a slice; slices are kept together in time.
        layer: its layer, -1 if none.
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
    """The plan of one window; ``phases[p]`` are the ids of the operators anchored in phase p."""

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
        """The number of operators."""
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

    ``begins_chain``: the snapshot does not continue the previous one, so its ``previous`` is -1.
    """

    phase: int
    anchored: tuple[int, ...]
    compute: tuple[int, ...]
    begins_chain: bool = False
    state: tuple[int, ...] = ()


class SnapshotPolicy(Protocol):
    """Which operators a snapshot records."""

    @property
    def window(self) -> int:
        """How many snapshots a suffix has."""

    @property
    def num_slots(self) -> int:
        """How many slots the ring needs so that it never runs out of them."""

    def levels_for(self, iteration: int) -> PhaseLevels | None:
        """What the snapshot of ``iteration`` records; None for no snapshot."""


class _PhasedPolicy:
    """A snapshot every iteration, as the phases of a schedule say."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._by_phase: dict[int, PhaseLevels] = {}

    @property
    def window(self) -> int:
        """How many snapshots a suffix has."""
        return self.schedule.window

    def levels_for(self, iteration: int) -> PhaseLevels:
        """What the snapshot of ``iteration`` records."""
        phase = iteration % self.window
        if phase not in self._by_phase:
            self._by_phase[phase] = self._levels(phase)
        return self._by_phase[phase]

    def _levels(self, phase: int) -> PhaseLevels:
        raise NotImplementedError


class SlidingPolicy(_PhasedPolicy):
    """Each snapshot has the compute weights of the operators that it does not anchor."""

    @property
    def num_slots(self) -> int:
        """The suffix, one slot being filled, one being digested."""
        return self.window + 2

    def _levels(self, phase: int) -> PhaseLevels:
        phases = self.schedule.phases
        compute = tuple(itertools.chain.from_iterable(phases[:phase] + phases[phase + 1 :]))
        return PhaseLevels(phase, phases[phase], compute)


class AlignedPolicy(_PhasedPolicy):
    """The paper's windows: an operator is recorded until it is anchored, then no more."""

    @property
    def num_slots(self) -> int:
        """A whole window promised, a whole one being built, one slot being digested."""
        return 2 * self.window + 1

    def _levels(self, phase: int) -> PhaseLevels:
        phases = self.schedule.phases
        compute = tuple(itertools.chain.from_iterable(phases[phase + 1 :]))
        return PhaseLevels(phase, phases[phase], compute, begins_chain=phase == 0)


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


class PartialPolicy:
    """All but the experts whole, and of the experts those of the phase, every ``every`` iterations.

    Args:
        always: the operators that every snapshot anchors: those that are no experts.
        longest: any so many consecutive snapshots have every expert, if they are selected otherwise than by
            phases; 0: a window.
    """

    def __init__(
        self,
        schedule: Schedule,
        always: Sequence[int],
        *,
        every: int = 1,
        scope: PartialScope = PartialScope.BOTH,
        longest: int = 0,
    ) -> None:
        self.schedule, self.every, self._scope = schedule, every, scope
        self._longest = longest or schedule.window
        self._always = frozenset(always)

    @property
    def window(self) -> int:
        """How many snapshots it takes at most until every expert is in one."""
        return self._longest

    @property
    def num_slots(self) -> int:
        """The newest of every expert, one slot being filled, one being digested."""
        return self.window + 2

    def levels_for(self, iteration: int) -> PhaseLevels | None:
        """What the snapshot of ``iteration`` records; None if it is no multiple of ``every``."""
        if iteration % self.every:
            return None
        phase = iteration // self.every % self.schedule.window
        anchored = self._always.union(self.schedule.phases[phase])
        rest = tuple(i for i in range(self.schedule.num_operators) if i not in anchored)
        return PhaseLevels(
            phase,
            tuple(sorted(anchored)),
            rest if self._scope is PartialScope.OPTIMIZER else (),
            state=rest if self._scope is PartialScope.WEIGHTS else (),
        )


def policy_for(schedule: Schedule) -> SlidingPolicy | AlignedPolicy:
    """The sparse policy that carries out ``schedule`` without losing anything."""
    if schedule.policy is PolicyKind.ALIGNED:
        return AlignedPolicy(schedule)
    return SlidingPolicy(schedule)


Phases = tuple[tuple[int, ...], ...]

_SEEN = 8


@dataclass(frozen=True, slots=True)
class Calendar:
    """The phase of each iteration: phase 0 begins at ``base``, and each lasts ``stride`` iterations.

    A phase follows from the number of the iteration and from what the ranks have agreed on, and from nothing
    else. A rank that counted its own snapshots or boundaries would be shifted against the others for good by
    whatever happens to it alone: a snapshot that failed, a step that its loss scaler skipped.

    If gradients are accumulated over several iterations of the loop, only every ``stride``-th boundary can
    have a snapshot. These boundaries must not all fall on the same few phases, so iterations are counted in
    strides. An irregular accumulation repeats or skips a phase; the next window has all of them again.

    ``orders``: the schedules that follow one another, one at the start of each window from iteration
    ``since`` on; the last one stays. Empty: the schedule does not change.
    """

    base: int = 0
    stride: int = 1
    orders: tuple[Phases, ...] = ()
    since: int = 0

    def ordinal(self, iteration: int) -> int:
        """The number of its snapshot in the schedule; the phase is this number modulo the window."""
        return (iteration - self.base) // self.stride

    def phases(self, iteration: int, window: int) -> Phases | None:
        """The schedule at ``iteration``; None: the one before ``orders``."""
        if not self.orders:
            return None
        first_whole = -(-(self.since - self.base) // self.stride)
        begun = self.ordinal(iteration) // window - -(-first_whole // window)
        return None if begun < 0 else self.orders[min(begun, len(self.orders) - 1)]

    def from_here(self, iteration: int, *, phase: int = 0, stride: int = 0) -> Calendar:
        """A calendar in which ``iteration`` has this phase."""
        stride = stride or self.stride
        return Calendar(iteration - phase * stride, stride)

    def ordered(self, orders: tuple[Phases, ...], since: int) -> Calendar:
        """A calendar with these schedules from the first window that begins at ``since`` or later."""
        return replace(self, orders=orders, since=since)


class Strides:
    """The numbers of iterations between recent clean boundaries."""

    def __init__(self) -> None:
        self._last = -1
        self._seen: deque[int] = deque(maxlen=_SEEN)

    def note(self, iteration: int) -> None:
        """This boundary is clean."""
        if 0 <= self._last < iteration:
            self._seen.append(iteration - self._last)
        self._last = iteration

    def forget(self) -> None:
        """The next boundary does not follow the last one."""
        self._last = -1
        self._seen.clear()

    @property
    def shortest(self) -> int:
        """The shortest one; 1 without any."""
        return min(self._seen, default=1)

    def settled(self) -> int:
        """The stride, if all recent ones are equal; 0 if they differ or are too few."""
        same = len(self._seen) == _SEEN and len(set(self._seen)) == 1
        return self._seen[0] if same else 0
