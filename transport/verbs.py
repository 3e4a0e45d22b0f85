"""One-sided transfers over registered memory: the interface that every fabric implements (DESIGN §10).

A process *registers* a buffer and hands the region's key to a peer, by a message; the peer *puts*
bytes into the region or *gets* bytes out of it, without any code of the owner taking part. A
transfer is cut into chunks, each an operation of its own that may be repeated, reordered or lost
without harm: it names region, offset and length, and its bytes carry an xxh3_64 or, sealed, a tag.
So a transfer survives a lost connection (chunks not yet acknowledged are sent again), and nothing
is remembered between chunks.

Contract, held by ``tests/transport/contract.py`` for every fabric:

* A put completes ``ok`` when every byte lies in the region and was verified there (by its digest;
  by its tag on an encrypted stream); a get, when every byte lies in the target and was verified.
  What failed says why (`Fault`), and never raises in the caller's thread.
* A chunk that is not what was sent is not acknowledged. It is asked for again a few times, then the
  transfer fails with ``DIGEST``. The owner of a region shows its content to others only after the
  transfer, never before (a slot is ``filling``).
* A request outside of the region, without its token, from another peer than the one it was
  registered for, or after `Region.revoke`, touches no byte and is refused: ``REGION``, ``BOUNDS``
  or ``ACCESS``. It is counted; it closes nothing.
* Completions come exactly once, on a thread of the fabric, in any order. `Transfer.cancel`
  completes with ``CANCELLED`` unless the transfer was complete already; after the completion no
  byte of the caller's buffer is touched any more.
* Chunks in flight are bounded by credits that the receiving side grants, so a slow receiver costs
  its peers no memory.

Where both ends are on one host, and the region lies in a file that the peer can open, the bytes
need not go over a network: `ckptd.transport.fabric.short_cut`. All of the above holds for such
transfers, too, except that nothing is digested on a way that they do not take, and that what the
network is spared does not count against its limits.

Control messages are two-sided and opaque here: bytes in, bytes out. They are authenticated like
everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Flag, StrEnum, auto
from typing import Protocol

__all__ = [
    "Access",
    "Completion",
    "Fabric",
    "FabricCounters",
    "Fault",
    "FileRange",
    "Peer",
    "PeerAddress",
    "Region",
    "RegionKey",
    "Scope",
    "Transfer",
]

CHUNK_BYTES = 1 << 20


class Fault(StrEnum):
    """Why a transfer or a request failed."""

    CANCELLED = "cancelled"
    DEADLINE = "deadline"  # not complete in time, the peer unreachable or slow
    REGION = "region"  # no such region (any more), or the token is another's
    BOUNDS = "bounds"  # outside of the region
    ACCESS = "access"  # registered for another peer, or not for this operation
    DIGEST = "digest"  # what arrives differs from what was sent, again and again
    DAMAGED = "damaged"  # the holder has lost these bytes, and may have others of the region
    REFUSED = "refused"  # the peer does not take part: keys not trusted, another version
    CLOSED = "closed"  # this fabric was closed


class Access(Flag):
    """What peers may do with a region."""

    READ = auto()
    WRITE = auto()


@dataclass(frozen=True, slots=True)
class Scope:
    """For whom a region is registered: one peer (its node id; "" for any that is authenticated),
    one job, one run.
    """

    peer: str
    job: str = ""
    run: str = ""


@dataclass(frozen=True, slots=True)
class FileRange:
    """Where a buffer begins in a file, and which file that is: ``device`` and ``inode`` as
    `os.stat` has them.
    """

    path: str
    device: int
    inode: int
    offset: int


@dataclass(frozen=True, slots=True)
class RegionKey:
    """What a peer must know to reach a region; ``token`` is 16 random bytes, new with each registration.

    ``file``, if it lies in one, lets a peer on the same host copy by itself.
    """

    region: int
    token: bytes
    length: int
    file: FileRange | None = None


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a node listens, and who it must be: ``public_key`` is Z85 (40 characters), "" without
    authentication.
    """

    node: str
    endpoint: str
    public_key: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """How a transfer ended. ``fault`` is None if it succeeded."""

    fault: Fault | None
    detail: str
    size_bytes: int
    retries: int
    seconds: float

    @property
    def ok(self) -> bool:
        return self.fault is None


