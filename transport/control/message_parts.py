"""What the words of the control protocol are made of: bounded fields, cards of nodes, and what is
held where.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

__all__ = [
    "Blob",
    "Count",
    "Epoch",
    "Generation",
    "HeaderBytes",
    "HeldSegment",
    "HeldSlot",
    "Holdings",
    "ImageDigest",
    "Iteration",
    "KnownEpoch",
    "KnownImageDigest",
    "Labels",
    "Member",
    "Metrics",
    "Name",
    "NodeCard",
    "NumSlots",
    "Rank",
    "RankMismatch",
    "RefusalCode",
    "ReplayFailure",
    "RunRecord",
    "SegmentInfo",
    "ShortText",
    "SlotIndex",
    "Text",
]

Name = Annotated[str, Meta(pattern=r"^(?!\.\.?\Z)[A-Za-z0-9._-]{1,64}\Z")]
Rank = Annotated[int, Meta(ge=0, lt=1 << 24)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Generation = Annotated[int, Meta(ge=0, lt=1 << 31)]
SlotIndex = Annotated[int, Meta(ge=0, lt=1 << 16)]
NumSlots = Annotated[int, Meta(ge=1, le=1 << 16)]
Epoch = Annotated[int, Meta(ge=0, lt=1 << 32)]
KnownEpoch = Annotated[int, Meta(ge=-1, lt=1 << 32)]  # -1: none is known
Iteration = Annotated[int, Meta(ge=-1, lt=1 << 62)]
Text = Annotated[str, Meta(max_length=4096)]
ShortText = Annotated[str, Meta(max_length=256)]
Metrics = Annotated[dict[ShortText, float], Meta(max_length=256)]
Blob = Annotated[bytes, Meta(max_length=16 << 20)]
HeaderBytes = Annotated[bytes, Meta(min_length=112, max_length=112)]
ImageDigest = Annotated[str, Meta(pattern=r"^(blake3|sha256):[0-9a-f]{64}\Z")]
KnownImageDigest = Annotated[str, Meta(pattern=r"^((blake3|sha256):[0-9a-f]{64})?\Z")]  # "": none is known
Labels = Annotated[dict[ShortText, ShortText], Meta(max_length=32)]


class RefusalCode(StrEnum):
    """Why the daemon says no. `Refused.code` is one of these words."""

    PROTOCOL = "protocol"  # another protocol version
    BAD_MESSAGE = "bad_message"  # not one of ours, or its values are out of range
    NO_SESSION = "no_session"  # attach first (the daemon was restarted, or never knew you)
    RANK_TAKEN = "rank_taken"  # a live process owns this rank
    TOPOLOGY = "topology"  # same job, run and rank, but another world size or topology
    LAYOUT_VERSION = "layout_version"  # the segments were written by another client layout
    QUOTA = "quota"  # the daemon's memory quota is too small
    SEGMENT_FS = "segment_fs"  # the filesystem under the segments is too small
    BAD_DESCRIPTOR = "bad_descriptor"  # a segment descriptor that contradicts the session
    NOT_FOUND = "not_found"  # no such job, run or generation
    IN_USE = "in_use"  # a live trainer still owns it
    DAEMON_DIFFERS = "daemon_differs"  # it has other settings than the trainer was told to expect
    STALE_EPOCH = "stale_epoch"  # the run has been recovered again since
    NOT_READY = "not_ready"  # what is in memory cannot be read yet: ask again
    BUSY = "busy"  # too much is under way for you already: try again
    CLOSING = "closing"  # the daemon is shutting down
    INTERNAL = "internal"  # a bug of ours; the daemon's log has the traceback


class NodeCard(Struct, frozen=True, tag=True):
    """How peers reach a node, and its memory quota (0: unknown).

    ``endpoint`` is "" where its daemon has no peer listener; ``public_key`` is Z85 or "".
    """

    node: Name
    endpoint: Text = ""
    public_key: ShortText = ""
    labels: Labels = {}
    boot_id: ShortText = ""
    memory_bytes: Count = 0


class Member(Struct, frozen=True, tag=True):
    """One node of a run and the ranks that live on it, with the bytes of each rank's ring."""

    card: NodeCard
    ranks: Annotated[tuple[Rank, ...], Meta(max_length=1 << 16)]
    ring_bytes: Annotated[tuple[Count, ...], Meta(max_length=1 << 16)] = ()


