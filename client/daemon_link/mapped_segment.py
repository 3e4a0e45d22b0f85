"""Segments as this process maps them: those that the trainer owns, one by one (`MappedSegment`) and together
(`Generations`, `SlotTable`), and any segment for reading (`SlotFile`).

The slot table in shared memory is the truth, and is read each time. What is cached are values of what was
read: a header's fields, by its bytes; and the operators that an image anchors, by the slot's ``sequence``.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from ckptd.client.log_lines import get_logger
from ckptd.config.daemon_config import trusted_users
from ckptd.core.recovery.snapshot_tables import SnapshotToLoad
from ckptd.core.replication.replicas import Promise, promised
from ckptd.core.slots.ring import NoSuffix, droppable_generations, find_suffix
from ckptd.core.slots.segment_format import (
    HINT_OFFSET,
    OWNER_LOCK_BYTE,
    QUIET_OFFSET,
    SLOT_HEADER_LEN,
    Kind,
    RingHint,
    SegmentDescriptor,
    SegmentGeometry,
    SlotHeader,
    last_filled,
    read_prologue,
    read_raw_slot_header,
    read_ring_hint,
    read_slot_header,
    set_slot_state,
    slot_lock_byte,
    slot_view,
    unpack_slot_header,
    write_slot_header,
)
from ckptd.core.slots.slots import SlotRecord, SlotState
from ckptd.cuda.engine import HostMemory
from ckptd.errors import SegmentError
from ckptd.holdings import header_record, operators_id, policy_of
from ckptd.memory import locks
from ckptd.storage.image import ImageView, seal
from ckptd.storage.image_format import ImageError
from ckptd.transport.access.local_trust import open_file

logger = get_logger(__name__)

_OPEN: weakref.WeakSet[MappedSegment] = weakref.WeakSet()
_MOST_ANCHORS = 4096
_HELD = (SlotState.FILLED, SlotState.SEALED)


def _after_fork_in_child() -> None:
    """Close the file in a forked child, which shares its OFD locks: our death would not free them."""
    for segment in list(_OPEN):
        os.close(segment.fd)
    _OPEN.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _open(path: str) -> int:
    return open_file(path, os.O_RDWR, trusted_users())


def _map(path: str) -> mmap.mmap:
    """Map the whole file through an open file description of its own.

    ``mmap`` keeps a duplicate of the descriptor for as long as a view lives, in forked children
    too; a duplicate of the one that holds our locks would keep them held after ``close`` and after
    our death.
    """
    fd = _open(path)
    try:
        return mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(fd)


class RankTaken(RuntimeError):
    """Another live process owns this rank's memory."""


