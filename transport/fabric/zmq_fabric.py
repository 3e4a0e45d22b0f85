"""The verbs over ZeroMQ: a ROUTER that answers, DEALERs that ask, and one thread that serves them all.

With keys every connection is authenticated and encrypted (CURVE), and the key of a peer says which node it
is. Without keys a peer is the node that it claims to be; that is refused on addresses that others can reach,
unless the operator allows it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import zmq
from zmq.auth.base import Authenticator

from ckptd.transport.access.admission import AdmissionLimits, source_of
from ckptd.transport.access.doorkeeper import Doorkeeper, fd_of_frame
from ckptd.transport.access.keys import Keys, check_security
from ckptd.transport.access.refusals import ForgeryLog, RefusalLog
from ckptd.transport.fabric.frames import MAX_CHUNK_BYTES, MAX_WIRE_FRAME_BYTES
from ckptd.transport.fabric.lanes import (
    HEARTBEAT_MS,
    HEARTBEAT_TIMEOUT_MS,
    RECEIVE_BATCH,
    FabricParts,
)
from ckptd.transport.fabric.links import FabricPeer, LinkParts
from ckptd.transport.fabric.regions import LocalRegion, Regions
from ckptd.transport.fabric.serving import GrantDial, Server
from ckptd.transport.fabric.transfers import Pacer
from ckptd.transport.verbs import (
    CHUNK_BYTES,
    Access,
    FabricCounters,
    FileRange,
    PeerAddress,
    Scope,
    Serve,
)

logger = logging.getLogger(__name__)

DEFAULT_CREDITS = 128  # chunks in flight towards us, all peers together
TRUST_S = 1.0  # between two checks of the keys of connected peers
ENDING_S = 2.0  # for libzmq to release the buffers of closed connections
# libzmq's default of 1,023 allows 341 outgoing connections; descriptors should be the limit.
MAX_SOCKETS = 65_536
RECEIVE_QUEUE, SEND_QUEUE = 128, 1024  # messages of one connection
HANDSHAKE_MS = 5_000
FRAME_COST_BYTES = 64  # an upper bound of what a frame takes on the wire besides its content
LARGE_BYTES, KEPT_BYTES = 1 << 20, 64 << 20
MAX_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class FabricOptions:
    """The operator's choices for a fabric.

    Raises:
        ValueError: a number is out of range.
    """

    advertise: str | None = None
    """Host in our address instead of the endpoint's."""

    allow_plain: bool = False
    """Listen without keys on an address that others can reach."""

    connections_per_peer: int = 1
    """Connections over which chunks are spread, in addition to one for control messages."""

    chunk_bytes: int | None = None
    """Size of a chunk; None: the default of the kind of fabric."""

    credits: int = DEFAULT_CREDITS
    """Chunks that may be in flight towards us, all peers together (at least one per connection)."""

    rate_bytes_per_s: float | None = None
    """Limit of our puts, all peers together."""

    short_cut: bool = True
    """Copy within this host where a region lies in a file that we can open, and let peers do so."""

    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    """Limits of the connections that others make."""

    def __post_init__(self) -> None:
        chunk_bytes = 1 if self.chunk_bytes is None else self.chunk_bytes
        if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes is between 1 and {MAX_CHUNK_BYTES}, not {chunk_bytes}")
        if self.connections_per_peer < 1 or self.credits < 1:
            raise ValueError(
                "connections_per_peer and credits are at least 1, "
                f"not {self.connections_per_peer} and {self.credits}"
            )


DEFAULT_OPTIONS = FabricOptions()


