"""Who may connect: a CURVE key pair per node, and a folder of the keys it trusts.

    <folder>/node.key           the public key, for others to trust
    <folder>/node.key_secret    both keys, 0600
    <folder>/trusted/<node>.key the public key of another node; the file's name is the node's id

The files are ZeroMQ certificates, so its own tools read them. Changes to ``trusted`` are seen without a restart.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from ipaddress import ip_address
from pathlib import Path
from typing import Self

import zmq
from zmq.auth import load_certificate
from zmq.utils import z85

__all__ = ["Keys", "KeysError", "Trust", "check_security", "trust", "trusted"]

logger = logging.getLogger(__name__)

REREAD_S = 1.0  # a stranger who knocks again and again costs one directory scan a second
NODE_NAME = re.compile(r"(?!\.\.?\Z)[A-Za-z0-9._-]{1,64}\Z")
ENDPOINT = re.compile(r"tcp://(?P<host>\[[^\]]+\]|[^:\[\]]+):(?P<port>\d{1,5}|\*)\Z")


class KeysError(ValueError):
    """Key files that are missing, unreadable or not safe; says which, and what to do."""


class Keys:
    """The key pair of this node, and whom it trusts. Keys are Z85, 40 characters."""

    def __init__(self, folder: Path, public: str, secret: str) -> None:
        self.folder = folder
        self.public = public
        self.secret = secret
        self.trust = Trust(folder)

    def __repr__(self) -> str:
        return f"Keys({str(self.folder)!r}, public={self.public!r})"  # never the secret

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The pair that `create` left there.

        Raises:
            KeysError: there is none, it is damaged, or others may read the secret.
        """
        path = Path(folder) / "node.key_secret"
        try:
            mode = path.stat().st_mode
            public, secret = load_certificate(path)
        except (OSError, ValueError) as error:
            raise KeysError(f"no usable key in {path}: {error}") from error
        if mode & 0o077:
            raise KeysError(f"{path} may be read by others; chmod 600 it")
        if secret is None:
            raise KeysError(f"{path} holds no secret key")
        return cls(Path(folder), checked_key(public), checked_key(secret))

    @classmethod
    def create(cls, folder: Path) -> Self:
        """Make a pair; the folder is made, with 0700, if need be.

        Raises:
            KeysError: there is a key already; it is never overwritten.
        """
        folder = Path(folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        (folder / "trusted").mkdir(mode=0o700, exist_ok=True)
        public, secret = _new_pair()
        _write_new(folder / "node.key_secret", _certificate(public, secret))
        _write_new(folder / "node.key", _certificate(public))
        return cls(folder, public, secret)


def _new_pair() -> tuple[str, str]:
    """A pair whose public key can be typed after a command: one that begins with a dash would be taken for an option."""
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
    except (KeyError, ValueError):
        pass  # characters outside of the alphabet: the same answer as a wrong length
    raise KeysError("a key is 40 characters of Z85")


def trust(folder: Path, name: str, public_key: str) -> None:
    """Let the node ``name`` connect, with this key. Replaces the key it had.

    Raises:
        KeysError: not a node name or key, or the key is another node's already.
    """
    if not NODE_NAME.match(name):
        raise KeysError(f"{name!r} is no node name: 1 to 64 letters, digits, '.', '_', '-'")
    key = checked_key(public_key)
    for other, its_key in trusted(folder).items():
        if its_key == key and other != name:
            raise KeysError(f"this key is trusted as {other!r} already")
    target = Path(folder) / "trusted" / f"{name}.key"
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    scratch = target.with_name(f".{name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    _write_new(scratch, _certificate(key))
    scratch.replace(target)


def trusted(folder: Path) -> dict[str, str]:
    """Node name to public key. Files that hold no key are reported in the log and left out."""
    found: dict[str, str] = {}
    for path in sorted((Path(folder) / "trusted").glob("[!.]*.key")):
        try:
            found[path.stem] = checked_key(load_certificate(path)[0])
        except (OSError, ValueError) as error:
            logger.warning("%s holds no key and is ignored: %s", path, error)
    return found


class Trust:
    """The trusted keys, read again when the folder changed or a key is not found. Any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = Path(folder)
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}
        self._stamp = -1
        self._read_at = float("-inf")

    def node_of(self, public_key: str) -> str | None:
        """The node with this key; None if it is not trusted."""
        with self._lock:
            if self._changed():
                self._read()
            name = self._names.get(public_key)
            if name is None and time.monotonic() - self._read_at >= REREAD_S:
                # A change within the clock tick of the last scan leaves the folder's time stamp as it was.
                self._read()
                name = self._names.get(public_key)
            return name

    def _changed(self) -> bool:
        return self._modified() != self._stamp

    def _modified(self) -> int:
        try:
            return (self._folder / "trusted").stat().st_mtime_ns
        except OSError:
            return 0

    def _read(self) -> None:
        self._stamp = self._modified()  # before the scan: a change during it is seen next time
        self._read_at = time.monotonic()
        self._names = {key: name for name, key in trusted(self._folder).items()}


def _certificate(public: str, secret: str | None = None) -> str:
    text = f'metadata\ncurve\n    public-key = "{public}"\n'
    return text if secret is None else text + f'    secret-key = "{secret}"\n'


def _write_new(path: Path, text: str) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise KeysError(f"{path} exists and is not overwritten") from error
    with open(handle, "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


# --- where to listen --------------------------------------------------------------------------------------


def check_security(
    endpoint: str, security: str, *, advertise: str | None = None, allow_plain: bool = False
) -> None:
    """Whether it is safe to listen at ``endpoint``, ``tcp://host:port``, with ``security`` "curve" or "plain".

    Args:
        advertise: host name or address that peers are told; needed when the endpoint is a wildcard.
        allow_plain: the operator said that this network is trusted.
    Raises:
        ValueError: it is not; the message says what would be.
    """
    found = ENDPOINT.match(endpoint)
    if found is None:
        raise ValueError(f"{endpoint!r} is no endpoint: tcp://host:port")
    if security not in ("curve", "plain"):
        raise ValueError(f"security is 'curve' or 'plain', not {security!r}")
    host = found["host"].strip("[]")
    if host in ("*", "0.0.0.0", "::") and not advertise:
        raise ValueError(f"{endpoint} listens everywhere: say which address to advertise")
    if security == "plain" and not allow_plain and not _is_loopback(host):
        raise ValueError(
            f"{endpoint} can be reached by others, who would not be authenticated: use keys"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
