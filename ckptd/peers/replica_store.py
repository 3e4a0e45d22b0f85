"""The replica segments of this node: other nodes' snapshots and boundary logs, beside the segments
of its own ranks.

As in `SegmentStore`, whoever looks for snapshots must not come upon a log: iterating, `of_run` and
`groups` leave them out.

Their memory is that of the `SegmentStore`, as all segments' is; here are their names, and which of
them belong together. What a rank of this node is promised goes first: a replica gets memory only if
that leaves room. All methods belong to the daemon's loop thread.

One primary has one replica here, or several *rings*: when a longer suffix must fit (the run's span
has grown) a wider one is made beside the first, which goes as soon as no promise needs it. The
descriptor of the n-th says that it was created n nanoseconds later, so its origin and its name are
its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from ckptd.core.sessions import room_for_replicas
from ckptd.core.slots.ring import SlotRecord, SlotState
from ckptd.core.slots.segment_format import (
    SegmentDescriptor,
    SlotHeader,
    decode_descriptor,
    encode_descriptor,
    origin_of,
    plan_geometry,
    set_slot_state,
    write_slot_header,
)
from ckptd.core.slots.segment_names import REPLICA_ENDS, replica_file_name
from ckptd.holdings import operators_id
from ckptd.memory.inventory import slot_record
from ckptd.memory.segment_file import Adopted, Adoption, Segment
from ckptd.memory.segment_store import Purpose, SegmentPlan, SegmentStore

__all__ = ["ReplicaStore", "same_primary"]

_MAX_RINGS = 1000  # nanoseconds: no two primaries of a rank are made within so short a time


@dataclass(frozen=True, slots=True, order=True)
class GroupKey:
    """Replicas whose snapshots may form one suffix: of one rank, with one operator table."""

    job: str
    run: str
    rank: int
    operators: str


class ReplicaStore:
    """The replicas in a store."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._operators: dict[str, str] = {}
        self._adoption = Adoption(store.folder, REPLICA_ENDS.values())

    def __iter__(self) -> Iterator[Segment]:
        return iter([s for s in self.everything() if s.holds_snapshots])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def everything(self) -> list[Segment]:
        """Every replica, of boundary logs, too."""
        return self._store.all_for(Purpose.REPLICA)

    def logs(self) -> list[Segment]:
        """The replicas of boundary logs."""
        return [s for s in self.everything() if s.is_log]

    @property
    def used_bytes(self) -> int:
        """What they take, those still being made included."""
        return self._store.bytes_for(Purpose.REPLICA)

    def get(self, name: str) -> Segment | None:
        """The replica in this file."""
        return self._store.named(name, Purpose.REPLICA)

    def of_run(self, job: str, run: str) -> list[Segment]:
        """The replicas of a run's snapshots."""
        return [s for s in self.all_of_run(job, run) if s.holds_snapshots]

    def all_of_run(self, job: str, run: str) -> list[Segment]:
        """Every replica of a run."""
        every = self.everything()
        return [s for s in every if (s.descriptor.job, s.descriptor.run) == (job, run)]

    def adopt(self) -> Adopted:
        """Take over the replicas of an earlier daemon."""
        return self._take_over(self._adoption.begin().and_then(self._adoption.come_back()))

    def adopt_waiting(self) -> Adopted:
        """Try again what could not be had before."""
        return self._take_over(self._adoption.again())

    def waits_for(self, job: str, run: str) -> list[str]:
        """The files of a run that are here, and could not be taken over yet."""
        return self._adoption.waits_for(f"{job}~{run}~")

    def forget_waiting(self, job: str, run: str) -> int:
        """Delete what waits of a run; returns how many files."""
        return self._adoption.forget(f"{job}~{run}~")

    def _take_over(self, found: Adopted) -> Adopted:
        found.damaged = [(s, index) for s in found.segments for index in _free_unsealed(s)]
        for segment in found.segments:
            self._store.enter_found(segment, Purpose.REPLICA)
        return found

    def plan(
        self, descriptor: SegmentDescriptor, num_slots: int, slot_bytes: int, origin: str
    ) -> SegmentPlan:
        """Lay out the next ring of a primary; nothing is promised yet.

        Raises:
            ValueError: numbers or names that no segment can have, or another origin than the descriptor's.
            SegmentError: a descriptor that could not be read any more after a restart.
        """
        if origin_of(descriptor) != origin:
            raise ValueError(f"origin {origin} is not that of the descriptor")
        if rings := self.rings_of(descriptor):
            later_ns = rings[-1].descriptor.created_at_ns + 1
            descriptor = msgspec.structs.replace(descriptor, created_at_ns=later_ns)
            decode_descriptor(encode_descriptor(descriptor))
        geometry = plan_geometry(num_slots, slot_bytes, len(encode_descriptor(descriptor)))
        name = replica_file_name(
            descriptor.job,
            descriptor.run,
            descriptor.rank,
            descriptor.generation,
            origin_of(descriptor),
            descriptor.kind,
        )
        return SegmentPlan(descriptor, geometry, self._store.folder / name, Purpose.REPLICA)

    def rings_of(self, descriptor: SegmentDescriptor) -> list[Segment]:
        """The rings of one primary here, narrowest and oldest first."""
        of_run = self.all_of_run(descriptor.job, descriptor.run)
        found = [s for s in of_run if same_primary(s.descriptor, descriptor)]
        return sorted(found, key=lambda s: s.descriptor.created_at_ns)

    @property
    def free_bytes(self) -> int:
        """What a replica may still take: neither in use nor promised to a rank of this node."""
        return room_for_replicas(self._store.facts(), self._store.memory)

    def forget(self, segment: Segment) -> None:
        """It is removed."""
        self._operators.pop(segment.path.name, None)

    # -- records ---------------------------------------------------------------------------------

    def operators(self, segment: Segment) -> str:
        """Which operator table the segment's anchors are of."""
        name = segment.path.name
        if name not in self._operators:
            self._operators[name] = operators_id(segment.descriptor)
        return self._operators[name]

    def beside(self, segment: Segment) -> list[Segment]:
        """Replicas whose snapshots may form a suffix with this one's, itself included, oldest first."""
        told, operators = segment.descriptor, self.operators(segment)
        found = [
            s
            for s in self.of_run(told.job, told.run)
            if s.descriptor.rank == told.rank and self.operators(s) == operators
        ]
        return sorted(found, key=lambda s: (s.descriptor.created_at_ns, s.path.name))

    def ordinal(self, segment: Segment) -> int:
        """Its number among those beside it: generations count per primary, and primaries differ."""
        return self.beside(segment).index(segment)

    def auxiliary_records(self, segment: Segment) -> list[SlotRecord]:
        """The slots of this replica and of those beside it, with ordinals for generations."""
        beside = self.beside(segment)
        return [r for number, s in enumerate(beside) for r in _numbered(s, number)]

    def groups(self) -> Iterator[list[Segment]]:
        """Replicas by rank and operator table, each group oldest first."""
        seen: set[GroupKey] = set()
        for segment in self:
            told = segment.descriptor
            key = GroupKey(told.job, told.run, told.rank, self.operators(segment))
            if key not in seen:
                seen.add(key)
                yield self.beside(segment)

    def slots_of(self, group: Sequence[Segment]) -> dict[str, tuple[int, Sequence[SlotRecord]]]:
        """By name: the number of operators, and the slots, with ordinals for generations."""
        return {
            s.path.name: (s.descriptor.num_operators, _numbered(s, number)) for number, s in enumerate(group)
        }


def same_primary(a: SegmentDescriptor, b: SegmentDescriptor) -> bool:
    """Are these the descriptors of rings of one primary, or its own?"""
    if abs(a.created_at_ns - b.created_at_ns) >= _MAX_RINGS:
        return False
    return msgspec.structs.replace(a, created_at_ns=b.created_at_ns) == b


def _free_unsealed(segment: Segment) -> list[int]:
    """Only the daemon that died filled these slots, and nobody will go on where it stopped.

    A slot with a damaged header is free as well, or it would never be granted again; returns these.
    """
    damaged: list[int] = []
    for index in range(segment.geometry.num_slots):
        header = segment.header(index)
        if header is None:
            write_slot_header(segment.buffer, segment.geometry, index, SlotHeader())
            damaged.append(index)
        elif header.state in (SlotState.FILLING, SlotState.FILLED):
            set_slot_state(segment.buffer, segment.geometry, index, SlotState.FREE)
    return damaged


def _numbered(segment: Segment, ordinal: int) -> list[SlotRecord]:
    return [
        replace(slot_record(segment, index, header), generation=ordinal)
        for index, header in segment.headers()
    ]
