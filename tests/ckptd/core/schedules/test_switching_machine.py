"""Golden transcripts of one rank's part in changes of the schedule: what it hears, asks the store, and does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckptd.core.schedules.switching import (
    TRANSITIONS,
    AllReady,
    Change,
    Decided,
    Event,
    Prepared,
    Proposed,
    RequestFailed,
    Stage,
    SwitchEvent,
    Switching,
    Unable,
)
from ckptd.errors import LocalProtocolError
from tests.transcripts import Driver, scenarios, shown


class Rank:
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
    transcript(name, Rank())


def test_an_event_that_is_not_legal_names_machine_attempt_state_and_event() -> None:
    """A rank that never promised must not go over: another one may have taken that iteration otherwise."""
    with pytest.raises(
        LocalProtocolError, match=r"schedule change \[attempt=3\]: event go .* in state ready"
    ):
        TRANSITIONS.after(Stage.READY, SwitchEvent.GO, attempt=3)
