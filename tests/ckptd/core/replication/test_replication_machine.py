"""Golden transcripts of a rank's replication: what each target is asked, and in which phase that leaves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ckptd.core.replication.replication_events import (
    BeginRefused,
    Event,
    Granted,
    OpenRefused,
    PeerBack,
    PeerLost,
    PutEnded,
    SealedThere,
    SealRefused,
    Slots,
    TargetOpened,
    Targets,
)
from ckptd.core.replication.replicator import Replicator
from ckptd.core.replication.target import TRANSITIONS, Phase, TargetEvent
from ckptd.core.slots.ring import SlotRecord, SlotState
from ckptd.core.slots.snapshot_events import Joined, SnapshotKey, Tick, key_of
from ckptd.errors import LocalProtocolError
from tests.transcripts import Driver, scenarios, shown


class Replication:
    """One rank with two operators, which are anchored in turns."""

    def __init__(self) -> None:
        self.core = Replicator()
        self.now_s = 0.0
        self.epoch, self.start = 0, -1

    def play(self, words: list[str]) -> list[str]:
        if words[0] == "wait":
            self.now_s += float(words[1])
        effects = self.core.handle(self.event(words), now_s=self.now_s)
        states = self.core.states(now_s=self.now_s)
        lines = [
            f"{t.node} {t.phase}: holds {t.held}, current to {t.current_up_to}"
            + ("" if t.counted else ", does not count")
            + (f", waits {t.waiting_s:g} s" if t.waiting_s else "")
            + (f" ({t.reason})" if t.reason else "")
            for t in states
        ]
        return [*map(shown, effects), *lines]

    def event(self, words: list[str]) -> Event:
        match words:
            case ["wait", _]:
                return Tick()
            case ["join", epoch, start]:
                self.epoch, self.start = int(epoch), int(start)
                return Joined(self.epoch, self.start)
            case ["targets", *nodes]:
                return Targets(tuple(nodes))
            case ["ring", *iterations]:
                return Slots(tuple(map(self.record, iterations)), 2, 6)
            case ["opened", node, boot, *held]:
                return TargetOpened(node, 0, 1, tuple(map(self.record, held)), boot)
            case ["open-refused", node, code]:
                return OpenRefused(node, 0, code, "said the test")
            case ["granted", node, iteration]:
                return Granted(node, self.key(iteration), f"grant-{node}-{iteration}")
            case ["begin-refused", node, iteration, code]:
                return BeginRefused(node, self.key(iteration), code, "said the test")
            case ["put-ended", node, iteration, *why]:
                return PutEnded(node, self.key(iteration), not why, " ".join(why))
            case ["sealed", node, iteration]:
                return SealedThere(node, self.key(iteration))
            case ["seal-refused", node, iteration, code]:
                return SealRefused(node, self.key(iteration), code, "said the test")
            case ["lost", node]:
                return PeerLost(node, "no heartbeat")
            case ["back", node]:
                return PeerBack(node)
        raise ValueError(words)

    def record(self, told: str) -> SlotRecord:
        iteration = int(told)
        made = SlotRecord(0, iteration % 6, SlotState.SEALED, iteration, iteration - 1, iteration)
        return replace(
            made,
            anchors=1 << iteration % 2,
            image_len=100,
            epoch=self.epoch,
            epoch_start=self.start,
        )

    def key(self, iteration: str) -> SnapshotKey:
        return key_of(self.record(iteration))


@pytest.mark.parametrize("name", scenarios("replication"))
def test_transcripts(name: str, transcript: Callable[[str, Driver], None]) -> None:
    transcript(name, Replication())


def test_an_event_that_is_not_legal_names_machine_node_state_and_event() -> None:
    """A seal that was never asked for must not count as a copy."""
    with pytest.raises(LocalProtocolError, match=r"replication \[node=b\]: event sealed .* state idle"):
        TRANSITIONS.after(Phase.IDLE, TargetEvent.SEALED, node="b")


def test_a_slot_that_nobody_reads_and_is_held_is_noticed() -> None:
    """The check must be able to fail: what is held for nobody is a slot that the ring has lost."""
    core = Replicator()
    core.handle(Targets(("b",)), now_s=0.0)
    core._holders[key_of(Replication().record("3"))] = 1
    with pytest.raises(AssertionError, match="held for"):
        core.handle(Tick(), now_s=1.0)
