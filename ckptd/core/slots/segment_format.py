"""A segment file: its name, and its bytes: prologue with hints, descriptor, slot headers, slots. Pure.

``docs/architecture.md`` section 2 is the specification. This module packs and unpacks over a ``memoryview``;
it opens, maps and locks nothing. Integers are little-endian, and the host must be too, because the state word
of a slot is stored natively.

Invariants:

* The prologue is written last, so a segment whose creator died is refused.
* A slot's state word is one aligned 4-byte store. It comes after the body on the way up (filled, sealed) and
  before it on the way down (free, filling): no death of the writer can leave an old ``sealed`` over a new
  body. A reader of a body holds the slot's lock or checks the crc.
* The hints at the end of the prologue page are outside every checksum, and each is one aligned store. They
  change while the segment is in use; nothing but efficiency depends on them.

A *replica* is a copy of another node's segment, descriptor and headers included; only its name differs
(``docs/replication.md`` section 4). A *boundary log* (``docs/boundary_logs.md``), which may have replicas
too, and *parked state* (``docs/parking.md``) have the same layout. Their descriptor, magic and name say what
they are, so that no version takes them for snapshots.
"""

from __future__ import annotations

import operator
import re
import struct
import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Literal, NamedTuple

import msgspec
import xxhash
from msgspec import Meta

from ckptd.core.slots.slots import SlotState, check_transition
from ckptd.core.state_machine import validating
from ckptd.errors import SegmentError
from ckptd.unpacking import unpack

Kind = Literal["snapshots", "log", "parked", "kv"]
FILE_ENDS: Mapping[Kind, str] = {"snapshots": ".seg", "log": ".boundary", "parked": ".parked", "kv": ".kv"}
RECORD_ENDS = ".run"  # of the file beside them that says who takes part in a run
REPLICA_ENDS: Mapping[Kind, str] = {"snapshots": ".rep", "log": ".logrep"}
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FILE_NAME = re.compile(
    r"(?P<job>[A-Za-z0-9._-]{1,64})~(?P<run>[A-Za-z0-9._-]{1,64})"
    r"~r(?P<rank>0|[1-9][0-9]{0,9})~g(?P<generation>0|[1-9][0-9]{0,9})"
    r"(?P<end>\.seg|\.boundary|\.parked|\.kv|~(?P<origin>[0-9a-f]{16})\.(?:log)?rep)"
)
_ORIGIN = re.compile(r"[0-9a-f]{16}")


class SegmentName(NamedTuple):
    """The parts of a segment's file name."""

    job: str
    run: str
    rank: int
    generation: int


class ReplicaName(NamedTuple):
    """The parts of a replica's file name; ``origin`` identifies the primary (`origin_of`)."""

    job: str
    run: str
    rank: int
    generation: int
    origin: str


def check_name(name: str, what: str) -> str:
    """Return ``name`` if it is valid for a job or a run.

    Raises:
        ValueError: it has a bad length, or a character that is not allowed in file names and URLs.
    """
    if _NAME.fullmatch(name) and name not in (".", ".."):
        return name
    if not name or len(name) > 64:
        raise ValueError(f"{what} has {len(name)} characters, must have 1 to 64")
    bad = next((char for char in name if not _NAME.fullmatch(char)), None)
    if bad is None:
        raise ValueError(f"{what} must not be {name!r}")
    raise ValueError(f"{what} {name!r} contains {bad!r}; allowed are letters, digits, '.', '_' and '-'")


def segment_file_name(job: str, run: str, rank: int, generation: int, kind: Kind = "snapshots") -> str:
    """``<job>~<run>~r<rank>~g<generation>.seg``, or with another end for another kind (`FILE_ENDS`)."""
    return f"{_stem(job, run, rank, generation)}{FILE_ENDS[kind]}"


def replica_file_name(
    job: str, run: str, rank: int, generation: int, origin: str, kind: Kind = "snapshots"
) -> str:
    """``<job>~<run>~r<rank>~g<generation>~<origin>.rep``; ``.logrep`` for a boundary log.

    Raises:
        ValueError: this kind is not replicated, or a part is not valid.
    """
    if not _ORIGIN.fullmatch(origin):
        raise ValueError(f"origin {origin!r} is not 16 hex digits")
    if kind not in REPLICA_ENDS:
        raise ValueError(f"{kind} state is not replicated")
    return f"{_stem(job, run, rank, generation)}~{origin}{REPLICA_ENDS[kind]}"


