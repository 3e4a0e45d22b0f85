"""One-sided transfers over registered memory: the interface of every fabric (DESIGN §10).

A process *registers* a buffer and sends the region's key to a peer. The peer *puts* bytes into the region or
*gets* bytes out of it, without any code of the owner taking part. A transfer is cut into chunks. Each is an
operation of its own that may be repeated, reordered or lost without harm: it names region, offset and length,
and its bytes carry an xxh3_64 or, sealed, a tag. So a transfer survives a lost connection (unacknowledged
chunks are sent again), and nothing is remembered between chunks.

The contract, which ``tests/transport/contract.py`` holds for every fabric:

* A put completes ``ok`` when every byte lies in the region and was verified there (by its digest; by its tag
  on an encrypted stream); a get, when every byte lies in the target and was verified. A failure says why
  (`Fault`), and never raises in the caller's thread.
* A chunk that arrives damaged is not acknowledged. It is asked for again a few times, then the transfer fails
  with ``DIGEST``. The owner of a region shows its content to others only after the transfer, never before (a
  slot is ``filling``).
* A request outside of the region, without its token, from another peer than the registered one, or after
  `Region.revoke`, touches no byte and is refused: ``REGION``, ``BOUNDS`` or ``ACCESS``. It is counted; it
  closes nothing.
* Completions come exactly once, on a thread of the fabric, in any order. `Transfer.cancel` completes with
  ``CANCELLED`` unless the transfer was complete already; after the completion no byte of the caller's buffer
  is touched any more.
* Chunks in flight are bounded by credits that the receiving side grants, so a slow receiver costs its peers
  no memory.

Where both ends are on one host, and the peer can open the file of the region, the bytes need no network
(`ckptd.transport.fabric.short_cut`). All of the above holds for such transfers too, except that their bytes
are not digested, and do not count against the limits of the network.

Control messages are two-sided and opaque here: bytes in, bytes out. They are authenticated like everything
else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Flag, StrEnum, auto
from typing import Annotated, Protocol

from msgspec import Meta, Struct

from ckptd.transport.messages import Count, Text

CHUNK_BYTES = 1 << 20


class Fault(StrEnum):
    """Why a transfer or a request failed."""

    CANCELLED = "cancelled"
    DEADLINE = "deadline"  # not complete in time, the peer unreachable or slow
    REGION = "region"  # no such region (any more), or another token
    BOUNDS = "bounds"  # outside of the region
    ACCESS = "access"  # registered for another peer, or not for this operation
    DIGEST = "digest"  # the bytes arrive damaged, again and again
    DAMAGED = "damaged"  # the holder has lost these bytes; it may have other parts of the region
    REFUSED = "refused"  # the peer does not take part: keys not trusted, another version
    CLOSED = "closed"  # this fabric is closed


class Access(Flag):
    """What peers may do with a region."""

    READ = auto()
    WRITE = auto()


@dataclass(frozen=True, slots=True)
class Scope:
    """The peers of a region: one peer (its node id; "" for any authenticated one), one job, one run."""

    peer: str
    job: str = ""
    run: str = ""


class FileRange(Struct, frozen=True):
    """Where a buffer begins in a file; ``device`` and ``inode`` as in `os.stat`. Messages carry it as it is,
    for a peer that may be on the same host (`ckptd.transport.fabric.short_cut`).
    """

    path: Text
    device: Annotated[int, Meta(ge=0)]
    inode: Annotated[int, Meta(ge=0)]
    offset: Count


@dataclass(frozen=True, slots=True)
class RegionKey:
    """What a peer must know to reach a region; ``token`` is 16 random bytes, new with each registration.

    ``file``, if the region lies in one, lets a peer on the same host copy by itself.
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
    short_cut_bytes: int = 0  # of put_bytes and got_bytes: copied within this host
    chunk_retries: int = 0
    refused: int = 0  # requests refused: region, bounds, access
    bad_digests: int = 0
    forged: int = 0  # encrypted streams broken off because of an attacker's bytes
    garbage: int = 0  # frames that are none of ours
    unauthenticated: int = 0  # connections refused for their key
    revoked: int = 0  # connections and streams ended because their key is not trusted any more
    reconnects: int = 0


class Region(Protocol):
    """A registered buffer."""

    @property
    def key(self) -> RegionKey: ...

    def revoke(self) -> bool:
        """Refuse every further request; returns at once, with whether nothing touches the buffer any more.

        If not, operations that began before may still read and write it, until a later call returns true or
        `close` has returned.
        """

    def break_off(self) -> None:
        """After `revoke`: make operations end soon, as far as this process can; takes a second at most."""

    def close(self) -> None:
        """Revoke, and wait until nothing touches the buffer any more. This may take long while a peer has
        stopped.
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
    """One other node; connects, and reconnects, by itself. All methods return at once."""

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
        """Send a control message; ``answered`` is called once, with the reply or a fault (``DEADLINE`` at the
        latest).

        It is sent at most once: after ``DEADLINE`` (also at once, when the connection breaks) whether the
        peer acted on it is unknown.
        """

    def close(self) -> None:
        """Give up the connections; transfers in flight complete with ``CLOSED``."""


# Called on a fabric's thread: the peer's node, the body, and how to answer (once or never, from any thread).
Serve = Callable[[str, bytes, Callable[[bytes], None]], None]


class Fabric(Protocol):
    """One node's end of all connections."""

    counters: FabricCounters

    @property
    def refused(self) -> dict[str, int]:
        """Refused connections and messages, by reason, and those of the addresses with the most."""

    @property
    def encryption(self) -> str:
        """The cipher of snapshots on their way to peers with the same options, or "plaintext"."""

    @property
    def newest_forgery(self) -> str:
        """The last of `FabricCounters.forged`, in words."""

    @property
    def address(self) -> PeerAddress:
        """The address for peers."""

    def register(
        self, buffer: memoryview, *, access: Access, scope: Scope, file: FileRange | None = None
    ) -> Region:
        """Let peers reach a buffer; ``file`` says where its bytes lie, if they are mapped from a file."""

    def peer(self, address: PeerAddress) -> Peer:
        """The peer behind an address; the same object for the same address until it is closed."""

    def close(self) -> None:
        """End all transfers and connections."""
