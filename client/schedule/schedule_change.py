"""Schedule changes that all ranks make at one iteration: agreement, plan, memory, switch-over.

The phase of an iteration follows from its number and from what was agreed on
(`ckptd.core.snapshot_policy`); the protocol is `ckptd.core.switching`. A thread beside
training (`ScheduleAgreement`) asks the job's store; training never waits for it. Memory for a change is
made before this rank reports that it is prepared, so that the switch-over cannot fail.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from ckptd.client import values
from ckptd.client.daemon_link.mapped_segment import MappedSegment
from ckptd.client.log_lines import get_logger
from ckptd.client.ranks.store_agreement import play
from ckptd.client.ranks.store_barrier import job_store, own_connection
from ckptd.client.schedule.measurements import StepTiming
from ckptd.client.schedule.planner import RankContext
from ckptd.client.schedule.snapshot_plan import SnapshotPlan
from ckptd.core.schedule import reorder
from ckptd.core.snapshot_policy import Calendar, OperatorCost, Schedule, Strides
from ckptd.core.state_machine import MachineState, Transitions, validated
from ckptd.core.switching import (
    Apply,
    Ask,
    Change,
    Discard,
    Effect,
    Event,
    LookForAttempt,
    Prepare,
    Prepared,
    RequestFailed,
    Stage,
    Switching,
    Unable,
    accesses,
)
from ckptd.cuda.quiet_threads import Bell, start_quiet
from ckptd.errors import AttachRefused, DaemonUnavailable, LocalProtocolError

if TYPE_CHECKING:
    from ckptd.client.schedule.provision import Provision

logger = get_logger(__name__)

# Seconds between two looks while nothing is open, and while something is; each rank looks, and one
# store serves them all: it answers some 20,000 small requests per second.
_IDLE_S, _OPEN_S = 1.0, 0.1
_RANKS_PER_S = 4_000
_ANSWER_S = 10.0
_RETRY_S, _RETRY_MAX_S, _TOLD_OUTAGES = 0.5, 30.0, 3
# A promise leaves time for so many looks of all ranks.
_MARGIN_LOOKS = 10
_PATIENCE_S, _APART_S, _APART_MAX_S = 120.0, 10.0, 600.0
_ORDER_TRIES = 5

Phases = tuple[tuple[int, ...], ...]


class ScheduleAgreement:
    """One rank's part in the agreements of one epoch: a thread that runs the protocol, and its lock.

    Args:
        find_store: returns the job's store; called in the thread, again after a failure.
        prefix: equal on all ranks, and new after each restart of the job.
        machine: other delays, for tests.
    """

    def __init__(
        self,
        find_store: Callable[[], Any],
        *,
        prefix: str,
        world_size: int,
        machine: Switching | None = None,
    ) -> None:
        self._find_store, self._prefix, self._world_size = find_store, prefix, world_size
        self._machine = machine or Switching(
            patience_s=_PATIENCE_S, apart_s=_APART_S, apart_max_s=_APART_MAX_S
        )
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._open_s = max(_OPEN_S, world_size / _RANKS_PER_S)
        self._outages = 0
        self._store: Any = None
        self._bell = Bell()
        start_quiet(self._run, name="ckptd-switch")

    def wish(self, change: Change) -> bool:
        """Propose a change; False if another one is open or was a moment ago."""
        margin_s = _MARGIN_LOOKS * self._open_s
        with self._lock:
            return self._machine.wish(change, margin_s=margin_s, now_s=time.monotonic())

    def boundary(self, step: int, *, iteration_s: float) -> list[Effect]:
        """The effects to perform at the top of ``step``, before its snapshot."""
        with self._lock:
            return self._machine.boundary(step, iteration_s=iteration_s)

    def knows(self, step: int) -> bool:
        """True if this rank may snapshot ``step``."""
        with self._lock:
            return self._machine.knows(step)

    def prepared(self, number: int) -> None:
        """Report that this rank can make the change."""
        self._handle(Prepared(number))

    def unable(self, number: int, why: str) -> None:
        """Report that this rank cannot make the change."""
        self._handle(Unable(number, why))

    def close(self) -> None:
        """Take no further part. An open attempt fails, unless all ranks have promised."""
        self._closed.set()
        self._bell.ring()

    def _handle(self, event: Event) -> None:
        with self._lock:
            self._machine.handle(event, now_s=time.monotonic())

    def _run(self) -> None:
        pause_s: float | None = 0.0
        while pause_s is not None:
            self._bell.wait(pause_s)
            if self._closed.is_set():
                return
            pause_s = self._turn()

    def _turn(self) -> float | None:
        """One access to the store, if the machine asks for one; the seconds until the next, None: never."""
        with self._lock:
            ask = self._machine.ask(time.monotonic())
        if ask is None:
            return self._open_s
        try:
            if self._store is None:
                self._store = own_connection(self._find_store(), answer_s=_ANSWER_S)
            event = play(self._store, self._prefix, accesses(ask, self._world_size))
            if event is not None:
                self._handle(event)
        except LocalProtocolError as error:
            logger.error("the ranks cannot agree on changes any more: %s", error)
            return None
        except Exception as error:  # noqa: BLE001 - see the next line
            # The store ends with the job, in as many ways as there are backends.
            self._store = None
            return self._failed(ask, error)
        if self._outages >= _TOLD_OUTAGES:
            logger.info("the job's store answers again")
        self._outages = 0
        if event is not None:
            return 0.0
        idle = isinstance(ask, LookForAttempt)
        return max(_IDLE_S, self._world_size / _RANKS_PER_S) if idle else self._open_s

    def _failed(self, ask: Ask, error: Exception) -> float:
        """The store did not answer; returns when to try again."""
        self._handle(RequestFailed())
        self._outages += 1
        doubt = self._machine.stage is Stage.PROMISED
        # While nothing is open it may just be the end of the job: logged if it lasts for some seconds.
        if self._outages == (1 if doubt else _TOLD_OUTAGES) and not self._closed.is_set():
            kept = (
                "whether the schedule changes is open, and no snapshots are taken until it answers"
                if doubt
                else "the schedule stays as it is"
            )
            logger.error("the job's store did not answer (%s): %s; %s", type(ask).__name__, error, kept)
        again_s: float = min(_RETRY_S * 2 ** min(self._outages, 10), _RETRY_MAX_S)
        return again_s


class Preparation(MachineState):
    """How far this rank is with the plan and the memory for a change."""

    NONE = "none", "no attempt is open for this rank"
    WAITING = "waiting", "asked to prepare; other memory is on its way, one thing at a time"
    MAKING = "making", "planned; its memory is being made"
    PREPARED = "prepared", "plan and memory are there, so that going over cannot fail"
    UNABLE = "unable", "this rank cannot, and has said so; the attempt is about to end"


class PreparationEvent(StrEnum):
    """An event of the preparation."""

    ASK = "ask"
    PLAN = "plan"
    MAKE = "make"
    REFUSE = "refuse"
    APPLY = "apply"
    GIVE_BACK = "give back"


TRANSITIONS = Transitions(
    "preparation",
    {
        (Preparation.NONE, PreparationEvent.ASK): Preparation.WAITING,
        (Preparation.WAITING, PreparationEvent.PLAN): Preparation.MAKING,
        (Preparation.WAITING, PreparationEvent.REFUSE): Preparation.UNABLE,
        (Preparation.MAKING, PreparationEvent.MAKE): Preparation.PREPARED,
        (Preparation.MAKING, PreparationEvent.REFUSE): Preparation.UNABLE,
        # A rank that has promised goes over, also if it has said since that it cannot.
        (Preparation.PREPARED, PreparationEvent.APPLY): Preparation.NONE,
        **{(state, PreparationEvent.GIVE_BACK): Preparation.NONE for state in Preparation},
    },
)


@dataclass(slots=True)
class _Ready:
    """What was prepared for an attempt."""

    plan: SnapshotPlan | None = None
    segment: MappedSegment | None = None
    orders: tuple[Phases, ...] = ()


class ScheduleChanges:
    """One rank's schedule changes; no call waits."""

    def __init__(self, plans: Provision, context: RankContext, pace: StepTiming) -> None:
        self._plans, self._pace = plans, pace
        self._binding, self._memory, self._engine = context.binding, context.memory, context.engine
        self._counter, self._stats = context.counter, context.stats
        self.calendar = Calendar()
        self.strides = Strides()
        self._agreement: ScheduleAgreement | None = None
        self._state, self._ready = Preparation.NONE, _Ready()
        self._number = 0  # of the attempt for which this rank prepares or has prepared
        self._order: tuple[int, ...] = ()  # to be proposed, and how often still
        self._order_tries = 0

    def close(self) -> None:
        """Take no further part, and return what was prepared."""
        if self._agreement is not None:
            self._agreement.close()
        self._give_back()

    def resume(self, last: int, phase: int, stride: int) -> None:
        """Continue after snapshot ``last``, which has this phase."""
        self.calendar = Calendar().from_here(last, phase=phase, stride=stride)
        self.strides.forget()

    # -- at the top of a step ------------------------------------------------------------------------

    @validated
    def boundary(self, step: int) -> bool:
        """Perform what is due at this boundary.

        False if this rank does not know the schedule of this step, which must then not be captured.
        """
        for effect in self._agreed().boundary(step, iteration_s=self._pace.iteration_s):
            match effect:
                case Prepare():
                    self._number = effect.number
                    if self._state is Preparation.NONE:
                        self._on(PreparationEvent.ASK)
                    self._prepare(effect.change)
                case Apply():
                    self._apply(effect)
                case Discard():
                    logger.info("the schedule stays (%s): %s", effect.change.why, effect.why)
                    self._give_back()
        self._follow_calendar(step)
        knows = self._agreed().knows(step)
        self._stats.undecided += not knows
        return knows

    def wish(self, change: Change) -> bool:
        """Propose a change to the other ranks; False if it must be tried again later."""
        return self._agreed().wish(change)

    @property
    def open(self) -> bool:
        """True while this rank prepares, or has prepared, a change."""
        return self._state is not Preparation.NONE

    @property
    def reserving(self) -> bool:
        """True while memory for a change is on its way: one request at a time."""
        return self._ready.plan is not None and self._ready.segment is None

    def unable(self, why: str) -> None:
        """Report that whatever was prepared is useless now."""
        if self.open:
            self._agreed().unable(self._number, why)

    @property
    def state(self) -> Preparation:
        """How far this rank is; see the table."""
        return self._state

    def _on(self, event: PreparationEvent) -> None:
        """Every transition goes through here."""
        self._state = TRANSITIONS.after(self._state, event, attempt=self._number)

    def _validate(self) -> None:
        """Memory that was made exists until it is used or given back, and no longer."""
        ready, state = self._ready, self._state
        if state in (Preparation.NONE, Preparation.WAITING):
            assert ready.plan is None, f"{state}, and a plan"
            assert not ready.orders, f"{state}, and orders"
        if state is Preparation.MAKING:
            assert self.reserving, f"{state}, and no memory is on its way"
        if state is Preparation.PREPARED:
            assert not self.reserving, f"{state}, and its memory is on its way"
        assert state is Preparation.NONE or self._number > 0

    def _agreed(self) -> ScheduleAgreement:
        if self._agreement is None:
            identity = self._memory.identity
            prefix = f"ckptd/{identity.job}/{identity.run}/{self._memory.epoch}/switch"
            self._agreement = ScheduleAgreement(job_store, prefix=prefix, world_size=identity.world_size)
        return self._agreement

    def _plan(self) -> SnapshotPlan:
        plan = self._plans.plan
        assert plan is not None
        return plan

    def _follow_calendar(self, step: int) -> None:
        """Where a window begins, take the next step towards the order that was agreed on."""
        plan = self._plan()
        phases = self.calendar.phases(step, plan.schedule.window)
        if phases is not None and phases != plan.schedule.phases:
            plan.use_phases(phases)
            self._stats.reorders += 1

    # -- preparing -----------------------------------------------------------------------------------

    def _prepare(self, change: Change) -> None:
        if self._state is Preparation.WAITING:
            if (change.window or change.policy) and self._plans.reserves:
                return  # later: one thing at a time
            try:
                self._ready = self._made_ready(change, self._plan())
            except ValueError as error:
                self._refuse(str(error))
                return
            self._on(PreparationEvent.PLAN)
        if self._state is Preparation.MAKING and (not self.reserving or self._reserve(self._ready)):
            self._on(PreparationEvent.MAKE)
            self._agreed().prepared(self._number)

    def _made_ready(self, change: Change, plan: SnapshotPlan) -> _Ready:
        if change.order:
            if change.table != table_digest(plan):
                raise ValueError("this rank has other operators, sizes or slots")
            orders = _orders(plan, change.order)
            if any(plan.takes(self._binding, phases) > plan.slot_bytes for phases in orders):
                raise ValueError("its slots are too small for that order")
            return _Ready(orders=orders)
        if change.every:
            self._plans.check_interval(change.every)
        if not (change.window or change.policy):
            return _Ready()
        if not self._memory.session.connected:
            raise ValueError("the daemon is away")
        other = self._plans.plan_for(change)
        wanted = 1 if change.policy == "dense" else change.window
        if other.schedule.window != wanted:
            raise ValueError(f"it can only have a window of {other.schedule.window}")
        return _Ready(plan=other)

    def _reserve(self, ready: _Ready) -> bool:
        """Have the memory made; False while it is on its way, or if there is none."""
        plan = ready.plan
        assert plan is not None
        if self._memory.session.reserving:
            return False
        try:
            ready.segment = self._memory.reserve(
                plan.slot_bytes,
                plan.num_slots,
                window=plan.policy.window,
                num_operators=len(plan.operators),
                payload=plan.payload(self._binding),
                patient=False,
                ahead=True,
            )
        except TimeoutError:
            return False
        except (AttachRefused, DaemonUnavailable) as error:
            if isinstance(error, AttachRefused) and plan.upload_slots:
                plan.leave_no_room_for_uploads()
            else:
                self._refuse(str(error))
            return False
        self._engine.register(ready.segment.memory, ready.segment.regions())
        return True

    def _refuse(self, why: str) -> None:
        self._on(PreparationEvent.REFUSE)
        logger.info("this rank cannot change its schedule: %s", why)
        self._agreed().unable(self._number, f"rank {self._memory.identity.rank} cannot: {why}")

    def _give_back(self) -> None:
        self._on(PreparationEvent.GIVE_BACK)
        ready, self._ready = self._ready, _Ready()
        if ready.segment is not None:
            self._engine.release(ready.segment.memory)
            self._memory.give_back(ready.segment)

    # -- switching over --------------------------------------------------------------------------------

    def _apply(self, effect: Apply) -> None:
        ready, change = self._ready, effect.change
        assert effect.number == self._number
        self._on(PreparationEvent.APPLY)
        self._ready = _Ready()
        text = f"from iteration {effect.at} on another schedule on all ranks: {change.why}"
        logger.info("%s", text)
        self._memory.session.notice("info", "schedule_changed", text)
        self._stats.switches += 1
        if ready.plan is not None:
            assert ready.segment is not None
            self._order = ()  # it was one of other operators
            self._memory.install(ready.segment)
            self.calendar = self.calendar.from_here(effect.at)
            self._plans.adopt(ready.plan)
        elif change.stride:
            phase = self.calendar.ordinal(effect.at) % self._plan().span
            self.calendar = self.calendar.from_here(effect.at, phase=phase, stride=change.stride)
        elif change.every:
            ordinal = self._plan().next_ordinal(self.calendar.ordinal(effect.at), change.every)
            self.calendar = self.calendar.from_here(effect.at, phase=ordinal)
            self._plans.use_interval(change.every)
        else:
            self._order = ()
            self.calendar = self.calendar.ordered(ready.orders, effect.at)

    # -- proposals of rank 0 ---------------------------------------------------------------------------

    def wish_for_order(self, *, every: int) -> bool:
        """Propose an order by the popularity that this rank has counted; call it where a window begins.

        True if it is proposed now.
        """
        plan = self._plan()
        if self._memory.identity.rank != 0 or plan.schedule.window == 1:
            return False
        order = self._counter.new_order(plan, every=every)
        if order:
            self._order, self._order_tries = order if _orders(plan, order) else (), _ORDER_TRIES
        going = self.calendar.orders and self.calendar.orders[-1] != plan.schedule.phases
        if not self._order or self.open or going:
            return False
        change = Change("experts by popularity", order=self._order, table=table_digest(plan))
        wished = self.wish(change)
        if wished:
            # Messages may be late. Ranks with other operators never agree, however often they are asked.
            self._order_tries -= 1
            self._order = self._order if self._order_tries else ()
        return wished

    def wish_for_stride(self) -> None:
        """Propose other strides once they have settled."""
        settled = self.strides.settled()
        if self._memory.identity.rank == 0 and settled not in (0, self.calendar.stride):
            change = Change(f"a snapshot can be taken every {settled} iterations", stride=settled)
            if self.wish(change):
                self.strides.forget()