def parse_segment_file_name(name: str, kind: Kind = "snapshots") -> SegmentName:
    """The arguments of `segment_file_name`.

    Raises:
        ValueError: ``name`` is not the name of a segment of this kind.
    """
    match, end = _FILE_NAME.fullmatch(name), FILE_ENDS[kind]
    if match is None or match["end"] != end:
        raise ValueError(f"{name!r} is not <job>~<run>~r<rank>~g<generation>{end}")
    return _parsed(match)


def parse_replica_file_name(name: str, kind: Kind = "snapshots") -> ReplicaName:
    """The arguments of `replica_file_name`.

    Raises:
        ValueError: ``name`` is not the name of a replica of this kind.
    """
    match, end = _FILE_NAME.fullmatch(name), REPLICA_ENDS[kind]
    if match is None or match["origin"] is None or not name.endswith(end):
        raise ValueError(f"{name!r} is not <job>~<run>~r<rank>~g<generation>~<origin>{end}")
    return ReplicaName(*_parsed(match), match["origin"])


def _stem(job: str, run: str, rank: int, generation: int) -> str:
    if rank < 0 or generation < 0:
        raise ValueError(f"rank {rank} and generation {generation} must not be negative")
    return f"{check_name(job, 'job')}~{check_name(run, 'run')}~r{rank}~g{generation}"


def _parsed(match: re.Match[str]) -> SegmentName:
    return SegmentName(
        check_name(match["job"], "job"),
        check_name(match["run"], "run"),
        int(match["rank"]),
        int(match["generation"]),
    )


PAGE_BYTES = 4096
PROLOGUE_BYTES = PAGE_BYTES
# The last byte of the prologue page: what a trainer learned for its successor (0: nothing).
HINT_OFFSET = PROLOGUE_BYTES - 1
HINT_DROP_GRADIENTS = 1
# A localized recovery has begun and not ended: once, or more than once in a row.
HINT_APART = 2
HINT_APART_AGAIN = 4
# How copies of host tensors run: what a trainer has measured to be faster.
HINT_COPIES_BESIDE, HINT_COPIES_INLINE = 8, 16
# Before it the daemon's `RingHint`: i64, u32, i64, i64, u16, and u16 after the trainer's wish for quiet.
_AIM_AT = slice(PROLOGUE_BYTES - 40, PROLOGUE_BYTES - 32)
_EPOCH_AT = slice(PROLOGUE_BYTES - 28, PROLOGUE_BYTES - 24)
_FLOOR_AT = slice(PROLOGUE_BYTES - 24, PROLOGUE_BYTES - 16)
_HORIZON_AT = slice(PROLOGUE_BYTES - 16, PROLOGUE_BYTES - 8)
_SPAN_AT = slice(PROLOGUE_BYTES - 8, PROLOGUE_BYTES - 6)
_SOLE_AT = PROLOGUE_BYTES - 6  # trainers of ckptd 0.4 keep what was agreed on only if this byte is not 0
QUIET_OFFSET = PROLOGUE_BYTES - 5
_BEHIND_AT = slice(PROLOGUE_BYTES - 4, PROLOGUE_BYTES - 2)


class RingHint(NamedTuple):
    """What the daemon knows of the other ranks (docs/replication.md §6): a trainer chooses its slots by it,
    and a restarted daemon continues from it.

    Attributes:
        floor: of the run, -1: none yet; see `ckptd.core.replication.replicas`.
        horizon: suffixes that end from here to ``aim`` may become the floor before this ring learns of it.
        span: how many snapshots the longest suffix of all ranks has; 0: not known.
        behind: how many iterations the slowest of the nodes that keep it is behind.
        epoch: the history in which all this was agreed on.
        aim: see ``horizon``.
    """

    floor: int = -1
    horizon: int = -1
    span: int = 0
    behind: int = 0
    epoch: int = 0
    aim: int = -1


def read_ring_hint(buf: memoryview) -> RingHint:
    """The daemon's hint; invalid values count as none."""
    # In the reverse order of writing: a mixture of two hints has the older horizon, or the newer span and
    # aim, and keeps more.
    horizon, floor = (max(-1, int(buf[at].cast("q")[0])) for at in (_HORIZON_AT, _FLOOR_AT))
    span, behind = (int(buf[at].cast("H")[0]) for at in (_SPAN_AT, _BEHIND_AT))
    epoch: int = buf[_EPOCH_AT].cast("I")[0]
    aim = max(-1, int(buf[_AIM_AT].cast("q")[0]))
    return RingHint(floor, horizon, span, behind, epoch, aim)