class ZmqFabric:
    """Implements `Fabric`.

    Args:
        node: our node id.
        endpoint: where to listen, ``tcp://host:port``; port 0 takes a free one (see ``address``).
        serve: called on our thread with each request of a peer.
        keys: our keys and those that we trust; None: nobody is authenticated.
        gate: called before each put chunk; while it returns false chunks wait, for at most half a second.
        tell: gets the lines about refused connections; default: the log.
    Raises:
        ValueError: the endpoint is invalid or not safe, or listening there failed.
    """

    default_chunk_bytes = CHUNK_BYTES

    def __init__(
        self,
        node: str,
        endpoint: str,
        *,
        serve: Serve,
        keys: Keys | None = None,
        options: FabricOptions = DEFAULT_OPTIONS,
        gate: Callable[[], bool] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        security = "plain" if keys is None else "curve"
        check_security(endpoint, security, advertise=options.advertise, allow_plain=options.allow_plain)
        keep_large_buffers()
        self.node = node
        self.counters = FabricCounters()
        self._keys, self._options = keys, options
        self.refusals = RefusalLog(self.counters, tell)
        self._forgeries = ForgeryLog(self.counters)
        pacer = Pacer(options.rate_bytes_per_s, gate)
        self._copier = ThreadPoolExecutor(1, f"copies-{node}") if options.short_cut else None
        self._loop = Loop(f"fabric-{node}", self._tick, self._end)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._peers: dict[PeerAddress, FabricPeer] = {}
        self._ending: list[FabricPeer] = []
        self._trust_due_s = 0.0
        self._peers_lock = threading.Lock()
        self._parts = FabricParts(
            node=node,
            context=self._context,
            curve=None if keys is None else (keys.public, keys.secret),
            node_of=None if keys is None else keys.trust.node_of,
            credits=options.credits,
            regions=Regions(),
            counters=self.counters,
            refusals=self.refusals,
            call=self._loop.call,
            watch=self._loop.watch,
            unwatch=self._loop.unwatch,
        )
        self._link_parts = LinkParts(
            fabric=self._parts,
            pacer=pacer,
            copier=self._copier,
            chunk_bytes=options.chunk_bytes or self.default_chunk_bytes,
            connections=options.connections_per_peer,
            vouch=self._vouch,
            forget=self._forget,
        )
        self._router = self._make_router(endpoint)
        self._door = Doorkeeper(node, self._router, options.limits, self.refusals)
        self._server = Server(self._parts, self._router, self._door, serve, self._grant_dials())
        self._authenticator = self._listen_for_keys()
        try:
            self._router.bind(endpoint)
            self._address = self._make_address()
            self._listen_for_more()
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(linger=0)
            raise ValueError(f"cannot listen at {endpoint}: {error}") from error
        self._door.start(urlsplit(self._bound_endpoint).port or 0)
        self._loop.watch(self._router, self._readable)
        self._loop.start()

    # --- for users, any thread ---

    @property
    def refused(self) -> dict[str, int]:
        return self.refusals.shown()

    @property
    def address(self) -> PeerAddress:
        return self._address

    @property
    def encryption(self) -> str:
        return "plaintext" if self._keys is None else "CURVE"

    @property
    def newest_forgery(self) -> str:
        """The newest of ``counters.forged``. libzmq does not report what CURVE refuses, so that is not
        counted.
        """
        return self._forgeries.newest

    def register(
        self, buffer: memoryview, *, access: Access, scope: Scope, file: FileRange | None = None
    ) -> LocalRegion:
        """Implements `Fabric.register`. The returned key names ``file`` only if peers on this host may use
        it.

        Raises:
            ValueError: not contiguous, or read-only although it is to be written.
        """
        return self._parts.regions.register(buffer, access, scope, file if self._copier else None)

    def peer(self, address: PeerAddress) -> FabricPeer:
        with self._peers_lock:
            link = self._peers.get(address)
            if link is None or link.closing:
                if link is not None:
                    self._ending.append(link)
                link = self._peers[address] = self._make_link(address)
            return link

    def close(self) -> None:
        """End all transfers and connections; they complete with ``CLOSED`` before this returns."""
        self._loop.stop()

    # --- making the parts ---

    def _make_link(self, address: PeerAddress) -> FabricPeer:
        return FabricPeer(self._link_parts, address)

    def _listen_for_keys(self) -> _Gatekeeper | None:
        if self._keys is None:
            return None
        gatekeeper = _Gatekeeper(self._context, self._keys, self.refusals, self._door)
        gatekeeper.start()
        self._loop.watch(gatekeeper.zap_socket, gatekeeper.readable)
        return gatekeeper

    def _make_router(self, endpoint: str) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.sndhwm, router.rcvhwm = SEND_QUEUE, RECEIVE_QUEUE
        # An answer to a peer that is gone or does not read is an error, not silence.
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_WIRE_FRAME_BYTES)
        router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        router.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        router.ipv6 = "[" in endpoint
        if self._keys is not None:
            router.curve_server = True
            router.curve_secretkey = self._keys.secret.encode()
        return router

    def _grant_dials(self) -> GrantDial | None:
        """For fabrics with streams."""
        return None

    def _listen_for_more(self) -> None:
        """For fabrics with more ports; called before anybody is answered."""

    @property
    def _bound_endpoint(self) -> str:
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def _make_address(self) -> PeerAddress:
        bound, advertise = self._bound_endpoint, self._options.advertise
        if advertise:
            host = f"[{advertise}]" if ":" in advertise else advertise
            bound = f"tcp://{host}:{urlsplit(bound).port}"
        return PeerAddress(self.node, bound, "" if self._keys is None else self._keys.public)

    # --- the thread ---

    def _vouch(self, address: PeerAddress) -> str:
        if self._keys is None:
            return f"{address.node} wants keys, and we have none" if address.public_key else ""
        if self._keys.public == address.public_key and address.node == self.node:
            return ""
        if self._keys.trust.node_of(address.public_key) != address.node:
            return f"this is not a key that we trust as {address.node}"
        return ""

    def _tick(self, now_s: float) -> float:
        if self._keys is not None and now_s >= self._trust_due_s:
            self._trust_due_s = now_s + TRUST_S
            self._revoke_untrusted()
        due = self._trust_due_s - now_s if self._keys is not None else float("inf")
        return min((due, *(link.pump(now_s) for link in self._links())))

    def _revoke_untrusted(self) -> None:
        """End what a key that was revoked, or has expired, still has open."""
        self._server.revoke_untrusted()
        for link in self._links():
            link.check_trust()

    def _links(self) -> list[FabricPeer]:
        with self._peers_lock:
            return [*self._peers.values(), *self._ending]

    def _forget(self, link: FabricPeer) -> None:
        with self._peers_lock:
            if self._peers.get(link.address) is link:
                del self._peers[link.address]
            elif link in self._ending:
                self._ending.remove(link)

    def _readable(self) -> None:
        for _ in range(RECEIVE_BATCH):
            try:
                frames = self._router.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            size = sum(len(frame) + FRAME_COST_BYTES for frame in frames)
            self._door.took(fd_of_frame(frames[-1]), size)
            self._server.message(frames)

    def _end(self) -> None:
        """Close everything, wait a moment for buffers that libzmq holds, and complete what is left."""
        self._stop_serving()
        self._parts.regions.end_leases()
        links = self._links()
        for link in links:
            link.shut()
        give_up_at = time.monotonic() + ENDING_S
        while links and time.monotonic() < give_up_at:
            links = [link for link in links if link.pump(time.monotonic()) != float("inf")]
            if links:
                time.sleep(0.001)  # libzmq's own thread releases them, without an event
        for link in links:
            logger.error("buffers of transfers with %s were not released", link.address.node)
            link.complete_all()
        if self._copier is not None:
            self._copier.shutdown()
        self._context.term()

    def _stop_serving(self) -> None:
        self._loop.unwatch(self._router)
        self._door.stop()
        self._router.close(linger=0)
        if self._authenticator is not None:
            self._loop.unwatch(self._authenticator.zap_socket)
            self._authenticator.stop()


