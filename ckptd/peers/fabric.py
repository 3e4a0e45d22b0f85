"""The fabric that a daemon's configuration asks for."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ckptd.config.config_values import parse_bytes, parse_peers
from ckptd.config.runtime_dir import UnusableFolder
from ckptd.config.settings import DaemonConfig
from ckptd.transport.access.admission import AdmissionLimits
from ckptd.transport.access.keys import Keys, KeysError, trusted
from ckptd.transport.control.messages import NodeCard
from ckptd.transport.fabric.zmq_fabric import FabricOptions, ZmqFabric
from ckptd.transport.tcp.stream_fabric import StreamFabric, StreamOptions
from ckptd.transport.tcp.stream_server import LIMITS
from ckptd.transport.verbs import Fabric, Serve

__all__ = ["make_fabric", "port_limits", "static_peers"]


def static_peers(config: DaemonConfig) -> tuple[NodeCard, ...]:
    """How to reach the nodes that the configuration names; none without a peer listener.

    Raises:
        UnusableFolder: the key of one is not trusted.
    """
    if not config.peer_listen or not config.peers:
        return ()
    known = {} if config.peer_security == "plain" else trusted(Path(config.keys_dir))
    cards = []
    for node, endpoint in parse_peers(config.peers).items():
        if config.peer_security == "curve" and node not in known:
            raise UnusableFolder(
                f"the key of peer {node} is not known: run `ckptctl keys trust {node} KEY`"
            )
        cards.append(NodeCard(node, endpoint, known.get(node, "")))
    return tuple(cards)


def port_limits(descriptors: int) -> tuple[AdmissionLimits, AdmissionLimits]:
    """What the connections of others may take of this many descriptors: on the control port, and on
    the data port.

    Half at most, with all strangers: the rest is for segments, trainers and the connections that
    this node makes. Without a limit (``RLIM_INFINITY``, which is -1), each gets the most.
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
    gate: Callable[[], bool] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Fabric | None:
    """Listen for peers; None if the configuration has no ``peer_listen``. While ``gate`` is false,
    puts are held back. ``tell`` gets the lines about connections that were refused.

    Raises:
        UnusableFolder: no keys, or an address that cannot be listened on or is not safe to.
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
            return ZmqFabric(
                node, where, serve=serve, keys=keys, options=options, gate=gate, tell=tell
            )
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
