"""When a state can be parked and who waits for its copy: golden transcripts of the two machines, without any tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ckptd.client.parking.park_gate import (
    COPY_TRANSITIONS,
    CopyEvent,
    CopyState,
    Moment,
    ParkGate,
)
from ckptd.errors import LocalProtocolError
from tests.transcripts import Driver, scenarios


class Gate:
    """A training thread that reports the life of its steps, and somebody who parks."""

    def __init__(self) -> None:
        self.gate = ParkGate("no step has begun")
        self.waiting: threading.Event | None = None

    def play(self, words: list[str]) -> list[str]:
        lines = []
        match words:
            case ["top", step]:
                self.gate.top(moment_of(int(step)))
            case ["update"]:
                self.waiting = self.gate.update()
            case ["waited-too-long"]:
                self.gate.abandon_copy()
                self.waiting = None
                lines = ["   the optimizer goes on"]
            case ["close", *why]:
                self.gate.close(" ".join(why))
            case ["park"]:
                moment = self.gate.awaited(0)
                began = moment is not None and self.gate.begin_copy(moment)
                lines = ["   copy begins" if began else f"   refused: {self.gate.why_not}"]
            case ["copied"]:
                lines = ["   thrown away" if self.gate.end_copy() else "   kept"]
            case _:
                raise ValueError(words)
        if self.waiting is not None:
            if self.waiting.is_set():
                self.waiting = None
                lines.append("   the optimizer may step")
            else:
                lines.append("   the optimizer waits")
        moment_state, copy_state = self.gate.state
        return [*lines, f"moment {moment_state}, copy {copy_state}"]


def moment_of(step: int) -> Moment:
    return Moment(step, 0, {}, {}, {}, [], None, None)


@pytest.mark.parametrize("name", scenarios("parking"))
def test_transcripts(name: str, transcript: Callable[[str, Driver], None]) -> None:
    transcript(name, Gate())


def test_a_second_copy_beside_the_first_is_refused_by_name() -> None:
    """Both would use one slot and one engine."""
    with pytest.raises(LocalProtocolError, match=r"parking copy: event begin .* in state running"):
        COPY_TRANSITIONS.after(CopyState.RUNNING, CopyEvent.BEGIN)


def test_the_copy_of_a_step_that_is_over_does_not_begin() -> None:
    """It was asked for before the optimizer stepped: what is live now is of no top."""
    gate = ParkGate("no step has begun")
    old = moment_of(1)
    gate.top(old)
    gate.update()
    gate.top(moment_of(2))
    assert not gate.begin_copy(old)
    assert gate.state[1] is CopyState.NONE


def test_who_waits_for_the_next_top_gets_its_moment() -> None:
    """Asked while an optimizer steps, and answered from the training thread."""
    gate = ParkGate("no step has begun")
    gate.update()
    found: list[Moment | None] = []
    waiting = threading.Thread(target=lambda: found.append(gate.awaited(60)))
    waiting.start()
    moment = moment_of(5)
    gate.top(moment)
    waiting.join(60)
    assert found == [moment]