class _Gatekeeper(Authenticator):
    """pyzmq's authenticator, run on the fabric's thread. A connection's user id is its public key."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: Keys,
        refusals: RefusalLog,
        door: Doorkeeper,
    ) -> None:
        super().__init__(context, log=logging.getLogger(f"{__name__}.keys"))
        self._keys = keys
        self._refusals = refusals
        self._door = door
        self._source = ""
        self.configure_curve_callback(credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a connection with this key may come in."""
        text = key.decode("ascii")
        if text == self._keys.public or self._keys.trust.node_of(text) is not None:
            return True
        self._refusals.stranger("key", self._source, f"the key {text} is not trusted")
        self._door.denied(self._source)
        return False

    def readable(self) -> None:
        """Answer a question of libzmq."""
        message = self.zap_socket.recv_multipart(zmq.DONTWAIT)
        # Version, request, domain, address: the source of the key that `callback` gets next.
        self._source = source_of(message[3].decode("ascii", "replace")) if message[3:] else ""
        answering = self.handle_zap_message(message)
        try:
            answering.send(None)  # it never waits: our callback is a plain function
        except StopIteration:
            return
        answering.close()
        raise RuntimeError("the authenticator would block")


@functools.cache
def keep_large_buffers() -> None:
    """Have malloc keep large buffers instead of mapping fresh ones; once per process.

    Otherwise a chunk costs more in page faults than in copying (2.4 against 3.6 GB/s received). The price:
    the process keeps `KEPT_BYTES` of its largest burst of messages. Without glibc nothing is done.
    """
    trim_threshold, mmap_threshold = -1, -3
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        logger.info("mallopt is not available: large messages cost page faults")
        return
    for parameter, value in ((mmap_threshold, LARGE_BYTES), (trim_threshold, KEPT_BYTES)):
        if not mallopt(parameter, value):
            logger.info("mallopt(%d) was refused: large messages cost page faults", parameter)


