"""Every setting of the daemon, its default, and what it means.

The text after a setting is its documentation: `ckptd.config.daemon_config` makes the command line's
help and the table in `docs/configuration.md` of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptd.config.config_values import (
    absolute_path,
    boolean_value,
    choice_value,
    endpoint_value,
    host_value,
    integer_value,
    labels_value,
    memory_value,
    name_value,
    names_value,
    number_value,
    object_value,
    peer_endpoint,
    rate_value,
    static_peers,
    store_value,
)
from ckptd.storage.stores.store_base import public_url

__all__ = ["TOLD", "DaemonConfig", "given_settings"]

# What a trainer's snapshots depend on most: where they go, and what room they have.
TOLD = ("memory", "store", "peers", "peer_listen")


def _key(default: Any, parse: Callable[[str], Any], allowed: str, shown: str = "") -> Any:
    metadata = {"parse": parse, "allowed": allowed, "shown": shown}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """What `ckptd run` needs to know. Empty strings were replaced by `load_config`."""

    runtime_dir: str = _key(
        "", absolute_path, "an absolute path", "$XDG_RUNTIME_DIR/ckptd, or /tmp/ckptd-<uid>"
    )
    """Folder of the control socket, the lock file, the node id and the log of an auto-started
    daemon. Made with mode 0700; refused if it belongs to another user or others may write to it.
    """

    segment_dir: str = _key("", absolute_path, "an absolute path", "/dev/shm/ckptd-<uid>")
    """Folder of the segment files, on tmpfs or hugetlbfs, so that they live in memory. When
    runtime_dir is not the default, the default gets a suffix made from it, so that two daemons
    of one user do not meet."""

    allow_disk_segments: bool = _key(False, boolean_value, "true or false")
    """Accept a segment_dir on a disk filesystem (snapshots then go through the page cache)."""

    memory: str = _key("50%", memory_value, "at least 1 MiB (units KiB…TiB, KB…TB) or 1% to 100%")
    """Quota for all segments together. A share is taken of the smallest of physical memory, the
    memory cgroup's limit and the size of the filesystem under segment_dir."""

    listen: str = _key("", endpoint_value, "an ipc:// endpoint", "ipc://<runtime_dir>/ckptd.sock")
    """Where trainers and ckptctl connect."""

    trainer_group: str = _key("", str, "a group's name or number, or empty", "off")
    """Group whose members may attach although they are other users than the daemon: they can enter the two
    folders, connect, and map their segments. Empty: only the daemon's own user (and root)."""

    node_id: str = _key(
        "", name_value, "1 to 64 of A-Z a-z 0-9 . _ -", "<hostname>-<random>, kept in runtime_dir"
    )
    """Name of this node in descriptors, events and towards peers."""

    peer_listen: str = _key("", peer_endpoint, "tcp://address:port, or empty", "off")
    """Where other nodes' daemons connect; empty means that snapshots stay on this node. Name the
    address of the interface that replication shall use: the wrong network costs a factor of forty.
    Port 0 takes a free one."""

    peer_advertise: str = _key("", host_value, "an address or host name, or empty", "peer_listen's")
    """The address that peers are told, where it is not the one that is listened on (a wildcard in
    peer_listen needs it)."""

    peers: str = _key("", static_peers, "name=tcp://address:port pairs, separated by commas")
    """Nodes that hold replicas beside those that the ranks of a job tell of each other: for a job of
    one rank, or nodes that only lend their memory. Under curve, their keys are the trusted ones."""

    peer_security: str = _key("curve", choice_value("curve", "plain"), "curve or plain")
    """curve: peers authenticate each other by keys (`ckptctl keys`). plain: anybody who can reach the
    port can read and write snapshots; the only way to listen without keys, on loopback, too."""

    peer_access: str = _key("members", choice_value("members", "trusted"), "members or trusted")
    """Which nodes may act on a run: members (nodes of its ranks, and `peers`), or every trusted node, which can
    then read and replace the snapshots of every job."""

    peer_data: str = _key(
        "stream",
        choice_value("stream", "zmq", "stream-plaintext"),
        "stream, zmq or stream-plaintext",
    )
    """How bytes travel. stream: over connections of their own, encrypted with keys that are agreed on
    under curve. zmq: with the messages, encrypted by curve, three times slower. stream-plaintext: not
    encrypted where both nodes say so; whoever reads the network reads the snapshots, and whoever
    changes its packets changes them. Under peer_security = plain nothing is encrypted."""

    peer_data_port: int = _key(0, integer_value(0, 65_535), "0 to 65535")
    """Port for streams, on the address of peer_listen; 0 takes a free one."""

    peer_short_cut: bool = _key(True, boolean_value, "true or false")
    """Daemons of one user on one host copy snapshots through their segment files, instead of sending
    them, where they see each other's segment_dir under the same path."""

    peer_connections: int = _key(1, integer_value(1, 16), "1 to 16")
    """Data connections per peer, for links that one does not fill."""

    peer_bandwidth: str = _key("0", rate_value, "bytes per second with units, or 0")
    """At most so many bytes per second are sent to all peers together; 0 is no limit."""

    peer_deadline_s: float = _key(15.0, number_value(0.1, 3600), "0.1 to 3600")
    """A peer that does not answer for so long is dead: its replicas are made elsewhere."""

    replicas: int = _key(2, integer_value(0, 16), "0 to 16")
    """On how many other nodes each snapshot is kept (as many as there are, if fewer)."""

    replication_slack: int = _key(2, integer_value(0, 64), "0 to 64")
    """Slots that a ring has beyond what one node needs, for snapshots that wait for peers."""

    labels: str = _key("", labels_value, "key=value pairs, separated by commas")
    """Where this node stands, such as "zone=a,rack=17": replicas avoid sharing what fails together."""

    domains: str = _key("zone,rack,host", names_value, "label names, separated by commas")
    """Failure domains, the largest first. A node without such a label is a domain of its own."""

    keys_dir: str = _key("", absolute_path, "an absolute path", "<runtime_dir>/keys")
    """Folder of this node's key pair and of the public keys it trusts."""

    store: str = _key("", store_value, "a URL such as s3://bucket/prefix or file:///folder", "off")
    """Where snapshots become durable: object storage, or a folder that all nodes share. Empty: they live
    in memory only, here and on peers."""

    store_options: str = _key("", object_value, "a JSON object")
    """Options for the store, such as {"endpoint_url": "http://10.0.0.9:9000", "region": "eu-1"}. Credentials
    are better given by the environment (AWS_ACCESS_KEY_ID, …) or by the node's role."""

    store_backend: str = _key(
        "auto", choice_value("auto", "obstore", "fsspec"), "auto, obstore or fsspec"
    )
    """What speaks to the store. auto: obstore, which needs the least CPU, where it is installed and knows
    the URL; otherwise fsspec, which knows most."""

    store_sign: bool = _key(False, boolean_value, "true or false")
    """Sign the manifests of checkpoints with this node's key (`ckptctl keys new-signer`)."""

    store_signed_only: bool = _key(False, boolean_value, "true or false")
    """Believe only manifests that a trusted signer signed (`ckptctl keys trust-signer`), and so only images
    that have the cryptographic digests in them."""

    store_deadline_s: float = _key(600.0, number_value(1, 86_400), "1 to 86400")
    """An object that is not stored within this time, with all retries, gives up its checkpoint."""

    persist_every: int = _key(1, integer_value(1, 1 << 40), "at least 1")
    """Iterations between durable checkpoints, at least. Doubled as often as the store, or persist_every_s,
    needs it: all ranks take the multiples of one number, so that they meet without asking each other."""

    persist_every_s: float = _key(300.0, number_value(0, 1e9), "0 to 1e9")
    """Seconds between durable checkpoints, at least (0: as often as the store can sustain)."""

    persist_keep_last: int = _key(3, integer_value(1, 1_000_000), "at least 1")
    """How many of the newest durable checkpoints stay."""

    persist_keep_every: int = _key(0, integer_value(0, 1 << 40), "0 or more")
    """Durable checkpoints of iterations that are multiples of this stay, too (0: none)."""

    persist_keep_for_s: float = _key(0.0, number_value(0, 1e9), "0 to 1e9")
    """Durable checkpoints younger than this stay, too."""

    persist_check: str = _key("size", choice_value("size", "full"), "size or full")
    """What is asked of the store before a checkpoint counts. size: that every object is there in full.
    full: every object is read back and compared with its digests."""

    persist_threads: int = _key(4, integer_value(1, 64), "1 to 64")
    """Transfers between this node and the store at a time."""

    persist_bandwidth: str = _key("0", rate_value, "bytes per second with units, or 0")
    """Limit for what this node uploads, such as 500MB; 0: none."""

    digest_threads: int = _key(0, integer_value(0, 64), "0 to 64")
    """Threads that digest and seal filled slots; 0 means half of the CPUs, 1 to 4, or an eighth of them where that is more, up to 16."""

    nice: int = _key(10, integer_value(0, 19), "0 to 19")
    """Scheduling niceness of the daemon, so that training comes first."""

    mlock: str = _key("auto", choice_value("auto", "on", "off"), "auto, on or off")
    """Lock segments in memory, so that they are never swapped: auto tries and reports, on refuses
    a segment that cannot be locked, off does not try."""

    hugepages: str = _key("auto", choice_value("auto", "off"), "auto or off")
    """auto advises huge pages for segments (they take effect on a tmpfs mounted with
    huge=advise); off leaves it."""

    retain_detached_s: float = _key(3600.0, number_value(0, 1e9), "0 to 1e9")
    """How long the segments of a run without a live trainer are kept; 0 keeps them for good. The
    clock starts when the last owner goes, or when a restarted daemon finds them."""

    idle_exit_s: float = _key(0.0, number_value(0, 1e9), "0 to 1e9")
    """Exit when no trainer was attached for so long; the segments stay. 0 means never. Used by
    daemons that a trainer started by itself."""

    started_by_trainer: bool = _key(False, boolean_value, "true or false")
    """Make way for a daemon that is started by `ckptd run`, which takes over the memory. Set for
    daemons that a trainer started by itself."""

    scrub_interval_s: float = _key(300.0, number_value(0, 1e9), "0 to 1e9")
    """How often every sealed slot is verified against its digests in the background; 0 is off."""

    drain_timeout_s: float = _key(30.0, number_value(0, 3600), "0 to 3600")
    """How long a stop waits for filled slots to be sealed. What is left is sealed at the next
    start."""

    max_events: int = _key(10_000, integer_value(16, 1_000_000), "16 to 1000000")
    """How many events are kept in memory for `ckptctl events`."""

    max_sessions: int = _key(1024, integer_value(1, 65_536), "1 to 65536")
    """How many trainers may be attached at a time."""

    log_level: str = _key(
        "info", choice_value("debug", "info", "warning", "error"), "debug, info, warning or error"
    )
    """Least severe log record that is written to stderr."""

    log_format: str = _key("text", choice_value("text", "json"), "text or json")
    """One line of text, or one JSON object, per log record."""


def given_settings(config: DaemonConfig) -> dict[str, str]:
    """What a trainer compares with its own environment, without credentials."""
    return {
        key: public_url(text) if key == "store" else text
        for key in TOLD
        if isinstance(text := getattr(config, key), str)
    }
