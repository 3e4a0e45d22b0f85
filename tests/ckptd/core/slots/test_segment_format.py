"""The segment format, byte by byte, and what happens when a byte is not what it should be."""

from __future__ import annotations

import random
import struct
import zlib
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.core.slots.segment_format import (
    Kind,
    RingHint,
    SlotHeader,
    check_name,
    decode_descriptor,
    encode_descriptor,
    origin_of,
    pack_slot_header,
    parse_replica_file_name,
    parse_segment_file_name,
    plan_geometry,
    read_prologue,
    read_ring_hint,
    read_slot_header,
    replica_file_name,
    segment_file_name,
    set_slot_state,
    slot_lock_byte,
    slot_view,
    unpack_slot_header,
    write_prologue,
    write_ring_hint,
    write_slot_header,
)
from ckptd.core.slots.slots import SlotState
from ckptd.errors import SegmentError
from tests.ckptd.memory.fresh import DESCRIPTOR, HEADER, make
from tests.simulation.model import Hint
from tests.simulation.torn_hints import mixtures

pytestmark = pytest.mark.usefixtures("unvalidated")


def test_geometry_is_aligned() -> None:
    geometry = plan_geometry(5, 4097, 10)
    assert geometry.slot_bytes == 8192
    assert geometry.descriptor_capacity == 4096
    assert geometry.slots_offset == 2 << 20
    assert geometry.total_bytes == (2 << 20) + 5 * 8192
    assert plan_geometry(600, 1, 1).slots_offset == 4 << 20  # headers alone pass 2 MiB


def test_prologue_is_the_specified_bytes() -> None:
    buf, geometry = make()
    payload = encode_descriptor(DESCRIPTOR)
    front = struct.pack(
        "<8sIIQQIII",
        b"CKPTDSEG",
        2,
        3,
        8192,
        2 << 20,
        len(payload),
        4096,
        zlib.crc32(payload),
    )
    assert bytes(buf[:48]) == front + struct.pack("<I", zlib.crc32(front))
    assert bytes(buf[4096 : 4096 + len(payload)]) == payload
    assert read_prologue(buf) == (geometry, DESCRIPTOR)


@pytest.mark.parametrize(
    ("kind", "magic"), [("log", b"CKPTDLOG"), ("parked", b"CKPTDPRK"), ("kv", b"CKPTDKVB")]
)
def test_another_kind_has_a_magic_of_its_own_which_must_agree_with_its_descriptor(
    kind: Kind, magic: bytes
) -> None:
    """Whoever knows of no logs, or of no parked state, refuses one by its first bytes, whatever name it has."""
    log = msgspec.structs.replace(DESCRIPTOR, kind=kind)
    geometry = plan_geometry(3, 8192, len(encode_descriptor(log)))
    buf = memoryview(bytearray(geometry.total_bytes))
    write_prologue(buf, geometry, log)
    assert bytes(buf[:8]) == magic
    assert read_prologue(buf) == (geometry, log)
    buf[:8] = b"CKPTDSEG"
    buf[44:48] = struct.pack("<I", zlib.crc32(buf[:44]))
    with pytest.raises(SegmentError, match=f"its descriptor says that it holds {kind}"):
        read_prologue(buf)


def test_a_descriptor_without_a_kind_is_of_snapshots() -> None:
    """As versions before boundary logs wrote it."""
    told = msgspec.msgpack.decode(encode_descriptor(DESCRIPTOR))
    del told["kind"]
    assert decode_descriptor(msgspec.msgpack.encode(told)) == DESCRIPTOR


def test_a_fresh_segment_has_only_free_slots() -> None:
    buf, geometry = make()
    assert [read_slot_header(buf, geometry, i) for i in range(3)] == [SlotHeader()] * 3


