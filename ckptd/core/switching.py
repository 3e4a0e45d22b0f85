"""A change of the schedule: all ranks change at one iteration, or none does. Pure.

The requirement is *agreement*: no two ranks of an epoch snapshot the same iteration by different schedules.
Nothing may wait for it, least of all training, and each rank is at another iteration when it hears of
something. The ranks share registers that can be compared and swapped (the job's store). An attempt to change
has a number and goes through the stages of the table below. *Ready* binds to nothing. A rank that has
*promised* takes no snapshot from iteration ``promised`` on before it knows the outcome, which is the same for
all ranks: ``go`` at the largest promise of all, or dropped.

The outcome is one register, written once: by the last rank that promises (go), or by a rank that gives up
(dropped), because it cannot prepare, because it has waited too long for others to be ready, or because it has
reached its own promise without knowing the outcome.

Why agreement holds. Suppose rank *q* snapshots iteration *s* by a change that went at *T* ≤ *s*. Then every
rank *r* has promised some *A* ≤ *T*, and *A* was later than any iteration that *r* had begun. If *r* began
*s* before it promised, then *s* < *A* ≤ *T*, a contradiction. If *r* began *s* afterwards, it is past its
promise and takes a snapshot only if it has read the register, which says *T*: so by the new schedule, too. A
rank prepares the next change only after it has applied the last one, so all ranks apply changes in the same
order. Nothing here depends on clocks or delays: they decide whether a change succeeds, and how many snapshots
a rank in doubt leaves out. That is none if it hears in time, and as many as one read of the store takes
otherwise.

The second half of the module plays each question to the store as a sequence of register accesses.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from ckptd.core.state_machine import MachineState, Transitions, validated
from ckptd.errors import LocalProtocolError
from ckptd.unpacking import unpack

_LEAST_MARGIN = 2
_MOST_MARGIN_S = 60.0


class Stage(MachineState):
    """How far the newest attempt is on this rank."""

    IDLE = "idle", "nothing is open"
    PROPOSING = "proposing", "this rank wishes for a change, and asks the store to open an attempt"
    PREPARING = "preparing", "plan and memory for the change are made"
    READY = "ready", "this rank could go over; that binds it to nothing"
    PROMISED = "promised", "from the promised iteration on no snapshot before the outcome is known"
    DECIDED = "decided", "go: by the new schedule from an iteration on"


class SwitchEvent(StrEnum):
    """What happens to an attempt, as this rank sees it."""

    WISH = "wish"
    PROPOSED = "proposed"  # by anybody
    FAILED = "failed"  # the store did not answer the proposal
    PREPARED = "prepared"
    UNABLE = "unable"
    ALL_READY = "all ready"
    GO = "go"
    DROPPED = "dropped"
    APPLIED = "applied"


TRANSITIONS = Transitions(
    "schedule change",
    {
        (Stage.IDLE, SwitchEvent.WISH): Stage.PROPOSING,
        (Stage.IDLE, SwitchEvent.PROPOSED): Stage.PREPARING,
        (Stage.PROPOSING, SwitchEvent.PROPOSED): Stage.PREPARING,
        (Stage.PROPOSING, SwitchEvent.FAILED): Stage.IDLE,
        (Stage.PREPARING, SwitchEvent.PREPARED): Stage.READY,
        (Stage.PREPARING, SwitchEvent.UNABLE): Stage.PREPARING,
        (Stage.PREPARING, SwitchEvent.DROPPED): Stage.IDLE,
        (Stage.READY, SwitchEvent.UNABLE): Stage.READY,
        (Stage.READY, SwitchEvent.ALL_READY): Stage.PROMISED,
        (Stage.READY, SwitchEvent.DROPPED): Stage.IDLE,
        # A promise binds: this rank learns the outcome like all others.
        (Stage.PROMISED, SwitchEvent.UNABLE): Stage.PROMISED,
        (Stage.PROMISED, SwitchEvent.GO): Stage.DECIDED,
        (Stage.PROMISED, SwitchEvent.DROPPED): Stage.IDLE,
        (Stage.DECIDED, SwitchEvent.APPLIED): Stage.IDLE,
    },
)
_ANSWERING = (Stage.PREPARING, Stage.READY, Stage.PROMISED)


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """A proposed change; defaults mean no change.

    ``policy``: of the snapshots.
    ``order``: the operators of the table with the digest ``table``, in the order of their anchors.
    ``stride``: the iterations between two boundaries at which a snapshot can be taken.
    ``every``: the iterations between two snapshots.
    """

    why: str
    window: int = 0
    policy: str = ""
    stride: int = 0
    every: int = 0
    order: tuple[int, ...] = ()
    table: str = ""


# -- events ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Proposed:
    """Some rank opened attempt ``number``; promises leave ``margin_s`` for the messages."""

    number: int
    change: Change
    margin_s: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """This rank has prepared the change."""

    number: int


@dataclass(frozen=True, slots=True)
class Unable:
    """This rank cannot prepare the change."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class AllReady:
    """Every rank has prepared the change."""

    number: int


