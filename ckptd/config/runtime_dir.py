"""The daemon's own folder: whose it is, who may run in it, and the node's name kept there."""

from __future__ import annotations

import fcntl
import grp
import os
import re
import secrets
import socket
import stat
from pathlib import Path

from ckptd.private_files import replace_private_file

__all__ = [
    "AlreadyRunning",
    "UnusableFolder",
    "claim",
    "forget_operator",
    "give_to_group",
    "group_number",
    "is_operated",
    "mark_operated",
    "node_name",
    "private_folder",
]


class UnusableFolder(RuntimeError):
    """A folder that we must not use; says why and what to do."""


class AlreadyRunning(RuntimeError):
    """Another daemon holds the lock; ``endpoint`` is where it serves, if it has told."""

    def __init__(self, message: str, endpoint: str = "") -> None:
        super().__init__(message)
        self.endpoint = endpoint


_OPERATED = "operated"


def private_folder(path: str, purpose: str, group: int | None = None) -> Path:
    """Make the folder with mode 0700, or accept one that is ours and that only we may write to.

    With a ``group`` it becomes the group's, with mode 0750: its members may look and enter.

    Raises:
        UnusableFolder: it is somebody else's, a link, no folder, or cannot be made.
    """
    folder = Path(path)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.lstat()
    except OSError as error:
        raise UnusableFolder(f"cannot make the {purpose} {folder}: {error}") from error
    if not stat.S_ISDIR(info.st_mode):
        raise UnusableFolder(f"the {purpose} {folder} is not a folder (a link is not followed)")
    if info.st_uid != os.getuid():
        raise UnusableFolder(
            f"the {purpose} {folder} belongs to user {info.st_uid}, this process runs as user "
            f"{os.getuid()}; choose another folder or remove it"
        )
    if info.st_mode & 0o022:
        raise UnusableFolder(
            f"the {purpose} {folder} may be written to by others (mode "
            f"{stat.S_IMODE(info.st_mode):04o}); run `chmod 700 {folder}`"
        )
    if group is not None:
        give_to_group(folder, group, 0o750)
    return folder


def give_to_group(path: Path, group: int, mode: int) -> None:
    """Let the members of a group have what the mode says.

    Raises:
        UnusableFolder: we are neither in the group nor root.
    """
    try:
        os.chown(path, -1, group)
        path.chmod(mode)
    except OSError as error:
        raise UnusableFolder(
            f"{path} cannot be given to trainer_group {group}: {error}; make the daemon's user a member of it"
        ) from error


def group_number(name: str) -> int | None:
    """The group that a `trainer_group` setting means; None if it is empty.

    Raises:
        UnusableFolder: there is no such group.
    """
    if not name:
        return None
    try:
        return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise UnusableFolder(f"trainer_group = {name!r}: there is no such group") from error


def claim(folder: Path, what: str, endpoint: str = "") -> int:
    """Take the folder's lock for the life of this process; returns its descriptor.

    Args:
        endpoint: where this process serves, for others that want the folder.
    Raises:
        AlreadyRunning: another process has it; its id is in the message.
    """
    path = folder / ".ckptd.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        told = os.pread(fd, 4096, 0).decode(errors="replace").splitlines()
        holder, serves = (*told, "", "")[:2]
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
    """Leave word that an operator runs the daemon of this folder: no trainer starts one, also while
    it is away. False: it was there.
    """
    try:
        fd = os.open(folder / _OPERATED, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    os.close(fd)
    return True


def forget_operator(folder: Path) -> None:
    """Trainers may start daemons here again."""
    (folder / _OPERATED).unlink(missing_ok=True)


def is_operated(folder: Path) -> Path | None:
    """The file that says so, if an operator runs the daemon of this folder."""
    path = folder / _OPERATED
    return path if path.exists() else None


def node_name(folder: Path) -> str:
    """This node's name: the one kept in the folder, else a new one that is then kept."""
    path = folder / "node-id"
    try:
        kept = path.read_text(encoding="ascii").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        kept = ""
    if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", kept):
        return kept
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:48] or "node"
    name = f"{host}-{secrets.token_hex(4)}"
    replace_private_file(path, f"{name}\n".encode("ascii"))
    return name
