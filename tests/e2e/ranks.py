"""All ranks of one life of a distributed job, as processes of this machine."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Mapping
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType

from ckptd.transport.messages import Events, GetEvents
from tests.e2e.harness import DaemonProcess, Jobs

__all__ = ["KILL_AT", "TOTAL", "Ranks", "story"]

TOTAL, KILL_AT = 15, 11


class Ranks:
    """The ranks of one life, started as torchrun would: its environment, gloo over the loopback interface.

    Args:
        run: names the run; lives of one run find each other's snapshots.
        options: of every rank's job.
        case: a case of ``cases.py`` (trained with DDP), or ``family/name`` of the parallelism matrix.
        killed: the rank that kills itself in the middle of step ``kill_at``.
        each: further options of single ranks.
    """

    def __init__(
        self,
        jobs: Jobs,
        run: str,
        *options: str,
        case: str = "drop",
        world_size: int = 2,
        total: int = TOTAL,
        kill_at: int = KILL_AT,
        daemon: str | None = None,
        killed: int | None = None,
        each: Mapping[int, tuple[str, ...]] = MappingProxyType({}),
    ) -> None:
        self._jobs = jobs
        store = jobs.folder / f"store-{uuid.uuid4().hex[:8]}"
        self.started: list[tuple[BaseProcess, Path]] = []
        # Whoever outruns the floor has a snapshot less than the others.
        patient = ("--patient-until", str(kill_at)) if killed is not None else ()
        for rank in range(world_size):
            dies = ("--kill-at", str(kill_at), "--kill-point", "backward") if rank == killed else ()
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "GLOO_SOCKET_IFNAME": "lo",
            }
            self.started.append(
                jobs.start(
                    case,
                    *("--total", str(total), "--run", run, "--store", str(store)),
                    *(*patient, *options, *dies, *each.get(rank, ())),
                    daemon=daemon,
                    name=f"rank{rank}",
                    environment=environment,
                )
            )

    @property
    def logs(self) -> str:
        """What all have written so far."""
        return "\n".join(f"-- log of {out.stem}\n{self._jobs.log(out)}" for _, out in self.started)

    def end(self, *, timeout_s: float = 120) -> list[Path]:
        """Wait for the orderly end of all; the first failure ends the others, which would wait for it."""
        self._until_one_fails(timeout_s)
        codes = [process.exitcode for process, _ in self.started]
        if any(code != 0 for code in codes):
            self.kill()
            raise AssertionError(f"ranks ended with {codes} (None: hung); their logs:\n{self.logs}")
        return [out for _, out in self.started]

    def end_by_the_death_of(self, rank: int) -> None:
        """Wait until that rank has killed itself; the others hang in a collective, or fail, and are
        killed too.
        """
        process, out = self.started[rank]
        process.join(90)
        died = process.exitcode
        self.kill()
        assert died == -signal.SIGKILL, f"{self._jobs.log(out)}\n{self.logs}"

    def end_by_a_failure(self, *, timeout_s: float = 120) -> str:
        """Wait until a rank has failed of itself, then end the others; what they wrote."""
        self._until_one_fails(timeout_s)
        failed = any(process.exitcode == 1 for process, _ in self.started)
        self.kill()
        assert failed, f"no rank failed; their logs:\n{self.logs}"
        return self.logs

    def end_by_themselves(self, *, timeout_s: float = 120) -> None:
        """Wait until all have ended, in whatever way; who hangs is killed."""
        deadline = time.monotonic() + timeout_s
        for process, _ in self.started:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """SIGKILL to all that still live."""
        for process, _ in self.started:
            process.kill()
            process.join()

    def _until_one_fails(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            running = [p.sentinel for p, _ in self.started if p.exitcode is None]
            left = deadline - time.monotonic()
            if not running or left <= 0 or any(p.exitcode for p, _ in self.started):
                return
            wait(running, timeout=left)


def story(daemon: DaemonProcess, run: str, *lives: Ranks) -> str:
    """What all ranks and the daemon have told, for the message of a test that fails."""
    events = [
        f"{e.level} {e.kind} rank {e.rank}: {e.message}"
        for e in daemon.ask(GetEvents(limit=10_000), Events).events
        if e.run == run or run in e.message
    ]
    return "\n".join(["", *(life.logs for life in lives), "-- events of the daemon", *events])
