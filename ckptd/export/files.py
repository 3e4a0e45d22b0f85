"""Files and folders that appear complete and synced, or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptd.core.export_plan import ExportError
from ckptd.private_files import sync_folder
from ckptd.units import format_bytes

__all__ = [
    "check_target",
    "created",
    "new_file",
    "new_folder",
    "reserve_space",
    "write_all",
]

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# Files that only a folder with a model (or a checkpoint) has: what else is there is not ours to replace.
_MODEL_FILES = ("model.safetensors", "model.safetensors.index.json", ".metadata")


def check_target(target: Path, *, force: bool, folder: bool) -> None:
    """Return if this may be written, before long work is done for nothing.

    Raises:
        ExportError: it exists, or cannot be replaced.
    """
    if not target.exists() or (folder and target.is_dir() and not any(target.iterdir())):
        return
    if not force:
        raise ExportError(f"{target} exists already; pass --force to replace it")
    if target.is_dir() != folder:
        raise ExportError(f"{target} is {'a file' if folder else 'a folder'} and is not replaced")
    if folder and not _is_model(target):
        raise ExportError(f"{target} holds something else than a model: --force does not replace it")


@contextmanager
def new_file(target: Path, size: int, *, force: bool) -> Iterator[int]:
    """A descriptor to write ``size`` bytes to; the target appears, synced, when the block ends well.

    Raises:
        ExportError: it cannot be written, or has just appeared.
    """
    temporary = _temporary(target)
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ExportError(f"cannot write in {target.parent}: {error.strerror}") from error
    try:
        reserve_space(fd, size)
        yield fd
        os.fsync(fd)
        if force:
            temporary.replace(target)
        else:
            os.link(temporary, target)  # unlike a rename it refuses to replace
        sync_folder(target.parent)
    except FileExistsError as error:
        raise ExportError(f"{target} has just appeared; pass --force to replace it") from error
    except OSError as error:
        raise ExportError(_why_not_written(error, target, size)) from error
    finally:
        os.close(fd)
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(target: Path, size: int, *, force: bool) -> Iterator[Path]:
    """A folder to fill with about ``size`` bytes; it becomes the target, synced, when the block ends well.

    Whoever fills it syncs the files. A folder that is replaced is gone for a moment.

    Raises:
        ExportError: it cannot be written, or has just appeared.
    """
    temporary = _temporary(target)
    try:
        temporary.mkdir(0o755)
    except OSError as error:
        raise ExportError(f"cannot write in {target.parent}: {error.strerror}") from error
    try:
        _check_room(temporary, size)
        yield temporary
        sync_folder(temporary)
        _put_in_place(temporary, target, force=force)
        sync_folder(target.parent)
    except OSError as error:
        raise ExportError(_why_not_written(error, target, size)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def created(path: Path) -> Iterator[int]:
    """A new file, open for writing."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


def reserve_space(fd: int, size: int) -> None:
    """Find out now that it does not fit, where the filesystem can tell."""
    if size == 0:
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def write_all(fd: int, data: memoryview) -> None:
    """All of it, however often the kernel has to be asked."""
    while data:
        data = data[os.write(fd, data) :]


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")


def _put_in_place(temporary: Path, target: Path, *, force: bool) -> None:
    check_target(target, force=force, folder=True)
    old = target.with_name(f".{target.name}.{secrets.token_hex(6)}.old")
    replaced = target.is_dir() and any(target.iterdir())
    if replaced:
        target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        if replaced:
            old.rename(target)
        raise
    if replaced:
        shutil.rmtree(old)


def _is_model(folder: Path) -> bool:
    entries = list(folder.iterdir())
    return any((folder / name).is_file() for name in _MODEL_FILES) and not any(
        entry.is_dir() for entry in entries
    )


def _check_room(folder: Path, size: int) -> None:
    info = os.statvfs(folder)
    if size > info.f_bavail * info.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _why_not_written(error: OSError, target: Path, size: int) -> str:
    if error.errno not in _NO_ROOM:
        return f"cannot write {target}: {error.strerror or error}"
    info = os.statvfs(target.parent)
    free = format_bytes(info.f_bavail * info.f_frsize)
    return f"{target} needs {format_bytes(size)}, its filesystem has {free} left; nothing was kept"