def test_slot_header_is_the_specified_bytes() -> None:
    packed = pack_slot_header(HEADER)
    assert len(packed) == 112
    at = {
        0: struct.pack("<I", 0x544F4C53),
        4: struct.pack("<I", 3),
        8: struct.pack("<q", 41),
        16: struct.pack("<q", 40),
        24: struct.pack("<Q", 12345),
        32: struct.pack("<Q", 7),
        40: b"\xff" * 8,
        48: struct.pack("<Q", 11),
        56: struct.pack("<Q", 12),
        64: struct.pack("<I", 4321),
        68: struct.pack("<I", 3),
        72: bytes(range(16)),
        88: struct.pack("<Q", 99),
        96: struct.pack("<q", 38),
        104: struct.pack("<I", 6),
        108: struct.pack("<I", zlib.crc32(packed[8:108])),
    }
    for offset, field in at.items():
        assert packed[offset : offset + len(field)] == field, offset
    assert sum(map(len, at.values())) == len(packed)


@pytest.mark.parametrize("state", SlotState)
def test_slot_headers_round_trip(state: SlotState) -> None:
    buf, geometry = make()
    header = replace(HEADER, state=state)
    write_slot_header(buf, geometry, 1, header)
    assert read_slot_header(buf, geometry, 1) == header
    assert read_slot_header(buf, geometry, 0) == SlotHeader()
    assert read_slot_header(buf, geometry, 2) == SlotHeader()


def test_the_state_word_alone_changes_the_state_alone() -> None:
    buf, geometry = make()
    write_slot_header(buf, geometry, 2, replace(HEADER, state=SlotState.FILLED))
    before = bytes(buf)
    set_slot_state(buf, geometry, 2, SlotState.QUARANTINED)
    found = read_slot_header(buf, geometry, 2)
    assert found == replace(HEADER, state=SlotState.QUARANTINED)
    changed = [at for at, (a, b) in enumerate(zip(before, bytes(buf), strict=True)) if a != b]
    assert changed == [geometry.header_offset(2) + 4]


class Recorder:
    """A buffer that remembers its stores, to die between any two of them."""

    def __init__(self, buf: memoryview) -> None:
        self.buf = buf
        self.images: list[bytes] = []

    def __getitem__(self, key: slice) -> memoryview:
        return self.buf[key]

    def __setitem__(self, key: slice, value: bytes) -> None:
        self.buf[key] = value
        self.images.append(bytes(self.buf))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (SlotState.SEALED, SlotState.FILLING),
        (SlotState.QUARANTINED, SlotState.FILLING),
        (SlotState.SEALED, SlotState.FREE),
        (SlotState.FREE, SlotState.FILLED),
        (SlotState.FILLED, SlotState.SEALED),
    ],
)
def test_a_writer_that_dies_between_stores_never_leaves_a_new_body_sealed(
    old: SlotState, new: SlotState
) -> None:
    buf, geometry = make()
    before = replace(HEADER, state=old)
    after = replace(HEADER, state=new, iteration=42, sequence=8)
    write_slot_header(buf, geometry, 0, before)
    recorder = Recorder(buf)
    write_slot_header(recorder, geometry, 0, after)  # type: ignore[arg-type]
    assert recorder.images
    seen = [read_slot_header(memoryview(image), geometry, 0) for image in [*recorder.images, bytes(buf)]]
    for header in seen:
        if header is not None and header.state is SlotState.SEALED:
            assert header == after if new is SlotState.SEALED else header == before
    assert seen[-1] == after


def test_a_damaged_slot_header_is_none() -> None:
    packed = pack_slot_header(HEADER)
    for at in range(len(packed)):
        for bit in (1, 128):
            damaged = bytearray(packed)
            damaged[at] ^= bit
            found = unpack_slot_header(bytes(damaged))
            if 4 <= at < 8:  # the state word is outside of the crc: another state, or none
                assert found is None or replace(found, state=HEADER.state) == HEADER
            else:
                assert found is None