@dataclass(frozen=True, slots=True)
class Decided:
    """The outcome: go at iteration ``at``, or dropped (-1) for the reason ``why``."""

    number: int
    at: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The store did not answer the last question; it may have been executed all the same."""


Event = Proposed | Prepared | Unable | AllReady | Decided | RequestFailed

# -- questions to the store, one at a time ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Propose:
    """Open the attempt, unless another rank has: Proposed, or RequestFailed."""

    number: int
    change: Change
    margin_s: float


@dataclass(frozen=True, slots=True)
class TellReady:
    """Count this rank as ready, once: AllReady if it is the last."""

    number: int


@dataclass(frozen=True, slots=True)
class TellPromise:
    """Publish this rank's promise, once: Decided if it is the last."""

    number: int
    at: int


@dataclass(frozen=True, slots=True)
class EndAttempt:
    """Drop the attempt, unless it is decided: Decided."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class Watch:
    """Read whether the attempt is decided, or (``ready``) all ranks are ready."""

    number: int
    ready: bool


@dataclass(frozen=True, slots=True)
class LookForAttempt:
    """Read whether there is an attempt later than ``number``."""

    number: int


Ask = Propose | TellReady | TellPromise | EndAttempt | Watch | LookForAttempt

# -- effects for the trainer -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepare:
    """Prepare plan and memory, then report Prepared or Unable; repeated at each boundary until then."""

    number: int
    change: Change


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply the change now; it counts from ``at`` on, which has passed if this rank was in doubt."""

    number: int
    change: Change
    at: int


@dataclass(frozen=True, slots=True)
class Discard:
    """The attempt was dropped: give back what was prepared."""

    number: int
    change: Change
    why: str


Effect = Prepare | Apply | Discard


