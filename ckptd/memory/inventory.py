"""Segments and slots as messages and records, read from the files alone."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from ckptd.core.recovery.recovery_facts import facts_of_log, facts_to_wire
from ckptd.core.slots.ring import NoSuffix, Suffix, find_suffix, newest_by_iteration, ways_to
from ckptd.core.slots.segment_format import (
    SegmentDescriptor,
    SlotHeader,
    origin_of,
    pack_slot_header,
)
from ckptd.core.slots.slots import NO_EPOCHS, SlotRecord, SlotState
from ckptd.core.snapshot_policy import PolicyKind
from ckptd.holdings import header_record, operators_id, policy_of
from ckptd.memory.segment_file import Segment
from ckptd.storage.image import ImageView
from ckptd.storage.image_format import ImageError
from ckptd.transport.messages import (
    ExpertLoss,
    HeldSegment,
    HeldSlot,
    RankSnapshots,
    SegmentStatus,
    SlotInfo,
)
from ckptd.unpacking import unpack

MOST_LOST = 8
"""Experts whose lost updates are told if nobody asks for all."""

_KEPT_PART = 8  # of an image's size, in bits: what is kept of its anchors
_MAX_OPERATORS = 1 << 20  # as in a descriptor
_WITH_IMAGE = (SlotState.FILLED, SlotState.SEALED, SlotState.QUARANTINED)


def segment_status(segment: Segment, now_s: float) -> SegmentStatus:
    """One segment, for `ckptctl status`."""
    headers = dict(segment.headers())
    states = Counter(header.state.name.lower() for header in headers.values())
    if bad := segment.geometry.num_slots - len(headers):
        states["damaged"] = bad
    sealed = [h.iteration for h in headers.values() if h.state is SlotState.SEALED]
    descriptor = segment.descriptor
    detached = segment.detached_at_s
    return SegmentStatus(
        job=descriptor.job,
        run=descriptor.run,
        rank=descriptor.rank,
        world_size=descriptor.world_size,
        generation=descriptor.generation,
        path=str(segment.path),
        total_bytes=segment.file_bytes,
        slot_bytes=segment.geometry.slot_bytes,
        num_slots=segment.geometry.num_slots,
        states=dict(states),
        newest_iteration=max(sealed, default=-1),
        window=descriptor.window,
        num_operators=descriptor.num_operators,
        owned=segment.owned(),
        mlocked=segment.mlocked,
        detached_s=0.0 if detached is None else now_s - detached,
        node_id=descriptor.node_id,
        created_at_ns=descriptor.created_at_ns,
        kind=descriptor.kind,
    )


def rank_snapshots(segments: Sequence[Segment], *, operators: bool) -> RankSnapshots:
    """The slot table of one rank, given its segments in the order of use; at least one holds snapshots."""
    logs = [segment for segment in segments if segment.is_log]
    parked = [segment for segment in segments if segment.descriptor.kind == "parked"]
    segments = [segment for segment in segments if segment.holds_snapshots]
    descriptor = segments[-1].descriptor
    records = records_of(segments)
    suffix = find_suffix(records, descriptor.num_operators)
    names = operator_names(descriptor.client, descriptor.num_operators, descriptor.rank) if operators else ()
    plt, lost = _lost_updates(segments, every=operators)
    return RankSnapshots(
        job=descriptor.job,
        run=descriptor.run,
        rank=descriptor.rank,
        world_size=descriptor.world_size,
        window=descriptor.window,
        num_operators=descriptor.num_operators,
        slots=_slot_infos(segments),
        log=_slot_infos(logs),
        parked=_slot_infos(parked),
        suffix=(-1, -1) if isinstance(suffix, NoSuffix) else (suffix.start, suffix.end),
        before=_before(records, suffix, descriptor.num_operators),
        reason=suffix.reason,
        operators=names,
        policy=policy_of(descriptor),
        plt=plt,
        lost=lost,
    )


def _before(records: Sequence[SlotRecord], suffix: Suffix | NoSuffix, num_operators: int) -> int:
    """The newest snapshot from which a replay computes the start of a suffix; -1 if there is none."""
    if isinstance(suffix, NoSuffix):
        return -1
    newest = newest_by_iteration(records, NO_EPOCHS)
    return max(ways_to(newest, suffix.start, num_operators), default=-1)


def records_of(segments: Iterable[Segment]) -> list[SlotRecord]:
    """The slots of a rank's generations that have as many operators as the one that was filled last."""
    known = sorted(segments, key=Segment.last_filled)
    if not known:
        return []
    same = [s for s in known if s.descriptor.num_operators == known[-1].descriptor.num_operators]
    return [slot_record(segment, index, header) for segment in same for index, header in segment.headers()]


