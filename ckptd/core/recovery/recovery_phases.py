"""The phases of a recovery, from the loss of a trainer to the first new step: their names, when each ended,
and how long each took. Pure.

The names are the same wherever a recovery is described: in the trainer's log, in the event
`recovery_phases`, in ``Checkpointer.stats()``, in ``ckptctl status`` and in ``bench/recovery.py``. A
phase is named after what is true at its end. It lasts from the end of the one before it, so the
durations add up to the whole. A phase that did not occur, or whose end is not known, is absent, and its
time is part of the next one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ckptd.core.histogram import Histogram


class RecoveryPhase(StrEnum):
    """The phases in their order."""

    # The node's daemon found a trainer of the run dead, the first one on this node.
    DETECTED = "detected"
    # The last of the run's other trainers on this node has ended.
    OTHERS_STOPPED = "others_stopped"
    # The new trainer's process exists. Before that the launcher waits, and agents of several nodes meet.
    PROCESS_THERE = "process_there"
    # Python runs, and ckptd.client is imported, torch with it.
    IMPORTS = "imports"
    # The program has come to its Checkpointer: process groups, data and model are made. The rendezvous of the
    # ranks is part of this phase: neither torch nor torchrun tells a trainer when it was over. An elastic job
    # plans and loads its state before it makes its Checkpointer: in this phase, too.
    PROCESS_GROUPS = "process_groups"
    # Model and optimizer are examined, and the daemon has granted the rank its memory.
    ATTACH = "attach"
    # The ranks know what all nodes hold. If they planned several times: when they asked last.
    INVENTORY = "inventory"
    # The plan that counts is made.
    PLAN = "plan"
    # The oldest snapshot of the plan is in this node's memory, verified; for parked state, that state.
    FIRST_BYTES = "first_bytes"
    # That snapshot is loaded into model and optimizer.
    LOADED = "loaded"
    # The newest snapshot is reached, and every operator active. Absent if there was nothing to replay.
    REPLAYED = "replayed"
    # The first optimizer's step of an iteration that no snapshot shows to have been done before is called.
    # A device may still be computing it.
    FIRST_NEW_STEP = "first_new_step"


_ORDER = {phase: number for number, phase in enumerate(RecoveryPhase)}


class RecoveryTrace:
    """When the phases of one start of one rank ended, in seconds of one clock."""

    def __init__(self) -> None:
        self._ended_s: dict[RecoveryPhase, float] = {}

    def note(self, phase: RecoveryPhase, at_s: float) -> None:
        """The phase ended at this time."""
        self._ended_s[phase] = at_s

    def reach(self, phase: RecoveryPhase, at_s: float) -> None:
        """The phase ends now; phases after it will end, or end again: the ranks may plan several times."""
        self._ended_s = {p: s for p, s in self._ended_s.items() if _ORDER[p] < _ORDER[phase]}
        self._ended_s[phase] = at_s

    @property
    def ends(self) -> dict[RecoveryPhase, float]:
        """The ends of the phases, in their order, which is that of their times.

        An end after that of a later phase is left out: the daemon may find a process dead when the next
        one already runs.
        """
        found, next_s = {}, math.inf
        for phase in reversed(RecoveryPhase):
            at_s = self._ended_s.get(phase, math.inf)
            if at_s <= next_s and at_s < math.inf:
                found[phase] = next_s = at_s
        return dict(reversed(found.items()))

    @property
    def durations(self) -> dict[RecoveryPhase, float]:
        """Seconds of each phase. The first known one has an end only: the trace begins with it, and has no
        duration of it.
        """
        ends = list(self.ends.items())
        return {phase: at_s - ends[i][1] for i, (phase, at_s) in enumerate(ends[1:])}

    def describe(self) -> str:
        """``9.84 s from detected to first_new_step: others_stopped 1.210 s, …``."""
        ends = self.ends
        if not ends:
            return "no phase is known"
        first, *_, last = ends if len(ends) > 1 else (*ends, *ends)
        whole = f"{ends[last] - ends[first]:.3f} s from {first} to {last}"
        return f"{whole}: {describe_phases(self.durations)}"


@dataclass(frozen=True, slots=True)
class ToldStart:
    """What a rank told of its start, once its first new step was done.

    Args:
        iteration: of that step.
        recovery: False for a first start.
        began_with: the phase whose end is the beginning; None: unknown.
        durations: seconds of the phases after it.
        ended_ns: unix time of the first new step.
        tier: the farthest one from which snapshots came: memory, peers or storage.
    """

    job: str
    run: str
    rank: int
    world_size: int
    epoch: int
    iteration: int
    recovery: bool
    began_with: RecoveryPhase | None
    durations: Mapping[RecoveryPhase, float]
    ended_ns: int
    tier: str
    policy: str


# From a phase that is hardly there to a launcher that waits for a node.
RECOVERY_BOUNDS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class RecoveryHistograms:
    """How long recoveries and their phases took."""

    def __init__(self) -> None:
        self.phases = {phase: Histogram(RECOVERY_BOUNDS_S) for phase in RecoveryPhase}
        self.whole = Histogram(RECOVERY_BOUNDS_S)

    def observe(self, durations: Mapping[RecoveryPhase, float]) -> None:
        """Count one recovery of one rank."""
        for phase, seconds in durations.items():
            self.phases[phase].observe(seconds)
        self.whole.observe(sum(durations.values()))


def describe_phases(durations: Mapping[RecoveryPhase, float]) -> str:
    """The durations in one line."""
    return ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in durations.items()) or "-"


_DESCRIBED = re.compile(rf"\b({'|'.join(RecoveryPhase)}) (\d+\.\d{{3}}) s")


def parse_phases(text: str) -> dict[RecoveryPhase, float]:
    """The durations in a text with the output of `describe_phases`, such as that of an event."""
    return {RecoveryPhase(found[1]): float(found[2]) for found in _DESCRIBED.finditer(text)}


_BEGAN = re.compile(rf" s from ({'|'.join(RecoveryPhase)}) to ")


def first_phase(text: str) -> RecoveryPhase | None:
    """The phase with whose end a trace begins, in a text with the output of `RecoveryTrace.describe`."""
    found = _BEGAN.search(text)
    return None if found is None else RecoveryPhase(found[1])


def phase_metrics(durations: Mapping[RecoveryPhase, float]) -> dict[str, float]:
    """The durations under the names that they have among a trainer's counters: ``phase_imports_s``."""
    return {f"phase_{phase}_s": seconds for phase, seconds in durations.items()}


def phases_in_metrics(metrics: Mapping[str, float]) -> dict[RecoveryPhase, float]:
    """The durations among a trainer's counters, in the order of the phases; not what can be none."""
    found = {phase: metrics.get(f"phase_{phase}_s", -1.0) for phase in RecoveryPhase}
    return {phase: seconds for phase, seconds in found.items() if 0 <= seconds < math.inf}
