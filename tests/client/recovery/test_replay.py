"""How far a replay is: golden transcripts of the order in which it is loaded, begun and compared."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckptd.client.recovery.replay import (
    TRANSITIONS,
    ReplayEvent,
    ReplayProgress,
    ReplayState,
)
from ckptd.errors import LocalProtocolError
from tests.transcripts import Driver, scenarios


class Progress:
    """A replay of some snapshots, as the loop drives it."""

    def __init__(self) -> None:
        self.progress = ReplayProgress([0])

    def play(self, words: list[str]) -> list[str]:
        match words:
            case ["suffix", *iterations]:
                self.progress = ReplayProgress([int(i) for i in iterations])
            case ["step", iteration]:
                if int(iteration) == self.progress.next_iteration:
                    self.progress.on(ReplayEvent.ADVANCE)
                else:
                    return [f"   not compared: the next boundary is {self.progress.next_iteration}"]
            case [event]:
                try:
                    self.progress.on(ReplayEvent(event.replace("-", " ")))
                except LocalProtocolError as error:
                    return [f"   refused: {error.message}"]
            case _:
                raise ValueError(words)
        self.progress.validate()
        told = self.progress
        return [f"{told.state} at {told.reached}, next {told.next_iteration}, end {told.end}"]


@pytest.mark.parametrize("name", scenarios("replay"))
def test_transcripts(name: str, transcript: Callable[[str, Driver], None]) -> None:
    transcript(name, Progress())


def test_an_event_that_is_not_legal_names_machine_iterations_state_and_event() -> None:
    """To compare what was never loaded would call every tensor a mismatch."""
    with pytest.raises(
        LocalProtocolError, match=r"replay \[start=3 end=5\]: event advance .* in state prepared"
    ):
        TRANSITIONS.after(ReplayState.PREPARED, ReplayEvent.ADVANCE, start=3, end=5)


def test_a_replay_that_is_taken_for_dense_too_early_is_noticed() -> None:
    """Steps between the snapshots would be run with frozen operators, and taken for new ones."""
    progress = ReplayProgress([3, 4, 5])
    for event in (ReplayEvent.LOAD_STATE, ReplayEvent.LOAD_TENSORS, ReplayEvent.BEGIN):
        progress.on(event)
    progress.state = ReplayState.DENSE
    with pytest.raises(AssertionError, match="dense at 3"):
        progress.validate()
