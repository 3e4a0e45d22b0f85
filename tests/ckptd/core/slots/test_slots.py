"""The machine of a slot: its table, and golden transcripts of a ring that is filled, given away and damaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ckptd.core.slots.ring import Suffix, choose_slot, find_suffix
from ckptd.core.slots.segment_format import (
    SlotHeader,
    read_slot_header,
    set_slot_state,
    write_slot_header,
)
from ckptd.core.slots.slots import TRANSITIONS, SlotEvent, SlotRecord, SlotState
from ckptd.errors import LocalProtocolError
from tests.ckptd.memory.fresh import make
from tests.transcripts import Driver, scenarios


class Ring:
    """A ring of one generation, and a trainer that fills it as `choose_slot` says."""

    def __init__(self) -> None:
        self.slots: list[SlotRecord] = []
        self.busy: set[tuple[int, int]] = set()
        self.promised: set[int] = set()
        self.operators = self.previous = self.sequence = 0

    def play(self, words: list[str]) -> list[str]:
        match words:
            case ["ring", slots, operators]:
                self.slots = [SlotRecord(0, i, SlotState.FREE) for i in range(int(slots))]
                self.operators, self.previous = int(operators), -1
                return [self.shown()]
            case ["fill", iteration, anchors, *broken]:
                return self.fill(int(iteration), int(anchors, 2), bool(broken))
            case ["read", iteration]:
                self.busy.add(self.of(iteration).key)
            case ["let-go", iteration]:
                self.busy.discard(self.of(iteration).key)
            case ["promise", *iterations]:
                self.promised = {*map(int, iterations)}
            case [event, iteration]:
                self.move(self.of(iteration), SlotEvent(event.replace("-", " ")))
                return [self.shown()]
            case _:
                raise ValueError(words)
        return []

    def fill(self, iteration: int, anchors: int, broken: bool) -> list[str]:
        protected = {r.key for r in self.slots if r.sealed and r.iteration in self.promised}
        choice = choose_slot(
            self.slots,
            self.operators,
            generation=0,
            busy=self.busy,
            protected=protected,
        )
        if choice.index is None:
            self.previous = -1
            return [f"no slot, {choice.remedy}: {choice.reason}"]
        self.sequence += 1
        previous, self.previous = -1 if broken else self.previous, iteration
        self.move(
            replace(
                self.slots[choice.index],
                iteration=iteration,
                previous=previous,
                anchors=anchors,
                sequence=self.sequence,
            ),
            SlotEvent.FILL,
        )
        return [f"slot {choice.index}: {choice.reason}", self.shown()]

    def move(self, record: SlotRecord, event: SlotEvent) -> None:
        state = TRANSITIONS.after(record.state, event)
        self.slots[record.index] = replace(record, state=state)

    def of(self, iteration: str) -> SlotRecord:
        return max((r for r in self.slots if r.iteration == int(iteration)), key=lambda r: r.sequence)

    def shown(self) -> str:
        slots = ", ".join(
            r.state.name.lower() + (f" {r.iteration}" if r.state is not SlotState.FREE else "")
            for r in self.slots
        )
        suffix = find_suffix(self.slots, self.operators)
        text = f"{suffix.start}..{suffix.end}" if isinstance(suffix, Suffix) else "none"
        return f"[{slots}] suffix {text}"


@pytest.mark.parametrize("name", scenarios("slot"))
def test_transcripts(name: str, transcript: Callable[[str, Driver], None]) -> None:
    transcript(name, Ring())


def test_an_event_that_is_not_legal_names_machine_state_and_event() -> None:
    with pytest.raises(LocalProtocolError, match=r"slot .*index=3.*event seal .* state filling"):
        TRANSITIONS.after(SlotState.FILLING, SlotEvent.SEAL, index=3)


def test_a_state_word_that_does_not_follow_is_refused_before_it_is_written() -> None:
    """A slot of which nothing was copied must not become visible to a recovery."""
    buf, geometry = make()
    write_slot_header(buf, geometry, 0, SlotHeader(iteration=7))
    with pytest.raises(LocalProtocolError, match="from free to sealed"):
        set_slot_state(buf, geometry, 0, SlotState.SEALED)
    header = read_slot_header(buf, geometry, 0)
    assert header is not None
    assert header.state is SlotState.FREE
