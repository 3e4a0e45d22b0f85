"""Lives of one training program: the library is imported once, then each life is forked, so that it may be SIGKILLed.

``python -m tests.e2e.lives MODULE`` reads rows of lives from standard input, as JSON; those of a row run side by side. A life is the
list of arguments for ``MODULE.main``; standard output has the exit codes, as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import traceback
import uuid
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.harness import DaemonProcess

__all__ = ["Life", "Run", "free_port", "join", "live", "resumed_at"]


class Life:
    """What to start: ``out`` is where it writes its final state; its log lies beside."""

    def __init__(self, out: Path, *arguments: str) -> None:
        self.out, self.arguments = out, arguments

    @property
    def log(self) -> str:
        path = self.out.with_suffix(".log")
        return path.read_text() if path.exists() else "(none)"


def resumed_at(log: str) -> int:
    """The iteration at which a life was complete again; -1: it began at the beginning."""
    found = re.search(r"resuming at iteration (\d+), replay begins at (\d+)", log)
    if found is None:
        return -1
    assert int(found[2]) < int(found[1]), "there was something to replay"
    return int(found[1])


class Run:
    """Lives of one run, one after the other."""

    def __init__(
        self, folder: Path, daemon: DaemonProcess, *options: str, name: str | None = None
    ) -> None:
        self._folder, self._name = folder, uuid.uuid4().hex[:8]
        self._options = (*options, "--daemon", daemon.endpoint, "--run", name or self._name)
        self.lives: list[Life] = []

    def life(self, *options: str) -> Life:
        out = self._folder / f"{self._name}-{len(self.lives)}.pt"
        self.lives.append(Life(out, *self._options, *options))
        return self.lives[-1]


def live(module: str, rows: Sequence[Sequence[Life]], *, timeout_s: float = 240) -> list[list[int]]:
    """Run them, row after row; the exit codes (negative: the signal that ended it)."""
    told = [[["--out", str(life.out), *life.arguments] for life in row] for row in rows]
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.lives", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, complaints = parent.communicate(json.dumps(told), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(parent.pid, signal.SIGKILL)  # the lives, too
        parent.communicate()
        logs = "\n".join(life.log for row in rows for life in row)
        raise AssertionError(f"hung for {timeout_s:.0f} s; their logs:\n{logs}") from None
    assert parent.returncode == 0, complaints
    codes: list[list[int]] = json.loads(said)
    return codes


def join(rank: int, port: int) -> None:
    """Be one of two ranks, as if started by torchrun; called before anything looks."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def free_port() -> int:
    """One for ranks to meet at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _fork(module: str, arguments: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = arguments[1].removesuffix(".pt") + ".log"
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        importlib.import_module(module).main(arguments)
        code = 0
    except BaseException:  # noqa: BLE001 - nothing of a life may go on in its parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    rows = json.load(sys.stdin)
    importlib.import_module(sys.argv[1])  # before any thread exists
    codes = []
    for row in rows:
        pids = [_fork(sys.argv[1], life) for life in row]
        codes.append([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
    json.dump(codes, sys.stdout)


if __name__ == "__main__":
    main()
