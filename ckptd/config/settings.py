"""The settings of the daemon: the values of each, its default, and its meaning.

The string under a field is its documentation: `ckptd.config.daemon_config` generates the help of the
command line and the table in `docs/configuration.md` from it. A parser takes the text of a setting and
returns its value, or raises ValueError.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ckptd.storage.stores.store_base import public_url

_IPC_PATH_LIMIT = 107  # sun_path of a unix socket, less the terminating zero
_UNITS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGT", start=1):
    _UNITS |= {_prefix: 1 << 10 * _power, f"{_prefix}IB": 1 << 10 * _power, f"{_prefix}B": 10 ** (3 * _power)}
_PORT_MAX = 65_535
_NAME = "[A-Za-z0-9._-]{1,64}"
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_NumberT = TypeVar("_NumberT", int, float)


def parse_bytes(text: str) -> int:
    """Bytes of "1.5 GiB", "300MB", "4096"; K, M, G, T alone are powers of 1024."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError("a number with one of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_memory(text: str) -> int | float:
    """Bytes as an int, or a share of memory (above 0, at most 1) as a float."""
    if text.strip().endswith("%"):
        share = float(text.strip()[:-1]) / 100
        if not 0 < share <= 1:
            raise ValueError("a share above 0% and at most 100%")
        return share
    return parse_bytes(text)


def _memory_value(text: str) -> str:
    value = parse_memory(text)
    if isinstance(value, int) and value < 1 << 20:
        raise ValueError("at least 1 MiB")
    return text.strip()


def _within(kind: type[_NumberT], low: float, high: float) -> Callable[[str], _NumberT]:
    def parse(text: str) -> _NumberT:
        value = kind(text)
        if not low <= value <= high:
            raise ValueError("out of range")
        return value

    return parse


