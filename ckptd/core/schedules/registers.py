"""What is asked of the job's store, as registers that can be read, counted up, and compared and
swapped (pure).

Each question is a generator that yields single accesses to the store and is sent their results; it
returns the event to which they amount, or None. So one and the same sequence is played against a
real store, and by a simulation that interleaves the accesses of many ranks.

Keys, beneath a prefix that is new in each epoch: ``head`` (the newest attempt), and per attempt *n*
``n/proposal``, ``n/ready`` and ``n/all``, ``n/at`` (the largest promise), ``n/promised``,
``n/outcome``. Of the attempts before the last two only the outcome stays (tens of bytes): a rank in
doubt must find it whenever it comes back.

Whoever proposes attempt *n* knows how *n* - 1 ended; so everything before it is over, but for what
a rank in doubt has yet to read.

The first schedule needs no attempts: every rank proposes numbers once, and the largest of each counts
(`propose_largest`). Its keys are named in that function.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import msgspec

from ckptd.core.schedules.switching import (
    AllReady,
    Ask,
    Change,
    Decided,
    EndAttempt,
    Event,
    LookForAttempt,
    Propose,
    Proposed,
    TellPromise,
    TellReady,
    Watch,
)
from ckptd.unpacking import unpack

__all__ = [
    "Access",
    "Add",
    "CompareAndSwap",
    "Delete",
    "Get",
    "Has",
    "Steps",
    "accesses",
    "largest_found",
    "propose_largest",
]


@dataclass(frozen=True, slots=True)
class Add:
    """Count up by one; sent the sum. Not to be repeated where it may have been done."""

    key: str


@dataclass(frozen=True, slots=True)
class CompareAndSwap:
    """Write ``new`` if the register holds ``old`` (empty: nothing yet); sent what it holds then."""

    key: str
    old: bytes
    new: bytes


@dataclass(frozen=True, slots=True)
class Has:
    """Whether anything was written; sent 1 or 0."""

    key: str


@dataclass(frozen=True, slots=True)
class Get:
    """Read what is known to be there; sent its bytes."""

    key: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Forget what nobody reads any more; sent anything."""

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

    Raises:
        ValueError: another program has written to our keys.
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
    # Before it is counted: who counts the last one must find the largest of all.
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
    """Take part in an agreement on the largest of each number; the last of so many ranks announces it.
    Repeating it does no harm.

    Keys: ``<key>/<place>`` (the largest number so far), ``<key>/rank<n>`` and ``<key>/count`` (who has
    proposed), ``<key>/decided``.
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
    """The largest of each number, as announced; None until then."""
    if not (yield Has(f"{key}/decided")):
        return None
    found = yield Get(f"{key}/decided")
    assert isinstance(found, bytes)
    return tuple(int(part) for part in found.split(b","))


def _proposed(number: int, held: bytes | int) -> Proposed:
    assert isinstance(held, bytes)
    proposal = unpack(_proposal_decoder, held)
    return Proposed(number, proposal.change, proposal.margin_s)


def _decided(number: int, held: bytes | int) -> Decided:
    assert isinstance(held, bytes)
    outcome = unpack(_outcome_decoder, held)
    return Decided(number, outcome.at, outcome.why)