class Switching:
    """One rank's part in one epoch.

    Args:
        patience_s: how long a rank that prepares or is ready waits for all ranks to be ready.
        apart_s: the pause after a dropped attempt before this rank proposes another; doubles with each.
        apart_max_s: the limit of that pause.
    """

    def __init__(self, *, patience_s: float, apart_s: float, apart_max_s: float) -> None:
        self._patience_s, self._apart_s, self._apart_max_s = patience_s, apart_s, apart_max_s
        self.stage = Stage.IDLE
        self.number = 0
        self._change = Change("")
        self._margin_s = 0.0
        self._told = False
        self._dropping = ""
        self._begun_s = 0.0
        self._not_before_s = -math.inf
        self._dropped_in_a_row = 0
        self._promised = self._at = 0
        self._reached, self._iteration_s = -1, 0.0
        self._discards: list[Discard] = []

    # -- called by the trainer -----------------------------------------------------------------------

    @validated
    def wish(self, change: Change, *, margin_s: float, now_s: float) -> bool:
        """Propose a change; False while another one is open, or the last attempt is too recent.

        Args:
            margin_s: the time in which all ranks hear of something; doubles with every dropped attempt.
        """
        if self.stage is not Stage.IDLE or now_s < self._not_before_s:
            return False
        self._on(SwitchEvent.WISH)
        self._change = change
        self._margin_s = min(margin_s * 2**self._dropped_in_a_row, _MOST_MARGIN_S)
        return True

    @validated
    def boundary(self, iteration: int, *, iteration_s: float) -> list[Effect]:
        """The effects at the top of ``iteration``, before its snapshot."""
        self._reached, self._iteration_s = max(self._reached, iteration), iteration_s
        effects: list[Effect] = list(self._discards)
        self._discards.clear()
        if self.stage is Stage.PREPARING and not self._dropping:
            effects.append(Prepare(self.number, self._change))
        elif self.stage is Stage.DECIDED and iteration >= self._at:
            self._on(SwitchEvent.APPLIED)
            effects.append(Apply(self.number, self._change, self._at))
        elif not self.knows(iteration) and not self._dropping:
            self._dropping = f"a rank reached iteration {iteration} before it heard of all others"
        return effects

    def knows(self, iteration: int) -> bool:
        """Whether this rank knows the schedule of ``iteration``, so that it may take a snapshot."""
        return self.stage is not Stage.PROMISED or iteration < self._promised

    # -- events --------------------------------------------------------------------------------------

    @validated
    def handle(self, event: Event, *, now_s: float) -> None:
        """Take note of an event; those of past attempts are ignored.

        Raises:
            LocalProtocolError: the event is impossible if all ranks keep to the rules.
        """
        if isinstance(event, RequestFailed):
            if self.stage is Stage.PROPOSING:
                self._on(SwitchEvent.FAILED)
                self._rest(now_s, came_about=False)
            return
        if self._is_past(event):
            return
        match event:
            case Proposed():
                self._begin(event, now_s)
            case Prepared():
                self._on(SwitchEvent.PREPARED)
            case Unable():
                self._on(SwitchEvent.UNABLE)
                self._dropping = self._dropping or event.why
            case AllReady():
                self._promise()
            case Decided():
                self._decided(event, now_s)

    def _on(self, event: SwitchEvent) -> None:
        """Make a transition; each stage has its own question to the store."""
        before, self.stage = self.stage, TRANSITIONS.after(self.stage, event, attempt=self.number)
        if self.stage is not before:
            self._told = False

    def _validate(self) -> None:
        """Assert what the module's proof rests on, as far as one rank can see it."""
        if self.stage is Stage.DECIDED:
            assert self._at >= self._promised, f"go at {self._at}, promised {self._promised}"
        assert not self._dropping or self.stage in _ANSWERING, f"{self.stage}, and dropping"
        assert self.number or self.stage in (Stage.IDLE, Stage.PROPOSING), "an attempt without a number"

    def _is_past(self, event: Event) -> bool:
        assert not isinstance(event, RequestFailed)
        if isinstance(event, Proposed):
            return event.number <= self.number
        ended = self.stage in (Stage.IDLE, Stage.PROPOSING, Stage.DECIDED)
        late = isinstance(event, AllReady) and self.stage is Stage.PROMISED
        return event.number < self.number or (event.number == self.number and (ended or late))

    def _begin(self, event: Proposed, now_s: float) -> None:
        self._on(SwitchEvent.PROPOSED)
        self.number, self._change = event.number, event.change
        self._margin_s, self._begun_s = event.margin_s, now_s
        self._dropping = ""

    def _promise(self) -> None:
        margin = math.ceil(self._margin_s / self._iteration_s) if self._iteration_s > 0 else 0
        # Later than anything that this rank has begun; from here on it is bound, published or not.
        self._on(SwitchEvent.ALL_READY)
        self._promised = self._reached + max(_LEAST_MARGIN, margin)

    def _decided(self, event: Decided, now_s: float) -> None:
        if event.at < 0:
            self._on(SwitchEvent.DROPPED)
            self._discards.append(Discard(self.number, self._change, event.why))
            self._rest(now_s, came_about=False)
            return
        if self.stage is Stage.PROMISED and event.at < self._promised:
            raise LocalProtocolError(f"{event}, but this rank promised {self._promised}")
        self._on(SwitchEvent.GO)
        self._rest(now_s, came_about=True)
        self._at = event.at

    def _rest(self, now_s: float, *, came_about: bool) -> None:
        self._dropping = ""
        self._dropped_in_a_row = 0 if came_about else self._dropped_in_a_row + 1
        # After a success there is no pause: the next wish may be that of a rank which is not protected until
        # then.
        tries = min(self._dropped_in_a_row, 20)
        apart_s = min(self._apart_s * 2 ** (tries - 1), self._apart_max_s) if tries else 0.0
        self._not_before_s = now_s + apart_s

    # -- questions to the store ----------------------------------------------------------------------

    def ask(self, now_s: float) -> Ask | None:
        """The next question to the store. A question that counts this rank comes once, never repeated."""
        stage, number = self.stage, self.number
        waits = stage in (Stage.PREPARING, Stage.READY)
        if waits and not self._dropping and now_s > self._begun_s + self._patience_s:
            self._dropping = f"not every rank was ready within {self._patience_s:.0f} s"
        if stage is Stage.DECIDED:
            return None
        if self._dropping:
            return EndAttempt(number, self._dropping)
        once, self._told = not self._told, True
        if stage is Stage.PROPOSING:
            return Propose(number + 1, self._change, self._margin_s) if once else None
        if stage is Stage.READY and once:
            return TellReady(number)
        if stage is Stage.PROMISED and once:
            return TellPromise(number, self._promised)
        if stage is Stage.IDLE:
            return LookForAttempt(number)
        return Watch(number, stage is Stage.READY)


