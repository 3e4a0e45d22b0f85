"""What a trainer does about slots that the daemon has not sealed yet, and what it learns from those that it has."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest

from ckptd.client.capture import slot_writer
from ckptd.client.capture.slot_writer import Capture
from ckptd.client.stats import Stats
from ckptd.core.slots.segment_format import SlotHeader
from ckptd.core.slots.slots import SlotRecord, SlotState

LARGE, SMALL = 1 << 30, 1 << 20
SECOND = 1_000_000_000


class Ring:
    """Slots whose headers a test sets; ``looked`` is called at each look at one."""

    generation = 0

    def __init__(self, *headers: SlotHeader) -> None:
        self.headers, self.sealed_here = list(headers), 0
        self.looked: Callable[[], None] = lambda: None

    def header(self, index: int) -> SlotHeader:
        self.looked()
        return self.headers[index]

    def seal(self, index: int) -> None:
        self.sealed_here += 1

    def records(self) -> list[SlotRecord]:
        return [
            SlotRecord(0, i, h.state, h.iteration, sequence=h.sequence, image_len=h.image_len)
            for i, h in enumerate(self.headers)
        ]


def filled(sequence: int, nbytes: int = LARGE) -> SlotHeader:
    return SlotHeader(SlotState.FILLED, sequence, image_len=nbytes, sequence=sequence)


def sealed(sequence: int, filled_at: float, sealed_at: float) -> SlotHeader:
    return SlotHeader(
        SlotState.SEALED,
        sequence,
        sequence=sequence,
        filled_at_ns=int(filled_at * SECOND),
        sealed_at_ns=int(sealed_at * SECOND),
    )


def capture(ring: Ring, *, connected: bool = True) -> Capture:
    binding, table = Mock(), Mock()
    binding.buffers.return_value = {}
    table.segment.return_value = ring
    table.next_sequence.return_value = 1
    return Capture(
        binding,
        table,
        Mock(),
        Mock(connected=connected),
        num_operators=1,
        stats=Stats(),
        filled=Mock(),
        restless=set(),
    )


def test_of_a_large_slot_the_daemon_is_waited_for() -> None:
    ring = Ring(filled(1))
    looks = iter(range(100))

    def looked() -> None:
        if next(looks) == 3:
            ring.headers[0] = sealed(1, 0.0, 1.0)

    ring.looked = looked
    writer = capture(ring)
    writer._have_sealed(ring.records()[0])
    assert ring.sealed_here == writer._stats.sealed_here == 0


@pytest.mark.parametrize(("nbytes", "connected"), [(SMALL, True), (LARGE, False)])
def test_a_small_slot_and_one_without_a_daemon_are_sealed_at_once(nbytes: int, connected: bool) -> None:
    ring = Ring(filled(1, nbytes))
    writer = capture(ring, connected=connected)
    writer._have_sealed(ring.records()[0])
    assert ring.sealed_here == writer._stats.sealed_here == 1


def test_a_daemon_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_writer, "_SEALING_PATIENCE_S", 0.05)
    ring = Ring(filled(1), filled(2))
    looks = []
    ring.looked = lambda: looks.append(1)
    writer = capture(ring)
    first, second = ring.records()
    writer._have_sealed(first)
    assert ring.sealed_here == 1
    waited = len(looks)
    writer._have_sealed(second)
    assert (ring.sealed_here, len(looks)) == (2, waited)


def test_how_long_a_slot_takes_is_known_where_it_waited_for_the_one_before() -> None:
    ring = Ring(sealed(1, 0.0, 4.0), sealed(2, 3.0, 6.5), filled(3))
    writer = capture(ring)
    writer._note_seals(ring.records())
    assert writer.seal_s == 2.5
    ring.headers[2] = sealed(3, 7.0, 9.0)  # filled after the one before was sealed: it waited for nothing
    writer._note_seals(ring.records())
    assert writer.seal_s == 0.0


def test_without_a_predecessor_nothing_is_known() -> None:
    ring = Ring(sealed(7, 0.0, 4.0), filled(8))
    writer = capture(ring)
    writer._note_seals(ring.records())
    assert writer.seal_s == 0.0
    empty = capture(Ring(filled(1)))
    empty._note_seals([])
    assert empty.seal_s == 0.0