class Loop:
    """The thread of a fabric: one poller over its sockets, and a queue of calls from other threads.

    Args:
        tick: called after each round with the time; returns the seconds until the next call, if nothing
            happens before.
        last: called once on the thread when it ends. Calls accepted before are run first; later ones are
            refused.
    """

    def __init__(self, name: str, tick: Callable[[float], float], last: Callable[[], None]) -> None:
        self._tick = tick
        self._last = last
        self._lock = threading.Lock()
        self._calls: deque[Callable[[], None]] = deque()
        self._open = True
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        self._handlers: dict[zmq.Socket[bytes], Callable[[], None]] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, task: Callable[[], None]) -> bool:
        """Run ``task`` on the thread soon; false if the loop was stopped. Any thread."""
        with self._lock:
            if not self._open:
                return False
            self._calls.append(task)
            if len(self._calls) == 1:
                os.eventfd_write(self._wake, 1)
            return True

    def stop(self) -> None:
        """Accept no more calls, and end. Waits for the end, except on the thread itself."""
        with self._lock:
            if self._open:
                self._open = False
                os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def watch(self, socket: zmq.Socket[bytes], handler: Callable[[], None]) -> None:
        """Call ``handler`` whenever ``socket`` is readable. The loop's thread only."""
        self._handlers[socket] = handler
        self._poller.register(socket, zmq.POLLIN)

    def unwatch(self, socket: zmq.Socket[bytes]) -> None:
        if self._handlers.pop(socket, None) is not None:
            self._poller.unregister(socket)

    def _run(self) -> None:
        wait_s = 0.0
        while self._open:
            self._handle(self._poll(wait_s))
            self._run_calls()
            try:
                wait_s = self._tick(time.monotonic())
            except Exception:  # all transfers of the node depend on this loop
                logger.exception("a fabric's tick failed")
                wait_s = 0.1
        self._run_calls()
        self._last()
        with self._lock:  # `call` does not touch it any more: it is closed
            os.close(self._wake)

    def _poll(self, wait_s: float) -> list[tuple[zmq.Socket[bytes] | int, int]]:
        # Rounded up: a wait of less than a millisecond must not become a busy loop.
        wait_ms = 0 if wait_s <= 0 else int(min(wait_s, MAX_WAIT_S) * 1000) + 1
        return self._poller.poll(wait_ms)

    def _handle(self, events: list[tuple[zmq.Socket[bytes] | int, int]]) -> None:
        for source, _ in events:
            if isinstance(source, int):
                os.eventfd_read(self._wake)
            elif (handler := self._handlers.get(source)) is not None:
                self._guarded(handler)

    def _run_calls(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, deque()
        for task in calls:
            self._guarded(task)

    def _guarded(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception:  # as above
            logger.exception("a fabric's event failed")
