"""Files in the segment folder that one other user may open: by an access control list of the kernel.

A daemon without privileges cannot give a file away, but it may add an entry for a user to the list of its own
file (``system.posix_acl_access``). The file stays the daemon's, with no rights for a group or others, so that
user can neither pass the right on nor keep it. The list is set while the file has its temporary name and mode
0600: at no time can anybody else open it. tmpfs has such lists; hugetlbfs has none.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import tempfile
from pathlib import Path

from ckptd.config.runtime_dir import UnusableFolder

_NAME = "system.posix_acl_access"
_VERSION = struct.Struct("<I")
_ENTRY = struct.Struct("<HHI")  # tag, permissions, user or group
_USER_OBJ, _USER, _GROUP_OBJ, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_READ, _WRITE = 4, 2
_NOBODY = 0xFFFF_FFFF
_NO_LIST = (errno.ENODATA, errno.EOPNOTSUPP)


def open_to_user(fd: int, user: int | None, *, write: bool = False) -> None:
    """Let one user open a file of ours for reading, or for both, and nobody else; None: only us.

    Raises:
        OSError: the file is not ours, or its filesystem has no such lists.
    """
    if user is None or user == os.geteuid():
        # First the mode, which is the list's mask: without its list the file would be open to its group.
        os.fchmod(fd, 0o600)
        try:
            os.removexattr(fd, _NAME)
        except OSError as error:
            if error.errno not in _NO_LIST:
                raise
        return
    rights = _READ | _WRITE if write else _READ
    entries = [
        (_USER_OBJ, _READ | _WRITE, _NOBODY),
        (_USER, rights, user),
        (_GROUP_OBJ, 0, _NOBODY),
        (_MASK, rights, _NOBODY),
        (_OTHER, 0, _NOBODY),
    ]
    os.setxattr(fd, _NAME, _VERSION.pack(2) + b"".join(_ENTRY.pack(*entry) for entry in entries))


def readers_of(fd: int) -> dict[int, int]:
    """The users other than the owner that may open a file, with their permissions (4: read, 2: write)."""
    try:
        data = os.getxattr(fd, _NAME)
    except OSError as error:
        if error.errno in _NO_LIST:
            return {}
        raise
    entries = list(_ENTRY.iter_unpack(data[_VERSION.size :]))
    mask = next((rights for tag, rights, _ in entries if tag == _MASK), _READ | _WRITE)
    return {user: rights & mask for tag, rights, user in entries if tag == _USER}


def close_files(folder: Path) -> None:
    """Take all rights of a group and of others from the files that an earlier daemon left in its folder, but
    for those with a list; first try whether the filesystem has lists.

    Raises:
        UnusableFolder: it has none.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            open_to_user(file.fileno(), os.geteuid() + 1)
    except OSError as error:
        raise UnusableFolder(
            f"isolate_users = true needs access control lists, which the filesystem of {folder} does not "
            f"have ({error.strerror}): set segment_dir to a folder on tmpfs, such as /dev/shm (hugetlbfs has "
            "none)"
        ) from error
    for entry in os.scandir(folder):
        info = entry.stat(follow_symlinks=False)
        if stat.S_ISREG(info.st_mode) and info.st_mode & 0o077 and info.st_uid == os.geteuid():
            fd = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if not readers_of(fd):
                    os.fchmod(fd, 0o600)
            finally:
                os.close(fd)
