"""What a trainer and its daemon say to each other."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ckptd.transport.control.message_parts import (
    Blob,
    Count,
    Epoch,
    Generation,
    HeaderBytes,
    Iteration,
    KnownEpoch,
    Member,
    Metrics,
    Name,
    NodeCard,
    NumSlots,
    Rank,
    ReplayFailure,
    SegmentInfo,
    ShortText,
    SlotIndex,
    Text,
)

__all__ = [
    "Attach",
    "Attached",
    "Detach",
    "Drop",
    "Fetch",
    "FetchPiece",
    "FetchSource",
    "FetchState",
    "Filled",
    "GetFetch",
    "Join",
    "Notice",
    "ParkOutcome",
    "Report",
    "Reserve",
    "ReserveBeside",
    "Reserved",
    "TellReplay",
]

# -- trainer -> daemon ---------------------------------------------------------------------------


class Attach(Struct, frozen=True, tag=True):
    """Ask to own one rank of a run.

    `needed_bytes` is all the segment memory the rank expects to hold and `needed_text` says how
    that sum comes about ("34 slots of 1.2 GiB"); `held` lists the generations whose owner lock
    the asking process already holds, as it does when the daemon was restarted under it. `token` is
    random, made once by each process: with the one of a live owner of the rank this is that owner
    on a new connection, and `held` is believed; without it the rank is taken.
    """

    job: Name
    run: Name
    rank: Rank
    world_size: Annotated[int, Meta(ge=1, lt=1 << 24)]
    topology: Text
    layout_version: Annotated[int, Meta(ge=0, lt=1 << 31)]
    needed_bytes: Count
    needed_text: Text = ""
    held: Annotated[tuple[Generation, ...], Meta(max_length=4096)] = ()
    token: Annotated[bytes, Meta(max_length=64)] = b""


class Reserve(Struct, frozen=True, tag=True):
    """Ask for the next generation: `num_slots` slots of `slot_bytes`, ready to be mapped.

    `descriptor` is the msgpack of a `ckptd.core.slots.segment_format.SegmentDescriptor`; the daemon checks
    its identity against the session and fills in generation, node id and creation time.
    """

    slot_bytes: Annotated[int, Meta(ge=1, lt=1 << 62)]
    num_slots: NumSlots
    descriptor: Blob


class ReserveBeside(Struct, frozen=True, tag=True):
    """As `Reserve`, for what lies beside a ring: a boundary log, or parked state, as the descriptor says.

    A message of its own, so that a daemon that knows of nothing but snapshots refuses it.
    """

    slot_bytes: Annotated[int, Meta(ge=1, lt=1 << 62)]
    num_slots: NumSlots
    descriptor: Blob


class Filled(Struct, frozen=True, tag=True):
    """A slot is filled; the daemon may digest and seal it."""

    generation: Generation
    slot: SlotIndex
    iteration: Iteration


class Drop(Struct, frozen=True, tag=True):
    """The trainer no longer needs this generation."""

    generation: Generation


class Report(Struct, frozen=True, tag=True):
    """The trainer's own counters, shown by `ckptctl status`."""

    step: Iteration
    metrics: Metrics


class ParkOutcome(Struct, frozen=True, tag=True):
    """What came of the request with this number in a `Pong`: the iteration that is parked, or -1,
    and why it is not.
    """

    number: Count
    iteration: Iteration
    reason: Text = ""


class Notice(Struct, frozen=True, tag=True):
    """Something worth keeping in the daemon's event log; level is info, warning or error."""

    level: Annotated[str, Meta(pattern="^(info|warning|error)$")]
    kind: ShortText
    message: Text


class Detach(Struct, frozen=True, tag=True):
    """Orderly end of a session; `final` says that the run is over and its memory may be freed."""

    final: bool = False


class TellReplay(Struct, frozen=True, tag=True):
    """A replay of this session's run did not reproduce what was recorded; None: one did, and the
    run goes on from there.
    """

    failure: ReplayFailure | None = None


class Join(Struct, frozen=True, tag=True):
    """Who takes part in the run that this session's rank is of; the same from every rank.

    ``epoch`` counts the recoveries of the run; its history goes back to ``epoch_start`` and no
    further into older ones (-1: to nothing). ``replicas`` is how many copies the trainer asks for;
    -1 leaves it to the daemon's configuration. ``follows`` is the highest epoch that anybody knew
    of before (-1: not told): a node that took part last in another one knows nothing of what was
    agreed on since.
    """

    epoch: Epoch
    epoch_start: Iteration
    members: Annotated[tuple[Member, ...], Meta(max_length=1 << 20)]
    replicas: Annotated[int, Meta(ge=-1, le=64)] = -1
    follows: KnownEpoch = -1


class FetchSource(Struct, frozen=True, tag=True):
    """Who holds a snapshot, and where."""

    node: Name
    segment: ShortText
    slot: SlotIndex


class FetchPiece(Struct, frozen=True, tag=True):
    """One snapshot to bring here, and its holders, the preferred one first."""

    header: HeaderBytes
    sources: Annotated[tuple[FetchSource, ...], Meta(min_length=1, max_length=256)]


class Fetch(Struct, frozen=True, tag=True):
    """Bring these snapshots of the session's rank here, into a new generation: piece i into slot i,
    in this order.

    Answered by `Reserved` as soon as the segment is there; each slot is sealed when its image is
    complete and verified.

    With a ``kind`` ("log", ...) the pieces are slots of segments of that kind, of rank ``rank`` of
    the same run, and the trainer is to read them: they become no part of its memory. `GetFetch` and
    `Drop` take the generation that is told, and it goes with the session.
    """

    pieces: Annotated[tuple[FetchPiece, ...], Meta(min_length=1, max_length=1 << 16)]
    cards: Annotated[tuple[NodeCard, ...], Meta(max_length=1 << 20)] = ()
    kind: ShortText = ""
    rank: Annotated[int, Meta(ge=-1, lt=1 << 24)] = -1


class GetFetch(Struct, frozen=True, tag=True):
    """How far is the fetch into this generation?"""

    generation: Generation


# -- daemon -> trainer ---------------------------------------------------------------------------


class FetchState(Struct, frozen=True, tag=True):
    """``state`` is running, done or failed (``reason`` says why); bytes per node they came from."""

    state: str
    reason: str
    pieces_done: int
    bytes_done: int
    bytes_total: int
    by_node: dict[str, int]


class Attached(Struct, frozen=True, tag=True):
    """The rank is yours: its segments, oldest generation first, and the memory left for it.

    ``replication_slack``: slots that its ring should have beyond what one node needs. ``persists``:
        snapshots go to storage, so that it should have those of one more suffix, which may stay
        while it is uploaded. ``logs``: the rank's boundary logs, ``parked`` its parked states,
        oldest generation first. ``notes``: what else is here of this job, which this rank does not
        get.
    """

    segments: tuple[SegmentInfo, ...]
    quota_bytes: int
    available_bytes: int
    replication_slack: int = 0
    persists: bool = False
    logs: tuple[SegmentInfo, ...] = ()
    parked: tuple[SegmentInfo, ...] = ()
    notes: tuple[str, ...] = ()


class Reserved(Struct, frozen=True, tag=True):
    """The new generation, pre-touched; `mlocked` says whether it is also locked in memory."""

    segment: SegmentInfo
    mlocked: bool = False