def test_slot_views_are_apart_and_whole() -> None:
    buf, geometry = make()
    for index in range(3):
        slot_view(buf, geometry, index)[:] = bytes([index + 1]) * geometry.slot_bytes
    assert read_prologue(buf) == (geometry, DESCRIPTOR)
    assert [set(slot_view(buf, geometry, i)) for i in range(3)] == [{1}, {2}, {3}]
    with pytest.raises(IndexError, match="slot 3 of a segment with 3 slots"):
        slot_view(buf, geometry, 3)
    with pytest.raises(IndexError):
        read_slot_header(buf, geometry, -1)


def test_lock_bytes() -> None:
    assert [slot_lock_byte(i) for i in (0, 5)] == [16, 21]


def reseal(buf: memoryview) -> None:
    """Make the prologue's own crc right again."""
    buf[44:48] = struct.pack("<I", zlib.crc32(buf[:44]))


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"X", "begins with"),
        (8, struct.pack("<I", 9), "format version 9 is unsupported"),
        (8, struct.pack("<I", 1), "format version 1 is unsupported, this program reads 2"),
        (12, b"\x09", "crc of its prologue"),
        (40, b"\x09\x09", "crc of its prologue"),
        (4100, b"\x00\x01\x02", "crc of its descriptor"),
    ],
)
def test_damage_is_named(at: int, value: bytes, message: str) -> None:
    buf, _ = make()
    buf[at : at + len(value)] = value
    with pytest.raises(SegmentError, match=message):
        read_prologue(buf)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (12, struct.pack("<I", 0), "num_slots is 0"),
        (12, struct.pack("<I", 2**32 - 1), "num_slots is"),
        (16, struct.pack("<Q", 2**64 - 1), "slot_bytes is"),
        (16, struct.pack("<Q", 8191), "do not follow"),
        (24, struct.pack("<Q", 4 << 20), "do not follow"),
        (32, struct.pack("<I", 5000), "has 5000 bytes in a room of 4096"),
        (36, struct.pack("<I", 2**32 - 1), "descriptor has"),
        (12, struct.pack("<I", 4), "truncated: the file has 2121728 bytes, needs 2129920"),
    ],
)
def test_impossible_numbers_are_refused_even_with_a_right_crc(at: int, value: bytes, message: str) -> None:
    buf, _ = make()
    buf[at : at + len(value)] = value
    reseal(buf)
    with pytest.raises(SegmentError, match=message):
        read_prologue(buf)


@pytest.mark.parametrize("payload", [b"\xc1", b"\x90", b"\x81\xa3job\x01"])
def test_a_descriptor_of_another_kind_is_refused(payload: bytes) -> None:
    buf, _ = make()
    buf[4096 : 4096 + len(payload)] = payload
    buf[32:36] = struct.pack("<I", len(payload))
    buf[40:44] = struct.pack("<I", zlib.crc32(payload))
    reseal(buf)
    with pytest.raises(SegmentError, match="descriptor cannot be read"):
        read_prologue(buf)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("rank", 0, (1 << 24) - 1),
        ("world_size", 1, (1 << 24) - 1),
        ("layout_version", 0, (1 << 31) - 1),
        ("generation", 0, (1 << 31) - 1),
        ("created_at_ns", 0, (1 << 63) - 1),
        ("window", 1, 1 << 15),
        ("num_operators", 1, 1 << 20),
    ],
)
def test_a_descriptor_with_numbers_that_cannot_be_is_refused(name: str, least: int, most: int) -> None:
    for number in (least, most):
        fitting = msgspec.structs.replace(DESCRIPTOR, **{name: number})
        assert decode_descriptor(encode_descriptor(fitting)) == fitting
    for number in (least - 1, most + 1, -(1 << 62), (1 << 64) - 1):
        wrong = msgspec.structs.replace(DESCRIPTOR, **{name: number})
        with pytest.raises(SegmentError, match=name):
            decode_descriptor(encode_descriptor(wrong))


@pytest.mark.parametrize("size", [0, 47, 4095, 4096, 5000, (2 << 20) + 1])
def test_a_truncated_segment_says_what_it_has_and_needs(size: int) -> None:
    buf, geometry = make()
    with pytest.raises(SegmentError, match=f"the file has {size} bytes, needs") as caught:
        read_prologue(buf[:size])
    assert caught.value.hint
    assert read_prologue(buf)[0] == geometry


