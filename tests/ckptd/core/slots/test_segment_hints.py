"""The hints of a segment, byte by byte."""

from __future__ import annotations

import struct

import pytest

from ckptd.core.slots.segment_format import read_prologue
from ckptd.core.slots.segment_hints import RingHint, read_ring_hint, write_ring_hint
from tests.ckptd.memory.fresh import make


def test_a_fresh_segment_protects_nothing() -> None:
    buf, _ = make()
    assert read_ring_hint(buf) == RingHint(-1, -1, 0, False, 0, 0)
    assert bytes(buf[4068:4096]) == bytes(4) + b"\xff" * 16 + bytes(8)


def test_the_protection_hint_is_the_specified_bytes_and_outside_every_checksum() -> None:
    buf, _ = make()
    told = read_prologue(buf)
    buf[4095] = 1  # the trainer's own hint stays
    buf[4091] = 1  # and its wish for quiet
    for hint in (
        RingHint(0, 3, 1),
        RingHint(41, 40, 64, sole=True, behind=7, epoch=1_800_000_000),
        RingHint(2**62, 2**62, 65535, behind=65535),
        RingHint(),
    ):
        write_ring_hint(buf, hint)
        packed = struct.pack("<IqqHBBH", hint.epoch, *hint[:4], 1, hint.behind)
        assert bytes(buf[4068:4094]) == packed
        assert read_ring_hint(buf) == hint
        assert read_prologue(buf) == told
    assert buf[4095] == 1
    for wrong in (
        RingHint(-2),
        RingHint(0, -2),
        RingHint(span=-1),
        RingHint(behind=1 << 16),
        RingHint(epoch=-1),
    ):
        with pytest.raises(ValueError, match="cannot be"):
            write_ring_hint(buf, wrong)


def test_a_protection_hint_that_cannot_be_means_none() -> None:
    buf, _ = make()
    buf[4080:4088] = struct.pack("<q", -(2**63))
    assert read_ring_hint(buf.toreadonly()) == RingHint()
