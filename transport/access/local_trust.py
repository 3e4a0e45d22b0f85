"""Who owns a local socket or file: checked before anything is said to it, or anything in it believed.

A path is as trustworthy as everybody who may change it. Therefore the whole way to it is walked: each folder,
link, and the end itself must belong to root or to a trusted user, and no folder may be writable by others,
except a sticky one (`/tmp`), where others cannot remove or rename what is not theirs. Such a path stays what
it is while it is used, so nobody wins a race between the check and libzmq's own `connect`, nor a later
`connect` after a lost connection. The listener's credentials (``SO_PEERCRED``) are checked too.

In a user namespace that maps few users (rootless containers) the kernel shows root's folders as those of the
overflow user. That user passes for root on the way, and never as the owner of the last folder, a socket, or a
file.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pwd
import socket
import stat
import struct
from collections.abc import Collection
from pathlib import Path, PurePosixPath

_MAX_LINKS = 40
_PROBE_S = 1.0
_CREDENTIALS = struct.Struct("@iII")  # struct ucred: pid, uid, gid
_SO_PEERGROUPS = 59  # <asm-generic/socket.h>; Python has no name for it
_MAX_GROUPS = 65_536  # the kernel's limit
OVERFLOW_UID = 65_534
_libc = ctypes.CDLL(None, use_errno=True)
_ALL_USERS = ["0", "0", "4294967295"]
_REMEDY = (
    "if that user is to run the daemon, set CKPTD_DAEMON_USER to it; else remove what is there, "
    "or choose other folders (CKPTD_RUNTIME_DIR, CKPTD_SEGMENT_DIR)"
)


class LocalFileError(PermissionError):
    """Another user may be behind this path; says owner, mode, what was expected, and what to do."""


def own_users() -> frozenset[int]:
    """The users that a process trusts by default: itself and root."""
    return frozenset({0, os.geteuid()})


def find_listener(endpoint: str, users: Collection[int]) -> bool:
    """Whether a process of one of ``users`` listens on an ipc endpoint.

    Raises:
        LocalFileError: another user listens there, or could, or we may not connect.
        ValueError: it is no endpoint with a path.
    """
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or not path.startswith("/"):
        raise ValueError(
            f"{endpoint!r} is not a socket with an absolute path, whose owner could be checked: use an "
            "endpoint such as 'ipc:///run/ckptd/ckptd.sock' (not abstract, not tcp)"
        )
    try:
        info = check_way(path, users)
        if not stat.S_ISSOCK(info.st_mode):
            raise LocalFileError(f"{path} is not a socket; remove it, or choose another endpoint")
        if info.st_mode & 0o002:
            raise LocalFileError(
                f"the socket {path} is open to everybody ({_shown(info)}); expected no access for "
                f"others: run `chmod o= {path}`, or restart the daemon, which sets it"
            )
        uid = _listener_uid(path)
    except FileNotFoundError:
        return False
    except PermissionError as error:
        if isinstance(error, LocalFileError):
            raise
        raise LocalFileError(
            f"user {user_name(os.geteuid())} may not connect to {path}: {error.strerror}; run as the "
            "daemon's user, or join the group that the daemon's setting trainer_group names"
        ) from error
    if uid is not None and uid not in users:
        raise LocalFileError(
            f"the process that listens on {path} runs as user {user_name(uid)}, expected "
            f"{_names(users)}: {_REMEDY}"
        )
    return uid is not None


def check_way(path: str, users: Collection[int]) -> os.stat_result:
    """Walk to the end of an absolute path; returns the status of its end, which is no link.

    Raises:
        LocalFileError: a user outside ``users`` can change where it leads.
        OSError: there is nothing, or we may not look.
    """
    left = list(reversed(PurePosixPath(path).parts[1:]))
    here, links = Path("/"), 0
    info = here.lstat()
    while True:
        if left:
            _check_folder(here, info, users, last=len(left) == 1)
        else:
            _check_owner(here, info, users)
            return info
        name = left.pop()
        entry = here.parent if name == ".." else here / name
        info = entry.lstat()
        if not stat.S_ISLNK(info.st_mode):
            here = entry
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        _check_owner(entry, info, users, on_the_way=True)
        target = PurePosixPath(entry.readlink())
        here = Path("/") if target.is_absolute() else here
        left.extend(reversed([part for part in target.parts if part != "/"]))
        info = here.lstat()


def open_file(path: str | os.PathLike[str], flags: int, users: Collection[int]) -> int:
    """Open a regular file that belongs to one of ``users`` and is not writable by everybody; returns its
    descriptor.

    Raises:
        LocalFileError: it is another user's, or open to everybody.
        OSError: it cannot be opened, or is a link.
    """
    # O_NONBLOCK: a pipe would wait for a writer.
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise LocalFileError(f"{path} is not a regular file; remove it")
        _check_owner(path, info, users)
        if info.st_mode & 0o002:
            raise LocalFileError(
                f"{path} may be written to by everybody ({_shown(info)}); expected no access for "
                f"others: run `chmod o= {path}`"
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def user_name(uid: int) -> str:
    """The name of a user, with the number."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)


def _check_folder(path: Path, info: os.stat_result, users: Collection[int], *, last: bool) -> None:
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    _check_owner(path, info, users, on_the_way=not last)
    if info.st_mode & 0o022 and not info.st_mode & stat.S_ISVTX:
        raise LocalFileError(
            f"{path} may be written to by others ({_shown(info)}), who could put something else in "
            f"the place of what is in it; expected no write permission for group and others: run "
            f"`chmod go-w {path}`, or choose another folder"
        )


def _check_owner(
    path: str | os.PathLike[str],
    info: os.stat_result,
    users: Collection[int],
    *,
    on_the_way: bool = False,
) -> None:
    if info.st_uid in users:
        return
    if on_the_way and info.st_uid == OVERFLOW_UID and _in_user_namespace():
        return  # most likely root's
    raise LocalFileError(
        f"{path} belongs to somebody else ({_shown(info)}); expected user {_names(users)}: {_REMEDY}"
    )


def _listener_uid(path: str) -> int | None:
    """The user of the process that listens there; None if none does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, BlockingIOError, TimeoutError):
            return None  # left by a killed process, or too busy to accept connections
        return peer_credentials(probe)[1]


def peer_credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end of a local socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(credentials)
    return pid, uid, gid


def peer_groups(connection: socket.socket) -> frozenset[int]:
    """The supplementary groups of the process at the other end of a local socket, when it connected.

    The kernel's answer (``SO_PEERGROUPS``), as for every permission: what the group database says now may be
    younger than the process, or be another one than that of the container in which it runs.

    Raises:
        OSError: the kernel does not say (before Linux 4.13).
    """
    # `socket.getsockopt` takes at most 1,024 bytes, which are 256 groups.
    groups = (ctypes.c_uint32 * _MAX_GROUPS)()
    size = ctypes.c_uint32(ctypes.sizeof(groups))
    place = (socket.SOL_SOCKET, _SO_PEERGROUPS, groups, ctypes.byref(size))
    if _libc.getsockopt(connection.fileno(), *place):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return frozenset(groups[: size.value // ctypes.sizeof(ctypes.c_uint32)])


def _in_user_namespace() -> bool:
    try:
        return Path("/proc/self/uid_map").read_text(encoding="ascii").split() != _ALL_USERS
    except OSError:
        return False


def _shown(info: os.stat_result) -> str:
    return f"owner {user_name(info.st_uid)}, mode {stat.S_IMODE(info.st_mode):04o}"


def _names(users: Collection[int]) -> str:
    return " or ".join(user_name(uid) for uid in sorted(users))
