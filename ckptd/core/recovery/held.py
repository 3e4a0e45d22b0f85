"""Inventories of nodes: the records that they hold of a run, and their encoding for exchange
between ranks.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import msgspec
from msgspec import Meta

from ckptd.core.slots.ring import SlotRecord, SlotState
from ckptd.core.slots.slots import least_starts, other_histories
from ckptd.errors import RemoteProtocolError
from ckptd.unpacking import unpack

__all__ = ["STORE_NODE", "HeldRecords", "History", "RunHoldings", "from_wire", "history_of", "to_wire"]


STORE_NODE = ".store"  # inventories of object storage have this name, which no node can have


@dataclass(frozen=True, slots=True)
class HeldRecords:
    """The slots of one segment on one node; ``own`` is false for a replica.

    Operator ids in the records have the same meaning in all segments with the same ``operators_id``.
    ``facts`` are those that a boundary log contains about its rank
    (`ckptd.core.recovery.recovery_facts.facts_to_wire`).
    """

    node: str
    segment: str
    own: bool
    rank: int
    num_operators: int
    operators_id: str
    slot_bytes: int
    records: tuple[SlotRecord, ...]
    facts: bytes = b""


@dataclass(frozen=True, slots=True)
class RunHoldings:
    """What the nodes hold of a run, and the starts of epochs that are known from elsewhere (``begun``).

    Boundary logs tell with whom their ranks communicate.
    """

    snapshots: Sequence[HeldRecords]
    parked: Sequence[HeldRecords] = ()
    logs: Sequence[HeldRecords] = ()
    begun: Mapping[int, int] = field(default_factory=dict)

    def without(self, nodes: Container[str]) -> RunHoldings:
        """What is left when these nodes are lost."""

        def left(held: Sequence[HeldRecords]) -> list[HeldRecords]:
            return [each for each in held if each.node not in nodes]

        return RunHoldings(left(self.snapshots), left(self.parked), left(self.logs), self.begun)


def to_wire(held: Iterable[HeldRecords]) -> bytes:
    """Encode inventories as msgpack for the exchange between ranks."""
    return msgspec.msgpack.encode([_WireHeld.of(h) for h in held])


def from_wire(payload: bytes) -> list[HeldRecords]:
    """Decode the output of `to_wire`.

    Raises:
        RemoteProtocolError: the payload is malformed, or contradicts itself.
    """
    try:
        return [wire.held() for wire in unpack(_decoder, payload, max_bytes=_MAX_BYTES)]
    except ValueError as error:
        raise RemoteProtocolError(
            f"the inventory of a node cannot be read ({error})",
            operation="plan recovery",
            hint="Check that all ranks run the same version of ckptd",
        ) from error


_MAX_BYTES = 1 << 30  # limit of one node's inventory
_Count = Annotated[int, Meta(ge=0)]
_Number = Annotated[int, Meta(ge=-1)]


class _WireRecord(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """A record in msgpack. Its integers have at most 64 bits, so anchors are sent as bytes."""

    generation: _Count
    index: _Count
    state: int
    iteration: _Number
    previous: _Number
    sequence: _Count
    image_len: _Count
    layout_id: _Count
    anchors: bytes
    phase: _Count
    epoch: _Count
    epoch_start: _Number
    header_digest: bytes

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
            record.epoch,
            record.epoch_start,
            record.header_digest,
        )

    def record(self, num_operators: int) -> SlotRecord:
        anchors = int.from_bytes(self.anchors, "little")
        if anchors >> num_operators:
            raise ValueError(
                f"the snapshot of iteration {self.iteration} anchors operators beyond the "
                f"{num_operators} of the model"
            )
        if len(self.header_digest) not in (0, 16):
            raise ValueError(f"a header digest of {len(self.header_digest)} bytes")
        return SlotRecord(
            self.generation,
            self.index,
            SlotState(self.state),
            self.iteration,
            self.previous,
            self.sequence,
            self.image_len,
            self.layout_id,
            anchors,
            self.phase,
            self.epoch,
            self.epoch_start,
            self.header_digest,
        )


class _WireHeld(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    node: str
    segment: str
    own: bool
    rank: _Count
    num_operators: _Count
    operators_id: str
    slot_bytes: _Count
    records: list[_WireRecord]
    facts: bytes = b""

    @classmethod
    def of(cls, held: HeldRecords) -> _WireHeld:
        return cls(
            held.node,
            held.segment,
            held.own,
            held.rank,
            held.num_operators,
            held.operators_id,
            held.slot_bytes,
            [_WireRecord.of(record, held.num_operators) for record in held.records],
            held.facts,
        )

    def held(self) -> HeldRecords:
        return HeldRecords(
            self.node,
            self.segment,
            self.own,
            self.rank,
            self.num_operators,
            self.operators_id,
            self.slot_bytes,
            tuple(record.record(self.num_operators) for record in self.records),
            self.facts,
        )


_decoder = msgspec.msgpack.Decoder(list[_WireHeld])


@dataclass(frozen=True, slots=True)
class History:
    """The history of a run that counts.

    Attributes:
        others: the known epochs that do not belong to it.
        begun: its known epochs, with the iteration at which each began.
    """

    others: frozenset[int]
    begun: Mapping[int, int]

    def held(self, held: Iterable[HeldRecords]) -> tuple[HeldRecords, ...]:
        """The inventories without the records of other histories."""
        if not self.others:
            return tuple(held)
        return tuple(
            replace(h, records=tuple(r for r in h.records if r.epoch not in self.others)) for h in held
        )


def history_of(
    held: Iterable[HeldRecords],
    epochs: Iterable[tuple[int, int, int]],
    *,
    complete: bool = False,
) -> History:
    """Choose the history that counts, from the inventories and epochs of the nodes that answered.

    Args:
        complete: every node that may hold something has answered.
        held: snapshots, boundary logs and parked states.
        epochs: from the nodes' records: an epoch, the iteration at which it began, and the epoch
            that it follows (-1: not known).
    """
    known = list(epochs)
    follows: dict[int, int] = {}
    for epoch, _, before in known:
        follows[epoch] = max(before, follows.get(epoch, -1))
    sealed = {record.epoch for h in held for record in h.records}
    empty = follows.keys() - sealed
    others = other_histories(sealed | follows.keys(), follows, empty=empty, complete=complete)
    begun = least_starts(*({epoch: start} for epoch, start, _ in known if epoch not in others))
    return History(frozenset(others), begun)
