"""Segment files, mapped: slots, hints for trainers, and the adoption of an earlier daemon's files.

Slot states are changed here only under the slot's lock, or where no trainer can be writing.
"""

from __future__ import annotations

import errno
import os
import resource
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from ckptd.config.daemon_config import trusted_users
from ckptd.core.sessions import RankKey
from ckptd.core.slots.segment_format import (
    OWNER_LOCK_BYTE,
    QUIET_OFFSET,
    REPLICA_ENDS,
    SLOT_HEADER_BYTES,
    SLOT_HEADER_LEN,
    RingHint,
    SegmentDescriptor,
    SegmentGeometry,
    SlotHeader,
    encode_descriptor,
    last_filled,
    origin_of,
    parse_replica_file_name,
    parse_segment_file_name,
    read_prologue,
    read_raw_slot_header,
    read_ring_hint,
    read_slot_header,
    set_slot_state,
    slot_lock_byte,
    slot_view,
    write_ring_hint,
    write_slot_header,
)
from ckptd.core.slots.slots import SlotState
from ckptd.errors import SegmentError
from ckptd.event_log import EventLog
from ckptd.memory import locks
from ckptd.memory.pages import FileMapping
from ckptd.memory.replicated_digests import ReplicatedSets
from ckptd.storage.strong_digest import is_strong_digest
from ckptd.transport.access.local_trust import open_file

# The cryptographic digest of an image is kept in its slot's header page, behind the header
# (docs/architecture.md section 2). It has a checksum of its own and names its snapshot: a digest of
# another snapshot (the slot was filled again) or a damaged one counts as none. It is not derived from
# the image: somebody who changes an image in memory, and the xxh3 digests in it, does not change it.
KEPT_DIGEST_AT = 128  # in the slot's header page
_MAGIC = b"IMGD"
_NUMBERS = {"blake3": 1, "sha256": 2}
_NAMES = {number: name for name, number in _NUMBERS.items()}
_FRONT = struct.Struct("<4sI")
_SNAPSHOT = struct.Struct("<qQQQI")  # iteration, sequence, image_len, filled_at_ns, epoch
_DIGEST_BYTES = 32
_CRC = struct.Struct("<I")
_LENGTH = _FRONT.size + _SNAPSHOT.size + _DIGEST_BYTES
assert KEPT_DIGEST_AT >= SLOT_HEADER_LEN
# Behind it, that an audit has come to the bits of this snapshot: magic, snapshot, header digest, crc.
_AUDIT_AT = 256
_AUDIT_MAGIC = b"AUDT"
assert KEPT_DIGEST_AT + _LENGTH + _CRC.size <= _AUDIT_AT