def write_ring_hint(buf: memoryview, hint: RingHint) -> None:
    """Store the daemon's hint. Each part is one store, in the order in which a mixture of two hints
    keeps more, not less. A mixture of two epochs has no floor of the older one that the newer one does not
    have, and no horizon of it: what a recovery left behind would count as agreed on in its history.

    Raises:
        ValueError: a number is out of range.
    """
    numbers_fit = all(0 <= n < 1 << 16 for n in (hint.span, hint.behind))
    numbers_fit = numbers_fit and 0 <= hint.epoch < 1 << 32
    if min(hint.floor, hint.horizon, hint.aim) < -1 or not numbers_fit:
        raise ValueError(f"{hint} cannot be")
    before = read_ring_hint(buf)
    if hint.epoch != before.epoch:
        buf[_HORIZON_AT].cast("q")[0] = -1
        if before.floor > hint.floor:
            buf[_FLOOR_AT].cast("q")[0] = -1
    buf[_AIM_AT].cast("q")[0] = hint.aim
    buf[_SPAN_AT].cast("H")[0] = hint.span
    buf[_SOLE_AT] = 1
    buf[_EPOCH_AT].cast("I")[0] = hint.epoch
    buf[_FLOOR_AT].cast("q")[0] = hint.floor
    buf[_HORIZON_AT].cast("q")[0] = hint.horizon
    buf[_BEHIND_AT].cast("H")[0] = hint.behind


SEGMENT_MAGIC = b"CKPTDSEG"
LOG_MAGIC = b"CKPTDLOG"
PARK_MAGIC = b"CKPTDPRK"
KV_MAGIC = b"CKPTDKVB"
FORMAT_VERSION = 2
SLOTS_ALIGNMENT = 2 << 20  # a huge page
SLOT_MAGIC = 0x544F4C53
SLOT_HEADER_BYTES = PAGE_BYTES
SLOT_HEADER_LEN = 112  # what of that page is used
OWNER_LOCK_BYTE = 0
MAX_GROUP_RANKS, MAX_REPLICA_GROUPS = 1 << 16, 1 << 12  # of a descriptor
WORLD_TOPOLOGY = "ckptd.core.elastic-world"
"""The topology of ranks whose run is a world of an elastic job."""

_FIRST_SLOT_LOCK_BYTE = 16
_MAX_SLOTS = 1 << 16
_MAX_DESCRIPTOR_BYTES = 256 << 20
_MAX_SLOT_BYTES = 1 << 50

_PROLOGUE = struct.Struct("<8sIIQQIII")
_CRC = struct.Struct("<I")
_SLOT_FRONT = struct.Struct("<II")
_SLOT_BODY = struct.Struct("<qqQQQQQII16sQqI")
_CRC_AT = _SLOT_FRONT.size + _SLOT_BODY.size
assert _CRC_AT + _CRC.size == SLOT_HEADER_LEN
_STATES = frozenset(int(state) for state in SlotState)
_STATE_WORD = 1  # index of the state in a slot header seen as 32-bit words
_MAGICS: Mapping[Kind, bytes] = {
    "snapshots": SEGMENT_MAGIC,
    "log": LOG_MAGIC,
    "parked": PARK_MAGIC,
    "kv": KV_MAGIC,
}
_NO_DIGEST = bytes(16)
_STEADY_TRIES = 8  # a writer changes a header four times in a fill, which takes milliseconds
_Rank = Annotated[int, Meta(ge=0, lt=1 << 24)]  # these three as messages bound them
_WorldSize = Annotated[int, Meta(ge=1, lt=1 << 24)]
_Small = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Time = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Window = Annotated[int, Meta(ge=1, le=1 << 15)]  # two of them fit into the most slots there can be
_NumOperators = Annotated[int, Meta(ge=1, le=1 << 20)]


class ReplicaGroup(msgspec.Struct, frozen=True):
    """Parameters that these ranks hold with the same bits, with their optimizer state, and capture each."""

    ranks: Annotated[tuple[_Rank, ...], Meta(min_length=2, max_length=MAX_GROUP_RANKS)]
    params: tuple[str, ...]


class SegmentDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """The owner and the purpose of a segment; ``client`` belongs to the trainer and is opaque to the daemon.

    ``replicated``: a boundary log has replicas on other nodes. Snapshots have them wherever there are peers.

    ``replica_groups``: what its snapshots share with those of other ranks; each parameter once.

    The bounds are checked on decoding, because peers send descriptors and slot tables are as wide as they
    say.
    """

    job: str
    run: str
    rank: _Rank
    world_size: _WorldSize
    topology: str
    layout_version: _Small
    generation: _Small
    node_id: str
    created_at_ns: _Time
    window: _Window
    num_operators: _NumOperators
    client: bytes = b""
    kind: Kind = "snapshots"
    replicated: bool = False
    replica_groups: Annotated[tuple[ReplicaGroup, ...], Meta(max_length=MAX_REPLICA_GROUPS)] = ()

    @property
    def is_log(self) -> bool:
        """Whether its slots hold tensors that were sent at pipeline boundaries."""
        return self.kind == "log"

    @property
    def holds_snapshots(self) -> bool:
        """Whether its slots are part of a ring of snapshots."""
        return self.kind == "snapshots"


@dataclass(frozen=True, slots=True)
class SegmentGeometry:
    """The layout of a segment; sizes and offsets in bytes."""

    num_slots: int
    slot_bytes: int
    descriptor_capacity: int
    slots_offset: int
    total_bytes: int

    @property
    def headers_offset(self) -> int:
        """The offset of the first slot header."""
        return PROLOGUE_BYTES + self.descriptor_capacity

    def header_offset(self, index: int) -> int:
        """The offset of a slot's header."""
        self._check(index)
        return self.headers_offset + index * SLOT_HEADER_BYTES

    def slot_offset(self, index: int) -> int:
        """The offset of a slot's content."""
        self._check(index)
        return self.slots_offset + index * self.slot_bytes

    def _check(self, index: int) -> None:
        if not 0 <= index < self.num_slots:
            raise IndexError(f"slot {index} of a segment with {self.num_slots} slots")


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """The header of a slot, its fields in the order of the bytes; times are unix time in nanoseconds.

    ``epoch`` is the history of its snapshot, ``epoch_start`` the iteration at which that history left the
    previous one (-1: from the beginning).
    """

    state: SlotState = SlotState.FREE
    iteration: int = -1
    previous: int = -1
    image_len: int = 0
    sequence: int = 0
    layout_id: int = 0
    filled_at_ns: int = 0
    sealed_at_ns: int = 0
    writer_pid: int = 0
    phase: int = 0
    header_digest: bytes = _NO_DIGEST
    digest_ns: int = 0
    epoch_start: int = -1
    epoch: int = 0


_body_fields = operator.attrgetter(*[spec.name for spec in fields(SlotHeader)][1:])


def plan_geometry(num_slots: int, slot_bytes: int, descriptor_len: int) -> SegmentGeometry:
    """Lay out a segment; ``slot_bytes`` is rounded up to whole pages.

    Raises:
        ValueError: a number is out of the range of the format.
    """
    if not 1 <= num_slots <= _MAX_SLOTS:
        raise ValueError(f"num_slots is {num_slots}, must be 1 to {_MAX_SLOTS}")
    if not 1 <= slot_bytes <= _MAX_SLOT_BYTES:
        raise ValueError(f"slot_bytes is {slot_bytes}, must be 1 to {_MAX_SLOT_BYTES}")
    if not 0 <= descriptor_len <= _MAX_DESCRIPTOR_BYTES:
        raise ValueError(f"the descriptor has {descriptor_len} bytes, limit {_MAX_DESCRIPTOR_BYTES}")
    whole = _round_up(slot_bytes, PAGE_BYTES)
    capacity = _round_up(max(descriptor_len, 1), PAGE_BYTES)
    headers_end = PROLOGUE_BYTES + capacity + num_slots * SLOT_HEADER_BYTES
    slots_offset = _round_up(headers_end, SLOTS_ALIGNMENT)
    return SegmentGeometry(
        num_slots=num_slots,
        slot_bytes=whole,
        descriptor_capacity=capacity,
        slots_offset=slots_offset,
        total_bytes=slots_offset + num_slots * whole,
    )


_decoder = msgspec.msgpack.Decoder(SegmentDescriptor)


