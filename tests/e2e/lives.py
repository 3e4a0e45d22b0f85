"""Lives of one training program: the library is imported once, then each life is forked, so that it
may be SIGKILLed.

``main(["MODULE", "OTHER", ...])``, forked with torch, imports the modules, and plays one request
after the other: a line of standard input has rows of lives, as JSON; those of a row run side by
side. A life is the list of arguments for ``MODULE.main``; a line of standard output has the exit
codes, as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import select
import signal
import sys
import tempfile
import traceback
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.e2e.harness import DaemonProcess
from tests.forked import PipedChild

__all__ = ["Life", "Parent", "Run", "join", "live", "resumed_at"]


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

    def __init__(self, folder: Path, daemon: DaemonProcess, *options: str, name: str | None = None) -> None:
        self._folder, self._name = folder, uuid.uuid4().hex[:8]
        self._options = (*options, "--daemon", daemon.endpoint, "--run", name or self._name)
        self.lives: list[Life] = []

    def life(self, *options: str) -> Life:
        out = self._folder / f"{self._name}-{len(self.lives)}.pt"
        self.lives.append(Life(out, *self._options, *options))
        return self.lives[-1]


class Parent:
    """The process of which lives are forked. What it imports, no life imports again: that takes
    longer than most lives.

    Args:
        module: has ``main(arguments)``.
        others: are imported beforehand, too.
        ends_with_one: the lives of a row end when one of them was SIGKILLed, as torchrun ends them. Otherwise each finds out by itself.
    """

    def __init__(self, module: str, *others: str, ends_with_one: bool = False) -> None:
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        words = (*["--ends-with-one"] * ends_with_one, module, *others)
        self._process = PipedChild(main, words, env=os.environ, stderr=self._complaints)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def live(self, rows: Sequence[Sequence[Life]], *, timeout_s: float = 240) -> list[list[int]]:
        """Run them, row after row; the exit codes (negative: the signal that ended it).

        Raises:
            AssertionError: they took longer than ``timeout_s``, or the parent failed. It is closed then, and the lives have ended.
        """
        told = [[["--out", str(life.out), *life.arguments] for life in row] for row in rows]
        try:
            self._process.stdin.write(json.dumps(told).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise AssertionError(f"the parent of lives failed:\n{self.close()}") from None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            self.close()
            logs = "\n".join(life.log for row in rows for life in row)
            raise AssertionError(f"hung for {timeout_s:.0f} s; their logs:\n{logs}")
        said = self._process.stdout.readline()
        if not said:
            raise AssertionError(f"the parent of lives failed:\n{self.close()}")
        codes: list[list[int]] = json.loads(said)
        return codes

    @property
    def alive(self) -> bool:
        return not self._complaints.closed and self._process.poll() is None

    def close(self) -> str:
        """End it, and whatever it forked; what it complained about."""
        if self._complaints.closed:
            return ""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the lives, too
        self._process.kill()  # one that had no time to begin a session
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._complaints.seek(0)
        with self._complaints:
            return self._complaints.read().decode(errors="replace")


def live(module: str, rows: Sequence[Sequence[Life]], *, timeout_s: float = 240) -> list[list[int]]:
    """Run them in a parent of their own (see ``Parent.live``)."""
    with Parent(module) as parent:
        return parent.live(rows, timeout_s=timeout_s)


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
        _keep_process_groups()
        importlib.import_module(module).main(arguments)
        code = 0
    except BaseException:  # noqa: BLE001 - nothing of a life may go on in its parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


_kept: list[object] = []


def _keep_process_groups() -> None:
    """Let no process group be freed before the life ends.

    If the last owner of one is a DDP model, torch 2.13 hangs now and then where that is freed: the group joins
    its thread, which waits for the interpreter's lock to free a finished work.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None:
        return
    destroy = distributed.destroy_process_group

    def keep_and_destroy(*args: Any, **kwargs: Any) -> None:
        _kept.append(distributed.group.WORLD)
        destroy(*args, **kwargs)

    distributed.destroy_process_group = keep_and_destroy  # type: ignore[attr-defined]


def _ended(pids: Sequence[int], *, with_one: bool) -> list[int]:
    """Wait for the lives of a row; their exit codes.

    Args:
        with_one: when one was SIGKILLed, the others are, too.
    """
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if with_one and codes[pid] == -signal.SIGKILL:
            for other in set(pids) - codes.keys():
                os.kill(other, signal.SIGKILL)
    return [codes[pid] for pid in pids]


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ends-with-one", action="store_true")
    parser.add_argument("modules", nargs="+")
    told = parser.parse_args(words)
    for module in told.modules:  # before any thread exists
        importlib.import_module(module)
    for line in sys.stdin:
        codes = []
        for row in json.loads(line):
            pids = [_fork(told.modules[0], life) for life in row]
            codes.append(_ended(pids, with_one=told.ends_with_one))
        print(json.dumps(codes), flush=True)  # noqa: T201
