"""The replica segments of this node: other nodes' snapshots and boundary logs.

As in `SegmentStore`, a search for snapshots must not find a log: iteration, `of_run` and `groups`
leave logs out. The `SegmentStore` manages the memory; this module knows the names of replicas, and
which of them belong together. A replica gets memory only if what is promised to ranks of this node
leaves room.

A primary has one replica here, or several *rings*: when a longer suffix must fit (the run's span has
grown), a wider ring is made, and the first goes as soon as no promise needs it. The descriptor of
the n-th ring says that it was created n nanoseconds later, so that each has an origin and a name of
its own. All methods belong to the daemon's loop thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from ckptd.core.sessions import RankKey, room_for_replicas
from ckptd.core.slots.segment_format import (
    REPLICA_ENDS,
    SegmentDescriptor,
    SlotHeader,
    decode_descriptor,
    encode_descriptor,
    origin_of,
    plan_geometry,
    replica_file_name,
    set_slot_state,
    write_slot_header,
)
from ckptd.core.slots.slots import SlotRecord, SlotState
from ckptd.holdings import operators_id
from ckptd.memory.inventory import slot_record
from ckptd.memory.segment_file import Adopted, Adoption, Segment
from ckptd.memory.segment_store import Purpose, SegmentPlan, SegmentStore

_MAX_RINGS = 1000  # nanoseconds: no two primaries of a rank are made within so short a time


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
        """Every replica, also of boundary logs."""
        return self._store.all_for(Purpose.REPLICA)

    def logs(self) -> list[Segment]:
        return [s for s in self.everything() if s.is_log]

    @property
    def used_bytes(self) -> int:
        """The memory of all replicas, including those that are still being made."""
        return self._store.bytes_for(Purpose.REPLICA)

    def get(self, name: str) -> Segment | None:
        return self._store.named(name, Purpose.REPLICA)

    @property
    def runs(self) -> set[tuple[str, str]]:
        """The runs of all replicas, including those that are still being made."""
        plans = (plan for plan, _ in self._store.plans_for(Purpose.REPLICA))
        return {(plan.descriptor.job, plan.descriptor.run) for plan in plans}

    def of_run(self, job: str, run: str) -> list[Segment]:
        return [s for s in self.all_of_run(job, run) if s.holds_snapshots]

    def all_of_run(self, job: str, run: str) -> list[Segment]:
        return [s for s in self.everything() if (s.key.job, s.key.run) == (job, run)]

    def adopt(self) -> Adopted:
        return self._take_over(self._adoption.begin().and_then(self._adoption.come_back()))

    def adopt_waiting(self) -> Adopted:
        return self._take_over(self._adoption.again())

    def waits_for(self, job: str, run: str) -> list[str]:
        """Files of a run that are here and could not be opened yet."""
        return self._adoption.waits_for(f"{job}~{run}~")

    def forget_waiting(self, job: str, run: str) -> int:
        """Delete the waiting files of a run; returns how many."""
        return self._adoption.forget(f"{job}~{run}~")

    def _take_over(self, found: Adopted) -> Adopted:
        found.damaged = [(s, index) for s in found.segments for index in _free_unsealed(s)]
        for segment in found.segments:
            self._store.enter_found(segment, Purpose.REPLICA)
        return found

    def plan(
        self, descriptor: SegmentDescriptor, num_slots: int, slot_bytes: int, origin: str
    ) -> SegmentPlan:
        """Lay out the next ring of a primary; no memory is promised yet.

        Raises:
            ValueError: numbers or names that no segment can have, or an origin that is not the descriptor's.
            SegmentError: a descriptor that could not be read after a restart.
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
        """The memory that is neither in use nor promised to a rank of this node."""
        return room_for_replicas(self._store.facts(), self._store.memory)

    def forget(self, segment: Segment) -> None:
        self._operators.pop(segment.path.name, None)

    # -- records ---------------------------------------------------------------------------------

    def _operators_of(self, segment: Segment) -> str:
        name = segment.path.name
        if name not in self._operators:
            self._operators[name] = operators_id(segment.descriptor)
        return self._operators[name]

    def group_of(self, segment: Segment) -> list[Segment]:
        """Replicas whose snapshots may form a suffix with this one's, oldest first, this one included.

        They are of one rank, with one operator table.
        """
        operators = self._operators_of(segment)
        found = [
            s
            for s in self.of_run(segment.key.job, segment.key.run)
            if s.key.rank == segment.key.rank and self._operators_of(s) == operators
        ]
        return sorted(found, key=lambda s: (s.descriptor.created_at_ns, s.path.name))

    def ordinal(self, segment: Segment) -> int:
        """Its number in its group: generations count per primary, and primaries differ."""
        return self.group_of(segment).index(segment)

    def group_records(self, segment: Segment) -> list[SlotRecord]:
        return [r for number, s in enumerate(self.group_of(segment)) for r in _numbered(s, number)]

    def groups(self) -> Iterator[list[Segment]]:
        """All groups of replicas of snapshots."""
        seen: set[tuple[RankKey, str]] = set()
        for segment in self:
            key = segment.key, self._operators_of(segment)
            if key not in seen:
                seen.add(key)
                yield self.group_of(segment)

    def slots_of(self, group: Sequence[Segment]) -> dict[str, tuple[int, Sequence[SlotRecord]]]:
        """By name: the number of operators, and the slots, with ordinals for generations."""
        return {
            s.path.name: (s.descriptor.num_operators, _numbered(s, number)) for number, s in enumerate(group)
        }


def same_primary(a: SegmentDescriptor, b: SegmentDescriptor) -> bool:
    """Whether these are descriptors of rings of one primary, or of the primary itself."""
    if abs(a.created_at_ns - b.created_at_ns) >= _MAX_RINGS:
        return False
    return msgspec.structs.replace(a, created_at_ns=b.created_at_ns) == b


def _free_unsealed(segment: Segment) -> list[int]:
    """Free the slots that an earlier daemon's peers were filling; returns those with a damaged header."""
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
