"""Runs training jobs as real processes that can be SIGKILLed, quickly: forked from a server that
has torch imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ckptd.launch import answers
from ckptd.transport.messages import Events, GetEvents, Request
from ckptd.transport.wire import ControlClient
from tests import programs
from tests.forked import FORKED

__all__ = ["DaemonProcess", "Jobs", "own_daemon"]

ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)


def _run(arguments: list[str], log: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    from tests.e2e.job import main

    main(arguments)


class Jobs:
    """Starts jobs that talk to one daemon; keeps their logs and outputs under ``folder``."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.folder, self.endpoint = folder, endpoint
        self._count = 0

    def start(
        self,
        case: str,
        *options: str,
        daemon: str | None = None,
        name: str | None = None,
        environment: dict[str, str] | None = None,
    ) -> tuple[BaseProcess, Path]:
        """The process, and where its final state goes."""
        self._count += 1
        out = self.folder / f"{name or case}-{self._count}.pt"
        arguments = [case, "--out", str(out), "--daemon", daemon or self.endpoint, *options]
        process = FORKED.Process(
            target=_run,
            args=(arguments, str(out.with_suffix(".log")), environment or {}),
            daemon=False,
        )
        process.start()
        return process, out

    def run(
        self,
        case: str,
        *options: str,
        daemon: str | None = None,
        expect_killed: bool = False,
        timeout_s: float = 120,
    ) -> Path:
        """Run to the end (or to its own SIGKILL); fails the test with its log otherwise."""
        process, out = self.start(case, *options, daemon=daemon)
        process.join(timeout_s)
        if process.is_alive():
            process.kill()
            process.join()
            raise AssertionError(f"{case} {options} hung; its log:\n{self.log(out)}")
        wanted = -signal.SIGKILL if expect_killed else 0
        if process.exitcode != wanted:
            raise AssertionError(
                f"{case} {options} ended with {process.exitcode}, expected {wanted}; its log:\n{self.log(out)}"
            )
        return out

    def end(self, process: BaseProcess, out: Path, *, timeout_s: float = 120) -> Path:
        """Wait for the orderly end of a started job; fails the test with its log otherwise."""
        process.join(timeout_s)
        if process.exitcode != 0:
            how = "hung" if process.is_alive() else f"ended with {process.exitcode}"
            process.kill()
            process.join()
            raise AssertionError(f"{out.stem} {how}; its log:\n{self.log(out)}")
        return out

    def log(self, out: Path) -> str:
        path = out.with_suffix(".log")
        return path.read_text() if path.exists() else "(none)"

    def report(self, out: Path) -> dict[str, Any]:
        """What the job told about itself at its end."""
        report: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())
        return report


class DaemonProcess:
    """A real ``ckptd run`` with folders of its own, forked (`tests.programs`)."""

    def __init__(self, runtime_dir: Path, segment_dir: Path, *flags: str) -> None:
        self.runtime_dir, self.segment_dir, self.flags = runtime_dir, segment_dir, flags
        self.endpoint = f"ipc://{runtime_dir}/ckptd.sock"
        self.process: programs.Program | None = None

    def start(self) -> None:
        words = [
            *("--runtime-dir", str(self.runtime_dir)),
            *("--segment-dir", str(self.segment_dir)),
            *("--listen", self.endpoint),
            *("--nice", "0"),  # a busy machine's other tests would starve it
            *self.flags,
        ]
        with (self.runtime_dir.parent / "ckptd.log").open("ab") as log:
            self.process = programs.start("ckptd", "run", *words, env=os.environ, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while not answers(self.endpoint):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                self.process.wait()
                raise AssertionError(
                    "the daemon did not start:\n" + (self.runtime_dir.parent / "ckptd.log").read_text()
                )
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, as the out-of-memory killer would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        """SIGSTOP: alive, holding its locks and its socket, and answering nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def unpause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def ask(self, request: Request, reply: type[ReplyT]) -> ReplyT:
        """What it answers, as ``ckptctl`` would ask."""
        with ControlClient(self.endpoint, timeout_s=20) as client:
            return client.ask(request, reply)

    def events(self, kind: str, run: str = "") -> list[str]:
        """Messages of the events of this kind, of this run if one is named."""
        page = self.ask(GetEvents(limit=10_000), Events)
        return [e.message for e in page.events if e.kind == kind and run in ("", e.run)]

    @contextlib.contextmanager
    def running(self) -> Iterator[DaemonProcess]:
        self.start()
        try:
            yield self
        finally:
            assert self.process is not None
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGCONT)  # a paused one could not end
                self.process.terminate()
                self.process.wait(timeout=20)


@contextlib.contextmanager
def own_daemon(*flags: str, segment_dir: Path | None = None) -> Iterator[DaemonProcess]:
    """A daemon that a test may kill, starve or feed damage, with folders of its own."""
    folder = Path(tempfile.mkdtemp(prefix="ckptd-own-", dir="/dev/shm"))
    for name in ("run", "segments"):
        (folder / name).mkdir(mode=0o700)
    flags = flags or ("--memory", "256MiB")
    try:
        with DaemonProcess(folder / "run", segment_dir or folder / "segments", *flags).running() as d:
            yield d
    finally:
        shutil.rmtree(folder)
