"""The messages between daemons: closed, typed, validated; carried as control messages of a fabric.

A request is answered by its reply or by `PeerRefused`. The sender of a one-way message ignores the answer
(`PeerDone`). Slot headers are the 112 bytes of the segment format, descriptors its msgpack; both are checked
where they are used.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ckptd.transport.messages import (
    Blob,
    Count,
    Epoch,
    GetHoldings,
    HeaderBytes,
    HeldSlot,
    Holdings,
    ImageDigest,
    Iteration,
    KnownEpoch,
    KnownImageDigest,
    Labels,
    Name,
    Rank,
    RunRecord,
    ShortText,
    SlotIndex,
    Text,
)
from ckptd.transport.verbs import FileRange
from ckptd.unpacking import unpack

PEER_PROTOCOL_VERSION = 3
Token = Annotated[bytes, Meta(min_length=16, max_length=16)]
Ticket = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Span = Annotated[int, Meta(ge=0, le=1 << 15)]


class PeerHello(Struct, frozen=True, tag=True):
    """The first message to a peer, and the later pings. ``boot_id`` is new at each start of a daemon.

    ``endpoint`` and ``public_key``: where the sender is reached now ("": not told).
    """

    protocol: int
    version: ShortText
    node: Name
    boot_id: ShortText
    labels: Labels = {}
    endpoint: Text = ""
    public_key: ShortText = ""


class PeerWelcome(Struct, frozen=True, tag=True):
    """The same of the daemon that answers."""

    protocol: int
    version: ShortText
    node: Name
    boot_id: ShortText
    labels: Labels = {}
    free_bytes: Count = 0


class OpenReplica(Struct, frozen=True, tag=True):
    """Make (or find) the replica of a segment, with room for two suffixes of ``span`` snapshots.

    ``epoch`` and ``epoch_start`` free the slots of an abandoned history. ``boot_id`` is the sender's
    (`PeerHello`): what another boot of it had begun ends once that boot is known to be gone.
    """

    job: Name
    run: Name
    rank: Rank
    origin: ShortText
    descriptor: Blob
    slot_bytes: Count
    num_slots: Annotated[int, Meta(ge=1, le=1 << 16)]
    epoch: Epoch
    epoch_start: Iteration
    span: Annotated[int, Meta(ge=1, le=1 << 15)] = 1
    boot_id: ShortText = ""


class ReplicaOpened(Struct, frozen=True, tag=True):
    """The replica exists; ``lease`` names it until this daemon restarts, ``held`` is what it holds already.

    ``boot_id`` is that of the daemon that answers (`PeerHello`): answers of another boot of it are void.
    """

    lease: Ticket
    held: tuple[HeldSlot, ...]
    boot_id: ShortText = ""


class BeginSlot(Struct, frozen=True, tag=True):
    """Ask to put the snapshot with this header.

    ``floor``, ``horizon``, ``span`` and ``epoch`` are what the run agreed on, as far as the sender knows
    (`ckptd.core.replication.replicas.Promise`; a snapshot may be of an earlier epoch; -1: of none). A host
    without a rank of the run is in no tree, and would keep everything without them.

    ``oldest``: of a boundary log, the oldest iteration that the primary holds in this generation (-1:
    unknown).

    ``gradient_bytes``: so many bytes behind the image, at most, have the gradients from which a peer that
    holds the snapshot of iteration ``base`` can compute this one (docs/recompute.md); 0: none.
    """

    lease: Ticket
    header: HeaderBytes
    anchors: Blob
    floor: Iteration = -1
    horizon: Iteration = -1
    span: Span = 1
    epoch: KnownEpoch = -1
    oldest: Iteration = -1
    gradient_bytes: Count = 0
    base: Iteration = -1


class SlotGranted(Struct, frozen=True, tag=True):
    """Put the image into this region, then seal.

    ``recomputes``: or put what does not follow from the gradients, and the gradients behind the image.
    ``why_whole``: gradients were offered, and the image is needed for this reason.
    """

    ticket: Ticket
    region: Ticket
    token: Token
    length: Count
    file: FileRange | None = None
    recomputes: bool = False
    why_whole: Text = ""


class SealSlot(Struct, frozen=True, tag=True):
    """All bytes are there: verify the image against its digests and against this cryptographic digest of the
    whole image, then show it to recovery. ``recompute``: first compute what is missing from the gradients.
    """

    ticket: Ticket
    digest: ImageDigest
    recompute: bool = False


class AbortSlot(Struct, frozen=True, tag=True):
    """The sender gives this slot up."""

    ticket: Ticket


class OpenRead(Struct, frozen=True, tag=True):
    """Ask to get a sealed snapshot, by segment name, slot and sequence number. ``boot_id`` as in
    `OpenReplica`.
    """

    job: Name
    run: Name
    name: ShortText
    slot: SlotIndex
    sequence: Count
    boot_id: ShortText = ""


class ReadOpened(Struct, frozen=True, tag=True):
    """Get the snapshot from this region. It stays until `CloseRead`, or until nothing was read for a minute.

    ``digest``: the cryptographic digest that the holder vouches for; "": not computed yet, ask by
    `GetDigest`.
    """

    region: Ticket
    token: Token
    length: Count
    header: HeaderBytes
    file: FileRange | None = None
    digest: KnownImageDigest = ""


class GetDigest(Struct, frozen=True, tag=True):
    """Ask for the cryptographic digest of a region that `ReadOpened` returned."""

    region: Ticket


class OpenedDigest(Struct, frozen=True, tag=True):
    """The answer to `GetDigest`."""

    digest: ImageDigest


class GetDescriptor(Struct, frozen=True, tag=True):
    """Ask for the descriptor of a segment that the peer holds."""

    job: Name
    run: Name
    name: ShortText


class Descriptor(Struct, frozen=True, tag=True):
    """The answer to `GetDescriptor`."""

    descriptor: Blob
    num_slots: Annotated[int, Meta(ge=1, le=1 << 16)]
    slot_bytes: Count


class CloseRead(Struct, frozen=True, tag=True):
    """The region was read."""

    region: Ticket


class DoubtSlot(Struct, frozen=True, tag=True):
    """The bytes that came from this slot do not match its digests: verify it."""

    job: Name
    run: Name
    name: ShortText
    slot: SlotIndex
    sequence: Count


class EndRun(Struct, frozen=True, tag=True):
    """The sender no longer replicates this run: it is over, or was forgotten."""

    job: Name
    run: Name


class Floor(Struct, frozen=True, tag=True):
    """What the nodes of a run agree on, up or down a tree (`ckptd.core.replication.floor`).

    ``members_id`` names the tree; ``kind`` is below (to the parent) or floor (to a child). ``counted`` and
    the ``carried`` fields go up only. ``sequence`` orders the messages of one boot of the sender,
    ``boot_id``.
    """

    job: Name
    run: Name
    members_id: ShortText
    kind: Annotated[str, Meta(pattern="^(below|floor)$")]
    value: Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)]
    sequence: Count
    horizon: Iteration = -1
    span: Span = 1
    counted: Count = 65_535
    carried_epoch: KnownEpoch = -1
    carried_floor: Iteration = -1
    boot_id: ShortText = ""


class TellDigests(Struct, frozen=True, tag=True):
    """Digests of the tensors that a rank's snapshot has in common with those of other ranks, for the node
    that compares them (`ckptd.core.replication.replica_comparison.RankDigests`). ``group`` names these ranks.
    """

    job: Name
    run: Name
    rank: Rank
    group: ShortText
    num_ranks: Annotated[int, Meta(ge=2, le=1 << 24)]
    epoch: Epoch
    iteration: Iteration
    tensors: Count
    digests: Annotated[bytes, Meta(max_length=1 << 20)]


class TellRun(Struct, frozen=True, tag=True):
    """The members of a run, for a member without a rank of it: no trainer joins there."""

    record: RunRecord


class PeerDone(Struct, frozen=True, tag=True):
    """Done."""


class PeerRefused(Struct, frozen=True, tag=True):
    """Refused; ``code`` is one word: protocol, unknown, busy, quota, held, stale, digest, recompute,
    bad_message, internal.
    """

    code: ShortText
    message: Text
    hint: Text = ""


PeerRequest = (
    PeerHello
    | GetHoldings
    | OpenReplica
    | BeginSlot
    | SealSlot
    | AbortSlot
    | OpenRead
    | GetDescriptor
    | GetDigest
    | CloseRead
    | DoubtSlot
    | EndRun
    | Floor
    | TellDigests
    | TellRun
)
PeerReply = (
    PeerWelcome
    | Holdings
    | ReplicaOpened
    | SlotGranted
    | ReadOpened
    | OpenedDigest
    | Descriptor
    | PeerDone
    | PeerRefused
)
PeerMessage = PeerRequest | PeerReply

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)


def encode_peer(message: PeerMessage) -> bytes:
    return _encoder.encode(message)


def decode_peer(body: bytes) -> PeerMessage:
    """Decode one message.

    Raises:
        ValueError: not one of ours, or its values are out of range.
    """
    try:
        return unpack(_decoder, body)
    except ValueError as error:
        raise ValueError(f"not a message between daemons: {error}") from error
