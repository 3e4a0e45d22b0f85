"""Processes as Linux has them: started, ended, and inherited from those that died.

A parent's death signal (`die_with_parent`) belongs to the *thread* that is the parent, and the signal is also
sent when an intermediate parent dies. So it is set after a process has got its last parent, that parent has
one thread, and the caller compares the parent's number afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_CANNOT_EXECUTE = 127
# Python ignores these from its start on, and a program must not inherit that.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)

_STANDARD = (0, 1, 2)
_TRACKER = b"from multiprocessing.resource_tracker import main"  # in its command line

_libc = ctypes.CDLL(None, use_errno=True)
_descriptors_given: list[tuple[int, int]] = []  # the limits before `allow_descriptors`
_blocked_given: set[int] = set()  # signals that were blocked before `hear_of_children`


@dataclass(frozen=True, slots=True)
class HostProcess:
    """A child of the host, which alone waits for it: until then its number is no other process's.

    Attributes:
        leads: it leads a session of its own, so its number is that of a process group.
    """

    pid: int
    leads: bool


def _prctl(option: int, value: int | bytes) -> None:
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if _libc.prctl(ctypes.c_int(option), argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def adopt_orphans() -> None:
    """Become the parent of descendants whose parents die, instead of the init process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def die_with_parent(parent: int) -> None:
    """Get SIGKILL when the parent dies; the process ends here if it has another parent already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """The name that `ps` and `top` show beside the command line; 15 characters at most."""
    _prctl(_PR_SET_NAME, os.fsencode(name))


def allow_descriptors(number: int) -> int:
    """Raise this process's soft limit of open files to at least this number, as far as it may be; programs
    that `spawn` starts afterwards have the limit that this process had. Returns the limit that is now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return number if soft == resource.RLIM_INFINITY else soft
    if not _descriptors_given:
        _descriptors_given.append((soft, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def open_standard_files() -> None:
    """Open those that are closed on nothing. Otherwise the next sockets have their numbers, and what a
    script prints goes there.
    """
    for number in _STANDARD:
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number is free: this one
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - as long as the process


def hear_of_children() -> None:
    """Get SIGCHLD although who has started this process has it blocked; programs that `spawn` starts have it
    blocked as they would.
    """
    if signal.SIGCHLD in signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD}):
        _blocked_given.add(signal.SIGCHLD)


def process_traits() -> dict[str, str]:
    """What a program inherits beside its environment and files, in words: two processes with the same are
    started under the same conditions. Limits are those before `allow_descriptors`.
    """
    wanted = {
        "Umask": "the umask",
        "Cpus_allowed": "the set of CPUs",
        "Mems_allowed": "the set of NUMA nodes",
    }
    found = {"the nice value": str(os.getpriority(os.PRIO_PROCESS, 0)), "the folder": os.getcwd()}
    with open("/proc/self/status") as status:
        for line in status:
            name, _, text = line.partition(":")
            if name in wanted:
                found[wanted[name]] = text.strip()
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as groups:  # a kernel without them
        found["the cgroup"] = groups.read()
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            limits = resource.getrlimit(number := getattr(resource, name))
            if number == resource.RLIMIT_NOFILE and _descriptors_given:
                limits = _descriptors_given[0]
            found[f"the limit {name}"] = str(limits)
    return found


def has_terminal() -> bool:
    """Whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY))
    except OSError:
        return False
    return True


def spawn(
    command: Sequence[str], environment: Mapping[str, str], *, own_session: bool, keep: Sequence[int] = ()
) -> HostProcess:
    """Start a program that dies with this process.

    Args:
        keep: descriptors that it inherits beside those that are inheritable anyway.
    Raises:
        OSError: no process could be made. A program that cannot be executed ends with exit code 127.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            if own_session:
                os.setsid()
            die_with_parent(parent)
            for number in _IGNORED_BY_PYTHON:
                signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            signal.pthread_sigmask(signal.SIG_BLOCK, _blocked_given)
            for fd in keep:
                os.set_inheritable(fd, True)
            for limits in _descriptors_given:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            os.execve(command[0], list(command), dict(environment))
        except OSError as error:
            sys.stderr.write(f"ckptd.host: cannot start {command[0]}: {error}\n")
            sys.stderr.flush()
        finally:
            os._exit(_CANNOT_EXECUTE)
    return HostProcess(pid, own_session)


def send(process: HostProcess, number: int, *, group: bool = False) -> None:
    """Send a signal to a process that has not been waited for; with ``group``, to its process group if it
    leads one.
    """
    try:
        if group and process.leads:
            os.killpg(process.pid, number)
            return
    except ProcessLookupError:
        pass  # it has only just begun, and leads no group yet
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


def end_group(leader: int) -> None:
    """SIGKILL what is left of a process group whose leader is dead; but not what removes the shared memory of
    those that were killed: it ends by itself when nobody is left who could need it.
    """
    seen: set[int] = set()
    # Looked for again: what a process has forked before it was killed.
    while new := set(_members_of(leader)) - seen:
        seen |= new
        for pid in new:
            with contextlib.suppress(OSError):
                _kill_member(pid, leader)


def _kill_member(pid: int, group: int) -> None:
    handle = os.pidfd_open(pid)
    try:
        # Asked once more: now its number is no other process's.
        if _members_of(group, pid) and not _cleans_up(pid):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    finally:
        os.close(handle)


def _members_of(group: int, only: int | None = None) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for name in os.listdir("/proc") if only is None else [str(only)]:
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                state, _, its_group = stat.read().rpartition(b")")[2].split()[:3]
                if int(its_group) == group and state not in (b"Z", b"X"):
                    found.append(int(name))
    return found


def _cleans_up(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as command:
            return _TRACKER in command.read()
    except OSError:
        return False


def status_text(status: int) -> str:
    """A wait status in words."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def die_as(status: int) -> int:
    """End this process as another ended: by the same signal; returns the exit code otherwise.

    The init process of a container cannot die of its own signal: it exits as a shell would.
    """
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the trainer has left its own
    sys.stderr.flush()
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    os.kill(os.getpid(), -code)
    return 128 - code