def slot_record(segment: Segment, index: int, header: SlotHeader) -> SlotRecord:
    """One slot, as the core sees it."""
    anchors = _packed_anchors(segment, index, header)
    return header_record(header, segment.generation, index, anchors, audited=segment.audited(index, header))


def log_records(segment: Segment) -> list[SlotRecord]:
    """The slots of a boundary log; they anchor nothing."""
    return [header_record(header, segment.generation, index, b"") for index, header in segment.headers()]


def held_slots(segment: Segment) -> tuple[HeldSlot, ...]:
    """The sealed slots of a segment, for nodes that may read or replicate them."""
    return tuple(
        HeldSlot(
            index,
            pack_slot_header(header),
            _packed_anchors(segment, index, header),
            segment.audited(index, header),
        )
        for index, header in segment.headers()
        if header.state is SlotState.SEALED
    )


def held_segment(segment: Segment, *, own: bool) -> HeldSegment:
    """A segment as nodes and ranks report it; ``own`` is false for a replica."""
    descriptor = segment.descriptor
    return HeldSegment(
        name=segment.path.name,
        rank=descriptor.rank,
        own=own,
        origin=origin_of(descriptor),
        generation=descriptor.generation,
        world_size=descriptor.world_size,
        window=descriptor.window,
        num_operators=descriptor.num_operators,
        operators_id=operators_id(descriptor),
        slot_bytes=segment.geometry.slot_bytes,
        num_slots=segment.geometry.num_slots,
        slots=held_slots(segment),
        facts=_facts(descriptor),
        partial=policy_of(descriptor) == PolicyKind.PARTIAL,
    )


def _facts(descriptor: SegmentDescriptor) -> bytes:
    found = facts_of_log(descriptor.client) if descriptor.is_log else None
    return b"" if found is None else facts_to_wire({descriptor.rank: found})


class _Operators(msgspec.Struct):
    operators: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_MAX_OPERATORS)]


class _Owners(msgspec.Struct):
    owners: Annotated[list[int], msgspec.Meta(max_length=_MAX_OPERATORS)]


class _Named(msgspec.Struct):
    name: str


_Listed = Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1, max_length=64)]

_operators = msgspec.msgpack.Decoder(_Operators)
_owners = msgspec.msgpack.Decoder(_Owners)
_item: msgspec.msgpack.Decoder[str | _Named | list[msgspec.Raw]] = msgspec.msgpack.Decoder(
    str | _Named | _Listed
)
_text = msgspec.msgpack.Decoder(str)


def operator_names(client: bytes, num_operators: int, rank: int) -> tuple[str, ...]:
    """Operator names from the trainer's part of a descriptor, or numbers if it has none.

    That part belongs to the client. It may be a map with a list under "operators", whose items are names,
    maps with a "name", or lists that begin with a name. If "owners" has another rank than ``rank`` for an
    operator, whose images hold it, the name says so.
    """
    try:
        listed = unpack(_operators, client).operators
    except ValueError:
        listed = []
    if len(listed) != num_operators:
        return tuple(f"operator {i}" for i in range(num_operators))
    names = [_name_of(item, i) for i, item in enumerate(listed)]
    try:
        owners = unpack(_owners, client).owners
    except ValueError:
        owners = []
    if len(owners) != num_operators:
        return tuple(names)
    ours = (-1, rank)
    return tuple(
        name if owner in ours else f"{name} (rank {owner})" for name, owner in zip(names, owners, strict=True)
    )


_Container = Annotated[str, msgspec.Meta(max_length=1024)]
_Tokens = Annotated[list[float], msgspec.Meta(max_length=1 << 16)]


class _OfExperts(msgspec.Struct, frozen=True):
    plt: float
    lost: Annotated[dict[_Container, _Tokens], msgspec.Meta(max_length=1 << 12)]


class _Scalars(msgspec.Struct, frozen=True):
    experts: _OfExperts | None = None


_scalars = msgspec.msgpack.Decoder(_Scalars)