def test_a_segment_whose_creator_died_is_refused() -> None:
    """The prologue is written last: without it the rest is nothing."""
    buf, _ = make()
    buf[:4096] = bytes(4096)
    with pytest.raises(SegmentError, match="begins with"):
        read_prologue(buf)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_random_damage_never_escapes(seed: int) -> None:
    buf, geometry = make()
    rng = random.Random(seed)
    for _ in range(rng.randrange(1, 5)):
        buf[rng.randrange(4096 + 200)] = rng.randrange(256)
    try:
        found = read_prologue(buf)
    except SegmentError:
        return
    assert found == (geometry, DESCRIPTOR)  # only what the format leaves unused was hit


def test_an_origin_tells_primaries_apart() -> None:
    """Pinned, because daemons of all nodes must compute the same; any of its fields changes it."""
    assert origin_of(DESCRIPTOR) == "4e57dbb42693272a"
    changes: list[dict[str, object]] = [
        {"node_id": "node-b"},
        {"created_at_ns": 1},
        {"rank": 4},
        {"generation": 3},
    ]
    others = {origin_of(msgspec.structs.replace(DESCRIPTOR, **change)) for change in changes}
    assert len(others | {origin_of(DESCRIPTOR)}) == 5
    assert origin_of(msgspec.structs.replace(DESCRIPTOR, client=b"")) == origin_of(DESCRIPTOR)


def test_a_bad_geometry_is_a_value_error() -> None:
    for arguments in ((0, 1, 1), (1, 0, 1), (1, 1, -1), (1 << 17, 1, 1), (1, 1, 1 << 30)):
        with pytest.raises(ValueError, match=r"must be|limit"):
            plan_geometry(*arguments)


def test_what_does_not_fit_is_not_written() -> None:
    geometry = plan_geometry(1, 1, 1)
    with pytest.raises(ValueError, match="the buffer has"):
        write_prologue(memoryview(bytearray(4096)), geometry, DESCRIPTOR)
    large = msgspec.structs.replace(DESCRIPTOR, client=bytes(5000))
    with pytest.raises(ValueError, match="room for 4096"):
        write_prologue(memoryview(bytearray(geometry.total_bytes)), geometry, large)


def test_a_fresh_segment_protects_nothing() -> None:
    buf, _ = make()
    assert read_ring_hint(buf) == RingHint(-1, -1, 0, 0)
    assert bytes(buf[4068:4096]) == bytes(4) + b"\xff" * 16 + bytes([0, 0, 1]) + bytes(5)


def test_the_protection_hint_is_the_specified_bytes_and_outside_every_checksum() -> None:
    buf, _ = make()
    told = read_prologue(buf)
    buf[4095] = 1  # the trainer's own hint stays
    buf[4091] = 1  # and its wish for quiet
    for hint in (
        RingHint(0, 3, 1),
        RingHint(41, 40, 64, behind=7, epoch=1_800_000_000),
        RingHint(2**62, 2**62, 65535, behind=65535),
        RingHint(),
    ):
        write_ring_hint(buf, hint)
        packed = struct.pack("<IqqHBBH", hint.epoch, *hint[:3], 1, 1, hint.behind)
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


@given(
    st.text("aZ09._-", min_size=1, max_size=64),
    st.text("bY18._-", min_size=1, max_size=64),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
)
def test_file_names_round_trip(job: str, run: str, rank: int, generation: int) -> None:
    if {job, run} & {".", ".."}:
        return
    name = segment_file_name(job, run, rank, generation)
    assert parse_segment_file_name(name) == (job, run, rank, generation)