@dataclass(slots=True, eq=False, weakref_slot=True)
class Segment:
    """One mapped segment file. ``fd`` queries locks and never takes one."""

    path: Path
    descriptor: SegmentDescriptor
    geometry: SegmentGeometry
    mapping: FileMapping
    fd: int
    file_bytes: int
    mlocked: bool = False
    detached_at_s: float | None = None  # monotonic; None while a trainer owns it
    damaged: set[int] = field(default_factory=set)  # slots whose bad header was reported
    replicated_sets: ReplicatedSets = field(default_factory=dict)
    anchors: dict[int, tuple[SlotHeader, int]] = field(
        default_factory=dict
    )  # of sealed slots, once they are read

    @property
    def key(self) -> RankKey:
        return RankKey(self.descriptor.job, self.descriptor.run, self.descriptor.rank)

    @property
    def generation(self) -> int:
        return self.descriptor.generation

    @property
    def is_log(self) -> bool:
        return self.descriptor.is_log

    @property
    def holds_snapshots(self) -> bool:
        """Whether it is part of a ring."""
        return self.descriptor.holds_snapshots

    @property
    def buffer(self) -> memoryview:
        return self.mapping.view

    @property
    def cut(self) -> bool:
        """Whether somebody made the file shorter than its mapping; then none of its content is valid."""
        return self.mapping.cut or os.fstat(self.fd).st_size < self.file_bytes

    def in_place(self) -> bool:
        """Whether the file of this name is still ours; false if it was removed, replaced or cut."""
        try:
            return self.path.stat().st_ino == os.fstat(self.fd).st_ino and not self.cut
        except FileNotFoundError:
            return False

    def owned(self) -> bool:
        """Whether a live process holds the owner lock."""
        return locks.is_locked(self.fd, OWNER_LOCK_BYTE, exclusive=True)

    def header(self, index: int) -> SlotHeader | None:
        """The header of a slot; None if it is damaged."""
        return read_slot_header(self.buffer, self.geometry, index)

    def headers(self) -> Iterator[tuple[int, SlotHeader]]:
        for index in range(self.geometry.num_slots):
            if (header := self.header(index)) is not None:
                yield index, header

    def mark(self) -> int:
        """A number that changes with any slot header, and with what is kept behind it.

        Much cheaper than to read the headers.
        """
        start = self.geometry.header_offset(0)
        return xxhash.xxh3_64_intdigest(
            self.buffer[start : start + self.geometry.num_slots * SLOT_HEADER_BYTES]
        )

    def sealed(self, index: int, sequence: int) -> SlotHeader | None:
        """The header of a slot that is sealed and has this sequence number; else None."""
        header = self.header(index)
        if header is None or (header.state, header.sequence) != (SlotState.SEALED, sequence):
            return None
        return header

    def gives_away(self) -> bool:
        """Whether a trainer has locked a slot with a snapshot, to overwrite it.

        The lock is read before the header.
        """
        return self.fd >= 0 and any(
            locks.is_locked(self.fd, slot_lock_byte(index), exclusive=False)
            and (header := self.header(index)) is not None
            and header.state is SlotState.SEALED
            for index in range(self.geometry.num_slots)
        )

    def last_filled(self) -> tuple[tuple[int, int], int]:
        """The key that sorts a rank's segments by their use."""
        return last_filled(header for _, header in self.headers()), self.generation

    @property
    def ring_hint(self) -> RingHint:
        """The hints for the trainer, as they were written."""
        return read_ring_hint(self.buffer) if self.fd >= 0 else RingHint()

    def protect(self, hint: RingHint) -> None:
        """Tell the trainer which sealed snapshots to keep."""
        if self.fd >= 0 and self.ring_hint != hint:
            write_ring_hint(self.buffer, hint)

    @property
    def quiet(self) -> bool:
        return bool(self.buffer[QUIET_OFFSET])

    def end_quiet(self) -> None:
        """Withdraw that request: the trainer is gone."""
        if self.fd >= 0:
            self.buffer[QUIET_OFFSET] = 0

    def raw_header(self, index: int) -> bytes:
        return read_raw_slot_header(self.buffer, self.geometry, index)

    def raw_descriptor(self) -> bytes:
        return encode_descriptor(self.descriptor)

    def image(self, index: int, header: SlotHeader) -> memoryview:
        """The bytes of a slot's image, as long as its header says (at most the slot)."""
        return slot_view(self.buffer, self.geometry, index)[: header.image_len]

    def kept_digest(self, index: int, header: SlotHeader) -> str:
        """The cryptographic digest kept for the image in a slot under this header; "" if there is none."""
        data = bytes(self._digest_bytes(index))
        magic, number = _FRONT.unpack_from(data)
        if magic != _MAGIC or number not in _NAMES:
            return ""
        if _CRC.unpack_from(data, _LENGTH)[0] != zlib.crc32(data[:_LENGTH]):
            return ""
        if data[_FRONT.size : _LENGTH - _DIGEST_BYTES] != _snapshot(header):
            return ""
        return f"{_NAMES[number]}:{data[_LENGTH - _DIGEST_BYTES : _LENGTH].hex()}"

    def keep_digest(self, index: int, header: SlotHeader, digest: str) -> None:
        """Keep the digest of the image in a slot under this header; "" forgets the one that was kept.

        The caller has the slot's lock, at least for reading.

        Raises:
            ValueError: it is no digest.
        """
        if digest and not is_strong_digest(digest):
            raise ValueError(f"{digest[:80]!r} is no digest")
        data = bytes(_LENGTH + _CRC.size)
        if digest:
            name, _, text = digest.partition(":")
            data = _FRONT.pack(_MAGIC, _NUMBERS[name]) + _snapshot(header) + bytes.fromhex(text)
            data += _CRC.pack(zlib.crc32(data))
        self._digest_bytes(index)[:] = data

    def audited(self, index: int, header: SlotHeader) -> bool:
        """Whether an audit has come to the bits of the snapshot in a slot under this header."""
        data = _audit_mark(header)
        start = self.geometry.header_offset(index) + _AUDIT_AT
        return bytes(self.buffer[start : start + len(data)]) == data

    def mark_audited(self, index: int, header: SlotHeader) -> None:
        """An audit has. The caller has the slot's lock, at least for reading."""
        data = _audit_mark(header)
        start = self.geometry.header_offset(index) + _AUDIT_AT
        self.buffer[start : start + len(data)] = data

    def _digest_bytes(self, index: int) -> memoryview:
        start = self.geometry.header_offset(index) + KEPT_DIGEST_AT
        return self.buffer[start : start + _LENGTH + _CRC.size]

    def close(self) -> None:
        """Close the file and the mapping (which lasts until the last view of a slot is gone).

        Unmapping the last mapping of an unlinked file frees its pages, which may take long.
        """
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.buffer.release()


