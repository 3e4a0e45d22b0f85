"""Every setting of the daemon: one key in TOML, one `CKPTD_<KEY>`, one flag `--key`.

A value comes from, in rising precedence, the built-in default, the TOML file, the environment,
the command line; whichever it was is remembered and named when the value is refused. This is the
only module that reads the environment. `docs/configuration.md` carries the table that
`render_table` makes from `DaemonConfig`, and a test holds the two together.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import hashlib
import inspect
import json
import os
import re
import textwrap
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = [
    "ConfigError",
    "DaemonConfig",
    "LoadedConfig",
    "default_endpoint",
    "default_runtime_dir",
    "endpoint_for",
    "field_docs",
    "load_config",
    "notify_settings",
    "parse_bytes",
    "parse_labels",
    "parse_memory",
    "parse_peers",
    "render_table",
    "render_toml",
]

DEFAULT_FILE = "/etc/ckptd/ckptd.toml"
IPC_PATH_LIMIT = 107  # sun_path of a unix socket, less the terminating zero
_UNITS = {
    "": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


class ConfigError(ValueError):
    """A setting that cannot be used; says which key, which value, from where, what is allowed."""


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


def _memory(text: str) -> str:
    value = parse_memory(text)
    if isinstance(value, int) and value < 1 << 20:
        raise ValueError("at least 1 MiB")
    return text.strip()


def _number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise ValueError("out of range")
        return value

    return parse


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError("out of range")
        return value

    return parse


def _choice(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError("not one of the words")
        return text.lower()

    return parse


def _boolean(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError("not a truth value")
    return text.lower() in _TRUE


def _absolute_path(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError("not an absolute path")
    return os.path.normpath(text)


def _endpoint(text: str) -> str:
    if text.startswith("tcp://"):
        raise ValueError("trainers connect over ipc; peers have peer_listen")
    if not text.startswith("ipc://") or len(text) == len("ipc://"):
        raise ValueError("not an ipc endpoint")
    if len(os.fsencode(text.removeprefix("ipc://"))) > IPC_PATH_LIMIT:
        raise ValueError(f"a socket path has at most {IPC_PATH_LIMIT} bytes; shorten runtime_dir")
    return text


def _peer_endpoint(text: str) -> str:
    if text and not re.fullmatch(r"tcp://(\[[0-9a-fA-F:.%]+\]|[^:/\s]+):[0-9]{1,5}", text):
        raise ValueError("not a tcp endpoint")
    return text


def _host(text: str) -> str:
    if text and not re.fullmatch(r"\[[0-9a-fA-F:.%]+\]|[A-Za-z0-9._-]+", text):
        raise ValueError("not an address or host name")
    return text


def parse_peers(text: str) -> dict[str, str]:
    """Endpoint by node id, of "a=tcp://10.0.0.1:7077,b=tcp://10.0.0.2:7077".

    Raises:
        ValueError: not such pairs.
    """
    peers: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, endpoint = part.partition("=")
        if not equals or _node_id(name) in peers or not _peer_endpoint(endpoint):
            raise ValueError(f"{part!r} is not a new name=tcp://address:port")
        peers[name] = endpoint
    return peers


def _static_peers(text: str) -> str:
    parse_peers(text)
    return text


def _rate(text: str) -> str:
    parse_bytes(text)
    return text.strip()


def _labels(text: str) -> str:
    """Checked here, read by `parse_labels`; kept as text so that every setting is one line."""
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
        names = re.fullmatch(r"[A-Za-z0-9._-]{1,64}", key) and re.fullmatch(
            r"[A-Za-z0-9._:/-]{1,128}", value
        )
        if not equals or not names or key in labels:
            raise ValueError(f"{part!r} is not a new key=value")
        labels[key] = value
    return labels


def _names(text: str) -> str:
    if not all(re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name) for name in text.split(",") if name):
        raise ValueError("not a list of names")
    return text


def _node_id(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text):
        raise ValueError("not a name")
    return text


def _key(default: Any, parse: Callable[[str], Any], allowed: str, shown: str = "") -> Any:
    metadata = {"parse": parse, "allowed": allowed, "shown": shown}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """What `ckptd run` needs to know. Empty strings were replaced by `load_config`."""

    runtime_dir: str = _key(
        "", _absolute_path, "an absolute path", "$XDG_RUNTIME_DIR/ckptd, or /tmp/ckptd-<uid>"
    )
    """Folder of the control socket, the lock file, the node id and the log of an auto-started
    daemon. Made with mode 0700; refused if it belongs to another user or others may write to it.
    """

    segment_dir: str = _key("", _absolute_path, "an absolute path", "/dev/shm/ckptd-<uid>")
    """Folder of the segment files, on tmpfs or hugetlbfs, so that they live in memory. When
    runtime_dir is not the default, the default gets a suffix made from it, so that two daemons
    of one user do not meet."""

    allow_disk_segments: bool = _key(False, _boolean, "true or false")
    """Accept a segment_dir on a disk filesystem (snapshots then go through the page cache)."""

    memory: str = _key("50%", _memory, "at least 1 MiB (units KiB…TiB, KB…TB) or 1% to 100%")
    """Quota for all segments together. A share is taken of the smallest of physical memory, the
    memory cgroup's limit and the size of the filesystem under segment_dir."""

    listen: str = _key("", _endpoint, "an ipc:// endpoint", "ipc://<runtime_dir>/ckptd.sock")
    """Where trainers and ckptctl connect."""

    node_id: str = _key(
        "", _node_id, "1 to 64 of A-Z a-z 0-9 . _ -", "<hostname>-<random>, kept in runtime_dir"
    )
    """Name of this node in descriptors, events and towards peers."""

    peer_listen: str = _key("", _peer_endpoint, "tcp://address:port, or empty", "off")
    """Where other nodes' daemons connect; empty means that snapshots stay on this node. Name the
    address of the interface that replication shall use: the wrong network costs a factor of forty.
    Port 0 takes a free one."""

    peer_advertise: str = _key("", _host, "an address or host name, or empty", "peer_listen's")
    """The address that peers are told, where it is not the one that is listened on (a wildcard in
    peer_listen needs it)."""

    peers: str = _key("", _static_peers, "name=tcp://address:port pairs, separated by commas")
    """Nodes that hold replicas beside those that the ranks of a job tell of each other: for a job of
    one rank, or nodes that only lend their memory. Under curve, their keys are the trusted ones."""

    peer_security: str = _key("curve", _choice("curve", "plain"), "curve or plain")
    """curve: peers authenticate each other by keys (`ckptctl keys`). plain: anybody who can reach the
    port can read and write snapshots; the only way to listen without keys, on loopback, too."""

    peer_data: str = _key("stream", _choice("stream", "zmq"), "stream or zmq")
    """How bytes travel: stream is fastest, authenticated by a ticket from the encrypted control
    connection, and not encrypted itself; zmq encrypts them with the rest (under curve)."""

    peer_data_port: int = _key(0, _integer(0, 65_535), "0 to 65535")
    """Port for peer_data = stream, on the address of peer_listen; 0 takes a free one."""

    peer_short_cut: bool = _key(True, _boolean, "true or false")
    """Daemons of one user on one host copy snapshots through their segment files, instead of sending
    them, where they see each other's segment_dir under the same path."""

    peer_connections: int = _key(1, _integer(1, 16), "1 to 16")
    """Data connections per peer, for links that one does not fill."""

    peer_bandwidth: str = _key("0", _rate, "bytes per second with units, or 0")
    """At most so many bytes per second are sent to all peers together; 0 is no limit."""

    peer_deadline_s: float = _key(15.0, _number(0.1, 3600), "0.1 to 3600")
    """A peer that does not answer for so long is dead: its replicas are made elsewhere."""

    replicas: int = _key(2, _integer(0, 16), "0 to 16")
    """On how many other nodes each snapshot is kept (as many as there are, if fewer)."""

    replication_slack: int = _key(2, _integer(0, 64), "0 to 64")
    """Slots that a ring has beyond what one node needs, for snapshots that wait for peers."""

    labels: str = _key("", _labels, "key=value pairs, separated by commas")
    """Where this node stands, such as "zone=a,rack=17": replicas avoid sharing what fails together."""

    domains: str = _key("zone,rack,host", _names, "label names, separated by commas")
    """Failure domains, the largest first. A node without such a label is a domain of its own."""

    keys_dir: str = _key("", _absolute_path, "an absolute path", "<runtime_dir>/keys")
    """Folder of this node's key pair and of the public keys it trusts."""

    digest_threads: int = _key(0, _integer(0, 64), "0 to 64")
    """Threads that digest and seal filled slots; 0 means half of the CPUs, 1 to 4."""

    nice: int = _key(10, _integer(0, 19), "0 to 19")
    """Scheduling niceness of the daemon, so that training comes first."""

    mlock: str = _key("auto", _choice("auto", "on", "off"), "auto, on or off")
    """Lock segments in memory, so that they are never swapped: auto tries and reports, on refuses
    a segment that cannot be locked, off does not try."""

    hugepages: str = _key("auto", _choice("auto", "off"), "auto or off")
    """auto advises huge pages for segments (they take effect on a tmpfs mounted with
    huge=advise); off leaves it."""

    retain_detached_s: float = _key(3600.0, _number(0, 1e9), "0 to 1e9")
    """How long the segments of a run without a live trainer are kept; 0 keeps them for good. The
    clock starts when the last owner goes, or when a restarted daemon finds them."""

    idle_exit_s: float = _key(0.0, _number(0, 1e9), "0 to 1e9")
    """Exit when no trainer was attached for so long; the segments stay. 0 means never. Used by
    daemons that a trainer started by itself."""

    scrub_interval_s: float = _key(300.0, _number(0, 1e9), "0 to 1e9")
    """How often every sealed slot is verified against its digests in the background; 0 is off."""

    drain_timeout_s: float = _key(30.0, _number(0, 3600), "0 to 3600")
    """How long a stop waits for filled slots to be sealed. What is left is sealed at the next
    start."""

    max_events: int = _key(10_000, _integer(16, 1_000_000), "16 to 1000000")
    """How many events are kept in memory for `ckptctl events`."""

    max_sessions: int = _key(1024, _integer(1, 65_536), "1 to 65536")
    """How many trainers may be attached at a time."""

    log_level: str = _key(
        "info", _choice("debug", "info", "warning", "error"), "debug, info, warning or error"
    )
    """Least severe log record that is written to stderr."""

    log_format: str = _key("text", _choice("text", "json"), "text or json")
    """One line of text, or one JSON object, per log record."""


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, where each value came from, and what looked like a slip."""

    config: DaemonConfig
    sources: Mapping[str, str]
    warnings: tuple[str, ...]


def load_config(
    flags: Mapping[str, str] | None = None,
    *,
    file: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """The validated configuration: defaults < TOML file < environment < flags.

    Args:
        flags: values given on the command line, by key.
        file: TOML file that must exist; default `CKPTD_CONFIG`, else /etc/ckptd/ckptd.toml if
            there is one.
        environ: default `os.environ`.
    Raises:
        ConfigError: a value or key that cannot be used.
    """
    environ = os.environ if environ is None else environ
    names = _fields()
    texts = _read_toml(file or environ.get("CKPTD_CONFIG"))
    for key in names:
        variable = "CKPTD_" + key.upper()
        if variable in environ:
            texts[key] = (environ[variable], f"environment variable {variable}")
    for key, text in (flags or {}).items():
        if key not in names:
            raise ConfigError(f"unknown setting {key!r}{_did_you_mean(key)}")
        texts[key] = (text, "flag --" + key.replace("_", "-"))
    values = {key: _parse(key, text, source) for key, (text, source) in texts.items()}
    sources = {key: texts[key][1] if key in texts else "default" for key in names}
    return LoadedConfig(_complete(values, environ), sources, _slips(environ))


def default_runtime_dir(environ: Mapping[str, str] | None = None) -> str:
    """Where a daemon of this user keeps its socket unless told otherwise."""
    environ = os.environ if environ is None else environ
    if text := environ.get("CKPTD_RUNTIME_DIR"):
        return os.path.normpath(text)
    return _builtin_runtime_dir(environ)


def endpoint_for(runtime_dir: str) -> str:
    """Control endpoint of a daemon with that runtime folder."""
    return f"ipc://{runtime_dir}/ckptd.sock"


def default_endpoint(environ: Mapping[str, str] | None = None) -> str:
    """Where clients look for the daemon: `CKPTD_LISTEN`, else the socket in the runtime folder."""
    environ = os.environ if environ is None else environ
    return environ.get("CKPTD_LISTEN") or endpoint_for(default_runtime_dir(environ))


def notify_settings(environ: Mapping[str, str] | None = None) -> tuple[str | None, float | None]:
    """The service manager's notification socket, and its watchdog period in seconds."""
    environ = os.environ if environ is None else environ
    period = environ.get("WATCHDOG_USEC", "")
    for_us = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    watchdog_s = int(period) / 1e6 if period.isdigit() and int(period) > 0 and for_us else None
    return environ.get("NOTIFY_SOCKET"), watchdog_s


