"""A job under torchrun and hosts, as tests and the campaign of hosts start it, follow it and hurt it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ckptd.demo.lab import SHARED_CORES, read_events
from ckptd.errors import DaemonUnavailable
from ckptd.saved import saved_iterations
from tests.ckptd.host.hosting import FOREIGN, ROOT, gone, until
from tests.e2e.harness import DaemonProcess
from tests.forked_hosts import RANKS_VARIABLE, ForkedProgram

__all__ = ["HostedJob"]


class HostedJob:
    """One torchrun on this machine, and the logs of its ranks."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        folder.mkdir()
        (folder / "runtime").mkdir(mode=0o700)
        self.process: subprocess.Popen[bytes] | ForkedProgram | None = None
        self.run = ""

    def start(
        self,
        *script: str,
        host: bool = True,
        max_restarts: int = 0,
        env: Mapping[str, str] | None = None,
        forked: bool = False,
    ) -> None:
        """
        Args:
            forked: torchrun, hosts and zygotes are forks (`tests.forked_hosts`), and no fresh interpreters.
        """
        kept = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
        environ = {
            **kept,
            **SHARED_CORES,
            "PYTHONPATH": str(ROOT),
            "CKPTD_RUNTIME_DIR": str(self.folder / "runtime"),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **(env or {}),
        }
        worker = ["ckptd.host", *script] if host else script[1:]
        module = ["-m"] if host or script[0] == "-m" else []
        words = [
            *("-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(self.ranks), "--max-restarts", str(max_restarts)),
            *("--log-dir", str(self.folder / "logs"), *module, "--", *worker),
        ]
        output = self.folder / "output"
        if forked:
            environ[RANKS_VARIABLE] = str(self.folder)
            self.process = ForkedProgram(words, cwd=ROOT, env=environ, log=output)
            return
        with output.open("ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
            )

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def events(self, rank: int, kind: str) -> list[dict[str, Any]]:
        return [e for e in read_events(self.folder / f"log-r{rank}.jsonl") if e["event"] == kind]

    def trainer(self, rank: int) -> int:
        """The process that has logged last."""
        pid: int = read_events(self.folder / f"log-r{rank}.jsonl")[-1]["pid"]
        return pid

    def lives(self) -> int:
        """How many trainers of each rank have come to train."""
        return min(len(self.events(rank, "attached")) for rank in range(self.ranks))

    def kill(self, *ranks: int) -> None:
        """SIGKILL their trainers, and wait until each rank has another."""
        before = self.lives()
        for pid in [self.trainer(rank) for rank in ranks]:
            with contextlib.suppress(ProcessLookupError):  # ended already, because of the first
                os.kill(pid, signal.SIGKILL)
        self.until(lambda: self.lives() > before, "the next life")

    def hosts(self) -> dict[int, int]:
        """The host of each rank."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        if isinstance(self.process, ForkedProgram):
            told = {int(path.name[4:]): path.read_text() for path in self.folder.glob("rank?")}
            return {rank: int(pid) for rank, pid in told.items() if pid in children}
        found = {}
        for pid in map(int, children):
            environ = dict(
                v.split("=", 1) for v in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in v
            )
            if "RANK" in environ:
                found[int(environ["RANK"])] = pid
        return found

    def until(self, condition: Callable[[], object], what: str) -> None:
        def holds() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, f"torchrun has ended early:\n{self.output}"
            return bool(condition())

        try:
            until(holds, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from None

    def reaches(self, step: int, daemon: DaemonProcess | None = None) -> None:
        """Wait until every rank has done a step; with a daemon, until the job can also go back to it."""
        self.until(
            lambda: all(
                any(e["step"] >= step for e in self.events(rank, "step")) for rank in range(self.ranks)
            ),
            f"step {step}",
        )
        if daemon is not None:
            self.until(lambda: self.can_go_back_to(step, daemon), f"snapshots of iteration {step}")

    def can_go_back_to(self, step: int, daemon: DaemonProcess) -> bool:
        """Whether the snapshots of an iteration from this one on are complete."""
        try:
            found = saved_iterations("demo", self.run, daemon=daemon.endpoint)
        except DaemonUnavailable:  # a slow machine
            return False
        return any(each.iteration >= step for each in found)

    def end(self, timeout_s: float = 200) -> int:
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"torchrun hangs:\n{self.output}") from None

    def final(self, rank: int) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = torch.load(self.folder / f"final-r{rank}.pt")
        return state

    def close(self) -> None:
        """Kill what is left, hosts first: they take the rest along."""
        if self.process is not None and self.process.poll() is None:
            hosts = self.hosts().values()
            self.process.kill()
            self.process.wait()
            for pid in hosts:
                if not gone(pid):
                    os.kill(pid, signal.SIGKILL)
