"""Hosts of a job that goes on without those that are lost: started, killed and started again, on this machine.

The demos of re-routed pipelines and of the server are built on it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from ckptd.demo.lab import MAX_RESTARTS, REPOSITORY, SHARED_CORES

__all__ = ["ReroutedHosts", "RunEnded", "end_on_sigterm"]

TIMEOUT_S = 900.0
POLL_S = 0.01
TAIL_BYTES = 4000
STOP_S = 60.0


class RunEnded(RuntimeError):
    """The job ended, or made no progress, when it should have gone on."""


class ReroutedHosts:
    """A host for each rank.

    Args:
        name: of the job, in errors.
        folder: for its files.
        words: the command line of each process, from its module on.
    """

    def __init__(self, name: str, folder: Path, count: int, words: Sequence[str]) -> None:
        self.name, self.folder, self._words = name, folder, tuple(words)
        self.ranks = range(count)
        self.hosts: dict[int, subprocess.Popen[bytes]] = {}
        self._port = 0

    def start_all(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        for rank in self.ranks:
            self.start(rank)

    def start(self, rank: int) -> None:
        count = f"{len(self.ranks)}"
        place = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{self._port}", "GLOO_SOCKET_IFNAME": "lo"}
        place |= {"CKPTD_RUNTIME_DIR": str(self.folder), "OMP_NUM_THREADS": "1"}
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "ckptd.host", "--reroute", "--max-restarts", MAX_RESTARTS, "-m"]
        with self._log(rank).open("ab") as sink:
            self.hosts[rank] = subprocess.Popen(
                [*command, *self._words],
                cwd=REPOSITORY,
                env={**os.environ, **SHARED_CORES, **place, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self, rank: int) -> float:
        """SIGKILL the host; its process dies with it, as on a machine that is gone. Returns when (unix time)."""
        at = time.time()
        self.hosts[rank].send_signal(signal.SIGKILL)
        self.hosts.pop(rank).wait()
        return at

    def until(self, reached: Callable[[], bool], what: str) -> None:
        """Wait for it.

        Raises:
            RunEnded: a host failed before, all have ended without it, or it took too long.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while not reached():
            failed = [rank for rank, host in self.hosts.items() if host.poll()]
            over = all(host.poll() == 0 for host in self.hosts.values()) and self.hosts and not reached()
            if failed or over or time.monotonic() > deadline:
                log = self._log(failed[0] if failed else 0)
                tail = log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip()
                raise RunEnded(f"{self.name}: {what} was not reached; {log.name}: {tail}")
            time.sleep(POLL_S)

    def wait(self) -> None:
        """Until all have ended by themselves.

        Raises:
            RunEnded: as `until`.
        """
        self.until(lambda: all(host.poll() == 0 for host in self.hosts.values()), "its end")

    def stop(self) -> None:
        """End what still runs: a host ends its process on SIGTERM."""
        for host in self.hosts.values():
            host.terminate()
        for host in self.hosts.values():
            try:
                host.wait(STOP_S)
            except subprocess.TimeoutExpired:
                host.kill()
                host.wait()
        self.hosts.clear()

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Start all, and end what is left."""
        try:
            self.start_all()
            yield self
        finally:
            self.stop()

    def _log(self, rank: int) -> Path:
        return self.folder / f"host-r{rank}.log"


def end_on_sigterm() -> None:
    """Let SIGTERM end this program as an exception does, so that its hosts end, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
