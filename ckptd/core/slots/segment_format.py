"""The bytes of a segment file: prologue, descriptor, slot headers, slots.

``docs/architecture.md`` section 2 is the specification. This module only packs and unpacks over a
``memoryview``; it opens, maps and locks nothing. Integers are little-endian, and so must the host be,
because the state word of a slot is stored natively.

Invariants:

* a prologue is written last, so a segment whose creator died is refused and not half believed;
* a slot's state word is one aligned 4-byte store. It comes after the body on the way up (filled,
  sealed) and before it on the way down (free, filling): no death of the writer can leave an old
  ``sealed`` over a new body. Whoever reads a body holds the slot's lock or checks its crc;
* the hints at the end of the prologue page (`ckptd.core.slots.segment_format`) are outside every checksum.

A *replica* is a segment file of another node's primary, descriptor and headers included; only its name
(`ckptd.core.slots.segment_format`) tells them apart (``docs/replication.md`` section 4).

A *boundary log* (``docs/boundary_logs.md``; it may have replicas, too) and *parked state*
(``docs/parking.md``) are laid out alike. Descriptor, magic and name all say what it is, so that
nobody, of whatever version, takes it for snapshots.
"""

from __future__ import annotations

import re
import struct
import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import msgspec
import xxhash
from msgspec import Meta

from ckptd.core.slots.ring import SlotState, check_transition
from ckptd.core.state_machine import validating
from ckptd.errors import SegmentError
from ckptd.unpacking import unpack

__all__ = [
    "FILE_ENDS",
    "FORMAT_VERSION",
    "HINT_APART",
    "HINT_APART_AGAIN",
    "HINT_DROP_GRADIENTS",
    "HINT_OFFSET",
    "LOG_MAGIC",
    "OWNER_LOCK_BYTE",
    "PAGE_BYTES",
    "PARK_MAGIC",
    "PROLOGUE_BYTES",
    "QUIET_OFFSET",
    "REPLICA_ENDS",
    "SEGMENT_MAGIC",
    "SLOTS_ALIGNMENT",
    "SLOT_HEADER_BYTES",
    "SLOT_HEADER_LEN",
    "SLOT_MAGIC",
    "WORLD_TOPOLOGY",
    "Kind",
    "ReplicaName",
    "RingHint",
    "SegmentDescriptor",
    "SegmentGeometry",
    "SegmentName",
    "SlotHeader",
    "check_name",
    "decode_descriptor",
    "encode_descriptor",
    "last_filled",
    "origin_of",
    "pack_slot_header",
    "parse_replica_file_name",
    "parse_segment_file_name",
    "plan_geometry",
    "read_prologue",
    "read_raw_slot_header",
    "read_ring_hint",
    "read_slot_header",
    "replica_file_name",
    "segment_file_name",
    "set_slot_state",
    "slot_lock_byte",
    "slot_view",
    "unpack_slot_header",
    "write_prologue",
    "write_ring_hint",
    "write_slot_header",
]


Kind = Literal["snapshots", "log", "parked"]
FILE_ENDS: Mapping[Kind, str] = {"snapshots": ".seg", "log": ".boundary", "parked": ".parked"}
REPLICA_ENDS: Mapping[Kind, str] = {
    "snapshots": ".rep",
    "log": ".logrep",
}  # no others have replicas
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FILE_NAME = re.compile(
    r"(?P<job>[A-Za-z0-9._-]{1,64})~(?P<run>[A-Za-z0-9._-]{1,64})"
    r"~r(?P<rank>0|[1-9][0-9]{0,9})~g(?P<generation>0|[1-9][0-9]{0,9})"
    r"(?P<end>\.seg|\.boundary|\.parked|~(?P<origin>[0-9a-f]{16})\.(?:log)?rep)"
)
_ORIGIN = re.compile(r"[0-9a-f]{16}")


class SegmentName(NamedTuple):
    """What a segment's file name says."""

    job: str
    run: str
    rank: int
    generation: int


class ReplicaName(NamedTuple):
    """What a replica's file name says; ``origin`` names the primary (`origin_of`)."""

    job: str
    run: str
    rank: int
    generation: int
    origin: str


