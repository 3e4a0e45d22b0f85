"""The fabric that a daemon's configuration asks for, and its counters."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path

from ckptd.config.runtime_dir import UnusableFolder
from ckptd.config.settings import DaemonConfig, parse_bytes, parse_peers
from ckptd.memory.segment_file import Segment
from ckptd.node_context import NodeContext
from ckptd.transport.access.admission import AdmissionLimits
from ckptd.transport.access.keys import Keys, KeysError, trusted
from ckptd.transport.fabric.zmq_fabric import FabricOptions, ZmqFabric
from ckptd.transport.messages import NodeCard
from ckptd.transport.tcp.stream_fabric import StreamFabric, StreamOptions
from ckptd.transport.tcp.stream_server import LIMITS
from ckptd.transport.verbs import Fabric, Serve

# One event for all since the last one, so that forged streams do not fill the log.
_FORGED_EVERY_S = 10.0
_PLAINTEXT = (
    "snapshots travel to and from peers unencrypted: whoever reads the network reads them, and whoever "
    "changes its packets changes them"
)


def static_peers(config: DaemonConfig) -> tuple[NodeCard, ...]:
    """Addresses of the configured nodes; none without a peer listener.

    Raises:
        UnusableFolder: the key of one is not trusted.
    """
    if not config.peer_listen or not config.peers:
        return ()
    known = {} if config.peer_security == "plain" else trusted(Path(config.keys_dir))
    cards = []
    for node, endpoint in parse_peers(config.peers).items():
        if config.peer_security == "curve" and node not in known:
            raise UnusableFolder(f"the key of peer {node} is not known: run `ckptctl keys trust {node} KEY`")
        cards.append(NodeCard(node, endpoint, known.get(node, "")))
    return tuple(cards)


def port_limits(descriptors: int) -> tuple[AdmissionLimits, AdmissionLimits]:
    """Limits of incoming connections: on the control port, and on the data port.

    Together at most half of ``descriptors``, with all strangers: the rest is for segments, trainers and
    outgoing connections. Without a limit (``RLIM_INFINITY``, which is -1), each gets its maximum.
    """
    if descriptors == resource.RLIM_INFINITY:
        descriptors = 1 << 20

    def share(part: int, most: int) -> int:
        return max(8, min(most, descriptors // part))

    control = AdmissionLimits(
        connections=share(5, 4096),
        strangers=share(16, 256),
        strangers_per_address=share(32, 64),
    )
    data = replace(
        LIMITS,
        connections=share(5, LIMITS.connections),
        strangers=share(16, LIMITS.strangers),
        strangers_per_address=share(64, LIMITS.strangers_per_address),
    )
    return control, data


def make_fabric(
    config: DaemonConfig,
    node: str,
    serve: Serve,
    gate: Callable[[], bool],
    tell: Callable[[str], None],
) -> Fabric | None:
    """Listen for peers; None if the configuration has no ``peer_listen``.

    Args:
        gate: puts are delayed while it returns false.
        tell: called with lines about refused connections.

    Raises:
        UnusableFolder: there are no keys, or the address cannot be listened on or is not safe.
    """
    if not config.peer_listen:
        return None
    plain = config.peer_security == "plain"
    try:
        keys = None if plain else Keys.load(Path(config.keys_dir))
    except KeysError as error:
        raise UnusableFolder(
            f"peers cannot be served: {error}. Run `ckptctl keys new` on each node and trust the others "
            "with `ckptctl keys trust`, or set CKPTD_PEER_SECURITY=plain where everybody who reaches "
            f"{config.peer_listen} may read and write snapshots"
        ) from error
    limits, data_limits = port_limits(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    where = config.peer_listen
    try:
        options = FabricOptions(
            advertise=config.peer_advertise or None,
            allow_plain=plain,
            connections_per_peer=config.peer_connections,
            rate_bytes_per_s=parse_bytes(config.peer_bandwidth) or None,
            short_cut=config.peer_short_cut,
            limits=limits,
        )
        if config.peer_data == "zmq":
            return ZmqFabric(node, where, serve=serve, keys=keys, options=options, gate=gate, tell=tell)
        plaintext = config.peer_data == "stream-plaintext"
        streams = StreamOptions(config.peer_data_port, data_limits, plaintext)
        return StreamFabric(
            node,
            where,
            serve=serve,
            keys=keys,
            options=options,
            streams=streams,
            gate=gate,
            tell=tell,
        )
    except ValueError as error:
        raise UnusableFolder(f"peers cannot be served: {error}") from error


class FabricWatch:
    """Reports a fabric to the operator: its counters, forged streams, and missing encryption."""

    def __init__(self, fabric: Fabric, node: NodeContext) -> None:
        self._fabric, self._events = fabric, node.events
        self._forged, self._due_s = 0, 0.0
        endpoint, config = fabric.address.endpoint, node.config
        self._events.add("info", "peers", f"peers reach this node at {endpoint}")
        if fabric.encryption == "plaintext":
            why = f"peer_security = {config.peer_security}, peer_data = {config.peer_data}"
            self._events.add("warning", "plaintext", f"{_PLAINTEXT} ({why})")

    @property
    def counters(self) -> dict[str, int]:
        """Bytes moved, requests refused, garbage, strangers."""
        counters = asdict(self._fabric.counters).items()
        # Shown even if it is 0: operators look for transfers that do not take the short cut.
        shown = {name: n for name, n in counters if n or name == "short_cut_bytes"}
        return {f"fabric.{name}": n for name, n in (shown | self._fabric.refused).items()}

    def tick(self, now_s: float) -> None:
        """Report forged streams, at most once every 10 s."""
        new = self._fabric.counters.forged - self._forged
        if new and now_s >= self._due_s:
            self._forged += new
            self._due_s = now_s + _FORGED_EVERY_S
            text = (
                f"{new} data streams carried bytes that the peer did not send, and were closed; the last "
                f"{self._fabric.newest_forgery}. These bytes are discarded, and the transfers are repeated. "
                "Somebody changes packets on the way, or something damages them past TCP's checksum."
            )
            self._events.add("error", "stream_forged", text)


class QuietGate:
    """Closed while a trainer of this node asks for a quiet network.

    The fabric's thread calls it before every chunk that is put; the request is a hint in shared memory, so
    that a trainer can set it in a microsecond. The fabric delays puts for half a second at most: a trainer
    that forgets to withdraw its request costs no more.
    """

    def __init__(self) -> None:
        self._segments: tuple[Segment, ...] = ()

    def watch(self, segments: Iterable[Segment]) -> None:
        """Follow the hints of these segments only (loop thread)."""
        self._segments = tuple(segments)

    def __call__(self) -> bool:
        return not any(_asks(segment) for segment in self._segments)


def _asks(segment: Segment) -> bool:
    try:
        return segment.quiet
    except ValueError:  # the loop thread has unmapped it: its trainer is gone
        return False