@dataclass(frozen=True, slots=True)
class SettleReport:
    """What `settle` did in one segment, by slot index."""

    freed: tuple[int, ...]
    to_seal: tuple[int, ...]
    damaged: tuple[int, ...]


def open_segment(path: Path, *, readonly: bool = False, named: str = "") -> Segment:
    """Map an existing segment file; check everything but its slots.

    Args:
        named: the name that its content must confirm, if it is not the file's.

    Raises:
        SegmentError: its content is damaged.
        ValueError: its name contradicts its content, or another user owns it.
        OSError: it cannot be opened.
    """
    if readonly:  # `ckptctl export` reads segments of any trusted user's daemon
        fd = open_file(path, os.O_RDONLY, trusted_users())
    else:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        size = os.fstat(fd).st_size
        if not readonly and os.fstat(fd).st_uid != os.getuid():
            raise ValueError(f"it belongs to user {os.fstat(fd).st_uid}")
        if size == 0:
            raise SegmentError("it is empty", operation="read segment")
        mapping = FileMapping(fd, size, readonly=readonly)
        geometry, descriptor = read_prologue(mapping.view)
        _check_file_name(named or path.name, descriptor)
    except BaseException:
        os.close(fd)
        raise
    return Segment(path, descriptor, geometry, mapping, fd, size)


def _check_file_name(name: str, descriptor: SegmentDescriptor) -> None:
    said: tuple[object, ...] = (descriptor.job, descriptor.run, descriptor.rank, descriptor.generation)
    replica_end = REPLICA_ENDS.get(descriptor.kind)
    if replica_end is not None and name.endswith(replica_end):
        said = (*said, origin_of(descriptor))
        named: tuple[object, ...] = tuple(parse_replica_file_name(name, descriptor.kind))
    else:
        named = tuple(parse_segment_file_name(name, descriptor.kind))
    if said != named:
        raise ValueError(f"its descriptor says {said}, its name says {named}")


def settle(segment: Segment) -> SettleReport:
    """Bring the slots of a segment without a (known) trainer to rest.

    A slot that was being filled is freed if nobody holds its lock; a damaged header is replaced by a free
    one. Filled slots are only reported: digesting them takes time.
    """
    freed: list[int] = []
    to_seal: list[int] = []
    damaged: list[int] = []
    for index in range(segment.geometry.num_slots):
        header = segment.header(index)
        if header is None:
            if _free_under_lock(segment, index):
                damaged.append(index)
        elif header.state is SlotState.FILLING:
            if _free_under_lock(segment, index):
                freed.append(index)
        elif header.state is SlotState.FILLED:
            to_seal.append(index)
    return SettleReport(tuple(freed), tuple(to_seal), tuple(damaged))


def _free_under_lock(segment: Segment, index: int) -> bool:
    """Free a filling or damaged slot if nobody is writing to it; reads its header again under the lock."""
    with locks.lock_file(segment.path, slot_lock_byte(index), exclusive=True) as taken:
        if not taken:
            return False
        header = segment.header(index)
        if header is None:
            write_slot_header(segment.buffer, segment.geometry, index, SlotHeader())
        elif header.state is SlotState.FILLING:
            set_slot_state(segment.buffer, segment.geometry, index, SlotState.FREE)
        else:
            return False
        return True


def _snapshot(header: SlotHeader) -> bytes:
    return _SNAPSHOT.pack(
        header.iteration, header.sequence, header.image_len, header.filled_at_ns, header.epoch
    )


def _audit_mark(header: SlotHeader) -> bytes:
    data = _AUDIT_MAGIC + _snapshot(header) + header.header_digest
    return data + _CRC.pack(zlib.crc32(data))


ASIDE = ".bad"  # the suffix of files that were put aside
_SPARE_DESCRIPTORS = 64  # kept for the socket, peers and trainers; segments wait instead
# Not a regular file: no segment of ours, now or later.
_NO_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO})