def table_digest(plan: SnapshotPlan) -> str:
    """A digest of what the steps towards another order follow from, equal on ranks that take the same."""
    facts = [
        [(c.name, c.anchor_bytes, c.compute_bytes) for c in plan.costs],
        plan.schedule.phases,
        plan.order_capacity,
        plan.owners,
    ]
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(facts))


def _orders(plan: SnapshotPlan, order: Sequence[int]) -> tuple[Phases, ...]:
    if plan.policy_name in ("dense", "partial"):
        raise ValueError(f"its snapshots are {plan.policy_name}")
    return orders_towards(plan.schedule, plan.costs, order, capacity_bytes=plan.order_capacity)


def orders_towards(
    schedule: Schedule, costs: Sequence[OperatorCost], order: Sequence[int], *, capacity_bytes: int
) -> tuple[Phases, ...]:
    """The phases of each following window until the order is reached; none if it cannot come closer.

    Raises:
        ValueError: the order is not one of these operators.
    """
    if sorted(order) != list(range(len(costs))):
        raise ValueError(f"an order of {len(order)} operators, there are {len(costs)}")
    found: list[Phases] = []
    # Each pass brings an operator at least one phase closer, as bubble sort does.
    for _ in range(2 * schedule.window):
        after = reorder(schedule, costs, order, capacity_bytes=capacity_bytes)
        if after.phases == schedule.phases:
            break
        found.append(after.phases)
        schedule = after
    return tuple(found)