class RunRecord(Struct, frozen=True, tag=True):
    """Who takes part in a run, as a node knows it over all lives of its daemon (docs/replication.md
    section 2a).

    ``members`` are those of ``epoch``, with what identifies each of them; ``former`` took part
    before, and may hold what this epoch cannot replace until its history has a floor. ``epochs``:
    of each epoch that was heard of, where it began and which one it follows (-1: not told).
    ``recoverable``: of every rank of this node, or of every rank, a suffix of this history was
    complete once. ``forgotten``: this epoch and all before it were forgotten by command. ``lost``:
    the file was damaged, so that nobody knows who takes part.
    """

    job: Name
    run: Name
    epoch: KnownEpoch = -1
    epoch_start: Iteration = -1
    members: tuple[Member, ...] = ()
    former: tuple[NodeCard, ...] = ()
    epochs: tuple[tuple[Epoch, Iteration, KnownEpoch], ...] = ()
    recoverable: bool = False
    forgotten: KnownEpoch = -1
    lost: bool = False

    @property
    def cards(self) -> tuple[NodeCard, ...]:
        """How to reach everybody who takes part or took part."""
        return (*(member.card for member in self.members), *self.former)

    @property
    def newest_epoch(self) -> int:
        """The highest that is known; -1: none."""
        return max(self.epoch, self.forgotten, *(epoch for epoch, _, _ in self.epochs), -1)


class HeldSlot(Struct, frozen=True, tag=True):
    """One sealed snapshot: where it lies, its header, and which operators it anchors (bitmap,
    little-endian).
    """

    slot: SlotIndex
    header: HeaderBytes
    anchors: Blob


class HeldSegment(Struct, frozen=True, tag=True):
    """A segment of one rank. ``own`` is false for a replica; ``origin`` names the primary that it
    copies (or is).

    ``facts``: of a boundary log, with whom its rank communicates in a step
    (`ckptd.core.recovery.recovery_facts.facts_to_wire`).
    """

    name: ShortText
    rank: Rank
    own: bool
    origin: ShortText
    generation: Generation
    world_size: int
    window: int
    num_operators: Count
    operators_id: ShortText
    slot_bytes: Count
    num_slots: NumSlots
    slots: tuple[HeldSlot, ...]
    facts: Blob = b""


class SegmentInfo(Struct, frozen=True, tag=True):
    """One segment file that the trainer may map."""

    path: Text
    generation: Generation
    slot_bytes: Count
    num_slots: NumSlots


class RankMismatch(Struct, frozen=True, tag=True):
    """What one rank recomputed otherwise than it was recorded: how many things, and the first of
    them in words.

    ``expected`` and ``got`` are digests, over all that differs, of what was recorded and of what
    was recomputed.
    """

    rank: Rank
    what: Text
    count: Count
    expected: ShortText
    got: ShortText


class ReplayFailure(Struct, frozen=True, tag=True):
    """A replay that did not reproduce at ``iteration`` what was recorded there, and what follows
    from it (`ckptd.core.recovery.quarantine.ReplayVerdict`).

    ``snapshots``: iteration, epoch and start of that epoch of every snapshot that the replay had
    used by then, oldest first. ``ranks``: the first of the ranks that differ. ``result`` is equal
    for replays that came to the same result on all ranks. ``freezing``: how it was replayed.
    """

    iteration: Iteration
    snapshots: Annotated[
        tuple[tuple[Iteration, Epoch, Iteration], ...], Meta(min_length=1, max_length=1 << 16)
    ]
    ranks: Annotated[tuple[RankMismatch, ...], Meta(max_length=16)]
    result: ShortText
    freezing: ShortText
    verdict: ShortText
    reason: Text = ""


class Holdings(Struct, frozen=True, tag=True):
    """Everything sealed that this node holds of a run, and the highest epoch of it that the node
    knows (-1: none).

    An epoch may have begun and nothing have been sealed in it: then no segment tells of it.
    """

    node: Name
    segments: tuple[HeldSegment, ...]
    epoch: KnownEpoch = -1
    logs: tuple[HeldSegment, ...] = ()  # boundary logs, apart, so that nobody plans with them
    parked: tuple[HeldSegment, ...] = ()  # parked states, apart for the same reason
    record: RunRecord | None = None  # who takes part, as this node knows it; None: it never heard of the run
    failures: tuple[ReplayFailure, ...] = ()  # replays that did not reproduce