def encode_descriptor(descriptor: SegmentDescriptor) -> bytes:
    """The descriptor as msgpack; `plan_geometry` needs its length."""
    return msgspec.msgpack.encode(descriptor)


def decode_descriptor(payload: bytes | memoryview) -> SegmentDescriptor:
    """Decode and validate a descriptor.

    Raises:
        SegmentError: the payload is not a descriptor, or a number in it is out of range.
    """
    try:
        return unpack(_decoder, payload)
    except ValueError as error:
        raise _bad(f"its descriptor cannot be read ({error})") from error


def write_prologue(buf: memoryview, geometry: SegmentGeometry, descriptor: SegmentDescriptor) -> None:
    """Initialize a segment in ``buf``: all slots free, then the descriptor, then the prologue."""
    _check_byte_order()
    payload = encode_descriptor(descriptor)
    if len(payload) > geometry.descriptor_capacity:
        raise ValueError(
            f"the descriptor has {len(payload)} bytes, the segment room for {geometry.descriptor_capacity}"
        )
    if len(buf) < geometry.total_bytes:
        raise ValueError(f"the buffer has {len(buf)} bytes, the segment {geometry.total_bytes}")
    buf[:PROLOGUE_BYTES] = bytes(PROLOGUE_BYTES)  # not a segment until the end of this call
    write_ring_hint(buf, RingHint())
    for index in range(geometry.num_slots):
        write_slot_header(buf, geometry, index, SlotHeader())
    buf[PROLOGUE_BYTES : PROLOGUE_BYTES + len(payload)] = payload
    prologue = _PROLOGUE.pack(
        _MAGICS[descriptor.kind],
        FORMAT_VERSION,
        geometry.num_slots,
        geometry.slot_bytes,
        geometry.slots_offset,
        len(payload),
        geometry.descriptor_capacity,
        zlib.crc32(payload),
    )
    prologue += _CRC.pack(zlib.crc32(prologue))
    buf[: len(prologue)] = prologue


def read_prologue(buf: memoryview) -> tuple[SegmentGeometry, SegmentDescriptor]:
    """The geometry and descriptor of the segment in ``buf``, with every number checked.

    Raises:
        SegmentError: it is not a segment, has another format version, or is truncated or damaged.
    """
    _check_byte_order()
    if len(buf) < PROLOGUE_BYTES:
        raise _bad(f"it is truncated: the file has {len(buf)} bytes, needs at least 4096")
    fields = _PROLOGUE.unpack_from(buf)
    magic, version, num_slots, slot_bytes, slots_offset, length, capacity, payload_crc = fields
    if magic not in _MAGICS.values():
        raise _bad(f"it begins with {magic!r}, not {SEGMENT_MAGIC!r}", "It is not a segment.")
    if version != FORMAT_VERSION:
        raise _bad(
            f"format version {version} is unsupported, this program reads {FORMAT_VERSION}",
            "Run the ckptd that wrote it, or remove the file.",
        )
    if _CRC.unpack_from(buf, _PROLOGUE.size)[0] != zlib.crc32(buf[: _PROLOGUE.size]):
        raise _bad("the crc of its prologue does not match")
    try:
        geometry = plan_geometry(num_slots, slot_bytes, capacity)
    except ValueError as error:
        raise _bad(f"its geometry is impossible ({error})") from error
    found = (slot_bytes, slots_offset, capacity)
    if found != (geometry.slot_bytes, geometry.slots_offset, geometry.descriptor_capacity):
        raise _bad("its offsets do not follow from its sizes")
    if len(buf) < geometry.total_bytes:
        raise _bad(f"it is truncated: the file has {len(buf)} bytes, needs {geometry.total_bytes}")
    if length > capacity:
        raise _bad(f"its descriptor has {length} bytes in a room of {capacity}")
    payload = buf[PROLOGUE_BYTES : PROLOGUE_BYTES + length]
    if zlib.crc32(payload) != payload_crc:
        raise _bad("the crc of its descriptor does not match")
    descriptor = decode_descriptor(payload)
    if magic != _MAGICS[descriptor.kind]:
        raise _bad(f"it begins with {magic!r}, and its descriptor says that it holds {descriptor.kind}")
    return geometry, descriptor


