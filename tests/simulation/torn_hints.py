"""A ring's hint of which the daemon stored a part when it died: the stores of the product, in their order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import overload

from ckptd.core.slots.segment_format import PROLOGUE_BYTES, RingHint, read_ring_hint, write_ring_hint
from tests.simulation.model import Hint

__all__ = ["mixtures", "torn"]

_Store = Callable[[memoryview], None]


class _Noted:
    """Notes the stores that are to be made in a buffer, and reads from it as it was."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self.made: list[_Store] = []
        self._at: slice | None = None
        self._format = ""

    @overload
    def __getitem__(self, at: slice) -> _Noted: ...
    @overload
    def __getitem__(self, at: int) -> int: ...
    def __getitem__(self, at: slice | int) -> _Noted | int:
        if isinstance(at, slice):
            self._at = at
            return self
        if self._at is None:
            return self._buffer[at]
        place, self._at = self._at, None
        value: int = self._buffer[place].cast(self._format)[at]  # type: ignore[call-overload]
        return value

    def cast(self, how: str) -> _Noted:
        self._format = how
        return self

    def __setitem__(self, at: int, value: int) -> None:
        place, how = self._at, self._format
        self._at = None

        def store(buffer: memoryview) -> None:
            if place is None:
                buffer[at] = value
            else:
                buffer[place].cast(how)[at] = value  # type: ignore[call-overload]

        self.made.append(store)


def _in_full(hint: Hint) -> RingHint:
    return RingHint(hint.floor, hint.horizon, hint.span, 0, hint.epoch, hint.aim)


def mixtures(before: Hint, after: Hint) -> list[Hint]:
    """What is read after none, one, two, … of the stores of ``after`` over ``before``."""
    buffer = memoryview(bytearray(PROLOGUE_BYTES))
    write_ring_hint(buffer, _in_full(before))
    noted = _Noted(buffer)
    write_ring_hint(noted, _in_full(after))  # type: ignore[arg-type]
    found = [_read(buffer)]
    for store in noted.made:
        store(buffer)
        found.append(_read(buffer))
    return found


def torn(before: Hint, after: Hint, rng: random.Random) -> Hint:
    """What is read when the daemon died before the last of these stores."""
    return rng.choice(mixtures(before, after)[:-1])


def _read(buffer: memoryview) -> Hint:
    read = read_ring_hint(buffer)
    return Hint(read.floor, read.horizon, read.span, read.epoch, read.aim)
