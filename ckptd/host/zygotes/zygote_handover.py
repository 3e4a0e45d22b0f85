"""A zygote between two starts by the same torchrun, or ahead of the first one (`ckptd.host.warm_start`): it
waits in the hosts' folder until the next host of its place takes it over, so that nothing is imported again.

torchrun ends all hosts of a job when the members change or a host is lost, meets, and starts others on the
same machines. A host that ends so leaves its zygote behind. The next one finds it by a name made of the
script, the place on the machine and torchrun's process. The environment of that host must be what the
zygote's was, but for what the launcher says of places and starts; so must limits, umask and CPUs.

The zygote does not become a child of the next host, because no process can. So trainers are its own children,
and it tells the host how they ended.
"""

from __future__ import annotations

import json
import math
import os
import select
import socket
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptd.host.host_links import LinkError, connect_socket, listen, peer_of
from ckptd.host.host_options import HostOptions
from ckptd.host.process_control import process_traits
from ckptd.host.zygotes.script_main import Script

_PACKET_MAX = 64 << 10
_ENVIRONMENT_MAX = 4 << 20
_ANSWER_S = 2.0
_LOOK_S = 5.0
# Of a launcher, about where a process is and in which start; they may change unless an import has read them.
_OF_LAUNCHERS = (
    *("TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "MASTER_", "CKPTD_HOST_"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",  # torchrun sets it for its workers; it is read when a group is made
)
_PLACES = ("RANK", "WORLD_SIZE")
_STANDARD = (0, 1, 2)


def waiting_name(options: HostOptions) -> str:
    """The socket at which the zygote of this place waits; other scripts and other torchruns have others."""
    return f"{_script_mark(options.script)}-{os.getppid()}-{options.local_rank}.sock"


def warm_name(script: Script, local_rank: int) -> str:
    """The socket at which a zygote waits that was started ahead of any torchrun."""
    return f"{_script_mark(script)}-warm-{local_rank}.sock"


def _script_mark(script: Script) -> str:
    what = json.dumps([script.flags, script.words, os.getcwd()])
    return f"zygote-{zlib.crc32(what.encode()):08x}"


def differing_variable(zygotes: Mapping[str, str], hosts: Mapping[str, str], read: set[str]) -> str:
    """A variable that keeps a zygote from being taken over, or "".

    Args:
        zygotes: the environment in which the zygote was started.
        hosts: that of the next host.
        read: variables that imports have read by their names.
    """
    for name in sorted({*zygotes, *hosts}):
        may_change = (name in _PLACES or name.startswith(_OF_LAUNCHERS)) and name not in read
        if not may_change and zygotes.get(name) != hosts.get(name):
            return name
    return ""


def moved_environment(
    zygotes: Mapping[str, str], now: Mapping[str, str], hosts: Mapping[str, str]
) -> dict[str, str]:
    """The next host's environment, with what imports have changed in the zygote's.

    Args:
        now: the zygote's environment after its imports.
    """
    changed = {name: text for name, text in now.items() if zygotes.get(name) != text}
    removed = zygotes.keys() - now.keys()
    return {**{name: text for name, text in hosts.items() if name not in removed}, **changed}


@dataclass(frozen=True, slots=True)
class Successor:
    """The next host.

    Attributes:
        control: the connection to it.
        pid: its process.
        environment: its environment.
        traits: its limits and the like (`process_traits`).
        kept: descriptors that trainers inherit.
    """

    control: socket.socket
    pid: int
    environment: dict[str, str]
    traits: dict[str, str]
    kept: tuple[int, ...]


def ready_of(*descriptors: int, within_s: float | None = None) -> set[int]:
    """Wait until one or more can be read (a pidfd: until the process has ended), and return these; none if
    the time is over.
    """
    poll = select.poll()
    for fd in descriptors:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if within_s is None else within_s * 1e3)}


def wait_for_successor(
    folder: Path, name: str, agent: int | None, *, within_s: float = math.inf
) -> Successor | None:
    """Wait, in a zygote; None if torchrun has ended, if the time is over, or if nobody can ask: the socket is
    another zygote's now.

    Its standard files are closed meanwhile, and are those of the successor afterwards.

    Args:
        agent: a pidfd of torchrun; None if there is none yet.
    """
    until = time.monotonic() + within_s
    with open(os.devnull, "r+b") as nothing:
        for fd in _STANDARD:
            os.dup2(nothing.fileno(), fd)
    try:
        listener = listen(folder, name, socket.SOCK_SEQPACKET)
        own = _file_of(folder / name)
    except OSError:
        return None
    with listener:
        found = None
        # A host that came too early for this zygote has made another one, which waits in its place now.
        watched = [listener.fileno(), *([] if agent is None else [agent])]
        while found is None and _file_of(folder / name) == own:
            left_s = until - time.monotonic()
            ready = ready_of(*watched, within_s=max(0.0, min(_LOOK_S, left_s)))
            if agent in ready or (left_s <= 0 and not ready):
                break
            if ready:
                found = _accepted(listener)
        if _file_of(folder / name) == own:
            (folder / name).unlink(missing_ok=True)
    return found


def _file_of(path: Path) -> tuple[int, int] | None:
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_dev, info.st_ino


def _accepted(listener: socket.socket) -> Successor | None:
    """The host that asks; None if it is of another user, or went away meanwhile."""
    try:
        connection, _ = listener.accept()
        pid = peer_of(connection)
        connection.settimeout(_ANSWER_S)
        packet, fds, _, _ = socket.recv_fds(connection, _PACKET_MAX, 16)
        connection.settimeout(None)
    except OSError:
        return None
    if not packet or len(fds) <= len(_STANDARD):
        return None
    environment, *others = fds
    told = json.loads(os.pread(environment, _ENVIRONMENT_MAX, 0))
    os.close(environment)
    for standard, fd in zip(_STANDARD, others, strict=False):
        os.dup2(fd, standard)
        os.close(fd)
    return Successor(connection, pid, told["environment"], told["traits"], tuple(others[len(_STANDARD) :]))


def ask_for_zygote(
    folder: Path, name: str, environment: Mapping[str, str], keep: list[int]
) -> tuple[socket.socket, dict[str, Any]] | None:
    """In a host: the connection to the zygote that waits for it, and its answer; None if none does.

    Args:
        keep: descriptors that trainers inherit.
    """
    try:
        control = connect_socket(folder, name, socket.SOCK_SEQPACKET)
    except LinkError:
        return None
    if control is None:
        return None
    with open(os.memfd_create("environment"), "wb", buffering=0) as told:
        told.write(json.dumps({"environment": dict(environment), "traits": process_traits()}).encode())
        try:
            control.settimeout(_ANSWER_S)
            socket.send_fds(control, [b"take over"], [told.fileno(), *_STANDARD, *keep])
            answer: dict[str, Any] = json.loads(control.recv(_PACKET_MAX))
        except (OSError, ValueError):
            control.close()
            return None
    return control, answer
