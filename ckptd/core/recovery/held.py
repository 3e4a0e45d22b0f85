"""Inventories of nodes: the records that they hold of a run, their encoding for exchange between ranks, and
the history of the run that counts (docs/replication.md section 2). Pure.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Annotated

import msgspec
from msgspec import Meta

from ckptd.core.slots.slots import SlotRecord, SlotState, least_starts, other_histories, past_of
from ckptd.errors import RemoteProtocolError
from ckptd.unpacking import unpack

STORE_NODE = ".store"  # the node of inventories of object storage; no node can have this name


@dataclass(frozen=True, slots=True)
class HeldRecords:
    """The slots of one segment on one node; ``own`` is false for a replica.

    Operator ids have the same meaning in all segments with the same ``operators_id``. ``facts`` are those of
    a boundary log about its rank (`ckptd.core.recovery.recovery_facts.facts_to_wire`). ``partial``: snapshots
    of the policy ``partial``, of which there may be images of several durable checkpoints
    (`ckptd.core.durable_experts`).
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
    partial: bool = False


@dataclass(frozen=True, slots=True)
class RunHoldings:
    """What the nodes hold of a run, and the starts of epochs that are known from elsewhere (``begun``)."""

    snapshots: Sequence[HeldRecords]
    parked: Sequence[HeldRecords] = ()
    logs: Sequence[HeldRecords] = ()
    begun: Mapping[int, int] = field(default_factory=dict)

    def without(self, nodes: Container[str]) -> RunHoldings:
        """What is left after the loss of these nodes."""

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
# As of a segment's descriptor: bitmaps have this width.
_NumOperators = Annotated[int, Meta(ge=0, le=1 << 20)]


# Both sides have the same fields in the same order, except for the conversions below.
_before_anchors = attrgetter(
    "generation", "index", "state", "iteration", "previous", "sequence", "image_len", "layout_id"
)
_after_anchors = attrgetter("phase", "epoch", "epoch_start", "header_digest", "audited")
_before_records = attrgetter("node", "segment", "own", "rank", "num_operators", "operators_id", "slot_bytes")


class _WireRecord(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """A record in msgpack, whose integers have at most 64 bits, so anchors are sent as bytes."""

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
    audited: bool = False

    @classmethod
    def of(cls, record: SlotRecord, num_operators: int) -> _WireRecord:
        anchors = record.anchors.to_bytes((num_operators + 7) // 8, "little")
        return cls(*(*_before_anchors(record), anchors, *_after_anchors(record)))

    def record(self, num_operators: int) -> SlotRecord:
        anchors = int.from_bytes(self.anchors, "little")
        if anchors >> num_operators:
            raise ValueError(
                f"the snapshot of iteration {self.iteration} anchors operators beyond the "
                f"{num_operators} of the model"
            )
        if len(self.header_digest) not in (0, 16):
            raise ValueError(f"a header digest of {len(self.header_digest)} bytes")
        generation, index, state, *before = _before_anchors(self)
        values = (generation, index, SlotState(state), *before, anchors, *_after_anchors(self))
        return SlotRecord(*values)


class _WireHeld(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    node: str
    segment: str
    own: bool
    rank: _Count
    num_operators: _NumOperators
    operators_id: str
    slot_bytes: _Count
    records: list[_WireRecord]
    facts: bytes = b""
    partial: bool = False

    @classmethod
    def of(cls, held: HeldRecords) -> _WireHeld:
        records = [_WireRecord.of(record, held.num_operators) for record in held.records]
        return cls(*(*_before_records(held), records, held.facts, held.partial))

    def held(self) -> HeldRecords:
        records = tuple(record.record(self.num_operators) for record in self.records)
        return HeldRecords(*(*_before_records(self), records, self.facts, self.partial))


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


def _is_held(held: Sequence[HeldRecords], iteration: int, epochs: Container[int]) -> bool:
    """Whether each rank of which anything is held has something of this iteration in these epochs."""
    found = {h.rank for h in held for r in h.records if r.iteration == iteration and r.epoch in epochs}
    return bool(found) and found == {h.rank for h in held if h.records}


def history_of(
    held: Iterable[HeldRecords],
    epochs: Iterable[tuple[int, int, int]],
    *,
    complete: bool = False,
) -> History:
    """Choose the history that counts.

    Args:
        held: snapshots, boundary logs and parked states of the nodes that answered.
        epochs: from the nodes' records: an epoch, the iteration at which it began, and the epoch that it
            follows (-1: not known).
        complete: every node that may hold something has answered.
    """
    known, there = list(epochs), list(held)
    follows: dict[int, int] = {}
    for epoch, _, before in known:
        follows[epoch] = max(before, follows.get(epoch, -1))
    sealed = {record.epoch for h in there for record in h.records}
    every = sealed | follows.keys()
    begun_here = {e for e, start, _ in known if _is_held(there, start, past_of(e, every, follows))}
    empty = every - sealed - begun_here
    others = other_histories(every, follows, empty=empty, complete=complete)
    begun = least_starts(*({epoch: start} for epoch, start, _ in known if epoch not in others))
    return History(frozenset(others), begun)
