"""What a daemon may use of its machine: threads, descriptors, memory."""

from __future__ import annotations

import logging
import os
import resource
from pathlib import Path

from ckptd.config.runtime_dir import UnusableFolder
from ckptd.config.settings import parse_memory
from ckptd.event_log import EventLog
from ckptd.memory.pages import filesystem_kind, is_in_memory
from ckptd.transport.access.doorkeeper import ENOUGH_DESCRIPTORS
from ckptd.units import format_bytes

logger = logging.getLogger(__name__)


def default_digest_threads(cpus: int) -> int:
    """Half of the processors, up to four; on a large machine an eighth, up to 16, for several GPUs."""
    return max(1, min(4, cpus // 2), min(16, cpus // 8))


def raise_descriptor_limit() -> None:
    """Raise the limit of open files to its maximum."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            logger.warning("the limit of open files stays at %d: %s", soft, error)


def check_descriptors(events: EventLog) -> None:
    """Warn of a limit of open files that strangers could use up."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < ENOUGH_DESCRIPTORS:
        text = (
            f"this daemon may open {limit} files; with fewer than {ENOUGH_DESCRIPTORS}, somebody who opens "
            "connections faster than they are closed can end it. Raise the hard limit of open files "
            "(LimitNOFILE=, ulimit -n)"
        )
        events.add("warning", "few_descriptors", text)


def physical_memory() -> int:
    """Bytes that this process may use: all physical memory, or less if a memory cgroup says so."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue  # no such cgroup version here
        if text.isdigit():
            total = min(total, int(text))
    return total


def quota_bytes(memory: str, folder: Path) -> int:
    """The quota for segments that a `memory` setting means for this folder."""
    value = parse_memory(memory)
    if isinstance(value, int):
        return value
    return int(value * min(physical_memory(), _size(folder)))


def _size(folder: Path) -> int:
    info = os.statvfs(folder)
    return info.f_blocks * info.f_frsize


def check_quota(quota: int, folder: Path) -> None:
    """Warn of a quota that promises more than there is."""
    if quota > (size := _size(folder)):
        logger.warning(
            "the quota of %s is larger than the filesystem of %s, which has %s: trainers are refused when "
            "that is full",
            format_bytes(quota),
            folder,
            format_bytes(size),
        )


def check_filesystem(folder: Path, allow_disk: bool) -> None:
    """Refuse a segment folder on a disk, unless the operator allows it.

    Raises:
        UnusableFolder: the folder is on a disk.
    """
    kind = filesystem_kind(folder)
    if is_in_memory(kind) or allow_disk:
        return
    raise UnusableFolder(
        f"the segment folder {folder} is on a filesystem of {kind}, not in memory; choose a "
        "folder under /dev/shm (CKPTD_SEGMENT_DIR), or set CKPTD_ALLOW_DISK_SEGMENTS=true"
    )