class MappedSegment:
    """One generation of this rank's memory, mapped and owned until ``close``.

    Raises:
        RankTaken: another process holds the owner lock.
        SegmentError: the file is not a segment of this format.
        OSError: it cannot be opened, or is neither this user's nor the daemon's.
    """

    def __init__(self, path: str, generation: int) -> None:
        self.path, self.generation = path, generation
        self._writing = threading.Lock()
        # A seal writes digests into the image: it must end before the slot is filled again.
        self._sealing = threading.Lock()
        self.fd = _open(path)
        try:
            if not locks.try_lock(self.fd, OWNER_LOCK_BYTE, True):
                holders = locks.holders_of(path)
                raise RankTaken(
                    f"{os.path.basename(path)} is owned by another live process (open in pids {holders}); "
                    "two trainers must not share job, run and rank: end the other, or give this "
                    "one another run="
                )
            self._map = _map(path)
        except BaseException:
            os.close(self.fd)
            raise
        # A forked child (a data loader's worker) must neither keep our locks alive nor our memory mapped.
        self._map.madvise(mmap.MADV_DONTFORK)
        _OPEN.add(self)
        self.buffer = memoryview(self._map)
        self.geometry: SegmentGeometry
        self.descriptor: SegmentDescriptor
        self.geometry, self.descriptor = read_prologue(self.buffer)
        self.memory = HostMemory(self.buffer)
        # By slot, the newest: most slots are the same from one snapshot to the next.
        starts = map(self.geometry.header_offset, range(self.geometry.num_slots))
        self._pages = [self.buffer[start : start + SLOT_HEADER_LEN] for start in starts]
        self._headers: dict[int, tuple[bytes, SlotHeader | None]] = {}
        self._records: dict[int, tuple[SlotHeader, int, SlotRecord]] = {}

    def header(self, index: int) -> SlotHeader | None:
        """The header of a slot; None if it is damaged."""
        known = self._headers.get(index)
        # No two fills, and no two stages of a fill, have the same body: one that is known already was there
        # before the state was read, too, so there is no need for `read_raw_slot_header`'s second look.
        if known is None or known[0] != bytes(self._pages[index]):
            raw = read_raw_slot_header(self.buffer, self.geometry, index)
            known = self._headers[index] = raw, unpack_slot_header(raw)
        return known[1]

    def headers(self) -> Iterator[tuple[int, SlotHeader]]:
        """Number and header of each slot whose header is not damaged."""
        for index in range(self.geometry.num_slots):
            header = self.header(index)
            if header is not None:
                yield index, header

    def records(
        self, anchors: Callable[[int, SlotHeader], int] = lambda index, header: 0
    ) -> list[SlotRecord]:
        """Every slot as a record; a slot whose header is damaged counts as free.

        Args:
            anchors: returns the operators that the image of a slot anchors, as a bitmap.
        """
        found = []
        for index in range(self.geometry.num_slots):
            header = self.header(index)
            if header is None:
                found.append(SlotRecord(self.generation, index, SlotState.FREE))
                continue
            bitmap = anchors(index, header) if header.state in _HELD else 0
            known = self._records.get(index)
            if known is None or known[0] is not header or known[1] != bitmap:
                packed = bitmap.to_bytes((bitmap.bit_length() + 7) // 8, "little")
                record = header_record(header, self.generation, index, packed)
                known = self._records[index] = header, bitmap, record
            found.append(known[2])
        return found

    def write_header(self, index: int, header: SlotHeader) -> None:
        with self._writing:
            write_slot_header(self.buffer, self.geometry, index, header)

    def set_state(self, index: int, state: SlotState) -> None:
        set_slot_state(self.buffer, self.geometry, index, state)

    def slot(self, index: int) -> memoryview:
        return slot_view(self.buffer, self.geometry, index)

    def slot_base(self, index: int) -> int:
        """The offset of a slot in the mapping."""
        return self.geometry.slots_offset + index * self.geometry.slot_bytes

    @property
    def hint(self) -> int:
        """What an earlier trainer learned (``HINT_…``, as bits); 0 if nothing."""
        return self.buffer[HINT_OFFSET]

    @hint.setter
    def hint(self, value: int) -> None:
        self.buffer[HINT_OFFSET] = value

    def last_filled(self) -> tuple[tuple[int, int], int]:
        """The sort key by use; a generation may be made ahead of the plan that it is for."""
        return last_filled(header for _, header in self.headers()), self.generation

    @property
    def ring_hint(self) -> RingHint:
        """What the daemon knows of the other ranks."""
        return read_ring_hint(self.buffer)

    def regions(self) -> list[tuple[int, int]]:
        """(offset, length) of every slot in the mapping."""
        return [(self.slot_base(i), self.geometry.slot_bytes) for i in range(self.geometry.num_slots)]

    def states(self) -> set[SlotState]:
        """The states of its slots, except those whose header is damaged."""
        return {header.state for _, header in self.headers()}

    def try_lock_slot(self, index: int) -> bool:
        return locks.try_lock(self.fd, slot_lock_byte(index), True)

    def unlock_slot(self, index: int) -> None:
        locks.unlock(self.fd, slot_lock_byte(index))

    def free_slot(self, index: int) -> None:
        """Free a slot, unless a process is reading it."""
        if self.try_lock_slot(index):
            self.set_state(index, SlotState.FREE)
            self.unlock_slot(index)

    def lock_sealed(self) -> list[int] | None:
        """Lock every sealed slot, and return the indices; None, with nothing locked, if one is being read."""
        sealed = [i for i, header in self.headers() if header.state is SlotState.SEALED]
        for at, index in enumerate(sealed):
            if not self.try_lock_slot(index):
                for taken in sealed[:at]:
                    self.unlock_slot(taken)
                return None
        return sealed

    def begin_filling(self, index: int, header: SlotHeader) -> None:
        """Declare a claimed slot as being filled; blocks (milliseconds) while this process seals it."""
        with self._sealing:
            self.write_header(index, header)

    def seal(self, index: int) -> None:
        """Digest and seal a filled slot here, as the daemon would: used while the daemon is away."""
        with self._sealing:
            self._seal(index)

    def _seal(self, index: int) -> None:
        header = self.header(index)
        if header is None or header.state != SlotState.FILLED:
            return
        started = time.perf_counter_ns()
        try:
            digest = seal(self.slot(index)[: header.image_len])
        except ImageError as error:
            logger.error("slot %d (iteration %d) is damaged: %s", index, header.iteration, error)
            self.set_state(index, SlotState.FREE)
            return
        sealed = replace(
            header,
            state=SlotState.SEALED,
            header_digest=digest,
            sealed_at_ns=time.time_ns(),
            digest_ns=time.perf_counter_ns() - started,
        )
        with self._writing:
            # The daemon may be back and have sealed it, and the training thread may be filling it again.
            if self.header(index) == header:
                write_slot_header(self.buffer, self.geometry, index, sealed)

    def close(self) -> None:
        """Give up ownership. The mapping goes when the last tensor view of it does."""
        _OPEN.discard(self)
        os.close(self.fd)


class SlotFile:
    """One generation of any segment, mapped for reading: another rank's of this node, a fetched copy, or one
    of a trainer that is gone. A slot does not change while a process locks it.

    Args:
        kind: what it must hold.
        shared: mapped for writing, too: all ranks of a node write to the same slot of this kind.
    Raises:
        SegmentError: it holds something else, or is no segment.
        OSError: it cannot be opened, or is neither this user's nor the daemon's.
    """

    def __init__(self, path: Path, kind: Kind, *, shared: bool = False) -> None:
        self.path = path
        fd = open_file(path, os.O_RDWR if shared else os.O_RDONLY, trusted_users())
        try:
            self._map = mmap.mmap(fd, 0, access=mmap.ACCESS_WRITE if shared else mmap.ACCESS_READ)
        finally:
            os.close(fd)
        self._buffer = memoryview(self._map)
        self._geometry: SegmentGeometry
        self.descriptor: SegmentDescriptor
        self._geometry, self.descriptor = read_prologue(self._buffer)
        if self.descriptor.kind != kind:
            raise SegmentError(f"{path.name} holds {self.descriptor.kind}", operation=f"read {kind}")

    def keep_from_children(self) -> None:
        """Unmap it in forked children: a data loader's worker would keep its memory while it lives."""
        self._map.madvise(mmap.MADV_DONTFORK)

    @property
    def num_slots(self) -> int:
        return self._geometry.num_slots

    def slot(self, index: int) -> memoryview:
        """All bytes of a slot, whatever its state is."""
        return slot_view(self._buffer, self._geometry, index)

    @property
    def ring_hint(self) -> RingHint:
        """What the daemon knows of the other ranks."""
        return read_ring_hint(self._buffer)

    def header(self, index: int) -> SlotHeader | None:
        """The header of a slot; None if it is damaged."""
        return read_slot_header(self._buffer, self._geometry, index)

    def image(self, record: SlotRecord) -> memoryview | None:
        """The image of a slot; None if the slot has been reused."""
        header = self.header(record.index)
        if header is None or header.state is not SlotState.SEALED:
            return None
        if header.sequence != record.sequence:
            return None
        return slot_view(self._buffer, self._geometry, record.index)[: header.image_len]

    @contextmanager
    def held(self, record: SlotRecord) -> Iterator[memoryview | None]:
        """The image of a slot, locked in the body; None if the slot has been reused."""
        byte = slot_lock_byte(record.index)
        with locks.lock_file(self.path, byte, exclusive=False) as taken:
            yield self.image(record) if taken else None


class SlotTable:
    """All generations of this rank, oldest first, read as one list of records.

    ``epoch`` is the history that is being written now, and ``epoch_start`` where it left the one
    before (-1: nowhere).
    """

    def __init__(self, segments: Sequence[MappedSegment], *, epoch: int = 0, epoch_start: int = -1) -> None:
        self.segments = list(segments)
        self.epoch, self.epoch_start = epoch, epoch_start
        self._anchors: dict[tuple[int, int, int], int] = {}

    @property
    def epochs(self) -> dict[int, int]:
        """For the ring's functions: this epoch has begun, even if no record shows it yet."""
        return {self.epoch: self.epoch_start}

    @property
    def ring_hint(self) -> RingHint:
        """The daemon's newest hint; a new segment has none yet."""
        hints = [hint for s in self.segments if (hint := s.ring_hint).span]
        return max(hints, key=lambda hint: (hint.floor, hint.horizon, hint.aim), default=RingHint())

    @property
    def of_several_ranks(self) -> bool:
        """Whether `promised` slots must stay, so that newer snapshots are left out instead: a run of one rank
        needs no common start.
        """
        return any(segment.descriptor.world_size > 1 for segment in self.segments[-1:])

    @property
    def returned(self) -> bool:
        """Whether the run went back to an iteration, and has no floor there or later since: other
        nodes may hold no suffix that ends there.
        """
        hint = self.ring_hint
        agreed = hint.epoch == self.epoch and hint.floor >= self.epoch_start
        return self.epoch_start >= 0 and not agreed

    def promised(self, records: Sequence[SlotRecord], num_operators: int) -> set[tuple[int, int]]:
        """The slots that a recovery together with the other ranks may need (docs/replication.md §6).

        They hold what the run agreed on, or may agree on next.
        """
        hint = self.ring_hint
        if not hint.span or not self.of_several_ranks:
            return set()
        return promised(
            records,
            num_operators,
            promise=Promise(hint.floor, hint.horizon),
            epochs=self.epochs,
            span=hint.span,
            up_to=hint.aim,
            tip=self.epoch_start if self.returned else -1,
        )

    def ask_quiet(self, quiet: bool) -> None:
        """Ask the daemon to leave the network to training, or take that back."""
        for segment in self.segments:
            segment.buffer[QUIET_OFFSET] = quiet

    def segment(self, generation: int) -> MappedSegment:
        return next(s for s in self.segments if s.generation == generation)

    def note_anchors(self, generation: int, index: int, sequence: int, anchors: int) -> None:
        """Remember what an image anchors, so that ``records`` need not parse it."""
        if len(self._anchors) > _MOST_ANCHORS:
            self._anchors.clear()
        self._anchors[generation, index, sequence] = anchors

    def records(self) -> list[SlotRecord]:
        """Every slot of every generation; a slot whose header is damaged counts as free."""
        return [
            record
            for segment in self.segments
            for record in segment.records(partial(self._anchors_of, segment))
        ]

    def _anchors_of(self, segment: MappedSegment, index: int, header: SlotHeader) -> int:
        key = (segment.generation, index, header.sequence)
        if key not in self._anchors:
            try:
                view = ImageView(segment.slot(index)[: header.image_len])
            except ImageError:
                return 0  # damaged: no suffix can rest on it; the daemon's scrub reports it
            self.note_anchors(*key, view.anchors)
        return self._anchors[key]

    def next_sequence(self) -> int:
        return 1 + max((r.sequence for r in self.records()), default=0)


class Generations:
    """The mapped segments of this rank of one kind, oldest generation first.

    Generations whose operator tables differ (a replanned window may split operators differently) cannot
    share a suffix, so the ring sees only those that agree with the newest; older ones are kept until
    the newest holds a complete suffix by itself.
    """

    def __init__(self) -> None:
        self._segments: list[MappedSegment] = []

    def __iter__(self) -> Iterator[MappedSegment]:
        """Over a copy: the session's thread iterates, too, while generations come and go."""
        return iter(list(self._segments))

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def newest(self) -> MappedSegment | None:
        return self._segments[-1] if self._segments else None

    @property
    def total_bytes(self) -> int:
        return sum(segment.geometry.total_bytes for segment in self._segments)

    def add(self, segment: MappedSegment) -> None:
        self._segments.append(segment)

    def order_by_use(self) -> None:
        """Make the generation that was filled last the newest: a later one may not be used yet."""
        self._segments.sort(key=MappedSegment.last_filled)

    def remove(self, segment: MappedSegment) -> None:
        self._segments.remove(segment)

    def current(self) -> list[MappedSegment]:
        """The newest, and those right before it that have its operator table."""
        current: list[MappedSegment] = []
        for segment in reversed(self._segments):
            if _table_of(segment) != _table_of(self._segments[-1]):
                break
            current.insert(0, segment)
        return current

    def newer_than_table(self, table: tuple[int, str]) -> list[MappedSegment]:
        """Those newer than the newest one with this operator table (number, id), if any has it."""
        newer: list[MappedSegment] = []
        for segment in reversed(self._segments):
            if _table_of(segment) == table:
                return newer
            newer.append(segment)
        return []

    def of_another_window(self, used: MappedSegment) -> list[MappedSegment]:
        """Those newer than ``used`` that were made for another window or policy: snapshots that follow those
        in ``used`` would not fit their slots.
        """

        def made_for(segment: MappedSegment) -> tuple[int, int, str]:
            descriptor = segment.descriptor
            return descriptor.window, segment.geometry.slot_bytes, policy_of(descriptor)

        newer = self._segments[self._segments.index(used) + 1 :]
        return [segment for segment in newer if made_for(segment) != made_for(used)]

    def unneeded(self, table: SlotTable, num_operators: int) -> list[MappedSegment]:
        """Those that no suffix needs, neither one of this rank nor one to which the ranks may have
        to go back together.

        Args:
            table: of the newest, and those that have its operator table.
        """
        records, epochs = table.records(), table.epochs
        every = SlotTable(list(self._segments), epoch=table.epoch, epoch_start=table.epoch_start)
        hint, keeps = every.ring_hint, every.of_several_ranks
        numbers = droppable_generations(
            records,
            num_operators,
            self.current()[-1].generation,
            protected=table.promised(records, num_operators),
            epochs=epochs,
        )
        if not isinstance(find_suffix(records, num_operators, epochs=epochs), NoSuffix):
            older = [s for s in self._segments if s not in table.segments]
            numbers |= {s.generation for s in older if not (keeps and _holds_from(s, hint.floor))}
        return [s for s in self._segments if s.generation in numbers]

    def own_copy(self, node: str, piece: SnapshotToLoad) -> SlotRecord | None:
        """The record of this rank's own copy of a piece, if it is mapped."""
        by_name = {os.path.basename(segment.path): segment for segment in self._segments}
        for at in piece.sources:
            if at.node == node and at.segment in by_name:
                return replace(piece.record, generation=by_name[at.segment].generation, index=at.index)
        return None

    def of(self, record: SlotRecord) -> MappedSegment:
        """The segment of a record."""
        return next(s for s in self._segments if s.generation == record.generation)

    def close(self) -> None:
        """Give up ownership of all; the daemon keeps the memory."""
        for segment in self._segments:
            segment.close()
        self._segments = []


def _table_of(segment: MappedSegment) -> tuple[int, str]:
    return segment.descriptor.num_operators, operators_id(segment.descriptor)


def _holds_from(segment: MappedSegment, iteration: int) -> bool:
    """Whether it holds a snapshot of that iteration or a later one."""
    return any(r.sealed and r.iteration >= iteration for r in segment.records())
