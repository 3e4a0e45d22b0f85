"""How the hosts of a job on one machine talk: JSON lines over sockets in a private folder. (Those of several
machines: `ckptd.host.remote_links`.)

Only this user may enter the folder, and the kernel names the user of each peer (``SO_PEERCRED``). The host of
rank 0 listens. Whoever has joined notices within milliseconds when the other side dies: its socket closes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import struct
from pathlib import Path
from typing import Any

Message = dict[str, Any]

_CREDENTIALS = struct.Struct("@iII")
_LINE_MAX = 64 << 10
_BACKLOG = 1024


class LinkError(ConnectionError):
    """The other side has gone, or has sent what it may not send."""


class Link:
    """One end of a connection. Sending and receiving do not block.

    Attributes:
        proven: the other side belongs to the job.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.proven = True
        self._socket, self._received = connection, b""

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            LinkError: the other side has gone, or has not read for so long that nothing fits any more.
        """
        self._send_line(json.dumps(message).encode())

    def _send_line(self, line: bytes) -> None:
        data = line + b"\n"
        try:
            sent = self._socket.send(data)
        except OSError as error:
            raise LinkError(f"cannot send: {error}") from error
        if sent < len(data):
            raise LinkError("cannot send: the other side does not read")

    def receive(self) -> list[Message]:
        """The messages that have arrived.

        Raises:
            LinkError: the other side has gone, or what arrived is no message.
        """
        return [parsed(line) for line in self._receive_lines(_LINE_MAX)]

    def _receive_lines(self, longest: int) -> list[bytes]:
        try:
            data = self._socket.recv(longest)
        except BlockingIOError:
            return []
        except OSError as error:
            raise LinkError(f"the connection is lost: {error}") from error
        if not data:
            raise LinkError("the connection is closed")
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > longest:
            raise LinkError("a message has no end")
        return lines

    def close(self) -> None:
        self._socket.close()


def parsed(line: bytes) -> Message:
    """The message in a line.

    Raises:
        LinkError: there is none.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LinkError(f"not a message: {line[:80]!r}") from error
    if not isinstance(message, dict):
        raise LinkError(f"not a message: {line[:80]!r}")
    return message


def _address(folder: int, name: str) -> str:
    """A path through the folder's descriptor: a socket's path may have 107 bytes only."""
    return f"/proc/self/fd/{folder}/{name}"


@contextlib.contextmanager
def _opened(folder: Path) -> Any:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def listen(folder: Path, name: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """A socket of this name in a private folder, in place of one that may be left from a dead process.

    Raises:
        OSError: it cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        (folder / name).unlink(missing_ok=True)
        with _opened(folder) as fd:
            listener.bind(_address(fd, name))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def connect(folder: Path, name: str) -> Link | None:
    """A connection to the host that listens; None if none does yet.

    Raises:
        LinkError: another user listens.
    """
    connection = connect_socket(folder, name)
    return None if connection is None else Link(connection)


def connect_socket(folder: Path, name: str, kind: int = socket.SOCK_STREAM) -> socket.socket | None:
    """A connection to this user's process that listens; None if none does.

    Raises:
        LinkError: another user listens.
    """
    connection = socket.socket(socket.AF_UNIX, kind)
    try:
        with _opened(folder) as fd:
            connection.connect(_address(fd, name))
    except OSError:
        connection.close()
        return None
    peer_of(connection)
    return connection


def accept(listener: socket.socket) -> Link | None:
    """A new connection; None if it went away meanwhile.

    Raises:
        LinkError: it is of another user.
    """
    try:
        connection, _ = listener.accept()
    except OSError:
        return None
    peer_of(connection)
    return Link(connection)


def peer_of(connection: socket.socket) -> int:
    """The process at the other end.

    Raises:
        LinkError: it is one of another user; the connection is closed.
    """
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    if uid != os.geteuid():
        connection.close()
        raise LinkError(f"the other side runs as user {uid}, this host as user {os.geteuid()}")
    return int(pid)


def remove_dead_sockets(folder: Path) -> None:
    """Remove the sockets on which nobody listens: hosts that were killed have left them."""
    for path in folder.glob("*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, _opened(folder) as fd:
            if probe.connect_ex(_address(fd, path.name)) == errno.ECONNREFUSED:
                path.unlink(missing_ok=True)
