"""Conversion between inventory messages and the records that recovery plans are made of.

The plan itself (`ckptd.core.recovery.global_plan`) is pure and knows no messages; this module unpacks and
checks slot headers, and joins them with their segment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import xxhash

from ckptd.core.recovery.held import HeldRecords, History, history_of
from ckptd.core.recovery.snapshot_tables import SnapshotToLoad
from ckptd.core.slots.segment_format import (
    SegmentDescriptor,
    SlotHeader,
    pack_slot_header,
    unpack_slot_header,
)
from ckptd.core.slots.slots import SlotRecord, SlotState, epoch_table
from ckptd.errors import RemoteProtocolError
from ckptd.transport.messages import FetchPiece, FetchSource, HeldSegment, HeldSlot, RunSeen
from ckptd.unpacking import unpack


def held_from_segments(node: str, segments: Iterable[HeldSegment]) -> list[HeldRecords]:
    """A node's segments, for `ckptd.core.recovery.global_plan.plan_recovery`.

    Raises:
        RemoteProtocolError: a header is damaged or not that of a sealed slot, or anchors contradict it.
    """
    return [
        HeldRecords(
            node=node,
            segment=segment.name,
            own=segment.own,
            rank=segment.rank,
            num_operators=segment.num_operators,
            operators_id=segment.operators_id,
            slot_bytes=segment.slot_bytes,
            records=tuple(_record(node, segment, slot) for slot in segment.slots),
            facts=segment.facts,
            partial=segment.partial,
        )
        for segment in segments
    ]


@dataclass(frozen=True, slots=True)
class HeldHistory:
    """The newest history of a run, and what nodes hold of it.

    Args:
        world_size: of its snapshots; 0 if there are none.
    """

    history: History
    snapshots: tuple[HeldRecords, ...]
    logs: tuple[HeldRecords, ...]
    parked: tuple[HeldRecords, ...]
    world_size: int


def newest_history(seen: RunSeen) -> HeldHistory:
    """What the nodes that answered hold of the newest history.

    Raises:
        RemoteProtocolError: see `held_from_segments`.
    """
    snapshots, logs, parked = list[HeldRecords](), list[HeldRecords](), list[HeldRecords]()
    for held in seen.holdings:
        snapshots += held_from_segments(held.node, held.segments)
        logs += held_from_segments(held.node, held.logs)
        parked += held_from_segments(held.node, held.parked)
    records = [held.record for held in seen.holdings if held.record is not None]
    epochs = [epoch for record in records for epoch in record.epochs]
    answered = {held.node for held in seen.holdings}
    absent = {member.card.node for member in seen.members} - answered
    complete = not (absent or seen.silent or any(record.lost for record in records))
    history = history_of([*snapshots, *logs, *parked], epochs, complete=complete)
    worlds = (segment.world_size for held in seen.holdings for segment in held.segments)
    return HeldHistory(
        history,
        history.held(snapshots),
        history.held(logs),
        history.held(parked),
        max(worlds, default=0),
    )


def begun_epochs(seen: RunSeen) -> dict[int, int]:
    """The epochs of the newest history that the nodes which answered know, with their starts; none if one of
    them reports something impossible.
    """
    try:
        found = newest_history(seen)
    except RemoteProtocolError:  # the trainers hear of it when they read the same reports
        return {}
    held = (*found.snapshots, *found.logs, *found.parked)
    return epoch_table((record for each in held for record in each.records), found.history.begun)


class _Told(msgspec.Struct):
    operators: msgspec.Raw
    policy: str = ""


_decoder = msgspec.msgpack.Decoder(_Told)


def operators_id(descriptor: SegmentDescriptor) -> str:
    """Equal for segments whose operator ids mean the same; 32 hex digits.

    The operator table is in the trainer's part of the descriptor, a map, under "operators". In any other
    form the whole part counts, so that nothing is taken for equal that might not be.
    """
    try:
        table = bytes(unpack(_decoder, descriptor.client).operators)
    except ValueError:
        table = descriptor.client
    return xxhash.xxh3_128_hexdigest(table)


def policy_of(descriptor: SegmentDescriptor) -> str:
    """The policy of the snapshots in a segment; "" if its trainer recorded none."""
    try:
        return unpack(_decoder, descriptor.client).policy
    except ValueError:
        return ""


def header_record(
    header: SlotHeader, generation: int, index: int, anchors: bytes, *, audited: bool = False
) -> SlotRecord:
    """A slot header with its anchors (a little-endian bitmap), as the core sees it."""
    return SlotRecord(
        generation=generation,
        index=index,
        state=header.state,
        iteration=header.iteration,
        previous=header.previous,
        sequence=header.sequence,
        image_len=header.image_len,
        layout_id=header.layout_id,
        anchors=int.from_bytes(anchors, "little"),
        phase=header.phase,
        epoch=header.epoch,
        epoch_start=header.epoch_start,
        header_digest=header.header_digest,
        audited=audited,
    )


def fetch_piece(piece: SnapshotToLoad, *, sealed_at_ns: int) -> FetchPiece:
    """The request for a copy of this snapshot."""
    record = piece.record
    header = SlotHeader(
        state=SlotState.SEALED,
        iteration=record.iteration,
        previous=record.previous,
        image_len=record.image_len,
        sequence=record.sequence,
        layout_id=record.layout_id,
        sealed_at_ns=sealed_at_ns,
        phase=record.phase,
        header_digest=record.header_digest,
        epoch=record.epoch,
        epoch_start=record.epoch_start,
    )
    sources = tuple(FetchSource(s.node, s.segment, s.index) for s in piece.sources)
    return FetchPiece(pack_slot_header(header), sources)


def _record(node: str, segment: HeldSegment, slot: HeldSlot) -> SlotRecord:
    header = unpack_slot_header(slot.header)
    if header is None:
        raise _unbelievable(node, segment, slot, "its header is damaged")
    if header.state is not SlotState.SEALED:
        raise _unbelievable(node, segment, slot, f"it is {header.state.name.lower()}, not sealed")
    anchors = int.from_bytes(slot.anchors, "little")
    if anchors >> segment.num_operators:
        why = f"it anchors operators beyond the {segment.num_operators} there are"
        raise _unbelievable(node, segment, slot, why)
    return header_record(header, segment.generation, slot.slot, slot.anchors, audited=slot.audited)


def _unbelievable(node: str, segment: HeldSegment, slot: HeldSlot, why: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"its report of a snapshot is impossible: {why}",
        operation="plan recovery",
        ids={"node": node, "segment": segment.name, "slot": slot.slot},
        hint="Check that all nodes run the same version of ckptd",
    )