def check_name(name: str, what: str) -> str:
    """``name`` itself, if it can be a job or a run.

    Raises:
        ValueError: naming the character that cannot stand in a file name or a URL.
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
    """``<job>~<run>~r<rank>~g<generation>.seg``; ``.boundary`` for a log, ``.parked`` for parked state."""
    return f"{_stem(job, run, rank, generation)}{FILE_ENDS[kind]}"


def replica_file_name(
    job: str, run: str, rank: int, generation: int, origin: str, kind: Kind = "snapshots"
) -> str:
    """``<job>~<run>~r<rank>~g<generation>~<origin>.rep``; ``.logrep`` for that of a boundary log.

    Raises:
        ValueError: there are no replicas of this kind, or something cannot stand in such a name.
    """
    if not _ORIGIN.fullmatch(origin):
        raise ValueError(f"origin {origin!r} is not 16 hex digits")
    if kind not in REPLICA_ENDS:
        raise ValueError(f"{kind} state is not replicated")
    return f"{_stem(job, run, rank, generation)}~{origin}{REPLICA_ENDS[kind]}"


def parse_segment_file_name(name: str, kind: Kind = "snapshots") -> SegmentName:
    """What `segment_file_name` was called with.

    Raises:
        ValueError: ``name`` was not made by it for this kind.
    """
    return _parse(name, FILE_ENDS[kind])


def parse_replica_file_name(name: str, kind: Kind = "snapshots") -> ReplicaName:
    """What `replica_file_name` was called with.

    Raises:
        ValueError: ``name`` was not made by it for this kind.
    """
    match, end = _FILE_NAME.fullmatch(name), REPLICA_ENDS[kind]
    if match is None or match["origin"] is None or not name.endswith(end):
        raise ValueError(f"{name!r} is not <job>~<run>~r<rank>~g<generation>~<origin>{end}")
    return ReplicaName(*_parsed(match), match["origin"])


def _stem(job: str, run: str, rank: int, generation: int) -> str:
    if rank < 0 or generation < 0:
        raise ValueError(f"rank {rank} and generation {generation} must not be negative")
    return f"{check_name(job, 'job')}~{check_name(run, 'run')}~r{rank}~g{generation}"


def _parse(name: str, end: str) -> SegmentName:
    match = _FILE_NAME.fullmatch(name)
    if match is None or match["end"] != end:
        raise ValueError(f"{name!r} is not <job>~<run>~r<rank>~g<generation>{end}")
    return _parsed(match)


def _parsed(match: re.Match[str]) -> SegmentName:
    return SegmentName(
        check_name(match["job"], "job"),
        check_name(match["run"], "run"),
        int(match["rank"]),
        int(match["generation"]),
    )


PAGE_BYTES = 4096
PROLOGUE_BYTES = PAGE_BYTES
# The prologue page's last byte, outside every checksum: what a trainer learned for its successor
# (0: nothing).
HINT_OFFSET = PROLOGUE_BYTES - 1
HINT_DROP_GRADIENTS = 1
# A localized recovery has begun and not come to its end: once, or more than once in a row.
HINT_APART = 2
HINT_APART_AGAIN = 4
# Before it what the daemon tells the trainer, see `RingHint`: i64, u32, i64, i64, u16, u8, and u16
# after the trainer's wish for quiet.
_AIM_AT = slice(PROLOGUE_BYTES - 40, PROLOGUE_BYTES - 32)
_EPOCH_AT = slice(PROLOGUE_BYTES - 28, PROLOGUE_BYTES - 24)
_FLOOR_AT = slice(PROLOGUE_BYTES - 24, PROLOGUE_BYTES - 16)
_HORIZON_AT = slice(PROLOGUE_BYTES - 16, PROLOGUE_BYTES - 8)
_SPAN_AT = slice(PROLOGUE_BYTES - 8, PROLOGUE_BYTES - 6)
_SOLE_AT = PROLOGUE_BYTES - 6
QUIET_OFFSET = PROLOGUE_BYTES - 5
_BEHIND_AT = slice(PROLOGUE_BYTES - 4, PROLOGUE_BYTES - 2)


class RingHint(NamedTuple):
    """What the daemon knows of the other ranks, for the trainer's choice of slots (docs/replication.md §6).

    And for a restarted daemon, which goes on from there: ``epoch`` is the history in which it was
    agreed on. ``floor``: what the run agreed on (-1: nothing yet), see
    `ckptd.core.replication.replicas`. ``horizon`` to ``aim``: where suffixes end that may become
    the floor before this ring is told. ``span``: how many snapshots the longest suffix among all
    ranks has (0: unknown). ``sole``: fewer than two other nodes are known to keep the floor's
    suffix, so that this ring must. ``behind``: how many iterations the slowest of the nodes that do
    is behind.
    """

    floor: int = -1
    horizon: int = -1
    span: int = 0
    sole: bool = False
    behind: int = 0
    epoch: int = 0
    aim: int = -1


def read_ring_hint(buf: memoryview) -> RingHint:
    """The daemon's hint; nonsense counts as none."""
    # Against the order of writing: a mixture of two hints has the older horizon, or the newer span
    # and aim, and keeps more.
    horizon, floor = (max(-1, int(buf[at].cast("q")[0])) for at in (_HORIZON_AT, _FLOOR_AT))
    span, behind = (int(buf[at].cast("H")[0]) for at in (_SPAN_AT, _BEHIND_AT))
    epoch: int = buf[_EPOCH_AT].cast("I")[0]
    sole, aim = bool(buf[_SOLE_AT]), max(-1, int(buf[_AIM_AT].cast("q")[0]))
    return RingHint(floor, horizon, span, sole, behind, epoch, aim)


