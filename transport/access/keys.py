"""CURVE keys: the key pair of a node, and a folder of the keys that it trusts.

    <folder>/node.key           the public key, for others to trust
    <folder>/node.key_secret    both keys, 0600
    <folder>/trusted/<node>.key the public key of another node; the file's name is the node's id
    <folder>/trusted/<node>~previous.key  that node's key before, as long as both are accepted

The files are ZeroMQ certificates, so its own tools read them. The metadata of a trusted key may hold
``expires``, unix seconds: the key is valid until then. Changes to ``trusted`` take effect without a restart.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Self

import zmq
from zmq.auth import load_certificate
from zmq.utils import z85

from ckptd.private_files import new_private_file, replace_private_file

logger = logging.getLogger(__name__)

REREAD_S = 1.0  # a stranger who keeps connecting costs one directory scan a second
NODE_NAME = re.compile(r"(?!\.\.?\Z)[A-Za-z0-9._-]{1,64}\Z")
EXPIRES = re.compile(r'^\s*expires\s*=\s*"(\d{1,12})"\s*$', re.MULTILINE)
PREVIOUS = "~previous"  # no node name has a tilde
ENDPOINT = re.compile(r"tcp://(?P<host>\[[^\]]+\]|[^:\[\]]+):(?P<port>\d{1,5}|\*)\Z")


class KeysError(ValueError):
    """Key files that are missing, unreadable or not safe; says which, and what to do."""


class Keys:
    """The key pair of this node, and the keys that it trusts. Keys are Z85, 40 characters."""

    def __init__(self, folder: Path, public: str, secret: str) -> None:
        self.folder = folder
        self.public = public
        self.secret = secret
        self.trust = Trust(folder)

    def __repr__(self) -> str:
        return f"Keys({str(self.folder)!r}, public={self.public!r})"  # never the secret

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The pair that `create` made.

        Raises:
            KeysError: there is none, it is damaged, or others may read the secret.
        """
        path = Path(folder) / "node.key_secret"
        try:
            mode = path.stat().st_mode
            public, secret = _load_certificate(path)
        except FileNotFoundError as error:
            raise KeysError(f"there is no {path}; `ckptctl keys new` makes a key pair") from error
        except (OSError, ValueError) as error:
            raise KeysError(f"no usable key in {path}: {error}") from error
        if mode & 0o077:
            raise KeysError(f"{path} is readable by others; run `chmod 600 {path}`")
        if secret is None:
            raise KeysError(f"{path} holds no secret key")
        for each in (Path(folder), Path(folder) / "trusted", path):
            _check_ours(each)
        return cls(Path(folder), checked_key(public), checked_key(secret))

    @classmethod
    def create(cls, folder: Path) -> Self:
        """Make a pair, and the folder, with mode 0700.

        Raises:
            KeysError: there is a key already; it is never overwritten.
        """
        folder = Path(folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        (folder / "trusted").mkdir(mode=0o700, exist_ok=True)
        public, secret = _new_pair()
        _write(new_private_file, folder / "node.key_secret", _certificate(public, secret))
        _write(new_private_file, folder / "node.key", _certificate(public))
        return cls(folder, public, secret)

    @classmethod
    def rotate(cls, folder: Path) -> Self:
        """Replace the pair by a new one. A running daemon keeps the pair that it loaded.

        Raises:
            KeysError: there is no pair to replace.
        """
        found = cls.load(folder)
        public, secret = _new_pair()
        _write(replace_private_file, found.folder / "node.key_secret", _certificate(public, secret))
        _write(replace_private_file, found.folder / "node.key", _certificate(public))
        return cls(found.folder, public, secret)


def _new_pair() -> tuple[str, str]:
    """A pair whose public key can be typed after a command: a leading dash would make it an option."""
    while True:
        public, secret = (key.decode("ascii") for key in zmq.curve_keypair())
        if not public.startswith("-"):
            return public, secret


def checked_key(key: str | bytes) -> str:
    """A Z85 key of 40 characters.

    Raises:
        KeysError: it is not.
    """
    text = key.decode("ascii", "replace") if isinstance(key, bytes) else key
    try:
        if len(text) == 40 and len(z85.decode(text)) == 32:
            return text
    except (KeyError, ValueError, struct.error):
        pass  # characters outside the alphabet, or five of too large a value: as a wrong length
    raise KeysError("a key has 40 characters of Z85")


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A key that may connect as ``node``, until ``expires_s`` (unix seconds; infinity: for ever)."""

    node: str
    public: str
    expires_s: float = float("inf")
    previous: bool = False  # the node has a newer one

    def valid_at(self, now_s: float) -> bool:
        return now_s < self.expires_s


def trust(
    folder: Path,
    name: str,
    public_key: str,
    *,
    valid_for_s: float | None = None,
    keep_previous_s: float = 0.0,
) -> None:
    """Let the node ``name`` connect, with this key instead of its earlier key.

    Args:
        valid_for_s: how long the key is valid; None: until it is replaced or removed.
        keep_previous_s: how long the node's earlier key stays valid next to the new one.
    Raises:
        KeysError: not a node name or key, a duration that is not positive, or the key is another node's
            already.
    """
    if not NODE_NAME.match(name):
        raise KeysError(f"{name!r} is not a node name: 1 to 64 letters, digits, '.', '_', '-'")
    if (valid_for_s is not None and not valid_for_s > 0) or not keep_previous_s >= 0:
        raise KeysError("the time for which a key is trusted must be positive")
    key = checked_key(public_key)
    known = trusted_keys(folder)
    for other in known:
        if other.public == key and other.node != name:
            raise KeysError(f"this key is trusted as {other.node!r} already")
    now_s = time.time()
    target = _trusted_file(folder, name)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    old = next((k for k in known if k.node == name and not k.previous), None)
    if old is not None and old.public != key and keep_previous_s > 0:
        until_s = min(old.expires_s, now_s + keep_previous_s)
        _write(
            replace_private_file,
            _trusted_file(folder, name, previous=True),
            _certificate(old.public, until_s=until_s),
        )
    elif old is not None and old.public != key:
        _trusted_file(folder, name, previous=True).unlink(missing_ok=True)
    expires_s = None if valid_for_s is None else now_s + valid_for_s
    _write(replace_private_file, target, _certificate(key, until_s=expires_s))


def untrust(folder: Path, name: str) -> None:
    """Let the node ``name`` connect no more. A running daemon cuts its connections within a second.

    Raises:
        KeysError: it is not trusted.
    """
    files = [_trusted_file(folder, name, previous=previous) for previous in (False, True)]
    files = [path for path in files if NODE_NAME.match(name) and path.exists()]
    if not files:
        raise KeysError(f"{name!r} is not trusted; `ckptctl keys list` shows who is")
    for path in files:
        path.unlink()


def trusted(folder: Path) -> dict[str, str]:
    """The newest public key of each node, unless it has expired."""
    now_s = time.time()
    return {k.node: k.public for k in trusted_keys(folder) if not k.previous and k.valid_at(now_s)}


def trusted_keys(folder: Path) -> list[TrustedKey]:
    """Every trusted key, also expired ones. A file without a valid key is logged and left out."""
    found: list[TrustedKey] = []
    for path in sorted((Path(folder) / "trusted").glob("[!.]*.key")):
        node, _, kind = path.stem.partition(PREVIOUS[0])
        try:
            if kind not in ("", PREVIOUS[1:]):
                raise ValueError("its name is not that of a node")
            key = checked_key(_load_certificate(path)[0])
            expires = EXPIRES.search(path.read_text(encoding="ascii"))
        except (OSError, ValueError) as error:
            logger.warning("%s holds no key and is ignored: %s", path, error)
            continue
        until_s = float(expires[1]) if expires else float("inf")
        found.append(TrustedKey(node, key, until_s, previous=bool(kind)))
    return found


def _trusted_file(folder: Path, name: str, *, previous: bool = False) -> Path:
    return Path(folder) / "trusted" / f"{name}{PREVIOUS if previous else ''}.key"


class Trust:
    """The trusted keys, read again when the folder has changed or a key is not found. Any thread."""

    def __init__(self, folder: Path, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._folder = Path(folder)
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._keys: dict[str, TrustedKey] = {}
        self._stamp = -1
        self._read_at = float("-inf")

    def node_of(self, public_key: str) -> str | None:
        """The node with this key; None if it is not trusted (any more)."""
        with self._lock:
            if self._modified() != self._stamp:
                self._read()
            found = self._keys.get(public_key)
            if found is None and time.monotonic() - self._read_at >= REREAD_S:
                # A change within the clock tick of the last scan does not change the folder's time stamp.
                self._read()
                found = self._keys.get(public_key)
            return found.node if found and found.valid_at(self._wall_clock()) else None

    def _modified(self) -> int:
        try:
            return (self._folder / "trusted").stat().st_mtime_ns
        except OSError:
            return 0

    def _read(self) -> None:
        self._stamp = self._modified()  # before the scan: a change during it is seen next time
        self._read_at = time.monotonic()
        self._keys = {key.public: key for key in trusted_keys(self._folder)}


def _load_certificate(path: Path) -> tuple[bytes, bytes | None]:
    """The public and the secret key in a file; raises OSError or ValueError if it has none."""
    try:
        return load_certificate(path)
    except IndexError as error:  # pyzmq's, for a key without a value
        raise ValueError("a line names a key, and has none") from error


def _certificate(public: str, secret: str | None = None, *, until_s: float | None = None) -> str:
    expires = "" if until_s is None or until_s == float("inf") else f'    expires = "{until_s:.0f}"\n'
    text = f'metadata\n{expires}curve\n    public-key = "{public}"\n'
    return text if secret is None else text + f'    secret-key = "{secret}"\n'


def _write(write: Callable[[Path, bytes], None], path: Path, text: str) -> None:
    try:
        write(path, text.encode("ascii"))
    except FileExistsError as error:
        raise KeysError(
            f"{path} exists and is not overwritten: `ckptctl keys list` prints the public key, `ckptctl keys "
            "rotate` replaces the pair"
        ) from error
    except OSError as error:
        raise KeysError(f"cannot write {path}: {error}") from error


# --- where to listen --------------------------------------------------------------------------------------


def check_security(
    endpoint: str, security: str, *, advertise: str | None = None, allow_plain: bool = False
) -> None:
    """Check that listening at ``endpoint``, ``tcp://host:port``, with ``security`` "curve" or "plain" is
    safe.

    Args:
        advertise: host name or address for peers; required if the endpoint is a wildcard.
        allow_plain: the operator trusts this network.
    Raises:
        ValueError: it is not safe; the message says what would be.
    """
    found = ENDPOINT.match(endpoint)
    if found is None:
        raise ValueError(f"{endpoint!r} is not an endpoint: use tcp://host:port")
    if security not in ("curve", "plain"):
        raise ValueError(f"security is 'curve' or 'plain', not {security!r}")
    host = found["host"].strip("[]")
    if host in ("*", "0.0.0.0", "::") and not advertise:
        raise ValueError(f"{endpoint} listens on all addresses: set the address to advertise")
    if security == "plain" and not allow_plain and not _is_loopback(host):
        raise ValueError(f"{endpoint} can be reached by others, who would not be authenticated: use keys")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_ours(path: Path) -> None:
    """Whoever can write there decides which keys we trust."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return
    if status.st_uid not in (os.getuid(), 0):
        raise KeysError(f"{path} belongs to user {status.st_uid}; run `chown {os.getuid()} {path}`")
    if status.st_mode & 0o022:
        raise KeysError(f"others may write to {path}; run `chmod go-w {path}`")
