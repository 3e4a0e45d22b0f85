"""A segment that was just laid out, in plain memory; and headers of slots as another process would leave them."""

from __future__ import annotations

from ckptd.core.slots.segment_format import (
    SegmentDescriptor,
    SegmentGeometry,
    SlotHeader,
    encode_descriptor,
    pack_slot_header,
    plan_geometry,
    write_prologue,
)
from ckptd.core.slots.slots import SlotState

__all__ = ["DESCRIPTOR", "HEADER", "make", "put_header"]

DESCRIPTOR = SegmentDescriptor(
    job="demo",
    run="r1",
    rank=3,
    world_size=8,
    topology="dp8",
    layout_version=1,
    generation=2,
    node_id="node-a",
    created_at_ns=1_700_000_000_000_000_000,
    window=4,
    num_operators=100,
    client=b"\x81\xa1a\x01",
)

HEADER = SlotHeader(
    state=SlotState.SEALED,
    iteration=41,
    previous=40,
    image_len=12345,
    sequence=7,
    layout_id=2**64 - 1,
    filled_at_ns=11,
    sealed_at_ns=12,
    writer_pid=4321,
    phase=3,
    header_digest=bytes(range(16)),
    digest_ns=99,
    epoch_start=38,
    epoch=6,
)


def make(num_slots: int = 3, slot_bytes: int = 5000) -> tuple[memoryview, SegmentGeometry]:
    geometry = plan_geometry(num_slots, slot_bytes, len(encode_descriptor(DESCRIPTOR)))
    buf = memoryview(bytearray(geometry.total_bytes))
    write_prologue(buf, geometry, DESCRIPTOR)
    return buf, geometry


def put_header(buf: memoryview, geometry: SegmentGeometry, index: int, header: SlotHeader) -> None:
    """Put a header there, whatever the slot held: what another process did before it counts as done."""
    packed = pack_slot_header(header)
    start = geometry.header_offset(index)
    buf[start : start + len(packed)] = packed
