"""The verbs with chunks over plain TCP streams, and everything else over ZeroMQ.

ZeroMQ costs about twice the processor time of TCP for each byte, which is what the training next to us needs. So the bytes
of puts and gets go straight between the registered buffers and the socket; control messages, who a peer is, and whom a
stream belongs to stay on the (authenticated, encrypted) control connections.

What keys protect: a stream is opened with a ticket that the authenticated peer was given, valid once and for seconds. The bytes
on it are compared with xxh3 digests, which finds damage, not forgery, and they are NOT encrypted: whoever can read the
network between two nodes can read the snapshots, and whoever can change its packets can change them. Where that is
not acceptable use `ZmqFabric`, or a network that encrypts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from urllib.parse import urlsplit

import zmq

from ckptd.transport.keys import Keys
from ckptd.transport.links import PeerLink
from ckptd.transport.serving import Connection, ServerParts
from ckptd.transport.stream_lanes import StreamLink
from ckptd.transport.stream_server import StreamServer, StreamServerParts
from ckptd.transport.verbs import PeerAddress, Serve
from ckptd.transport.zmq_fabric import DEFAULT_CREDITS, ZmqFabric

__all__ = ["STREAM_CHUNK_BYTES", "StreamFabric"]

# Larger than over ZeroMQ: nothing is copied or held per chunk, so a chunk costs the hand-overs between threads only.
STREAM_CHUNK_BYTES = 4 << 20


class StreamFabric(ZmqFabric):
    """Implements `Fabric`. Peers without a data port are reached over ZeroMQ, and may reach us that way.

    Args:
        data_port: where streams come in, on the endpoint's address; 0 takes a free one.

    The others are those of `ZmqFabric`. ``allow_plain`` says of the endpoint what it says there; that the bytes of
    streams are not encrypted is not asked about.
    """

    def __init__(
        self,
        node: str,
        endpoint: str,
        *,
        serve: Serve,
        advertise: str | None = None,
        keys: Keys | None = None,
        allow_plain: bool = False,
        connections_per_peer: int = 1,
        chunk_bytes: int = STREAM_CHUNK_BYTES,
        credits: int = DEFAULT_CREDITS,
        rate_bytes_per_s: float | None = None,
        gate: Callable[[], bool] | None = None,
        short_cut: bool = True,
        data_port: int = 0,
    ) -> None:
        if not 0 <= data_port < 1 << 16:
            raise ValueError(f"{data_port} is no port")
        self._data_port = data_port
        self._credits = credits
        super().__init__(
            node,
            endpoint,
            serve=serve,
            advertise=advertise,
            keys=keys,
            allow_plain=allow_plain,
            connections_per_peer=connections_per_peer,
            chunk_bytes=chunk_bytes,
            credits=credits,
            rate_bytes_per_s=rate_bytes_per_s,
            gate=gate,
            short_cut=short_cut,
        )

    @property
    def data_address(self) -> tuple[str, int]:
        """Host and port that peers are told to connect streams to."""
        return urlsplit(self.address.endpoint).hostname or "", self._streams.port

    def _listen_for_more(self) -> None:
        bound = urlsplit(self._router.getsockopt_string(zmq.LAST_ENDPOINT)).hostname or ""
        parts = StreamServerParts(
            self.node,
            self._regions,
            self.counters,
            self._garbage,
            self._credits,
            self._node_of,
        )
        self._streams = StreamServer(parts, bound, self._data_port)

    def _make_server_parts(self, serve: Serve, credits: int) -> ServerParts:
        return replace(super()._make_server_parts(serve, credits), dial=self._dial)

    def _dial(
        self, peer: Connection, slot: bytes, answer: Callable[[str, int, bytes], None]
    ) -> None:
        def granted(ticket: bytes) -> None:
            answer(*self.data_address, ticket)

        self._streams.grant(peer.node, peer.key, slot, granted)

    def _revoke_untrusted(self) -> None:
        super()._revoke_untrusted()
        self._streams.revoke_untrusted()

    def _make_link(self, address: PeerAddress) -> PeerLink:
        return StreamLink(self._link_parts, address)

    def _stop_serving(self) -> None:
        super()._stop_serving()
        self._streams.close()
