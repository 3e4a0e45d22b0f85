"""torchrun in a host without the imports: its agent, its store and its ranks are forked (`tests.forked_hosts`).

Only in a network namespace, by which the processes of a host are found: the environment that the kernel shows of a
fork is that of the server.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.leftovers import NETNS_FOLDER, REPOSITORY
from tests.forked import FORKED
from tests.forked_hosts import become, end_as_program, fork_ranks

__all__ = ["ForkedModule"]

_CLONE_NEWNET = 0x40000000
_TORCHRUN = "torch.distributed.run"


class ForkedModule:
    """``python -m module arguments`` in a namespace, in a session of its own; as much of `subprocess.Popen` as a host
    takes. Output is appended to ``log``.
    """

    def __init__(self, namespace: str, words: Sequence[str], env: Mapping[str, str], *, log: Path) -> None:
        log.touch()  # there, whenever the fork comes to write
        arguments = (namespace, list(words), dict(env), str(log))
        self._process = FORKED.Process(target=_act, args=arguments, daemon=False)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code.

        Raises:
            subprocess.TimeoutExpired: it runs for longer than ``timeout`` seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.is_alive():
            os.kill(self.pid, number)


def _act(namespace: str, words: list[str], env: dict[str, str], log: str) -> None:
    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    with (NETNS_FOLDER / namespace).open("rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"setns of {namespace}: {os.strerror(number)}")
    os.chdir(REPOSITORY)
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(sink, descriptor)
    os.close(sink)
    if words[0] == _TORCHRUN:
        fork_ranks()
    end_as_program(lambda: become(["-m", *words], env))