@pytest.mark.parametrize(("kind", "end"), [("log", ".boundary"), ("parked", ".parked"), ("kv", ".kv")])
def test_names_of_one_kind_are_of_that_kind_alone(kind: Kind, end: str) -> None:
    name = segment_file_name("demo", "r1", 3, 2, kind)
    assert name == f"demo~r1~r3~g2{end}"
    assert parse_segment_file_name(name, kind) == ("demo", "r1", 3, 2)
    for parse in (parse_segment_file_name, parse_replica_file_name):
        with pytest.raises(ValueError, match="is not <job>"):
            parse(name)
    with pytest.raises(ValueError, match="is not <job>"):
        parse_segment_file_name(segment_file_name("demo", "r1", 3, 2), kind)


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 2**64 - 1))
def test_replica_names_round_trip(rank: int, generation: int, origin: int) -> None:
    told = ("demo", "r1", rank, generation, f"{origin:016x}")
    name = replica_file_name(*told)
    assert name == f"demo~r1~r{rank}~g{generation}~{origin:016x}.rep"
    assert parse_replica_file_name(name) == told
    with pytest.raises(ValueError, match="is not <job>"):
        parse_segment_file_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "demo~r1~r3~g2.seg",
        "demo~r1~r3~g2.rep",
        "demo~r1~r3~g2~0123456789abcdef.seg",
        "demo~r1~r3~g2~0123456789ABCDEF.rep",
        "demo~r1~r3~g2~0123456789abcde.rep",
        "demo~r1~r3~g2~0123456789abcdef.rep.bad",
        "..~r1~r3~g2~0123456789abcdef.rep",
    ],
)
def test_what_is_not_a_replicas_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"is not <job>|must not be"):
        parse_replica_file_name(name)


def test_a_replica_needs_an_origin() -> None:
    for origin in ("", "0123", "0123456789ABCDEF", "0123456789abcdef\n"):
        with pytest.raises(ValueError, match="is not 16 hex digits"):
            replica_file_name("a", "b", 0, 0, origin)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "has 0 characters"),
        ("a" * 65, "has 65 characters"),
        ("a/b", "contains '/'"),
        ("run~1", "contains '~'"),
        ("größe", "contains 'ö'"),
        ("a\n", r"contains '\\n'"),
        ("..", r"must not be '\.\.'"),
    ],
)
def test_names_that_cannot_be_are_refused_by_character(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_name(name, "job")


@pytest.mark.parametrize(
    "name",
    [
        "demo~r1~r3~g2",
        "demo~r1~r3~g2.seg.tmp",
        "demo~r1~r-3~g2.seg",
        "demo~r1~r03~g2.seg",
        "demo~r1~r3.seg",
        "..~r1~r3~g2.seg",
        "a/demo~r1~r3~g2.seg",
        "demo~r1~r3~g2.seg\n",
    ],
)
def test_foreign_file_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"is not <job>|must not be"):
        parse_segment_file_name(name)


def test_negative_numbers_are_in_no_name() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        segment_file_name("a", "b", -1, 0)


@pytest.mark.parametrize("floor", [-1, 7, 10, 12])
def test_a_hint_that_was_stored_in_part_promises_nothing_of_an_abandoned_history(floor: int) -> None:
    """A daemon that dies in between leaves a mixture, from which the next one continues.

    It had the new epoch with the floor of the old one, which the recovery had left behind: the next
    daemon told all nodes that the new history has a floor there, and each gave away what it had gone
    back to.
    """
    before, after = Hint(10, 12, 3, 1 << 12, 14), Hint(floor, -1, 3, 2 << 12, 7)
    found = mixtures(before, after)
    assert found[0] == before
    assert found[-1] == after
    assert len(set(found)) > 3
    for hint in found:
        assert hint.epoch in (before.epoch, after.epoch)
        if hint.epoch == after.epoch:
            assert hint.floor <= after.floor
            assert hint.horizon == -1
        assert hint.floor in (before.floor, after.floor, -1)


def test_a_hint_of_the_same_epoch_that_was_stored_in_part_keeps_the_floor() -> None:
    found = mixtures(Hint(10, 12, 3, 1, 14), Hint(12, 13, 4, 1, 16))
    assert {hint.floor for hint in found} == {10, 12}
    assert all(hint.aim == 16 for hint in found[1:])