# -- after a localized restart ---------------------------------------------------------------------


class ScheduleStart(msgspec.Struct, frozen=True, array_like=True):
    """The schedule that one rank begins a localized recovery with.

    Args:
        phases: pairs of an iteration and its phase.
        span: the number of snapshots after which phases repeat, at the last of ``phases``; 0:
            unknown (a snapshot may not be here yet).
        stride: iterations between two snapshots there.
    """

    phases: list[tuple[int, int]] = []
    span: int = 0
    stride: int = 1

    def agrees(self, iteration: int, phase: int) -> bool:
        """True if this rank has that phase in that iteration, under an unchanged schedule."""
        at, here = self.phases[-1]
        return (here + (iteration - at) // self.stride) % self.span == phase


def of_parked(iteration: int, phase: int, scalars: dict[str, Any], payload: bytes) -> ScheduleStart:
    """The start of a rank that continues from parked state.

    Args:
        scalars: its step scalars.
        payload: the plan in its ring, as in a segment's descriptor.
    """
    plan = values.unpack(payload)
    dense = plan["policy"] == "dense"
    every = int(scalars.get("every", plan["every"]))  # absent in what 0.4 recorded
    window = len(scalars["phases"])
    if window != len(plan["phases"]):
        return ScheduleStart()  # its ring is already that of another window, or not yet
    return ScheduleStart([(iteration, phase)], every if dense else window, int(scalars.get("stride", 1)))


def differing(starts: Sequence[ScheduleStart]) -> str:
    """The first rank whose schedule differs, in words; empty if all agree.

    Each rank continues with the schedule of what it loads. If the ranks changed the window after the
    last snapshot of those that replay, these would not know: phases would differ for good, and no
    global recovery would be exact any more. So all ranks go back now, while they have a suffix in
    common.

    Args:
        starts: by rank; an empty one differs from all.
    """
    known = next((each for each in starts if each.span), None)
    for rank, each in enumerate(starts):
        agrees = known is not None and bool(each.phases)
        if agrees and known is not None:
            agrees = all(known.agrees(*pair) for pair in each.phases)
            agrees &= not each.span or (each.span, each.stride) == (known.span, known.stride)
        if not agrees:
            return f"rank {rank} would go on by another schedule of snapshots than those before it"
    return ""
