"""Golden transcripts of one rank's way to storage: what is held, stored and committed, and in which phase."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ckptd.core.persistence.cadence import Cadence
from ckptd.core.persistence.persistence_events import (
    CommitFailed,
    Committed,
    Durable,
    Event,
    Fenced,
    Flush,
    Forgotten,
    SlotReused,
    SlotTables,
    SnapshotStored,
    StoreFailed,
)
from ckptd.core.persistence.persister import TRANSITIONS, Persister, PersistEvent, PersistPhase
from ckptd.core.slots.ring import SlotRecord, SlotState
from ckptd.core.slots.snapshot_events import Joined, SnapshotKey, Tick, key_of
from ckptd.errors import LocalProtocolError
from tests.transcripts import Driver, scenarios, shown


class Persistence:
    """One rank with two operators that are anchored in turns, and a checkpoint every four iterations."""

    def __init__(self) -> None:
        self.core = Persister(Cadence(every=4), parallel=1)
        self.now_s = 0.0

    def play(self, words: list[str]) -> list[str]:
        if words[0] == "wait":
            self.now_s += float(words[1])
        effects = self.core.handle(self.event(words), now_s=self.now_s)
        state = self.core.state()
        line = str(self.core.phase)
        if state.under_way >= 0:
            line += f" {state.under_way}, {state.stored} of {state.of}"
        line += f"; durable {state.committed}" if state.committed >= 0 else ""
        return [*map(shown, effects), line]

    def event(self, words: list[str]) -> Event:
        match words:
            case ["wait", _]:
                return Tick()
            case ["join", epoch, start]:
                return Joined(int(epoch), int(start))
            case ["ring", slots, *iterations]:
                return SlotTables(tuple(map(self.record, iterations)), 2, int(slots))
            case ["stored", iteration]:
                return SnapshotStored(self.key(iteration), 100)
            case ["store-failed", iteration]:
                return StoreFailed(self.key(iteration), "said the store")
            case ["reused", iteration]:
                return SlotReused(self.key(iteration))
            case ["committed", iteration]:
                return Committed(self.key(iteration))
            case ["commit-failed", iteration]:
                return CommitFailed(self.key(iteration), "said the store")
            case ["durable", iteration]:
                return Durable(int(iteration))
            case ["fenced"]:
                return Fenced("another job writes there")
            case ["keeper-restarted"]:
                return Forgotten()
            case ["flush"]:
                return Flush()
        raise ValueError(words)

    def record(self, told: str) -> SlotRecord:
        iteration = int(told)
        made = SlotRecord(0, iteration % 8, SlotState.SEALED, iteration, iteration - 1, iteration)
        return replace(made, anchors=1 << iteration % 2, image_len=100)

    def key(self, iteration: str) -> SnapshotKey:
        return key_of(self.record(iteration))


@pytest.mark.parametrize("name", scenarios("persistence"))
def test_transcripts(name: str, transcript: Callable[[str, Driver], None]) -> None:
    transcript(name, Persistence())


def test_an_event_that_is_not_legal_names_machine_state_and_event() -> None:
    """A checkpoint must not be begun beside another one: its slots would be held twice."""
    with pytest.raises(LocalProtocolError, match=r"persistence: event begin .* in state committing"):
        TRANSITIONS.after(PersistPhase.COMMITTING, PersistEvent.BEGIN)
