"""Who got a signal that a host has got: the host alone, or every process of the job.

Slurm signals all of them, and a terminal its whole foreground group. Then the trainer has the signal
already, and a second one does harm: a second SIGTERM cuts parking short, a second Ctrl-C what a script saves
after the first. So a process in the place of the trainer blocks these signals, and tells the host which have
reached it: the zygote, or a process of its own where trainers are started plainly.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket

from ckptd.host.process_control import die_with_parent, name_process

# Signals that the host passes on, unless they reached all processes of the job.
WITNESSED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_ANSWER_MAX = 64


def take_pending() -> list[int]:
    """Which of them, blocked here, have reached this process since."""
    seen = signal.sigpending() & set(WITNESSED)
    for number in seen:
        signal.sigtimedwait({number}, 0)
    return sorted(seen)


def pending_in(pid: int) -> set[int]:
    """Which signals wait in another process, where they are blocked; none if it has gone."""
    bits = 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
        for line in status:
            name, _, text = line.partition(":")
            if name in ("SigPnd", "ShdPnd"):
                bits |= int(text, 16)
    return {number for number in map(int, WITNESSED) if bits >> (number - 1) & 1}


class SignalWitness:
    """A process that does nothing else; in a session of its own if trainers lead one.

    Attributes:
        pid: its number.
    Raises:
        OSError: no process could be made.
    """

    def __init__(self, *, own_session: bool) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        host, mask = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, WITNESSED)
        try:
            with theirs:
                self.pid = os.fork()
                if self.pid == 0:
                    _witness(theirs, host, own_session=own_session)
        except OSError:
            self._connection.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def fileno(self) -> int:
        """For selectors."""
        return self._connection.fileno()

    def ask(self) -> None:
        """Which signals have reached it since?"""
        with contextlib.suppress(OSError):  # that it has died is seen when its answer is read
            self._connection.send(b"?")

    def receive(self) -> list[int] | None:
        """The answer; None if it has gone."""
        try:
            answer = self._connection.recv(_ANSWER_MAX)
        except BlockingIOError:
            return []
        except OSError:
            answer = b""
        return list(answer[1:]) if answer else None

    def close(self) -> None:
        """End it."""
        self._connection.close()


def _witness(connection: socket.socket, host: int, *, own_session: bool) -> None:
    """In the new process. Never returns: above are frames of the host."""
    try:
        if own_session:
            os.setsid()
        die_with_parent(host)
        name_process("ckptd-witness")
        signal.set_wakeup_fd(-1)
        for name in os.listdir("/proc/self/fd"):  # others see by their sockets that the host has died
            if int(name) != connection.fileno():
                with contextlib.suppress(OSError):  # that of the listing
                    os.close(int(name))
        while connection.recv(1):
            connection.send(bytes([0, *take_pending()]))
    finally:
        os._exit(0)
