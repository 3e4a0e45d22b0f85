"""`ckptd` and `ckptctl` as processes of their own, forked from one that has imported them.

A fresh interpreter spends a second of a core on importing what a daemon needs, and tests start hundreds of them. A
forked one goes through the same ``__main__``, arguments, environment and exit; ``tests/ckptd/test_cli.py``, the
cluster's tests, those of units and of the wheel start fresh ones. `tests.forked` does it for processes with torch.

``python -m tests.programs DESCRIPTOR`` serves requests of the socket until that is closed. A request is JSON with four descriptors: standard input, output and error, and a pipe that is told the
process id and, later, the exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import re
import resource
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, Any

from ckptd.core.state_machine import validate_always

__all__ = ["Program", "run", "start"]

ROOT = Path(__file__).resolve().parents[1]
_REQUEST_BYTES = 1 << 18
_INT = struct.Struct("i")
_starts = threading.Lock()


class Program:
    """A running module; what `subprocess.Popen` offers of that, and like it."""

    def __init__(self, module: str, told: int) -> None:
        self.args = module
        self.returncode: int | None = None
        self._told = told
        self.pid = self._read()

    def __del__(self) -> None:
        os.close(self._told)

    def _read(self) -> int:
        data = os.read(self._told, _INT.size)
        assert len(data) == _INT.size, "the zygote of the tests has died"
        number: int = _INT.unpack(data)[0]
        return number

    def poll(self) -> int | None:
        """The exit code (negative: the signal that ended it); None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it runs for longer than ``timeout`` seconds.
        """
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = self._read()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    module: str,
    *arguments: str,
    env: Mapping[str, str],
    stdout: IO[bytes],
    stderr: IO[bytes],
    files: int | None = None,
) -> Program:
    """``python -m module arguments``, in the repository's root, with at most so many open files."""
    umask = int(re.findall(r"^Umask:\s*(\d+)$", Path("/proc/self/status").read_text(), re.MULTILINE)[0], 8)
    told = {"words": [module, *arguments], "env": dict(env), "files": files, "umask": umask}
    request = json.dumps(told).encode()
    assert len(request) <= _REQUEST_BYTES
    ours, its = os.pipe()
    with open(os.devnull, "rb") as nothing:
        given = [nothing.fileno(), stdout.fileno(), stderr.fileno(), its]
        try:
            with _starts:  # threads start nodes side by side
                zygote = _zygote()
            socket.send_fds(zygote, [request], given)
        finally:
            os.close(its)
    return Program(module, ours)


def run(
    module: str, *arguments: str, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """As `start`, to the end.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``timeout`` seconds, and was killed.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        program = start(module, *arguments, env=env, stdout=out, stderr=err)
        try:
            code = program.wait(timeout)
        except subprocess.TimeoutExpired:
            program.kill()
            raise
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
    return subprocess.CompletedProcess([module, *arguments], code, *said)


@functools.cache
def _zygote() -> socket.socket:
    """Our end of its socket; it ends with this process."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _REQUEST_BYTES)
    with its:
        command = [sys.executable, "-m", "tests.programs", str(its.fileno())]
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=[its.fileno()])
    atexit.register(process.wait)
    atexit.register(ours.close)  # before that
    return ours


def _serve(control: socket.socket) -> list[str] | None:
    """Fork what is asked for: returns the words of a program in its process, and None in this one, at the end."""
    told: dict[int, int] = {}
    ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the tests
    while True:
        ready, _, _ = select.select([control.fileno(), ended], [], [])
        if ended in ready:
            os.read(ended, 1 << 12)
            _tell(told)
        if control.fileno() not in ready:
            continue
        request, descriptors, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 4)
        if not request:
            return None
        pid = os.fork()
        if pid == 0:
            return _become(json.loads(request), descriptors)
        told[pid] = descriptors.pop()
        os.write(told[pid], _INT.pack(pid))
        for descriptor in descriptors:
            os.close(descriptor)


def _tell(told: dict[int, int]) -> None:
    """Who waits for those that have ended, of their exit codes."""
    while told:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with contextlib.suppress(BrokenPipeError):  # nobody waits any more
            os.write(told[pid], _INT.pack(os.waitstatus_to_exitcode(status)))
        os.close(told.pop(pid))


def _become(request: dict[str, Any], descriptors: Sequence[int]) -> list[str]:
    """Make this fork what a new interpreter would be: the program's words."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    words: list[str] = request["words"]
    os.environ.clear()
    os.environ.update(request["env"])
    validate_always("CKPTD_VALIDATE" in os.environ)  # read when a module is imported
    os.umask(request["umask"])
    if files := request["files"]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    sys.argv = ["-m", *words[1:]]
    sys.orig_argv = [sys.orig_argv[0], "-m", *words]
    return words


def main() -> None:
    importlib.import_module("ckptd.cli")
    resolve_name("ckptd.ctl.main:command_parser")()  # imports all commands
    gc.freeze()
    control = socket.socket(fileno=int(sys.argv[1]))
    words = _serve(control)
    if words is not None:
        control.detach()  # closed already
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
