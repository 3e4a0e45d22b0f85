"""Small files that only their owner may read: keys, owners of ranks, records of runs.

They appear complete, or not at all. The mode is 0600 whatever the umask is. A process that dies meanwhile
leaves a file that nobody reads, `.<name>.<random>.tmp`. This module is below all others: the engines import
it, too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def new_private_file(path: Path, data: bytes) -> None:
    """Write a file that does not exist yet; it is on disk, with its name, when this returns.

    Raises:
        FileExistsError: it exists, and is unchanged.
        OSError: it cannot be written.
    """
    with _written_aside(path, data, synced=True) as aside:
        os.link(aside, path)  # unlike a rename it refuses to replace
    sync_folder(path.parent)


def replace_private_file(path: Path, data: bytes, *, synced: bool = True) -> None:
    """Write a file, in place of one that may exist.

    Args:
        synced: it is on disk, with its name, when this returns; otherwise a power cut may undo it.

    Raises:
        OSError: it cannot be written; the old one stays.
    """
    with _written_aside(path, data, synced=synced) as aside:
        aside.replace(path)
    if synced:
        sync_folder(path.parent)


def sync_folder(folder: Path | str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _written_aside(path: Path, data: bytes, *, synced: bool) -> Iterator[Path]:
    """Write the data under a name that nobody reads; the file is gone after the block."""
    aside = path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with open(os.open(aside, flags, 0o600), "wb") as file:
            os.fchmod(file.fileno(), 0o600)  # a umask may have removed the owner's rights
            file.write(data)
            file.flush()
            if synced:
                os.fsync(file.fileno())
        yield aside
    finally:
        aside.unlink(missing_ok=True)
