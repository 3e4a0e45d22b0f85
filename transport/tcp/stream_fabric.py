"""The verbs with chunks over TCP streams, and everything else over ZeroMQ.

ZeroMQ costs about twice the processor time of TCP for each byte, and CURVE ten times that of AES on a
processor with AES instructions; training on the same machine needs that time. So the bytes of puts and gets
go straight between the registered buffers and the socket, sealed by `ckptd.transport.tcp.sealing`. Control
messages, the identity of peers, the ownership of streams, and the secrets behind their keys stay on the
control connections, which CURVE authenticates and encrypts.

A stream is in plaintext only if both sides ask for it, or have no keys at all. Its bytes are compared with
xxh3 digests, which find damage and no forgery: whoever can read the network between the two nodes can read
the snapshots, and whoever can change its packets can change them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from ckptd.transport.access.admission import AdmissionLimits
from ckptd.transport.access.keys import Keys
from ckptd.transport.fabric import frames as f
from ckptd.transport.fabric.links import FabricPeer
from ckptd.transport.fabric.regions import Refusal
from ckptd.transport.fabric.serving import Connection, GrantDial
from ckptd.transport.fabric.zmq_fabric import DEFAULT_OPTIONS, FabricOptions, ZmqFabric
from ckptd.transport.tcp.sealing import Cipher, common_cipher, offered_ciphers
from ckptd.transport.tcp.stream_lanes import StreamLink
from ckptd.transport.tcp.stream_server import LIMITS, DialGrant, StreamServer
from ckptd.transport.verbs import Fault, PeerAddress, Serve

# Larger than over ZeroMQ: nothing is copied or held for a chunk, so it costs only the changes of thread.
STREAM_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The operator's choices for the data port.

    Raises:
        ValueError: the port is invalid.
    """

    port: int = 0
    """The data port, on the endpoint's address; 0 takes a free one."""

    limits: AdmissionLimits = LIMITS
    """Limits of the streams that others open."""

    plaintext: bool = False
    """Do not encrypt streams to and from peers with the same option. Without keys no stream is encrypted."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"{self.port} is not a port number: 0 to 65535")


class StreamFabric(ZmqFabric):
    """Implements `Fabric`. Peers without a data port are reached over ZeroMQ, and may reach us that way.

    The arguments are those of `ZmqFabric`, and ``streams``.

    Raises:
        ValueError: as `ZmqFabric`, or the library that encrypts is missing.
    """

    default_chunk_bytes = STREAM_CHUNK_BYTES

    def __init__(
        self,
        node: str,
        endpoint: str,
        *,
        serve: Serve,
        keys: Keys | None = None,
        options: FabricOptions = DEFAULT_OPTIONS,
        streams: StreamOptions = StreamOptions(),
        gate: Callable[[], bool] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._ciphers = (Cipher.PLAINTEXT,) if keys is None else offered_ciphers(plaintext=streams.plaintext)
        self._stream_options = streams
        super().__init__(node, endpoint, serve=serve, keys=keys, options=options, gate=gate, tell=tell)

    @property
    def data_address(self) -> tuple[str, int]:
        """Host and port that peers connect streams to."""
        return urlsplit(self.address.endpoint).hostname or "", self._streams.port

    @property
    def encryption(self) -> str:
        return self._ciphers[0].title

    def _listen_for_more(self) -> None:
        host, chosen = urlsplit(self._bound_endpoint).hostname or "", self._stream_options
        self._streams = StreamServer(self._parts, self._forgeries, host, chosen.port, chosen.limits)

    def _grant_dials(self) -> GrantDial | None:
        return self._dial

    def _dial(self, peer: Connection, ask: f.Dial, answer: Callable[[f.Ticket], None]) -> None:
        cipher = common_cipher(ask.ciphers, self._ciphers)
        if cipher is None:
            ours = " or ".join(each.title for each in self._ciphers)
            raise Refusal(Fault.REFUSED, f"streams here are {ours}, which {peer.node} does not accept")

        def granted(ticket: bytes, secret: bytes) -> None:
            host, port = self.data_address
            answer(f.Ticket(ask.op, host, port, ticket, cipher, secret))

        grant = DialGrant(peer.node, peer.key, ask.slot, cipher, ask.secret, granted, peer.source)
        self._streams.grant(grant)

    def _revoke_untrusted(self) -> None:
        super()._revoke_untrusted()
        self._streams.revoke_untrusted()

    def _make_link(self, address: PeerAddress) -> FabricPeer:
        return StreamLink(self._link_parts, address, self._ciphers, self._forgeries)

    def _stop_serving(self) -> None:
        super()._stop_serving()
        self._streams.close()
