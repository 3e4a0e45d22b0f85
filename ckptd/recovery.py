"""From where every rank of a job resumes: one pure function of what all the ranks hold.

Each rank asks its daemon for its slot table and the ranks exchange these inventories; each then
computes the same plan from the same input, so nobody has to be asked and nobody has to be alive.

The plan is a pair of iterations common to all ranks. Every rank loads its snapshot of *start*, replays
forward, and is dense and exact at *end*. It holds an unbroken chain of snapshots over exactly that
span, and that chain anchors each of its operators. Ranks differ in how far back their operators reach
(pipeline stages, other windows): the one that needs most decides where all of them start. The newest
*end* wins, then the newest *start*, which is the least to replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ckptd.errors import RemoteProtocolError
from ckptd.ring import (
    NoSuffix,
    SlotRecord,
    SlotState,
    chain_from,
    find_suffix,
    newest_by_iteration,
)

__all__ = [
    "NoRecovery",
    "RankInventory",
    "RecoveryPlan",
    "from_wire",
    "plan_recovery",
    "to_wire",
]


@dataclass(frozen=True, slots=True)
class RankInventory:
    """What one rank holds: the records of all generations that share one operator table."""

    num_operators: int
    records: tuple[SlotRecord, ...]


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """Where all ranks resume; ``per_rank`` gives each its snapshots from start to end, oldest first."""

    start: int
    end: int
    per_rank: Mapping[int, tuple[SlotRecord, ...]]
    replayed: int
    reason: str


@dataclass(frozen=True, slots=True)
class NoRecovery:
    """Why the job can only begin anew."""

    reason: str


def plan_recovery(
    inventories: Mapping[int, RankInventory], world_size: int
) -> RecoveryPlan | NoRecovery:
    """The newest state that all ranks can reach together; see the module.

    Args:
        inventories: of each rank, 0 to ``world_size`` - 1.
    """
    refusal = _not_ready(inventories, world_size)
    if refusal is not None:
        return NoRecovery(refusal)
    newest = {
        rank: newest_by_iteration(inventory.records) for rank, inventory in inventories.items()
    }
    first, *others = newest.values()
    ends = sorted(set(first).intersection(*others), reverse=True)
    for end in ends:
        chains = {rank: chain_from(table[end], table) for rank, table in newest.items()}
        start = _common_start(chains, inventories)
        if start is not None:
            return _plan(chains, start, end, newest)
    return NoRecovery(_no_common(newest, ends))


def to_wire(inventory: RankInventory) -> bytes:
    """The inventory as msgpack, to be exchanged between ranks."""
    wire = _WireInventory(
        inventory.num_operators,
        [_WireRecord.of(record, inventory.num_operators) for record in inventory.records],
    )
    return msgspec.msgpack.encode(wire)


def from_wire(payload: bytes) -> RankInventory:
    """The inventory that `to_wire` was given.

    Raises:
        RemoteProtocolError: the payload is not one, or contradicts itself.
    """
    try:
        wire = msgspec.msgpack.decode(payload, type=_WireInventory)
        records = tuple(record.record() for record in wire.records)
    except (msgspec.DecodeError, ValueError) as error:
        raise _unreadable(str(error)) from error
    for record in records:
        if record.anchors >> wire.num_operators:
            raise _unreadable(
                f"the snapshot of iteration {record.iteration} anchors operators beyond the "
                f"{wire.num_operators} there are"
            )
    return RankInventory(wire.num_operators, records)


class _WireRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A record in msgpack, whose integers end at 64 bits: anchors travel as bytes."""

    generation: int
    index: int
    state: int
    iteration: int
    previous: int
    sequence: int
    image_len: int
    layout_id: int
    anchors: bytes
    phase: int

    @classmethod
    def of(cls, record: SlotRecord, num_operators: int) -> _WireRecord:
        return cls(
            record.generation,
            record.index,
            int(record.state),
            record.iteration,
            record.previous,
            record.sequence,
            record.image_len,
            record.layout_id,
            record.anchors.to_bytes((num_operators + 7) // 8, "little"),
            record.phase,
        )

    def record(self) -> SlotRecord:
        return SlotRecord(
            generation=self.generation,
            index=self.index,
            state=SlotState(self.state),
            iteration=self.iteration,
            previous=self.previous,
            sequence=self.sequence,
            image_len=self.image_len,
            layout_id=self.layout_id,
            anchors=int.from_bytes(self.anchors, "little"),
            phase=self.phase,
        )


class _WireInventory(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    num_operators: int
    records: list[_WireRecord]

    def __post_init__(self) -> None:
        if self.num_operators < 0:
            raise ValueError(f"num_operators is {self.num_operators}")


def _unreadable(why: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"the inventory of a rank cannot be read ({why})",
        operation="plan recovery",
        hint="Check that all ranks run the same version of ckptd",
    )


def _not_ready(inventories: Mapping[int, RankInventory], world_size: int) -> str | None:
    """Why these inventories cannot make a plan at all; None if they may."""
    if world_size < 1:
        return f"world size {world_size}"
    missing = [rank for rank in range(world_size) if rank not in inventories]
    if missing:
        return f"no inventory of {_ranks(missing)} (world size {world_size})"
    beyond = sorted(rank for rank in inventories if not 0 <= rank < world_size)
    if beyond:
        return f"inventories of {_ranks(beyond)}, beyond world size {world_size}"
    for rank in range(world_size):
        inventory = inventories[rank]
        found = find_suffix(inventory.records, inventory.num_operators)
        if isinstance(found, NoSuffix):
            return f"rank {rank}: {found.reason}"
    return None


def _common_start(
    chains: Mapping[int, Sequence[SlotRecord]], inventories: Mapping[int, RankInventory]
) -> int | None:
    """The newest iteration from which every rank's chain anchors all that the rank has."""
    common: set[int] | None = None
    for rank, chain in chains.items():
        starts = _covering_starts(chain, inventories[rank].num_operators)
        common = starts if common is None else common & starts
        if not common:
            return None
    return max(common) if common else None


def _covering_starts(chain: Sequence[SlotRecord], num_operators: int) -> set[int]:
    """The iterations of ``chain`` (newest first) from which on it anchors everything."""
    everything = (1 << num_operators) - 1
    covered = 0
    starts = set()
    for record in chain:
        covered |= record.anchors
        if covered & everything == everything:
            starts.add(record.iteration)
    return starts


def _plan(
    chains: Mapping[int, Sequence[SlotRecord]],
    start: int,
    end: int,
    newest: Mapping[int, Mapping[int, SlotRecord]],
) -> RecoveryPlan:
    per_rank = {
        rank: tuple(record for record in reversed(chain) if record.iteration >= start)
        for rank, chain in sorted(chains.items())
    }
    last = max(max(table) for table in newest.values())
    reason = f"every rank can start at iteration {start} and is exact at {end}"
    if last > end:
        reason += f"; snapshots up to {last} are not complete on every rank"
    return RecoveryPlan(start, end, per_rank, end - start, reason)


def _no_common(newest: Mapping[int, Mapping[int, SlotRecord]], ends: Sequence[int]) -> str:
    if not ends:
        spans = ", ".join(
            f"rank {rank}: {min(table)} to {max(table)}"
            for rank, table in sorted(newest.items())[:8]
        )
        return f"the ranks have no iteration in common ({spans})"
    return (
        f"the ranks share iterations up to {ends[0]}, but from none of them back does every rank's "
        "chain of snapshots anchor all its operators from a common start"
    )


def _ranks(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