@dataclass(slots=True)
class FabricCounters:
    """Since the start; read without a lock."""

    put_bytes: int = 0
    got_bytes: int = 0
    received_bytes: int = 0  # written by peers into our regions, over the network
    served_bytes: int = 0  # read by peers out of our regions, over the network
    short_cut_bytes: int = 0  # of put_bytes and got_bytes: copied within this host, over no network
    chunk_retries: int = 0
    refused: int = 0  # requests refused: region, bounds, access
    bad_digests: int = 0
    forged: int = 0  # encrypted streams that were broken off because somebody else's bytes came on them
    garbage: int = 0  # frames that are nothing of ours
    unauthenticated: int = 0  # connections refused for their key
    revoked: int = 0  # connections and streams ended because their key is not trusted any more
    reconnects: int = 0


class Region(Protocol):
    """A registered buffer."""

    @property
    def key(self) -> RegionKey: ...

    def revoke(self) -> bool:
        """Refuse every further request from now on; returns at once, with whether nothing touches
        the buffer any more.

        Otherwise operations that began before may still read and write it, until a later call says
        so or `close` has returned.
        """

    def break_off(self) -> None:
        """After `revoke`: make what goes on end soon, as far as that is in our hands; takes a
        second at most.
        """

    def close(self) -> None:
        """Revoke, and wait until nothing touches the buffer any more: while a peer has stopped,
        that may take long.
        """


class Transfer(Protocol):
    """A put or a get in flight."""

    def cancel(self) -> None: ...

    def wait(self, timeout_s: float) -> Completion:
        """The completion.

        Raises:
            TimeoutError: not complete within ``timeout_s`` (the transfer goes on).
        """


Done = Callable[[Completion], None]
Answered = Callable[[bytes | Fault], None]


class Peer(Protocol):
    """One other node; connects, and connects again, by itself. All methods return at once."""

    @property
    def address(self) -> PeerAddress: ...

    def put(
        self,
        source: memoryview,
        target: RegionKey,
        *,
        offset: int = 0,
        deadline_s: float = 60.0,
        done: Done | None = None,
    ) -> Transfer:
        """Copy ``source`` into the region, from ``offset`` bytes on. ``source`` must not change meanwhile."""

    def get(
        self,
        source: RegionKey,
        target: memoryview,
        *,
        offset: int = 0,
        deadline_s: float = 60.0,
        done: Done | None = None,
    ) -> Transfer:
        """Fill ``target`` from the region, from ``offset`` bytes on."""

    def request(self, body: bytes, *, timeout_s: float, answered: Answered) -> None:
        """Send a control message; ``answered`` is called once, with the reply or a fault
        (``DEADLINE`` at the latest).

        It is sent at most once: ``DEADLINE`` (also at once, when the connection breaks) leaves open
        whether the peer acted on it.
        """

    def close(self) -> None:
        """Give up the connections; what is in flight completes with ``CLOSED``."""


# Called on a fabric's thread: the peer's node id, the body, and how to answer (once, from any
# thread, or never).
Serve = Callable[[str, bytes, Callable[[bytes], None]], None]


class Fabric(Protocol):
    """One node's end of all connections."""

    counters: FabricCounters

    @property
    def refused(self) -> dict[str, int]:
        """Connections and messages that were turned away, by reason, and of the addresses with the most."""

    @property
    def encryption(self) -> str:
        """What the bytes of snapshots are encrypted with on their way to peers who want no other;
        "plaintext" if with nothing.
        """

    @property
    def newest_forgery(self) -> str:
        """The last of `FabricCounters.forged`, in words."""

    @property
    def address(self) -> PeerAddress:
        """What peers must be told to reach us."""

    def register(
        self, buffer: memoryview, *, access: Access, scope: Scope, file: FileRange | None = None
    ) -> Region:
        """Let peers reach a buffer; ``file`` says where its bytes lie, if they are mapped from a file."""

    def peer(self, address: PeerAddress) -> Peer:
        """The peer behind an address; the same object for the same address until it is closed."""

    def close(self) -> None:
        """End all transfers and connections."""
