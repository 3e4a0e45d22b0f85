"""Messages between the daemon and its store keeper: msgpack frames over a socket pair, each preceded by its
length (u32).

Both ends are of one installation and one user, so there is no version and no authentication; sizes are
bounded all the same.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct

from ckptd.core.slots.slots import SnapshotKey
from ckptd.unpacking import unpack

_LENGTH = struct.Struct("<I")
_MAX_FRAME = 256 << 20


class RankName(Struct, frozen=True, array_like=True):
    """A rank of a run."""

    job: str
    run: str
    rank: int


class Retain(Struct, frozen=True):
    """The checkpoints that retention keeps: the newest ``last``, the first of every ``every`` iterations
    (0: off), and those younger than ``for_s`` (0: off).
    """

    last: int
    every: int
    for_s: float


# -- daemon -> keeper ----------------------------------------------------------------------------


class Configure(Struct, frozen=True, tag=True):
    """The first message: the store and its settings."""

    url: str
    options: dict[str, Any]
    backend: str
    threads: int
    bytes_per_s: float
    deadline_s: float
    read_back: bool
    retain: Retain
    sign_with: str = ""  # folder of the key that signs manifests; "": do not sign
    signers: str = ""  # folder of the keys of trusted signers; "": accept unsigned manifests


class OpenRank(Struct, frozen=True, tag=True):
    """Prepare to store snapshots of this rank; answered by `RunOpened`."""

    id: int
    rank: RankName
    epoch: int
    epoch_start: int


class SlotPlace(Struct, frozen=True, array_like=True):
    """A snapshot, and the slot of a segment file that holds it."""

    snapshot: SnapshotKey
    path: str
    index: int


class StoreSlot(Struct, frozen=True, tag=True):
    """Store the image in slot ``index`` of a segment file, if it still is that of ``snapshot``; answered by
    `StoredSlot`.

    ``newer``: what these snapshots have, too, may be left out (`ckptd.storage.reduced_image`).
    ``checkpoint``: of partial snapshots, all of the same checkpoint, oldest first, each with its phase: what
    the last checkpoint has of experts may stay (`ckptd.core.durable_experts`). ``newest``: the last of them,
    if its slot is held. ``another``: an older one whose slot is held, if there is one.
    """

    id: int
    rank: RankName
    snapshot: SnapshotKey
    path: str
    index: int
    newer: tuple[SlotPlace, ...] = ()
    checkpoint: tuple[tuple[SnapshotKey, int], ...] = ()
    newest: SlotPlace | None = None
    another: SlotPlace | None = None


class CommitRank(Struct, frozen=True, tag=True):
    """Write the manifest of the checkpoint made of these snapshots; answered by `Answer`."""

    id: int
    rank: RankName
    world_size: int
    end: int
    stride: int
    snapshots: list[SnapshotKey]
    descriptor: bytes
    slot_bytes: int
    window: int
    num_slots: int


class FindStored(Struct, frozen=True, tag=True):
    """Find the committed checkpoints of these ranks; answered by `Found`.

    ``ranks``: None for all. ``left_out``: iteration and epoch of quarantined snapshots; checkpoints with one
    of them are skipped.
    ``begun``: the epochs that the nodes of the run know, with their starts. What a keeper knows of them by
    itself does not count: all nodes must offer the same checkpoints, and that of a new node knows nothing.
    """

    id: int
    job: str
    run: str
    ranks: list[int] | None
    left_out: list[tuple[int, int]] = []
    begun: dict[int, int] = {}


class FindWorlds(Struct, frozen=True, tag=True):
    """Find the incarnations of an elastic run and their committed checkpoints; answered by `FoundWorlds`.

    ``again``: the start found damaged checkpoints, so they are skipped; a first request considers all.
    """

    id: int
    job: str
    run: str
    again: bool


class OfferStored(Struct, frozen=True, tag=True):
    """Find these ranks' part of the committed checkpoint that ends at ``end``; answered by `Found`."""

    id: int
    job: str
    run: str
    end: int
    ranks: list[int]


class ReadRange(Struct, frozen=True, tag=True):
    """Read bytes of a stored snapshot into a segment file, at an offset; answered by `Answer`."""

    id: int
    segment: str
    index: int
    offset: int
    length: int
    path: str
    file_offset: int


class DoubtStored(Struct, frozen=True, tag=True):
    """The bytes read of this checkpoint do not match their digests: do not offer it any more."""

    segment: str


class KeeperPing(Struct, frozen=True, tag=True):
    """Answered by `KeeperPong` at once, whatever the keeper is working on."""


ToKeeper = (
    Configure
    | OpenRank
    | StoreSlot
    | CommitRank
    | FindStored
    | FindWorlds
    | OfferStored
    | ReadRange
    | DoubtStored
    | KeeperPing
)


# -- keeper -> daemon ----------------------------------------------------------------------------