def pack_slot_header(header: SlotHeader) -> bytes:
    """The 112 bytes of a slot header; the rest of its page is zero."""
    body = _SLOT_BODY.pack(*_body_fields(header))
    front = _SLOT_FRONT.pack(SLOT_MAGIC, header.state)
    return front + body + _CRC.pack(zlib.crc32(body))


def unpack_slot_header(page: bytes) -> SlotHeader | None:
    """The header in ``page``; None if its magic, state or crc is wrong."""
    magic, state = _SLOT_FRONT.unpack_from(page)
    body = page[_SLOT_FRONT.size : _CRC_AT]
    if magic != SLOT_MAGIC or state not in _STATES:
        return None
    if _CRC.unpack_from(page, _CRC_AT)[0] != zlib.crc32(body):
        return None
    return SlotHeader(SlotState(state), *_SLOT_BODY.unpack(body))


def write_slot_header(buf: memoryview, geometry: SegmentGeometry, index: int, header: SlotHeader) -> None:
    """Write a slot's header; see the module for the order of the stores."""
    packed = pack_slot_header(header)
    start = geometry.header_offset(index)
    going_down = header.state < SlotState.FILLED
    if going_down:
        set_slot_state(buf, geometry, index, header.state)
    buf[start : start + 4] = packed[:4]
    buf[start + _SLOT_FRONT.size : start + len(packed)] = packed[_SLOT_FRONT.size :]
    if not going_down:
        set_slot_state(buf, geometry, index, header.state)


def read_raw_slot_header(buf: memoryview, geometry: SegmentGeometry, index: int) -> bytes:
    """The 112 bytes of a slot's header at one moment; zeros, which are no header, if a writer never rests.

    No two fills of a slot, and no two stages of a fill, have the same body. So a body that is the same before
    and after the state was read belongs to that state.
    """
    start = geometry.header_offset(index)
    body_at, end = start + _SLOT_FRONT.size, start + SLOT_HEADER_LEN
    body = bytes(buf[body_at:end])
    for _ in range(_STEADY_TRIES):
        front = bytes(buf[start:body_at])
        again = bytes(buf[body_at:end])
        if again == body:
            return front + body
        body = again
    return bytes(SLOT_HEADER_LEN)


def read_slot_header(buf: memoryview, geometry: SegmentGeometry, index: int) -> SlotHeader | None:
    """A slot's header; None if it is damaged (treat the slot as free, and report it)."""
    return unpack_slot_header(read_raw_slot_header(buf, geometry, index))


def set_slot_state(buf: memoryview, geometry: SegmentGeometry, index: int, state: SlotState) -> None:
    """Store a slot's state word in one store; every transition of a slot is made here.

    An illegal transition raises only under `validate_always`: the old word is no more certain than the memory
    that other processes share with this one.
    """
    if validating():
        before = read_slot_header(buf, geometry, index)  # None: damaged, which counts as free
        if before is not None and before.state is not state:
            check_transition(before.state, state)
    start = geometry.header_offset(index)
    buf[start : start + _SLOT_FRONT.size].cast("I")[_STATE_WORD] = int(state)


def slot_view(buf: memoryview, geometry: SegmentGeometry, index: int) -> memoryview:
    """The bytes of a slot: an image, then remains of earlier ones."""
    start = geometry.slot_offset(index)
    return buf[start : start + geometry.slot_bytes]


def slot_lock_byte(index: int) -> int:
    """The byte of the file that is locked for a slot."""
    return _FIRST_SLOT_LOCK_BYTE + index


def origin_of(descriptor: SegmentDescriptor) -> str:
    """Identifies a primary by its descriptor: 16 hex digits, different for every segment."""
    d = descriptor
    text = f"{d.node_id}/{d.created_at_ns}/{d.rank}/{d.generation}"
    return xxhash.xxh3_64_hexdigest(text.encode())


def last_filled(headers: Iterable[SlotHeader]) -> tuple[int, int]:
    """Epoch and iteration of the newest snapshot in a segment; (-1, -1): none."""
    taken = (h for h in headers if h.state is not SlotState.FREE)
    return max(((h.epoch, h.iteration) for h in taken), default=(-1, -1))


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _check_byte_order() -> None:
    if sys.byteorder != "little":
        raise SegmentError("segments are little-endian and this host is not", operation="open segment")


def _bad(message: str, hint: str = "Remove the file if nothing else explains it.") -> SegmentError:
    return SegmentError(message, operation="read segment", hint=hint)
