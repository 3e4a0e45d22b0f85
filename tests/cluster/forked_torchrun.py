"""torchrun in a host without the imports: its agent, its store and its ranks are forked (`tests.forked_hosts`).

Only in a network namespace, by which the processes of a host are found: the environment that the kernel shows of a
fork is that of the server.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.leftovers import NETNS_FOLDER, REPOSITORY
from tests.forked_hosts import ForkedProcess, become, end_as_program, fork_ranks

__all__ = ["ForkedModule"]

_CLONE_NEWNET = 0x40000000
_TORCHRUN = "torch.distributed.run"


class ForkedModule(ForkedProcess):
    """``python -m module arguments`` in a namespace, in a session of its own."""

    def __init__(self, namespace: str, words: Sequence[str], env: Mapping[str, str], *, log: Path) -> None:
        super().__init__(_act, namespace, list(words), dict(env), log=log)


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
