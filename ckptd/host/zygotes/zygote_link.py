"""The host's side of its zygote: starting it, requests, answers, and a server of stores that it forks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptd.host.process_control import HostProcess, send, spawn
from ckptd.host.zygotes.script_main import Script
from ckptd.host.zygotes.zygote_handover import ask_for_zygote

_PACKET_MAX = 64 << 10


def start_zygote(
    script: Script,
    record: Path | None,
    *,
    environment: Mapping[str, str],
    own_session: bool,
    keep: Sequence[int] = (),
    script_imports: bool = False,
) -> ZygoteLink:
    """Start one; it says when it is ready.

    Args:
        record: names of modules that it imports; None: what every trainer needs.
        script_imports: where there is no record, it imports what the script's text says.
        keep: descriptors that trainers inherit, and programs that they start do not.
    Raises:
        OSError: no process could be made.
    """
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    settings = {
        "control": theirs.fileno(),
        "host": os.getpid(),
        "own_session": own_session,
        "record": str(record or ""),
        "flags": script.flags,
        "keep": list(keep),
        "script_imports": script_imports,
    }
    command = [sys.executable, *script.flags, "-m", "ckptd.host.zygotes.zygote", json.dumps(settings)]
    with theirs:
        process = spawn(
            [*command, *script.words],
            environment,
            own_session=own_session,
            keep=[theirs.fileno(), *keep],
        )
    return ZygoteLink(control, process)


def take_over_zygote(folder: Path, name: str, *, keep: Sequence[int] = ()) -> ZygoteLink | str:
    """The one that waits for this host under this name, or why there is none.

    Args:
        keep: as above.
    """
    found = ask_for_zygote(folder, name, os.environ, list(keep))
    if found is None:
        return ""
    control, answer = found
    if "taken_over" not in answer:
        control.close()
        return f"{answer.get('refused', 'something')} differs from when that was started"
    zygote = ZygoteLink(control, HostProcess(int(answer["taken_over"]), leads=True), is_child=False)
    zygote.ready, zygote.modules = True, int(answer["modules"])
    return zygote


class ZygoteLink:
    """A zygote.

    Attributes:
        process: for whoever waits for children.
        is_child: of this host. If not, it was taken over; trainers are its children then, and die with it.
        modules: that it has imported; 0 until it is ready.
        ready: it waits for requests, and trainers may be forked from it.
        forking: it was asked for a trainer, and has not answered yet.
        reaped: how it ended, once it was waited for; its number may be another process's then.
    """

    def __init__(self, control: socket.socket, process: HostProcess, *, is_child: bool = True) -> None:
        self._control, self.process, self.is_child = control, process, is_child
        self._control.setblocking(False)
        self.ready = self.forking = False
        self.modules = 0
        self.reaped = ""

    def fileno(self) -> int:
        """For selectors."""
        return self._control.fileno()

    def receive(self) -> dict[str, Any] | None:
        """An answer; None if the zygote has gone."""
        try:
            packet = self._control.recv(_PACKET_MAX)
        except BlockingIOError:
            return {}
        except OSError:
            packet = b""
        if not packet:
            self.ready = False
            return None
        answer: dict[str, Any] = json.loads(packet)
        if "ready" in answer:
            self.ready, self.modules = True, int(answer["modules"])
        if {"forked", "failed", "stale"} & answer.keys():
            self.forking = False
        return answer

    def fork(self, environment: Mapping[str, str], imports: int) -> None:
        """Ask for a trainer. Answers: ``forked``, ``stale`` or ``failed``.

        Args:
            environment: what differs from this process's.
            imports: a file in which the trainer writes down what it imports.
        """
        self.forking = True
        self._ask({"do": "fork", "environment": dict(environment)}, imports)

    def import_more(self, imports: int) -> None:
        """Import what is written in the file, too. Answers: ``ready`` or ``unfit``."""
        self.ready = False
        self._ask({"do": "import"}, imports)

    def ask_for_signals(self) -> None:
        """Which signals have reached it? Answer: ``signals``."""
        self._ask({"do": "signals"})

    def forget_group(self) -> None:
        """The trainer and its process group have ended."""
        self._ask({"do": "ended"})

    def fork_store(self) -> StoreServer:
        """Ask for a server of stores."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._ask({"do": "store"}, theirs.fileno())
        return StoreServer(ours)

    def fork_errand(self, channel: int) -> None:
        """Ask for a child that serves a `StoreErrand` at the other end of this socket."""
        self._ask({"do": "errand"}, channel)

    def leave_behind(
        self, folder: Path, name: str, agent: int | None, *, within_s: float | None = None
    ) -> None:
        """It waits for the next host that torchrun starts in this place, and ends with torchrun.

        Args:
            agent: a pidfd of torchrun; None if there is none yet.
            within_s: without torchrun: how long.
        """
        fds = [] if agent is None else [agent]
        self._ask({"do": "wait", "folder": str(folder), "name": name, "within_s": within_s}, *fds)
        self.ready = False
        self._control.close()

    def end(self) -> None:
        """End it. Its trainer goes on if it is a child of this host."""
        self.ready = self.forking = False
        if self.is_child and not self.reaped:
            send(self.process, signal.SIGKILL)
        self._control.close()

    def _ask(self, request: Mapping[str, object], *fds: int) -> None:
        # That it has died is seen when its answer is read.
        with contextlib.suppress(OSError):
            socket.send_fds(self._control, [json.dumps(request).encode()], list(fds))


class StoreServer:
    """A process that makes stores for the trainers; it ends with this object, or with the host."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection, self._received = connection, b""

    def fileno(self) -> int:
        """For selectors."""
        return self._connection.fileno()

    def ask(self) -> None:
        """Make one more store."""
        with contextlib.suppress(OSError):  # as above
            self._connection.send(b"n")

    def receive(self) -> list[int] | None:
        """The ports of stores that were made; None if the server has gone."""
        try:
            data = self._connection.recv(_PACKET_MAX)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        return [int(line) for line in lines]

    def close(self) -> None:
        """Stores that are in use end, too."""
        self._connection.close()
