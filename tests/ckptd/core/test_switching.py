"""One rank's part in a change: what it says, and what binds it. Many ranks are in ``tests/simulation``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckptd.core.switching import (
    TRANSITIONS,
    AllReady,
    Apply,
    Ask,
    Change,
    Decided,
    Discard,
    Effect,
    EndAttempt,
    Event,
    LookForAttempt,
    Prepare,
    Prepared,
    Propose,
    Proposed,
    RequestFailed,
    Stage,
    SwitchEvent,
    Switching,
    TellPromise,
    TellReady,
    Unable,
    Watch,
)
from ckptd.errors import LocalProtocolError
from tests.transcripts import Driver, scenarios, shown

WIDER = Change("too slow", window=6)


class Rank(Switching):
    """With a clock of its own, and iterations of a second."""

    def __init__(self) -> None:
        super().__init__(patience_s=30, apart_s=10, apart_max_s=60)
        self.now_s = 0.0

    def hears(self, *events: Event) -> Rank:
        for event in events:
            self.handle(event, now_s=self.now_s)
        return self

    def begins(self, iteration: int) -> list[Effect]:
        return self.boundary(iteration, iteration_s=1.0)

    def asks(self) -> Ask | None:
        return self.ask(self.now_s)


def promised(at: int = 15) -> Rank:
    """It has promised to take no snapshot from that iteration on."""
    rank = Rank()
    rank.begins(at - 5)
    rank.hears(Proposed(1, WIDER, 5.0), Prepared(1), AllReady(1))
    assert rank.asks() == TellPromise(1, at)
    return rank


def test_from_a_wish_to_the_change() -> None:
    rank = Rank()
    assert rank.asks() == LookForAttempt(0)
    assert rank.wish(WIDER, margin_s=2.0, now_s=0)
    assert rank.asks() == Propose(1, WIDER, 2.0)
    rank.hears(Proposed(1, WIDER, 2.0))
    assert rank.begins(7) == [Prepare(1, WIDER)]
    assert rank.asks() == Watch(1, ready=False)
    rank.hears(Prepared(1))
    assert [rank.asks(), rank.asks()] == [TellReady(1), Watch(1, ready=True)]
    assert rank.begins(8) == []
    rank.hears(AllReady(1))
    assert [rank.asks(), rank.asks()] == [TellPromise(1, 10), Watch(1, ready=False)]
    rank.hears(Decided(1, 12))
    assert rank.asks() is None
    assert [rank.begins(i) for i in (9, 10, 11)] == [[], [], []]
    assert rank.knows(11)
    assert rank.begins(12) == [Apply(1, WIDER, 12)]
    assert rank.begins(13) == []
    assert rank.asks() == LookForAttempt(1)


def test_what_must_be_counted_once_is_asked_once() -> None:
    """An access that failed may have been done."""
    rank = promised().hears(RequestFailed())
    assert rank.asks() == Watch(1, ready=False)
    rank = Rank().hears(Proposed(1, WIDER, 1.0), Prepared(1))
    assert rank.asks() == TellReady(1)
    assert rank.hears(RequestFailed()).asks() == Watch(1, ready=True)


def test_whoever_reaches_its_promise_in_doubt_takes_no_snapshot_and_gives_up() -> None:
    rank = promised(at=15)
    assert rank.begins(14) == []
    assert rank.knows(14)
    assert rank.begins(15) == []
    assert not rank.knows(15)
    drop = rank.asks()
    assert isinstance(drop, EndAttempt)
    assert rank.hears(RequestFailed()).asks() == drop, "it goes on asking until it knows"
    assert not rank.knows(16)
    rank.hears(Decided(1, -1, drop.why))
    assert rank.begins(17) == [Discard(1, WIDER, drop.why)]
    assert rank.knows(17)


def test_one_in_doubt_that_comes_too_late_to_give_up_goes_over() -> None:
    """Another was the last to promise before it: the register says so."""
    rank = promised(at=15)
    rank.begins(16)
    assert isinstance(rank.asks(), EndAttempt)
    rank.hears(Decided(1, 15))
    assert rank.begins(17) == [Apply(1, WIDER, 15)]
    assert rank.knows(17)


def test_a_promise_is_later_than_whatever_has_begun() -> None:
    rank = Rank()
    rank.begins(100)
    rank.hears(Proposed(1, WIDER, 0.0), Prepared(1), AllReady(1))
    assert rank.asks() == TellPromise(1, 102)


def test_one_that_cannot_prepare_ends_it_for_all() -> None:
    rank = Rank().hears(Proposed(1, WIDER, 1.0), Unable(1, "no memory"))
    assert rank.begins(3) == []
    assert rank.asks() == EndAttempt(1, "no memory")


def test_one_that_promised_and_then_cannot_asks_and_is_bound() -> None:
    rank = promised().hears(Unable(1, "planned anew"))
    assert rank.asks() == EndAttempt(1, "planned anew")
    rank.hears(Decided(1, 20))
    assert rank.begins(20) == [Apply(1, WIDER, 20)]


def test_who_waits_too_long_for_the_others_ends_it() -> None:
    rank = Rank().hears(Proposed(1, WIDER, 1.0), Prepared(1))
    rank.asks()
    rank.now_s = 31
    drop = rank.asks()
    assert isinstance(drop, EndAttempt)
    assert "within 30 s" in drop.why


def test_wishes_come_apart_and_get_more_patient() -> None:
    rank = Rank()
    assert rank.wish(WIDER, margin_s=1.0, now_s=0)
    assert not rank.wish(WIDER, margin_s=1.0, now_s=0), "one is open"
    rank.hears(Proposed(1, WIDER, 1.0), Decided(1, -1, "late"))
    assert not rank.wish(WIDER, margin_s=1.0, now_s=9)
    assert rank.wish(WIDER, margin_s=1.0, now_s=10)
    assert rank.asks() == Propose(2, WIDER, 2.0)
    rank.hears(RequestFailed())
    assert rank.stage is Stage.IDLE


def test_after_a_change_the_next_may_come_at_once() -> None:
    rank = promised(at=15).hears(Decided(1, 15))
    rank.begins(15)
    assert rank.wish(WIDER, margin_s=1.0, now_s=0)


def test_somebody_elses_proposal_takes_the_place_of_ones_own() -> None:
    rank = Rank()
    rank.wish(WIDER, margin_s=1.0, now_s=0)
    other = Change("dense", policy="dense")
    rank.hears(Proposed(1, other, 1.0))
    assert rank.begins(1) == [Prepare(1, other)]


def test_what_is_past_is_passed_over() -> None:
    rank = Rank().hears(Proposed(3, WIDER, 1.0), Decided(3, -1, "late"))
    before = rank.stage
    rank.hears(Prepared(3), Unable(3, "late"), Decided(3, -1), Proposed(2, WIDER, 1.0), AllReady(3))
    assert rank.stage is before is Stage.IDLE


@pytest.mark.parametrize(
    "impossible",
    [Decided(1, 30), AllReady(1), AllReady(2), Proposed(2, WIDER, 1.0)],
    ids=["go without its promise", "ready without it", "of another attempt", "one is open"],
)
def test_what_cannot_be_is_told(impossible: Event) -> None:
    rank = Rank().hears(Proposed(1, WIDER, 1.0))
    with pytest.raises(LocalProtocolError):
        rank.hears(impossible)


def test_a_change_before_ones_own_promise_is_told() -> None:
    with pytest.raises(LocalProtocolError, match="promised 15"):
        promised(at=15).hears(Decided(1, 14))


class PlayedRank:
    """One rank whose iterations take a second."""

    def __init__(self) -> None:
        self.machine = Switching(patience_s=30, apart_s=10, apart_max_s=60)
        self.now_s = 0.0

    def play(self, words: list[str]) -> list[str]:
        machine, lines = self.machine, []
        match words:
            case ["wait", seconds]:
                self.now_s += float(seconds)
            case ["wish", why]:
                change = Change(why, window=6)
                taken = machine.wish(change, margin_s=5.0, now_s=self.now_s)
                lines = ["   taken" if taken else "   refused"]
            case ["boundary", iteration]:
                lines = list(map(shown, machine.boundary(int(iteration), iteration_s=1.0)))
                knows = machine.knows(int(iteration))
                lines.append("   snapshot" if knows else "   no snapshot: by which schedule is not known")
            case ["ask"]:
                ask = machine.ask(self.now_s)
                lines = ["   nothing" if ask is None else shown(ask)]
            case _:
                machine.handle(self.event(words), now_s=self.now_s)
        return [*lines, f"{machine.stage}, attempt {machine.number}"]

    def event(self, words: list[str]) -> Event:
        match words:
            case ["proposed", number]:
                return Proposed(int(number), Change("by another rank", window=6), 5.0)
            case ["prepared", number]:
                return Prepared(int(number))
            case ["unable", number, *why]:
                return Unable(int(number), " ".join(why))
            case ["all-ready", number]:
                return AllReady(int(number))
            case ["go", number, at]:
                return Decided(int(number), int(at), "")
            case ["dropped", number, *why]:
                return Decided(int(number), -1, " ".join(why))
            case ["request-failed"]:
                return RequestFailed()
        raise ValueError(words)


@pytest.mark.parametrize("name", scenarios("schedule_change"))
def test_transcripts(name: str, transcript: Callable[[str, Driver], None]) -> None:
    transcript(name, PlayedRank())


def test_an_event_that_is_not_legal_names_machine_attempt_state_and_event() -> None:
    """A rank that never promised must not go over: another one may have taken that iteration otherwise."""
    with pytest.raises(
        LocalProtocolError, match=r"schedule change \[attempt=3\]: event go .* in state ready"
    ):
        TRANSITIONS.after(Stage.READY, SwitchEvent.GO, attempt=3)