class FailureCode(StrEnum):
    """The reason of a `KeeperFailed`."""

    LOST = "lost"  # the slot holds another snapshot
    DAMAGED = "damaged"  # a stored object is missing or too short: a retry is useless
    STORE = "store"  # the store refused, or failed for too long
    FENCED = "fenced"  # another run uses the names
    UNKNOWN = "unknown"  # the keeper does not know the snapshot or checkpoint (any more)
    INTERNAL = "internal"


class RunOpened(Struct, frozen=True, tag=True):
    """``committed`` is the end of the newest committed checkpoint of the run (-1: none)."""

    id: int
    committed: int


class StoredSlot(Struct, frozen=True, tag=True):
    """The snapshot is in storage; ``uploaded_bytes`` of its ``size_bytes`` had to be uploaded.

    ``for_later``: another checkpoint may refer to it, too. False: not all of it is stored, or nothing.
    """

    id: int
    size_bytes: int
    uploaded_bytes: int
    for_later: bool = True


class Answer(Struct, frozen=True, tag=True):
    """The request succeeded."""

    id: int


class KeeperFailed(Struct, frozen=True, tag=True):
    """The request failed."""

    id: int
    code: FailureCode
    reason: str


class CommittedCheckpoint(Struct, frozen=True):
    """One rank's part of a committed checkpoint; `ReadRange.segment` refers to its ``name``."""

    name: str
    rank: int
    end: int
    epoch: int
    world_size: int
    window: int
    slot_bytes: int
    num_slots: int
    descriptor: bytes
    lengths: list[int]  # of each snapshot's image
    headers: list[bytes]  # of each snapshot, as in a slot
    anchors: list[bytes]  # little-endian bitmaps
    digests: list[str]  # cryptographic, of each snapshot's image; "" where the manifest has none


class Found(Struct, frozen=True, tag=True):
    """The checkpoints, newest first, one entry per rank."""

    id: int
    checkpoints: list[CommittedCheckpoint]
    epoch: int = -1  # the highest that the store shows, also of what cannot be restored


class WholeWorld(Struct, frozen=True):
    """A committed checkpoint of an incarnation; ``sizes``: bytes of each rank's objects of iteration
    ``end``.
    """

    world: int
    end: int
    sizes: list[int]


class FoundWorlds(Struct, frozen=True, tag=True):
    """The numbers of all incarnations, and their newest checkpoints, newest first, without the ``damaged``
    ones (world, end).
    """

    id: int
    numbers: list[int]
    checkpoints: list[WholeWorld]
    damaged: list[tuple[int, int]]


class Settled(Struct, frozen=True, tag=True):
    """The result after a rank's manifest: all ranks have committed the checkpoint, or some did not in time.

    ``epoch``: that of its last snapshot.
    """

    rank: RankName
    end: int
    epoch: int
    complete: bool
    missing: str


class RankFenced(Struct, frozen=True, tag=True):
    """After a rank's manifest, the store shows a later, unknown ``epoch``: another job uses the names."""

    rank: RankName
    epoch: int
    reason: str


class KeeperEvent(Struct, frozen=True, tag=True):
    """An event for the log, or a counter (``level`` "count")."""

    level: str
    kind: str
    message: str = ""
    amount: int = 1


class KeeperPong(Struct, frozen=True, tag=True):
    """The answer to `KeeperPing`."""


FromKeeper = (
    RunOpened
    | StoredSlot
    | Answer
    | KeeperFailed
    | Found
    | FoundWorlds
    | Settled
    | RankFenced
    | KeeperEvent
    | KeeperPong
)

_to_keeper = msgspec.msgpack.Decoder(ToKeeper)
_from_keeper = msgspec.msgpack.Decoder(FromKeeper)


class Channel:
    """One end of the connection; `receive` and `send` may be called from two different threads.

    Args:
        decode: for received messages: `decode_to_keeper` or `decode_from_keeper`.
    """

    def __init__(self, connection: socket.socket, decode: Callable[[bytes], Any]) -> None:
        self._socket, self._decode = connection, decode
        self._sending = threading.Lock()

    def send(self, message: Struct) -> None:
        """Send one message; blocks while the other end does not read. OSError: the other end is gone."""
        body = msgspec.msgpack.encode(message)
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> Any:
        """The next message; None when the other end is gone.

        Raises:
            OSError, ValueError: the connection failed, or the bytes are not a message.
        """
        head = self._exactly(_LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > _MAX_FRAME:
            raise ValueError(f"a frame of {length} bytes")
        body = self._exactly(length)
        return None if body is None else self._decode(body)

    def close(self) -> None:
        """Close the connection; a `receive` in another thread returns None."""
        with contextlib.suppress(OSError):  # the other end has closed it already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            if not piece:
                return None
            data += piece
        return bytes(data)


def decode_to_keeper(body: bytes) -> Any:
    """A `ToKeeper` message."""
    return unpack(_to_keeper, body, max_bytes=_MAX_FRAME)


def decode_from_keeper(body: bytes) -> Any:
    """A `FromKeeper` message."""
    return unpack(_from_keeper, body, max_bytes=_MAX_FRAME)
