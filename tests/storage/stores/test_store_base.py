"""Cutting puts into parts and reads into requests."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.storage.stores.objects import Range
from ckptd.storage.stores.store_base import (
    Filler,
    RangeRequest,
    cut,
    flat,
    part_size,
    plan_reads,
    total,
)


@given(st.lists(st.binary(max_size=30), max_size=12), st.integers(1, 40))
def test_cut_keeps_bytes_and_sizes(parts: list[bytes], size: int) -> None:
    groups = [*cut(flat([memoryview(part) for part in parts]), size)]
    assert b"".join(b"".join(group) for group in groups) == b"".join(parts)
    assert all(total(group) == size for group in groups[:-1])
    assert all(0 < total(group) <= size for group in groups)


@given(st.data())
def test_reads_cover_every_buffer_once(data: st.DataObject) -> None:
    content = random.Random(1).randbytes(300)
    wanted = data.draw(st.lists(st.tuples(st.integers(0, 299), st.integers(0, 60)), max_size=12))
    size = data.draw(st.integers(1, 80))
    buffers = [bytearray(min(length, 300 - offset)) for offset, length in wanted]
    ranges = [Range(offset, memoryview(buffer)) for (offset, _), buffer in zip(wanted, buffers, strict=True)]
    step = data.draw(st.integers(1, 50))
    for piece in plan_reads(ranges, size):
        assert 0 < piece.size <= size
        filler = Filler(piece)
        source = memoryview(content)[piece.offset : piece.offset + piece.size]
        for at in range(0, len(source), step):
            filler.take(source[at : at + step])
        assert filler.left == 0
    for (offset, _), buffer in zip(wanted, buffers, strict=True):
        assert buffer == content[offset : offset + len(buffer)]


def test_neighbours_share_a_request() -> None:
    buffers = [bytearray(10) for _ in range(4)]
    ranges = [Range(offset, memoryview(b)) for offset, b in zip((20, 0, 10, 31), buffers, strict=True)]
    assert [(p.offset, p.size) for p in plan_reads(ranges, 100)] == [(0, 30), (31, 10)]
    assert [(p.offset, p.size) for p in plan_reads(ranges, 25)] == [(0, 25), (25, 5), (31, 10)]


def test_too_much_is_refused() -> None:
    filler = Filler(RangeRequest(0, 3, (memoryview(bytearray(3)),)))
    filler.take(memoryview(b"ab"))
    with pytest.raises(ValueError, match="missing"):
        filler.take(memoryview(b"cd"))


def test_parts_grow_where_there_would_be_too_many() -> None:
    mib = 1 << 20
    assert part_size(10 * mib, 5 * mib) == 5 * mib
    assert part_size(10_000 * 5 * mib, 5 * mib) == 5 * mib
    grown = part_size(10_000 * 5 * mib + 1, 5 * mib)
    assert grown == 6 * mib
    assert -(-(5 << 40) // part_size(5 << 40, 16 * mib)) <= 10_000
