"""Parking: this rank's whole state of the current iteration, copied by another thread than the training
thread (DESIGN §8; MoEvement §3.4).

A rank whose job is being torn down is not lost: its state at the top of iteration T goes to its daemon's
memory as a dense image, and the next life goes on at T without a replay. The state of the top of T exists
until the first optimizer's step in T: parameters, masters and optimizer state do not change before; step
scalars are kept from the top, and so are the buffers that a forward may change.

Two machines behind one lock (`ParkGate`) say when. The *moment* opens at the top of a step and closes at
the optimizer's pre-hook. The *copy* of a moment may outlast it: the optimizer's step waits for it. If that
takes too long the step goes on, and the copy is discarded; so is a copy of which anything was written to:
a torn image is never sealed.

Who asks: SIGTERM (`park_signals`), a loop that is left in the middle of a step, a step that lasts too long,
and ``ckptctl park``.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from ckptd.client.capture.slot_writer import SMALL_BUFFER_BYTES
from ckptd.client.daemon_link.connection import WorkerThread
from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState, local
from ckptd.client.parking.park_memory import ParkMemory
from ckptd.client.parking.park_writer import CopyFailed, Moment, ParkCopy
from ckptd.client.rng_state import capture_rng
from ckptd.client.schedule.snapshot_plan import SnapshotPlan, human
from ckptd.client.stats import Stats
from ckptd.core.state_machine import MachineState, Transitions, validating
from ckptd.cuda.engine import CopyEngine

logger = get_logger(__name__)

_LOOK_S = 0.25
_TELL_S = 2.0
# How long a request from outside waits for the next top while the optimizer is stepping.
PATIENCE_S = 20.0
# How long the optimizer's step waits for a copy before that is discarded: 100 GB at 4 GB/s.
_UPDATE_WAIT_S = 25.0
# A step counts as hanging when it lasts longer than both: an evaluation or a save within the body
# must not look like it.
_LEAST_LIMIT_S = 30.0
_STEPS_OF_LIMIT = 20
_KNOWN_STEPS = 3


class MomentState(MachineState):
    """Whether there is a state to park."""

    CLOSED = "closed", "no state can be parked, and no top is near"
    OPEN = "open", "from the top of a step on: its state can be parked"
    UPDATING = "updating", "an optimizer is stepping; the next top is near"


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
    """The copy of a moment that is being parked."""

    NONE = "none", "no copy is under way"
    RUNNING = "running", "the optimizer's step waits for it"
    ABANDONED = "abandoned", "the optimizer's step has gone on; the result is discarded"


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


class ParkGate:
    """Opens and closes moments (training thread), and lets one copy at a time begin (any thread).

    Attributes:
        moment: the state that can be parked right now; None: there is none, and ``why_not`` says why.
    """

    def __init__(self, why_not: str) -> None:
        self.moment: Moment | None = None
        self.why_not = why_not
        self._moments, self._copies = MomentState.CLOSED, CopyState.NONE
        self._over = threading.Event()  # of the copy that is under way
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    @property
    def state(self) -> tuple[MomentState, CopyState]:
        """That of the moment, and of the copy."""
        return self._moments, self._copies

    @property
    def locked(self) -> bool:
        """Whether a thread is opening or closing a moment right now."""
        return self._lock.locked()

    def top(self, moment: Moment) -> None:
        """A step begins, and can be parked."""
        self._go(MomentEvent.TOP, moment, self.why_not)

    def update(self) -> threading.Event | None:
        """An optimizer is about to step; returns the event that ends its wait for a copy, if there is one."""
        self._go(MomentEvent.UPDATE, None, "an optimizer is stepping")
        # No copy of this moment can begin any more; one that ends just now need not be waited for.
        return self._over if self._copies is CopyState.RUNNING else None

    def close(self, why: str) -> None:
        """There is no state to park until the next top."""
        self._go(MomentEvent.CLOSE, None, why)

    def awaited(self, patience_s: float) -> Moment | None:
        """The moment; while an optimizer is stepping, the next one, if it comes in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._moments is not MomentState.UPDATING, timeout=patience_s)
            return self.moment

    def begin_copy(self, moment: Moment) -> bool:
        """Begin a copy, which is under way until `end_copy`; False if that is no longer the moment."""
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
        """Let the optimizer step; returns whether it did not wait for that. A second call does nothing."""
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


@dataclass(frozen=True, slots=True)
class Parked:
    """The outcome of a request to park: the iteration, or -1 and why not."""

    iteration: int
    reason: str = ""
    again: bool = False  # it was parked before the request