def _lost_updates(segments: Sequence[Segment], *, every: bool) -> tuple[float, tuple[ExpertLoss, ...]]:
    """By the newest partial snapshot: the PLT of all recoveries of the run, and by expert of this rank the
    tokens whose updates they lost, the most first. Nothing of other policies, and of what cannot be read.

    Args:
        every: all experts that have lost tokens; otherwise the first `MOST_LOST`.
    """
    sealed = [
        (segment, index, header)
        for segment in segments
        for index, header in segment.headers()
        if header.state is SlotState.SEALED
    ]
    if not sealed or policy_of(segments[-1].descriptor) != PolicyKind.PARTIAL:
        return 0.0, ()
    segment, index, header = max(sealed, key=lambda one: (one[2].epoch, one[2].iteration))
    try:
        found = unpack(_scalars, ImageView(segment.image(index, header)).scalars).experts
    except (ImageError, ValueError, LookupError):
        return 0.0, ()  # damaged, or being overwritten; sealing and scrubbing report damage
    now = segment.header(index)
    if found is None or now is None or now.sequence != header.sequence:
        return 0.0, ()
    lost = [
        ExpertLoss(f"{container}.{expert}", tokens)
        for container, counts in found.lost.items()
        for expert, tokens in enumerate(counts)
        if 0 < tokens < math.inf
    ]
    lost.sort(key=lambda one: (-one.tokens, one.expert))
    return found.plt if 0 <= found.plt <= 1 else 0.0, tuple(lost if every else lost[:MOST_LOST])


def own_memory() -> tuple[int, int, int]:
    """This process's resident bytes: anonymous, file-backed, shared (segments)."""
    text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    found = dict(re.findall(r"^Rss(Anon|File|Shmem):\s+(\d+) kB$", text, re.MULTILINE))
    anon, file, shmem = (int(found.get(kind, 0)) * 1024 for kind in ("Anon", "File", "Shmem"))
    return anon, file, shmem


def _slot_infos(segments: Iterable[Segment]) -> tuple[SlotInfo, ...]:
    found = [
        _slot_info(segment, index, header) for segment in segments for index, header in segment.headers()
    ]
    return tuple(sorted(found, key=lambda slot: (slot.iteration, slot.sequence)))


def _slot_info(segment: Segment, index: int, header: SlotHeader) -> SlotInfo:
    anchors = _anchors(segment, index, header)
    return SlotInfo(
        generation=segment.generation,
        slot=index,
        state=header.state.name.lower(),
        iteration=header.iteration,
        previous=header.previous,
        sequence=header.sequence,
        image_len=header.image_len,
        phase=header.phase,
        filled_at_ns=header.filled_at_ns,
        sealed_at_ns=header.sealed_at_ns,
        digest_ns=header.digest_ns,
        writer_pid=header.writer_pid,
        anchors=anchors.to_bytes((anchors.bit_length() + 7) // 8, "little"),
        audited=segment.audited(index, header),
    )


def _packed_anchors(segment: Segment, index: int, header: SlotHeader) -> bytes:
    width = (segment.descriptor.num_operators + 7) // 8
    return _anchors(segment, index, header).to_bytes(width, "little")


def _anchors(segment: Segment, index: int, header: SlotHeader) -> int:
    if header.state not in _WITH_IMAGE:
        return 0
    known = segment.anchors.get(index)
    if known is not None and known[0] == header:
        return known[1]
    try:
        anchors = ImageView(segment.image(index, header)).anchors
    except ImageError:
        return 0  # damaged, or being overwritten; sealing and scrubbing report damage
    now = segment.header(index)
    if now is None or now.sequence != header.sequence or now.state not in _WITH_IMAGE:
        return 0  # filled again meanwhile: what was read may be of another snapshot
    # A peer may send an intact image with more operators than its segment; it is useless here.
    anchors = 0 if anchors >> segment.descriptor.num_operators else anchors
    # Of a peer's tiny images with many operators they would take as much memory as the images.
    if header.state is SlotState.SEALED and anchors.bit_length() < header.image_len // _KEPT_PART:
        segment.anchors[index] = header, anchors
    return anchors


def _name_of(item: msgspec.Raw, number: int) -> str:
    try:
        found = unpack(_item, item)
        if isinstance(found, list):
            found = unpack(_text, found[0])
    except ValueError:
        return f"operator {number}"
    return found.name if isinstance(found, _Named) else found