@dataclass(slots=True)
class Adopted:
    """The outcome of one look at the files."""

    segments: list[Segment] = field(default_factory=list)
    bad: list[tuple[Path, str]] = field(default_factory=list)  # put aside under this name, and why
    back: list[Path] = field(default_factory=list)  # were put aside, and are whole
    waiting: list[tuple[Path, str]] = field(default_factory=list)  # from now on, and why
    damaged: list[tuple[Segment, int]] = field(default_factory=list)  # slots of replicas, freed

    def and_then(self, later: Adopted) -> Adopted:
        return Adopted(
            self.segments + later.segments,
            self.bad + later.bad,
            self.back + later.back,
            self.waiting + later.waiting,
        )


class Adoption:
    """Takes over the files in a folder that an earlier daemon left.

    Only a file's content proves that it is damaged; then it is put aside as ``*.bad``. A daemon without
    free descriptors or memory, or a filesystem that fails for a moment, says nothing about a file: it
    *waits* under its own name and is tried again. A file that was put aside gets its name back when it
    turns out to be whole, unless its rank has newer segments: then its run has gone on without it.

    Args:
        ends: the suffixes of the files.
        superseded: whether a file that was put aside is older than other segments of its rank.
    """

    def __init__(
        self,
        folder: Path,
        ends: Collection[str],
        *,
        superseded: Callable[[SegmentDescriptor], bool] = lambda descriptor: False,
    ) -> None:
        self._folder, self._ends, self._superseded = folder, ends, superseded
        self._waiting: set[Path] = set()

    def begin(self) -> Adopted:
        return self._look(self._named(""))

    def come_back(self) -> Adopted:
        """Open the files that were put aside; call it after `begin`."""
        return self._look(self._named(ASIDE))

    def again(self) -> Adopted:
        return self._look(sorted(self._waiting)) if self._waiting else Adopted()

    def waits_for(self, prefix: str) -> list[str]:
        return sorted(path.name for path in self._waiting if path.name.startswith(prefix))

    def forget(self, prefix: str) -> int:
        gone = {path for path in self._waiting if path.name.startswith(prefix)}
        for path in gone:
            path.unlink(missing_ok=True)
        self._waiting -= gone
        return len(gone)

    def _named(self, suffix: str) -> list[Path]:
        return sorted(p for end in self._ends for p in self._folder.glob(f"*{end}{suffix}"))

    def _look(self, paths: Iterable[Path]) -> Adopted:
        found = Adopted()
        for path in paths:
            try:
                self._open(path, found)
            except FileNotFoundError:
                self._waiting.discard(path)  # somebody removed it
            except OSError as error:
                if path not in self._waiting:
                    self._waiting.add(path)
                    found.waiting.append((path, error.strerror or str(error)))
        return found

    def _open(self, path: Path, found: Adopted) -> None:
        if path.name.endswith(ASIDE):
            self._restore(path, found)
            return
        try:
            _check_descriptors()
            segment = open_segment(path)
        except (OSError, ValueError, SegmentError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_FILE:
                raise
            aside = path.with_name(path.name + ASIDE)
            path.replace(aside)
            found.bad.append((aside, str(error)))
        else:
            found.segments.append(segment)
        self._waiting.discard(path)

    def _restore(self, path: Path, found: Adopted) -> None:
        """Give a file that was put aside its name back, if it is whole and the name is free."""
        name = path.with_name(path.name.removesuffix(ASIDE))
        self._waiting.discard(path)
        if name.exists():
            return
        _check_descriptors()
        try:
            segment = open_segment(path, named=name.name)
        except (ValueError, SegmentError):
            return
        except OSError as error:
            if error.errno in _NO_FILE:
                return
            raise
        if self._superseded(segment.descriptor):
            segment.close()
            return
        path.rename(name)
        segment.path = name
        found.segments.append(segment)
        found.back.append(name)


def tell_adopted(events: EventLog, found: Adopted) -> None:
    """Add events for everything out of the ordinary."""
    for path, why in found.bad:
        events.add("error", "bad_segment", f"{path.name} is put aside: {why}")
    for path, why in found.waiting:
        events.add(
            "error",
            "segment_waits",
            f"{path.name} cannot be opened now ({why}): it stays as it is, is tried again every second, and "
            "its run waits for it; mend the cause, or give it up with `ckptctl forget JOB RUN`",
        )
    for path in found.back:
        events.add("info", "segment_back", f"{path.name} had been put aside, and is whole")


def _check_descriptors() -> None:
    """Raise OSError if too few descriptors are left for a segment, which takes two."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    used = len(os.listdir("/proc/self/fd"))
    if used + _SPARE_DESCRIPTORS > limit:
        text = f"{used} of {limit} descriptors are in use; raise the limit of open files"
        raise OSError(errno.EMFILE, text)