def write_ring_hint(buf: memoryview, hint: RingHint) -> None:
    """Store the daemon's hint. Each part is one store, in the order in which a mixture of two hints
    keeps more, not less.

    Raises:
        ValueError: a number is out of range.
    """
    numbers_fit = all(0 <= n < 1 << 16 for n in (hint.span, hint.behind))
    numbers_fit = numbers_fit and 0 <= hint.epoch < 1 << 32
    if min(hint.floor, hint.horizon, hint.aim) < -1 or not numbers_fit:
        raise ValueError(f"{hint} cannot be")
    buf[_AIM_AT].cast("q")[0] = hint.aim
    buf[_SPAN_AT].cast("H")[0] = hint.span
    buf[_SOLE_AT] = hint.sole
    buf[_EPOCH_AT].cast("I")[0] = hint.epoch
    buf[_FLOOR_AT].cast("q")[0] = hint.floor
    buf[_HORIZON_AT].cast("q")[0] = hint.horizon
    buf[_BEHIND_AT].cast("H")[0] = hint.behind


SEGMENT_MAGIC = b"CKPTDSEG"
LOG_MAGIC = b"CKPTDLOG"
PARK_MAGIC = b"CKPTDPRK"
FORMAT_VERSION = 2
SLOTS_ALIGNMENT = 2 << 20  # a huge page
SLOT_MAGIC = 0x544F4C53
SLOT_HEADER_BYTES = PAGE_BYTES
SLOT_HEADER_LEN = 112  # what of that page is used
OWNER_LOCK_BYTE = 0
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
}
_NO_DIGEST = bytes(16)
_STEADY_TRIES = 8  # a writer changes a header four times in a fill, which takes milliseconds
_Rank = Annotated[int, Meta(ge=0, lt=1 << 24)]  # these three as messages bound them
_WorldSize = Annotated[int, Meta(ge=1, lt=1 << 24)]
_Small = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Time = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Window = Annotated[int, Meta(ge=1, le=1 << 15)]  # two of them fit into the most slots there can be
_NumOperators = Annotated[int, Meta(ge=1, le=1 << 20)]


class SegmentDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """Whose segment it is and for what; ``client`` is the trainer's own, opaque to the daemon.

    ``replicated``: of a boundary log, whether it is to have replicas on other nodes. Snapshots
    have, wherever there are peers.

    The bounds are checked where a descriptor is decoded: peers send them, and every table of slots
    is as wide as they say.
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

    @property
    def is_log(self) -> bool:
        """Whether its slots hold what was sent at pipeline boundaries, not snapshots."""
        return self.kind == "log"

    @property
    def holds_snapshots(self) -> bool:
        """Whether its slots make up a ring; nobody may take anything else for a part of one."""
        return self.kind == "snapshots"


@dataclass(frozen=True, slots=True)
class SegmentGeometry:
    """Where everything lies in a segment; sizes and offsets in bytes."""

    num_slots: int
    slot_bytes: int
    descriptor_capacity: int
    slots_offset: int
    total_bytes: int

    @property
    def headers_offset(self) -> int:
        """Where the first slot header begins."""
        return PROLOGUE_BYTES + self.descriptor_capacity

    def header_offset(self, index: int) -> int:
        """Where the header of slot ``index`` begins."""
        self._check(index)
        return self.headers_offset + index * SLOT_HEADER_BYTES

    def slot_offset(self, index: int) -> int:
        """Where the content of slot ``index`` begins."""
        self._check(index)
        return self.slots_offset + index * self.slot_bytes

    def _check(self, index: int) -> None:
        if not 0 <= index < self.num_slots:
            raise IndexError(f"slot {index} of a segment with {self.num_slots} slots")


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What a slot holds; times are unix time in nanoseconds.

    ``epoch`` is the history that it belongs to, ``epoch_start`` the iteration at which that history
    left the one before (-1: from the beginning).
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


def plan_geometry(num_slots: int, slot_bytes: int, descriptor_len: int) -> SegmentGeometry:
    """Lay out a segment; ``slot_bytes`` is rounded up to whole pages.

    Raises:
        ValueError: a number is outside of what the format can hold.
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
    """The descriptor as msgpack; its length is what `plan_geometry` asks for."""
    return msgspec.msgpack.encode(descriptor)


