"""Processes that begin with torch and the client imported: forked from one server, which each
process of tests starts once.

A fresh interpreter spends seconds of a core on importing torch; a fork begins in milliseconds. What
they inherit is the environment that the server had when it was started, hence what a process needs
of it is told to the process.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

__all__ = ["FORKED", "Forked", "PipedChild"]

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.e2e.job", "tests.e2e.elastic_job", "tests.preload"])


class Forked:
    """A function in a process of its own, and what it prints; as much of `subprocess.Popen` as that takes."""

    def __init__(self, function: Callable[..., object], *args: object, env: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ckptd-forked-")
        self._files = [Path(self._folder.name, name) for name in ("out", "err")]
        for path in self._files:
            path.touch()
        self._process = FORKED.Process(
            target=_printing, args=(function, args, dict(env), self._files), daemon=False
        )
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it has printed to standard output and error, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it runs for longer than ``timeout`` seconds, and was killed.
        """
        self._process.join(timeout)
        hangs = self._process.is_alive()
        self._process.kill()
        self._process.join()
        out, err = (path.read_text() for path in self._files)
        self._folder.cleanup()
        if hangs:
            raise subprocess.TimeoutExpired(self._process.name, timeout, out, err)
        return out, err


class PipedChild:
    """A function in a session of its own, with pipes to its standard input and output; as much of
    `subprocess.Popen` as that takes.
    """

    def __init__(
        self, function: Callable[..., object], *args: object, env: Mapping[str, str], stderr: IO[bytes]
    ) -> None:
        its_input, ours = os.pipe()
        theirs, its_output = os.pipe()
        # As connections descriptors are passed on.
        its = [Connection(number) for number in (its_input, its_output, os.dup(stderr.fileno()))]
        self._process = FORKED.Process(target=_piped, args=(function, args, dict(env), its), daemon=False)
        self._process.start()
        for each in its:
            each.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdin, self.stdout = os.fdopen(ours, "wb"), os.fdopen(theirs, "rb")

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _piped(
    function: Callable[..., object],
    args: tuple[object, ...],
    env: dict[str, str],
    its: Sequence[Connection],
) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    for number, each in enumerate(its):
        os.dup2(each.fileno(), number)
        each.close()
    sys.stdin = os.fdopen(0)  # in place of the empty one of `multiprocessing`
    code = function(*args)
    assert code is None or isinstance(code, int)
    sys.exit(code)


def _printing(
    function: Callable[..., object], args: tuple[object, ...], env: dict[str, str], files: list[Path]
) -> None:
    os.environ.clear()
    os.environ.update(env)
    for number, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY), number)
    function(*args)
