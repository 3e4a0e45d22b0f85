"""The daemon's runtime folder: its owner and mode, its lock, and the node name stored in it."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import re
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from ckptd.private_files import replace_private_file


def default_runtime_dir(environ: Mapping[str, str] | None = None) -> str:
    """The default folder for the socket of a daemon of this user."""
    environ = os.environ if environ is None else environ
    if text := environ.get("CKPTD_RUNTIME_DIR"):
        return os.path.normpath(text)
    return builtin_runtime_dir(environ)


AUDIT_VARIABLE = "CKPTD_AUDIT"
"""The folder of the audit for which `ckptctl audit` has started this process."""
AUDITED_RUN_VARIABLE = "CKPTD_AUDITED_RUN"
"""The audited run, as ``job~run``."""


def audit_runtime_dir(folder: str) -> str:
    """The runtime folder of the daemon of the audit in this folder."""
    return f"{folder}/run"


def builtin_runtime_dir(environ: Mapping[str, str]) -> str:
    """The folder if ``CKPTD_RUNTIME_DIR`` names none."""
    base = environ.get("XDG_RUNTIME_DIR", "")
    return f"{base}/ckptd" if base.startswith("/") else f"/tmp/ckptd-{os.getuid()}"


class UnusableFolder(RuntimeError):
    """A folder that ckptd must not use; the message gives the reason and the remedy."""


class AlreadyRunning(RuntimeError):
    """Another daemon holds the lock; ``endpoint`` is its endpoint, if it has written it."""

    def __init__(self, message: str, endpoint: str = "") -> None:
        super().__init__(message)
        self.endpoint = endpoint


_OPERATED = "operated"
_RUN = Path("/run")  # in which the units of deploy/ have their runtime folders
_LOCK = ".ckptd.lock"


def private_folder(path: str, purpose: str, group: int | None = None) -> Path:
    """Create the folder with mode 0700, or accept one that this user owns and only this user can write.

    With a ``group``, the folder gets that group and mode 0750: its members can list and enter it.

    Raises:
        UnusableFolder: it belongs to another user, is a link or not a folder, or cannot be created.
    """
    folder = Path(path)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.lstat()
    except OSError as error:
        raise UnusableFolder(f"cannot create the {purpose} {folder}: {error}") from error
    if not stat.S_ISDIR(info.st_mode):
        raise UnusableFolder(f"the {purpose} {folder} is not a folder (links are not followed)")
    if info.st_uid != os.getuid():
        raise UnusableFolder(
            f"the {purpose} {folder} belongs to user {info.st_uid}, this process runs as user "
            f"{os.getuid()}; choose another folder or remove it"
        )
    if info.st_mode & 0o022:
        raise UnusableFolder(
            f"other users can write to the {purpose} {folder} (mode "
            f"{stat.S_IMODE(info.st_mode):04o}); run `chmod 700 {folder}`"
        )
    if group is not None:
        give_to_group(folder, group, 0o750)
    return folder


def give_to_group(path: Path, group: int, mode: int) -> None:
    """Give a path to a group, with this mode.

    Raises:
        UnusableFolder: this user is neither in the group nor root.
    """
    try:
        os.chown(path, -1, group)
        path.chmod(mode)
    except OSError as error:
        raise UnusableFolder(
            f"{path} cannot be given to trainer_group {group}: {error}; make the daemon's user a member of it"
        ) from error


def group_number(name: str) -> int | None:
    """The number of the group in a `trainer_group` setting; None if it is empty.

    Raises:
        UnusableFolder: the group does not exist.
    """
    if not name:
        return None
    try:
        return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise UnusableFolder(f"trainer_group = {name!r}: this group does not exist") from error


def claim(folder: Path, what: str, endpoint: str = "") -> int:
    """Take the folder's lock for the life of this process; returns its descriptor.

    Args:
        endpoint: the endpoint of this process, written for others that want the folder.
    Raises:
        AlreadyRunning: another process holds the lock; the message contains its id.
    """
    path = folder / _LOCK
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lines = os.pread(fd, 4096, 0).decode(errors="replace").splitlines()
        holder, serves = (*lines, "", "")[:2]
        os.close(fd)
        raise AlreadyRunning(
            f"another ckptd (process {holder or 'unknown'}) already uses the {what} {folder}; stop it, or "
            "start this one with another CKPTD_RUNTIME_DIR and CKPTD_SEGMENT_DIR",
            serves,
        ) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n{endpoint}\n".encode(), 0)
    return fd


def mark_operated(folder: Path) -> bool:
    """Mark the folder as operated: no trainer starts a daemon in it, even while the daemon is away.
    Returns False if the mark existed.
    """
    try:
        fd = os.open(folder / _OPERATED, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    os.close(fd)
    return True


def keep_log_place(folder: Path) -> None:
    """Write into the mark where this process logs, so that its log is found when it has ended."""
    try:
        place = os.readlink("/proc/self/fd/2")
    except OSError:  # its standard error is closed
        place = ""
    (folder / _OPERATED).write_text(f"{place}\n", encoding="utf-8", errors="surrogateescape")


def log_place(folder: Path) -> str | None:
    """Where the operator's daemon that used this folder last logs; None if it was a trainer's, or "" if that
    is not known.
    """
    try:
        return (folder / _OPERATED).read_text(encoding="utf-8", errors="surrogateescape").strip()
    except FileNotFoundError:
        return None
    except OSError:  # another user's daemon, of which this one may read no file
        return ""


def forget_operator(folder: Path) -> None:
    """Remove the mark: trainers may start daemons in this folder again."""
    (folder / _OPERATED).unlink(missing_ok=True)


def is_operated(folder: Path) -> Path | None:
    """The mark, if an operator runs the daemon of this folder."""
    path = folder / _OPERATED
    return path if path.exists() else None


def settings_of_unit() -> tuple[Path, str] | None:
    """The socket of a daemon that a shipped unit runs on this machine, and the variables of its clients; None
    if this user sees none.
    """
    for path in sorted(_RUN.glob("ckptd*/ckptd.sock")):
        with contextlib.suppress(OSError, KeyError):  # it has gone; its owner has no name
            user = "" if path.stat().st_uid == os.getuid() else f" CKPTD_DAEMON_USER={path.owner()}"
            return path, f"CKPTD_RUNTIME_DIR={path.parent}{user}"
    return None


def node_name(folder: Path) -> str:
    """This node's name: the stored one, else a new one that is then stored."""
    path = folder / "node-id"
    try:
        kept = path.read_text(encoding="ascii").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        kept = ""
    if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", kept):
        return kept
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:48] or "node"
    name = f"{host}-{os.urandom(4).hex()}"
    keep_node_name(folder, name)
    return name


def keep_node_name(folder: Path, name: str) -> None:
    """Store this node's name, for its next daemon."""
    replace_private_file(folder / "node-id", f"{name}\n".encode("ascii"))


def is_claimed(folder: Path, fd: int) -> bool:
    """Whether the lock that this process holds with ``fd`` is still that of this folder."""
    try:
        return (folder / _LOCK).stat().st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False