# -- accesses to the store -------------------------------------------------------------------------

# A question is a generator that yields single accesses, is sent their results, and returns the resulting
# event, or None. So the same sequence is played against a real store, and by a simulation that interleaves
# the accesses of many ranks.


@dataclass(frozen=True, slots=True)
class Add:
    """Count up by one; the result is the sum. It must not be repeated where it may have been executed."""

    key: str


@dataclass(frozen=True, slots=True)
class CompareAndSwap:
    """Write ``new`` if the register holds ``old`` (empty: nothing yet); the result is what it holds then."""

    key: str
    old: bytes
    new: bytes


@dataclass(frozen=True, slots=True)
class Has:
    """Whether anything was written; the result is 1 or 0."""

    key: str


@dataclass(frozen=True, slots=True)
class Get:
    """Read a register that was written; the result is its bytes."""

    key: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a register that is not read any more; the result is anything."""

    key: str


Access = Add | CompareAndSwap | Has | Get | Delete
Steps = Generator[Access, bytes | int, Event | None]


class _Proposal(msgspec.Struct, frozen=True):
    change: Change
    margin_s: float


class _Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    at: int
    why: str = ""


_proposal_decoder = msgspec.msgpack.Decoder(_Proposal)
_outcome_decoder = msgspec.msgpack.Decoder(_Outcome)


def accesses(ask: Ask, world_size: int) -> Steps:
    """The accesses that answer a question.

    Keys, beneath a prefix that is new in each epoch: ``head`` (the newest attempt), and per attempt *n*
    ``n/proposal``, ``n/ready`` and ``n/all``, ``n/at`` (the largest promise), ``n/promised``, ``n/outcome``.
    Of attempts before the last two only the outcome stays (tens of bytes): a rank in doubt must find it
    whenever it comes back. A rank that proposes attempt *n* knows how *n* - 1 ended, so nothing else of them
    is needed.

    Raises:
        ValueError: another program has written to these keys.
    """
    match ask:
        case Propose():
            return _propose(ask)
        case TellReady():
            return _tell_ready(ask.number, world_size)
        case TellPromise():
            return _promise(ask, world_size)
        case EndAttempt():
            return _decide(ask.number, _Outcome(-1, ask.why))
        case Watch():
            return _watch(ask)
        case LookForAttempt():
            return _look(ask.number)


def _propose(ask: Propose) -> Steps:
    number = ask.number
    mine = msgspec.msgpack.encode(_Proposal(ask.change, ask.margin_s))
    held = yield CompareAndSwap(f"{number}/proposal", b"", mine)
    yield from _raise_to("head", number)
    for what in ("proposal", "ready", "all", "at", "promised"):
        if number > 2:
            yield Delete(f"{number - 2}/{what}")
    return _proposed(number, held)


def _look(number: int) -> Steps:
    if not (yield Has("head")):
        return None
    head = int((yield Get("head")))
    if head <= number:
        return None
    return _proposed(head, (yield Get(f"{head}/proposal")))


def _tell_ready(number: int, world_size: int) -> Steps:
    if (yield Add(f"{number}/ready")) != world_size:
        return None
    yield CompareAndSwap(f"{number}/all", b"", b"1")
    return AllReady(number)


def _promise(ask: TellPromise, world_size: int) -> Steps:
    # Before this rank is counted: the one that counts the last rank must find the largest promise of all.
    yield from _raise_to(f"{ask.number}/at", ask.at)
    if (yield Add(f"{ask.number}/promised")) != world_size:
        return None
    at = int((yield Get(f"{ask.number}/at")))
    return (yield from _decide(ask.number, _Outcome(at)))


def _decide(number: int, outcome: _Outcome) -> Steps:
    held = yield CompareAndSwap(f"{number}/outcome", b"", msgspec.msgpack.encode(outcome))
    return _decided(number, held)


def _watch(ask: Watch) -> Steps:
    if (yield Has(f"{ask.number}/outcome")):
        return _decided(ask.number, (yield Get(f"{ask.number}/outcome")))
    if ask.ready and (yield Has(f"{ask.number}/all")):
        return AllReady(ask.number)
    return None


def _raise_to(key: str, value: int) -> Steps:
    known = b""
    while True:
        found = yield CompareAndSwap(key, known, str(value).encode())
        assert isinstance(found, bytes)
        if int(found) >= value:
            return None
        known = found


def propose_largest(
    key: str, mine: Sequence[int], *, rank: int, ranks: int
) -> Generator[Access, bytes | int, None]:
    """Agree on the largest of each number: every rank proposes once, and the last of ``ranks`` announces it.

    The first schedule needs no attempts, only this. To repeat it is harmless. Keys: ``<key>/<place>`` (the
    largest number so far), ``<key>/rank<n>`` and ``<key>/count`` (which ranks have proposed),
    ``<key>/decided``.
    """
    for place, value in enumerate(mine):
        yield from _raise_to(f"{key}/{place}", value)
    if (yield Add(f"{key}/rank{rank}")) != 1 or (yield Add(f"{key}/count")) != ranks:
        return
    found = []
    for place in range(len(mine)):
        largest = yield Get(f"{key}/{place}")
        assert isinstance(largest, bytes)
        found.append(largest)
    yield CompareAndSwap(f"{key}/decided", b"", b",".join(found))


def largest_found(key: str) -> Generator[Access, bytes | int, tuple[int, ...] | None]:
    """The announced largest numbers; None until then."""
    if not (yield Has(f"{key}/decided")):
        return None
    found = yield Get(f"{key}/decided")
    assert isinstance(found, bytes)
    return tuple(int(part) for part in found.split(b","))


def forget_largest(key: str, numbers: int, ranks: Sequence[int]) -> Generator[Access, bytes | int, None]:
    """Remove the keys of `propose_largest`; none of the ranks uses them any more.

    Args:
        numbers: how many each rank has proposed.
    """
    names = [*map(str, range(numbers)), *(f"rank{rank}" for rank in ranks), "count", "decided"]
    for name in names:
        yield Delete(f"{key}/{name}")


def _proposed(number: int, held: bytes | int) -> Proposed:
    assert isinstance(held, bytes)
    proposal = unpack(_proposal_decoder, held)
    return Proposed(number, proposal.change, proposal.margin_s)


def _decided(number: int, held: bytes | int) -> Decided:
    assert isinstance(held, bytes)
    outcome = unpack(_outcome_decoder, held)
    return Decided(number, outcome.at, outcome.why)
