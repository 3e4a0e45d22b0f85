"""The process behind an endpoint: its id, its systemd unit, and the place of its log.

The kernel names the process (``SO_PEERCRED`` of the socket), because the id in the daemon's answer is that of
its own PID namespace.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ckptd.config.runtime_dir import log_place
from ckptd.ctl.command import EXIT_NO_DAEMON, EXIT_REFUSED, CommandError
from ckptd.transport.access.local_trust import peer_credentials

_CONNECT_S = 1.0
_LOOK_S = 0.5
_TAIL_BYTES = 4 << 20  # more than any tail that people ask for
# The shipped units, and those of a user's own manager.
_UNIT = re.compile(r"/(ckptd(?:@[^/]*)?\.service)(?:/|$)")


@dataclass(frozen=True, slots=True)
class SystemdUnit:
    """A systemd unit."""

    name: str
    of_user: bool  # of the user's own manager

    @property
    def stop_command(self) -> str:
        """The command that stops it."""
        return f"systemctl {'--user ' if self.of_user else ''}stop {self.name}"

    @property
    def journal_option(self) -> str:
        """The option of `journalctl` that selects it."""
        return f"--{'user-' if self.of_user else ''}unit={self.name}"


def listener_pid(endpoint: str) -> int | None:
    """The process that listens on an ipc endpoint, whose owner the caller has checked; 0 if it is in another
    PID namespace, None if none listens.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(endpoint.removeprefix("ipc://"))
        except OSError:
            return None
        return peer_credentials(probe)[0]


def unit_of(pid: int, proc: Path = Path("/proc")) -> SystemdUnit | None:
    """The ckptd unit that a process belongs to; None: it was started in another way."""
    try:
        groups = (proc / str(pid) / "cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in groups.splitlines():
        if found := _UNIT.search(line):
            return SystemdUnit(found[1], of_user="/user@" in line)
    return None


@dataclass(frozen=True, slots=True)
class DaemonLog:
    """A log: a file, or the journal of a unit."""

    path: Path | None
    unit: SystemdUnit | None = None

    def __str__(self) -> str:
        return str(self.path) if self.unit is None else f"journal of {self.unit.name}"

    def lines(self, count: int, *, follow: bool) -> Generator[str, None, None]:
        """The last ``count`` lines; with ``follow`` then the new ones, without an end.

        Raises:
            CommandError: it cannot be read.
        """
        try:
            if self.unit is not None:
                yield from _journal_lines(self.unit, count, follow=follow)
            else:
                assert self.path is not None
                yield from _file_lines(self.path, count, follow=follow)
        except OSError as error:
            raise CommandError(f"{self} cannot be read: {error}", EXIT_REFUSED) from error


def find_log(pid: int, runtime_dir: str) -> DaemonLog:
    """Where a daemon logs, or logged: the journal of its unit, the file that is its stderr, or the file of a
    daemon that a trainer started.

    Args:
        pid: its process; 0 if there is none, or if it is not known.

    Raises:
        CommandError: it logs elsewhere, such as to a terminal, or no log is there.
    """
    if pid and (unit := unit_of(pid)):
        return DaemonLog(None, unit)
    usual = Path(runtime_dir) / "ckptd.log"
    of_operator = None if pid else log_place(Path(runtime_dir))
    # An operator's daemon does not write to the usual file: what is there is of an earlier daemon.
    place = _stderr_of(pid) if pid else of_operator
    for path in (place, "" if of_operator else usual):
        if path and Path(path).is_file():
            return DaemonLog(Path(path))
    if place:
        who = f"the daemon (process {pid}) logs" if pid else "no daemon answers, and the last one logged"
        text = f"{who} to {place}, which is not a file; a unit of systemd logs to `journalctl -u ckptd`"
        raise CommandError(text, EXIT_REFUSED if pid else EXIT_NO_DAEMON)
    raise CommandError(f"no daemon is known that has a log: there is no {usual}", EXIT_NO_DAEMON)


def _stderr_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/2")
    except OSError:  # of another user, or it has ended
        return ""


def _journal_lines(unit: SystemdUnit, count: int, *, follow: bool) -> Iterator[str]:
    program = shutil.which("journalctl")
    if program is None:
        text = f"the daemon logs to the journal of {unit.name}, and journalctl is not installed here"
        raise CommandError(text, EXIT_REFUSED)
    command = [program, unit.journal_option, f"--lines={count}", "--no-pager", *(["--follow"] * follow)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as journal:
        assert journal.stdout is not None
        try:
            for line in journal.stdout:
                yield line.rstrip("\n")
        finally:
            journal.terminate()
    if journal.returncode > 0:  # its own message is on stderr
        raise CommandError(f"journalctl ended with exit code {journal.returncode}", EXIT_REFUSED)


def _file_lines(path: Path, count: int, *, follow: bool) -> Iterator[str]:
    """Lines of a file; if another file takes its name, then those of the other one."""
    file = path.open("rb")
    try:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
        yield from lines[max(0, len(lines) - count) :]
        while follow:
            for line in file:
                yield line.decode(errors="replace").rstrip("\n")
            time.sleep(_LOOK_S)
            if _was_replaced(path, file):
                file.close()
                file = path.open("rb")
    finally:
        file.close()


def _was_replaced(path: Path, file: BinaryIO) -> bool:
    """Whether another file has the name, or this one was emptied."""
    ours = os.fstat(file.fileno())
    try:
        there = path.stat()
    except FileNotFoundError:
        return False  # it is being replaced
    return stat.S_ISREG(there.st_mode) and (
        (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino) or there.st_size < file.tell()
    )