def decode_descriptor(payload: bytes | memoryview) -> SegmentDescriptor:
    """The descriptor back from msgpack, validated.

    Raises:
        SegmentError: it is not msgpack, or not a descriptor, or a number in it is out of range.
    """
    try:
        return unpack(_decoder, payload)
    except ValueError as error:
        raise _bad(f"its descriptor cannot be read ({error})") from error


def write_prologue(buf: memoryview, geometry: SegmentGeometry, descriptor: SegmentDescriptor) -> None:
    """Make a fresh segment of ``buf``: all slots free, then the descriptor, then the prologue."""
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
    """The geometry and descriptor of the segment in ``buf``, every number of it checked.

    Raises:
        SegmentError: it is not a segment, of another format version, truncated or damaged.
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
    body = _SLOT_BODY.pack(
        header.iteration,
        header.previous,
        header.image_len,
        header.sequence,
        header.layout_id,
        header.filled_at_ns,
        header.sealed_at_ns,
        header.writer_pid,
        header.phase,
        header.header_digest,
        header.digest_ns,
        header.epoch_start,
        header.epoch,
    )
    front = _SLOT_FRONT.pack(SLOT_MAGIC, header.state)
    return front + body + _CRC.pack(zlib.crc32(body))


def unpack_slot_header(page: bytes) -> SlotHeader | None:
    """The header in ``page``; None when its magic, state or crc says that it is damaged."""
    magic, state = _SLOT_FRONT.unpack_from(page)
    body = page[_SLOT_FRONT.size : _CRC_AT]
    if magic != SLOT_MAGIC or state not in _STATES:
        return None
    if _CRC.unpack_from(page, _CRC_AT)[0] != zlib.crc32(body):
        return None
    return SlotHeader(SlotState(state), *_SLOT_BODY.unpack(body))


def write_slot_header(buf: memoryview, geometry: SegmentGeometry, index: int, header: SlotHeader) -> None:
    """Write the header of slot ``index``; see the module for the order of the stores."""
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
    """The 112 bytes of the header of slot ``index``, as they stood at one moment.

    No two fills of a slot, and no two stages of a fill, have the same body. So a body that is the
    same before and after the state was read is the body that this state was of. Zeros, which are no
    header, if a writer never rests.
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
    """The header of slot ``index``; None when it is damaged (to be treated as free, and reported)."""
    return unpack_slot_header(read_raw_slot_header(buf, geometry, index))


def set_slot_state(buf: memoryview, geometry: SegmentGeometry, index: int, state: SlotState) -> None:
    """Store the state word of slot ``index``, alone and at once: every transition of a slot goes
    through here.

    Where the tests ask for it, an illegal one raises. Otherwise it does not: what the word was is no
    more certain than the memory that other processes share with this one.
    """
    if validating():
        before = read_slot_header(buf, geometry, index)  # None: damaged, which is as good as free
        if before is not None and before.state is not state:
            check_transition(before.state, state)
    start = geometry.header_offset(index)
    buf[start : start + _SLOT_FRONT.size].cast("I")[_STATE_WORD] = int(state)


def slot_view(buf: memoryview, geometry: SegmentGeometry, index: int) -> memoryview:
    """The bytes of slot ``index``: an image, then whatever was there before."""
    start = geometry.slot_offset(index)
    return buf[start : start + geometry.slot_bytes]


def slot_lock_byte(index: int) -> int:
    """The byte of the file that is locked on behalf of slot ``index``."""
    return _FIRST_SLOT_LOCK_BYTE + index


def origin_of(descriptor: SegmentDescriptor) -> str:
    """Which primary it is, for all that know its descriptor: 16 hex digits, new with every segment."""
    told = descriptor
    text = f"{told.node_id}/{told.created_at_ns}/{told.rank}/{told.generation}"
    return xxhash.xxh3_64_hexdigest(text.encode())


def last_filled(headers: Iterable[SlotHeader]) -> tuple[int, int]:
    """Epoch and iteration of the newest snapshot in a segment; what has none comes before all others."""
    taken = (h for h in headers if h.state is not SlotState.FREE)
    return max(((h.epoch, h.iteration) for h in taken), default=(-1, -1))


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _check_byte_order() -> None:
    if sys.byteorder != "little":
        raise SegmentError("segments are little-endian and this host is not", operation="open segment")


def _bad(message: str, hint: str = "Remove the file if nothing else explains it.") -> SegmentError:
    return SegmentError(message, operation="read segment", hint=hint)
