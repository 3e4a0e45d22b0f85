"""The trainer's view of its segments: mapped memory, slot locks, and the slot table as records.

The slot table in shared memory is the truth; nothing here caches a slot's state. What is cached is
what cannot change without the slot's ``sequence`` changing: which operators its image anchors.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace

from ckptd.client.log_lines import get_logger
from ckptd.config.daemon_config import trusted_users
from ckptd.core.replication.replicas import Promise, promised
from ckptd.core.slots.ring import SlotRecord, SlotState
from ckptd.core.slots.segment_format import (
    OWNER_LOCK_BYTE,
    SegmentDescriptor,
    SegmentGeometry,
    SlotHeader,
    last_filled,
    read_prologue,
    read_slot_header,
    set_slot_state,
    slot_lock_byte,
    slot_view,
    write_slot_header,
)
from ckptd.core.slots.segment_hints import HINT_OFFSET, QUIET_OFFSET, RingHint, read_ring_hint
from ckptd.cuda.engine import HostMemory
from ckptd.memory import locks
from ckptd.storage.image import ImageView, seal
from ckptd.storage.image_format import ImageError
from ckptd.transport.access.local_trust import open_file

__all__ = ["MappedSegment", "RankTaken", "SlotTable"]

logger = get_logger(__name__)


_OPEN: weakref.WeakSet[MappedSegment] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """OFD locks belong to the open file, which a forked child shares: close it there, or our death
    would not free it.
    """
    for segment in list(_OPEN):
        os.close(segment.fd)
    _OPEN.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _open(path: str) -> int:
    return open_file(path, os.O_RDWR, trusted_users())


def _map(path: str) -> mmap.mmap:
    """All of the file, mapped through a description of its own.

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
        # A seal writes digests into the image: it must not go on while the slot is being filled again.
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

    def header(self, index: int) -> SlotHeader | None:
        return read_slot_header(self.buffer, self.geometry, index)

    def write_header(self, index: int, header: SlotHeader) -> None:
        with self._writing:
            write_slot_header(self.buffer, self.geometry, index, header)

    def set_state(self, index: int, state: SlotState) -> None:
        set_slot_state(self.buffer, self.geometry, index, state)

    def slot(self, index: int) -> memoryview:
        return slot_view(self.buffer, self.geometry, index)

    def slot_base(self, index: int) -> int:
        return self.geometry.slots_offset + index * self.geometry.slot_bytes

    @property
    def hint(self) -> int:
        """What an earlier trainer learned (``HINT_…``, as bits); 0 if nothing."""
        return self.buffer[HINT_OFFSET]

    @hint.setter
    def hint(self, value: int) -> None:
        self.buffer[HINT_OFFSET] = value

    def last_filled(self) -> tuple[tuple[int, int], int]:
        """By what segments are put into the order of their use; a generation may be made ahead of
        the plan that it is for.
        """
        headers = map(self.header, range(self.geometry.num_slots))
        return last_filled(h for h in headers if h is not None), self.generation

    @property
    def ring_hint(self) -> RingHint:
        """What the daemon knows of the other ranks."""
        return read_ring_hint(self.buffer)

    def regions(self) -> list[tuple[int, int]]:
        """(offset, length) of every slot in the mapping."""
        return [(self.slot_base(i), self.geometry.slot_bytes) for i in range(self.geometry.num_slots)]

    def states(self) -> set[SlotState]:
        """Which states its slots are in; of those whose header is damaged none."""
        headers = map(self.header, range(self.geometry.num_slots))
        return {header.state for header in headers if header is not None}

    def try_lock_slot(self, index: int) -> bool:
        return locks.try_lock(self.fd, slot_lock_byte(index), True)

    def unlock_slot(self, index: int) -> None:
        locks.unlock(self.fd, slot_lock_byte(index))

    def lock_sealed(self) -> list[int] | None:
        """Lock every slot that holds a sealed snapshot, and return their indices; None, with
        nothing locked, if one of them is being read.
        """
        headers = enumerate(map(self.header, range(self.geometry.num_slots)))
        sealed = [i for i, header in headers if header and header.state is SlotState.SEALED]
        for at, index in enumerate(sealed):
            if not self.try_lock_slot(index):
                for taken in sealed[:at]:
                    self.unlock_slot(taken)
                return None
        return sealed

    def seal(self, index: int) -> None:
        """Digest and seal a filled slot here, as the daemon would: used while the daemon is away."""
        with self._sealing:
            self._seal(index)

    def begin_filling(self, index: int, header: SlotHeader) -> None:
        """Declare a claimed slot as being filled; waits (milliseconds) for a seal of this process
        that is under way.
        """
        with self._sealing:
            self.write_header(index, header)

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
        """What the ring's functions must know beyond the records: this epoch has begun, even if no
        snapshot of it is there.
        """
        return {self.epoch: self.epoch_start}

    @property
    def ring_hint(self) -> RingHint:
        """What the daemon told last; a segment that is new has not been told yet."""
        told = [hint for s in self.segments if (hint := s.ring_hint).span]
        return max(told, key=lambda hint: (hint.floor, hint.horizon, hint.aim), default=RingHint())

    def is_hard(self, *, connected: bool) -> bool:
        """Whether what is `promised` must stay, so that newer snapshots are left out instead.

        While the daemon is away nobody can tell what other nodes still hold. A run of one rank
        needs no common start.
        """
        several = any(segment.descriptor.world_size > 1 for segment in self.segments[-1:])
        return several and (self.ring_hint.sole or not connected or self.returned)

    @property
    def returned(self) -> bool:
        """Whether the run went back to an iteration, and has no floor there or later since: other
        nodes may hold no suffix that ends there.
        """
        hint = self.ring_hint
        agreed = hint.epoch == self.epoch and hint.floor >= self.epoch_start
        return self.epoch_start >= 0 and not agreed

    def promised(
        self, records: Sequence[SlotRecord], num_operators: int, *, hard: bool = False
    ) -> set[tuple[int, int]]:
        """The slots that a recovery together with the other ranks may need (docs/replication.md §6).

        Where they must stay (`is_hard`), these are no more than what the run agreed on or may agree on next.
        """
        hint = self.ring_hint
        if not hint.span:
            return set()
        return promised(
            records,
            num_operators,
            promise=Promise(hint.floor, hint.horizon),
            epochs=self.epochs,
            span=hint.span,
            up_to=hint.aim if hard else None,
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
        if len(self._anchors) > 4096:
            self._anchors.clear()
        self._anchors[generation, index, sequence] = anchors

    def records(self) -> list[SlotRecord]:
        """Every readable slot header as a record; a header with a bad checksum counts as free."""
        found = []
        for segment in self.segments:
            for index in range(segment.geometry.num_slots):
                header = segment.header(index)
                if header is None:
                    found.append(SlotRecord(segment.generation, index, SlotState.FREE))
                    continue
                held = header.state in (SlotState.FILLED, SlotState.SEALED)
                found.append(
                    SlotRecord(
                        generation=segment.generation,
                        index=index,
                        state=SlotState(header.state),
                        iteration=header.iteration,
                        previous=header.previous,
                        sequence=header.sequence,
                        image_len=header.image_len,
                        layout_id=header.layout_id,
                        anchors=self._anchors_of(segment, index, header) if held else 0,
                        phase=header.phase,
                        epoch=header.epoch,
                        epoch_start=header.epoch_start,
                        header_digest=header.header_digest,
                    )
                )
        return found

    def _anchors_of(self, segment: MappedSegment, index: int, header: SlotHeader) -> int:
        key = (segment.generation, index, header.sequence)
        if key not in self._anchors:
            try:
                view = ImageView(segment.slot(index)[: header.image_len])
            except ImageError:
                # Damaged: anchors nothing, so no suffix can rest on it; the daemon's scrub reports
                # it.
                return 0
            self.note_anchors(*key, view.anchors)
        return self._anchors[key]

    def next_sequence(self) -> int:
        return 1 + max((r.sequence for r in self.records()), default=0)