@cache
def field_docs() -> dict[str, str]:
    """The sentence under each field of `DaemonConfig`, on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(DaemonConfig)))
    body = tree.body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            assert isinstance(text.value, ast.Constant)
            docs[field.target.id] = " ".join(str(text.value.value).split())
    return docs


def render_table() -> str:
    """The settings as a Markdown table, for the documentation."""
    lines = ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    for key, field in _fields().items():
        default = _default_text(field)
        lines.append(f"| `{key}` | `{default}` | {_allowed(field)} | {field_docs()[key]} |")
    return "\n".join(lines) + "\n"


def render_toml(loaded: LoadedConfig) -> str:
    """The configuration as TOML, each value with where it came from."""
    lines = []
    for key in _fields():
        value = getattr(loaded.config, key)
        text = json.dumps(value, ensure_ascii=False)
        lines.append(f"{key} = {text}  # {loaded.sources[key]}")
    return "\n".join(lines) + "\n"


def _complete(values: dict[str, Any], environ: Mapping[str, str]) -> DaemonConfig:
    """Fill in the defaults that depend on the user and on other keys."""
    usual = _builtin_runtime_dir(environ)
    runtime_dir = values.setdefault("runtime_dir", usual)
    if "segment_dir" not in values:
        suffix = hashlib.sha256(os.fsencode(runtime_dir)).hexdigest()[:8]
        values["segment_dir"] = f"/dev/shm/ckptd-{os.getuid()}" + (
            "" if runtime_dir == usual else f"-{suffix}"
        )
    if "listen" not in values:
        values["listen"] = _parse("listen", endpoint_for(runtime_dir), "made from runtime_dir")
    values.setdefault("keys_dir", f"{runtime_dir}/keys")
    return DaemonConfig(**values)


def _builtin_runtime_dir(environ: Mapping[str, str]) -> str:
    base = environ.get("XDG_RUNTIME_DIR", "")
    return f"{base}/ckptd" if base.startswith("/") else f"/tmp/ckptd-{os.getuid()}"


def _read_toml(file: str | None) -> dict[str, tuple[str, str]]:
    path = Path(file or DEFAULT_FILE)
    if file is None and not path.exists():
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error
    found: dict[str, tuple[str, str]] = {}
    for key, value in table.items():
        if key not in _fields():
            raise ConfigError(f"unknown setting {key!r} in {path}{_did_you_mean(key)}")
        if not isinstance(value, str | int | float):
            raise ConfigError(f"{key} = {value!r} in {path}: expected {_allowed(_fields()[key])}")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        found[key] = (text, f"file {path}")
    return found


def _parse(key: str, text: str, source: str) -> Any:
    field = _fields()[key]
    try:
        return field.metadata["parse"](text)
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"{key} = {text!r} (from {source}) cannot be used: expected {_allowed(field)} ({error})"
        ) from error


def _fields() -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(DaemonConfig)}


def _allowed(field: dataclasses.Field[Any]) -> str:
    return str(field.metadata["allowed"])


def _default_text(field: dataclasses.Field[Any]) -> str:
    shown = field.metadata["shown"] or field.default
    return str(shown).lower() if isinstance(shown, bool) else str(shown)


def _did_you_mean(key: str) -> str:
    close = difflib.get_close_matches(key, list(_fields()), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _slips(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Environment variables that are almost, but not, a setting.

    Unknown `CKPTD_` variables are no error: the client has some of its own.
    """
    known = {"CKPTD_" + key.upper() for key in _fields()} | {"CKPTD_CONFIG", "CKPTD_ENDPOINT"}
    found = []
    for name in environ:
        if name.startswith("CKPTD_") and name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.85)
            found += [f"{name} is not a setting; did you mean {close[0]}?"] if close else []
    return tuple(found)
