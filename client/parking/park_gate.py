"""When the state of a step can be parked, and who waits for the copy: two machines behind one lock.

The *moment* opens at the top of a step and closes at the optimizer's pre-hook. The *copy* of a moment
may outlast it: the optimizer's step waits for it, and where that takes too long it goes on, and what
comes of the copy is thrown away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from ckptd.client.parking.park_writer import TopTensors
from ckptd.core.state_machine import MachineState, Transitions, validating

__all__ = [
    "COPY_TRANSITIONS",
    "MOMENT_TRANSITIONS",
    "CopyEvent",
    "CopyState",
    "Moment",
    "MomentEvent",
    "MomentState",
    "ParkGate",
]


class MomentState(MachineState):
    """Whether there is a state to park."""

    CLOSED = "closed", "there is none, and no top is near"
    OPEN = "open", "from the top of a step on: that state is there"
    UPDATING = "updating", "an optimizer is stepping; the next top is not far"


class MomentEvent(StrEnum):
    """What the training thread reports."""

    TOP = "top"
    UPDATE = "update"
    CLOSE = "close"


MOMENT_TRANSITIONS = Transitions(
    "parking moment",
    {
        **{(state, MomentEvent.TOP): MomentState.OPEN for state in MomentState},
        **{(state, MomentEvent.UPDATE): MomentState.UPDATING for state in MomentState},
        **{(state, MomentEvent.CLOSE): MomentState.CLOSED for state in MomentState},
    },
)


class CopyState(MachineState):
    """What becomes of a moment that is parked."""

    NONE = "none", "no copy is under way"
    RUNNING = "running", "the optimizer's step waits for it"
    ABANDONED = "abandoned", "the optimizer's step has gone on: what comes of it is thrown away"


class CopyEvent(StrEnum):
    """What happens to a copy."""

    BEGIN = "begin"
    ABANDON = "abandon"
    END = "end"


COPY_TRANSITIONS = Transitions(
    "parking copy",
    {
        (CopyState.NONE, CopyEvent.BEGIN): CopyState.RUNNING,
        (CopyState.RUNNING, CopyEvent.ABANDON): CopyState.ABANDONED,
        (CopyState.RUNNING, CopyEvent.END): CopyState.NONE,
        (CopyState.ABANDONED, CopyEvent.END): CopyState.NONE,
    },
)


@dataclass(slots=True, eq=False)
class Moment:
    """The state at the top of a step, as far as it has to be kept apart; the rest is what is live.

    ``recorded``: the dictionary that the step's snapshot is written from, to which the first
    forward adds. ``marks``: what must not change, where it is found, and its version. ``tensors``:
    all that is copied, with samples of it. ``ready``: the device has come so far.
    """

    step: int
    phase: int
    scalars: dict[str, Any]
    recorded: Mapping[str, Any]
    buffers: dict[str, Tensor]
    marks: list[tuple[Mapping[str, Any], str, Tensor, int]]
    tensors: TopTensors | None
    ready: torch.cuda.Event | None
    begun_s: float = field(default_factory=time.monotonic)
    rng_forward: dict[str, Any] | None = None
    parked: bool = False
    late: bool = False

    def changed(self) -> str:
        """The name of something that was written to or replaced since the top; empty if nothing was."""
        for place, key, tensor, version in self.marks:
            if place.get(key) is not tensor or tensor._version != version:
                return key
        return ""


class ParkGate:
    """Opens and closes moments (training thread), and lets one copy at a time begin (any thread).

    Attributes:
        moment: the state that can be parked right now; None: there is none, and ``why_not`` says why.
    """

    def __init__(self, why_not: str) -> None:
        self.moment: Moment | None = None
        self.why_not = why_not
        self._moments, self._copies = MomentState.CLOSED, CopyState.NONE
        self._over = threading.Event()  # the copy that is under way
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    @property
    def state(self) -> tuple[MomentState, CopyState]:
        """That of the moment, and of the copy."""
        return self._moments, self._copies

    @property
    def locked(self) -> bool:
        """Whether some thread is in the middle of opening or closing a moment."""
        return self._lock.locked()

    def top(self, moment: Moment) -> None:
        """A step begins, and can be parked."""
        self._go(MomentEvent.TOP, moment, self.why_not)

    def update(self) -> threading.Event | None:
        """An optimizer is about to step; what is set when the copy that it must wait for is over."""
        self._go(MomentEvent.UPDATE, None, "an optimizer is stepping")
        # Of this moment no copy begins any more; one that ends just now need not be waited for.
        return self._over if self._copies is CopyState.RUNNING else None

    def close(self, why: str) -> None:
        """There is no state to park until the next top."""
        self._go(MomentEvent.CLOSE, None, why)

    def awaited(self, patience_s: float) -> Moment | None:
        """The moment; where an optimizer is stepping, the next one, if it comes in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._moments is not MomentState.UPDATING, timeout=patience_s)
            return self.moment

    def begin_copy(self, moment: Moment) -> bool:
        """Whether that is still the moment; then its copy is under way until `end_copy`."""
        with self._lock:
            if self.moment is not moment:
                return False
            self._over = threading.Event()
            self._copy_on(CopyEvent.BEGIN)
            return True

    def abandon_copy(self) -> None:
        """The optimizer's step has waited long enough."""
        with self._lock:
            if self._copies is CopyState.RUNNING:
                self._copy_on(CopyEvent.ABANDON)

    def end_copy(self) -> bool:
        """From here on the optimizer may step; whether it did not wait for that. Called again: nothing."""
        with self._lock:
            abandoned = self._copies is CopyState.ABANDONED
            if self._copies is not CopyState.NONE:
                self._over.set()
                self._copy_on(CopyEvent.END)
            return abandoned

    def _go(self, event: MomentEvent, moment: Moment | None, why_not: str) -> None:
        with self._changed:
            self._moments = MOMENT_TRANSITIONS.after(self._moments, event)
            self.moment, self.why_not = moment, why_not
            if validating():
                self._validate()
            if self._moments is not MomentState.UPDATING:
                self._changed.notify_all()

    def _copy_on(self, event: CopyEvent) -> None:
        self._copies = COPY_TRANSITIONS.after(self._copies, event)
        if validating():
            self._validate()

    def _validate(self) -> None:
        """There is a moment exactly while one is open, and who waits for a copy is woken when it is over."""
        assert (self.moment is not None) == (self._moments is MomentState.OPEN), self._moments
        assert self._copies is CopyState.NONE or not self._over.is_set(), self._copies
        assert self.moment is not None or self.why_not, "nothing to park, and no reason"
