"""A training of two ranks, of which one is killed."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Container
from pathlib import Path

from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess
from tests.e2e.lives import Life, Parent, Run, resumed_at
from tests.ports import free_ports

__all__ = ["TwoRanks", "both"]


def both(port: int, *options: str) -> list[tuple[str, ...]]:
    """Arguments of two ranks that meet at this port."""
    return [("--rank", str(rank), "--port", str(port), *options) for rank in (0, 1)]


class TwoRanks:
    """Three lives of each rank: undisturbed, ended by a kill of rank 1, and resumed.

    Args:
        again: further options of the last one.
    """

    def __init__(
        self, folder: Path, daemon: DaemonProcess, kill_at: int, *options: str, again: tuple[str, ...] = ()
    ) -> None:
        plain, first, second = (both(port, *options) for port in free_ports(3))
        self.plain = [Life(folder / f"plain{rank}.pt", *end) for rank, end in enumerate(plain)]
        name = uuid.uuid4().hex[:8]
        runs = [Run(folder, daemon, name=name) for _ in (0, 1)]
        self.killed = [runs[0].life(*first[0]), runs[1].life(*first[1], "--kill-at", str(kill_at))]
        self.resumed = [run.life(*end, *again) for run, end in zip(runs, second, strict=True)]

    @property
    def told(self) -> str:
        return "\n".join(life.log for life in (*self.plain, *self.killed, *self.resumed))

    def live(self, parent: Parent) -> None:
        """One life after the other, as they are to end."""
        codes = parent.live([self.plain, self.killed, self.resumed])
        assert codes[0] == [0, 0], self.told
        assert codes[1][1] == -signal.SIGKILL, self.told
        assert codes[2] == [0, 0], self.told

    def check(self, steps: Container[int]) -> None:
        """Both came back at one of these steps, and ended with the bits of the undisturbed ones."""
        for reference, life in zip(self.plain, self.resumed, strict=True):
            assert resumed_at(life.log) in steps, self.told
            assert differences(reference.out, life.out) == [], self.told