def _choice_value(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError("not one of the words")
        return text.lower()

    return parse


def _boolean_value(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError("not a truth value")
    return text.lower() in _TRUE


def _absolute_path(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError("not an absolute path")
    return os.path.normpath(text)


def _endpoint_value(text: str) -> str:
    if text.startswith("tcp://"):
        raise ValueError("trainers connect over ipc; use peer_listen for peers")
    if not text.startswith("ipc://") or len(text) == len("ipc://"):
        raise ValueError("not an ipc endpoint")
    if not text.startswith("ipc:///"):
        raise ValueError(
            "not an absolute path: any process could create an abstract or relative socket first"
        )
    if len(os.fsencode(text.removeprefix("ipc://"))) > _IPC_PATH_LIMIT:
        raise ValueError(f"a socket path has at most {_IPC_PATH_LIMIT} bytes; shorten runtime_dir")
    return text


def _matching(pattern: str, problem: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(problem)
        return text

    return parse


_IPV6 = r"\[[0-9a-fA-F:.%]+\]"
_peer_endpoint = _matching(rf"(tcp://({_IPV6}|[^:/\s]+):[0-9]{{1,5}})?", "not a tcp endpoint")
_metrics_address = _matching(rf"(({_IPV6}|[^:/\s]+):[0-9]{{1,5}})?", "not an address with a port")
_host_value = _matching(rf"({_IPV6}|[A-Za-z0-9._-]+)?", "not an address or host name")
_names_value = _matching(f"({_NAME})?(,({_NAME})?)*", "not a list of names")
_name_value = _matching(
    "[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", "not a name, or one that begins with a dot, which ckptd reserves"
)


def parse_peers(text: str) -> dict[str, str]:
    """Endpoint by node id, of "a=tcp://10.0.0.1:7077,b=tcp://10.0.0.2:7077".

    Raises:
        ValueError: not such pairs.
    """
    peers: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, endpoint = part.partition("=")
        if not equals or _name_value(name) in peers or not _peer_endpoint(endpoint):
            raise ValueError(f"{part!r} is not a new name=tcp://address:port")
        peers[name] = endpoint
    return peers


def _metrics_value(text: str) -> str:
    if text.startswith("unix:"):
        if len(os.fsencode(_absolute_path(text.removeprefix("unix:")))) > _IPC_PATH_LIMIT:
            raise ValueError(f"a socket path has at most {_IPC_PATH_LIMIT} bytes")
        return text
    if int(_metrics_address(text).rpartition(":")[2] or 0) > _PORT_MAX:
        raise ValueError(f"a port is at most {_PORT_MAX}")
    return text


def _otel_value(text: str) -> str:
    if text and not re.fullmatch(r"https?://[^\s/@?#]+(/[^\s@?#]*)?|grpcs?://[^\s/@?#]+/?", text):
        raise ValueError(
            "a URL of http, https, grpc or grpcs; credentials belong in OTEL_EXPORTER_OTLP_HEADERS"
        )
    return text


def _static_peers(text: str) -> str:
    parse_peers(text)
    return text


def _rate_value(text: str) -> str:
    parse_bytes(text)
    return text.strip()


def parse_user_quotas(text: str) -> dict[str, int]:
    """Bytes by user (a name or a number), of "alice=128GiB,1003=16GiB".

    Raises:
        ValueError: not such pairs.
    """
    quotas: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        user, equals, size = part.partition("=")
        if not equals or not user or user in quotas:
            raise ValueError(f"{part!r} is not a new user=bytes")
        quotas[user] = parse_bytes(size)
    return quotas


def _user_quotas_value(text: str) -> str:
    parse_user_quotas(text)
    return text


def _labels_value(text: str) -> str:
    """The text itself, so that every setting is one line; `parse_labels` reads it."""
    parse_labels(text)
    return text


def parse_labels(text: str) -> dict[str, str]:
    """The labels in "rack=A,zone=eu-1".

    Raises:
        ValueError: not pairs of names.
    """
    labels: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = part.partition("=")
        names = re.fullmatch(r"[A-Za-z0-9._-]{1,64}", key) and re.fullmatch(r"[A-Za-z0-9._:/-]{1,128}", value)
        if not equals or not names or key in labels:
            raise ValueError(f"{part!r} is not a new key=value")
        labels[key] = value
    return labels


def _store_value(text: str) -> str:
    """The URL of a store, or nothing."""
    if text and not re.fullmatch(r"[a-z][a-z0-9+.-]*://\S*", text):
        raise ValueError("not a URL")
    if text.startswith("file://") and not text.startswith("file:///"):
        raise ValueError("a file URL has an absolute path: file:///folder")
    if text.rstrip("/").endswith(":"):
        raise ValueError("it names no bucket or container")
    return text.rstrip("/")


def _object_value(text: str) -> str:
    """The text of a JSON object, or nothing."""
    if text and not isinstance(json.loads(text), dict):
        raise ValueError("not a JSON object")
    return text


# The settings that matter most to a trainer: the places of its snapshots and their room.
_SHOWN = ("memory", "store", "peers", "peer_listen")


def _key(default: Any, parse: Callable[[str], Any], allowed: str, shown: str = "") -> Any:
    metadata = {"parse": parse, "allowed": allowed, "shown": shown}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """The settings of `ckptd run`. `load_config` replaces empty strings."""

    runtime_dir: str = _key(
        "", _absolute_path, "an absolute path", "$XDG_RUNTIME_DIR/ckptd, or /tmp/ckptd-<uid>"
    )
    """Folder of the control socket, the lock file, the node id and the log of an auto-started
    daemon. Created with mode 0700; refused if it belongs to another user or other users can write to it.
    """

    segment_dir: str = _key("", _absolute_path, "an absolute path", "/dev/shm/ckptd-<uid>")
    """Folder of the segment files, on tmpfs, so that they live in memory. If
    runtime_dir is not the default, this default gets a suffix derived from it, so that two daemons
    of one user use different folders."""

    allow_disk_segments: bool = _key(False, _boolean_value, "true or false")
    """Accept a segment_dir on a disk filesystem (snapshots then go through the page cache)."""

    memory: str = _key("50%", _memory_value, "at least 1 MiB (units KiB…TiB, KB…TB) or 1% to 100%")
    """Quota for all segments together. A percentage refers to the smallest of physical memory, the
    memory cgroup's limit and the size of the filesystem under segment_dir."""

    listen: str = _key("", _endpoint_value, "an ipc:// endpoint", "ipc://<runtime_dir>/ckptd.sock")
    """Endpoint to which trainers and ckptctl connect."""

    trainer_group: str = _key("", str, "a group's name or number, or empty", "off")
    """Group whose members may attach as users other than the daemon's: they can enter the two folders,
    connect, and map their segments. Empty: only the daemon's own user (and root)."""

    isolate_users: bool = _key(False, _boolean_value, "true or false")
    """Keep the users of trainer_group apart: each has jobs of its own, whose names begin with u<uid>., and
    can neither read, change nor see those of the others. Off: members of trainer_group trust each other."""

    user_quota: str = _key("0", _rate_value, "bytes with units, or 0")
    """Largest memory of each user's segments on this node, with replicas of the user's ranks on other nodes;
    0: only `memory` limits it. Needs isolate_users."""

    user_quotas: str = _key("", _user_quotas_value, "user=bytes pairs, separated by commas")
    """Other limits for some users, by name or number, such as "alice=128GiB,1003=16GiB"; 0: none. A name
    that no user of this node has is ignored, with a warning."""

    node_id: str = _key(
        "", _name_value, "1 to 64 of A-Z a-z 0-9 . _ -", "<hostname>-<random>, kept in runtime_dir"
    )
    """Name of this node in descriptors, in events and for peers."""

    peer_listen: str = _key("", _peer_endpoint, "tcp://address:port, or empty", "off")
    """Endpoint to which other nodes' daemons connect; empty: snapshots stay on this node. Use the
    address of the interface for replication: the wrong network can be forty times slower. Port 0
    chooses a free port."""

    peer_advertise: str = _key("", _host_value, "an address or host name, or empty", "peer_listen's")
    """The address under which peers reach this node, if it differs from the address in peer_listen
    (required for a wildcard there)."""

    peers: str = _key("", _static_peers, "name=tcp://address:port pairs, separated by commas")
    """Nodes that hold replicas in addition to the nodes of a job's ranks: for a job of one rank, or nodes
    that only provide memory. With peer_security = curve, their keys must be trusted."""

    peer_security: str = _key("curve", _choice_value("curve", "plain"), "curve or plain")
    """curve: peers authenticate each other by keys (`ckptctl keys`). plain: anybody who can reach the
    port can read and write snapshots; without keys this is the only mode, even on loopback."""

    peer_access: str = _key("members", _choice_value("members", "trusted"), "members or trusted")
    """Nodes that may act on a run: members (nodes of its ranks, and `peers`), or trusted (every trusted node
    can read and replace the snapshots of every job)."""

    peer_data: str = _key(
        "stream",
        _choice_value("stream", "zmq", "stream-plaintext"),
        "stream, zmq or stream-plaintext",
    )
    """Transport of snapshot bytes. stream: separate connections, encrypted with keys that are exchanged
    under curve. zmq: with the messages, encrypted by curve, three times slower. stream-plaintext: not
    encrypted if both nodes have this setting; anybody on the network can then read and change the
    snapshots. With peer_security = plain nothing is encrypted."""

    peer_data_port: int = _key(0, _within(int, 0, _PORT_MAX), "0 to 65535")
    """Port for streams, on the address of peer_listen; 0 chooses a free port."""

    peer_short_cut: bool = _key(True, _boolean_value, "true or false")
    """Daemons of one user on one host copy snapshots through their segment files instead of sending
    them, if they see each other's segment_dir under the same path."""

    peer_connections: int = _key(1, _within(int, 1, 16), "1 to 16")
    """Data connections per peer, for links that one connection does not fill."""

    peer_bandwidth: str = _key("0", _rate_value, "bytes per second with units, or 0")
    """Limit of the bytes per second that are sent to all peers together; 0: no limit."""

    peer_deadline_s: float = _key(15.0, _within(float, 0.1, 3600), "0.1 to 3600")
    """A peer that does not answer for this time counts as dead, and its replicas move to other nodes."""

    replicas: int = _key(2, _within(int, 0, 16), "0 to 16")
    """Number of other nodes that keep each snapshot (all other nodes, if there are fewer)."""

    replication_slack: int = _key(2, _within(int, 0, 64), "0 to 64")
    """Additional slots of a ring, for snapshots that wait for their transfer to peers."""

    labels: str = _key("", _labels_value, "key=value pairs, separated by commas")
    """Labels of this node, such as "zone=a,rack=17": replicas avoid nodes in the same failure domain."""

    domains: str = _key("zone,rack,host", _names_value, "label names, separated by commas")
    """Labels that define failure domains, the largest first. A node without such a label is a
    domain of its own.
    """

    keys_dir: str = _key("", _absolute_path, "an absolute path", "<runtime_dir>/keys")
    """Folder of this node's key pair and of the trusted public keys."""

    store: str = _key("", _store_value, "a URL such as s3://bucket/prefix or file:///folder", "off")
    """Store for durable checkpoints: object storage, or a folder that all nodes share. Empty: snapshots
    are only in memory, on this node and on peers."""

    store_options: str = _key("", _object_value, "a JSON object")
    """Options for the store, such as {"endpoint_url": "http://10.0.0.9:9000", "region": "eu-1"}. Prefer
    credentials from the environment (AWS_ACCESS_KEY_ID, …) or from the node's role."""

    store_backend: str = _key("auto", _choice_value("auto", "obstore", "fsspec"), "auto, obstore or fsspec")
    """Library that accesses the store. auto: obstore, which needs the least CPU, if it is installed and
    supports the URL; otherwise fsspec, which supports most URLs."""

    store_sign: bool = _key(False, _boolean_value, "true or false")
    """Sign the manifests of checkpoints with this node's key (`ckptctl keys new-signer`)."""

    store_signed_only: bool = _key(False, _boolean_value, "true or false")
    """Accept only manifests that a trusted signer signed (`ckptctl keys trust-signer`), and so only images
    with the cryptographic digests in them."""

    store_deadline_s: float = _key(600.0, _within(float, 1, 86_400), "1 to 86400")
    """If an object is not stored within this time, including all retries, its checkpoint is abandoned."""

    persist_every: int = _key(1, _within(int, 1, 1 << 40), "at least 1")
    """Minimum number of iterations between durable checkpoints. Doubled as often as the store or
    persist_every_s requires: all ranks use multiples of one number, so that they choose the same
    iterations without communication.
    """

    persist_every_s: float = _key(300.0, _within(float, 0, 1e9), "0 to 1e9")
    """Minimum number of seconds between durable checkpoints (0: as often as the store can sustain)."""

    persist_keep_last: int = _key(3, _within(int, 1, 1_000_000), "at least 1")
    """Number of newest durable checkpoints to keep."""

    persist_keep_every: int = _key(0, _within(int, 0, 1 << 40), "0 or more")
    """Also keep durable checkpoints of iterations that are multiples of this (0: none)."""

    persist_keep_for_s: float = _key(0.0, _within(float, 0, 1e9), "0 to 1e9")
    """Also keep durable checkpoints younger than this."""

    persist_check: str = _key("size", _choice_value("size", "full"), "size or full")
    """Check of the store before a checkpoint counts. size: every object exists with its full size.
    full: every object is read back and compared with its digests.
    """

    persist_threads: int = _key(4, _within(int, 1, 64), "1 to 64")
    """Number of simultaneous transfers between this node and the store."""

    persist_bandwidth: str = _key("0", _rate_value, "bytes per second with units, or 0")
    """Limit of this node's upload rate, such as 500MB; 0: no limit."""

    digest_threads: int = _key(0, _within(int, 0, 64), "0 to 64")
    """Threads that digest and seal filled slots; 0: half of the CPUs (1 to 4), or an eighth of them
    if that is more (up to 16).
    """

    nice: int = _key(10, _within(int, 0, 19), "0 to 19")
    """Niceness of the daemon, so that the scheduler prefers training."""

    mlock: str = _key("auto", _choice_value("auto", "on", "off"), "auto, on or off")
    """Lock segments in memory, so that they are never swapped: auto tries and reports, on refuses
    a segment that cannot be locked, off does not try."""

    hugepages: str = _key("auto", _choice_value("auto", "off"), "auto or off")
    """auto advises huge pages for segments (they take effect on a tmpfs mounted with
    huge=advise); off leaves it."""

    retain_detached_s: float = _key(3600.0, _within(float, 0, 1e9), "0 to 1e9")
    """How long the segments of a run without a live trainer are kept; 0: for ever. The time starts when
    the last owner detaches, or when a restarted daemon finds them."""

    idle_exit_s: float = _key(0.0, _within(float, 0, 1e9), "0 to 1e9")
    """Exit when no trainer has been attached for this time; the segments stay. 0: never. Used by daemons
    that a trainer started."""

    started_by_trainer: bool = _key(False, _boolean_value, "true or false")
    """Exit when an operator starts a daemon with `ckptd run`, which takes over the memory. Set for daemons
    that a trainer started."""

    scrub_interval_s: float = _key(300.0, _within(float, 0, 1e9), "0 to 1e9")
    """Interval in which every sealed slot is verified against its digests in the background; 0: off."""

    drain_timeout_s: float = _key(30.0, _within(float, 0, 3600), "0 to 3600")
    """How long a stop waits until filled slots are sealed. The next start seals the rest."""

    metrics: str = _key("", _metrics_value, "address:port, unix:/path, or empty", "off")
    """Where Prometheus scrapes this daemon (`GET /metrics`; docs/metrics.md): an address with a port (0
    chooses a free one), or a unix socket, which trainer_group can connect to, unless isolate_users is set.
    There is no authentication, and the page names jobs, runs and nodes. Needs the package prometheus_client
    (`pip install 'ckptd[metrics]'`)."""

    dash: str = _key("", _metrics_value, "address:port, unix:/path, or empty", "off")
    """Where this daemon serves the page of `ckptctl dash`: an address with a port (0 chooses a free one), or
    a unix socket, which trainer_group can connect to, unless isolate_users is set. Beyond loopback, and with
    isolate_users on loopback, too, viewers need the token in <runtime_dir>/dash.token, which the daemon makes
    (docs/operations.md)."""

    otel_endpoint: str = _key(
        "",
        _otel_value,
        "http://host:port, https://host:port, grpc://host:port, grpcs://host:port, or empty",
        "off",
    )
    """OTLP collector that gets a trace of each recovery (docs/observability.md#traces-of-recoveries), over
    HTTP (/v1/traces is added) or gRPC (grpcs: with TLS). Empty: the one that OpenTelemetry's own variables
    name, if any (OTEL_EXPORTER_OTLP_ENDPOINT, …), which hold credentials and certificates, too. Needs `pip
    install 'ckptd[otel]'`, for gRPC `'ckptd[otel-grpc]'`."""

    max_events: int = _key(10_000, _within(int, 16, 1_000_000), "16 to 1000000")
    """Number of events that are kept in memory for `ckptctl events`."""

    max_sessions: int = _key(1024, _within(int, 1, 65_536), "1 to 65536")
    """Largest number of attached trainers."""

    log_level: str = _key(
        "info", _choice_value("debug", "info", "warning", "error"), "debug, info, warning or error"
    )
    """Lowest severity of log records that are written to stderr."""

    log_format: str = _key("text", _choice_value("text", "json"), "text or json")
    """One line of text, or one JSON object, per log record."""


def given_settings(config: DaemonConfig) -> dict[str, str]:
    """The settings that a trainer compares with its own environment, without credentials."""
    return {
        key: public_url(text) if key == "store" else text
        for key in _SHOWN
        if isinstance(text := getattr(config, key), str)
    }
