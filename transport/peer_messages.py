"""What daemons say to each other: closed, typed, validated; carried as control messages of a fabric.

A request is answered by its reply or by `PeerRefused`. One-way messages are answered by `PeerDone`
and nobody waits for it. Slot headers travel as the 112 bytes of the segment format, descriptors as
its msgpack: both are checked where they are used.
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
from ckptd.unpacking import unpack

__all__ = [
    "PEER_PROTOCOL_VERSION",
    "AbortSlot",
    "BeginSlot",
    "CloseRead",
    "Descriptor",
    "DoubtSlot",
    "EndRun",
    "Floor",
    "GetDescriptor",
    "GetDigest",
    "OpenRead",
    "OpenReplica",
    "OpenedDigest",
    "PeerDone",
    "PeerHello",
    "PeerMessage",
    "PeerRefused",
    "PeerWelcome",
    "ReadOpened",
    "RegionFile",
    "ReplicaOpened",
    "SealSlot",
    "SlotGranted",
    "TellRun",
    "decode_peer",
    "encode_peer",
]

PEER_PROTOCOL_VERSION = 3
Token = Annotated[bytes, Meta(min_length=16, max_length=16)]
Ticket = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Span = Annotated[int, Meta(ge=0, le=1 << 15)]


class PeerHello(Struct, frozen=True, tag=True):
    """First words to a peer, and the ping afterwards: ``boot_id`` is new at each start of a daemon."""

    protocol: int
    version: ShortText
    node: Name
    boot_id: ShortText
    labels: Labels = {}


class PeerWelcome(Struct, frozen=True, tag=True):
    """The same about the one who answers."""

    protocol: int
    version: ShortText
    node: Name
    boot_id: ShortText
    labels: Labels = {}
    free_bytes: Count = 0


class OpenReplica(Struct, frozen=True, tag=True):
    """Make (or find) the replica of a segment, with room for two suffixes of ``span`` snapshots.

    ``epoch`` and ``epoch_start`` free what belongs to an abandoned history. ``boot_id`` is the
    sender's (`PeerHello`): what another boot of it had begun ends when it is known to be gone.
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
    """The replica is there; ``lease`` names it until this daemon restarts, ``held`` is what it holds already.

    ``boot_id`` is that of the daemon that answers (`PeerHello`): what another boot of it told holds
    no longer.
    """

    lease: Ticket
    held: tuple[HeldSlot, ...]
    boot_id: ShortText = ""


class BeginSlot(Struct, frozen=True, tag=True):
    """I want to put the snapshot with this header.

    What the run agreed on, as far as the sender knows (`ckptd.core.replication.replicas.Promise`),
    comes along, and in which epoch (a snapshot may be of an earlier one; -1: in none): a host
    without a rank of its own is in no tree and would keep everything.

    ``oldest``: of a boundary log, the oldest iteration that the primary holds in this generation
    (-1: not told).
    """

    lease: Ticket
    header: HeaderBytes
    anchors: Blob
    floor: Iteration = -1
    horizon: Iteration = -1
    span: Span = 1
    epoch: KnownEpoch = -1
    oldest: Iteration = -1


class RegionFile(Struct, frozen=True):
    """Where a region lies, for a peer that may be on the same host (`ckptd.transport.fabric.short_cut`)."""

    path: Text
    device: Annotated[int, Meta(ge=0)]
    inode: Annotated[int, Meta(ge=0)]
    offset: Count


class SlotGranted(Struct, frozen=True, tag=True):
    """Put the image into this region, then seal."""

    ticket: Ticket
    region: Ticket
    token: Token
    length: Count
    file: RegionFile | None = None


class SealSlot(Struct, frozen=True, tag=True):
    """Every byte is there: verify the image against its digests and this cryptographic one of all
    of it, and show it to recovery.
    """

    ticket: Ticket
    digest: ImageDigest


class AbortSlot(Struct, frozen=True, tag=True):
    """I will not go on with this slot."""

    ticket: Ticket


class OpenRead(Struct, frozen=True, tag=True):
    """I want to get a sealed snapshot: by segment name, slot and sequence number. ``boot_id`` as in
    `OpenReplica`.
    """

    job: Name
    run: Name
    name: ShortText
    slot: SlotIndex
    sequence: Count
    boot_id: ShortText = ""


class ReadOpened(Struct, frozen=True, tag=True):
    """Get it from this region. It stays until `CloseRead`, or until nothing was read for a minute.

    ``digest``: the cryptographic one that the holder vouches for; "": it was not made yet, ask by
    `GetDigest`.
    """

    region: Ticket
    token: Token
    length: Count
    header: HeaderBytes
    file: RegionFile | None = None
    digest: KnownImageDigest = ""


class GetDigest(Struct, frozen=True, tag=True):
    """The cryptographic digest of what you opened for me to read."""

    region: Ticket


class OpenedDigest(Struct, frozen=True, tag=True):
    """It."""

    digest: ImageDigest


class GetDescriptor(Struct, frozen=True, tag=True):
    """The descriptor of a segment that you hold."""

    job: Name
    run: Name
    name: ShortText


class Descriptor(Struct, frozen=True, tag=True):
    """It."""

    descriptor: Blob
    num_slots: Annotated[int, Meta(ge=1, le=1 << 16)]
    slot_bytes: Count


class CloseRead(Struct, frozen=True, tag=True):
    """I have it."""

    region: Ticket


class DoubtSlot(Struct, frozen=True, tag=True):
    """What I got from this slot does not match its digests: look at it."""

    job: Name
    run: Name
    name: ShortText
    slot: SlotIndex
    sequence: Count


class EndRun(Struct, frozen=True, tag=True):
    """I no longer replicate this run: it is over, or was forgotten."""

    job: Name
    run: Name


class Floor(Struct, frozen=True, tag=True):
    """What the nodes of a run agree on, up or down a tree (`ckptd.core.replication.floor`).

    ``members_id`` names the tree, ``kind`` is below (to the parent) or floor (to a child);
    ``counted`` and what is carried go up only. ``sequence`` orders what one boot of the sender
    tells; of which boot it is says ``boot_id``.
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


class TellRun(Struct, frozen=True, tag=True):
    """Who takes part in a run, for a member that has no rank of it: nobody joins there."""

    record: RunRecord


class PeerDone(Struct, frozen=True, tag=True):
    """It is done."""


class PeerRefused(Struct, frozen=True, tag=True):
    """No; ``code`` is one word: protocol, unknown, busy, quota, held, stale, digest, bad_message,
    internal.
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
    """One message as msgpack."""
    return _encoder.encode(message)


def decode_peer(body: bytes) -> PeerMessage:
    """The message in a body.

    Raises:
        ValueError: not one of ours, or its values are out of range.
    """
    try:
        return unpack(_decoder, body)
    except ValueError as error:
        raise ValueError(f"not a message between daemons: {error}") from error