class Parking:
    """Parks one rank.

    Args:
        memory: this rank's memory, which has a session with the daemon.
        engine: its own, so that copies do not wait for a snapshot's.
        restless: names of large buffers that are known to change before the optimizer's step; added to.
        park_after_s: a step that lasts longer is parked; None: derived from the durations of steps.
    """

    def __init__(
        self,
        memory: RankMemory,
        binding: LiveState,
        engine: CopyEngine,
        stats: Stats,
        *,
        device: torch.device,
        restless: set[str],
        park_after_s: float | None = None,
        update_wait_s: float = _UPDATE_WAIT_S,
    ) -> None:
        self._memory, self._binding, self._engine, self._stats = memory, binding, engine, stats
        self._device, self._restless = device, restless
        self._park_after_s, self._update_wait_s = park_after_s, update_wait_s
        self._slots = ParkMemory(memory, binding, engine, stats)
        self._copy = ParkCopy(binding, engine, self._slots, device)
        self._places: list[tuple[str, Mapping[str, Tensor | None], str]] = []
        self._placed_for: SnapshotPlan | None = None
        # Whether random numbers are drawn between the top and the first forward; None: not seen yet.
        self._draws_first: bool | None = None
        self._durations: deque[float] = deque(maxlen=_STEPS_OF_LIMIT)
        self._top_at = 0.0
        self._pid = os.getpid()
        self._gate = ParkGate(
            "no step has begun whose state can be parked: the first ones are measured, and a replay is none"
        )
        self._one_at_a_time = threading.Lock()
        self._closed = threading.Event()
        self._thread = WorkerThread("ckptd-park", self._look, lambda error: None, self._closed, _LOOK_S)
        self._thread.start()
        memory.park_when_asked(self._asked_by_the_daemon)

    # -- the life of a step (training thread) -----------------------------------------------------

    def top(self, step: int, plan: SnapshotPlan, phase: int, scalars: dict[str, Any]) -> None:
        """The top of ``step``: from here on its state can be parked. Never raises.

        Args:
            phase: the place of the step in the schedule.
            scalars: the step scalars; the snapshot of the step, if there is one, is written from
                this dictionary.
        """
        try:
            now, before = time.monotonic(), self._top_at
            if before:
                self._durations.append(now - before)
            self._top_at = now
            if not self.copying:
                self._slots.tidy()
                self._slots.fit(plan, step)
            moment = self._moment_of(step, plan, phase, scalars)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            if why != self._gate.why_not:  # logged once, not at every step
                logger.error("step %d cannot be parked", step, exc_info=error)
            self.closed_because(why)
            return
        self._gate.top(moment)

    def again(self) -> None:
        """The top of a further step of an accumulation: the weights are those of the top before."""
        if (moment := self._gate.moment) is not None:
            moment.begun_s = time.monotonic()

    def first_forward(self) -> None:
        """The first forward is about to run: keep the random state that a resumed step must have there."""
        moment = self._gate.moment
        if moment is None or moment.rng_forward is not None:
            return
        found: dict[str, Any] = moment.recorded.get("rng_forward") or capture_rng()
        if not self._draws_first:
            self._draws_first = found != moment.scalars["rng"]
        moment.rng_forward = found

    def before_update(self) -> None:
        """An optimizer is about to step: the moment is over. Blocks while a copy is under way."""
        over = self._gate.update()
        if over is not None and not over.wait(self._update_wait_s):
            self._gate.abandon_copy()

    def closed_because(self, why: str) -> None:
        """There is no state to park until the next top."""
        self._gate.close(why)

    def leave(self, why: str) -> None:
        """The loop is left; if that is in the middle of a step, its state is parked first. Never raises."""
        if os.getpid() != self._pid:
            return
        if self.possible:
            self.park(why)
        self.closed_because("the loop is not running")

    # -- parking (any thread) --------------------------------------------------------------------

    @property
    def copying(self) -> bool:
        """Whether a copy is under way."""
        return self._gate.state[1] is not CopyState.NONE

    @property
    def locked(self) -> bool:
        """Whether a thread is opening or closing a moment right now."""
        return self._gate.locked

    @property
    def possible(self) -> bool:
        """Whether there is a state that can be parked right now."""
        return self._gate.moment is not None

    def park(self, why: str, patience_s: float = 0.0) -> Parked:
        """Park the current step; never raises.

        Args:
            why: for the log.
            patience_s: how long to wait for the next top while the optimizer is stepping.
        """
        started = time.perf_counter()
        try:
            outcome = self._park(patience_s)
        except CopyFailed as error:
            outcome = Parked(-1, str(error))
        except Exception as error:  # whoever asks must get an answer, and training must go on
            logger.error("parking failed", exc_info=error)
            outcome = Parked(-1, f"{type(error).__name__}: {error}")
        self._report(why, outcome, time.perf_counter() - started)
        return outcome

    def ask(self, why: str, then: Callable[[Parked], None]) -> bool:
        """Park on another thread, with patience, then call ``then``. False if too many requests wait."""
        return self._thread.submit(lambda: then(self.park(why, PATIENCE_S)))

    def close(self) -> None:
        """Park no more; parked state stays. Never raises."""
        self._memory.park_when_asked(None)
        self.closed_because("the checkpointer is closed")
        self._closed.set()
        self._thread.join(_TELL_S)
        self._engine.close()

    def describe(self) -> str:
        """One line: the size of the memory, or why there is none."""
        newest, limit_s = self._slots.newest, self.limit_s
        if newest is None:
            return f"parking: no memory yet{f' ({self._slots.refused})' if self._slots.refused else ''}"
        after = f"; a step of more than {limit_s:.0f} s is parked" if limit_s else ""
        total, each = human(self._stats.park_memory_bytes), human(newest.geometry.slot_bytes)
        return f"parking: {total} for 2 states of at most {each}{after}"

    @property
    def limit_s(self) -> float:
        """How long a step may last before it is parked; 0: not known yet."""
        if self._park_after_s is not None:
            return self._park_after_s
        if len(self._durations) < _KNOWN_STEPS:
            return 0.0
        # A copy: the parking thread asks, too.
        return max(_LEAST_LIMIT_S, _STEPS_OF_LIMIT * statistics.median(list(self._durations)))

    def _park(self, patience_s: float) -> Parked:
        gate = self._gate
        moment = gate.awaited(patience_s)
        if moment is None:
            return Parked(-1, gate.why_not)
        with self._one_at_a_time:
            if moment.parked:
                return Parked(moment.step, again=True)
            if not gate.begin_copy(moment):
                return Parked(-1, gate.why_not)
            gone_on = f"the optimizer's step waited {self._update_wait_s:g} s for it, and went on"
            try:
                with self._copy.of(moment, self._rng_forward(moment)) as fill:
                    if gate.end_copy():
                        raise CopyFailed(gone_on)
                    fill.seal()
            except CopyFailed as error:
                if gate.end_copy():  # whatever has changed then, it may have been the optimizer
                    raise CopyFailed(gone_on) from error
                raise
            finally:
                gate.end_copy()
            moment.parked = True
            return Parked(moment.step)

    def _rng_forward(self, moment: Moment) -> dict[str, Any] | None:
        """Random state at the first forward; before that, that at the top if nothing draws in between."""
        if moment.rng_forward is not None:
            return moment.rng_forward
        found: dict[str, Any] = moment.scalars["rng"]
        return found if self._draws_first is False else None

    def _report(self, why: str, outcome: Parked, took_s: float) -> None:
        stats, session = self._stats, self._memory.session
        if outcome.again:
            return
        if outcome.iteration < 0:
            stats.park_refused += 1
            logger.warning("not parked (%s): %s", why, outcome.reason)
            return
        stats.parked += 1
        stats.parked_iteration, stats.park_ms = outcome.iteration, took_s * 1e3
        text = f"parked at iteration {outcome.iteration} in {took_s:.3f} s: {why}"
        # A warning, so that it is seen without any logging set-up: the process may be about to end.
        logger.warning("%s", text)
        if not session.tell("info", "parked", text, _TELL_S):
            logger.info("parked all the same: what is sealed needs no daemon")

    def _moment_of(self, step: int, plan: SnapshotPlan, phase: int, scalars: dict[str, Any]) -> Moment:
        if plan is not self._placed_for:
            self._placed_for = plan
            known = self._binding.buffers().keys()
            places = self._binding.buffer_places()
            self._places = [(name, *place) for name, place in places.items() if name in known]
        marks: list[tuple[Mapping[str, Any], str, Tensor, int]] = [
            (tensors, name, tensor, tensor._version)
            for tensors in (self._binding.params, self._binding.masters)
            for name, tensor in tensors.items()
        ]
        kept: dict[str, Tensor] = {}
        for name, place, key in self._places:
            buffer = place.get(key)
            if not isinstance(buffer, Tensor):
                continue
            size = buffer.numel() * buffer.element_size()
            if size <= SMALL_BUFFER_BYTES or name in self._restless:
                kept[name] = local(buffer).detach().clone()
            else:
                marks.append((place, key, buffer, buffer._version))
        # The thread of a copy that the optimizer's step gave up may use what `look` would change.
        tensors = None if self.copying else self._copy.look(step)
        ready = None
        if self._device.type == "cuda":
            ready = torch.cuda.current_stream(self._device).record_event()
        return Moment(step, phase, dict(scalars), scalars, kept, marks, tensors, ready)

    # -- on the thread ---------------------------------------------------------------------------

    def _look(self) -> None:
        """Park the current step if it lasts too long."""
        moment, limit_s = self._gate.moment, self.limit_s
        if moment is None or moment.late or moment.parked or not limit_s:
            return
        if time.monotonic() - moment.begun_s > limit_s:
            moment.late = True
            self.park(f"step {moment.step} lasts longer than {limit_s:g} s; training goes on")

    def _asked_by_the_daemon(self, number: int) -> None:
        session = self._memory.session

        def answer(outcome: Parked) -> None:
            session.park_outcome(number, outcome.iteration, outcome.reason)

        if not self.ask("ckptctl park", answer):
            answer(Parked(-1, "too many wishes to park wait already"))
